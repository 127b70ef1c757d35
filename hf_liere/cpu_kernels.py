"""
Rotations, their gradients and their application on CPUs, compiled from cpu_kernels.cpp by the C++ compiler of the
machine when they are first needed. Never needed: where there is no compiler, no such file (in code that came with a
checkpoint) or another type than float32, the plain operations do the same, several times slower for small blocks.

Libraries are kept in `hf_liere` in the user's cache directory, one for each block size, source, compiler and kind of
CPU. HF_LIERE_CPU_KERNELS=0 in the environment leaves them alone.
"""

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path
from types import SimpleNamespace

import torch
from torch.utils._python_dispatch import is_in_torch_dispatch_mode
from transformers.utils import logging

from .triton_kernels import empty_like, rows


logger = logging.get_logger(__name__)

SOURCE = Path(__file__).with_suffix(".cpp")
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fno-math-errno", "-fopenmp", "-shared", "-fPIC")
# In seconds; a few are usual.
COMPILE_TIMEOUT = 120
# Two huge pages of the usual 2 MiB, of which at least one is whole.
HUGE_BYTES = 1 << 22


class _Steps(ctypes.Structure):
    _fields_ = [("sample", ctypes.c_int64), ("head", ctypes.c_int64), ("token", ctypes.c_int64)]


class _Pair(ctypes.Structure):
    _fields_ = [("states", ctypes.c_void_p * 2), ("steps", _Steps * 2)]


class _Shape(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("batch", "heads", "tokens", "head_dim", "blocks", "rotation_batch")]


def is_available(tensor: torch.Tensor, dtype: torch.dtype, block_size: int) -> bool:
    """
    Whether the kernels take tensors like this one on the CPU for results in `dtype`; they may be compiled for that now.

    Subclasses, such as those that only pretend to hold numbers or hold a part of them, are left to plain operations,
    and so is everything where operations are watched, to be traced or counted.
    """
    if torch.jit.is_tracing() or is_in_torch_dispatch_mode():
        return False
    if tensor.device.type != "cpu" or dtype != torch.float32 or type(tensor) is not torch.Tensor:
        return False
    return os.environ.get("HF_LIERE_CPU_KERNELS", "1") != "0" and _library(block_size) is not None


@functools.cache
def _library(block_size: int) -> ctypes.CDLL | None:
    compiler = shlex.split(os.environ.get("CXX") or "g++")
    if shutil.which(compiler[0]) is None or not SOURCE.is_file() or os.name != "posix":
        logger.info(
            "Rotations on the CPU are computed by plain operations: there is no %s, or no %s.", compiler[0], SOURCE.name
        )
        return None
    command = [*compiler, *FLAGS, f"-DBLOCK_SIZE={block_size}"]
    try:
        path = _directory() / f"cpu_kernels-{block_size}-{_digest(command)}.so"
        if not path.is_file():
            _compile(command, path)
        return ctypes.CDLL(str(path))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        reason = (getattr(error, "stderr", None) or str(error)).strip()
        logger.warning(
            "Rotations on the CPU are computed by plain operations, which are slower, because %s did not compile or "
            "load: %s",
            SOURCE.name,
            reason[-2000:],
        )
        return None


def _directory() -> Path:
    directory = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hf_liere"
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    return directory


def _digest(command: list[str]) -> str:
    """What a library depends on: a home directory may be shared by machines of several kinds."""
    version = _run([*command, "--version"])
    information = Path("/proc/cpuinfo")
    lines = information.read_text().split("\n\n")[0].splitlines() if information.is_file() else []
    kinds = ("flags", "Features", "model name", "CPU implementer", "CPU part")
    cpu = [platform.machine(), *(line for line in lines if line.startswith(kinds))]
    return hashlib.sha256("\n".join([SOURCE.read_text(), *command, version, *cpu]).encode()).hexdigest()[:16]


def _compile(command: list[str], path: Path) -> None:
    # Several processes may come here at once; none may load half a file.
    descriptor, unfinished = tempfile.mkstemp(suffix=".so", dir=path.parent)
    os.close(descriptor)
    try:
        _run([*command, "-o", unfinished, str(SOURCE)])
        os.replace(unfinished, path)
    except BaseException:
        os.unlink(unfinished)
        raise


def _run(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=COMPILE_TIMEOUT).stdout


