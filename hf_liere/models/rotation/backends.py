"""
Faster implementations of rotations, for one kind of device each. They live outside of this folder and are registered
from there; without one, as in code that came with a checkpoint, the plain operations of these files run.
"""

import contextlib
import contextvars
from collections.abc import Iterator
from types import ModuleType

import torch


_BACKENDS: list[ModuleType] = []
_backends_are_off = contextvars.ContextVar("_backends_are_off", default=False)


def register_backend(backend: ModuleType) -> None:
    """
    Args:
        backend: Has `NAME`, what reports call it, `refusal(tensor, dtype, block_size)`, why it does not take tensors
            like this one or `None` if it does, and some of the functions `apply_rotation`, `angle_gradients`,
            `planes_backward` (both in one pass), `outer_products`, `block_rotations`, `block_tangents` and
            `moments_gradient`. Where several take a tensor, the one that was registered first does.
    """
    if backend not in _BACKENDS:
        _BACKENDS.append(backend)


@contextlib.contextmanager
def plain_operations() -> Iterator[None]:
    """Plain operations run inside of this context, in this thread."""
    token = _backends_are_off.set(True)
    try:
        yield
    finally:
        _backends_are_off.reset(token)


def find_backend(
    function: str, tensor: torch.Tensor, block_size: int, dtype: torch.dtype | None = None
) -> ModuleType | None:
    """
    The backend that has a function for tensors like this one and blocks of this size, with results in `dtype` (the
    tensor's own if `None`), or `None` where plain operations are to run, as on tensors without elements.
    """
    if _backends_are_off.get() or not tensor.numel():
        return None
    for backend, refusal in refusals(function, tensor, block_size, dtype):
        if refusal is None:
            return backend
    return None


def refusals(
    function: str, tensor: torch.Tensor, block_size: int, dtype: torch.dtype | None = None
) -> Iterator[tuple[ModuleType, str | None]]:
    """
    The backends with the reasons for which they do not take what [`find_backend`] takes; the last one with `None` if it
    does, since no other is asked then.
    """
    for backend in _BACKENDS:
        has_it = hasattr(backend, function)
        refusal = backend.refusal(tensor, dtype or tensor.dtype, block_size) if has_it else "they lack this function"
        yield backend, refusal
        if refusal is None:
            return
