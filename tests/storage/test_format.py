"""
Checkpoints of earlier releases keep loading, those of later ones are refused.

`python tests/storage/test_format.py tests/checkpoints/format_1` wrote tests/checkpoints/format_1 once. It is never
written again: a new format gets another folder beside it.
"""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModel,
    AutoModelForImageClassification,
    AutoModelForVideoClassification,
    ViTConfig,
    ViTModel,
)

import hf_liere


FORMATS = sorted((Path(__file__).parents[1] / "checkpoints").glob("format_*"))
SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16, "patch_size": 4}
LOADERS = {
    "liere": AutoModelForImageClassification,
    "comrope_ld": AutoModelForVideoClassification,
    "rope_mixed": AutoModelForImageClassification,
    "rotary_vit": AutoModel,
}


def build() -> dict:
    image = {**SMALL, "image_size": 8, "num_labels": 2}
    models = {
        "liere": hf_liere.LieREViTForImageClassification(hf_liere.LieREViTConfig(**image, num_register_tokens=1)),
        "comrope_ld": hf_liere.LieREVideoForVideoClassification(
            hf_liere.LieREVideoConfig(**image, num_frames=4, position_encoding="comrope_ld", block_size=4)
        ),
        "rope_mixed": hf_liere.LieREViTForImageClassification(
            hf_liere.LieREViTConfig(
                **image, position_encoding="rope_mixed", share_heads=True, use_absolute_position_embeddings=True
            )
        ),
    }
    patched = hf_liere.patch(
        ViTModel(ViTConfig(**SMALL, image_size=8)),
        hf_liere.RotaryPatchConfig(position_encoding="liere", block_size=4, rotary_init="uniform"),
    )
    models["rotary_vit"] = hf_liere.complete_model(patched)
    return models


@torch.no_grad()
def output(model, pixels: torch.Tensor) -> torch.Tensor:
    values = model.eval()(pixel_values=pixels)
    return values.logits if "logits" in values else values.last_hidden_state


def write(folder: Path) -> None:
    torch.manual_seed(0)
    for name, model in build().items():
        model.save_pretrained(folder / name)
        # The code of the checkpoint is another matter: here the package's own is tested.
        for code in (folder / name).glob("*.py"):
            code.unlink()
        pixels = torch.randn(2, 4, 3, 8, 8) if "Video" in type(model).__name__ else torch.randn(2, 3, 12, 8)
        save_file({"pixels": pixels, "output": output(model, pixels)}, folder / name / "expected.safetensors")
        if name == "rotary_vit":
            hf_liere.save_rotary(model, folder / name / "adapter")


@pytest.mark.parametrize("folder", [folder / name for folder in FORMATS for name in LOADERS], ids=str)
def test_a_stored_checkpoint_gives_the_outputs_it_gave(folder):
    expected = load_file(folder / "expected.safetensors")
    model, info = LOADERS[folder.name].from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    # Another machine sums float32 in another order.
    torch.testing.assert_close(output(model, expected["pixels"]), expected["output"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("folder", FORMATS, ids=str)
def test_a_stored_adapter_fits_its_base(folder):
    expected = load_file(folder / "rotary_vit" / "expected.safetensors")
    complete = AutoModel.from_pretrained(folder / "rotary_vit")
    base = ViTModel(ViTConfig(**SMALL, image_size=8))
    base.load_state_dict(hf_liere.unpatch(complete).state_dict())
    model = hf_liere.load_rotary(base, folder / "rotary_vit" / "adapter")
    torch.testing.assert_close(output(model, expected["pixels"]), expected["output"], rtol=1e-4, atol=1e-5)


def test_the_present_format_is_stored():
    """Whoever changes FORMAT_VERSION stores a checkpoint of the new format."""
    stored = {json.loads((folder / "liere" / "config.json").read_text())["format_version"] for folder in FORMATS}
    assert hf_liere.LieREViTConfig().format_version in stored
    assert hf_liere.RotaryPatchConfig().format_version in {
        json.loads((folder / "rotary_vit" / "config.json").read_text())["rotary_patch"]["format_version"]
        for folder in FORMATS
    }


@pytest.mark.parametrize("name", LOADERS)
def test_a_checkpoint_of_the_future_is_refused(name, tmp_path):
    shutil.copytree(FORMATS[-1] / name, tmp_path / name)
    path = tmp_path / name / "config.json"
    config = json.loads(path.read_text())
    config.get("rotary_patch", config)["format_version"] = 99
    path.write_text(json.dumps(config))
    with pytest.raises(Exception, match="format_version=99 was written by a newer hf_liere.*upgrade hf_liere"):
        LOADERS[name].from_pretrained(tmp_path / name)


def test_an_adapter_of_the_future_is_refused(tmp_path):
    shutil.copytree(FORMATS[-1] / "rotary_vit" / "adapter", tmp_path / "adapter")
    path = tmp_path / "adapter" / "rotary_config.json"
    content = json.loads(path.read_text())
    content["rotary_patch"]["format_version"] = 99
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="format_version=99 was written by a newer hf_liere"):
        hf_liere.load_rotary(ViTModel(ViTConfig(**SMALL, image_size=8)), tmp_path / "adapter")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
