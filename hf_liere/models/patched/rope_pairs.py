"""
Which channels of a head an attention module rotates together, by which angle and in which direction: found by calling
it with known cos and sin. What rotary modules return does not tell it, because attention modules make pairs of
channels each in their own way, leave some channels as they are, or rotate nothing in some layers.
"""

import copy
import inspect
import itertools
from collections import UserDict
from dataclasses import dataclass

import torch
from torch import nn
from transformers.modeling_utils import AttentionInterface

from .patched_forward import View
from .rope_layout import RopeTower, accepted_positions
from .vision_towers import device_of, projections, takes


# Planes are told apart by two numbers from 1 to 16, which half types hold exactly.
DIGIT = 16


class Seen(Exception):
    """Ends a call of an attention module, with its query and key."""


def see_states(module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args, **kwargs):
    raise Seen(query.float().cpu(), key.float().cpu())


SEEING = f"seen:{__name__}"
AttentionInterface.register(SEEING, see_states)


@dataclass(frozen=True)
class HeadPlanes:
    """
    Attributes:
        head_dim: All channels of a head.
        pairs: By plane of the [`RopeLayout`], the two channels (c, d) that it rotates: c to c·cos − d·sin.
    """

    head_dim: int
    pairs: tuple[tuple[int, int], ...]

    @property
    def still(self) -> tuple[int, ...]:
        """The channels that nothing rotates."""
        rotated = {channel for pair in self.pairs for channel in pair}
        return tuple(channel for channel in range(self.head_dim) if channel not in rotated)


