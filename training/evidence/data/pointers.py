"""
Generated grids with a pointer: which glyph stands so many rows and columns away from the header?

A sample is a grid of `SIZE` × `SIZE` tokens. One of them, at a random cell, is the header, which names a step: rows and
columns to another cell of the grid. The others carry one of four glyphs, and the glyph where the step leads is the
label of the header. Without positions the most frequent glyph is the best guess, right with probability
`BAG_OF_GLYPHS_ACCURACY` = 33.9%. The answer depends on the step between two cells, not on the cells, and a shift of the
whole grid changes none. The largest shift is a setting.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from training.common.arguments import flag, require_numbers
from training.common.tasks import Task, register_task
from training.data.augmentation import IGNORED_LABEL
from training.evidence.data.drawing import CHUNK, draw_columns


SIZE, CLASSES = 6, 4
CELLS = SIZE * SIZE
# E[max of multinomial(35, ¼)] / 35, the expected share of the most frequent glyph.
BAG_OF_GLYPHS_ACCURACY = 0.3393418512430049
# Steps on an axis, from -(SIZE - 1) to SIZE - 1.
STEPS = 2 * SIZE - 1


def pointer_columns(split: str, count: int, largest_shift: float) -> dict[str, np.ndarray]:
    """
    Args:
        largest_shift: the largest distance that a grid is moved by on each axis, in cells.

    Returns:
        `count` samples of N = 36 tokens: `features` (count, N, 26), the glyph as one of four channels, which are zero
        for the header, and the header's steps in rows and in columns as one of eleven channels each, which are zero for
        all others; `positions` (count, N, 2), row and column; `labels` (count, N), the glyph where the step leads at
        the header, and `IGNORED_LABEL` elsewhere.
    """
    return draw_columns(split, count, lambda rng: _chunk(rng, largest_shift))


@register_task
@dataclass
class Pointers(Task):
    name = "pointers"
    inputs = "tokens"
    sizes = {"training": 51200, "evaluation": 1000}
    training_shift: float = flag(
        0.0, "Largest distance that the grids of `pointers` are moved by to train on, in cells on each axis."
    )
    evaluation_shift: float = flag(0.0, "The same to evaluate.")

    def __post_init__(self):
        super().__post_init__()
        require_numbers(self, "training_shift", "evaluation_shift")

    def samples(self, part: str, request: Any = None) -> dict[str, np.ndarray]:
        return pointer_columns(self.split(part), self.count(part), getattr(self, f"{part}_shift"))


def _chunk(rng: np.random.Generator, largest_shift: float) -> dict[str, np.ndarray]:
    glyphs = rng.integers(CLASSES, size=(CHUNK, CELLS))
    headers, samples = rng.integers(CELLS, size=CHUNK), np.arange(CHUNK)
    targets = (headers + rng.integers(1, CELLS, CHUNK)) % CELLS
    shifts = largest_shift * rng.uniform(-1, 1, (CHUNK, 1, 2))
    cells = np.stack(np.divmod(np.arange(CELLS), SIZE), axis=1)  # (N, 2)
    steps = cells[targets] - cells[headers] + SIZE - 1  # (CHUNK, 2)
    features = np.zeros((CHUNK, CELLS, CLASSES + 2 * STEPS), np.float32)
    features[..., :CLASSES] = np.eye(CLASSES)[glyphs]
    named = np.eye(STEPS)[steps].reshape(CHUNK, -1)
    features[samples, headers] = np.concatenate([np.zeros((CHUNK, CLASSES)), named], axis=1)
    labels = np.full((CHUNK, CELLS), IGNORED_LABEL)
    labels[samples, headers] = glyphs[samples, targets]
    return {"features": features, "positions": (cells + shifts).astype(np.float32), "labels": labels}
