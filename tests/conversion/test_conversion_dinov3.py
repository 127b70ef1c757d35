"""Conversion of transformers' DINOv3 ViT, and what upgrades make of it: the original's outputs at any size."""

import json

import conversion_cases
import pytest
import torch
import transformers
from conversion_cases import converts, images, randomize, without
from safetensors.torch import load_file
from transformers import AutoModel, DINOv3ViTConfig, DINOv3ViTModel

from hf_liere import upgrade_encoding
from hf_liere.cli import main
from hf_liere.conversion.base import ConversionError
from hf_liere.conversion.checkpoints import convert_state_dict
from hf_liere.conversion.reading import read_checkpoint
from hf_liere.convert import convert_checkpoint


# Two layers in float32 on normalised tokens, of the order of one; DINOv3 rounds its angles, of up to 2π, to float32.
EXACT = {"rtol": 0, "atol": 1e-5}
SIZES = ((16, 16), (24, 20), (8, 40))
FIELDS = {**conversion_cases.FIELDS, "num_register_tokens": 3, "layerscale_value": 0.1}
HEADS = {"num_attention_heads": 2}
KINDS = {
    "small": {},
    "gated": {"use_gated_mlp": True, "hidden_act": "silu", "num_register_tokens": 1},
    "without_biases": dict.fromkeys(("query_bias", "value_bias", "proj_bias", "mlp_bias"), False),
    "with_key_bias": {"key_bias": True, "num_register_tokens": 0, "rope_theta": 10.0, "layer_norm_eps": 1e-3},
    "rectangles": {"image_size": [16, 24], "patch_size": [8, 4], "num_attention_heads": 4},
}


def dinov3(kind="small", **fields):
    return randomize(DINOv3ViTModel(DINOv3ViTConfig(**(FIELDS | KINDS[kind] | fields))))


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_outputs_are_those_of_transformers(kind, tmp_path):
    """From the files that transformers writes, with what its config.json states."""
    if kind == "rectangles":
        # Before it, DINOv3 is built for squares alone.
        pytest.importorskip("transformers", "5.18")
    official = dinov3(kind)
    official.save_pretrained(tmp_path)
    tensors, source_config = read_checkpoint(tmp_path)
    conversion = convert_state_dict(tensors, None, source_config)
    assert conversion.source == "dinov3" and conversion.ignored == ["embeddings.mask_token"]
    assert conversion.config.position_encoding == "axial_rope"
    model = conversion.model()
    assert sum(parameter.numel() for name, parameter in model.named_parameters() if "rotary_encoding" in name) == 0
    for size in SIZES:
        pixels = images(2, 3, *size)
        expected, outputs = official(pixels), model(pixels)
        assert outputs.last_hidden_state.std() > 0.5
        torch.testing.assert_close(outputs.last_hidden_state, expected.last_hidden_state, **EXACT)
        torch.testing.assert_close(outputs.pooler_output, expected.pooler_output, **EXACT)


@torch.no_grad()
def test_rotations_matter_in_these_tests():
    official = dinov3()
    before = official(images(2, 3, 24, 20)).last_hidden_state
    official.rope_embeddings.inv_freq.zero_()
    assert (official(images(2, 3, 24, 20)).last_hidden_state - before).abs().max() > 0.1


@torch.no_grad()
def test_names_in_memory_differ_from_those_in_files():
    official = dinov3()
    assert any(name.startswith("model.layer.") for name in official.state_dict())
    model = convert_state_dict(official.state_dict(), image_size=16, **HEADS).model()
    pixels = images(2, 3, 16, 16)
    torch.testing.assert_close(model(pixels).last_hidden_state, official(pixels).last_hidden_state, **EXACT)


UPGRADES = [("rope_mixed", None), ("liere", 8), ("liere", 16), ("comrope_ap", 4), ("comrope_ld", 2), ("comrope_ld", 8)]


@pytest.mark.parametrize("encoding, block_size", UPGRADES)
@torch.no_grad()
def test_upgrades_keep_the_outputs_and_have_something_to_learn(encoding, block_size):
    official = dinov3("gated")
    model = convert_state_dict(official.state_dict(), image_size=16, hidden_act="silu", **HEADS).model()
    upgraded = upgrade_encoding(model, position_encoding=encoding, block_size=block_size)
    assert upgraded.config.position_encoding == encoding and upgraded.config.use_gated_mlp
    for size in SIZES:
        pixels = images(2, 3, *size)
        torch.testing.assert_close(upgraded(pixels).last_hidden_state, official(pixels).last_hidden_state, **EXACT)
    pixels = images(1, 3, 24, 20)
    with torch.enable_grad():
        upgraded(pixels).last_hidden_state.square().sum().backward()
    assert all(parameter.grad.any() for _, parameter in upgraded.rotary_parameters())


def test_a_block_of_two_axes_is_no_block_of_comrope():
    """Heads of 32 channels have 16 for each axis."""
    model = convert_state_dict(dinov3().state_dict(), image_size=16, **HEADS).model()
    with pytest.raises(ConversionError, match="8 planes of a head rotate with one ratio of the axes"):
        upgrade_encoding(model, position_encoding="comrope_ld", block_size=32)


