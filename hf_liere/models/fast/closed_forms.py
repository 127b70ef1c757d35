"""Rotations of planes by cosines and sines, and the sizes of blocks whose rotations have a closed form."""

import math
from collections.abc import Callable

import torch
from transformers.utils.generic import maybe_autocast

from .differentiation import forbid_second_derivative
from .dispatch import values_are_unknown
from .scaling_and_squaring import find_exponential_backend


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


def cos_sin(angles: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """(…, 2) cos and sin, in `dtype`, of (…) angles in the working type."""
    # Compilers fuse the plain operations.
    backend = None if values_are_unknown(angles) else find_exponential_backend("cos_sin", angles, angles, 2, dtype)
    if backend:
        return _CosSin.apply(angles, backend)
    # Whole revolutions are subtracted in the working type, so that the arguments of float32 cos and sin are small.
    revolutions = (angles.detach() / (2 * math.pi)).round_().mul_(2 * math.pi)  # (…)
    angles = (angles - revolutions).to(dtype)
    return torch.stack([angles.cos(), angles.sin()], dim=-1)


class _CosSin(torch.autograd.Function):
    """[`cos_sin`] by a backend, with the same bits."""

    generate_vmap_rule = True

    @staticmethod
    def forward(angles, backend):
        return backend.cos_sin(angles)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.backend = inputs[1]
        ctx.save_for_backward(output)

    @staticmethod
    @forbid_second_derivative
    def backward(ctx, gradient):
        return ctx.backend.cos_sin_backward(gradient, *ctx.saved_tensors), None
