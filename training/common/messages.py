"""Phrases that several error messages share."""

import traceback
from collections.abc import Sequence


def reason(error: BaseException) -> str:
    """Class and first line of another library's error; for a dead worker also advice."""
    text = f"{type(error).__name__}: {str(error).splitlines()[0].strip() if str(error) else 'no message'}"
    if not is_lost_worker(error):
        return text
    return (
        f"a data loader worker died ({text}). This happens when memory or shared memory (/dev/shm) is full: try a "
        "smaller --dataloader_num_workers, or 0 for no workers"
    )


def is_lost_worker(error: BaseException) -> bool:
    """Whether a data loader's process died, rather than failed to read an example."""
    if isinstance(error, RuntimeError):
        return str(error).startswith("DataLoader worker (pid")
    modules = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    # The loader may fail to fetch a dead worker's tensors before it notices that the worker died.
    of_loader = "torch.utils.data.dataloader" in modules
    return of_loader and any(name.startswith("multiprocessing.") for name in modules)


def abbreviate(names: Sequence[str]) -> str:
    """The first ten names, and the total number if there are more."""
    return ", ".join(names[:10]) + (f" … ({len(names)})" if len(names) > 10 else "")
