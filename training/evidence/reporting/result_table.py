"""Results of a sweep as rows of models and columns of conditions, with the papers' names."""

import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import numpy as np

from hf_liere.encoding.kinds import ENCODINGS
from hf_liere.errors import InputError
from training.evidence.reporting.result_lines import correct_examples, decode_numbers
from training.evidence.reporting.significance import FEWEST_SEEDS, Interval, Outcomes, bootstrap_mean


METRICS = {"eval_accuracy": "accuracy", "eval_auc": "AUC", "eval_map": "mAP", "eval_perplexity": "perplexity"}
LOWER_IS_BETTER = ("eval_perplexity", "eval_loss")
AS_TRAINED = "as trained"
# Half the width of a 95% interval, in standard errors.
QUANTILE = 1.959964
# Results are averaged over these settings.
SEEDS = ("seed", "evaluation_seed")
# Settings that the name of the encoding implies.
AS_IN_PAPER = (
    *("coordinates", "position_table_size", "rotary_init", "rotate_prefix", "rope_theta", "model_name_or_path"),
    "baseline",
)
# Exceptions, if two models of a sweep have the same encoding.
TELLING = ("coordinates", "rotary_init", "rotate_prefix")
# From this number on, single seeds are in the picture of a sweep, not in its tables.
MANY_SEEDS = 10
# Conditions in words, by their settings.
CONDITIONS = {
    "image_size": "{} px",
    "evaluation_shuffle": "{} shuffled",
    "evaluation_angle": "turned by up to {}°",
    "evaluation_shift": "moved by up to {} cells",
    "evaluation_offset": "offset {}",
    "coordinates": "{}",
    "max_length": "{} tokens",
}
# By the identity of a model: the settings that no label tells, and the labels of the others.
Labels = dict[str, tuple[dict[str, Any], list[str]]]


@dataclass
class Cell:
    """
    All results of one row under one condition.

    Attributes:
        of: the metric, by default the one of [`METRICS`] that tells most.
        groups: how many examples, one after another, resemble each other, such as the residues of a protein. Groups are
            drawn then, not single examples. By default each example is one.
    """

    results: list[dict[str, Any]] = field(default_factory=list)
    of: str | None = None
    groups: tuple[int, ...] = ()

    def metric(self) -> str:
        return self.of or max((name for name in METRICS if name in self.results[0]["metrics"]), key=list(METRICS).index)

    def has(self, metric: str) -> bool:
        return all(metric in result["metrics"] for result in self.results)

    @cached_property
    def outcomes(self) -> Outcomes:
        """The compared values: the metric, but the logarithm of a perplexity, which is the mean of losses."""
        runs: dict[Any, dict[Any, dict[str, Any]]] = defaultdict(dict)
        for result in self.results:
            runs[result["settings"].get("seed")][result["condition"].get("evaluation_seed")] = result
        if len({tuple(some) for some in runs.values()}) > 1:
            # Seeds with different draws are compared by their means.
            return Outcomes(
                np.array([[[np.mean([self._mean(run) for run in some.values()])]] for some in runs.values()])
            )
        single = [[self._single(run) for run in some.values()] for some in runs.values()]
        lengths = {None if values is None else len(values) for some in single for values in some}
        if len(lengths) == 1 and None not in lengths:
            return Outcomes(np.array(single))
        return Outcomes(
            np.array([[[self._mean(run)] for run in some.values()] for some in runs.values()]), self._error()
        )

    def _transform(self, value: Any) -> Any:
        return np.log(value) if self.metric() == "eval_perplexity" else value

    def shown(self, value: float) -> float:
        """An outcome as the metric, which may have bounds."""
        if self.metric() == "eval_perplexity":
            return float(np.exp(value))
        return value if self.metric() == "eval_loss" else min(max(value, 0.0), 1.0)

    def _mean(self, result: dict[str, Any]) -> float:
        return float(self._transform(result["metrics"][self.metric()]))

    def _single(self, result: dict[str, Any]) -> np.ndarray | None:
        """The outcomes of the examples, if they were stored; their mean is that of the run."""
        metric = self.metric()
        if metric == "eval_accuracy" and result["correct"] is not None:
            values = correct_examples(result)
            if not self.groups:
                return values
            if sum(self.groups) != len(values):
                raise InputError(
                    f"groups: {', '.join(map(str, self.groups))} are {sum(self.groups)} examples; accepted: sizes of "
                    f"{len(values)} examples."
                )
            sizes = np.array(self.groups)
            return _weigh(np.add.reduceat(values.astype(float), np.cumsum(sizes) - sizes) / sizes, sizes)
        sizes = decode_numbers(result, "sizes") if "sizes" in result else 1.0
        if metric == "eval_accuracy" and "right" in result:
            values = decode_numbers(result, "right") / sizes
        elif metric in ("eval_loss", "eval_perplexity") and "losses" in result:
            values = decode_numbers(result, "losses")
        else:
            return None
        return _weigh(values, sizes)

    def _error(self) -> float:
        """The standard error due to the choice of examples, from the intervals of the runs."""
        name = self.metric()
        if not (self.has(f"{name}_low") and self.has(f"{name}_high")):
            return 0.0
        bounds = [[result["metrics"][f"{name}_{bound}"] for bound in ("low", "high")] for result in self.results]
        return float(np.mean([np.ptp(self._transform(np.array(pair))) for pair in bounds])) / (2 * QUANTILE)

    @property
    def mean(self) -> float:
        return self.shown(self.outcomes.mean)

    @cached_property
    def interval(self) -> Interval | None:
        """For other seeds, draws and examples; `None` if seeds or draws are too few to know how they vary."""
        seeds, draws, _ = self.outcomes.values.shape
        if seeds < FEWEST_SEEDS or 1 < draws < FEWEST_SEEDS:
            return None
        interval = bootstrap_mean(self.outcomes)
        return Interval(*(self.shown(value) for value in (interval.mean, interval.low, interval.high)))

    def by_seed(self) -> dict[int | None, float]:
        seeds = dict.fromkeys(result["settings"].get("seed") for result in self.results)
        return dict(zip(seeds, map(self.shown, self.outcomes.values.mean(axis=(1, 2)))))

    def by_draw(self) -> list[float]:
        return [self.shown(value) for value in self.outcomes.values.mean(axis=(0, 2))]

    def number(self, value: float) -> str:
        return f"{100 * value:.1f}" if self.metric() == "eval_accuracy" else f"{value:.3f}"

    def __str__(self) -> str:
        """The mean with its interval if there is one, the single seeds unless they are many, and the range of draws."""
        number, interval = self.number, self.interval
        parts = [number(self.mean)]
        if interval is not None:
            parts[0] += f" ({number(interval.low)} – {number(interval.high)})"
        if self.metric() in METRICS and self.metric() != "eval_accuracy":
            parts[0] = f"{METRICS[self.metric()]} {parts[0]}"
        if 1 < len(seeds := self.by_seed()) < MANY_SEEDS:
            parts.append(", ".join(map(number, seeds.values())))
        draws = [number(bound(self.by_draw())) for bound in (min, max)]
        if draws[0] != draws[1]:
            parts.append(f"draws {draws[0]} – {draws[1]}")
        return "<br>".join(parts)


