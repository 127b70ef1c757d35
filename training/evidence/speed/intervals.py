"""The median of repeated measurements and its confidence interval."""

import math
import statistics
from typing import NamedTuple


CONFIDENCE = 0.95
# Fewer values give no interval of a median with this confidence.
FEWEST_VALUES = 6
# Largest width of the interval of a resolved share: one percentage point, or this fraction of a large share.
RESOLUTION, RELATIVE_RESOLUTION = 0.01, 0.02


class Estimate(NamedTuple):
    """A median with its confidence interval, or the range of fewer values."""

    median: float
    low: float
    high: float
    count: int

    @property
    def width(self) -> float:
        """Width of the interval; infinite without one."""
        return self.high - self.low if self.count >= FEWEST_VALUES else math.inf

    @property
    def is_resolved(self) -> bool:
        """Whether the interval of a share is narrow enough to report its median."""
        return self.width < max(RESOLUTION, RELATIVE_RESOLUTION * self.median)


def estimate(values: list[float], confidence: float = CONFIDENCE) -> Estimate:
    """
    The median of at least one value, with the narrowest symmetric pair of order statistics that contains the
    distribution's median with a probability of at least `confidence`. For any distribution, the k-th lowest of n values
    exceeds the median with the probability of fewer than k heads in n coin tosses.
    """
    ordered, count = sorted(values), len(values)
    tails = [sum(math.comb(count, heads) for heads in range(k)) / 2**count for k in range(1, count // 2 + 1)]
    k = max(1, sum(tail <= (1 - confidence) / 2 for tail in tails))
    return Estimate(statistics.median(ordered), ordered[k - 1], ordered[count - k], count)
