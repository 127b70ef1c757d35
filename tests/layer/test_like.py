"""The layer started at rotations of other implementations: found by calling these, and given as frequencies."""

import math

import pytest
import reference
import torch
from checkout import ROOT
from pages import blocks
from timm.layers import RotaryEmbeddingCat, RotaryEmbeddingMixed, apply_rot_embed_cat
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

import hf_liere
from hf_liere import LieRotaryEmbedding, grid_positions


HEADS, HEAD_DIM, TOKENS = 4, 48, 33


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def rotate_half(x):
    first, second = x.chunk(2, dim=-1)
    return torch.cat([-second, first], dim=-1)


def rotate_adjacent(x):
    return torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)


class TableInAttention(nn.Module):
    """Called with values and positions, as Chronos-2's; returns cos and sin of halves."""

    def __init__(self, dim=HEAD_DIM):
        super().__init__()
        self.register_buffer("inv_freq", 10_000 ** -(torch.arange(0, dim, 2).float() / dim), persistent=False)

    def forward(self, values, position_ids):
        angles = position_ids[:, :, None].float() * self.inv_freq
        angles = torch.cat([angles, angles], dim=-1)
        return angles.cos().to(values.dtype), angles.sin().to(values.dtype)

    def rotate(self, states, positions):
        cos, sin = (table.unsqueeze(1) for table in self(states, positions[..., 0]))
        return states * cos + rotate_half(states) * sin


class PointRope(nn.Module):
    """Called with queries, keys and points, as Utonia's: a third of the channels for each axis, halves in each."""

    def forward(self, query, key, points):
        return self.rotate(query, points), self.rotate(key, points)

    def rotate(self, states, positions):
        thirds = []
        for axis, x in enumerate(states.chunk(3, dim=-1)):
            frequencies = 100 ** -(torch.arange(0, x.shape[-1], 2).float() / x.shape[-1])
            angles = (positions[..., axis, None] * frequencies).unsqueeze(-3).repeat(1, 1, 1, 2)
            thirds.append(x * angles.cos() + rotate_half(x) * angles.sin())
        return torch.cat(thirds, dim=-1)


class Lookup(nn.Module):
    """A table of whole positions up to 100 for (batch, tokens, heads, channels), named as torchtune's argument."""

    def __init__(self):
        super().__init__()
        angles = torch.arange(100.0)[:, None] * 100 ** -(torch.arange(0, HEAD_DIM, 2).float() / HEAD_DIM)
        self.register_buffer("cos_sin", torch.stack([angles.cos(), angles.sin()]).repeat_interleave(2, -1))

    def forward(self, states, *, input_pos):
        cos, sin = self.cos_sin[:, input_pos].unsqueeze(-2)
        return states * cos + rotate_adjacent(states) * sin

    def rotate(self, states, positions):
        return self(states.transpose(1, 2), input_pos=positions[..., 0].long()).transpose(1, 2)


class Partial(nn.Module):
    """Called with states and positions; rotates ten channels of each head."""

    def forward(self, states, positions):
        angles = (positions[..., 0, None] * torch.logspace(0, -2, 5)).unsqueeze(1).repeat(1, 1, 1, 2)
        rotated, others = states[..., :10], states[..., 10:]
        return torch.cat([rotated * angles.cos() + rotate_half(rotated) * angles.sin(), others], dim=-1)

    rotate = forward


