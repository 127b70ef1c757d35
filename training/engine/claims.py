"""One run at a time in a folder: its claim is a locked file, which the system unlocks when the process ends."""

import json
import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from transformers.utils import logging

from hf_liere.errors import InputError
from training.common.folders import CLAIM


try:
    import fcntl
except ImportError:  # Windows
    fcntl = None


logger = logging.get_logger(__name__)

# The open files of this process by folder.
_claims: dict[Path, int] = {}


def claim(folder: Path) -> None:
    """
    Takes a writable folder for a run, until [`release`], the end of a block [`giving_back`] or of the process.

    Raises:
        InputError: if another run, in any process, has it.
    """
    place = folder.resolve()
    while True:
        file = os.open(place / CLAIM, os.O_RDWR | os.O_CREAT)
        is_locked = _lock(file)
        if not is_locked:
            os.close(file)
            break
        if not _is_current(file, place):
            # The run that had it has ended meanwhile, and deleted it.
            os.close(file)
            continue
        about = {"process": os.getpid(), "host": platform.node(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        os.truncate(file, 0)
        os.write(file, json.dumps(about).encode())
        _claims[place] = file
        return
    raise InputError(
        f"--output_dir {str(folder)!r} is that of a run that has not ended{_describe(place)}; accepted: another "
        "folder, or this one when that run has ended."
    )


def release(folder: Path) -> None:
    """Ends the claim of this process, if it has one."""
    place = folder.resolve()
    if place in _claims:
        _release(place, _claims[place])


@contextmanager
def giving_back() -> Iterator[None]:
    """Releases the folders that were taken in a block, or a decorated function, when it ends, also by an error."""
    before = set(_claims)
    try:
        yield
    finally:
        for folder in _claims.keys() - before:
            release(folder)


def _release(place: Path, file: int) -> None:
    if _claims.get(place) == file:
        del _claims[place]
        # Before it is unlocked: whoever waits for it finds that it is gone.
        (place / CLAIM).unlink(missing_ok=True)
        os.close(file)


def _lock(file: int) -> bool:
    """Whether this process has the lock of a file now."""
    try:
        if fcntl is not None:
            # Unlike those of lockf, these locks do not end when anyone in this process reads the file.
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        else:
            import msvcrt

            msvcrt.locking(file, msvcrt.LK_NBLCK, 1)
    except (BlockingIOError, PermissionError):
        return False
    except OSError as error:
        logger.warning(f"Whether other runs use the same output directory is unknown: {error.strerror}.")
    return True


def _leave_to_parent() -> None:
    """In a forked worker, which would keep the lock when its parent is killed."""
    while _claims:
        os.close(_claims.popitem()[1])


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_parent)


def _is_current(file: int, place: Path) -> bool:
    """Whether an open file is still the claim of a folder."""
    try:
        return os.path.samestat(os.fstat(file), os.stat(place / CLAIM))
    except FileNotFoundError:
        return False


def _describe(place: Path) -> str:
    try:
        about = json.loads((place / CLAIM).read_bytes())
        return f" (process {about['process']} on {about['host']}, since {about['since']})"
    except (OSError, ValueError, KeyError, TypeError):
        # It begins or ends at this moment; Windows locks what it contains.
        return ""
