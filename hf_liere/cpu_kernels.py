"""
Rotations, their gradients and their application on CPUs, compiled from cpu_kernels.cpp by the C++ compiler of the
machine when they are first needed, see `cpu_library`. Never needed: where there is no compiler, no such file (in code
that came with a checkpoint) or another type than float32, the plain operations do the same, several times slower for
small blocks. HF_LIERE_CPU_KERNELS=0 in the environment leaves the kernels alone.
"""

import ctypes
import os
from types import SimpleNamespace

import torch
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from .cpu_library import library
from .triton_kernels import empty_like, rows


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
    return os.environ.get("HF_LIERE_CPU_KERNELS", "1") != "0" and library(block_size) is not None


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
    rays, squarings = _checked_rays(rays, squarings, len(positions))
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
    rays, squarings = _checked_rays(rays, squarings, len(rotations[0]))
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
    """
    Tensors, sequences of them and structures are passed by their addresses, bools as int, and `None` as null.

    Raises:
        MemoryError: if the kernel found too little memory for its scratch.
    """
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
    if not getattr(library(block_size), name)(*passed, ctypes.c_int(torch.get_num_threads())):
        raise MemoryError(f"There is too little memory for {name} with {torch.get_num_threads()} threads.")


def _empty(block_size: int, *shape: int) -> torch.Tensor:
    """float32 on the CPU, whatever the process has as its default type and device."""
    return _prefer_huge_pages(torch.empty(shape, dtype=torch.float32, device="cpu"), block_size)


def _prefer_huge_pages(tensor: torch.Tensor, block_size: int) -> torch.Tensor:
    if tensor.nbytes >= HUGE_BYTES:
        _call(block_size, "hf_liere_prefer_huge_pages", tensor, *_sizes(tensor.nbytes))
    return tensor


def _sizes(*sizes: int) -> list[ctypes.c_int64]:
    return [ctypes.c_int64(size) for size in sizes]


def _checked_rays(rays: torch.Tensor, squarings: torch.Tensor, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Contiguous and int64. A token beyond the last would be written to all the same."""
    if rays.ndim != 2 or squarings.shape != rays.shape[:1]:
        raise ValueError(
            f"Rays must be (rays, longest ray) and squarings (rays,); they are {tuple(rays.shape)} and "
            f"{tuple(squarings.shape)}."
        )
    rays, squarings = (tensor.to("cpu", torch.int64).contiguous() for tensor in (rays, squarings))
    if len(rays) and (rays.shape[1] == 0 or rays[:, 0].min() < 0 or rays.min() < -1 or rays.max() >= tokens):
        raise ValueError(
            f"Rays must hold tokens from 0 to {tokens - 1}, one at least, and -1 beyond the end of a ray; in a tensor "
            f"of shape {tuple(rays.shape)} they hold {rays.unique().tolist()}."
        )
    if len(squarings) and squarings.min() < 0:
        raise ValueError(f"Squarings must not be negative; they are {squarings.tolist()}.")
    return rays, squarings


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
