"""
The last factor of the gradient of exp(Σ_a x_a A_a), which [`exponential.block_rotations`] applies: φ(−ad Y), with
φ(−z) = (eᶻ − 1)/z and ad Y: W ↦ YW − WY (Hall 2015, theorem 5.4).
"""

import itertools
import math

import torch

from .backends import find_backend


# Largest spectral norm of Y; the frequencies of ad Y, differences of those of Y, reach twice as far.
POLYNOMIAL_NORM = 3.2
# Elements that are processed at a time, to limit memory.
SLICE_ELEMENTS = 1 << 22


def derivative_coefficients(degree: int) -> tuple[float, ...]:
    """
    Coefficients, from the constant on, of a polynomial near φ(−z) = Σ zⁿ/(n+1)! for imaginary z of at most twice
    `POLYNOMIAL_NORM`: a longer Taylor polynomial, economized by subtracting multiples of the Chebyshev polynomials
    iⁿTₙ(z / (2i POLYNOMIAL_NORM)) that cancel its highest powers (Lanczos 1938).
    """
    terms, bound = degree + 40, 2 * POLYNOMIAL_NORM
    chebyshev = [[1.0], [0.0, 1 / bound]]
    for _ in range(2, terms):
        raised = [0.0, *(2 / bound * coefficient for coefficient in chebyshev[-1])]
        chebyshev.append([a + b for a, b in itertools.zip_longest(raised, chebyshev[-2], fillvalue=0.0)])
    coefficients = [1 / math.factorial(power + 1) for power in range(terms)]
    for power in range(terms - 1, degree, -1):
        factor = coefficients.pop() / chebyshev[power][power]
        coefficients = [a - factor * b for a, b in zip(coefficients, chebyshev[power])]
    return tuple(coefficients)


# Their errors are 7e-8 and 4e-14.
COEFFICIENTS = {torch.float32: derivative_coefficients(16), torch.float64: derivative_coefficients(24)}


def derivative(exponents: torch.Tensor, tangents: torch.Tensor) -> torch.Tensor:
    """(n, b, b) φ(−ad Y) W for each of n exponents Y, W the skew part of `tangents`, in the type of `tangents`."""
    *lower, highest = COEFFICIENTS[tangents.dtype]
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


def _raised(axes: int, degree: int) -> list[list[int]]:
    """For each axis a and each monomial of `degree`, the index of its product with x_a among those of `degree` + 1."""
    places = {monomial: place for place, monomial in enumerate(_monomials(axes, degree + 1))}
    return [[places[tuple(sorted((*factors, axis)))] for factors in _monomials(axes, degree)] for axis in range(axes)]


# By the number of axes, for each degree from 1: the exponents of the monomials, and what [`_raised`] returns.
POWERS = {
    axes: [[tuple(map(factors.count, range(axes))) for factors in _monomials(axes, degree)] for degree in range(1, 26)]
    for axes in (1, 2, 3)
}
RAISED = {axes: [_raised(axes, degree) for degree in range(1, 25)] for axes in (1, 2, 3)}


def upper_entries(matrices: torch.Tensor) -> torch.Tensor:
    """Of (…, b, b) matrices M the upper triangles of M − Mᵀ, row by row, (…, b(b−1)/2)."""
    size = matrices.shape[-1]
    row, column = torch.triu_indices(size, size, offset=1, device=matrices.device)
    flat = matrices.flatten(-2)
    return flat[..., row * size + column] - flat[..., column * size + row]


def coordinates_gradient(coordinates: torch.Tensor, generators: torch.Tensor, tangents: torch.Tensor) -> torch.Tensor:
    """
    (tokens, A) gradient of the coordinates x: Σ ⟨φ(−ad Y) W, A_a⟩ over groups and blocks, with Y = Σ_a x_a A_a.

    Args:
        coordinates: (tokens, A). The spectral norms of all Y must be at most `POLYNOMIAL_NORM`.
        generators: (A, G, K, b, b).
        tangents: As in [`GradientMoments`].
    """
    _, groups, blocks, size, _ = generators.shape
    flat = generators.to(coordinates.dtype).flatten(2)
    row, column = torch.triu_indices(size, size, offset=1, device=generators.device)
    total = torch.zeros_like(coordinates)
    for group in range(groups):
        matrices = tangents.new_zeros(len(coordinates), blocks, size, size)
        matrices[..., row, column] = tangents[group].unflatten(-1, (blocks, -1))
        exponents = (coordinates @ flat[:, group]).view(-1, size, size)
        change = derivative(exponents.to(tangents.dtype), matrices.flatten(0, 1)).view(len(coordinates), -1)
        total += change.to(total.dtype) @ flat[:, group].T
    return total


class GradientMoments:
    """
    Σ_p x_a φ(−ad Σ_a x_a A_a) W_p for all tokens p, as polynomials of the generators that act on the moments
    Σ_p x₁ⁱ x₂ʲ … W_p: one large product over the tokens, then commutators whose number does not depend on the tokens.

    Args:
        coordinates: (tokens, A), A ≤ 3. The spectral norms of all Σ_a x_a A_a must be at most `POLYNOMIAL_NORM`.
        generators: (A, G, K, b, b), skew-symmetric.
        tangents: (G, tokens, K·b(b−1)/2), float32 or float64, the [`upper_entries`] of matrices whose skew part is W.
    """

    def __init__(self, coordinates: torch.Tensor, generators: torch.Tensor, tangents: torch.Tensor):
        self.generators, self.dtype = generators, tangents.dtype
        axes, _, _, size, _ = generators.shape
        self.coefficients = COEFFICIENTS[self.dtype]
        self.levels = POWERS[axes][: len(self.coefficients)]
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
            raised = RAISED[axes][: len(self.levels) - 1]
            return backend.moments_gradient(generators, self.moments, self.coefficients, raised) * scales
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
                for generator, places in zip(generators, RAISED[axes][degree - 1]):
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
