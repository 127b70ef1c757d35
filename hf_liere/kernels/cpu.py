"""
Rotations, their gradients and their application on CPUs, compiled from cpu.cpp when the package is installed (see
`cpu_library`). They are optional: without a compiler, for larger blocks and for dtypes other than float32 and bfloat16,
plain operations compute the same, several times slower for small blocks. HF_LIERE_CPU_KERNELS=0 disables the kernels.

Queries, keys and their gradients are float32 or bfloat16; rotations, their gradients and all arithmetic are float32.
"""

import torch

from ..fast.scaling_and_squaring import POLYNOMIAL, SAVE_INTERVAL, RayTokens, first_square, num_saved
from .cpu_library import Monomials, Pair, Rays, Shape, Shared, Sizes, Strides, failure, library
from .layout import Tensors, contiguous_channels, empty_like, is_planes, shared_strides


NAME = "CPU kernels"
SWITCH = "HF_LIERE_CPU_KERNELS"
# Accepted dtypes of queries and keys.
TYPES = (torch.float32, torch.bfloat16)
# Twice the usual huge page of 2 MiB, so that at least one whole page fits.
HUGE_BYTES = 1 << 22
# Tokens whose gradients of commuting generators are added one after the other.
TOKENS_AT_ONCE = 8


def refusal(tensor: torch.Tensor, dtype: torch.dtype, block_size: int, function: str = "") -> str | None:
    """Why the kernels do not accept tensors like this one for results in `dtype`; `None` if they do."""
    if tensor.device.type != "cpu":
        return "they run only on the CPU"
    if dtype not in TYPES:
        return "they compute only float32 and bfloat16"
    return failure(block_size)


def apply_rotation(states: Tensors, rotation: torch.Tensor, inverse: bool = False) -> tuple[torch.Tensor, ...]:
    """As [`cuda.apply_rotation`], on CPUs."""
    states = tuple(map(contiguous_channels, states))
    name = "rotate_planes" if is_planes(rotation) else "rotate_blocks"
    size, rotation = rotation.shape[-1], _contiguous_blocks(rotation)
    out = _results_like(states)
    _call(size, name, _shape(states, rotation.shape, size), _pair(states), _pair(out), _shared(rotation), inverse)
    return out


def angle_gradients(gradients: Tensors, rotated: Tensors, shape: torch.Size) -> torch.Tensor:
    """As [`cuda.angle_gradients`], on CPUs."""
    return _sums(2, "angle_gradients", gradients, rotated, shape)


