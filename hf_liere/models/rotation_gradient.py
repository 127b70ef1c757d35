"""
Gradients of rotations from those of rotated queries and keys: of angles, of blocks, and of commuting generators.
"""

import torch
from transformers.utils.generic import maybe_autocast

from .backends import find_backend


# Above, indexing costs less than one product that gathers the parts of all pairs of planes.
GATHERED_SIZE = 16


def block_rows(states: torch.Tensor, size: int) -> torch.Tensor:
    """(B, H, N, blocks · size) → (N · H · blocks, B, size)."""
    return states.unflatten(-1, (-1, size)).permute(2, 1, 3, 0, 4).flatten(0, 2)


def angle_gradients(gradients, rotated, cos_sin: torch.Tensor) -> torch.Tensor:
    """Derivative along the angles, summed over query, key and what shares an angle: (1 or B, 1 or H, N, planes)."""
    if backend := find_backend("angle_gradients", rotated[0], 2):
        return backend.angle_gradients(gradients, rotated, cos_sin.shape[:4]).to(cos_sin.dtype)
    total = 0
    for gradient, states in zip(gradients, rotated):
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
    with maybe_autocast(rotated[0].device.type, enabled=False):
        for gradient, states in zip(gradients, rotated):
            dtype = torch.promote_types(states.dtype, torch.float32)
            gradient, states = gradient.to(dtype), states.to(dtype)
            if batch > 1:
                gradient, states = (x.unflatten(-1, (blocks, size)).transpose(1, 2) for x in (gradient, states))
                product = gradient.unsqueeze(-1) * states.unsqueeze(-2)
                outer = product if outer is None else outer.add_(product)
            else:
                factors = block_rows(gradient, size).transpose(1, 2), block_rows(states, size)
                # Buffers are reused: small products spend most of their time on allocations.
                outer = torch.bmm(*factors) if outer is None else outer.baddbmm_(*factors)
    outer = outer.view(batch, tokens, -1, blocks, size, size)
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
    # Half for the block, half for its mirror image below.
    blocks = torch.stack([torch.stack([a + c, d - b], -1), torch.stack([b + d, a - c], -1)], -2) / 4
    gradient = blocks.new_zeros(*blocks.shape[:-3], planes, planes, 2, 2)
    gradient[..., j, k, :, :] = blocks
    gradient = gradient.transpose(-3, -2).flatten(-2).flatten(-3, -2)
    return angles_gradient, (gradient - gradient.transpose(-1, -2)).to(generators.dtype)


def _plane_parts(matrices: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """
    Parts of the skew part of (…, b, b): the one within each plane, (…, b/2), and for the block of every pair of planes
    j < k twice the a, b, c and d of aI + bJ + cK + dL, K = diag(1, −1), L = [[0, 1], [1, 0]], (…, pairs) each.
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
