"""
Leaving the process group of a distributed run.

A thread of Gloo completes a collective before it releases the tensors of that collective, for which it needs Python's
lock. A thread that asks for the lock while Python shuts down is ended by Python (3.13 and older), in the middle of a
C++ destructor, and the process aborts: "terminate called without an active exception". The threads end when the group
is deleted. `destroy_process_group` only drops torch's references to it; these remain:

- Functions whose module was imported while the group existed may have it as a default argument. Some of
  `torch.distributed.nn.functional`, which `DistributedDataParallel` imports, and of `deepspeed.comm` do.
- The model inside `DistributedDataParallel` belongs to cycles, which last until they are collected.
"""

import gc
import sys
from types import FunctionType

from torch import distributed


def leave_process_group() -> None:
    """
    Deletes the process group, if there is one, and waits until its threads have ended.

    Every process calls it when its collectives are complete and nothing refers to its wrapped models any more. A
    process that fails does not: it could wait for others that are gone.
    """
    if not (distributed.is_available() and distributed.is_initialized()):
        return
    group = distributed.group.WORLD
    # DeepSpeed's function also drops DeepSpeed's own references.
    used = sys.modules.get("deepspeed.comm")
    (used if used is not None and used.is_initialized() else distributed).destroy_process_group()
    for function in gc.get_objects():
        if type(function) is FunctionType and any(value is group for value in function.__defaults__ or ()):
            # As if the module had been imported before there was a group.
            function.__defaults__ = tuple(None if value is group else value for value in function.__defaults__)
    del group
    gc.collect()
