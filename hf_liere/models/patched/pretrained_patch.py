"""
Rotary patches of models with RoPE: the plan, which is checked before the model is changed, and the hooks.

In a forward pass, a hook on the rotary module replaces its cos and sin by the coordinates of the tokens, so whatever
the model does with these (windows, slices of tokens) is done with the coordinates. A hook on every attention module
computes cos and sin from them, with the frequencies of its layer. Blocks of more than one plane rotate queries and keys
where they are made, before the model's own rotation, which then gets cos = 1 and sin = 0; cached keys are rotated.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from ..encoding.encoding_traits import rotary_traits
from .module_inspection import forward_arguments, projection_widths
from .pretrained_blocks import PretrainedBlocks, find_state_modules
from .pretrained_rope import PretrainedPlanes
from .rope_layout import RopeLayout, RopeTower, find_rope_towers
from .rope_pairs import Probe, find_common_planes, find_key_sources
from .rotating_layers import choose_rotating_layers
from .tower_patch import TowerPatch, TowerPlan, detach, thread


@dataclass
class RopePatch(TowerPatch[RopeTower]):
    """
    The patch of a [`RopeTower`].

    Attributes:
        rope_name: Name of the rotary module inside the tower.
        layouts: The distinct layouts of its attention modules.
        rotating: By layer and part, the module whose output [`rotate_states`] rotates, and the handle of that hook.
    """

    rope_name: str
    layouts: list[RopeLayout]
    rotating: dict[tuple[int, str], tuple[nn.Module, Any]] = field(default_factory=dict)

    def describe_base(self, module: nn.Module) -> dict:
        """With the frequencies that the rotations start from."""
        attention, rope = self.attentions(module)[0], module.get_submodule(self.rope_name)
        head_dim = getattr(attention, "head_dim", len(self.layouts[0].planes))
        stated, widths = projection_widths(attention, head_dim)
        heads = [(width or 0) // head_dim or None for width in widths or [None]]
        frequencies = [rope._buffers[layout.buffer].flatten().tolist() for layout in self.layouts]
        return {
            # The projection of queries may also make gates.
            "heads": heads[0] and stated or heads[0],
            "key_heads": heads[-1],
            "head_dim": head_dim,
            "train_grid": [],
            "frequencies": [[float(f"{value:.5g}") for value in values] for values in frequencies],
        }

    def reset_parameters(self, module: nn.Module) -> None:
        module.rotary_encoding.reset_parameters(module.get_submodule(self.rope_name))

    def add_hooks(self, tower: RopeTower) -> None:
        module, encoding = tower.module, tower.module.rotary_encoding
        self.handles.append(tower.rope.register_forward_hook(partial(replace_cos_sin, module), with_kwargs=True))
        for layer, (_, attention) in enumerate(tower.attentions):
            hook = partial(prepare_layer, module, layer, tuple(forward_arguments(attention)))
            self.handles.append(attention.register_forward_pre_hook(hook, with_kwargs=True))
            if layer in encoding.place and isinstance(encoding, PretrainedBlocks):
                self.hook_projections(module, layer, attention)
                self.handles.append(attention.register_forward_hook(clear_rotation))

    def hook_projections(self, module: nn.Module, layer: int, attention: nn.Module) -> None:
        """Rotate the outputs of the current projections: adapters such as LoRA put other modules around them."""
        for part, projection in find_state_modules(attention, layer in module.rotary_encoding.sources).items():
            known, handle = self.rotating.get((layer, part), (None, None))
            if known is projection:
                continue
            if handle is not None:
                handle.remove()
            handle = projection.register_forward_hook(partial(rotate_states, module, layer, part))
            self.rotating[layer, part] = (projection, handle)

    def remove_hooks(self, module: nn.Module) -> None:
        super().remove_hooks(module)
        while self.rotating:
            _, (_, handle) = self.rotating.popitem()
            handle.remove()


def plan_rope(model: nn.Module, config) -> list[TowerPlan[RopeTower]]:
    """
    Args:
        config: A `RotaryPatchConfig` with `rotary_init="pretrained"`.

    Raises:
        ValueError: if no module computes rotations that can be learned, or the configuration does not fit.
    """
    plans = [_plan_tower(tower, config) for tower in find_rope_towers(model, config.target)]
    # Report what does not fit before the model is changed.
    for planned in plans:
        encoding = planned.build_encoding()
        if isinstance(encoding, PretrainedBlocks):
            check_start(planned, encoding)
    return plans


def _plan_tower(tower: RopeTower, config) -> TowerPlan[RopeTower]:
    layers = tower.choose_layers(config.layers)
    tower.sources = find_key_sources(tower)
    layers = choose_rotating_layers(tower, layers, config.layers is not None)
    if rotary_traits(config).product and tower.layouts[layers[0]].num_axes == 1:
        raise ValueError(
            f"position_encoding={config.position_encoding!r}: {tower.label} rotates with one axis, and a product of "
            "one factor rotates planes in a basis, as cayley_string does; accepted: cayley_string, liere and others."
        )
    if rotary_traits(config).pretrained == "planes":
        build = partial(PretrainedPlanes, tower, layers, config)
    else:
        build = partial(PretrainedBlocks, tower, layers, config, find_common_planes(tower, layers))
    layouts = list(dict.fromkeys(tower.layouts))
    return TowerPlan(tower, RopePatch(config, tower.attention_names(layers), tower.rope_name, layouts), build)


def check_start(planned: TowerPlan[RopeTower], encoding: PretrainedBlocks) -> None:
    """
    Compare the queries and keys of one attention module under the model's rotation and under the one that starts there.

    Raises:
        ValueError: if they differ, or the attention module cannot be called alone.
    """
    tower, layer = planned.tower, encoding.layers[0]
    probe = Probe(tower, layer)
    if probe.is_meta:
        # A model that is constructed before its weights are loaded was checked when it was patched.
        return
    with torch.no_grad():
        coordinates = encoding.coordinates(probe.layout.layer_type, *probe.arguments, **probe.options)
        cos, sin, _ = encoding.compute_pretrained(layer, coordinates[:0], coordinates, tower.rope)
        before = probe.capture(cos, sin)
        planned.attach(encoding)
        try:
            after = probe.capture(cos[..., :1], coordinates)
        finally:
            detach(tower.module)
            thread.rotation = None
    # Less than the angle of any wrong pair, and more than the rounding of half types.
    if any((x - y).abs().max() > 0.05 * x.abs().max() for x, y in zip(before, after)):
        raise probe.make_error("pairs channels in another way")


def replace_cos_sin(tower: nn.Module, rope: nn.Module, args, kwargs, output):
    """Forward hook of a rotary module: returns A channels of cos, for its dtype, and (…, N, A) coordinates for sin."""
    layer_type = kwargs.get("layer_type", args[2] if len(args) > 2 else None)
    coordinates = tower.rotary_encoding.coordinates(layer_type, *args, **kwargs)
    return output[0][..., : coordinates.shape[-1]], coordinates


def prepare_layer(tower: nn.Module, layer: int, names: tuple[str, ...], attention: nn.Module, args, kwargs):
    """Forward pre-hook of an attention module whose arguments have these names: passes cos and sin of its layer."""
    options = {**dict(zip(names, args)), **kwargs}
    if options.get("position_embeddings") is None:
        # Some models do not rotate in every layer.
        return None
    cos, coordinates = options["position_embeddings"]
    encoding, rope = tower.rotary_encoding, tower.get_submodule(tower.rotary_patch.rope_name)
    num_axes = encoding.layouts[encoding.layout_of_layer[layer]].layout.num_axes
    if coordinates.shape[-1] != num_axes or coordinates.dtype != torch.float32:
        raise RuntimeError(
            f"{tower.rotary_patch.rope_name} returned float32 coordinates of {num_axes} axes, but attention layer "
            f"{layer} got {coordinates.dtype} of shape {tuple(coordinates.shape)}: the model computes with cos and sin "
            "before attention, or they do not come from it; unpatch the model."
        )
    states = options[names[0]]  # (…, prefix + N, hidden_size)
    *replaced, rotation = encoding(layer, cos, coordinates, rope, states)
    thread.rotation = None
    if rotation is not None:
        tower.rotary_patch.hook_projections(tower, layer, attention)
        thread.rotation = (layer, rotation, states.ndim)
    options["position_embeddings"] = tuple(replaced)
    positional = names[: len(args)]
    return tuple(options.pop(name) for name in positional), options


def rotate_states(tower: nn.Module, layer: int, part: str, module: nn.Module, args, output: torch.Tensor):
    """Forward hook of the module that makes the queries or keys of an attention module, or both."""
    current = getattr(thread, "rotation", None)
    if current is None or current[0] != layer:
        raise RuntimeError(
            f"{type(module).__name__} of attention layer {layer} ran outside its attention module, so the positions "
            "of its tokens are unknown. Call the model around it, or unpatch the model."
        )
    _, rotation, state_dims = current
    return tower.rotary_encoding.rotate(rotation, layer, part, output, state_dims)


def clear_rotation(attention: nn.Module, args, output) -> None:
    thread.rotation = None
