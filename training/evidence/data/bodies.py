"""
Generated volumes of different voxel sizes: how far apart, in mm, are two bodies?

Two cells of a grid of slices, rows and columns contain a body, the others noise. The label is the class of the distance
between the centres of these cells, four classes of a quarter of the volumes each. How many cells a distance in mm is
depends on the size of the voxels, which is drawn for every volume and every axis and cannot be seen: the voxel spacing
has it. The best guess without it is right with probability `BLIND_ACCURACY` = 44.9%.
"""

from dataclasses import dataclass

import numpy as np

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
# Of the most probable class, given the cells of the bodies alone.
BLIND_ACCURACY = 0.449


@dataclass
class Bodies:
    """
    A split of the volumes: `bodies[index]` is `(clip, label)`, identical on every call, machine and process. The clip
    has `GRID` slices, uint8 of shape (GRID, image_size, image_size, 1), and the spacing of its voxels in mm.

    Args:
        image_size: height and width in pixels, a multiple of `GRID`.

    Raises:
        ValueError: for any other size.
    """

    split: str
    size: int
    image_size: int

    def __post_init__(self):
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
        side = self.image_size // GRID
        rows, columns = np.indices((side, side)) - (side - 1) / 2
        values = rng.integers(64, size=(GRID, GRID, GRID, side, side), dtype=np.uint8)
        values[tuple(cells.T)] += (160 * (np.hypot(rows, columns) < side / 2)).astype(np.uint8)
        volume = values.swapaxes(2, 3).reshape(GRID, self.image_size, self.image_size, 1)
        slices, *pixels = (extents / (1, side, side)).tolist()
        clip = ClipArray(volume, f"{self.split} volume {index}", (slices, *pixels))
        return clip, int(np.searchsorted(BOUNDS, distance))


@register_task
@dataclass
class BodiesTask(Task):
    name = "bodies"
    inputs = "clips"
    sizes = {"training": 102400, "evaluation": 1000}
    labels = LABELS

    def samples(self, part: str, request: DataRequest) -> Bodies:
        if request.num_channels != 1:
            raise ValueError(f"--num_channels {request.num_channels}: clips of bodies have one; accepted: 1.")
        if request.num_frames != GRID:
            raise ValueError(f"--num_frames {request.num_frames}: bodies have {GRID} slices; accepted: as many.")
        return Bodies(self.split(part), self.count(part), request.image_size[0])
