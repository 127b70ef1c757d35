"""Folding, for inference: rotations become constants, or part of the query and key weights."""

import copy
import math
from collections.abc import Iterable
from typing import TypeGuard

import torch
from torch import nn
from transformers import initialization as init

from ..rotation.bases import skew_from_planes
from ..rotation.exponential import skew_entries
from ..rotation.grouped_rotation import Rotation
from ..rotation.rotation import BlockRotation, PlaneRotation
from .batch_positions import GroupedPositions
from .commuting_encodings import EncodingInBasis
from .encoding_traits import TRAINING_ONLY, needs_exponential, rotary_traits, traits_of
from .encodings import ENCODING_CLASSES
from .positions import GridPositions, TokenPositions
from .rotary_encoding import ALL_LAYERS, LieRE, RotaryEncoding, RoundedPlanes


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
        if not isinstance(positions, GridPositions) or positions.grid is None:
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
    def copy_rotations(self, encoding: LieRE, rotations: dict[str, Iterable[BlockRotation]]) -> None:
        """Copy the generators of `encoding` and its rotations by the names of their grids."""
        self.generators.copy_(encoding.generators)
        for name, layers in rotations.items():
            for constant, rotation in zip(self.grids[name], layers):
                constant.copy_(rotation.blocks[0].transpose(0, 1))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        super().reset_parameters()
        for constants in self.grids.values():
            init.copy_(constants, torch.eye(self.block_size).expand_as(constants))


class FoldedPlanes(RotaryEncoding):
    """
    An [`EncodingInBasis`] for inference: RoPE with a frequency per axis and plane. The basis is in the query and key
    weights, which put the channels that odd blocks do not rotate after all planes of their head. Products of
    exponentials keep the constant matrices between their factors.

    Attributes:
        frequencies: (A, layers or 1, heads or 1, planes).
        inner: (A − 1, layers or 1, heads or 1, blocks, b, b) of products, in the order of the factors, see
            [`PlaneRotation`]; else `None`.
    """

    def __init__(self, config, num_axes: int):
        super().__init__(config, num_axes)
        planes = self.num_blocks * (self.block_size // 2)
        self.frequencies = self.new_parameter(num_axes, self.layers, self.heads, planes).requires_grad_(False)
        self.inner = None
        if rotary_traits(config).product and num_axes > 1:
            shape = (num_axes - 1, self.layers, self.heads, self.num_blocks, self.block_size, self.block_size)
            self.inner = self.new_parameter(*shape).requires_grad_(False)
        else:
            self.block_size = 2

    def entries(self, device: torch.device) -> torch.Tensor:
        """In the basis that the weights contain, which is that of the last factor."""
        frequencies = self.frequencies.detach()
        if self.inner is None:
            return frequencies.unsqueeze(-1)
        bases = [torch.eye(self.block_size, dtype=self.inner.dtype, device=self.inner.device).expand_as(self.inner[0])]
        for inner in reversed(self.inner.detach().unbind()):
            bases.insert(0, bases[0] @ inner)
        planes = self.to_factors(frequencies).unflatten(-1, (self.num_blocks, -1))
        entries = skew_entries(skew_from_planes(planes, torch.stack(bases)))  # factor after factor
        return entries.roll(self.config.relative_axis, 0)

    def sources(self, device: torch.device, layers: slice = ALL_LAYERS) -> tuple[torch.Tensor, ...]:
        inner = () if self.inner is None else (self.inner[:, layers],)
        return *super().sources(device, layers), *inner

    def layer_rotations(
        self, positions: TokenPositions, dtype: torch.dtype | None = None, layers: slice = ALL_LAYERS
    ) -> Iterable[Rotation]:
        if self.inner is None:
            return super().layer_rotations(positions, dtype, layers)
        planes = self.axis_planes(positions.locate(), self.frequencies.detach()[:, layers])
        inner = self.inner.detach()[:, layers].unbind(1)
        return self.repeat_for_layers([PlaneRotation(cos_sin, inner=each) for cos_sin, each in zip(planes, inner)])

    @torch.no_grad()
    def copy_rotations(self, encoding: EncodingInBasis) -> None:
        for name, values in encoding.folded_parameters().items():
            getattr(self, name).copy_(values)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        init.zeros_(self.frequencies)
        if self.inner is not None:
            init.copy_(self.inner, torch.eye(self.inner.shape[-1]).expand_as(self.inner))


def grid_name(grid: tuple[int, ...]) -> str:
    """(14, 14) → "14x14"."""
    return "x".join(map(str, grid))


def choose_folded_class(config) -> type[RotaryEncoding]:
    """The class for a folded model: the unfolded one if its rotations cost only cos and sin."""
    encoding = ENCODING_CLASSES[config.position_encoding]
    if issubclass(encoding, EncodingInBasis):
        return FoldedPlanes
    return FoldedLieRE if needs_exponential(config) else encoding


def build_rotary_encoding(config, num_axes: int) -> RotaryEncoding | None:
    """[`build_encoding`], or `None` for `none` and `absolute`, which do not rotate."""
    return None if traits_of(config) is None else build_encoding(config, num_axes)


def build_encoding(config, num_axes: int) -> RotaryEncoding:
    """
    The module for `config.position_encoding`, which rotates, initialised by `rotary_init`.

    Raises:
        ValueError: if the encoding does not support this number of axes.
    """
    traits = rotary_traits(config)
    if traits.num_axes not in (None, num_axes):
        raise ValueError(f"{config.position_encoding} is defined on {traits.num_axes} axes, not on {num_axes}.")
    if config.folded_grids is not None:
        kind = choose_folded_class(config)
    else:
        rounded = getattr(config, "round_angles", False)
        kind = RoundedPlanes if rounded else ENCODING_CLASSES[config.position_encoding]
    encoding = kind(config, num_axes)
    encoding.reset_parameters()
    return encoding


@torch.no_grad()
def fold_rotations(model: nn.Module, grids: Iterable[tuple[int, ...]] | None) -> nn.Module:
    """See `LieREPreTrainedModel.fold_rotations`."""
    config = model.config
    if config.folded_grids is not None or config.position_encoding not in ENCODING_CLASSES:
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
    folded = _copy_model(model)
    encoder = next(module for module in folded.modules() if "rotary_encoding" in module._modules)
    grids = [config.train_grid] if grids is None else list(grids)
    # All modules share this configuration.
    folded.config.folded_grids = [list(grid) for grid in grids] if constant else []
    for name, neutral in TRAINING_ONLY.items():
        if hasattr(folded.config, name):
            setattr(folded.config, name, neutral)
    folded.config.validate()
    encoding = encoder.rotary_encoding
    reference = next(encoding.parameters(), encoder.layers[0].attention.q_proj.weight)
    rotations = {}
    if constant:
        for grid in map(tuple, grids):
            rotations[grid_name(grid)] = encoder.rotations(encoder.grid_positions(grid, reference.device))
    encoder.rotary_encoding = build_encoding(folded.config, config.num_axes).to(reference)
    if constant:
        encoder.rotary_encoding.copy_rotations(encoding, rotations)
    elif isinstance(encoding, EncodingInBasis):
        encoder.rotary_encoding.copy_rotations(encoding)
        for layer, basis in zip(encoder.layers, encoding.bases()):
            layer.attention.fold(basis)
    else:
        encoder.rotary_encoding = encoding
    return folded.requires_grad_(False)


def _copy_model(model: nn.Module) -> nn.Module:
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
