"""
Which channels of a head an attention module rotates together, by which angle and in which direction: found by calling
it with known cos and sin. The output of rotary modules does not show this, because attention modules differ in how they
pair channels, leave some channels as they are, or rotate nothing in some layers.
"""

import copy
import inspect
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


class Captured(Exception):
    """Ends a call of a module, with what the call was made for."""


def capture_states(module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args, **kwargs):
    raise Captured(query.float().cpu(), key.float().cpu())  # 2 × (B, H, N, head_dim)


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
        response = self.call(cos, sin, shared)
        if response is None or not response.is_captured:
            raise self.make_error("could not be called with a few tokens to see what it rotates")
        query, key = response.values
        return query, key

    def call(self, cos: torch.Tensor, sin: torch.Tensor, shared: "SharedStates") -> "Response | None":
        """Queries and keys as [`Probe.capture`], else the outputs of attention; `None` if it cannot be called alone."""
        attention = fill_values(self.attention) if self.is_meta else self.attention
        config = getattr(attention, "config", None)
        if config is None:
            return call_module(attention, cos, sin, self.arguments, shared)
        attention.config = View(config, _attn_implementation=CAPTURE_ATTENTION)
        try:
            return call_module(attention, cos, sin, self.arguments, shared)
        finally:
            attention.config = config

    def make_quarters(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Ones and zeros, (…, N, D): cos and sin of an angle of zero, and sin and cos of π/2."""
        ones, zeros = (torch.full(self.coordinates.shape, value, device="cpu") for value in (1.0, 0.0))
        return ones, zeros

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
        with torch.device("cpu"), torch.no_grad():
            ones, zeros = self.make_quarters()  # 2 × (…, N, D)
            # 2 × (B · H · N, head_dim)
            plain, rotated = (self.capture(*angle)[0].flatten(0, -2) for angle in ((ones, zeros), (zeros, ones)))
            planes = torch.tensor(self.layout.planes)  # (D,)
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


@dataclass(frozen=True)
class Response:
    """
    What a module did with a few tokens.

    Attributes:
        values: What a [`Captured`] contains, else the floating point tensors of the output, in float32 on the CPU.
        is_captured: Which of the two.
    """

    values: tuple
    is_captured: bool


def fill_values(module: nn.Module) -> nn.Module:
    """A copy of a module on the meta device with values, distinct in every row of a weight, that take little memory."""
    copied = copy.deepcopy(module)
    for inner in copied.modules():
        for tensors in (inner._parameters, inner._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and tensor.is_meta:
                    rows = tensor.shape[0] if tensor.ndim else 1
                    values = (torch.arange(rows, device="cpu", dtype=torch.float32) * 0.7).sin() + 2  # (rows,)
                    values = values.view(rows, *[1] * (tensor.ndim - 1)) if tensor.ndim else values[0]
                    values = values.to(tensor.dtype).expand(tensor.shape)
                    tensors[name] = nn.Parameter(values, False) if tensors is inner._parameters else values
    return copied


def call_module(
    module: nn.Module, cos: torch.Tensor, coordinates: torch.Tensor, arguments: tuple, shared: SharedStates
) -> Response | None:
    """A call of attention, or of a module around it, with a few tokens; `None` if it fails."""
    weight = next(module.parameters(), torch.empty(0))
    device, dtype = device_of(module), weight.dtype if weight.is_floating_point() else torch.float32
    tokens = coordinates.shape[-2]
    known = {
        "position_embeddings": (cos.to(device, dtype), coordinates.to(device)),  # 2 × (…, N, D)
        "cu_seqlens": torch.tensor([0, tokens], dtype=torch.int32, device=device),  # (2,)
        "position_ids": arguments[-1].to(device),  # (…, N) or (…, N, A)
        "shared_kv_states": shared,
    }
    # The width of the hidden states is one of these.
    widths = dict.fromkeys(inner.in_features for inner in module.modules() if hasattr(inner, "in_features"))
    for width, batch in itertools.product(widths, ((), (1,)) if coordinates.ndim == 2 else ((1,),)):
        try:
            # Attention modules may make tensors, and the default device is meta during construction.
            with device:
                states = (torch.arange(tokens * width).float() * 0.7).sin().to(dtype)  # (N · width,)
                states = states.view(*batch, tokens, width)  # (1, N, width) or (N, width)
                output = module(states, **_propose_options(module, known, states))
        except Captured as captured:
            return Response(captured.args, True)
        except Exception:
            # What code of other packages raises is not known.
            continue
        values = output if isinstance(output, (tuple, list)) else (output,)
        floats = (value for value in values if isinstance(value, torch.Tensor) and value.is_floating_point())
        return Response(tuple(value.float().cpu() for value in floats), False)
    return None


def _propose_options(module: nn.Module, known: dict, states: torch.Tensor) -> dict:
    """The arguments of a module after its hidden states: what is known, states of others, an empty mask, and `None`."""
    parameters = forward_arguments(module)
    parameters.pop("hidden_states", None)
    required = {name: parameter for name, parameter in parameters.items() if parameter.default is parameter.empty}
    options = {name: None for name in required if required[name].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD}
    options |= {name: states for name in options if name.endswith("_states")}
    if "attention_mask" in options:
        # Attention that does not use transformers' interface adds it to scores: (1, 1, N, N).
        options["attention_mask"] = states.new_zeros(1, 1, states.shape[-2], states.shape[-2])
    return options | {name: value for name, value in known.items() if name in parameters}


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
