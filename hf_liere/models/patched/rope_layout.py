"""
Models with RoPE: the modules that compute cos and sin, the attention modules that receive these as
`position_embeddings`, and which channel rotates with which frequency of which coordinate. All of it is found by calling
the modules with known positions and frequencies, never by the name of a class.
"""

import copy
import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field

import torch
from torch import nn

from .module_inspection import forward_arguments, forward_code, names_in_forward, takes
from .tower_patch import AttentionTower


# sin(x) is x in every floating point type for angles this small: with this frequency, sin is the coordinate itself.
UNIT = 2.0**-60
TOKENS = 7


@dataclass(frozen=True)
class RopeLayout:
    """
    How a rotary module computes cos and sin for one type of layers: of p_a ω_f for each of D channels, times a factor.

    Attributes:
        buffer: Name of the buffer with the frequencies.
        layer_type: Argument that selects this type of layers, or `None` where there is only one.
        frequencies: For every channel, the index f of its frequency in the buffer.
        axes: For every channel, its axis a, numbered as they appear.
        planes: For every channel, its plane: the channels with the same frequency and axis.
        factor: By which cos and sin are multiplied (YaRN's attention scaling).
    """

    buffer: str
    layer_type: str | None
    frequencies: tuple[int, ...]
    axes: tuple[int, ...]
    planes: tuple[int, ...]
    factor: float

    @property
    def num_axes(self) -> int:
        return max(self.axes) + 1

    @property
    def num_planes(self) -> int:
        return max(self.planes) + 1

    def first_channels(self) -> list[int]:
        """The first channel of every plane."""
        return [self.planes.index(plane) for plane in range(self.num_planes)]


@dataclass
class RopeTower(AttentionTower):
    """
    The module around a rotary module, with the attention modules that it serves.

    Attributes:
        rope_name: Name of the rotary module inside.
        layouts: The layout of every attention module.
        sources: By index of an attention module that reads the keys of another one, the index of that one.
    """

    rope_name: str
    layouts: list[RopeLayout]
    sources: dict[int, int] = field(default_factory=dict)

    @property
    def rope(self) -> nn.Module:
        return self.module.get_submodule(self.rope_name)


class CoordinateProbe(nn.Module):
    """
    A copy of a rotary module whose frequencies are [`UNIT`]: for every channel it returns the coordinate of its axis,
    exactly as the rotary module multiplies it with frequencies.
    """

    def __init__(self, rope: nn.Module):
        super().__init__()
        self.module = _replace_frequencies(rope, lambda values: torch.full_like(values, UNIT), neutral_factor=True)
        self.states_name = next(iter(forward_arguments(rope)))

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "CoordinateProbe":
        result = super()._apply(fn, recurse)
        # Half types round the unit to zero.
        self.reset_parameters()
        return result

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Fill the buffers again, in float32, after a conversion or a construction without values."""
        for name, buffer in self.module._buffers.items():
            self.module._buffers[name] = torch.full_like(buffer, UNIT, dtype=torch.float32)

    def forward(self, *arguments, **options) -> torch.Tensor:
        """The arguments of the rotary module → (…, N, D) coordinates, without a gradient, float32."""
        if self.states_name in options:
            options = dict(options)
            arguments = (options.pop(self.states_name), *arguments)
        states, *arguments = arguments
        # Rotary modules read only the dtype, shape and device of their first argument, and return its dtype.
        if states.dtype != torch.float32:
            states = torch.empty((), dtype=torch.float32, device=states.device).expand(states.shape)
        for name, buffer in self.module._buffers.items():
            if buffer.device != states.device:
                self.module._buffers[name] = buffer.to(states.device)
        # Frameworks may have replaced `forward` on the instance that was copied.
        _, sin = type(self.module).forward(self.module, states, *arguments, **options)  # (…, N, D)
        return sin.float() * (1 / UNIT)


def _replace_frequencies(
    rope: nn.Module, value: Callable[[torch.Tensor], torch.Tensor], neutral_factor: bool = False
) -> nn.Module:
    """A copy of a rotary module with other frequencies, in float32 on the CPU, and without hooks."""
    copied = copy.copy(rope)
    state = vars(copied)
    for name in list(state):
        if name.endswith("_hooks") or "_hooks_" in name:
            state[name] = OrderedDict()
        elif neutral_factor and name.endswith("attention_scaling"):
            state[name] = 1.0
    for name in ("forward", "_hf_hook", "_old_forward"):
        state.pop(name, None)
    state["_parameters"], state["_modules"] = {}, {}
    names = [name for name, buffer in rope._buffers.items() if buffer is not None and name.endswith("inv_freq")]
    blank = (torch.zeros(rope._buffers[name].shape, dtype=torch.float32, device="cpu") for name in names)
    state["_buffers"] = {name: value(values) for name, values in zip(names, blank)}
    state["_non_persistent_buffers_set"] = set(names)
    return copied.eval()


def frequency_buffers(module: nn.Module) -> list[str]:
    """Names of the frequencies that a module multiplies positions with, without its copies of the original ones."""
    return [name for name in module._buffers if name.endswith("inv_freq") and "original" not in name]


def find_rope_towers(model: nn.Module, target: str | None = None) -> list[RopeTower]:
    """
    All modules of a model that contain a rotary module, with the attention modules that it serves.

    Args:
        target: Name of the one such module to return; `None` means all.

    Raises:
        ValueError: if there is none, or its frequencies cannot be learned; the message names the module.
    """
    modules = dict(model.named_modules())
    ropes = {name: module for name, module in modules.items() if name and frequency_buffers(module)}
    owners: dict[str, list[str]] = {}
    for name in ropes:
        owners.setdefault(name.rpartition(".")[0], []).append(name)
    if not owners:
        raise ValueError(
            f"{type(model).__name__} has no module with frequencies (inv_freq) to compute rotations from, so "
            "rotary_init='pretrained' has nothing to start from; pass rotary_init='zeros' for models of images that do "
            "not rotate."
        )
    if target is not None and target not in owners:
        raise ValueError(f"target={target!r} computes no rotations; modules that do: {sorted(owners)}.")
    served: dict[str, list[tuple[str, nn.Module]]] = {owner: [] for owner in owners}
    users = {module: name for name, module in modules.items() if takes(module, "position_embeddings")}
    for attention, name in users.items():
        inside = [owner for owner in owners if not owner or name.startswith(f"{owner}.")]
        # Modules around attention may take cos and sin only to pass them on.
        if inside and not any(inner in users for inner in attention.modules() if inner is not attention):
            served[max(inside, key=len)].append((name, attention))
    chosen = owners if target is None else [target]
    _refuse_common_weights(served, chosen)
    return [_make_tower(modules, owner, owners[owner], served[owner]) for owner in chosen]


def _refuse_common_weights(served: dict[str, list[tuple[str, nn.Module]]], chosen: Collection[str]) -> None:
    """Towers that share weights read each other's keys, as decoders do that attend to cached inputs."""
    first_with: dict[nn.Parameter, tuple[str, str]] = {}
    for owner, attentions in served.items():
        for name, attention in attentions:
            for parameter in attention.parameters():
                other_owner, other = first_with.setdefault(parameter, (owner, name))
                if other_owner != owner and (other_owner in chosen or owner in chosen):
                    raise ValueError(
                        f"{other} and {name} have weights in common, but {other_owner!r} and {owner!r} compute "
                        "separate rotations: what one learns would not rotate the keys that the other reads. Accepted: "
                        "attention modules that share one rotary module."
                    )


