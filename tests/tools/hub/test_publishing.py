"""Publishing over the real clients and a local Hub: what is pushed, and what a push leaves."""

import json
import re
import shutil

import pytest
import torch
from checkout import SUPPORT
from conversion_cases import liere_weights
from counted_reads import count_reads
from hub_client import client, history, run_as_user
from PIL import Image
from published_models import CARD
from pulling_user import outputs
from run_records import write_records
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModel,
    AutoModelForImageClassification,
    AutoModelForTokenClassification,
    AutoModelForVideoClassification,
    CLIPModel,
)

import hf_liere
from hf_liere.storage.client import HubError
from hf_liere.storage.saved_model import SavedModel
from hf_liere.tools.cli import main
from hf_liere.tools.convert import convert_checkpoint
from hf_liere.tools.hub.cards import LEADERBOARD_FILE, push_card, render_card
from hf_liere.tools.hub.checked_facts import facts_of_run
from hf_liere.tools.hub.publishing import check_reload, publish, push
from hf_liere.tools.hub.pulling import pull


@pytest.mark.slow
def test_every_kind_of_model_from_one_process_to_another(saved, hub, storage, tmp_path, monkeypatch):
    # Code that comes with a checkpoint has no kernels for CPUs, which round otherwise.
    monkeypatch.setenv("HF_LIERE_CPU_KERNELS", "0")
    commits = {}
    for kind in ("image", "video", "tokens", "backbone", "clip", "adapter"):
        published = push(saved[kind], f"tester/{kind}", api=client(hub), reload=False, max_shard_size="60KB")
        assert hub.repo(f"tester/{kind}").resolve("main") == published.commit
        commits[kind] = published.commit
        pulled = pull(f"tester/{kind}", tmp_path / "pulled" / kind, api=client(hub))
        assert SavedModel(pulled.folder).digest == SavedModel(saved[kind]).digest
    assert len(list((tmp_path / "pulled" / "image").glob("model-*.safetensors"))) > 1
    weights = {name: entry for name, entry in hub.files("tester/image").items() if name.endswith(".safetensors")}
    assert all(bool(entry.get("xet")) == (storage == "xet") for entry in weights.values())

    base = CLIPModel.from_pretrained(saved["base"])
    expected = outputs(
        {
            "image": AutoModelForImageClassification.from_pretrained(saved["image"]),
            "video": AutoModelForVideoClassification.from_pretrained(saved["video"]),
            "tokens": AutoModelForTokenClassification.from_pretrained(saved["tokens"]),
            "backbone": hf_liere.LieREViTBackbone.from_pretrained(saved["backbone"]),
            "clip": AutoModel.from_pretrained(saved["clip"]),
            "adapter": hf_liere.load_rotary(base, saved["adapter"]),
        }
    )
    user = str(SUPPORT / "pulling_user.py")
    arguments = [str(saved["base"]), json.dumps(commits)]
    home = tmp_path / "user"
    home.mkdir()
    run_as_user([user, "remote.safetensors", arguments[0], "remote", arguments[1]], hub, home)
    found = {"remote": load_file(home / "remote.safetensors")}
    if storage == "lfs":
        # A second process loads what the first one has downloaded, with the package and without a connection.
        hub.reset()
        command = [user, "package.safetensors", arguments[0], "package", arguments[1]]
        run_as_user(command, hub, home, HF_HUB_OFFLINE="1")
        assert not hub.requests
        found["package"] = load_file(home / "package.safetensors")
        assert found["package"].keys() == expected.keys()
    for way, results in found.items():
        for kind, result in results.items():
            # Weights are compared above; where they lie in memory decides the order of sums in matrix products.
            torch.testing.assert_close(result, expected[kind], rtol=0, atol=2e-6, msg=f"{kind} {way}")


def test_the_command_pushes_reloads_verifies_and_pulls(saved, hub, tmp_path, capsys):
    """As a user: the reload happens in a third process, without this package."""
    with count_reads() as reads:
        assert main(["push", str(saved["clip"]), "tester/model", "--private", "--message", "First"]) == 0
    times = {path.parent.name: round(share) for path, share in reads.items() if path.name == "model.safetensors"}
    output = capsys.readouterr().out
    assert "hashes compared, loaded in a separate process" in output and history(hub) == ["First"]
    commit = hub.repo("tester/model").resolve("main")
    assert commit in output and hub.repo("tester/model").private
    # The folder: digest with checks, and load. The copy: digest; the client hashes and sends it. The commit: hash.
    assert set(times) == {"clip", "checkpoint", commit}
    assert times["clip"] <= 2 and times["checkpoint"] <= 1 + 2 and times[commit] <= 1
    assert main(["pull", "tester/model", str(tmp_path / "pulled"), "--revision", commit[:10]]) == 0
    assert commit in capsys.readouterr().out
    assert main(["verify", str(saved["clip"]), "tester/model"]) == 0
    other = tmp_path / "other"
    shutil.copytree(saved["clip"], other)
    tensors = load_file(other / "model.safetensors")
    tensors["logit_scale"] += 1
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    assert main(["verify", str(other), "tester/model"]) == 1
    assert "has other weights" in capsys.readouterr().err


