"""Positions that tokens choose: those given, moved by a linear map of the states that attention reads."""

import torch
from torch import nn
from transformers.utils.generic import maybe_autocast

from ..fast.dispatch import working_dtype
from ..rotation.learned_rotations import LearnedRotations
from .positions import TokenPositions


class ContentPositions(nn.Module):
    """
    g(x) = W x for the states x that the attention of a layer reads, or Σ W x over a token and those before it, as the
    angles of Selective RoPE (arXiv 2511.17388). W = 0 at the start, where nothing moves.

    Attributes:
        weight: (layers, heads · A or A, hidden_size), the W.
    """

    def __init__(self, choice: str, layers: int, heads: int, num_axes: int, hidden_size: int):
        super().__init__()
        self.heads, self.sums = heads if "heads" in choice else 1, "sum" in choice
        self.weight = LearnedRotations.new_parameter(layers, self.heads * num_axes, hidden_size)
        nn.init.zeros_(self.weight)

    def forward(
        self,
        states: torch.Tensor,
        positions: TokenPositions,
        layer: int,
        moves: torch.Tensor | None = None,
        past: torch.Tensor | None = None,
    ) -> TokenPositions:
        """
        p + g(x) of (B, N, hidden_size) states. Tokens that are false in (1 or B, N) `moves` stay, or add nothing to a
        sum, which continues `past`, the total of the tokens before.
        """
        weight = self.weight[layer]  # (heads · A, hidden_size)
        dtype = torch.promote_types(torch.promote_types(states.dtype, weight.dtype), torch.float32)
        with maybe_autocast(weight.device.type, enabled=False):
            offsets = nn.functional.linear(states.to(weight.device, dtype), weight.to(dtype))
        offsets = offsets.to(working_dtype(weight.device))  # (B, N, heads · A)
        if moves is not None:
            offsets = offsets.masked_fill(~moves.to(weight.device).unsqueeze(-1), 0.0)
        if self.sums:
            offsets = offsets.cumsum(1) + (0.0 if past is None else past.unsqueeze(1))
        coordinates = positions.locate().coordinates.to(offsets)  # (N, A) or (1 or B, N, A)
        moved = TokenPositions(torch.cat([coordinates] * self.heads, dim=-1) + offsets)  # (B, N, heads · A)
        moved.heads, moved.total = self.heads, offsets[:, -1:].sum(1)
        return moved
