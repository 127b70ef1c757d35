"""Rotations of queries and keys: a class for each kind, with the fastest exact way to apply it on every device."""

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch

from ..fast.rotating import _rotate
from .bases import change_basis


OneOrNone = TypeVar("OneOrNone", torch.Tensor, None, torch.Tensor | None)


class PlaneRotation(NamedTuple):
    """
    R(p) = U rot(α) Uᵀ rotates planes by angles α(p): pairs of neighbouring channels (RoPE-Mixed, Heo et al., eq. 6), or
    pairs of columns of a basis U, where generators commute. There α = s(p) μ for one matrix S = U · blockdiag(μ J) · Uᵀ
    in every block, J = [[0, −1], [1, 0]].

    U cancels in the products of rotated queries and keys: attention changes both to the basis once, by [`change_basis`]
    of weights or states, and rotates planes.

    With `inner`, R(p) = Π_a U_a rot(α_a) U_aᵀ is a product with a basis for each of A factors. The basis is that of the
    last factor, which acts first; the others act between the rotations of planes, and that of the first one cancels.

    Attributes:
        cos_sin: (1 or B, 1 or H, N, planes, 2) cos and sin of the angles; of a product, with A times as many planes,
            factor after factor.
        basis: (1 or H, blocks, b, b) orthogonal U, with a gradient if it is learned separately; `None` for I.
        generators: (1 or H, blocks, b, b), the value of UᵀSU with the gradient of S, or `None` if not needed.
        phases: (1 or B, 1 or H, N, blocks) the s(p), or `None` as `generators`.
        inner: (A − 1, 1 or H, blocks, b, b) U_(a+1)ᵀ U_a of a product; `None` for one factor.
        outer: (1 or B, 1 or H, N, blocks, b, b) of [`outer_products_of_layers`], which then takes the gradients of
            `cos_sin` and `generators`; or `None`.
    """

    cos_sin: torch.Tensor
    basis: torch.Tensor | None = None
    generators: torch.Tensor | None = None
    phases: torch.Tensor | None = None
    inner: torch.Tensor | None = None
    outer: torch.Tensor | None = None

    def rotate(self, query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """
        R(p) q and R(p) k of every token and head (LieRE §4). Queries and keys are in the basis, and stay in it;
        channels beyond the last plane are passed through.

        Args:
            query: (B, H, N, D).
            key: (B, H, N, D), or (0, H, N, D) to rotate the query alone.

        Returns:
            The same shapes and types.
        """
        *others, last = self._factors()
        query, key = self._rotate_planes(query, key, last)
        for cos_sin, basis in zip(reversed(others), self._inner_bases()):
            query, key = (change_basis(states, basis, tokens_first=False) for states in (query, key))
            query, key = self._rotate_planes(query, key, cos_sin)
        return query, key

    def _rotate_planes(self, query: torch.Tensor, key: torch.Tensor, cos_sin: torch.Tensor):
        if self.outer is not None:
            return _rotate(query, key, cos_sin, self.outer, None, False)
        return _rotate(query, key, cos_sin, self.generators, self.phases, False)

    def _factors(self) -> tuple[torch.Tensor, ...]:
        """cos and sin of every factor of a product, (1 or B, 1 or H, N, planes, 2) each."""
        return self.cos_sin.chunk(1 if self.inner is None else len(self.inner) + 1, dim=3)

    def _inner_bases(self) -> list[torch.Tensor]:
        """(1 or H, blocks, b, b) of `inner`, in the order in which they act."""
        return [] if self.inner is None else list(reversed(self.inner.unbind()))

    def change_basis(self, states: torch.Tensor) -> torch.Tensor:
        """
        Uᵀ applied to (B, H, N, D) queries or keys, where it cannot be applied to the weights that made them. Where U is
        the identity, the numbers stay exactly the same.
        """
        return states if self.basis is None else change_basis(states, self.basis)

    def final_basis(self) -> torch.Tensor | None:
        """(1 or H, blocks, b, b) basis of the rotated states: U, or U_0 of a product; `None` for I."""
        basis = self.basis
        for inner in self._inner_bases():
            basis = inner if basis is None else basis @ inner
        return basis

    def transpose(self) -> "PlaneRotation":
        """R(p)ᵀ, which takes what `rotate` returned back into the basis that it came in."""
        backwards = [cos_sin * cos_sin.new_tensor([1.0, -1.0]) for cos_sin in reversed(self._factors())]
        inner = None if self.inner is None else self.inner.flip(0).transpose(-1, -2)
        phases = None if self.phases is None else -self.phases
        cos_sin = backwards[0] if len(backwards) == 1 else torch.cat(backwards, dim=3)
        return type(self)(cos_sin, self.final_basis(), self.generators, phases, inner)

    def to(self, *args, **kwargs) -> "PlaneRotation":
        """A copy whose tensors are converted by `torch.Tensor.to`."""
        tensors = self._replace(outer=None)
        return type(self)(*(None if tensor is None else tensor.to(*args, **kwargs) for tensor in tensors))

    def select(self, kept: torch.Tensor) -> "PlaneRotation":
        """The rotations of the tokens (B, kept) of every sample."""
        return self._map_tokens(lambda values: _select(values, kept))

    def num_tokens(self) -> int:
        return self.cos_sin.shape[2]

    def num_samples(self) -> int:
        """1 where all samples share the rotations."""
        return self.cos_sin.shape[0]

    def repeat_samples(self, times: int) -> "PlaneRotation":
        """The rotations of every sample `times` times, one after the other."""
        return self._map_tokens(lambda values: values.repeat_interleave(times, 0))

    def split(self, lengths: list[int]) -> "list[PlaneRotation]":
        """The rotations of consecutive groups of tokens, of these lengths."""
        phases = [None] * len(lengths) if self.phases is None else self.phases.split(lengths, dim=2)
        parts = zip(self.cos_sin.split(lengths, dim=2), phases)
        return [self._replace(cos_sin=cos_sin, phases=phase, outer=None) for cos_sin, phase in parts]

    def num_planes(self) -> int:
        """Planes of a head that are rotated elementwise, without matrix products."""
        return self.cos_sin.shape[3]

    def matrices(self) -> torch.Tensor:
        """
        R(p) in the basis of the model: (1 or B, 1 or H, N, planes, 2, 2) without any basis, and with one
        (1 or B, 1 or H, N, blocks, b, b) in float64, detached.
        """
        final = self.final_basis()
        if final is None:
            cos, sin = self.cos_sin.unbind(-1)  # (1 or B, 1 or H, N, planes)
            return torch.stack([torch.stack([cos, -sin], -1), torch.stack([sin, cos], -1)], -2)
        *others, product = (_fill_blocks(cos_sin.detach().double(), final.shape[-1]) for cos_sin in self._factors())
        if self.basis is not None:
            product = product @ _of_tokens(self.basis).transpose(-1, -2)
        for rotations, inner in zip(reversed(others), self._inner_bases()):
            product = rotations @ _of_tokens(inner).transpose(-1, -2) @ product
        return _of_tokens(final) @ product

    def _map_tokens(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "PlaneRotation":
        phases = None if self.phases is None else change(self.phases)
        return self._replace(cos_sin=change(self.cos_sin), phases=phases, outer=None)


class BlockRotation(NamedTuple):
    """
    R(p) multiplies blocks of neighbouring channels by rotation matrices (LieRE eq. 4). Methods are those of
    [`PlaneRotation`].

    Attributes:
        blocks: (1 or B, 1 or H, N, blocks, b, b).
        basis: `None`: queries and keys stay in the basis of the model.
    """

    blocks: torch.Tensor
    basis: None = None

    def rotate(self, query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """R(p) q and R(p) k, (B, H, N, D) each."""
        return _rotate(query, key, self.blocks, None, None, False)

    def change_basis(self, states: torch.Tensor) -> torch.Tensor:
        return states

    def final_basis(self) -> None:
        return None

    def transpose(self) -> "BlockRotation":
        return BlockRotation(self.blocks.transpose(-1, -2))

    def to(self, *args, **kwargs) -> "BlockRotation":
        return BlockRotation(self.blocks.to(*args, **kwargs))

    def select(self, kept: torch.Tensor) -> "BlockRotation":
        return BlockRotation(_select(self.blocks, kept))

    def num_tokens(self) -> int:
        return self.blocks.shape[2]

    def num_samples(self) -> int:
        return self.blocks.shape[0]

    def repeat_samples(self, times: int) -> "BlockRotation":
        return BlockRotation(self.blocks.repeat_interleave(times, 0))

    def split(self, lengths: list[int]) -> "list[BlockRotation]":
        return [BlockRotation(part) for part in self.blocks.split(lengths, dim=2)]

    def num_planes(self) -> int:
        """Returns 0, because blocks are multiplied as matrices."""
        return 0

    def matrices(self) -> torch.Tensor:
        """R(p) as (1 or B, 1 or H, N, blocks, b, b)."""
        return self.blocks


TokenRotation = PlaneRotation | BlockRotation


def rotate_pair(rotation: TokenRotation, query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """R(p) q and R(p) k as [`PlaneRotation.rotate`], of queries and keys in the basis of the model."""
    final = rotation.final_basis()
    if rotation.basis is None or final is None:
        return rotation.rotate(query, key)
    # In half types the two changes of basis would round the states twice more.
    wide = torch.promote_types(query.dtype, torch.float32)
    rotated = rotation.rotate(*(change_basis(states.to(wide), rotation.basis) for states in (query, key)))
    back = final.transpose(-1, -2)
    return tuple(change_basis(states, back).to(query.dtype) for states in rotated)


def _of_tokens(basis: torch.Tensor) -> torch.Tensor:
    """(1 or H, blocks, b, b) → (1 or H, 1, blocks, b, b) in float64, detached."""
    return basis.detach().double().unsqueeze(1)


def _fill_blocks(cos_sin: torch.Tensor, size: int) -> torch.Tensor:
    """(1 or B, 1 or H, N, planes, 2) cos and sin → (1 or B, 1 or H, N, blocks, b, b) with planes on the diagonals."""
    planes = PlaneRotation(cos_sin).matrices().unflatten(3, (-1, size // 2))  # (…, blocks, b/2, 2, 2)
    rotations = planes.new_zeros(*planes.shape[:4], size, size)  # (1 or B, 1 or H, N, blocks, b, b)
    for plane in range(size // 2):
        channels = slice(2 * plane, 2 * plane + 2)
        rotations[..., channels, channels] = planes[..., plane, :, :]  # (…, blocks, 2, 2)
    return rotations


def _select(values: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """(1 or B, 1 or H, N, …) → (B, 1 or H, kept, …), tokens before heads in memory as in queries and keys."""
    return gather_tokens(values.transpose(1, 2), kept).transpose(1, 2)


def gather_tokens(states: OneOrNone, kept: torch.Tensor) -> OneOrNone:
    """(1 or B, N, …) values of tokens → those of the tokens (B, kept) of every sample, (B, kept, …)."""
    if states is None:
        return None
    kept = kept.to(states.device)
    if states.shape[0] == 1:
        return states[0][kept]  # (B, kept, …)
    samples = torch.arange(kept.shape[0], device=kept.device).unsqueeze(1)  # (B, 1)
    return states[samples, kept]
