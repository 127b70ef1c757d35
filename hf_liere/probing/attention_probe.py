"""
Attention modules called alone, for a few tokens and with known cos and sin, to see the queries and keys that they
compute attention with.
"""

import copy
import dataclasses
import functools
import itertools
import weakref
from collections import UserDict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers.modeling_utils import AttentionInterface

from .coordinate_probe import Turn, find_positions, first_that_works
from .module_inspection import View, device_of, find_indexers, forward_arguments, is_rotation, required_arguments, takes
from .rope_layout import RopeTower


class CapturedStates(Exception):
    """Ends a call of an attention module, with its query and key."""


def capture_states(module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args, **kwargs):
    raise CapturedStates(query.float().cpu(), key.float().cpu())  # 2 × (B, H, N, head_dim)


CAPTURE_ATTENTION = f"capture:{__name__}"
AttentionInterface.register(CAPTURE_ATTENTION, capture_states)


class CaptureFunction(TorchFunctionMode):
    """
    The same for attention modules that call PyTorch's function themselves. Projections, which take most of the time,
    compute the output of every input once: `memory` contains weight, input and output.
    """

    def __init__(self, memory: list[tuple[weakref.ref, torch.Tensor, torch.Tensor]]):
        super().__init__()
        self.memory = memory

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is nn.functional.scaled_dot_product_attention:
            given = (*args, *(kwargs or {}).values())
            raise CapturedStates(given[0].float().cpu(), given[1].float().cpu())  # 2 × (B, H, N, head_dim)
        if function is not nn.functional.linear or kwargs:
            return function(*args, **(kwargs or {}))
        states, projection, *_ = args
        for weight, known, output in self.memory:
            if weight() is projection and known.shape == states.shape and torch.equal(known, states):
                return output.clone()
        output = function(*args)
        self.memory.append((weakref.ref(projection), states.detach().clone(), output.detach().clone()))
        return output


# Called with the name of a module, and as a forward hook: returns another output, or `None`.
Replacement = Callable[[str, nn.Module, tuple, Any], torch.Tensor | None]
QueryKey: TypeAlias = tuple[torch.Tensor, torch.Tensor]


