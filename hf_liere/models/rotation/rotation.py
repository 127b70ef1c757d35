"""Rotations of queries and keys: a class for each kind, with the fastest exact way to apply it on every device."""

from typing import NamedTuple

import torch
from transformers.utils.generic import maybe_autocast

from .operators import rotate_blocks, rotate_planes


class PlaneRotation(NamedTuple):
    """
    R(p) rotates pairs of neighbouring channels by angles (RoPE-Mixed, Heo et al., eq. 6).

    Attributes:
        cos_sin: (1 or B, 1 or H, N, planes, 2) cos and sin of the angles.
        basis: `None`: queries and keys stay in the basis of the model.
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
        return rotate_planes(query, key, self.cos_sin)

    def change_basis(self, states: torch.Tensor) -> torch.Tensor:
        """(B, H, N, D) queries or keys in the basis in which `rotate` takes them."""
        return states

    def to(self, *args, **kwargs) -> "PlaneRotation":
        """A copy whose tensors are converted by `torch.Tensor.to`."""
        return PlaneRotation(self.cos_sin.to(*args, **kwargs))

    def select(self, kept: torch.Tensor) -> "PlaneRotation":
        """The rotations of the tokens (B, kept) of every sample."""
        return PlaneRotation(_selected(self.cos_sin, kept))

    def num_tokens(self) -> int:
        return self.cos_sin.shape[2]

    def num_samples(self) -> int:
        """Of rotations: 1 where all samples share them."""
        return self.cos_sin.shape[0]

    def repeat_samples(self, times: int) -> "PlaneRotation":
        """The rotations of every sample `times` times, one after the other."""
        return PlaneRotation(self.cos_sin.repeat_interleave(times, 0))

    def split(self, lengths: list[int]) -> "list[PlaneRotation]":
        """The rotations of so many tokens after another."""
        return [PlaneRotation(part) for part in self.cos_sin.split(lengths, dim=2)]

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
        return rotate_blocks(query, key, self.blocks)

    def change_basis(self, states: torch.Tensor) -> torch.Tensor:
        """As [`PlaneRotation.change_basis`]."""
        return states

    def to(self, *args, **kwargs) -> "BlockRotation":
        """As [`PlaneRotation.to`]."""
        return BlockRotation(self.blocks.to(*args, **kwargs))

    def select(self, kept: torch.Tensor) -> "BlockRotation":
        """As [`PlaneRotation.select`]."""
        return BlockRotation(_selected(self.blocks, kept))

    def num_tokens(self) -> int:
        return self.blocks.shape[2]

    def num_samples(self) -> int:
        """As [`PlaneRotation.num_samples`]."""
        return self.blocks.shape[0]

    def repeat_samples(self, times: int) -> "BlockRotation":
        """As [`PlaneRotation.repeat_samples`]."""
        return BlockRotation(self.blocks.repeat_interleave(times, 0))

    def split(self, lengths: list[int]) -> "list[BlockRotation]":
        """As [`PlaneRotation.split`]."""
        return [BlockRotation(part) for part in self.blocks.split(lengths, dim=2)]

    def num_planes(self) -> int:
        """0: blocks are multiplied as matrices."""
        return 0

    def matrices(self) -> torch.Tensor:
        """R(p) as (1 or B, 1 or H, N, blocks, b, b)."""
        return self.blocks


class EigenRotation(NamedTuple):
    """
    R(p) = exp(s(p) S) = U rot(s(p) μ) Uᵀ with S = U · blockdiag(μ J) · Uᵀ, for generators that commute;
    J = [[0, −1], [1, 0]], and rot(α) rotates these planes by α.

    U cancels in the products of rotated queries and keys: attention changes both to the basis once, by [`change_basis`]
    of weights or states, and rotates planes.

    Attributes:
        cos_sin: (1 or B, 1 or H, N, blocks · b/2, 2) cos and sin of s(p) μ.
        basis: (1 or H, blocks, b, b) orthogonal U; with a gradient where it is learned by itself.
        generators: (1 or H, blocks, b, b), the value of UᵀSU with the gradient of S, or `None` if not needed.
        phases: (1 or B, 1 or H, N, blocks) the s(p), or `None` as `generators`.
    """

    cos_sin: torch.Tensor
    basis: torch.Tensor
    generators: torch.Tensor | None = None
    phases: torch.Tensor | None = None

    def rotate(self, query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As [`PlaneRotation.rotate`], of queries and keys that are in the basis already, and stay in it."""
        return rotate_planes(query, key, self.cos_sin, self.generators, self.phases)

    def change_basis(self, states: torch.Tensor) -> torch.Tensor:
        """
        Uᵀ applied to (B, H, N, D) queries or keys, where it cannot be applied to the weights that made them.

        Exactly the same numbers where U is the identity.
        """
        return _in_basis(states, self.basis)

    def to(self, *args, **kwargs) -> "EigenRotation":
        """As [`PlaneRotation.to`]."""
        return EigenRotation(*(None if tensor is None else tensor.to(*args, **kwargs) for tensor in self))

    def select(self, kept: torch.Tensor) -> "EigenRotation":
        """As [`PlaneRotation.select`]."""
        phases = None if self.phases is None else _selected(self.phases, kept)
        return self._replace(cos_sin=_selected(self.cos_sin, kept), phases=phases)

    def num_tokens(self) -> int:
        return self.cos_sin.shape[2]

    def num_samples(self) -> int:
        """As [`PlaneRotation.num_samples`]."""
        return self.cos_sin.shape[0]

    def repeat_samples(self, times: int) -> "EigenRotation":
        """As [`PlaneRotation.repeat_samples`]."""
        of_samples = {"cos_sin": self.cos_sin, "phases": self.phases}
        return self._replace(**{name: x.repeat_interleave(times, 0) for name, x in of_samples.items() if x is not None})

    def split(self, lengths: list[int]) -> "list[EigenRotation]":
        """As [`PlaneRotation.split`]."""
        phases = [None] * len(lengths) if self.phases is None else self.phases.split(lengths, dim=2)
        parts = zip(self.cos_sin.split(lengths, dim=2), phases)
        return [EigenRotation(cos_sin, self.basis, self.generators, phase) for cos_sin, phase in parts]

    def num_planes(self) -> int:
        return self.cos_sin.shape[3]

    def matrices(self) -> torch.Tensor:
        """
        R(p) = U rot(s(p) μ) Uᵀ as (1 or B, 1 or H, N, blocks, b, b) in float64, in the basis of the model and without
        a gradient.
        """
        size, basis = self.basis.shape[-1], self.basis.detach().double().unsqueeze(1)  # (1 or H, 1, blocks, b, b)
        planes = PlaneRotation(self.cos_sin.detach().double()).matrices().unflatten(3, (-1, size // 2))
        rotations = planes.new_zeros(*planes.shape[:4], size, size)  # (1 or B, 1 or H, N, blocks, b, b)
        for plane in range(size // 2):
            channels = slice(2 * plane, 2 * plane + 2)
            rotations[..., channels, channels] = planes[..., plane, :, :]
        return basis @ rotations @ basis.transpose(-1, -2)


class GroupedRotation(NamedTuple):
    """
    Rotations of a batch of inputs of different sizes: those of each distinct size once. Padding is not rotated.

    Attributes:
        rotations: One for each size, for all samples of that size.
        samples: For each size, (samples,) their indices in the batch.
    """

    rotations: tuple[PlaneRotation | BlockRotation | EigenRotation, ...]
    samples: tuple[torch.Tensor, ...]

    @property
    def basis(self) -> torch.Tensor | None:
        """Of [`EigenRotation`], which does not depend on positions."""
        return self.rotations[0].basis

    def change_basis(self, states: torch.Tensor) -> torch.Tensor:
        """As [`PlaneRotation.change_basis`]."""
        return self.rotations[0].change_basis(states)

    def rotate(self, query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As [`PlaneRotation.rotate`]."""
        groups = []
        for rotation, samples in zip(self.rotations, self.samples):
            tokens, of_group = rotation.num_tokens(), [states[samples] for states in (query, key)]
            rotated = rotation.rotate(*(states[:, :, :tokens] for states in of_group))
            groups.append([torch.cat([x, states[:, :, tokens:]], 2) for x, states in zip(rotated, of_group)])
        order = torch.cat(self.samples).argsort()
        return tuple(torch.cat(parts)[order] for parts in zip(*groups))

    def select(self, kept: torch.Tensor) -> "GroupedRotation":
        """As [`PlaneRotation.select`]; padding, which nothing attends to, gets the rotation of the last token."""
        groups = zip(self.rotations, self.samples)
        chosen = (each.select(kept[samples].clamp(max=each.num_tokens() - 1)) for each, samples in groups)
        return self._replace(rotations=tuple(chosen))


def _in_basis(states: torch.Tensor, basis: torch.Tensor) -> torch.Tensor:
    """Uᵀ applied to (B, H, N, D) states, U of shape (1 or H, blocks, b, b)."""
    batch, heads, tokens, width = states.shape
    _, blocks, size, _ = basis.shape
    with maybe_autocast(states.device.type, enabled=False):
        # One product per head and block, with all tokens of all samples as rows.
        rows = states.unflatten(-1, (blocks, size)).permute(1, 3, 0, 2, 4).flatten(2, 3).flatten(0, 1)
        basis = basis.to(states.dtype).expand(heads, blocks, size, size).flatten(0, 1)  # (H·blocks, b, b)
        changed = torch.bmm(rows, basis).view(heads, blocks, batch, tokens, size).permute(2, 3, 0, 1, 4)
    return changed.reshape(batch, tokens, heads, width).transpose(1, 2)


Rotation = PlaneRotation | BlockRotation | EigenRotation | GroupedRotation


def rotate_pair(rotation: Rotation, query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """R(p) q and R(p) k as [`PlaneRotation.rotate`], in the basis of the model for every class of rotations."""
    if rotation.basis is None:
        return rotation.rotate(query, key)
    # Half types would round the states twice more.
    wide = torch.promote_types(query.dtype, torch.float32)
    rotated = rotation.rotate(*(_in_basis(states.to(wide), rotation.basis) for states in (query, key)))
    back = rotation.basis.transpose(-1, -2)
    return tuple(_in_basis(states, back).to(query.dtype) for states in rotated)


def rotate_one(rotation: Rotation, states: torch.Tensor, heads: int) -> torch.Tensor:
    """
    R(p) x of queries or keys by themselves, in the basis of the model.

    Args:
        states: (B, G · heads, N, D); G neighbouring heads share a rotation.
        heads: Number of heads for which there may be rotations.

    Returns:
        The same shape and type.
    """
    batch, groups = states.shape[0], states.shape[1] // heads
    if groups > 1:
        # Heads that share a rotation are rotated as samples that do.
        states = states.unflatten(1, (heads, groups)).transpose(1, 2).flatten(0, 1)  # (B · G, heads, N, D)
        rotation = rotation if rotation.num_samples() == 1 else rotation.repeat_samples(groups)
    rotated, _ = rotate_pair(rotation, states, states[:0])
    return rotated if groups == 1 else rotated.unflatten(0, (batch, groups)).transpose(1, 2).flatten(1, 2)


def _selected(values: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """(1 or B, 1 or H, N, …) → (B, 1 or H, kept, …), tokens before heads in memory as in queries and keys."""
    return gather_tokens(values.transpose(1, 2), kept).transpose(1, 2)


def to_basis(projected: torch.Tensor, basis: torch.Tensor) -> torch.Tensor:
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


def basis_gradients(projected: torch.Tensor, gradients: torch.Tensor, basis: torch.Tensor) -> torch.Tensor:
    """Gradient of the basis from that of [`to_basis`]`(projected, basis)`, in the shape and type of the basis."""
    heads, blocks, size, _ = basis.shape
    with maybe_autocast(projected.device.type, enabled=False):
        before, after = (x.to(basis.dtype).reshape(-1, blocks, size, x[0].numel()) for x in (projected, gradients))
        of_heads = torch.matmul(before, after.transpose(-1, -2))  # (H, blocks, b, b)
    return of_heads if heads > 1 else of_heads.sum(0, keepdim=True)


def gather_tokens(states: torch.Tensor | None, kept: torch.Tensor) -> torch.Tensor | None:
    """(1 or B, N, …) values of tokens → those of the tokens (B, kept) of every sample, (B, kept, …)."""
    if states is None:
        return None
    kept = kept.to(states.device)
    if states.shape[0] == 1:
        return states[0][kept]
    return states[torch.arange(kept.shape[0], device=kept.device).unsqueeze(1), kept]