@pytest.mark.slow
def test_a_model_of_tokens_is_published_with_the_card_that_its_owner_writes(saved, hub, tmp_path, capsys):
    folder = tmp_path / "tokens"
    shutil.copytree(saved["tokens"], folder)
    (folder / "eval_results.json").write_text('{"eval_accuracy": 0.5}')
    assert main(["push", str(folder), "tester/model"]) == 0
    assert "loaded in a separate process" in capsys.readouterr().out
    assert hub.repo("tester/model").read(hub.files("tester/model")["README.md"]).decode() == CARD


def test_an_adapter_without_a_card_gets_one(saved, hub, tmp_path, capsys):
    folder = tmp_path / "adapter"
    shutil.copytree(saved["adapter"], folder)
    (folder / "README.md").unlink()
    assert main(["push", str(folder), "tester/model", "--license", "mit"]) == 0
    assert "hashes compared, not loaded" in capsys.readouterr().out
    files = hub.files("tester/model")
    assert set(files) == {"README.md", "rotary.safetensors", "rotary_config.json", ".gitattributes"}
    assert "license: mit" in hub.repo("tester/model").read(files["README.md"]).decode()
    assert main(["verify", str(folder), "tester/model"]) == 0


@pytest.mark.slow
def test_a_commit_that_does_not_load_is_no_success(ready, saved, hub):
    """The weights are right, the code beside them is not."""
    (ready / "modeling_liere.py").write_text("raise ImportError('broken')\n")
    published = publish(ready, "tester/model", message="Broken", api=client(hub))
    pulled = pull("tester/model", api=client(hub))
    with pytest.raises(HubError, match="(?s)does not load.*broken"):
        check_reload(AutoModelForImageClassification.from_pretrained(saved["image"]), published, pulled.folder)


def test_only_what_belongs_to_the_model_is_published(saved, hub, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(saved["image"], folder)
    stray = "optimizer.pt training_args.bin trainer_state.json notes.txt checkpoint-8/model.safetensors"
    for name in stray.split():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"stray")
    (folder / "eval_results.json").write_text("{}")
    published = push(folder, "tester/model", api=client(hub), reload=False)
    code = {path.name for path in saved["image"].glob("*.py")}
    assert "modeling_liere.py" in code and set(published.files) == code | {
        *("README.md", "config.json", "model.safetensors", "preprocessor_config.json", "eval_results.json")
    }
    assert set(hub.files("tester/model")) == {*published.files, ".gitattributes"}
    auto_map = json.loads((pull("tester/model", api=client(hub)).folder / "config.json").read_text())["auto_map"]
    assert set(auto_map) >= {"AutoConfig", "AutoModel", "AutoBackbone", "AutoModelForMaskedImageModeling"}


def test_a_push_replaces_earlier_weights_and_leaves_other_files(saved, ready, hub, tmp_path):
    (ready / "LICENSE").write_text("terms")
    old = ("pytorch_model.bin", "training_args.bin", "last-checkpoint/optimizer.pt", "old_helper.py")
    # Figures of other weights.
    for name in (*old, "eval_results.json", LEADERBOARD_FILE, "accuracy_by_image_size.png", "own_script.py"):
        (ready / name).parent.mkdir(exist_ok=True)
        (ready / name).write_bytes(b"old")
    (ready / "modeling_liere.py").write_text("from .old_rotation import R\n")
    (ready / "old_rotation.py").write_text("def r():\n    from .old_helper import H\n    from .words import W\n")
    (ready / "words.py").write_text("W = 1")
    # The tokenizer and its code stay.
    (ready / "tokenizer_config.json").write_text(json.dumps({"auto_map": {"AutoTokenizer": ["words.Words", None]}}))
    left = ("LICENSE", "own_script.py", "tokenizer_config.json", "words.py")
    publish(ready, "tester/model", message="Old", api=client(hub))
    published = push(saved["image"], "tester/model", api=client(hub), reload=False, max_shard_size="60KB")
    assert set(hub.files("tester/model")) == {*published.files, ".gitattributes", *left}
    assert published.left == left and not published.reloaded
    assert "model.safetensors" not in published.files and len(history(hub)) == 2


