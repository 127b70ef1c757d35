"""LieRE, whose generators are free, and folded for inference."""

import math
from collections.abc import Iterable
from typing import TypeGuard

import torch
from torch import nn
from transformers import initialization as init

from ..rotation.bases import skew_entries
from ..rotation.grouped_rotation import Rotation
from ..rotation.rotation import BlockRotation
from ..rotation.spins import representation
from .encoding_traits import ENCODING_CLASSES, needs_exponential
from .positions import GridPositions, GroupedPositions, TokenPositions
from .rotary_encoding import ALL_LAYERS, RotaryEncoding


# All layers at once need fewer calls, but rotations of LieRE64 for ViT-B at 3,136 tokens take 7.4 GB.
ALL_LAYERS_BYTES = 1 << 30


@ENCODING_CLASSES.offer("rope_mixed", "liere")
class LieRE(RotaryEncoding):
    """
    Free generators for every axis (LieRE §4). With `block_size` 2 this is RoPE-Mixed (LieRE §5.4), which differs only
    in its initialisation and coordinates. The last head_dim mod b channels of a head are not rotated.

    Attributes:
        generators: (A, layers or 1, heads or 1, blocks, b(b−1)/2); ViT-B, 2-D: 9,216 / 27,648 / 64,512 / 138,240 /
            285,696 / 580,608 numbers for b = 2, 4, 8, 16, 32, 64 (LieRE Table 10).
    """

    def __init__(self, config, num_axes: int):
        super().__init__(config, num_axes)
        shape = (num_axes, self.layers, self.heads, self.num_blocks, self.num_entries)
        self.generators = self.new_parameter(*shape)
        # Set by `accumulate_rotations`.
        self.rotation_sums = None

    def entries(self, device: torch.device) -> torch.Tensor:
        return self.generators

    @torch.no_grad()
    def reset_parameters(self) -> None:
        if self.config.rotary_init != "so3":
            super().reset_parameters()
            return
        entries = skew_entries(representation(self.config.spins)).to(self.generators)  # (3, b(b−1)/2)
        init.copy_(self.generators, entries[:, None, None, None].expand_as(self.generators))

    def parameters_for_entries(self, entries: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"generators": entries}

    def _rotate_groups(self, groups: tuple[TokenPositions, ...], dtype: torch.dtype | None) -> list[Iterable[Rotation]]:
        # Each group may be a grid, which has multiples of positions and a place in the cache.
        return [self.forward(group, dtype) for group in groups]

    def layer_rotations(
        self, positions: TokenPositions, dtype: torch.dtype | None = None, layers: slice = ALL_LAYERS
    ) -> Iterable[Rotation]:
        """
        On a grid that starts at zero or has its middle there, rotations at multiples of a position are powers, and
        those at its negative multiples their transposes, see `scaling_and_squaring.Rays`.
        Above `ALL_LAYERS_BYTES`, each layer's rotations are computed when they are needed.
        """
        placed = positions.locate()
        facts = positions.facts if isinstance(positions, GridPositions) else None
        rays = None if facts is None else facts.rays()
        entries = self.entries(placed.coordinates.device)  # (A, layers or 1, heads or 1, blocks, b(b−1)/2)
        num_layers = entries[:, layers].shape[1]
        elements = num_layers * self.heads * self.num_blocks * self.block_size**2 * placed.coordinates[..., 0].numel()
        at_once = num_layers == 1 or elements * self.rotation_dtype.itemsize <= ALL_LAYERS_BYTES
        # Positions of no grid will not return.
        key = (facts, layers.start, dtype, self.rotation_dtype) if at_once and facts is not None else None

        # Graphs of torch 2.9 cannot evaluate this annotation on Python 3.10.
        def compute(entries: torch.Tensor) -> "Iterable[Rotation]":
            chosen = entries[:, layers]  # (A, layers, heads, blocks, b(b−1)/2)
            if at_once:
                return self.rotations_from(placed, chosen, dtype, rays)
            # Copies, because frameworks that shard parameters free them when this module returns.
            parts = [part.clone() for part in chosen.split(1, dim=1)]
            return (self.rotations_from(placed, part, dtype, rays)[0] for part in parts)

        # Replicas of `DataParallel` share the sums and have no parameters.
        if self.rotation_sums is None or not self._parameters:
            return compute(entries)
        return self.rotation_sums.rotations(key, entries, compute)

    @classmethod
    def folded_class(cls, config) -> type[RotaryEncoding]:
        return FoldedLieRE if needs_exponential(config) else cls


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
