"""
Loads the kernels of cpu.cpp, which setup.py builds when the package is installed: a library for each kind of CPU, or in
a checkout the fastest for this one, without those that the compiler cannot build. The structures and functions for
ctypes have fields and arguments in the order of the C++ headers.
"""

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers.utils import logging


logger = logging.get_logger(__name__)

FOLDER = Path(__file__).parent
# For each value of `torch.backends.cpu.get_cpu_capability`, the libraries that run there, the fastest first.
NAMES: dict[str, tuple[str, ...]] = {"AVX512": ("_cpu_avx512", "_cpu_avx2", "_cpu_openmp", "_cpu_portable")}
NAMES["AVX2"] = NAMES["AVX512"][1:]
ON_ANY_CPU = NAMES["AVX512"][2:]
REMEDY = (
    "installing the package builds them if it finds a C++ compiler, GCC or clang (pip install "
    "--force-reinstall --no-deps --no-cache-dir, or pip install -e . in a checkout)"
)

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


def library() -> ctypes.CDLL | None:
    """The fastest usable library of kernels for this CPU; `None` if there is none."""
    return _find()[0]


def failure(block_size: int) -> str | None:
    """Why [`library`] has no kernels for blocks of this size; `None` if it has."""
    reason = _find()[1]
    if reason is None and block_size > LARGEST_PADDED_SIZE and block_size != LARGEST_SIZE:
        return f"they take blocks of at most {LARGEST_PADDED_SIZE} channels and of {LARGEST_SIZE}, not of {block_size}"
    return reason


@functools.cache
def _find() -> tuple[ctypes.CDLL | None, str | None]:
    """Load the fastest usable library, or return why there is none. Warns about libraries that do not load."""
    names = NAMES.get(torch.backends.cpu.get_cpu_capability(), ON_ANY_CPU)
    failures = []
    for path in (path for name in names for path in sorted(FOLDER.glob(f"{name}.*"))):
        try:
            found = _load(path)
        except OSError as error:
            failures.append(f"{path} cannot be used: {error}")
            continue
        if failures:
            logger.warning_once(
                f"Kernels for rotations on the CPU: {'; '.join(failures)}. {path.name} is used instead; {REMEDY}."
            )
        return found, None
    failures = failures or [f"they were not built: {FOLDER} has none for this CPU ({', '.join(names)})"]
    reason = f"{'; '.join(failures)}; {REMEDY}"
    if any(FOLDER.glob("_cpu_*")):
        logger.warning_once(f"Plain operations, which are slower, compute rotations on the CPU: {reason}.")
    return None, reason


def _load(path: Path) -> ctypes.CDLL:
    """Raises `OSError` if the library does not load, was built from other sources, or would abort the process."""
    if b"__kmpc_fork_call" in path.read_bytes() and hasattr(ctypes.CDLL(None), "__kmpc_fork_call"):
        raise OSError("it is linked to LLVM's OpenMP, and a second copy of it would abort this process")
    found = ctypes.CDLL(str(path))
    built = found.hf_liere_interface() if hasattr(found, "hf_liere_interface") else "none"
    if built != INTERFACE:
        raise OSError(f"it was built from other sources (interface {built}, not {INTERFACE})")
    for name, arguments in ARGUMENTS.items():
        getattr(found, name).argtypes = arguments
    return found
