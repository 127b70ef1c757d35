"""The layer started at rotations of other implementations: found by calling these, and given as frequencies."""

import pytest
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


def turn(states, angles):
    """The planes of channels i and i + K by (…, K) angles, rounded as most implementations do."""
    angles = torch.cat([angles, angles], dim=-1)
    return states * angles.cos() + rotate_half(states) * angles.sin()


def geometric(theta, width):
    return theta ** -(torch.arange(0, width, 2).float() / width)


class TableInAttention(nn.Module):
    """Called with values and positions, as Chronos-2's; returns cos and sin of halves."""

    def __init__(self):
        super().__init__()
        self.register_buffer("inv_freq", geometric(10_000, HEAD_DIM), persistent=False)

    def forward(self, values, position_ids):
        angles = (position_ids[:, :, None].float() * self.inv_freq).repeat(1, 1, 2)
        return angles.cos().to(values.dtype), angles.sin().to(values.dtype)

    def rotate(self, states, positions):
        return turn(states, (positions[..., :1] * self.inv_freq).unsqueeze(1))


class PointRope(nn.Module):
    """Called with queries, keys and points, as Utonia's: a third of the channels for each axis, halves in each."""

    def forward(self, query, key, points):
        return self.rotate(query, points), self.rotate(key, points)

    def rotate(self, states, positions):
        angles = (positions.unsqueeze(-1) * geometric(100, HEAD_DIM // 3)).unsqueeze(-4)  # (…, 1, N, A, K)
        return turn(states.unflatten(-1, (3, -1)), angles).flatten(-2)


class Lookup(nn.Module):
    """A table of whole positions up to 100 for (batch, tokens, heads, channels), named as torchtune's argument."""

    def __init__(self):
        super().__init__()
        angles = torch.arange(100.0)[:, None] * geometric(100, HEAD_DIM)
        self.register_buffer("cos_sin", torch.stack([angles.cos(), angles.sin()]).repeat_interleave(2, -1))

    def forward(self, states, *, input_pos):
        cos, sin = self.cos_sin[:, input_pos].unsqueeze(-2)
        return states * cos + rotate_adjacent(states) * sin

    def rotate(self, states, positions):
        return self(states.transpose(1, 2), input_pos=positions[..., 0].long()).transpose(1, 2)


class Partial(nn.Module):
    """Called with states and positions; rotates ten channels of each head."""

    def forward(self, states, positions):
        angles = (positions[..., :1] * torch.logspace(0, -2, 5)).unsqueeze(1)
        return torch.cat([turn(states[..., :10], angles), states[..., 10:]], dim=-1)

    rotate = forward


class Packed(nn.Module):
    """Called with queries and keys of packed samples, (tokens, heads, channels), and their positions."""

    def forward(self, query, key, positions):
        angles = positions.view(-1, 1, 1) * torch.logspace(0, -2, HEAD_DIM // 2)
        return turn(query, angles), turn(key, angles)

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
    grouped = {"num_key_value_heads": HEADS // 2}
    rotary = LieRotaryEmbedding.like(module, HEADS, HEAD_DIM, axes, encoding, block_size, **grouped)
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
    frequencies = [10_000 ** -(torch.arange(0, dim, 2).double() / dim) for dim in (8, 20, 20)]
    angles = torch.cat([torch.outer(ids[:, axis].double(), f) for axis, f in enumerate(frequencies)], dim=-1)
    angles = angles.repeat_interleave(2, dim=-1)
    return angles.cos().float(), angles.sin().float()


def complex_table(positions):
    angles = torch.outer(positions.squeeze(-1), torch.logspace(0, -3, HEAD_DIM // 2))
    return torch.polar(torch.ones_like(angles), angles)


def rotate_by_division(states, positions):
    """SmolVLA: (batch, tokens, heads, channels), and angles that are quotients."""
    half = states.shape[-1] // 2
    return turn(states, (positions[..., None] / 100 ** (torch.arange(half) / half)).unsqueeze(-2))


def by_table(states, ids):
    cos, sin = flux_table(ids)
    return states * cos + rotate_adjacent(states) * sin


def by_complex_numbers(states, ids):
    products = torch.view_as_complex(states.unflatten(-1, (-1, 2))) * complex_table(ids)
    return torch.view_as_real(products).flatten(-2)


def by_division(states, ids):
    return rotate_by_division(states.transpose(1, 2), ids[:, 0].expand(2, -1)).transpose(1, 2)


@pytest.mark.parametrize(
    "function, axes, rotated, fields",
    [
        (flux_table, 3, by_table, {}),
        (lambda ids: flux_table(ids)[::-1], 3, by_table, {}),
        (complex_table, 1, by_complex_numbers, {}),
        (rotate_by_division, 1, by_division, {}),
        (rotate_by_division, 1, by_division, {"num_key_value_heads": 2, "share_heads": True}),
    ],
)
def test_functions_that_round_in_another_way(function, axes, rotated, fields):
    states, ids = torch.randn(2, HEADS, TOKENS, HEAD_DIM), torch.randint(60, (TOKENS, axes)).float()
    rotary = LieRotaryEmbedding.like(function, HEADS, HEAD_DIM, axes, **fields)
    for heads in {HEADS, fields.get("num_key_value_heads", HEADS)}:
        # Angles up to 60, or frequencies, are rounded to float32, and norms of states are near seven.
        found, wanted = rotary.rotate(states[:, :heads], ids), rotated(states[:, :heads], ids)
        torch.testing.assert_close(found, wanted, atol=5e-5, rtol=0)
    generators = HEAD_DIM // 2 * axes * (1 if "share_heads" in fields else HEADS)
    assert sum(parameter.numel() for parameter in rotary.parameters()) == generators


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
    return turn(states, positions.reshape(-1, 1).float() * frequencies)


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
    "positions that stop": lambda x, p: Partial()(x, p.clamp(max=5000)),
}


@pytest.mark.parametrize("name", LENGTHS)
def test_frequencies_that_depend_on_the_length_are_refused(name):
    with pytest.raises(ValueError, match="frequencies that depend on the length|angles are not sums"):
        LieRotaryEmbedding.like(LENGTHS[name], HEADS, HEAD_DIM, 1)


def test_frequencies_that_grow_are_kept_as_they_are():
    """In a module, its method, and a function that closes over it."""
    rope = Growing()
    for given in (rope, rope.forward, lambda query, key, positions: rope(query, key, positions)):
        with pytest.raises(ValueError, match="frequencies that depend on the length"):
            LieRotaryEmbedding.like(given, HEADS, HEAD_DIM, 1)
        assert rope.longest == 64 and torch.equal(rope.inv_freq, FREQUENCIES)


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
