"""`hf-liere verify`: the differences it finds, what it runs, and the digest of weights."""

import json
import os
import shutil
from functools import partial

import pytest
import torch
from hub_client import OTHER, WRITE, client
from run_records import edited, written
from transformers import AutoModelForImageClassification

import hf_liere
from hf_liere.storage.client import HubError
from hf_liere.storage.saved_model import SavedModel, weights_digest
from hf_liere.tools.cli import main
from hf_liere.tools.hub.cards import LEADERBOARD_FILE, PICTURE
from hf_liere.tools.hub.publishing import publish, push, verify
from hf_liere.tools.hub.staging import stage


def test_the_digest_of_weights_does_not_depend_on_files(saved, tmp_path):
    model = AutoModelForImageClassification.from_pretrained(saved["image"])
    model.save_pretrained(tmp_path / "shards", max_shard_size="40KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    digests = {SavedModel(tmp_path / "shards").digest, SavedModel(saved["image"]).digest}
    assert digests == {weights_digest(model.state_dict())}
    with torch.no_grad():
        model.classifier.bias[0] += 1e-7
    assert weights_digest(model.state_dict()) not in digests


def test_verify_finds_a_repository_with_other_files(saved, hub):
    push(saved["image"], "tester/model", api=client(hub), reload=False)
    push(saved["backbone"], "tester/model", api=client(hub), reload=False)
    with pytest.raises(HubError, match="has other weights"):
        verify(saved["image"], "tester/model", api=client(hub))


def elsewhere(content):
    return {name: f"other/code--{reference}" for name, reference in content["auto_map"].items()}


configured = partial(edited, "config.json")
PROCESSOR, TOKENIZER = (
    "preprocessor_config.json",
    '{"auto_map": {"AutoTokenizer": ["other/code--code.Tokenizer", null]}}',
)
OTHER_CLASS = {"AutoModel": "modeling_liere.LieREViTBackbone"}
# With which weights, and mostly outputs, are the same: what somebody changes of a copy, and what `verify` says.
CHANGED = [
    ("image", written("modeling_liere.py", "raise SystemExit"), "neither this .* has: modeling_liere.py. None"),
    ("adapter", written("custom_generate/generate.py", ""), "has: custom_generate/generate.py. None of"),
    ("image", configured(auto_map=elsewhere), "refers to code of another repository, other"),
    ("image", configured(custom_pipelines={"x": {"impl": "o/c--m.P"}}), "o/c--m.P;"),
    ("image", written("tokenizer_config.json", TOKENIZER), "tokenizer_config.json of .* other/code--code.Tokenizer;"),
    ("image", configured(id2label={"0": "b", "1": "a", "2": "c"}), 'config.json has id2label {"0": "b"'),
    ("image", configured(coordinates="unit_width"), 'coordinates "unit_width" for "unit"'),
    ("image", configured(hidden_act="gelu_new"), 'has hidden_act "gelu_new" for "gelu"'),
    ("image", configured(architectures=["LieREViTModel"]), "config.json has architectures"),
    ("image", configured(auto_map=lambda old: old["auto_map"] | OTHER_CLASS), "config.json has auto_map"),
    ("image", configured(model_type="vit"), 'config.json has model_type "vit" for "liere_vit"'),
    ("image", configured(attn_implementation="other/code"), 'attn_implementation "other/code" for'),
    ("image", configured(hidden_size="?"), "config.json there is not a LieRE"),
    ("image", edited(PROCESSOR, image_mean=[0.1] * 3), "has image_mean .0.1, 0.1, 0.1. for"),
    ("image", lambda folder: (folder / PROCESSOR).unlink(), "it lacks preprocessor_con"),
    ("image", written("adapter_config.json", "{}"), "adapter_config.json would go"),
    ("adapter", edited("rotary_config.json", base=[]), "rotary_config.json has base .. for"),
]


@pytest.mark.parametrize("kind, change, message", CHANGED)
def test_verify_names_what_somebody_changed(saved, hub, tmp_path, kind, change, message):
    copy = tmp_path / "copy"
    stage(SavedModel(saved[kind]), copy)
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
    stage(SavedModel(folder), copy)
    shutil.copy(folder / "modeling_liere.py", copy)
    # What other releases of transformers write otherwise, and what a push leaves.
    configuration = json.loads((copy / "config.json").read_text()) | {"transformers_version": "5.17.0"}
    assert configuration.pop("initializer_range") == hf_liere.LieREViTConfig().initializer_range
    (copy / "config.json").write_text(json.dumps(configuration))
    for name in ("notes.txt", PICTURE, LEADERBOARD_FILE):
        written(name, "Of the owner, or of a card.")(copy)
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
