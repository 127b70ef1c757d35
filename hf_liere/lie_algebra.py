"""From skew-symmetric generators to rotations: the one owner of matrix exponentials."""

import math

import torch


# Degree-11 Taylor polynomial at norm ≤ ½: a remainder below 3e-13, so that 12 squarings keep 1e-9.
TAYLOR = tuple(1 / math.factorial(degree) for degree in range(12))
TAYLOR_NORM = 0.5
# Used where the norm cannot be looked at (a traced graph): enough for norms up to 2048.
TRACED_SQUARINGS = 12
# Matrices are worked on in pieces that stay in a core's cache: 1 MiB of float64.
CHUNK_ELEMENTS = 1 << 17


def working_dtype(device: torch.device) -> torch.dtype:
    """
    The type rotations are computed in: float64, because rounding the exponent to float32 alone costs 3e-5 at LieRE64's
    initial norm, and float32 on MPS, which has no float64.
    """
    return torch.float32 if device.type == "mps" else torch.float64


def skew(entries: torch.Tensor, block_size: int) -> torch.Tensor:
    """
    Skew-symmetric matrices from their free entries.

    A[j, i] = −A[i, j] = the entry of the pair i < j, pairs in row-major order (0,1), (0,2), …; so for b = 2 the entry
    is the angular frequency of a counter-clockwise rotation, as in RoPE.

    Args:
        entries: (…, b(b−1)/2).

    Returns:
        (…, b, b).

    Raises:
        ValueError: if the number of entries is not b(b−1)/2.
    """
    if entries.shape[-1] != block_size * (block_size - 1) // 2:
        raise ValueError(
            f"{entries.shape[-1]} entries do not make a skew-symmetric matrix of size {block_size}, which has "
            f"{block_size * (block_size - 1) // 2}."
        )
    row, column = torch.triu_indices(block_size, block_size, offset=1, device=entries.device)
    lower = entries.new_zeros(*entries.shape[:-1], block_size, block_size)
    lower[..., column, row] = entries
    return lower - lower.transpose(-1, -2)


def skew_entries(matrices: torch.Tensor) -> torch.Tensor:
    """Free entries of skew-symmetric (…, b, b) matrices, the inverse of [`skew`]: (…, b(b−1)/2)."""
    row, column = torch.triu_indices(matrices.shape[-1], matrices.shape[-1], offset=1, device=matrices.device)
    return matrices[..., column, row]


