"""What users can mend themselves: one class of error for it, and the sentence that says what to install."""

import importlib.util
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager


class InputError(ValueError):
    """What the user asked for cannot be done; the message names the value and what is accepted."""


class MissingLibraryError(InputError):
    """An optional library is not installed; the message says how to install it."""


def require_libraries(purpose: str, extra: str, *modules: str) -> None:
    """
    Args:
        purpose: what the libraries are needed for, the beginning of the sentence.
        extra: name of the optional dependencies, in pyproject.toml, that bring them.
        modules: names under which they are imported.

    Raises:
        MissingLibraryError: if one of them is not installed.
    """
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    if missing:
        # The package is installed from a checkout; no registry has it under this name.
        raise MissingLibraryError(
            f"{purpose} needs {' and '.join(missing)}; in a checkout of hf_liere, pip install -e '.[{extra}]' installs "
            "it."
        )


def memory_shortage(error: Exception) -> str | None:
    """A sentence for the errors with which memory is refused, `None` for others."""
    # What torch raises on a CPU, or for sizes beyond all memory, has no class of its own.
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
def quiet(*loggers: str) -> Iterator[None]:
    """Keeps warnings of other libraries back where an error of ours says the same in a sentence."""
    levels = {logging.getLogger(name): logging.getLogger(name).level for name in loggers}
    try:
        for logger in levels:
            logger.setLevel(logging.ERROR)
        yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)
