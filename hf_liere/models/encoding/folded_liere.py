"""LieRE for inference: rotations of some grids as constants."""

import math
from collections.abc import Iterable
from typing import TypeGuard

import torch
from torch import nn
from transformers import initialization as init

from ..rotation.grouped_rotation import Rotation
from ..rotation.rotation import BlockRotation
from .grouped_positions import GroupedPositions
from .kinds import FOLDED
from .positions import GridPositions, TokenPositions
from .rotary_encoding import LieRE


@FOLDED.offer("liere")
class FoldedLieRE(LieRE):
    """
    LieRE for inference: the rotations of some grids are constants; those of other grids are computed on the fly.

    Attributes:
        grids: Rotations of all tokens for each of `config.folded_grids`, by names like "14x14": (layers or 1, N, heads
            or 1, blocks, b, b).
    """

    def __init__(self, config, num_axes: int):
        super().__init__(config, num_axes)
        self.grids = nn.ParameterDict()
        for grid in config.folded_grids:
            tokens = config.num_prefix_tokens + math.prod(grid)
            shape = (self.layers, tokens, self.heads, self.num_blocks, self.block_size, self.block_size)
            self.grids[grid_name(grid)] = self.new_parameter(*shape).requires_grad_(False)

    def forward(
        self,
        positions: TokenPositions | GroupedPositions,
        dtype: torch.dtype | None = None,
        layer: int | None = None,
    ) -> Iterable[Rotation]:
        if layer is not None or not self._is_folded(positions):
            return super().forward(positions, dtype, layer)
        # from_pretrained makes every parameter trainable; constants must stay fixed.
        layers = self.grids[grid_name(positions.facts.grid)].detach()  # (layers, N, heads or 1, blocks, b, b)
        rotations = [BlockRotation(layer.transpose(0, 1).unsqueeze(0)) for layer in layers]
        return rotations * (self.num_layers // self.layers)

    def _is_folded(self, positions: TokenPositions | GroupedPositions) -> TypeGuard[GridPositions]:
        """Whether the model placed these tokens, on a grid whose rotations are constants."""
        if not isinstance(positions, GridPositions):
            return False
        config, facts = self.config, positions.facts
        own = facts._replace(
            train_grid=config.train_grid,
            convention=config.coordinates,
            num_prefix_tokens=config.num_prefix_tokens,
            prefix_coordinate=config.prefix[1] if config.rotate_prefix else 0.0,
        )
        return grid_name(facts.grid) in self.grids and facts == own

    @torch.no_grad()
    def copy_rotations(self, encoding: LieRE, rotations: dict[tuple[int, ...], Iterable[BlockRotation]]) -> None:
        """Copy the generators of `encoding` and its rotations by their grids."""
        self.generators.copy_(encoding.generators)
        for grid, layers in rotations.items():
            for constant, rotation in zip(self.grids[grid_name(grid)], layers):
                constant.copy_(rotation.blocks[0].transpose(0, 1))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        super().reset_parameters()
        for constants in self.grids.values():
            init.copy_(constants, torch.eye(self.block_size).expand_as(constants))


def grid_name(grid: tuple[int, ...]) -> str:
    """(14, 14) → "14x14"."""
    return "x".join(map(str, grid))
