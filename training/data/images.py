"""Where images and labels come from: the Hub, folders, files or the built-in arrows, all as indexable sources.

A source has a length and returns `(image, label)` for an index: a uint8 array of shape (height, width, channels) and
the number of the class. What is wrong with a data set is said before training starts wherever that is possible.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import datasets
import numpy as np
import pyarrow
from datasets.exceptions import DatasetsError
from torch.utils.data import Subset
from tqdm.auto import tqdm

from training.data.arrows import LABELS, Arrows
from training.engine.arguments import DataArguments, InputError
from training.playground.pictures import EIGHT_BIT_MODES, GREY_MODES


EVALUATION_SPLITS = ("validation", "valid", "dev", "test")
IMAGE_NAMES = ("image", "img", "pixel_values", "picture", "file_name")
LABEL_NAMES = ("label", "labels", "class", "target", "category")
FILE_BUILDERS = {".parquet": "parquet", ".json": "json", ".jsonl": "json", ".csv": "csv"}


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
    # False where the data set only numbers its classes.
    named: bool = True
    splits: dict[str, str] = field(default_factory=dict)


class Relabelled:
    """A source whose label n is `numbers[n]` to the model."""

    def __init__(self, source: Source, numbers: Sequence[int]):
        self.source = source
        self.numbers = numbers

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        image, label = self.source[index]
        return image, self.numbers[label]


def fraction_of(source: Source, fraction: float, seed: int) -> Source:
    """A random share of a source; a larger share of the same seed contains a smaller one."""
    if fraction == 1:
        return source
    count = max(round(len(source) * fraction), 1)
    return Subset(source, np.random.default_rng(seed).permutation(len(source))[:count].tolist())


class DecodedImages:
    """
    Images of a `datasets.Dataset`, all decoded in advance where they fit in memory, else each time they are asked for.

    Args:
        table: the data set, its image column cast to undecoded `datasets.Image`.
        labels: the class of every row, (rows,).
        num_channels: 3, to which grey images are repeated, or 1.
        cache_bytes: what the decoded images may take together.

    Raises:
        InputError: on access, naming the file or else the row, if an image cannot be decoded or has the wrong number
            of channels.
    """

    def __init__(
        self, table: datasets.Dataset, image_column: str, labels: np.ndarray, num_channels: int, cache_bytes: float
    ):
        self.table = table
        self.image_column = image_column
        self.labels = labels
        self.num_channels = num_channels
        self.cache_bytes = cache_bytes
        self.cache: dict[int, np.ndarray] = {}
        self._decoder = datasets.Image()

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        image = self.cache.get(index)
        if image is None:
            image = self.decode(self.table[index][self.image_column], index)
        return image, int(self.labels[index])

    def fill_cache(self, description: str) -> None:
        """Decodes all images if, judged by the first, they fit; one that cannot be decoded is found here."""
        first = [self[index][0].nbytes for index in range(min(len(self), 64))]
        if sum(first) / len(first) * len(self) > self.cache_bytes:
            return
        with tqdm(total=len(self), desc=f"Decoding {description}", unit="img", leave=False, disable=None) as progress:
            for start in range(0, len(self), 256):
                for row, encoded in enumerate(self.table[start : start + 256][self.image_column], start):
                    self.cache[row] = self.decode(encoded, row)
                    progress.update()

    def decode(self, encoded: dict | None, row: int) -> np.ndarray:
        """An undecoded image as (height, width, num_channels); `row` is for the message of what goes wrong."""
        try:
            image = self._decoder.decode_example(encoded)
            mode = image.mode
            if mode not in EIGHT_BIT_MODES:
                raise InputError(f"mode {mode}; accepted are 8-bit images, modes {', '.join(EIGHT_BIT_MODES)}")
            if self.num_channels == 1 and mode not in GREY_MODES:
                raise InputError(
                    f"mode {mode}, but the model takes num_channels=1; accepted: grey images or --num_channels 3"
                )
            array = np.asarray(image.convert("RGB" if self.num_channels == 3 else "L"))
        except InputError as error:
            raise InputError(f"{self._place(encoded, row)} has {error}.") from None
        except Exception as error:
            # Whatever a decoder throws at a broken file, the reader needs to know where to look.
            raise InputError(f"{self._place(encoded, row)} cannot be decoded ({_reason(error)}).") from error
        return array.reshape(*array.shape[:2], self.num_channels)

    def _place(self, encoded: dict | None, row: int) -> str:
        if encoded and encoded.get("path") and encoded.get("bytes") is None:
            return f"The image {encoded['path']}"
        return f"The image in row {row}, column {self.image_column!r},"


def load_images(
    arguments: DataArguments, image_size: tuple[int, int], num_channels: int, train: bool, evaluate: bool, seed: int
) -> LabelledImages:
    """
    Loads the splits that are needed.

    Args:
        image_size: height and width of the model's input; the arrows are drawn at that size.
        seed: of the arrows, and of the parts that `validation_fraction` and `train_fraction` make.

    Raises:
        InputError: naming the column, split, row or value that does not fit and what would.
    """
    if arguments.streaming:
        raise InputError("--streaming: this script reads its images first; accepted in image_classification.py.")
    if num_channels not in (1, 3):
        raise InputError(f"--num_channels {num_channels}: image files are read with 1 or 3 channels.")
    given = [
        name for name in ("dataset_name", "image_folder", "train_files", "validation_files") if getattr(arguments, name)
    ]
    if not given or (len(given) > 1 and set(given) != {"train_files", "validation_files"}):
        raise InputError(
            f"The data come from {' and '.join(given) or 'nowhere'}; accepted: one of --dataset_name, --image_folder "
            "and --train_files with --validation_files."
        )
    if arguments.dataset_name == "arrows":
        images = _load_arrows(arguments, image_size, train, evaluate, seed)
    else:
        images = _load_decoded(arguments, num_channels, train, evaluate, seed)
    images.train = images.train and fraction_of(images.train, arguments.train_fraction, seed)
    return images


def _load_decoded(
    arguments: DataArguments, num_channels: int, train: bool, evaluate: bool, seed: int
) -> LabelledImages:
    tables = _load_tables(arguments)
    train_table, eval_table, splits = _pick_splits(tables, arguments, train, evaluate, seed)
    some_table = train_table if train_table is not None else eval_table
    image_column = infer_image_column(some_table.features, arguments.image_column_name)
    if arguments.image_folder:
        _require_class_folders(tables, image_column, arguments)
    label_column = infer_label_column(some_table.features, arguments.label_column_name)
    label_names, named = _label_names(some_table, label_column)

    def source(table: datasets.Dataset | None, limit: int | None, description: str, files: list[str] | None):
        if table is None:
            return None
        _require_columns(table.features, image_column, label_column, description)
        if limit is not None:
            table = table.select(range(min(limit, len(table))))
        if not len(table):
            raise InputError(f"The {description} images are none; accepted: at least one row.")
        labels = _numbered_labels(table, label_column, label_names, description)
        # Paths in a file are relative to that file, as in the folders that `datasets` reads.
        folder = Path(files[0]).parent if files else None
        table = _undecoded(table, image_column, folder)
        images = DecodedImages(table, image_column, labels, num_channels, arguments.image_cache_gigabytes * 2**30)
        images.fill_cache(f"{description} images")
        return images

    return LabelledImages(
        source(train_table, arguments.max_train_samples, "training", arguments.train_files),
        source(
            eval_table,
            arguments.max_eval_samples,
            "evaluation",
            arguments.validation_files or arguments.train_files,
        ),
        label_names,
        named,
        # Those of files are made up here.
        {} if arguments.train_files or arguments.validation_files else splits,
    )


def infer_image_column(features: datasets.Features, given: str | None) -> str:
    """The column of images: the given one, the only one of type Image, or the only one with a usual name."""
    return _infer_column(
        features,
        given,
        "image",
        "--image_column_name",
        lambda feature: isinstance(feature, datasets.Image),
        IMAGE_NAMES,
    )


def infer_label_column(features: datasets.Features, given: str | None) -> str:
    """The column of classes: the given one, the only one of type ClassLabel, or the only one with a usual name."""
    return _infer_column(
        features,
        given,
        "label",
        "--label_column_name",
        lambda feature: isinstance(feature, datasets.ClassLabel),
        LABEL_NAMES,
    )


def _infer_column(
    features: datasets.Features,
    given: str | None,
    kind: str,
    flag: str,
    has_type: Callable,
    usual_names: Sequence[str],
) -> str:
    columns = ", ".join(f"{name} ({_type_name(feature)})" for name, feature in features.items())
    if given is not None:
        if given not in features:
            raise InputError(f"{flag} {given!r}: there is no such column; the data set has {columns}.")
        return given
    typed = [name for name, feature in features.items() if has_type(feature)]
    named = [name for name in usual_names if name in features and (not typed or name in typed)]
    candidates = typed if len(typed) == 1 else named[:1] or typed
    if len(candidates) == 1:
        return candidates[0]
    found = f"several {kind} columns ({', '.join(candidates)})" if candidates else f"no {kind} column"
    raise InputError(f"The data set has {found}; name one by {flag}. Its columns are {columns}.")


def _type_name(feature: object) -> str:
    return feature.dtype if isinstance(feature, datasets.Value) else type(feature).__name__


def _load_arrows(
    arguments: DataArguments, image_size: tuple[int, int], train: bool, evaluate: bool, seed: int
) -> LabelledImages:
    if image_size[0] != image_size[1]:
        raise InputError(f"The arrows are square; {image_size} is not. Accepted: --image_size 108 and the like.")
    splits = {"train": arguments.train_split, "evaluation": arguments.eval_split or "validation"}
    sizes = {"train": arguments.max_train_samples, "evaluation": arguments.max_eval_samples}
    try:
        sources = {
            part: Arrows(splits[part], sizes[part], image_size[0], seed) if needed else None
            for part, needed in (("train", train), ("evaluation", evaluate))
        }
    except ValueError as error:
        raise InputError(str(error)) from None
    return LabelledImages(sources["train"], sources["evaluation"], list(LABELS), splits=splits)


def _load_tables(arguments: DataArguments) -> datasets.DatasetDict:
    if arguments.dataset_name:
        with readable(f"--dataset_name {arguments.dataset_name!r}"):
            return datasets.load_dataset(arguments.dataset_name, arguments.dataset_config_name)
    if arguments.image_folder:
        if not Path(arguments.image_folder).is_dir():
            raise InputError(f"--image_folder {arguments.image_folder!r} is no folder.")
        with readable(f"--image_folder {arguments.image_folder!r}"):
            return datasets.load_dataset("imagefolder", data_dir=arguments.image_folder)
    files = {"train": arguments.train_files or [], "validation": arguments.validation_files or []}
    builders = set()
    require_files(files["train"] + files["validation"])
    for name in files["train"] + files["validation"]:
        builder = FILE_BUILDERS.get(Path(name).suffix)
        if builder is None:
            raise InputError(f"Files of type {Path(name).suffix!r} are not read; accepted: {', '.join(FILE_BUILDERS)}.")
        builders.add(builder)
    if len(builders) != 1:
        raise InputError(f"The files are of several types ({', '.join(sorted(builders))}); accepted: one.")
    # Every split by itself: features such as the number of classes may differ, and are compared below.
    tables = datasets.DatasetDict()
    for split, names in files.items():
        if names:
            with readable(_shown(names)):
                tables[split] = datasets.load_dataset(*builders, data_files=names, split="train")
    return tables


def require_files(names: Sequence[str]) -> None:
    """
    Raises:
        InputError: naming the first of these files that is not there.
    """
    for name in names:
        if not Path(name).is_file():
            raise InputError(f"There is no file {name!r}.")


@contextlib.contextmanager
def readable(what: str) -> Iterator[None]:
    """
    Around the opening of a data set.

    Raises:
        InputError: with the reason, if it cannot be read or reached.
    """
    try:
        yield
    except InputError:
        raise
    except (OSError, ValueError, DatasetsError, pyarrow.ArrowException) as error:
        # `datasets` says of empty files that a split has no data, and wraps what went wrong in reading.
        reason = "it has no rows" if "corresponds to no data" in str(error) else _reason(error.__cause__ or error)
        raise InputError(f"{what} cannot be read ({reason}).") from error


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"


def pick_evaluation_split(splits: list[str], arguments: DataArguments) -> str:
    """The split of a data set to evaluate: the given one, else the first of the usual names.

    Raises:
        InputError: if there is none.
    """
    name = arguments.eval_split or next((name for name in EVALUATION_SPLITS if name in splits), None)
    if name is None:
        raise InputError(
            f"There is no split to evaluate among {', '.join(splits)}; accepted: --eval_split with one of these or "
            "--validation_fraction, say 0.1."
        )
    if name not in splits:
        raise InputError(f"--eval_split {name!r}: there is no such split; accepted: {', '.join(splits)}.")
    return name


def _pick_splits(
    tables: datasets.DatasetDict, arguments: DataArguments, train: bool, evaluate: bool, seed: int
) -> tuple[datasets.Dataset | None, datasets.Dataset | None, dict[str, str]]:
    """The tables to train on and to evaluate, and the names of their splits."""

    def split(name: str, flag: str) -> datasets.Dataset:
        if name not in tables:
            raise InputError(f"{flag} {name!r}: there is no such split; accepted: {', '.join(tables)}.")
        return tables[name]

    train_table = split(arguments.train_split, "--train_split") if train else None
    splits = {"train": arguments.train_split}
    if not evaluate:
        return train_table, None, splits
    if arguments.validation_fraction is None or arguments.eval_split or set(EVALUATION_SPLITS) & set(tables):
        name = pick_evaluation_split(list(tables), arguments)
        return train_table, tables[name], splits | {"evaluation": name}
    if not 0 < arguments.validation_fraction < 1:
        raise InputError(f"--validation_fraction {arguments.validation_fraction}; accepted: between 0 and 1.")
    parts = split(arguments.train_split, "--train_split").train_test_split(arguments.validation_fraction, seed=seed)
    held_out = f"{arguments.train_split}, a share of {arguments.validation_fraction:g} held out"
    return (parts["train"] if train else None), parts["test"], splits | {"evaluation": held_out}


def _require_columns(features: datasets.Features, image_column: str, label_column: str, description: str) -> None:
    for column in (image_column, label_column):
        if column not in features:
            raise InputError(f"The {description} data have no column {column!r}; they have {', '.join(features)}.")


def _undecoded(table: datasets.Dataset, image_column: str, folder: Path | None) -> datasets.Dataset:
    """The table with images as bytes or paths: whatever goes wrong in decoding can then be told with its row."""
    if folder is not None and _type_name(table.features[image_column]) == "string":

        def resolve(names: list[str]) -> dict[str, list[str]]:
            return {image_column: [str(folder / name) for name in names]}

        table = table.map(resolve, batched=True, input_columns=image_column, keep_in_memory=True)
    try:
        return table.cast_column(image_column, datasets.Image(decode=False))
    except (TypeError, ValueError) as error:
        raise InputError(
            f"Column {image_column!r} holds {_type_name(table.features[image_column])}; accepted: images, as files, "
            "paths or bytes."
        ) from error


def _require_class_folders(tables: datasets.DatasetDict, image_column: str, arguments: DataArguments) -> None:
    """`datasets` makes classes of folders only where there are several, and of the folders of all splits together."""
    some, folder = next(iter(tables.values())), arguments.image_folder
    if list(some.features) == [image_column]:
        rows = some.cast_column(image_column, datasets.Image(decode=False))[image_column]
        found = sorted({Path(row["path"]).parent.name for row in rows})
        raise InputError(
            f"--image_folder {folder!r} has no class folders: its images are in {_shown(found)}; accepted: a folder "
            "for each of at least two classes, all of them equally deep."
        )
    feature = some.features.get("label")
    if arguments.train_split not in tables or not isinstance(feature, datasets.ClassLabel):
        return
    trained = set(tables[arguments.train_split]["label"])
    missing = [name for number, name in enumerate(feature.names) if number not in trained]
    if missing:
        raise InputError(
            f"--image_folder {folder!r} has no images of {_shown(missing)} in the split {arguments.train_split!r}; "
            "accepted: classes that are trained."
        )


def _label_names(table: datasets.Dataset, label_column: str) -> tuple[list[str], bool]:
    feature = table.features[label_column]
    if isinstance(feature, datasets.ClassLabel):
        return list(feature.names), True
    values = sorted(set(table[label_column]), key=lambda value: (str(type(value)), value))
    if all(isinstance(value, str) for value in values):
        return values, True
    if not all(isinstance(value, int) for value in values):
        raise InputError(f"Column {label_column!r} holds {values[:3]!r} …; accepted: class numbers or names.")
    if values[0] < 0:
        raise InputError(f"Column {label_column!r} holds the label {values[0]}; accepted: 0 and above.")
    return [str(number) for number in range(values[-1] + 1)], False


def _numbered_labels(
    table: datasets.Dataset, label_column: str, label_names: list[str], description: str
) -> np.ndarray:
    """Labels as numbers into `label_names`, (rows,); anything else is refused with its row."""
    feature, values = table.features[label_column], table[label_column][:]
    numbers = {name: number for number, name in enumerate(label_names)}
    if isinstance(feature, datasets.ClassLabel):
        if sorted(feature.names) != sorted(label_names):
            raise InputError(
                f"The {description} data have the classes {_shown(feature.names)}, the model learns "
                f"{_shown(label_names)}."
            )
        numbers = {value: numbers[name] for value, name in enumerate(feature.names)}
    elif not isinstance(values[0], str):
        numbers = {int(name): number for name, number in numbers.items()}
    labels = np.empty(len(values), np.int64)
    for row, value in enumerate(values):
        number = numbers.get(value)
        if number is None:
            raise InputError(
                f"The {description} data have the label {value!r} in row {row}, column {label_column!r}; accepted: "
                f"{len(label_names)} classes, {_shown(label_names)}."
            )
        labels[row] = number
    return labels


def _shown(names: Sequence[str]) -> str:
    return ", ".join(names[:10]) + (f" … ({len(names)})" if len(names) > 10 else "")
