"""The arrows task of LieRE (section 5.2), drawn on demand and never stored.

A grid of cells, by default 9×9 cells of 12×12 pixels, contains eight arrows and the letters A, B, C, D, E and Y. The Y
has one of four rotations, and exactly one arrow lies on the ray from the base of the Y. The label is that arrow's
direction. Guessing the most frequent direction of all arrows is right with probability `BAG_OF_ARROWS_ACCURACY` =
44.2%; a better answer requires the relative position of the Y and an arrow.

The paper's grids are square. Rectangular images draw one of the grids with about as many cells that [`rectangles`]
lists. In clips the cells of all frames form one grid with three axes, and arrows also point to earlier frames (a disc,
an arrow seen from its tip) and to later ones (a cross, an arrow seen from its tail). The same shapes in a ring are a Y.
Guessing from the arrows alone is then right with probability `BAG_OF_CLIP_ARROWS_ACCURACY` = 36.5%.
"""

import numpy as np

from training.common.tasks import SPLITS


CELL = 12
LABELS = ("up", "right", "down", "left")
STEPS = np.array([(-1, 0), (0, 1), (1, 0), (0, -1)])
CLIP_LABELS = (*LABELS, "earlier", "later")
# Frames, rows and columns.
CLIP_STEPS = np.array([*np.pad(STEPS, ((0, 0), (1, 0))), (-1, 0, 0), (1, 0, 0)])
NUM_ARROWS = 8
LETTERS = "ABCDE"
# As in the paper's experiment: 800,000 examples, each seen once.
DEFAULT_SIZES = {"train": 800_000, "validation": 10_000, "test": 10_000}
SMALLEST_GRID = 5
GRID_STREAM = 1

# E[max of multinomial(8, ¼)] / 8, the expected share of the most frequent direction.
BAG_OF_ARROWS_ACCURACY = 0.4422607421875
# The same with six directions.
BAG_OF_CLIP_ARROWS_ACCURACY = 0.36514953417924095

# An arrow, the letters A … E and the Y. Bitmaps instead of a font give the same pixels on every platform.
_GLYPHS = """
    ....##....  ...####...  .######...  ...#####..  .#####....  .########.  ##......##
    ...####...  ..##..##..  .##...##..  ..##...##.  .##..##...  .##.......  ###....###
    ..######..  .##....##.  .##...##..  .##.......  .##...##..  .##.......  .###..###.
    .##.##.##.  .##....##.  .##...##..  .##.......  .##....##.  .##.......  ..######..
    ##..##..##  .##....##.  .######...  .##.......  .##....##.  .######...  ...####...
    ....##....  .########.  .#######..  .##.......  .##....##.  .######...  ....##....
    ....##....  .########.  .##....##.  .##.......  .##....##.  .##.......  ....##....
    ....##....  .##....##.  .##....##.  .##.......  .##...##..  .##.......  ....##....
    ....##....  .##....##.  .##....##.  ..##...##.  .##..##...  .##.......  ....##....
    ....##....  .##....##.  .#######..  ...#####..  .#####....  .########.  ....##....
"""
# Arrows to an earlier and to a later frame, and Ys whose bases face there.
_CLIP_GLYPHS = """
    ..........  ##......##  ...####...  ...####...
    ...####...  ###....###  .##....##.  .##....##.
    ..######..  .###..###.  .#......#.  .##....##.
    .########.  ..######..  #...##...#  #..#..#..#
    .########.  ...####...  #..####..#  #...##...#
    .########.  ...####...  #..####..#  #...##...#
    .########.  ..######..  #...##...#  #..#..#..#
    ..######..  .###..###.  .#......#.  .##....##.
    ...####...  ###....###  .##....##.  .##....##.
    ..........  ##......##  ...####...  ...####...
"""


def _stamps(glyphs: str) -> np.ndarray:
    """Glyphs as black on white, (glyphs, CELL, CELL)."""
    ink = np.array([[list(glyph) for glyph in line.split()] for line in glyphs.split("\n") if line]) == "#"
    # (rows, glyphs, columns) to (glyphs, rows, columns), with white around each.
    margin = (CELL - len(ink)) // 2
    return np.where(np.pad(ink.swapaxes(0, 1), ((0, 0), (margin, margin), (margin, margin))), 0, 255).astype(np.uint8)


_ARROW, *_LETTERS, _Y = _stamps(_GLYPHS)
_EARLIER, _LATER, _Y_EARLIER, _Y_LATER = _stamps(_CLIP_GLYPHS)
_ARROWS = [np.rot90(_ARROW, -direction) for direction in range(4)]
_YS = [np.rot90(_Y, LABELS.index("down") - direction) for direction in range(4)]
_STAMPS = np.stack([*_ARROWS, *_YS, *_LETTERS])
_CLIP_STAMPS = np.stack([*_ARROWS, _EARLIER, _LATER, *_YS, _Y_EARLIER, _Y_LATER, *_LETTERS])


