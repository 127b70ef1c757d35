"""
Intervals and tests for the reports. Seeds, draws of an evaluation and examples are random and crossed: every run of
every seed answers the same examples. What is said of a model is meant for other seeds, draws and examples.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from scipy import stats


# With fewer seeds there are neither intervals nor tests.
FEWEST_SEEDS = 5
# With fewer seeds shares of seeds are not tested: of two groups of five, only 5 and at most 1 would differ at 5%.
# Nor are the accuracies of runs between guessing and all: they are far from normal, as t-tests of few seeds need them.
FEWEST_SEEDS_OF_SHARES = 20
RESAMPLES = 5000
LEVEL = 0.05


@dataclass(frozen=True)
class Interval:
    """A mean and the bounds of its 95% interval."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Test:
    """
    Attributes:
        difference: of the second model from the first; for shares and durations without an interval.
        p_value: two-sided, but for tests of equivalence.
    """

    difference: Interval
    p_value: float


@dataclass(frozen=True)
class Outcomes:
    """
    What one model answers under one condition.

    Attributes:
        values: (seeds, draws, examples). There is one draw unless the evaluation draws an offset, and one "example",
            the mean of all, if results of single examples were not stored.
        error: the standard error of the mean due to the choice of examples, if there is only their mean.
    """

    values: np.ndarray
    error: float = 0.0

    @property
    def mean(self) -> float:
        return float(self.values.mean())

    def variances(self) -> list[tuple[float, float]]:
        """The variance of the mean, and the degrees of freedom of its estimate, due to seeds, draws and examples."""
        seeds, rest = _variance(self.values.mean(axis=(1, 2))), _shared_variances(self.values.mean(axis=0))
        return [seeds, *rest, *([(self.error**2, math.inf)] if self.error else [])]

    def error_of_examples(self) -> float:
        """The standard error of the mean due to the choice of examples, for these seeds and draws."""
        means = self.values.mean(axis=(0, 1))
        return math.sqrt(_variance(means)[0]) if len(means) > 1 else self.error


def _variance(means: np.ndarray) -> tuple[float, float]:
    """The variance of the mean of independent `means`, and its degrees of freedom."""
    return float(means.var(ddof=1)) / len(means), len(means) - 1.0


def _shared_variances(means: np.ndarray) -> list[tuple[float, float]]:
    """The variances of draws and of examples, from means over seeds (draws, examples)."""
    return [_variance(means.mean(axis=1 - axis)) for axis in (0, 1) if means.shape[axis] > 1]


