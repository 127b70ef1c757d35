import pytest
import reference
import torch
from encoding_cases import COMMUTING, ENCODINGS, IMAGE_CASES, fields, perturb
from rotating import rotate

from hf_liere.encoding.folding import build_rotary_encoding
from hf_liere.encoding.positions import TokenPositions
from hf_liere.transformer.layers import LieREAttention


def layer_inputs(tiny, encoding, batch=None, **overrides):
    config = tiny(position_encoding=encoding, **overrides)
    config._attn_implementation = "eager"
    encoding = build_rotary_encoding(config, 2)
    perturb(encoding)
    positions = torch.rand(*((batch,) if batch else ()), 6, 2)
    return config, encoding(TokenPositions.from_coordinates(positions))[0]


def test_rotate_keeps_the_tail_and_the_type(tiny):
    _, rotation = layer_inputs(tiny, "liere", block_size=5)
    states = torch.randn(3, 2, 6, 24, dtype=torch.bfloat16)
    rotated = rotate(states, rotation)
    assert rotated.dtype == torch.bfloat16 and torch.equal(rotated[..., 20:], states[..., 20:])
    assert not torch.equal(rotated[..., :20], states[..., :20])


@pytest.mark.parametrize("rotate_values", [False, True])
@pytest.mark.parametrize("encoding, block_size", IMAGE_CASES)
def test_attention_matches_the_reference(tiny, encoding, block_size, rotate_values):
    config, rotation = layer_inputs(tiny, encoding, block_size=block_size, rotate_values=rotate_values)
    module = LieREAttention(config)
    states = torch.randn(2, 6, 48)
    expected = reference.attention(states, module, reference.dense(rotation, 24, 2))
    torch.testing.assert_close(module(states, rotation)[0].double(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_attention_under_a_common_shift(tiny, encoding):
    """Outputs, and so the logits between patches, do not see a shift of all positions where generators commute."""
    config = tiny(**fields(encoding))
    config._attn_implementation = "eager"
    rotary, module = perturb(build_rotary_encoding(config, 2)), LieREAttention(config)
    states, positions = torch.randn(2, 6, 48) * 5, torch.rand(6, 2)
    shifted = (
        TokenPositions.from_coordinates(positions),
        TokenPositions.from_coordinates(positions + torch.tensor([0.3, -2.0])),
    )
    weights = [module(states, rotary(p)[0])[1] for p in shifted]
    deviation = (weights[0] - weights[1]).abs().max()
    assert deviation < 1e-5 if encoding in COMMUTING else deviation > 1e-3
