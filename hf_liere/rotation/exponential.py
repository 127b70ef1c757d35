"""The rotations of blocks: exponentials of skew-symmetric generators."""

import torch

from ..fast.exponentials import exponentiate
from ..fast.scaling_and_squaring import Rays


def layer_block_rotations(
    positions: torch.Tensor,
    generators: torch.Tensor,
    dtype: torch.dtype = torch.float32,
    rays: Rays | None = None,
    query_dtype: torch.dtype | None = None,
) -> list[torch.Tensor]:
    """
    R(p) = exp(Σ_a p_a A_a) for b > 2 (LieRE eq. 4, ComRoPE eq. 3): what `torch.matrix_exp` of
    `torch.einsum("pa,agkij->gpkij", positions, generators)` computes, faster, in closed form for b = 3 and 4 and by
    scaling and squaring for others, with a gradient of its own.

    Args:
        positions: (P, A) in the working type, of P tokens.
        generators: (A, G, K, b, b), skew-symmetric, of G layers and K blocks of all heads.
        dtype: Type of the result.
        rays: Which positions are multiples of others, if known: R(kp) = R(p)ᵏ.
        query_dtype: Type of the queries and keys, by default `dtype`: for half types products are float32 where that
            adds less than a tenth of their rounding.

    Returns:
        (P, K, b, b) rotations in `dtype` for each of the G layers.
    """
    return exponentiate(positions, generators, dtype, rays, query_dtype)


def block_rotations(
    positions: torch.Tensor,
    generators: torch.Tensor,
    dtype: torch.dtype = torch.float32,
    rays: Rays | None = None,
    query_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """[`layer_block_rotations`] of (A, …, K, b, b) generators: (…, K, P, b, b), in memory (…, P, K, b, b)."""
    leading = generators.shape[1:-3]
    layers = generators.reshape(generators.shape[0], -1, *generators.shape[-3:])  # (A, G, K, b, b)
    rotations = layer_block_rotations(positions, layers, dtype, rays, query_dtype)
    rotations = [rotation.transpose(0, 1) for rotation in rotations]  # (K, P, b, b) each
    return torch.stack(rotations).unflatten(0, leading) if leading else rotations[0]


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
    found, needed = entries.shape[-1], block_size * (block_size - 1) // 2
    if found != needed:
        raise ValueError(
            f"{found} entries do not make a skew-symmetric matrix of size {block_size}, which has {needed}."
        )
    row, column = torch.triu_indices(block_size, block_size, offset=1, device=entries.device)  # (b(b−1)/2,) each
    lower = entries.new_zeros(*entries.shape[:-1], block_size, block_size)  # (…, b, b)
    lower[..., column, row] = entries
    return lower - lower.transpose(-1, -2)


def skew_entries(matrices: torch.Tensor) -> torch.Tensor:
    """Free entries of skew-symmetric (…, b, b) matrices, the inverse of [`skew`]: (…, b(b−1)/2)."""
    row, column = torch.triu_indices(matrices.shape[-1], matrices.shape[-1], offset=1, device=matrices.device)
    return matrices[..., column, row]
