"""
Patched models for inference: bases of rotations become part of the weights, rotations of grids constants, and learned
frequencies the RoPE of a plain model, where it has that.
"""

import contextlib
from collections.abc import Iterable
from dataclasses import replace
from functools import partial

import torch
from torch import nn
from transformers import PreTrainedModel

from ..encoding.folding import build_encoding, copy_model, fold_encoding, grid_name
from ..encoding.kinds import needs_exponential
from ..encoding.positions import TokenPositions
from ..encoding.rotary_encoding import RotaryEncoding
from ..encoding.rotary_fields import DISPLACEMENTS
from ..probing.attention_probe import CAPTURE_ATTENTION, CapturedStates
from ..probing.module_inspection import View, device_of, forward_arguments, projections, replaced
from ..rotation.projections import check_foldable, fold_into, to_folded
from ..transformer.configuration_liere import pair
from .apply import refuse_adapters, require_patched, unpatch
from .patched_forward import place_grid
from .pretrained_blocks import PretrainedBlocks
from .pretrained_patch import RopePatch, rotate_states
from .rotary_patch import RotaryPatchConfig
from .tower_patch import patched_towers
from .vision_patch import RotaryPatch, make_tower_config


@torch.no_grad()
def fold_rotations(model: PreTrainedModel, grids: Iterable[tuple[int, ...]] | None = None) -> PreTrainedModel:
    """
    Copy a patched model for inference, as `model.fold_rotations()`: frequencies become the RoPE of a plain model of
    transformers where [`unpatch`] can keep them. Otherwise the query and key weights take the basis of generators that
    commute, as all do on one axis, and rotations of `liere` become constants for the requested grids.

    Args:
        grids: Patches per axis, for example `[(16, 16)]`; `None` means the grid of the trained size.

    Raises:
        ValueError: if the model is not patched, folded already or contains adapters; if a grid has another number of
            axes; or if something stands between a projection and the rotation of its queries or keys, such as a norm.
    """
    refuse_adapters(model)
    for name, tower in require_patched(model):
        config = tower.rotary_patch.config
        done, compose, content = config.folded_grids, config.compose, config.content_positions
        if done is not None or compose or content or not isinstance(tower.rotary_patch, (RotaryPatch, RopePatch)):
            raise ValueError(
                f"{name or 'model'} ({type(tower).__name__}) cannot be folded: accepted are Transformers models "
                f"whose rotations are not folded already (folded_grids={done}) and are not behind the model's own "
                f"(compose={compose}) or moved by every input (content_positions={content!r})."
            )
    folded = copy_model(model)
    # What one RoPE describes needs no patch.
    with contextlib.suppress(ValueError):
        return unpatch(folded, keep_frequencies=True).requires_grad_(False)
    requested = None if grids is None else [list(grid) for grid in grids]
    for _, tower in patched_towers(folded):
        patch, fold = tower.rotary_patch, _fold_blocks if isinstance(tower.rotary_patch, RopePatch) else _fold_vision
        patch.config = fold(tower, replace(patch.config, folded_grids=[], **DISPLACEMENTS), requested)
    configs = [tower.rotary_patch.config for _, tower in patched_towers(folded)]
    if any(replace(config, target=None) != replace(configs[0], target=None) for config in configs):
        raise ValueError(f"The parts of {model._get_name()} fold differently and would not be one model: fold each.")
    if getattr(folded.config, "rotary_patch", None) is not None:
        folded._describe_patches()
    return folded.requires_grad_(False)


def _fold_vision(tower: nn.Module, config: RotaryPatchConfig, grids: list[list[int]] | None) -> RotaryPatchConfig:
    patch, encoding = tower.rotary_patch, tower.rotary_encoding
    if needs_exponential(encoding.config):
        config = replace(config, folded_grids=[list(patch.train_grid)] if grids is None else grids)
    heads, head_dim = encoding.config.num_attention_heads, encoding.config.head_dim
    rotary_config = make_tower_config(config, patch.train_grid, encoding.num_layers, heads, head_dim)
    device = next(tower.parameters()).device
    rotations = {grid: encoding(place_grid(tower, grid, device, 1)) for grid in map(tuple, config.folded_grids or [])}
    tower.rotary_encoding = fold_encoding(encoding, rotary_config, rotations)
    if encoding.in_basis:
        for name, attention, basis in zip(patch.attention_names, patch.attentions(tower), encoding.bases()):
            _fold_attention(f"{name} ({type(attention).__name__})", attention, basis)
    return config


def _fold_attention(label: str, attention: nn.Module, basis: torch.Tensor) -> None:
    """Put a basis into the projections of an attention module, and check that its queries and keys are then in it."""
    found = projections(attention)
    if len(found) != 2:
        raise ValueError(f"{label} has no separate projections of queries and of keys, into which a basis folds.")
    check_foldable(found)
    expected = [to_folded(rows, basis) for rows in _capture(label, attention, found[0])]  # 2 × (H · D, N)
    fold_into(found, basis)
    # More than the rounding of weights and sums, and less than any norm or bias in another basis.
    tolerance = 1e-4 + 8 * torch.finfo(found[0].weight.dtype).eps
    for rows, wanted in zip(_capture(label, attention, found[0]), expected):
        if not (rows - wanted).abs().max() <= tolerance * wanted.abs().max():
            raise ValueError(
                f"{label} changes queries or keys between their projections and their rotation (a norm, or a bias of "
                "its own), and takes no other basis. Accepted: liere, whose rotations become constants of grids."
            )


