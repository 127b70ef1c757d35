"""
Models with RoPE: the modules that compute cos and sin, the attention modules that receive these as
`position_embeddings`, and which channel rotates with which frequency of which coordinate. All of it is found by calling
the modules with known positions and frequencies, never by the name of a class.
"""

import math
import re
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from os.path import commonprefix
from typing import Any, TypeAlias

import torch
from torch import nn
from transformers import PreTrainedModel

from .attention_tower import AttentionTower
from .coordinate_probe import (
    TOKENS,
    UNIT,
    CoordinateProbe,
    compute_cos_sin,
    find_positions,
    frequency_buffers,
    read_frequencies,
    replace_frequencies,
    split_cos_sin,
)
from .module_inspection import cache_name, find_indexers, forward_arguments, forward_code, names_in_forward, takes


CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
# tower → module inside → names of rotary modules.
RopeNames: TypeAlias = dict[str, dict[str, list[str]]]


@dataclass(frozen=True)
class RopeLayout:
    """
    How a rotary module computes cos and sin for one type of layers: of p_a ω_f for each of D channels, times a factor.

    Attributes:
        rope_name: Name of the rotary module inside its [`RopeTower`].
        buffer: Name of the buffer with the frequencies.
        layer_type: Argument that selects this type of layers, or `None` where there is only one.
        planes: For every channel, its plane: the channels with the same frequency and axis.
        frequencies: For every plane, the index f of its frequency in the buffer.
        axes: For every plane, its axis a, numbered as they appear.
        factor: By which cos and sin are multiplied (YaRN's attention scaling).
        is_complex: Whether the rotary module returns cos + i sin, not cos and sin.
        is_transposed: Whether these lie in memory channel by channel, by which some processors round products.
    """

    rope_name: str
    buffer: str
    layer_type: str | None
    planes: tuple[int, ...]
    frequencies: tuple[int, ...]
    axes: tuple[int, ...]
    factor: float
    is_complex: bool
    is_transposed: bool

    @property
    def options(self) -> dict[str, str]:
        """Arguments that select the type of layers."""
        return {} if self.layer_type is None else {"layer_type": self.layer_type}

    @property
    def num_axes(self) -> int:
        return max(self.axes) + 1

    @property
    def num_planes(self) -> int:
        return len(self.axes)

    @property
    def channels(self) -> list[int]:
        """The first channel of every plane."""
        return [self.planes.index(plane) for plane in range(self.num_planes)]


@dataclass
class RopeTower(AttentionTower):
    """
    The module around a rotary module, with the attention modules that it serves.

    Attributes:
        layouts: The layout of every attention module; where `others` is not empty, a possible one.
        others: Layouts of the same channels that an attention module may get instead of its own.
        unrotated: Indices of attention modules of a type that the rotary module has no frequencies for; in `layouts`,
            they have the layout of another type.
        has_prefix: Whether the module puts cos and sin that it computes for class tokens before the rotary module's.
        sources: By index of an attention module that reads the keys of another one, the index of that one.
        probes: By index of an attention module, what is known from calling it.
    """

    layouts: list[RopeLayout]
    others: tuple[RopeLayout, ...] = ()
    unrotated: frozenset[int] = frozenset()
    has_prefix: bool = False
    sources: dict[int, int] = field(default_factory=dict)
    probes: dict[int, Any] = field(default_factory=dict)

    @property
    def distinct_layouts(self) -> list[RopeLayout]:
        return list(dict.fromkeys((*self.layouts, *self.others)))

    def rope(self, layer: int) -> nn.Module:
        """The rotary module of an attention module."""
        return self.module.get_submodule(self.layouts[layer].rope_name)

    def inner_rope(self, layer: int) -> str | None:
        """The name of the rotary module inside an attention module, if it is there."""
        (name,) = self.attention_names([layer])
        rope_name = self.layouts[layer].rope_name
        return rope_name.removeprefix(f"{name}.") if rope_name.startswith(f"{name}.") else None


