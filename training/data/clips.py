"""Clips of videos: choosing their frames, and the data sets that read and augment them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from hf_liere.reading.clips import FrameReader, clip_indices
from hf_liere.reading.files import UnreadableError
from training.data.augmentation import IGNORED_LABEL, PADDING, EvaluationImages, TrainingImages
from training.data.sources import leave_out


# Makes the choice of frames independent of the augmentation, which has the same (seed, epoch, index).
CLIP_STREAM = 1


class Clip(Protocol):
    """A video that has not been read."""

    name: str
    # If the model needs them: distances of slices, rows and columns, and the times of frames that are not slices. Times
    # are known wherever the rate varies.
    spacing: tuple[float, float, float] | None
    frame_times: np.ndarray | None

    def __len__(self) -> int: ...

    def read(self, indices: Sequence[int]) -> np.ndarray:
        """uint8 frames (frames, height, width, C) with these ascending numbers. Raises `UnreadableError`."""


@dataclass
class ClipFile:
    path: Path
    length: int
    reader: FrameReader
    spacing: tuple[float, float, float] | None = None
    frame_times: np.ndarray | None = None

    @property
    def name(self) -> str:
        return self.path.name

    def __len__(self) -> int:
        return self.length

    def read(self, indices: Sequence[int]) -> np.ndarray:
        return self.reader.read(self.path, indices)


@dataclass
class ClipArray:
    frames: np.ndarray
    name: str
    spacing: tuple[float, float, float] | None = None
    frame_times: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.frames)

    def read(self, indices: Sequence[int]) -> np.ndarray:
        return self.frames[indices]


def voxel_places(
    clip: Clip, indices: np.ndarray, extent: tuple[float, float], size: tuple[int, int]
) -> dict[str, np.ndarray]:
    """
    Further inputs of a model with physical coordinates: `frame_times`, times of the chosen frames or positions of the
    chosen slices, in the shape of `indices`, and the `spacing` (rows, columns) after resizing. Empty for clips without
    a spacing.

    Args:
        extent: height and width of the region of the clip that the model's input shows.
        size: height and width of that input.
    """
    if clip.spacing is None:
        return {}
    slices, *pixel = clip.spacing
    times = indices * slices if clip.frame_times is None else clip.frame_times[indices]
    return {"frame_times": times, "spacing": np.array(pixel) * extent / np.array(size)}


@dataclass
class ClipReader:
    """Reads clips. An unreadable clip is `None` and is reported once, by name."""

    num_frames: int
    stride: int | None

    def indices(self, clip: Clip, start: float | np.ndarray) -> np.ndarray:
        return clip_indices(len(clip), self.num_frames, self.stride, start, clip.frame_times)

    def read(self, clip: Clip, indices: np.ndarray) -> np.ndarray | None:
        try:
            return clip.read(indices)
        except UnreadableError as error:
            leave_out(self, error)
            return None


@dataclass
class TrainingClips(TrainingImages):
    """Augmented random clips by key `(epoch, index)`: `image` (T, height, width, C), `label`, `key`, and what
    `voxel_places` returns. An unreadable clip has no `image`, and the label that the loss ignores.
    """

    reader: ClipReader

    def __getitem__(self, key: tuple[int, int]) -> dict[str, Any]:
        epoch, index = key
        if index == PADDING:
            return super().__getitem__(key)
        clip, label = self.source[index % len(self)]
        rng = np.random.default_rng((self.augment.seed, epoch, index, CLIP_STREAM))
        start = rng.random(self.reader.num_frames if self.reader.stride is None else None)
        indices = self.reader.indices(clip, start)
        frames = self.reader.read(clip, indices)
        if frames is None:
            return {"label": IGNORED_LABEL, "key": key}
        extent = self.augment.extent(frames.shape[1:3], epoch, index)
        places = voxel_places(clip, indices, extent, self.augment.image_size)
        return {"image": self.augment(frames, epoch, index), "label": label, "key": key, **places}


@dataclass
class EvaluationClips(EvaluationImages):
    """
    Views of each video: `image` (views, T, height, width, C), or (T, …) for one view, `label`, `index`, and what
    `voxel_places` returns.

    Several clips of a video are evenly spaced from the first possible one to the last; a single clip is in the middle.
    Each clip is cut into all parts of `view`.

    Args:
        averaged: whether the views of a video are one example; else each is a separate example.
    """

    reader: ClipReader
    num_clips: int = 1
    averaged: bool = True

    @property
    def num_views(self) -> int:
        return self.num_clips * max(self.view.crops, 1)

    def __len__(self) -> int:
        return super().__len__() * (1 if self.averaged else self.num_views)

    def __getitem__(self, index: int) -> dict[str, Any]:
        number, view = (index, None) if self.averaged else divmod(index, self.num_views)
        clip, label = self.source[number]
        starts = np.linspace(0, 1, self.num_clips) if self.num_clips > 1 else [0.5]
        indices = np.stack([self.reader.indices(clip, start) for start in starts])
        if view is not None:
            indices = indices[view % self.num_clips :][:1]
        needed, places = np.unique(indices, return_inverse=True)
        frames = self.reader.read(clip, needed)
        if frames is None:
            return {"label": IGNORED_LABEL}
        parts = self.view.parts(frames)
        if view is not None:
            parts = parts[view // self.num_clips :][:1]
        views = np.concatenate([part[places.reshape(indices.shape)] for part in parts])
        given = voxel_places(clip, indices, self.view.extent(frames.shape[1:3]), self.view.image_size)
        if given:
            given = {"frame_times": np.tile(given["frame_times"], (len(parts), 1)), "spacing": given["spacing"]}
            given["spacing"] = np.broadcast_to(given["spacing"], (len(views), 2))
        example = {"image": views, **given}
        example = {name: value if len(views) > 1 else value[0] for name, value in example.items()}
        return {**example, "label": label, "index": index}
