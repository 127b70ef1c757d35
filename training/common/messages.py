"""Parts of sentences that several messages have in common."""

import traceback
from collections.abc import Sequence


def reason(error: BaseException) -> str:
    """What an error of another library says: its class and the first line; of a dead worker also what to try."""
    text = f"{type(error).__name__}: {str(error).splitlines()[0].strip() if str(error) else 'no message'}"
    if not is_lost_worker(error):
        return text
    return (
        f"a worker that reads data died ({text}), as they do where memory or shared memory (/dev/shm) is full: try a "
        "smaller --dataloader_num_workers, or 0, which reads data without workers"
    )


def is_lost_worker(error: BaseException) -> bool:
    """Whether an error says that a process of a data loader died, and not that it could not read an example."""
    if isinstance(error, RuntimeError):
        return str(error).startswith("DataLoader worker (pid")
    modules = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    # Tensors of a worker that is gone cannot be fetched any more, which may be noticed before its end is.
    of_loader = "torch.utils.data.dataloader" in modules
    return of_loader and any(name.startswith("multiprocessing.") for name in modules)


def abbreviate(names: Sequence[str]) -> str:
    """The first ten names, and how many there are if that is not all."""
    return ", ".join(names[:10]) + (f" … ({len(names)})" if len(names) > 10 else "")
