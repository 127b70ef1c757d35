"""Fewer cases of many parameters: every two values meet, though not every combination of all values."""

import itertools
from collections.abc import Iterable


def pairwise(*parameters: Iterable) -> list[tuple]:
    """
    Choose rows, with one value of each parameter, such that every two values of any two parameters share a row.

    Greedy: rows that cover the most new pairs come first. The choice depends on nothing but the order of the values.
    """
    product = [frozenset(enumerate(row)) for row in itertools.product(*map(range, map(len, parameters)))]
    pairs = {row: {frozenset(pair) for pair in itertools.combinations(row, 2)} for row in product}
    missing, chosen = set().union(*pairs.values()), set()
    for gain in range(max(map(len, pairs.values())), 0, -1):
        # No row gains more than before, so that one pass for each gain is enough.
        for row in product:
            if len(pairs[row] & missing) >= gain:
                chosen.add(row)
                missing -= pairs[row]
    return [tuple(parameters[p][v] for p, v in sorted(row)) for row in product if row in chosen]
