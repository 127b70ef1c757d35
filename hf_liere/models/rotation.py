"""Rotations of queries and keys: a class for each kind, with the fastest exact way to apply it on every device."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from transformers.utils.generic import maybe_autocast

from .backends import find_backend
from .rotation_gradient import angle_gradients, block_rows, eigen_gradients, outer_products
from .tracing import first_derivative_only


# Of query and key each; measured on CPU for blocks of 8.
SAMPLES_AT_ONCE = 8


class PlaneRotation(NamedTuple):
    """
    R(p) rotates pairs of neighbouring channels by angles (RoPE-Mixed, Heo et al., eq. 6).

    Attributes:
        cos_sin: (1 or B, 1 or H, N, planes, 2) cos and sin of the angles.
        basis: `None`, as queries and keys are rotated in the basis that they are in.
    """

    cos_sin: torch.Tensor
    basis: None = None

    def rotate(self, query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """
        R(p) q and R(p) k of every token and head (LieRE §4); channels beyond the last plane are passed through.

        Args:
            query: (B, H, N, D).
            key: (B, H, N, D).

        Returns:
            The same shapes and types.
        """
        return _rotate_planes(query, key, self.cos_sin)

    def change_basis(self, states: torch.Tensor) -> torch.Tensor:
        """(B, H, N, D) queries or keys in the basis in which `rotate` takes them."""
        return states

    def to(self, *args, **kwargs) -> "PlaneRotation":
        """With all tensors as `torch.Tensor.to` makes them."""
        return PlaneRotation(self.cos_sin.to(*args, **kwargs))

    def num_tokens(self) -> int:
        return self.cos_sin.shape[2]

    def num_planes(self) -> int:
        """Planes of a head that are rotated elementwise, without products of matrices."""
        return self.cos_sin.shape[3]

    def matrices(self) -> torch.Tensor:
        """R(p) as (1 or B, 1 or H, N, blocks, b, b)."""
        cos, sin = self.cos_sin.unbind(-1)
        return torch.stack([torch.stack([cos, -sin], -1), torch.stack([sin, cos], -1)], -2)


class BlockRotation(NamedTuple):
    """
    R(p) multiplies blocks of neighbouring channels by rotation matrices (LieRE eq. 4).

    Attributes:
        blocks: (1 or B, 1 or H, N, blocks, b, b).
        basis: `None`, as for [`PlaneRotation`].
    """

    blocks: torch.Tensor
    basis: None = None

    def rotate(self, query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As [`PlaneRotation.rotate`]."""
        return _rotate_blocks(query, key, self.blocks)

    def change_basis(self, states: torch.Tensor) -> torch.Tensor:
        """As [`PlaneRotation.change_basis`]."""
        return states

    def to(self, *args, **kwargs) -> "BlockRotation":
        """As [`PlaneRotation.to`]."""
        return BlockRotation(self.blocks.to(*args, **kwargs))

    def num_tokens(self) -> int:
        return self.blocks.shape[2]

    def num_planes(self) -> int:
        """None: blocks are products of matrices."""
        return 0

    def matrices(self) -> torch.Tensor:
        """R(p) as (1 or B, 1 or H, N, blocks, b, b)."""
        return self.blocks


