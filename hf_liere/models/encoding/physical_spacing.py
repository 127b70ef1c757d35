"""Coordinates in units of length and time: extents of patches from the spacing of pixels and the times of frames."""

import math

import torch

from ..fast.dispatch import values_are_unknown, working_dtype
from .positions import CONVENTIONS, Convention, in_unit


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
