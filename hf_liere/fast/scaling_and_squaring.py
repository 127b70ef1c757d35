"""
Matrix exponentials by scaling and squaring, with matrix products alone: exp(X) = exp(2⁻ˢX)^(2ˢ), by a polynomial of the
scaled exponent and s squarings.
"""

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

import torch
from transformers.utils.generic import maybe_autocast

from .constants import device_constant
from .dispatch import find_backend


# (P, K, b, b) of every layer: one tensor, or a list.
Results: TypeAlias = torch.Tensor | list[torch.Tensor]
# Largest spectral norm for which POLYNOMIAL is the exponential.
POLYNOMIAL_NORM = 3.2
# P(x) of degree 18 in five products (scheme of Bader, Blanes and Casas 2019, eq. 23): with the combinations B₁ … B₅ of
# 1, x, x², x³, x⁶ in the rows below, Q = B₁B₅ + B₄ and P = B₂ + (B₃ + Q) Q. P is the polynomial with P(0) = 1 that
# interpolates e^(iφ) in the Chebyshev points of |φ| ≤ POLYNOMIAL_NORM, with an error of 2e-13: the spectrum of a
# skew-symmetric matrix is imaginary, so the exponential needs no accuracy elsewhere.
POLYNOMIAL = (
    (0.046014031967345956404, -0.12829239509055682887, -0.0086190452043831576574, -0.0009708167894662686554, 0.0),
    (-7.436071040167876, 1.0967138264914148, 0.9805621491119557, -0.016487091429580077, -0.00053250217893578),
    (2.3637198439526685953, 1.9469494375136080881, 0.0975735182129525, 0.002290955806307134, 0.00003501107180980672),
    (1.9489950753324255, -0.6227656338610917167, 0.06987186799980863, 0.026504164510235873, -0.000012858941845688914),
    (0.10615836313296318, 0.3127635065704058389, -0.09672525453016817, -0.014771321279952634, -0.000012114218070775968),
)
# Used where values are unknown, as in an exported graph: enough for norms up to 209,715 in float64. Every squaring
# doubles the rounding error, so float32 gets fewer, for norms up to 3,276. For larger norms the result is NaN.
PORTABLE_SQUARINGS = {torch.float64: 16, torch.float32: 10}
# The backward pass of kernels squares in float32, where each squaring doubles the error: it starts again from every
# sixth square. With every fourth, the gradient of LieRE64 would have half the error, 8e-7, and the squares twice the
# memory.
SAVE_INTERVAL = 6
# For queries and keys in bfloat16: the largest number of squarings of any token with which kernels compute in float32.
# Its polynomial adds errors of up to 2e-6 times the norm, less than a tenth of what rounding to the type adds.
FLOAT32_SQUARINGS = {torch.bfloat16: 5}
# Numbers in one batch. On CPUs it fits into the cache of a core, 512 KiB of float64; on other devices a product of a
# batch takes longer than its launch, and larger ones would only need more memory.
CHUNK_ELEMENTS = 1 << 16
DEVICE_CHUNK_ELEMENTS = 1 << 22


class RayTokens(NamedTuple):
    """
    Tokens by the ray from the origin that they are on: R(kp) = R(p)ᵏ, one product instead of an exponential. Tokens at
    the origin are on no ray.

    Attributes:
        indices: (rays, longest ray) index of the token at each multiple, −1 beyond the end of a ray.
        step: 1 for the multiples 1, 2, 3, …; 2 for 1, 3, 5, …, where R((k + 2)p) = R(kp) R(p)².
        mirror: Token `mirror` − i is at the negative position of token i: R(−p) = R(p)ᵀ. −1 without such tokens.
    """

    indices: torch.Tensor
    step: int = 1
    mirror: int = -1


