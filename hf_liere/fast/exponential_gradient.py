"""
The gradient of the rotations of dense blocks.

A change of X = Σ_a p_a A_a has the tangent R⁻¹ dR = φ(ad X) dX with φ(z) = (1 − e⁻ᶻ)/z and ad X: W ↦ XW − WX (Hall
2015, theorem 5.4), exact at zero and at repeated eigenvalues. The backward pass applies the adjoint to W, the skew part
of Rᵀ dL/dR: with X = 2ˢY it is φ(−ad Y) Π_{j<s} ½(1 + e^(2ʲ ad Y)). The exponentials conjugate W with the squares that
led to R: plain operations compute them again, kernels save every `SAVE_INTERVAL`-th. A polynomial computes φ(−z) =
(eᶻ − 1)/z.
"""

import functools
import itertools
import math

import torch

from .constants import device_constant
from .dispatch import find_backend, operator
from .scaling_and_squaring import (
    Results,
    batch_tangents,
    find_exponential_backend,
    largest_norm,
    num_saved,
    ray_squarings,
    ray_tokens,
)


# From four axes on there are too many monomials: compute the gradient token by token.
MOST_MOMENT_AXES = 3
# Elements that are processed at a time, to limit memory.
SLICE_ELEMENTS = 1 << 22
MOMENT_ELEMENTS = 1 << 24
# Of the operators of the rotations and of their gradients.
ARGUMENTS = (
    "Tensor positions, Tensor generators, Tensor squarings, SymInt[]? grid, SymInt num_prefix_tokens, bool centred"
)


@operator(
    f"({ARGUMENTS}, Tensor[] results, Tensor[] gradients, bool needs_positions) -> (Tensor, Tensor)",
    fake=lambda positions, generators, *_: tuple(torch.empty_like(x).contiguous() for x in (positions, generators)),
    reads_values=True,
)
def block_rotations_backward(
    positions, generators, squarings, grid, num_prefix_tokens, centred, results, gradients, needs_positions
):
    """Gradients of positions, zeros unless they are needed, and of generators."""
    *rotations, squares = results
    size, most = generators.shape[-1], int(squarings.max()) if len(squarings) else 0
    kernels = "block_rotations", "block_tangents"
    found = [find_exponential_backend(name, positions, generators, size, squares.dtype) for name in kernels]
    if (backend := found[0]) is None or found[1] is None:
        return batched_rotations_backward(positions, generators, rotations, gradients, most, needs_positions)
    rays = ray_tokens(grid, num_prefix_tokens, centred, len(positions))
    squarings = ray_squarings(rays.indices, squarings)
    offsets = num_saved(squarings).cumsum(0)
    if len(squarings) and int(offsets[-1]) > squares.shape[1]:
        # In a graph there was not enough room.
        squares = squares.new_empty(squares.shape[0], int(offsets[-1]), *squares.shape[2:])
        backend.block_rotations(positions, generators, rays, squarings, squares, squares.dtype)
    first = rays.indices[:, 0].to(positions.device)
    scales = torch.ldexp(torch.ones_like(squarings, dtype=positions.dtype), -squarings).to(positions.device)
    coordinates = positions[first] * scales.unsqueeze(-1)  # (rays, A)
    entries = backend.block_tangents(rotations, gradients, rays, squarings, squares)  # (G, rays, K·b(b−1)/2)
    positions_gradient = torch.zeros_like(positions).contiguous()
    if needs_positions or positions.shape[1] > MOST_MOMENT_AXES:
        coordinates_gradient, generators_gradient = gradients_by_token(coordinates, generators, entries)
        # The other positions are multiples on a grid, which need no gradient.
        positions_gradient.index_copy_(0, first, coordinates_gradient * scales.unsqueeze(-1))
    else:
        generators_gradient = gradient_by_moments(coordinates, generators, entries)
    return positions_gradient, generators_gradient.to(generators.dtype).contiguous()


