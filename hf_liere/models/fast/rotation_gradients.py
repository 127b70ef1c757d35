"""Gradients of applied rotations: of queries, keys, angles, blocks and commuting generators."""

import torch

from .application import apply_rotation, block_rows, drop_empty_key, match_layout, restore_empty_key
from .dispatch import find_backend, operator


# Up to this block size one product gathers the parts of all pairs of planes; above it, indexing costs less.
GATHERED_SIZE = 16


def _like_inputs(query_gradient, key_gradient, query, key, rotation, generators, phases):
    return query_gradient, key_gradient, rotation, rotation.new_empty(0) if generators is None else generators


@operator(
    "(Tensor query_gradient, Tensor key_gradient, Tensor query, Tensor key, Tensor rotation, Tensor? generators, "
    "Tensor? phases) -> (Tensor, Tensor, Tensor, Tensor)",
    fake=lambda *inputs: tuple(map(torch.empty_like, _like_inputs(*inputs))),
)
def rotate_backward(query_gradient, key_gradient, query, key, rotation, generators, phases):
    """
    Gradients of query, key, rotation, and of the generators if given; `query` and `key` are the rotated ones. Cos and
    sin get the gradient of the angles.
    """
    like = _like_inputs(query_gradient, key_gradient, query, key, rotation, generators, phases)
    pairs = drop_empty_key(query_gradient, key_gradient), drop_empty_key(query, key)
    if generators is not None:
        *rotated_back, rotation_gradient, generators_gradient = commuting_backward(*pairs, rotation, generators, phases)
    else:
        backward, generators_gradient = planes_backward if rotation.ndim == 5 else blocks_backward, like[-1]
        *rotated_back, rotation_gradient = backward(*pairs, rotation)
    rotated_back = restore_empty_key(tuple(rotated_back), key_gradient)
    return match_layout((*rotated_back, rotation_gradient, generators_gradient), like)


def blocks_backward(gradients, rotated, blocks: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Gradients of the states, and those of blocks: g qᵀ with q = Rᵀ r for rotated states r."""
    outer = outer_products(gradients, rotated, blocks.shape[:4], blocks.shape[-1], blocks)
    return *apply_rotation(gradients, blocks, inverse=True), outer.to(blocks.dtype)


def planes_backward(gradients, rotated, cos_sin: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Gradients of the states, and those of cos and sin: [`angle_gradients`] along (−sin, cos)."""
    by_angle = angle_gradients(gradients, rotated, cos_sin)
    return *apply_rotation(gradients, cos_sin, inverse=True), _along_circle(by_angle, cos_sin)


def commuting_backward(
    gradients, rotated, cos_sin: torch.Tensor, generators: torch.Tensor, phases: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """As [`planes_backward`], and the gradient of UᵀSU."""
    size = generators.shape[-1]
    # The rotations of separate samples have few states each: a separate pass costs no more.
    backend = find_backend("commuting_backward", rotated[0], size) if len(phases) == 1 else None
    if backend:
        frequencies = _plane_frequencies(generators)
        *found, a, b, c, d = backend.commuting_backward(gradients, rotated, cos_sin, frequencies, phases)
        *rotated_back, cos_sin_gradient = found
        generators_gradient = _join_parts(a, b, c, d, size)
    else:
        outer = outer_products(gradients, rotated, phases.shape, size)
        by_angle, generators_gradient = eigen_gradients(outer, generators, phases)
        by_angle = by_angle.reshape(cos_sin.shape[:-1]).to(cos_sin.dtype)  # (1 or B, 1 or H, N, planes)
        rotated_back = apply_rotation(gradients, cos_sin, inverse=True)
        cos_sin_gradient = _along_circle(by_angle, cos_sin)
    return *rotated_back, cos_sin_gradient.to(cos_sin.dtype), generators_gradient.to(generators.dtype)


def _along_circle(by_angle: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """The gradient of cos and sin along (−sin, cos), the direction in which they change with the angle."""
    cos, sin = cos_sin.unbind(-1)
    return torch.stack([-sin * by_angle, cos * by_angle], dim=-1)


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
    assert outer is not None, "there is a query or a key"
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
    frequencies = _plane_frequencies(generators).to(phases.dtype)
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
    return angles_gradient, _join_parts(a, b, c, d, size).to(generators.dtype)


def _plane_frequencies(generators: torch.Tensor) -> torch.Tensor:
    """(…, b/2) frequencies of the planes of (…, b, b) UᵀSU."""
    return torch.stack([generators[..., j + 1, j] for j in range(0, generators.shape[-1], 2)], dim=-1)


def _join_parts(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, d: torch.Tensor, size: int) -> torch.Tensor:
    """(1 or H, blocks, b, b) gradient of UᵀSU from integrals of the [`_plane_parts`], (1 or H, blocks, pairs) each."""
    planes = size // 2
    j, k = torch.triu_indices(planes, planes, offset=1, device=a.device)
    # `_plane_parts` gives twice a, b, c and d, and the gradient is half of the skew-symmetric matrix made of them.
    blocks = torch.stack([torch.stack([a + c, d - b], -1), torch.stack([b + d, a - c], -1)], -2) / 4
    gradient = blocks.new_zeros(*blocks.shape[:-3], planes, planes, 2, 2)
    gradient[..., j, k, :, :] = blocks
    gradient = gradient.transpose(-3, -2).flatten(-2).flatten(-3, -2)
    return gradient - gradient.transpose(-1, -2)


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