class Rays(NamedTuple):
    """
    A grid with tokens on rays. If it starts at the origin, rays start at tokens with coprime indices. If the origin is
    its middle, the second half of the tokens is on rays and the first half is their mirror image; positions along axes
    of even size are odd multiples of half a step, and so are those along rays.

    Attributes:
        grid: Patches per axis, with equal steps along each axis.
        num_prefix_tokens: Tokens before the patches, at position zero.
        centred: Whether the origin is the middle of the grid and not the first patch.
    """

    grid: tuple[int, ...]
    num_prefix_tokens: int = 0
    centred: bool = False

    def tokens(self) -> RayTokens:
        """The tokens on the rays."""
        return _grid_rays(*self)


@functools.lru_cache(maxsize=64)
def _grid_rays(grid: tuple[int, ...], num_prefix_tokens: int, centred: bool) -> RayTokens:
    rays: dict[tuple[int, ...], list[int]] = {}
    for token, index in enumerate(itertools.product(*map(range, grid)), start=num_prefix_tokens):
        if centred:
            # In half steps.
            index = tuple(2 * i - size + 1 for i, size in zip(index, grid))
        multiple = math.gcd(*index)
        # Raster order is that of tuples: those above zero are the second half, and multiples come in order.
        if index > (0,) * len(grid):
            rays.setdefault(tuple(i // multiple for i in index), []).append(token)
    longest = max(map(len, rays.values()), default=1)
    rows = [ray + [-1] * (longest - len(ray)) for ray in rays.values()]
    # Training cannot use tensors that inference mode made.
    with torch.inference_mode(False):
        indices = torch.tensor(rows, dtype=torch.long, device="cpu").view(len(rows), longest)
    if not centred:
        return RayTokens(indices)
    step = 2 if any(size % 2 == 0 for size in grid) else 1
    return RayTokens(indices, step, mirror=2 * num_prefix_tokens + math.prod(grid) - 1)


def ray_tokens(grid: Sequence[int] | None, num_prefix_tokens: int, centred: bool, num_tokens: int) -> RayTokens:
    """The tokens of [`Rays`], or every token as a separate ray without a grid."""
    if grid is None:
        return RayTokens(torch.arange(num_tokens, device="cpu").unsqueeze(-1))
    return Rays(tuple(grid), num_prefix_tokens, centred).tokens()


def ray_squarings(tokens: torch.Tensor, squarings: torch.Tensor) -> torch.Tensor:
    """
    (rays,) how often the first rotation of each ray is squared, from the (P,) squarings of all tokens and the (rays,
    longest ray) `tokens` of [`RayTokens`]. Small groups join the next number: one more squaring costs less than a
    separate group.
    """
    squarings = squarings[tokens[:, 0]]  # (rays,)
    counts, done = squarings.unique(), -1
    for count in counts.tolist():
        joining = (squarings > done) & (squarings <= count)
        if count == counts[-1] or int(joining.sum()) * 8 >= len(squarings):
            squarings, done = squarings.masked_fill(joining, count), count
    return squarings


def num_saved(squarings: torch.Tensor) -> torch.Tensor:
    """(rays,) numbers of squares that are saved, every `SAVE_INTERVAL`-th one."""
    return (squarings + SAVE_INTERVAL - 1) // SAVE_INTERVAL


def first_square(squarings: torch.Tensor) -> torch.Tensor:
    """(rays,) indices of the first saved square of each ray."""
    counts = num_saved(squarings)
    return counts.cumsum(0) - counts


def largest_norm(axes: int) -> float:
    """
    Largest spectral norm of Y = Σ_a y_a A_a over `axes` axes: for three and more, one more squaring costs less than the
    gradient's polynomials of a higher degree.
    """
    return POLYNOMIAL_NORM if axes < 3 else POLYNOMIAL_NORM / 2


def norm_bounds(positions: torch.Tensor, generators: torch.Tensor) -> torch.Tensor:
    """(A,) tight upper bounds of the spectral norms of each axis' generators, in the type of `positions`."""
    # The spectral norm of a skew-symmetric A is at most (‖A⁴‖ / √2)^¼, in the Frobenius norm.
    squares = generators.to(positions.dtype).flatten(1, -3) @ generators.to(positions.dtype).flatten(1, -3)
    return ((squares @ squares).flatten(2).norm(dim=-1).amax(1) / math.sqrt(2)) ** 0.25


def exponential_dtype(positions: torch.Tensor, squarings: torch.Tensor, dtype: torch.dtype) -> torch.dtype:
    """Type of products in kernels, for (P,) squarings and queries in `dtype`."""
    most = int(squarings.max()) if len(squarings) else 0
    return torch.float32 if most <= FLOAT32_SQUARINGS.get(dtype, -1) else positions.dtype


def find_exponential_backend(
    function: str, positions: torch.Tensor, generators: torch.Tensor, block_size: int, dtype: torch.dtype
):
    """The backend that computes a function with float32 results from positions in float64, if any."""
    if positions.dtype != torch.float64 or dtype != torch.float32:
        return None
    return find_backend(function, generators, block_size, torch.float32)


class Batch(NamedTuple):
    """
    Some `layers` and `tokens`, and room for (9, tokens · layers · K, b, b) matrices, of which the first are the scaled
    exponents 2^−s Σ_a p_a A_a.
    """

    layers: slice
    tokens: slice
    memory: torch.Tensor


def batches(positions: torch.Tensor, generators: torch.Tensor, squarings: int, together: bool) -> Iterator[Batch]:
    """Batches of (P, A) positions and (A, G, K, b, b) generators, with all layers together or one after the other."""
    scaled, generators = positions * 2.0**-squarings, generators.to(positions.dtype)
    step = generators.shape[1] if together else 1
    for first in range(0, generators.shape[1], step):
        layers = slice(first, first + step)
        flat = generators[:, layers].flatten(1)  # (A, layers · K · b²)
        elements = CHUNK_ELEMENTS if positions.device.type == "cpu" and not together else DEVICE_CHUNK_ELEMENTS
        size = max(1, elements // flat.shape[1])
        memory = positions.new_empty(0)
        for start in range(0, len(positions), size):
            tokens = slice(start, start + size)
            chosen = scaled[tokens]  # (tokens, A)
            # Memory is reused: small products spend most of their time on allocations.
            if memory.shape[1:] != (len(chosen) * flat.shape[1],):
                memory = positions.new_empty(9, len(chosen) * flat.shape[1])
            torch.mm(chosen, flat, out=memory[0].view(len(chosen), -1))
            yield Batch(layers, tokens, memory.view(9, -1, *generators.shape[-2:]))


def batch_rotations(
    positions: torch.Tensor, generators: torch.Tensor, squarings: int, together: bool
) -> Iterator[tuple[Batch, torch.Tensor]]:
    """
    exp(Σ_a p_a A_a) of every [`Batch`], (tokens, layers, K, b, b), NaN where these squarings are too few for the norm.
    """
    for batch in batches(positions, generators, squarings, together):
        square, other = _exponential_within(batch.memory), batch.memory[3]  # (tokens · layers · K, b, b) each
        # The other is the sixth power of the exponent, whose eigenvalues are pairs ±iλ: its norm is at least √2 λ⁶.
        excess = other.norm(dim=(-2, -1), keepdim=True) > math.sqrt(2) * POLYNOMIAL_NORM**6
        square.masked_fill_(excess, torch.nan)
        for _ in range(squarings):
            square, other = torch.bmm(square, square, out=other), square
        yield batch, square.view(-1, *generators[0, batch.layers].shape)


def batch_tangents(
    positions: torch.Tensor, generators: torch.Tensor, squarings: int, rotations: Results, gradients: Results
) -> Iterator[tuple[Batch, torch.Tensor]]:
    """
    For every [`Batch`] (tokens, layers, K, b, b) matrices whose skew part is the gradient of the tangents of the scaled
    exponents, from rotations and their gradients, (P, K, b, b) for each layer; see `exponential_gradient`.
    """
    for batch in batches(positions, generators, squarings, together=isinstance(rotations, torch.Tensor)):
        square, (other, product, tangents) = _exponential_within(batch.memory), batch.memory[:3]
        # W = Rᵀ dL/dR
        rotation, gradient = (_of_batch(results, batch) for results in (rotations, gradients))
        by_layer = rotation.mT @ gradient.to(rotation.dtype)  # (layers, tokens, K, b, b)
        tangents.view(-1, *generators[0, batch.layers].shape).copy_(by_layer.transpose(0, 1))
        for _ in range(squarings):
            # (1 + e^(2ʲ ad Y)) W; the scaled exponents contain the factors ½.
            tangents.baddbmm_(torch.bmm(square, tangents, out=product), square.mT)
            square, other = torch.bmm(square, square, out=other), square
        yield batch, tangents.view(-1, *generators[0, batch.layers].shape)


def _of_batch(results: Results, batch: Batch) -> torch.Tensor:
    """(layers, tokens, K, b, b) of a batch."""
    if isinstance(results, torch.Tensor):
        return results[batch.layers, batch.tokens]
    return torch.stack([layer[batch.tokens] for layer in results[batch.layers]])


def portable_rotations(positions: torch.Tensor, generators: torch.Tensor, dtype: torch.dtype) -> list[torch.Tensor]:
    """Rotations for a graph, of operations of PyTorch alone, as [`exponentials.exponentiate`]; NaN for large norms."""
    squarings = PORTABLE_SQUARINGS[positions.dtype]
    bounds = positions.detach().abs() @ norm_bounds(positions, generators.detach())  # (P,)
    fitting = torch.where(bounds <= POLYNOMIAL_NORM * 2.0**squarings, 1.0, torch.nan).to(positions.dtype)
    rotations = []
    with maybe_autocast(positions.device.type, enabled=False):
        for group in range(generators.shape[1]):
            exponents = _exponents(positions * fitting.unsqueeze(-1), generators[:, group], squarings)
            rotation = _exponential(exponents)  # (P · K, b, b)
            for _ in range(squarings):
                rotation = torch.bmm(rotation, rotation)
            rotations.append(rotation.view(-1, *generators.shape[2:]).to(dtype))  # (P, K, b, b)
    return rotations


def _exponents(positions: torch.Tensor, generators: torch.Tensor, squarings: int) -> torch.Tensor:
    """(P · K, b, b) scaled exponents 2^−s Σ_a p_a A_a."""
    flat = generators.to(positions.dtype).flatten(1)  # (A, K · b²)
    return ((positions * 2.0**-squarings) @ flat).view(-1, *generators.shape[-2:])


def _exponential(exponents: torch.Tensor) -> torch.Tensor:
    """[`POLYNOMIAL`] of (n, b, b) exponents, without squarings."""
    second = torch.bmm(exponents, exponents)
    third = torch.bmm(second, exponents)
    powers = torch.stack([exponents, second, third, torch.bmm(third, third)])  # (4, n, b, b)
    coefficients = powers.new_tensor(POLYNOMIAL)
    identity = torch.eye(exponents.shape[-1], dtype=exponents.dtype, device=exponents.device)
    combinations = (coefficients[:, 1:] @ powers.flatten(1)).view(5, *exponents.shape)
    b1, b2, b3, b4, b5 = combinations + coefficients[:, 0].view(5, 1, 1, 1) * identity
    product = torch.baddbmm(b4, b1, b5)
    return torch.baddbmm(b2, b3 + product, product)


def _exponential_within(memory: torch.Tensor) -> torch.Tensor:
    """As [`_exponential`], of the first (n, b, b) of `memory`, (9, n, b, b), of which the result is another part."""
    powers, combinations = memory[:4], memory[4:]
    first, second, third, sixth = powers
    torch.bmm(first, first, out=second)
    torch.bmm(second, first, out=third)
    torch.bmm(third, third, out=sixth)
    coefficients = device_constant(POLYNOMIAL, powers.dtype, powers.device)
    torch.mm(coefficients[:, 1:], powers.flatten(1), out=combinations.flatten(1))
    combinations.diagonal(dim1=-2, dim2=-1).add_(coefficients[:, 0].view(5, 1, 1))
    b1, b2, b3, b4, b5 = combinations
    product = b4.baddbmm_(b1, b5)
    return b2.baddbmm_(b3.add_(product), product)
