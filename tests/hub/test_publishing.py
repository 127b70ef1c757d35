"""Publishing over the real clients and a local Hub: what is pushed, what survives faults, what is refused."""

import json
import os
import re
import shutil
import textwrap
import threading

import pytest
import torch
from checkout import SUPPORT
from conversion_cases import liere_weights
from hub_client import OTHER, READ, WRITE, client, finish, online, start
from hub_server import HubServer
from PIL import Image
from published_models import CARD, save_models
from pulling_user import outputs
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModel,
    AutoModelForImageClassification,
    AutoModelForTokenClassification,
    AutoModelForVideoClassification,
    CLIPModel,
)

import hf_liere
from hf_liere.cli import main
from hf_liere.convert import convert_checkpoint
from hf_liere.hub.cards import push_card, render
from hf_liere.hub.checked_facts import facts_of_run
from hf_liere.hub.publishing import ConcurrentCommitError, check_reload, publish, push, verify
from hf_liere.hub.pulling import pull
from hf_liere.hub.staging import load_complete, stage
from hf_liere.storage.client import HubError
from hf_liere.storage.saved_weights import saved_weights_digest, weights_digest


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return save_models(tmp_path_factory.mktemp("saved"))


@pytest.fixture(params=["lfs", "xet"])
def storage(request):
    if request.param == "xet":
        pytest.importorskip("hf_xet", reason="the client for Xet storage is not installed")
    return request.param


@pytest.fixture
def hub(tmp_path, monkeypatch, request):
    xet = "storage" in request.fixturenames and request.getfixturevalue("storage") == "xet"
    with HubServer(tmp_path / "hub", xet=xet) as server:
        online(monkeypatch, server, tmp_path / "home")
        yield server
        assert not server.errors, server.errors[0]


@pytest.fixture
def ready(saved, tmp_path):
    """A small folder as it is published, for tests of what happens on the way."""
    folder = tmp_path / "ready"
    stage(saved["image"], folder)
    (folder / "README.md").write_text(CARD)
    return folder


def history(hub, repo_id="tester/model"):
    """Titles, oldest first, without the commit that made the repository."""
    with hub.store.lock:
        repo = hub.repo(repo_id)
        return repo and [commit["title"] for _, commit in repo.history(repo.resolve("main"))][-2::-1]


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
        assert saved_weights_digest(pulled.folder) == saved_weights_digest(saved[kind])
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
    finish(start([user, "remote.safetensors", arguments[0], "remote", arguments[1]], hub, home))
    found = {"remote": load_file(home / "remote.safetensors")}
    if storage == "lfs":
        # A second process loads what the first one has downloaded, with the package and without a connection.
        hub.reset()
        command = [user, "package.safetensors", arguments[0], "package", arguments[1]]
        finish(start(command, hub, home, HF_HUB_OFFLINE="1"))
        assert not hub.requests
        found["package"] = load_file(home / "package.safetensors")
        assert found["package"].keys() == expected.keys()
    for way, results in found.items():
        for kind, result in results.items():
            assert torch.equal(result, expected[kind]), f"{kind} {way}"


def test_the_command_pushes_reloads_verifies_and_pulls(saved, hub, tmp_path, capsys):
    """As a user: the reload happens in a third process, without this package."""
    assert main(["push", str(saved["clip"]), "tester/model", "--private", "--message", "First"]) == 0
    output = capsys.readouterr().out
    assert "hashes compared, loaded in a process of its own" in output and history(hub) == ["First"]
    commit = hub.repo("tester/model").resolve("main")
    assert commit in output and hub.repo("tester/model").meta["private"]
    assert main(["pull", "tester/model", str(tmp_path / "pulled"), "--revision", commit[:10]]) == 0
    assert commit in capsys.readouterr().out
    assert main(["verify", str(saved["clip"]), "tester/model"]) == 0
    other = tmp_path / "other"
    shutil.copytree(saved["clip"], other)
    tensors = load_file(other / "model.safetensors")
    tensors["logit_scale"] += 1
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    assert main(["verify", str(other), "tester/model"]) == 1
    assert "holds other weights" in capsys.readouterr().err


