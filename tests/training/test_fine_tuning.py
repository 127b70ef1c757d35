"""image_classification.py on pretrained models of transformers: what learns, what is saved, and what is refused."""

import json

import pytest
import torch
import transformers
from patching_cases import IMAGE
from PIL import Image
from training_helpers import TINY_RUN, main, write_dinov2, write_images_folder

from hf_liere import is_patched
from hf_liere.auto import load_checkpoint
from training.common.arguments import InputError


SHORT = [*TINY_RUN, "--max_steps", "3", "--do_train", "--do_eval"]
RESNET = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 8, 8, 8], depths=[1, 1, 1, 1])
ROTATIONS = ["--position_encoding", "comrope_ld", "--block_size", "8"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Pretrained models, and pictures of cats and dogs."""
    folder = tmp_path_factory.mktemp("pretrained")
    write_dinov2(folder / "dinov2")
    transformers.ViTModel(transformers.ViTConfig(**IMAGE)).save_pretrained(folder / "vit")
    transformers.ResNetModel(RESNET).save_pretrained(folder / "resnet")
    write_images_folder(folder / "images", {"train": 12, "validation": 6})
    return folder


def tune(folder, model, output, *flags):
    data = ["--image_folder", str(folder / "images"), "--model_name_or_path", str(folder / model)]
    return main([*SHORT, *data, "--output_dir", str(output), *flags])


def correct(model, output, folder):
    """How many pictures of the validation a saved model names right, prepared by the saved processor."""
    processor = transformers.AutoImageProcessor.from_pretrained(output)
    right = 0
    for path in sorted((folder / "images" / "validation").glob("*/*.png")):
        with torch.no_grad():
            logits = model.eval()(**processor(Image.open(path), return_tensors="pt")).logits
        right += model.config.id2label[int(logits.argmax())] == path.parent.name
    return right


@pytest.mark.parametrize(
    "model, flags",
    [
        pytest.param("dinov2", ["--image_size", "42"], marks=pytest.mark.slow),
        pytest.param("dinov2", [*ROTATIONS, "--image_size", "42"], marks=pytest.mark.slow),
        ("dinov2", [*ROTATIONS, "--trainable", "rotary+head", "--image_size", "28"]),
        pytest.param("vit", [*ROTATIONS, "--image_size", "24"], marks=pytest.mark.slow),
        pytest.param("vit", [], marks=pytest.mark.slow),
        ("resnet", ["--image_size", "32"]),
    ],
)
def test_a_tuned_model_loads_with_its_classes(folder, tmp_path, model, flags):
    metrics = tune(folder, model, tmp_path, *flags)
    tuned = transformers.AutoModelForImageClassification.from_pretrained(tmp_path)
    assert is_patched(tuned) == ("--position_encoding" in flags) and [*tuned.config.id2label.values()] == ["cat", "dog"]
    assert correct(tuned, tmp_path, folder) == round(6 * metrics["eval_accuracy"])
    before = transformers.AutoModel.from_pretrained(folder / model).state_dict()
    after = {name.partition(".")[2]: value for name, value in tuned.state_dict().items()}
    weights = [name for name, value in before.items() if name in after and value.is_floating_point()]
    assert any(not torch.equal(before[name], after[name]) for name in weights) == ("rotary+head" not in flags)
    record = json.loads((tmp_path / "run_config.json").read_text())
    assert record["model_name_or_path"] == model and record["tuning"]["lora_rank"] == 8
    # Evaluated again, as any checkpoint.
    again = [*TINY_RUN, "--do_eval", "--image_folder", str(folder / "images"), "--output_dir", str(tmp_path / "again")]
    size = flags[-2:] if "--image_size" in flags else []
    found = main([*again, "--model_name_or_path", str(tmp_path), *size])
    assert found["eval_loss"] == pytest.approx(metrics["eval_loss"], abs=1e-5)


@pytest.mark.parametrize(
    "rotations",
    [pytest.param([], id="lora", marks=pytest.mark.slow), pytest.param(ROTATIONS, id="lora and rotations")],
)
def test_lora_is_an_adapter_that_commands_load(folder, tmp_path, rotations):
    flags = ["--trainable", "lora+rotary", "--lora_rank", "2", "--image_size", "28", *rotations]
    metrics = tune(folder, "dinov2", tmp_path, *flags)
    tuned, processor = load_checkpoint(tmp_path / "lora")
    assert is_patched(tuned) == bool(rotations) and [*tuned.config.id2label.values()] == ["cat", "dog"]
    assert processor.size == {"height": 28, "width": 28}
    assert correct(tuned, tmp_path / "lora", folder) == round(6 * metrics["eval_accuracy"])
    # LoRA is in attention; the other weights of the tower are those of the base.
    base = transformers.AutoModel.from_pretrained(folder / "dinov2").state_dict()
    changed = [
        name for name, value in tuned.dinov2.state_dict().items() if not torch.equal(value, base.get(name, value))
    ]
    assert changed and all("attention" in name for name in changed)


@pytest.mark.parametrize(
    "model, flags, message",
    [
        (
            "dinov2",
            ["--hidden_size", "48"],
            "--hidden_size 48: a pretrained dinov2 keeps its architecture; accepted: ",
        ),
        ("dinov2", ["--block_size", "8"], "--block_size 8: a pretrained dinov2 keeps its architecture"),
        (
            "dinov2",
            ["--trainable", "rotary", "--image_size", "28"],
            "accepted if no classifier is trained: the sa",
        ),
        ("dinov2", ["--position_encoding", "absolute"], "absolute"),
        ("dinov2", ["--upgrade_encoding"], "--upgrade_encoding: the checkpoint is a dinov2, not a model of hf_liere"),
        ("dinov2", ["--push_to_hub", "--hub_model_id", "me/it"], "--push_to_hub: the checkpoint is a dinov2"),
        ("dinov2", ["--image_size", "30"], "--image_size 30×30 is not divisible by the patch size 14×14"),
        (
            "vit",
            ["--image_size", "24"],
            "--image_size 24×24: a vit without rotations takes its own size where it is",
        ),
        ("resnet", ["--trainable", "lora+rotary", "--image_size", "32"], "has 0 towers of patches with attention"),
        ("resnet", [*ROTATIONS, "--image_size", "32"], "ResNet"),
        (None, ["--trainable", "rotary"], "--trainable rotary: accepted with a pretrained model of another library"),
    ],
)
def test_what_a_model_does_not_take_is_refused(folder, tmp_path, model, flags, message):
    with pytest.raises(InputError, match=message):
        if model is None:
            main([*SHORT, "--image_folder", str(folder / "images"), "--output_dir", str(tmp_path), *flags])
        else:
            tune(folder, model, tmp_path, *flags)
    assert not (tmp_path / "model.safetensors").exists()
