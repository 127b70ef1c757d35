"""The structures and functions of cpu.cpp for ctypes, with fields and arguments in the order of the C++ headers."""

import ctypes
from collections.abc import Sequence

import torch


# Must equal the version in cpu.cpp.
INTERFACE = 7
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


_POWERS, _RAYS, _STATES, _TURNED = (
    [ctypes.POINTER(structure) for structure in structures]
    for structures in ((Sizes, Monomials), (Sizes, Rays), (Shape, Pair, Pair, Shared), (Pair, Shared))
)
_ANGLES = [ctypes.c_int64, Values, Values]
_QUATERNIONS = [ctypes.POINTER(Sizes), ctypes.c_int64, Values, Values]
# Arguments of each function. Kernels take the number of threads last and return whether memory sufficed.
ARGUMENTS = {
    "hf_liere_prefer_huge_pages": [Values, ctypes.c_int64],
    "hf_liere_block_rotations": [*_RAYS, ctypes.c_int, Values, Values, Values, Values, ctypes.c_int],
    "hf_liere_block_tangents": [*_RAYS, Values, Values, Values, ctypes.c_int],
    "hf_liere_moments_gradient": [*_POWERS, Values, Values, Values, ctypes.c_int],
    "hf_liere_quaternion_rotations": [*_QUATERNIONS, Values, ctypes.c_int],
    "hf_liere_quaternion_gradients": [*_QUATERNIONS, Values, Values, ctypes.c_int],
    "hf_liere_rotate_blocks": [*_STATES, ctypes.c_int, ctypes.c_int],
    "hf_liere_rotate_planes": [*_STATES, ctypes.c_int, ctypes.c_int],
    "hf_liere_outer_products": [*_STATES, ctypes.POINTER(Shared), ctypes.c_int],
    "hf_liere_angle_gradients": [*_STATES, ctypes.c_int],
    "hf_liere_planes_backward": [*_STATES, *_TURNED, ctypes.c_int],
    "hf_liere_commuting_backward": [
        *_STATES,
        *_TURNED,
        ctypes.POINTER(Shared),
        ctypes.c_int64,
        Values,
        Values,
        ctypes.c_int,
    ],
    "hf_liere_reduce_angles": [*_ANGLES, ctypes.c_int],
    "hf_liere_interleave": [*_ANGLES, Values, ctypes.c_int],
    "hf_liere_cos_sin_backward": [*_ANGLES, Values, ctypes.c_int],
}
