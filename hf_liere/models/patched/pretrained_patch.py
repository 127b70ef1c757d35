"""
Rotary patches of models that rotate queries and keys by themselves: the plan, which is checked before anything is
changed, and the hooks.

A forward pass: a hook on the rotary module hands on the coordinates of the tokens in the place of cos and sin, so that
whatever the model does with these (windows, slices of tokens) is done with the coordinates. A hook on every attention
module makes cos and sin of them with the frequencies of its layer. Blocks that are no planes rotate queries and keys
where they are made, before the model's own rotation, which then gets cos = 1 and sin = 0; keys are cached rotated.
"""

import inspect
import threading
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from ..encoding.encoding_traits import traits_of
from .pretrained_blocks import PretrainedBlocks, projected_states
from .pretrained_rope import PretrainedPlanes, PretrainedRope
from .rope_layout import RopeLayout, RopeTower, find_rope_towers
from .rope_pairs import HeadPlanes, Probe, key_sources, rotated_planes, rotating_layers
from .vision_towers import choose_layers, device_of, projected_widths


# The rotation of the attention module that is running; it belongs to the thread, never to a module.
_thread = threading.local()


@dataclass
class RopePatch:
    """
    The state of a patched [`RopeTower`], stored on it as `rotary_patch`.

    Attributes:
        rotating: By layer and part, the module whose output [`rotate_states`] rotates, and the handle of that hook.
    """

    config: object
    attention_names: list[str]
    rope_name: str
    handles: list = field(default_factory=list)
    rotating: dict[tuple[int, str], tuple[nn.Module, Any]] = field(default_factory=dict)

    def rotate_states_of(self, tower: nn.Module, layer: int, attention: nn.Module) -> None:
        """Rotate what the attention module projects now: adapters such as LoRA put other modules around projections."""
        for part, module in projected_states(attention, layer in tower.rotary_encoding.sources).items():
            known, handle = self.rotating.get((layer, part), (None, None))
            if known is module:
                continue
            if handle is not None:
                handle.remove()
            handle = module.register_forward_hook(partial(rotate_states, tower, layer, part))
            self.rotating[layer, part] = (module, handle)

    def base(self, tower: nn.Module) -> dict:
        """As [`RopePlan.base`]."""
        attention, layouts = tower.get_submodule(self.attention_names[0]), tower.rotary_encoding.layouts
        return describe_base(tower.get_submodule(self.rope_name), attention, [planes.layout for planes in layouts])

    def reset_parameters(self, tower: nn.Module) -> None:
        """Values of the start for parameters that no checkpoint had."""
        tower.rotary_encoding.reset_parameters(tower.get_submodule(self.rope_name))

    def detach(self, tower: nn.Module) -> None:
        """Undo [`RopePlan.attach`]."""
        for handle in (*self.handles, *(handle for _, handle in self.rotating.values())):
            handle.remove()


