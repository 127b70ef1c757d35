"""
Rotations of all layers, exp(Σ_a p_a A_a) for blocks of at most 16 channels, in one launch on CUDA (Triton), and their
gradient in another. Plain operations take about 150 batched products that each go through memory. Here a program
computes a few blocks of a few tokens in registers, in float64, on tensor cores that have it.

Each program finds the number of squarings from the norms of its exponents, so that the host reads nothing. The gradient
computes the squares again. Its sums over tokens are the same in every run: each program adds those of its tokens in
their order, and the few parts are added afterwards.

Eigenbases of such blocks, by Jacobi's method for skew-symmetric matrices (Hacon 1993): on two planes a matrix is
q ↦ a q + q b of quaternions. Unit quaternions turn the imaginary a and b to the axis i, which uncouples the planes.
"""

from typing import TYPE_CHECKING, Any

import torch

from ..fast.constants import device_constant
from ..fast.exponential_gradient import derivative_coefficients
from ..fast.scaling_and_squaring import POLYNOMIAL, POLYNOMIAL_NORM


import_error: str | None = None
try:
    import triton
    import triton.language as tl
except Exception as error:
    # A damaged installation may raise anything; only these kernels need Triton.
    triton, tl, import_error = None, None, f"Triton cannot be imported ({type(error).__name__}: {error})"

LARGEST_BLOCK = 16
# Sums of fewer than 16 products of float64 came with Triton 3.8. Before, smaller blocks share a tile.
SMALLEST_TILE = 8 if triton is not None and tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 8) else 16
# Programs of the gradient, each with some of the tokens: enough for a GPU, and few sums.
PROGRAMS = 2048
_eigenbases_kernel: Any
_exponentials_kernel: Any
_gradients_kernel: Any


def batched_rotations(positions: torch.Tensor, generators: torch.Tensor) -> torch.Tensor:
    """
    exp(Σ_a p_a A_a) for (P, A) positions in float64 and (A, G, K, b, b) generators: (G, P, K, b, b) in float32, NaN
    where 18 squarings do not suffice.
    """
    rotations = positions.new_empty(generators.shape[1], len(positions), *generators.shape[2:], dtype=torch.float32)
    grid, given, sizes, constants = _arguments(positions, generators, POLYNOMIAL_NORM)
    # Triton launches on the current device, which may differ from that of the tensors.
    with torch.cuda.device_of(positions):
        _exponentials_kernel[grid](given, rotations, sizes, **constants)
    return rotations


