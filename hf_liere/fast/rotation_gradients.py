"""Gradients of applied rotations: of queries, keys, angles, blocks and commuting generators."""

import functools
from collections.abc import Sequence

import torch

from .application import apply_rotation, block_rows, drop_empty_key, match_layout, restore_empty_key
from .dispatch import batches_layers, find_backend, in_portable_graph, operator


# Up to this block size one product gathers the parts of all pairs of planes; above it, indexing costs less.
GATHERED_SIZE = 16
# Outer products of all layers that are kept until the end of the backward pass, 64 MiB.
KEPT_ELEMENTS = 1 << 24


def _like_inputs(query_gradient, key_gradient, query, key, rotation, generators, phases):
    if collects_outer_products(generators, phases):
        return query_gradient, key_gradient, rotation.new_empty(0), generators
    return query_gradient, key_gradient, rotation, rotation.new_empty(0) if generators is None else generators


@operator(
    "(Tensor query_gradient, Tensor key_gradient, Tensor query, Tensor key, Tensor rotation, Tensor? generators, "
    "Tensor? phases) -> (Tensor, Tensor, Tensor, Tensor)",
    fake=lambda *inputs: tuple(map(torch.empty_like, _like_inputs(*inputs))),
)
def rotate_backward(query_gradient, key_gradient, query, key, rotation, generators, phases):
    """
    Gradients of query, key, rotation, and of the generators if given; `query` and `key` are the rotated ones. Cos and
    sin get the gradient of the angles, or none where [`outer_products_of_layers`] are given as generators.
    """
    like = _like_inputs(query_gradient, key_gradient, query, key, rotation, generators, phases)
    pairs = drop_empty_key(query_gradient, key_gradient), drop_empty_key(query, key)
    if collects_outer_products(generators, phases):
        generators_gradient = outer_products(*pairs, generators.shape[:4], generators.shape[-1])
        *rotated_back, rotation_gradient = *apply_rotation(pairs[0], rotation, inverse=True), like[2]
    elif generators is not None:
        *rotated_back, rotation_gradient, generators_gradient = commuting_backward(*pairs, rotation, generators, phases)
    else:
        backward, generators_gradient = planes_backward if rotation.ndim == 5 else blocks_backward, like[-1]
        *rotated_back, rotation_gradient = backward(*pairs, rotation)
    rotated_back = restore_empty_key(tuple(rotated_back), key_gradient)
    return match_layout((*rotated_back, rotation_gradient, generators_gradient), like)


def collects_outer_products(generators: torch.Tensor | None, phases: torch.Tensor | None) -> bool:
    """Whether generators stand for [`outer_products_of_layers`]."""
    return generators is not None and phases is None


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
        generators_gradient = _join_parts(torch.cat([a, c], -1), torch.cat([b, d], -1), size)
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
    pairs = planes * (planes - 1) // 2
    if size <= GATHERED_SIZE:
        # The parts are linear in the blocks: one product for all of them.
        gather, scatter = _part_maps(size, outer.dtype, outer.device)
        # Tokens come before heads in memory.
        parts = (outer.transpose(1, 2).flatten(-2) @ gather).transpose(1, 2)
    else:
        parts = torch.cat(_plane_parts(outer), dim=-1)
    angles_gradient, real, imaginary = parts.split([planes, 2 * pairs, 2 * pairs], dim=-1)
    frequencies = _plane_frequencies(generators).to(phases.dtype)  # (1 or H, blocks, b/2)
    differences = frequencies @ _half_differences(planes, phases.dtype, phases.device)  # (1 or H, blocks, 2 · pairs)
    phases = phases.unsqueeze(-1)
    half = phases * differences.unsqueeze(-3)  # (1 or B, 1 or H, N, blocks, 2 · pairs)
    cos, sin = half.cos(), half.sin()
    length = phases * (sin / half).masked_fill_(half == 0, 1)
    cos, sin = cos * length, sin * length
    along, across = (real * cos).addcmul_(imaginary, sin), (imaginary * cos).addcmul_(real, sin, value=-1)
    along, across = along.sum((0, 2)), across.sum((0, 2))  # (1 or H, blocks, 2 · pairs) each
    if size <= GATHERED_SIZE:
        gradient = (torch.cat([along, across], dim=-1) @ scatter).unflatten(-1, (size, size))
    else:
        gradient = _join_parts(along, across, size)
    return angles_gradient, gradient.to(generators.dtype)


