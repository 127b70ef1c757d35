"""Tables of the `datasets` library: opening them from the Hub, folders and files; splits, columns and labels.

Errors in a data set are reported before training starts if possible.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow
from datasets.exceptions import DatasetsError
from datasets.packaged_modules.imagefolder.imagefolder import ImageFolder
from PIL import Image

from hf_liere.errors import InputError
from hf_liere.reading.files import HEIC_SUFFIXES, unread_files
from hf_liere.reading.pictures import register_formats
from training.common.arguments import DataArguments
from training.common.folders import require_files, require_folder
from training.common.messages import abbreviate, reason
from training.data.sources import DataRequest, report_unread


EVALUATION_SPLITS = ("validation", "valid", "dev", "test")
# Type and usual names of the columns of images and of classes.
COLUMNS = {
    "image": (datasets.Image, ("image", "img", "pixel_values", "picture", "file_name")),
    "label": (datasets.ClassLabel, ("label", "labels", "class", "target", "category")),
}
ARCHIVES = (".zip", ".gz", ".tar", ".tgz", ".xz", ".bz2", ".zst")
FILE_BUILDERS = {".parquet": "parquet", ".json": "json", ".jsonl": "json", ".csv": "csv"}


def load_tables(arguments: DataArguments) -> datasets.DatasetDict:
    if arguments.dataset_name:
        with translate_read_errors(f"--dataset_name {arguments.dataset_name!r}"):
            return datasets.load_dataset(arguments.dataset_name, arguments.dataset_config_name)
    if arguments.image_folder:
        require_folder("image_folder", arguments.image_folder)
        with translate_read_errors(f"--image_folder {arguments.image_folder!r}"):
            return _load_folder(arguments.image_folder)
    return load_table_files({"train": arguments.train_files or [], "validation": arguments.validation_files or []})


def _load_folder(folder: str) -> datasets.DatasetDict:
    """Images of a folder in every format that Pillow reads here: `datasets` has a list of its own."""
    register_formats()
    known = ImageFolder.EXTENSIONS
    further = sorted({".avif", *HEIC_SUFFIXES}.intersection(Image.registered_extensions()).difference(known))
    # The name of a configuration keeps what is stored of the same folder with other formats apart.
    name = "".join(["with", *further]) if further else None
    try:
        ImageFolder.EXTENSIONS = [*known, *further]
        return datasets.load_dataset("imagefolder", name, data_dir=folder)
    finally:
        ImageFolder.EXTENSIONS = known


def report_unread_images(tables: datasets.DatasetDict, image_column: str, folder: str) -> None:
    """Says which files of a folder are in no table, apart from metadata and archives, whose contents are."""
    read = set()
    for table in tables.values():
        stored = table.cast_column(image_column, datasets.Image(decode=False)).with_format("arrow")
        read |= {Path(path) for path in stored[:][image_column].combine_chunks().field("path").to_pylist() if path}
    base = Path(folder).absolute()
    read |= {base / path.relative_to(base.resolve()) for path in read if path.is_relative_to(base.resolve())}
    left = unread_files(base, read)
    left = [path for path in left if path.name not in ImageFolder.METADATA_FILENAMES and path.suffix not in ARCHIVES]
    report_unread(f"--image_folder {folder!r}", left, read)


def load_table_files(files: dict[str, list[str]]) -> datasets.DatasetDict:
    """Tables by split, from parquet, json or csv files of one type. Raises [`InputError`] for other files."""
    builders = set()
    require_files(files["train"] + files["validation"])
    for name in files["train"] + files["validation"]:
        builder = FILE_BUILDERS.get(Path(name).suffix)
        if builder is None:
            raise InputError(f"Files of type {Path(name).suffix!r} are not read; accepted: {', '.join(FILE_BUILDERS)}.")
        builders.add(builder)
    if len(builders) != 1:
        raise InputError(f"The files are of several types ({', '.join(sorted(builders))}); accepted: one.")
    # Splits are loaded separately: their features, such as the number of classes, may differ and are compared later.
    tables = datasets.DatasetDict()
    for split, names in files.items():
        if names:
            with translate_read_errors(abbreviate(names)):
                tables[split] = datasets.load_dataset(*builders, data_files=names, split="train")
    return tables


@contextlib.contextmanager
def translate_read_errors(what: str) -> Iterator[None]:
    """
    Translates the errors of opening a data set.

    Raises:
        InputError: with the reason, if the data set cannot be read or reached.
    """
    try:
        yield
    except InputError:
        raise
    except (OSError, ValueError, DatasetsError, pyarrow.ArrowException) as error:
        # `datasets` reports empty files as a split without data; it wraps other read errors as causes.
        why = "it has no rows" if "corresponds to no data" in str(error) else reason(error.__cause__ or error)
        raise InputError(f"{what} cannot be read ({why}).") from error


def pick_evaluation_split(splits: list[str], arguments: DataArguments) -> str:
    """The split to evaluate: the given one, else the first with a usual name.

    Raises:
        InputError: if it does not exist.
    """
    name = arguments.eval_split or next((name for name in EVALUATION_SPLITS if name in splits), None)
    if name is None:
        folder = Path(arguments.image_folder or ".")
        parent = f", or its parent folder {str(folder.parent)!r}" if folder.name in ("train", "training") else ""
        raise InputError(
            f"There is no split to evaluate among {', '.join(splits)}; accepted: --eval_split with one of these or "
            f"--validation_fraction, say 0.1{parent}."
        )
    if name not in splits:
        raise InputError(f"--eval_split {name!r}: there is no such split; accepted: {', '.join(splits)}.")
    return name


def training_split(tables: dict[str, Any], arguments: DataArguments) -> Any:
    """The table or stream to train on."""
    if arguments.train_split not in tables:
        raise InputError(
            f"--train_split {arguments.train_split!r}: there is no such split; accepted: {', '.join(tables)}."
        )
    return tables[arguments.train_split]


def pick_splits(
    tables: datasets.DatasetDict, arguments: DataArguments, request: DataRequest
) -> tuple[dict[str, datasets.Dataset], dict[str, str]]:
    """The tables of the required parts, and the names of their splits for `LabelledImages`."""

    chosen = {"training": training_split(tables, arguments)} if "training" in request.parts else {}
    splits = {"train": arguments.train_split}
    if "evaluation" not in request.parts:
        return chosen, splits
    if arguments.validation_fraction is None or arguments.eval_split or set(EVALUATION_SPLITS) & set(tables):
        name = pick_evaluation_split(list(tables), arguments)
        return chosen | {"evaluation": tables[name]}, splits | {"evaluation": name}
    if not 0 < arguments.validation_fraction < 1:
        raise InputError(f"--validation_fraction {arguments.validation_fraction}; accepted: between 0 and 1.")
    halves = training_split(tables, arguments).train_test_split(arguments.validation_fraction, seed=request.seed)
    chosen = dict.fromkeys(chosen, halves["train"]) | {"evaluation": halves["test"]}
    held_out = f"{arguments.train_split}, a share of {arguments.validation_fraction:g} held out"
    return chosen, splits | {"evaluation": held_out}


def require_columns(features: datasets.Features, image_column: str, label_column: str, description: str) -> None:
    for column in (image_column, label_column):
        if column not in features:
            raise InputError(f"The {description} data have no column {column!r}; they have {', '.join(features)}.")


def keep_encoded(table: datasets.Dataset, image_column: str, folder: Path | None) -> datasets.Dataset:
    """Keeps images as bytes or paths, so that decoding errors can name the row."""
    if folder is not None and _type_name(table.features[image_column]) == "string":

        def resolve(names: list[str]) -> dict[str, list[str]]:
            return {image_column: [str(folder / name) for name in names]}

        table = table.map(resolve, batched=True, input_columns=image_column, keep_in_memory=True)
    try:
        return table.cast_column(image_column, datasets.Image(decode=False))
    except (TypeError, ValueError) as error:
        raise InputError(
            f"Column {image_column!r} has type {_type_name(table.features[image_column])}; accepted: images, as files, "
            "paths or bytes."
        ) from error


def require_class_folders(tables: datasets.DatasetDict, image_column: str, arguments: DataArguments) -> None:
    """
    Checks what `datasets` does not: that there are at least two class folders, and that every class has training
    images.
    """
    some, folder = next(iter(tables.values())), arguments.image_folder
    if list(some.features) == [image_column]:
        rows = some.cast_column(image_column, datasets.Image(decode=False))[image_column]
        found = sorted({Path(row["path"]).parent.name for row in rows})
        raise InputError(
            f"--image_folder {folder!r} has no class folders: its images are in {abbreviate(found)}; accepted: at "
            "least two classes, one folder each, all at the same depth."
        )
    feature = some.features.get("label")
    if arguments.train_split not in tables or not isinstance(feature, datasets.ClassLabel):
        return
    trained = set(tables[arguments.train_split]["label"])
    missing = [name for number, name in enumerate(feature.names) if number not in trained]
    if missing:
        raise InputError(
            f"--image_folder {folder!r} has no images of {abbreviate(missing)} in the split {arguments.train_split!r}; "
            "accepted: classes with training images."
        )


def label_names(table: datasets.Dataset, label_column: str) -> tuple[list[str], bool]:
    feature = table.features[label_column]
    if isinstance(feature, datasets.ClassLabel):
        return list(feature.names), True
    values = sorted(set(table[label_column]), key=lambda value: (str(type(value)), value))
    if all(isinstance(value, str) for value in values):
        return values, True
    if not all(isinstance(value, int) for value in values):
        raise InputError(f"Column {label_column!r} contains {values[:3]!r} …; accepted: class numbers or names.")
    if values[0] < 0:
        raise InputError(f"Column {label_column!r} contains the label {values[0]}; accepted: 0 and above.")
    return [str(number) for number in range(values[-1] + 1)], False


def number_labels(table: datasets.Dataset, label_column: str, label_names: list[str], description: str) -> np.ndarray:
    """Labels as indices into `label_names`, (rows,). Raises [`InputError`] with the row of any other label."""
    feature, values = table.features[label_column], table[label_column][:]
    numbers = {name: number for number, name in enumerate(label_names)}
    if isinstance(feature, datasets.ClassLabel):
        if sorted(feature.names) != sorted(label_names):
            raise InputError(
                f"The {description} data have the classes {abbreviate(feature.names)}; accepted: "
                f"{abbreviate(label_names)}."
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
                f"{len(label_names)} classes, {abbreviate(label_names)}."
            )
        labels[row] = number
    return labels


def infer_columns(features: datasets.Features, arguments: DataArguments) -> tuple[str, str]:
    """The image and class columns: the given ones, else the only ones of their type or with a usual name."""
    given = {"image": arguments.image_column_name, "label": arguments.label_column_name}
    image, label = (infer_column(features, kind, column) for kind, column in given.items())
    return image, label


def infer_column(features: datasets.Features, kind: str, given: str | None) -> str:
    columns = ", ".join(f"{name} ({_type_name(feature)})" for name, feature in features.items())
    flag, (feature_type, usual_names) = f"--{kind}_column_name", COLUMNS[kind]
    if given is not None:
        if given not in features:
            raise InputError(f"{flag} {given!r}: there is no such column; the data set has {columns}.")
        return given
    typed = [name for name, feature in features.items() if isinstance(feature, feature_type)]
    named = [name for name in usual_names if name in features and (not typed or name in typed)]
    candidates = typed if len(typed) == 1 else named[:1] or typed
    if len(candidates) == 1:
        return candidates[0]
    found = f"several {kind} columns ({', '.join(candidates)})" if candidates else f"no {kind} column"
    raise InputError(f"The data set has {found}; name one by {flag}. Its columns are {columns}.")


def _type_name(feature: object) -> str:
    return feature.dtype if isinstance(feature, datasets.Value) else type(feature).__name__
