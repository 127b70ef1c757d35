"""The structures and functions of cpu.cpp for ctypes, with fields and arguments in the order of the C++ headers."""

import ctypes
from collections.abc import Sequence

import torch


# Must equal the version in cpu.cpp.
INTERFACE = 8
# Blocks up to the first size are padded if necessary. Sizes between the two are not supported: padded to the second,
# they are slower than plain operations.
LARGEST_PADDED_SIZE, LARGEST_SIZE = 64, 128


def _fields(kind: type, names: str) -> list[tuple[str, type]]:
    return [(name, kind) for name in names.split()]


class Strides(ctypes.Structure):
    """Strides over samples, heads and tokens."""

    _fields_ = _fields(ctypes.c_int64, "sample head token")


class Pair(ctypes.Structure):
    """Query and key, or their gradients; or only one of them."""

    _fields_ = [("states", ctypes.c_void_p * 2), ("strides", Strides * 2)]


class Shared(ctypes.Structure):
    """Rotations or their gradients, with zero strides over samples or heads that share them."""

    _fields_ = [("values", ctypes.c_void_p), ("strides", Strides)]


class Shape(ctypes.Structure):
    _fields_ = _fields(ctypes.c_int64, "batch heads tokens head_dim blocks rotation_batch size is_bfloat16 states")


class Sizes(ctypes.Structure):
    _fields_ = _fields(ctypes.c_int64, "axes groups blocks size")


class Rays(ctypes.Structure):
    tensors: Sequence[torch.Tensor]
    _fields_ = _fields(ctypes.c_void_p, "tokens squarings offsets saved_squares")
    _fields_ += _fields(ctypes.c_int64, "count longest saved interval step mirror")


class Monomials(ctypes.Structure):
    _fields_ = _fields(ctypes.c_void_p, "coefficients counts raised") + _fields(ctypes.c_int64, "degrees total")


class Values:
    """A contiguous tensor, passed as its address, or a sequence of such tensors, passed as an array of addresses."""

    @staticmethod
    def from_param(values: torch.Tensor | Sequence[torch.Tensor]) -> ctypes.c_void_p | ctypes.Array:
        if isinstance(values, torch.Tensor):
            return ctypes.c_void_p(values.data_ptr())
        return (ctypes.c_void_p * len(values))(*(tensor.data_ptr() for tensor in values))


_POWERS, _RAYS, _STATES, _TURNED, _SHARED = (
    [ctypes.POINTER(structure) for structure in structures]
    for structures in ((Sizes, Monomials), (Sizes, Rays), (Shape, Pair, Pair, Shared), (Pair, Shared), (Shared,))
)
_QUATERNIONS = [ctypes.POINTER(Sizes), ctypes.c_int64, Values, Values]
# Arguments of each kernel before the last one, the number of threads. Kernels return whether memory sufficed.
_KERNELS: dict[str, list] = {
    "block_rotations": [*_RAYS, ctypes.c_int, Values, Values, Values, Values],
    "block_tangents": [*_RAYS, Values, Values, Values],
    "moments_gradient": [*_POWERS, Values, Values, Values],
    "quaternion_rotations": [*_QUATERNIONS, Values],
    "quaternion_gradients": [*_QUATERNIONS, Values, Values],
    "rotate_blocks": [*_STATES, ctypes.c_int],
    "rotate_planes": [*_STATES, ctypes.c_int],
    "outer_products": [*_STATES, *_SHARED],
    "angle_gradients": _STATES,
    "commuting_backward": [*_STATES, *_TURNED, *_SHARED, ctypes.c_int64, Values, Values],
}
ARGUMENTS = {f"hf_liere_{name}": [*arguments, ctypes.c_int] for name, arguments in _KERNELS.items()}
ARGUMENTS["hf_liere_prefer_huge_pages"] = [Values, ctypes.c_int64]
