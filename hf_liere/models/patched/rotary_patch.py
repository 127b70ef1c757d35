"""
Learned rotations in the vision towers of pretrained models (ComRoPE §4.4): the configuration of a patch, its check
against a model, and the hooks that a tower gets.
"""

import inspect
from dataclasses import asdict, dataclass, fields
from functools import partial
from typing import Any, get_args, get_origin, get_type_hints

import torch
from huggingface_hub.dataclasses import strict
from huggingface_hub.errors import StrictDataclassError
from torch import nn

from ..encoding.encoding_traits import ENCODING_TRAITS, OWN_FIELDS, closest, default_rotate_prefix
from ..encoding.folding import build_rotary_encoding
from ..encoding.rotary_fields import EncodingConfig, GridFields, RotaryFields, check_format_version
from ..transformer.layers import eager_attention_forward
from .coordinate_probe import frequency_buffers
from .module_inspection import View, head_shape
from .patched_forward import (
    ROTARY_ATTENTION,
    CheckpointingInPass,
    accept_any_size,
    begin_pass,
    compute_rotations,
    end_pass,
    interpolate_table,
    record_grid,
    resize_tables,
)
from .pretrained_patch import plan_rope
from .tower_patch import TowerPatch, TowerPlan, choose_target, patched_towers
from .vision_towers import Tower, find_towers, position_table, refuse_other_tokens, refuse_rotating, table_method


FORMAT_VERSION = 1
KEEP_ABSOLUTE = ("interpolate", "train_size", "fade", "drop")
# Fields of positions and initial values that a model with RoPE defines itself.
PLACEMENT_FIELDS = (
    *("rotary_init_scale", "rope_theta", *OWN_FIELDS),
    *(field.name for field in fields(GridFields)),
    *("rotate_prefix", "keep_absolute", "absolute_weight"),
)


