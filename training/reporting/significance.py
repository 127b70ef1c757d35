"""Intervals and tests for the reports: bootstrapped means over runs, and paired tests over examples and over seeds."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats


@dataclass
class Interval:
    mean: float
    low: float
    high: float


@dataclass
class PairedTest:
    """Difference between two models on the same examples or seeds, its z or t statistic and two-sided `p_value`."""

    difference: Interval
    statistic: float
    p_value: float


def bootstrap_mean(values: np.ndarray, num_resamples: int = 1000, confidence: float = 0.95, seed: int = 0) -> Interval:
    """
    Mean over runs and examples with the percentile bootstrap of the LieRE paper.

    Examples are drawn with replacement together with their results in all runs, because several runs on the same
    examples do not make a larger test set. The interval does not include the spread between runs.

    Args:
        values: (runs, examples).
    """
    of_example = values.mean(axis=0, dtype=np.float64)
    generator = np.random.default_rng(seed)
    count = len(of_example)
    means = [of_example[generator.integers(count, size=count)].mean() for _ in range(num_resamples)]
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
    return Interval(float(of_example.mean()), float(low), float(high))


def paired_test(first: np.ndarray, second: np.ndarray) -> PairedTest:
    """
    Paired z-test of the mean of `second - first` over examples (LieRE, Tables 2 and 7).

    Args:
        first, second: (runs, examples), the same examples in the same order. Runs are averaged.

    Raises:
        ValueError: if the numbers of examples differ or are below two.
    """
    if first.shape[1:] != second.shape[1:] or first.shape[-1] < 2:
        raise ValueError(f"Results of {first.shape[-1]} and {second.shape[-1]} examples cannot be paired.")
    return _test_differences(second.mean(axis=0, dtype=np.float64) - first.mean(axis=0, dtype=np.float64), stats.norm)


def paired_test_over_seeds(first: np.ndarray, second: np.ndarray) -> PairedTest:
    """
    Paired t-test of the mean of `second - first` over seeds. It generalises to other seeds (initial weights, order of
    examples), whereas [`paired_test`] generalises to other examples for the same trained models.

    Args:
        first, second: (seeds,) figures of the same seeds in the same order.

    Raises:
        ValueError: if the numbers of seeds differ or are below two.
    """
    if first.shape != second.shape or first.ndim != 1 or len(first) < 2:
        raise ValueError(f"Figures of {first.shape} and {second.shape} seeds cannot be paired.")
    return _test_differences(second.astype(np.float64) - first, stats.t(len(first) - 1))


def _test_differences(differences: np.ndarray, distribution) -> PairedTest:
    mean, error = float(differences.mean()), float(differences.std(ddof=1)) / math.sqrt(len(differences))
    if error == 0:
        statistic, p_value = (0.0, 1.0) if mean == 0 else (math.copysign(math.inf, mean), 0.0)
    else:
        statistic = mean / error
        p_value = 2 * float(distribution.sf(abs(statistic)))
    margin = float(distribution.ppf(0.975)) * error
    return PairedTest(Interval(mean, mean - margin, mean + margin), statistic, p_value)


def holm(p_values: Sequence[float]) -> list[float]:
    """
    Corrects p-values for their number by Holm's method (1979). The probability of any false rejection at a level is at
    most that level, for any dependence.
    """
    order = np.argsort(p_values, kind="stable")
    corrected, largest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        corrected[index] = largest
    return corrected
