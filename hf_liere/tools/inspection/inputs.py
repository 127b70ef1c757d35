"""Images and clips for `hf-liere inspect`: read from files or data sets, and prepared for a model."""

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, count, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...errors import InputError, MissingLibraryError, require_libraries
from ...patching.vision_towers import Tower
from ...reading.clips import FrameReader, clip_indices, is_clip
from ...reading.files import PICTURE_SUFFIXES, SUFFIXES, VIDEO_SUFFIXES, UnreadableError, has_suffix, visible
from ...reading.pictures import count_pages, develop, open_picture, pixels


COLOURS = FrameReader(3)
TABLE_SUFFIXES = {".parquet": "parquet", ".json": "json", ".jsonl": "json", ".arrow": "arrow"}


class InspectionError(InputError):
    """The inspection is not possible; the message says what is accepted."""


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Raises errors of decoders, which have many types for broken files, as [`InspectionError`] that names the file."""
    try:
        yield
    except (InspectionError, MissingLibraryError):
        raise
    except UnreadableError as error:
        raise InspectionError(str(error) if name in str(error) else f"{name}: {error}") from error
    except Exception as error:
        raise InspectionError(f"{name} cannot be read: {type(error).__name__}: {error}") from error


def spaced_indices(count: int, wanted: int) -> np.ndarray:
    """`wanted` evenly spaced indices below `count`, including the first and the last."""
    return np.linspace(0, count - 1, wanted).round().astype(int)


@dataclass
class Sample:
    """
    Attributes:
        name: File name, or row of a data set.
        frames: (T, H, W, C) uint8, C = 3 or 1; an image is one frame.
        places: For models with physical coordinates, the distances of rows and columns, and the times or places of
            the frames (T,).
        remarks: Sentences on what the file contains and the sample does not.
    """

    name: str
    frames: np.ndarray
    places: tuple[Sequence[float], np.ndarray] | None = None
    remarks: Sequence[str] = ()


@dataclass
class Preparation:
    """
    Turns frames into `pixel_values` with the constants of a checkpoint's processor. Frames are resized to the requested
    size and not cropped, so that attention maps fit the displayed frames.

    Attributes:
        num_channels: 1 or 3.
        num_frames: Frames of a clip; `None` for images.
        rescale_factor, mean, std: (pixels · rescale_factor − mean) / std.
        resample: PIL's filter.
    """

    num_channels: int
    num_frames: int | None
    rescale_factor: float = 1 / 255
    mean: Sequence[float] = (0.5,)
    std: Sequence[float] = (0.5,)
    # PIL.Image.Resampling.BILINEAR, without importing PIL.
    resample: int = 2

    @classmethod
    def for_tower(cls, tower: Tower, processor: Any) -> "Preparation":
        """The constants of a processor; without one, pixels from −1 to 1, as for ViT."""
        config = tower.module.config
        sizes = getattr(config, "num_channels", 3), config.num_frames if len(tower.train_grid) == 3 else None
        if processor is None:
            return cls(*sizes)
        normalizes = processor.do_normalize and processor.image_mean is not None
        mean, std = (processor.image_mean, processor.image_std) if normalizes else ((0.0,), (1.0,))
        return cls(*sizes, processor.rescale_factor if processor.do_rescale else 1.0, mean, std, processor.resample)

    def pictures(self, sample: Sample) -> list:
        """
        PIL images with the model's number of frames and channels and the sample's size. Raises [`InspectionError`] if
        the model takes images and the sample has several frames.
        """
        from PIL import Image

        frames = sample.frames
        if self.num_frames is not None:
            frames = frames[spaced_indices(len(frames), self.num_frames)]
        elif len(frames) > 1:
            raise InspectionError(f"{sample.name} has {len(frames)} frames; this model takes images.")
        mode = "L" if self.num_channels == 1 else "RGB"
        return [Image.fromarray(frame.squeeze(-1) if frame.shape[-1] == 1 else frame).convert(mode) for frame in frames]

    def resize(self, sample: Sample, size: tuple[int, int]) -> np.ndarray:
        """(T, H, W, C) uint8 with the given size and the model's number of frames and channels."""
        resized = [picture.resize(size[::-1], self.resample) for picture in self.pictures(sample)]
        return np.stack(resized).reshape(len(resized), *size, self.num_channels)

    def pixel_values(self, clips: Sequence[np.ndarray]) -> torch.Tensor:
        """(B, C, H, W) images or (B, T, C, H, W) clips, from the output of [`resize`]."""
        pixels = torch.from_numpy(np.stack(clips)).permute(0, 1, 4, 2, 3).float() * self.rescale_factor
        mean, std = self._constants()
        pixels = (pixels - mean) / std
        return pixels[:, 0] if self.num_frames is None else pixels

    def frames(self, pixel_values: torch.Tensor) -> np.ndarray:
        """(B, T, H, W, C) uint8, the inverse of [`pixel_values`]; an image is one frame."""
        pixels = pixel_values.unsqueeze(1) if self.num_frames is None else pixel_values
        mean, std = self._constants()
        pixels = ((pixels * std + mean) / self.rescale_factor).round().clamp(0, 255)
        return pixels.permute(0, 1, 3, 4, 2).to(torch.uint8).numpy()

    def _constants(self) -> Iterator[torch.Tensor]:
        return (torch.tensor(list(values)).view(-1, 1, 1) for values in (self.mean, self.std))


