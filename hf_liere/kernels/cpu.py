"""
Rotations, their gradients and their application on CPUs, compiled from cpu.cpp when the package is installed, see
`cpu_library`. Optional: where no compiler built them, for larger blocks and for types other than float32 and bfloat16,
plain operations compute the same, several times slower for small blocks. HF_LIERE_CPU_KERNELS=0 in the environment
disables the kernels.

Queries, keys and their gradients are float32 or bfloat16, rotations and their gradients are float32, and so is the
arithmetic between them.
"""

import os

import torch
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from .cpu_interface import Monomials, Pair, Rays, Shape, Shared, Sizes, Strides
from .cpu_library import failure, library
from .layout import contiguous_channels, empty_like, is_planes, shared_strides


NAME = "CPU kernels"
# Of queries and keys.
TYPES = (torch.float32, torch.bfloat16)
# Two huge pages of the usual 2 MiB, of which at least one is whole.
HUGE_BYTES = 1 << 22


def refusal(tensor: torch.Tensor, dtype: torch.dtype, block_size: int) -> str | None:
    """
    Why the kernels do not take tensors like this one for results in `dtype`, or `None` if they do.

    Subclasses, such as those that hold no values or a part of them, are left to plain operations, and so is everything
    where operations are traced or counted.
    """
    if torch.jit.is_tracing() or is_in_torch_dispatch_mode():
        return "operations are traced or counted"
    if tensor.device.type != "cpu":
        return "they run on the CPU only"
    if dtype not in TYPES:
        return "they compute float32 and bfloat16 only"
    if type(tensor) is not torch.Tensor:
        return "they take no subclass of torch.Tensor"
    if os.environ.get("HF_LIERE_CPU_KERNELS", "1") == "0":
        return "HF_LIERE_CPU_KERNELS=0 turns them off"
    return failure(block_size)