def find_rope_towers(model: nn.Module, target: str | None = None) -> list[RopeTower]:
    """
    All modules of a model that contain a rotary module, with the attention modules that it serves, or the one called
    `target`. Raises `ValueError` if there is none, or its frequencies cannot be learned; the message names the module.
    """
    modules = dict(model.named_modules())
    towers = group_ropes(modules)
    if not towers:
        raise ValueError(
            f"{type(model).__name__} has no module with frequencies (inv_freq) to compute rotations from, so "
            "rotary_init='pretrained' and compose=True have nothing to start from; pass rotary_init='zeros' alone for "
            "models of images that do not rotate."
        )
    if target is not None and target not in towers:
        raise ValueError(f"target={target!r} computes no rotations; modules that do: {sorted(towers)}.")
    served = _find_served(modules, towers)
    # Cos and sin that no attention module takes rotate something else, as embeddings of time do.
    chosen = [tower for tower in towers if served[tower]] or list(towers) if target is None else [target]
    _refuse_common_weights(modules, served, chosen)
    return [_make_tower(modules, tower, sum(towers[tower].values(), []), served[tower]) for tower in chosen]


def group_ropes(modules: dict[str, nn.Module]) -> RopeNames:
    """
    Maps tower → enclosing module → names of its rotary modules. Where every layer of a stack has a rotary module, the
    module around the stack is the tower.
    """
    around: dict[str, list[str]] = {}
    for name in [name for name, module in modules.items() if name and frequency_buffers(module)]:
        around.setdefault(_skip_containers(modules, name.rpartition(".")[0]), []).append(name)
    users = _find_users(modules)
    stacks: dict[tuple[str, bool], list[str]] = {}
    for owner in around:
        # A stack of one layer, unlike a layer, is in no list.
        most = 1 if any(part.isdigit() for part in owner.split(".")) else 0
        is_layer = owner != "" and sum(name.startswith(f"{owner}.") for name in users) <= most
        stacks.setdefault((re.sub(r"\d+", "*", owner) if is_layer else owner, is_layer), []).append(owner)
    towers: RopeNames = {}
    for (_, is_layer), owners in stacks.items():
        path = commonprefix([owner.split(".") for owner in owners])
        path = path[:-1] if is_layer and len(owners) == 1 else path
        tower = _skip_containers(modules, ".".join(path))
        towers.setdefault(tower, {}).update({owner: around[owner] for owner in owners})
    return towers


def _find_served(modules: dict[str, nn.Module], towers: RopeNames) -> RopeNames:
    """
    Maps tower → attention module → names of the rotary modules that may serve it: its own, or those of the innermost
    enclosing module.
    """
    owners = {owner: tower for tower, found in towers.items() for owner in found}
    served: RopeNames = {tower: {} for tower in towers}
    around = {
        name: max((owner for owner in owners if not owner or name.startswith(f"{owner}.")), key=len, default=None)
        for name in _find_users(modules)
    }
    idle = owners.keys() - around.values()
    for name, module in modules.items():
        owner = around.get(name)
        may_attend = name in idle and takes(module, "position_ids") and hasattr(module, "config")
        if may_attend and not isinstance(module, PreTrainedModel):
            owner = name
        if owner is not None:
            served[owners[owner]][name] = towers[owners[owner]][owner]
    return served


def _skip_containers(modules: dict[str, nn.Module], name: str) -> str:
    """The name of the innermost module around that runs by itself."""
    while name and isinstance(modules[name], CONTAINERS):
        name = name.rpartition(".")[0]
    return name


