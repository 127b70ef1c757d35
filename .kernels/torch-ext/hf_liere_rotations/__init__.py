"""
Exponentials of small skew-symmetric matrices, and queries and keys rotated by them, with their gradients. Compiled
kernels compute float32 and bfloat16 on CPUs; plain operations of PyTorch compute the rest.
"""

import torch

from . import kernels  # noqa: F401 — it registers the kernels
from .fast.dispatch import working_dtype
from .rotation.exponential import block_rotations, skew
from .rotation.rotation import BlockRotation


__all__ = ["block_rotations", "rotate", "skew", "skew_exponential"]


def skew_exponential(generators: torch.Tensor) -> torch.Tensor:
    """
    exp(A) of skew-symmetric matrices, from products in float64.

    Args:
        generators: (…, b, b), skew-symmetric.

    Returns:
        (…, b, b) rotations in the type of the generators.

    Raises:
        ValueError: if the generators are not square matrices.
    """
    size = generators.shape[-1]
    if generators.shape[-2:] != (size, size):
        raise ValueError(f"generators has shape {tuple(generators.shape)}; accepted: (…, b, b).")
    dtype = working_dtype(generators.device)
    one = torch.ones(1, 1, dtype=dtype, device=generators.device)
    layer = generators.reshape(1, -1, size, size).to(dtype)  # (1, blocks, b, b)
    return block_rotations(one, layer, dtype=generators.dtype).reshape(generators.shape)


def rotate(query: torch.Tensor, key: torch.Tensor, rotations: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Blocks of neighbouring channels multiplied by rotations (LieRE eq. 4).

    Args:
        query, key: (B, H, N, D) each. Channels beyond the last block are passed through.
        rotations: (1 or B, 1 or H, N, blocks, b, b).

    Returns:
        The same shapes and types.
    """
    return BlockRotation(rotations).rotate(query, key)
