"""From a configuration and inputs to the positions of all tokens, with spacing, and the displacements of training."""

import math
from typing import NamedTuple

import torch

from ..fast.dispatch import in_portable_graph, values_are_unknown, working_dtype
from .positions import CONVENTIONS, Convention, GroupedPositions, TokenPositions, in_unit, needs_spacing, patch_indices
from .rotary_fields import DISPLACEMENTS


def draw_perturbation(grid: tuple[int, ...], strength: float, device: torch.device) -> torch.Tensor:
    """
    Random displacements of patches, ComRoPE eq. (11): normal with a standard deviation of `strength` patch extents,
    truncated to the patch (not clamped, which would put mass on its border).

    Every forward pass draws once for all samples of its batch, so that they share rotations; the equation does not
    say whether samples differ, and ComRoPE's code accepts both. That code halves the deviation, clamps, and perturbs no
    frames of videos; here all axes are perturbed. For other draws, pass `positions` to the model.

    Returns:
        (N, A) displacements in patch extents, in [−½, ½].
    """
    quantiles = _draw_uniform(math.erf(0.5 / (strength * math.sqrt(2))), device, math.prod(grid), len(grid))
    return torch.erfinv(quantiles).mul(strength * math.sqrt(2)).clamp(-0.5, 0.5)


def draw_displacements(
    config, grid: tuple[int, ...], given: torch.Tensor | None, device: torch.device
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """
    Draw the displacements of a forward pass in training: those of [`draw_perturbation`], then those of DINOv3 (§3.2 and
    its code). It augments coordinates x that run from −1 to 1 over an input: x ← (x + s) · j · r, with one
    s_a ~ U[−shift, shift] and one j_a ~ exp U[−log jitter, log jitter] per axis, and one r ~ exp U[−log rescale, log
    rescale] for all axes. All patches share these numbers.

    Args:
        config: A [`LieREConfig`] or a [`RotaryPatchConfig`].
        given: (…, N, A) displacements that the input has, for frames at irregular times, or `None`.

    Returns:
        Two displacements in patch extents, each possibly `None`: (N, A) from [`draw_perturbation`], which also act on a
        table of training patches, and (…, N, A) of everything together, which act on coordinates.
    """
    perturbed, offsets = None, given
    if config.position_perturbation:
        perturbed = draw_perturbation(grid, config.position_perturbation, device)  # (N, A)
        offsets = perturbed if given is None else given + perturbed  # (…, N, A)
    shift, factors = config.position_shift, ((config.position_jitter, len(grid)), (config.position_rescale, 1))
    if not shift and all(largest is None for largest, _ in factors):
        return perturbed, offsets
    regular = patch_indices(grid, device)  # (N, A)
    half = regular.new_tensor(grid) / 2  # (A,)
    centre = half - 0.5
    placed = (regular if offsets is None else regular + offsets) - centre  # (…, N, A)
    if shift:
        placed = placed + _draw_uniform(shift, device, len(grid)) * half
    for largest, axes in factors:
        if largest is not None:
            placed = placed * _draw_uniform(math.log(largest), device, axes).exp()
    return perturbed, placed + centre - regular


def _draw_uniform(bound: float, device: torch.device, *shape: int) -> torch.Tensor:
    """Numbers from U[−bound, bound], in the working type."""
    return torch.rand(*shape, device=device, dtype=working_dtype(device)).mul(2).sub(1).mul(bound)


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
    frames = torch.arange(grid[0], device=device, dtype=dtype)  # (grid[0],)
    displaced = tubelets / extent - (frames + 0.5 - grid[0] / 2)  # (1 or B, grid[0])
    displaced = displaced.repeat_interleave(math.prod(grid[1:]), dim=1)  # (1 or B, N)
    return spacing * patch_shape / units, torch.nn.functional.pad(displaced.unsqueeze(-1), (0, len(grid) - 1))


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


CONVENTIONS["physical"] = Convention(
    "lengths about the centre of the input, in physical_unit", in_unit, centre=0.5, extents=physical_extents
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
    Place a batch of samples with (B, A) grids, padded to `num_patches`: the places of the distinct grids and the
    (samples,) indices of each, both empty if no table needs them, and the positions of all tokens.
    """
    needs_positions = needs_positions and config.uses_positions
    if not has_table and not needs_positions:
        return [], (), None
    drawn = training and any(getattr(config, name) != value for name, value in DISPLACEMENTS.items())
    by_grid = has_table or needs_spacing(config) or drawn
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
    The grids of (B, A) patches per axis, each with the spacing and the (samples,) indices of its samples. Samples of
    different (A,) or (B, A) spacing do not share a grid.
    """
    if in_portable_graph():
        raise ValueError(
            "An exported graph would keep the spatial_shapes of its example; accepted there: inputs of one size, or "
            "coordinates of the grid alone, without a table and in evaluation mode."
        )
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
    [`place_patches`] for samples of (B, A) `shapes`, in the working type, by operations that do not depend on them.
    Positions of padding are arbitrary.
    """
    index = torch.arange(num_patches, device=shapes.device, dtype=shapes.dtype)  # (N,)
    strides = shapes.flip(-1).cumprod(-1).flip(-1).roll(-1, dims=-1)  # (B, A)
    strides = torch.cat([strides[:, :-1], torch.ones_like(strides[:, -1:])], dim=-1).unsqueeze(1)  # (B, 1, A)
    sizes, trained = shapes.unsqueeze(1), shapes.new_tensor(config.train_grid)  # (B, 1, A), (A,)
    indices = (index.view(1, -1, 1) / strides).floor().remainder(sizes)  # (B, N, A)
    patches = CONVENTIONS[config.coordinates].place(indices, sizes, trained, sizes[..., -1:])  # (B, N, A)
    return TokenPositions.from_coordinates(patches, *config.prefix)
