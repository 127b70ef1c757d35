"""Rotations applied to queries and keys: the fastest exact form for each kind of rotation, on every device."""

from typing import NamedTuple

import torch
from transformers.utils.generic import maybe_autocast

from .backends import find_backend
from .tracing import first_derivative_only


# Of query and key each; measured on CPU for blocks of 8.
SAMPLES_AT_ONCE = 8
# Above, a product that gathers the parts of all pairs of planes is more work than to index them.
GATHERED_SIZE = 16


class EigenRotation(NamedTuple):
    """
    R(p) = exp(s(p) S) = U rot(s(p) μ) Uᵀ with S = U · blockdiag(μ J) · Uᵀ, for generators that commute.

    U cancels in the products of rotated queries and keys, so that after [`fold`] attention only turns planes.

    Attributes:
        planes: (1 or B, 1 or H, N, blocks · b/2, 2) cos and sin of s(p) μ.
        basis: (1 or H, blocks, b, b) orthogonal U, without a gradient.
        generators: (1 or H, blocks, b, b), the value of UᵀSU with the gradient of S, or `None` where none is asked for.
        scalars: (1 or B, 1 or H, N, blocks) the s(p), or `None` as `generators`.
    """

    planes: torch.Tensor
    basis: torch.Tensor
    generators: torch.Tensor | None = None
    scalars: torch.Tensor | None = None


Rotation = torch.Tensor | EigenRotation


