"""The trained models that the repository has for snippets, notebooks and the page, against what their cards state."""

import json
import math
import re

import datasets
import pytest
import torch
from checkout import ROOT
from huggingface_hub import ModelCard
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoImageProcessor, AutoModelForImageClassification

import hf_liere
from hf_liere.storage.saved_model import SavedModel
from hf_liere.tools.hub.staging import stage
from training.data.arrows import LABELS, Arrows


CHECKPOINTS = ROOT / "training" / "checkpoints"
STORED = CHECKPOINTS / "arrows_liere8"
# The images of the evaluation, not part of the repository.
CIFAR100 = ROOT.parent / "shared" / "data" / "cifar100" / "test-00000-of-00001.parquet"


@pytest.fixture(scope="module")
def card():
    return ModelCard.load(STORED / "README.md")


def figure(card, size):
    """Accuracy in the card at an image size, and with how many images it was measured."""
    (found,) = (
        result
        for result in card.data.eval_results
        if result.metric_type == "accuracy" and result.metric_args["image_size"] == [size, size]
    )
    return found.metric_value, found.metric_args["samples"]


def accuracy(images):
    """By transformers alone; the processor's constants, without its resizing to the trained size."""
    model = AutoModelForImageClassification.from_pretrained(STORED).eval()
    processor = AutoImageProcessor.from_pretrained(STORED, do_resize=False)
    names, right = model.config.id2label, 0
    for start in range(0, len(images), 100):
        pixels, labels = zip(*(images[index] for index in range(start, min(start + 100, len(images)))))
        pictures = [Image.fromarray(array.squeeze(-1)).convert("RGB") for array in pixels]
        with torch.no_grad():
            answers = model(**processor(pictures, return_tensors="pt")).logits.argmax(1).tolist()
        right += sum(names[answer] == LABELS[label] for answer, label in zip(answers, labels))
    return right / len(images)


@pytest.mark.parametrize(
    "folder", sorted(path.parent for path in CHECKPOINTS.glob("*/config.json")), ids=lambda path: path.name
)
def test_it_is_small_whole_and_the_one_that_was_measured(folder):
    """Its code is the package's, and does not lie beside it."""
    card = ModelCard.load(folder / "README.md")
    files = {path.name: path.stat().st_size for path in folder.iterdir()}
    assert sum(files.values()) < 4_000_000 and not [name for name in files if name.endswith(".py")]
    assert "auto_map" not in json.loads((folder / "config.json").read_text())
    model = AutoModelForImageClassification.from_pretrained(folder)
    assert isinstance(model, hf_liere.LieREViTForImageClassification)
    digest = SavedModel(folder).digest
    assert json.loads((folder / "weights.json").read_text())["sha256"] == digest
    assert f"Weights: SHA-256 `{digest}`" in card.text
    assert f"| parameters | {sum(parameter.numel() for parameter in model.parameters()):,} |" in card.text


def test_what_is_published_of_it_has_the_code(tmp_path):
    stage(SavedModel(STORED), tmp_path / "staged")
    config = json.loads((tmp_path / "staged" / "config.json").read_text())
    assert config["auto_map"]["AutoModelForImageClassification"] == "modeling_liere.LieREViTForImageClassification"
    assert (tmp_path / "staged" / "modeling_liere.py").is_file()


def test_its_accuracy_is_that_of_its_card(card):
    """On the images that were evaluated. Kernels that round otherwise may decide an even image or two."""
    stated, samples = figure(card, 108)
    assert json.loads((STORED / "eval_results.json").read_text())["eval_accuracy"] == stated
    assert accuracy(Arrows("validation", samples)) == pytest.approx(stated, abs=2 / samples)


@pytest.mark.parametrize("size, images", [(108, 1000), (168, 500)])
def test_its_accuracy_on_new_puzzles(card, size, images):
    """On a split that nothing was measured with: within three standard errors of the difference."""
    stated, samples = figure(card, size)
    error = math.sqrt(stated * (1 - stated) * (1 / samples + 1 / images))
    assert accuracy(Arrows("test", images, size)) == pytest.approx(stated, abs=3 * error)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cifar100_liere8", "cifar100_comrope_ld"])
def test_the_accuracy_on_cifar100_is_that_of_the_card(name):
    """On all images of the evaluation. Kernels that round otherwise may decide an even image or two."""
    if not CIFAR100.is_file():
        pytest.skip(f"{CIFAR100} does not exist")
    folder = CHECKPOINTS / name
    rows = datasets.Dataset.from_parquet(str(CIFAR100))
    model = AutoModelForImageClassification.from_pretrained(folder).eval()
    processor = AutoImageProcessor.from_pretrained(folder)
    # The generators are not rounded, and models load in the type that their configuration names.
    saved = load_file(folder / "model.safetensors")
    assert {value.dtype for value in saved.values()} == {torch.float16, torch.float32} and model.dtype == torch.float32
    assert saved["liere.rotary_encoding.generators"].dtype == torch.float32
    assert [model.config.id2label[number] for number in range(100)] == rows.features["label"].names
    found = torch.zeros(2, dtype=torch.int64)
    for batch in rows.iter(250):
        with torch.no_grad():
            answers = model(**processor(batch["image"], return_tensors="pt")).logits.topk(5).indices
        right = answers == torch.tensor(batch["label"])[:, None]
        found += torch.stack([right[:, 0].sum(), right.sum()])
    card = ModelCard.load(folder / "README.md")
    for name, count in zip(("top-1 accuracy at 32 × 32 px", "top-5 accuracy at 32 × 32 px"), found.tolist()):
        (stated,) = (each for each in card.data.eval_results if each.metric_name == name)
        assert stated.metric_args["samples"] == len(rows) == 10_000
        assert count / len(rows) == pytest.approx(stated.metric_value, abs=2 / len(rows))


def test_the_code_of_its_card_runs(card, tmp_path, monkeypatch, capsys):
    (tmp_path / "training").symlink_to(ROOT / "training")
    monkeypatch.chdir(tmp_path)
    pixels, label = Arrows("test", 1)[0]
    Image.fromarray(pixels.squeeze(-1)).save("picture.png")
    (code,) = re.findall(r"```python\n(.*?)```", card.text, re.DOTALL)
    exec(compile(code, "README.md", "exec"), {})
    first, *_ = capsys.readouterr().out.splitlines()
    name, probability = first.split(": ")
    assert name == LABELS[label] and float(probability.rstrip("%")) > 50
