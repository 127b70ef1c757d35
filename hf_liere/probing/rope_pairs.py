"""
Which attention modules rotate, and which channels of a head they rotate together, by which angle and in which
direction: found by calling them with known cos and sin. The output of rotary modules does not show this, because
attention modules differ in how they pair channels, and leave some channels as they are. Some modules do not read cos
and sin that they get, as layers with linear attention, and some do not get them, as attention to the output of an
encoder: parameters of these would change nothing.
"""

import contextlib
import copy
from typing import Any

import torch
from torch import nn

from .attention_probe import CapturedStates, Form, Probe, SharedStates, fill_values, propose_forms
from .coordinate_probe import first_that_works
from .module_inspection import forward_arguments, is_rotation, required_arguments, takes, takes_rotation
from .planes import Pairs
from .rope_layout import RopeTower


# Two numbers from 1 to 16 identify a plane; half types represent these exactly.
DIGIT = 16


@torch.no_grad()
def find_pairs(probe: Probe) -> Pairs:
    """
    The channels of a head that the attention module rotates, by plane of the layout. Raises `ValueError` if it cannot
    be called, or does not rotate every plane in exactly two channels.
    """
    replace = probe.later_modules
    (plain, _), (rotated, _) = probe.rotate_quarter(replace)  # 2 × (B · H · N, head_dim)
    with torch.device("cpu"), torch.no_grad():
        zeros, planes = torch.zeros(probe.coordinates.shape), torch.tensor(probe.layout.planes)  # (N, D), (D,)
        # sin = 1 + digit: 2 × (B, H, N, head_dim), each channel multiplied by the digit of its plane
        parts = (planes % DIGIT, planes // DIGIT)
        digits = [probe.capture(probe.join(zeros, zeros + part + 1), None, replace)[0] for part in parts]
        scale = rotated.square().sum(0).clamp_min(1e-30)  # (head_dim,)
        # (head_dim,) each
        low, high = (((x.flatten(0, -2) * rotated).sum(0) / scale).round().long() - 1 for x in digits)
    pairs: list[list[tuple[int, int]]] = [[] for _ in range(probe.layout.num_planes)]
    for channel in (~(plain == rotated).all(0)).nonzero().flatten().tolist():
        opposite = (rotated[:, channel, None] + plain).abs().amax(0)  # (head_dim,)
        if opposite.min() <= 1e-6 * plain.abs().max():
            plane = int(low[channel] + DIGIT * high[channel])
            other = int(opposite.argmin())
            if 0 <= plane < len(pairs) and torch.equal(rotated[:, other], plain[:, channel]):
                pairs[plane].append((channel, other))
    used = [channel for found in pairs for pair in found for channel in pair]
    if any(len(found) != 1 for found in pairs) or len(set(used)) != len(used):
        raise probe.make_error("does not rotate every plane in two channels of each head")
    return tuple(pair for found in pairs for pair in found)


@torch.no_grad()
def find_key_sources(tower: RopeTower) -> dict[int, int]:
    """
    Maps each attention layer that reads the keys of an earlier layer to that layer, by their indices. Raises
    `ValueError` if a layer that may do so cannot be called, or reads keys that no layer makes.
    """
    shared = SharedStates()
    for layer, (name, attention) in enumerate(tower.attentions):
        if takes(attention, "shared_kv_states"):
            shared.layer, probe = layer, Probe.of(tower, layer)
            try:
                probe.capture(probe.quarter[0], shared)
            except ValueError as error:
                known = layer in shared.sources
                raise ValueError(
                    f"{name} ({type(attention).__name__}) "
                    + ("reads keys that no layer before it makes" if known else "may read the keys of another layer")
                    + ": with which frequencies these are rotated is unknown. Accepted: layers that make keys, or read "
                    f"those of an earlier layer of {tower.label}."
                ) from error
    return shared.sources


class UnreadPair(tuple):
    """A pair of cos and sin that raises where it is read."""

    def __iter__(self, *_):
        raise RuntimeError("Cos and sin are read.")

    __getitem__ = __iter__


class PassThrough(nn.Module):
    """
    Stands in for a module and returns the first tensor that it gets. Cos and sin that it gets count as read.

    Attributes:
        original: The module, whose attributes it has.
        calls: For every call, whether it passed cos and sin.
    """

    original: nn.Module
    calls: list[bool]

    def __init__(self, original: nn.Module):
        super().__init__()
        # Bypass `nn.Module`, so that the original is not registered as a submodule.
        self.__dict__.update(original=original, calls=[])

    def __getattr__(self, name: str):
        return getattr(vars(self)["original"], name)

    def forward(self, *args, **kwargs) -> torch.Tensor:
        self.calls.append(passes_rotation(self.original, args, kwargs))
        given = (*args, *kwargs.values())
        for pair in given:
            if isinstance(pair, UnreadPair):
                iter(pair)
        return next(value for value in given if isinstance(value, torch.Tensor))


def passes_rotation(module: nn.Module, args: tuple, kwargs: dict) -> bool:
    """Whether these arguments of a module contain cos and sin."""
    given = {**dict(zip(forward_arguments(module), args)), **kwargs}
    return any(is_rotation(name) and value is not None for name, value in given.items())


def choose_rotating_layers(tower: RopeTower, layers: list[int], are_named: bool) -> list[int]:
    """
    Those of `layers` that make keys and rotate them. Raises `ValueError` if none does, or one does not though all have
    to (`are_named`), or rotates its queries and not its keys, or not with all planes, or cannot be called to see it.
    """
    reading = [layer for layer in layers if layer in tower.sources]
    if reading and are_named:
        layer = reading[0]
        name, source = tower.attentions[layer][0], tower.sources[layer]
        raise ValueError(
            f"layers={layers}: {name} reads the keys of {tower.attentions[source][0]} and rotates its queries as that "
            f"layer does; name layer {source}, and leave out {reading}."
        )
    layers = [layer for layer in layers if layer not in reading]
    if not layers:
        raise ValueError(f"{tower.label}: each attention layer reads shared_kv_states; accepted: some make their keys.")
    skipped = tower.unrotated | _find_skipped(tower)
    unrotated = [layer for layer in layers if layer in skipped or not rotates(Probe.of(tower, layer))]
    if unrotated and (are_named or len(unrotated) == len(layers)):
        names = ", ".join(tower.attentions[layer][0] for layer in unrotated)
        raise ValueError(f"layers={unrotated}: the model does not rotate in {names}; accepted: layers that it rotates.")
    return [layer for layer in layers if layer not in unrotated]


@torch.no_grad()
def rotates(probe: Probe) -> bool:
    """
    Whether an attention module rotates queries by the cos and sin that it takes. Raises `ValueError` if it rotates
    these and not its keys, or not with all planes, or cannot be called to see it.
    """
    if not probe.inner_rope and (_reads_nothing(probe) or _gets_nothing(probe)):
        return False
    label = f"{probe.name} ({type(probe.attention).__name__})"
    try:
        # (B · H · N, head_dim) each
        (query, key), (rotated_query, rotated_key) = probe.rotate_quarter()
    except ValueError as error:
        differs = None if probe.inner_rope else _changes_outputs(probe)
        if differs is None:
            raise ValueError(
                f"{label} could not be called with a few tokens to see whether it rotates by the cos and sin of "
                f"{probe.layout.rope_name}: what it would learn might change nothing. Accepted: layers that can be "
                "called with hidden states, cos and sin alone."
            ) from error
        return differs
    rotates = not torch.equal(query, rotated_query)
    # All keys of a new model may be zero; those of another module are rotated there.
    if key.any() and torch.equal(key, rotated_key) and rotates and probe.layer not in probe.tower.sources:
        raise ValueError(
            f"{label} rotates its queries and not its keys: with which frequencies these are rotated is unknown."
        )
    # Channels that differ, or that are zero under every angle.
    channels, planes = int(((query != rotated_query) | (query == 0)).any(0).sum()), probe.layout.num_planes
    if rotates and channels < 2 * planes:
        raise ValueError(
            f"{label} rotates {channels} channels of each head, and {probe.layout.rope_name} has {planes} planes of "
            "two channels: some of these would learn nothing."
        )
    return rotates


def _changes_outputs(probe: Probe) -> bool | None:
    """Whether other cos and sin change the output of attention that no interface computes; `None` if it fails."""

    def compare(form: Form) -> bool:
        outputs = []
        for turn in probe.quarter:
            output = probe.call_module(form, probe.filled, turn)
            output = output if isinstance(output, (tuple, list)) else (output,)
            outputs.append([value for value in output if isinstance(value, torch.Tensor)])
        return not all(torch.equal(plain, rotated) for plain, rotated in zip(*outputs))

    return first_that_works(compare, propose_forms(probe.attention, probe.coordinates))


def _reads_nothing(probe: Probe) -> bool:
    """
    Returns whether a layer ignores cos and sin, as layers around linear attention do. Inner modules are replaced by
    the identity, because some need a GPU; if that breaks the layer, the answer is `False`.
    """
    copied = _pass_through(probe.attention, "", [], {})
    pair, parameters = UnreadPair(probe.quarter), forward_arguments(copied)
    states = torch.zeros(1, probe.coordinates.shape[-2], 8, device="cpu")  # (1, N, width)
    options: dict[str, Any] = dict.fromkeys(required_arguments(copied))
    options |= {name: pair for name in parameters if is_rotation(name)}
    try:
        type(copied).forward(copied, **{next(iter(parameters)): states, **options})
    except Exception:
        return False
    return True


@torch.no_grad()
def _find_skipped(tower: RopeTower) -> set[int]:
    """
    The attention modules in layers to which the tower passes no cos and sin, though it does to other layers: found by a
    call in which all modules inside pass their input through. None where the tower does not get along with that.
    """
    names = tower.attention_names(list(range(len(tower.attentions))))
    layers = [[*_find_users_around(tower.module, name), name][0] for name in names]
    stand_ins: dict[str, PassThrough] = {}
    copied = _pass_through(tower.module, "", layers, stand_ins)
    states = torch.zeros(1, 4, 8, device="cpu")  # (1, N, width)
    parameters = forward_arguments(copied)
    options = {"inputs_embeds" if "inputs_embeds" in parameters else next(iter(parameters), ""): states}
    options |= {name: False for name in ("use_cache",) if name in parameters}
    with contextlib.suppress(Exception), torch.device("cpu"):
        type(copied).forward(copied, **options)
    gets = {path: any(layer.calls) for path, layer in stand_ins.items() if layer.calls and path in layers}
    return {index for index, path in enumerate(layers) if any(gets.values()) and gets.get(path) is False}


def _find_users_around(tower: nn.Module, name: str) -> list[str]:
    """The names of the modules around attention, from outside, that take cos and sin."""
    parts = name.split(".")
    paths = (".".join(parts[:length]) for length in range(1, len(parts)))
    return [path for path in paths if takes_rotation(tower.get_submodule(path))]


def _pass_through(module: nn.Module, path: str, layers: list[str], stand_ins: dict[str, PassThrough]) -> nn.Module:
    """A copy of a module in which others stand in for the layers, and for all modules beside these."""
    copied = copy.copy(module)
    vars(copied)["_modules"] = {}
    for name, inner in module._modules.items():
        inner_path = f"{path}.{name}" if path else name
        if inner is not None and any(layer.startswith(f"{inner_path}.") for layer in layers):
            inner = _pass_through(inner, inner_path, layers, stand_ins)
        elif inner is not None:
            inner = stand_ins[inner_path] = PassThrough(inner)
        copied._modules[name] = inner
    return copied


def _gets_nothing(probe: Probe) -> bool:
    """Whether the module around attention does not pass cos and sin on; no where it cannot be called alone."""
    tower = probe.tower
    users = _find_users_around(tower.module, *tower.attention_names([probe.layer]))
    if not users:
        return False
    outer = tower.module.get_submodule(users[-1])
    inner = next(name for name, module in outer.named_modules() if module is probe.attention)
    outer = fill_values(outer)

    def capture(module, args, kwargs):
        raise CapturedStates(passes_rotation(module, args, kwargs))

    def gets_nothing(form: Form) -> bool:
        try:
            probe.call_module(form, outer, probe.quarter[0])
        except CapturedStates as captured:
            return not captured.args[0]
        return True

    with outer.get_submodule(inner).register_forward_pre_hook(capture, with_kwargs=True, prepend=True):
        return bool(first_that_works(gets_nothing, propose_forms(outer, probe.coordinates)))