@dataclass
class RotaryPatchConfig(GridFields, RotaryFields):
    r"""
    Which rotations a pretrained vision transformer gets, and where. See [`RotaryFields`] for the encoding, here
    `comrope_ld` by default, and [`GridFields`] for coordinates; towers whose samples have different grids draw
    displacements for each sample.

    ```python
    from hf_liere import RotaryPatchConfig

    clip = RotaryPatchConfig(position_encoding="comrope_ld", block_size=8)  # for models without rotations
    llama = RotaryPatchConfig(position_encoding="rope_mixed", rotary_init="pretrained")  # for models with RoPE
    ```

    Args:
        layers: Indices of the attention layers to rotate, from 0; `None` means all.
        target: Dotted name of the vision tower, or of the module around the one that computes RoPE, as in
            `model.named_modules()`; `None` means all.
        rotary_init: `"zeros"` leaves a model without rotations exactly as it is: zero generators, exp(0) = I (ComRoPE
            §4.4); `circulant_string`, whose basis is never the identity, within rounding. `"pretrained"` is for models
            that already rotate (RoPE) and starts at their rotations: `rope_mixed` learns the frequencies of every
            layer and computes the same bits at the start, `liere`, `comrope_ld`, `comrope_ap`, `cayley_string` and, on
            several axes, `liere_product` learn blocks of each key head and start within rounding. Any other
            (`"frequencies"`, `"normal"`, …, `None` for the encoding's own, see `RotaryFields`) is **not neutral**: it
            changes what the pretrained model computes.
            `axial_rope` and `golden_gate_rope` learn nothing and take only `None`.
        rotate_prefix: Whether class and register tokens are rotated as tokens at the centre; `None` becomes yes for
            ComRoPE in its own coordinates and others of a fixed range, else no, see `LieREConfig`.
        keep_absolute: How the patches use the model's own position table (prefix tokens always keep their entries).
            `"interpolate"`: as the model interpolates it; `"train_size"`: every patch reads the entry of its index,
            patches beyond the trained grid the nearest one; `"fade"`: interpolated and multiplied by
            `absolute_weight`, which `set_absolute_weight` changes during training; `"drop"`: not used.
        absolute_weight: Weight of the table for `keep_absolute="fade"`.

    Raises:
        ValueError: for values that no model accepts; `patch` refuses those that a given model does not accept.
    """

    position_encoding: str = "comrope_ld"
    layers: list[int] | None = None
    target: str | None = None
    rotary_init: str | None = "zeros"
    rotate_prefix: bool | None = None
    keep_absolute: str = "interpolate"
    absolute_weight: float = 1.0
    format_version: int = FORMAT_VERSION

    def __post_init__(self):
        self._check_types()
        check_format_version(self.format_version, FORMAT_VERSION)
        if self.position_encoding not in ENCODING_TRAITS:
            raise ValueError(
                f"position_encoding={self.position_encoding!r} is not a rotary encoding"
                f"{closest(self.position_encoding, ENCODING_TRAITS)}; accepted: {', '.join(ENCODING_TRAITS)}."
            )
        if self.coordinates == "physical":
            raise ValueError(
                "coordinates='physical' need the spacing of every input, which pretrained models do not take."
            )
        if self.keep_absolute not in KEEP_ABSOLUTE:
            raise ValueError(f"keep_absolute={self.keep_absolute!r} must be one of {', '.join(KEEP_ABSOLUTE)}.")
        if not 0 <= self.absolute_weight <= 1:
            raise ValueError(f"absolute_weight={self.absolute_weight} must lie in [0, 1].")
        if self.absolute_weight != 1 and self.keep_absolute != "fade":
            raise ValueError(
                f"absolute_weight={self.absolute_weight} belongs to keep_absolute='fade', not {self.keep_absolute!r}."
            )
        if self.rotary_init == "so3":
            raise ValueError(
                "rotary_init='so3' is for tokens whose positions are orientations, not for patches or words; accepted: "
                "'zeros', 'pretrained' and others of RotaryFields."
            )
        if not ENCODING_TRAITS[self.position_encoding].learned and self.rotary_init is not None:
            raise ValueError(
                f"rotary_init={self.rotary_init!r}: {self.position_encoding} learns nothing and never starts neutral; "
                "pass rotary_init=None to accept that, or another position_encoding."
            )
        if self.rotate_prefix is None:
            self.rotate_prefix = self.rotary_init != "pretrained" and default_rotate_prefix(self)
        if self.rotary_init == "pretrained":
            self._check_pretrained()

    def _check_pretrained(self) -> None:
        chosen = ENCODING_TRAITS[self.position_encoding]
        starting = [name for name, traits in ENCODING_TRAITS.items() if traits.pretrained in ("planes", "blocks")]
        if self.position_encoding not in starting:
            raise ValueError(
                f"rotary_init='pretrained' does not exist for {self.position_encoding}: {chosen.pretrained}; accepted: "
                f"{', '.join(starting)}."
            )
        defaults = {field.name: field.default for field in fields(self)} | {"rotate_prefix": False}
        refused = [name for name in PLACEMENT_FIELDS if name not in chosen.fields]
        given = [name for name in refused if getattr(self, name) != defaults[name]]
        if given:
            raise ValueError(
                f"{', '.join(f'{name}={getattr(self, name)!r}' for name in given)}: with rotary_init='pretrained' the "
                "coordinates of tokens and their frequencies are those of the model; leave these fields out."
            )

    def _check_types(self) -> None:
        if isinstance(self.layers, (list, tuple, range, set)) and all(type(layer) is int for layer in self.layers):
            self.layers = sorted(set(self.layers))
        elif self.layers is not None:
            raise ValueError(f"layers={self.layers!r} must be a list of indices from 0, or None.")
        for name, hint in get_type_hints(type(self)).items():
            value = getattr(self, name)
            kinds = [kind for part in get_args(hint) or (hint,) for kind in _accepted_kinds(part)]
            # An int is accepted as a float, a bool is not accepted as a number.
            kind = float if type(value) is int and float in kinds else type(value)
            if kind not in kinds and not (kind is str and value in kinds):
                accepted = ("None" if one is type(None) else getattr(one, "__name__", repr(one)) for one in kinds)
                raise ValueError(f"{name}={value!r} must be {' or '.join(accepted)}.")

    def to_dict(self) -> dict:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict) -> "RotaryPatchConfig":
        """Raises `ValueError` for unknown names, and for values that their fields do not accept."""
        if not isinstance(values, dict):
            raise ValueError(f"rotary_patch={values!r} must be a dictionary of fields of RotaryPatchConfig.")
        known = {field.name for field in fields(cls)}
        if unknown := set(values) - known:
            raise ValueError(f"{sorted(unknown)} are not fields of RotaryPatchConfig; accepted: {sorted(known)}.")
        return cls(**values)


