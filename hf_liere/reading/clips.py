"""Clips as frames: videos through PyAV, animations and folders of frames through Pillow, and slices of volumes."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np

from ..errors import require_libraries
from .files import (
    FRAME_SUFFIXES,
    PICTURE_SUFFIXES,
    VIDEO_SUFFIXES,
    UnreadableError,
    has_suffix,
    naming,
    unread,
    visible,
)
from .pictures import develop, pixels, read_frames, read_picture, register_formats
from .volumes import count_slices, dicom_files, is_volume, read_volume, to_bytes, volume_spacing


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
        """
        Number of the frames that players show, not decoded: headers also count those that an edit list hides. Raises
        `UnreadableError` if the file cannot be opened.
        """
        with naming(path.name):
            if is_volume(path):
                return count_slices(path)
            if path.is_dir():
                return len(frame_files(path))
            if has_suffix(path, PICTURE_SUFFIXES):
                return len(_durations(path))
            with _open(path) as container:
                return _indexed(container) or len(_stamps(container))

    def unused(self, path: Path) -> list[str]:
        """A sentence on what a clip's file or folder contains beside the frames that are read, if there is more."""
        if path.is_dir():
            return unread(path, dicom_files(path) or frame_files(path))
        if not has_suffix(path, VIDEO_SUFFIXES):
            return []
        with naming(path.name), _open(path) as container:
            # A cover is a video of one picture.
            count = sum(not each.disposition & each.disposition.attached_pic for each in container.streams.video)
        return [f"{path.name}: has {count} videos; the one that players show is read."] if count > 1 else []

    def read(self, path: Path, indices: Sequence[int] | None = None) -> np.ndarray:
        """
        The frames with these ascending numbers, by default all. Raises `UnreadableError` if the file cannot be decoded
        up to the last one.
        """
        with naming(path.name):
            return self.decode(path, indices)

    def decode(self, source: Path | IO[bytes], indices: Sequence[int] | None = None) -> np.ndarray:
        """As [`read`], also of an opened video; errors do not name it."""
        frames: dict[int, np.ndarray] = {}
        count = 0
        for count, frame in enumerate(self._frames(source), 1):
            if indices is None or count - 1 in indices:
                frames[count - 1] = frame()
            if indices is not None and count > indices[-1]:
                break
        if not count:
            raise UnreadableError("has no frames.")
        chosen = range(count) if indices is None else indices
        if count <= chosen[-1]:
            raise UnreadableError(f"ends after {count} frames; frame {chosen[-1] + 1} was requested.")
        if len(shapes := {frame.shape[:2] for frame in frames.values()}) > 1:
            raise UnreadableError(f"has frames of several sizes, {sorted(shapes)}; accepted: one.")
        return np.stack([frames[index] for index in chosen])

    def _frames(self, source: Path | IO[bytes]) -> Iterator[Any]:
        """For each frame a function that makes it."""
        path = source if isinstance(source, Path) else None
        if path and is_volume(path):
            volume = to_bytes(read_volume(path), self.intensity_range)
            yield from (partial(self._with_channels, each) for each in volume)
        elif path and path.is_dir():
            yield from (partial(read_picture, file, self.mode) for file in frame_files(path))
        elif path and has_suffix(path, PICTURE_SUFFIXES):
            for frame in read_frames(path):
                yield lambda frame=frame: pixels(develop(frame, self.mode))
        else:
            with _open(source) as container:
                stream = _video(container)
                aspect = float(stream.sample_aspect_ratio or 1)
                for frame in container.decode(stream):
                    yield partial(_upright, frame, aspect, self.mode)

    @property
    def mode(self) -> str:
        return "L" if self.num_channels == 1 else "RGB"

    def spacing(self, path: Path) -> tuple[float, float, float]:
        """
        Distances of a volume's slices, rows and columns, in mm for scans and in the array's unit for npz. For videos,
        all are 1: rows and columns are in pixels, and frames have [`frame_times`]. Raises `UnreadableError` if the file
        has no spacing, or one that is not positive and finite.
        """
        with naming(path.name):
            return (1.0, 1.0, 1.0) if has_suffix(path, TIMED) else volume_spacing(path)

    def frame_times(self, path: Path, if_even: bool = True) -> np.ndarray | None:
        """
        Times of a clip's frames in seconds from the first, also at a variable rate; `None` for volumes and folders, and
        without `if_even` at a constant rate, which the header of a video tells. Raises `UnreadableError` if the file
        lacks the time of a frame.
        """
        if path.is_dir() or not has_suffix(path, TIMED):
            return None
        with naming(path.name):
            if has_suffix(path, PICTURE_SUFFIXES):
                lasting = _durations(path)
                if if_even and len(lasting) > 1 and not any(lasting):
                    raise UnreadableError(f"has {len(lasting)} pages or frames without times.")
                times = np.cumsum([0.0, *lasting[:-1]])
            else:
                with _open(path) as container:
                    stream = _video(container)
                    rates = [float(rate or 0) for rate in (stream.average_rate, stream.base_rate)]
                    # A container that does not count its frames knows no average.
                    if not if_even and _indexed(container) and abs(rates[0] - rates[1]) <= SAME_RATE * rates[1]:
                        return None
                    stamps, base = _stamps(container), stream.time_base
                known = [stamp for stamp in stamps if stamp is not None]
                if not known or len(known) < len(stamps) or base is None:
                    raise UnreadableError(f"has the times of {len(known)} of {len(stamps)} frames only.")
                # Packets come in the order of decoding.
                times = (np.sort(known) - min(known)) * float(base)
        return times if if_even or is_uneven(times) else None

    def _with_channels(self, frame: np.ndarray) -> np.ndarray:
        frame = pixels(frame)
        if frame.shape[-1] not in (1, self.num_channels):
            raise UnreadableError(f"frames have {frame.shape[-1]} channels; the model takes {self.num_channels}.")
        return np.broadcast_to(frame, (*frame.shape[:2], self.num_channels))


