"""Numbers that code needs as tensors."""

import functools
from collections.abc import Sequence

import torch

from .dispatch import values_are_unknown


def constant(values: Sequence, like: torch.Tensor) -> torch.Tensor:
    """Numbers, in tuples, of the type and device of a tensor: made once, as copies to a device wait, and only read."""
    # In a graph it would be fake.
    if values_are_unknown(like):
        return like.new_tensor(values)
    return device_constant(values, like.dtype, like.device)


@functools.lru_cache(maxsize=256)
def device_constant(values: Sequence, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Numbers on a device, copied there once: the capture of a CUDA graph allows no copy. For use inside operators."""
    # Training cannot use tensors that inference mode made.
    with torch.inference_mode(False):
        return torch.tensor(values, dtype=dtype, device=device)
