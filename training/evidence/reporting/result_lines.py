"""Results of sweeps as json lines, each with everything needed to repeat it.

Stored files are compressed: a line without a sweep contains only the changes from the previous line, entry by entry in
dictionaries.
"""

import base64
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from hf_liere.errors import InputError
from training.common.records import write_text


# Sweep, settings and condition; flags of the training and the resolved run; metrics of training and of this evaluation;
# accuracies by epoch; correctly classified examples, as bits in base64; versions and hardware.
REQUIRED_KEYS = "sweep script settings condition flags run train_metrics metrics history examples correct environment"
# Arguments of evaluate_sweep.py; cross entropies of the examples, or means of the tokens of each sample or document,
# with the number of these tokens and of the correct ones. Older lines lack them.
OPTIONAL_KEYS = ("command", "losses", "sizes", "right")
RESULT_KEYS = (*REQUIRED_KEYS.split(), *OPTIONAL_KEYS)
# Written completely if they change, because the names of their entries differ between lines.
NOT_ENTRY_BY_ENTRY = ("settings", "condition", "metrics")


def write_results(path: Path, results: list[dict[str, Any]], as_changes: bool = False) -> None:
    """
    Writes the lines atomically.

    Args:
        as_changes: write only changes from the previous line, and round measured numbers to six digits.
    """
    lines = [_select_keys(result) for result in results]
    if as_changes:
        given = ("settings", "condition")
        lines = list(_to_changes(_round(line) | {key: line[key] for key in given} for line in lines))
    write_text(path, "".join(json.dumps(line, default=str) + "\n" for line in lines))


def read_results(path: Path) -> list[dict[str, Any]]:
    """
    The complete lines of a file of results.

    Raises:
        InputError: naming the file and the invalid line.
    """
    if not path.is_file():
        raise InputError(f"There are no results {str(path)!r}.")
    results = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            result = json.loads(line)
            if "sweep" not in result:
                result = _apply_changes(results[-1], result)
            result["metrics"]["eval_samples"]
            results.append(_select_keys(result))
        except (json.JSONDecodeError, KeyError, IndexError, TypeError) as error:
            raise InputError(f"{path.name}, line {number} is not a result of evaluate_sweep.py.") from error
    if not results:
        raise InputError(f"{path.name} contains no results.")
    return results


def correct_examples(result: dict[str, Any]) -> np.ndarray:
    """Whether each example was classified correctly, (examples,), decoded from a line of results."""
    bits = np.frombuffer(base64.b64decode(result["correct"]), np.uint8)
    return np.unpackbits(bits, count=result["examples"]).astype(bool)


def encode_examples(correct: np.ndarray) -> str:
    """Encodes (examples,) for `correct_examples`."""
    return base64.b64encode(np.packbits(correct).tobytes()).decode()


def encode_numbers(values: np.ndarray) -> str:
    """Encodes (units,) for `decode_numbers`, losses in half precision: rounded by at most one in 2,000."""
    kind = "<f2" if np.issubdtype(values.dtype, np.floating) else "<u4"
    return base64.b64encode(values.astype(kind).tobytes()).decode()


def decode_numbers(result: dict[str, Any], key: str) -> np.ndarray:
    """(units,): `losses`, `sizes` or `right` of a line of results."""
    return np.frombuffer(base64.b64decode(result[key]), "<f2" if key == "losses" else "<u4").astype(np.float64)


def _select_keys(result: dict[str, Any]) -> dict[str, Any]:
    return {key: result[key] for key in RESULT_KEYS if key in result or key not in OPTIONAL_KEYS}


def _to_changes(lines: Iterable[dict[str, Any]]) -> Iterable[dict[str, Any]]:
    before: dict[str, Any] = {}
    for line in lines:
        found = _apply_changes(before, _changes(before, line))
        if before and found == line:
            # In the order in which a reader finds the entries, so that a file that was read is written as it was.
            yield _changes(before, found)
            before = found
        else:
            # Changes cannot express that an entry was removed.
            yield line
            before = line


def _changes(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    changes = {}
    for key, value in after.items():
        if _has_entries(key, before, value):
            if entries := _changes(before[key], value):
                changes[key] = entries
        elif key not in before or before[key] != value:
            changes[key] = value
    return changes


def _apply_changes(before: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    after = dict(before)
    for key, value in changes.items():
        after[key] = _apply_changes(before[key], value) if _has_entries(key, before, value) else value
    return after


def _has_entries(key: str, before: dict[str, Any], value: Any) -> bool:
    return isinstance(value, dict) and isinstance(before.get(key), dict) and key not in NOT_ENTRY_BY_ENTRY


def _round(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _round(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_round(item) for item in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value