def test_a_model_of_tokens_is_published_with_the_card_that_its_owner_writes(saved, hub, tmp_path, capsys):
    folder = tmp_path / "tokens"
    shutil.copytree(saved["tokens"], folder)
    (folder / "eval_results.json").write_text('{"eval_accuracy": 0.5}')
    assert main(["push", str(folder), "tester/model", "--evaluation", str(folder)]) == 1
    assert "cards are rendered for models of images and videos: write one as README.md" in capsys.readouterr().err
    assert main(["push", str(folder), "tester/model"]) == 0
    assert "loaded in a process of its own" in capsys.readouterr().out


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


def test_a_commit_that_does_not_load_is_no_success(ready, saved, hub):
    """The weights are right, the code beside them is not."""
    (ready / "modeling_liere.py").write_text("raise ImportError('broken')\n")
    published = publish(ready, "tester/model", message="Broken", api=client(hub))
    pulled = pull("tester/model", api=client(hub))
    with pytest.raises(HubError, match="(?s)does not load.*broken"):
        check_reload(load_complete(saved["image"]), published, pulled.folder)


def test_only_what_belongs_to_the_model_is_published(saved, hub, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(saved["image"], folder)
    for name in (
        "optimizer.pt",
        "training_args.bin",
        "trainer_state.json",
        "notes.txt",
        "checkpoint-8/model.safetensors",
    ):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"stray")
    (folder / "eval_results.json").write_text("{}")
    published = push(folder, "tester/model", api=client(hub), reload=False)
    code = {path.name for path in saved["image"].glob("*.py")}
    assert "modeling_liere.py" in code and set(published.files) == code | {
        *("README.md", "config.json", "model.safetensors", "preprocessor_config.json", "eval_results.json"),
    }
    assert set(hub.files("tester/model")) == {*published.files, ".gitattributes"}
    auto_map = json.loads((pull("tester/model", api=client(hub)).folder / "config.json").read_text())["auto_map"]
    assert set(auto_map) >= {"AutoConfig", "AutoModel", "AutoBackbone", "AutoModelForMaskedImageModeling"}


def test_a_push_replaces_earlier_weights_and_leaves_other_files(saved, ready, hub, tmp_path):
    (ready / "LICENSE").write_text("terms")
    (ready / "last-checkpoint").mkdir()
    old = ("pytorch_model.bin", "training_args.bin", "last-checkpoint/optimizer.pt", "modeling_old.py")
    # Figures of other weights.
    for name in (*old, "eval_results.json", "accuracy_by_image_size.png"):
        (ready / name).write_bytes(b"old")
    publish(ready, "tester/model", message="Old", api=client(hub))
    published = push(saved["image"], "tester/model", api=client(hub), reload=False, max_shard_size="60KB")
    assert set(hub.files("tester/model")) == {*published.files, ".gitattributes", "LICENSE"}
    assert published.left == ("LICENSE",) and not published.reloaded
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


def test_a_converted_checkpoint_is_published_with_its_own_card(hub, tmp_path):
    source = tmp_path / "last.safetensors"
    save_file(liere_weights(), source)
    convert_checkpoint(source, tmp_path / "converted", "liere")
    assert main(["push", str(tmp_path / "converted"), "tester/model", "--no_reload"]) == 0
    card = hub.repo("tester/model").read(hub.files("tester/model")["README.md"]).decode()
    assert "they are converted from the file `last.safetensors`" in card
    assert "preprocessor_config.json" in hub.files("tester/model")


def test_an_existing_public_repository_is_not_taken_for_private(saved, hub):
    push(saved["image"], "tester/model", api=client(hub), reload=False)
    with pytest.raises(HubError, match="exists already and is public"):
        push(saved["image"], "tester/model", private=True, api=client(hub))


def test_pushing_the_same_again_changes_nothing(saved, hub):
    first = push(saved["image"], "tester/model", api=client(hub), reload=False)
    assert push(saved["image"], "tester/model", api=client(hub), reload=False) == first
    assert len(history(hub)) == 1


COMMIT = "POST .*/commit/"


@pytest.mark.parametrize(
    "fault, attempts",
    [
        ({"lost": True}, 1),
        ({"status": 503, "times": 2}, 3),
        ({"close": True}, 2),
        ({"status": 429, "headers": {"Retry-After": "2"}}, 2),
        ({"status": 429, "headers": {"RateLimit": '"api";r=0;t=2'}}, 2),
    ],
    ids=["lost response", "5xx", "closed", "Retry-After", "RateLimit"],
)
def test_a_commit_happens_once_whatever_its_answer(ready, hub, storage, fault, attempts):
    hub.fail(COMMIT, **fault)
    published = publish(ready, "tester/model", message="Once", api=client(hub))
    assert history(hub) == ["Once"] and hub.repo("tester/model").resolve("main") == published.commit
    sent = hub.lines(COMMIT)
    assert len(sent) == attempts
    if "headers" in fault:
        # The header asks for two seconds.
        assert sent[1]["t"] - sent[0]["t"] >= 2