def _weigh(values: np.ndarray, sizes: np.ndarray | float) -> np.ndarray:
    """Means of documents of so many tokens, or of groups, linearised: their mean is the weighted one."""
    weights = sizes / np.mean(sizes)
    mean = np.mean(weights * values)
    return mean + weights * (values - mean)


# Rows by the names of settings, columns by those of conditions.
Table = dict[str, dict[str, Cell]]


def arrange(results: list[dict[str, Any]], groups: Iterable[int] = ()) -> Table:
    """Cells by the names of settings and of conditions, in the order of the results. Seeds share a cell."""
    table: dict[str, dict[str, Cell]] = defaultdict(lambda: defaultdict(partial(Cell, groups=tuple(groups))))
    shown = distinguishing_settings([result["settings"] for result in results], results[0]["script"])
    for result in results:
        table[method(result["settings"], result["script"], shown)][condition(result["condition"])].results.append(
            result
        )
    return {row: dict(cells) for row, cells in table.items()}


def identity(settings: dict[str, Any]) -> str:
    """The settings that tell a model from others of its sweep: all but seeds."""
    told = {name: value for name, value in settings.items() if name not in SEEDS and value is not None}
    return json.dumps(told, sort_keys=True)


def reader_name(settings: dict[str, Any], script: str, shown: Iterable[str], common: list[str], labels: Labels) -> str:
    """
    A model in its sweep's labels, after its encoding if no label tells it; without labels its [`method`] but for the
    settings that all models have in `common`.
    """
    rest, words = labels.get(identity(settings), (settings, []))
    own = [drop_common(method(rest, script, shown), common)] if not words or "position_encoding" in rest else []
    return ", ".join([*own, *words])


def reader_names(table: Table, labels: Labels, common: list[str]) -> dict[str, str]:
    """
    The rows of [`arrange`] with their names for readers.

    Raises:
        InputError: if two rows have one name.
    """
    first = {row: next(iter(cells.values())).results[0] for row, cells in table.items()}
    settings, script = [result["settings"] for result in first.values()], next(iter(first.values()))["script"]
    shown = distinguishing_settings(settings, script)
    names = {row: reader_name(given, script, shown, common, labels) for row, given in zip(first, settings)}
    for row, name in names.items():
        if list(names.values()).count(name) > 1:
            raise InputError(f"The label {name!r} names {row!r} and another model; accepted: labels that differ.")
    return names


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
    if isinstance(encoding, list):
        return ", ".join([" + ".join(ENCODINGS[name].title for name, _ in encoding), *_named(rest)])
    name = {
        "none": {"clip_finetuning": "Absolute", "language_modeling": "RoPE as it was"}.get(script, "no positions"),
        "absolute": "Absolute",
    }.get(encoding) or (ENCODINGS[encoding].title if encoding in ENCODINGS else encoding)
    if encoding == "none" and rest.pop("pose_columns", None):
        name = "PoseEmbedding"
    elif encoding == "liere":
        name += str(block or 8)
    elif encoding in ENCODINGS and block not in (None, ENCODINGS[encoding].block_sizes.default):
        name += f", block_size {block}"
    return ", ".join([name, *_named(rest)])


def condition(given: dict[str, Any]) -> str:
    """In words: "64 px" for an `image_size` of 64."""
    told = {name: value for name, value in given.items() if name not in SEEDS}
    parts = [
        CONDITIONS[name].format(_shown(told[name])) if name in CONDITIONS else part
        for name, part in zip(told, _named(told))
    ]
    return ", ".join(parts) or AS_TRAINED


def _named(values: dict[str, Any]) -> list[str]:
    return [name if value is True else f"{name} {_shown(value)}" for name, value in values.items()]


def _shown(value: Any) -> str:
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return " + ".join(value)
    if isinstance(value, dict):
        return " and ".join(_named(value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)
