"""Samples of tokens with features, positions and labels: reading, checks, and batches."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from torch.utils.data import Dataset

from hf_liere.errors import InputError
from hf_liere.fast.dispatch import working_dtype
from training.common.arguments import LimitArguments, flag
from training.common.messages import abbreviate
from training.common.tasks import Task, draw_samples, require_task
from training.data import solids  # noqa: F401 (a task)
from training.data.augmentation import IGNORED_LABEL, PADDING
from training.data.sources import LabelledImages
from training.data.token_files import Columns, read_columns, require_distinct, to_float64


TASKS = ("sequence", "token")
FEATURES, POSITIONS, LABELS, POSES = "features", "positions", "labels", "poses"


@dataclass
class TokenDataArguments(LimitArguments):
    inputs: ClassVar[str] = "tokens"

    dataset_name: str | None = flag(
        None,
        "`solids` for points on generated solids (--training_points, --evaluation_points), or a task of --register; "
        "else pass files.",
    )
    train_files: list[str] | None = flag(None, "npz, parquet or ts files to train on.")
    validation_files: list[str] | None = flag(None, "npz, parquet or ts files to evaluate.")
    feature_columns: list[str] | None = flag(
        None, "Columns of features, concatenated; by default the column `features`."
    )
    position_columns: list[str] | None = flag(
        None,
        "Columns of positions, concatenated; by default `positions`, or the token's index without such a column.",
    )
    pose_columns: list[str] | None = flag(
        None,
        "Columns of poses, concatenated: 16 numbers per token, a 4 × 4 matrix from body to world row by row. The model "
        "then attends by hf_liere.PoseEmbedding.",
    )
    label_column: str = flag(LABELS, "Column of classes, one per sample or one per token.")
    task: str | None = flag(None, "Expected task, `sequence` or `token`; by default decided by the labels.")

    def __post_init__(self):
        # Takes back what a recipe gives.
        for name, value in vars(self).items():
            if value in ("None", ["None"]):
                setattr(self, name, None)
        super().__post_init__()
        require_task(self)
        if self.dataset_name and (self.train_files or self.validation_files):
            raise InputError(f"--dataset_name {self.dataset_name} takes no files; accepted: one of the two.")
        if self.task not in (None, *TASKS):
            raise InputError(f"--task {self.task!r}; accepted: {', '.join(TASKS)}.")


@dataclass
class TokenTable:
    """
    Samples of N tokens each; N may differ between samples.

    Attributes:
        features: float32 arrays (N, features).
        positions: float64 arrays (N, axes).
        labels: The class of every sample, or an array (N,) of its tokens' classes, as in the data.
        poses: float32 arrays (N, 16), or none.
    """

    features: list[np.ndarray]
    positions: list[np.ndarray]
    labels: list
    poses: list[np.ndarray] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.features)

    @property
    def sizes(self) -> tuple[int, int]:
        """Features and axes."""
        return self.features[0].shape[1], self.positions[0].shape[1]

    @property
    def is_per_token(self) -> bool:
        return isinstance(self.labels[0], np.ndarray)

    def select(self, indices: np.ndarray | slice) -> "TokenTable":
        chosen = np.arange(len(self))[indices]
        return TokenTable(*([column[index] for index in chosen if column] for column in vars(self).values()))

    def classes(self) -> set:
        values = np.unique(np.concatenate(self.labels)) if self.is_per_token else set(self.labels)
        return {value.item() if isinstance(value, np.generic) else value for value in values} - {IGNORED_LABEL}


@dataclass
class TokenData:
    """Training and evaluation data, and the names of the classes in the order of the labels."""

    train: TokenTable | None
    evaluation: TokenTable | None
    label_names: list[str]
    named: bool

    @property
    def some(self) -> TokenTable:
        return self.train or self.evaluation

    @property
    def task(self) -> str:
        return TASKS[self.some.is_per_token]

    def for_model(self) -> LabelledImages:
        """The classes in the form that `build_model` takes."""
        return LabelledImages(None, None, self.label_names, self.named)


def load_tokens(arguments: TokenDataArguments, parts: tuple[str, ...], seed: int) -> TokenData:
    """
    Args:
        parts: `training`, `evaluation` or both.
        seed: Seed for the samples that `train_fraction` draws.

    Raises:
        InputError: if files, columns or values are missing or inconsistent.
    """
    tables: dict[str, TokenTable | None] = {"training": None, "evaluation": None}
    for part in parts:
        limit = arguments.limits[part]
        if limit is not None and limit < 1:
            raise InputError(f"{limit} examples of the {part} data; accepted: 1 and above.")
        if isinstance(arguments, Task):
            tables[part] = _from_columns(arguments, draw_samples(arguments, part), arguments.name)
        else:
            tables[part] = _from_files(arguments, part).select(slice(limit))
    train, evaluation = tables["training"], tables["evaluation"]
    if train is not None and arguments.train_fraction < 1:
        count = max(round(len(train) * arguments.train_fraction), 1)
        train = train.select(np.random.default_rng(seed).permutation(len(train))[:count])
    _check_parts(arguments, train, evaluation)
    names, named = _label_names(train, evaluation)
    return TokenData(
        *(_number_labels(table, names) for table in (train, evaluation)), [str(name) for name in names], named
    )


def _from_files(arguments: TokenDataArguments, part: str) -> TokenTable:
    infix = "train" if part == "training" else "validation"
    names = getattr(arguments, f"{infix}_files")
    if not names:
        raise InputError(f"There are no {part} data; accepted: --{infix}_files, or --dataset_name solids.")
    tables = [_from_file(arguments, name) for name in names]
    joined = TokenTable(*(sum((getattr(table, column) for table in tables), []) for column in vars(tables[0])))
    for name, table in zip(names, tables):
        _require_alike(tables[0], table, f"{names[0]} and {name}")
    return joined


def _from_file(arguments: TokenDataArguments, name: str) -> TokenTable:
    wanted = {
        *(arguments.feature_columns or [FEATURES]),
        *(arguments.position_columns or [POSITIONS]),
        *(arguments.pose_columns or []),
        arguments.label_column,
    }
    return _from_columns(arguments, read_columns(name, wanted), name)


def _from_columns(arguments: TokenDataArguments, columns: Columns, name: str) -> TokenTable:
    """The features, positions and labels that the arguments choose among the columns of the data `name`."""
    features = arguments.feature_columns or [FEATURES]
    positions = arguments.position_columns or ([POSITIONS] if POSITIONS in columns else [])
    placed_by = arguments.pose_columns or []
    for column in (*features, *positions, *placed_by, arguments.label_column):
        if column not in columns:
            raise InputError(f"{name} has no column {column!r}; it has {abbreviate(list(columns))}.")
    samples = {name: len(columns[name]) for name in (*features, *positions, *placed_by, arguments.label_column)}
    if len(set(samples.values())) != 1 or 0 in samples.values():
        raise InputError(f"{name} has different numbers of samples, {samples}; accepted: equal numbers, at least 1.")
    made = TokenTable([], [], [])
    for index, label in enumerate(columns[arguments.label_column]):
        where = f"{name}, sample {index}"
        tokens = _stack_columns(columns, features, index, where).astype(np.float32)
        placed = _stack_columns(columns, positions, index, where) if positions else np.arange(len(tokens))[:, None]
        placed = to_float64(placed, where)
        if len(placed) != len(tokens):
            raise InputError(f"{where} has {len(tokens)} tokens with features and {len(placed)} with positions.")
        made.features.append(tokens)
        made.positions.append(placed)
        made.labels.append(_label(label, len(tokens), where))
        if placed_by:
            made.poses.append(_stack_poses(columns, placed_by, index, where, len(tokens)))
    for index, sample in enumerate(zip(made.features, made.positions, made.labels)):
        _require_alike(made, TokenTable(*([cell] for cell in sample)), f"{name}, samples 0 and {index}")
    return made


def _stack_columns(columns: Columns, names: list[str], index: int, where: str) -> np.ndarray:
    """Concatenates the cells of several columns to an array (N, columns) of a type that holds all of them."""
    parts = []
    for name in names:
        cell = np.asarray(columns[name][index])
        cell = cell[:, None] if cell.ndim == 1 else cell
        if cell.ndim != 2 or 0 in cell.shape or cell.dtype.kind not in "biufMm":
            raise InputError(
                f"{where}: {name!r} has shape {cell.shape} and type {cell.dtype}; accepted: numbers (tokens,) or "
                "(tokens, …) for at least one token."
            )
        if cell.dtype.kind in "Mm":
            cell = to_float64(cell, f"{where}, {name!r}")
        if not np.isfinite(cell).all():
            raise InputError(
                f"{where}: {name!r} contains {int((~np.isfinite(cell)).sum())} values that are not finite; replace "
                "them, or remove these tokens."
            )
        parts.append(cell)
    if len({len(part) for part in parts}) != 1:
        raise InputError(f"{where}: {', '.join(names)} have {', '.join(str(len(part)) for part in parts)} tokens.")
    joined = np.concatenate(parts, axis=1)
    for part in parts:
        # Beside a column of another type, whole numbers become float64.
        if part.dtype.kind in "iu" and joined.dtype.kind == "f":
            require_distinct(part, part.astype(joined.dtype), where)
    return joined


def _stack_poses(columns: Columns, names: list[str], index: int, where: str, tokens: int) -> np.ndarray:
    """A float32 array (N, 16) of rigid motions."""
    given = _stack_columns(columns, names, index, where)
    if given.shape != (tokens, 16):
        raise InputError(
            f"{where}: {', '.join(names)} have shape {given.shape}; poses of {tokens} tokens are ({tokens}, 16), the "
            "rows of a 4 × 4 matrix for each token."
        )
    require_distinct(given, given.astype(np.float32), f"{where}, {', '.join(names)}")
    return given.astype(np.float32)


def _label(value: Any, tokens: int, where: str) -> Any:
    label = np.asarray(value)
    if label.shape not in ((), (tokens,)) or label.dtype.kind not in "biuU":
        raise InputError(
            f"{where}: labels have shape {label.shape} and type {label.dtype}; accepted: an integer or a name, or one "
            f"for each of the {tokens} tokens."
        )
    return label.item() if label.ndim == 0 else label


def _require_alike(first: TokenTable, other: TokenTable, which: str) -> None:
    if first.sizes != other.sizes or first.is_per_token != other.is_per_token:
        kinds = [f"{table.sizes[0]} features, {table.sizes[1]} axes" for table in (first, other)]
        kinds = [
            f"{kind}, labels of {'tokens' if table.is_per_token else 'samples'}"
            for kind, table in zip(kinds, (first, other))
        ]
        raise InputError(f"{which} differ: {kinds[0]}; {kinds[1]}.")


def _check_parts(arguments: TokenDataArguments, train: TokenTable | None, evaluation: TokenTable | None) -> None:
    if train is not None and evaluation is not None:
        _require_alike(train, evaluation, "The training and the evaluation data")
        if unknown := evaluation.classes() - train.classes():
            raise InputError(
                f"The evaluation data have labels that the training data lack: {abbreviate(sorted(map(str, unknown)))}."
            )
    given = TASKS[(train or evaluation).is_per_token]
    if arguments.task not in (None, given):
        raise InputError(
            f"--task {arguments.task}, but column {arguments.label_column!r} labels each "
            f"{'token' if given == 'token' else 'sample'}; accepted: --task {given}."
        )


def _label_names(*tables: TokenTable | None) -> tuple[list, bool]:
    """All classes in order, and whether they have names, unlike numbers from 0 on."""
    found = set().union(*(table.classes() for table in tables if table is not None))
    if not found:
        raise InputError(f"All labels are {IGNORED_LABEL}, which is ignored; accepted: at least one class.")
    if all(isinstance(value, int) for value in found):
        if min(found) < 0:
            raise InputError(
                f"Labels start at {min(found)}; accepted: numbers from 0 on, and {IGNORED_LABEL} for no label."
            )
        return list(range(max(found) + 1)), False
    kinds = {type(value).__name__ for value in found}
    if len(kinds) > 1:
        raise InputError(f"Labels have types {', '.join(sorted(kinds))}; accepted: numbers or names.")
    # Numeric names are sorted as numbers.
    numeric = all(name.lstrip("-").isdigit() for name in found)
    return sorted(found, key=int if numeric else str), True


def _number_labels(table: TokenTable | None, names: list) -> TokenTable | None:
    if table is None:
        return None
    numbers = {name: number for number, name in enumerate(names)} | {IGNORED_LABEL: IGNORED_LABEL}
    labels = [
        np.array([numbers[item] for item in label.tolist()]) if table.is_per_token else numbers[label]
        for label in table.labels
    ]
    return replace(table, labels=labels)


@dataclass
class TokenExamples(Dataset):
    """
    Examples by index or training key `(epoch, index)`: `features`, `positions`, `label`, and `poses` if there are any.

    Args:
        numbers: The model's number for every label of the data.
    """

    table: TokenTable
    numbers: list[int]

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, key: int | tuple[int, int]) -> dict[str, Any]:
        index = key[1] if isinstance(key, tuple) else key
        if index == PADDING:
            features, axes = self.table.sizes
            label = np.full(1, IGNORED_LABEL) if self.table.is_per_token else IGNORED_LABEL
            example = {"features": np.zeros((1, features)), "positions": np.zeros((1, axes)), "label": label}
            return example | ({POSES: np.eye(4).reshape(1, 16)} if self.table.poses else {})
        label = self.table.labels[index]
        if self.table.is_per_token:
            label = np.where(label == IGNORED_LABEL, IGNORED_LABEL, np.array(self.numbers)[np.maximum(label, 0)])
        else:
            label = self.numbers[label]
        example = {"features": self.table.features[index], "positions": self.table.positions[index], "label": label}
        return example | ({POSES: self.table.poses[index]} if self.table.poses else {})


def token_collator(device: torch.device, *tables: TokenTable | None) -> Callable:
    """[`collate_tokens`] for a device. Raises [`InputError`] if positions need float64 and the device has none."""
    dtype = working_dtype(device)
    for table in tables if dtype == torch.float32 else ():
        for index, placed in enumerate(table.positions if table else ()):
            require_distinct(placed, placed.astype(np.float32), f"On {device}, sample {index}")
    return partial(collate_tokens, dtype=dtype)


def collate_tokens(examples: list[dict[str, Any]], dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    """
    Pads examples to the longest: `inputs_embeds` (B, N, features) and `positions` (B, N, axes), zero where padded,
    `attention_mask` (B, N), and `labels` (B,), or (B, N) with `IGNORED_LABEL` for padding. `poses` (B, N, 4, 4), if
    there are any, are the identity where padded.
    """
    longest, size = max(len(example["features"]) for example in examples), len(examples)
    shapes = {name: (size, longest, examples[0][name].shape[1]) for name in (FEATURES, POSITIONS)}
    # Models subtract the origin in float64; only then do times since 1970 fit into float32.
    types = {FEATURES: torch.float32, POSITIONS: dtype}
    batch = {name: torch.zeros(shape, dtype=types[name]) for name, shape in shapes.items()}
    if POSES in examples[0]:
        batch[POSES] = torch.eye(4).flatten().repeat(size, longest, 1)
    mask = torch.zeros(size, longest, dtype=torch.long)
    per_token = isinstance(examples[0]["label"], np.ndarray)
    labels = torch.full((size, longest) if per_token else (size,), IGNORED_LABEL)
    for row, example in enumerate(examples):
        count = len(example["features"])
        mask[row, :count] = 1
        for name, values in batch.items():
            values[row, :count] = torch.as_tensor(example[name])
        if per_token:
            labels[row, :count] = torch.as_tensor(example["label"])
        else:
            labels[row] = example["label"]
    if POSES in batch:
        batch[POSES] = batch[POSES].unflatten(-1, (4, 4))
    return {"inputs_embeds": batch.pop(FEATURES), **batch, "attention_mask": mask, "labels": labels}
