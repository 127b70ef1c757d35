import pytest
import reference
import torch
from encoding_cases import COMMUTING, ENCODINGS, IMAGE_CASES, LEARNED, fields, perturb
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


@pytest.mark.parametrize("encoding, block_size", [("liere", 5), *IMAGE_CASES])
@pytest.mark.parametrize("batch", [None, 3])
@pytest.mark.parametrize("share_heads", [False, True])
def test_rotate_is_the_block_diagonal_product(tiny, encoding, block_size, batch, share_heads):
    config, rotation = layer_inputs(tiny, encoding, batch, block_size=block_size, share_heads=share_heads)
    states = torch.randn(3, 2, 6, 24)
    matrices = reference.dense(rotation, 24, 2)
    expected = (matrices @ states.double().unsqueeze(-1)).squeeze(-1)
    rotated = rotate(rotation.change_basis(states), rotation)
    if rotation.basis is not None:
        rotated = rotation._replace(basis=rotation.final_basis().transpose(-1, -2)).change_basis(rotated)
    torch.testing.assert_close(rotated.double(), expected, rtol=0, atol=2e-6)


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


@pytest.mark.parametrize("encoding, block_size", [case for case in IMAGE_CASES if case[0] in LEARNED])
def test_rotations_of_values_have_gradients(tiny, encoding, block_size):
    """Along a random direction of all parameters of rotations, against a central difference."""
    config = tiny(position_encoding=encoding, block_size=block_size, rotate_values=True)
    config._attn_implementation = "eager"
    encoding = perturb(build_rotary_encoding(config, 2)).double()
    module, positions = LieREAttention(config).double(), TokenPositions.from_coordinates(torch.rand(6, 2).double())
    states, weight = torch.randn(2, 2, 6, 48).double()
    parameters = list(encoding.parameters())
    start, direction = [p.detach().clone() for p in parameters], [torch.randn_like(p) for p in parameters]

    def loss(step=0.0):
        with torch.no_grad():
            for parameter, value, along in zip(parameters, start, direction):
                parameter.copy_(value + step * along)
        return (module(states, list(encoding(positions))[0])[0] * weight).sum()

    gradients = torch.autograd.grad(loss(), parameters)
    slope = sum((gradient * along).sum() for gradient, along in zip(gradients, direction))
    # Rounding of float64 over the step, and the step squared.
    difference = (loss(1e-5) - loss(-1e-5)) / 2e-5
    torch.testing.assert_close(slope, difference.detach(), rtol=1e-6, atol=1e-6)


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