def apply_rotation(
    query: torch.Tensor, key: torch.Tensor, rotation: torch.Tensor, inverse: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """As [`cuda.apply_rotation`], on CPUs."""
    states = contiguous_channels(query), contiguous_channels(key)
    name = "rotate_planes" if is_planes(rotation) else "rotate_blocks"
    size, rotation = rotation.shape[-1], _contiguous_blocks(rotation)
    out = _prefer_huge_pages(empty_like(states[0])), _prefer_huge_pages(empty_like(states[1]))
    _call(size, name, _shape(query, rotation.shape, size), _pair(states), _pair(out), _shared(rotation), inverse)
    return out


def angle_gradients(gradients, rotated, shape: torch.Size) -> torch.Tensor:
    """As [`cuda.angle_gradients`], on CPUs."""
    return _sums(2, "angle_gradients", gradients, rotated, shape)


def outer_products(
    gradients, rotated, shape: torch.Size, block_size: int, rotation: torch.Tensor | None = None
) -> torch.Tensor:
    """As [`cuda.outer_products`], on CPUs."""
    rotation = None if rotation is None else _contiguous_blocks(rotation)
    factor = None if rotation is None else _shared(rotation)
    return _sums(block_size, "outer_products", gradients, rotated, (*shape, block_size, block_size), factor)


def block_rotations(
    positions: torch.Tensor,
    generators: torch.Tensor,
    rays: torch.Tensor,
    squarings: torch.Tensor,
    polynomial: tuple[tuple[float, ...], ...],
    interval: int | None,
) -> tuple[tuple[torch.Tensor, ...], torch.Tensor | None, torch.Tensor]:
    """
    The rotations of [`exponential.layer_block_rotations`], in float32 from products in the type of the positions.

    Args:
        positions: (P, A) in float64 or float32.
        generators: (A, G, K, b, b).
        rays: (rays, longest ray), see [`exponential.Rays`].
        squarings: (rays,), how often each ray's first rotation is squared.
        polynomial: [`exponential.POLYNOMIAL`].
        interval: The first of so many squares is saved for the backward pass, or none with `None`.

    Returns:
        For each of the G groups (P, K, b, b); the saved squares, and for each ray the index of its first.
    """
    if positions.dtype not in (torch.float64, torch.float32):
        raise ValueError(f"Positions must be in torch.float64 or torch.float32; they are in {positions.dtype}.")
    axes, groups, blocks, size, _ = generators.shape
    positions, generators = positions.contiguous(), generators.to(positions.dtype).contiguous()
    rays, squarings = _checked_rays(rays, squarings, len(positions))
    in_no_ray = torch.ones(len(positions), dtype=torch.bool, device="cpu").index_fill_(0, rays[rays >= 0], False)
    rotations = tuple(_empty(len(positions), blocks, size, size) for _ in range(groups))
    tokens = in_no_ray.nonzero().flatten()
    identity = torch.eye(size, dtype=torch.float32, device="cpu").expand(len(tokens), blocks, size, size)
    for rotation in rotations:
        rotation.index_copy_(0, tokens, identity)
    counts = (squarings + (interval or 1) - 1) // (interval or 1)
    offsets = counts.cumsum(0) - counts
    saved_squares = None if interval is None else _empty(groups, int(counts.sum()), blocks, size, size)
    _call(
        size,
        "block_rotations",
        Sizes(axes, groups, blocks, size),
        _rays(rays, squarings, offsets, saved_squares, interval),
        positions.dtype == torch.float64,
        positions,
        generators,
        torch.tensor(polynomial, dtype=torch.float64, device="cpu"),
        rotations,
    )
    return rotations, saved_squares, offsets


def block_tangents(
    rotations: tuple[torch.Tensor, ...],
    gradients: tuple[torch.Tensor, ...],
    rays: torch.Tensor,
    squarings: torch.Tensor,
    saved_squares: torch.Tensor,
    offsets: torch.Tensor,
    interval: int,
) -> torch.Tensor:
    """
    The tangents that [`exponential_gradient.GradientMoments`] takes, for rotations of [`block_rotations`].

    Args:
        rotations: (P, K, b, b) for each of G groups.
        gradients: Their gradients, likewise.

    Returns:
        (G, rays, K·b(b−1)/2).
    """
    _, blocks, size, _ = rotations[0].shape
    gradients = tuple(gradient.to(torch.float32).contiguous() for gradient in gradients)
    rays, squarings = _checked_rays(rays, squarings, len(rotations[0]))
    tangents = _empty(len(rotations), len(rays), blocks * (size * (size - 1) // 2))
    sizes = Sizes(groups=len(rotations), blocks=blocks, size=size)
    traversal = _rays(rays, squarings, offsets, saved_squares, interval)
    _call(size, "block_tangents", sizes, traversal, rotations, gradients, tangents)
    return tangents


def moments_gradient(
    generators: torch.Tensor, moments: torch.Tensor, coefficients: tuple[float, ...], raised: list[list[list[int]]]
) -> torch.Tensor:
    """
    [`exponential_gradient.GradientMoments.generators_gradient`].

    Args:
        generators: (A, G, K, b, b).
        moments: (G, monomials, K·b(b−1)/2).
        coefficients: One for each degree of the monomials, from 1 on.
        raised: For each degree but the last and each axis, the indices of the monomials that are x_a times as high.

    Returns:
        (A, G, K, b, b) in the type of the generators, from products in float32.
    """
    axes, groups, blocks, size, _ = generators.shape
    dtype, out = generators.dtype, _empty(*generators.shape)
    generators, moments = (tensor.to(torch.float32).contiguous() for tensor in (generators, moments))
    counts = [len(level[0]) for level in raised]
    counts.append(moments.shape[1] - sum(counts))
    indices = [index for level in raised for axis in level for index in axis]
    # The structure holds addresses: these tensors must live until the call returns.
    tables = [torch.tensor(coefficients, dtype=torch.float64, device="cpu")]
    tables += [torch.tensor(values, dtype=torch.int64, device="cpu") for values in (counts, indices)]
    monomials = Monomials(*(table.data_ptr() for table in tables), len(counts), moments.shape[1])
    _call(size, "moments_gradient", Sizes(axes, groups, blocks, size), monomials, generators, moments, out)
    return out.to(dtype)


def _call(block_size: int, name: str, *arguments) -> None:
    """
    Raises:
        RuntimeError: if there are no kernels for blocks of this size.
        MemoryError: if the kernel found too little memory for its scratch.
    """
    if reason := failure(block_size):
        raise RuntimeError(f"There are no CPU kernels for blocks of {block_size}: {reason}.")
    name, threads = f"hf_liere_{name}", torch.get_num_threads()
    if not getattr(library(), name)(*arguments, threads):
        raise MemoryError(f"There is too little memory for {name} with {threads} threads.")


def _sums(block_size: int, name: str, gradients, rotated, shape: tuple[int, ...], *factor) -> torch.Tensor:
    """The kernels add over the samples that share a rotation, and heads that do are added here."""
    gradients, rotated = (tuple(map(contiguous_channels, pair)) for pair in (gradients, rotated))
    out = _empty(shape[0], shape[2], rotated[0].shape[1], *shape[3:]).transpose(1, 2)
    if gradients[0].dtype != rotated[0].dtype:
        raise ValueError(
            f"Gradients must be in the type of queries and keys; they are in {gradients[0].dtype} and "
            f"{rotated[0].dtype}."
        )
    kind = _shape(rotated[0], shape, block_size)
    _call(block_size, name, kind, _pair(gradients), _pair(rotated), _shared(out), *factor)
    return out.sum_to_size(shape)


def _empty(*shape: int) -> torch.Tensor:
    """float32 on the CPU, whatever the process has as its default type and device."""
    return _prefer_huge_pages(torch.empty(shape, dtype=torch.float32, device="cpu"))


def _prefer_huge_pages(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.nbytes >= HUGE_BYTES:
        library().hf_liere_prefer_huge_pages(tensor, tensor.nbytes)
    return tensor


def _checked_rays(rays: torch.Tensor, squarings: torch.Tensor, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Contiguous and int64. The kernels would write to tokens beyond the last one."""
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


def _rays(rays, squarings, offsets, saved_squares, interval) -> Rays:
    address, saved = (None, 0) if saved_squares is None else (saved_squares.data_ptr(), saved_squares.shape[1])
    addresses = (tensor.data_ptr() for tensor in (rays, squarings, offsets))
    return Rays(*addresses, address, *rays.shape, saved, interval or 1)


def _contiguous_blocks(rotation: torch.Tensor) -> torch.Tensor:
    """float32, with the blocks or planes of a token and head one after the other in memory."""
    rotation = rotation.to("cpu", torch.float32)
    return rotation if rotation[0, 0, 0].is_contiguous() else rotation.contiguous()


def _shape(states: torch.Tensor, rotations: tuple[int, ...], block_size: int) -> Shape:
    batch, heads, tokens, head_dim = states.shape
    if rotations[0] not in (1, batch) or rotations[1] not in (1, heads) or rotations[2] != tokens:
        raise ValueError(
            f"Rotations of shape {tuple(rotations)} do not fit queries and keys of shape {tuple(states.shape)}: they "
            f"must be for 1 or {batch} samples, 1 or {heads} heads and {tokens} tokens."
        )
    if rotations[3] * block_size > head_dim:
        raise ValueError(
            f"{rotations[3]} blocks of {block_size} channels do not fit into the {head_dim} channels of a head."
        )
    if states.dtype not in TYPES:
        raise ValueError(f"Queries and keys must be in {' or '.join(map(str, TYPES))}; they are in {states.dtype}.")
    return Shape(*states.shape, rotations[3], rotations[0], block_size, states.dtype == torch.bfloat16)


def _pair(tensors: tuple[torch.Tensor, torch.Tensor]) -> Pair:
    first, second = tensors
    if first.shape != second.shape or first.dtype != second.dtype:
        raise ValueError(
            f"Query and key must be alike; they are {tuple(first.shape)} in {first.dtype} and {tuple(second.shape)} in "
            f"{second.dtype}."
        )
    strides = tuple(Strides(*tensor.stride()[:3]) for tensor in tensors)
    return Pair((first.data_ptr(), second.data_ptr()), strides)


def _shared(rotation: torch.Tensor) -> Shared:
    return Shared(rotation.data_ptr(), Strides(*shared_strides(rotation)))
