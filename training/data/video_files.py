"""Reading clips: videos through PyAV, folders of frames, and volumes (NIfTI, npz, npy), whose slices are frames.

Every problem with a file raises an `UnreadableError` with its name; the caller decides what to do without the file.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import av
import numpy as np
from PIL import Image

from training.common.messages import reason


VIDEO_SUFFIXES = (".mp4", ".avi", ".mkv", ".mov", ".webm", ".mpg", ".mpeg", ".m4v")
FRAME_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp")
VOLUME_SUFFIXES = (".nii.gz", ".nii", ".npz", ".npy")
# The array of an npz with the distances of slices, rows and columns.
SPACING = "spacing"
# Factors to mm and s, the default units.
NIFTI_MEASURES = {"meter": 1e3, "micron": 1e-3, "msec": 1e-3, "usec": 1e-6}


class UnreadableError(ValueError):
    """A file cannot be read or has too few frames. The message names it."""


@dataclass
class FrameReader:
    """
    Reads chosen frames as uint8 (frames, height, width, num_channels).

    Args:
        num_channels: 3 (grey frames are repeated) or 1 (colours are converted to grey).
        intensity_range: intensities of volumes that become 0 and 255; others are clipped. By default each volume's
            minimum and maximum, unless it is uint8 already.
    """

    num_channels: int
    intensity_range: Sequence[float] | None = None

    def count(self, path: Path) -> int:
        """Number of frames according to the file, without decoding them.

        Raises:
            UnreadableError: if the file cannot be opened.
        """
        return self._name_errors(path, self._count)

    def read(self, path: Path, indices: Sequence[int]) -> np.ndarray:
        """The frames with these ascending numbers.

        Raises:
            UnreadableError: if the file cannot be decoded up to the last one.
        """
        return self._name_errors(path, lambda path: self._read(path, [int(index) for index in indices]))

    def spacing(self, path: Path) -> tuple[float, float, float]:
        """
        Distances of a volume's slices, rows and columns, in mm for NIfTI and in the array's unit for npz. For videos,
        all are 1: rows and columns are in pixels, and frames have [`frame_times`].

        Raises:
            UnreadableError: if the file has no spacing, or one that is not positive and finite.
        """
        return self._name_errors(path, _spacing)

    def frame_times(self, path: Path) -> np.ndarray | None:
        """
        Times of a video's frames in seconds from the first, also at a variable rate; `None` for volumes.

        Raises:
            UnreadableError: if the file lacks the time of a frame.
        """
        return self._name_errors(path, _frame_times) if path.suffix.lower() in VIDEO_SUFFIXES else None

    def _name_errors(self, path: Path, action):
        try:
            return action(path)
        except UnreadableError as error:
            raise UnreadableError(f"{path.name}: {error}") from None
        except Exception as error:
            # Decoders raise errors of any class for broken files.
            raise UnreadableError(f"{path.name}: cannot be read ({reason(error)}).") from error

    def _count(self, path: Path) -> int:
        if path.is_dir():
            return len(frame_files(path))
        if is_volume(path):
            return len(_volume(path))
        with av.open(str(path)) as container:
            stream = container.streams.video[0]
            # Some containers do not state the number of frames; count their packets instead.
            return stream.frames or sum(packet.size > 0 for packet in container.demux(stream))

    def _read(self, path: Path, indices: list[int]) -> np.ndarray:
        if path.is_dir():
            files = frame_files(path)
            _require_frames(len(files), indices)
            mode = "L" if self.num_channels == 1 else "RGB"
            return self._with_channels(
                np.stack([np.asarray(Image.open(files[index]).convert(mode)) for index in indices])
            )
        if is_volume(path):
            volume = _volume(path)
            _require_frames(len(volume), indices)
            return self._with_channels(_to_bytes(volume, self.intensity_range)[indices])
        return self._with_channels(self._decode(path, indices))

    def _decode(self, path: Path, indices: list[int]) -> np.ndarray:
        wanted, frames, number = set(indices), {}, -1
        with av.open(str(path)) as container:
            for number, frame in enumerate(container.decode(video=0)):
                if number in wanted:
                    frames[number] = frame.to_ndarray(format="gray" if self.num_channels == 1 else "rgb24")
                if number == indices[-1]:
                    break
        _require_frames(number + 1, indices)
        return np.stack([frames[index] for index in indices])

    def _with_channels(self, frames: np.ndarray) -> np.ndarray:
        frames = frames[..., None] if frames.ndim == 3 else frames
        if frames.shape[-1] == 1:
            return np.repeat(frames, self.num_channels, axis=-1)
        if frames.shape[-1] != self.num_channels:
            raise UnreadableError(f"frames have {frames.shape[-1]} channels; the model takes {self.num_channels}.")
        return frames


def _require_frames(count: int, indices: list[int]) -> None:
    if count <= indices[-1]:
        raise UnreadableError(f"ends after {count} frames; frame {indices[-1] + 1} was requested.")


def is_volume(path: Path) -> bool:
    return path.name.lower().endswith(VOLUME_SUFFIXES)


def is_clip(path: Path) -> bool:
    """Whether a path is a video, a volume or a folder of frames."""
    if path.is_dir():
        return any(file.suffix.lower() in FRAME_SUFFIXES for file in path.iterdir())
    return path.suffix.lower() in VIDEO_SUFFIXES or is_volume(path)


def frame_files(folder: Path) -> list[Path]:
    """The pictures in a folder, sorted by the numbers in their names."""
    files = [path for path in folder.iterdir() if path.suffix.lower() in FRAME_SUFFIXES]
    return sorted(files, key=lambda path: ([int(part) for part in re.findall(r"\d+", path.stem)], path.name))


def _volume(path: Path) -> np.ndarray:
    """A volume (slices, height, width) or (slices, height, width, channels), in the file's dtype."""
    if path.suffix == ".npy":
        volume = np.load(path, allow_pickle=False)
    elif path.suffix == ".npz":
        with np.load(path, allow_pickle=False) as arrays:
            names = [name for name in arrays.files if name != SPACING]
            if len(names) != 1:
                raise UnreadableError(f"contains the arrays {arrays.files}; accepted: one array beside {SPACING}.")
            volume = arrays[names[0]]
    else:
        # Imported here because only NIfTI needs it.
        import nibabel

        # NIfTI's first axis is the fastest, left to right; its last axis is the slices.
        volume = np.asanyarray(nibabel.load(path).dataobj).T
    if volume.ndim not in (3, 4):
        raise UnreadableError(f"contains an array of shape {volume.shape}; accepted: 3 or 4 axes.")
    return volume


