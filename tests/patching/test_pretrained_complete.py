"""Complete models with RoPE and learned rotations: restored with and without the package."""

import pytest
import torch
import transformers
from patching_cases import realign, same_bits
from rope_cases import PLANES, blocks, build, build_patched, outputs

from hf_liere import rotary_parameters
from hf_liere.patching.modeling_patched import RotaryDINOv3ViTConfig, RotaryLlamaConfig


CONFIGS = {"planes": PLANES, "blocks": blocks(), "commuting": blocks("comrope_ld", layers=[0])}


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize(
    "name, config_class, auto_class",
    [
        ("llama", RotaryLlamaConfig, transformers.AutoModelForCausalLM),
        ("dinov3", RotaryDINOv3ViTConfig, transformers.AutoModel),
    ],
)
def test_weights_of_a_plain_checkpoint_start_at_their_rope(name, config_class, auto_class, kind, tmp_path):
    model, inputs = build(name)
    model.save_pretrained(tmp_path)
    config = config_class.from_dict(
        {**model.config.to_dict(), "model_type": config_class.model_type, "rotary_patch": CONFIGS[kind].to_dict()}
    )
    loaded = type(auto_class.from_config(config)).from_pretrained(tmp_path, config=config).eval()
    found, expected = outputs(realign(loaded), inputs), outputs(model, inputs)
    if kind == "planes":
        assert same_bits(found, expected)
    for value, start in zip(found, expected):
        # Blocks start within rounding.
        torch.testing.assert_close(value, start, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["planes", "blocks"])
@pytest.mark.parametrize("name", ["llama", "dinov3", "qwen2_5_vl"])
def test_device_maps(name, kind, tmp_path):
    """On one device, and with all that does not fit into memory on disk."""
    pytest.importorskip("accelerate")
    whole, inputs = build_patched(name, CONFIGS[kind])
    whole.save_pretrained(tmp_path)
    with torch.no_grad():
        expected = outputs(whole, inputs)
        placed = type(whole).from_pretrained(tmp_path, device_map={"": "cpu"})
        close(outputs(placed, inputs), expected)
        offload = {"device_map": "auto", "max_memory": {"cpu": 60_000}, "offload_folder": tmp_path / "offload"}
        offloaded = type(whole).from_pretrained(tmp_path, **offload)
        assert next(value for _, value in rotary_parameters(offloaded)).is_meta
        close(outputs(offloaded, inputs), expected)


def close(found, expected):
    for value, other in zip(found, expected, strict=True):
        # The same products of weights at other addresses, by which some processors round.
        torch.testing.assert_close(value, other, rtol=0, atol=1e-6)


def test_configuration_of_its_own_rotates_by_default():
    assert RotaryLlamaConfig().rotary_patch["rotary_init"] == "pretrained"
