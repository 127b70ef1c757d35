"""Learned rotations in the vision towers of pretrained models (ComRoPE §4.4): the plan, and the hooks of a tower."""

import inspect
from dataclasses import dataclass, fields
from functools import partial

import torch
from huggingface_hub.dataclasses import strict
from huggingface_hub.errors import StrictDataclassError
from torch import nn

from ..encoding.folding import build_rotary_encoding
from ..encoding.rotary_fields import EncodingConfig, GridFields, RotaryFields, rotated_prefix
from ..probing.coordinate_probe import frequency_buffers
from ..probing.module_inspection import View, head_shape, linear_layer, projections
from ..transformer.attention_functions import eager_attention_forward
from .patched_forward import (
    ROTARY_ATTENTION,
    CheckpointingInPass,
    accept_any_size,
    compute_rotations,
    interpolate_table,
    record_grid,
    record_states,
    resize_tables,
    run_pass,
)
from .rotary_patch import RotaryPatchConfig
from .tower_patch import TowerPatch, TowerPlan, choose_target
from .vision_towers import Tower, find_towers, position_table, refuse_other_tokens, refuse_rotating, table_method


@strict
@dataclass
class TowerConfig(GridFields, EncodingConfig):
    """The configuration of one tower's rotations, for the patched layers only; `train_grid`: its patches per axis."""

    train_grid: tuple[int, ...] = ()
    rotate_prefix: bool = False

    def __post_init__(self):
        super().__post_init__()
        self.fill_in_coordinates()

    @property
    def prefix(self) -> tuple[int, float]:
        """Number of prefix tokens among constants, and their coordinate."""
        return self.num_prefix_tokens, rotated_prefix(self)


@dataclass
class RotaryPatch(TowerPatch[Tower]):
    """
    The patch of a vision tower.

    Attributes:
        train_grid, is_flexible: As in [`Tower`].
        fixed_table: (1, N, hidden_size) position table that is not a parameter and that the model cannot resize;
            the patch embedding adds its entries. `None` for other models.
    """

    embeddings_name: str
    train_grid: tuple[int, ...]
    coordinates: str
    is_flexible: bool
    fixed_table: torch.Tensor | None = None

    run = staticmethod(run_pass)

    def describe_base(self, module: nn.Module) -> dict:
        heads, head_dim = head_shape(self.attentions(module)[0])
        return {"heads": heads, "head_dim": head_dim, "train_grid": list(self.train_grid)}

    def add_hooks(self, tower: Tower) -> None:
        self.handles += [
            tower.embeddings.register_forward_pre_hook(accept_any_size, with_kwargs=True),
            tower.embeddings.register_forward_hook(compute_rotations, with_kwargs=True),
        ]
        self._replace_table(tower.embeddings)
        if not self.is_flexible:
            self.handles.append(tower.patch_embedding.register_forward_hook(record_grid))
        for layer, attention in enumerate(self.attentions(tower.module)):
            if self.config.content_positions is not None:
                self.hook_arguments(attention, record_states)
            names = inspect.unwrap(type(attention).forward).__globals__
            eager = names.get("eager_attention_forward") or eager_attention_forward
            attention.config = View(attention.config, _attn_implementation=ROTARY_ATTENTION, layer=layer, eager=eager)

    def _replace_table(self, embeddings: nn.Module) -> None:
        """Make the embeddings read their table as `keep_absolute` defines it, without changing a parameter."""
        method = table_method(embeddings)
        if _has_fixed_table(embeddings):
            self.fixed_table = embeddings.position_embeddings
            # record_grid has already added the entries to the patches.
            embeddings.position_embeddings = self.fixed_table.new_zeros(1, 1, self.fixed_table.shape[-1])
        elif method is not None and (self.config.keep_absolute != "interpolate" or len(self.train_grid) == 3):
            setattr(embeddings, method, partial(resize_tables if self.is_flexible else interpolate_table, embeddings))

    def remove_hooks(self, module: nn.Module) -> None:
        super().remove_hooks(module)
        embeddings = module.get_submodule(self.embeddings_name)
        vars(embeddings).pop(table_method(embeddings), None)
        if self.fixed_table is not None:
            embeddings.position_embeddings = self.fixed_table
        for attention in self.attentions(module):
            attention.config = attention.config.base
        for inner in module.modules():
            checkpointing = getattr(inner, "_gradient_checkpointing_func", None)
            if isinstance(checkpointing, CheckpointingInPass):
                inner._gradient_checkpointing_func = checkpointing.function


