"""
Which of the modules that take cos and sin rotate by them. Some do not read them, as layers with linear attention; some
do not get them, as attention to the output of an encoder. Parameters of such a layer would change nothing.
"""

import copy
from typing import Any

import torch
from torch import nn

from .module_inspection import forward_arguments, takes
from .rope_layout import RopeTower
from .rope_pairs import Captured, Probe, SharedStates, call_module, fill_values


class WatchedPair(tuple):
    """A pair of cos and sin that records whether it was read."""

    is_read = False

    def __iter__(self):
        self.is_read = True
        return super().__iter__()

    def __getitem__(self, index):
        self.is_read = True
        return super().__getitem__(index)


class PassThrough(nn.Module):
    """Returns the first tensor that it gets. Cos and sin count as read where they are passed to it."""

    def forward(self, *args, **kwargs) -> torch.Tensor:
        given = (*args, *kwargs.values())
        for pair in given:
            if isinstance(pair, WatchedPair):
                pair.is_read = True
        return next(value for value in given if isinstance(value, torch.Tensor))


def choose_rotating_layers(tower: RopeTower, layers: list[int], are_named: bool) -> list[int]:
    """
    Those of `layers` that make keys and rotate them.

    Args:
        are_named: Whether all of `layers` have to rotate.

    Raises:
        ValueError: if one of the named ones does not, or none does, or one rotates its queries and not its keys, or not
            with all planes, or cannot be called to see it.
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
    unrotated = [layer for layer in layers if not _rotates(Probe(tower, layer))]
    if unrotated and (are_named or len(unrotated) == len(layers)):
        names = ", ".join(tower.attentions[layer][0] for layer in unrotated)
        raise ValueError(f"layers={unrotated}: the model does not rotate in {names}; accepted: layers that it rotates.")
    return [layer for layer in layers if layer not in unrotated]


@torch.no_grad()
def _rotates(probe: Probe) -> bool:
    if _reads_nothing(probe) or _gets_nothing(probe):
        return False
    ones, zeros = probe.make_quarters()
    plain, rotated = (probe.call(*angle, SharedStates()) for angle in ((ones, zeros), (zeros, ones)))
    label = f"{probe.name} ({type(probe.attention).__name__})"
    if plain is None or rotated is None:
        raise ValueError(
            f"{label} could not be called with a few tokens to see whether it rotates by the cos and sin of "
            f"{probe.tower.rope_name}: what it would learn might change nothing. Accepted: layers that can be called "
            "with the hidden states, cos and sin alone."
        )
    differs = [not torch.equal(before, after) for before, after in zip(plain.values, rotated.values)]
    if not (plain.is_captured and rotated.is_captured):
        return any(differs)
    query, key = plain.values
    # All keys of a new model may be zero.
    if key.any() and differs == [True, False]:
        raise ValueError(
            f"{label} rotates its queries and not its keys: with which frequencies these are rotated is unknown."
        )
    # Channels that differ, or that are zero under every angle: (head_dim,)
    changed = ((query != rotated.values[0]) | (query == 0)).flatten(0, -2)
    channels, planes = int(changed.any(0).sum()), probe.layout.num_planes
    if differs[0] and channels < 2 * planes:
        raise ValueError(
            f"{label} rotates {channels} channels of each head, and {probe.tower.rope_name} has {planes} planes of two "
            "channels: some of these would learn nothing."
        )
    return differs[0]


def _reads_nothing(probe: Probe) -> bool:
    """
    Whether a module does not read cos and sin, as a layer around linear attention. The modules inside pass their input
    through here, because some run on a GPU alone; where the module does not get along with that, the answer is no.
    """
    copied = copy.copy(probe.attention)
    modules = copied._modules.items()
    vars(copied)["_modules"] = {name: None if module is None else PassThrough() for name, module in modules}
    pair = WatchedPair((torch.ones_like(probe.coordinates), torch.zeros_like(probe.coordinates)))
    parameters = forward_arguments(copied)
    states = torch.zeros(1, probe.coordinates.shape[-2], 8)  # (1, N, width)
    required = [name for name, parameter in parameters.items() if parameter.default is parameter.empty]
    options: dict[str, Any] = {name: None for name in required if parameters[name].kind is parameters[name].POSITIONAL_OR_KEYWORD}
    options |= {next(iter(parameters)): states, "position_embeddings": pair}
    try:
        type(copied).forward(copied, **options)
    except Exception:
        # What code of other packages raises is not known.
        return False
    return not pair.is_read


def _gets_nothing(probe: Probe) -> bool:
    """Whether the module around attention does not pass cos and sin on; no where it cannot be called alone."""
    tower = probe.tower
    *around, _ = probe.name[len(tower.name) + 1 if tower.name else 0 :].split(".")
    paths = (".".join(around[:length]) for length in range(len(around), 0, -1))
    path = next((path for path in paths if takes(tower.module.get_submodule(path), "position_embeddings")), None)
    if path is None:
        return False
    outer = tower.module.get_submodule(path)
    inner = next(name for name, module in outer.named_modules() if module is probe.attention)
    outer = fill_values(outer) if any(value.is_meta for value in (*outer.parameters(), *outer.buffers())) else outer
    attention = outer.get_submodule(inner)

    def capture(module, args, kwargs):
        given = {**dict(zip(forward_arguments(module), args)), **kwargs}
        raise Captured(given.get("position_embeddings") is not None)

    handle = attention.register_forward_pre_hook(capture, with_kwargs=True, prepend=True)
    try:
        response = call_module(outer, *probe.make_quarters(), probe.arguments, SharedStates())
    finally:
        handle.remove()
    return response is not None and not (response.is_captured and response.values[0])