@dataclass
class Probe:
    """One attention module of a tower, with the arguments to call it for a few tokens."""

    tower: RopeTower
    layer: int

    def __post_init__(self):
        tower, layer = self.tower, self.layer
        self.name, self.attention = tower.attentions[layer]
        self.layout = tower.layouts[layer]
        self.options = {} if self.layout.layer_type is None else {"layer_type": self.layout.layer_type}
        positions = self.refusal("has unknown positions")
        with torch.device("cpu"):
            self.arguments, self.coordinates = accepted_positions(tower.rope, self.options, positions)

    def refusal(self, reason: str) -> ValueError:
        return ValueError(
            f"{self.name} ({type(self.attention).__name__}) {reason}: blocks start where queries and keys are rotated "
            f"as {self.tower.rope_name} says; accepted: position_encoding='rope_mixed'."
        )

    @property
    def is_meta(self) -> bool:
        return any(tensor.is_meta for tensor in (*self.attention.parameters(), *self.attention.buffers()))

    def see(
        self, cos: torch.Tensor, sin: torch.Tensor, shared: "SharedStates | None" = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Query and key, (B, H, N, head_dim) in float32 on the CPU, that attention hands to transformers' attention
        interface.

        Args:
            shared: Keys of other attention modules; `None` for those of the one that this one reads.

        Raises:
            ValueError: if the attention module cannot be called by itself.
        """
        attention = _with_values(self.attention) if self.is_meta else self.attention
        if shared is None:
            shared = SharedStates()
            if self.layer in self.tower.sources:
                Probe(self.tower, self.tower.sources[self.layer]).see(cos, sin, shared)
        seen = _seen_by_attention(attention, (cos, sin), self.arguments, shared)
        if seen is None:
            raise self.refusal("could not be called with a few tokens to see what it rotates")
        return seen

    @torch.no_grad()
    def quarter_rotation(self) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
        """Queries and keys, (B · H · N, head_dim) each, by an angle of zero and by one of π/2."""
        ones, zeros = (torch.full(self.coordinates.shape, value, device="cpu") for value in (1.0, 0.0))
        angles = ((ones, zeros), (zeros, ones))
        return tuple(tuple(states.flatten(0, -2) for states in self.see(*given)) for given in angles)

    def head_planes(self) -> HeadPlanes:
        """
        What the attention module rotates.

        Raises:
            ValueError: if it cannot be called, or does not rotate each plane in two channels of its own.
        """
        if not projections(self.attention, self.layer in self.tower.sources):
            raise ValueError(
                f"{self.name} ({type(self.attention).__name__}) has no q_proj and k_proj, query and key, or one "
                "projection for queries, keys and values after each other: where its queries and keys can be rotated "
                "is unknown; accepted: position_encoding='rope_mixed'."
            )
        (still, _), (rotated, _) = self.quarter_rotation()
        with torch.device("cpu"), torch.no_grad():
            zeros, planes = torch.zeros(self.coordinates.shape), torch.tensor(self.layout.planes)
            digits = [self.see(zeros, zeros + part + 1)[0] for part in (planes % DIGIT, planes // DIGIT)]
            scale = rotated.square().sum(0).clamp_min(1e-30)
            low, high = (((x.flatten(0, -2) * rotated).sum(0) / scale).round().long() - 1 for x in digits)
        pairs = [[] for _ in range(self.layout.num_planes)]
        for channel in (~(still == rotated).all(0)).nonzero().flatten().tolist():
            opposite = (rotated[:, channel, None] + still).abs().amax(0)
            if opposite.min() <= 1e-6 * still.abs().max():
                plane = int(low[channel] + DIGIT * high[channel])
                other = int(opposite.argmin())
                if 0 <= plane < len(pairs) and torch.equal(rotated[:, other], still[:, channel]):
                    pairs[plane].append((channel, other))
        used = [channel for found in pairs for pair in found for channel in pair]
        if any(len(found) != 1 for found in pairs) or len(set(used)) != len(used):
            raise self.refusal("does not rotate every plane in two channels of each head")
        return HeadPlanes(still.shape[-1], tuple(pair for found in pairs for pair in found))


class SharedStates(UserDict):
    """
    What attention modules share with later ones (`shared_kv_states`), which a pass over them fills.

    Attributes:
        layer: Index of the attention module that is called.
        makers: By name of shared states, the last attention module that made them.
        sources: By attention module that read shared states, the one that made them, or `None` if there was none.
    """

    def __init__(self):
        super().__init__()
        self.layer, self.makers, self.sources = None, {}, {}

    def __setitem__(self, name, states) -> None:
        super().__setitem__(name, states)
        self.makers[name] = self.layer

    def __getitem__(self, name):
        self.sources[self.layer] = self.makers.get(name)
        return super().__getitem__(name)

    def to(self, device: torch.device, **options) -> "SharedStates":
        """In place, as transformers' own: hooks of accelerate move arguments, and would make a dictionary of others."""
        self.data = {name: tuple(x.to(device, **options) for x in states) for name, states in self.data.items()}
        return self


@torch.no_grad()
def key_sources(tower: RopeTower) -> dict[int, int]:
    """
    By index of an attention module of a tower that reads the keys of an earlier one, the index of that one.

    Raises:
        ValueError: if one that may do so cannot be called to see it, or reads keys that none of them makes.
    """
    shared = SharedStates()
    for layer, (name, attention) in enumerate(tower.attentions):
        if takes(attention, "shared_kv_states"):
            shared.layer, probe = layer, Probe(tower, layer)
            try:
                probe.see(torch.ones_like(probe.coordinates), torch.zeros_like(probe.coordinates), shared)
            except ValueError as error:
                known = layer in shared.sources
                raise ValueError(
                    f"{name} ({type(attention).__name__}) "
                    + ("reads keys that no layer before it makes" if known else "may read the keys of another layer")
                    + ": with which frequencies these are rotated is unknown. Accepted: layers that make keys, or read "
                    f"those of an earlier layer of {tower.shown}."
                ) from error
    return shared.sources


def _with_values(attention: nn.Module) -> nn.Module:
    """A copy of a module without values, with distinct ones in every row of a weight, which take no memory."""
    made = copy.deepcopy(attention)
    for module in made.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and tensor.is_meta:
                    rows = tensor.shape[0] if tensor.ndim else 1
                    values = (torch.arange(rows, device="cpu", dtype=torch.float32) * 0.7).sin() + 2
                    values = values.to(tensor.dtype).view(-1, *[1] * (tensor.ndim - 1)).expand(tensor.shape)
                    tensors[name] = nn.Parameter(values, False) if tensors is module._parameters else values
    return made


def _seen_by_attention(
    attention: nn.Module,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    arguments: tuple,
    shared: SharedStates,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Query and key that an attention module hands to transformers' attention interface, for a few tokens."""
    config = getattr(attention, "config", None)
    if config is None:
        return None
    weight = next(attention.parameters(), torch.empty(0))
    device, dtype = device_of(attention), weight.dtype if weight.is_floating_point() else torch.float32
    cos, coordinates = position_embeddings
    tokens = coordinates.shape[-2]
    given = {
        "position_embeddings": (cos.to(device, dtype), coordinates.to(device)),
        "cu_seqlens": torch.tensor([0, tokens], dtype=torch.int32, device=device),
        "position_ids": arguments[-1].to(device),
        "shared_kv_states": shared,
    }
    parameters = inspect.signature(type(attention).forward).parameters
    given = {name: value for name, value in given.items() if name in parameters}
    needed = (name for name, parameter in parameters.items() if parameter.default is inspect.Parameter.empty)
    named = {name: None for name in needed if parameters[name].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD}
    for name in ("self", "hidden_states"):
        named.pop(name, None)
    # One of these is that of the hidden states.
    widths = dict.fromkeys(module.in_features for module in attention.modules() if hasattr(module, "in_features"))
    attention.config = View(config, _attn_implementation=SEEING)
    try:
        for width, batch in itertools.product(widths, ((), (1,)) if coordinates.ndim == 2 else ((1,),)):
            try:
                # Attention modules may make tensors of their own, and the default device is meta during construction.
                with device:
                    states = (torch.arange(tokens * width).float() * 0.7).sin().to(dtype)
                    attention(states.view(*batch, tokens, width), **{**named, **given})
            except Seen as seen:
                return seen.args
            except (AttributeError, LookupError, RuntimeError, TypeError, ValueError):
                continue
    finally:
        attention.config = config
    return None


def rotating_layers(tower: RopeTower, layers: list[int], are_named: bool) -> list[int]:
    """
    Those of `layers` that rotate keys of their own; what cannot be called to see it counts as rotating.

    Args:
        are_named: Whether all of `layers` have to rotate.

    Raises:
        ValueError: if one of them does not, or none does, or one rotates its queries and not its keys.
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
    still = [layer for layer in layers if not _rotates(tower, layer)]
    if still and (are_named or len(still) == len(layers)):
        names = ", ".join(tower.attentions[layer][0] for layer in still)
        raise ValueError(f"layers={still}: the model does not rotate in {names}; accepted: layers that it rotates in.")
    return [layer for layer in layers if layer not in still]


def _rotates(tower: RopeTower, layer: int) -> bool:
    try:
        (query, key), (rotated_query, rotated_key) = Probe(tower, layer).quarter_rotation()
    except ValueError:
        return True
    # Keys of new models may all be zero.
    if key.any() and torch.equal(key, rotated_key) and not torch.equal(query, rotated_query):
        name, attention = tower.attentions[layer]
        raise ValueError(
            f"{name} ({type(attention).__name__}) rotates its queries and not its keys: with which frequencies these "
            "are rotated is unknown."
        )
    return not torch.equal(query, rotated_query)


def rotated_planes(tower: RopeTower, layers: list[int]) -> HeadPlanes:
    """
    What the attention modules of these layers rotate, and those that read their keys.

    Raises:
        ValueError: if they cannot be called, or do not rotate the same channels.
    """
    rotating = [layer for layer in range(len(tower.attentions)) if tower.sources.get(layer, layer) in layers]
    found = {Probe(tower, layer).head_planes() for layer in rotating}
    if len(found) > 1:
        raise ValueError(
            f"The attention layers of {tower.shown} pair channels differently, and blocks of all are of the same "
            "channels; name equal ones in layers."
        )
    return found.pop()
