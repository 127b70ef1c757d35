"""Rotations of a batch of inputs of different sizes, and the union of all kinds of rotations."""

from typing import NamedTuple

import torch

from .rotation import TokenRotation


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


Rotation = TokenRotation | GroupedRotation