def rotate(states: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """
    R(p) applied to consecutive blocks of channels of every token and head (LieRE §4: q′ = R(p) q, k′ = R(p) k).

    Args:
        states: (B, H, N, D) queries or keys.
        rotation: (1 or B, 1 or H, N, blocks, 2) with cos and sin, or (1 or B, 1 or H, N, blocks, b, b); channels
            beyond blocks · b are passed through.

    Returns:
        (B, H, N, D) in the type of `states`.
    """
    width = rotation.shape[3] * rotation.shape[-1]
    rotated, tail = states[..., :width], states[..., width:]
    if rotation.ndim == 5:
        rotated = _turn(rotated, rotation)
    elif rotation.shape[0] == 1 and not torch.compiler.is_compiling():
        rotated = _multiply((rotated,), rotation)[0]
    else:
        rotation = rotation.to(states.dtype)
        rotated = (rotation @ rotated.unflatten(-1, (-1, rotation.shape[-1])).unsqueeze(-1)).squeeze(-1).flatten(-2)
    return torch.cat([rotated, tail], dim=-1) if tail.shape[-1] else rotated


def rotate_query_key(query: torch.Tensor, key: torch.Tensor, rotation: Rotation) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Query and key of one layer, (B, H, N, D) each, rotated as in [`rotate`].

    With an [`EigenRotation`] they must be in its basis already, see [`fold`], and stay in it.
    """
    eigen = rotation if isinstance(rotation, EigenRotation) else EigenRotation(rotation, None)
    width = eigen.planes.shape[3] * eigen.planes.shape[-1]
    fused = find_backend("apply_rotation", query, eigen.planes.shape[-1]) is not None
    whole = fused or width == query.shape[-1]
    states = (query, key) if whole else (query[..., :width], key[..., :width])
    differentiable = eigen.generators is None and torch.compiler.is_compiling()
    if differentiable or (eigen.planes.ndim == 6 and eigen.planes.shape[0] > 1 and not fused):
        # Compilers fuse plain operations themselves, and the samples' own matrices have no sum to be saved.
        rotated = tuple(rotate(part, eigen.planes) for part in states)
    else:
        rotated = _Rotate.apply(*states, eigen.planes, eigen.generators, eigen.scalars)
    if whole:
        return rotated
    return tuple(torch.cat([part, source[..., width:]], dim=-1) for part, source in zip(rotated, (query, key)))


def fold(projected: torch.Tensor, basis: torch.Tensor) -> torch.Tensor:
    """
    Uᵀ applied to what a query or key projection puts out, or to its weight or bias.

    Args:
        projected: (H · D, …), output channels first.
        basis: (1 or H, blocks, b, b).

    Returns:
        The same shape and type.
    """
    _, blocks, size, _ = basis.shape
    with maybe_autocast(projected.device.type, enabled=False):
        dtype = torch.promote_types(projected.dtype, torch.float32)
        states = projected.to(dtype).reshape(-1, blocks, size, projected[0].numel())
        folded = torch.matmul(basis.to(dtype).transpose(-1, -2), states)
    return folded.view(projected.shape).to(projected.dtype)


def fold_states(states: torch.Tensor, basis: torch.Tensor) -> torch.Tensor:
    """
    Uᵀ applied to (B, H, N, D) queries or keys, where the weights that made them cannot be turned by [`fold`].

    Exactly the same numbers where U is the identity.
    """
    batch, heads, tokens, width = states.shape
    _, blocks, size, _ = basis.shape
    with maybe_autocast(states.device.type, enabled=False):
        # One product per head and block, with all tokens of all samples as rows.
        rows = states.unflatten(-1, (blocks, size)).permute(1, 3, 0, 2, 4).flatten(2, 3).flatten(0, 1)
        turn = basis.to(states.dtype).expand(heads, blocks, size, size).flatten(0, 1)
        turned = torch.bmm(rows, turn).view(heads, blocks, batch, tokens, size).permute(2, 3, 0, 1, 4)
    return turned.reshape(batch, tokens, heads, width).transpose(1, 2)


class _Rotate(torch.autograd.Function):
    """
    Query and key rotated alike. The backward pass returns the gradient of dense blocks, or that of angles, through
    cos and sin, with the rest of the gradient of the generators for an [`EigenRotation`].
    """

    @staticmethod
    def forward(ctx, query, key, rotation, generators, scalars):
        rotated = _apply((query, key), rotation)
        # Rotated states are kept by attention anyway; the ones before are never needed.
        states = rotated if ctx.needs_input_grad[2] else (None, None)
        ctx.save_for_backward(*states, rotation, generators, scalars)
        return rotated

    @staticmethod
    @first_derivative_only
    def backward(ctx, *gradients):
        *states, rotation, generators, scalars = ctx.saved_tensors
        turned_back = _apply(gradients, rotation, inverse=True)
        if not ctx.needs_input_grad[2]:
            return *turned_back, None, None, None
        if rotation.ndim == 6:
            # g qᵀ with q = Rᵀ r, r being the rotated state.
            outer = _outer_products(gradients, states, rotation.shape[:4], rotation.shape[-1], rotation)
            return *turned_back, outer.to(rotation.dtype), None, None
        (cos, sin), generators_gradient = rotation.unbind(-1), None
        if generators is None:
            slopes = _angle_gradients(gradients, states, rotation)
        else:
            outer = _outer_products(gradients, states, scalars.shape, generators.shape[-1])
            slopes, generators_gradient = _eigen_gradients(outer, generators, scalars)
            slopes = slopes.reshape(cos.shape)
        # The direction in which cos and sin change with the angle: any other part would be lost in it.
        rotation_gradient = torch.stack([-sin * slopes, cos * slopes], dim=-1)
        return *turned_back, rotation_gradient, generators_gradient, None


def _apply(states, rotation: torch.Tensor, inverse: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    if backend := find_backend("apply_rotation", states[0], rotation.shape[-1]):
        return backend.apply_rotation(*states, rotation, inverse)
    if rotation.ndim == 6:
        return _multiply(states, rotation, inverse)
    if inverse:
        rotation = rotation * rotation.new_tensor([1.0, -1.0])
    return tuple(_turn(part, rotation) for part in states)


def _turn(states: torch.Tensor, planes: torch.Tensor) -> torch.Tensor:
    planes = planes.to(torch.promote_types(states.dtype, torch.float32))
    wide = states.to(planes.dtype)
    if _as_complex(wide):
        # One pass over memory instead of six.
        rotated = torch.view_as_complex(wide.unflatten(-1, (-1, 2))) * torch.view_as_complex(planes.contiguous())
        rotated = torch.view_as_real(rotated)
    else:
        (cos, sin), (first, second) = planes.unbind(-1), wide.unflatten(-1, (-1, 2)).unbind(-1)
        rotated = torch.stack([first * cos - second * sin, first * sin + second * cos], dim=-1)
    return rotated.flatten(-2).to(states.dtype)


def _as_complex(states: torch.Tensor) -> bool:
    """Whether pairs of channels can be seen as complex numbers; compilers and MPS do better without."""
    if torch.compiler.is_compiling() or states.device.type == "mps":
        return False
    return states.stride(-1) == 1 and all(s % 2 == 0 for s in (states.storage_offset(), *states.stride()[:-1]))


def _multiply(
    states: tuple[torch.Tensor, ...], rotation: torch.Tensor, inverse: bool = False
) -> tuple[torch.Tensor, ...]:
    """(B, H, N, D) states, all times the same (1, 1 or H, N, blocks, b, b) blocks or their transposes."""
    batch, heads, tokens, width = states[0].shape
    blocks, size = rotation.shape[3], rotation.shape[-1]
    rotation = rotation[0].expand(heads, *rotation.shape[2:]).transpose(0, 1).reshape(-1, size, size)
    rotation = rotation.to(states[0].dtype)
    # In memory as a projection leaves it, tokens before heads.
    rotated = tuple(part.new_empty(batch, tokens, heads, width).transpose(1, 2) for part in states)
    # One product per token, head and block takes several samples as its columns; more than these fall out of cache.
    for start in range(0, batch, SAMPLES_AT_ONCE):
        samples = slice(start, start + SAMPLES_AT_ONCE)
        rows = _rows(torch.cat([part[samples].transpose(1, 2) for part in states]).transpose(1, 2), size)
        if inverse:
            product = torch.bmm(rows, rotation)
        else:
            product = torch.bmm(rotation, rows.transpose(1, 2)).transpose(1, 2)
        product = product.unflatten(0, (tokens, heads, blocks)).permute(3, 1, 0, 2, 4)
        for whole, part in zip(rotated, product.chunk(len(states))):
            whole[samples].unflatten(-1, (blocks, size)).copy_(part)
    return rotated


def _rows(states: torch.Tensor, size: int) -> torch.Tensor:
    """(B, H, N, blocks · size) → (N · H · blocks, B, size)."""
    return states.unflatten(-1, (-1, size)).permute(2, 1, 3, 0, 4).flatten(0, 2)


def _angle_gradients(gradients, rotated, planes: torch.Tensor) -> torch.Tensor:
    """Derivative along the angles, summed over query, key and what shares an angle: (1 or B, 1 or H, N, planes)."""
    if backend := find_backend("angle_gradients", rotated[0], 2):
        return backend.angle_gradients(gradients, rotated, planes.shape[:4]).to(planes.dtype)
    slopes = 0
    for gradient, states in zip(gradients, rotated):
        first, second = gradient.to(planes.dtype).unflatten(-1, (-1, 2)).unbind(-1)
        rotated_first, rotated_second = states.to(planes.dtype).unflatten(-1, (-1, 2)).unbind(-1)
        slope = (second * rotated_first).addcmul_(first, rotated_second, value=-1)
        slopes = slopes + slope.sum_to_size(planes.shape[:-1])
    return slopes


def _outer_products(
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
                factors = _rows(gradient, size).transpose(1, 2), _rows(states, size)
                # Fresh memory is what small products wait for.
                outer = torch.bmm(*factors) if outer is None else outer.baddbmm_(*factors)
    outer = outer.view(batch, tokens, -1, blocks, size, size)
    outer = (outer.sum(2, keepdim=True) if heads == 1 else outer).transpose(1, 2)
    return outer if rotation is None else outer @ rotation.to(outer.dtype)


def _eigen_gradients(
    outer: torch.Tensor, generators: torch.Tensor, scalars: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Gradients of the angles and of UᵀSU off its diagonal planes, from Σ g rᵀ.

    With D = UᵀSU, ∂exp(sD) along T contracted with g is ⟨∫₀ˢ e^(−uD) (g rᵀ) e^(uD) du, T⟩ (Daleckii–Krein). On the 2×2
    block of the planes j and k, written as (a + ib) and (c + id) for its parts that commute and anticommute with a
    rotation, the integral is a product with s e^(−iα/2) sinc(α/2), α = s (μ_j ∓ μ_k): finite for equal frequencies.

    Args:
        outer: (1 or B, 1 or H, N, blocks, b, b).
        generators: (1 or H, blocks, b, b).
        scalars: (1 or B, 1 or H, N, blocks).

    Returns:
        (1 or B, 1 or H, N, blocks, b/2) and (1 or H, blocks, b, b).
    """
    size = generators.shape[-1]
    planes = size // 2
    if size <= GATHERED_SIZE:
        # The parts are linear in the blocks: one product for all of them.
        every = torch.eye(size**2, dtype=outer.dtype, device=outer.device).view(-1, size, size)
        # In the order of memory, tokens before heads.
        parts = (outer.transpose(1, 2).flatten(-2) @ torch.cat(_plane_parts(every), dim=-1)).transpose(1, 2)
        pairs = planes * (planes - 1) // 2
        angles_gradient, a, b, c, d = parts.split([planes, pairs, pairs, pairs, pairs], dim=-1)
    else:
        angles_gradient, a, b, c, d = _plane_parts(outer)
    frequencies = torch.stack([generators[..., 2 * j + 1, 2 * j] for j in range(planes)], dim=-1).to(scalars.dtype)
    j, k = torch.triu_indices(planes, planes, offset=1, device=outer.device)
    scalars = scalars.unsqueeze(-1)

    def integrate(real, imaginary, frequency):
        half = scalars * (frequency / 2).unsqueeze(-3)
        cos, sin = half.cos(), half.sin()
        length = scalars * torch.where(half == 0, 1, sin / half)
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
