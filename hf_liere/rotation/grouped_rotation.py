"""Rotations of a batch of inputs of different sizes, and the union of all kinds of rotations."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from .rotation import TokenRotation, rotate_pair


class GroupedRotation(NamedTuple):
    """
    Rotations of a batch of inputs of different sizes: those of each distinct size once. Padding is not rotated. Methods
    are those of [`PlaneRotation`].

    Attributes:
        rotations: One for each size, for all samples of that size.
        samples: For each size, (samples,) their indices in the batch.
    """

    rotations: tuple[TokenRotation, ...]
    samples: tuple[torch.Tensor, ...]

    @property
    def basis(self) -> torch.Tensor | None:
        """The same for all groups: it does not depend on positions."""
        return self.rotations[0].basis

    def change_basis(self, states: torch.Tensor) -> torch.Tensor:
        return self.rotations[0].change_basis(states)

    def final_basis(self) -> torch.Tensor | None:
        return self.rotations[0].final_basis()

    def rotate(self, query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        groups = []
        for rotation, samples in zip(self.rotations, self.samples):
            # An empty key has no samples.
            tokens, grouped = rotation.num_tokens(), [states[samples[: len(states)]] for states in (query, key)]
            rotated = rotation.rotate(*(states[:, :, :tokens] for states in grouped))  # (samples, H, tokens, D)
            groups.append([torch.cat([x, states[:, :, tokens:]], 2) for x, states in zip(rotated, grouped)])
        order = torch.cat(self.samples).argsort()  # (B,)
        joined = (torch.cat(parts) for parts in zip(*groups))
        return tuple(states[order[: len(states)]] for states in joined)

    def transpose(self) -> "GroupedRotation":
        return self._replace(rotations=tuple(each.transpose() for each in self.rotations))

    def select(self, kept: torch.Tensor) -> "GroupedRotation":
        """Padding, which nothing attends to, gets the rotation of the last token."""
        groups = zip(self.rotations, self.samples)
        chosen = (each.select(kept[samples].clamp(max=each.num_tokens() - 1)) for each, samples in groups)
        return self._replace(rotations=tuple(chosen))


class SharedRotation(NamedTuple):
    """
    Rotations of consecutive shares of the channels of a head; channels after the last share are not rotated. Queries
    and keys stay in the basis of the model. Methods are those of [`PlaneRotation`].

    Attributes:
        parts: A rotation of tokens or groups for each share.
        widths: Their numbers of channels.
        is_transposed: Whether each share is rotated back.
        basis: `None`.
    """

    parts: tuple[Any, ...]
    widths: list[int]
    is_transposed: bool = False
    basis: None = None

    def rotate(self, query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rest = query.shape[-1] - sum(self.widths)
        sizes = [*self.widths, rest] if rest else self.widths
        pairs = list(zip(query.split(sizes, -1), key.split(sizes, -1)))  # (B, H, N, width) each
        rotated = [self._rotate_share(part, *states) for part, states in zip(self.parts, pairs)]
        return tuple(torch.cat(states, dim=-1) for states in zip(*rotated, *pairs[len(rotated) :]))

    def change_basis(self, states: torch.Tensor) -> torch.Tensor:
        return states

    def final_basis(self) -> None:
        return None

    def _rotate_share(self, part: Any, query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        turned = part.transpose() if self.is_transposed else part
        # The basis of folded planes is in the weights, before rotations and after their transposes.
        return turned.rotate(query, key) if part.basis is None else rotate_pair(turned, query, key)

    def transpose(self) -> "SharedRotation":
        return self._replace(is_transposed=not self.is_transposed)

    def to(self, *args, **kwargs) -> "SharedRotation":
        return self._map(lambda part: part.to(*args, **kwargs))

    def select(self, kept: torch.Tensor) -> "SharedRotation":
        return self._map(lambda part: part.select(kept))

    def num_tokens(self) -> int:
        return self.parts[0].num_tokens()

    def num_samples(self) -> int:
        return max(part.num_samples() for part in self.parts)

    def repeat_samples(self, times: int) -> "SharedRotation":
        return self._map(lambda part: part if part.num_samples() == 1 else part.repeat_samples(times))

    def split(self, lengths: list[int]) -> "list[SharedRotation]":
        return [self._replace(parts=parts) for parts in zip(*(part.split(lengths) for part in self.parts))]

    def num_planes(self) -> int:
        return sum(part.num_planes() for part in self.parts)

    def matrices(self) -> torch.Tensor:
        """One block for each head, of the channels of all shares: (1 or B, 1 or H, N, 1, D, D)."""
        blocks = [block for part in self.parts for block in part.matrices().unbind(3)]  # (1 or B, 1 or H, N, b, b) each
        shape = torch.broadcast_shapes(*(block.shape[:3] for block in blocks))
        whole, first = blocks[0].new_zeros(*shape, sum(self.widths), sum(self.widths)), 0
        for block in blocks:
            channels = slice(first, first := first + block.shape[-1])
            whole[..., channels, channels] = block
        return (whole.mT if self.is_transposed else whole).unsqueeze(3)

    def _map(self, change: Callable[[Any], Any]) -> "SharedRotation":
        return self._replace(parts=tuple(map(change, self.parts)))


Rotation = TokenRotation | GroupedRotation | SharedRotation
