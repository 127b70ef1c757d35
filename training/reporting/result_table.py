"""Results of a sweep as rows of models and columns of conditions, with the papers' names."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from hf_liere.models.encoding.encoding_traits import ENCODING_TRAITS
from training.reporting.result_lines import correct_examples
from training.reporting.significance import Interval, bootstrap_mean


METRICS = {"eval_accuracy": "accuracy", "eval_auc": "AUC", "eval_map": "mAP", "eval_perplexity": "perplexity"}
AS_TRAINED = "as trained"
# Results are averaged over these settings.
SEEDS = ("seed", "evaluation_seed")
# Settings that the name of the encoding implies.
AS_IN_PAPER = (
    *("coordinates", "position_table_size", "rotary_init", "rotate_prefix", "rope_theta", "model_name_or_path"),
    "baseline",
)
# Exceptions, if two models of a sweep have the same encoding.
TELLING = ("coordinates", "rotary_init", "rotate_prefix")


@dataclass
class Cell:
    """All results of one row under one condition."""

    results: list[dict[str, Any]] = field(default_factory=list)

    def metric(self) -> str:
        return max((name for name in METRICS if name in self.results[0]["metrics"]), key=list(METRICS).index)

    def correct(self) -> np.ndarray | None:
        """(runs, examples) of 0 and 1, if every run stored them."""
        if any(result["correct"] is None for result in self.results):
            return None
        runs = [correct_examples(result) for result in self.results]
        return np.stack(runs) if len({len(run) for run in runs}) == 1 else None

    def has_interval(self) -> bool:
        return f"{self.metric()}_low" in self.results[0]["metrics"]

    @cached_property
    def interval(self) -> Interval:
        """Bootstrapped from examples for accuracies; else the mean of the runs' intervals, or the range of the runs."""
        name, correct = self.metric(), self.correct()
        if name == "eval_accuracy" and correct is not None:
            return bootstrap_mean(correct)
        means = [result["metrics"][name] for result in self.results]
        if not self.has_interval():
            return Interval(float(np.mean(means)), min(means), max(means))
        low, high = (
            np.mean([result["metrics"][f"{name}_{bound}"] for result in self.results]) for bound in ("low", "high")
        )
        return Interval(float(np.mean(means)), float(low), float(high))

    def by_seed(self) -> dict[int | None, float]:
        values = defaultdict(list)
        for result in self.results:
            values[result["settings"].get("seed")].append(result["metrics"][self.metric()])
        return {seed: float(np.mean(some)) for seed, some in values.items()}

    def __str__(self) -> str:
        interval, name = self.interval, self.metric()
        if name == "eval_accuracy":
            return f"{100 * interval.mean:.1f} ({100 * interval.low:.1f} – {100 * interval.high:.1f})"
        bounds = f"({interval.low:.3f} – {interval.high:.3f})"
        if not self.has_interval():
            bounds = f"[{interval.low:.3f}, {interval.high:.3f}]"
        return f"{METRICS[name]} {interval.mean:.3f} {bounds}"


# Rows by the names of settings, columns by those of conditions.
Table = dict[str, dict[str, Cell]]


def arrange(results: list[dict[str, Any]]) -> Table:
    """Cells by the names of settings and of conditions, in the order of the results. Seeds share a cell."""
    table: dict[str, dict[str, Cell]] = defaultdict(lambda: defaultdict(Cell))
    shown = distinguishing_settings([result["settings"] for result in results], results[0]["script"])
    for result in results:
        table[method(result["settings"], result["script"], shown)][condition(result["condition"])].results.append(
            result
        )
    return {row: dict(cells) for row, cells in table.items()}


def common_settings(rows: Iterable[str]) -> list[str]:
    """Settings that all rows have in common, if there are several."""
    parts = [row.split(", ")[1:] for row in rows]
    return [part for part in parts[0] if all(part in other for other in parts)] if len(parts) > 1 else []


def drop_common(row: str, common: list[str]) -> str:
    return ", ".join(part for part in row.split(", ") if part not in common)


def distinguishing_settings(trained: Iterable[dict[str, Any]], script: str) -> tuple[str, ...]:
    """The settings of [`TELLING`] in which models of a sweep with the same encoding and block size differ."""
    values: dict[str, set[tuple]] = defaultdict(set)
    for settings in trained:
        encoding = {name: settings.get(name) for name in ("position_encoding", "block_size")}
        values[method(encoding, script)].add(tuple(str(settings.get(name)) for name in TELLING))
    return tuple(
        name
        for index, name in enumerate(TELLING)
        if any(len({some[index] for some in of}) > 1 for of in values.values())
    )


def method(settings: dict[str, Any], script: str = "image_classification", shown: Iterable[str] = ()) -> str:
    """
    The papers' name of a model, and its other settings. Unpatched models keep the name of their own positions.

    Args:
        shown: Settings to name although the encoding's name usually implies them.
    """
    ignored = {*SEEDS, *AS_IN_PAPER} - set(shown)
    rest = {name: value for name, value in settings.items() if name not in ignored and value is not None}
    encoding, block = rest.pop("position_encoding", None), rest.pop("block_size", None)
    if encoding is None:
        rest |= {} if block is None else {"block_size": block}
        return ", ".join(_named(rest)) or "the recipe"
    name = {
        "none": {"clip_finetuning": "Absolute", "language_modeling": "RoPE as it was"}.get(script, "no positions"),
        "absolute": "Absolute",
    }.get(encoding) or ENCODING_TRAITS[encoding].title
    if encoding == "liere":
        name += str(block or 8)
    elif encoding in ENCODING_TRAITS and block not in (None, ENCODING_TRAITS[encoding].block_sizes.default):
        name += f", block_size {block}"
    return ", ".join([name, *_named(rest)])


def condition(given: dict[str, Any]) -> str:
    return ", ".join(_named({name: value for name, value in given.items() if name not in SEEDS})) or AS_TRAINED


def _named(values: dict[str, Any]) -> list[str]:
    return [name if value is True else f"{name} {_shown(value)}" for name, value in values.items()]


def _shown(value: Any) -> str:
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return " + ".join(value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)
