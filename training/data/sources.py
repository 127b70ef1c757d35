"""What all data are to the scripts: indexable sources of inputs and labels, and the names of the classes.

A source has a length and returns `(input, label)` for an index: of images a uint8 array of shape (height, width,
channels), of videos a clip that is not read yet, and the number of the class.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from torch.utils.data import Dataset, Subset


PARTS = ("training", "evaluation")


@dataclass(frozen=True)
class DataRequest:
    """
    What a run needs from its data.

    Args:
        image_size: height and width of the model's input; what is generated is drawn at that size.
        parts: those of `PARTS` that are needed.
        num_frames: number of frames of a clip.
        spacing: whether the model needs the spacing of voxels.
        writes: whether this process writes the files of generated clips.
        seed: seed of the arrows, and of the parts that `validation_fraction` and `train_fraction` make.
    """

    image_size: tuple[int, int]
    num_channels: int = 3
    parts: tuple[str, ...] = PARTS
    num_frames: int = 1
    writes: bool = True
    seed: int = 0
    spacing: bool = False


class Source(Protocol):
    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]: ...


@dataclass
class LabelledImages:
    """
    The sources of a run and the names of their classes, in the order of the labels; `splits` names the splits that the
    parts `train` and `evaluation` come from, where the data have any.
    """

    train: Source | None
    evaluation: Source | None
    label_names: list[str]
    # `named` is False where the data set only numbers its classes.
    named: bool = True
    splits: dict[str, str] = field(default_factory=dict)


@dataclass
class SourceDataset(Dataset):
    """Examples made from a source, one for each of its inputs."""

    source: Source

    def __len__(self) -> int:
        return len(self.source)


@dataclass
class Relabelled(SourceDataset):
    """A source whose label n is `numbers[n]` to the model."""

    numbers: Sequence[int]

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        image, label = self.source[index]
        return image, self.numbers[label]


def take_fraction(source: Source, fraction: float, seed: int) -> Source:
    """A random share of a source; a larger share of the same seed contains a smaller one."""
    if fraction == 1:
        return source
    count = max(round(len(source) * fraction), 1)
    return Subset(source, np.random.default_rng(seed).permutation(len(source))[:count].tolist())