class Packed(nn.Module):
    """Called with queries and keys of packed samples, (tokens, heads, channels), and their positions."""

    def forward(self, query, key, positions):
        tokens, _, width = query.shape
        angles = positions.view(tokens, 1, 1) * torch.logspace(0, -2, width // 2).repeat(2)
        return tuple(states * angles.cos() + rotate_half(states) * angles.sin() for states in (query, key))

    def rotate(self, states, positions):
        samples = zip(states.transpose(1, 2), positions)
        return torch.stack([self(sample, sample, places)[0] for sample, places in samples]).transpose(1, 2)


# (module, its axes)
MODULES = [(TableInAttention, 1), (PointRope, 3), (Lookup, 1), (Partial, 1), (Packed, 1)]


def inputs(axes):
    """Queries, keys of half as many heads, and whole positions, which tables need."""
    query, key = torch.randn(2, HEADS, TOKENS, HEAD_DIM), torch.randn(2, HEADS // 2, TOKENS, HEAD_DIM)
    return query, key, torch.randint(100, (2, TOKENS, axes)).float()


@pytest.mark.parametrize("module, axes", MODULES)
def test_planes_start_with_the_same_bits(module, axes):
    module = module()
    query, key, positions = inputs(axes)
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    rotary = LieRotaryEmbedding.like(module, HEADS, HEAD_DIM, axes, num_key_value_heads=HEADS // 2)
    for rotated, states in zip(rotary(query, key, positions), (query, key)):
        assert torch.equal(rotated, module.rotate(states, positions))
        assert torch.equal(rotary.rotate(states, positions), rotated)
        assert not torch.equal(rotated, states)
    assert all(torch.equal(buffer, before[name]) for name, buffer in module.named_buffers())


@pytest.mark.parametrize(
    "encoding, block_size", [("liere", 8), ("comrope_ld", 4), ("comrope_ap", 8), ("cayley_string", None), ("liere", 2)]
)
@pytest.mark.parametrize("module, axes", MODULES[:2])
def test_blocks_start_within_rounding_and_learn(module, axes, encoding, block_size):
    module = module()
    query, key, positions = inputs(axes)
    rotary = LieRotaryEmbedding.like(
        module, HEADS, HEAD_DIM, axes, encoding, block_size, num_key_value_heads=HEADS // 2
    )
    rotated = rotary(query, key, positions)
    for found, states in zip(rotated, (query, key)):
        # The module rounds angles up to 100 to float32.
        torch.testing.assert_close(found, module.rotate(states, positions), atol=5e-5, rtol=0)
    sum((x * torch.randn_like(x)).sum() for x in rotated).backward()
    for name, parameter in rotary.named_parameters():
        assert parameter.grad.abs().sum() > 0, name


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("fields", [{}, {"ref_feat_shape": [6, 9]}, {"feat_shape": [6, 9]}, {"grid_indexing": "xy"}])
def test_tables_of_timm(half, fields):
    rope = RotaryEmbeddingCat(HEAD_DIM, in_pixels=False, rotate_half=half, **fields)
    rotary = LieRotaryEmbedding.like(rope, HEADS, HEAD_DIM, 2)
    states = torch.randn(2, HEADS, 54, HEAD_DIM)
    expected = apply_rot_embed_cat(states, rope.get_embed((6, 9)), half=half)
    assert torch.equal(rotary.rotate(states, grid_positions((6, 9), "index")), expected)


def test_the_mixed_table_of_timm():
    """Frequencies of both axes in every plane, other ones for every head and layer."""
    rope = RotaryEmbeddingMixed(HEADS * HEAD_DIM, depth=2, num_heads=HEADS)
    rotary = LieRotaryEmbedding.like(rope, HEADS, HEAD_DIM, 2, num_layers=2)
    states, positions = torch.randn(2, HEADS, 54, HEAD_DIM), grid_positions((6, 9), "index")
    for layer, table in enumerate(rope.get_embed((6, 9))):
        assert torch.equal(rotary.rotate(states, positions, layer=layer), apply_rot_embed_cat(states, table))
    # timm has columns first here.
    assert torch.equal(rotary.encoding.generators[..., 0], rope.freqs.flip(0))


def test_a_module_of_transformers():
    rope = LlamaRotaryEmbedding(LlamaConfig(hidden_size=HEADS * HEAD_DIM, num_attention_heads=HEADS))
    query, key, positions = inputs(1)
    rotary = LieRotaryEmbedding.like(rope, HEADS, HEAD_DIM, 1, num_key_value_heads=HEADS // 2)
    expected = apply_rotary_pos_emb(query, key, *rope(query, positions[..., 0]))
    assert all(map(torch.equal, rotary(query, key, positions), expected))


def flux_table(ids):
    """diffusers: float64 angles on three axes with 8, 20 and 20 channels, in adjacent channels."""
    dims = (8, 20, 20)
    frequencies = [10_000 ** -(torch.arange(0, dim, 2).double() / dim) for dim in dims]
    angles = torch.cat([torch.outer(ids[:, axis].double(), f) for axis, f in enumerate(frequencies)], dim=-1)
    angles = angles.repeat_interleave(2, dim=-1)
    return angles.cos().float(), angles.sin().float()


def sines_first(ids):
    return flux_table(ids)[::-1]


def complex_table(positions):
    angles = torch.outer(positions.squeeze(-1), torch.logspace(0, -3, HEAD_DIM // 2))
    return torch.polar(torch.ones_like(angles), angles)


def rotate_by_division(states, positions):
    """SmolVLA: (batch, tokens, heads, channels), and angles that are quotients."""
    half = states.shape[-1] // 2
    angles = (positions[..., None] / 100 ** (torch.arange(half) / half)).unsqueeze(-2)
    first, second = states.split(half, dim=-1)
    return torch.cat([first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], -1)


def test_functions_that_round_in_another_way():
    states, ids = torch.randn(2, HEADS, TOKENS, HEAD_DIM), torch.randint(60, (TOKENS, 3)).float()
    cos, sin = flux_table(ids)
    for table in (flux_table, sines_first):
        rotated = LieRotaryEmbedding.like(table, HEADS, HEAD_DIM, 3).rotate(states, ids)
        # Frequencies are rounded to float32: 60 · 6e-8, and norms of states are near seven.
        torch.testing.assert_close(rotated, states * cos + rotate_adjacent(states) * sin, atol=2e-5, rtol=0)
    rotated = LieRotaryEmbedding.like(rotate_by_division, HEADS, HEAD_DIM, 1).rotate(states, ids[:, :1])
    expected = rotate_by_division(states.transpose(1, 2), ids[:, 0].expand(2, -1)).transpose(1, 2)
    # Angles up to 60 are rounded to float32 here.
    torch.testing.assert_close(rotated, expected, atol=5e-5, rtol=0)
    shared = LieRotaryEmbedding.like(rotate_by_division, HEADS, HEAD_DIM, 1, num_key_value_heads=2, share_heads=True)
    assert sum(parameter.numel() for parameter in shared.parameters()) == HEAD_DIM // 2
    for x, whole in ((states, expected), (states[:, :2], expected[:, :2])):
        torch.testing.assert_close(shared.rotate(x, ids[:, :1]), whole, atol=5e-5, rtol=0)
    rotated = LieRotaryEmbedding.like(complex_table, HEADS, HEAD_DIM, 1).rotate(states, ids[:, :1])
    expected = torch.view_as_complex(states.unflatten(-1, (-1, 2))) * complex_table(ids[:, :1])
    torch.testing.assert_close(rotated, torch.view_as_real(expected).flatten(-2), atol=2e-5, rtol=0)


@pytest.mark.parametrize(
    "module, fields, message",
    [
        (lambda x, p: Partial()(x, p.log1p()), {}, "angles are not sums of coordinates times frequencies"),
        (lambda x, p: Partial()(x, p + 1), {}, "does not leave states at position 0 as they are"),
        (lambda x, p: Partial()(x, p), {"num_axes": 2}, "does not rotate with axis 1"),
        (lambda x, p: 2 * x, {}, "does not rotate every channel with one other"),
        (lambda q, k, p: (q, PointRope()(q, k, p)[1]), {"num_axes": 3}, "changes queries in another way than the keys"),
        (lambda p: (torch.ones(len(p), 24), torch.zeros(len(p), 24)), {}, "half the channels do not show.*pairing"),
        (PointRope(), {"pairing": "both"}, "pairing='both': accepted are adjacent, halves"),
        (lambda: None, {}, "could not be called. Accepted are .query, key, positions"),
        (RotaryEmbeddingCat(HEAD_DIM), {"num_axes": 2}, "does not leave states at position 0"),
        (RotaryEmbeddingMixed(192, 3, 4), {"num_axes": 2}, "rotates 3 layers of 4 heads, but num_layers=1"),
        (
            PointRope(),
            {"num_axes": 3, "position_encoding": "axial_rope"},
            "it learns nothing; accepted: liere, rope_mixed",
        ),
        (PointRope(), {"num_axes": 3, "rotary_init": "normal"}, "rotary_init would do nothing with frequencies"),
        (Partial(), {"position_encoding": "liere", "block_size": 4}, "does not divide the 10 rotated channels"),
    ],
)
def test_other_modules_are_refused(module, fields, message):
    with pytest.raises(ValueError, match=message):
        LieRotaryEmbedding.like(module, HEADS, HEAD_DIM, **{"num_axes": 1, **fields})


def rotate_at(states, positions, frequencies):
    angles = positions.reshape(-1, 1).float() * frequencies
    return states * angles.cos().repeat(1, 2) + rotate_half(states) * angles.sin().repeat(1, 2)


FREQUENCIES = torch.logspace(0, -3, HEAD_DIM // 2)


def switching(limit, length=lambda query, positions: int(positions.max()) + 1):
    """A function whose frequencies are halved beyond a length."""

    def rotate(query, key, positions):
        frequencies = FREQUENCIES / (2 if length(query, positions) > limit else 1)
        return rotate_at(query, positions, frequencies), rotate_at(key, positions, frequencies)

    return rotate


class Growing(nn.Module):
    """Slower frequencies for longer inputs, which it keeps, in place."""

    def __init__(self):
        super().__init__()
        self.register_buffer("inv_freq", FREQUENCIES.clone())
        self.longest = 64

    def forward(self, query, key, positions):
        if positions.max() >= self.longest:
            self.inv_freq.mul_(self.longest / (positions.max() + 1))
            self.longest = int(positions.max()) + 1
        return rotate_at(query, positions, self.inv_freq), rotate_at(key, positions, self.inv_freq)


def of_transformers(**parameters):
    config = LlamaConfig(hidden_size=HEADS * HEAD_DIM, num_attention_heads=HEADS, max_position_embeddings=131072)
    config.rope_parameters = {"rope_theta": 1e4, **parameters}
    rope = LlamaRotaryEmbedding(config)
    return lambda query, key, positions: apply_rotary_pos_emb(query, key, *rope(query, positions.reshape(1, -1)))


LONGROPE = {"short_factor": [1.0] * 24, "long_factor": [1.0] * 23 + [2.0], "attention_factor": 1.0, "factor": 4.0}
LENGTHS = {
    "at 8": switching(8),
    "at 64": switching(64),
    "at 131072": switching(131072),
    "at 4M": switching(2**22),
    "at 500 tokens": switching(500, lambda query, positions: query.shape[-2]),
    "dynamic": of_transformers(rope_type="dynamic", factor=2.0),
    "longrope": of_transformers(rope_type="longrope", original_max_position_embeddings=32768, **LONGROPE),
    "growing": Growing(),
}


@pytest.mark.parametrize("name", LENGTHS)
def test_frequencies_that_depend_on_the_length_are_refused(name):
    with pytest.raises(ValueError, match="frequencies that depend on the length|angles are not sums"):
        LieRotaryEmbedding.like(LENGTHS[name], HEADS, HEAD_DIM, 1)


def test_positions_that_count_otherwise_from_some_on_are_refused():
    with pytest.raises(ValueError, match="angles are not sums"):
        LieRotaryEmbedding.like(lambda x, p: Partial()(x, p.clamp(max=5000)), HEADS, HEAD_DIM, 1)


def test_frequencies_that_grow_are_kept_as_they_are():
    """In a module, its method, and a function that closes over it."""
    rope = Growing()
    for given in (rope, rope.forward, lambda query, key, positions: rope(query, key, positions)):
        with pytest.raises(ValueError, match="frequencies that depend on the length"):
            LieRotaryEmbedding.like(given, HEADS, HEAD_DIM, 1)
        assert rope.longest == 64 and torch.equal(rope.inv_freq, FREQUENCIES)


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
    rotary = LieRotaryEmbedding(
        HEADS,
        HEAD_DIM,
        2,
        encoding,
        block_size,
        num_key_value_heads=HEADS // 2,
        num_layers=3,
        frequencies=frequencies,
        pairing=pairs if pairing == "some" else pairing,
    )
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
    rotary = LieRotaryEmbedding.like(PointRope(), HEADS, HEAD_DIM, 3, encoding, num_key_value_heads=HEADS // 2).eval()
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


def test_periodic_axes_wrap_around():
    """Headings in radians with whole frequencies, beside a distance with any: kept, also in a basis that learns."""
    planes = HEAD_DIM // 2
    frequencies = torch.zeros(2, planes)
    frequencies[0, :12] = torch.arange(1, 13)
    frequencies[1, 12:] = torch.logspace(0, -3, 12)
    rotary = LieRotaryEmbedding(HEADS, HEAD_DIM, 2, "cayley_string", frequencies=frequencies)
    rotary.encoding.generators.requires_grad_(False)
    with torch.no_grad():
        rotary.encoding.skew.normal_()
    states, positions = torch.randn(1, HEADS, TOKENS, HEAD_DIM), torch.randn(TOKENS, 2, dtype=torch.float64)
    turned = positions + torch.tensor([2 * math.pi * 5, 0], dtype=torch.float64)
    # Angles are float64; their cos and sin, float32.
    torch.testing.assert_close(rotary.rotate(states, turned), rotary.rotate(states, positions), atol=2e-6, rtol=0)
    moved = positions + torch.tensor([0, 2 * math.pi * 5], dtype=torch.float64)
    assert (rotary.rotate(states, moved) - rotary.rotate(states, positions)).abs().max() > 0.1


def test_the_module_for_torchtune_takes_queries_and_fewer_keys():
    lines = next(block.text for block in blocks(ROOT / "docs/layer.md") if "class LearnedRope" in block.text)
    namespace = {"torch": torch, "nn": nn, "hf_liere": hf_liere}
    exec(compile(lines, "docs/layer.md", "exec"), namespace)
    rope, positions = Lookup(), torch.randint(60, (2, TOKENS))
    learned = namespace["LearnedRope"](rope, HEADS, HEAD_DIM, 2)
    for heads in (HEADS, 2):
        states = torch.randn(2, TOKENS, heads, HEAD_DIM)
        assert torch.equal(learned(states, input_pos=positions), rope(states, input_pos=positions))
        assert torch.equal(learned(states), rope(states, input_pos=torch.arange(TOKENS)))


class SplitAttention(nn.Module):
    """Splits queries, keys and values by `input_rearrange`, as MONAI's SABlock."""

    def __init__(self, hidden_size, num_heads):
        super().__init__()
        self.qkv = nn.Linear(hidden_size, 3 * hidden_size)
        self.input_rearrange = lambda x: x.unflatten(-1, (3, num_heads, -1)).permute(2, 0, 3, 1, 4)

    def forward(self, x):
        query, key, value = self.input_rearrange(self.qkv(x))
        return nn.functional.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("library", ["none", "monai"])
@torch.no_grad()
def test_the_lines_for_monai_attend_in_millimetres(library):
    """The same body in scans of 3 and 1 mm gets the same attention at the same places."""
    block = pytest.importorskip("monai.networks.blocks").SABlock if library == "monai" else SplitAttention
    namespace = {"torch": torch, "nn": nn, "hf_liere": hf_liere}
    lines = next(block.text for block in blocks(ROOT / "docs/layer.md") if "class RotatedSplit" in block.text)
    exec(compile(lines, "docs/layer.md", "exec"), namespace)
    attention, waves = block(HEADS * HEAD_DIM, HEADS).eval(), torch.randn(3, HEADS * HEAD_DIM) / 20
    # Scores that differ between tokens.
    attention.qkv.weight.mul_(3)
    rotary = LieRotaryEmbedding(HEADS, HEAD_DIM, 3, "rope_mixed")
    attention.input_rearrange = namespace["RotatedSplit"](attention.input_rearrange, rotary)

    def attend(affine, shape, tokens, coordinates):
        centres = namespace["patch_centres"](affine, shape, 4)[tokens]  # (N, 3) in mm
        attention.input_rearrange.positions = namespace["patch_centres"](coordinates, shape, 4, 12.0)[tokens]
        return attention((centres.float() @ waves).sin().unsqueeze(0))

    coarse, fine = torch.diag(torch.tensor([3.0, 3, 3, 1])), torch.eye(4)
    fine[:3, 3] = -1  # the centre of the first voxel of 1 mm, from that of the voxel of 3 mm around it
    middle, corner = torch.arange(216).view(6, 6, 6)[1::3, 1::3, 1::3].flatten(), torch.arange(8)
    expected = attend(coarse, (8, 8, 8), corner, coarse)
    # float32, angles of a few radians
    torch.testing.assert_close(attend(fine, (24, 24, 24), middle, fine), expected, atol=2e-5, rtol=0)
    in_voxels = attend(coarse, (8, 8, 8), corner, torch.eye(4))
    assert (in_voxels - expected).abs().max() > 0.01
    assert (attend(fine, (24, 24, 24), middle, torch.eye(4)) - in_voxels).abs().max() > 0.01


@pytest.mark.parametrize("encoding, head_dim", [("comrope_ld", 12), ("comrope_ap", 24), ("liere", 12)])
@pytest.mark.parametrize("shared", [False, True])
def test_odd_blocks_do_not_start_at_planes(encoding, head_dim, shared):
    """Whether each plane rotates with one axis or with both."""
    frequencies = torch.zeros(2, 6)
    frequencies[0] = 1.0
    frequencies[1, :3] = float(shared)
    with pytest.raises(ValueError, match="block_size=3: a block is made of planes.*even size"):
        LieRotaryEmbedding(2, head_dim, 2, encoding, 3, frequencies=frequencies)