def rectangles(grid: int) -> tuple[tuple[int, int], ...]:
    """(rows, columns) of grids with at most `grid`² cells, from wide to tall, including the square."""
    wide = [(rows, grid**2 // rows) for rows in range(SMALLEST_GRID, grid)]
    return (*wide, (grid, grid), *((rows, columns) for columns, rows in reversed(wide)))


class Arrows:
    """A split of the arrows task. `arrows[index]` is `(image, label)`, identical on every call, machine and process.

    Args:
        split: one of `SPLITS`; splits share no random stream.
        size: number of images.
        image_size: side of the square image in pixels, a multiple of `CELL`.
        seed: each seed gives another data set.
        rectangular: draw the shapes of `rectangles` instead of squares, with at most as many pixels.
        num_frames: frames per clip; `None` draws images.

    Raises:
        ValueError: if the split is unknown, the image does not consist of whole cells or a clip has fewer than two
            frames.
    """

    def __init__(
        self,
        split: str,
        size: int | None = None,
        image_size: int = 9 * CELL,
        seed: int = 0,
        rectangular: bool = False,
        num_frames: int | None = None,
    ):
        if split not in SPLITS:
            raise ValueError(f"The arrows have no split {split!r}; accepted: {', '.join(SPLITS)}.")
        if image_size % CELL or image_size < SMALLEST_GRID * CELL:
            raise ValueError(
                f"Arrows of {image_size} px cannot be drawn; accepted: multiples of {CELL} px, the size of a cell, "
                f"from {SMALLEST_GRID * CELL} px on, such as 108, 168 and 276."
            )
        if num_frames is not None and num_frames < 2:
            raise ValueError(f"Clips of arrows have 2 frames or more, not {num_frames}.")
        self.split = split
        self.size = DEFAULT_SIZES[split] if size is None else size
        grid = image_size // CELL
        self.grids = rectangles(grid) if rectangular else ((grid, grid),)
        self.seed = seed
        self.frames = () if num_frames is None else (num_frames,)
        self.label_names = LABELS if num_frames is None else CLIP_LABELS
        self.steps, self.pictures = (STEPS, _STAMPS) if num_frames is None else (CLIP_STEPS, _CLIP_STAMPS)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        """The image, uint8 of shape (height, width, 1) or (frames, height, width, 1), and its label, an index into
        `label_names`."""
        stamps, cells, label = self.scene(index)
        *frames, rows, columns = grid = self.grid(index)
        canvas = np.full((np.prod(grid), CELL, CELL), 255, np.uint8)
        canvas[cells] = self.pictures[stamps]
        lines = canvas.reshape(*grid, CELL, CELL).swapaxes(-3, -2)
        return lines.reshape(*frames, rows * CELL, columns * CELL, 1), label

    def grid(self, index: int) -> tuple[int, ...]:
        """Cells of an image, (rows, columns), or of a clip, (frames, rows, columns)."""
        if len(self.grids) == 1:
            return (*self.frames, *self.grids[0])
        # A separate stream, so that the contents of a grid do not depend on the available grids.
        rng = np.random.default_rng((self.seed, SPLITS.index(self.split), index, GRID_STREAM))
        return (*self.frames, *self.grids[rng.integers(len(self.grids))])

    def scene(self, index: int) -> tuple[np.ndarray, np.ndarray, int]:
        """The stamps (14,), their cells (14,), as flat indices into the grid, and the label.

        The order is: the arrow that the Y points at, the Y, the other arrows, the letters A … E. Stamps are numbered:
        arrows by direction, then Ys by the direction of their base, both as in `label_names`, then letters.
        """
        if not 0 <= index < self.size:
            raise IndexError(f"The {self.split} split has {self.size} arrows images, no number {index}.")
        grid, num_directions = self.grid(index), len(self.steps)
        num_cells = int(np.prod(grid))
        rng = np.random.default_rng((self.seed, SPLITS.index(self.split), index))
        directions = rng.integers(num_directions, size=NUM_ARROWS)
        base = int(rng.integers(num_directions))
        axis = int(np.flatnonzero(self.steps[base])[0])
        room = int(rng.integers(1, grid[axis]))
        # `room` cells lie between the Y and the border that its base faces.
        along = room if self.steps[base, axis] < 0 else grid[axis] - 1 - room
        place = [along if other == axis else int(rng.integers(size)) for other, size in enumerate(grid)]
        distance = int(rng.integers(1, room + 1))

        y_cell = int(np.ravel_multi_index(place, grid))
        step = int(self.steps[base, axis]) * int(np.prod(grid[axis + 1 :]))
        target = y_cell + distance * step

        order = rng.permutation(num_cells)
        on_ray = np.zeros(num_cells, bool)
        on_ray[[y_cell + i * step for i in range(room + 1)]] = True
        others = order[~on_ray[order]][: NUM_ARROWS - 1]
        # Letters may lie on the ray; only a second arrow there would be ambiguous.
        on_ray[:] = False
        on_ray[others] = on_ray[y_cell] = on_ray[target] = True
        letters = order[~on_ray[order]][: len(LETTERS)]
        letter_stamps = 2 * num_directions + np.arange(len(LETTERS))
        stamps = np.concatenate([directions[:1], [num_directions + base], directions[1:], letter_stamps])
        return stamps, np.concatenate([[target, y_cell], others, letters]), int(directions[0])
