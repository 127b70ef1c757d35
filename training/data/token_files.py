"""Files of tokens: npz, parquet and ts, read into columns of one array per sample.

- *npz*: the first axis of an array is the sample. With an array `lengths` (samples,), arrays may instead concatenate
  the tokens of all samples.
- *parquet*: one row per sample; cells are numbers, names, or (nested) lists with one entry per token.
- In both, times and durations of any unit become seconds, times those since 1970.
- *ts*: time series of aeon, sktime and the UEA archive, with columns `features` and `labels`. Read here, because aeon
  requires an older numpy than torch.
"""

from decimal import Decimal
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet

from hf_liere.errors import InputError
from hf_liere.reading.files import UnreadableError, naming
from training.common.folders import require_files


LENGTHS = "lengths"
# Whole numbers up to this one are numbers of float64.
EXACT = 2**53
# Cells by column name. A cell is a number, a name or an array (tokens, …).
Columns = dict[str, list]


def read_columns(name: str, wanted: set[str]) -> Columns:
    """
    The columns of a file; those that are not `wanted` are empty. Raises `InputError` if the file cannot be read or has
    another type.
    """
    readers = {".npz": _read_npz, ".parquet": _read_parquet, ".ts": _read_ts}
    path = Path(name)
    if path.suffix not in readers:
        raise InputError(f"{name}: files of type {path.suffix!r} are not read; accepted: {', '.join(readers)}.")
    require_files([name])
    with naming(path.name):
        return readers[path.suffix](path, wanted)


def _read_npz(path: Path, wanted: set[str]) -> Columns:
    with np.load(path, allow_pickle=False) as arrays:
        lengths = arrays.get(LENGTHS)
        columns = {}
        for name in arrays:
            array = arrays[name] if name in wanted else np.empty(0)
            if array.ndim == 0:
                raise UnreadableError(f"{name!r} is a single value; accepted: an array of samples.")
            if lengths is None or name not in wanted or len(array) == len(lengths):
                columns[name] = list(array)
            elif len(array) == lengths.sum():
                columns[name] = np.split(array, np.cumsum(lengths)[:-1])
            else:
                raise UnreadableError(
                    f"{name!r} has {len(array)} entries; accepted are {len(lengths)}, one per sample, and "
                    f"{lengths.sum()}, the sum of {LENGTHS!r}."
                )
        return columns


def _read_parquet(path: Path, wanted: set[str]) -> Columns:
    with pyarrow.parquet.ParquetFile(path) as file:
        columns: Columns = {name: [] for name in file.schema_arrow.names}
        table = file.read(columns=[name for name in columns if name in wanted])
    for name in table.column_names:
        for row, cell in enumerate(table[name].to_numpy()):
            try:
                # Nested lists are arrays of arrays, and decimals objects.
                is_nested = isinstance(cell, np.ndarray) and cell.dtype == object
                cell = np.array(cell.tolist()) if is_nested else cell
                is_decimal = is_nested and isinstance(cell.flat[0] if cell.size else None, Decimal)
                columns[name].append(cell.astype(np.float64) if is_decimal else cell)
            except ValueError:
                raise UnreadableError(
                    f"row {row}: the lists in {name!r} have different lengths; accepted: a list with one entry, or one "
                    "list of equal length, per token."
                ) from None
    return columns


def to_float64(values: np.ndarray, where: str) -> np.ndarray:
    """
    Positions (tokens, axes) as float64; times and durations in seconds, missing ones as NaN. Raises `InputError` with
    the number of tokens that lost a place of their own, here or where float32 was written.
    """
    if values.dtype.kind in "Mm":
        kept = (values - np.array(0, values.dtype)) / np.timedelta64(1, "s")
    else:
        kept = values.astype(np.float64)
    if values.dtype.kind in "iuMm":
        require_distinct(values, kept, where)
    elif values.dtype.itemsize <= 4 and values.dtype.kind == "f" and values.size and np.isfinite(values).all():
        # Of tokens that are drawn at random, n²/2m share one of m places.
        steps, extents = np.spacing(np.abs(values).max(axis=0)), np.ptp(values, axis=0)
        # An axis without extent is one on purpose, unless even whole numbers are rounded there.
        places = np.where((extents > 0) | (steps >= 1), extents / steps + 1, np.inf).prod(dtype=np.float64)
        if len(values) ** 2 / 2 >= places and (lost := len(values) - len(np.unique(values, axis=0))):
            raise InputError(
                f"{where}: {lost} of {len(values)} tokens have the position of another one, because {values.dtype} "
                f"has steps of {steps.max():g} at {np.abs(values).max():g}; accepted: float64, or an origin nearby."
            )
    return kept


def require_distinct(values: np.ndarray, kept: np.ndarray, where: str) -> None:
    """Raises [`InputError`] if rows that differ in `values` are equal in `kept`, the same rows in another type."""
    if values.dtype == kept.dtype:
        return
    distinct = len(np.unique(kept, axis=0))
    # The rows of `values` are counted only where they could be more.
    if distinct < len(kept) and (lost := len(np.unique(values, axis=0)) - distinct) > 0:
        raise InputError(
            f"{where}: {lost} of {len(values)} tokens lose a position of their own where {values.dtype} becomes "
            f"{kept.dtype}; accepted: an origin nearby, or coarser units."
        )


def _read_ts(path: Path, wanted: set[str]) -> Columns:
    lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    header, features, labels = {}, [], []
    for number, line in enumerate(lines, 1):
        if not line or line.startswith("#"):
            continue
        if line.startswith("@"):
            key, _, value = line[1:].partition(" ")
            header[key.lower()] = value.strip()
            continue
        if "data" not in header or not header.get("classlabel", "").lower().startswith("true"):
            raise UnreadableError(f"line {number}: there is no '@classLabel true …' and '@data' before it.")
        if header.get("timestamps", "false").lower() != "false":
            raise UnreadableError("has time stamps; accepted: series of values at equal intervals.")
        *channels, label = line.split(":")
        try:
            series = [[float(value) for value in channel.split(",")] for channel in channels]
        except ValueError as error:
            raise UnreadableError(f"line {number}: {error}; accepted: numbers.") from None
        for text, values in zip((channel.split(",") for channel in channels), series):
            if max(map(abs, values)) > EXACT and len(set(values)) < len(set(map(Decimal, text))):
                lost = len(set(map(Decimal, text))) - len(set(values))
                raise UnreadableError(f"line {number}: float64 cannot tell {lost} values from others.")
        if len({len(channel) for channel in series}) != 1:
            raise UnreadableError(f"line {number}: the dimensions of a series have different lengths.")
        features.append(np.array(series).T)  # (tokens, features)
        labels.append(label.strip())
    return {"features": features, "labels": labels}
