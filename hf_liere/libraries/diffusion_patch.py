"""
Patches of diffusers' transformers: the plan, which is checked before the model is changed, and the hooks.

In a forward pass, the coordinates of the tokens travel behind the channels of the model's own cos, so whatever the
model does with it (concatenation, padding, checkpointing) is done with the coordinates. A hook on every attention
module takes them off, and turns cos and sin to the frequencies of its layer; or hooks on the norms of queries and keys
rotate these by blocks, and the model's own rotation becomes the identity.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from ..models.encoding.encoding_traits import rotary_traits
from ..models.fast.dispatch import working_dtype
from ..models.patched.rotary_patch import RotaryPatchConfig
from ..models.patched.tower_patch import TowerPlan, choose_target, patched_towers
from ..models.patched.vision_patch import make_tower_config
from ..models.probing.attention_tower import AttentionTower
from ..models.probing.module_inspection import device_of, forward_arguments, linear_layer
from .checks import LibraryPatch, build_from_grid, check_start
from .diffusion_forward import (
    STATE_MODULES,
    CarryingRope,
    carry_argument,
    carry_coordinates,
    carry_positions,
    drop_positions,
    finish_attention,
    prepare_attention,
    record_noise_level,
    rotate_states,
    state_module,
)
from .families import FAMILIES, DiffusionFamily, find_kind
from .planes import PlaneTable
from .rotations import PretrainedFrequencies, StateRotations, build_blocks, identity_turn, turn_further
from .schedules import FrequencySchedule, Schedule


# In the configuration of a patched model. diffusers warns of unknown fields without an underscore.
CONFIG_FIELD = "_rotary_patch"


@dataclass
class DiffusionTower(AttentionTower):
    """
    A transformer of diffusers, with the attention modules that rotate or can rotate.

    Attributes:
        kind: The name of its family in `FAMILIES`.
    """

    kind: str

    @property
    def family(self) -> DiffusionFamily:
        return FAMILIES[self.kind]


@dataclass
class DiffusionPatch(LibraryPatch[DiffusionTower]):
    """
    The patch of a transformer of diffusers.

    Attributes:
        kind: As in [`DiffusionTower`].
        table: The planes of models that rotate.
        schedule: Of the frequencies, `None` for none.
        reads_level: Whether the schedule depends on the noise level.
        level_hooks: Then the hook that records it.
    """

    kind: str
    table: PlaneTable = PlaneTable((), ())
    schedule: Schedule | None = None
    reads_level: bool = False
    level_hooks: list = field(default_factory=list)

    @property
    def family(self) -> DiffusionFamily:
        return FAMILIES[self.kind]

    def weighted_modules(self, attention: nn.Module) -> list[nn.Module]:
        names = ("to_q", "to_k", "add_q_proj", "add_k_proj", "to_qkv_mlp_proj")
        found = (getattr(attention, name, None) for name in names)
        return [module for module in found if isinstance(module, nn.Module)]

    def add_hooks(self, tower: DiffusionTower) -> None:
        module, family = tower.module, tower.family
        module.register_to_config(**{CONFIG_FIELD: self.config.to_dict()})
        rope = getattr(module, family.rope) if family.rope else None
        pass_inputs = carry_argument if family.rotates else carry_positions
        if rope is None:
            names = tuple(forward_arguments(module))
            hook = partial(pass_inputs, names)
            self.handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
        elif isinstance(rope, nn.Module):
            self.handles.append(rope.register_forward_hook(partial(carry_coordinates, module), with_kwargs=True))
        else:
            # Z-Image's is not a module.
            setattr(module, str(family.rope), CarryingRope(module, rope))
        for layer, (_, attention) in enumerate(tower.attentions):
            names = tuple(forward_arguments(attention))
            hook = partial(prepare_attention, module, layer, names)
            self.handles.append(attention.register_forward_pre_hook(hook, with_kwargs=True))
            if self.rotates_states(module.rotary_encoding, layer):
                self.hook_outputs(module, layer, attention)
                self.handles.append(attention.register_forward_hook(finish_attention, always_call=True))
        if not family.rotates:
            for _, attention in family.find_attentions(module, cross=True):
                self.handles.append(attention.register_forward_pre_hook(drop_positions, with_kwargs=True))

    def rotates_states(self, encoding: nn.Module, layer: int) -> bool:
        """Whether queries and keys of an attention module are rotated where they are normalised."""
        return layer in encoding.place and (self.family.in_place or isinstance(encoding, StateRotations))

    def streams(self, attention: nn.Module) -> tuple[str, ...]:
        """The streams of tokens that an attention module rotates."""
        joins = self.family.text in ("first", "separate") and state_module(attention, "text", "query") is not None
        return ("image", "text") if joins else ("image",)

    def hook_outputs(self, module: nn.Module, layer: int, attention: nn.Module) -> None:
        """Rotate what the current modules make: adapters such as LoRA put other modules around projections."""
        for stream in self.streams(attention):
            for part in STATE_MODULES[stream]:
                hook = partial(rotate_states, layer, stream, part)
                self.outputs.follow((layer, stream, part), state_module(attention, stream, part), hook)

    def remove_schedule(self) -> None:
        while self.level_hooks:
            self.level_hooks.pop().remove()
        self.schedule, self.reads_level = None, False

    def remove_hooks(self, module: nn.Module) -> None:
        super().remove_hooks(module)
        config: Any = module.config
        module._internal_dict = type(config)({name: config[name] for name in config if name != CONFIG_FIELD})
        self.remove_schedule()
        rope = getattr(module, self.family.rope) if self.family.rope else None
        if isinstance(rope, CarryingRope):
            setattr(module, str(self.family.rope), rope.rope)


def is_diffusion_model(model: nn.Module) -> bool:
    """Whether a model, or a part of it, is a transformer that this package knows, or any other model of diffusers."""
    return any(
        kind.__module__.partition(".")[0] == "diffusers" and kind.__name__ == "ModelMixin"
        for module in model.modules()
        for kind in type(module).__mro__
    )


def plan_diffusion(model: nn.Module, config: RotaryPatchConfig) -> list[TowerPlan[DiffusionTower]]:
    """
    Check a configuration against a model of diffusers, before the model is changed.

    Raises:
        ValueError: if the model has no transformer that can be patched, or the configuration does not fit it.
    """
    towers = []
    for name, module in model.named_modules():
        kind = find_kind(module)
        if kind is not None:
            attentions = [(f"{name}.{inner}".lstrip("."), one) for inner, one in FAMILIES[kind].find_attentions(module)]
            towers.append(DiffusionTower(name, module, attentions, kind))
    if not towers:
        raise ValueError(
            f"{type(model).__name__} is not a transformer of diffusers whose rotations are known; accepted: "
            f"{', '.join(FAMILIES)}."
        )
    return [_plan_tower(tower, config) for tower in choose_target(towers, config.target, "transformer")]


def _plan_tower(tower: DiffusionTower, config: RotaryPatchConfig) -> TowerPlan[DiffusionTower]:
    model, family = tower.module, tower.family
    layers = check_start(tower, config, family.rotates)
    shapes = {_head_shape(name, attention) for name, attention in tower.attentions}
    if len(shapes) != 1:
        raise ValueError(f"The attention modules of {tower.label} have different (heads, head_dim): {sorted(shapes)}.")
    heads, head_dim = shapes.pop()
    patch = DiffusionPatch(config, tower.attention_names(layers), heads, head_dim, tower.kind)
    if family.rotates:
        patch.table = table = _find_table(tower)
        patch.frequencies = table.frequencies
        if rotary_traits(config).pretrained == "planes":
            build: Callable[[], nn.Module] = partial(PretrainedFrequencies, table, layers, config, family.pairing)
        else:
            build = partial(build_blocks, table, layers, config, heads, head_dim, family.pairing, tower.label)
    else:
        size = model.config.sample_size // model.config.patch_size
        patch.train_grid = (size, size)
        rotary_config = make_tower_config(config, patch.train_grid, len(layers), heads, head_dim)
        patch.coordinates = str(rotary_config.coordinates)
        build = partial(build_from_grid, rotary_config, config, heads, layers)
    build()
    return TowerPlan(tower, patch, build)


def _head_shape(name: str, attention: Any) -> tuple[int, int]:
    """(heads, head_dim) of queries and keys."""
    heads = attention.heads
    head_dim = getattr(attention, "head_dim", None) or attention.inner_dim // heads
    key = getattr(attention, "to_k", None)
    if key is not None and linear_layer(key).out_features != heads * head_dim:
        raise ValueError(
            f"{name} has {heads} heads of {head_dim} channels, and keys of {linear_layer(key).out_features}: one "
            "number of heads for queries and keys is needed."
        )
    return heads, head_dim


def _find_table(tower: DiffusionTower) -> PlaneTable:
    """
    The planes of a model, compared with the cos and sin that it computes for a few tokens.

    Raises:
        ValueError: if they differ.
    """
    model, family = tower.module, tower.family
    assert family.planes is not None, "a family that rotates"
    if family.rope is None:
        if not model.config.use_rotary_positional_embeddings:
            raise ValueError(
                f"{tower.label} has use_rotary_positional_embeddings=False: it adds a table and does not rotate."
            )
        return family.planes(model)
    assert family.example is not None and family.coordinates is not None, "a family with a rotary module"
    table, rope, device = family.planes(model), getattr(model, family.rope), device_of(model)
    arguments = {
        name: value.to(device) if isinstance(value, torch.Tensor) else value
        for name, value in family.example(model).items()
    }
    with torch.no_grad():
        turns, coordinates = rope(**arguments), family.coordinates(rope, **arguments)
    separate = family.text == "separate"
    for turn, places in zip(turns, coordinates) if separate else [(turns, coordinates)]:
        places = places.to(working_dtype(places.device))
        angles: Any = places[..., list(table.axes)] * places.new_tensor(table.frequencies)
        expected = turn_further(identity_turn(turn), angles, family.pairing)
        parts: Any = [(turn, expected)] if isinstance(turn, torch.Tensor) else zip(turn, expected)
        # The model computes angles in float32, or rounds cos and sin to half types.
        half = not isinstance(turn, torch.Tensor) and turn[0].dtype in (torch.float16, torch.bfloat16)
        tolerance = (1e-2 if half else 1e-4) + 2e-6 * angles.abs().max()
        if any(x.shape != y.shape or (x - y).abs().max() > tolerance for x, y in parts):
            raise ValueError(
                f"{tower.label}: {type(rope).__name__} computes other rotations than the releases of diffusers that "
                "are known here do; nothing was changed."
            )
    return table


def set_frequency_schedule(
    model: nn.Module,
    schedule: Schedule | None,
    noise_level: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> None:
    """
    Let the frequencies of a patched diffusion transformer depend on the size of its inputs, the noise level and the
    layer, until it is set again. Learned factors stay, and `save_rotary` does not store a schedule.

    ```python
    from diffusers import FluxTransformer2DModel
    from hf_liere import FrequencySchedule, RotaryPatchConfig, patch, set_frequency_schedule

    shape = {"num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16, "num_attention_heads": 2}
    transformer = FluxTransformer2DModel(**shape, axes_dims_rope=(4, 4, 8))  # or pipeline.transformer
    patch(transformer, RotaryPatchConfig(position_encoding="rope_mixed", rotary_init="pretrained"))
    schedule = FrequencySchedule("ntk", trained_size=(None, 64, 64), dype=(2.0, 2.0))  # FLUX.1 at 1,024 pixels
    set_frequency_schedule(transformer, schedule)
    ```

    Args:
        schedule: A [`FrequencySchedule`], or any function of a [`ScheduleInput`] that returns the (planes,) multipliers
            of the frequencies and a factor of cos and sin; `None` for the frequencies alone.
        noise_level: (timestep as the model takes it) → 1 for noise to 0 for a clean image; `None` means that of the
            model's own pipelines.

    Raises:
        ValueError: if the model is not patched with learned frequencies, has another number of axes than the schedule,
            divides coordinates by the trained size itself (LTX), or the schedule needs a noise level that is unknown.
    """
    towers = [tower for _, tower in patched_towers(model) if isinstance(tower.rotary_patch, DiffusionPatch)]
    if not towers:
        raise ValueError(
            f"{type(model).__name__} contains no patched transformer of diffusers; call patch(model, config) first."
        )
    for tower in towers:
        _check_schedule(tower, schedule, noise_level)
    for tower in towers:
        patch = tower.rotary_patch
        patch.remove_schedule()
        patch.schedule, level = schedule, noise_level or patch.family.noise_level
        is_static = isinstance(schedule, FrequencySchedule) and schedule.dype is None
        patch.reads_level = schedule is not None and level is not None and not is_static
        if patch.reads_level:
            hook = partial(record_noise_level, tuple(forward_arguments(tower)), level)
            patch.level_hooks.append(tower.register_forward_pre_hook(hook, with_kwargs=True, prepend=True))


def _check_schedule(tower: nn.Module, schedule: Schedule | None, noise_level: Callable | None) -> None:
    patch, name = tower.rotary_patch, type(tower).__name__
    if not isinstance(tower.rotary_encoding, PretrainedFrequencies):
        raise ValueError(
            f"{name} is patched with position_encoding={patch.config.position_encoding!r}, whose blocks have no "
            "frequencies to multiply; accepted: rope_mixed."
        )
    if schedule is not None and patch.family.argument_of_scale is not None:
        raise ValueError(
            f"{name} divides coordinates by the size of training itself; pass it {patch.family.argument_of_scale}."
        )
    if isinstance(schedule, FrequencySchedule):
        if len(schedule.trained_size) != patch.table.num_axes:
            raise ValueError(
                f"trained_size={schedule.trained_size!r} must have {patch.table.num_axes} entries for the axes of "
                f"{name}, with None for those that are not scaled."
            )
        if schedule.dype is not None and (noise_level or patch.family.noise_level) is None:
            raise ValueError(
                f"dype needs the noise level, which the timestep of {name} does not tell: pass noise_level."
            )
