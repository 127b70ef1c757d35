"""Queries and keys rotated in the basis of the model, for attention whose projections are not ours."""

import torch

from .bases import change_basis
from .grouped_rotation import Rotation
from .rotation import TokenRotation, rotate_pair


def rotate_back(rotation: Rotation, states: torch.Tensor) -> torch.Tensor:
    """U R(p)ᵀ x, in the basis of the model, of (B, H, N, D) states that [`PlaneRotation.rotate`] rotated."""
    states, _ = rotation.transpose().rotate(states, states[:0])
    return states if rotation.basis is None else change_basis(states, rotation.basis.transpose(-1, -2))


def rotate_one(rotation: TokenRotation, states: torch.Tensor, heads: int) -> torch.Tensor:
    """
    R(p) x of queries or keys alone, in the basis of the model.

    Args:
        states: (B, G · heads, N, D); G neighbouring heads share a rotation.
        heads: Number of heads with separate rotations.

    Returns:
        The same shape and type.
    """
    batch, groups = states.shape[0], states.shape[1] // heads
    if groups > 1:
        # Heads that share a rotation become samples that share it.
        states = states.unflatten(1, (heads, groups)).transpose(1, 2).flatten(0, 1)  # (B · G, heads, N, D)
        rotation = rotation if rotation.num_samples() == 1 else rotation.repeat_samples(groups)
    rotated, _ = rotate_pair(rotation, states, states[:0])  # an empty key
    return rotated if groups == 1 else rotated.unflatten(0, (batch, groups)).transpose(1, 2).flatten(1, 2)