def test_augmentation_of_coordinates_is_taken_over(tmp_path):
    """DINOv3's default is a rescaling by up to 2."""
    augmented = dinov3(pos_embed_shift=0.25, pos_embed_jitter=1.5)
    augmented.save_pretrained(tmp_path)
    tensors, source_config = read_checkpoint(tmp_path)
    config = convert_state_dict(tensors, None, source_config).config
    assert (config.position_shift, config.position_jitter, config.position_rescale) == (0.25, 1.5, 2.0)
    model = convert_state_dict(tensors, None, source_config).model()
    pixels = images(1, 3, 16, 16)
    assert not torch.equal(model.train()(pixels).pooler_output, model.eval()(pixels).pooler_output)
    config = convert_state_dict(tensors, None, source_config | {"pos_embed_rescale": None}, position_shift=0.0).config
    assert (config.position_shift, config.position_jitter, config.position_rescale) == (0.0, 1.5, None)
    with pytest.raises(ConversionError, match="position_rescale=0.5 must be at least 1"):
        convert_state_dict(tensors, None, source_config, position_rescale=0.5)


@torch.no_grad()
def test_the_command_writes_a_model_with_processor_and_card(tmp_path, monkeypatch, capsys):
    official = dinov3()
    official.save_pretrained(tmp_path / "dinov3")
    # What DINOv3's processor writes; its class needs torchvision.
    processor = {"image_processor_type": "DINOv3ViTImageProcessor", "image_mean": [0.485, 0.456, 0.406], "resample": 2}
    (tmp_path / "dinov3" / "preprocessor_config.json").write_text(json.dumps(processor))
    monkeypatch.chdir(tmp_path)
    main(["convert", "dinov3", "converted"])
    model, pixels = AutoModel.from_pretrained("converted").eval(), images(2, 3, 24, 20)
    torch.testing.assert_close(model(pixels).last_hidden_state, official(pixels).last_hidden_state, **EXACT)
    written = transformers.AutoImageProcessor.from_pretrained("converted")
    assert list(written.image_mean) == [0.485, 0.456, 0.406] and written.resample == 2
    assert dict(written.size) == {"height": 16, "width": 16}
    card = (tmp_path / "converted" / "README.md").read_text(encoding="utf-8")
    assert "`dinov3`" in card and "LieREViTModel" in card and "`embeddings.mask_token`" in card


def test_no_tensor_may_be_missing_or_of_another_shape():
    weights = dinov3("gated", key_bias=True).state_dict()
    needed = [name for name in weights if name != "embeddings.mask_token"]
    assert [name for name in needed if converts(without(weights, name), HEADS)] == []
    accepted = []
    for name in needed:
        for axis in range(weights[name].ndim):
            # Channels and extents of a patch are what the kernel says, the number of register tokens their tensor.
            if (weights[name].ndim == 4 and axis > 0) or (name.endswith("register_tokens") and axis == 1):
                continue
            changed = torch.cat([weights[name], weights[name].narrow(axis, 0, 1)], dim=axis)
            if converts(weights | {name: changed}, HEADS):
                accepted.append((name, axis))
    assert accepted == []


@pytest.mark.parametrize(
    "options, message",
    [
        ({"num_attention_heads": 3}, "width of 64 is not divisible into 3 heads"),
        ({"num_attention_heads": 32}, "Heads of 2 channels are not divisible into planes of 2 axes"),
        ({"rope_theta": 0.0}, "rope_theta=0.0 must be positive and finite"),
        ({"rope_theta": "hundred"}, "rope_theta='hundred': accepted is a number"),
        ({"image_size": 18, **HEADS}, "not divisible into patches"),
        ({"position_encoding": "axial"}, "Unknown options position_encoding for a source of kind 'dinov3'"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_reason(options, message):
    with pytest.raises(ConversionError, match=message):
        convert_state_dict(dinov3().state_dict(), **options)


def test_dinov2_is_not_taken_for_dinov3(tmp_path):
    config = transformers.Dinov2Config(hidden_size=64, num_hidden_layers=1, num_attention_heads=2, image_size=28)
    transformers.Dinov2Model(config).save_pretrained(tmp_path / "dinov2")
    with pytest.raises(ConversionError):
        convert_checkpoint(tmp_path / "dinov2", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@torch.no_grad()
def test_released_files_in_bfloat16_are_read(tmp_path):
    dinov3().to(torch.bfloat16).save_pretrained(tmp_path)
    assert {value.dtype for value in load_file(tmp_path / "model.safetensors").values()} == {torch.bfloat16}
    tensors, source_config = read_checkpoint(tmp_path)
    model = convert_state_dict(tensors, None, source_config).model()
    pixels = images(1, 3, 24, 20)
    expected = DINOv3ViTModel.from_pretrained(tmp_path, dtype=torch.float32).eval()(pixels).last_hidden_state
    torch.testing.assert_close(model(pixels).last_hidden_state, expected, **EXACT)
