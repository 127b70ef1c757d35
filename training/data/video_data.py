"""Sources of clips and labels: folders of classes, split files, volumes, or generated shapes and arrows.

The sources of this module yield `(clip, label)`. The clip has not been read; training and evaluation choose its frames.
"""

import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
from tqdm.auto import tqdm
from transformers.utils import logging

from hf_liere.errors import InputError
from hf_liere.reading.clips import FrameReader, frames_needed, is_clip
from hf_liere.reading.files import UnreadableError, unread_files, visible
from hf_liere.reading.volumes import SPACING, check_spacing
from training.common.arguments import ViewArguments, flag
from training.common.folders import require_folder
from training.common.tasks import Task, require_task
from training.data.arrows import LABELS, Arrows
from training.data.clips import Clip, ClipArray, ClipFile
from training.data.images import build_arrows
from training.data.moving_shapes import DEFAULT_SIZES, SPLITS, write_moving_shapes
from training.data.sources import PARTS, DataRequest, LabelledImages, report_unread, task_sources


logger = logging.get_logger(__name__)
CLASS_INDEX = "classInd.txt"
# Without --eval_split, the first of these that exists is evaluated. Some data sets abbreviate the name.
USUAL_SPLITS = ("validation", "valid", "dev", "val", "test")


# Paths of clips with the numbers of their classes, by the part of the data.
Files = dict[str, list[tuple[Path, int]]]


@dataclass
class ArrowClips:
    """The clips of a split of the arrows, drawn on demand."""

    arrows: Arrows

    def __len__(self) -> int:
        return len(self.arrows)

    def __getitem__(self, index: int) -> tuple[ClipArray, int]:
        frames, label = self.arrows[index]
        return ClipArray(frames, f"{self.arrows.split} clip {index}"), label


