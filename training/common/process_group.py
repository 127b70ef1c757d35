"""
Leaving the process group of a distributed run.

A thread of Gloo completes a collective before it releases the tensors of that collective, for which it needs Python's
lock. A thread that asks for the lock while Python shuts down is ended by Python (3.13 and older), in the middle of a
C++ destructor, and the process aborts: "terminate called without an active exception". The threads end when the group
is deleted. `destroy_process_group` only drops torch's references to it; these remain:

- Functions of `torch.distributed.nn.functional` have the group as a default argument if that module is imported
  while the group exists, and `DistributedDataParallel` imports it. Here it is imported before.
- The model inside `DistributedDataParallel` belongs to cycles, which last until they are collected.
"""

import gc

from torch import distributed


if distributed.is_available():
    import torch.distributed.nn.functional  # noqa: F401 (before there is a group)


def leave_process_group() -> None:
    """
    Deletes the process group, if there is one, and waits until its threads have ended.

    Every process calls it when its collectives are complete and nothing refers to its wrapped models any more. A
    process that fails does not: it could wait for others that are gone.
    """
    if distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()
        gc.collect()
