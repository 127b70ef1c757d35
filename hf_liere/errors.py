"""Errors that users can fix themselves, and the message that says what to install."""

import importlib.util
import json
import logging
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


# Characters that move the cursor, set the title or the direction of text, or that no terminal can show.
UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")


def printable(text: str, keep: str = "\n\t") -> str:
    """A text for a terminal, with json's escapes of all control characters but `keep`. Names in files contain any."""
    return UNPRINTABLE.sub(lambda found: found[0] if found[0] in keep else json.dumps(found[0])[1:-1], text)


@contextmanager
def printable_messages() -> Iterator[None]:
    """Inside, log records and warnings of all libraries are [`printable`]."""
    make, layout = logging.getLogRecordFactory(), warnings.formatwarning

    def make_record(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = make(*args, **kwargs)
        record.msg, record.args = printable(record.getMessage()), None
        return record

    logging.setLogRecordFactory(make_record)
    warnings.formatwarning = lambda *args, **kwargs: printable(layout(*args, **kwargs))
    try:
        yield
    finally:
        logging.setLogRecordFactory(make)
        warnings.formatwarning = layout


class InputError(ValueError):
    """The request cannot be fulfilled; the message names the value and what is accepted."""

    def __str__(self) -> str:
        return printable(Exception.__str__(self))


class MissingLibraryError(InputError):
    """An optional library is not installed; the message says how to install it."""


def require_libraries(purpose: str, extra: str, *modules: str) -> None:
    """
    Args:
        purpose: What needs the libraries; the message starts with it.
        extra: The optional dependencies in pyproject.toml that install them.
        modules: The names under which they are imported.

    Raises:
        MissingLibraryError: if one of them is not installed.
    """
    if missing := [module for module in modules if importlib.util.find_spec(module) is None]:
        # The package is installed from a checkout or a wheel; it is not on a package index.
        raise MissingLibraryError(
            f"{purpose} needs {' and '.join(missing)}; in a checkout of hf_liere, pip install -e '.[{extra}]' installs "
            f"it, with a wheel pip install 'FILE.whl[{extra}]'."
        )


def memory_shortage(error: Exception) -> str | None:
    """One sentence for an error that reports a lack of memory; `None` for other errors."""
    # On a CPU, and for impossible sizes, torch raises a plain RuntimeError.
    refused = isinstance(error, RuntimeError) and re.search(
        "DefaultCPUAllocator|out of memory|Storage size calculation overflowed", str(error)
    )
    if not refused and not isinstance(error, MemoryError):
        return None
    return (
        "there is not enough memory for what the sizes in config.json (image_size, num_frames, hidden_size …) and "
        f"options ask for; smaller ones are accepted. {' '.join(str(error).split())}"
    ).rstrip()


@contextmanager
def silence(*loggers: str) -> Iterator[None]:
    """Suppress warnings of other libraries where an error of ours reports the same problem."""
    levels = {logging.getLogger(name): logging.getLogger(name).level for name in loggers}
    try:
        for logger in levels:
            logger.setLevel(logging.ERROR)
        yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)