def describe_base(rope: nn.Module, attention: nn.Module, layouts: list[RopeLayout]) -> dict:
    """What adapters say of the model that they belong to: its heads, and the frequencies that it starts from."""
    head_dim = getattr(attention, "head_dim", len(layouts[0].planes))
    _, widths = projected_widths(attention, head_dim)
    heads = [(width or 0) // head_dim or None for width in widths or [None]]
    frequencies = [rope._buffers[layout.buffer].flatten().tolist() for layout in layouts]
    return {
        "heads": heads[0],
        "key_heads": heads[-1],
        "head_dim": head_dim,
        "train_grid": [],
        "frequencies": [[float(f"{value:.5g}") for value in values] for values in frequencies],
    }


@dataclass
class RopePlan:
    """A rotary patch of a model that rotates by itself, checked before anything is changed."""

    tower: RopeTower
    layers: list[int]
    config: object
    head_planes: HeadPlanes | None = None

    @property
    def attentions(self) -> list[tuple[str, nn.Module]]:
        return [self.tower.attentions[layer] for layer in self.layers]

    def build_encoding(self) -> PretrainedRope:
        if self.head_planes is None:
            return PretrainedPlanes(self.tower, self.layers, self.config)
        return PretrainedBlocks(self.tower, self.layers, self.config, self.head_planes)

    def base(self) -> dict:
        """See [`describe_base`]."""
        return describe_base(self.tower.rope, self.attentions[0][1], list(dict.fromkeys(self.tower.layouts)))

    def attach(self, encoding: PretrainedRope) -> None:
        tower, module = self.tower, self.tower.module
        prefix = len(tower.name) + 1 if tower.name else 0
        patch = RopePatch(self.config, [name[prefix:] for name, _ in self.attentions], tower.rope_name)
        module.rotary_encoding = encoding.to(device_of(self.attentions[0][1], module)).train(module.training)
        handles = [tower.rope.register_forward_hook(partial(hand_on_coordinates, module), with_kwargs=True)]
        for layer, (_, attention) in enumerate(tower.attentions):
            names = tuple(name for name in inspect.signature(type(attention).forward).parameters if name != "self")
            hook = partial(rotate_as_layer, module, layer, names)
            handles.append(attention.register_forward_pre_hook(hook, with_kwargs=True))
            if layer in encoding.place and isinstance(encoding, PretrainedBlocks):
                patch.rotate_states_of(module, layer, attention)
                handles.append(attention.register_forward_hook(forget_rotation))
        patch.handles = handles
        module.rotary_patch = patch


def plan_rope(model: nn.Module, config) -> list[RopePlan]:
    """
    Args:
        config: A `RotaryPatchConfig` with `rotary_init="pretrained"`.

    Raises:
        ValueError: if no module computes rotations that can be learned, or the configuration does not fit.
    """
    plans = []
    for tower in find_rope_towers(model, config.target):
        layers = choose_layers(tower.shown, tower.module, tower.attentions, config.layers)
        tower.sources = key_sources(tower)
        layers = rotating_layers(tower, layers, config.layers is not None)
        planes = None if traits_of(config).pretrained == "planes" else rotated_planes(tower, layers)
        plans.append(RopePlan(tower, layers, config, planes))
    # What does not fit is noticed before a model is changed.
    for planned in plans:
        encoding = planned.build_encoding()
        if isinstance(encoding, PretrainedBlocks):
            check_start(planned, encoding)
    return plans


def check_start(planned: RopePlan, encoding: PretrainedBlocks) -> None:
    """
    Compare the queries and keys that attention sees, with the rotation of the model and with the one that starts from
    it, in one attention module.

    Raises:
        ValueError: if they differ, or the attention module cannot be called by itself.
    """
    tower, layer = planned.tower, planned.layers[0]
    probe = Probe(tower, layer)
    if probe.is_meta:
        # A model that is constructed before its weights are loaded was checked when it was patched.
        return
    with torch.no_grad():
        coordinates = encoding.coordinates(probe.layout.layer_type, *probe.arguments, **probe.options)
        cos, sin, _ = encoding.unchanged(layer, coordinates[:0], coordinates, tower.rope)
        before = probe.see(cos, sin)
        planned.attach(encoding)
        try:
            after = probe.see(cos[..., :1], coordinates)
        finally:
            detach_rope(tower.module)
            _thread.rotation = None
    # Less than the angle of any wrong pair, and more than half types round.
    if any((x - y).abs().max() > 0.05 * x.abs().max() for x, y in zip(before, after)):
        raise probe.refusal("pairs channels in another way")


def detach_rope(tower: nn.Module) -> None:
    """Undo [`RopePlan.attach`]."""
    tower.rotary_patch.detach(tower)
    del tower.rotary_encoding, tower.rotary_patch


def hand_on_coordinates(tower: nn.Module, rope: nn.Module, args, kwargs, output):
    """Forward hook of a rotary module: (…, N, A) channels of cos, for their type, and coordinates instead of sin."""
    layer_type = kwargs.get("layer_type", args[2] if len(args) > 2 else None)
    coordinates = tower.rotary_encoding.coordinates(layer_type, *args, **kwargs)
    return output[0][..., : coordinates.shape[-1]], coordinates


def rotate_as_layer(tower: nn.Module, layer: int, names: tuple[str, ...], attention: nn.Module, args, kwargs):
    """Forward pre-hook of an attention module with arguments of these names: cos and sin of its layer."""
    given = {**dict(zip(names, args)), **kwargs}
    if given.get("position_embeddings") is None:
        # Some models leave layers without a rotation.
        return None
    cos, coordinates = given["position_embeddings"]
    encoding, rope = tower.rotary_encoding, tower.get_submodule(tower.rotary_patch.rope_name)
    num_axes = encoding.layouts[encoding.layout_of_layer[layer]].layout.num_axes
    if coordinates.shape[-1] != num_axes or coordinates.dtype != torch.float32:
        raise RuntimeError(
            f"{tower.rotary_patch.rope_name} handed on float32 coordinates of {num_axes} axes, but attention layer "
            f"{layer} got {coordinates.dtype} of shape {tuple(coordinates.shape)}: the model computes with cos and sin "
            "before attention, or they do not come from it; unpatch the model."
        )
    states = given[names[0]]
    *replaced, rotation = encoding(layer, cos, coordinates, rope, states)
    _thread.rotation = None
    if rotation is not None:
        tower.rotary_patch.rotate_states_of(tower, layer, attention)
        _thread.rotation = (layer, rotation, states.ndim)
    given["position_embeddings"] = tuple(replaced)
    positional = names[: len(args)]
    return tuple(given.pop(name) for name in positional), given


def rotate_states(tower: nn.Module, layer: int, part: str, module: nn.Module, args, output: torch.Tensor):
    """Forward hook of the module that makes the queries or keys of an attention module, or both."""
    current = getattr(_thread, "rotation", None)
    if current is None or current[0] != layer:
        raise RuntimeError(
            f"{type(module).__name__} of attention layer {layer} ran outside of its attention module, so the positions "
            "of its tokens are unknown. Call the model around it, or unpatch the model."
        )
    _, rotation, state_dims = current
    return tower.rotary_encoding.rotated(rotation, part, args[0], output, state_dims)


def forget_rotation(attention: nn.Module, args, output) -> None:
    _thread.rotation = None