@dataclass
class VideoDataArguments(ViewArguments):
    inputs: ClassVar[str] = "clips"

    dataset_name: str | None = flag(
        None,
        "Generated clips: `moving_shapes`, the default without other data, `arrows`, which differ for every --seed, or "
        "a task of --register.",
    )
    moving_shapes_folder: str = flag("outputs/moving_shapes", "Folder for the moving shapes, written once per size.")
    video_folder: str | None = flag(
        None,
        "Folder with train/ and validation/, each with one folder per class of videos, volumes (.nii, .nii.gz, .npz, "
        ".npy), or folders of frames or DICOM slices; with split files, the folder that their paths are relative to.",
    )
    train_files: list[str] | None = flag(
        None, "Split files to train on, with a path and optionally a class number per line, as for UCF101."
    )
    validation_files: list[str] | None = flag(None, "Split files to evaluate.")
    volume_file: str | None = flag(
        None,
        "npz of arrays train_images (N, slices, height, width), train_labels (N, 1), val_images, …; for "
        "--coordinates physical also spacing (3,) or train_spacing (N, 3), …",
    )
    eval_split: str | None = flag(None, "Split to evaluate; by default the first of validation, valid, dev, val, test.")
    frame_stride: int | None = flag(
        None, "Distance between the frames of a clip; by default they are spread over the video."
    )
    eval_clips: int = flag(1, "Clips per video; with --eval_crops, each is evaluated in all crops.")
    eval_average_views: bool = flag(
        True, "Average the probabilities of a video's views; else each view counts as an example."
    )
    intensity_range: list[float] | None = flag(
        None, "Intensities of volumes that become black and white; by default each volume's minimum and maximum."
    )

    def __post_init__(self):
        super().__post_init__()
        for name in ("frame_stride", "eval_clips"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise InputError(f"--{name} {getattr(self, name)}; accepted: 1 and above.")
        if self.intensity_range is not None and not (
            len(self.intensity_range) == 2 and self.intensity_range[0] < self.intensity_range[1]
        ):
            raise InputError(f"--intensity_range {self.intensity_range}; accepted: two numbers, the lower one first.")


def load_clips(arguments: VideoDataArguments, request: DataRequest) -> LabelledImages:
    """
    Finds the clips of the required splits. Files that cannot be opened or have too few frames are reported by name and
    skipped.

    Raises:
        InputError: naming the wrong folder, file, line or split and what is accepted.
    """
    sources = {
        "--dataset_name": arguments.dataset_name,
        "--video_folder": arguments.video_folder,
        "--volume_file": arguments.volume_file,
    }
    given = [flag for flag, value in sources.items() if value is not None]
    if len(given) > 1:
        raise InputError(f"The data come from {' and '.join(given)}; accepted: one of {', '.join(sources)}.")
    require_task(arguments, "moving_shapes", "arrows")
    if (arguments.train_files or arguments.validation_files) and arguments.video_folder is None:
        raise InputError("The paths in split files are relative to --video_folder; accepted: with that flag.")
    if isinstance(arguments, Task) or arguments.dataset_name == "arrows":
        _check_drawn(arguments, request)
        return task_sources(arguments, request) if isinstance(arguments, Task) else _arrow_clips(arguments, request)
    if request.num_channels not in (1, 3):
        raise InputError(f"--num_channels {request.num_channels}: clips are read with 1 or 3 channels.")
    if arguments.volume_file is not None:
        found, names = _volumes(arguments, request)
    else:
        if arguments.train_files or arguments.validation_files:
            files, names = _split_files(arguments, request)
        elif arguments.video_folder is not None:
            files, names = _class_folders(Path(arguments.video_folder), arguments.eval_split, request)
        else:
            # Set for the run's record of its arguments.
            arguments.dataset_name = "moving_shapes"
            files, names = _moving_shapes(arguments, request), list(LABELS)
        if len(files) == 2 and arguments.video_folder is not None:
            _require_trained(files, names)
        reader = FrameReader(request.num_channels, arguments.intensity_range)
        found = {
            part: _open_clips(entries[: arguments.limits[part]], reader, part, request.spacing)
            for part, entries in files.items()
        }
    needed = frames_needed(request.num_frames, arguments.frame_stride)
    parts = {part: _drop_short(clips, needed, part) for part, clips in found.items()}
    return LabelledImages(parts.get("training"), parts.get("evaluation"), names)


def _require_trained(files: Files, names: list[str]) -> None:
    trained, evaluated = ({label for _, label in files[part]} for part in ("training", "evaluation"))
    missing = ", ".join(names[label] for label in sorted(evaluated - trained))
    if missing:
        raise InputError(f"There are no training clips of {missing}, which are evaluated; accepted: trained classes.")


def _open_clips(
    entries: list[tuple[Path, int]], reader: FrameReader, part: str, needs_spacing: bool
) -> list[tuple[Clip, int]]:
    clips, remarks = [], []
    for path, label in tqdm(entries, desc=f"Opening {part} clips", unit="clip", leave=False, disable=None):
        try:
            length, times = reader.count(path), None if needs_spacing else reader.frame_times(path, if_even=False)
        except UnreadableError as error:
            logger.warning(f"Left out: {error}")
            continue
        try:
            spacing, times = (reader.spacing(path), reader.frame_times(path)) if needs_spacing else (None, times)
        except UnreadableError as error:
            raise InputError(f"--coordinates physical: {error}") from error
        # The header may state a wrong number of frames.
        length = length if times is None else len(times)
        clips.append((ClipFile(path, length, reader, spacing, times), label))
        remarks += reader.unused(path)
    if remarks:
        further = f" So have {len(remarks) - 1} further {part} clips others." if len(remarks) > 1 else ""
        logger.warning(remarks[0] + further)
    return clips


def _drop_short(clips: list[tuple[Clip, int]], needed: int, part: str) -> list[tuple[Clip, int]]:
    for clip, _ in clips:
        if len(clip) < needed:
            logger.warning(f"Left out: {clip.name}: has {len(clip)} frames; a clip needs {needed}.")
    chosen = [(clip, label) for clip, label in clips if len(clip) >= needed]
    if not chosen:
        raise InputError(f"None of the {part} clips can be read and has {needed} frames.")
    return chosen


def _evaluation_split(given: str | None, splits: Sequence[str]) -> str:
    """The given split, else the first usual name among the splits, else `validation`."""
    usual = [given] if given else USUAL_SPLITS
    return next((name for name in usual if name in splits), usual[0])


def _class_folders(folder: Path, eval_split: str | None, request: DataRequest) -> tuple[Files, list[str]]:
    """Clips of `folder/<split>/<class>/…`."""
    require_folder("video_folder", str(folder))
    splits = [path.name for path in visible(folder) if path.is_dir()]
    usual = {"training": "train", "evaluation": _evaluation_split(eval_split, splits)}
    parts = {part: usual[part] for part in request.parts}
    for split in parts.values():
        if split not in splits:
            raise InputError(
                f"--video_folder {str(folder)!r} has no folder {split!r}, only {', '.join(splits) or 'none'}; "
                "accepted: train/ and validation/ with one folder per class, or split files."
            )
    # Classes are collected from all splits, so that an evaluation has the training classes.
    known = {"train", *USUAL_SPLITS, *parts.values()}.intersection(splits)
    ordered = sorted({path.name for split in known for path in visible(folder / split) if path.is_dir()})
    files = {
        part: [
            (path, number)
            for number, name in enumerate(ordered)
            if (folder / split / name).is_dir()
            for path in visible(folder / split / name)
            if is_clip(path)
        ]
        for part, split in parts.items()
    }
    read = {path for entries in files.values() for path, _ in entries}
    left = [
        path
        for place in visible(folder)
        if place.name in parts.values() or place.name not in known
        for path in ([place] if place.is_file() else unread_files(place, read))
        if not _is_header(path)
    ]
    report_unread(f"--video_folder {str(folder)!r}", left, read)
    # In sorted order, the first --max_train_samples clips would belong to one class.
    orders = {part: np.random.default_rng(0).permutation(len(entries)) for part, entries in files.items()}
    return {part: [files[part][index] for index in order] for part, order in orders.items()}, ordered


def _is_header(path: Path) -> bool:
    """Whether a file is the header of a pair, which is read with its image."""
    return path.suffix.lower() == ".hdr" and any(path.with_suffix(suffix).exists() for suffix in (".img", ".img.gz"))


def _split_files(arguments: VideoDataArguments, request: DataRequest) -> tuple[Files, list[str]]:
    """
    Clips of split files with a path and optionally a class number per line. classInd.txt beside the file names the
    classes by number; without numbers, the class is the folder of the clip.
    """
    folder = Path(arguments.video_folder)
    listed = {
        "training": (arguments.train_files, "--train_files"),
        "evaluation": (arguments.validation_files, "--validation_files"),
    }
    named: dict[str, list[tuple[Path, str]]] = {}
    names: set[str] = set()
    for part in request.parts:
        files, flag = listed[part]
        if not files:
            raise InputError(f"There are no split files for the {part}; accepted: {flag}.")
        for name in files:
            entries, classes = _split_lines(Path(name), folder, flag)
            named.setdefault(part, []).extend(entries)
            names |= classes
    numbers = {name: number for number, name in enumerate(sorted(names))}
    return {part: [(path, numbers[name]) for path, name in entries] for part, entries in named.items()}, [*numbers]


def _split_lines(file: Path, folder: Path, flag: str) -> tuple[list[tuple[Path, str]], set[str]]:
    """Paths with the names of their classes, and the names of all classes, including those of classInd.txt."""
    if not file.is_file():
        raise InputError(f"{flag}: there is no file {str(file)!r}.")
    index = file.with_name(CLASS_INDEX)
    classes = {}
    if index.is_file():
        classes = dict(
            line.split(maxsplit=1) for line in index.read_text(encoding="utf-8").splitlines() if line.strip()
        )
    entries = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        head, _, tail = line.strip().rpartition(" ")
        path, label = (head, tail) if head and tail.isdigit() else (line.strip(), None)
        if label is not None and classes and label not in classes:
            raise InputError(f"{file.name}, line {number}: class {label} is not in {CLASS_INDEX}.")
        name = classes.get(label, label) if label is not None else Path(path).parent.name
        if not name:
            raise InputError(f"{file.name}, line {number}: {line!r} has neither a class number nor a class folder.")
        # Some copies of UCF101 have one folder per class, some a single folder.
        place = folder / path if (folder / path).exists() else folder / Path(path).name
        entries.append((place, name.strip()))
    return entries, {name for _, name in entries} | {name.strip() for name in classes.values()}


def _volumes(
    arguments: VideoDataArguments, request: DataRequest
) -> tuple[dict[str, list[tuple[Clip, int]]], list[str]]:
    """Volumes of an npz in MedMNIST's format: arrays <split>_images and <split>_labels."""
    file, num_channels = Path(arguments.volume_file), request.num_channels
    try:
        arrays = np.load(file, allow_pickle=False)
        splits = [name.removesuffix("_images") for name in arrays.files if name.endswith("_images")]
    except (OSError, ValueError, AttributeError, zipfile.BadZipFile) as error:
        raise InputError(f"--volume_file {file.name}: {error}; accepted: an npz file.") from error
    usual = {"training": "train", "evaluation": _evaluation_split(arguments.eval_split, splits)}
    found, highest = {}, 0
    with arrays:
        for part in request.parts:
            split = usual[part]
            if split not in splits or f"{split}_labels" not in arrays.files:
                raise InputError(
                    f"{file.name} has no {split}_images and {split}_labels; it has {', '.join(arrays.files)}."
                )
            images, labels = arrays[f"{split}_images"], arrays[f"{split}_labels"].reshape(-1)
            if images.dtype != np.uint8 or images.ndim not in (4, 5) or len(images) != len(labels):
                raise InputError(
                    f"{file.name}: {split}_images are {images.dtype} of shape {images.shape} for {len(labels)} labels; "
                    "accepted: uint8 (N, slices, height, width) or (N, slices, height, width, channels)."
                )
            images = images if images.ndim == 5 else np.repeat(images[..., None], num_channels, axis=-1)
            if images.shape[-1] != num_channels:
                raise InputError(
                    f"{file.name}: {images.shape[-1]} channels; accepted: {num_channels}, or another --num_channels."
                )
            spacings = _spacings(arrays, file.name, split, len(images)) if request.spacing else [None] * len(images)
            highest = max(highest, int(labels.max()))
            limit = arguments.limits[part]
            found[part] = [
                (ClipArray(volume, f"{split} volume {number}", spacing), int(label))
                for number, (volume, label, spacing) in enumerate(zip(images[:limit], labels[:limit], spacings))
            ]
    return found, [str(number) for number in range(highest + 1)]


def _spacings(arrays: Mapping[str, np.ndarray], name: str, split: str, count: int) -> list[tuple[float, float, float]]:
    """Distances of slices, rows and columns of every volume of a split, from an array (N, 3) or (3,)."""
    found = next((array for array in (f"{split}_{SPACING}", SPACING) if array in arrays), None)
    if found is None:
        raise InputError(f"--coordinates physical: {name} has neither {split}_{SPACING} (N, 3) nor {SPACING} (3,).")
    values = arrays[found]
    if values.shape not in ((3,), (count, 3)):
        raise InputError(f"{name}: {found} has shape {values.shape}; accepted: (3,) or {(count, 3)}.")
    try:
        return [check_spacing(row) for row in np.broadcast_to(values, (count, 3)).tolist()]
    except UnreadableError as error:
        raise InputError(f"{name}: {found} {error}") from None


def _check_drawn(arguments: VideoDataArguments, request: DataRequest) -> None:
    """Raises [`InputError`] for what no clips have that are drawn on demand."""
    name = arguments.dataset_name
    if request.image_size[0] != request.image_size[1]:
        raise InputError(
            f"--dataset_name {name}: clips are square; {request.image_size} is not. Accepted: --image_size 60 and the "
            "like."
        )
    if arguments.frame_stride not in (None, 1):
        raise InputError(
            f"--frame_stride {arguments.frame_stride}: clips of {name} have --num_frames frames only; accepted: 1."
        )


def _arrow_clips(arguments: VideoDataArguments, request: DataRequest) -> LabelledImages:
    if request.num_channels != 1:
        raise InputError(f"--num_channels {request.num_channels}: clips of arrows have one; accepted: 1.")
    if request.spacing:
        raise InputError("--coordinates physical: clips of arrows have no spacing; accepted: other coordinates.")
    clips = build_arrows(request, arguments.limits, "train", arguments.eval_split, num_frames=request.num_frames)
    clips.train, clips.evaluation = (part and ArrowClips(part) for part in (clips.train, clips.evaluation))
    return clips


def _moving_shapes(arguments: VideoDataArguments, request: DataRequest) -> Files:
    side = request.image_size[0]
    if side != request.image_size[1]:
        raise InputError(
            f"Moving shapes are square; {request.image_size} is not. Accepted: --image_size 32 and the like."
        )
    # The videos do not depend on the seed, so that runs can be compared. Every size has separate files.
    folder = Path(arguments.moving_shapes_folder) / f"{side}px"
    splits = {part: split for part, split in zip(PARTS, SPLITS) if part in request.parts}
    sizes = {split: arguments.limits[part] or DEFAULT_SIZES[split] for part, split in splits.items()}
    if request.writes:
        try:
            write_moving_shapes(folder, sizes, side)
        except ValueError as error:
            raise InputError(str(error)) from None
    files = {}
    for part, split in splits.items():
        entries = [
            (path, number) for number, name in enumerate(LABELS) for path in (folder / split / name).glob("*.mp4")
        ]
        # Sorted by number, so that a folder with more videos yields the same ones.
        files[part] = sorted(entries, key=lambda entry: entry[0].stem)[: sizes[split]]
    return files