@pytest.mark.parametrize(
    "path", ["validate-yaml", "preupload", "whoami", "repos/create", "api/models/tester/model", "batch"]
)
def test_faults_of_any_request_are_survived(ready, hub, path):
    hub.fail(path, status=502, headers={"Retry-After": "0"})
    hub.fail(path, close=True)
    publish(ready, "tester/model", message="Once", api=client(hub))
    assert history(hub) == ["Once"] and all(fault.hits for fault in hub.faults)


def test_a_hub_that_stays_down_is_reported_and_nothing_is_claimed(ready, hub):
    hub.fail(COMMIT, status=500, times=-1, headers={"Retry-After": "0"})
    with pytest.raises(HubError, match="refused the request after 5 attempts"):
        publish(ready, "tester/model", message="Never", api=client(hub))
    assert history(hub) == [] and hub.count(COMMIT) == 5


def test_too_long_a_wait_is_not_waited(ready, hub):
    hub.fail(COMMIT, status=429, times=-1, headers={"Retry-After": "7200"})
    with pytest.raises(HubError, match="tester/model"):
        publish(ready, "tester/model", message="Never", api=client(hub))


def test_a_commit_of_someone_else_in_between_is_reported(ready, hub, tmp_path):
    first = publish(ready, "tester/model", message="First", api=client(hub))
    other = tmp_path / "other"
    shutil.copytree(ready, other)
    (other / "LICENSE").write_text("terms")
    (ready / "README.md").write_text(CARD + "\nChanged.\n")
    hub.fail(COMMIT, delay=2, times=1)
    errors = []

    def slow():
        try:
            publish(ready, "tester/model", message="Slow", api=client(hub))
        except HubError as error:
            errors.append(error)

    thread = threading.Thread(target=slow)
    thread.start()
    while not hub.faults[0].hits:
        pass
    publish(other, "tester/model", message="In between", api=client(hub))
    thread.join()
    assert history(hub) == ["First", "In between"]
    assert isinstance(errors[0], ConcurrentCommitError)
    assert "'In between' by tester" in str(errors[0]) and "Nothing was written" in str(errors[0])
    with pytest.raises(ConcurrentCommitError, match="has moved on from commit"):
        publish(ready, "tester/model", message="Slow", parent_commit=first.commit, api=client(hub))


def test_a_lost_response_and_someone_else_right_after(ready, hub, tmp_path):
    """Our commit is in the history, though no longer the newest: it did happen."""
    hub.fail(COMMIT, lost=True)
    hub.fail("/commits/main", delay=2)
    result = []
    thread = threading.Thread(
        target=lambda: result.append(publish(ready, "tester/model", message="Ours", api=client(hub)))
    )
    thread.start()
    while not history(hub):
        pass
    other = tmp_path / "other"
    other.mkdir()
    (other / "LICENSE").write_text("terms")
    publish(other, "tester/model", message="Theirs", api=client(hub))
    thread.join()
    assert history(hub) == ["Ours", "Theirs"]
    assert result[0].commit != hub.repo("tester/model").resolve("main")


@pytest.mark.slow
def test_two_processes_at_once(saved, hub, tmp_path):
    """Both have seen the same commit when they commit: one wins, the other says so, nothing is mixed."""
    hub.fail("/preupload/", delay=3, times=2)
    homes = [tmp_path / name for name in ("first", "second")]
    client(hub).create_repo("tester/model")
    processes = []
    for home, kind in zip(homes, ("image", "backbone")):
        home.mkdir()
        command = ["-m", "hf_liere.cli", "push", str(saved[kind]), "tester/model", "--no_reload", "--message", kind]
        processes.append(start(command, hub, home))
    results = [(*process.communicate(timeout=300), process.returncode) for process in processes]
    assert sorted(code for *_, code in results) == [0, 1], results
    winner = ("image", "backbone")[[code for *_, code in results].index(0)]
    loser = next(errors for _, errors, code in results if code)
    assert "has moved on from commit" in loser and "Traceback" not in loser and history(hub) == [winner]
    assert saved_weights_digest(pull("tester/model", api=client(hub)).folder) == saved_weights_digest(saved[winner])