# Containers round the rates of their headers by less, relative to the rate.
SAME_RATE = 1e-3
# Pictures that may be a clip: animations, and stacks of pages.
MOVING_SUFFIXES = (".gif", ".webp", ".apng", ".tif", ".tiff")
# Files whose frames have times.
TIMED = (*VIDEO_SUFFIXES, *PICTURE_SUFFIXES)


def is_clip(path: Path) -> bool:
    """Whether a path is a video, an animation, a volume, or a folder of frames or of slices."""
    if path.is_dir():
        return bool(frame_files(path)) or is_volume(path)
    # The header of a pair goes with its image.
    return has_suffix(path, (*VIDEO_SUFFIXES, *MOVING_SUFFIXES)) or (
        is_volume(path) and not has_suffix(path, (".hdr",))
    )


def frame_files(folder: Path) -> list[Path]:
    """The pictures in a folder, sorted by the numbers in their names."""
    files = [path for path in visible(folder) if has_suffix(path, FRAME_SUFFIXES) and path.is_file()]
    for path in files:
        register_formats(path)
    return sorted(files, key=lambda path: ([int(part) for part in re.findall(r"\d+", path.stem)], path.name))


def frames_needed(num_frames: int, stride: int | None) -> int:
    return num_frames if stride is None else (num_frames - 1) * stride + 1