def plane_rotations(
    positions: torch.Tensor, frequencies: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """
    exp(Σ_a p_a A_a) for b = 2, in closed form: a rotation by the angle Σ_a p_a f_a (RoPE-Mixed, Heo et al., eq. 6).

    Args:
        positions: (P, A) in the working type.
        frequencies: (A, K), one per axis and plane.
        dtype: Type of the result.

    Returns:
        (K, P, 2) holding cos and sin, in `dtype`.
    """
    with torch.autocast(device_type=positions.device.type, enabled=False):
        angles = torch.einsum("ak,pa->kp", frequencies.to(positions.dtype), positions)
        # Whole turns are taken off in the working type, so that float32 cos and sin see a small, exact argument.
        angles = torch.remainder(angles, 2 * math.pi).to(dtype)
        return torch.stack([angles.cos(), angles.sin()], dim=-1)


def block_rotations(
    positions: torch.Tensor, generators: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """
    exp(Σ_a p_a A_a) for b > 2 (LieRE eq. 4, ComRoPE eq. 3), by scaling and squaring with matrix products only.

    Nothing but the arguments is kept for the backward pass, which recomputes the exponentials together with their
    Fréchet derivative (Al-Mohy and Higham 2009, eq. 3.4) and is exact at repeated eigenvalues and at zero.

    Args:
        positions: (P, A) in the working type.
        generators: (A, K, b, b), skew-symmetric.
        dtype: Type of the result.

    Returns:
        (K, P, b, b) rotations, in `dtype`.
    """
    squarings = TRACED_SQUARINGS
    if not torch.compiler.is_compiling():
        # For a skew-symmetric matrix the spectral norm is at most the Frobenius norm over √2.
        norms = generators.detach().to(positions.dtype).flatten(-2).norm(dim=-1) / math.sqrt(2)
        bound = (positions.detach().abs() @ norms).max().item() if positions.numel() else 0.0
        if math.isfinite(bound):
            squarings = max(0, math.ceil(math.log2(max(bound, TAYLOR_NORM) / TAYLOR_NORM)))
    return _BlockRotations.apply(positions, generators, squarings, dtype)


class _BlockRotations(torch.autograd.Function):
    @staticmethod
    def forward(ctx, positions, generators, squarings, dtype):
        ctx.save_for_backward(positions, generators)
        ctx.squarings = squarings
        blocks, tokens, size = generators.shape[1], positions.shape[0], generators.shape[-1]
        with torch.autocast(device_type=positions.device.type, enabled=False):
            rotations = positions.new_empty(blocks, tokens, size, size, dtype=dtype)
            for block, token in _chunks(blocks, tokens, size):
                exponents = _exponents(positions[token], generators[:, block], squarings)
                rotations[block, token] = _exponential(exponents, squarings).view(
                    -1, *rotations[block, token].shape[1:]
                )
        return rotations

    @staticmethod
    def backward(ctx, gradient):
        positions, generators = ctx.saved_tensors
        blocks, tokens, size = generators.shape[1], positions.shape[0], generators.shape[-1]
        generators_gradient = torch.zeros_like(generators, dtype=positions.dtype)
        positions_gradient = torch.zeros_like(positions)
        with torch.autocast(device_type=positions.device.type, enabled=False):
            for block, token in _chunks(blocks, tokens, size):
                position, generator = positions[token], generators[:, block]
                # The adjoint of the derivative at X is the derivative at Xᵀ = −X.
                exponents = _exponents(-position, generator, ctx.squarings)
                direction = gradient[block, token].to(positions.dtype).reshape(exponents.shape)
                adjoint = _exponential_derivative(exponents, direction, ctx.squarings)
                adjoint = adjoint.view(generator.shape[1], position.shape[0], size * size)
                generators_gradient[:, block] += torch.einsum("pa,kpe->ake", position, adjoint).view(generator.shape)
                if ctx.needs_input_grad[0]:
                    flat = generator.to(positions.dtype).flatten(-2)
                    positions_gradient[token] += torch.einsum("ake,kpe->pa", flat, adjoint)
        return positions_gradient, generators_gradient.to(generators.dtype), None, None


def _chunks(blocks: int, tokens: int, size: int):
    # A traced graph has no use for pieces and its sizes may be symbolic.
    if torch.compiler.is_compiling():
        yield slice(0, blocks), slice(0, tokens)
        return
    matrices = max(1, CHUNK_ELEMENTS // (size * size))
    token_step = min(tokens, matrices)
    block_step = max(1, matrices // max(token_step, 1))
    for block in range(0, blocks, block_step):
        for token in range(0, tokens, token_step):
            yield slice(block, block + block_step), slice(token, token + token_step)


def _exponents(positions: torch.Tensor, generators: torch.Tensor, squarings: int) -> torch.Tensor:
    """(k·p, b, b) scaled exponents 2^−s Σ_a p_a A_a."""
    axes, blocks, size, _ = generators.shape
    scaled = positions * 2.0**-squarings
    flat = generators.to(positions.dtype).reshape(axes, -1)
    exponents = (scaled @ flat).view(-1, blocks, size * size).transpose(0, 1)
    return exponents.reshape(-1, size, size)


def _taylor_terms(powers: tuple[torch.Tensor, ...], with_identity: bool) -> list[torch.Tensor]:
    """The four quadratic pieces of the Taylor polynomial, lowest degree first (Paterson–Stockmeyer in X³)."""
    first, second = powers
    pieces = []
    for degree in range(0, 12, 3):
        piece = torch.add(TAYLOR[degree + 1] * first, second, alpha=TAYLOR[degree + 2])
        if with_identity:
            piece.diagonal(dim1=-2, dim2=-1).add_(TAYLOR[degree])
        pieces.append(piece)
    return pieces


def _exponential(exponents: torch.Tensor, squarings: int) -> torch.Tensor:
    second = torch.bmm(exponents, exponents)
    third = torch.bmm(second, exponents)
    *rest, result = _taylor_terms((exponents, second), with_identity=True)
    for piece in reversed(rest):
        result = torch.baddbmm(piece, third, result)
    for _ in range(squarings):
        result = torch.bmm(result, result)
    return result


def _exponential_derivative(exponents: torch.Tensor, directions: torch.Tensor, squarings: int) -> torch.Tensor:
    """Fréchet derivative of exp at 2^s · `exponents` along `directions`."""
    directions = directions * 2.0**-squarings
    second = torch.bmm(exponents, exponents)
    second_derivative = torch.baddbmm(torch.bmm(exponents, directions), directions, exponents)
    third = torch.bmm(second, exponents)
    third_derivative = torch.baddbmm(torch.bmm(second, directions), second_derivative, exponents)
    *rest, result = _taylor_terms((exponents, second), with_identity=True)
    *rest_derivative, derivative = _taylor_terms((directions, second_derivative), with_identity=False)
    for piece, piece_derivative in zip(reversed(rest), reversed(rest_derivative)):
        derivative = torch.baddbmm(torch.baddbmm(piece_derivative, third, derivative), third_derivative, result)
        result = torch.baddbmm(piece, third, result)
    for _ in range(squarings):
        derivative = torch.baddbmm(torch.bmm(result, derivative), derivative, result)
        result = torch.bmm(result, result)
    return derivative
