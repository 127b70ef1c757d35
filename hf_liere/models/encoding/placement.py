"""From a configuration and an input to the positions of all of its tokens, those that the user gives included."""

import math
from typing import NamedTuple

import torch
from transformers.utils import logging

from ..fast.dispatch import values_are_unknown, working_dtype
from .displacements import draw_displacements
from .encoding_traits import DISPLACEMENTS
from .positions import COORDINATES, GroupedPositions, TokenPositions, patch_indices


logger = logging.get_logger(__name__)


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
        extents: (A,) or (B, A) extents e of a patch, for `coordinates="physical"`, see [`physical_extents`]. The patch
            with index i on an axis of n patches is at ½ + (i + ½ − n/2)·e: the centre of the input is at ½, and an
            input with an extent of 1 has `unit` coordinates.
    """
    if not config.uses_positions:
        return None
    (num_prefix_tokens, centre), dtype = config.prefix, working_dtype(device)
    if extents is None:
        # (P + N, A)
        return TokenPositions.from_grid(
            grid, config.train_grid, config.coordinates, num_prefix_tokens, centre, offsets, device, dtype
        )
    indices = patch_indices(grid, offsets, device, dtype)  # (…, N, A)
    patches = 0.5 + (indices + 0.5 - extents.new_tensor(grid) / 2) * extents.unsqueeze(-2)  # ((B,) N, A)
    return TokenPositions.from_coordinates(patches, num_prefix_tokens, centre)  # (1 or B, P + N, A)


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
    extents = offsets = displaced = None
    if config.coordinates == "physical" and needs_positions:
        # (A,) or (1 or B, A), (1 or B, N, A)
        extents, displaced = physical_extents(config, grid, batch_size, spacing, frame_times, device)
    if training:
        # (N, A), (…, N, A)
        offsets, displaced = draw_displacements(config, grid, displaced, device, working_dtype(device))
    return Place(grid, offsets, place_patches(config, grid, device, displaced, extents) if needs_positions else None)


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
        return [], (), place_shapes(config, shapes, num_patches)
    grids = distinct_grids(spatial_shapes, spacing, device)
    samples = tuple(indices for *_, indices in grids)  # (samples,) each
    places = [
        place_input(config, grid, len(indices), device, grid_spacing, None, training, needs_positions)
        for grid, grid_spacing, indices in grids
    ]
    placed = tuple(place.positions for place in places if place.positions is not None)
    return places, samples, GroupedPositions(placed, samples) if needs_positions else None


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
    groups: dict[tuple, tuple[torch.Tensor | None, list[int]]] = {}
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


def place_shapes(config, shapes: torch.Tensor, num_patches: int) -> TokenPositions:
    """
    [`place_patches`] for samples of different sizes, by operations that do not depend on the sizes. Positions of
    padding are arbitrary.

    Args:
        shapes: (B, A) patches per axis of every sample, in the working type.
        num_patches: N, padding included.
    """
    num_prefix_tokens, centre = config.prefix
    index = torch.arange(num_patches, device=shapes.device, dtype=shapes.dtype)  # (N,)
    strides = shapes.flip(-1).cumprod(-1).flip(-1).roll(-1, dims=-1)  # (B, A)
    strides = torch.cat([strides[:, :-1], torch.ones_like(strides[:, -1:])], dim=-1).unsqueeze(1)  # (B, 1, A)
    sizes, trained = shapes.unsqueeze(1), shapes.new_tensor(config.train_grid)  # (B, 1, A), (A,)
    indices = (index.view(1, -1, 1) / strides).floor().remainder(sizes)  # (B, N, A)
    patches = COORDINATES[config.coordinates](indices, sizes, trained, sizes[..., -1:])  # (B, N, A)
    return TokenPositions.from_coordinates(patches, num_prefix_tokens, centre)


def physical_extents(
    config,
    grid: tuple[int, ...],
    batch_size: int,
    spacing: torch.Tensor | None,
    frame_times: torch.Tensor | None,
    device: torch.device,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """
    Args:
        config: A [`LieREConfig`] with `coordinates="physical"`.
        spacing: (A,) or (B, A) extents of a pixel, frames or slices first; without these if `frame_times` are given.
        frame_times: (T,) or (B, T) times of frames, or positions of slices.

    Returns:
        (A,) or (1 or B, A) extents of a patch in `physical_unit`, and `None`, or, with `frame_times`, (1 or B, N, A)
        displacements in patch extents that move each tubelet to the mean time of its frames. Its extent is then that of
        equally spaced frames with the same first and last time.

    Raises:
        ValueError: if `spacing` is missing, either is of the wrong shape, a spacing is not positive and finite, or
            times are not finite or decrease.
    """
    dtype = working_dtype(device)
    patch_shape = torch.tensor(config.patch_shape, device=device, dtype=dtype)  # (A,)
    units = torch.tensor(config.physical_unit, device=device, dtype=dtype).expand(len(grid))  # (A,)
    axes = len(grid) if frame_times is None else len(grid) - 1
    spacing = _check_spacing(spacing, frame_times is not None, batch_size, axes, device)
    if frame_times is None:
        return spacing * patch_shape / units, None
    times = _check_times(frame_times, batch_size, grid, config.patch_shape[0], device)  # (1 or B, T)
    first, last = times[:, :1], times[:, -1:]
    interval = (last - first) / max(times.shape[1] - 1, 1)  # (1 or B, 1)
    rows = max(times.shape[0], spacing.shape[0] if spacing.ndim == 2 else 1)
    spacing = torch.cat([interval.expand(rows, 1), spacing.expand(rows, axes)], dim=-1)  # (1 or B, A)
    tubelets = times.unflatten(1, (grid[0], config.patch_shape[0])).mean(dim=-1) - (first + last) / 2
    # If all frames have one time, patches have an extent of zero and displacements do not matter.
    extent = torch.where(interval > 0, interval, 1.0) * config.patch_shape[0]  # (1 or B, 1)
    frames = patch_indices(grid[:1], None, device, dtype).squeeze(-1)  # (grid[0],)
    displaced = tubelets / extent - (frames + 0.5 - grid[0] / 2)  # (1 or B, grid[0])
    displaced = displaced.repeat_interleave(patch_indices(grid[1:], None, device, dtype).shape[0], dim=1)  # (1 or B, N)
    return spacing * patch_shape / units, torch.nn.functional.pad(displaced.unsqueeze(-1), (0, len(grid) - 1))


def refuse_spacing(config, spacing: torch.Tensor | None, frame_times: torch.Tensor | None, positions) -> None:
    """Raises `ValueError` for a spacing or times that would have no effect."""
    for name, value in (("spacing", spacing), ("frame_times", frame_times)):
        if value is None:
            continue
        if config.coordinates != "physical":
            raise ValueError(
                f"{name} was given, but coordinates={config.coordinates!r} do not depend on it: accepted with "
                "coordinates='physical'."
            )
        if positions is not None:
            raise ValueError(f"{name} and positions were both given; positions alone place the patches.")


def _check_spacing(spacing, has_times: bool, batch_size: int, axes: int, device: torch.device) -> torch.Tensor:
    meaning = "one extent of a pixel (voxel, frame) per axis"
    if has_times:
        meaning = "rows and columns only, because frame_times place the frames"
    if spacing is None:
        raise ValueError(
            f"coordinates='physical' needs spacing of shape ({axes},) or ({batch_size}, {axes}): {meaning}, in the "
            "measure of physical_unit."
        )
    spacing = _check_rows("spacing", spacing, batch_size, axes, meaning, device)
    accepted = torch.isfinite(spacing) & (spacing > 0)
    if not values_are_unknown(spacing) and not accepted.all():
        raise ValueError(f"spacing contains {spacing[~accepted][0].item()}; positive and finite numbers are needed.")
    return spacing


def _check_times(times, batch_size: int, grid: tuple[int, ...], tubelet: int, device: torch.device) -> torch.Tensor:
    """(1 or B, T)"""
    if len(grid) != 3:
        raise ValueError("frame_times were given to a model of images, which have no frames.")
    frames = grid[0] * tubelet
    times = _check_rows("frame_times", times, batch_size, frames, "one per frame", device).reshape(-1, frames)
    if not values_are_unknown(times):
        if not torch.isfinite(times).all():
            raise ValueError(f"frame_times contain {(~torch.isfinite(times)).sum().item()} values that are not finite.")
        if (falls := times.diff() < 0).any():
            frame = falls.nonzero()[0, 1].item() + 1
            raise ValueError(f"frame_times decrease at frame {frame}; frames must be in the order of their times.")
    return times


def _check_rows(name: str, given, batch_size: int, length: int, meaning: str, device: torch.device) -> torch.Tensor:
    """(length,) or (1 or B, length), in the working dtype."""
    values = torch.as_tensor(given, device=device).to(working_dtype(device))
    if tuple(values.shape) not in ((length,), (1, length), (batch_size, length)):
        raise ValueError(
            f"{name} of shape {tuple(values.shape)} must be ({length},) or ({batch_size}, {length}): {meaning}."
        )
    return values


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
    num_prefix_tokens, prefix_coordinate = config.prefix
    accepted = num_prefix_tokens if config.places_prefix else 0
    check_shape(coordinates, batch_size, num_tokens, config.num_axes, accepted)
    coordinates = zero_hidden(coordinates, visible)  # (…, N or P + N, A)
    check_coordinates(config, coordinates)
    has_prefix = coordinates.shape[-2] > num_tokens
    if (scale := getattr(config, "position_scale", None)) is not None:
        coordinates = coordinates.to(working_dtype(coordinates.device))
        origin, scale = (coordinates.new_tensor(config.by_axis(f"position_{name}")) for name in ("origin", "scale"))
        coordinates = (coordinates - origin) * scale  # (…, N or P + N, A)
    return TokenPositions.from_coordinates(coordinates, num_prefix_tokens, None if has_prefix else prefix_coordinate)


def require_tensors(**given: object) -> None:
    """Raises `ValueError` if one of the given values is something else than a tensor or `None`."""
    for name, value in given.items():
        if value is not None and not isinstance(value, torch.Tensor):
            raise ValueError(
                f"{name} is a {type(value).__name__}; a tensor is needed: torch.as_tensor makes one of numbers, and a "
                "processor, such as AutoImageProcessor, of images."
            )


def check_shape(
    positions: torch.Tensor, batch_size: int, num_patches: int, num_axes: int, num_prefix_tokens: int = 0
) -> None:
    """
    Args:
        num_prefix_tokens: Number P of class and register tokens whose positions may come first.

    Raises:
        ValueError: if the user's `positions` are not (N, A), (1, N, A) or (B, N, A), with N or P + N tokens.
    """
    require_tensors(positions=positions)
    accepted = ((num_patches, num_axes), (batch_size, num_patches, num_axes))
    batches, tokens = positions.shape[:-2], positions.shape[-2:]
    if batches not in ((), (1,), (batch_size,)) or tokens not in (
        (num_patches, num_axes),
        (num_prefix_tokens + num_patches, num_axes),
    ):
        prefix = f"patch tokens, or these after {num_prefix_tokens} class and register tokens"
        raise ValueError(
            f"positions of shape {tuple(positions.shape)} do not match the input: accepted are {accepted[0]} (patches, "
            f"axes) and {accepted[1]} (batch, patches, axes), {prefix if num_prefix_tokens else 'patch tokens only'}."
        )


def check_coordinates(config, positions: torch.Tensor) -> None:
    """Raises `ValueError` if the user's `positions` are not floating point or not finite; warns of degrees."""
    if not positions.is_floating_point():
        raise ValueError(f"positions are {positions.dtype}; a floating point type is needed.")
    if values_are_unknown(positions):
        return
    if not torch.isfinite(positions).all():
        raise ValueError(f"positions contain {(~torch.isfinite(positions)).sum().item()} values that are not finite.")
    if config.rotary_init == "so3" and (positions.detach().norm(dim=-1) > 2 * math.pi).any():
        logger.warning_once(
            "Some rotation vectors are longer than 2π, a full turn: their length is an angle in radians. "
            "torch.deg2rad converts degrees."
        )


def zero_hidden(values: torch.Tensor, visible: torch.Tensor | None) -> torch.Tensor:
    """
    (…, N, C) values of tokens, with or without prefix tokens, and zeros for hidden tokens: the values there, even
    infinity and NaN, reach neither outputs nor gradients.

    Args:
        visible: (B, N), false for hidden tokens. Values that samples share are hidden where all samples hide them.
    """
    if visible is None:
        return values
    visible = visible.to(values.device, torch.bool)  # (B, N)
    if values.ndim == 2 or values.shape[0] != len(visible):
        visible = visible.any(dim=0)  # (N,)
    visible = torch.nn.functional.pad(visible, (values.shape[-2] - visible.shape[-1], 0), value=True)  # (…, N)
    return values.masked_fill(~visible.unsqueeze(-1), 0)  # (…, N, C)