def plan_towers(model: nn.Module, config: RotaryPatchConfig) -> list[TowerPlan[Tower]]:
    """Raises `ValueError` if the model has no vision tower, or the configuration does not fit it."""
    try:
        towers = find_towers(model)
    except ValueError as error:
        rotating = [name for name, module in model.named_modules() if frequency_buffers(module)]
        if not rotating:
            raise
        raise ValueError(
            f"{type(model).__name__} already rotates query and key ({rotating[0]}), and rotary_init="
            f"{config.rotary_init!r} is for models that do not: pass rotary_init='pretrained' to start at its "
            f"rotations. {error}"
        ) from error
    return [_plan_vision_tower(tower, config) for tower in choose_target(towers, config.target, "vision tower")]


def _plan_vision_tower(tower: Tower, config: RotaryPatchConfig) -> TowerPlan[Tower]:
    refuse_rotating(tower.module, tower.attentions)
    layers = tower.choose_layers(config.layers)
    refuse_other_tokens(tower, [tower.attentions[layer] for layer in layers])
    heads, head_dim = tower.common_shape(layers, lambda layer: head_shape(tower.attentions[layer][1]))
    if config.keep_absolute != "interpolate":
        _check_position_table(tower, config)
    if "sum" in (config.content_positions or "") and hasattr(tower.embeddings, "random_masking"):
        raise ValueError(
            f"content_positions={config.content_positions!r}: {tower.label} shuffles patches; accepted: shared, heads."
        )
    rotary_config = make_tower_config(config, tower.train_grid, len(layers), heads, head_dim)
    rotary_config.hidden_size = linear_layer(projections(tower.attentions[layers[0]][1])[0]).in_features
    patch = RotaryPatch(
        config,
        tower.attention_names(layers),
        embeddings_name=next(name for name, module in tower.module.named_modules() if module is tower.embeddings),
        train_grid=tower.train_grid,
        coordinates=str(rotary_config.coordinates),
        is_flexible=tower.is_flexible,
    )
    return TowerPlan(tower, patch, partial(build_rotary_encoding, rotary_config, len(tower.train_grid)))


def make_tower_config(
    config: RotaryPatchConfig, grid: tuple[int, ...], layers: int, heads: int, head_dim: int
) -> TowerConfig:
    """The configuration of rotations by the position in a grid. Raises `ValueError` if there are none of that kind."""
    shared = {field.name: getattr(config, field.name) for kind in (RotaryFields, GridFields) for field in fields(kind)}
    try:
        return TowerConfig(
            **shared,
            num_axes=len(grid),
            num_hidden_layers=layers,
            num_attention_heads=heads,
            head_dim=head_dim,
            train_grid=grid,
            rotate_prefix=bool(config.rotate_prefix),
            folded_grids=config.folded_grids,
        )
    except StrictDataclassError as error:
        raise ValueError(str(error.__cause__ or error)) from error


def _check_position_table(tower: Tower, config: RotaryPatchConfig) -> None:
    name = type(tower.module).__name__
    if position_table(tower.embeddings) is None:
        raise ValueError(f"keep_absolute={config.keep_absolute!r}: {name} has no absolute position table.")
    if table_method(tower.embeddings) is None and not _has_fixed_table(tower.embeddings):
        raise ValueError(
            f"keep_absolute={config.keep_absolute!r} is not available for {name}, which has no method to read its "
            "position table for another size; accepted: interpolate."
        )


def _has_fixed_table(embeddings: nn.Module) -> bool:
    """Whether the table is neither parameter nor buffer and cannot be read for another grid (VideoMAE's sinusoids)."""
    return table_method(embeddings) is None and "position_embeddings" in vars(embeddings)