@pytest.mark.parametrize(
    "token, repo_id, message",
    [
        (False, "tester/model", "There is no token"),
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
    assert hub.repo("tester/model") is None and not hub.count(COMMIT)


def test_branches(saved, hub):
    push(saved["image"], "tester/model", api=client(hub), reload=False)
    published = push(saved["backbone"], "tester/model", revision="wide", api=client(hub), reload=False)
    assert hub.repo("tester/model").resolve("wide") == published.commit != hub.repo("tester/model").resolve("main")


def test_a_folder_without_a_whole_model_is_refused_before_anything_is_sent(saved, hub, tmp_path):
    folder = tmp_path / "broken"
    shutil.copytree(saved["image"], folder)
    tensors = load_file(folder / "model.safetensors")
    dropped = tensors.pop("classifier.weight")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="classifier.weight"):
        push(folder, "tester/model", api=client(hub))
    save_file(tensors | {"classifier.weight": dropped, "extra": dropped + 1}, folder / "model.safetensors")
    with pytest.raises(ValueError, match="extra"):
        push(folder, "tester/model", api=client(hub))
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match="holds no model.safetensors"):
        push(folder, "tester/model", api=client(hub))
    with pytest.raises(ValueError, match="no saved model"):
        push(saved["base"].parent, "tester/model", api=client(hub))
    with pytest.raises(ValueError, match="'CLIPModel' is none of our models"):
        push(saved["base"], "tester/model", api=client(hub))
    (saved["image"] / "README.md").rename(tmp_path / "card")
    with pytest.raises(ValueError, match="holds no README.md"):
        push(saved["image"], "tester/model", api=client(hub))
    (tmp_path / "card").rename(saved["image"] / "README.md")
    assert not hub.requests


def cut(path):
    path.write_bytes(path.read_bytes()[:-100])


def poison(path):
    tensors = load_file(path)
    next(value for value in tensors.values() if value.is_floating_point()).view(-1)[0] = float("nan")
    save_file(tensors, path, metadata={"format": "pt"})


BROKEN = {
    "cut off": ("image", "model.safetensors", cut, "is no readable safetensors file"),
    "empty": ("image", "model.safetensors", lambda path: path.write_bytes(b""), "is no readable safetensors file"),
    "no number": ("image", "model.safetensors", poison, "hold values that are infinite or no number (NaN): "),
    "a folder": (
        "image",
        "model.safetensors",
        lambda path: (path.unlink(), path.mkdir()),
        "holds no model.safetensors",
    ),
    "no configuration": ("image", "config.json", lambda path: path.unlink(), "holds neither config.json nor"),
    "half a configuration": ("image", "config.json", cut, "config.json is no json file"),
    "a list": ("image", "config.json", lambda path: path.write_text("[]"), "config.json holds a list"),
    "of nothing": ("image", "config.json", lambda path: path.write_text("{}"), "none of our models"),
    "other shapes": ("image", "config.json", lambda path: widen(path), "does not load as LieREViTForImageCl"),
    "no processor": ("image", "preprocessor_config.json", lambda path: path.write_text("?"), "is no json file"),
    "no text": ("image", "README.md", lambda path: path.write_bytes(b"\xff\xfe\x00"), "README.md is no text in UTF-8"),
    "no picture": (
        "image",
        "README.md",
        lambda path: path.write_text("![a](b.png)"),
        "b.png of the card cannot be read",
    ),
    "index": ("shards", "model.safetensors.index.json", lambda path: path.write_text("{}"), "names no files of"),
    "outside": ("shards", "model.safetensors.index.json", lambda path: escape(path), "names no files of"),
    "a shard less": ("shards", "model-00001-of-00002.safetensors", lambda path: path.unlink(), "holds no model-00001"),
    "a link": ("image", "merges.txt", lambda path: leak(path), "merges.txt is a link out of its folder, to "),
    "weights of others": (
        "image",
        "model.safetensors",
        lambda path: leak(path, "moved"),
        "is a link out of its folder",
    ),
    "a card of others": ("image", "README.md", lambda path: leak(path), "README.md is a link out of its folder, to "),
    "two models": ("image", "rotary_config.json", lambda path: path.write_text("{}"), "(rotary_config.json): move the"),
    "two adapters": (
        "adapter",
        "adapter_config.json",
        lambda path: path.write_text("{}"),
        "(adapter_config.json), whi",
    ),
    "adapter cut off": ("adapter", "rotary.safetensors", cut, "is no readable safetensors file"),
    "adapter, no number": ("adapter", "rotary.safetensors", poison, "infinite or no number (NaN): 0.generators"),
    "adapter of nothing": (
        "adapter",
        "rotary_config.json",
        lambda path: path.write_text("{}"),
        "written by save_rotary",
    ),
    "adapter of two": ("adapter", "rotary_config.json", lambda path: double(path), "speaks of 2 vision towers"),
}


