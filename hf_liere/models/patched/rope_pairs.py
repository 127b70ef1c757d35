"""
Which channels of a head an attention module rotates together, by which angle and in which direction: found by calling
it with known cos and sin. The output of rotary modules does not show this, because attention modules differ in how they
pair channels, leave some channels as they are, or rotate nothing in some layers.
"""

import copy
import itertools
from collections import UserDict
from dataclasses import dataclass

import torch
from torch import nn
from transformers.modeling_utils import AttentionInterface

from .module_inspection import View, device_of, forward_arguments, projections, takes
from .rope_layout import RopeTower, find_positions


# Two numbers from 1 to 16 identify a plane; half types represent these exactly.
DIGIT = 16


class CapturedStates(Exception):
    """Ends a call of an attention module, with its query and key."""


def capture_states(module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args, **kwargs):
    raise CapturedStates(query.float().cpu(), key.float().cpu())  # 2 × (B, H, N, head_dim)


CAPTURE_ATTENTION = f"capture:{__name__}"
AttentionInterface.register(CAPTURE_ATTENTION, capture_states)


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
    def unrotated(self) -> tuple[int, ...]:
        """The channels that are not rotated."""
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
        refusal = self.make_error("has unknown positions")
        with torch.device("cpu"):
            self.arguments, self.coordinates = find_positions(tower.rope, self.options, refusal)  # …, (…, N, D)

    def make_error(self, reason: str) -> ValueError:
        return ValueError(
            f"{self.name} ({type(self.attention).__name__}) {reason}: blocks start from queries and keys that are "
            f"rotated by the cos and sin of {self.tower.rope_name}; accepted: position_encoding='rope_mixed'."
        )

    @property
    def is_meta(self) -> bool:
        return any(tensor.is_meta for tensor in (*self.attention.parameters(), *self.attention.buffers()))

    def capture(
        self, cos: torch.Tensor, sin: torch.Tensor, shared: "SharedStates | None" = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Query and key, (B, H, N, head_dim) in float32 on the CPU, that attention passes to transformers' attention
        interface.

        Args:
            shared: Keys of other attention modules; `None` computes those that this one reads.

        Raises:
            ValueError: if the attention module cannot be called alone.
        """
        if shared is None:
            shared = SharedStates()
            if self.layer in self.tower.sources:
                Probe(self.tower, self.tower.sources[self.layer]).capture(cos, sin, shared)
        attention = _fill_values(self.attention) if self.is_meta else self.attention
        captured = _call_attention(attention, cos, sin, self.arguments, shared)
        if captured is None:
            raise self.make_error("could not be called with a few tokens to see what it rotates")
        return captured

    @torch.no_grad()
    def rotate_quarter(self) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
        """Queries and keys, (B · H · N, head_dim) each, by an angle of zero and by one of π/2."""
        ones, zeros = (torch.full(self.coordinates.shape, value, device="cpu") for value in (1.0, 0.0))
        # cos and sin of 0, then of π/2
        plain, rotated = self.capture(ones, zeros), self.capture(zeros, ones)
        return (
            (plain[0].flatten(0, -2), plain[1].flatten(0, -2)),
            (rotated[0].flatten(0, -2), rotated[1].flatten(0, -2)),
        )

    def find_planes(self) -> HeadPlanes:
        """
        The channels that the attention module rotates.

        Raises:
            ValueError: if it cannot be called, or does not rotate every plane in exactly two channels.
        """
        if not projections(self.attention, self.layer in self.tower.sources):
            raise ValueError(
                f"{self.name} ({type(self.attention).__name__}) has no q_proj and k_proj, query and key, or one "
                "projection for queries, then keys, then values: where its queries and keys can be rotated is unknown; "
                "accepted: position_encoding='rope_mixed'."
            )
        (plain, _), (rotated, _) = self.rotate_quarter()  # 2 × (B · H · N, head_dim)
        with torch.device("cpu"), torch.no_grad():
            zeros, planes = torch.zeros(self.coordinates.shape), torch.tensor(self.layout.planes)  # (N, D), (D,)
            # sin = 1 + digit: 2 × (B, H, N, head_dim), each channel multiplied by the digit of its plane
            digits = [self.capture(zeros, zeros + part + 1)[0] for part in (planes % DIGIT, planes // DIGIT)]
            scale = rotated.square().sum(0).clamp_min(1e-30)  # (head_dim,)
            # (head_dim,) each
            low, high = (((x.flatten(0, -2) * rotated).sum(0) / scale).round().long() - 1 for x in digits)
        pairs: list[list[tuple[int, int]]] = [[] for _ in range(self.layout.num_planes)]
        for channel in (~(plain == rotated).all(0)).nonzero().flatten().tolist():
            opposite = (rotated[:, channel, None] + plain).abs().amax(0)  # (head_dim,)
            if opposite.min() <= 1e-6 * plain.abs().max():
                plane = int(low[channel] + DIGIT * high[channel])
                other = int(opposite.argmin())
                if 0 <= plane < len(pairs) and torch.equal(rotated[:, other], plain[:, channel]):
                    pairs[plane].append((channel, other))
        used = [channel for found in pairs for pair in found for channel in pair]
        if any(len(found) != 1 for found in pairs) or len(set(used)) != len(used):
            raise self.make_error("does not rotate every plane in two channels of each head")
        return HeadPlanes(plain.shape[-1], tuple(pair for found in pairs for pair in found))


class SharedStates(UserDict):
    """
    Keys and values that attention modules share with later ones (`shared_kv_states`), and who made and read them.

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
        """In place, as the class of transformers: hooks of accelerate turn other mappings into a dictionary."""
        self.data = {name: tuple(x.to(device, **options) for x in states) for name, states in self.data.items()}
        return self


@torch.no_grad()
def find_key_sources(tower: RopeTower) -> dict[int, int]:
    """
    By index of an attention module of a tower that reads the keys of an earlier one, the index of that one.

    Raises:
        ValueError: if one that may do so cannot be called, or reads keys that none of them makes.
    """
    shared = SharedStates()
    for layer, (name, attention) in enumerate(tower.attentions):
        if takes(attention, "shared_kv_states"):
            shared.layer, probe = layer, Probe(tower, layer)
            try:
                probe.capture(torch.ones_like(probe.coordinates), torch.zeros_like(probe.coordinates), shared)
            except ValueError as error:
                known = layer in shared.sources
                raise ValueError(
                    f"{name} ({type(attention).__name__}) "
                    + ("reads keys that no layer before it makes" if known else "may read the keys of another layer")
                    + ": with which frequencies these are rotated is unknown. Accepted: layers that make keys, or read "
                    f"those of an earlier layer of {tower.label}."
                ) from error
    return shared.sources


def _fill_values(attention: nn.Module) -> nn.Module:
    """A copy of a module on the meta device with values, distinct in every row of a weight, that take little memory."""
    copied = copy.deepcopy(attention)
    for module in copied.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and tensor.is_meta:
                    rows = tensor.shape[0] if tensor.ndim else 1
                    values = (torch.arange(rows, device="cpu", dtype=torch.float32) * 0.7).sin() + 2  # (rows,)
                    values = values.to(tensor.dtype).view(-1, *[1] * (tensor.ndim - 1)).expand(tensor.shape)
                    tensors[name] = nn.Parameter(values, False) if tensors is module._parameters else values
    return copied


def _call_attention(
    attention: nn.Module, cos: torch.Tensor, coordinates: torch.Tensor, arguments: tuple, shared: SharedStates
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Query and key that attention passes to transformers' interface for a few tokens; `None` if it fails."""
    config = getattr(attention, "config", None)
    if config is None:
        return None
    weight = next(attention.parameters(), torch.empty(0))
    device, dtype = device_of(attention), weight.dtype if weight.is_floating_point() else torch.float32
    tokens = coordinates.shape[-2]
    known = {
        "position_embeddings": (cos.to(device, dtype), coordinates.to(device)),  # 2 × (…, N, D)
        "cu_seqlens": torch.tensor([0, tokens], dtype=torch.int32, device=device),  # (2,)
        "position_ids": arguments[-1].to(device),  # (…, N) or (…, N, A)
        "shared_kv_states": shared,
    }
    parameters = forward_arguments(attention)
    parameters.pop("hidden_states", None)
    options = {name: value for name, value in known.items() if name in parameters}
    for name, parameter in parameters.items():
        if parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
            options.setdefault(name, None)
    # The width of the hidden states is one of these.
    widths = dict.fromkeys(module.in_features for module in attention.modules() if hasattr(module, "in_features"))
    attention.config = View(config, _attn_implementation=CAPTURE_ATTENTION)
    try:
        for width, batch in itertools.product(widths, ((), (1,)) if coordinates.ndim == 2 else ((1,),)):
            try:
                # Attention modules may make tensors, and the default device is meta during construction.
                with device:
                    states = (torch.arange(tokens * width).float() * 0.7).sin().to(dtype)  # (N · width,)
                    attention(states.view(*batch, tokens, width), **options)  # (1, N, width) or (N, width)
            except CapturedStates as captured:
                return captured.args
            except (AttributeError, LookupError, RuntimeError, TypeError, ValueError):
                continue
    finally:
        attention.config = config
    return None


def choose_rotating_layers(tower: RopeTower, layers: list[int], are_named: bool) -> list[int]:
    """
    Those of `layers` that make keys and rotate them; a layer that cannot be called counts as rotating.

    Args:
        are_named: Whether all of `layers` have to rotate.

    Raises:
        ValueError: if one of the named ones does not, or none does, or one rotates its queries and not its keys.
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
    unrotated = [layer for layer in layers if not _rotates(tower, layer)]
    if unrotated and (are_named or len(unrotated) == len(layers)):
        names = ", ".join(tower.attentions[layer][0] for layer in unrotated)
        raise ValueError(f"layers={unrotated}: the model does not rotate in {names}; accepted: layers that it rotates.")
    return [layer for layer in layers if layer not in unrotated]


def _rotates(tower: RopeTower, layer: int) -> bool:
    try:
        # (B · H · N, head_dim) each
        (query, key), (rotated_query, rotated_key) = Probe(tower, layer).rotate_quarter()
    except ValueError:
        return True
    # All keys of a new model may be zero.
    if key.any() and torch.equal(key, rotated_key) and not torch.equal(query, rotated_query):
        name, attention = tower.attentions[layer]
        raise ValueError(
            f"{name} ({type(attention).__name__}) rotates its queries and not its keys: with which frequencies these "
            "are rotated is unknown."
        )
    return not torch.equal(query, rotated_query)


def find_common_planes(tower: RopeTower, layers: list[int]) -> HeadPlanes:
    """
    The channels that these attention modules, and those that read their keys, rotate.

    Raises:
        ValueError: if they cannot be called, or do not rotate the same channels.
    """
    rotating = [layer for layer in range(len(tower.attentions)) if tower.sources.get(layer, layer) in layers]
    found = {(Probe(tower, n).find_planes(), tower.layouts[n].planes, tower.layouts[n].axes) for n in rotating}
    if len(found) > 1:
        raise ValueError(
            f"The attention layers of {tower.label} pair channels differently, but blocks need the same channels in "
            "all layers; name equal ones in layers."
        )
    return found.pop()[0]
