"""
Which channels of a head an attention module rotates together, by which angle and in which direction: found by calling
it with known cos and sin. What rotary modules return does not tell it, because attention modules make pairs of
channels each in their own way, leave some channels as they are, or rotate nothing in some layers.
"""

import copy
import inspect
from dataclasses import dataclass

import torch
from torch import nn
from transformers.modeling_utils import AttentionInterface

from .patched_forward import View
from .rope_layout import RopeTower, accepted_positions
from .vision_towers import linear_layer, projections


# Planes are told apart by two numbers from 1 to 16, which half types hold exactly.
DIGIT = 16


class Seen(Exception):
    """Ends a call of an attention module, with its query and key."""


def see_states(module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args, **kwargs):
    raise Seen(query.float(), key.float())


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
        if not projections(self.attention):
            raise ValueError(
                f"{self.name} ({type(self.attention).__name__}) has no q_proj and k_proj, query and key, or one "
                "projection for queries, keys and values after each other: where its queries and keys can be rotated "
                "is unknown; accepted: position_encoding='rope_mixed'."
            )
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

    def see(self, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Query and key, (B, H, N, head_dim) in float32, that attention hands to transformers' attention interface.

        Raises:
            ValueError: if the attention module cannot be called by itself.
        """
        attention = _with_values(self.attention) if self.is_meta else self.attention
        seen = _seen_by_attention(attention, (cos, sin), self.arguments)
        if seen is None:
            raise self.refusal("could not be called with a few tokens to see what it rotates")
        return seen

    def rotates(self) -> bool:
        """Whether the attention module uses cos and sin. Raises `ValueError` if it cannot be called."""
        return not torch.equal(*self._quarter_rotation())

    @torch.no_grad()
    def _quarter_rotation(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries (B · H · N, head_dim) by an angle of zero and by one of π/2."""
        ones, zeros = (torch.full(self.coordinates.shape, value, device="cpu") for value in (1.0, 0.0))
        return tuple(self.see(*given)[0].flatten(0, -2) for given in ((ones, zeros), (zeros, ones)))

    def head_planes(self) -> HeadPlanes:
        """
        What the attention module rotates.

        Raises:
            ValueError: if it cannot be called, or does not rotate each plane in two channels of its own.
        """
        still, rotated = self._quarter_rotation()
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
    attention: nn.Module, position_embeddings: tuple[torch.Tensor, torch.Tensor], arguments: tuple
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Query and key that an attention module hands to transformers' attention interface, for a few tokens."""
    projection = linear_layer(projections(attention)[0])
    weight = next(attention.parameters(), torch.empty(0))
    coordinates = position_embeddings[1]
    dtype = weight.dtype if weight.is_floating_point() else torch.float32
    states = torch.arange(coordinates.shape[-2] * projection.in_features, device=coordinates.device)
    states = (states.float() * 0.7).sin().view(coordinates.shape[-2], -1).to(dtype)
    given = {
        "position_embeddings": tuple(x.to(dtype) if x is position_embeddings[0] else x for x in position_embeddings),
        "cu_seqlens": torch.tensor([0, len(states)], dtype=torch.int32, device=states.device),
        "position_ids": arguments[-1].to(states.device),
    }
    parameters = inspect.signature(type(attention).forward).parameters
    given = {name: value for name, value in given.items() if name in parameters}
    needed = (name for name, parameter in parameters.items() if parameter.default is inspect.Parameter.empty)
    named = {name: None for name in needed if parameters[name].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD}
    for name in ("self", "hidden_states"):
        named.pop(name, None)
    config = getattr(attention, "config", None)
    if config is None:
        return None
    attention.config = View(config, _attn_implementation=SEEING)
    try:
        for shape in (states, states.unsqueeze(0)) if coordinates.ndim == 2 else (states.unsqueeze(0),):
            try:
                attention(shape, **{**named, **given})
            except Seen as seen:
                return seen.args
            except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
                continue
    finally:
        attention.config = config
    return None


def rotating_layers(tower: RopeTower, layers: list[int], are_named: bool) -> list[int]:
    """
    Those of `layers` that rotate; what cannot be called to see it counts as rotating.

    Args:
        are_named: Whether all of `layers` have to rotate.

    Raises:
        ValueError: if one of them does not, or none does.
    """
    still = [layer for layer in layers if not _rotates(tower, layer)]
    if still and (are_named or len(still) == len(layers)):
        names = ", ".join(tower.attentions[layer][0] for layer in still)
        raise ValueError(f"layers={still}: the model does not rotate in {names}; accepted: layers that it rotates in.")
    return [layer for layer in layers if layer not in still]


def _rotates(tower: RopeTower, layer: int) -> bool:
    try:
        return Probe(tower, layer).rotates()
    except ValueError:
        return True


def rotated_planes(tower: RopeTower, layers: list[int]) -> HeadPlanes:
    """
    What the attention modules of these layers rotate.

    Raises:
        ValueError: if they cannot be called, or do not rotate the same channels.
    """
    found = {Probe(tower, layer).head_planes() for layer in layers}
    if len(found) > 1:
        raise ValueError(
            f"The attention layers of {tower.shown} pair channels differently, and blocks of all are of the same "
            "channels; name equal ones in layers."
        )
    return found.pop()