def _capture(label: str, attention: nn.Module, projection: nn.Module) -> list[torch.Tensor]:
    """The queries and the keys, (H · D, N) each, that a vision tower's attention module makes of a few tokens."""
    weight = projection.weight
    states = (torch.arange(5 * weight.shape[1], device=weight.device) * 0.7).sin().to(weight.dtype)
    view = View(attention.config.base, _attn_implementation=CAPTURE_ATTENTION)
    try:
        with replaced("config", view, attention):
            attention(states.view(1, 5, -1))  # (1, N, hidden_size)
    except CapturedStates as captured:
        return [rows[0].transpose(1, 2).flatten(0, 1).to(weight.device) for rows in captured.args]
    raise ValueError(f"{label} did not reach its attention with five tokens, so its projections are unknown.")


def _fold_blocks(tower: nn.Module, config: RotaryPatchConfig, grids: list[list[int]] | None) -> RotaryPatchConfig:
    """Fold those of a model with RoPE; planes of the model's own RoPE have nothing to fold."""
    blocks = tower.rotary_encoding
    if not isinstance(blocks, PretrainedBlocks):
        return config
    encodings = {name: _on_one_axis(blocks.get_submodule(name).encoding) for name in blocks.orders}
    chosen = next(iter(encodings.values()))
    places = _place(tower, grids) if needs_exponential(chosen.config) else {}
    if chosen.in_basis:
        _fold_makers(tower, {name: encoding.bases() for name, encoding in encodings.items()})
    kind = chosen.config.position_encoding
    config = replace(config, position_encoding=kind, folded_grids=[list(grid) for grid in places])
    blocks.config = config
    for name, encoding in encodings.items():
        rotary = blocks.get_submodule(name)
        rotary.config = replace(encoding.config, folded_grids=config.folded_grids)
        rotations = {grid: encoding(TokenPositions.from_coordinates(place, 1)) for grid, place in places.items()}
        rotary.encoding = fold_encoding(encoding, rotary.config, rotations)
        for grid, coordinates in places.items():
            rotary.encoding.places[grid_name(grid)].copy_(coordinates)
    return config


def _place(tower: nn.Module, grids: list[list[int]] | None) -> dict[tuple[int, ...], torch.Tensor]:
    """By grid, the (N, A) coordinates at which a model with RoPE places patches."""
    blocks = tower.rotary_encoding
    rope = tower.get_submodule(blocks.rope_names[0])
    if list(forward_arguments(rope)) != ["pixel_values"]:
        raise ValueError(
            f"{type(tower).__name__} gets positions with every input, so that liere has no constant rotations; "
            "accepted: encodings whose generators commute."
        )
    rows, columns = pair("patch_size", rope.config.patch_size)
    if grids is None:
        height, width = pair("image_size", rope.config.image_size)
        grids = [[height // rows, width // columns]]
    places = {}
    for grid in grids:
        if len(grid) != 2 or min(grid) < 1:
            raise ValueError(f"grids: {grid} must be 2 numbers of patches, one per axis.")
        pixels = torch.empty(1, 1, rows * grid[0], columns * grid[1], device=device_of(rope, tower))
        places[tuple(grid)], _ = blocks.measure(0, rope, pixels)  # (N, A)
    return places


def _on_one_axis(encoding: RotaryEncoding) -> RotaryEncoding:
    """On one axis every generator commutes with itself: those of LieRE are ComRoPE's."""
    if encoding.num_axes > 1 or not needs_exponential(encoding.config):
        return encoding
    same = build_encoding(replace(encoding.config, position_encoding="comrope_ld"), 1).to(encoding.generators)
    for name, values in same.parameters_for_entries(encoding.generators).items():
        getattr(same, name).copy_(values)
    return same


def _fold_makers(tower: nn.Module, bases: dict[str, list[torch.Tensor]]) -> None:
    """Put the bases of every layer into the linear layers that make queries and keys."""
    patch, blocks = tower.rotary_patch, tower.rotary_encoding
    for layer, attention in zip(blocks.layers, patch.attentions(tower)):
        # Adapters that were merged leave other modules.
        patch.hook_projections(tower, layer, attention)
    places = {place: module for place, (module, _) in patch.outputs.current.items()}
    # Hooks of the rotations are no obstacle.
    patch.outputs.remove()
    for (layer, name), maker in places.items():
        group, row = blocks.rows[layer]
        if not hasattr(maker, "out_features"):
            raise ValueError(
                f"{name} ({type(maker).__name__}) of attention layer {layer} stands between a projection and the "
                "rotation of its queries or keys, and takes no other basis; accepted: rope_mixed."
            )
        check_foldable([maker])
        (index,) = blocks.makers[layer][name].values()
        channels = blocks.channels[index]
        widths = [2 * len(channels.planes) * heads for heads in channels.maker.heads]
        for parameter in maker.parameters():
            *rotated, others = parameter[channels.order].split([*widths, len(parameter) - sum(widths)])
            changed = torch.cat([*(to_folded(rows, bases[group][row]) for rows in rotated), others])
            parameter.copy_(changed[channels.inverse])
        patch.outputs.follow((layer, name), maker, partial(rotate_states, tower, layer, name))
