"""Counts for what the host waits for the device: values that it reads or uploads, as far as CPUs show it."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.utils.generic import maybe_autocast

from hf_liere.fast.dispatch import plain_functions


# Values decide the results of such operations, or their shapes.
READS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
# Without such a tag; those of linear algebra read whether they succeeded.
OTHER_READS = {"equal", "_linalg_check_errors", "_linalg_eigh", "_linalg_svd", "linalg_eig", "linalg_matrix_exp"}
# A tensor of Python's numbers: the copy to the device waits for all work before it.
UPLOADS = {"lift_fresh"}
# Methods that copy to the host, and call no operation on a CPU.
COPIES = {torch.Tensor.cpu, torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__}


@contextmanager
def count_waits(compiled: bool = False) -> Iterator[Counter[str]]:
    """
    How often each operation or method was called that waits, in this thread.

    Args:
        compiled: Whether compiled graphs run, which call no methods.
    """
    waits: Counter[str] = Counter()
    with nullcontext() if compiled else _Methods(waits), _Operations(waits):
        yield waits


class _Operations(TorchDispatchMode):
    def __init__(self, waits: Counter[str]):
        super().__init__()
        self.waits = waits

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """True: compiled graphs run under this mode as without it."""
        return True

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        # Operators of ours hide what they call.
        if (plain := plain_functions.get(function.overloadpacket)) is not None:
            with self, maybe_autocast("cpu", enabled=False):
                return plain(*args, **kwargs)
        name = function.overloadpacket.__name__
        if name.startswith(("index", "_index")):
            # A mask decides how many values are taken, or put unless they are all the same.
            waits = _has_mask(args[1]) and (len(args) < 3 or args[2].numel() > 1)
        else:
            waits = name in OTHER_READS | UPLOADS or bool(READS & {*function.tags})
        if waits:
            self.waits[name] += 1
        return function(*args, **kwargs)


def _has_mask(indices: object) -> bool:
    """Whether values are chosen by a mask, not by numbers."""
    return isinstance(indices, list) and any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in indices)


class _Methods(TorchFunctionMode):
    def __init__(self, waits: Counter[str]):
        super().__init__()
        self.waits = waits

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        named = [x for x in (*args, *kwargs.values()) if isinstance(x, str)]
        if function in COPIES or function is torch.Tensor.to and "cpu" in named:
            self.waits[function.__name__] += 1
        return function(*args, **kwargs)