def commuting_backward(
    gradients: Tensors, rotated: Tensors, cos_sin: torch.Tensor, frequencies: torch.Tensor, phases: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """As [`rotation_gradients.commuting_backward`] for rotations that all samples share."""
    cos_sin, phases, back = _contiguous_blocks(cos_sin), _contiguous_blocks(phases), _results_like(gradients)
    heads, tokens = rotated[0].shape[1:3]
    shared, blocks, planes = frequencies.shape
    frequencies = frequencies.to(torch.float32).expand(heads, -1, -1).contiguous()
    numbers = 2 * planes * (planes - 1)
    sums = _empty(-(-tokens // TOKENS_AT_ONCE), heads, 2, blocks, numbers // 2).zero_()
    factors = _pair(back), _shared(cos_sin), _shared(phases), TOKENS_AT_ONCE, frequencies, sums
    by_cos_sin = _sums(2 * planes, "commuting_backward", gradients, rotated, cos_sin.shape, *factors, blocks=blocks)
    parts = sums.sum(0).sum_to_size(shared, 2, blocks, numbers // 2).unflatten(-1, (2, -1))
    (a, c), (b, d) = (part.unbind(-2) for part in parts.unbind(1))  # (1 or H, blocks, pairs) each
    return *back, by_cos_sin, a, b, c, d


def outer_products(
    gradients: Tensors, rotated: Tensors, shape: torch.Size, block_size: int, rotation: torch.Tensor | None = None
) -> torch.Tensor:
    """As [`cuda.outer_products`], on CPUs."""
    rotation = None if rotation is None else _contiguous_blocks(rotation)
    factor = None if rotation is None else _shared(rotation)
    return _sums(block_size, "outer_products", gradients, rotated, (*shape, block_size, block_size), factor)


def block_rotations(
    positions: torch.Tensor,
    generators: torch.Tensor,
    rays: RayTokens,
    squarings: torch.Tensor,
    squares: torch.Tensor | None,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, ...]:
    """
    exp(Σ_a p_a A_a) of every token, in float32, by float64 or float32 products, as the positions.

    Args:
        positions: (P, A), of P tokens.
        generators: (A, G, K, b, b), of G layers and K blocks.
        rays: The tokens at positions other than zero, or those that the others mirror.
        squarings: (rays,), how often each ray's first rotation is squared.
        squares: (G, saved, K, b, b) for every `SAVE_INTERVAL`-th square, those of a ray from `first_square` on; it is
            overwritten. `None` saves nothing.

    Returns:
        For each of the G layers (P, K, b, b).
    """
    if positions.dtype not in (torch.float64, torch.float32):
        raise ValueError(f"Positions in {positions.dtype}; accepted are torch.float64 and torch.float32.")
    axes, groups, blocks, size, _ = generators.shape
    positions, generators = positions.contiguous(), generators.to(positions.dtype).contiguous()
    structure = _rays(rays, squarings, squares, len(positions))
    on_ray = rays.indices[rays.indices >= 0]
    on_no_ray = torch.ones(len(positions), dtype=torch.bool, device="cpu").index_fill_(0, on_ray, False)
    if rays.mirror >= 0:
        on_no_ray[rays.mirror - on_ray] = False
    rotations = tuple(_empty(len(positions), blocks, size, size) for _ in range(groups))
    identity = torch.eye(size, dtype=torch.float32, device="cpu")
    for rotation in rotations:
        rotation[on_no_ray] = identity
    sizes, is_double = Sizes(axes, groups, blocks, size), positions.dtype == torch.float64
    polynomial = torch.tensor(POLYNOMIAL, dtype=torch.float64, device="cpu")
    _call(size, "block_rotations", sizes, structure, is_double, positions, generators, polynomial, rotations)
    return rotations


def block_tangents(
    rotations: Tensors, gradients: Tensors, rays: RayTokens, squarings: torch.Tensor, squares: torch.Tensor
) -> torch.Tensor:
    """
    Gradients of the tangents of the scaled exponents, from the results and gradients of [`block_rotations`]: (G, rays,
    K·b(b−1)/2) [`exponential_gradient.upper_entries`] of M, whose skew part is the gradient. Those of R(−p) = R(p)ᵀ are
    transposed and added to those of R(p).
    """
    _, blocks, size, _ = rotations[0].shape
    rotations, gradients = (tuple(x.to(torch.float32).contiguous() for x in pair) for pair in (rotations, gradients))
    structure = _rays(rays, squarings, squares, len(rotations[0]))
    tangents = _empty(len(rotations), len(squarings), blocks * (size * (size - 1) // 2))
    sizes = Sizes(groups=len(rotations), blocks=blocks, size=size)
    _call(size, "block_tangents", sizes, structure, rotations, gradients, tangents)
    return tangents


def moments_gradient(
    generators: torch.Tensor,
    moments: torch.Tensor,
    coefficients: tuple[float, ...],
    product_indices: list[list[list[int]]],
) -> torch.Tensor:
    """
    The last step of [`exponential_gradient.gradient_by_moments`].

    Args:
        generators: (A, G, K, b, b).
        moments: (G, monomials, K·b(b−1)/2).
        coefficients: One for each degree of the monomials, starting with degree 1.
        product_indices: For each degree except the last and each axis a, the index of x_a times each monomial.

    Returns:
        (A, G, K, b, b) in the dtype of the generators, from products in float32.
    """
    axes, groups, blocks, size, _ = generators.shape
    dtype, out = generators.dtype, _empty(*generators.shape)
    generators, moments = (tensor.to(torch.float32).contiguous() for tensor in (generators, moments))
    counts = [len(level[0]) for level in product_indices]
    counts.append(moments.shape[1] - sum(counts))
    indices = [index for level in product_indices for axis in level for index in axis]
    # The structure contains addresses: these tensors must live until the call returns.
    tables = [torch.tensor(coefficients, dtype=torch.float64, device="cpu")]
    tables += [torch.tensor(values, dtype=torch.int64, device="cpu") for values in (counts, indices)]
    monomials = Monomials(*(table.data_ptr() for table in tables), len(counts), moments.shape[1])
    _call(size, "moments_gradient", Sizes(axes, groups, blocks, size), monomials, generators, moments, out)
    return out.to(dtype)


def quaternion_rotations(positions: torch.Tensor, generators: torch.Tensor) -> torch.Tensor:
    """
    As [`closed_forms.quaternion_rotations`], for the (A, G, K, 1 or 2, 3) quaternions of generators: (G, P, K, b, b) in
    float32.
    """
    sizes, *factors = _quaternions(positions, generators)
    rotations = _empty(sizes.groups, len(positions), sizes.blocks, sizes.size, sizes.size)
    _call(sizes.size, "quaternion_rotations", sizes, len(positions), *factors, rotations)
    return rotations


def quaternion_gradients(positions: torch.Tensor, generators: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """The gradients (G, P, K, 1 or 2, 3) of the exponents, from those (G, P, K, b, b) of [`quaternion_rotations`]."""
    sizes, *factors = _quaternions(positions, generators)
    out = _empty(sizes.groups, len(positions), sizes.size - 2, 3, sizes.blocks)
    gradient = gradient.to(torch.float32).contiguous()
    _call(sizes.size, "quaternion_gradients", sizes, len(positions), *factors, gradient, out)
    return out.permute(0, 1, 4, 2, 3)


def _quaternions(positions: torch.Tensor, generators: torch.Tensor) -> tuple[Sizes, torch.Tensor, torch.Tensor]:
    axes, groups, blocks, halves, _ = generators.shape
    sizes = Sizes(axes, groups, blocks, 2 + halves)
    return sizes, positions.contiguous(), generators.to(torch.float64).permute(1, 0, 3, 4, 2).contiguous()


def _call(block_size: int, name: str, *arguments: object) -> None:
    """Raises `RuntimeError` for blocks of an unknown size, `MemoryError` without memory for the scratch space."""
    if reason := failure(block_size):
        raise RuntimeError(f"No CPU kernels for blocks of {block_size}: {reason}.")
    name, threads = f"hf_liere_{name}", torch.get_num_threads()
    if not getattr(library(), name)(*arguments, threads):
        raise MemoryError(f"Too little memory for {name} with {threads} threads.")


def _sums(
    block_size: int,
    name: str,
    gradients: Tensors,
    rotated: Tensors,
    shape: tuple[int, ...],
    *factors: object,
    blocks: int | None = None,
) -> torch.Tensor:
    """Sums over samples and heads that share a rotation: the kernels add samples, this function adds heads."""
    gradients, rotated = (tuple(map(contiguous_channels, pair)) for pair in (gradients, rotated))
    out = _empty(shape[0], shape[2], rotated[0].shape[1], *shape[3:]).transpose(1, 2)
    if gradients[0].dtype != rotated[0].dtype:
        raise ValueError(f"Gradients in {gradients[0].dtype} do not match queries and keys in {rotated[0].dtype}.")
    kind = _shape(rotated, (*shape[:3], shape[3] if blocks is None else blocks), block_size)
    _call(block_size, name, kind, _pair(gradients), _pair(rotated), _shared(out), *factors)
    return out.sum_to_size(shape)


def _results_like(states: Tensors) -> tuple[torch.Tensor, ...]:
    """Uninitialised results in the layouts of a query and a key."""
    return tuple(_prefer_huge_pages(empty_like(state)) for state in states)


def _empty(*shape: int) -> torch.Tensor:
    """An uninitialised float32 tensor on the CPU, whatever the default dtype and device."""
    return _prefer_huge_pages(torch.empty(shape, dtype=torch.float32, device="cpu"))


def _prefer_huge_pages(tensor: torch.Tensor) -> torch.Tensor:
    if (kernels := library()) is not None and tensor.nbytes >= HUGE_BYTES:
        kernels.hf_liere_prefer_huge_pages(tensor, tensor.nbytes)
    return tensor


def _rays(rays: RayTokens, squarings: torch.Tensor, squares: torch.Tensor | None, num_tokens: int) -> Rays:
    """
    Raises:
        ValueError: if rays lead elsewhere; the kernels do not check bounds when they write to tokens and squares.
    """
    tokens = rays.indices
    if tokens.ndim != 2 or squarings.shape != tokens.shape[:1]:
        raise ValueError(
            f"Rays must be (rays, longest ray) and squarings (rays,); they are {tuple(tokens.shape)} and "
            f"{tuple(squarings.shape)}."
        )
    tokens, squarings = (tensor.to("cpu", torch.int64).contiguous() for tensor in (tokens, squarings))
    if len(tokens) and (
        tokens.shape[1] == 0 or tokens[:, 0].min() < 0 or tokens.min() < -1 or tokens.max() >= num_tokens
    ):
        raise ValueError(
            f"Rays must contain tokens from 0 to {num_tokens - 1}, at least one, and -1 beyond the end of a ray; in a "
            f"tensor of shape {tuple(tokens.shape)} they contain {tokens.unique().tolist()}."
        )
    mirrored = rays.mirror - tokens[tokens >= 0]
    if rays.mirror >= 0 and len(mirrored) and (mirrored.min() < 0 or mirrored.max() >= num_tokens):
        raise ValueError(
            f"mirror={rays.mirror} must lead to tokens from 0 to {num_tokens - 1}; it leads to {mirrored.tolist()}."
        )
    if len(squarings) and squarings.min() < 0:
        raise ValueError(f"Squarings must not be negative; they are {squarings.tolist()}.")
    if squares is not None and (not squares.is_contiguous() or num_saved(squarings).sum() > squares.shape[1]):
        raise ValueError(
            f"{int(num_saved(squarings).sum())} squares of each group need contiguous memory, not "
            f"{tuple(squares.shape)} with strides {squares.stride()}."
        )
    address, saved = (None, 0) if squares is None else (squares.data_ptr(), squares.shape[1])
    tensors = tokens, squarings, first_square(squarings)
    addresses = (tensor.data_ptr() for tensor in tensors)
    structure = Rays(*addresses, address, *tokens.shape, saved, SAVE_INTERVAL, rays.step, rays.mirror)
    # They must live as long as the addresses.
    structure.tensors = tensors
    return structure


def _contiguous_blocks(rotation: torch.Tensor) -> torch.Tensor:
    """In float32, with the blocks or planes of a token and head contiguous in memory."""
    rotation = rotation.to("cpu", torch.float32)
    return rotation if rotation[0, 0, 0].is_contiguous() else rotation.contiguous()


def _shape(states: Tensors, rotations: tuple[int, ...], block_size: int) -> Shape:
    count, states = len(states), states[0]
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
    return Shape(*states.shape, rotations[3], rotations[0], block_size, states.dtype == torch.bfloat16, count)


def _pair(tensors: Tensors) -> Pair:
    # The kernels do not read the second of a single state.
    pair = first, last = tensors[0], tensors[-1]
    if first.shape != last.shape or first.dtype != last.dtype:
        raise ValueError(
            f"Query and key must be alike; they are {tuple(first.shape)} in {first.dtype} and {tuple(last.shape)} in "
            f"{last.dtype}."
        )
    return Pair(tuple(tensor.data_ptr() for tensor in pair), tuple(Strides(*tensor.stride()[:3]) for tensor in pair))


def _shared(rotation: torch.Tensor) -> Shared:
    return Shared(rotation.data_ptr(), Strides(*shared_strides(rotation)))
