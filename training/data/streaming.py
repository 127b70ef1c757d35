"""Training images that are read while they are needed, for data sets that fit neither memory nor disk.

An epoch is as many steps as the number of images makes. One process without workers sees every image once, the last
batch filled up with images seen before. Several processes or workers read shards of their own, whose lengths differ:
who has fewer images sees some of them again, who has more leaves some out.
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
from training.common.arguments import DataArguments, RunArguments
from training.data.augmentation import Augmentation
from training.data.images import DecodedImages
from training.data.sources import DataRequest, LabelledImages
from training.data.tables import (
    infer_columns,
    pick_evaluation_split,
    require_files,
    training_split,
    translate_read_errors,
)


# Size of the buffer that the next image is drawn from at random.
SHUFFLE_BUFFER = 10_000


@dataclass
class Stream:
    """
    Training images that are still to be read.

    Args:
        table: its image column cast to undecoded `datasets.Image`.
        size: number of images in an epoch, over all processes.
    """

    table: datasets.IterableDataset
    image_column: str
    label_column: str
    size: int


class StreamedImages(IterableDataset):
    """
    Augmented images of a stream, without end but for the epoch: `image`, `label`, `key`, as `TrainingImages` has them.

    The order depends on (seed, epoch) alone, and on the number of processes and workers.

    Args:
        numbers: for every label of the stream its number in the model.
        args: tell the processes, their batches and workers.

    Raises:
        InputError: if there are not enough shards for all workers.
    """

    def __init__(
        self, stream: Stream, numbers: list[int], num_channels: int, augment: Augmentation, args: RunArguments
    ):
        shuffled = stream.table.shuffle(seed=augment.seed, buffer_size=SHUFFLE_BUFFER)
        self.table = split_dataset_by_node(shuffled, args.process_index, args.world_size)
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
        # Set by the trainer: a function returning the object whose `epoch` an iteration belongs to.
        self.trainer_state = lambda: None

    def __len__(self) -> int:
        """Images of this process in an epoch."""
        return self.steps * self.batch_size

    def __iter__(self) -> Iterator[dict[str, Any]]:
        epoch = int(getattr(self.trainer_state(), "epoch", 0) or 0)
        worker = torch.utils.data.get_worker_info()
        part, parts = (0, 1) if worker is None else (worker.id, worker.num_workers)
        # The loader takes batches from its workers in turn.
        left = (self.steps // parts + (part < self.steps % parts)) * self.batch_size
        number, share = 0, self.rank * parts + part
        self.table.set_epoch(epoch)
        while left:
            before = left
            for row in self.table:
                image = self.decoder.decode(row[self.stream.image_column], number)
                label = self.numbers[row[self.stream.label_column]]
                for _ in range(min(self.repeats, left)):
                    # No other view of the epoch has this number, in any process or worker.
                    index = number * self.world_size * parts + share
                    yield {"image": self.augment(image, epoch, index), "label": label, "key": (epoch, index)}
                    number, left = number + 1, left - 1
                if not left:
                    break
            if left == before:
                raise InputError("The stream holds no images.")


def open_stream(arguments: DataArguments, request: DataRequest) -> tuple[LabelledImages, Stream | None]:
    """
    The evaluation images, downloaded, and the training images as a stream.

    Returns:
        The evaluation and the classes; the stream, `None` without training.

    Raises:
        InputError: if the labels have no names or the number of images is not known, naming what is accepted.
    """
    tables = _streams(arguments)
    features = next(iter(tables.values())).features
    if features is None:
        raise InputError("--streaming: the data set does not say what its columns are; accepted: without --streaming.")
    image_column, label_column = infer_columns(features, arguments)
    label = features[label_column]
    if not isinstance(label, datasets.ClassLabel):
        raise InputError(
            f"--streaming: column {label_column!r} holds {type(label).__name__}, of which the classes are only known "
            "when all is read; accepted: ClassLabel, or without --streaming."
        )
    stream = None
    if "training" in request.parts:
        table = training_split(tables, arguments)
        size = min(arguments.max_train_samples or math.inf, _size(arguments, table) or math.inf)
        if size == math.inf:
            raise InputError(
                "--streaming: the data set does not say how many images it has; accepted: --max_train_samples."
            )
        table = table.take(size) if arguments.max_train_samples else table
        stream = Stream(table.cast_column(image_column, datasets.Image(decode=False)), image_column, label_column, size)
    source, splits = None, {"train": arguments.train_split}
    if "evaluation" in request.parts:
        splits["evaluation"] = split = pick_evaluation_split(list(tables), arguments)
        rows = tables[split].cast_column(image_column, datasets.Image(decode=False))
        rows = rows.take(arguments.max_eval_samples) if arguments.max_eval_samples else rows
        # An evaluation is exact only where every process can index all images, so they are kept on disk.
        table = datasets.Dataset.from_generator(rows.__iter__, features=rows.features)
        labels = table.with_format("numpy")[label_column][:]
        cache_bytes = arguments.image_cache_gigabytes * 2**30
        source = DecodedImages(table, image_column, labels, request.num_channels, cache_bytes)
    # The names of splits of files are chosen here and say nothing.
    splits = splits if arguments.dataset_name else {}
    return LabelledImages(None, source, list(label.names), splits=splits), stream


def _size(arguments: DataArguments, table: datasets.IterableDataset) -> int | None:
    """Number of images of the training split, if it is known."""
    if arguments.train_files:
        # For several files, `datasets` only knows the number of rows of the first.
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
        # Otherwise a damaged file would only be found in the middle of the training.
        for name in names:
            ParquetFile(name).close()
        return datasets.load_dataset("parquet", data_files=files, streaming=True)
