"""
Attention modules called alone, for a few tokens and with known cos and sin, to see the queries and keys that they
compute attention with.
"""

import contextlib
import copy
import dataclasses
import functools
import itertools
from collections import UserDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers.modeling_utils import AttentionInterface

from .coordinate_probe import find_positions
from .module_inspection import View, device_of, find_indexers, forward_arguments, is_rotation, required_arguments, takes
from .rope_layout import RopeTower
from .trials import first_that_works


class CapturedStates(Exception):
    """Ends a call of an attention module, with its query and key."""


def capture_states(module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args, **kwargs):
    raise CapturedStates(query.float().cpu(), key.float().cpu())  # 2 × (B, H, N, head_dim)


CAPTURE_ATTENTION = f"capture:{__name__}"
AttentionInterface.register(CAPTURE_ATTENTION, capture_states)


class CaptureFunction(TorchFunctionMode):
    """The same for attention modules that call PyTorch's function themselves."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is nn.functional.scaled_dot_product_attention:
            given = (*args, *(kwargs or {}).values())
            raise CapturedStates(given[0].float().cpu(), given[1].float().cpu())  # 2 × (B, H, N, head_dim)
        return function(*args, **(kwargs or {}))


# Called with the name of a module, and as a forward hook: returns another output, or `None`.
Replacement = Callable[[str, nn.Module, tuple, Any], torch.Tensor | None]


@dataclass
class Probe:
    """
    One attention module of a tower, with the arguments to call it for a few tokens.

    Attributes:
        form: In which form it takes tokens, as soon as that is known.
        memory: By name of a projection inside, its inputs and outputs.
    """

    tower: RopeTower
    layer: int
    form: "Form | None" = None
    memory: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = field(default_factory=dict)

    def __post_init__(self):
        tower, layer = self.tower, self.layer
        self.name, self.attention = tower.attentions[layer]
        self.layout, self.inner_rope = tower.layouts[layer], tower.inner_rope(layer)
        self.options = {} if self.layout.layer_type is None else {"layer_type": self.layout.layer_type}
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
    def is_meta(self) -> bool:
        return any(tensor.is_meta for tensor in (*self.attention.parameters(), *self.attention.buffers()))

    @property
    def quarter(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(…, N, D) cos and sin of an angle of zero, and of one of π/2."""
        ones, zeros = (torch.full(self.coordinates.shape, value, device="cpu") for value in (1.0, 0.0))
        return [(ones, zeros), (zeros, ones)]

    def join(self, cos: torch.Tensor, sin: torch.Tensor):
        """What attention takes as `position_embeddings`, in the type of its weights."""
        dtype = _weight_type(self.attention)
        return torch.complex(cos, sin) if self.layout.is_complex else (cos.to(dtype), sin.to(dtype))

    def capture(
        self,
        cos: torch.Tensor,
        sin: torch.Tensor,
        shared: "SharedStates | None" = None,
        replace: "Replacement | None" = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Query and key, (B, H, N, head_dim) in float32 on the CPU, that attention computes with.

        Args:
            shared: Keys of other attention modules; `None` computes those that this one reads.
            replace: Returns other outputs of the modules inside.

        Raises:
            ValueError: if the attention module cannot be called alone.
        """
        if shared is None:
            shared = SharedStates()
            if self.layer in self.tower.sources:
                Probe.of(self.tower, self.tower.sources[self.layer]).capture(cos, sin, shared)
        return self.call(self.join(cos, sin), shared, replace, cos_sin=True)

    def call(
        self,
        position_embeddings,
        shared: "SharedStates | None" = None,
        replace: "Replacement | None" = None,
        cos_sin: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """
        As `capture`, with anything that attention takes as `position_embeddings`.

        Args:
            cos_sin: Whether a rotary module inside returns `position_embeddings`, not its own output.
        """
        given = position_embeddings, shared, cos_sin
        if self.form is None:
            # Trials that fail would confuse what replaces outputs.
            forms = propose_forms(self.attention, self.coordinates)
            self.form = first_that_works(lambda form: self._call(form, *given) and form, forms)
        captured = first_that_works(lambda form: self._call(form, *given, replace), filter(None, [self.form]))
        if captured is None:
            raise self.make_error("could not be called with a few tokens to see what it rotates")
        return captured

    def _call(
        self, form: "Form", position_embeddings, shared, cos_sin: bool, replace: "Replacement | None" = None
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Query and key that attention computes with for a few tokens, if it does; raises what it raises."""
        handles, attention = [], self.filled if self.is_meta else self.attention
        if replace is not None:
            for name, module in attention.named_modules():
                if name and name != self.inner_rope:
                    handles.append(module.register_forward_hook(partial(replace, name)))
        if self.inner_rope and cos_sin:
            rope = attention.get_submodule(self.inner_rope)
            handles.append(rope.register_forward_hook(lambda module, args, output: _like(position_embeddings, output)))
        try:
            with _remember(attention, self.memory):
                self.call_module(form, attention, position_embeddings, shared)
        except CapturedStates as captured:
            query, key = captured.args
            # Others take dimensions of tokens for those of samples.
            is_fit = query.shape[0] == 1 and query.shape[-2] == self.coordinates.shape[-2]
            return (query, key) if is_fit else None
        finally:
            for handle in handles:
                handle.remove()
        return None

    def call_module(self, form: "Form", module: nn.Module, position_embeddings, shared: "SharedStates | None" = None):
        """What an attention module, or one around it, returns for a few tokens. Raises what it raises."""
        tokens = self.coordinates.shape[-2]
        device, dtype = device_of(module), _weight_type(module)
        is_joined = isinstance(position_embeddings, torch.Tensor)
        parts = [x.to(device) for x in ([position_embeddings] if is_joined else position_embeddings)]
        known = {
            "position_embeddings": parts[0] if is_joined else tuple(parts),
            "cu_seqlens": torch.tensor([0, tokens], dtype=torch.int32, device=device),  # (2,)
            "position_ids": self.arguments[-1].to(device),  # (…, N) or (…, N, A)
            "shared_kv_states": SharedStates() if shared is None else shared,
            # What an indexer chose in another layer.
            "prev_topk_indices": torch.arange(tokens, device=device).expand(1, tokens, tokens),
        }
        if find_indexers(module):
            known["attention_mask"] = torch.zeros(1, 1, tokens, tokens, device=device)
        # Some modules take cos and sin of keys too.
        rotations = {name: known["position_embeddings"] for name in forward_arguments(module) if is_rotation(name)}
        options = {name: value for name, value in known.items() if takes(module, name)} | rotations
        options |= {form.counter: 1} if form.counter else {}
        # Attention modules may make tensors, and the default device is meta during construction.
        with device:
            states, keys = (
                (torch.arange(count * width).float() * 0.7).sin().to(dtype).view(*form.batch, count, width)
                for count, width in ((tokens, form.width), (tokens * form.key_repeats, form.key_width))
            )  # 2 × (…, N, width)
            options |= {name: keys for name in ("key", "value") if takes(module, name)}
            for name in required_arguments(module):
                # Those of an encoder or of tokens before, and no mask.
                options.setdefault(name, keys if name.endswith("_states") else None)
            config = getattr(module, "config", None)
            if config is None:
                return module(states, **options)
            module.config = View(config, _attn_implementation=form.implementation)
            try:
                with CaptureFunction():
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
        self.capture(*self.quarter[0])
        assert self.form is not None
        try:
            Probe(self.tower, self.layer, dataclasses.replace(self.form, key_repeats=2)).capture(*self.quarter[0])
        except ValueError:
            return False
        return True

    @torch.no_grad()
    def rotate_quarter(
        self, replace: "Replacement | None" = None
    ) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
        """Queries and keys, (B · H · N, head_dim) each, by an angle of zero and by one of π/2."""
        (q, k), (rq, rk) = (self.capture(*angle, None, replace) for angle in self.quarter)
        return (q.flatten(0, -2), k.flatten(0, -2)), (rq.flatten(0, -2), rk.flatten(0, -2))

    @functools.cached_property
    @torch.no_grad()
    def later_modules(self) -> "Replacement":
        """What replaces modules that get queries or keys after their rotation (norms): they return what they get."""
        recorded: list[dict[str, list[torch.Tensor]]] = []
        for angle in self.quarter:
            outputs: dict[str, list[torch.Tensor]] = {}

            def record(name, module, args, output, outputs=outputs):
                if isinstance(output, torch.Tensor) and output.is_floating_point():
                    outputs.setdefault(name, []).append(output.float().cpu())

            self.capture(*angle, None, record)
            recorded.append(outputs)
        plain, rotated = recorded
        later = {name for name in plain if any(not torch.equal(*pair) for pair in zip(plain[name], rotated[name]))}
        return lambda name, module, args, output: args[0] if name in later else None


@contextlib.contextmanager
def _remember(attention: nn.Module, memory: dict[str, list[tuple[torch.Tensor, torch.Tensor]]]) -> Iterator[None]:
    """Projections, which take most of the time, compute the outputs of every input once."""
    changed: list[tuple[nn.Module, dict]] = []

    def recall(name, forward, *args, **kwargs):
        if kwargs or len(args) != 1:
            return forward(*args, **kwargs)
        for known, output in memory.setdefault(name, []):
            if known.shape == args[0].shape and torch.equal(known, args[0]):
                return output.clone()
        output = forward(*args)
        memory[name].append((args[0].detach().clone(), output.detach().clone()))
        return output

    for name, module in attention.named_modules():
        if name and hasattr(module, "in_features"):
            own = {"forward": vars(module)["forward"]} if "forward" in vars(module) else {}
            changed.append((module, own))
            module.forward = partial(recall, name, module.forward)
    try:
        yield
    finally:
        for module, own in changed:
            del module.forward
            vars(module).update(own)


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


def fill_values(attention: nn.Module) -> nn.Module:
    """A copy of a module on the meta device with values, distinct in every row of a weight, that take little memory."""
    copied = copy.deepcopy(attention)
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


def _like(position_embeddings, output):
    """cos and sin of the dtype and on the device of those that a rotary module returned."""
    if isinstance(output, torch.Tensor):
        return position_embeddings.to(output)
    return tuple(x.to(y) for x, y in zip(position_embeddings, output))


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
