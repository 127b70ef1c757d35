"""Patches of diffusers' transformers: what is known of these, the hooks, and schedules of frequencies."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from ...probing.module_inspection import device_of, forward_arguments, linear_layer
from ...probing.planes import Planes
from ..tower_patch import patched_towers
from . import diffusion_forward as hooks
from .families import FAMILIES, DiffusionFamily
from .library_patch import LibraryPatch, LibraryTower
from .rotations import planes_along, require_known
from .schedules import FrequencySchedule, Schedule


# The least half turn of the slowest plane of an axis, in tokens, where coordinates are read from cos and sin.
REACH = 32
# In the configuration of a patched model. diffusers warns of unknown fields without an underscore.
CONFIG_FIELD = "_rotary_patch"


@dataclass
class DiffusionPatch(LibraryPatch["DiffusionTower"]):
    """
    The patch of a transformer of diffusers.

    Attributes:
        schedule: Of the frequencies, `None` for none.
        noise_level: As in [`set_frequency_schedule`], if it is not that of the family.
        reads_level: Whether the schedule depends on the noise level.
        names: Those of the transformer's arguments.
    """

    schedule: Schedule | None = None
    noise_level: Callable[[torch.Tensor], torch.Tensor] | None = None
    reads_level: bool = False
    names: tuple[str, ...] = ()

    @property
    def family(self) -> DiffusionFamily:
        return FAMILIES[self.kind]

    def weighted_modules(self, attention: nn.Module) -> list[nn.Module]:
        names = ("to_q", "to_k", "add_q_proj", "add_k_proj", "to_qkv_mlp_proj")
        found = (getattr(attention, name, None) for name in names)
        return [module for module in found if isinstance(module, nn.Module)]

    def add_hooks(self, tower: "DiffusionTower") -> None:
        module, family = tower.module, self.family
        self.names = tuple(forward_arguments(module))
        module.register_to_config(**{CONFIG_FIELD: self.config.to_dict()})
        rope = getattr(module, family.rope) if family.rope else None
        if isinstance(rope, nn.Module):
            self.handles.append(rope.register_forward_hook(partial(hooks.carry_coordinates, module), with_kwargs=True))
        elif rope is not None:
            # Z-Image's is not a module.
            setattr(module, str(family.rope), hooks.CarryingRope(rope, tower=module))
        for layer, (_, attention) in enumerate(tower.attentions):
            self.hook_arguments(attention, partial(hooks.prepare_attention, module, layer))
            if self.rotates_states(module.rotary_encoding, layer):
                self.hook_outputs(module, layer, attention)
                self.handles.append(attention.register_forward_hook(hooks.finish_attention, always_call=True))
        if not family.rotates:
            rotated = [attention for _, attention in tower.attentions]
            for attention in module.modules():
                if hasattr(attention, "to_q") and attention not in rotated:
                    self.hook_arguments(attention, hooks.drop_positions)

    def run(self, module: nn.Module, forward: Callable, *args: Any, **kwargs: Any) -> Any:
        options = dict(zip(self.names, args)) | kwargs
        hooks.record_noise_level(module, options)
        if self.config.compose:
            hooks.carry_given(module, options)
        if not self.family.rope:
            (hooks.carry_argument if self.family.rotates else hooks.carry_positions)(module, options)
        return forward(**options)

    def rotates_states(self, encoding: nn.Module, layer: int) -> bool:
        """Whether queries and keys of an attention module are rotated where they are normalised."""
        return layer in encoding.place and (self.family.in_place or not self.turns)

    def streams(self, attention: nn.Module) -> tuple[str, ...]:
        """The streams of tokens that an attention module rotates."""
        joins = self.family.text in ("first", "separate") and hooks.state_module(attention, "text", "query") is not None
        return ("image", "text") if joins else ("image",)

    def hook_outputs(self, module: nn.Module, layer: int, attention: nn.Module) -> None:
        """Rotate what the current modules make: adapters such as LoRA put other modules around projections."""
        for stream in self.streams(attention):
            for part in hooks.STATE_MODULES[stream]:
                hook = partial(hooks.rotate_states, layer, stream, part)
                self.outputs.follow((layer, stream, part), hooks.state_module(attention, stream, part), hook)

    def remove_hooks(self, module: nn.Module) -> None:
        super().remove_hooks(module)
        config: Any = module.config
        module._internal_dict = type(config)({name: config[name] for name in config if name != CONFIG_FIELD})
        rope = getattr(module, self.family.rope) if self.family.rope else None
        if isinstance(rope, hooks.CarryingRope):
            setattr(module, str(self.family.rope), rope.base)


@dataclass
class DiffusionTower(LibraryTower):
    """A transformer of diffusers."""

    kinds, noun, library, patch_class = FAMILIES, "transformer", "diffusers", DiffusionPatch

    @classmethod
    def belongs(cls, model: nn.Module) -> bool:
        return any(
            kind.__module__.partition(".")[0] == "diffusers" and kind.__name__ == "ModelMixin"
            for module in model.modules()
            for kind in type(module).__mro__
        )

    @staticmethod
    def find_attentions(module: nn.Module, kind: str) -> Iterator[tuple[str, nn.Module]]:
        return FAMILIES[kind].find_attentions(module)

    @property
    def rotates(self) -> bool:
        return FAMILIES[self.kind].rotates

    @property
    def composes(self) -> bool:
        return FAMILIES[self.kind].text == "first"

    @property
    def train_grid(self) -> tuple[int, int]:
        config: Any = self.module.config
        size = config.sample_size // config.patch_size
        return size, size

    def head_shape(self, layer: int, turns: bool) -> tuple[int, int]:
        name, attention = self.attentions[layer]
        heads = attention.heads
        head_dim = getattr(attention, "head_dim", None) or attention.inner_dim // heads
        if (key := getattr(attention, "to_k", None)) is not None and linear_layer(key).out_features != heads * head_dim:
            raise ValueError(
                f"{name} has {heads} heads of {head_dim} channels, and keys of {linear_layer(key).out_features}: one "
                "number of heads for queries and keys is needed."
            )
        return heads, head_dim

    def read_start(self) -> Planes:
        model, family = self.module, FAMILIES[self.kind]
        assert family.planes is not None, "a family that rotates"
        planes = family.planes(model)
        if family.coordinates is None:
            reach = min(math.pi / planes_along(planes, axis)[0][0] for axis in range(planes.num_axes))
            if reach < REACH:
                raise ValueError(
                    f"{self.label} has so few channels for an axis that rotations repeat after {2 * reach:.3g} tokens, "
                    f"and do not tell where these are; accepted: {2 * REACH} tokens or more."
                )
        if family.rope is None:
            if not model.config.use_rotary_positional_embeddings:
                raise ValueError(
                    f"{self.label} has use_rotary_positional_embeddings=False: it adds a table and does not rotate."
                )
        else:
            assert family.example is not None, "a family with a rotary module"
            rope, device = getattr(model, family.rope), device_of(model)
            example = family.example(model)
            arguments = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in example.items()}
            with torch.no_grad():
                turns = rope(**arguments)
                coordinates = family.place(planes, turns, rope, **arguments)
            label = f"{self.label}: {type(rope).__name__}"
            for turn, places in zip(family.parts(turns), coordinates):
                require_known(turn, planes, places, label, "diffusers")
        return planes


def set_frequency_schedule(
    model: nn.Module, schedule: Schedule | None, noise_level: Callable[[torch.Tensor], torch.Tensor] | None = None
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
        patch.schedule, patch.noise_level = schedule, noise_level
        is_static = schedule is None or (isinstance(schedule, FrequencySchedule) and schedule.dype is None)
        patch.reads_level = not is_static and (noise_level or patch.family.timesteps) is not None


def _check_schedule(tower: nn.Module, schedule: Schedule | None, noise_level: Callable | None) -> None:
    patch, name = tower.rotary_patch, type(tower).__name__
    if not patch.turns:
        raise ValueError(
            f"{name} is patched with position_encoding={patch.config.position_encoding!r}, whose blocks have no "
            "frequencies to multiply; accepted: rope_mixed."
        )
    if schedule is not None and patch.family.argument_of_scale is not None:
        raise ValueError(
            f"{name} divides coordinates by the size of training itself; pass it {patch.family.argument_of_scale}."
        )
    if isinstance(schedule, FrequencySchedule):
        if len(schedule.trained_size) != patch.planes.num_axes:
            raise ValueError(
                f"trained_size={schedule.trained_size!r} must have {patch.planes.num_axes} entries for the axes of "
                f"{name}, with None for those that are not scaled."
            )
        if schedule.dype is not None and (noise_level or patch.family.timesteps) is None:
            raise ValueError(
                f"dype needs the noise level, which the timestep of {name} does not tell: pass noise_level."
            )
