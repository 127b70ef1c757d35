"""The rotations of dense blocks that generators generate: the matrix exponential."""

import torch

from ..fast.exponentials import layer_block_rotations
from ..fast.scaling_and_squaring import Rays


def block_rotations(
    positions: torch.Tensor,
    generators: torch.Tensor,
    dtype: torch.dtype = torch.float32,
    rays: Rays | None = None,
    query_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """
    exp(Σ_a p_a A_a) for b > 2 (LieRE eq. 4, ComRoPE eq. 3), in closed form for b = 3 and 4, and by scaling and squaring
    with the gradient of `exponential_gradient` for others.

    Args:
        positions: (P, A) in the working type.
        generators: (A, …, K, b, b), skew-symmetric.
        dtype: Type of the result.
        rays: Which positions are multiples of others, if known.
        query_dtype: Type of the queries and keys, by default `dtype`: for half types products are float32 where that
            adds less than a tenth of their rounding.

    Returns:
        (…, K, P, b, b) rotations in `dtype`. The memory order is (…, P, K, b, b).
    """
    leading = generators.shape[1:-3]
    layers = generators.reshape(generators.shape[0], -1, *generators.shape[-3:])  # (A, G, K, b, b)
    rotations = layer_block_rotations(positions, layers, dtype, rays, query_dtype)
    rotations = [rotation.transpose(0, 1) for rotation in rotations]  # (K, P, b, b) each
    return torch.stack(rotations).unflatten(0, leading) if leading else rotations[0]
