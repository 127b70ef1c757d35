"""Exponentials of all layers: in closed form, or by scaling and squaring with its own gradient."""

import torch

from .dispatch import batches_layers, carry_tangents, in_portable_graph, operator, values_are_unknown
from .exponential_gradient import ARGUMENTS, batched_rotations_backward, block_rotations_backward
from .quaternions import CLOSED_FORMS, quaternion_rotations
from .scaling_and_squaring import (
    PORTABLE_SQUARINGS,
    Rays,
    batch_rotations,
    exponential_dtype,
    find_exponential_backend,
    largest_norm,
    norm_bounds,
    num_saved,
    portable_rotations,
    ray_squarings,
    ray_tokens,
)


def exponentiate(
    positions: torch.Tensor,
    generators: torch.Tensor,
    dtype: torch.dtype = torch.float32,
    rays: Rays | None = None,
    query_dtype: torch.dtype | None = None,
) -> list[torch.Tensor]:
    """[`exponential.layer_block_rotations`], by the fastest way for the size of blocks and the kind of graph."""
    size = generators.shape[-1]
    if size in CLOSED_FORMS and not carry_tangents(positions, generators):
        return list(quaternion_rotations(positions, generators, dtype))
    if in_portable_graph() or carry_tangents(positions, generators):
        return portable_rotations(positions, generators, dtype)
    # The squarings that suffice for all norms cost five digits, which only float32 results from float64 can spare.
    if batches_layers(positions.device) and positions.dtype == torch.float64 != dtype:
        return list(_batched_rotations(positions, generators, dtype).unbind())
    grid, num_prefix_tokens, centred = rays or (None, 0, False)
    squarings, saved = _squarings(positions.detach(), generators.detach()), 0
    if torch.is_grad_enabled() and (positions.requires_grad or generators.requires_grad):
        # In a graph the number of squarings is unknown: reserve two per token, enough up to norm 13,107.
        saved = 2 * positions.shape[0]
        if not values_are_unknown(positions, squarings):
            backend = find_exponential_backend("block_rotations", positions, generators, size, dtype)
            tokens = ray_tokens(grid, num_prefix_tokens, centred, len(positions)).indices  # (rays, longest ray)
            saved = int(num_saved(ray_squarings(tokens, squarings)).sum()) if backend else 0
    arguments = squarings, grid, num_prefix_tokens, centred
    *rotations, _ = _block_rotations(positions, generators, *arguments, saved, dtype, query_dtype or dtype)
    return rotations


@operator(
    "(Tensor positions, Tensor generators) -> Tensor",
    fake=lambda positions, generators: torch.empty(positions.shape[0], dtype=torch.long, device="cpu"),
    reads_values=True,
)
def _squarings(positions, generators):
    """(P,) numbers of squarings, on the CPU, after which scaled exponents have norms of at most `largest_norm`."""
    norms = (positions.abs() @ norm_bounds(positions, generators)).cpu().nan_to_num(0.0, 0.0, 0.0)  # (P,)
    return (norms / largest_norm(positions.shape[1])).clamp(min=1.0).log2().ceil().long()


def _fake_rotations(positions, generators, squarings, grid, num_prefix_tokens, centred, saved, dtype, query_dtype):
    _, layers, blocks, size, _ = generators.shape
    shapes = [*[(positions.shape[0], blocks, size, size)] * layers, (layers, saved, blocks, size, size)]
    return [positions.new_empty(shape, dtype=dtype) for shape in shapes]


def _save_results(ctx, inputs, output):
    positions, generators, squarings, *others = inputs
    ctx.rays = others[:3]
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(positions, generators, squarings, *output)


def _gradients(ctx, *gradients):
    positions, generators, squarings, *results = ctx.saved_tensors
    gradients = [torch.zeros_like(x) if g is None else g for g, x in zip(gradients[:-1], results)]
    needs_positions = ctx.needs_input_grad[0]
    return block_rotations_backward(positions, generators, squarings, *ctx.rays, results, gradients, needs_positions)


@operator(
    f"({ARGUMENTS}, SymInt saved, ScalarType dtype, ScalarType query_dtype) -> Tensor[]",
    fake=_fake_rotations,
    gradients=_gradients,
    save=_save_results,
    reads_values=True,
)
def _block_rotations(positions, generators, squarings, grid, num_prefix_tokens, centred, saved, dtype, query_dtype):
    """G rotations (P, K, b, b), and squares for the backward pass (G, `saved`, K, b, b) if there is room for all."""
    squares = positions.new_empty(generators.shape[1], saved, *generators.shape[2:], dtype=dtype)
    if backend := find_exponential_backend("block_rotations", positions, generators, generators.shape[-1], dtype):
        rays = ray_tokens(grid, num_prefix_tokens, centred, len(positions))
        positions = positions.to(exponential_dtype(positions, squarings, query_dtype))
        squarings = ray_squarings(rays.indices, squarings)  # (rays,)
        room = squares if 0 < saved >= int(num_saved(squarings).sum()) else None
        return [*backend.block_rotations(positions, generators, rays, squarings, room, dtype), squares]
    # A graph reserves room without knowing that plain operations save nothing.
    squares.zero_()
    most = int(squarings.max()) if len(squarings) else 0
    rotations = list(map(squares.new_empty, [(len(positions), *generators.shape[2:])] * len(squares)))
    for batch, found in batch_rotations(positions, generators, most, together=False):
        rotations[batch.layers.start][batch.tokens] = found.squeeze(1)
    return [*rotations, squares]


@operator(
    "(Tensor positions, Tensor generators, Tensor rotations, Tensor gradient, bool needs_positions) "
    "-> (Tensor, Tensor)",
    fake=lambda positions, generators, *_: tuple(torch.empty_like(x).contiguous() for x in (positions, generators)),
)
def _batched_backward(positions, generators, rotations, gradient, needs_positions):
    arguments, size = (positions, generators, rotations, gradient), generators.shape[-1]
    if backend := find_exponential_backend("batched_backward", positions, generators, size, rotations.dtype):
        return backend.batched_backward(*arguments, needs_positions)
    return batched_rotations_backward(*arguments, PORTABLE_SQUARINGS[positions.dtype], needs_positions)


def _fake_batched(positions, generators, dtype):
    return positions.new_empty(generators.shape[1], positions.shape[0], *generators.shape[2:], dtype=dtype)


@operator(
    "(Tensor positions, Tensor generators, ScalarType dtype) -> Tensor",
    fake=_fake_batched,
    gradients=lambda ctx, gradient: _batched_backward(*ctx.saved_tensors, gradient, ctx.needs_input_grad[0]),
    save=lambda ctx, inputs, output: ctx.save_for_backward(*inputs[:2], output),
)
def _batched_rotations(positions, generators, dtype):
    """(G, P, K, b, b), with a number of squarings that no value decides, so that the host reads none."""
    if backend := find_exponential_backend("batched_rotations", positions, generators, generators.shape[-1], dtype):
        return backend.batched_rotations(positions, generators)
    rotations = _fake_batched(positions, generators, dtype)
    for batch, found in batch_rotations(positions, generators, PORTABLE_SQUARINGS[positions.dtype], together=True):
        rotations[batch.layers, batch.tokens] = found.transpose(0, 1)
    return rotations
