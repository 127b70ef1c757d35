"""
Rotary patches of models with RoPE: the plan, which is checked before the model is changed, and the hooks.

In a forward pass, a hook on the rotary module lets the angles of the tokens travel with its cos and sin, as `carrying`
describes. A hook on every attention module computes cos and sin of its layer from them. Blocks of more than one plane
get coordinates in place of angles, and rotate queries and keys where they are made, before the model's own rotation,
which then gets cos = 1 and sin = 0; cached keys are rotated. A rotary module inside an attention module serves that one
alone, and the hook on it returns cos and sin of that layer. An indexer inside an attention module gets the pretrained
cos and sin: no gradient could adapt its choice to others.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from ..encoding.kinds import encoding_of
from ..probing.attention_probe import Probe
from ..probing.coordinate_probe import Turn, changes_frequencies, read_frequencies
from ..probing.module_inspection import find_indexers, forward_arguments, is_rotation, projection_widths
from ..probing.rope_layout import RopeLayout, RopeTower, find_rope_towers
from ..probing.rope_pairs import choose_rotating_layers, find_key_sources
from ..transformer.attention_functions import refuse_ignored_poses
from .carrying import carry, keep_joined, take_off
from .composed import choose_positions
from .moved_tokens import move_numbers, refuse_moves
from .pretrained_blocks import PretrainedBlocks
from .pretrained_rope import GridPass, PretrainedPlanes, PretrainedRope
from .tower_patch import AttentionPass, TowerPatch, TowerPlan, detach


@dataclass
class RopePatch(TowerPatch[RopeTower]):
    """The patch of a [`RopeTower`], with the distinct layouts of its attention modules."""

    layouts: list[RopeLayout]

    def describe_base(self, module: nn.Module) -> dict:
        """With the frequencies that the rotations start from."""
        attention = self.attentions(module)[0]
        head_dim = getattr(attention, "head_dim", len(self.layouts[0].planes))
        stated, widths = projection_widths(attention, head_dim)
        heads = [(width or 0) // head_dim or None for width in widths or [None]]
        starts = (read_start(module, layout).flatten().tolist() for layout in self.layouts)
        frequencies = (tuple(float(f"{value:.5g}") for value in start) for start in starts)
        return {
            # The projection of queries may also make gates.
            "heads": heads[0] and (stated or heads[0]),
            "key_heads": heads[-1],
            "head_dim": head_dim,
            "train_grid": [],
            # Layers with a rotary module each usually have the same frequencies.
            "frequencies": [list(kind) for kind in dict.fromkeys(frequencies)],
        }

    def reset_parameters(self, module: nn.Module) -> None:
        module.rotary_encoding.reset_parameters(module)

    def add_hooks(self, tower: RopeTower) -> None:
        module, encoding = tower.module, tower.module.rotary_encoding
        inner = {layer: tower.inner_rope(layer) for layer in range(len(tower.attentions))}
        for name in encoding.rope_names:
            if name not in {tower.layouts[layer].rope_name for layer in inner if inner[layer]}:
                hook = partial(carry_numbers, module, name)
                self.handles.append(module.get_submodule(name).register_forward_hook(hook, with_kwargs=True))
        for layer, (_, attention) in enumerate(tower.attentions):
            rotates_states = encoding.rotates_states and layer in encoding.place
            indexers = find_indexers(attention)
            if inner[layer]:
                hook = partial(rotate_inside, module, layer)
                self.handles.append(tower.rope(layer).register_forward_hook(hook, with_kwargs=True))
            if not inner[layer] or rotates_states:
                prepare = prepare_inside if inner[layer] else partial(prepare_layer, bool(indexers))
                self.hook_arguments(
                    attention, partial(prepare, module, layer, next(iter(forward_arguments(attention))))
                )
            for indexer in indexers:
                hook = partial(pass_pretrained, layer)
                self.handles.append(indexer.register_forward_pre_hook(hook, with_kwargs=True))
            if rotates_states:
                self.hook_projections(module, layer, attention)
            if rotates_states or indexers:
                self.handles.append(attention.register_forward_hook(RopePass.finish, always_call=True))

    def hook_projections(self, module: nn.Module, layer: int, attention: nn.Module) -> None:
        """Rotate the outputs of the current projections: adapters such as LoRA put other modules around them."""
        for name in module.rotary_encoding.makers[layer]:
            projection = attention.get_submodule(name)
            self.outputs.follow((layer, name), projection, partial(rotate_states, module, layer, name))


def read_start(module: nn.Module, layout: RopeLayout) -> torch.Tensor:
    """The frequencies that a rotary module of a tower has at the start, in the order of its buffer."""
    rope = module.get_submodule(layout.rope_name)
    # Types that compute other frequencies for longer inputs keep the first ones.
    start = layout.buffer.replace("inv_freq", "original_inv_freq")
    return read_frequencies(rope, layout.buffer if rope._buffers.get(start) is None else start)


def plan_rope(model: nn.Module, config) -> list[TowerPlan[RopeTower]]:
    """Raises `ValueError` if no module computes rotations that can be learned, or the configuration does not fit."""
    return [_plan_tower(tower, config) for tower in find_rope_towers(model, config.target)]


def _plan_tower(tower: RopeTower, config) -> TowerPlan[RopeTower]:
    layers = tower.choose_layers(config.layers)
    tower.sources = find_key_sources(tower)
    layers = choose_rotating_layers(tower, layers, config.layers is not None)
    if not config.compose and encoding_of(config).product and tower.layouts[layers[0]].num_axes == 1:
        raise ValueError(
            f"position_encoding={config.position_encoding!r}: {tower.label} rotates with one axis, and a product of "
            "one factor rotates planes in a basis, as cayley_string does; accepted: cayley_string, liere and others."
        )
    has_planes = encoding_of(config).pretrained == "planes" and not config.compose
    kind = PretrainedPlanes if has_planes else PretrainedBlocks
    if kind.rotates_states:
        refuse_blocks(tower, config.compose)
    if config.content_positions is not None:
        refuse_moves(tower, layers, config, has_planes)
    patch = RopePatch(config, tower.attention_names(layers), tower.distinct_layouts)
    planned = TowerPlan(tower, patch, partial(kind, tower, layers, config))
    # Report what does not fit before the model is changed.
    encoding = planned.build_encoding()
    if kind.rotates_states and config.folded_grids is None:
        check_planned_start(planned, encoding)
    return planned


def refuse_blocks(tower: RopeTower, compose: bool) -> None:
    """
    Raises `ValueError` if the frequencies that a layer rotates with are known only when the model runs: generators
    contain the frequencies, and learned factors multiply them. With `compose` these may change, but positions are known
    outside of layers alone.
    """
    accepted = "accepted: position_encoding='rope_mixed'."
    names = ", ".join(dict.fromkeys(layout.rope_name for layout in tower.distinct_layouts))
    if compose and (", " in names or any(map(tower.inner_rope, range(len(tower.attentions))))):
        raise ValueError(
            f"compose=True: {tower.label} has several rotary modules, or one inside attention, {names}; accepted: one "
            "for all layers, or rotary_init='pretrained'."
        )
    if tower.others:
        raise ValueError(
            f"{tower.label} has several modules that compute rotations, {names}: which attention module uses which is "
            f"unknown, and blocks start at the frequencies of one; {accepted}"
        )
    for layer in range(len(tower.attentions)):
        rope, layout = tower.rope(layer), tower.layouts[layer]
        kind = getattr(rope, "rope_type", None)
        kind = kind.get(layout.layer_type) if isinstance(kind, dict) else kind
        if changes_frequencies(kind) and not compose:
            raise ValueError(
                f"{layout.rope_name} ({type(rope).__name__}) has rope_type={kind!r}, which computes other frequencies "
                f"for longer inputs, and blocks have fixed ones; {accepted}"
            )


def check_planned_start(planned: TowerPlan[RopeTower], encoding: PretrainedRope) -> None:
    """
    Compare the queries and keys of an attention module of every shape under the model's rotation and under the one that
    starts there. Raises `ValueError` if they differ, or the attention module cannot be called alone.
    """
    tower = planned.tower
    for layer in {encoding.rows[layer][0]: layer for layer in reversed(encoding.layers)}.values():
        probe = Probe.of(tower, layer)
        if probe.filled is not probe.attention:
            # A model that is constructed before its weights are loaded was checked when it was patched.
            return
        with torch.no_grad():
            layout = encoding.layout_of_layer[layer]
            coordinates, angles = encoding.measure(layout, tower.rope(layer), *probe.arguments, **probe.options)
            if encoding.config.compose:
                coordinates = coordinates.new_zeros(*coordinates.shape[:-1], encoding.widths[layer][1])
            turn = encoding.layouts[layout](angles, probe.quarter[0])
            before = probe.capture(turn)
            planned.attach(encoding)
            try:
                after = probe.capture(carry(turn, coordinates, encoding.has_prefix))
            finally:
                detach(tower.module)
        # Less than the angle of any wrong pair, and more than the rounding of half types.
        if any((x - y).abs().max() > 0.05 * x.abs().max() for x, y in zip(before, after)):
            raise probe.make_error("pairs channels in another way")


def carry_numbers(tower: nn.Module, rope_name: str, rope: nn.Module, args, kwargs, output):
    """Forward hook of a rotary module: lets coordinates or angles travel with what it returns."""
    layer_type = kwargs.get("layer_type", args[2] if len(args) > 2 else None)
    encoding = tower.rotary_encoding
    layout = encoding.layout_of[rope_name, layer_type]
    coordinates, angles = encoding.measure(layout, rope, *args, **kwargs)
    if encoding.config.folded_grids:
        patch, (height, width) = rope.config.patch_size, args[0].shape[-2:]  # of (B, C, height, width) pixels
        rows, columns = patch if isinstance(patch, (list, tuple)) else (patch, patch)
        GridPass(tower, (height // rows, width // columns)).begin()
    if not encoding.reads_own:
        # Compiled graphs leave out what computes cos.
        first = output if isinstance(output, torch.Tensor) else output[0]
        blank = first.new_zeros(1).expand_as(first)
        output = blank if first is output else (blank, output[1])
    elif rope.training:
        # In training, rotary modules may draw coordinates, and each call draws others.
        output = encoding.layouts[layout](angles, output)
    if encoding.config.compose:
        coordinates = choose_positions(tower, coordinates, next(iter((*args, *kwargs.values()))))
    return carry(output, coordinates if encoding.rotates_states else angles, encoding.has_prefix)


@dataclass(eq=False)
class RopePass(AttentionPass):
    """One call of an attention module, with the model's own cos and sin, and what rotates queries and keys."""

    own: Turn | None
    rotation: Any


