"""
Loads the kernels of cpu.cpp, which are built when the package is installed: pyproject.toml declares a library for each
kind of CPU, and the installation skips those that the compiler cannot build.
"""

import ctypes
import functools
from pathlib import Path

import torch
from transformers.utils import logging

from .cpu_interface import ARGUMENTS, INTERFACE, LARGEST_PADDED_SIZE, LARGEST_SIZE


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
    if not failures:
        return None, f"they were not built: {FOLDER} has none for this CPU ({', '.join(names)}); {REMEDY}"
    reason = f"{'; '.join(failures)}; {REMEDY}"
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
