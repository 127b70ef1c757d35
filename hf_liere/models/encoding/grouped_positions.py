"""Positions of the tokens of a batch of inputs of different sizes."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from .positions import TokenPositions


class GroupedPositions(NamedTuple):
    """
    Where the tokens of a batch of inputs of different sizes sit, padded to the longest.

    Attributes:
        groups: Positions of the tokens of each distinct grid, without padding, the same for all samples of a group.
        samples: For each group, (samples,) their indices in the batch.
    """

    groups: tuple[TokenPositions, ...]
    samples: tuple[torch.Tensor, ...]

    def unrotate_prefix(self) -> "GroupedPositions":
        """As [`TokenPositions.unrotate_prefix`]."""
        return self._replace(groups=tuple(group.unrotate_prefix() for group in self.groups))

    def padded(self, num_tokens: int) -> torch.Tensor:
        """(B, num_tokens, A) coordinates of all samples, zero for padding."""
        return pad_rows([group.locate().coordinates for group in self.groups], self.samples, num_tokens)


def pad_rows(groups: Sequence[torch.Tensor], samples: Sequence[torch.Tensor], length: int) -> torch.Tensor:
    """
    (B, length, C) rows of all samples, zero for padding. Each group has rows (n, C), shared by the samples whose
    (samples,) indices in the batch are given.
    """
    padded = [torch.nn.functional.pad(rows, (0, 0, 0, length - len(rows))) for rows in groups]  # (length, C)
    expanded = [rows.expand(len(indices), -1, -1) for rows, indices in zip(padded, samples)]  # (samples, length, C)
    return torch.cat(expanded)[torch.cat(tuple(samples)).argsort()]  # (B, length, C)
