"""The layer with frequencies and pairs of channels of the user, and the lines of its page for other libraries."""

import pytest
import reference
import torch
from checkout import ROOT
from pages import blocks
from torch import nn

import hf_liere
from hf_liere import LieRotaryEmbedding


HEADS, HEAD_DIM, TOKENS = 4, 48, 33


def inputs(axes):
    """Queries, keys of half as many heads, and positions."""
    query, key = torch.randn(2, HEADS, TOKENS, HEAD_DIM), torch.randn(2, HEADS // 2, TOKENS, HEAD_DIM)
    return query, key, torch.randint(100, (2, TOKENS, axes)).float()


PAIRINGS = {
    "adjacent": [(2 * i, 2 * i + 1) for i in range(HEAD_DIM // 2)],
    "halves": [(i, i + HEAD_DIM // 2) for i in range(HEAD_DIM // 2)],
    # Every other plane backwards, the last eight channels never.
    "some": [(39 - i, i) if i % 2 else (i, 39 - i) for i in range(20)],
}


@pytest.mark.parametrize("encoding, block_size", [("rope_mixed", 2), ("liere", 4), ("cayley_string", None)])
@pytest.mark.parametrize("pairing", PAIRINGS)
def test_frequencies_of_every_layer_head_and_axis(pairing, encoding, block_size):
    pairs = PAIRINGS[pairing]
    frequencies = torch.randn(2, 3, HEADS // 2, len(pairs), dtype=torch.float64)
    options = {"num_key_value_heads": HEADS // 2, "num_layers": 3, "frequencies": frequencies}
    options["pairing"] = pairs if pairing == "some" else pairing
    rotary = LieRotaryEmbedding(HEADS, HEAD_DIM, 2, encoding, block_size, **options)
    query, key, positions = inputs(2)
    generators = torch.zeros(2, HEADS // 2, HEAD_DIM, HEAD_DIM, dtype=torch.float64)
    for plane, (first, second) in enumerate(pairs):
        generators[..., second, first] = frequencies[:, 1, :, plane]
        generators[..., first, second] = -frequencies[:, 1, :, plane]
    matrices = torch.stack([reference.rotations(generators, sample) for sample in positions])  # (B, H, N, D, D)
    rotated = rotary(query, key, positions, layer=1)
    # Frequencies are rounded to float32: 100 · 3 · 6e-8 for the largest.
    torch.testing.assert_close(rotated[1].double(), reference.rotate(key, matrices), atol=2e-4, rtol=0)
    matrices = matrices.repeat_interleave(2, dim=1)
    torch.testing.assert_close(rotated[0].double(), reference.rotate(query, matrices), atol=2e-4, rtol=0)


@pytest.mark.parametrize("encoding", ["rope_mixed", "comrope_ld", "cayley_string"])
def test_the_order_of_channels_folds(encoding):
    options = {"num_key_value_heads": HEADS // 2, "frequencies": torch.eye(3).repeat(1, 8), "pairing": "halves"}
    rotary = LieRotaryEmbedding(HEADS, HEAD_DIM, 3, encoding, 8 if encoding != "rope_mixed" else 2, **options).eval()
    with torch.no_grad():
        for parameter in rotary.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    q_proj, k_proj = nn.Linear(32, HEADS * HEAD_DIM), nn.Linear(32, HEADS // 2 * HEAD_DIM)
    x, positions = torch.randn(2, TOKENS, 32), torch.randn(TOKENS, 3)

    def scores():
        query, key = (layer(x).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for layer in (q_proj, k_proj))
        query, key = rotary(query, key, positions)
        return query @ key.repeat_interleave(2, dim=1).mT

    before = scores()
    rotary.fold(q_proj, k_proj)
    assert rotary.order is None
    # Sums of 48 products of numbers near one.
    torch.testing.assert_close(scores(), before, atol=2e-5, rtol=0)


@pytest.mark.parametrize("encoding", ["comrope_ld", "liere"])
@pytest.mark.parametrize("shared", [0, 1])
def test_odd_blocks_do_not_start_at_planes(encoding, shared):
    """Whether each plane rotates with one axis or with both."""
    with pytest.raises(ValueError, match="block_size=3: a block is made of planes.*even size"):
        LieRotaryEmbedding(HEADS, HEAD_DIM, 2, encoding, 3, frequencies=torch.eye(2, 24) + shared)


def test_the_lines_for_monai_rotate_in_millimetres():
    """Scans of 3 and 1 mm have the same centres at the same places, by which queries and keys turn, but no values."""
    namespace = {"torch": torch, "nn": nn, "hf_liere": hf_liere}
    lines = next(block.text for block in blocks(ROOT / "docs/layer.md") if "class RotatedSplit" in block.text)
    exec(compile(lines, "docs/layer.md", "exec"), namespace)
    coarse, fine = torch.diag(torch.tensor([3.0, 3, 3, 1])), torch.eye(4)
    fine[:3, 3] = -1  # the centre of the first voxel of 1 mm, from that of the voxel of 3 mm around it
    centres = namespace["patch_centres"](coarse, (8, 8, 8), 4)  # (8, 3) in mm
    middle = torch.arange(216).view(6, 6, 6)[1::3, 1::3, 1::3].flatten()
    torch.testing.assert_close(namespace["patch_centres"](fine, (24, 24, 24), 4)[middle], centres)
    rotary, states = LieRotaryEmbedding(HEADS, HEAD_DIM, 3, "rope_mixed"), torch.randn(3, 1, HEADS, 8, HEAD_DIM)
    split = namespace["RotatedSplit"](lambda states: states, rotary)
    split.positions = namespace["patch_centres"](coarse, (8, 8, 8), 4, 12.0)
    query, key, value = split(states)
    wanted = (rotary.rotate(each, centres / 12) for each in states[:2])
    assert all(map(torch.equal, (query, key, value), (*wanted, states[2])))