def _make_tower(
    modules: dict[str, nn.Module], owner: str, ropes: list[str], attentions: list[tuple[str, nn.Module]]
) -> RopeTower:
    module = modules[owner]
    tower = RopeTower(owner, module, attentions, ropes[0][len(owner) + 1 :] if owner else ropes[0], [])
    if not attentions:
        raise ValueError(
            f"{ropes[0]} ({type(modules[ropes[0]]).__name__}) computes rotations, but no module in {tower.label} takes "
            "them as position_embeddings: how they are applied is unknown."
        )
    if {"cos", "sin"} <= set(names_in_forward(module)):
        raise ValueError(
            f"{tower.label} computes cos and sin in its forward pass, beside those of {ropes[0]}: its rotations do not "
            "follow from coordinates and frequencies alone."
        )
    if len(ropes) > 1:
        raise ValueError(
            f"{tower.label} has several modules that compute rotations, {', '.join(ropes)}: which attention module "
            "uses which is unknown; accepted: one, which may take the type of a layer as an argument."
        )
    rope, name = modules[ropes[0]], ropes[0]
    _refuse_changing_frequencies(rope, name)
    _refuse_rotating_around(modules, owner, attentions)
    _refuse_unknown_axes(rope, name, attentions[0][1])
    if not takes(rope, "layer_type"):
        tower.layouts = [examine(rope, name, frequency_buffers(rope)[0], None)] * len(attentions)
    else:
        types = getattr(getattr(module, "config", None), "layer_types", None) or []
        if len(types) != len(attentions):
            raise ValueError(
                f"{name} rotates types of layers differently, but the configuration of {tower.label} has {len(types)} "
                f"layer_types for {len(attentions)} attention modules."
            )
        found = {kind: examine(rope, name, f"{kind}_inv_freq", kind) for kind in dict.fromkeys(types)}
        tower.layouts = [found[kind] for kind in types]
    return tower


def _refuse_changing_frequencies(rope: nn.Module, name: str) -> None:
    kinds = getattr(rope, "rope_type", None)
    for kind in kinds.values() if isinstance(kinds, dict) else [kinds]:
        if isinstance(kind, str) and ("dynamic" in kind or kind == "longrope"):
            raise ValueError(
                f"{name} ({type(rope).__name__}) has rope_type={kind!r}, which computes other frequencies for longer "
                "inputs and would overwrite learned ones. Accepted: types with fixed frequencies, such as default, "
                "linear, llama3, yarn and axial."
            )


