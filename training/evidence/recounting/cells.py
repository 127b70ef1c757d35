"""
Cells of the tables of results and the tests between them, counted from the stored json lines by other code than the
report's, for recount.py.
"""

import base64
import json
import math
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

import numpy as np
from scipy import stats


# The report's resamples of an interval, how many times as many are made here, and how rarely its bound lies outside.
DRAWS, OWN, RARELY = 5000, 8, 1e-5
# With fewer there are neither intervals nor tests.
FEWEST_SEEDS = 5
WHOLE = ("settings", "condition", "metrics")
# Settings that tell seeds, or the folder of the weights.
UNTOLD = ("seed", "evaluation_seed", "model_name_or_path")
METRICS = ("eval_accuracy", "eval_auc", "eval_map", "eval_perplexity")


def merged(before: dict, changes: dict) -> dict:
    return before | {
        key: merged(before[key], value)
        if key not in WHOLE and isinstance(value, dict) and isinstance(before.get(key), dict)
        else value
        for key, value in changes.items()
    }


def lines_of(path: Path) -> list[dict]:
    """The complete lines of a file whose lines contain what differs from the previous one."""
    lines: list[dict] = []
    for text in path.read_text(encoding="utf-8").splitlines():
        line = json.loads(text)
        lines.append(line if "sweep" in line else merged(lines[-1], line))
    return lines


def told(settings: dict) -> str:
    return json.dumps({k: v for k, v in settings.items() if k not in UNTOLD and v is not None}, sort_keys=True)


def unpacked(text: str, kind: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), kind).astype(float)


class Cell:
    """The lines of one model under one condition: `values` (seeds, draws, examples)."""

    def __init__(self, lines: list[dict], groups: list[int], metric: str | None = None):
        self.lines, self.groups = lines, groups
        self.metric = metric or [name for name in METRICS if name in lines[0]["metrics"]][-1]
        self.scale = 100.0 if self.metric == "eval_accuracy" else 1.0
        runs: dict = {}
        for line in lines:
            runs.setdefault(line["settings"].get("seed"), {})[line["condition"].get("evaluation_seed")] = line
        self.seeds, self.error = list(runs), 0.0
        single = [[self.single(line) for line in draws.values()] for draws in runs.values()]
        lengths = {len(values) if values is not None else 0 for draws in single for values in draws}
        if len({tuple(draws) for draws in runs.values()}) > 1:
            self.values = np.array([[[np.mean([self.plain(line) for line in d.values()])]] for d in runs.values()])
        elif len(lengths) == 1 and 0 not in lengths:
            self.values = np.array(single, float)
        else:
            self.values = np.array([[[self.plain(line)] for line in draws.values()] for draws in runs.values()])
            low, high = ([self.plain(line, end) for line in lines] for end in ("_low", "_high"))
            self.error = float(np.mean(np.subtract(high, low))) / 2 / 1.959964 if None not in low + high else 0.0

    def plain(self, line: dict, end: str = "") -> float | None:
        value = line["metrics"].get(self.metric + end)
        return math.log(value) if self.metric == "eval_perplexity" and value is not None else value

    def single(self, line: dict) -> np.ndarray | None:
        """The values of examples, or of documents and groups: m + w (x − m) has the weighted mean m."""
        if self.metric == "eval_accuracy" and line.get("correct") is not None:
            bits = np.unpackbits(np.frombuffer(base64.b64decode(line["correct"]), np.uint8))[: line["examples"]]
            assert abs(bits.mean() - line["metrics"]["eval_accuracy"]) < 1e-5
            if not self.groups:
                return bits.astype(float)
            sizes = np.array(self.groups, float)
            values = np.array([part.mean() for part in np.split(bits, np.cumsum(self.groups)[:-1])])
        else:
            sizes = unpacked(line["sizes"], "<u4") if "sizes" in line else np.ones(1)
            if self.metric == "eval_accuracy" and "right" in line:
                values = unpacked(line["right"], "<u4") / sizes
            elif self.metric in ("eval_loss", "eval_perplexity") and "losses" in line:
                values = unpacked(line["losses"], "<f2")
            else:
                return None
        weights = sizes * len(sizes) / sizes.sum()
        mean = float((weights * values).sum() / (weights * np.ones_like(values)).sum())
        return mean + weights * (values - mean)

    def shown(self, value: float) -> float:
        if self.metric == "eval_perplexity":
            return math.exp(value)
        return value if self.metric == "eval_loss" else self.scale * min(max(value, 0), 1)

    def difference(self, value: float) -> float:
        return 100 * math.expm1(value) if self.metric == "eval_perplexity" else self.scale * value

    @property
    def mean(self) -> float:
        return self.shown(self.values.mean())

    @property
    def by_seed(self) -> list[float]:
        return [self.shown(seed.mean()) for seed in self.values]

    def durations(self, goal: float) -> list[tuple[int, bool]]:
        found = []
        for line in self.lines:
            samples = line["run"]["examples"]["train"]["samples"]
            reached = [epoch for epoch, accuracy in line["history"] if accuracy >= goal]
            found.append((round((reached or [line["history"][-1][0]])[0] * samples), bool(reached)))
        return found

    def bounds(self) -> list[tuple[float, float]] | None:
        """Between which figures either bound of the 95% interval lies; `None` with few seeds or draws."""
        seeds, draws, examples = self.values.shape
        if seeds < FEWEST_SEEDS or 1 < draws < FEWEST_SEEDS:
            return None
        parts = components(self.values, self.error)
        error, freedom = welch(parts)
        if error == 0:
            return [(self.mean, self.mean)] * 2
        random = np.random.default_rng(77)
        of_seeds = random.multinomial(seeds, [1 / seeds] * seeds, (OWN, DRAWS)) / seeds
        of_draws = random.multinomial(draws, [1 / draws] * draws, (OWN, DRAWS)) / draws
        per_run = (drawn(examples) @ self.values.reshape(-1, examples).T).reshape(DRAWS, seeds, draws)
        means = np.einsum("ors,ord,rsd->or", of_seeds, of_draws, per_run, optimize=True).ravel()
        means = np.sort(means + self.error * random.standard_normal(OWN * DRAWS))
        narrower = welch([(variance * (n / (n + 1) if n < math.inf else 1), n) for variance, n in parts])[0]
        tail = stats.norm.sf(stats.t.isf(0.025, freedom) * error / narrower)
        # Both samples are random: the place of one bound among the other's resamples.
        both = DRAWS * OWN / (1 + OWN)
        places = stats.beta(tail * both + 0.5, (1 - tail) * both + 0.5).ppf([RARELY, 1 - RARELY])
        first, last = (int(place * len(means)) for place in places)
        ends = (means[first], means[last]), (means[-1 - last], means[-1 - first])
        return [(self.shown(low), self.shown(high)) for low, high in ends]


