"""Calls of somebody's own code that leave it as it is: copies that share no state, and how large their tensors are."""

import contextlib
import copy
import types
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def copy_module(value: Any, memo: dict[int, Any]) -> Any:
    """A copy that shares no state: of a function, also of what it closes over and of the globals that it names."""
    if id(value) in memo:
        return memo[id(value)]
    if not isinstance(value, types.FunctionType):
        try:
            return copy.deepcopy(value, memo)
        except Exception:
            # Modules of Python, locks, open files.
            return value
    scope, cells = dict(value.__globals__), tuple(types.CellType() for _ in value.__closure__ or ())
    memo[id(value)] = copied = types.FunctionType(value.__code__, scope, value.__name__, value.__defaults__, cells)
    copied.__kwdefaults__ = value.__kwdefaults__
    for name in _names(value.__code__) & scope.keys():
        scope[name] = _copy_used(scope[name], memo)
    for cell, own in zip(cells, value.__closure__ or ()):
        with contextlib.suppress(ValueError):
            # An empty cell has no contents.
            cell.cell_contents = _copy_used(own.cell_contents, memo)
    return copied


def _names(code: types.CodeType) -> set[str]:
    inner = [_names(value) for value in code.co_consts if isinstance(value, types.CodeType)]
    return set(code.co_names).union(*inner)


def _copy_used(value: Any, memo: dict[int, Any]) -> Any:
    """A copy that shares the weights of a whole model, of which a function calls but a part."""
    weights = value.parameters() if isinstance(value, nn.Module) else ()
    memo.update({id(weight): weight for weight in weights if weight.numel() > 2**20})
    return copy_module(value, memo)


class TensorSizes(TorchDispatchMode):
    """Remembers how large the largest tensor is that is made."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made = [x.numel() for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
        self.largest = max([self.largest, *made])
        return result
