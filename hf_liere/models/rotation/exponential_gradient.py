"""
The last factor of the gradient of exp(Σ_a x_a A_a), which [`exponential.block_rotations`] applies: φ(−ad Y), with
φ(−z) = (eᶻ − 1)/z and ad Y: W ↦ YW − WY (Hall 2015, theorem 5.4).
"""

import functools
import itertools
import math

import torch

from .backends import find_backend


# Largest spectral norm for which squaring.POLYNOMIAL is the exponential.
POLYNOMIAL_NORM = 3.2
# As polynomials of the generators, gradients take so many monomials from four axes on that each token has its own.
MOST_MOMENT_AXES = 3
# Elements that are processed at a time, to limit memory.
SLICE_ELEMENTS = 1 << 22


def largest_norm(axes: int) -> float:
    """
    Largest spectral norm of Y = Σ_a y_a A_a over `axes` axes: for three and more, one more squaring costs less than the
    gradient's polynomials of a higher degree.
    """
    return POLYNOMIAL_NORM if axes < 3 else POLYNOMIAL_NORM / 2


@functools.cache
def derivative_coefficients(norm: float, dtype: torch.dtype) -> tuple[float, ...]:
    """
    Coefficients, from the constant on, of the polynomial of the lowest degree that is near φ(−z) = Σ zⁿ/(n+1)! for
    imaginary z of at most twice `norm`, as frequencies of ad Y are differences of those of Y: a longer Taylor
    polynomial, economized by subtracting multiples of the Chebyshev polynomials iⁿTₙ(z / (2i norm)) that cancel its
    highest powers, as long as all that is subtracted is below 1e-7 or 1e-13 (Lanczos 1938).
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


def _monomials(axes: int, degree: int) -> list[tuple[int, ...]]:
    """All monomials of a degree as tuples of axes, like (0, 0, 1) for x₀²x₁; those of degree 1 in the order of axes."""
    return list(itertools.combinations_with_replacement(range(axes), degree))


@functools.cache
def _powers(axes: int, degree: int) -> list[tuple[int, ...]]:
    """The exponents of the monomials of a degree, one for each axis."""
    return [tuple(map(factors.count, range(axes))) for factors in _monomials(axes, degree)]


@functools.cache
def _raised(axes: int, degree: int) -> list[list[int]]:
    """For each axis a and each monomial of `degree`, the index of its product with x_a among those of `degree` + 1."""
    places = {monomial: place for place, monomial in enumerate(_monomials(axes, degree + 1))}
    return [[places[tuple(sorted((*factors, axis)))] for factors in _monomials(axes, degree)] for axis in range(axes)]


def upper_entries(matrices: torch.Tensor) -> torch.Tensor:
    """Of (…, b, b) matrices M the upper triangles of M − Mᵀ, row by row, (…, b(b−1)/2)."""
    size = matrices.shape[-1]
    row, column = torch.triu_indices(size, size, offset=1, device=matrices.device)
    flat = matrices.flatten(-2)
    return flat[..., row * size + column] - flat[..., column * size + row]


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
    flat = generators.to(coordinates.dtype).flatten(2)
    row, column = torch.triu_indices(size, size, offset=1, device=generators.device)
    of_coordinates = torch.zeros_like(coordinates)
    of_generators = tangents.new_zeros(axes, groups, blocks * size**2)
    step = max(1, SLICE_ELEMENTS // (blocks * size**2))
    for group, start in itertools.product(range(groups), range(0, len(coordinates), step)):
        tokens = slice(start, start + step)
        matrices = tangents.new_zeros(len(coordinates[tokens]), blocks, size, size)
        matrices[..., row, column] = tangents[group, tokens].unflatten(-1, (blocks, -1))
        exponents = (coordinates[tokens] @ flat[:, group]).view(-1, size, size)
        change = derivative(exponents.to(tangents.dtype), matrices.flatten(0, 1), largest_norm(axes))
        change = change.view(-1, blocks * size**2)
        of_coordinates[tokens] += change.to(coordinates.dtype) @ flat[:, group].T
        of_generators[:, group] += coordinates[tokens].T.to(change.dtype) @ change
    return of_coordinates, of_generators.view(generators.shape)


class GradientMoments:
    """
    Σ_p x_a φ(−ad Σ_a x_a A_a) W_p for all tokens p, as polynomials of the generators that act on the moments
    Σ_p x₁ⁱ x₂ʲ … W_p: one large product over the tokens, then commutators whose number does not depend on the tokens.

    Args:
        coordinates: (tokens, A), A ≤ `MOST_MOMENT_AXES`.
        generators: As in [`gradients_by_token`].
        tangents: Likewise.
    """

    def __init__(self, coordinates: torch.Tensor, generators: torch.Tensor, tangents: torch.Tensor):
        self.generators, self.dtype = generators, tangents.dtype
        axes, _, _, size, _ = generators.shape
        self.coefficients = derivative_coefficients(largest_norm(axes), self.dtype)
        self.levels = [_powers(axes, degree + 1) for degree in range(len(self.coefficients))]
        self.raised = [_raised(axes, degree) for degree in range(1, len(self.levels))]
        powers = torch.tensor([powers for level in self.levels for powers in level], device=generators.device)
        # Powers of coordinates of at most 1 do not overflow.
        largest = torch.cat([coordinates.new_zeros(1, axes), coordinates]).abs().amax(0)
        self.scales = torch.where(largest > 0, largest, 1.0)
        weights = (coordinates / self.scales).unsqueeze(1).pow(powers).prod(-1).to(self.dtype)  # (tokens, monomials)
        self.row, self.column = torch.triu_indices(size, size, offset=1, device=generators.device)
        self.moments = torch.matmul(0.5 * weights.T, tangents)  # (G, monomials, K·b(b−1)/2)

    def generators_gradient(self) -> torch.Tensor:
        """(A, G, K, b, b) gradient of the generators, in the type of the W."""
        axes, groups, blocks, size, _ = self.generators.shape
        scales = self.scales.view(-1, 1, 1, 1, 1)
        generators = (self.generators * scales).to(self.dtype)
        scales = scales.to(self.dtype)
        if backend := find_backend("moments_gradient", generators, size):
            return backend.moments_gradient(generators, self.moments, self.coefficients, self.raised) * scales
        generators = generators.flatten(1, 2)
        moments = self.moments.unflatten(2, (blocks, -1)).transpose(1, 2).flatten(0, 1)
        step = max(1, SLICE_ELEMENTS // (moments.shape[1] * size**2))
        parts = [
            self._gradient(generators[:, block : block + step], moments[block : block + step])
            for block in range(0, groups * blocks, step)
        ]
        return torch.cat(parts, dim=1).view(self.generators.shape) * scales

    def _gradient(self, generators: torch.Tensor, moments: torch.Tensor) -> torch.Tensor:
        """
        Horner's rule in the degree: v_j = c_{|j|−1} M_j + Σ_a [A_a, v_{j+e_a}] for the exponents j of each monomial.
        The v of degree one are the gradients.

        Args:
            generators: (A, k, b, b).
            moments: (k, monomials, b(b−1)/2).

        Returns:
            (A, k, b, b).
        """
        axes, blocks, size, _ = generators.shape
        upper = moments.new_zeros(blocks, size, moments.shape[1], size)  # (k, b, monomials, b)
        upper[:, self.row, :, self.column] = moments.permute(2, 0, 1)
        levels = upper.split([len(level) for level in self.levels], dim=2)
        total = None
        for degree in range(len(levels), 0, -1):
            # The part above the diagonal; its negative transpose is added below.
            half = (levels[degree - 1] * self.coefficients[degree - 1]).flatten(2)
            if total is not None:
                for generator, places in zip(generators, self.raised[degree - 1]):
                    # One product for all monomials, whose matrices are side by side.
                    half.baddbmm_(generator, _take(total, places).flatten(2))
            half = half.view(blocks, size, -1, size)
            total = half - half.transpose(1, 3)
        return total.permute(2, 0, 1, 3)


def _take(matrices: torch.Tensor, places: list[int]) -> torch.Tensor:
    """The monomials `places` of (k, b, monomials, b), as a view where they are consecutive."""
    if places == list(range(places[0], places[0] + len(places))):
        return matrices[:, :, places[0] : places[0] + len(places)]
    return matrices[:, :, torch.tensor(places, device=matrices.device)]