class EigenRotation(NamedTuple):
    """
    R(p) = exp(s(p) S) = U rot(s(p) μ) Uᵀ with S = U · blockdiag(μ J) · Uᵀ, for generators that commute.

    U cancels in the products of rotated queries and keys: attention changes both to the basis once, by [`change_basis`]
    of weights or states, and rotates planes.

    Attributes:
        cos_sin: (1 or B, 1 or H, N, blocks · b/2, 2) cos and sin of s(p) μ.
        basis: (1 or H, blocks, b, b) orthogonal U, without a gradient.
        generators: (1 or H, blocks, b, b), the value of UᵀSU with the gradient of S, or `None` where none is asked for.
        phases: (1 or B, 1 or H, N, blocks) the s(p), or `None` as `generators`.
    """

    cos_sin: torch.Tensor
    basis: torch.Tensor
    generators: torch.Tensor | None = None
    phases: torch.Tensor | None = None

    def rotate(self, query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As [`PlaneRotation.rotate`], of queries and keys that are in the basis already, and stay in it."""
        return _rotate_planes(query, key, self.cos_sin, self.generators, self.phases)

    def change_basis(self, states: torch.Tensor) -> torch.Tensor:
        """
        Uᵀ applied to (B, H, N, D) queries or keys, where it cannot be applied to the weights that made them.

        Exactly the same numbers where U is the identity.
        """
        batch, heads, tokens, width = states.shape
        _, blocks, size, _ = self.basis.shape
        with maybe_autocast(states.device.type, enabled=False):
            # One product per head and block, with all tokens of all samples as rows.
            rows = states.unflatten(-1, (blocks, size)).permute(1, 3, 0, 2, 4).flatten(2, 3).flatten(0, 1)
            basis = self.basis.to(states.dtype).expand(heads, blocks, size, size).flatten(0, 1)  # (H·blocks, b, b)
            changed = torch.bmm(rows, basis).view(heads, blocks, batch, tokens, size).permute(2, 3, 0, 1, 4)
        return changed.reshape(batch, tokens, heads, width).transpose(1, 2)

    def to(self, *args, **kwargs) -> "EigenRotation":
        """As [`PlaneRotation.to`]."""
        return EigenRotation(*(None if tensor is None else tensor.to(*args, **kwargs) for tensor in self))

    def num_tokens(self) -> int:
        return self.cos_sin.shape[2]

    def num_planes(self) -> int:
        """As [`PlaneRotation.num_planes`]."""
        return self.cos_sin.shape[3]

    def matrices(self) -> torch.Tensor:
        """
        R(p) = U rot(s(p) μ) Uᵀ as (1 or B, 1 or H, N, blocks, b, b) in float64, in the basis of the model and without
        a gradient.
        """
        size, basis = self.basis.shape[-1], self.basis.double().unsqueeze(1)  # (1 or H, 1, blocks, b, b)
        planes = PlaneRotation(self.cos_sin.detach().double()).matrices().unflatten(3, (-1, size // 2))
        rotations = planes.new_zeros(*planes.shape[:4], size, size)  # (1 or B, 1 or H, N, blocks, b, b)
        for plane in range(size // 2):
            channels = slice(2 * plane, 2 * plane + 2)
            rotations[..., channels, channels] = planes[..., plane, :, :]
        return basis @ rotations @ basis.transpose(-1, -2)


Rotation = PlaneRotation | BlockRotation | EigenRotation
ROTATIONS = {kind.__name__: kind for kind in (PlaneRotation, BlockRotation, EigenRotation)}


def change_basis(projected: torch.Tensor, basis: torch.Tensor) -> torch.Tensor:
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
        rows = projected.to(dtype).reshape(-1, blocks, size, projected[0].numel())  # (H, blocks, b, …)
        changed = torch.matmul(basis.to(dtype).transpose(-1, -2), rows)
    return changed.view(projected.shape).to(projected.dtype)


def _rotate_planes(
    query: torch.Tensor,
    key: torch.Tensor,
    cos_sin: torch.Tensor,
    generators: torch.Tensor | None = None,
    phases: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    def rotate(*states):
        if generators is None and torch.compiler.is_compiling():
            # Compilers fuse plain operations themselves.
            return tuple(_planes_of(part, cos_sin) for part in states)
        return _RotatePlanes.apply(*states, cos_sin, generators, phases)

    if find_backend("apply_rotation", query, 2) is not None:
        return rotate(query, key)
    return _on_leading(query, key, 2 * cos_sin.shape[3], rotate)


def _rotate_blocks(query: torch.Tensor, key: torch.Tensor, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    fused = find_backend("apply_rotation", query, blocks.shape[-1]) is not None

    def rotate(*states):
        if torch.compiler.is_compiling() or (blocks.shape[0] > 1 and not fused):
            # Samples with matrices of their own have no sum to be saved.
            return tuple(_blocks_of(part, blocks) for part in states)
        return _RotateBlocks.apply(*states, blocks)

    return rotate(query, key) if fused else _on_leading(query, key, blocks.shape[3] * blocks.shape[-1], rotate)


def _on_leading(query: torch.Tensor, key: torch.Tensor, width: int, rotate: Callable):
    """`rotate` for the first channels of query and key; the others are passed through."""
    if width == query.shape[-1]:
        return rotate(query, key)
    rotated = rotate(query[..., :width], key[..., :width])
    return tuple(torch.cat([part, states[..., width:]], dim=-1) for part, states in zip(rotated, (query, key)))


class _RotatePlanes(torch.autograd.Function):
    """
    Query and key by [`PlaneRotation`] or [`EigenRotation`]. The backward pass returns the gradient of the angles,
    through cos and sin, with the rest of the gradient of the generators where these are given.
    """

    @staticmethod
    def forward(ctx, query, key, cos_sin, generators, phases):
        rotated = _apply_planes((query, key), cos_sin)
        # Attention keeps the rotated states anyway; those before are never needed.
        states = rotated if ctx.needs_input_grad[2] else (None, None)
        ctx.save_for_backward(*states, cos_sin, generators, phases)
        return rotated

    @staticmethod
    @first_derivative_only
    def backward(ctx, *gradients):
        *states, cos_sin, generators, phases = ctx.saved_tensors
        rotated_back = _apply_planes(gradients, cos_sin, inverse=True)
        if not ctx.needs_input_grad[2]:
            return *rotated_back, None, None, None
        (cos, sin), generators_gradient = cos_sin.unbind(-1), None
        if generators is None:
            by_angle = angle_gradients(gradients, states, cos_sin)
        else:
            outer = outer_products(gradients, states, phases.shape, generators.shape[-1])
            by_angle, generators_gradient = eigen_gradients(outer, generators, phases)
            by_angle = by_angle.reshape(cos.shape)
        # The direction in which cos and sin change with the angle: any other part would be lost in it.
        cos_sin_gradient = torch.stack([-sin * by_angle, cos * by_angle], dim=-1)
        return *rotated_back, cos_sin_gradient, generators_gradient, None


class _RotateBlocks(torch.autograd.Function):
    """Query and key by a [`BlockRotation`] that all samples share, or any with a backend."""

    @staticmethod
    def forward(ctx, query, key, blocks):
        rotated = _apply_blocks((query, key), blocks)
        ctx.save_for_backward(*(rotated if ctx.needs_input_grad[2] else (None, None)), blocks)
        return rotated

    @staticmethod
    @first_derivative_only
    def backward(ctx, *gradients):
        *states, blocks = ctx.saved_tensors
        rotated_back = _apply_blocks(gradients, blocks, inverse=True)
        if not ctx.needs_input_grad[2]:
            return *rotated_back, None
        # g qᵀ with q = Rᵀ r, r being the rotated state.
        outer = outer_products(gradients, states, blocks.shape[:4], blocks.shape[-1], blocks)
        return *rotated_back, outer.to(blocks.dtype)


def _apply_planes(states, cos_sin: torch.Tensor, inverse: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    if backend := find_backend("apply_rotation", states[0], 2):
        return backend.apply_rotation(*states, cos_sin, inverse)
    if inverse:
        cos_sin = cos_sin * cos_sin.new_tensor([1.0, -1.0])
    return tuple(_planes_of(part, cos_sin) for part in states)


def _apply_blocks(states, blocks: torch.Tensor, inverse: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    if backend := find_backend("apply_rotation", states[0], blocks.shape[-1]):
        return backend.apply_rotation(*states, blocks, inverse)
    return _shared_blocks_of(states, blocks, inverse)


def _planes_of(states: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """(B, H, N, 2 · planes) states, rotated."""
    cos_sin = cos_sin.to(torch.promote_types(states.dtype, torch.float32))
    wide = states.to(cos_sin.dtype)
    if _as_complex(wide):
        # One pass over memory instead of six.
        rotated = torch.view_as_complex(wide.unflatten(-1, (-1, 2))) * torch.view_as_complex(cos_sin.contiguous())
        rotated = torch.view_as_real(rotated)  # (B, H, N, planes, 2)
    else:
        (cos, sin), (first, second) = cos_sin.unbind(-1), wide.unflatten(-1, (-1, 2)).unbind(-1)
        rotated = torch.stack([first * cos - second * sin, first * sin + second * cos], dim=-1)
    return rotated.flatten(-2).to(states.dtype)


def _as_complex(states: torch.Tensor) -> bool:
    """Whether pairs of channels can be seen as complex numbers; compilers and MPS do better without."""
    if torch.compiler.is_compiling() or states.device.type == "mps":
        return False
    return states.stride(-1) == 1 and all(s % 2 == 0 for s in (states.storage_offset(), *states.stride()[:-1]))


def _blocks_of(states: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """(B, H, N, blocks · b) states, rotated."""
    blocks = blocks.to(states.dtype)
    columns = states.unflatten(-1, (-1, blocks.shape[-1])).unsqueeze(-1)  # (B, H, N, blocks, b, 1)
    return (blocks @ columns).squeeze(-1).flatten(-2)


def _shared_blocks_of(
    states: tuple[torch.Tensor, ...], blocks: torch.Tensor, inverse: bool = False
) -> tuple[torch.Tensor, ...]:
    """(B, H, N, blocks · b) states, all rotated by the same (1, 1 or H, N, blocks, b, b) blocks or their transposes."""
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
