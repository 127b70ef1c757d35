"""Rotations of planes by cosines and sines, and the sizes of blocks whose rotations have a closed form."""

import math
from collections.abc import Callable

import torch
from transformers.utils.generic import maybe_autocast

from .dispatch import batches_layers


# Block size → (positions, generators, dtype) → rotations, see `quaternions`; the code of a checkpoint may have none.
CLOSED_FORMS: dict[int, Callable[..., torch.Tensor] | None] = {3: None, 4: None}


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
        (K, P, 2) cos and sin, in `dtype`.
    """
    with maybe_autocast(positions.device.type, enabled=False):
        return cos_sin(positions @ frequencies.to(positions.dtype), dtype).transpose(0, 1)


def layer_plane_rotations(
    positions: torch.Tensor, frequencies: torch.Tensor, dtype: torch.dtype = torch.float32
) -> list[torch.Tensor]:
    """
    [`plane_rotations`] of (A, G, K) frequencies, with all layers at a time or with one, as suits the device: (P, K, 2)
    cos and sin for each of the G layers.
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
