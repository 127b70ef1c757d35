"""Rotations of dense blocks from their generators: the matrix exponential and its gradient, as operators of torch."""

from collections.abc import Sequence

import torch

from .backends import find_backend
from .exponential_gradient import MOST_MOMENT_AXES, GradientMoments, gradients_by_token, largest_norm
from .squaring import (
    Rays,
    norm_bounds,
    num_saved,
    portable_rotations,
    product_types,
    ray_rotations,
    ray_tangents,
)
from .tracing import in_portable_graph, operator, values_are_unknown


def block_rotations(
    positions: torch.Tensor,
    generators: torch.Tensor,
    dtype: torch.dtype = torch.float32,
    rays: Rays | None = None,
    states: torch.dtype | None = None,
) -> torch.Tensor:
    """
    exp(Σ_a p_a A_a) for b > 2 (LieRE eq. 4, ComRoPE eq. 3), by scaling and squaring with matrix products only.

    A change of X = Σ_a p_a A_a has the tangent R⁻¹ dR = φ(ad X) dX with φ(z) = (1 − e⁻ᶻ)/z and ad X: W ↦ XW − WX
    (Hall 2015, theorem 5.4), exact at zero and at repeated eigenvalues. The backward pass applies the adjoint to W, the
    skew part of Rᵀ dL/dR: with X = 2ˢY it is φ(−ad Y) Π_{j<s} ½(1 + e^(2ʲ ad Y)), of which the exponentials conjugate W
    with the squares that led to R, and the rest is in `exponential_gradient`. The rotations and every
    `SAVE_INTERVAL`-th square are saved for it.

    Args:
        positions: (P, A) in the working type.
        generators: (A, …, K, b, b), skew-symmetric.
        dtype: Type of the result.
        rays: Which positions are multiples of others, if known.
        states: Type of the queries and keys, `dtype` if `None`: for half types products are float32 where that adds
            less than a tenth of their rounding.

    Returns:
        (…, K, P, b, b) rotations in `dtype`. The memory order is (…, P, K, b, b).
    """
    leading = generators.shape[1:-3]
    layers = generators.reshape(generators.shape[0], -1, *generators.shape[-3:])
    rotations = layer_block_rotations(positions, layers, dtype, rays, states)
    return torch.stack(rotations).unflatten(0, leading) if leading else rotations[0]


def layer_block_rotations(
    positions: torch.Tensor,
    generators: torch.Tensor,
    dtype: torch.dtype = torch.float32,
    rays: Rays | None = None,
    states: torch.dtype | None = None,
) -> tuple[torch.Tensor, ...]:
    """[`block_rotations`] of (A, G, K, b, b) generators, as a (K, P, b, b) tensor for each of the G."""
    if in_portable_graph():
        return _transposed(portable_rotations(positions, generators, dtype))
    grid, num_prefix_tokens = rays or (None, 0)
    squarings, saved = _squarings(positions.detach(), generators.detach()), 0
    if torch.is_grad_enabled() and (positions.requires_grad or generators.requires_grad):
        # No graph knows how many squares there will be: two for every token are enough for norms up to 819.
        saved = 2 * positions.shape[0]
        if not values_are_unknown(positions, squarings):
            saved = int(num_saved(_of_rays(_tokens(grid, num_prefix_tokens, len(positions)), squarings)).sum())
    results = _block_rotations(positions, generators, squarings, grid, num_prefix_tokens, saved, dtype, states or dtype)
    return _transposed(results[:-1])


def _tokens(grid: Sequence[int] | None, num_prefix_tokens: int, num_tokens: int) -> torch.Tensor:
    """The tokens of [`Rays`], or every token as a ray of its own."""
    if grid is None:
        return torch.arange(num_tokens, device="cpu").unsqueeze(-1)
    return Rays(tuple(grid), num_prefix_tokens).tokens()


def _of_rays(tokens: torch.Tensor, squarings: torch.Tensor) -> torch.Tensor:
    """
    (rays,) how often the first rotation of each ray is squared. A few rays join the next number, since one more
    squaring costs less than a group of their own.
    """
    squarings = squarings[tokens[:, 0]]
    counts, done = squarings.unique(), -1
    for count in counts.tolist():
        joining = (squarings > done) & (squarings <= count)
        if count == counts[-1] or int(joining.sum()) * 8 >= len(squarings):
            squarings, done = squarings.masked_fill(joining, count), count
    return squarings


def _fake_rotations(positions, generators, squarings, grid, num_prefix_tokens, saved, dtype, states):
    _, groups, blocks, size, _ = generators.shape
    shapes = [*[(positions.shape[0], blocks, size, size)] * groups, (groups, saved, blocks, size, size)]
    return [positions.new_empty(shape, dtype=dtype) for shape in shapes]


def _fake_gradients(positions, generators, *_):
    return torch.empty_like(positions).contiguous(), torch.empty_like(generators).contiguous()


