"""What is not pushed: incomplete and damaged models, secrets, and what a token may not write."""

import json
import shutil
import subprocess
import textwrap
from pathlib import Path

import pytest
from hub_client import OTHER, READ, WRITE, client, run_as_user
from huggingface_hub import HfApi
from run_records import edit
from safetensors.torch import load_file, save_file
from secret_cases import HARMLESS, SECRETS

from hf_liere.storage.client import HubError
from hf_liere.storage.saved_model import SavedModel
from hf_liere.tools.hub.cards import Card
from hf_liere.tools.hub.publishing import publish, push
from hf_liere.tools.hub.secrets import find_named_secret, readings
from hf_liere.tools.hub.staging import refuse_private


@pytest.mark.parametrize(
    "token, repo_id, message",
    [
        (False, "tester/model", "No token"),
        ("hf_nobodys", "tester/model", "does not accept the token"),
        (READ, "tester/model", "is read-only"),
        (OTHER, "tester/model", "may not write"),
        (WRITE, "tester/a b", "alphanumeric|Repo id"),
    ],
)
def test_pushes_that_may_not_be(ready, hub, token, repo_id, message):
    with pytest.raises(HubError, match=message) as caught:
        publish(ready, repo_id, message="Never", api=client(hub, token))
    assert str(token) not in str(caught.value)
    assert hub.repo("tester/model") is None and not hub.count("/commit/")


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_model_that_changed_since_its_card_was_made_is_refused(saved, hub, tmp_path, name):
    """As if a training run had saved meanwhile."""
    folder = tmp_path / "run"
    shutil.copytree(saved["image"], folder)
    known, card = SavedModel(folder), Card(f"Weights: SHA-256 `{SavedModel(folder).digest}`")
    assert known.digest and known.architecture == "LieREViTForImageClassification"
    if name == "config.json":
        edit(folder / name, id2label={"0": "a", "1": "b", "2": "c"})
    else:
        tensors = load_file(folder / name)
        save_file(tensors | {"classifier.bias": tensors["classifier.bias"] + 1}, folder / name, {"format": "pt"})
        with pytest.raises(ValueError, match="The card is for weights"):
            push(folder, "tester/model", card=card, api=client(hub))
    with pytest.raises(ValueError, match="has changed since it was first read"):
        push(known, "tester/model", card=card, api=client(hub))
    assert not hub.requests


def put_text(folder, name, text):
    if name.endswith(".safetensors"):
        save_file(load_file(folder / name), folder / name, metadata={"format": "pt", "by": text})
    else:
        (folder / name).write_text(json.dumps({"wandb_api_key": text}) if name.endswith(".json") else text)


@pytest.mark.parametrize(
    "kind, name, text, what",
    [
        ("image", "run_config.json", WRITE, "a token"),
        ("image", "README.md", f"hf_{'a' * 34}", "a token"),
        ("image", "merges.txt", f"api_org_{'aB' * 17}", "a token"),
        ("image", "run_config.json", "its own folder", "a folder"),
        ("adapter", "rotary.safetensors", WRITE, "a token"),
        # Made up, in the forms that these services give their keys; in parts, for the scanners of this file.
        ("image", "run_config.json", "7f3a91bc04de58a2f6173bd90ce4a8215f6b3c9d", "a secret .*weights-and-biases"),
        ("adapter", "rotary.safetensors", f"ghp_{'aB3dE6gH9jK2mN5pQ8sT1vW4yZ7bC0eFxYa2'}", "a secret .*github"),
    ],
)
def test_secrets_and_folders_are_not_published(saved, hub, tmp_path, kind, name, text, what):
    folder = tmp_path / "private"
    shutil.copytree(saved[kind], folder)
    text = str(folder) if text == "its own folder" else text
    put_text(folder, name, text)
    with pytest.raises(ValueError, match=f"{name} contains {what}") as caught:
        push(folder, "tester/model", api=client(hub))
    assert text not in str(caught.value) and not hub.requests


WHOLE = "hf_" + "aB3" * 12
NAMED_SECRETS = {
    "escaped": WHOLE.replace("h", "\\u0068", 1),
    "broken": f"{WHOLE[:20]}\n  {WHOLE[20:]}",
    "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMIK7MDENGbPxRfiCYzKEYTOSHOWxx",
    "COMET_API_KEY": "aB3dE6gH9jK2mN5pQ8sT1vW4y",
    "password": "correct horse",
    "clientSecret": "tiger",
    "store": "postgres://bob:tiger@example.org/runs",
    "argv": ["train.py", "--wandb_key", "7f3a91bc04de58a2f6173bd90ce4a8215f6b3c9d"],
    "command": "export MLFLOW_TRACKING_PASSWORD=tiger22; python train.py",
    "environment": [{"name": "SMTP_PASS", "value": "tiger"}],
    "options": json.dumps({"access_token": "tiger"}),
}


