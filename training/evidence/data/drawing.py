"""Drawing samples of generated tasks, the same for every number of samples, and tasks with a setting for each part."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from training.common.arguments import flag, require_numbers
from training.common.tasks import SPLITS, Task


# Samples that are drawn together; the samples of a split are the same however many are drawn.
CHUNK = 1024


def draw_columns(
    split: str, count: int, draw: Callable[[np.random.Generator], dict[str, np.ndarray]]
) -> dict[str, np.ndarray]:
    """The first `count` samples of a split, of which `draw` makes `CHUNK` at a time."""
    generators = (np.random.default_rng((SPLITS.index(split), chunk)) for chunk in range(math.ceil(count / CHUNK)))
    chunks = [draw(rng) for rng in generators]
    return {name: np.concatenate([columns[name] for columns in chunks])[:count] for name in chunks[0]}


@dataclass
class TurnedTask(Task):
    """Tokens whose world is turned: `draw(split, count, largest angle)` makes their columns."""

    inputs = "tokens"
    training_angle: float = flag(
        30.0,
        "Largest angle of the query of `poses`, of the scene of `views`, or of a sample of --structures to train on, "
        "from the world's axes or those of the file, in degrees; 180 for all.",
    )
    evaluation_angle: float = flag(30.0, "The same to evaluate.")

    def __post_init__(self):
        super().__post_init__()
        require_numbers(self, "training_angle", "evaluation_angle", highest=180)

    def samples(self, part: str, request: Any = None) -> dict[str, np.ndarray]:
        return self.draw(self.split(part), self.count(part), getattr(self, f"{part}_angle"))

    def draw(self, split: str, count: int | None, largest_angle: float) -> dict[str, np.ndarray]:
        raise NotImplementedError


@dataclass
class StructuresTask(TurnedTask):
    """Tokens of --structures, which `read(path, split, count, largest angle)` makes."""

    structures: str | None = flag(
        None,
        "Folder of chains for `proteins`, such as data/dssp of MDAnalysisTests, or file of evidence/carbon_centres.py "
        "for `handedness`.",
    )

    def draw(self, split: str, count: int | None, largest_angle: float) -> dict[str, np.ndarray]:
        if self.structures is None:
            raise ValueError(f"--dataset_name {self.name} reads --structures, which is missing.")
        return self.read(self.structures, split, count, largest_angle)

    def read(self, path: str, split: str, count: int | None, largest_angle: float) -> dict[str, np.ndarray]:
        raise NotImplementedError