@dataclass
class Probe:
    """
    One attention module of a tower, with the arguments to call it for a few tokens.

    Attributes:
        form: In which form it takes tokens, as soon as that is known.
        memory: Of [`CaptureFunction`].
    """

    tower: RopeTower
    layer: int
    form: "Form | None" = None
    memory: list[tuple[weakref.ref, torch.Tensor, torch.Tensor]] = field(default_factory=list)

    def __post_init__(self):
        tower, layer = self.tower, self.layer
        self.name, self.attention = tower.attentions[layer]
        self.layout, self.inner_rope = tower.layouts[layer], tower.inner_rope(layer)
        self.options = self.layout.options
        refusal = self.make_error("has unknown positions")
        with torch.device("cpu"):
            self.arguments, self.coordinates = find_positions(tower.rope(layer), self.options, refusal)  # (…, N, D)

    @classmethod
    def of(cls, tower: RopeTower, layer: int) -> "Probe":
        """The probe of an attention module, which remembers what it has seen."""
        if layer not in tower.probes:
            tower.probes[layer] = cls(tower, layer)
        return tower.probes[layer]

    def make_error(self, reason: str) -> ValueError:
        return ValueError(
            f"{self.name} ({type(self.attention).__name__}) {reason}: blocks start from queries and keys that are "
            f"rotated by the cos and sin of {self.layout.rope_name}; accepted: position_encoding='rope_mixed'."
        )

    @functools.cached_property
    def filled(self) -> nn.Module:
        return fill_values(self.attention)

    @property
    def quarter(self) -> list[Turn]:
        """The `position_embeddings` for an angle of zero, and those for π/2."""
        ones, zeros = (torch.full(self.coordinates.shape, value, device="cpu") for value in (1.0, 0.0))
        return [self.join(ones, zeros), self.join(zeros, ones)]

    def join(self, cos: torch.Tensor, sin: torch.Tensor) -> Turn:
        """The `position_embeddings` for (…, N, D) cos and sin, in the dtype of attention's weights."""
        dtype = _weight_type(self.attention)
        if self.layout.is_complex:
            # Of half types, in which models are made too, there are no complex numbers.
            wide = torch.promote_types(cos.dtype, torch.float32)
            return torch.complex(cos.to(wide), sin.to(wide))
        return cos.to(dtype), sin.to(dtype)

    def capture(self, turn: Turn, shared: "SharedStates | None" = None, replace: Replacement | None = None) -> QueryKey:
        """
        Query and key, (B, H, N, head_dim) in float32 on the CPU, that attention computes with. Raises `ValueError` if
        the attention module cannot be called alone.

        Args:
            turn: What it takes as `position_embeddings`, and what a rotary module inside returns that is not patched.
            shared: Keys of other attention modules; `None` computes those that this one reads.
            replace: Returns other outputs of the modules inside.
        """
        if shared is None:
            shared = SharedStates()
            if self.layer in self.tower.sources:
                Probe.of(self.tower, self.tower.sources[self.layer]).capture(turn, shared)
        if self.form is None:
            # Trials that fail would confuse what replaces outputs.
            forms = propose_forms(self.attention, self.coordinates)
            self.form = first_that_works(lambda form: self._call(form, turn, shared, None) and form, forms)
        forms = filter(None, [self.form])
        captured = first_that_works(lambda form: self._call(form, turn, shared, replace), forms)
        if captured is None:
            raise self.make_error("could not be called with a few tokens to see what it rotates")
        return captured

    def _call(self, form: "Form", turn: Turn, shared: "SharedStates", replace: Replacement | None) -> QueryKey | None:
        """Query and key that attention computes with for a few tokens, if it does; raises what it raises."""
        hooks: dict[str, Callable] = {}
        if replace is not None:
            hooks = {name: partial(replace, name) for name, _ in self.filled.named_modules() if name}
            hooks.pop(self.inner_rope or "", None)
        if self.inner_rope and not hasattr(self.tower.module, "rotary_encoding"):
            hooks[self.inner_rope] = lambda module, args, output: _like(turn, output)
        try:
            with ExitStack() as stack:
                for name, hook in hooks.items():
                    stack.enter_context(self.filled.get_submodule(name).register_forward_hook(hook))
                self.call_module(form, self.filled, turn, shared)
        except CapturedStates as captured:
            query, key = captured.args
            # Others take dimensions of tokens for those of samples.
            is_fit = query.shape[0] == 1 and query.shape[-2] == self.coordinates.shape[-2]
            return (query, key) if is_fit else None
        return None

    def call_module(self, form: "Form", module: nn.Module, turn: Turn, shared: "SharedStates | None" = None):
        """Calls an attention module, or one around it, with a few tokens; its errors are passed on."""
        tokens = self.coordinates.shape[-2]
        device, dtype = device_of(module), _weight_type(module)
        turn = turn.to(device) if isinstance(turn, torch.Tensor) else tuple(x.to(device) for x in turn)
        known = {
            "cu_seqlens": torch.tensor([0, tokens], dtype=torch.int32, device=device),  # (2,)
            "position_ids": self.arguments[-1].to(device),  # (…, N) or (…, N, A)
            "shared_kv_states": SharedStates() if shared is None else shared,
            # What an indexer chose in another layer.
            "prev_topk_indices": torch.arange(tokens, device=device).expand(1, tokens, tokens),
        }
        if find_indexers(module):
            known["attention_mask"] = torch.zeros(1, 1, tokens, tokens, device=device)
        # Some modules take cos and sin of keys too.
        options: dict[str, Any] = {name: turn for name in forward_arguments(module) if is_rotation(name)}
        options |= {name: value for name, value in known.items() if takes(module, name)}
        options |= {form.counter: 1} if form.counter else {}
        # Attention modules may make tensors, and the default device is meta during construction.
        with device:
            states, keys = (
                (torch.arange(count * width).float() * 0.7).sin().to(dtype).view(*form.batch, count, width)
                for count, width in ((tokens, form.width), (tokens * form.key_repeats, form.key_width))
            )  # 2 × (…, N, width)
            options |= {name: keys for name in ("key", "value") if takes(module, name)}
            for name in required_arguments(module):
                # States of an encoder or of a cache get the keys; masks get `None`.
                options.setdefault(name, keys if name.endswith("_states") else None)
            config = getattr(module, "config", None)
            if config is None:
                return module(states, **options)
            module.config = View(config, _attn_implementation=form.implementation)
            try:
                with CaptureFunction(self.memory):
                    return module(states, **options)
            finally:
                module.config = config

    def has_other_keys(self) -> bool:
        """Whether keys may belong to other tokens than queries, or be rotated by other cos and sin."""
        is_empty = self.form is not None and self.form.key_repeats == 0
        if is_empty or sum(map(is_rotation, forward_arguments(self.attention))) > 1:
            return True
        if not takes(self.attention, "key"):
            return False
        self.capture(self.quarter[0])
        assert self.form is not None
        try:
            Probe(self.tower, self.layer, dataclasses.replace(self.form, key_repeats=2)).capture(self.quarter[0])
        except ValueError:
            return False
        return True

    @torch.no_grad()
    def rotate_quarter(self, replace: Replacement | None = None) -> tuple[QueryKey, QueryKey]:
        """Queries and keys, (B · H · N, head_dim) each, by an angle of zero and by one of π/2."""
        (q, k), (rq, rk) = (self.capture(turn, None, replace) for turn in self.quarter)
        return (q.flatten(0, -2), k.flatten(0, -2)), (rq.flatten(0, -2), rk.flatten(0, -2))

    @functools.cached_property
    @torch.no_grad()
    def later_modules(self) -> Replacement:
        """Replaces modules that get queries or keys after their rotation (norms) by the identity."""
        recorded: list[dict[str, list[torch.Tensor]]] = []
        for turn in self.quarter:
            outputs: dict[str, list[torch.Tensor]] = {}

            def record(name, module, args, output, outputs=outputs):
                if isinstance(output, torch.Tensor) and output.is_floating_point():
                    outputs.setdefault(name, []).append(output.float().cpu())

            self.capture(turn, None, record)
            recorded.append(outputs)
        plain, rotated = recorded
        later = {name for name in plain if any(not torch.equal(*pair) for pair in zip(plain[name], rotated[name]))}
        return lambda name, module, args, output: args[0] if name in later else None


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


