"""
Queries and keys rotated by tensors: the kind of rotation follows from their number of dimensions. And the operators
that run.
"""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_liere.models.rotation.rotation import BlockRotation, PlaneRotation


def rotation_of(rotation):
    """(…, planes, 2) cos and sin, or (…, blocks, b, b) matrices, as a rotation; rotations as they are."""
    if not isinstance(rotation, torch.Tensor):
        return rotation
    return PlaneRotation(rotation) if rotation.ndim == 5 else BlockRotation(rotation)


def rotate_query_key(query, key, rotation):
    return rotation_of(rotation).rotate(query, key)


def rotate(states, rotation):
    return rotate_query_key(states, states, rotation)[0]


class Operators(TorchDispatchMode):
    """
    Notes the operators that run in this context.

    Attributes:
        names: Those of this package, one after the other.
    """

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "hf_liere":
            self.names.append(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))