def _accepted_kinds(hint: Any) -> tuple[Any, ...]:
    """The types that a part of a type hint accepts; of a Literal its values."""
    container = get_origin(hint)
    return (container,) if container in (list, tuple) else get_args(hint) or (hint,)


@strict
@dataclass
class TowerConfig(GridFields, EncodingConfig):
    """The configuration of one tower's rotations, for the patched layers only; `train_grid`: its patches per axis."""

    train_grid: tuple[int, ...] = ()
    rotate_prefix: bool = False

    def __post_init__(self):
        super().__post_init__()
        self.fill_in_coordinates()


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

    def describe_base(self, module: nn.Module) -> dict:
        heads, head_dim = head_shape(self.attentions(module)[0])
        return {"heads": heads, "head_dim": head_dim, "train_grid": list(self.train_grid)}

    def add_hooks(self, tower: Tower) -> None:
        self.handles += [
            tower.module.register_forward_pre_hook(begin_pass, prepend=True),
            tower.module.register_forward_hook(end_pass, always_call=True),
            tower.embeddings.register_forward_pre_hook(accept_any_size, with_kwargs=True),
            tower.embeddings.register_forward_hook(compute_rotations, with_kwargs=True),
        ]
        self._replace_table(tower.embeddings)
        if not self.is_flexible:
            self.handles.append(tower.patch_embedding.register_forward_hook(record_grid))
        for layer, attention in enumerate(self.attentions(tower.module)):
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


def plan(model: nn.Module, config: RotaryPatchConfig) -> list[TowerPlan]:
    """
    Check a configuration against a model, before the model is changed.

    Raises:
        ValueError: if the model is patched already, has nothing to patch, or the configuration does not fit it.
    """
    require_unpatched(model)
    if config.rotary_init == "pretrained":
        return plan_rope(model, config)
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
    return [_plan_tower(tower, config) for tower in choose_target(towers, config.target, "vision tower")]


def require_unpatched(model: nn.Module) -> None:
    """Raise `ValueError` if any part of a model is patched."""
    patched = [name or model._get_name() for name, _ in patched_towers(model)]
    if patched:
        raise ValueError(f"{', '.join(patched)} is patched already; call unpatch(model) first.")


def _plan_tower(tower: Tower, config: RotaryPatchConfig) -> TowerPlan[Tower]:
    refuse_rotating(tower.module, tower.attentions)
    layers = tower.choose_layers(config.layers)
    attentions = [tower.attentions[layer] for layer in layers]
    refuse_other_tokens(tower, attentions)
    shapes = {head_shape(attention) for _, attention in attentions}
    if len(shapes) != 1:
        raise ValueError(f"The layers have different (heads, head_dim): {sorted(shapes)}; name equal ones in layers.")
    if config.keep_absolute != "interpolate":
        _check_table(tower, config)
    heads, head_dim = shapes.pop()
    rotary_config = make_tower_config(config, tower.train_grid, len(layers), heads, head_dim)
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
    """
    The configuration of rotations by the position in a grid.

    Raises:
        ValueError: if there are no such rotations.
    """
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
        )
    except StrictDataclassError as error:
        raise ValueError(str(error.__cause__ or error)) from error


def _check_table(tower: Tower, config: RotaryPatchConfig) -> None:
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
