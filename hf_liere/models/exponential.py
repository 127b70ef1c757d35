"""Rotations of dense blocks from their generators: the plain implementation of the matrix exponential."""

import itertools
import math
from typing import NamedTuple

import torch
from transformers.utils.generic import maybe_autocast

from .backends import find_backend
from .exponential_gradient import POLYNOMIAL_NORM, GradientMoments, derivative
from .tracing import OperatorContext, first_derivative_only, operator, takes_operators, values_are_unknown


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
# Used where values are unknown, as in a compiled graph: enough for norms up to 209,715 in float64. Every squaring
# doubles the rounding error, so that float32 has fewer, for norms up to 3,276. For larger norms the result is NaN.
TRACED_SQUARINGS = {torch.float64: 16, torch.float32: 10}
# The backward pass squares in float32, where each squaring doubles the error: it starts again from every fourth square.
SAVE_INTERVAL = 4
# On CPUs a chunk fits into the cache of a core, 512 KiB of float64; on other devices chunks only limit the memory.
CHUNK_ELEMENTS = 1 << 16
DEVICE_CHUNK_ELEMENTS = 1 << 22


class Rays(NamedTuple):
    """
    Tokens whose positions are the multiples 1, 2, … of a first one: R(kp) = R(p)ᵏ, one product instead of an
    exponential. On a grid that starts at zero these are all tokens but those with coprime indices.

    Attributes:
        grid: Patches per axis, whose positions are proportional to their indices.
        num_prefix_tokens: Tokens before the patches, at position zero.
    """

    grid: tuple[int, ...]
    num_prefix_tokens: int = 0

    def tokens(self) -> torch.Tensor:
        """
        (rays, longest ray) index of the token at each multiple, −1 beyond the end of a ray; tokens that are in no ray
        are at position zero.
        """
        rays = {}
        for token, index in enumerate(itertools.product(*map(range, self.grid)), start=self.num_prefix_tokens):
            multiple = math.gcd(*index)
            if multiple:
                # Raster order meets the multiples in order.
                rays.setdefault(tuple(i // multiple for i in index), []).append(token)
        longest = max(map(len, rays.values()), default=1)
        rows = [ray + [-1] * (longest - len(ray)) for ray in rays.values()]
        return torch.tensor(rows, dtype=torch.long, device="cpu").view(len(rows), longest)


class _Chunk(NamedTuple):
    """
    Rays whose first rotations are squared equally often, longest ray first.

    Attributes:
        multiples: At k − 1 the k-th tokens of all rays that have so many.
    """

    squarings: int
    multiples: tuple[torch.Tensor, ...]


def block_rotations(
    positions: torch.Tensor, generators: torch.Tensor, dtype: torch.dtype = torch.float32, rays: Rays | None = None
) -> torch.Tensor:
    """
    exp(Σ_a p_a A_a) for b > 2 (LieRE eq. 4, ComRoPE eq. 3), by scaling and squaring with matrix products only.

    A change of X = Σ_a p_a A_a has the tangent R⁻¹ dR = φ(ad X) dX with φ(z) = (1 − e⁻ᶻ)/z and ad X: W ↦ XW − WX
    (Hall 2015, theorem 5.4), exact at zero and at repeated eigenvalues. The backward pass applies the adjoint to W, the
    skew part of Rᵀ dL/dR: with X = 2ˢY it is φ(−ad Y) Π_{j<s} ½(1 + e^(2ʲ ad Y)), of which the exponentials conjugate W
    with the squares that led to R, and the rest is [`exponential_gradient.GradientMoments`]. The rotations and every
    `SAVE_INTERVAL`-th square are saved for it.

    Args:
        positions: (P, A) in the working type.
        generators: (A, …, K, b, b), skew-symmetric.
        dtype: Type of the result.
        rays: Which positions are multiples of others, if known.

    Returns:
        (…, K, P, b, b) rotations in `dtype`. The memory order is (…, P, K, b, b).
    """
    leading = generators.shape[1:-3]
    layers = generators.reshape(generators.shape[0], -1, *generators.shape[-3:])
    rotations = layer_block_rotations(positions, layers, dtype, rays)
    return torch.stack(rotations).unflatten(0, leading) if leading else rotations[0]


def layer_block_rotations(
    positions: torch.Tensor, generators: torch.Tensor, dtype: torch.dtype = torch.float32, rays: Rays | None = None
) -> tuple[torch.Tensor, ...]:
    """[`block_rotations`] of (A, G, K, b, b) generators, as a (K, P, b, b) tensor for each of the G."""
    if takes_operators(positions) and not positions.requires_grad:
        grid, num_prefix_tokens = rays or (None, 0)
        return _transposed(_block_rotations(positions, generators, grid, num_prefix_tokens, dtype))
    if values_are_unknown(positions, generators):
        squarings = TRACED_SQUARINGS[positions.dtype]
        bounds = positions.detach().abs() @ _norm_bounds(positions, generators.detach())
        fitting = torch.where(bounds <= POLYNOMIAL_NORM * 2.0**squarings, 1.0, torch.nan).to(positions.dtype)
        return _transposed(_TracedBlockRotations.apply(positions * fitting.unsqueeze(-1), generators, squarings, dtype))
    function, arguments = _known_values(positions, generators, dtype, rays)
    return _transposed(function.apply(*arguments))


def _known_values(
    positions: torch.Tensor, generators: torch.Tensor, dtype: torch.dtype, rays: Rays | None
) -> tuple[type[torch.autograd.Function], tuple]:
    """What computes the rotations where values can be looked at, and its arguments."""
    tokens = torch.arange(len(positions), device="cpu").unsqueeze(-1) if rays is None else rays.tokens()
    squarings = _squarings(positions.detach(), generators.detach(), tokens[:, 0])
    # The kernels compute float32 results in float64, and no gradient of the positions.
    compiled = positions.dtype == torch.float64 and dtype == torch.float32 and not positions.requires_grad
    backend = find_backend("block_rotations", generators, generators.shape[-1], torch.float32) if compiled else None
    if backend is not None:
        return _CompiledBlockRotations, (positions, generators, tokens, squarings, backend)
    chunks = _chunks(tokens, squarings, generators[0, 0].numel(), positions.device)
    return _BlockRotations, (positions, generators, chunks, dtype)


_ARGUMENTS = "Tensor positions, Tensor generators, SymInt[]? grid, SymInt num_prefix_tokens, ScalarType dtype"


@operator(f"({_ARGUMENTS}) -> Tensor[]")
def _block_rotations(positions, generators, grid, num_prefix_tokens, dtype):
    """[`layer_block_rotations`] in a compiled graph, which cannot know the number of squarings."""
    function, arguments = _known_values(positions, generators, dtype, grid and Rays(tuple(grid), num_prefix_tokens))
    return list(function.forward(OperatorContext(needs_generators=False), *arguments))


@operator(f"({_ARGUMENTS}, Tensor[] gradients) -> Tensor")
def _block_rotations_backward(positions, generators, grid, num_prefix_tokens, dtype, gradients):
    """The gradient of the generators. The rotations are computed again: no graph knows how many squares to save."""
    context = OperatorContext(needs_generators=True)
    function, arguments = _known_values(positions, generators, dtype, grid and Rays(tuple(grid), num_prefix_tokens))
    function.forward(context, *arguments)
    return function.backward(context, *gradients)[1].contiguous()


def _fake_rotations(positions, generators, grid, num_prefix_tokens, dtype):
    shape = positions.shape[0], *generators.shape[2:]
    return [positions.new_empty(shape, dtype=dtype) for _ in range(generators.shape[1])]


def _save_arguments(ctx, inputs, output):
    positions, generators, *ctx.others = inputs
    ctx.save_for_backward(positions, generators)


_block_rotations.register_fake(_fake_rotations)
_block_rotations_backward.register_fake(lambda positions, generators, *_: torch.empty_like(generators).contiguous())
_block_rotations.register_autograd(
    lambda ctx, gradients: (None, _block_rotations_backward(*ctx.saved_tensors, *ctx.others, gradients), *[None] * 3),
    setup_context=_save_arguments,
)


def _transposed(layers: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(layer.transpose(0, 1) for layer in layers)


def _norm_bounds(positions: torch.Tensor, generators: torch.Tensor) -> torch.Tensor:
    """(A,) tight upper bounds of the spectral norms of each axis' generators, in the type of `positions`."""
    # The spectral norm of a skew-symmetric A is at most (‖A⁴‖ / √2)^¼, in the Frobenius norm.
    squares = generators.to(positions.dtype).flatten(1, -3) @ generators.to(positions.dtype).flatten(1, -3)
    return ((squares @ squares).flatten(2).norm(dim=-1).amax(1) / math.sqrt(2)) ** 0.25


def _squarings(positions: torch.Tensor, generators: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """(tokens,) numbers of squarings, so that the norms of the scaled exponents are at most `POLYNOMIAL_NORM`."""
    norms = positions.abs() @ _norm_bounds(positions, generators)
    norms = norms[tokens.to(positions.device)].cpu().nan_to_num(0.0, 0.0, 0.0)
    return (norms / POLYNOMIAL_NORM).clamp(min=1.0).log2().ceil().long()


def _chunks(tokens: torch.Tensor, squarings: torch.Tensor, elements: int, device: torch.device) -> list[_Chunk]:
    """Chunks of rays, for rotations of so many elements each."""
    lengths = (tokens >= 0).sum(1)
    most = max(1, (CHUNK_ELEMENTS if device.type == "cpu" else DEVICE_CHUNK_ELEMENTS) // elements)
    chunks = []
    done = -1
    for count in squarings.unique().tolist():
        chosen = ((squarings > done) & (squarings <= count)).nonzero().squeeze(-1)
        # A few rays join the next group, since one extra squaring costs less than a group of their own.
        if len(chosen) * 8 < len(squarings) and count < squarings.max():
            continue
        done = count
        chosen = chosen[lengths[chosen].argsort(descending=True, stable=True)]
        for part in chosen.split(most):
            multiples = tuple(
                tokens[part[: int((lengths[part] > k).sum())], k].to(device) for k in range(int(lengths[part].max()))
            )
            chunks.append(_Chunk(count, multiples))
    return chunks


class _CompiledBlockRotations(torch.autograd.Function):
    """[`_BlockRotations`] computed by a backend, with a number of squarings for each ray."""

    @staticmethod
    def forward(ctx, positions, generators, tokens, squarings, backend):
        ctx.backend = backend
        interval = SAVE_INTERVAL if any(ctx.needs_input_grad) else None
        rotations, saved_squares, offsets = backend.block_rotations(
            positions, generators, tokens, squarings, POLYNOMIAL, interval
        )
        ctx.save_for_backward(positions, generators, tokens, squarings, saved_squares, offsets, *rotations)
        return rotations

    @staticmethod
    @first_derivative_only
    def backward(ctx, *gradients):
        positions, generators, tokens, squarings, saved_squares, offsets, *rotations = ctx.saved_tensors
        coordinates = torch.ldexp(positions[tokens[:, 0]], -squarings.unsqueeze(-1))
        with maybe_autocast("cpu", enabled=False):
            moments = GradientMoments([coordinates], generators, torch.float32)
            entries = ctx.backend.block_tangents(
                rotations, gradients, tokens, squarings, saved_squares, offsets, SAVE_INTERVAL
            )
            for group, tangents in enumerate(entries):
                moments.add(group, [(0, tangents)])
            return None, moments.generators_gradient().to(generators.dtype), None, None, None


class _BlockRotations(torch.autograd.Function):
    """(P, A) positions and (A, G, K, b, b) generators → G times (P, K, b, b)."""

    @staticmethod
    def forward(ctx, positions, generators, chunks, dtype):
        _, groups, blocks, size, _ = generators.shape
        saved_squares = []
        with maybe_autocast(positions.device.type, enabled=False):
            # Tokens at the origin belong to no ray: their rotation stays the identity.
            identity = torch.eye(size, dtype=dtype, device=positions.device)
            shape = (positions.shape[0], blocks, size, size)
            rotations = tuple(identity.expand(shape).contiguous() for _ in range(groups))
            memory = positions.new_empty(9, 0, size, size)
            for group, (squarings, multiples) in itertools.product(range(groups), chunks):
                exponents = _exponents(positions[multiples[0]], generators[:, group], squarings)  # (rays · K, b, b)
                # Buffers are reused: small products spend most of their time on allocations.
                if memory.shape[1] != exponents.shape[0]:
                    memory = exponents.new_empty(9, *exponents.shape)
                square, spare = _exponential(exponents, memory), memory[0]
                for squaring in range(squarings):
                    if squaring % SAVE_INTERVAL == 0 and any(ctx.needs_input_grad):
                        saved_squares.append(square.to(dtype, copy=True))
                    square, spare = torch.bmm(square, square, out=spare), square
                first = square.view(-1, blocks, size, size)  # (rays, K, b, b)
                rotations[group].index_copy_(0, multiples[0], first.to(dtype))
                rotation = first
                for tokens in multiples[1:]:
                    rotation = rotation[: len(tokens)] @ first[: len(tokens)]
                    rotations[group].index_copy_(0, tokens, rotation.to(dtype))
        ctx.chunks = chunks
        ctx.save_for_backward(positions, generators, *rotations, *saved_squares)
        return rotations

    @staticmethod
    @first_derivative_only
    def backward(ctx, *gradients):
        positions, generators, *saved = ctx.saved_tensors
        rotations, saved_squares = saved[: len(gradients)], iter(saved[len(gradients) :])
        coordinates = [positions[multiples[0]] * 2.0**-squarings for squarings, multiples in ctx.chunks]
        positions_gradient = torch.zeros_like(positions)

        def tangents_of(group):
            for chunk, (squarings, multiples) in enumerate(ctx.chunks):
                chosen = [rotations[group].index_select(0, tokens) for tokens in multiples]
                tangents = [
                    rotation.transpose(-1, -2) @ gradients[group].index_select(0, tokens)
                    for rotation, tokens in zip(chosen, multiples)
                ]
                tangents = _tangent_of_first(chosen[0], tangents).flatten(0, 1)
                for squaring in range(0, squarings, SAVE_INTERVAL):
                    tangents = _conjugated(tangents, next(saved_squares), min(SAVE_INTERVAL, squarings - squaring))
                if ctx.needs_input_grad[0]:
                    # Only positions that are no multiples of others need a gradient: the others come from a grid.
                    exponents = _exponents(positions[multiples[0]], generators[:, group], squarings)
                    change = derivative(exponents.to(tangents.dtype), tangents).view(len(chosen[0]), -1)
                    flat = generators[:, group].to(positions.dtype).flatten(1)
                    positions_gradient[multiples[0]] += change.to(positions.dtype) @ flat.T * 2.0**-squarings
                # The factors ½ of the squarings are those of the scaled exponents, so that they are not applied here.
                yield chunk, moments.entries(tangents.view(chosen[0].shape))

        with maybe_autocast(positions.device.type, enabled=False):
            moments = GradientMoments(coordinates, generators, gradients[0].dtype)
            for group in range(generators.shape[1]):
                moments.add(group, tangents_of(group))
            generators_gradient = moments.generators_gradient()
        return positions_gradient, generators_gradient.to(generators.dtype), None, None


class _TracedBlockRotations(_BlockRotations):
    """[`_BlockRotations`] for graphs: one number of squarings for all tokens, and no operation in place."""

    @staticmethod
    def forward(ctx, positions, generators, squarings, dtype):
        _, groups, blocks, size, _ = generators.shape
        rotations, saved_squares = [], []
        with maybe_autocast(positions.device.type, enabled=False):
            for group in range(groups):
                square = _exponential(_exponents(positions, generators[:, group], squarings))
                for squaring in range(squarings):
                    if squaring % SAVE_INTERVAL == 0 and any(ctx.needs_input_grad):
                        saved_squares.append(square.to(dtype))
                    square = torch.bmm(square, square)
                rotations.append(square.view(-1, blocks, size, size).to(dtype))
        ctx.chunks = [_Chunk(squarings, (torch.arange(positions.shape[0], device=positions.device),))]
        ctx.save_for_backward(positions, generators, *rotations, *saved_squares)
        return tuple(rotations)


def _tangent_of_first(first: torch.Tensor, tangents: list[torch.Tensor]) -> torch.Tensor:
    """
    The gradient of a tangent Ω of R, R → R(1 + Ω), from the gradients Wₖ = (Rᵏ)ᵀ dL/d(Rᵏ) of tangents of R, R², …:
    Σₖ Σ_{j<k} Rʲ Wₖ R⁻ʲ, by Horner's rule.

    Args:
        first: (rays, K, b, b), R.
        tangents: (rays with so many tokens, K, b, b) for each multiple; overwritten.
    """
    tail, *shorter = reversed(tangents)
    total = tail
    for tangent in shorter:
        longer = first[: len(tail)]
        tangent[: len(tail)] += tail
        conjugated = longer @ total @ longer.transpose(-1, -2)
        tail, total = tangent, tangent.clone()
        total[: len(longer)] += conjugated
    return total


def _conjugated(tangents: torch.Tensor, square: torch.Tensor, squarings: int) -> torch.Tensor:
    """Π_{j<s} (1 + e^(2ʲ ad Z)) W for the square e^Z; (n, b, b)."""
    size = tangents.shape[-1]
    # The next square and the first half of the conjugation are one product, as wide products are more efficient.
    both = torch.cat([square, tangents], dim=-1)  # (n, b, 2b)
    for _ in range(squarings):
        square, tangents = both.split(size, dim=-1)
        both = torch.bmm(square, both)
        half = both[..., size:]
        half.copy_(torch.baddbmm(tangents, half, square.transpose(-1, -2)))
    return both[..., size:]


def _exponents(positions: torch.Tensor, generators: torch.Tensor, squarings: int) -> torch.Tensor:
    """(P · K, b, b) scaled exponents 2^−s Σ_a p_a A_a."""
    flat = generators.to(positions.dtype).flatten(1)
    return ((positions * 2.0**-squarings) @ flat).view(-1, *generators.shape[-2:])


def _exponential(exponents: torch.Tensor, memory: torch.Tensor | None = None) -> torch.Tensor:
    """
    (n, b, b) values of [`POLYNOMIAL`], without squarings. They are a part of `memory`, (9, n, b, b), if it is given,
    which is overwritten.
    """
    if memory is None:
        second = torch.bmm(exponents, exponents)
        third = torch.bmm(second, exponents)
        powers = torch.stack([exponents, second, third, torch.bmm(third, third)])
        coefficients = powers.new_tensor(POLYNOMIAL)
        identity = torch.eye(exponents.shape[-1], dtype=exponents.dtype, device=exponents.device)
        combinations = (coefficients[:, 1:] @ powers.flatten(1)).view(5, *exponents.shape)
        b1, b2, b3, b4, b5 = combinations + coefficients[:, 0].view(5, 1, 1, 1) * identity
        product = torch.baddbmm(b4, b1, b5)
        return torch.baddbmm(b2, b3 + product, product)
    powers, combinations = memory[:4], memory[4:]
    first, second, third, sixth = powers
    first.copy_(exponents)
    torch.bmm(first, first, out=second)
    torch.bmm(second, first, out=third)
    torch.bmm(third, third, out=sixth)
    coefficients = powers.new_tensor(POLYNOMIAL)
    torch.mm(coefficients[:, 1:], powers.flatten(1), out=combinations.flatten(1))
    combinations.diagonal(dim1=-2, dim2=-1).add_(coefficients[:, 0].view(5, 1, 1))
    b1, b2, b3, b4, b5 = combinations
    product = b4.baddbmm_(b1, b5)
    return b2.baddbmm_(b3.add_(product), product)