def test_a_model_that_was_loaded_from_the_hub_brings_its_own_code(saved, hub, tmp_path):
    """A fine-tuned copy must not refer to the repository that it came from. The cache consists of links."""
    push(saved["image"], "tester/model", api=client(hub), reload=False)
    cached = pull("tester/model", api=client(hub)).folder
    assert (cached / "config.json").is_symlink()
    copied = push(cached, "tester/copy", api=client(hub), reload=False)
    assert set(hub.files("tester/copy")) == set(hub.files("tester/model")) == {*copied.files, ".gitattributes"}
    model = AutoModelForImageClassification.from_pretrained("tester/model")
    model.save_pretrained(tmp_path / "tuned")
    (tmp_path / "tuned" / "README.md").write_text(CARD)
    push(tmp_path / "tuned", "tester/tuned", api=client(hub), reload=False)
    files = hub.files("tester/tuned")
    auto_map = json.loads(hub.repo("tester/tuned").read(files["config.json"]))["auto_map"]
    assert not [reference for reference in auto_map.values() if "--" in reference]
    assert {f"{reference.partition('.')[0]}.py" for reference in auto_map.values()} <= set(files)


@pytest.fixture
def converted(tmp_path):
    save_file(liere_weights(), tmp_path / "last.safetensors")
    convert_checkpoint(tmp_path / "last.safetensors", tmp_path / "converted", "liere")
    return tmp_path / "converted"


def test_a_converted_checkpoint_is_published_with_its_own_card(hub, converted):
    assert main(["push", str(converted), "tester/model", "--no_reload"]) == 0
    card = hub.repo("tester/model").read(hub.files("tester/model")["README.md"]).decode()
    assert "they are converted from the file `last.safetensors`" in card
    assert "preprocessor_config.json" in hub.files("tester/model")


def test_a_converted_checkpoint_that_was_evaluated_is_still_called_converted(converted, tmp_path):
    write_records(tmp_path / "evaluation", SavedModel(converted).digest, accuracy=0.5, size=16)
    text = push_card(SavedModel(converted), "me/x", evaluations=[tmp_path / "evaluation"]).text
    assert "they are converted from the file `last.safetensors`" in text and "split `test`" in text
    assert "Licence and terms are those of the source" in text


def test_an_existing_public_repository_is_not_taken_for_private(saved, hub):
    push(saved["image"], "tester/model", api=client(hub), reload=False)
    with pytest.raises(HubError, match="exists already and is public"):
        push(saved["image"], "tester/model", private=True, api=client(hub))


def test_pushing_the_same_again_changes_nothing(saved, hub):
    first = push(saved["image"], "tester/model", api=client(hub), reload=False)
    assert push(saved["image"], "tester/model", api=client(hub), reload=False) == first
    assert len(history(hub)) == 1


def test_branches(saved, hub):
    push(saved["image"], "tester/model", api=client(hub), reload=False)
    published = push(saved["backbone"], "tester/model", revision="wide", api=client(hub), reload=False)
    assert hub.repo("tester/model").resolve("wide") == published.commit != hub.repo("tester/model").resolve("main")


@pytest.mark.slow
def test_the_code_of_every_card_runs(saved, hub, tmp_path):
    """In one process that does not import hf_liere, on pictures and frames that lie there."""
    home, blocks = tmp_path / "visitor", []
    home.mkdir()
    for name in ("picture", *(f"frame{number}" for number in range(4))):
        Image.new("RGB", (20, 20)).save(home / f"{name}.png")
    for kind in ("image", "video", "backbone", "clip"):
        card = render_card(facts_of_run(SavedModel(saved[kind])), f"tester/{kind}")
        push(saved[kind], f"tester/{kind}", card=card, api=client(hub), reload=False)
        blocks.append(re.search(r"```python\n(.*?)```", card.text, re.S)[1])
    code = "\n".join([*blocks, "import sys", "assert 'hf_liere' not in sys.modules"])
    output, _ = run_as_user(["-c", code], hub, home)
    assert len(re.findall(r"^LABEL_\d: \d+\.\d%$", output, re.M)) == 6
    assert "feature_maps" in output and "torch.Size([1, 24])" in output