def fill_values(module: nn.Module) -> nn.Module:
    """
    A module, if it has values; else a copy with some, distinct in every row of a weight, that take little memory.
    """
    if not any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
        return module
    copied = copy.deepcopy(module)
    for module in copied.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and tensor.is_meta:
                    rows = tensor.shape[0] if tensor.ndim else 1
                    values = (torch.arange(rows, device="cpu", dtype=torch.float32) * 0.7).sin() + 2  # (rows,)
                    values = values.view(rows, *[1] * (tensor.ndim - 1)) if tensor.ndim else values[0]
                    values = values.to(tensor.dtype).expand(tensor.shape)
                    tensors[name] = nn.Parameter(values, False) if tensors is module._parameters else values
    return copied


def _like(turn, output):
    """cos and sin of the dtype and on the device of those that a rotary module returned."""
    return turn.to(output) if isinstance(output, torch.Tensor) else tuple(x.to(y) for x, y in zip(turn, output))


def _weight_type(module: nn.Module) -> torch.dtype:
    weight = next(module.parameters(), torch.empty(0))
    return weight.dtype if weight.is_floating_point() else torch.float32


@dataclass(frozen=True)
class Form:
    """
    How an attention module takes a few tokens.

    Attributes:
        implementation: Of attention: the interface of transformers, or the function of PyTorch.
        width: That of the hidden states.
        key_width: That of the states of which keys and values are made, where these are arguments.
        key_repeats: How many tokens of keys, or of states before those of queries, there are for one of queries.
        batch: Dimensions before tokens: of one sample, of none (packed tokens), or of one sample and one row of a grid.
        counter: Name of an argument that is 1, where attention needs another count than its default.
    """

    implementation: str
    width: int
    key_width: int
    batch: tuple[int, ...]
    counter: str | None
    key_repeats: int = 1


def propose_forms(attention: nn.Module, coordinates: torch.Tensor) -> Iterator[Form]:
    widths = dict.fromkeys(module.in_features for module in attention.modules() if hasattr(module, "in_features"))
    batches = [(), (1,), (1, 1)] if coordinates.ndim == 2 else [(1,), (1, 1)]
    counters = [None, *(name for name, each in forward_arguments(attention).items() if type(each.default) is int)]
    has_context = any(name.endswith("_states") for name in required_arguments(attention))
    for repeats, counter, name, width, batch in itertools.product(
        (1, 0) if has_context else (1,), counters, (CAPTURE_ATTENTION, "sdpa"), widths, batches
    ):
        for key_width in widths if takes(attention, "key") else [width]:
            yield Form(name, width, key_width, batch, counter, repeats)
