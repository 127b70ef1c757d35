"""Calls of somebody else's code, whose arguments are not known."""

import contextlib
from collections.abc import Callable, Iterable
from typing import Any


def first_that_works(call: Callable[[Any], Any], ways: Iterable) -> Any:
    """
    What `call` returns for the first of some ways with which it does not fail and returns something; else `None`. With
    other arguments than those of its model, code of any kind fails in any way.
    """
    for way in ways:
        with contextlib.suppress(Exception):
            result = call(way)
            if result is not None:
                return result
    return None