def read_samples(
    files: Sequence[str],
    dataset: str | None,
    split: str | None,
    max_samples: int,
    is_video: bool,
    reader: FrameReader = COLOURS,
) -> list[Sample]:
    """
    Samples from image, video or array files, and `max_samples` of a data set: a folder of such files, a table with an
    image or video column, or the name of a data set on the Hub, of which `None` means the test, validation or first
    split. Raises [`InspectionError`], naming the file or row that cannot be read.
    """
    samples = [read_file(Path(name), is_video, reader) for name in files]
    if dataset is None:
        return samples
    if max_samples < 1:
        raise InspectionError(f"--max_samples {max_samples}: accepted are numbers from 1.")
    if Path(dataset).is_dir():
        paths = files_of(Path(dataset), is_video)
        # Sample the whole folder, because data sets often store each class together.
        places = spaced_indices(len(paths), min(max_samples, len(paths)))
        return samples + [read_file(paths[place], is_video, reader) for place in places]
    return samples + list(islice(_read_dataset(dataset, split, is_video), max_samples))


def files_of(path: Path, is_video: bool) -> list[Path]:
    """
    A file, or the readable files below a folder: for models of videos also folders of frames or slices, for others no
    videos. Raises [`InspectionError`] if there are none.
    """
    found = _files(path, is_video)
    if not found:
        raise InspectionError(f"{path} has no images or videos; accepted are files in {', '.join(SUFFIXES)}.")
    return found


def _files(path: Path, is_video: bool) -> list[Path]:
    if path.is_file() or (is_video and is_clip(path)):
        return [path]
    found = chain.from_iterable(_files(entry, is_video) for entry in visible(path))
    found = (each for each in found if each.is_dir() or has_suffix(each, SUFFIXES))
    return [each for each in found if is_video or not has_suffix(each, VIDEO_SUFFIXES)]


def require_readable(path: Path) -> None:
    """Raise [`InspectionError`] if a path is neither a file of a suffix that is read nor a folder with some."""
    if not path.is_file() and not (path.is_dir() and _files(path, True)):
        raise InspectionError(f"{path} is not a file, nor a folder of images, clips, frames or DICOM slices.")
    if path.is_file() and not has_suffix(path, SUFFIXES):
        raise InspectionError(f"{path.name}: accepted are files in {', '.join(SUFFIXES)}.")


def read_file(
    path: Path, is_video: bool, reader: FrameReader = COLOURS, num_frames: int | None = None, is_physical: bool = False
) -> Sample:
    """
    A picture or clip, with all frames or the `num_frames` that an evaluation with one clip would choose; with
    `is_physical` also with the places of frames, rows and columns. Raises [`InspectionError`] if it cannot be read.
    """
    require_readable(path)
    with _naming(path.name):
        if not is_video and has_suffix(path, PICTURE_SUFFIXES) and path.is_file():
            with open_picture(path) as image:
                pages, frame = count_pages(image), pixels(develop(image))
            remarks = [f"{path.name}: has {pages} pages or frames; the first is read."] if pages > 1 else []
            return Sample(path.name, frame[None], remarks=remarks)
        remarks = reader.unused(path)
        if num_frames is None:
            return Sample(path.name, reader.read(path), remarks=remarks)
        times = reader.frame_times(path, if_even=is_physical)
        length = reader.count(path) if times is None else len(times)
        indices, places = clip_indices(length, num_frames, None, 0.5, times), None
        if is_physical:
            slices, *extents = reader.spacing(path)
            places = (extents, indices * slices if times is None else times[indices])
        return Sample(path.name, reader.read(path, indices.tolist()), places, remarks)


def images_of_patches(
    patches: torch.Tensor, spatial_shapes: torch.Tensor, patch_shape: tuple[int, int]
) -> torch.Tensor:
    """
    The (1, C, H, W) image from which [`batch_of_patches`] or a SigLIP 2 processor made (1, N, patch pixels) patches,
    with channels last in each and padding after the (1, 2) `spatial_shapes` of rows and columns.
    """
    rows, columns = spatial_shapes[0].tolist()
    pixels = patches[0, : rows * columns].unflatten(1, (*patch_shape, -1)).unflatten(0, (rows, columns))
    return pixels.permute(4, 0, 2, 1, 3).flatten(3).flatten(1, 2).unsqueeze(0)


def _read_dataset(name: str, split: str | None, is_video: bool) -> Iterator[Sample]:
    require_libraries(f"Reading {name}", "inspect", "datasets")
    import datasets

    suffix = Path(name).suffix.lower()
    with _naming(f"The data set {name}"):
        source = {"path": TABLE_SUFFIXES[suffix], "data_files": name} if suffix in TABLE_SUFFIXES else {"path": name}
        found = datasets.load_dataset(**source, streaming=True)
    chosen = split or next((part for part in ("test", "validation") if part in found), next(iter(found)))
    if chosen not in found:
        raise InspectionError(f"--split {chosen}: {name} has {', '.join(found)}.")
    rows = found[chosen]
    features = rows.features or {}
    kinds = (datasets.Image, datasets.Video) if is_video else (datasets.Image,)
    column = next((column for column, feature in features.items() if isinstance(feature, kinds)), None)
    if column is None:
        raise InspectionError(
            f"{name} has no column of {'images or videos' if is_video else 'images'}: {dict(features) or 'unknown'}."
        )
    # The split of a single file is always "train", so name samples after the file.
    origin = Path(name).name if suffix in TABLE_SUFFIXES else chosen
    if not isinstance(features[column], datasets.Image):
        # Decoded by `_frames`, as in training.
        rows = rows.cast_column(column, datasets.Video(decode=False))
    rows = iter(rows)
    for index in count():
        place = f"{origin} {index}"
        with _naming(f"{place} of {name}"):
            row = next(rows, None)
            if row is None:
                return
            sample = Sample(place, _frames(row[column]))
        yield sample


def _frames(value: Any) -> np.ndarray:
    if hasattr(value, "convert"):
        return pixels(develop(value))[None]
    content = value["bytes"]
    return COLOURS.decode(Path(value["path"]) if content is None else io.BytesIO(content))
