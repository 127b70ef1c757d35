"""The median of repeated measurements, and the interval that it is known to."""

import math
import statistics
from typing import NamedTuple


CONFIDENCE = 0.95
# From fewer values no interval of a median has this confidence.
FEWEST_VALUES = 6
# The interval of an added share shall be narrower than a percentage point, or than this part of a large share.
RESOLUTION, RELATIVE_RESOLUTION = 0.01, 0.02


class Estimate(NamedTuple):
    """A median, and the interval that contains the median of the distribution; or the range of fewer values."""

    median: float
    low: float
    high: float
    count: int

    @property
    def width(self) -> float:
        """Of the interval; infinite where there is none."""
        return self.high - self.low if self.count >= FEWEST_VALUES else math.inf

    @property
    def is_resolved(self) -> bool:
        """Whether the digits of a share mean anything."""
        return self.width < max(RESOLUTION, RELATIVE_RESOLUTION * self.median)


def estimate(values: list[float]) -> Estimate:
    """
    The median of at least one value with the narrowest pair of order statistics, equally far from both ends, that
    contains the median of the distribution with a probability of `CONFIDENCE` or more: the k-th lowest of n values is
    above it with the probability of fewer than k heads in n tosses of a coin, whatever the distribution is.
    """
    ordered, count = sorted(values), len(values)
    tails = [sum(math.comb(count, heads) for heads in range(k)) / 2**count for k in range(1, count // 2 + 1)]
    k = max(1, sum(tail <= (1 - CONFIDENCE) / 2 for tail in tails))
    return Estimate(statistics.median(ordered), ordered[k - 1], ordered[count - k], count)