def batched_rotations_backward(
    positions: torch.Tensor,
    generators: torch.Tensor,
    rotations: Results,
    gradients: Results,
    squarings: int,
    needs_positions: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As [`block_rotations_backward`], by plain operations with one number of squarings and without stored squares."""
    _, groups, blocks, size, _ = generators.shape
    entries = rotations[0].new_empty(groups, len(positions), blocks * (size * (size - 1) // 2))
    for batch, tangents in batch_tangents(positions, generators, squarings, rotations, gradients):
        entries[batch.layers, batch.tokens] = upper_entries(tangents).flatten(2).transpose(0, 1)
    scale = 2.0**-squarings
    positions_gradient = torch.zeros_like(positions).contiguous()
    if needs_positions or not moments_are_fewer(positions, entries.dtype):
        scaled_gradient, generators_gradient = gradients_by_token(positions * scale, generators, entries)
        positions_gradient.add_(scaled_gradient, alpha=scale)
    else:
        generators_gradient = gradient_by_moments(positions * scale, generators, entries)
    return positions_gradient, generators_gradient.to(generators.dtype).contiguous()


@functools.cache
def derivative_coefficients(norm: float, dtype: torch.dtype) -> tuple[float, ...]:
    """
    Coefficients, constant first, of a polynomial of low degree near φ(−z) = Σ zⁿ/(n+1)!, for imaginary z of at most
    twice `norm`: frequencies of ad Y are differences of those of Y.

    A longer Taylor polynomial is economized (Lanczos 1938): multiples of the Chebyshev polynomials iⁿTₙ(z / (2i norm))
    cancel its highest powers while their sum stays below 1e-7 (float32) or 1e-13 (float64).
    """
    error, terms, bound = {torch.float32: 1e-7, torch.float64: 1e-13}[dtype], 64, 2 * norm
    chebyshev = [[1.0], [0.0, 1 / bound]]
    for _ in range(2, terms):
        raised = [0.0, *(2 / bound * coefficient for coefficient in chebyshev[-1])]
        chebyshev.append([a + b for a, b in itertools.zip_longest(raised, chebyshev[-2], fillvalue=0.0)])
    coefficients = [1 / math.factorial(power + 1) for power in range(terms)]
    # |Tₙ| ≤ 1 between the ends.
    while (error := error - abs(factor := coefficients[-1] / chebyshev[len(coefficients) - 1][-1])) > 0:
        subtracted = chebyshev[len(coefficients) - 1]
        coefficients = [a - factor * b for a, b in zip(coefficients[:-1], subtracted)]
    return tuple(coefficients)


def derivative(exponents: torch.Tensor, tangents: torch.Tensor, norm: float) -> torch.Tensor:
    """
    (n, b, b) φ(−ad Y) W for each of n exponents Y of spectral norms up to `norm`, W the skew part of `tangents`, in the
    type of `tangents`.
    """
    *lower, highest = derivative_coefficients(norm, tangents.dtype)
    tangents = 0.5 * (tangents - tangents.transpose(-1, -2))
    total = highest * tangents
    for coefficient in reversed(lower):
        # A commutator needs one product only, since WY = (YW)ᵀ.
        product = torch.bmm(exponents, total)
        total = (product - product.transpose(-1, -2)).add_(tangents, alpha=coefficient)
    return total


@functools.cache
def _powers(axes: int, degree: int) -> list[tuple[int, ...]]:
    """All monomials of a degree as exponents of the axes, like (2, 1) for x₀²x₁, in lexicographic order of factors."""
    monomials = itertools.combinations_with_replacement(range(axes), degree)
    return [tuple(map(factors.count, range(axes))) for factors in monomials]


@functools.cache
def product_indices(axes: int, degree: int) -> list[list[int]]:
    """Index of x_a · m among the monomials of `degree` + 1, for each axis a and each monomial m of `degree`."""
    places = {powers: place for place, powers in enumerate(_powers(axes, degree + 1))}
    return [
        [places[tuple(n + (a == axis) for a, n in enumerate(powers))] for powers in _powers(axes, degree)]
        for axis in range(axes)
    ]


@functools.cache
def _upper_places(size: int) -> tuple[int, ...]:
    """Indices of the upper triangle of a flattened matrix."""
    return tuple(row * size + column for row, column in itertools.combinations(range(size), 2))


def upper_entries(matrices: torch.Tensor) -> torch.Tensor:
    """(…, b(b−1)/2) upper triangles of M − Mᵀ, row by row, for (…, b, b) matrices M."""
    size = matrices.shape[-1]
    entries = device_constant(_upper_places(size), torch.long, matrices.device)  # (b(b−1)/2,)
    return (matrices - matrices.mT).flatten(-2).index_select(-1, entries)


def gradients_by_token(
    coordinates: torch.Tensor, generators: torch.Tensor, tangents: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Gradients of the coordinates x, Σ ⟨φ(−ad Y) W, A_a⟩ over groups and blocks with Y = Σ_a x_a A_a, and of the
    generators, Σ x_a φ(−ad Y) W over tokens.

    Args:
        coordinates: (tokens, A).
        generators: (A, G, K, b, b), skew-symmetric. The spectral norms of all Y must be at most `largest_norm`.
        tangents: (G, tokens, K·b(b−1)/2), float32 or float64, the [`upper_entries`] of matrices whose skew part is W.

    Returns:
        (tokens, A) in the type of the coordinates and (A, G, K, b, b) in the type of the tangents.
    """
    axes, groups, blocks, size, _ = generators.shape
    flat = generators.to(coordinates.dtype).flatten(1)  # (A, G·K·b²)
    row, column = torch.triu_indices(size, size, offset=1, device=generators.device)
    coordinates_gradient = torch.zeros_like(coordinates)
    generators_gradient = tangents.new_zeros(flat.shape)
    step = max(1, SLICE_ELEMENTS // flat.shape[1])
    for start in range(0, len(coordinates), step):
        tokens = slice(start, start + step)
        matrices = tangents.new_zeros(len(coordinates[tokens]), groups, blocks, size, size)
        matrices[..., row, column] = tangents[:, tokens].transpose(0, 1).unflatten(-1, (blocks, -1))
        exponents = (coordinates[tokens] @ flat).view(-1, size, size)
        change = derivative(exponents.to(tangents.dtype), matrices.flatten(0, 2), largest_norm(axes))
        change = change.view(-1, flat.shape[1])  # (tokens, G·K·b²)
        coordinates_gradient[tokens] = change.to(coordinates.dtype) @ flat.T
        generators_gradient += coordinates[tokens].T.to(change.dtype) @ change
    return coordinates_gradient, generators_gradient.view(generators.shape)


def moments_are_fewer(positions: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether there are fewer monomials in [`gradient_by_moments`] than (P, A) positions; tangents are in `dtype`."""
    axes = positions.shape[1]
    degrees = len(derivative_coefficients(largest_norm(axes), dtype))
    return axes <= MOST_MOMENT_AXES and math.comb(degrees + axes, axes) - 1 < len(positions)


def gradient_by_moments(coordinates: torch.Tensor, generators: torch.Tensor, tangents: torch.Tensor) -> torch.Tensor:
    """
    As the gradient of the generators of [`gradients_by_token`], for up to `MOST_MOMENT_AXES` axes: polynomials of the
    generators act on the moments Σ_p x₁ⁱ x₂ʲ … W_p, one large product over the tokens, then a number of commutators
    that does not depend on them.
    """
    axes, groups, blocks, size, _ = generators.shape
    coefficients = derivative_coefficients(largest_norm(axes), tangents.dtype)
    degrees = range(1, len(coefficients) + 1)
    monomials = tuple(powers for degree in degrees for powers in _powers(axes, degree))
    # Powers of coordinates of at most 1 do not overflow.
    largest = torch.cat([coordinates.new_zeros(1, axes), coordinates]).abs().amax(0)
    scales = largest.clamp(min=torch.finfo(largest.dtype).tiny)
    powers = device_constant(monomials, torch.long, scales.device)  # (monomials, A)
    weights = (coordinates / scales).unsqueeze(1).pow(powers).prod(-1).to(tangents.dtype)  # (tokens, monomials)
    moments = torch.matmul(0.5 * weights.T, tangents)  # (G, monomials, K·b(b−1)/2)
    scales = scales.view(-1, 1, 1, 1, 1)
    scaled = (generators * scales).to(tangents.dtype)
    scales = scales.to(tangents.dtype)
    if backend := find_backend("moments_gradient", scaled, size):
        indices = [product_indices(axes, degree) for degree in degrees[:-1]]
        return backend.moments_gradient(scaled, moments, coefficients, indices) * scales
    scaled = scaled.flatten(1, 2)
    moments = moments.unflatten(2, (blocks, -1)).transpose(1, 2).flatten(0, 1)
    step = max(1, MOMENT_ELEMENTS // (moments.shape[1] * size**2))
    parts = [
        _apply_polynomials(scaled[:, block : block + step], moments[block : block + step], coefficients)
        for block in range(0, groups * blocks, step)
    ]
    return torch.cat(parts, dim=1).view(generators.shape) * scales


def _apply_polynomials(
    generators: torch.Tensor, moments: torch.Tensor, coefficients: tuple[float, ...]
) -> torch.Tensor:
    """
    Horner's rule in the degree: v_j = c_{|j|−1} M_j + Σ_a [A_a, v_{j+e_a}] for the exponents j of each monomial and the
    (k, monomials, b(b−1)/2) moments M. The v of degree one are the (A, k, b, b) gradients of the generators.
    """
    axes, blocks, size, _ = generators.shape
    row, column = torch.triu_indices(size, size, offset=1, device=generators.device)
    upper = moments.new_zeros(blocks, size, moments.shape[1], size)  # (k, b, monomials, b)
    upper[:, row, :, column] = moments.permute(2, 0, 1)
    levels = upper.split([len(_powers(axes, degree + 1)) for degree in range(len(coefficients))], dim=2)
    total = None
    for degree in range(len(levels), 0, -1):
        # Half of a skew-symmetric matrix; its negative transpose is added below.
        half = (levels[degree - 1] * coefficients[degree - 1]).flatten(2)
        if total is not None:
            for generator, places in zip(generators, product_indices(axes, degree)):
                # One product for all monomials, whose matrices are side by side.
                half.baddbmm_(generator, _take(total, places).flatten(2))
        half = half.view(blocks, size, -1, size)
        total = half - half.transpose(1, 3)
    assert total is not None, "there is a degree"
    return total.permute(2, 0, 1, 3)


def _take(matrices: torch.Tensor, places: list[int]) -> torch.Tensor:
    """The monomials `places` of (k, b, monomials, b), as a view where they are consecutive."""
    if places == list(range(places[0], places[0] + len(places))):
        return matrices[:, :, places[0] : places[0] + len(places)]
    return matrices[:, :, torch.tensor(places, device=matrices.device)]
