"""LieRE for inference: rotations of some grids as constants."""

import math
from collections.abc import Iterable

import torch
from torch import nn
from transformers import initialization as init

from ..fast.dispatch import carry_tangents, values_are_unknown
from ..rotation.grouped_rotation import Rotation
from ..rotation.rotation import BlockRotation
from .grouped_positions import GroupedPositions
from .positions import TokenPositions, convention_of
from .rotary_encoding import LieRE, RotaryEncoding


class FoldedLieRE(LieRE):
    """
    LieRE for inference: the rotations of some grids are constants; those of other grids are computed on the fly.
    Patched towers keep the rotation of one prefix token for all.

    Attributes:
        grids: Rotations of all tokens for each of `config.folded_grids`, by names like "14x14": (layers or 1, N, heads
            or 1, blocks, b, b).
        places: By the same names, (N, A) coordinates of the patches where another model places them; else empty.
    """

    def __init__(self, config, num_axes: int):
        super().__init__(config, num_axes)
        self.grids, self.places = nn.ParameterDict(), nn.ParameterDict()
        # Numbers, because a function could not be pickled; those of a convention that is registered again are others.
        self.samples = None if (rule := convention_of(config)) is None else rule.samples
        for grid in config.folded_grids:
            if getattr(config, "train_grid", None) is None:
                self.places[grid_name(grid)] = self.new_parameter(math.prod(grid), num_axes).requires_grad_(False)
            tokens = config.num_prefix_tokens + math.prod(grid)
            shape = (self.layers, tokens, self.heads, self.num_blocks, self.block_size, self.block_size)
            self.grids[grid_name(grid)] = self.new_parameter(*shape).requires_grad_(False)

    def forward(
        self,
        positions: TokenPositions | GroupedPositions,
        dtype: torch.dtype | None = None,
        layer: int | None = None,
    ) -> Iterable[Rotation]:
        grid = None if isinstance(positions, GroupedPositions) else self._find_grid(positions)
        if isinstance(positions, GroupedPositions) or grid is None:
            return super().forward(positions, dtype, layer)
        # from_pretrained makes every parameter trainable; constants must stay fixed.
        layers = self.grids[grid].detach()  # (layers, N, heads or 1, blocks, b, b)
        stored, given = self.config.num_prefix_tokens, positions.num_prefix_tokens
        if given != stored:
            # All prefix tokens have one rotation.
            prefix = layers[:, :1].expand(-1, given, -1, -1, -1, -1)  # (layers, P, heads or 1, blocks, b, b)
            layers = torch.cat([prefix, layers[:, stored:]], dim=1)
        rotations = [BlockRotation(each.transpose(0, 1).unsqueeze(0)) for each in layers]
        rotations *= self.num_layers // self.layers
        return rotations if layer is None else [rotations[layer]]

    def _find_grid(self, positions: TokenPositions) -> str | None:
        """The name of the grid with constant rotations on which the model placed these tokens, if it did."""
        config, facts = self.config, positions.facts
        # torch.jit.trace would keep the choice for inputs of every shape.
        if torch.jit.is_tracing() or (config.num_prefix_tokens == 0 and positions.num_prefix_tokens > 0):
            return None
        grid = next((grid_name(each) for each in config.folded_grids if tuple(each) == positions.grid), None)
        if facts is not None:
            own = facts._replace(
                train_grid=config.train_grid,
                convention=config.coordinates,
                prefix_coordinate=config.prefix[1] if config.rotate_prefix else 0.0,
            )
            return grid if facts == own and facts.rule.samples == self.samples else None
        patches = positions.coordinates[..., positions.num_prefix_tokens :, :]  # (…, N, A)
        if carry_tangents(patches):
            return None
        if not values_are_unknown(patches):
            return next((name for name, place in self.places.items() if _agree(patches, place)), None)
        # Graphs see no coordinates, but the shape of the input from which they were computed.
        return grid if grid in self.places and self.places[grid].shape == patches.shape else None

    @torch.no_grad()
    def copy_rotations(
        self, encoding: RotaryEncoding, rotations: dict[tuple[int, ...], Iterable[BlockRotation]]
    ) -> None:
        """Copy the generators of an encoding, also of a user, and its rotations by their grids."""
        self.generators.copy_(encoding.entries(self.generators.device))
        for grid, layers in rotations.items():
            for constant, rotation in zip(self.grids[grid_name(grid)], layers):
                constant.copy_(rotation.blocks[0].transpose(0, 1))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        init.zeros_(self.generators)
        for constants in self.grids.values():
            init.copy_(constants, torch.eye(self.block_size).expand_as(constants))
        for place in self.places.values():
            init.zeros_(place)


def _agree(patches: torch.Tensor, place: torch.Tensor) -> bool:
    """Whether patches are at these coordinates, up to float32."""
    return patches.shape == place.shape and (patches - place.to(patches)).abs().max().item() < 1e-5


def grid_name(grid: tuple[int, ...]) -> str:
    """(14, 14) → "14x14"."""
    return "x".join(map(str, grid))
