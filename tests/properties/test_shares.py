"""A head that several encodings share is rotated by each as a layer of its own rotates its channels, to the bit."""

import contextlib
import copy
import random

import pytest
import torch
from plain_models import draw_shares
from slow_cases import slow_except
from torch import nn

from hf_liere import LieRotaryEmbedding
from hf_liere.encoding.kinds import generators_commute, needs_exponential
from hf_liere.encoding.rotary_fields import share_configs


HEADS, KEY_HEADS, HEAD_DIM, LAYERS = 4, 2, 24, 2
DRAWS = slow_except(range(0, 200, 4), [(number,) for number in range(200)])


class Slices(nn.Module):
    """A layer for each share, on its slice of the channels and its columns of the positions."""

    def __init__(self, rotary, shares):
        super().__init__()
        self.shares = share_configs(rotary.config)
        sizes = {"num_key_value_heads": KEY_HEADS, "num_layers": LAYERS}
        fields = [
            {name: value for name, value in given.items() if name not in ("share", "axes")} for _, given in shares
        ]
        self.layers = nn.ModuleList(
            LieRotaryEmbedding(HEADS, part.head_dim, len(axes), name, **sizes, **own)
            for (name, _), (part, axes), own in zip(shares, self.shares, fields)
        )
        for layer, part in zip(self.layers, rotary.encoding.parts):
            layer.encoding.load_state_dict(part.state_dict())

    def forward(self, query, key, positions, layer):
        rotated, first = [], 0
        for rotary, (part, axes) in zip(self.layers, self.shares):
            channels = slice(first, first := first + part.head_dim)
            rotated.append(rotary(query[..., channels], key[..., channels], positions[..., axes], layer=layer))
        rest = query[..., first:], key[..., first:]
        return tuple(torch.cat(parts, dim=-1) for parts in zip(*rotated, rest))


def draw(number):
    """A layer with shares, the layers of its slices, states and positions of three axes."""
    rng, rotary = random.Random(number), None
    torch.manual_seed(number)
    while rotary is None:
        shares = draw_shares(rng, 3)
        with contextlib.suppress(ValueError):
            rotary = LieRotaryEmbedding(HEADS, HEAD_DIM, 3, shares, num_key_value_heads=KEY_HEADS, num_layers=LAYERS)
    states = torch.randn(2, HEADS, 5, HEAD_DIM), torch.randn(2, KEY_HEADS, 5, HEAD_DIM), torch.rand(2, 5, 3)
    return rotary, Slices(rotary, shares), states


def test_shares_without_a_number_divide_the_rest():
    shares = [("rope_mixed", {"share": 0.5}), ("liere", {"block_size": 4}), ("comrope_ld", {"block_size": 2})]
    assert LieRotaryEmbedding(2, 32, 3, shares).encoding.widths == [16, 8, 8]


@pytest.mark.parametrize("number", DRAWS)
def test_shares_are_layers_of_slices(number):
    rotary, slices, states = draw(number)
    given = [states, tuple(x.clone() for x in states)]
    for module, tensors in zip((rotary, slices), given):
        rotated = module(*(x.requires_grad_() for x in tensors), layer=1)
        sum(x.square().sum() * factor + x.sum() for x, factor in zip(rotated, (1, 0.3))).backward()
        module.rotated = rotated
    found, expected = ([*module.rotated, *(x.grad for x in x)] for module, x in zip((rotary, slices), given))
    found += [x.grad for x in rotary.parameters()]
    expected += [x.grad for x in slices.parameters()]
    for ours, alone in zip(found, expected, strict=True):
        assert (ours is None) == (alone is None) and (ours is None or torch.equal(ours, alone))
    sizes = {"num_key_value_heads": KEY_HEADS, "num_layers": LAYERS}
    restored = LieRotaryEmbedding(HEADS, HEAD_DIM, 3, rotary.config.shares, **sizes)
    restored.load_state_dict(rotary.state_dict())
    assert torch.equal(restored(*states, layer=0)[0], slices(*states, layer=0)[0])


@pytest.mark.parametrize(
    "number", [pytest.param(number, marks=() if number == 80 else pytest.mark.slow) for number in range(0, 200, 40)]
)
def test_exported(number):
    rotary, slices, states = draw(number)
    exported = torch.export.export(rotary.eval(), states, {"layer": 1}).module()
    for ours, alone in zip(exported(*states, layer=1), slices(*states, layer=1)):
        torch.testing.assert_close(ours, alone)


@pytest.mark.parametrize("number", range(0, 200, 8))
def test_folded_where_their_parts_fold(number):
    rotary, slices, (_, _, positions) = draw(number)
    projections = [[nn.Linear(16, heads * HEAD_DIM) for _ in range(LAYERS)] for heads in (HEADS, KEY_HEADS)]
    folded, plain = copy.deepcopy((rotary, projections)), projections
    parts = rotary.encoding.parts
    commute = all(generators_commute(part.config) for part in parts) or any(part.in_basis for part in parts)
    if not commute or any(needs_exponential(part.config) for part in parts):
        with pytest.raises(ValueError, match="do not commute"):
            rotary.fold(*projections)
        return
    rotary, changed = folded[0].fold(*folded[1]), folded[1]
    states = torch.randn(2, 5, 16)
    found, expected = (
        scores(module, [layers[1](states) for layers in weights], positions)
        for module, weights in ((rotary, changed), (slices, plain))
    )
    torch.testing.assert_close(found, expected)


def scores(module, projected, positions):
    """Attention scores of every query head with its key head, (B, H, N, N)."""
    query, key = (x.unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for x in projected)
    query, key = module(query, key, positions, layer=1)
    return query @ key.repeat_interleave(HEADS // KEY_HEADS, dim=1).mT
