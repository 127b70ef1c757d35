"""From a configuration and an input to the positions of all of its tokens."""

from typing import NamedTuple

import torch

from .displacements import draw_displacements
from .positions import CONVENTIONS, TokenPositions, patch_indices


class Place(NamedTuple):
    """
    Where one grid of patches sits.

    Attributes:
        grid: Patches per axis.
        offsets: (N, A) displacements of patches in patch extents that also act on a learned table, or `None`.
        positions: Positions of all tokens; `None` if the model does not use any.
    """

    grid: tuple[int, ...]
    offsets: torch.Tensor | None
    positions: TokenPositions | None


def place_patches(
    config,
    grid: tuple[int, ...],
    device: torch.device,
    offsets: torch.Tensor | None = None,
    extents: torch.Tensor | None = None,
) -> TokenPositions | None:
    """
    Positions of all tokens of a grid of patches; `None` if the model does not use them.

    Args:
        config: A [`LieREPixelConfig`].
        offsets: (…, N, A) displacements of patches in patch extents.
        extents: (A,) or (B, A) extents e of a patch, where `coordinates` need spacing, see [`Convention`]. The
            patch with index i on an axis of n patches is at ½ + (i + ½ − n/2)·e: the centre of the input is at ½, and
            an input with an extent of 1 has `unit` coordinates.
    """
    if not config.uses_positions:
        return None
    prefix: tuple[int, float] = config.prefix
    if extents is None:
        return TokenPositions.from_grid(grid, config.train_grid, config.coordinates, *prefix, offsets, device)
    indices = patch_indices(grid, device)  # (N, A)
    indices = indices if offsets is None else indices + offsets  # (…, N, A)
    patches = 0.5 + (indices + 0.5 - extents.new_tensor(grid) / 2) * extents.unsqueeze(-2)  # ((B,) N, A)
    return TokenPositions.from_coordinates(patches, *prefix)  # (1 or B, P + N, A)


def place_input(
    config,
    grid: tuple[int, ...],
    batch_size: int,
    device: torch.device,
    spacing: torch.Tensor | None,
    frame_times: torch.Tensor | None,
    training: bool,
    needs_positions: bool,
) -> Place:
    """
    Place inputs of one size, with the displacements of training; see `forward` of [`LieREPixelModel`], whose caller may
    have given positions.
    """
    extents = offsets = displaced = None
    convention = CONVENTIONS.get(config.coordinates)
    if needs_positions and convention is not None and convention.extents is not None:
        # (A,) or (1 or B, A), (1 or B, N, A)
        extents, displaced = convention.extents(config, grid, batch_size, spacing, frame_times, device)
    if training:
        # (N, A), (…, N, A)
        offsets, displaced = draw_displacements(config, grid, displaced, device)
    return Place(grid, offsets, place_patches(config, grid, device, displaced, extents) if needs_positions else None)