def leak(path, how="replaced"):
    target = path.parent.parent / "outside"
    if how == "moved":
        shutil.copy(path, target)
    else:
        target.write_text("-----BEGIN OPENSSH PRIVATE KEY-----")
    path.unlink(missing_ok=True)
    path.symlink_to(target)


def widen(path):
    path.write_text(json.dumps(json.loads(path.read_text()) | {"hidden_size": 96}))


def escape(path):
    path.write_text(json.dumps({"weight_map": {"classifier.bias": "../image/model.safetensors"}}))


def double(path):
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"base": content["base"] * 2}))


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_folder_is_one_sentence_and_nothing_is_sent(saved, hub, tmp_path, capsys, case):
    kind, name, change, message = BROKEN[case]
    folder = tmp_path / "broken"
    if kind == "shards":
        load_complete(saved["image"]).save_pretrained(folder, max_shard_size="80KB")
        (folder / "README.md").write_text(CARD)
    else:
        shutil.copytree(saved[kind], folder)
    change(folder / name)
    commands = [["push", str(folder), "tester/model"]]
    # A card or a processor is nothing that `verify` reads here.
    if name not in ("README.md", "preprocessor_config.json") and case not in ("no number", "adapter, no number"):
        commands.append(["verify", str(folder), "tester/model"])
    for command in commands:
        capsys.readouterr()
        assert main(command) == 1
        error = capsys.readouterr().err.splitlines()[-1]
        assert error.startswith(f"hf-liere {command[0]}: ") and message in error
    assert not hub.requests


def test_what_is_no_folder(saved, hub, tmp_path, capsys):
    (tmp_path / "file").write_text("x")
    for folder, what in ((tmp_path / "absent", "does not exist"), (tmp_path / "file", "is a file")):
        for command in ("push", "verify"):
            assert main([command, str(folder), "tester/model"]) == 1
            assert f"{folder} {what}; accepted: the folder of a saved model." in capsys.readouterr().err
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
    with pytest.raises(ValueError, match=f"{name} holds {what}") as caught:
        push(folder, "tester/model", api=client(hub))
    assert text not in str(caught.value) and not hub.requests


def test_tokens_stay_out_of_logs_and_errors(saved, hub, tmp_path):
    """A user's process with everything logged: with a token that may push, one that may only read and a wrong one."""
    token = "hf_" + "Tt0" * 11
    hub.tokens[token] = ("tester", "write")
    hub.tokens[token[:-1] + "R"] = ("tester", "read")
    code = f"""
        import os
        from hf_liere.cli import main
        for last in "0Rx":
            os.environ["HF_TOKEN"] = os.environ["HF_TOKEN"][:-1] + last
            print("status", main(["push", {str(saved["image"])!r}, "tester/model", "--no_reload"]))
            print("status", main(["pull", "tester/private"]))
    """
    home = tmp_path / "user"
    home.mkdir()
    debug = {"HF_DEBUG": "1", "HF_HUB_VERBOSITY": "debug", "TRANSFORMERS_VERBOSITY": "debug"}
    output, errors = finish(start(["-c", textwrap.dedent(code)], hub, home, token, **debug))
    statuses = [line.split()[-1] for line in output.splitlines() if line.startswith("status")]
    assert statuses == ["0", "1", "1", "1", "1", "1"]
    # The client logs its requests, so there is something to leak into.
    assert "preupload" in errors and "uthorization" in errors
    assert token[3:-1] not in output + errors
    for name, entry in hub.files("tester/model").items():
        assert token.encode() not in hub.repo("tester/model").read(entry), name


