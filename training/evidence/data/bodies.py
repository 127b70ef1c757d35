"""
Generated volumes of different voxel sizes: how far apart, in mm, are two bodies?

Two cells of a grid of slices, rows and columns contain a body, the others noise. The label is the class of the distance
between the centres of these cells, four classes of a quarter of the volumes each. How many cells a distance in mm is
depends on the size of the voxels, which is drawn for every volume and every axis and cannot be seen: the voxel spacing
has it. The best guess without it is right with probability `BLIND_ACCURACY` = 44.9%.

Two other ways tell a model the size of the voxels: as channels, and by volumes resampled to one size.
"""

from dataclasses import dataclass

import numpy as np

from training.common.arguments import flag
from training.common.tasks import SPLITS, Task, register_task
from training.data.clips import ClipArray
from training.data.sources import DataRequest


# Distances in mm that separate the classes.
BOUNDS = (21.0, 32.0, 50.0)
LABELS = ("up to 21 mm", "21 – 32 mm", "32 – 50 mm", "above 50 mm")
# Slices, rows and columns of cells. A cell is one slice thick.
GRID = 4
# Least and largest extent of a cell on each axis, in mm. Its logarithm has a uniform distribution.
EXTENTS = (4.0, 32.0)
# Voxels of the least extent, on each axis, that the largest volume has.
RESAMPLED = int(GRID * EXTENTS[1] / EXTENTS[0])
# Of the most probable class, given the cells of the bodies alone.
BLIND_ACCURACY = 0.449


@dataclass
class Bodies:
    """
    A split of the volumes: `bodies[index]` is `(clip, label)`, identical on every call, machine and process. The clip
    has `GRID` slices, uint8 of shape (GRID, image_size, image_size, num_channels), and the spacing of its voxels in mm.

    Args:
        image_size: height and width in pixels, a multiple of `GRID`.
        num_channels: 1, or 4: in every voxel also the logarithms of the three extents of a cell, `EXTENTS` as 0 … 255.
        resampled: whether a clip has `RESAMPLED` slices, rows and columns of voxels of 4 mm on each axis, each with the
            value of the voxel at its centre, or 0 outside the volume. `image_size` is then `RESAMPLED`.

    Raises:
        ValueError: for any other size.
    """

    split: str
    size: int
    image_size: int
    num_channels: int = 1
    resampled: bool = False

    def __post_init__(self):
        if self.resampled and self.image_size != RESAMPLED:
            raise ValueError(f"Resampled bodies of {self.image_size} px; accepted: {RESAMPLED} px.")
        if self.image_size % GRID or self.image_size < 4 * GRID:
            raise ValueError(
                f"Bodies of {self.image_size} px cannot be drawn; accepted: multiples of {GRID} px from {4 * GRID} on."
            )

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[ClipArray, int]:
        rng = np.random.default_rng((SPLITS.index(self.split), index))
        extents = np.exp(rng.uniform(*np.log(EXTENTS), 3))  # of a cell, in mm
        cells = np.stack(np.unravel_index(rng.choice(GRID**3, 2, replace=False), (GRID,) * 3), axis=1)  # (2, 3)
        distance = np.linalg.norm((cells[1] - cells[0]) * extents)
        side = 4 if self.resampled else self.image_size // GRID
        rows, columns = np.indices((side, side)) - (side - 1) / 2
        values = rng.integers(64, size=(GRID, GRID, GRID, side, side), dtype=np.uint8)
        values[tuple(cells.T)] += (160 * (np.hypot(rows, columns) < side / 2)).astype(np.uint8)
        volume = values.swapaxes(2, 3).reshape(GRID, GRID * side, GRID * side, 1)
        if self.num_channels > 1:
            low, high = np.log(EXTENTS)
            levels = np.rint(255 * (np.log(extents) - low) / (high - low)).astype(np.uint8)
            volume = np.concatenate([volume, np.broadcast_to(levels, (*volume.shape[:3], 3))], axis=-1)
        spacing = extents / (1, side, side)
        if self.resampled:
            volume, spacing = _resample(volume, spacing), np.full(3, EXTENTS[0])
        clip = ClipArray(volume, f"{self.split} volume {index}", tuple(spacing.tolist()))
        return clip, int(np.searchsorted(BOUNDS, distance))


def _resample(volume: np.ndarray, spacing: np.ndarray) -> np.ndarray:
    """(slices, rows, columns, channels) of voxels of `spacing` mm, as `RESAMPLED` voxels of 4 mm on each axis."""
    centres = (np.arange(RESAMPLED) + 0.5) * EXTENTS[0]
    # Voxels outside the volume are those of a border of zeros.
    bordered = np.pad(volume, [(0, 1), (0, 1), (0, 1), (0, 0)])
    nearest = [np.minimum(centres // extent, count).astype(int) for extent, count in zip(spacing, volume.shape)]
    return bordered[np.ix_(*nearest)]


@register_task
@dataclass
class BodiesTask(Task):
    name = "bodies"
    inputs = "clips"
    sizes = {"training": 102400, "evaluation": 1000}
    labels = LABELS
    resampled: bool = flag(False, "Resample volumes of `bodies` to voxels of 4 mm.")

    def samples(self, part: str, request: DataRequest) -> Bodies:
        if request.num_channels not in (1, 4):
            raise ValueError(
                f"--num_channels {request.num_channels}: accepted: 1, or 4, of which three are the size of the voxels."
            )
        slices = RESAMPLED if self.resampled else GRID
        if request.num_frames != slices:
            raise ValueError(f"--num_frames {request.num_frames}: bodies have {slices} slices; accepted: as many.")
        return Bodies(self.split(part), self.count(part), request.image_size[0], request.num_channels, self.resampled)