def _spacing(path: Path) -> tuple[float, float, float]:
    if path.name.lower().endswith((".nii", ".nii.gz")):
        import nibabel

        header = nibabel.load(path).header
        # Axes come in the order of NIfTI, which `_volume` reverses.
        zooms = header.get_zooms()
        measures = [NIFTI_MEASURES.get(measure, 1.0) for measure in header.get_xyzt_units()]
        factors = [measures[0] if axis < 3 else measures[1] for axis in range(len(zooms))]
        values = [zoom * factor for zoom, factor in zip(zooms, factors)][::-1][:3]
    elif path.suffix == ".npz":
        with np.load(path, allow_pickle=False) as arrays:
            if SPACING not in arrays.files:
                raise UnreadableError(f"has no voxel spacing; accepted: an npz with an array {SPACING!r}.")
            values = arrays[SPACING].reshape(-1).tolist()
    elif path.suffix.lower() in VIDEO_SUFFIXES:
        return 1.0, 1.0, 1.0
    else:
        raise UnreadableError("has no voxel spacing; accepted: NIfTI files, and npz files with an array 'spacing'.")
    return check_spacing(values)


def _frame_times(path: Path) -> np.ndarray:
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        stamps = [packet.pts for packet in container.demux(stream) if packet.size]
        if not stamps or None in stamps or stream.time_base is None:
            raise UnreadableError(f"has the times of {len(stamps) - stamps.count(None)} of {len(stamps)} frames only.")
        # Packets come in the order of decoding.
        times = np.array(sorted(stamps)) * float(stream.time_base)
    return times - times[0]


def check_spacing(values: Sequence[float]) -> tuple[float, float, float]:
    """Raises [`UnreadableError`], without the file's name, unless there are three positive, finite numbers."""
    if len(values) != 3 or not all(0 < value < np.inf for value in values):
        raise UnreadableError(
            f"has the spacing {values}; accepted: three positive numbers, of slices, rows and columns."
        )
    return tuple(float(value) for value in values)


def _to_bytes(volume: np.ndarray, intensity_range: Sequence[float] | None) -> np.ndarray:
    if volume.dtype == np.uint8 and intensity_range is None:
        return volume
    if not np.isfinite(volume).all():
        raise UnreadableError("contains intensities that are not finite.")
    low, high = intensity_range or (float(volume.min()), float(volume.max()))
    scaled = (volume.astype(np.float32) - low) / max(high - low, np.finfo(np.float32).tiny)
    return (scaled.clip(0, 1) * 255).round().astype(np.uint8)
