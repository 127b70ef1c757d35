"""Our models with the weights of timm's ViTs, and of transformers' DINOv3 at any size: the same outputs."""

import math

import pytest
import timm
import torch
from conversion_cases import FIELDS, images, randomize
from renamed_weights import dinov3_weights, timm_weights
from transformers import DINOv3ViTConfig, DINOv3ViTModel

from hf_liere import LieREViTConfig, LieREViTForImageClassification, LieREViTModel, upgrade_encoding
from hf_liere.upgrades import ConversionError


# Two layers in float32 on values of the order of one; DINOv3 rounds its angles, of up to 2π, to float32.
EXACT = {"rtol": 0, "atol": 1e-5}
TOLERANCE = {"rtol": 1e-4, "atol": 2e-5}
SIZES = ((16, 16), (24, 20), (8, 40))

SMALL = {"img_size": 16, "patch_size": 4, "embed_dim": 64, "depth": 2, "num_heads": 2, "mlp_ratio": 0.75}
TIMM = {
    "table": ("vit_small_patch16_224", {}, {}),
    "registers": ("vit_small_patch16_224", {"reg_tokens": 2, "init_values": 0.1}, {"num_register_tokens": 2}),
    "norm_of_embeddings": ("vit_base_patch16_clip_224", {}, {"use_pre_layernorm": True, "layer_norm_eps": 1e-5}),
    "mean": ("vit_small_patch16_224", {"global_pool": "avg"}, {"pooling": "mean", "final_norm": "pooled"}),
}


@pytest.mark.parametrize("kind", TIMM)
@torch.no_grad()
def test_logits_are_those_of_timm(kind):
    name, options, fields = TIMM[kind]
    theirs = randomize(timm.create_model(name, num_classes=5, **SMALL, **options))
    fields = {"layerscale_value": options.get("init_values"), "layer_norm_eps": 1e-6, "num_labels": 5, **fields}
    config = LieREViTConfig(**FIELDS, position_encoding="absolute", **fields)
    ours = LieREViTForImageClassification(config).eval()
    ours.load_state_dict(timm_weights(theirs))
    # At other sizes timm resizes the table with antialiasing.
    pixels = images(2, 3, 16, 16)
    expected = theirs(pixels)
    assert expected.abs().max() > 0.1
    torch.testing.assert_close(ours(pixels).logits, expected, **TOLERANCE)


DINOV3 = {
    "small": {},
    "silu": {"hidden_act": "silu", "num_register_tokens": 1},
    "without_biases": dict.fromkeys(("query_bias", "value_bias", "proj_bias", "mlp_bias"), False),
    "with_key_bias": {"key_bias": True, "num_register_tokens": 0, "rope_theta": 10.0, "layer_norm_eps": 1e-3},
    "rectangles": {"image_size": [16, 24], "patch_size": [8, 4], "num_attention_heads": 4},
}


def dinov3(kind):
    """
    DINOv3 and our model. DINOv3 rotates plane i of an axis by 2π θ^(−i/q) at x = 2u − 1, where u is the `unit`
    coordinate of a patch, and no class and register tokens. Scores depend on differences alone, so this is Axial RoPE
    with 4π θ^(−i/q) at u, and with these tokens at u = ½, where x is zero.
    """
    fields = {**FIELDS, "num_register_tokens": 3, "layerscale_value": 0.1, "layer_norm_eps": 1e-5, **DINOV3[kind]}
    fields.setdefault("rope_theta", 100.0)
    theirs = randomize(DINOv3ViTModel(DINOv3ViTConfig(**fields)))
    shared = {name: value for name, value in fields.items() if not name.endswith("_bias")}
    rotations = {"position_encoding": "axial_rope", "rotary_init_scale": 4 * math.pi, "coordinates": "unit"}
    config = LieREViTConfig(**{"hidden_act": "gelu", **shared}, **rotations, rotate_prefix=True, prefix_coordinate=0.5)
    ours = LieREViTModel(config).eval()
    ours.load_state_dict(dinov3_weights(theirs))
    return theirs, ours


@pytest.mark.parametrize("kind", DINOV3)
@torch.no_grad()
def test_outputs_are_those_of_dinov3(kind):
    if kind == "rectangles":
        # Before it, DINOv3 is built for squares alone.
        pytest.importorskip("transformers", "5.18")
    theirs, ours = dinov3(kind)
    for size in SIZES:
        pixels = images(2, 3, *size)
        expected, outputs = theirs(pixels), ours(pixels)
        assert outputs.last_hidden_state.std() > 0.5
        torch.testing.assert_close(outputs.last_hidden_state, expected.last_hidden_state, **EXACT)
        torch.testing.assert_close(outputs.pooler_output, expected.pooler_output, **EXACT)
    theirs.rope_embeddings.inv_freq.zero_()
    assert (theirs(pixels).last_hidden_state - expected.last_hidden_state).abs().max() > 0.1


UPGRADES = [("rope_mixed", None), ("liere", 8), ("liere", 16), ("comrope_ap", 4), ("comrope_ld", 2), ("comrope_ld", 8)]


@pytest.mark.parametrize("encoding, block_size", UPGRADES)
@torch.no_grad()
def test_upgrades_keep_the_outputs_and_have_something_to_learn(encoding, block_size):
    theirs, ours = dinov3("silu")
    upgraded = upgrade_encoding(ours, position_encoding=encoding, block_size=block_size)
    assert upgraded.config.position_encoding == encoding
    for size in SIZES:
        pixels = images(2, 3, *size)
        torch.testing.assert_close(upgraded(pixels).last_hidden_state, theirs(pixels).last_hidden_state, **EXACT)
    pixels = images(1, 3, 24, 20)
    with torch.enable_grad():
        upgraded(pixels).last_hidden_state.square().sum().backward()
    assert all(parameter.grad.any() for _, parameter in upgraded.rotary_parameters())


def test_a_block_of_two_axes_is_no_block_of_comrope():
    """Heads of 32 channels have 16 for each axis."""
    with pytest.raises(ConversionError, match="8 planes of a head rotate with one ratio of the axes"):
        upgrade_encoding(dinov3("small")[1], position_encoding="comrope_ld", block_size=32)