@pytest.mark.parametrize("name", NAMED_SECRETS)
def test_secrets_that_only_their_names_betray(tmp_path, name):
    (tmp_path / "run_config.json").write_text(json.dumps({"run": {name: NAMED_SECRETS[name]}}).replace("\\\\u", "\\u"))
    with pytest.raises(ValueError, match="run_config.json contains a (token|secret)") as caught:
        refuse_private(tmp_path, HfApi(token=False))
    assert "tiger" not in str(caught.value) and WHOLE[3:20] not in str(caught.value)


@pytest.mark.parametrize("name", ["modeling_liere.py", "run_config.json"])
def test_secrets_are_found_and_what_looks_like_them_is_not(tmp_path, name):
    """Alone, and among other lines."""
    path = tmp_path / name
    for lines, wanted in ((SECRETS, True), (HARMLESS, False)):
        assert len(lines) > 60
        for number, line in enumerate(lines):
            path.write_text(f"# {number}\n\n{line}\n\nimport torch\n" if number % 2 else line)
            try:
                refuse_private(tmp_path, HfApi(token=False))
                found = False
            except ValueError:
                found = True
            assert found == wanted, line
    path.write_text("\n".join(HARMLESS))
    refuse_private(tmp_path, HfApi(token=False))


def test_ordinary_files_contain_no_secrets(tmp_path):
    """Records, configurations, pages and code of this repository, and what looks like secrets in those of others."""
    listed = subprocess.run(["git", "ls-files", "docs", "model_cards", "training", "hf_liere"], capture_output=True)
    for path in map(Path, listed.stdout.decode().split()):
        if path.suffix in (".json", ".md", ".py", ".txt", ".yaml"):
            for text in readings(path.read_text(encoding="utf-8")):
                assert find_named_secret(path.name, text) is None, path
        elif path.suffix == ".jsonl":
            # The records of a sweep are alike.
            for line in path.read_text(encoding="utf-8").splitlines()[::20]:
                assert find_named_secret("run_config.json", line) is None, path
    others = {"hub_token": "<HUB_TOKEN>", "hub_private_repo": None, "eos_token": "</s>", "sort_key": "image_0001"}
    others |= {"api_key": "${API_KEY}", "url": "https://example.org:8080/a@b", "label2id": {"password": 3}}
    assert find_named_secret("run_config.json", json.dumps(others)) is None
    assert find_named_secret("vocab.json", json.dumps({"password=": 1, "secret": 2})) is None
    code = "token = os.environ['HF_TOKEN']\npassword = read_password()\nfrom hf_liere\nimport configurations"
    assert find_named_secret("model.py", code) is None


def test_tokens_stay_out_of_logs_and_errors(saved, hub, tmp_path):
    """A user's process with everything logged: with a token that may push, one that may only read and a wrong one."""
    token = "hf_" + "Tt0" * 11
    hub.tokens[token] = ("tester", "write")
    hub.tokens[token[:-1] + "R"] = ("tester", "read")
    code = f"""
        import os
        from hf_liere.tools.cli import main
        for last in "0Rx":
            os.environ["HF_TOKEN"] = os.environ["HF_TOKEN"][:-1] + last
            print("status", main(["push", {str(saved["image"])!r}, "tester/model", "--no_reload"]))
            print("status", main(["pull", "tester/private"]))
    """
    home = tmp_path / "user"
    home.mkdir()
    debug = {"HF_DEBUG": "1", "HF_HUB_VERBOSITY": "debug", "TRANSFORMERS_VERBOSITY": "debug"}
    output, errors = run_as_user(["-c", textwrap.dedent(code)], hub, home, token, **debug)
    statuses = [line.split()[-1] for line in output.splitlines() if line.startswith("status")]
    assert statuses == ["0", "1", "1", "1", "1", "1"]
    # The client logs its requests, so there is something to leak into.
    assert "preupload" in errors and "uthorization" in errors
    assert token[3:-1] not in output + errors
    for name, entry in hub.files("tester/model").items():
        assert token.encode() not in hub.repo("tester/model").read(entry), name
