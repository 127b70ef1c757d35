"""Rotations of planes by cosines and sines."""

import math

import torch
from transformers.utils.generic import maybe_autocast

from .dispatch import batches_layers


def layer_plane_rotations(
    positions: torch.Tensor, frequencies: torch.Tensor, dtype: torch.dtype = torch.float32
) -> list[torch.Tensor]:
    """
    exp(Σ_a p_a A_a) for b = 2, in closed form: a rotation by the angle Σ_a p_a f_a (RoPE-Mixed, Heo et al., eq. 6). All
    layers at a time or one, as suits the device.

    Args:
        positions: (P, A) in the working type.
        frequencies: (A, G, K), one per axis, layer and plane.
        dtype: Type of the result.

    Returns:
        (P, K, 2) cos and sin, in `dtype`, for each of the G layers.
    """
    rotations: list[torch.Tensor] = []
    step = frequencies.shape[1] if batches_layers(positions.device) else 1
    with maybe_autocast(positions.device.type, enabled=False):
        for part in frequencies.split(step, dim=1):
            angles = positions @ part.flatten(1).to(positions.dtype)  # (P, layers · K)
            angles = angles.unflatten(1, part.shape[1:]).transpose(0, 1)  # (layers, P, K)
            rotations.extend(cos_sin(angles, dtype).unbind())
    return rotations


def cos_sin(angles: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """(…, 2) cos and sin, in `dtype`, of (…) angles in the working type."""
    # Whole revolutions are subtracted in the working type, so that the arguments of float32 cos and sin are small.
    revolutions = (angles.detach() / (2 * math.pi)).round_().mul_(2 * math.pi)  # (…)
    angles = (angles - revolutions).to(dtype)
    return torch.stack([angles.cos(), angles.sin()], dim=-1)
