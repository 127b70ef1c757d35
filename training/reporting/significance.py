"""Intervals and tests for the reports: bootstrapped means over runs, and paired tests over the same examples."""

import math
from dataclasses import dataclass

import numpy as np


@dataclass
class Interval:
    mean: float
    low: float
    high: float


@dataclass
class PairedTest:
    """Differences between two models on the same examples; `p_value` is two-sided."""

    difference: Interval
    z: float
    p_value: float


def bootstrap_mean(values: np.ndarray, num_resamples: int = 1000, confidence: float = 0.95, seed: int = 0) -> Interval:
    """
    Mean over runs and examples with the percentile bootstrap of the LieRE paper.

    Examples are drawn with replacement, and with each its results in all runs: several runs on the same examples are
    no larger test set. The interval does not contain the spread of the runs.

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
        ValueError: if the examples are not as many, or only one.
    """
    if first.shape[1:] != second.shape[1:] or first.shape[-1] < 2:
        raise ValueError(f"Results of {first.shape[-1]} and {second.shape[-1]} examples cannot be paired.")
    differences = second.mean(axis=0, dtype=np.float64) - first.mean(axis=0, dtype=np.float64)
    mean, error = differences.mean(), differences.std(ddof=1) / math.sqrt(len(differences))
    if error == 0:
        z, p_value = (0.0, 1.0) if mean == 0 else (math.copysign(math.inf, mean), 0.0)
    else:
        z = mean / error
        p_value = math.erfc(abs(z) / math.sqrt(2))
    # The 97.5% quantile of the normal distribution.
    margin = 1.959963984540054 * error
    return PairedTest(Interval(float(mean), float(mean - margin), float(mean + margin)), float(z), float(p_value))