def _combine(variances: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """The standard error of a sum of independent terms, and its degrees of freedom (Welch and Satterthwaite)."""
    variances = list(variances)
    total = sum(variance for variance, _ in variances)
    spread = sum(variance**2 / freedom for variance, freedom in variances)
    return math.sqrt(total), total**2 / spread if spread else math.inf


@lru_cache(maxsize=4)
def _drawn(count: int) -> np.ndarray:
    """(resamples, count): how often each of `count` is drawn."""
    generator = np.random.default_rng(count)
    counts = np.empty((RESAMPLES, count), np.uint8)
    for row in counts:
        row[:] = np.bincount(generator.integers(count, size=count), minlength=count)
    return counts


def bootstrap_mean(outcomes: Outcomes) -> Interval:
    """
    The mean with its 95% percentile bootstrap: seeds are drawn with replacement, then draws, then examples.

    Percentiles of few seeds are too narrow: resamples of n vary as if they were n − 1, and their variance is an
    estimate. They are expanded by as much (Hesterberg 2015, "What Teachers Should Know about the Bootstrap").
    """
    seeds, draws, examples = outcomes.values.shape
    (error, freedom), mean = _combine(outcomes.variances()), outcomes.mean
    if error == 0:
        return Interval(mean, mean, mean)
    generator = np.random.default_rng(0)
    weights = generator.multinomial(seeds, np.full(seeds, 1 / seeds), RESAMPLES)[:, :, None]
    weights = weights * generator.multinomial(draws, np.full(draws, 1 / draws), RESAMPLES)[:, None]
    flat, totals = outcomes.values.reshape(-1, examples).astype(np.float64), np.empty(RESAMPLES)
    for start in range(0, RESAMPLES, 500):
        chunk = slice(start, start + 500)
        # In float64 sums of 0 and 1 are exact in any order.
        of_runs = _drawn(examples)[chunk].astype(np.float64) @ flat.T  # (resamples, seeds · draws)
        totals[chunk] = (weights[chunk].reshape(len(of_runs), -1) * of_runs).sum(axis=1)
    means = totals / outcomes.values.size + outcomes.error * generator.standard_normal(RESAMPLES)
    resampled, _ = _combine(
        (variance * (1 if math.isinf(n) else n / (n + 1)), n) for variance, n in outcomes.variances()
    )
    tail = float(stats.norm.sf(stats.t.isf(LEVEL / 2, freedom) * error / resampled))
    low, high = np.quantile(means, [tail, 1 - tail], method="inverted_cdf")
    return Interval(mean, float(low), float(high))


def exceeds(outcomes: Outcomes, bound: float) -> bool:
    """Whether the mean for other seeds, draws and examples exceeds `bound`, by a t-test at the level of three sigma."""
    error, freedom = _combine(outcomes.variances())
    return outcomes.mean - bound > float(stats.t(freedom).isf(stats.norm.sf(3))) * error


def compare(first: Outcomes, second: Outcomes, margin: float | None = None, paired_seeds: bool = False) -> Test:
    """
    t-test of the mean of `second - first`, for other seeds, draws and examples. Draws and examples are paired.

    Args:
        paired_seeds: a seed does the same to both: the same models were evaluated twice, or models start with equal
            outputs and see equal batches. From random weights, what it does to one model says nothing of another.
        margin: test instead whether the difference is smaller than this, by two one-sided tests (TOST).
    """
    variances = [_variance(one.values.mean(axis=(1, 2))) for one in (first, second)]
    if paired_seeds:
        variances = [_variance(second.values.mean(axis=(1, 2)) - first.values.mean(axis=(1, 2)))]
    (draws, examples), (other_draws, other_examples) = (one.values.shape[1:] for one in (first, second))
    # Without an offset there is one draw, which is beside each of the others.
    paired = examples == other_examples and (draws == other_draws or 1 in (draws, other_draws))
    if paired and not first.error + second.error:
        variances += _shared_variances(second.values.mean(axis=0) - first.values.mean(axis=0))
    else:
        variances += [part for one in (first, second) for part in one.variances()[1:]]
    mean, (error, freedom) = second.mean - first.mean, _combine(variances)
    if error == 0:
        p_value = mean == 0 if margin is None else abs(mean) >= margin
        return Test(Interval(mean, mean, mean), float(p_value))
    distribution = stats.t(freedom)
    reach = float(distribution.isf(LEVEL / 2)) * error
    p_value = (
        2 * distribution.sf(abs(mean) / error) if margin is None else distribution.sf((margin - abs(mean)) / error)
    )
    return Test(Interval(mean, mean - reach, mean + reach), float(p_value))


def share(solved: int, seeds: int) -> Interval:
    """The share of seeds that solve a task with Clopper and Pearson's interval, exact for any number of seeds."""
    bounds = stats.binomtest(solved, seeds).proportion_ci(1 - LEVEL, method="exact")
    return Interval(solved / seeds, float(bounds.low), float(bounds.high))


def compare_shares(first: Sequence[bool], second: Sequence[bool]) -> Test:
    """Fisher's exact test of the shares of seeds that solve a task."""
    counts = [[sum(some), len(some) - sum(some)] for some in (first, second)]
    difference = float(np.mean(second) - np.mean(first))
    return Test(Interval(difference, math.nan, math.nan), float(stats.fisher_exact(counts).pvalue))


Duration = tuple[float, bool]


def compare_durations(first: Sequence[Duration], second: Sequence[Duration]) -> Test:
    """Log-rank test of durations, each with whether it ended because the goal was reached."""
    difference = float(np.mean([time for time, _ in second]) - np.mean([time for time, _ in first]))
    censored = [
        stats.CensoredData([time for time, ended in some if ended], right=[time for time, ended in some if not ended])
        for some in (first, second)
    ]
    p_value = math.nan
    if any(ended for _, ended in (*first, *second)):
        with np.errstate(invalid="ignore"):
            p_value = float(stats.logrank(*censored).pvalue)
    # Undefined if no seed reaches the goal, or all at the same time.
    return Test(Interval(difference, math.nan, math.nan), 1.0 if math.isnan(p_value) else p_value)


def holm(p_values: Sequence[float]) -> list[float]:
    """
    Corrects p-values for their number by Holm's method (1979). The probability of any false rejection at a level is at
    most that level, for any dependence.
    """
    order = np.argsort(p_values, kind="stable")
    scaled = np.arange(len(order), 0, -1) * np.array(p_values)[order]
    corrected = np.empty(len(order))
    corrected[order] = np.maximum.accumulate(np.minimum(1.0, scaled))
    return corrected.tolist()
