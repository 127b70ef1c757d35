"""Folding, for inference: rotations become constants, or part of the query and key weights."""

import copy
from collections.abc import Iterable

import torch
from torch import nn

from ..rotation.grouped_rotation import Rotation
from .folded_liere import FoldedLieRE
from .kinds import ENCODINGS, encoding_of, needs_exponential
from .rotary_encoding import RotaryEncoding
from .rotary_fields import TRAINING_ONLY
from .rounded_planes import RoundedPlanes


def build_rotary_encoding(config, num_axes: int) -> RotaryEncoding | None:
    """[`build_encoding`], or `None` for `none` and `absolute`, which do not rotate."""
    return None if encoding_of(config) is None else build_encoding(config, num_axes)


def build_encoding(config, num_axes: int) -> RotaryEncoding:
    """The module for `config.position_encoding`, which rotates, initialised by `rotary_init`."""
    kind = ENCODINGS[config.position_encoding]
    if config.folded_grids is not None:
        kind = FoldedLieRE if needs_exponential(config) else kind.folded_class(config)
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
    The rotations of an encoding, and of the tokens of some grids, without exponentials and bases, for its configuration
    with `folded_grids`; see `RotaryEncoding.folded_class`.
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
