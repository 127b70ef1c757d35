"""The interface of all data: indexable sources of inputs and labels, and the names of the classes.

A source has a length and maps an index to `(input, label)`. The input is a uint8 image (height, width, channels) or a
clip that has not been read; the label is the number of the class.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
from torch.utils.data import Dataset, Subset
from transformers.utils import logging

from hf_liere.reading.files import HEIC_SUFFIXES, UnreadableError, has_suffix, numbers
from training.common.messages import abbreviate
from training.common.tasks import Task, draw_samples


logger = logging.get_logger(__name__)
PARTS = ("training", "evaluation")


@dataclass(frozen=True)
class DataRequest:
    """
    What a run requires of its data.

    Args:
        image_size: height and width of the model's input; generated data are drawn at that size.
        parts: required members of `PARTS`.
        num_frames: number of frames per clip.
        spacing: whether the model needs the voxel spacing.
        writes: whether this process writes the files of generated clips.
        seed: seed of the arrows, and of the splits by `validation_fraction` and `train_fraction`.
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
    The sources of a run and the names of their classes, in the order of the labels. `splits` names the splits of
    `train` and `evaluation`, if any.
    """

    train: Source | None
    evaluation: Source | None
    label_names: list[str]
    # `named` is False where the data set only numbers its classes.
    named: bool = True
    splits: dict[str, str] = field(default_factory=dict)


def task_sources(task: Task, request: DataRequest) -> LabelledImages:
    """The images or clips of a task. Raises [`InputError`] for what it refuses."""
    made = {part: draw_samples(task, part, request) for part in request.parts}
    return LabelledImages(*map(made.get, PARTS), list(task.labels))


@dataclass
class SourceDataset(Dataset):
    """One example for each input of a source."""

    source: Source

    def __len__(self) -> int:
        return len(self.source)


@dataclass
class Relabelled(SourceDataset):
    """A source with labels of the model: label n becomes `numbers[n]`."""

    numbers: Sequence[int]

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        image, label = self.source[index]
        return image, self.numbers[label]


def leave_out(reader: object, error: UnreadableError) -> None:
    """Reports an example that cannot be read, once for each reader: it must not end a run."""
    reported = vars(reader).setdefault("reported", set())
    if str(error) not in reported:
        reported.add(str(error))
        logger.warning(f"Left out: {error}")


def report_unread(folder: str, left: Sequence[Path], read: set[Path]) -> None:
    """
    Says before a run which files of a folder it does not read.

    Args:
        folder: the flag and its value.
        read: the files that it reads.
    """
    if not left:
        return
    text = f"{folder}: {numbers(left)}."
    without = sorted({path.parent for path in left} - {parent for path in read for parent in path.parents})
    if without:
        text += f" Nothing is read in {abbreviate([path.name for path in without])}."
    if any(has_suffix(path, HEIC_SUFFIXES) for path in left):
        text += " Images in HEIC are read with the extra heic: pip install -e '.[heic]'."
    logger.warning(text)


def take_fraction(source: Source, fraction: float, seed: int) -> Source:
    """A random share of a source. With the same seed, larger shares contain smaller ones."""
    if fraction == 1:
        return source
    count = max(round(len(source) * fraction), 1)
    return Subset(source, np.random.default_rng(seed).permutation(len(source))[:count].tolist())