def apply_rotation(
    query: torch.Tensor, key: torch.Tensor, rotation: torch.Tensor, inverse: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """As [`triton_kernels.apply_rotation`], on CPUs."""
    query, key, rotation = rows(query), rows(key), _blocks(rotation)
    size = 2 if rotation.ndim == 5 else rotation.shape[-1]
    out = _prefer_huge_pages(empty_like(query), size), _prefer_huge_pages(empty_like(key), size)
    name = "hf_liere_turn_planes" if rotation.ndim == 5 else "hf_liere_multiply"
    _call(size, name, _shape(query, rotation.shape), _pair((query, key)), _pair(out), *_shared(rotation), inverse)
    return out


def angle_gradients(gradients, rotated, shape: torch.Size) -> torch.Tensor:
    """As [`triton_kernels.angle_gradients`], on CPUs."""
    gradients, rotated = [rows(each) for each in gradients], [rows(each) for each in rotated]
    shapes = _shape(rotated[0], shape)
    out = _empty(2, shape[0], shape[2], rotated[0].shape[1], shape[3]).transpose(1, 2)
    _call(2, "hf_liere_angle_gradients", shapes, _pair(gradients), _pair(rotated), *_shared(out))
    return out.sum_to_size(shape)


def outer_products(
    gradients, rotated, shape: torch.Size, block_size: int, rotation: torch.Tensor | None = None
) -> torch.Tensor:
    """As [`triton_kernels.outer_products`], on CPUs."""
    gradients, rotated = [rows(each) for each in gradients], [rows(each) for each in rotated]
    out = _empty(block_size, shape[0], shape[2], rotated[0].shape[1], shape[3], block_size, block_size)
    out = out.transpose(1, 2)
    factor = (None, None) if rotation is None else _shared(_blocks(rotation))
    states = _pair(gradients), _pair(rotated)
    _call(block_size, "hf_liere_outer_products", _shape(rotated[0], shape), *states, *_shared(out), *factor)
    return out.sum_to_size(*shape, block_size, block_size)


def block_rotations(
    positions: torch.Tensor,
    generators: torch.Tensor,
    rays: torch.Tensor,
    squarings: torch.Tensor,
    polynomial: tuple[tuple[float, ...], ...],
    kept_squares: int | None,
) -> tuple[tuple[torch.Tensor, ...], torch.Tensor | None, torch.Tensor]:
    """
    The rotations of [`lie_algebra.layer_block_rotations`], in float32 from products in float64.

    Args:
        positions: (P, A) in float64.
        generators: (A, G, K, b, b).
        rays: (rays, longest ray), see [`lie_algebra.Rays`].
        squarings: (rays,), how often each ray's first rotation is squared.
        polynomial: [`lie_algebra.POLYNOMIAL`].
        kept_squares: The first and every so many further squares are kept for the backward pass, or `None` for none.

    Returns:
        For each of the G groups (P, K, b, b); what was kept, and from where on for each ray.
    """
    groups, blocks, size = generators.shape[1:4]
    positions, generators = positions.contiguous(), generators.to(torch.float64).contiguous()
    rays, squarings = rays.contiguous(), squarings.contiguous()
    coefficients = torch.tensor(polynomial, dtype=torch.float64, device="cpu")
    rotations = tuple(_empty(size, len(positions), blocks, size, size) for _ in range(groups))
    counts = (squarings + (kept_squares or 1) - 1) // (kept_squares or 1)
    slots = counts.cumsum(0) - counts
    kept = None if kept_squares is None else _empty(size, groups, int(counts.sum()), blocks, size, size)
    _call(
        size,
        "hf_liere_rotations",
        positions,
        generators,
        *_sizes(len(generators), groups, blocks, len(positions)),
        *_rays(rays, squarings, slots, kept, kept_squares),
        coefficients,
        rotations,
    )
    return rotations, kept, slots


def block_turns(
    rotations: tuple[torch.Tensor, ...],
    gradients: tuple[torch.Tensor, ...],
    rays: torch.Tensor,
    squarings: torch.Tensor,
    kept: torch.Tensor,
    slots: torch.Tensor,
    kept_squares: int,
) -> torch.Tensor:
    """
    What is handed to [`exponential_gradient.GradientMoments`] for rotations of [`block_rotations`].

    Args:
        rotations: (P, K, b, b) for each of G groups.
        gradients: Their gradients, likewise.

    Returns:
        (G, rays, K·b(b−1)/2).
    """
    _, blocks, size, _ = rotations[0].shape
    gradients = tuple(gradient.contiguous() for gradient in gradients)
    rays, squarings = rays.contiguous(), squarings.contiguous()
    entries = _empty(size, len(rotations), len(rays), blocks * (size * (size - 1) // 2))
    _call(
        size,
        "hf_liere_turns",
        *_sizes(len(rotations), blocks),
        *_rays(rays, squarings, slots, kept, kept_squares),
        rotations,
        gradients,
        entries,
    )
    return entries


def moments_gradient(
    generators: torch.Tensor, moments: torch.Tensor, coefficients: tuple[float, ...], raised: list[list[list[int]]]
) -> torch.Tensor:
    """
    [`exponential_gradient.GradientMoments.generators_gradient`].

    Args:
        generators: (A, G, K, b, b) in float32.
        moments: (G, monomials, K·b(b−1)/2).
        coefficients: One for each degree of the monomials, from 1 on.
        raised: For each degree but the last and each axis, the places of the monomials that are x_a times as high.

    Returns:
        (A, G, K, b, b).
    """
    axes, groups, blocks, size, _ = generators.shape
    generators, moments, out = generators.contiguous(), moments.contiguous(), _empty(size, *generators.shape)
    sizes = [len(level[0]) for level in raised]
    sizes.append(moments.shape[1] - sum(sizes))
    _call(
        size,
        "hf_liere_moments_gradient",
        generators,
        *_sizes(axes, groups, blocks),
        moments,
        *_sizes(moments.shape[1]),
        torch.tensor(coefficients, dtype=torch.float64, device="cpu"),
        *_sizes(len(sizes)),
        torch.tensor(sizes, device="cpu"),
        torch.tensor(
            [place for level in raised for places in level for place in places], dtype=torch.long, device="cpu"
        ),
        out,
    )
    return out


def _call(block_size: int, name: str, *arguments) -> None:
    """Tensors, sequences of them and structures are passed by their addresses, bools as int, and `None` as null."""
    passed = []
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            argument = ctypes.c_void_p(argument.data_ptr())
        elif isinstance(argument, (tuple, list)):
            argument = (ctypes.c_void_p * len(argument))(*(tensor.data_ptr() for tensor in argument))
        elif isinstance(argument, ctypes.Structure):
            argument = ctypes.byref(argument)
        elif isinstance(argument, bool):
            argument = ctypes.c_int(argument)
        passed.append(argument)
    getattr(_library(block_size), name)(*passed, ctypes.c_int(torch.get_num_threads()))


def _empty(block_size: int, *shape: int) -> torch.Tensor:
    """float32 on the CPU, whatever the process has as its default type and device."""
    return _prefer_huge_pages(torch.empty(shape, dtype=torch.float32, device="cpu"), block_size)


def _prefer_huge_pages(tensor: torch.Tensor, block_size: int) -> torch.Tensor:
    if tensor.nbytes >= HUGE_BYTES:
        _call(block_size, "hf_liere_prefer_huge_pages", tensor, *_sizes(tensor.nbytes))
    return tensor


def _sizes(*sizes: int) -> list[ctypes.c_int64]:
    return [ctypes.c_int64(size) for size in sizes]


def _rays(rays, squarings, slots, kept, kept_squares) -> list:
    kept_count = 0 if kept is None else kept.shape[1]
    return [rays, *_sizes(*rays.shape), squarings, slots, kept, *_sizes(kept_count, kept_squares or 1)]


def _blocks(rotation: torch.Tensor) -> torch.Tensor:
    """float32, with the blocks of a token and head, or its planes, one after the other in memory."""
    rotation = rotation.to("cpu", torch.float32)
    return rotation if rotation[0, 0, 0].is_contiguous() else rotation.contiguous()


def _shape(states: torch.Tensor, rotations: torch.Size) -> _Shape:
    batch, heads, tokens, _ = states.shape
    if rotations[0] not in (1, batch) or rotations[1] not in (1, heads) or rotations[2] != tokens:
        raise ValueError(
            f"Rotations of shape {tuple(rotations)} do not fit queries and keys of shape {tuple(states.shape)}: they "
            f"must be for 1 or {batch} samples, 1 or {heads} heads and {tokens} tokens."
        )
    return _Shape(*states.shape, rotations[3], rotations[0])


def _pair(tensors) -> _Pair:
    pair, (first, second) = _Pair(), tensors
    if first.shape != second.shape or first.dtype != second.dtype:
        raise ValueError(
            f"Query and key must be alike; they are {tuple(first.shape)} in {first.dtype} and {tuple(second.shape)} in "
            f"{second.dtype}."
        )
    for which, tensor in enumerate(tensors):
        pair.states[which] = tensor.data_ptr()
        pair.steps[which] = _Steps(*tensor.stride()[:3])
    return pair


def _shared(rotation: torch.Tensor) -> tuple[torch.Tensor, _Steps]:
    """With steps of zero over what samples or heads share."""
    steps = [0 if size == 1 else step for size, step in zip(rotation.shape[:3], rotation.stride())]
    return rotation, _Steps(*steps)


# Under one name, because code that comes with a checkpoint cannot import a module as a whole.
CPU_KERNELS = SimpleNamespace(
    is_available=is_available,
    apply_rotation=apply_rotation,
    angle_gradients=angle_gradients,
    outer_products=outer_products,
    block_rotations=block_rotations,
    block_turns=block_turns,
    moments_gradient=moments_gradient,
)
