"""Training images that are read on demand, for data sets that fit neither memory nor disk.

The number of images determines the steps of an epoch. A single process without workers sees every image once and fills
the last batch with repeated images. Several processes or workers read separate shards of different lengths: in short
shards some images repeat, in long ones some are skipped.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import datasets
import torch
from datasets.distributed import split_dataset_by_node
from pyarrow.parquet import ParquetFile
from torch.utils.data import IterableDataset

from hf_liere.errors import InputError
from hf_liere.reading.files import UnreadableError
from training.common.arguments import DataArguments, RunArguments
from training.common.folders import require_files
from training.data.augmentation import Augmentation
from training.data.images import DecodedImages
from training.data.sources import DataRequest, LabelledImages, leave_out
from training.data.tables import (
    infer_columns,
    pick_evaluation_split,
    training_split,
    translate_read_errors,
)


# The next image is drawn at random from a buffer of this size.
SHUFFLE_BUFFER = 10_000


@dataclass
class Stream:
    """
    Training images that have not been read.

    Args:
        table: the data set, with its image column cast to undecoded `datasets.Image`.
        size: number of images in an epoch, over all processes.
    """

    table: datasets.IterableDataset
    image_column: str
    label_column: str
    size: int


class StreamedImages(IterableDataset):
    """
    Augmented images of one epoch of a stream: `image`, `label` and `key`, as in `TrainingImages`.

    The order depends only on (seed, epoch) and the number of processes and workers.

    Args:
        numbers: the model's number for every label of the stream.
        args: provides processes, batch size and workers.

    Raises:
        InputError: if there are not enough shards for all workers.
    """

    def __init__(
        self, stream: Stream, numbers: list[int], num_channels: int, augment: Augmentation, args: RunArguments
    ):
        shuffled = stream.table.shuffle(seed=augment.seed, buffer_size=SHUFFLE_BUFFER)
        self.table = split_dataset_by_node(shuffled, args.process_index, args.world_size)
        if args.chooses_workers:
            args.dataloader_num_workers = min(args.dataloader_num_workers, self.table.num_shards)
        if args.dataloader_num_workers > self.table.num_shards:
            raise InputError(
                f"--dataloader_num_workers {args.dataloader_num_workers}: each process reads {self.table.num_shards} "
                f"shards of the stream; accepted: up to {self.table.num_shards}."
            )
        self.stream = stream
        self.numbers = numbers
        self.decoder = DecodedImages(None, stream.image_column, None, num_channels, 0)
        self.augment = augment
        self.repeats = augment.arguments.repeated_augmentation
        self.batch_size = args.per_device_train_batch_size
        self.num_examples = stream.size
        self.steps = math.ceil(stream.size / (args.world_size * self.batch_size))
        self.rank, self.world_size = args.process_index, args.world_size
        # Set by the trainer: a function that returns an object with the current `epoch`.
        self.trainer_state = lambda: None

    def __len__(self) -> int:
        """Images of this process in an epoch."""
        return self.steps * self.batch_size

    def __iter__(self) -> Iterator[dict[str, Any]]:
        epoch = int(getattr(self.trainer_state(), "epoch", 0) or 0)
        worker = torch.utils.data.get_worker_info()
        part, parts = (0, 1) if worker is None else (worker.id, worker.num_workers)
        # The loader takes batches from its workers in turns.
        left = (self.steps // parts + (part < self.steps % parts)) * self.batch_size
        number, share = 0, self.rank * parts + part
        self.table.set_epoch(epoch)
        while left:
            before = left
            for row in self.table:
                try:
                    image = self.decoder.decode(row[self.stream.image_column], number)
                except UnreadableError as error:
                    leave_out(self, error)
                    continue
                label = self.numbers[row[self.stream.label_column]]
                for _ in range(min(self.repeats, left)):
                    # Unique among all views of the epoch, in all processes and workers.
                    index = number * self.world_size * parts + share
                    yield {"image": self.augment(image, epoch, index), "label": label, "key": (epoch, index)}
                    number, left = number + 1, left - 1
                if not left:
                    break
            if left == before:
                raise InputError("The stream contains no images that can be read.")


def open_stream(arguments: DataArguments, request: DataRequest) -> tuple[LabelledImages, Stream | None]:
    """
    Downloads the evaluation images and opens the training images as a stream.

    Returns:
        The evaluation images with the classes, and the stream, or `None` without training.

    Raises:
        InputError: if labels have no names or the number of images is unknown.
    """
    tables = _streams(arguments)
    features = next(iter(tables.values())).features
    if features is None:
        raise InputError("--streaming: the data set does not describe its columns; accepted: without --streaming.")
    image_column, label_column = infer_columns(features, arguments)
    label = features[label_column]
    if not isinstance(label, datasets.ClassLabel):
        raise InputError(
            f"--streaming: column {label_column!r} has type {type(label).__name__}, whose classes are unknown until "
            "all rows are read; accepted: ClassLabel, or without --streaming."
        )
    stream = None
    if "training" in request.parts:
        table = training_split(tables, arguments)
        size = min(arguments.max_train_samples or math.inf, _size(arguments, table) or math.inf)
        if size == math.inf:
            raise InputError(
                "--streaming: the data set does not state its number of images; accepted: --max_train_samples."
            )
        table = table.take(size) if arguments.max_train_samples else table
        stream = Stream(table.cast_column(image_column, datasets.Image(decode=False)), image_column, label_column, size)
    source, splits = None, {"train": arguments.train_split}
    if "evaluation" in request.parts:
        splits["evaluation"] = split = pick_evaluation_split(list(tables), arguments)
        rows = tables[split].cast_column(image_column, datasets.Image(decode=False))
        rows = rows.take(arguments.max_eval_samples) if arguments.max_eval_samples else rows
        # An exact evaluation requires that every process can index all images, so they are stored on disk.
        table = datasets.Dataset.from_generator(rows.__iter__, features=rows.features)
        labels = table.with_format("numpy")[label_column][:]
        cache_bytes = arguments.image_cache_gigabytes * 2**30
        source = DecodedImages(table, image_column, labels, request.num_channels, cache_bytes)
    # Splits of files have arbitrary names, chosen here.
    splits = splits if arguments.dataset_name else {}
    return LabelledImages(None, source, list(label.names), splits=splits), stream


def _size(arguments: DataArguments, table: datasets.IterableDataset) -> int | None:
    """Number of images in the training split; `None` if unknown."""
    if arguments.train_files:
        # For several files, `datasets` knows only the first one's number of rows.
        return sum(ParquetFile(name).metadata.num_rows for name in arguments.train_files)
    split = (table.info.splits or {}).get(arguments.train_split)
    return split.num_examples if split else None


def _streams(arguments: DataArguments) -> dict[str, datasets.IterableDataset]:
    if arguments.dataset_name:
        with translate_read_errors(f"--dataset_name {arguments.dataset_name!r}"):
            return datasets.load_dataset(arguments.dataset_name, arguments.dataset_config_name, streaming=True)
    files = {"train": arguments.train_files, "validation": arguments.validation_files}
    files = {split: names for split, names in files.items() if names}
    if not files or any(not name.endswith(".parquet") for names in files.values() for name in names):
        raise InputError("--streaming reads --dataset_name or parquet files by --train_files and --validation_files.")
    names = [name for some in files.values() for name in some]
    require_files(names)
    with translate_read_errors(", ".join(names)):
        # Finds damaged files before training.
        for name in names:
            ParquetFile(name).close()
        return datasets.load_dataset("parquet", data_files=files, streaming=True)