def prepare_layer(
    has_indexer: bool, tower: nn.Module, layer: int, states_name: str, attention: nn.Module, options: dict
) -> None:
    """Among the arguments of an attention module, replaces what came from the rotary module by cos and sin."""
    if options.get("poses") is not None:
        refuse_ignored_poses(attention.config._attn_implementation, options["poses"])
    encoding = tower.rotary_encoding
    # Some models do not rotate in every layer.
    for name in [name for name in options if is_rotation(name) and options[name] is not None]:
        own, numbers = take_off(options[name], f"Attention layer {layer}", *encoding.widths[layer])
        options[name], rotation = own, None
        if layer in encoding.place:
            numbers = move_numbers(tower, layer, numbers, options[states_name], options)
            # (…, prefix + N, hidden_size)
            turn, rotation = encoding(layer, own, numbers, options[states_name])
            joins = encoding.has_prefix and not encoding.config.compose
            options[name] = keep_joined(own, numbers, turn) if joins else turn
        if rotation is not None:
            tower.rotary_patch.hook_projections(tower, layer, attention)
        if rotation is not None or has_indexer:
            RopePass(attention, layer, own, rotation).begin()


def pass_pretrained(layer: int, indexer: nn.Module, args, kwargs):
    """Forward pre-hook of an indexer: passes the cos and sin that the model has without learned rotations."""

    def choose(name, value):
        return RopePass.find(layer, indexer).own if is_rotation(name) and value is not None else value

    return tuple(map(choose, forward_arguments(indexer), args)), {n: choose(n, value) for n, value in kwargs.items()}