def batched_backward(
    positions: torch.Tensor,
    generators: torch.Tensor,
    rotations: torch.Tensor,
    gradient: torch.Tensor,
    needs_positions: bool,
    programs: int = PROGRAMS,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Gradients of positions, zeros unless they are needed, and of generators, from [`batched_rotations`] and the gradient
    of these, see `exponential_gradient`. About `programs` programs share the tokens.
    """
    # One more squaring costs less than a polynomial of a higher degree.
    norm = POLYNOMIAL_NORM / 2
    (tiles, packs, groups), given, sizes, constants = _arguments(positions, generators, norm)
    coefficients = derivative_coefficients(norm, torch.float32)
    parts = min(tiles, -(-programs // (packs * groups)))
    by_generator = positions.new_zeros(parts, *generators.shape)
    by_position = positions.new_zeros(groups * packs if needs_positions else 1, *positions.shape)
    derivative = device_constant(coefficients, torch.float64, positions.device)
    given += derivative, rotations.contiguous(), gradient.contiguous()
    sizes += -(-tiles // parts), len(coefficients), int(needs_positions)
    with torch.cuda.device_of(positions):
        _gradients_kernel[parts, packs, groups](given, (by_generator, by_position), sizes, **constants)
    return by_position.sum(0), by_generator.sum(0).to(generators.dtype)


def eigenbases(matrices: torch.Tensor) -> torch.Tensor:
    """[`bases.eigenbasis`] of finite (…, b, b) matrices, made in float64, with frequencies of any sign and order."""
    size, bases = matrices.shape[-1], matrices.new_empty(matrices.shape)
    width, count = max(SMALLEST_TILE, 1 << (size - 1).bit_length()), bases.numel() // size**2
    with torch.cuda.device_of(matrices):
        _eigenbases_kernel[(-(-count // (64 // width)),)](matrices.contiguous(), bases, count, SIZE=size, WIDTH=width)
    return bases


def _arguments(positions: torch.Tensor, generators: torch.Tensor, norm: float) -> tuple[tuple, tuple, tuple, dict]:
    """
    The grid over tiles of tokens, packs of blocks that share a tile, and layers; tensors, sizes and constants of both
    kernels, which scale exponents to spectral norms of at most `norm`.
    """
    axes, groups, blocks, size, _ = generators.shape
    width = max(SMALLEST_TILE, 1 << (size - 1).bit_length())
    grid = -(-len(positions) // (64 // width)), -(-blocks // (width // size)), groups
    # Eigenvalues of X are pairs ±iλ: the squared Frobenius norm of X² is at least 2 λ⁴.
    sizes = len(positions), axes, blocks, blocks * size**2, 0.5 / norm**4
    constants = {"SIZE": size, "WIDTH": width, "SCHEME": POLYNOMIAL}
    return grid, (positions.contiguous(), generators.contiguous()), sizes, constants


# A tile is (TOKENS, WIDTH, WIDTH): for each of 64 / WIDTH tokens, as many blocks of a layer as fit on the diagonal, so
# that some tiles fit into the registers of four warps. Type checkers do not read Triton's language.
if not TYPE_CHECKING and triton is not None:

    @triton.jit
    def _multiply(left, right):
        return tl.dot(left, right, input_precision="ieee", out_dtype=tl.float64)

    @triton.jit
    def _entries(blocks, SIZE: tl.constexpr, WIDTH: tl.constexpr):
        """Which entries of a tile are in a block, and their offsets in the (K, b, b) of a layer."""
        row, column = tl.arange(0, WIDTH)[None, :, None], tl.arange(0, WIDTH)[None, None, :]
        place = row // SIZE
        block = tl.program_id(1) * (WIDTH // SIZE) + place
        inside = (place == column // SIZE) & (place < WIDTH // SIZE) & (block < blocks)
        return inside, (block * SIZE + row % SIZE) * SIZE + column % SIZE

    @triton.jit
    def _generator(generators, axis, layer, entry, inside):
        """(1, WIDTH, WIDTH) of an axis in float64, from a `layer` of so many numbers."""
        first = generators + (axis * tl.num_programs(2) + tl.program_id(2)) * layer
        return tl.load(first + entry, mask=inside, other=0.0).to(tl.float64)

    @triton.jit
    def _combine(first, second, third, sixth, SCHEME: tl.constexpr, NUMBER: tl.constexpr):
        row, column = tl.arange(0, first.shape[1])[None, :, None], tl.arange(0, first.shape[1])[None, None, :]
        identity = tl.where(row == column, 1.0, 0.0).to(tl.float64)
        total = identity * SCHEME[NUMBER][0] + first * SCHEME[NUMBER][1] + second * SCHEME[NUMBER][2]
        return total + third * SCHEME[NUMBER][3] + sixth * SCHEME[NUMBER][4]

    @triton.jit
    def _scaled_exponential(given, token, entry, inside, sizes, WIDTH: tl.constexpr, SCHEME: tl.constexpr):
        """Y = 2⁻ˢ Σ_a p_a A_a and exp(Y) of a tile, s, and 2⁻ˢ for each token, NaN where s is not enough."""
        first = tl.full([64 // WIDTH, WIDTH, WIDTH], 0.0, tl.float64)
        for axis in range(sizes[1]):
            position = tl.load(given[0] + token * sizes[1] + axis, mask=token < sizes[0], other=0.0)
            first += position * _generator(given[1], axis, sizes[3], entry, inside)
        second = _multiply(first, first)
        fourth = tl.sum(tl.sum(second * second, 2, keep_dims=True), 1, keep_dims=True) * sizes[4]  # (TOKENS, 1, 1)
        wanted = tl.ceil(0.25 * tl.log2(tl.minimum(tl.maximum(fourth, 1e-30), 1e30).to(tl.float32)))
        # More than `PORTABLE_SQUARINGS`, as these bounds exceed norms by less than two.
        enough = wanted <= 18
        squarings = tl.max(tl.where(enough, tl.maximum(wanted, 0.0), 0.0)).to(tl.int64)
        # The bits of 2⁻ˢ in float64.
        scale = tl.where(enough, ((1023 - squarings) << 52).to(tl.float64, bitcast=True), float("nan"))
        first, second = first * scale, second * (scale * scale)
        third = _multiply(second, first)
        sixth = _multiply(third, third)
        # As `scaling_and_squaring.POLYNOMIAL` says, which is the scheme.
        b1, b5 = _combine(first, second, third, sixth, SCHEME, 0), _combine(first, second, third, sixth, SCHEME, 4)
        product = _multiply(b1, b5) + _combine(first, second, third, sixth, SCHEME, 3)
        square = _multiply(_combine(first, second, third, sixth, SCHEME, 2) + product, product)
        return first, square + _combine(first, second, third, sixth, SCHEME, 1), squarings, scale

    @triton.jit
    def _exponentials_kernel(given, rotations, sizes, SIZE: tl.constexpr, WIDTH: tl.constexpr, SCHEME: tl.constexpr):
        # 64 bits for offsets: a batch may contain more than 2³¹ values.
        token = (tl.program_id(0).to(tl.int64) * (64 // WIDTH) + tl.arange(0, 64 // WIDTH))[:, None, None]
        inside, entry = _entries(sizes[2], SIZE, WIDTH)
        _, square, squarings, _ = _scaled_exponential(given, token, entry, inside, sizes, WIDTH, SCHEME)
        for _ in range(squarings):
            square = _multiply(square, square)
        places = (tl.program_id(2) * sizes[0] + token) * sizes[3] + entry
        tl.store(rotations + places, square.to(tl.float32), mask=inside & (token < sizes[0]))

    @triton.jit
    def _gradients_kernel(given, results, sizes, SIZE: tl.constexpr, WIDTH: tl.constexpr, SCHEME: tl.constexpr):
        positions, generators, coefficients, rotations, gradients = given
        tokens, axes, blocks, layer, bound, steps, terms, needs_positions = sizes
        part, group, groups = tl.program_id(0).to(tl.int64), tl.program_id(2).to(tl.int64), tl.num_programs(2)
        inside, entry = _entries(blocks, SIZE, WIDTH)
        for step in range(steps):
            token = ((part * steps + step) * (64 // WIDTH) + tl.arange(0, 64 // WIDTH))[:, None, None]
            first, square, squarings, scale = _scaled_exponential(given, token, entry, inside, sizes, WIDTH, SCHEME)
            places, present = (group * tokens + token) * layer + entry, inside & (token < tokens)
            rotation = tl.load(rotations + places, mask=present, other=0.0).to(tl.float64)
            gradient = tl.load(gradients + places, mask=present, other=0.0).to(tl.float64)
            # W, the skew part of Rᵀ dL/dR; `scale` has the factor ½ of each squaring.
            tangents = _multiply(tl.permute(rotation, (0, 2, 1)), gradient)
            tangents = 0.5 * scale * (tangents - tl.permute(tangents, (0, 2, 1)))
            for _ in range(squarings):
                # (1 + e^(2ʲ ad Y)) W
                tangents += _multiply(_multiply(square, tangents), tl.permute(square, (0, 2, 1)))
                square = _multiply(square, square)
            # φ(−ad Y) W, by Horner's rule. A commutator needs one product only, since WY = (YW)ᵀ.
            total = tangents * tl.load(coefficients + terms - 1)
            for term in range(2, terms + 1):
                product = _multiply(first, total)
                total = product - tl.permute(product, (0, 2, 1)) + tangents * tl.load(coefficients + terms - term)
            for axis in range(axes):
                position = tl.load(positions + token * axes + axis, mask=token < tokens, other=0.0)
                # Only this program adds to this place.
                place = results[0] + ((part * axes + axis) * groups + group) * layer + entry
                tl.atomic_add(place, tl.sum(total * position, 0, keep_dims=True), inside, "relaxed")
                if needs_positions:
                    found = total * _generator(generators, axis, layer, entry, inside)
                    found = tl.sum(tl.sum(found, 2, keep_dims=True), 1, keep_dims=True)
                    row = (group * tl.num_programs(1) + tl.program_id(1)) * tokens + token
                    tl.store(results[1] + row * axes + axis, found, mask=token < tokens)

    @triton.jit
    def _coordinate(signed, difference, bits, step):
        """Mean over two planes of the entries whose row and column differ by these bits, (TOKENS, WIDTH, 1)."""
        sums = tl.sum(tl.where(difference == bits, signed, 0.0), 1, keep_dims=True)  # (TOKENS, 1, WIDTH)
        return 0.25 * tl.sum(tl.where((difference < 2) | (difference >> 1 == step), sums, 0.0), 2, keep_dims=True)

    @triton.jit
    def _turn(skew, odd, difference, step, negligible):
        """The product with the unit quaternion that turns a or b to ±i, the nearer one, on the side that `odd` says."""
        signs = tl.where(odd % 2 == 1, -1.0, 1.0).to(tl.float64)
        i = _coordinate(skew * signs, difference, 1, step)
        j = _coordinate(skew * signs, difference, 2 * step, step)
        k = _coordinate(skew * signs, difference, 2 * step + 1, step)
        norm = tl.sqrt(i * i + j * j + k * k)
        # Equal frequencies leave a or b without direction: turning it would undo other turns. Less is left each sweep.
        turned = tl.where(norm > negligible, tl.where(i < 0, -1.0, 1.0), 0.0)
        j, k, real = j * turned, k * turned, tl.where(norm > negligible, norm + tl.abs(i), 1.0)
        turn = tl.where(difference == 2 * step, k, tl.where(difference == 2 * step + 1, -j, 0.0)) * signs
        return tl.where(difference == 0, real, turn) / tl.sqrt(real * real + j * j + k * k)

    @triton.jit
    def _eigenbases_kernel(matrices, bases, count, SIZE: tl.constexpr, WIDTH: tl.constexpr):
        matrix = (tl.program_id(0).to(tl.int64) * (64 // WIDTH) + tl.arange(0, 64 // WIDTH))[:, None, None]
        row, column = tl.arange(0, WIDTH)[None, :, None], tl.arange(0, WIDTH)[None, None, :]
        inside, places = (row < SIZE) & (column < SIZE), (matrix * SIZE + row) * SIZE + column
        skew = tl.load(matrices + places, mask=inside & (matrix < count), other=0.0).to(tl.float64)
        skew = skew / tl.maximum(tl.max(tl.max(tl.abs(skew), 2, keep_dims=True), 1, keep_dims=True), 1e-300)
        identity = tl.where((row == column) & (matrix >= 0), 1.0, 0.0).to(tl.float64)
        basis, difference = identity, row ^ column
        # In a sweep all planes meet. Nine leave couplings below 2e-13 in 36,000 matrices, some with equal frequencies.
        for sweep in range(9):
            for step in range(1, WIDTH // 2):
                # Channels of planes p < p ^ step are the units k, j, i and 1, numbers 3 to 0. If only 1 is beyond the
                # block, then b = −a, and turns do not change 1.
                unit = 1 - (column & 1) + 2 * ((column ^ (2 * step)) > column).to(tl.int32)
                other, negligible = (difference & 1) + 2 * (difference > 1).to(tl.int32), tl.exp2(-3.0 - 5.0 * sweep)
                # Bit 4 m + n is 1 where the product of units m and n has a minus.
                turn = _turn(skew, (0xC6A0 >> (4 * other + unit)) + 1, difference, step, negligible)
                turn = _multiply(turn, _turn(skew, 0xC6A0 >> (4 * unit + other), difference, step, negligible))
                turn = tl.where(inside, turn, identity)
                skew = _multiply(_multiply(tl.permute(turn, (0, 2, 1)), skew), turn)
                basis = _multiply(basis, turn)
        tl.store(bases + places, basis, mask=inside & (matrix < count))
