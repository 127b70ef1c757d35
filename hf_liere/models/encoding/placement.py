"""Placement: from a configuration and an input to the positions of all of its tokens."""

from typing import NamedTuple

import torch

from ..rotation.dispatch import values_are_unknown, working_dtype
from .displacements import draw_displacements
from .encoding_traits import DISPLACEMENTS
from .physical_spacing import physical_extents
from .positions import (
    COORDINATES,
    GroupedPositions,
    TokenPositions,
    check_coordinates,
    check_shape,
    zero_hidden,
)


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


def place_prefix(config) -> tuple[int, float]:
    """Number of class and register tokens, and their coordinate on every axis; at zero they are not rotated."""
    return config.num_prefix_tokens, config.prefix_coordinate if _prefix_is_placed(config) else 0.0


def _prefix_is_placed(config) -> bool:
    return config.rotate_prefix or config.position_table_size is not None


def rotated_positions(config, positions: TokenPositions | GroupedPositions) -> TokenPositions | GroupedPositions:
    """Positions for rotations: a learned table may place prefix tokens that are not rotated."""
    if config.rotate_prefix or config.position_table_size is None:
        return positions
    return positions.unrotate_prefix()


def place_grid(
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
        extents: (A,) or (B, A) extents of a patch, for `coordinates="physical"`, see [`physical_extents`].
    """
    if not config.uses_positions:
        return None
    prefix = place_prefix(config)
    if extents is not None:
        return TokenPositions.from_extents(grid, extents, *prefix, offsets)
    return TokenPositions.from_grid(
        grid, config.train_grid, config.coordinates, *prefix, offsets, device, working_dtype(device)
    )


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
    Place inputs of one size, with the displacements of training.

    Args:
        config: A [`LieREPixelConfig`].
        spacing, frame_times: As in `forward` of [`LieREPixelModel`].
        needs_positions: Whether the caller gave no positions.
    """
    dtype = working_dtype(device)
    extents = offsets = displaced = None
    if config.coordinates == "physical" and needs_positions:
        # (A,) or (1 or B, A), (1 or B, N, A)
        extents, displaced = physical_extents(config, grid, batch_size, spacing, frame_times, device, dtype)
    if training:
        offsets, displaced = draw_displacements(config, grid, displaced, device, dtype)  # (N, A), (…, N, A)
    return Place(grid, offsets, place_grid(config, grid, device, displaced, extents) if needs_positions else None)


def place_batch(
    config,
    spatial_shapes: torch.Tensor,
    num_patches: int,
    device: torch.device,
    spacing: torch.Tensor | None,
    training: bool,
    needs_positions: bool,
    has_table: bool,
) -> tuple[list[Place], tuple[torch.Tensor, ...], TokenPositions | GroupedPositions | None]:
    """
    Place a batch of samples with (B, A) grids, padded to `num_patches`, computing each distinct grid once.

    Returns:
        The places of the distinct grids and the (samples,) indices of each, both empty if no table needs them; and the
        positions of all tokens.
    """
    needs_positions = needs_positions and config.uses_positions
    if not has_table and not needs_positions:
        return [], (), None
    drawn = training and any(getattr(config, name) != value for name, value in DISPLACEMENTS.items())
    by_grid = has_table or config.coordinates == "physical" or drawn
    if values_are_unknown(spatial_shapes) and not by_grid:
        shapes = spatial_shapes.to(device, working_dtype(device))  # (B, A)
        return [], (), place_shapes(shapes, num_patches, config.train_grid, config.coordinates, *place_prefix(config))
    grids = distinct_grids(spatial_shapes, spacing, device)
    samples = tuple(indices for *_, indices in grids)  # (samples,) each
    places = [
        place_input(config, grid, len(indices), device, grid_spacing, None, training, needs_positions)
        for grid, grid_spacing, indices in grids
    ]
    positions = GroupedPositions(tuple(place.positions for place in places), samples) if needs_positions else None
    return places, samples, positions


def place_given(
    config,
    coordinates: torch.Tensor,
    batch_size: int,
    num_tokens: int,
    visible: torch.Tensor | None = None,
) -> TokenPositions:
    """
    Positions of all tokens from the user's coordinates of `num_tokens` input tokens, or of all tokens. Coordinates of
    hidden tokens, false in (B, N) `visible`, are ignored.

    Raises:
        ValueError: as [`check_shape`] and [`check_coordinates`], or if the model does not use positions.
    """
    if not config.uses_positions:
        raise ValueError(f"positions were given, but position_encoding={config.position_encoding!r} has no rotations.")
    num_prefix_tokens, prefix_coordinate = place_prefix(config)
    accepted = num_prefix_tokens if _prefix_is_placed(config) else 0
    check_shape(coordinates, batch_size, num_tokens, config.num_axes, accepted)
    coordinates = zero_hidden(coordinates, visible)  # (…, N or P + N, A)
    check_coordinates(coordinates)
    has_prefix = coordinates.shape[-2] > num_tokens
    if (scale := getattr(config, "position_scale", None)) is not None:
        coordinates = coordinates.to(working_dtype(coordinates.device))
        origin, scale = (coordinates.new_tensor(config.by_axis(f"position_{name}")) for name in ("origin", "scale"))
        coordinates = (coordinates - origin) * scale  # (…, N or P + N, A)
    return TokenPositions.from_coordinates(coordinates, num_prefix_tokens, None if has_prefix else prefix_coordinate)


def distinct_grids(
    spatial_shapes: torch.Tensor, spacing: torch.Tensor | None, device: torch.device
) -> list[tuple[tuple[int, ...], torch.Tensor | None, torch.Tensor]]:
    """
    The grids of a batch, each with the spacing and the (samples,) indices of its samples.

    Args:
        spatial_shapes: (B, A) patches per axis.
        spacing: (A,), (B, A) or `None`; samples of different spacing do not share a grid.
    """
    spacing = None if spacing is None else torch.as_tensor(spacing)
    groups = {}
    for sample, grid in enumerate(map(tuple, spatial_shapes.tolist())):
        own = spacing[sample] if spacing is not None and spacing.ndim == 2 else spacing  # (A,)
        key = grid, None if own is None else tuple(own.tolist())
        groups.setdefault(key, (own, []))[1].append(sample)
    if not groups:
        # An empty batch gets one grid, so that its outputs have the usual types.
        axes = spatial_shapes.shape[1]
        groups[(1,) * axes, None] = None if spacing is None else spacing.new_ones(axes), []
    return [
        (grid, shared, torch.tensor(samples, dtype=torch.long, device=device))
        for (grid, _), (shared, samples) in groups.items()
    ]


def place_shapes(
    shapes: torch.Tensor,
    num_patches: int,
    train_grid: tuple[int, ...],
    coordinates: str,
    num_prefix_tokens: int = 0,
    prefix_coordinate: float = 0.0,
) -> TokenPositions:
    """
    [`TokenPositions.from_grid`] for samples of different sizes, by operations that do not depend on the sizes.
    Positions of padding are arbitrary.

    Args:
        shapes: (B, A) patches per axis of every sample, in the working type.
        num_patches: N, padding included.
    """
    place = COORDINATES[coordinates]
    index = torch.arange(num_patches, device=shapes.device, dtype=shapes.dtype)  # (N,)
    strides = shapes.flip(-1).cumprod(-1).flip(-1).roll(-1, dims=-1)  # (B, A)
    strides = torch.cat([strides[:, :-1], torch.ones_like(strides[:, -1:])], dim=-1).unsqueeze(1)  # (B, 1, A)
    sizes = shapes.unsqueeze(1)  # (B, 1, A)
    indices = (index.view(1, -1, 1) / strides).floor().remainder(sizes)  # (B, N, A)
    patches = place(indices, sizes, shapes.new_tensor(train_grid), sizes[..., -1:])  # (B, N, A)
    return TokenPositions.from_coordinates(patches, num_prefix_tokens, prefix_coordinate)