def rotate_inside(tower: nn.Module, layer: int, rope: nn.Module, args, kwargs, output):
    """Forward hook of a rotary module inside an attention module: returns cos and sin of that layer."""
    encoding = tower.rotary_encoding
    layout = encoding.layout_of_layer[layer]
    if layer not in encoding.place:
        return None
    if encoding.rotates_states:
        # Queries and keys are rotated already.
        return encoding.layouts[layout].identity(output)
    _, angles = encoding.measure(layout, rope, *args, **kwargs)
    return encoding(layer, output, angles, angles)[0]


def prepare_inside(tower: nn.Module, layer: int, states_name: str, attention: nn.Module, options: dict) -> None:
    """Reads the arguments of an attention module with a rotary module inside, whose queries and keys are rotated."""
    encoding, states = tower.rotary_encoding, options[states_name]
    if options.get("position_ids") is None:
        raise RuntimeError(f"Attention layer {layer} got no position_ids, by which its queries and keys are rotated.")
    layout = encoding.layout_of_layer[layer]
    rope = tower.get_submodule(encoding.layouts[layout].layout.rope_name)
    coordinates, _ = encoding.measure(layout, rope, states, options["position_ids"])
    tower.rotary_patch.hook_projections(tower, layer, attention)
    coordinates = move_numbers(tower, layer, coordinates, states, options)
    RopePass(attention, layer, None, encoding.compute_rotation(layer, coordinates, states)).begin()


def rotate_states(tower: nn.Module, layer: int, name: str, module: nn.Module, args, output: torch.Tensor):
    """Forward hook of the module of this name, which makes the queries or keys of an attention module, or both."""
    rotation = RopePass.find(layer, module).rotation
    indices, call = tower.rotary_encoding.makers[layer][name], None
    if None not in indices:
        call = rotation.calls.setdefault(name, 0)
        rotation.calls[name] += 1
    # Other calls of this module may make neither queries nor keys.
    return tower.rotary_encoding.rotate(rotation, layer, indices[call], output) if call in indices else None