@lru_cache(maxsize=2)
def drawn(examples: int) -> np.ndarray:
    """(draws, examples): the share of each example in a resample."""
    random, counts = np.random.default_rng(examples + 1), np.zeros((DRAWS, examples), np.float32)
    for row in counts:
        row += np.bincount(random.integers(0, examples, examples), minlength=examples)
    return counts.astype(float) / examples


def components(values: np.ndarray, error: float) -> list[tuple[float, float]]:
    """Variances of the mean due to seeds, draws and examples, with degrees of freedom."""
    means = [values.mean(axis=tuple(other for other in range(3) if other != axis)) for axis in range(3)]
    parts = [(float(np.var(some, ddof=1)) / len(some), len(some) - 1) for some in means if len(some) > 1]
    return [*parts, *([(error**2, math.inf)] if error else [])]


def welch(parts: Iterable[tuple[float, float]]) -> tuple[float, float]:
    parts = list(parts)
    total, spread = sum(variance for variance, _ in parts), sum(variance**2 / n for variance, n in parts)
    return math.sqrt(total), total**2 / spread if spread else math.inf


def t_test(cell: Cell, base: Cell, paired: bool, margin: float | None) -> tuple[float, float, float, float]:
    """The difference, its 95% bounds and p."""
    one, other = cell.values, base.values
    if paired:
        seeds = [components((one.mean((1, 2)) - other.mean((1, 2)))[:, None, None], 0)]
    else:
        seeds = [components(values.mean((1, 2))[:, None, None], 0) for values in (one, other)]
    parts = [part for some in seeds for part in some]
    same = one.shape[2] == other.shape[2] and (one.shape[1] == other.shape[1] or 1 in (one.shape[1], other.shape[1]))
    if same and not cell.error + base.error:
        parts += components((one.mean(0) - other.mean(0))[None], 0)
    else:
        parts += [part for some in (cell, base) for part in components(some.values.mean(0)[None], some.error)]
    gap, (error, freedom) = one.mean() - other.mean(), welch(parts)
    if error == 0:
        return gap, gap, gap, float(gap == 0 if margin is None else abs(gap) >= margin)
    reach = stats.t.isf(0.025, freedom) * error
    p = (
        2 * stats.t.sf(abs(gap) / error, freedom)
        if margin is None
        else stats.t.sf((margin - abs(gap)) / error, freedom)
    )
    return gap, gap - reach, gap + reach, float(p)


def fisher(first: list[bool], second: list[bool]) -> float:
    law = stats.hypergeom(len(first) + len(second), sum(first) + sum(second), len(first))
    chances = law.pmf(np.arange(len(first) + 1))
    return float(min(1, chances[chances <= law.pmf(sum(first)) * (1 + 1e-7)].sum()))


def log_rank(first: list[tuple[int, bool]], second: list[tuple[int, bool]]) -> float:
    gap = variance = 0.0
    for time in {time for time, ended in first + second if ended}:
        sizes = [sum(t >= time for t, _ in some) for some in (first, second)]
        ends = [sum(t == time and ended for t, ended in some) for some in (first, second)]
        n, d, share = sum(sizes), sum(ends), sizes[0] / sum(sizes)
        gap += ends[0] - d * share
        variance += d * share * (1 - share) * (n - d) / (n - 1) if n > 1 else 0
    return float(2 * stats.norm.sf(abs(gap) / math.sqrt(variance))) if variance else 1.0
