"""Folding, for inference: rotations become constants, or part of the query and key weights."""

import copy
import functools
import math
from collections.abc import Iterable

import torch
from torch import nn
from transformers import initialization as init

from ..fast.application import drop_empty_key, restore_empty_key, rotate_channels
from ..fast.dispatch import carry_tangents, values_are_unknown
from ..fast.scaling_and_squaring import Rays
from ..rotation.grouped_rotation import Rotation
from ..rotation.rotation import BlockRotation, PlaneRotation
from .commuting_encodings import FoldedPlanes
from .content_positions import ContentPositions
from .kinds import ENCODINGS, encoding_of, needs_exponential
from .positions import GroupedPositions, TokenPositions, convention_of
from .rotary_encoding import LieRE, RotaryEncoding
from .rotary_fields import TRAINING_ONLY


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


class RoundedPlaneRotation(PlaneRotation):
    """Planes that are rotated by two products and one sum, each rounded, as most implementations of RoPE do."""

    def _rotate_planes(
        self, query: torch.Tensor, key: torch.Tensor, cos_sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rotated = rotate_channels(drop_empty_key(query, key), cos_sin, portable=True)  # (B, H, N, D) each
        return restore_empty_key(rotated, key)


class RoundedPlanes(LieRE):
    """
    Planes whose angles, cosines and sines are rounded to float32, as those of most rotary modules: with their
    frequencies, the same bits. Angles of RoPE-Mixed are p_1 f_1 + p_2 f_2 + … in this order.
    """

    def rotations_from(
        self, positions: TokenPositions, entries: torch.Tensor, dtype: torch.dtype | None, rays: Rays | None = None
    ) -> list[Rotation]:
        entries = positions.by_head(entries)  # (A or heads · A, layers, heads, planes, 1)
        coordinates = positions.coordinates.float().reshape(-1, len(entries))  # (B · N, A)
        rotations: list[Rotation] = []
        for layer in entries.squeeze(-1).float().unbind(1):  # (A, heads, planes)
            products = (p.unsqueeze(-1) * f.flatten() for p, f in zip(coordinates.unbind(-1), layer))
            angles = functools.reduce(torch.add, products)  # (B · N, H · planes)
            planes = torch.stack([angles.cos(), angles.sin()], dim=-1)  # (B · N, H · planes, 2)
            rotations.append(RoundedPlaneRotation(self.to_tokens(planes, positions, layer.shape[1])))
        return self.repeat_for_layers(rotations)


def build_rotary_encoding(config, num_axes: int) -> RotaryEncoding | None:
    """[`build_encoding`], or `None` for `none` and `absolute`, which do not rotate."""
    return None if encoding_of(config) is None else build_encoding(config, num_axes)


def build_encoding(config, num_axes: int) -> RotaryEncoding:
    """The module for `config.position_encoding`, which rotates, initialised by `rotary_init`."""
    kind = ENCODINGS[config.position_encoding]
    if config.folded_grids is not None:
        kind = FoldedLieRE if needs_exponential(config) else FoldedPlanes if kind.in_basis else kind
    elif getattr(config, "round_angles", False):
        if config.position_encoding not in ("rope_mixed", "liere") or config.block_size != 2:
            raise ValueError(
                f"round_angles=True is for planes, not for {config.position_encoding} with block_size="
                f"{config.block_size}; accepted: rope_mixed, and liere with block_size=2."
            )
        kind = RoundedPlanes
    encoding = kind(config, num_axes)
    encoding.reset_parameters()
    if kind.check is not None:
        kind.check(encoding)
    if config.content_positions is not None:
        sizes = config.num_hidden_layers, config.num_attention_heads, num_axes, config.hidden_size
        encoding.content = ContentPositions(config.content_positions, *sizes)
    return encoding


@torch.no_grad()
def fold_rotations(model: nn.Module, grids: Iterable[tuple[int, ...]] | None) -> nn.Module:
    """See `LieREPreTrainedModel.fold_rotations`."""
    config = model.config
    if config.folded_grids is not None or encoding_of(config) is None:
        raise ValueError(
            f"There is nothing to fold in a model with position_encoding={config.position_encoding!r} and "
            f"folded_grids={config.folded_grids}."
        )
    constant = needs_exponential(config)
    if constant and config.train_grid is None:
        raise ValueError(
            f"{config.position_encoding} with block_size={config.block_size} folds into the constant rotations of a "
            "grid, and this model takes positions with every input; accepted here: block_size 2 and encodings whose "
            "generators commute."
        )
    folded = copy_model(model)
    encoder = next(module for module in folded.modules() if "rotary_encoding" in module._modules)
    grids = [config.train_grid] if grids is None else list(grids)
    # All modules share this configuration.
    folded.config.folded_grids = [list(grid) for grid in grids] if constant else []
    for name, neutral in TRAINING_ONLY.items():
        if hasattr(folded.config, name):
            setattr(folded.config, name, neutral)
    folded.config.validate()
    encoding = encoder.rotary_encoding
    places = {grid: encoder.grid_positions(grid, model.device) for grid in map(tuple, folded.config.folded_grids)}
    rotations = {grid: encoder.rotations(positions) for grid, positions in places.items()}
    encoder.rotary_encoding = fold_encoding(encoding, folded.config, rotations)
    if encoding.in_basis:
        for layer, basis in zip(encoder.layers, encoding.bases()):
            layer.attention.fold(basis)
    return folded.requires_grad_(False)


def fold_encoding(encoding: RotaryEncoding, config, rotations: dict[tuple, Iterable[Rotation]]) -> RotaryEncoding:
    """
    Builds the folded form of an encoding, for its configuration with `folded_grids`: constants for the given grids, or
    frequencies without a basis, see [`build_encoding`].
    """
    constant = needs_exponential(config)
    if not (constant or encoding.in_basis):
        return encoding
    folded = build_encoding(config, encoding.num_axes).to(next(encoding.parameters()))
    folded.copy_rotations(encoding, *([rotations] if constant else []))
    return folded


def copy_model(model: nn.Module) -> nn.Module:
    offloaded = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if offloaded:
        raise ValueError(f"{len(offloaded)} weights are offloaded ({offloaded[0]} …); fold before offloading.")
    try:
        return copy.deepcopy(model).eval()
    except RuntimeError as error:
        raise ValueError(
            "The model cannot be copied to be folded, because some weights are computed from others; make pruning "
            f"and parametrizations permanent first. {error}"
        ) from error