@functools.lru_cache(maxsize=64)
def _half_differences(planes: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """(planes, 2 · pairs) matrix that makes (f_j − f_k)/2 and (f_j + f_k)/2 of frequencies, for all pairs j < k."""
    with torch.inference_mode(False):
        planes_of_pairs = torch.triu_indices(planes, planes, offset=1, device=device)  # (2, pairs)
        first, second = torch.eye(planes, dtype=dtype, device=device)[:, planes_of_pairs].unbind(1)
        return torch.cat([first - second, first + second], dim=-1) / 2


@functools.lru_cache(maxsize=64)
def _part_maps(size: int, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """[`_plane_parts`] as a (b², b/2 + 4 · pairs) matrix, and [`_join_parts`] as a (4 · pairs, b²) matrix."""
    pairs = (size // 2) * (size // 2 - 1) // 2
    # Training cannot use tensors that inference mode made.
    with torch.inference_mode(False):
        every_entry = torch.eye(size**2, dtype=dtype, device=device).view(-1, size, size)
        every_part = torch.eye(4 * pairs, dtype=dtype, device=device)
        joined = _join_parts(every_part[:, : 2 * pairs], every_part[:, 2 * pairs :], size)
        return torch.cat(_plane_parts(every_entry), dim=-1), joined.flatten(-2)


def outer_products_of_layers(phases: torch.Tensor, generators: torch.Tensor) -> Sequence[torch.Tensor | None]:
    """
    For every layer a stand-in for Σ g rᵀ of every token: where queries and keys are rotated, it takes these products as
    its gradient, and returns the gradients of phases and generators of all layers together. `None` for every layer
    without gradients, on devices that compute layers one by one, and for products that are too large to be kept.

    Args:
        phases: (layers, 1 or B, 1 or H, N, blocks).
        generators: (layers, 1 or H, blocks, b, b), UᵀSU.

    Returns:
        (1 or B, 1 or H, N, blocks, b, b) for each layer.
    """
    needs_gradient = torch.is_grad_enabled() and (phases.requires_grad or generators.requires_grad)
    kept = phases.numel() * generators.shape[-1] ** 2 <= KEPT_ELEMENTS
    if not (needs_gradient and kept and batches_layers(phases.device)) or in_portable_graph():
        return [None] * len(phases)
    return _outer_products_of_layers(phases, generators).unbind()


def _stand_in(phases, generators):
    """Of the shape of all products, in the memory of one number."""
    return phases.new_zeros(1).expand(*phases.shape, *generators.shape[-2:])


@operator(
    "(Tensor phases, Tensor generators, Tensor outer) -> (Tensor, Tensor)",
    fake=lambda phases, generators, outer: tuple(torch.empty_like(x).contiguous() for x in (phases, generators)),
)
def integrate_layers(phases, generators, outer):
    """Gradients of phases and UᵀSU of all layers, from Σ g rᵀ."""
    layers, heads = phases.shape[0], phases.shape[2]
    every_outer, every_phase = (x.transpose(0, 1).flatten(1, 2) for x in (outer, phases))  # (B, layers · H, N, …)
    every_generator = generators.flatten(0, 1)
    by_angle, gradient = eigen_gradients(every_outer, every_generator, every_phase)
    # α = s μ
    by_phase = (by_angle * _plane_frequencies(every_generator).unsqueeze(-3)).sum(-1)  # (B, layers · H, N, blocks)
    by_frequency = (by_angle * every_phase.unsqueeze(-1)).sum((0, 2))  # (layers · H, blocks, b/2)
    _plane_frequencies(gradient).add_(by_frequency)
    by_phase = by_phase.unflatten(1, (layers, heads)).transpose(0, 1)
    return by_phase.to(phases.dtype).contiguous(), gradient.view_as(generators).contiguous()


@operator(
    "(Tensor phases, Tensor generators) -> Tensor",
    fake=_stand_in,
    gradients=lambda ctx, outer: integrate_layers(*ctx.saved_tensors, outer),
    save=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)
def _outer_products_of_layers(phases, generators):
    return _stand_in(phases, generators)


def _plane_frequencies(generators: torch.Tensor) -> torch.Tensor:
    """(…, b/2) frequencies of the planes of (…, b, b) UᵀSU, in their memory."""
    return generators[..., 1::2, ::2].diagonal(dim1=-2, dim2=-1)


def _join_parts(real: torch.Tensor, imaginary: torch.Tensor, size: int) -> torch.Tensor:
    """(…, b, b) gradient of UᵀSU from integrals of the [`_plane_parts`] a and c, b and d, (…, 2 · pairs) each."""
    planes = size // 2
    (a, c), (b, d) = real.chunk(2, dim=-1), imaginary.chunk(2, dim=-1)
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
    planes j < k twice the a, c, b and d of aI + bJ + cK + dL, K = diag(1, −1), L = [[0, 1], [1, 0]], (…, pairs) each.
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
        upper_left - lower_right,
        lower_left - upper_right,
        upper_right + lower_left,
    )