def clip_indices(
    length: int, num_frames: int, stride: int | None, start: float | np.ndarray, times: np.ndarray | None = None
) -> np.ndarray:
    """
    Frame numbers of a clip, (num_frames,), in non-descending order. Short videos repeat frames.

    Args:
        length: number of frames of the video.
        stride: distance between frames; `None` takes one from each of `num_frames` equal segments of the video.
        start: position of the clip among all possible ones, in [0, 1]. Without a stride, the position of the frame in
            its segment, which may be one number per segment.
        times: of the frames, if their rate varies: segments then last equally long.
    """
    if stride is None and times is not None and is_uneven(times):
        # The last frame is shown for as long as others on average.
        shown = (np.arange(num_frames) + start) / num_frames * (times[-1] + times[-1] / (length - 1))
        return np.clip(np.searchsorted(times, shown, side="right") - 1, 0, length - 1)
    if stride is None:
        return np.minimum(((np.arange(num_frames) + start) * length / num_frames).astype(int), length - 1)
    last = length - frames_needed(num_frames, stride)
    return min(int(start * (last + 1)), last) + stride * np.arange(num_frames)


def is_uneven(times: np.ndarray) -> bool:
    """Whether a frame is off its place at a constant rate by half of a frame; containers round times by less."""
    even = np.linspace(0, times[-1], len(times))
    return len(times) > 2 and bool(np.abs(times - even).max() > even[1] / 2)


def _open(source: Path | IO[bytes]) -> Any:
    require_libraries("Reading videos", "video", "av")
    import av

    return av.open(str(source) if isinstance(source, Path) else source)


def _video(container: Any) -> Any:
    """The video that players show."""
    stream = container.streams.best("video")
    if stream is None:
        raise UnreadableError("has no video; accepted: a file with one.")
    return stream


def _indexed(container: Any) -> int | None:
    """Number of frames, if the index of the container tells it: all are shown. Other headers are wrong at times."""
    stream = _video(container)
    entries = getattr(stream, "index_entries", None) or ()
    shown = sum(1 for entry in entries if entry.size and not entry.is_discard)
    return shown if "mov" in container.format.name and 0 < shown == len(entries) == stream.frames else None


def _stamps(container: Any) -> list[int | None]:
    """Times of the frames that players show; some containers hold others that only help to decode them."""
    packets = [packet for packet in container.demux(_video(container)) if packet.size]
    # Decoders drop frames that are shown before the first that needs no other; some of them have no times.
    first = next((packet.pts for packet in packets if packet.is_keyframe), None)
    later = next((n for n, each in enumerate(packets) if None not in (first, each.pts) and each.pts > first), 0)
    shown = [each for n, each in enumerate(packets) if n >= later or each.pts == first]
    return [packet.pts for packet in shown if not packet.is_discard]


def _upright(frame: Any, aspect: float, mode: str) -> np.ndarray:
    """A frame as players show it: with square pixels, turned and mirrored as its header says."""
    from PIL import Image

    form = "gray" if mode == "L" else "rgb24"
    see_through = any(component.is_alpha for component in frame.format.components)
    wide = {"width": max(round(frame.width * aspect), 1), "height": frame.height}
    array = frame.reformat(format="rgba" if see_through else form, **wide).to_ndarray()
    array = pixels(develop(Image.fromarray(array), mode) if see_through else array)
    matrix = frame.side_data.get("DISPLAYMATRIX")
    if matrix is None:
        return array
    # Columns go along (a, b), rows along (c, d), in fixed point. `frame.rotation` would lose mirrors.
    (a, b, _), (c, d, _), _ = np.frombuffer(bytes(matrix), np.int32).reshape(3, 3) / 2**16
    if min(abs(a), abs(b)) > 0.01 * max(abs(a), abs(b)):
        raise UnreadableError(f"is to be turned by {frame.rotation}°; accepted: multiples of 90°.")
    if abs(b) > abs(a):
        array, a, d = array.swapaxes(0, 1), c, b
    return array[:: -1 if d < 0 else 1, :: -1 if a < 0 else 1]


def _durations(path: Path) -> list[float]:
    """Seconds for which each frame of an animation is shown."""
    # WebP knows how long a frame lasts once it is decoded, with `load`.
    frames = ((frame, frame.load())[0] for frame in read_frames(path))
    return [float(frame.info.get("duration") or 0) / 1e3 for frame in frames]
