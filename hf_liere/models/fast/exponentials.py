"""Exponentials of all layers: in closed form, or by scaling and squaring with its own gradient."""

import torch

from .batched_exponential import batched_rotations
from .closed_forms import CLOSED_FORMS
from .dispatch import batches_layers, carry_tangents, in_portable_graph, operator, values_are_unknown
from .exponential_gradient import ARGUMENTS, block_rotations_backward, ray_tokens
from .scaling_and_squaring import (
    Rays,
    largest_norm,
    norm_bounds,
    num_saved,
    portable_rotations,
    product_dtypes,
    ray_rotations,
    ray_squarings,
)


def exponentiate(
    positions: torch.Tensor,
    generators: torch.Tensor,
    dtype: torch.dtype = torch.float32,
    rays: Rays | None = None,
    query_dtype: torch.dtype | None = None,
) -> list[torch.Tensor]:
    """[`exponential.layer_block_rotations`], by the fastest way for the size of blocks and the kind of graph."""
    if (size := generators.shape[-1]) in CLOSED_FORMS and not carry_tangents(positions, generators):
        if (rotate := CLOSED_FORMS[size]) is None:
            raise ValueError(f"block_size={size} is not in the code of this checkpoint; install hf_liere.")
        return list(rotate(positions, generators, dtype))
    if in_portable_graph() or carry_tangents(positions, generators):
        return portable_rotations(positions, generators, dtype)
    # The squarings that suffice for all tokens cost five digits, which only float32 results from float64 can spare.
    if batches_layers(positions.device) and positions.dtype == torch.float64 != dtype:
        return list(batched_rotations(positions, generators, dtype))
    grid, num_prefix_tokens, centred = rays or (None, 0, False)
    squarings, saved = _squarings(positions.detach(), generators.detach()), 0
    if torch.is_grad_enabled() and (positions.requires_grad or generators.requires_grad):
        # In a graph the number of squarings is unknown: reserve two per token, enough up to norm 13,107.
        saved = 2 * positions.shape[0]
        if not values_are_unknown(positions, squarings):
            tokens = ray_tokens(grid, num_prefix_tokens, centred, len(positions)).indices  # (rays, longest ray)
            saved = int(num_saved(ray_squarings(tokens, squarings)).sum())
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
    rays = ray_tokens(grid, num_prefix_tokens, centred, len(positions))
    dtypes = product_dtypes(positions, squarings, query_dtype)
    squarings = ray_squarings(rays.indices, squarings)  # (rays,)
    squares = positions.new_empty(generators.shape[1], saved, *generators.shape[2:], dtype=dtype)
    room = squares if 0 < saved >= int(num_saved(squarings).sum()) else None
    return [*ray_rotations(positions, generators, rays, squarings, room, dtype, dtypes), squares]
