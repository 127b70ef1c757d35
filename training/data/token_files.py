"""Files of tokens: npz, parquet and ts, read into columns of one array per sample.

- *npz*: the first axis of an array is the sample. With an array `lengths` (samples,), arrays may instead concatenate
  the tokens of all samples.
- *parquet*: one row per sample; cells are numbers, names, or (nested) lists with one entry per token.
- *ts*: time series of aeon, sktime and the UEA archive, with columns `features` and `labels`. Read here, because aeon
  requires an older numpy than torch.
"""

import zipfile
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet

from hf_liere.errors import InputError
from training.common.messages import reason


LENGTHS = "lengths"
# Cells by column name. A cell is a number, a name or an array (tokens, …).
Columns = dict[str, list]


def read_columns(name: str, wanted: set[str]) -> Columns:
    """
    The columns of a file; those that are not `wanted` are empty.

    Raises:
        InputError: if the file cannot be read or has another type.
    """
    readers = {".npz": _read_npz, ".parquet": _read_parquet, ".ts": _read_ts}
    path = Path(name)
    if path.suffix not in readers:
        raise InputError(f"{name}: files of type {path.suffix!r} are not read; accepted: {', '.join(readers)}.")
    if not path.is_file():
        raise InputError(f"There is no file {name!r}.")
    try:
        return readers[path.suffix](path, wanted)
    except InputError:
        raise
    except (OSError, ValueError, zipfile.BadZipFile, pyarrow.ArrowException) as error:
        raise InputError(f"{name} cannot be read ({reason(error)}).") from error


def _read_npz(path: Path, wanted: set[str]) -> Columns:
    with np.load(path, allow_pickle=False) as arrays:
        lengths = arrays.get(LENGTHS)
        columns = {}
        for name in arrays:
            array = arrays[name] if name in wanted else np.empty(0)
            if array.ndim == 0:
                raise InputError(f"{path.name}: {name!r} is a single value; accepted: an array of samples.")
            if lengths is None or name not in wanted or len(array) == len(lengths):
                columns[name] = list(array)
            elif len(array) == lengths.sum():
                columns[name] = np.split(array, np.cumsum(lengths)[:-1])
            else:
                raise InputError(
                    f"{path.name}: {name!r} has {len(array)} entries; accepted are {len(lengths)}, one per sample, and "
                    f"{lengths.sum()}, the sum of {LENGTHS!r}."
                )
        return columns


def _read_parquet(path: Path, wanted: set[str]) -> Columns:
    with pyarrow.parquet.ParquetFile(path) as file:
        columns = {name: [] for name in file.schema_arrow.names}
        table = file.read(columns=[name for name in columns if name in wanted])
    for name in table.column_names:
        for row, cell in enumerate(table[name].to_pylist()):
            try:
                columns[name].append(np.array(cell) if isinstance(cell, list) else cell)
            except ValueError:
                raise InputError(
                    f"{path.name}, row {row}: the lists in {name!r} have different lengths; accepted: a list with one "
                    "entry, or one list of equal length, per token."
                ) from None
    return columns


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
            raise InputError(f"{path.name}, line {number}: there is no '@classLabel true …' and '@data' before it.")
        if header.get("timestamps", "false").lower() != "false":
            raise InputError(f"{path.name} has time stamps; accepted: series of values at equal intervals.")
        *channels, label = line.split(":")
        try:
            series = [[float(value) for value in channel.split(",")] for channel in channels]
        except ValueError as error:
            raise InputError(f"{path.name}, line {number}: {error}; accepted: numbers.") from None
        if len({len(channel) for channel in series}) != 1:
            raise InputError(f"{path.name}, line {number}: the dimensions of a series have different lengths.")
        features.append(np.array(series).T)  # (tokens, features)
        labels.append(label.strip())
    return {"features": features, "labels": labels}
