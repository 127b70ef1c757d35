"""Memory layout of queries, keys and rotations, for the kernels of every device."""

from collections.abc import Sequence

import torch


Tensors = Sequence[torch.Tensor]


def is_planes(rotation: torch.Tensor) -> bool:
    """Whether a rotation is (…, planes, 2) cos and sin, and not (…, blocks, b, b) matrices."""
    return rotation.shape[4:] == (2,)


def contiguous_channels(states: torch.Tensor) -> torch.Tensor:
    """The same values with contiguous channels."""
    # Memory of a negative view contains the values with the opposite sign.
    return (states if states.stride(-1) == 1 else states.contiguous()).resolve_neg()


def empty_like(states: torch.Tensor) -> torch.Tensor:
    """
    An uninitialised result in the layout of `states`, but always dense with contiguous channels, unlike
    `torch.empty_like` of overlapping sliding windows.
    """
    out = torch.empty_like(states)
    return out if out.stride(-1) == 1 else torch.empty_like(states, memory_format=torch.contiguous_format)


def shared_strides(rotation: torch.Tensor) -> tuple[int, ...]:
    """Strides over samples, heads and tokens of (1 or B, 1 or H, N, …); zero over shared samples or heads."""
    return tuple(0 if size == 1 else stride for size, stride in zip(rotation.shape[:3], rotation.stride()))