def test_the_digest_of_weights_does_not_depend_on_files(saved, tmp_path):
    model = AutoModelForImageClassification.from_pretrained(saved["image"])
    model.save_pretrained(tmp_path / "shards", max_shard_size="40KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    digests = {saved_weights_digest(tmp_path / "shards"), saved_weights_digest(saved["image"])}
    assert digests == {weights_digest(model.state_dict())}
    with torch.no_grad():
        model.classifier.bias[0] += 1e-7
    assert weights_digest(model.state_dict()) not in digests


def test_verify_finds_a_repository_with_other_files(saved, hub):
    push(saved["image"], "tester/model", api=client(hub), reload=False)
    push(saved["backbone"], "tester/model", api=client(hub), reload=False)
    with pytest.raises(HubError, match="holds other weights"):
        verify(saved["image"], "tester/model", api=client(hub))


def edited(name, **fields):
    def change(folder):
        content = json.loads((folder / name).read_text())
        fields_now = {field: value(content) if callable(value) else value for field, value in fields.items()}
        (folder / name).write_text(json.dumps(content | fields_now))

    return change


def written(name, text):
    def change(folder):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)

    return change


def elsewhere(content):
    return {name: f"other/code--{reference}" for name, reference in content["auto_map"].items()}


LABELS = {"0": "LABEL_2", "1": "LABEL_1", "2": "LABEL_0"}
# With which weights, and mostly outputs, are the same: what somebody changes of a copy, and what `verify` says.
CHANGED = {
    "code": ("image", written("modeling_liere.py", "raise SystemExit"), "neither this .* has: modeling_liere.py. None"),
    "code beside": ("adapter", written("custom_generate/generate.py", ""), "has: custom_generate/generate.py. None of"),
    "code elsewhere": (
        "image",
        edited("config.json", auto_map=elsewhere),
        "refers to code of another repository, other",
    ),
    "a pipeline elsewhere": ("image", edited("config.json", custom_pipelines={"x": {"impl": "o/c--m.P"}}), "o/c--m.P;"),
    "a tokenizer elsewhere": (
        "image",
        written("tokenizer_config.json", '{"auto_map": {"AutoTokenizer": ["other/code--code.Tokenizer", null]}}'),
        "tokenizer_config.json of .* refers to code of another repository, other/code--code.Tokenizer;",
    ),
    "labels": ("image", edited("config.json", id2label=LABELS), 'config.json has id2label {"0": "LABEL_2"'),
    "coordinates": ("image", edited("config.json", coordinates="unit_width"), 'coordinates "unit_width" for "unit"'),
    "activation": ("image", edited("config.json", hidden_act="gelu_new"), 'has hidden_act "gelu_new" for "gelu"'),
    "class": ("image", edited("config.json", architectures=["LieREViTModel"]), "config.json has architectures"),
    "another class": (
        "image",
        edited("config.json", auto_map=lambda old: old["auto_map"] | {"AutoModel": "modeling_liere.LieREViTBackbone"}),
        "config.json has auto_map",
    ),
    "type": ("image", edited("config.json", model_type="vit"), 'config.json has model_type "vit" for "liere_vit"'),
    "a kernel": (
        "image",
        edited("config.json", attn_implementation="other/code"),
        'attn_implementation "other/code" for',
    ),
    "configuration of nothing": (
        "image",
        edited("config.json", hidden_size="?"),
        "config.json there is no LieRE",
    ),
    "processor": (
        "image",
        edited("preprocessor_config.json", image_mean=[0.1] * 3),
        "has image_mean .0.1, 0.1, 0.1. for",
    ),
    "no processor": (
        "image",
        lambda folder: (folder / "preprocessor_config.json").unlink(),
        "it lacks preprocessor_con",
    ),
    "another adapter": ("image", written("adapter_config.json", "{}"), "adapter_config.json would go"),
    "adapter": ("adapter", edited("rotary_config.json", base=[]), "rotary_config.json has base .. for"),
}


@pytest.mark.parametrize("case", CHANGED)
def test_verify_names_what_somebody_changed(saved, hub, tmp_path, case):
    kind, change, message = CHANGED[case]
    copy = tmp_path / "copy"
    stage(saved[kind], copy)
    change(copy)
    publish(copy, "other/copy", message="A copy", api=client(hub, OTHER))
    with pytest.raises(HubError, match=message):
        verify(saved[kind], "other/copy", run=True, api=client(hub))


