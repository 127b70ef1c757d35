"""
What rotations do to queries and keys, forward and backward: planes and blocks applied, and the gradients of angles,
blocks and commuting generators. They are operators of torch; each has a plain implementation here and may have a faster
one for a kind of device, see `backends`.
"""

import functools
from collections.abc import Callable

import torch

from .backends import find_backend
from .tracing import in_portable_graph, operator


# Samples of query, and of key, in one product: the fastest on CPUs for blocks of 8.
SAMPLES_AT_ONCE = 8
# Up to this block size one product gathers the parts of all pairs of planes; above it, indexing costs less.
GATHERED_SIZE = 16


def rotate_planes(
    query: torch.Tensor,
    key: torch.Tensor,
    cos_sin: torch.Tensor,
    generators: torch.Tensor | None = None,
    phases: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    (B, H, N, D) query and key by (1 or B, 1 or H, N, planes, 2) cos and sin; others as in `EigenRotation`. A `key` of
    shape (0, H, N, D) is none.
    """
    if in_portable_graph():
        return _completed(_planes_of(_present(query, key), cos_sin, portable=True), key)
    return _rotate_planes(query, key, cos_sin, generators, phases, False)


def rotate_blocks(query: torch.Tensor, key: torch.Tensor, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(B, H, N, D) query and key by (1 or B, 1 or H, N, blocks, b, b) matrices, as [`rotate_planes`]."""
    if in_portable_graph():
        return _completed(_blocks_of(_present(query, key), blocks), key)
    return _rotate_blocks(query, key, blocks, False)


def _present(query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Query and key, or the query alone where the key has no samples."""
    return (query, key) if key.shape[0] else (query,)


def _completed(states: tuple[torch.Tensor, ...], key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Results for [`_present`] states, and for a key without samples."""
    # An operator must not return what it was given.
    return states if len(states) == 2 else (*states, torch.empty_like(key))


def _empty_like(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(torch.empty_like(tensor) for tensor in tensors)


def _laid_out_as(values, like) -> tuple[torch.Tensor, ...]:
    """Each of the values in the layout of `torch.empty_like`, which is what the compiler is told."""
    strides = (torch.empty_like(tensor, device="meta").stride() for tensor in like)
    return tuple(
        x if x.stride() == stride else torch.empty_like(tensor).copy_(x)
        for x, tensor, stride in zip(values, like, strides)
    )


def _fake_planes_backward(query_gradient, key_gradient, query, key, cos_sin, generators, phases):
    others = cos_sin, cos_sin.new_empty(0) if generators is None else generators
    return _empty_like(query_gradient, key_gradient, *others)


@operator(
    "(Tensor query_gradient, Tensor key_gradient, Tensor query, Tensor key, Tensor cos_sin, Tensor? generators, "
    "Tensor? phases) -> (Tensor, Tensor, Tensor, Tensor)",
    fake=_fake_planes_backward,
)
def _rotate_planes_backward(query_gradient, key_gradient, query, key, cos_sin, generators, phases):
    """
    Gradients of query, key, cos and sin, and of the generators where these are given; `query` and `key` are the rotated
    ones. That of cos and sin is the gradient of the angles.
    """
    gradients, states = _present(query_gradient, key_gradient), _present(query, key)
    (cos, sin), generators_gradient = cos_sin.unbind(-1), cos_sin.new_empty(0)
    if generators is None:
        *rotated_back, by_angle = planes_backward(gradients, states, cos_sin)
    else:
        rotated_back = _apply_planes(gradients, cos_sin, inverse=True)
        outer = outer_products(gradients, states, phases.shape, generators.shape[-1])
        by_angle, generators_gradient = eigen_gradients(outer, generators, phases)
        by_angle = by_angle.reshape(cos.shape).to(cos.dtype)
    # Along (−sin, cos), the direction in which cos and sin change with the angle.
    cos_sin_gradient = torch.stack([-sin * by_angle, cos * by_angle], dim=-1)
    like = query_gradient, key_gradient, cos_sin, generators_gradient if generators is None else generators
    rotated_back = _completed(tuple(rotated_back), key_gradient)
    return _laid_out_as((*rotated_back, cos_sin_gradient, generators_gradient), like)


@operator(
    "(Tensor query_gradient, Tensor key_gradient, Tensor query, Tensor key, Tensor blocks) -> (Tensor, Tensor, Tensor)",
    fake=lambda query_gradient, key_gradient, query, key, blocks: _empty_like(query_gradient, key_gradient, blocks),
)
def _rotate_blocks_backward(query_gradient, key_gradient, query, key, blocks):
    """Gradients of query, key and blocks; `query` and `key` are the rotated ones."""
    gradients = _present(query_gradient, key_gradient)
    # g qᵀ with q = Rᵀ r, r being the rotated state.
    outer = outer_products(gradients, _present(query, key), blocks.shape[:4], blocks.shape[-1], blocks)
    rotated_back = _completed(_apply_blocks(gradients, blocks, inverse=True), key_gradient)
    return _laid_out_as((*rotated_back, outer.to(blocks.dtype)), (query_gradient, key_gradient, blocks))


def _save_rotated(ctx, inputs, output):
    _, _, rotation, *others, ctx.inverse = inputs
    # Attention saves the rotated states anyway; those before the rotation are not needed.
    ctx.save_for_backward(*(output if ctx.needs_input_grad[2] else (None, None)), rotation, *others)


def _planes_gradients(ctx, *gradients):
    query, key, *rotation = ctx.saved_tensors
    if query is None:
        return *_rotate_planes.operator(*gradients, *rotation, not ctx.inverse), *[None] * 4
    if ctx.inverse:
        raise NotImplementedError("Inverse rotations have no gradient of the rotation.")
    *rotated_back, cos_sin_gradient, generators_gradient = _rotate_planes_backward(*gradients, query, key, *rotation)
    return *rotated_back, cos_sin_gradient, None if rotation[1] is None else generators_gradient, None, None


def _blocks_gradients(ctx, *gradients):
    query, key, blocks = ctx.saved_tensors
    if query is None:
        return *_rotate_blocks.operator(*gradients, blocks, not ctx.inverse), None, None
    if ctx.inverse:
        raise NotImplementedError("Inverse rotations have no gradient of the rotation.")
    return *_rotate_blocks_backward(*gradients, query, key, blocks), None


@operator(
    "(Tensor query, Tensor key, Tensor cos_sin, Tensor? generators, Tensor? phases, bool inverse) -> (Tensor, Tensor)",
    fake=lambda query, key, *_: _empty_like(query, key),
    gradients=_planes_gradients,
    save=_save_rotated,
)
def _rotate_planes(query, key, cos_sin, generators, phases, inverse):
    """Query and key by [`rotation.PlaneRotation`] or [`rotation.EigenRotation`], or by its inverse."""
    return _laid_out_as(_completed(_apply_planes(_present(query, key), cos_sin, inverse), key), (query, key))


@operator(
    "(Tensor query, Tensor key, Tensor blocks, bool inverse) -> (Tensor, Tensor)",
    fake=lambda query, key, *_: _empty_like(query, key),
    gradients=_blocks_gradients,
    save=_save_rotated,
)
def _rotate_blocks(query, key, blocks, inverse):
    """Query and key by [`rotation.BlockRotation`], or by its inverse."""
    return _laid_out_as(_completed(_apply_blocks(_present(query, key), blocks, inverse), key), (query, key))


def _apply_planes(states, cos_sin: torch.Tensor, inverse: bool = False) -> tuple[torch.Tensor, ...]:
    if backend := find_backend("apply_rotation", states[0], 2):
        return backend.apply_rotation(states, cos_sin, inverse)
    if inverse:
        cos_sin = cos_sin * cos_sin.new_tensor([1.0, -1.0])
    return _planes_of(states, cos_sin)


def _apply_blocks(states, blocks: torch.Tensor, inverse: bool = False) -> tuple[torch.Tensor, ...]:
    if backend := find_backend("apply_rotation", states[0], blocks.shape[-1]):
        return backend.apply_rotation(states, blocks, inverse)
    if blocks.shape[0] == 1:
        return _shared_blocks_of(states, blocks, inverse)
    return _blocks_of(states, blocks.transpose(-1, -2) if inverse else blocks)


def _leading_channels(rotate: Callable) -> Callable:
    """Decorator of a function of states whose channels are all rotated: those beyond the rotation's are passed on."""

    @functools.wraps(rotate)
    def rotate_leading(states, rotation, *arguments, **options):
        width, head_dim = rotation.shape[3] * rotation.shape[-1], states[0].shape[-1]
        if width == head_dim:
            return rotate(states, rotation, *arguments, **options)
        rotated = rotate(tuple(part[..., :width] for part in states), rotation, *arguments, **options)
        return tuple(torch.cat([part, whole[..., width:]], dim=-1) for part, whole in zip(rotated, states))

    return rotate_leading


@_leading_channels
def _planes_of(states, cos_sin: torch.Tensor, portable: bool = False) -> tuple[torch.Tensor, ...]:
    """Pairs of channels rotated, `portable` by operations that compilers fuse and other runtimes have."""
    cos_sin = cos_sin.to(torch.promote_types(states[0].dtype, torch.float32))
    rotated = []
    for part in states:
        wide = part.to(cos_sin.dtype)
        if not portable and _are_complex(wide):
            # One pass over memory instead of six.
            product = torch.view_as_complex(wide.unflatten(-1, (-1, 2))) * torch.view_as_complex(cos_sin.contiguous())
            pairs = torch.view_as_real(product)  # (B, H, N, planes, 2)
        else:
            (cos, sin), (first, second) = cos_sin.unbind(-1), wide.unflatten(-1, (-1, 2)).unbind(-1)
            pairs = torch.stack([first * cos - second * sin, first * sin + second * cos], dim=-1)
        rotated.append(pairs.flatten(-2).to(part.dtype))
    return tuple(rotated)


def _are_complex(states: torch.Tensor) -> bool:
    """Whether pairs of channels can be seen as complex numbers, which MPS lacks."""
    if states.device.type == "mps":
        return False
    return states.stride(-1) == 1 and all(s % 2 == 0 for s in (states.storage_offset(), *states.stride()[:-1]))


@_leading_channels
def _blocks_of(states, blocks: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Blocks of channels multiplied by matrices of any sample."""
    blocks = blocks.to(states[0].dtype)
    columns = (part.unflatten(-1, (-1, blocks.shape[-1])).unsqueeze(-1) for part in states)  # (B, H, N, blocks, b, 1)
    return tuple((blocks @ column).squeeze(-1).flatten(-2) for column in columns)


@_leading_channels
def _shared_blocks_of(states, blocks: torch.Tensor, inverse: bool = False) -> tuple[torch.Tensor, ...]:
    """Blocks of channels multiplied by (1, 1 or H, N, blocks, b, b) matrices of all samples, or by their transposes."""
    batch, heads, tokens, _ = states[0].shape
    count, size = blocks.shape[3], blocks.shape[-1]
    matrices = blocks[0].expand(heads, *blocks.shape[2:]).transpose(0, 1).reshape(-1, size, size)
    matrices = matrices.to(states[0].dtype)  # (N · H · blocks, b, b)
    # In memory as a projection leaves it, tokens before heads.
    rotated = tuple(part.new_empty(batch, tokens, heads, count * size).transpose(1, 2) for part in states)
    # One product per token, head and block takes several samples as its columns; more than these fall out of cache.
    for start in range(0, batch, SAMPLES_AT_ONCE):
        samples = slice(start, start + SAMPLES_AT_ONCE)
        rows = block_rows(torch.cat([part[samples].transpose(1, 2) for part in states]).transpose(1, 2), size)
        if inverse:
            product = torch.bmm(rows, matrices)
        else:
            product = torch.bmm(matrices, rows.transpose(1, 2)).transpose(1, 2)
        product = product.unflatten(0, (tokens, heads, count)).permute(3, 1, 0, 2, 4)  # (B, H, N, blocks, b)
        for whole, part in zip(rotated, product.chunk(len(states))):
            whole[samples].unflatten(-1, (count, size)).copy_(part)
    return rotated


def block_rows(states: torch.Tensor, size: int) -> torch.Tensor:
    """(B, H, N, blocks · size) → (N · H · blocks, B, size)."""
    return states.unflatten(-1, (-1, size)).permute(2, 1, 3, 0, 4).flatten(0, 2)


def planes_backward(gradients, rotated, cos_sin: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Gradients of the states, and [`angle_gradients`]."""
    if backend := find_backend("planes_backward", rotated[0], 2):
        *rotated_back, by_angle = backend.planes_backward(gradients, rotated, cos_sin)
        return *rotated_back, by_angle.to(cos_sin.dtype)
    return *_apply_planes(gradients, cos_sin, inverse=True), angle_gradients(gradients, rotated, cos_sin)


def angle_gradients(gradients, rotated, cos_sin: torch.Tensor) -> torch.Tensor:
    """Derivative along the angles, summed over query, key and what shares an angle: (1 or B, 1 or H, N, planes)."""
    if backend := find_backend("angle_gradients", rotated[0], 2):
        return backend.angle_gradients(gradients, rotated, cos_sin.shape[:4]).to(cos_sin.dtype)
    total, width = 0, 2 * cos_sin.shape[3]
    for gradient, states in zip(gradients, rotated):
        gradient, states = gradient[..., :width], states[..., :width]
        first, second = gradient.to(cos_sin.dtype).unflatten(-1, (-1, 2)).unbind(-1)
        rotated_first, rotated_second = states.to(cos_sin.dtype).unflatten(-1, (-1, 2)).unbind(-1)
        by_angle = (second * rotated_first).addcmul_(first, rotated_second, value=-1)
        total = total + by_angle.sum_to_size(cos_sin.shape[:-1])
    return total


def outer_products(
    gradients, rotated, shape: torch.Size, size: int, rotation: torch.Tensor | None = None
) -> torch.Tensor:
    """
    Σ g rᵀ over query, key, and the samples and heads that share a rotation, times that `rotation` if given:
    (1 or B, 1 or H, N, blocks, b, b).
    """
    if backend := find_backend("outer_products", rotated[0], size):
        return backend.outer_products(gradients, rotated, shape, size, rotation)
    batch, heads, tokens, blocks = shape
    outer = None
    for gradient, states in zip(gradients, rotated):
        dtype = torch.promote_types(states.dtype, torch.float32)
        gradient, states = (x[..., : blocks * size].to(dtype) for x in (gradient, states))
        if batch != 1:
            gradient, states = (x.unflatten(-1, (blocks, size)).transpose(1, 2) for x in (gradient, states))
            product = gradient.unsqueeze(-1) * states.unsqueeze(-2)
            outer = product if outer is None else outer.add_(product)
        else:
            factors = block_rows(gradient, size).transpose(1, 2), block_rows(states, size)
            # Buffers are reused: small products spend most of their time on allocations.
            outer = torch.bmm(*factors) if outer is None else outer.baddbmm_(*factors)
    outer = outer.view(batch, tokens, rotated[0].shape[1], blocks, size, size)
    outer = (outer.sum(2, keepdim=True) if heads == 1 else outer).transpose(1, 2)
    return outer if rotation is None else outer @ rotation.to(outer.dtype)


def eigen_gradients(
    outer: torch.Tensor, generators: torch.Tensor, phases: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Gradients of the angles and of UᵀSU off its diagonal planes, from Σ g rᵀ.

    With D = UᵀSU, ∂exp(sD) along T contracted with g is ⟨∫₀ˢ e^(−uD) (g rᵀ) e^(uD) du, T⟩ (Daleckii–Krein). On the 2×2
    block of the planes j and k, written as (a + ib) and (c + id) for its parts that commute and anticommute with a
    rotation, the integral is a product with s e^(−iα/2) sinc(α/2), α = s (μ_j ∓ μ_k): finite for equal frequencies.

    Args:
        outer: (1 or B, 1 or H, N, blocks, b, b).
        generators: (1 or H, blocks, b, b).
        phases: (1 or B, 1 or H, N, blocks).

    Returns:
        (1 or B, 1 or H, N, blocks, b/2) and (1 or H, blocks, b, b).
    """
    size = generators.shape[-1]
    planes = size // 2
    if size <= GATHERED_SIZE:
        # The parts are linear in the blocks: one product for all of them.
        every = torch.eye(size**2, dtype=outer.dtype, device=outer.device).view(-1, size, size)
        # Tokens come before heads in memory.
        parts = (outer.transpose(1, 2).flatten(-2) @ torch.cat(_plane_parts(every), dim=-1)).transpose(1, 2)
        pairs = planes * (planes - 1) // 2
        angles_gradient, a, b, c, d = parts.split([planes, pairs, pairs, pairs, pairs], dim=-1)
    else:
        angles_gradient, a, b, c, d = _plane_parts(outer)
    frequencies = torch.stack([generators[..., 2 * j + 1, 2 * j] for j in range(planes)], dim=-1).to(phases.dtype)
    j, k = torch.triu_indices(planes, planes, offset=1, device=outer.device)
    phases = phases.unsqueeze(-1)

    def integrate(real, imaginary, frequency):
        half = phases * (frequency / 2).unsqueeze(-3)
        cos, sin = half.cos(), half.sin()
        length = phases * torch.where(half == 0, 1, sin / half)
        cos, sin = cos * length, sin * length
        return (real * cos + imaginary * sin).sum((0, 2)), (imaginary * cos - real * sin).sum((0, 2))

    a, b = integrate(a, b, frequencies[..., j] - frequencies[..., k])
    c, d = integrate(c, d, frequencies[..., j] + frequencies[..., k])
    # `_plane_parts` gives twice a, b, c and d, and the gradient is half of the skew-symmetric matrix made of them.
    blocks = torch.stack([torch.stack([a + c, d - b], -1), torch.stack([b + d, a - c], -1)], -2) / 4
    gradient = blocks.new_zeros(*blocks.shape[:-3], planes, planes, 2, 2)
    gradient[..., j, k, :, :] = blocks
    gradient = gradient.transpose(-3, -2).flatten(-2).flatten(-3, -2)
    return angles_gradient, (gradient - gradient.transpose(-1, -2)).to(generators.dtype)


def _plane_parts(matrices: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """
    Parts of M − Mᵀ for (…, b, b) matrices M: the one within each plane, (…, b/2), and for the block of every pair of
    planes j < k twice the a, b, c and d of aI + bJ + cK + dL, K = diag(1, −1), L = [[0, 1], [1, 0]], (…, pairs) each.
    """
    planes = matrices.shape[-1] // 2
    skew = matrices - matrices.transpose(-1, -2)
    # (…, j, k, 2, 2)
    blocks = skew.unflatten(-1, (planes, 2)).unflatten(-3, (planes, 2)).transpose(-2, -3)
    within = blocks[..., 1, 0].diagonal(dim1=-2, dim2=-1)
    j, k = torch.triu_indices(planes, planes, offset=1, device=matrices.device)
    (upper_left, upper_right), (lower_left, lower_right) = (
        row.unbind(-1) for row in blocks[..., j, k, :, :].unbind(-2)
    )
    return (
        within,
        upper_left + lower_right,
        lower_left - upper_right,
        upper_left - lower_right,
        upper_right + lower_left,
    )
