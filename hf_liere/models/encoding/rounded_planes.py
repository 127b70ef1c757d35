"""Planes that start at the bits of another implementation of RoPE."""

import functools

import torch

from ..fast.application import drop_empty_key, restore_empty_key, rotate_channels
from ..fast.scaling_and_squaring import Rays
from ..rotation.grouped_rotation import Rotation
from ..rotation.rotation import PlaneRotation
from .positions import TokenPositions
from .rotary_encoding import LieRE


class RoundedPlaneRotation(PlaneRotation):
    """Planes that are rotated by two products and one sum, each rounded, as most implementations of RoPE do."""

    def _rotate_planes(
        self, query: torch.Tensor, key: torch.Tensor, cos_sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rotated = rotate_channels(drop_empty_key(query, key), cos_sin, portable=True)  # (B, H, N, D) each
        return restore_empty_key(rotated, key)


class RoundedPlanes(LieRE):
    """
    Planes whose angles, cosines and sines are rounded to float32, as those of most rotary modules: with their
    frequencies, the same bits. Angles of RoPE-Mixed are p_1 f_1 + p_2 f_2 + … in this order.
    """

    def rotations_from(
        self, positions: TokenPositions, entries: torch.Tensor, dtype: torch.dtype | None, rays: Rays | None = None
    ) -> list[Rotation]:
        coordinates = positions.coordinates.float().reshape(-1, self.num_axes)  # (B · N, A)
        rotations: list[Rotation] = []
        for layer in entries.squeeze(-1).float().unbind(1):  # (A, heads, planes)
            products = (p.unsqueeze(-1) * f.flatten() for p, f in zip(coordinates.unbind(-1), layer))
            angles = functools.reduce(torch.add, products)  # (B · N, H · planes)
            planes = torch.stack([angles.cos(), angles.sin()], dim=-1)  # (B · N, H · planes, 2)
            rotations.append(RoundedPlaneRotation(self.to_tokens(planes, positions, layer.shape[1])))
        return self.repeat_for_layers(rotations)
