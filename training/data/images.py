"""Sources of images and labels: the Hub, folders and files, decoded as arrays, or the built-in arrows."""

import io
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import datasets
import numpy as np
from PIL import Image
from tqdm.auto import tqdm
from transformers.utils import logging

from hf_liere.errors import InputError
from hf_liere.reading.files import UnreadableError, naming
from hf_liere.reading.pictures import EIGHT_BIT_MODES, GREY_MODES, count_pages, develop, pixels, register_formats
from training.common.arguments import DataArguments
from training.common.messages import abbreviate
from training.common.tasks import Task
from training.data.arrows import Arrows
from training.data.decoded import DecodedFile, decode_once, place_of
from training.data.sources import PARTS, DataRequest, LabelledImages, take_fraction, task_sources
from training.data.tables import (
    infer_column,
    keep_encoded,
    label_names,
    load_tables,
    number_labels,
    pick_splits,
    report_unread_images,
    require_class_folders,
    require_columns,
)


logger = logging.get_logger(__name__)
# Here, because workers that are new processes import this module.
register_formats()
# Longest search for images of other modes among those that are decoded in training.
HEADER_SECONDS = 20.0
RECTANGLES = "rectangles"
ARROWS_CONFIGURATIONS = ("squares", RECTANGLES)


@dataclass
class DecodedImages:
    """
    Images of a `datasets.Dataset`. If they fit into memory, all are decoded in advance, once on a machine, else on each
    access.

    Args:
        table: the data set, with its image column cast to undecoded `datasets.Image`.
        labels: class of every row, (rows,).
        num_channels: 3 (grey images are repeated) or 1.
        cache_bytes: largest total size of the decoded images.

    Raises:
        UnreadableError: on access, naming the file or row of an image that cannot be decoded or has too many channels.
    """

    table: datasets.Dataset
    image_column: str
    labels: np.ndarray
    num_channels: int
    cache_bytes: float
    cache: DecodedFile | dict[int, np.ndarray] = field(default_factory=dict)
    # Files or rows with several pages or frames, of which the first is read.
    several: dict[str, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        image = self.cache.get(index)
        if image is None:
            image = self.decode(self.table[index][self.image_column], index)
        return image, int(self.labels[index])

    def fill_cache(self, description: str) -> None:
        """
        Decodes all images if they fit, estimated from the first ones, and finds those that cannot be decoded. Of more
        images it reads headers only, for at most `HEADER_SECONDS`.
        """
        first = [self[index][0].nbytes for index in range(min(len(self), 64))]
        if sum(first) / len(first) * len(self) > self.cache_bytes:
            self._read_headers()
            self._report_pages(description)
            return
        try:
            place = place_of(self.table, self.image_column, self.num_channels)
            self.cache = decode_once(place, self._decode_all(description), self.several)
            self.several = self.cache.remarks
        except OSError:
            # Nothing can be written there, or the images are somewhere else.
            self.cache = dict(enumerate(self._decode_all(description)))
        self._report_pages(description)

    def _decode_all(self, description: str) -> Iterator[np.ndarray]:
        with tqdm(total=len(self), desc=f"Decoding {description}", unit="img", leave=False, disable=None) as progress:
            for start in range(0, len(self), 256):
                for row, encoded in enumerate(self.table[start : start + 256][self.image_column], start):
                    yield self.decode(encoded, row)
                    progress.update()

    def _report_pages(self, description: str) -> None:
        if self.several:
            named = [f"{place.rstrip(',')} has {count}" for place, count in self.several.items()]
            logger.warning(
                f"{len(named)} {description} have several pages or frames, of which the first is read: "
                f"{abbreviate(named)}."
            )

    def _read_headers(self) -> None:
        """Raises as [`decode`] for an image that is refused by its mode, in an order that soon sees every part."""
        until = time.monotonic() + HEADER_SECONDS
        for row in np.random.default_rng(0).permutation(len(self)).tolist():
            if time.monotonic() > until:
                return
            encoded = self.table[row][self.image_column]
            if not self._has_read_mode(encoded):
                self.decode(encoded, row)

    def _has_read_mode(self, encoded: dict) -> bool:
        try:
            content = encoded["path"] if encoded["bytes"] is None else io.BytesIO(encoded["bytes"])
            with Image.open(content) as image:
                return count_pages(image) == 1 and image.mode in (
                    EIGHT_BIT_MODES if self.num_channels == 3 else GREY_MODES
                )
        except Exception:
            # Decoding says what is wrong, if anything: it knows paths on the Hub too.
            return False

    def decode(self, encoded: dict | None, row: int) -> np.ndarray:
        """Decodes an image to (height, width, num_channels). Error messages name its file or `row`."""
        if encoded and encoded.get("path") and encoded.get("bytes") is None:
            place = f"The image {encoded['path']}"
        else:
            place = f"The image in row {row}, column {self.image_column!r},"
        register_formats(encoded and encoded.get("path"))
        # An animation keeps its file open.
        with naming(place, " has ", " cannot be decoded"), datasets.Image().decode_example(encoded) as image:
            if (count := count_pages(image)) > 1:
                self.several[place] = count
            developed = develop(image, "RGB" if self.num_channels == 3 else "L")
            if self.num_channels == 1 and image.mode not in GREY_MODES:
                raise UnreadableError(
                    f"mode {image.mode}, but the model takes num_channels=1; accepted: grey images or --num_channels 3."
                )
            return pixels(developed)


def load_images(arguments: DataArguments, request: DataRequest) -> LabelledImages:
    """
    Loads the required splits.

    Raises:
        InputError: naming the wrong column, split, row or value and what is accepted.
    """
    if arguments.streaming:
        raise InputError("--streaming: accepted by image_classification.py only.")
    if request.num_channels not in (1, 3):
        raise InputError(f"--num_channels {request.num_channels}: image files are read with 1 or 3 channels.")
    given = [
        name for name in ("dataset_name", "image_folder", "train_files", "validation_files") if getattr(arguments, name)
    ]
    if not given or (len(given) > 1 and set(given) != {"train_files", "validation_files"}):
        raise InputError(
            f"{'The data come from ' + ' and '.join(given) if given else 'There are no data'}; accepted: one of "
            "--dataset_name, --image_folder and --train_files with --validation_files."
        )
    if isinstance(arguments, Task):
        images = task_sources(arguments, request)
    else:
        images = (_load_arrows if arguments.dataset_name == "arrows" else _load_decoded)(arguments, request)
    images.train = images.train and take_fraction(images.train, arguments.train_fraction, request.seed)
    return images


def _load_decoded(arguments: DataArguments, request: DataRequest) -> LabelledImages:
    tables = load_tables(arguments)
    chosen, splits = pick_splits(tables, arguments, request)
    some_table = next(iter(chosen.values()))
    image_column = infer_column(some_table.features, "image", arguments.image_column_name)
    if arguments.image_folder:
        report_unread_images(tables, image_column, arguments.image_folder)
        require_class_folders(tables, image_column, arguments)
    label_column = infer_column(some_table.features, "label", arguments.label_column_name)
    names, named = label_names(some_table, label_column)
    files = {"training": arguments.train_files, "evaluation": arguments.validation_files or arguments.train_files}
    sources = {}
    for part, table in chosen.items():
        require_columns(table.features, image_column, label_column, part)
        limit = arguments.limits[part]
        if limit is not None:
            table = table.select(range(min(limit, len(table))))
        if not len(table):
            raise InputError(f"There are no {part} images; accepted: at least one row.")
        labels = number_labels(table, label_column, names, part)
        # Paths in a file are relative to it, as in folders that `datasets` reads.
        table = keep_encoded(table, image_column, Path(files[part][0]).parent if files[part] else None)
        source = DecodedImages(
            table, image_column, labels, request.num_channels, arguments.image_cache_gigabytes * 2**30
        )
        source.fill_cache(f"{part} images")
        sources[part] = source
    # Splits of files have arbitrary names, chosen here.
    splits = {} if arguments.train_files or arguments.validation_files else splits
    return LabelledImages(*map(sources.get, PARTS), names, named, splits)


def _load_arrows(arguments: DataArguments, request: DataRequest) -> LabelledImages:
    if request.image_size[0] != request.image_size[1]:
        raise InputError(
            f"--image_size {request.image_size}: arrows take the side of a square; accepted: --image_size 108 and the "
            f"like. With --dataset_config_name {RECTANGLES}, images of many shapes have about as many pixels."
        )
    if arguments.dataset_config_name not in (None, *ARROWS_CONFIGURATIONS):
        raise InputError(
            f"--dataset_config_name {arguments.dataset_config_name!r}: unknown for the arrows; accepted: "
            f"{', '.join(ARROWS_CONFIGURATIONS)}."
        )
    rectangular = arguments.dataset_config_name == RECTANGLES
    return build_arrows(request, arguments.limits, arguments.train_split, arguments.eval_split, rectangular=rectangular)


def build_arrows(
    request: DataRequest, limits: dict[str, int | None], train_split: str, eval_split: str | None, **shape
) -> LabelledImages:
    """The arrows that a run requires, as images or clips. `shape` has further arguments of [`Arrows`]."""
    names = {"train": train_split, "evaluation": eval_split or "validation"}
    splits = dict(zip(PARTS, names.values()))
    try:
        sources = {
            part: Arrows(splits[part], limits[part], request.image_size[0], request.seed, **shape)
            for part in request.parts
        }
    except ValueError as error:
        raise InputError(str(error)) from None
    labels = next(iter(sources.values())).label_names
    return LabelledImages(*map(sources.get, PARTS), list(labels), splits=names)
