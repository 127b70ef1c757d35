"""Which cases of a test run in every test run, and which only among the slow ones."""

import pytest


def slow_except(fast, cases):
    """`cases`, which are names or tuples that start with one; slow unless `fast` has the name or the whole tuple."""
    tuples = [(case,) if isinstance(case, str) else case for case in cases]
    return [pytest.param(*case, marks=() if case[0] in fast or case in fast else pytest.mark.slow) for case in tuples]
