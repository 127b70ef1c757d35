"""The rotations as a layer for any attention, against the plain reference in float64."""

import copy
import itertools
import logging
import re
from functools import partial

import layer_worker
import pytest
import reference
import torch
from encoding_cases import COMMUTING, ENCODINGS, FOLDABLE, GRID_CONVENTIONS, block_size, on_axes, perturb
from fresh_process import run_two_processes
from pairwise import pairwise
from torch import nn
from transformers.utils import logging as transformers_logging

from hf_liere import LieRotaryEmbedding, grid_positions
from hf_liere.encoding.kinds import ENCODINGS as KINDS


HEADS, KEY_HEADS, HEAD_DIM, BLOCK_SIZE = 4, 2, 48, 4


def build(encoding, axes=2, **options):
    size = block_size(encoding, HEAD_DIM, axes, BLOCK_SIZE)
    options = {"num_key_value_heads": KEY_HEADS, **options}
    return LieRotaryEmbedding(HEADS, HEAD_DIM, axes, encoding, size, **options)


def states(batch=2, tokens=5, heads=HEADS):
    return torch.randn(batch, heads, tokens, HEAD_DIM)


def inputs(batch=2, tokens=5, key_heads=KEY_HEADS):
    return states(batch, tokens), states(batch, tokens, key_heads)


