"""The structures and functions of cpu.cpp for ctypes, with fields and arguments in the order of the C++ headers."""

import ctypes

import torch


class Strides(ctypes.Structure):
    """Over samples, heads and tokens."""

    _fields_ = [(name, ctypes.c_int64) for name in ("sample", "head", "token")]


class Pair(ctypes.Structure):
    """Query and key, or their gradients."""

    _fields_ = [("states", ctypes.c_void_p * 2), ("strides", Strides * 2)]


class Shared(ctypes.Structure):
    """Rotations or their gradients, with strides of zero over what samples or heads share."""

    _fields_ = [("values", ctypes.c_void_p), ("strides", Strides)]


class Shape(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("batch", "heads", "tokens", "head_dim", "blocks", "rotation_batch")]


class Sizes(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("axes", "groups", "blocks")]


class Rays(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("tokens", "squarings", "offsets", "saved_squares")),
        *((name, ctypes.c_int64) for name in ("count", "longest", "saved", "interval")),
    ]


class Monomials(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("coefficients", "counts", "raised")),
        *((name, ctypes.c_int64) for name in ("degrees", "total")),
    ]


class Values:
    """A contiguous tensor, passed by its address, or a sequence of them, by the addresses of each."""

    @staticmethod
    def from_param(values):
        if isinstance(values, torch.Tensor):
            return ctypes.c_void_p(values.data_ptr())
        return (ctypes.c_void_p * len(values))(*(tensor.data_ptr() for tensor in values))


_PAIRS = [ctypes.POINTER(structure) for structure in (Shape, Pair, Pair, Shared)]
_RAYS = [ctypes.POINTER(structure) for structure in (Sizes, Rays)]
_MONOMIALS = [ctypes.POINTER(structure) for structure in (Sizes, Monomials)]
# All but the first two return whether there was enough memory for their scratch, and take a number of threads last.
ARGUMENTS = {
    "hf_liere_block_size": [],
    "hf_liere_prefer_huge_pages": [Values, ctypes.c_int64],
    "hf_liere_block_rotations": [*_RAYS, Values, Values, Values, Values, ctypes.c_int],
    "hf_liere_block_tangents": [*_RAYS, Values, Values, Values, ctypes.c_int],
    "hf_liere_moments_gradient": [*_MONOMIALS, Values, Values, Values, ctypes.c_int],
    "hf_liere_rotate_blocks": [*_PAIRS, ctypes.c_int, ctypes.c_int],
    "hf_liere_rotate_planes": [*_PAIRS, ctypes.c_int, ctypes.c_int],
    "hf_liere_outer_products": [*_PAIRS, ctypes.POINTER(Shared), ctypes.c_int],
    "hf_liere_angle_gradients": [*_PAIRS, ctypes.c_int],
}