def test_verify_runs_what_is_compared_and_gives_it_no_secret(saved, hub, tmp_path, monkeypatch, capsys):
    """Code that another version of the package has saved may be in the folder and in the repository."""
    folder, copy = tmp_path / "folder", tmp_path / "copy"
    shutil.copytree(saved["image"], folder)
    spy = f"""
import json, os
from pathlib import Path
from huggingface_hub import get_token
Path({str(tmp_path / "seen")!r}).write_text(json.dumps([dict(os.environ), get_token(), str(Path.home())]))
"""
    (folder / "modeling_liere.py").write_text((folder / "modeling_liere.py").read_text() + spy)
    stage(folder, copy)
    shutil.copy(folder / "modeling_liere.py", copy)
    # What other releases of transformers write otherwise, and what a push leaves.
    configuration = json.loads((copy / "config.json").read_text()) | {"transformers_version": "5.17.0"}
    assert configuration.pop("initializer_range") == hf_liere.LieREViTConfig().initializer_range
    (copy / "config.json").write_text(json.dumps(configuration))
    written("notes.txt", "Of the owner.")(copy)
    publish(copy, "tester/model", message="Earlier", api=client(hub), private=True)
    secrets = {"HF_TOKEN": WRITE, "WANDB_API_KEY": "5" * 40, "AWS_SECRET_ACCESS_KEY": "6" * 40, "MY_ACCOUNT": "7" * 40}
    for name, value in secrets.items():
        monkeypatch.setenv(name, value)
    assert main(["verify", str(folder), "tester/model"]) == 0 and not (tmp_path / "seen").exists()
    assert f"what a push of {folder} would write\n" in capsys.readouterr().out
    assert main(["verify", str(folder), "tester/model", "--run"]) == 0
    assert "would write, with the same outputs\n" in capsys.readouterr().out
    text = (tmp_path / "seen").read_text()
    environment, token, home = json.loads(text)
    assert not [value for value in secrets.values() if value in text] and token is None
    assert environment["HF_HUB_OFFLINE"] == "1" and home == environment["HF_HOME"] != os.environ.get("HF_HOME")


def test_the_code_of_every_card_runs(saved, hub, tmp_path):
    """In one process that does not import hf_liere, on pictures and frames that lie there."""
    home, blocks = tmp_path / "visitor", []
    home.mkdir()
    for name in ("picture", *(f"frame{number}" for number in range(4))):
        Image.new("RGB", (20, 20)).save(home / f"{name}.png")
    for kind in ("image", "video", "backbone", "clip"):
        card = render(facts_of_run(saved[kind], saved_weights_digest(saved[kind])), f"tester/{kind}")
        push(saved[kind], f"tester/{kind}", card=card, api=client(hub), reload=False)
        blocks.append(re.search(r"```python\n(.*?)```", card.text, re.S)[1])
    code = "\n".join([*blocks, "import sys", "assert 'hf_liere' not in sys.modules"])
    output, _ = finish(start(["-c", code], hub, home))
    assert len(re.findall(r"^LABEL_\d: \d+\.\d%$", output, re.M)) == 6
    assert "feature_maps" in output and "torch.Size([1, 24])" in output


def test_a_converted_checkpoint_that_was_evaluated_is_still_called_converted(tmp_path):
    source = tmp_path / "last.safetensors"
    save_file(liere_weights(), source)
    convert_checkpoint(source, tmp_path / "converted", "liere")
    digest = saved_weights_digest(tmp_path / "converted")
    evaluation = tmp_path / "evaluation"
    evaluation.mkdir()
    size = json.loads((tmp_path / "converted" / "preprocessor_config.json").read_text())["size"]["height"]
    used = {"name": "uoft-cs/cifar10", "split": "test", "samples": 10}
    run = {"examples": {"train": None, "evaluation": used}, "image_size": [size, size]}
    for name, content in (
        ("run_config.json", run),
        ("weights.json", {"sha256": digest}),
        ("eval_results.json", {"eval_accuracy": 0.5, "eval_samples": 10}),
    ):
        (evaluation / name).write_text(json.dumps(content))
    text = push_card(tmp_path / "converted", digest, "me/x", evaluations=[evaluation]).text
    assert "they are converted from the file `last.safetensors`" in text and "split `test`" in text
    assert "Licence and terms are those of the source" in text