def expected(rotary, x, positions, layer=0):
    """Every head and token by a product with its own matrix."""
    parameters = {name.removeprefix("encoding."): values for name, values in rotary.rotary_parameters()}
    groups = x.shape[1] // rotary.num_key_value_heads
    positions = positions.expand(x.shape[0], *positions.shape[-2:])
    heads = []
    for head in range(x.shape[1]):
        generators = reference.generators(parameters, rotary.config, rotary.num_axes, layer, head // groups)
        name = rotary.config.position_encoding
        heads.append([reference.rotations(generators, sample, name) for sample in positions])
    matrices = torch.stack([torch.stack(samples) for samples in heads], dim=1)  # (B, H, N, D, D)
    return reference.rotate(x, matrices)


# Every encoding on every number of axes, and every two of the other values.
CASES = pairwise(
    [(name, axes) for axes in (1, 2, 3, 4, 6) for name in on_axes(axes)],
    [1, 2, 4],
    [True, False],
    ["compiled", "plain"],
)


@pytest.mark.parametrize(
    "encoding, axes, key_heads, shared_positions, every_path",
    [(*case, *others) for case, *others in CASES],
    indirect=["every_path"],
)
def test_the_layer_is_the_plain_reference(encoding, axes, key_heads, shared_positions, every_path):
    rotary = perturb(build(encoding, axes, num_key_value_heads=key_heads))
    # Negative and between grid points.
    positions = 3 * torch.randn(*(() if shared_positions else (3,)), 5, axes, dtype=torch.float64)
    query, key = inputs(3, key_heads=key_heads)
    rotated = rotary(query, key, positions)
    for result, x in zip(rotated, (query, key)):
        # Rotations are rounded to float32; norms of states are near seven.
        torch.testing.assert_close(result.double(), expected(rotary, x, positions), atol=2e-5, rtol=0)
        torch.testing.assert_close(rotary.rotate(x, positions), result, atol=5e-6, rtol=0)
    # Rotated there and back.
    torch.testing.assert_close(rotary.undo(rotated[0], positions), query, atol=2e-5, rtol=0)


@pytest.mark.parametrize("distance", [1e3, -1e6])
@pytest.mark.parametrize("encoding", COMMUTING)
def test_far_positions(encoding, distance):
    rotary = build(encoding)
    positions = distance + torch.randn(5, 2, dtype=torch.float64)
    query, key = inputs()
    # Angles of 1e7 have an error of 1e-9 in float64, generators in float32 are exact.
    torch.testing.assert_close(
        rotary(query, key, positions)[0].double(), expected(rotary, query, positions), atol=2e-5, rtol=0
    )


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("shared", [{}, {"share_layers": True}, {"share_heads": True}])
def test_layers(encoding, shared):
    rotary = build(encoding, num_layers=3, **shared)
    positions = torch.randn(5, 2)
    query, key = inputs()
    rotations = rotary.rotations(positions, query.dtype)
    assert len(rotations) == 3
    for layer in range(3):
        together = rotary(query, key, rotations, layer=layer)
        alone = rotary(query, key, positions, layer=layer)
        for one, other in zip(together, alone):
            torch.testing.assert_close(one, other, atol=5e-6, rtol=0)
        torch.testing.assert_close(alone[1].double(), expected(rotary, key, positions, layer), atol=2e-5, rtol=0)


def to(change):
    return lambda positions: positions._replace(coordinates=change(positions.coordinates))


MOVES = (
    to(lambda places: places * 1.5),
    lambda positions: positions.moved(torch.tensor([0.3, -0.2], dtype=torch.float64).expand(6, 2)),
    to(lambda places: places + torch.rand(7, 2, generator=torch.Generator().manual_seed(1)).double()),
    to(lambda places: torch.where(torch.arange(7)[:, None] == 3, 2.0, places)),
)


@pytest.mark.parametrize("convention", GRID_CONVENTIONS)
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_tokens_that_were_moved_from_their_grid(encoding, convention):
    """Where they are is what counts, whether the rotations of the grid were computed before, and kept, or not."""
    rotary = perturb(build(encoding)).eval()
    states = torch.randn(1, HEADS, 7, HEAD_DIM)
    for move in MOVES:
        coordinates = move(grid_positions((2, 3), convention, num_prefix_tokens=1)).coordinates.clone()
        exact = rotary.rotate(states, coordinates)
        for gradients, called in ((True, False), (False, False), (False, True)):
            positions = grid_positions((2, 3), convention, num_prefix_tokens=1)
            with torch.set_grad_enabled(gradients):
                if called:
                    rotary.rotate(states, positions)
                    rotary.rotations(positions)
                positions = move(positions)
                for given in (positions, rotary.rotations(positions)):
                    torch.testing.assert_close(rotary.rotate(states, given), exact, atol=5e-6, rtol=0)
    # As above.
    torch.testing.assert_close(exact.double(), expected(rotary, states, coordinates), atol=2e-5, rtol=0)


def test_coordinates_of_a_grid_that_need_a_gradient_get_it():
    rotary = build("liere")
    states, positions = torch.randn(1, HEADS, 6, HEAD_DIM), grid_positions((2, 3), "index")
    given = positions.coordinates.clone().requires_grad_()
    weights = torch.randn(states.shape)
    (rotary.rotate(states, given) * weights).sum().backward()
    (rotary.rotate(states, positions._replace(coordinates=given)) * weights).sum().backward()
    offsets = torch.zeros(6, 2, dtype=torch.float64, requires_grad=True)
    (rotary.rotate(states, positions.moved(offsets)) * weights).sum().backward()
    assert given.grad.ne(0).any(1).all()
    # Sums in another order.
    torch.testing.assert_close(offsets.grad * 2, given.grad, atol=1e-4, rtol=0)


@pytest.mark.parametrize("encoding", ["liere", pytest.param("comrope_ld", marks=pytest.mark.slow)])
def test_moved_grids_in_a_graph(encoding, fresh_compiler):
    rotary, states = build(encoding), torch.randn(1, HEADS, 6, HEAD_DIM)
    compiled = torch.compile(rotary.rotate, backend="aot_eager", fullgraph=True)
    positions = grid_positions((2, 3), "index")
    torch.testing.assert_close(compiled(states, positions), rotary.rotate(states, positions), atol=1e-5, rtol=0)
    moved = positions.moved(torch.full((6, 2), 0.5, dtype=torch.float64))
    exact = rotary.rotate(states, moved.coordinates.clone())
    torch.testing.assert_close(compiled(states, moved), exact, atol=1e-5, rtol=0)


@pytest.mark.usefixtures("every_path")
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_no_samples_no_tokens_and_one(encoding):
    rotary = build(encoding, num_layers=2)
    for (batch, tokens), shared in itertools.product(((0, 5), (2, 0), (0, 0), (1, 1)), (False, True)):
        query, key = (x.requires_grad_() for x in inputs(batch, tokens))
        positions = torch.rand(*(() if shared else (batch,)), tokens, 2)
        for given in (positions, rotary.rotations(positions)):
            rotated = rotary(query, key, given, layer=1)
            assert [x.shape for x in rotated] == [query.shape, key.shape]
            alone = rotary.rotate(key, given, layer=1)
            torch.testing.assert_close(alone, rotated[1], atol=5e-6, rtol=0)
            sum(x.sum() for x in (*rotated, alone)).backward()
        if batch * tokens:
            torch.testing.assert_close(rotated[0].double(), expected(rotary, query, positions, 1), atol=2e-5, rtol=0)
        else:
            assert all(parameter.grad is None or not parameter.grad.any() for parameter in rotary.parameters())


@pytest.mark.usefixtures("every_path")
def test_layers_whose_rotations_are_one_block_do_not_share_it():
    rotary = LieRotaryEmbedding(1, 8, 2, "liere", 8, num_layers=2)
    first, second = rotary.rotations(torch.rand(1, 2))
    assert not torch.allclose(first.blocks, second.blocks)


def scores(rotary, q_proj, k_proj, x, positions):
    states = (projection(x).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for projection in (q_proj, k_proj))
    query, key = rotary(*states, positions)
    return query @ key.repeat_interleave(HEADS // KEY_HEADS, 1).mT


@pytest.mark.parametrize("size", [3, 4])
@pytest.mark.parametrize(
    "encoding, axes", [*((name, 2) for name in FOLDABLE), ("liere_product", 1), ("liere_product", 3)]
)
def test_folding_keeps_the_scores(encoding, axes, size):
    size = block_size(encoding, HEAD_DIM, axes, size)
    rotary = LieRotaryEmbedding(HEADS, HEAD_DIM, axes, encoding, size, num_key_value_heads=KEY_HEADS)
    width = HEADS * HEAD_DIM
    parts = perturb(rotary).eval(), nn.Linear(width, width), nn.Linear(width, width * KEY_HEADS // HEADS)
    folded, query, key = copy.deepcopy(parts)
    x, positions = torch.randn(3, 6, width), torch.randn(6, axes)
    assert folded.fold(query, key) is folded
    # Sums over heads of 48 channels.
    torch.testing.assert_close(
        scores(folded, query, key, x, positions), scores(*parts, x, positions), atol=2e-5, rtol=0
    )
    changed = not torch.equal(query.weight, parts[1].weight)
    assert changed == (not KINDS[encoding].planar)
    if changed:
        with pytest.raises(ValueError, match="folded"):
            folded.train()
        with pytest.raises(ValueError, match="folded already"):
            folded.fold(query, key)


def test_folding_of_several_layers_changes_nothing_if_one_cannot_be_folded():
    rotary = build("comrope_ld", num_layers=2)
    width = HEADS * HEAD_DIM
    queries = [nn.Linear(8, width) for _ in range(2)]
    keys = [nn.Linear(8, width // 2), nn.Linear(8, width)]
    before = queries[0].weight.clone()
    with pytest.raises(ValueError, match="k_proj has out_features=192; 2 heads of 48 channels"):
        rotary.fold(queries, keys)
    with pytest.raises(ValueError, match="1 projections were given for num_layers=2"):
        rotary.fold(queries[0], keys[0])
    keys[1] = nn.Linear(8, width // 2)
    keys[1].register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="hooks"):
        rotary.fold(queries, keys)
    assert torch.equal(queries[0].weight, before)
    with pytest.raises(ValueError, match="do not commute"):
        build("liere").fold(queries[0], keys[0])


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_gradients(encoding):
    """Of states and generators against finite differences, with grouped queries and other positions of keys."""
    rotary = perturb(build(encoding)).double()
    query, key = (x.double().requires_grad_() for x in (states(tokens=2)[:1], states(tokens=3, heads=2)[:1]))
    positions, key_positions = (torch.randn(n, 2, dtype=torch.float64) for n in (2, 3))
    names, values = (
        zip(*((n, p.detach().requires_grad_()) for n, p in rotary.named_parameters()))
        if list(rotary.parameters())
        else ((), ())
    )

    def scores(query, key, *values):
        rotated = torch.func.functional_call(rotary, dict(zip(names, values)), (query, key, positions, key_positions))
        return torch.matmul(rotated[0], rotated[1].repeat_interleave(2, 1).mT)

    assert torch.autograd.gradcheck(scores, (query, key, *values), fast_mode=True, atol=1e-6)


@pytest.mark.parametrize("shared", [False, True])
def test_one_of_several_layers_is_named(shared):
    rotary = build("rope_mixed", num_layers=3, share_layers=shared)
    (query, key), positions = inputs(), torch.zeros(5, 2)
    for given in (positions, rotary.rotations(positions)):
        for call in (partial(rotary, query, key), partial(rotary.rotate, key)):
            with pytest.raises(ValueError, match="layer=None: this module has rotations of 3 layers; accepted: 0 … 2"):
                call(given)
    with pytest.raises(ValueError, match="positions are a list; accepted are"):
        rotary.rotate(key, rotary.rotations(positions)[:2], layer=0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_two_processes_take_the_step_of_one(kind, tmp_path):
    model, x, positions = layer_worker.model_and_batch()
    before = model.blocks[0].rotary.encoding.generators.detach().clone()
    layer_worker.step(model, x, positions)
    run_two_processes(layer_worker.__file__, kind, tmp_path / "weights.pt")
    weights = torch.load(tmp_path / "weights.pt", weights_only=True)
    for name, expected in model.state_dict().items():
        # Means of two halves instead of one mean.
        torch.testing.assert_close(weights[name], expected, rtol=0, atol=1e-6, msg=name)
    assert (weights["blocks.0.rotary.encoding.generators"] - before).abs().max() > 1e-4


SECONDS = 1.7e9 + torch.arange(40, dtype=torch.float64).unsqueeze(-1)  # since 1970
TOKENS = torch.arange(300.0).unsqueeze(-1)
ROPE = {"frequencies": 1e4 ** -(torch.arange(8.0) / 8).unsqueeze(0), "block_size": 8}
MIXED = {"position_encoding": "rope_mixed"}


@pytest.mark.parametrize(
    "positions, fields, warned",
    [
        (300 * torch.rand(100, 3), {}, "tokens are .* apart, .*divide positions by their range, here (2|300)"),
        (TOKENS, {}, "tokens are 1 apart, .* here 299"),
        (TOKENS.expand(2, -1, -1), {"block_size": 3}, "tokens are 1 apart"),
        (SECONDS.float(), MIXED, r"torch.float32 up to 1.7e\+09 are 128 apart, .*subtract a common origin"),
        (SECONDS.float(), {"rotary_init": "zeros"}, "are 128 apart, so that neighbours may have the same"),
        (TOKENS.bfloat16(), MIXED, "torch.bfloat16 up to 300 are 2 apart"),
        (torch.rand(100, 3), {}, None),
        (torch.rand(9, 3), {}, None),
        (torch.rand(3, 2), {"block_size": 16}, None),
        (300 * torch.rand(100, 3) / 300, {}, None),
        (SECONDS, MIXED, None),
        (SECONDS.float() - 1.7e9, MIXED, None),
        (TOKENS, {"position_encoding": "axial_rope"}, None),
        (TOKENS, ROPE, None),
        (5e5 + TOKENS, ROPE, None),
        (TOKENS[:256].bfloat16(), MIXED, None),
        (torch.full((5, 2), 7.0), {}, None),
        (torch.zeros(0, 2), {}, None),
    ],
)
def test_units_are_looked_at_in_the_first_call(positions, fields, warned, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    monkeypatch.setattr(logging.getLogger("hf_liere.encoding.given_positions"), "propagate", True)
    torch.manual_seed(0)
    rotary, states = (
        LieRotaryEmbedding(2, 16, positions.shape[-1], **fields),
        torch.randn(2, 2, positions.shape[-2], 16),
    )
    for _ in range(2):
        transformers_logging.warning_once.cache_clear()
        rotary.rotate(states, positions)
    assert len(caplog.messages) == (warned is not None)
    assert warned is None or re.search(warned, caplog.text)


def test_units_are_no_matter_of_graphs():
    rotary, states = LieRotaryEmbedding(2, 16, 1), torch.randn(1, 2, 300, 16)
    torch.compile(rotary.rotate, backend="eager", fullgraph=True)(states, TOKENS)
    assert not rotary.has_seen_positions
    rotary.rotate(states, grid_positions((300,)))
    assert not rotary.has_seen_positions
    rotary.rotate(states, TOKENS)
    assert rotary.has_seen_positions
