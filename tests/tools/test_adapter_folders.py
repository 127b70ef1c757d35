"""A folder of peft is a model of every command: its base with rotations, LoRA, the trained classifier and its names."""

import json
import shutil
from types import SimpleNamespace

import huggingface_hub
import onnx
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import AutoImageProcessor, BitImageProcessor, Dinov2Config, Dinov2Model, pipeline
from transformers import AutoModelForImageClassification as AutoClassifier

import hf_liere
from hf_liere.auto import load_checkpoint
from hf_liere.storage.loading import CheckpointError
from hf_liere.tools.cli import main


peft = pytest.importorskip("peft")
# More than ten: "10" is sorted before "2".
NAMES = [f"tree {number}" for number in range(12)]
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A trained adapter of a DINOv2 without a classifier, with its outputs before it was saved."""
    root = tmp_path_factory.mktemp("adapters")
    torch.manual_seed(0)
    Dinov2Model(Dinov2Config(**SIZES)).save_pretrained(root / "base")
    labels = {"id2label": dict(enumerate(NAMES)), "label2id": {name: index for index, name in enumerate(NAMES)}}
    model = AutoClassifier.from_pretrained(root / "base", **labels, problem_type="multi_label_classification")
    hf_liere.patch(model, hf_liere.RotaryPatchConfig(position_encoding="comrope_ld"))
    lora = peft.LoraConfig(r=2, target_modules="all-linear", modules_to_save=["classifier"])
    model = peft.get_peft_model(model, hf_liere.with_rotations(lora)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(root / "adapter")
    processor = BitImageProcessor(size={"shortest_edge": 28}, crop_size=28, image_mean=[0.1] * 3)
    processor.save_pretrained(root / "adapter")
    Image.fromarray(torch.randint(256, (40, 40, 3), dtype=torch.uint8).numpy()).save(root / "a.png")
    pixels = processor(Image.open(root / "a.png"), return_tensors="pt").pixel_values
    with torch.no_grad():
        logits = model(pixels).logits
    return SimpleNamespace(root=root, pixels=pixels, logits=logits, likeliest=NAMES[int(logits.argmax())])


@pytest.fixture
def moved(made, tmp_path):
    """The adapter, whose base is no longer where it was."""
    for name in ("adapter", "base"):
        shutil.copytree(made.root / name, tmp_path / name)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = "me/dinov2"
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    return tmp_path


def test_it_loads_as_the_model_that_was_trained(made, tmp_path):
    """Also on a base that was a classifier of other classes."""
    AutoClassifier.from_pretrained(made.root / "base", num_labels=7).save_pretrained(tmp_path)
    for base in (None, tmp_path):
        model, processor = load_checkpoint(made.root / "adapter", base=base)
        with torch.no_grad():
            # Merged: other sums.
            torch.testing.assert_close(model(made.pixels).logits, made.logits, rtol=1e-4, atol=1e-5)
        assert hf_liere.is_patched(model) and list(processor.image_mean) == [0.1] * 3
        assert model.config.id2label == dict(enumerate(NAMES))
        assert model.config.problem_type == "multi_label_classification"


@pytest.mark.parametrize("base", [None, "me/other"])
@pytest.mark.parametrize("command", ["predict {} a.png", "inspect {} --output out", "export {} a.onnx"])
def test_commands_ask_for_a_base_that_is_not_there(command, base, made, moved, capsys, monkeypatch):
    monkeypatch.chdir(made.root)
    typed = [*command.format(moved / "adapter").split(), *([] if base is None else ["--base", base])]
    assert main(typed) == 1
    wanted = f"is an adapter of {base or 'me/dinov2'}; accepted: the folder or repository of that model as base"
    assert wanted in capsys.readouterr().err


def test_the_prediction_is_that_of_the_trained_model(made, moved, capsys):
    adapter, picture = str(moved / "adapter"), str(made.root / "a.png")
    assert main(["predict", adapter, picture, "--json", "--base", str(moved / "base")]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    # Several labels at once: sigmoids.
    assert found["answers"][0]["label"] == made.likeliest
    assert found["answers"][0]["score"] == pytest.approx(made.logits.max().sigmoid().item(), abs=1e-4)


@pytest.mark.slow
def test_files_and_reports_have_the_names_of_the_classes(made, moved):
    adapter, picture, base = str(moved / "adapter"), str(made.root / "a.png"), ["--base", str(moved / "base")]
    assert main(["export", adapter, str(moved / "a.onnx"), *base]) == 0
    (metadata,) = onnx.load(moved / "a.onnx").metadata_props
    assert list(json.loads(metadata.value)["id2label"].values()) == NAMES
    assert main(["inspect", adapter, "--output", str(moved / "report"), "--image", picture, *base]) == 0
    assert made.likeliest in (moved / "report" / "report.html").read_text()


def test_merged_models_keep_names_and_processor(made, tmp_path):
    model, processor = load_checkpoint(made.root / "adapter")
    model.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    found = pipeline("image-classification", str(tmp_path))(str(made.root / "a.png"), top_k=1)
    assert found[0]["label"] == made.likeliest
    assert found[0]["score"] == pytest.approx(made.logits.max().sigmoid().item(), abs=1e-4)
    assert AutoImageProcessor.from_pretrained(tmp_path).image_mean == processor.image_mean


def test_weights_that_neither_base_nor_adapter_has_are_refused(moved):
    """Else the classifier would be random."""
    path = moved / "adapter" / "adapter_model.safetensors"
    kept = {name: value for name, value in load_file(path).items() if "classifier" not in name}
    save_file(kept, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"does not fit the model. Missing: classifier.bias, classifier.weight"):
        load_checkpoint(moved / "adapter", base=moved / "base")


def test_rotations_alone_load_on_the_base_that_is_named(tmp_path, made):
    model = hf_liere.patch(Dinov2Model.from_pretrained(made.root / "base"), hf_liere.RotaryPatchConfig("liere"))
    torch.nn.init.normal_(next(iter(hf_liere.rotary_parameters(model)))[1])
    hf_liere.save_rotary(model, tmp_path)
    loaded, _ = load_checkpoint(tmp_path, base=made.root / "base")
    with torch.no_grad():
        assert torch.equal(loaded(made.pixels).pooler_output, model.eval()(made.pixels).pooler_output)


def test_it_is_pushed_verified_and_pulled(made, moved, hub, capsys, monkeypatch):
    monkeypatch.setattr(huggingface_hub.hf_api.api, "endpoint", hub.url)
    adapter = str(moved / "adapter")
    assert main(["push", adapter, "tester/model", "--license", "mit"]) == 0
    card = hub.repo("tester/model").read(hub.files("tester/model")["README.md"]).decode()
    for line in ("base_model: me/dinov2", "library_name: peft", 'load_peft(repository, "me/dinov2"', "`tree 11`"):
        assert line in card, line
    assert "More Information Needed" not in card
    assert main(["verify", adapter, "tester/model"]) == 0
    assert main(["pull", "tester/model", str(moved / "pulled")]) == 0
    assert {path.name for path in (moved / "pulled").iterdir()} >= {path.name for path in (moved / "adapter").iterdir()}
    arguments = ["tester/model", str(made.root / "a.png"), "--base", str(moved / "base")]
    capsys.readouterr()
    assert main(["predict", *arguments]) == 0 and f": {made.likeliest} " in capsys.readouterr().out
    (moved / "adapter" / "rotary.safetensors").write_bytes((moved / "base" / "model.safetensors").read_bytes())
    assert main(["push", adapter, "tester/model"]) == 1
    assert "was not saved with rotary.safetensors" in capsys.readouterr().err
