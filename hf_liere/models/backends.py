"""
Faster implementations of rotations, for one kind of device each. They live outside of this folder and are registered
from there; without one, as in code that came with a checkpoint, the plain operations of these files run.
"""

from types import ModuleType

import torch


_BACKENDS: list[ModuleType] = []


def register_backend(backend: ModuleType) -> None:
    """
    Args:
        backend: Has `is_available(tensor, dtype, block_size)` and some of the functions `apply_rotation`,
            `angle_gradients`, `outer_products`, `block_rotations`, `block_tangents` and `moments_gradient`. Where
            several take a tensor, the one that was registered first does.
    """
    if backend not in _BACKENDS:
        _BACKENDS.append(backend)


def find_backend(
    function: str, tensor: torch.Tensor, block_size: int, dtype: torch.dtype | None = None
) -> ModuleType | None:
    """
    The backend that has a function for tensors like this one and blocks of this size, with results in `dtype` (the
    tensor's own if `None`), or `None` where plain operations are to run, as in graphs that are compiled.
    """
    if torch.compiler.is_compiling():
        return None
    for backend in _BACKENDS:
        if hasattr(backend, function) and backend.is_available(tensor, dtype or tensor.dtype, block_size):
            return backend
    return None