@operator(
    "(Tensor positions, Tensor generators) -> Tensor",
    fake=lambda positions, generators: torch.empty(positions.shape[0], dtype=torch.long, device="cpu"),
    reads_values=True,
)
def _squarings(positions, generators):
    """(P,) numbers of squarings, on the CPU, after which scaled exponents have norms of at most `largest_norm`."""
    norms = (positions.abs() @ norm_bounds(positions, generators)).cpu().nan_to_num(0.0, 0.0, 0.0)
    return (norms / largest_norm(positions.shape[1])).clamp(min=1.0).log2().ceil().long()


_ARGUMENTS = "Tensor positions, Tensor generators, Tensor squarings, SymInt[]? grid, SymInt num_prefix_tokens"


@operator(
    f"({_ARGUMENTS}, Tensor[] results, Tensor[] gradients, bool needs_positions) -> (Tensor, Tensor)",
    fake=_fake_gradients,
    reads_values=True,
)
def _block_rotations_backward(
    positions, generators, squarings, grid, num_prefix_tokens, results, gradients, needs_positions
):
    """Gradients of positions, zeros unless they are needed, and of generators."""
    *rotations, squares = results
    tokens = _tokens(grid, num_prefix_tokens, len(positions))
    squarings = _of_rays(tokens, squarings)
    offsets = num_saved(squarings).cumsum(0)
    if len(squarings) and int(offsets[-1]) > squares.shape[1]:
        # In a graph there was not enough room.
        squares = squares.new_empty(squares.shape[0], int(offsets[-1]), *squares.shape[2:])
        _rotate_rays(positions, generators, tokens, squarings, squares, squares.dtype, (positions.dtype,) * 2)
    first = tokens[:, 0].to(positions.device)
    scales = torch.ldexp(torch.ones_like(squarings, dtype=positions.dtype), -squarings).to(positions.device)
    coordinates = positions[first] * scales.unsqueeze(-1)  # (rays, A)
    backend = _compiled(positions, generators, squares.dtype)
    tangents_of = backend.block_tangents if backend else ray_tangents
    entries = tangents_of(rotations, gradients, tokens, squarings, squares)  # (G, rays, K·b(b−1)/2)
    by_token = needs_positions or positions.shape[1] > MOST_MOMENT_AXES
    positions_gradient = torch.zeros_like(positions).contiguous()
    if by_token:
        of_coordinates, of_generators = gradients_by_token(coordinates, generators, entries)
        # Only positions that are no multiples of others need a gradient: the others come from a grid.
        positions_gradient.index_copy_(0, first, of_coordinates * scales.unsqueeze(-1))
    else:
        of_generators = GradientMoments(coordinates, generators, entries).generators_gradient()
    return positions_gradient, of_generators.to(generators.dtype).contiguous()


def _save_results(ctx, inputs, output):
    positions, generators, squarings, ctx.grid, ctx.num_prefix_tokens, *_ = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(positions, generators, squarings, *output)


def _gradients(ctx, *gradients):
    positions, generators, squarings, *results = ctx.saved_tensors
    gradients = [torch.zeros_like(x) if g is None else g for g, x in zip(gradients[:-1], results)]
    needs_positions, needs_generators, *_ = ctx.needs_input_grad
    of_positions, of_generators = _block_rotations_backward(
        positions, generators, squarings, ctx.grid, ctx.num_prefix_tokens, results, gradients, needs_positions
    )
    return of_positions if needs_positions else None, of_generators if needs_generators else None, *[None] * 6


@operator(
    f"({_ARGUMENTS}, SymInt saved, ScalarType dtype, ScalarType states) -> Tensor[]",
    fake=_fake_rotations,
    gradients=_gradients,
    save=_save_results,
    reads_values=True,
)
def _block_rotations(positions, generators, squarings, grid, num_prefix_tokens, saved, dtype, states):
    """G rotations (P, K, b, b), and squares for the backward pass (G, `saved`, K, b, b) if there is room for all."""
    tokens, types = _tokens(grid, num_prefix_tokens, len(positions)), product_types(positions, squarings, states)
    squarings = _of_rays(tokens, squarings)
    squares = positions.new_empty(generators.shape[1], saved, *generators.shape[2:], dtype=dtype)
    room = squares if 0 < saved >= int(num_saved(squarings).sum()) else None
    return [*_rotate_rays(positions, generators, tokens, squarings, room, dtype, types), squares]


def _compiled(positions: torch.Tensor, generators: torch.Tensor, dtype: torch.dtype):
    """The backend for float32 results of positions in float64, if any."""
    if positions.dtype != torch.float64 or dtype != torch.float32:
        return None
    return find_backend("block_rotations", generators, generators.shape[-1], torch.float32)


def _rotate_rays(positions, generators, tokens, squarings, squares, dtype, types) -> tuple[torch.Tensor, ...]:
    if backend := _compiled(positions, generators, dtype):
        return backend.block_rotations(positions.to(types[0]), generators, tokens, squarings, squares, dtype)
    return ray_rotations(positions, generators, tokens, squarings, squares, dtype, types)


def _transposed(layers: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(layer.transpose(0, 1) for layer in layers)