def _refuse_rotating_around(modules: dict[str, nn.Module], owner: str, attentions: list[tuple[str, nn.Module]]) -> None:
    """Refuse modules that use cos and sin and pass them on: they would mistake the coordinates for cos and sin."""
    for name, module in modules.items():
        is_around = any(inner.startswith(f"{name}.") for inner, _ in attentions) and name.startswith(owner)
        if is_around and takes(module, "position_embeddings"):
            code = forward_code(module)
            if code is not None and {"cos", "sin"} <= set(code.co_varnames):
                raise ValueError(
                    f"{name} ({type(module).__name__}) rotates with cos and sin and passes them to a module inside "
                    "that also takes them; accepted: models in which only one of the two does."
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


def examine(rope: nn.Module, name: str, buffer: str, layer_type: str | None) -> RopeLayout:
    """
    The layout of a rotary module, from what it returns for known positions and frequencies.

    Raises:
        ValueError: if some channel is not the cos and sin of one coordinate times one frequency.
    """
    if buffer not in rope._buffers:
        raise ValueError(f"{name} ({type(rope).__name__}) has no {buffer}; its buffers: {sorted(rope._buffers)}.")
    refusal = ValueError(
        f"{name} ({type(rope).__name__}) does not return the cos and sin of one coordinate times one frequency of "
        f"{buffer} for every channel, as rotary_init='pretrained' needs."
    )
    options = {} if layer_type is None else {"layer_type": layer_type}
    with torch.device("cpu"), torch.no_grad():
        arguments, found = find_positions(rope, options, refusal)
        coordinates = found.flatten(0, -2)  # (N, D)

        def compute_cos_sin(value, neutral_factor=False):
            changed = _replace_frequencies(rope, value, neutral_factor)
            cos, sin = type(changed).forward(changed, *arguments, **options)
            return cos.flatten(0, -2), sin.flatten(0, -2)  # (N, D)

        _, sin = compute_cos_sin(lambda values: _count_from(1, values.shape).mul(UNIT), neutral_factor=True)
        token = coordinates.abs().argmax(0, keepdim=True)  # (1, D)
        numbers = (sin / UNIT).gather(0, token) / coordinates.gather(0, token)
        numbers = numbers.round().long().squeeze(0) - 1  # (D,)
        count = rope._buffers[buffer].numel()
        if (numbers < 0).any() or (numbers >= count).any():
            raise refusal
        factor, _ = compute_cos_sin(lambda values: values)
        found_cos, found_sin = compute_cos_sin(lambda values: _count_from(2, values.shape).rsqrt())
        angles = coordinates * _count_from(2, (count,)).rsqrt()[numbers]  # (N, D)
        expected = (angles.cos() * factor[0, 0], angles.sin() * factor[0, 0])
        # The operations are the same, but a processor may round differently at the end of a row.
        if any((x - y).abs().max() > 1e-6 for x, y in zip((found_cos, found_sin), expected)):
            raise refusal
    axes = _number_groups([tuple(column) for column in coordinates.T.tolist()])
    planes = _number_groups(list(zip(axes, numbers.tolist())))
    return RopeLayout(buffer, layer_type, tuple(numbers.tolist()), axes, planes, float(factor[0, 0]))


def _count_from(start: int, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(start, start + math.prod(shape), dtype=torch.float32).view(shape)


def _number_groups(values: list) -> tuple[int, ...]:
    """Equal values get the same number, in the order in which they appear."""
    numbers: dict[object, int] = {}
    return tuple(numbers.setdefault(value, len(numbers)) for value in values)


def find_positions(rope: nn.Module, options: dict, refusal: ValueError) -> tuple[tuple, torch.Tensor]:
    """Arguments with positions in a form that a rotary module takes, and its (…, N, D) coordinates for them."""
    probe = CoordinateProbe(rope)
    for arguments, shape in _propose_arguments(rope):
        try:
            coordinates = probe(*arguments, **options)
        except Exception:
            # What code of other packages raises is not known.
            continue
        if coordinates.shape[:-1] == shape and coordinates.isfinite().all():
            return arguments, coordinates
    raise refusal


def _propose_arguments(rope: nn.Module) -> Iterator[tuple[tuple, tuple[int, ...]]]:
    """Arguments in the forms in which models pass positions, and the shape of tokens that must result."""
    if not takes(rope, "position_ids"):
        patch = getattr(getattr(rope, "config", None), "patch_size", None)
        if patch is not None and len(forward_arguments(rope)) == 1:
            rows, columns = patch if isinstance(patch, (list, tuple)) else (patch, patch)
            yield (torch.zeros(1, 3, 2 * rows, 3 * columns, dtype=torch.float32),), (6,)
        return
    states = torch.zeros(1, 1, dtype=torch.float32)
    # Distinct for all tokens and axes: (3, N).
    positions = torch.arange(1, 3 * TOKENS + 1).view(3, TOKENS) * 5 % 23
    yield (states, positions.unsqueeze(1)), (1, TOKENS)
    # Modules of two axes would also take three.
    for axes in (2, 3):
        yield (states, positions[:axes].T.unsqueeze(0)), (1, TOKENS)
        yield (states, positions[:axes].T), (TOKENS,)
    yield (states, positions[:1]), (1, TOKENS)
