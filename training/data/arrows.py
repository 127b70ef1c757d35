"""The arrows task of LieRE (section 5.2), drawn on demand and never stored.

On a grid of cells, by default 9×9 cells of 12×12 pixels, stand eight arrows and the letters A, B, C, D, E and Y. The Y
is rotated one of four ways, and exactly one arrow stands on the ray that leaves the base of the Y. The label is that
arrow's direction. A guess from the arrows alone, their most frequent direction, is right with probability
`BAG_OF_ARROWS_ACCURACY` = 44.2%; more needs the relative position of the Y and an arrow.

Beside the paper's square grids there are rectangles: every image has one of the grids with about as many cells that
[`rectangles`] lists, drawn at random.
"""

import numpy as np


CELL = 12
LABELS = ("up", "right", "down", "left")
STEPS = np.array([(-1, 0), (0, 1), (1, 0), (0, -1)])
SPLITS = ("train", "validation", "test")
NUM_ARROWS = 8
LETTERS = "ABCDE"
# The sizes of the paper's experiment: 800,000 examples, hence none is seen twice.
DEFAULT_SIZES = {"train": 800_000, "validation": 10_000, "test": 10_000}
SMALLEST_GRID = 5
GRID_STREAM = 1

# E[max of multinomial(8, ¼)] / 8, the expected share of the most frequent direction.
BAG_OF_ARROWS_ACCURACY = 0.4422607421875

# An arrow, the letters A … E and the Y, side by side. Bitmaps instead of a font, so that every platform draws the same.
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


def _stamps() -> np.ndarray:
    """All glyphs as black on white, (13, CELL, CELL): four arrows, four Ys by the direction of their base, A … E."""
    ink = np.array([[list(glyph) for glyph in line.split()] for line in _GLYPHS.split("\n") if line]) == "#"
    # (rows, glyphs, columns) to (glyphs, rows, columns), with white around each.
    margin = (CELL - len(ink)) // 2
    stamps = np.where(np.pad(ink.swapaxes(0, 1), ((0, 0), (margin, margin), (margin, margin))), 0, 255).astype(np.uint8)
    arrow, *letters, y = stamps
    arrows = [np.rot90(arrow, -direction) for direction in range(4)]
    ys = [np.rot90(y, LABELS.index("down") - direction) for direction in range(4)]
    return np.stack([*arrows, *ys, *letters])


_STAMPS = _stamps()
_FIRST_Y = 4
_LETTER_STAMPS = np.arange(8, 8 + len(LETTERS))


def rectangles(grid: int) -> tuple[tuple[int, int], ...]:
    """(rows, columns) of grids with `grid`² cells or as many as fit, from wide to tall, the square among them."""
    wide = [(rows, grid**2 // rows) for rows in range(SMALLEST_GRID, grid)]
    return (*wide, (grid, grid), *((rows, columns) for columns, rows in reversed(wide)))


class Arrows:
    """A split of the arrows task; `arrows[index]` is `(image, label)`, the same on every call, machine and process.

    Args:
        split: one of `SPLITS`; splits share no random stream.
        size: number of images.
        image_size: side of the square image in pixels, a multiple of `CELL`.
        seed: another seed is another data set.
        rectangular: whether images have the shapes of `rectangles` instead, with at most as many pixels.

    Raises:
        ValueError: if the split is unknown or the image does not consist of whole cells.
    """

    label_names = LABELS

    def __init__(
        self,
        split: str,
        size: int | None = None,
        image_size: int = 9 * CELL,
        seed: int = 0,
        rectangular: bool = False,
    ):
        if split not in SPLITS:
            raise ValueError(f"The arrows have no split {split!r}; accepted: {', '.join(SPLITS)}.")
        if image_size % CELL or image_size < SMALLEST_GRID * CELL:
            raise ValueError(
                f"Arrows of {image_size} px cannot be drawn: accepted are multiples of the cell's {CELL} px from "
                f"{SMALLEST_GRID * CELL} px on, such as 108, 168 and 276."
            )
        self.split = split
        self.size = DEFAULT_SIZES[split] if size is None else size
        grid = image_size // CELL
        self.grids = rectangles(grid) if rectangular else ((grid, grid),)
        self.seed = seed

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        """The image, uint8 of shape (height, width, 1), and its label, an index into `LABELS`."""
        stamps, cells, label = self.scene(index)
        rows, columns = self.grid(index)
        canvas = np.full((rows * columns, CELL, CELL), 255, np.uint8)
        canvas[cells] = _STAMPS[stamps]
        lines = canvas.reshape(rows, columns, CELL, CELL).swapaxes(1, 2)
        return lines.reshape(rows * CELL, columns * CELL, 1), label

    def grid(self, index: int) -> tuple[int, int]:
        """Rows and columns of the cells of an image."""
        if len(self.grids) == 1:
            return self.grids[0]
        # A stream of its own, so that what stands on a grid does not depend on which grids there are.
        rng = np.random.default_rng((self.seed, SPLITS.index(self.split), index, GRID_STREAM))
        return self.grids[rng.integers(len(self.grids))]

    def scene(self, index: int) -> tuple[np.ndarray, np.ndarray, int]:
        """What stands where: stamps (14,), their cells in raster order (14,), and the label.

        First the arrow that the Y points at, then the Y, the other arrows, and the letters A … E. Stamps 0 … 3 are
        arrows by their direction, 4 … 7 Ys by the direction of their base, both as in `LABELS`.
        """
        if not 0 <= index < self.size:
            raise IndexError(f"The {self.split} split has {self.size} arrows images, no number {index}.")
        rows, columns = self.grid(index)
        rng = np.random.default_rng((self.seed, SPLITS.index(self.split), index))
        directions = rng.integers(4, size=NUM_ARROWS)
        base = int(rng.integers(4))
        is_vertical = bool(STEPS[base, 0])
        length, breadth = (rows, columns) if is_vertical else (columns, rows)
        room, aside = int(rng.integers(1, length)), int(rng.integers(breadth))
        distance = int(rng.integers(1, room + 1))

        # `room` cells lie between the Y and the border its base faces.
        along = room if base in (LABELS.index("up"), LABELS.index("left")) else length - 1 - room
        row, column = (along, aside) if is_vertical else (aside, along)
        y_cell = row * columns + column
        step = int(STEPS[base, 0]) * columns + int(STEPS[base, 1])
        target = y_cell + distance * step

        order = rng.permutation(rows * columns)
        on_ray = np.zeros(rows * columns, bool)
        on_ray[[y_cell + i * step for i in range(room + 1)]] = True
        others = order[~on_ray[order]][: NUM_ARROWS - 1]
        # Letters may stand on the ray: only a second arrow there would make the question ambiguous.
        on_ray[:] = False
        on_ray[others] = on_ray[y_cell] = on_ray[target] = True
        letters = order[~on_ray[order]][: len(LETTERS)]
        stamps = np.concatenate([directions[:1], [_FIRST_Y + base], directions[1:], _LETTER_STAMPS])
        return stamps, np.concatenate([[target, y_cell], others, letters]), int(directions[0])
