"""
Generated volumes of different voxel sizes: how bright is the body at a given distance, in mm, from the marked one?

Every cell of a grid of slices, rows and columns contains a disc of one of four brightnesses. One is a ring instead, the
mark. The label is the brightness of the body that is `AWAY` mm further along the slices and as far down the rows. How
many cells these are depends on the size of the voxels, which is drawn for every volume and every axis and cannot be
seen: the voxel spacing has it. The best guess without it is right with probability `BLIND_ACCURACY` = 54.5%.
"""

from dataclasses import dataclass

import numpy as np

from training.data.clips import ClipArray


SPLITS = ("train", "validation")
DEFAULT_SIZES = {"train": 102400, "validation": 1000}
LABELS = ("dark", "dim", "light", "bright")
# Slices, rows and columns of cells. A cell is one slice thick.
GRID = 4
# Distance on each of the two axes, in mm.
AWAY = 12.0
# How far the body may be from the centre of the nearest cell, in cells.
NOISE = 0.25
# Of the most probable brightness, given the volume alone.
BLIND_ACCURACY = 0.545


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
        steps = rng.integers(1, GRID, 3)
        extents = AWAY / (steps + rng.uniform(-NOISE, NOISE, 3))  # of a cell, in mm
        steps[2] = 0
        marked = rng.integers(GRID - steps)
        brightness = rng.integers(len(LABELS), size=(GRID, GRID, GRID))
        side = self.image_size // GRID
        rows, columns = np.indices((side, side)) - (side - 1) / 2
        radius = np.hypot(rows, columns) / (side / 2)
        values = (60 * (brightness[..., None, None] + 1) * (radius < 1)).astype(np.uint8)  # (slices, rows, columns, …)
        values[tuple(marked)] = np.where((radius > 0.5) & (radius < 1), 240, 0)
        volume = values.swapaxes(2, 3).reshape(GRID, self.image_size, self.image_size, 1)
        slices, *pixels = (extents / (1, side, side)).tolist()
        clip = ClipArray(volume, f"{self.split} volume {index}", (slices, *pixels))
        return clip, int(brightness[tuple(marked + steps)])