def _find_users(modules: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """By name, the modules that take cos and sin and do not pass them to modules inside, but to indexers."""
    takers = {name: module for name, module in modules.items() if takes(module, "position_embeddings")}
    found = set(takers.values()).difference(*map(find_indexers, takers.values()))
    return {
        name: module
        for name, module in takers.items()
        if module in found and not any(inner in found for inner in module.modules() if inner is not module)
    }


def _refuse_common_weights(modules: dict[str, nn.Module], served: RopeNames, chosen: Collection[str]) -> None:
    """Towers with a cache that share weights read each other's keys, as decoders do that attend to cached inputs."""
    first_with: dict[nn.Parameter, tuple[str, str]] = {}
    for owner, attentions in served.items():
        for name in attentions:
            for parameter in modules[name].parameters() if cache_name(forward_arguments(modules[name])) else ():
                other_owner, other = first_with.setdefault(parameter, (owner, name))
                if other_owner != owner and (other_owner in chosen or owner in chosen):
                    raise ValueError(
                        f"{other} and {name} have weights in common, but {other_owner!r} and {owner!r} compute "
                        "separate rotations: what one learns would not rotate the keys that the other reads. Accepted: "
                        "attention modules that share one rotary module."
                    )


def _make_tower(modules: dict[str, nn.Module], owner: str, ropes: list[str], served: dict[str, list[str]]) -> RopeTower:
    """With `ropes`, its rotary modules, and `served`, by name of its attention modules, those that may serve them."""
    module = modules[owner]
    tower = RopeTower(owner, module, [(name, modules[name]) for name in served], [])
    if unused := [name for name in ropes if not any(name in found for found in served.values())]:
        raise ValueError(
            f"{unused[0]} ({type(modules[unused[0]]).__name__}) computes rotations, but no module in {tower.label} "
            "takes them as position_embeddings: how they are applied is unknown."
        )
    tower.has_prefix = {"cos", "sin", "cat"} <= set(names_in_forward(module))
    if {"cos", "sin"} <= set(names_in_forward(module)) and not tower.has_prefix:
        raise ValueError(
            f"{tower.label} computes cos and sin in its forward pass, beside those of {ropes[0]}: its rotations do not "
            "follow from coordinates and frequencies alone."
        )
    _refuse_rotating_around(modules, owner, tower.attentions)
    found: dict[str, list[RopeLayout | None]] = {}
    for name in ropes:
        attention = next(attention for attention, names in served.items() if name in names)
        _refuse_unknown_axes(modules[name], name, modules[attention])
        found[name] = _examine_all(modules, owner, name, sum(name in names for names in served.values()))
    places: Counter[str] = Counter()
    for place, names in enumerate(served.values()):
        layouts = [found[name][min(places[name], len(found[name]) - 1)] for name in names]
        places.update(names)
        if layouts[0] is None:
            tower.unrotated |= {place}
        known = [layout or next(filter(None, found[name])) for layout, name in zip(layouts, names)]
        tower.layouts.append(known[0])
        tower.others += tuple(known[1:])
    _refuse_different_channels(tower, ropes)
    return tower


def _examine_all(modules: dict[str, nn.Module], owner: str, name: str, count: int) -> list[RopeLayout | None]:
    """
    The layouts of a rotary module for each of the `count` attention modules that it serves, `None` for a type of layers
    that it has no frequencies for.
    """
    module, rope = modules[owner], modules[name]
    inner = name[len(owner) + 1 :] if owner else name
    if not takes(rope, "layer_type"):
        return [examine(rope, name, inner, frequency_buffers(rope)[0], None)]
    types = getattr(getattr(module, "config", None), "layer_types", None) or []
    if len(types) != count:
        raise ValueError(
            f"{name} rotates types of layers differently, but the configuration of {owner or type(module).__name__} "
            f"has {len(types)} layer_types for {count} attention modules."
        )
    buffers = {kind: f"{kind}_inv_freq" for kind in dict.fromkeys(types) if f"{kind}_inv_freq" in rope._buffers}
    found = {kind: examine(rope, name, inner, buffer, kind) for kind, buffer in buffers.items()}
    if not found:
        raise ValueError(f"{name} ({type(rope).__name__}) has frequencies for none of the layer_types {types}.")
    return [found.get(kind) for kind in types]


def _refuse_different_channels(tower: RopeTower, ropes: list[str]) -> None:
    """Where an attention module may get the rotations of one of several modules, these must serve the same channels."""
    kinds = {(layout.axes, layout.planes, layout.is_complex) for layout in tower.distinct_layouts}
    if tower.others and (len(kinds) > 1 or any(layout.is_complex for layout in tower.others)):
        raise ValueError(
            f"{tower.label} has several modules that compute rotations, {', '.join(ropes)}: which attention module "
            "uses which is unknown; accepted: modules that rotate the same channels."
        )


def _refuse_rotating_around(modules: dict[str, nn.Module], owner: str, attentions: list[tuple[str, nn.Module]]) -> None:
    """Refuse modules that use cos and sin and pass them on: they would mistake the coordinates for cos and sin."""
    for name, module in modules.items():
        is_around = any(inner.startswith(f"{name}.") for inner, _ in attentions) and name.startswith(owner)
        variables = getattr(forward_code(module), "co_varnames", ())
        if is_around and takes(module, "position_embeddings") and {"cos", "sin"} <= set(variables):
            raise ValueError(
                f"{name} ({type(module).__name__}) rotates with cos and sin and passes them to a module inside that "
                "also takes them; accepted: models in which only one of the two does."
            )


def _refuse_unknown_axes(rope: nn.Module, name: str, attention: nn.Module) -> None:
    """Modules that take positions on two axes may be meant for three, if heads have channels for these."""
    head_dim = getattr(attention, "head_dim", None)
    if head_dim is None or not takes(rope, "position_ids") or takes(rope, "layer_type"):
        return
    with torch.device("cpu"), torch.no_grad():
        try:
            arguments, coordinates = find_positions(rope, {}, ValueError(name))
            if arguments[-1].shape[-1] != 2 or arguments[-1].ndim != 2:
                return
            three = CoordinateProbe(rope)(arguments[0], torch.arange(3 * TOKENS).view(TOKENS, 3))
        except Exception:
            return
    if coordinates.shape[-1] < three.shape[-1] <= head_dim:
        raise ValueError(
            f"{name} ({type(rope).__name__}) takes positions on two axes and on three, and heads have {head_dim} "
            f"channels for the {three.shape[-1]} of three: which the model passes is unknown."
        )


def examine(rope: nn.Module, name: str, inner_name: str, buffer: str, layer_type: str | None) -> RopeLayout:
    """
    The layout of a rotary module, called `name` in the model and `inner_name` in its tower, from what it returns for
    known positions and frequencies. Raises `ValueError` if some channel is not the cos and sin of one coordinate times
    one frequency.
    """
    refusal = ValueError(
        f"{name} ({type(rope).__name__}) does not return the cos and sin of one coordinate times one frequency of "
        f"{buffer} for every channel, as rotary_init='pretrained' needs."
    )
    options = {} if layer_type is None else {"layer_type": layer_type}
    with torch.device("cpu"), torch.no_grad():
        arguments, coordinates = find_positions(rope, options, refusal)
        coordinates = coordinates.flatten(0, -2)  # (N, D)
        counted = replace_frequencies(rope, lambda values: _count_from(1, values.shape).mul(UNIT), neutral_factor=True)
        _, sin = compute_cos_sin(counted, *arguments, **options)  # (N, D)
        token = coordinates.abs().argmax(0, keepdim=True)  # (1, D)
        numbers = (sin / UNIT).gather(0, token) / coordinates.gather(0, token)
        numbers = numbers.round().long().squeeze(0) - 1  # (D,)
        if (numbers < 0).any() or (numbers >= rope._buffers[buffer].numel()).any():
            raise refusal
        unchanged = replace_frequencies(rope, lambda values: values)
        output = type(unchanged).forward(unchanged, *arguments, **options)
        factor = float(split_cos_sin(output)[0].flatten()[0])
        changed = replace_frequencies(rope, lambda values: _count_from(2, values.shape).rsqrt())
        found = compute_cos_sin(changed, *arguments, **options)
        angles = coordinates * read_frequencies(changed, buffer).flatten()[numbers]  # (N, D)
        expected = (angles.cos() * factor, angles.sin() * factor)
        # The operations are the same, but a processor may round differently at the end of a row.
        if any((x - y).abs().max() > 1e-6 for x, y in zip(found, expected)):
            raise refusal
    channels = list(zip(_number_groups([tuple(column) for column in coordinates.T.tolist()]), numbers.tolist()))
    axes, frequencies = zip(*dict.fromkeys(channels))
    is_complex = isinstance(output, torch.Tensor)
    is_transposed = is_complex and output.stride(-1) > output.stride(-2)
    what = inner_name, buffer, layer_type, _number_groups(channels)
    return RopeLayout(*what, frequencies, axes, factor, is_complex, is_transposed)


def _count_from(start: int, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(start, start + math.prod(shape), dtype=torch.float32).view(shape)


def _number_groups(values: list) -> tuple[int, ...]:
    """Equal values get the same number, in the order in which they appear."""
    numbers: dict[object, int] = {}
    return tuple(numbers.setdefault(value, len(numbers)) for value in values)
