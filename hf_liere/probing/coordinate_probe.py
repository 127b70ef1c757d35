"""
Rotary modules: modules with frequencies that return cos and sin of positions, or the complex numbers cos + i sin. A
copy with other frequencies shows the coordinates that a rotary module multiplies with them.
"""

import contextlib
import copy
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

import torch
from torch import nn

from .module_inspection import forward_arguments, takes
from .tables import Tables


# sin(x) is x in every floating point type for angles this small: with this frequency, sin is the coordinate itself.
UNIT = 2.0**-60
# The α of LeRoPE, whose planes rotate with ω exp(α): a parameter, and before transformers 5.24 a buffer.
LOG_FACTORS = "alpha"
TOKENS = 7

# (…, N, D) cos and sin, or cos + i sin.
Turn: TypeAlias = tuple[torch.Tensor, torch.Tensor] | torch.Tensor


class CoordinateProbe(Tables):
    """
    A copy of a rotary module whose frequencies are [`UNIT`]: for every channel it returns the coordinate of its axis,
    exactly as the rotary module multiplies it with frequencies. Half types would round the unit to zero.
    """

    def __init__(self, rope: nn.Module):
        super().__init__()
        copied = replace_frequencies(rope, lambda values: torch.full_like(values, UNIT), neutral_factor=True)
        self.set_tables(**copied._buffers)
        # Not a module inside this one, but with its buffers.
        vars(copied)["_buffers"], self.hidden = self._buffers, (copied,)
        self.states_name = next(iter(forward_arguments(rope)))

    def train(self, mode: bool = True) -> "CoordinateProbe":
        self.hidden[0].train(mode)
        return super().train(mode)

    def forward(self, *arguments, **options) -> torch.Tensor:
        """The arguments of the rotary module → (…, N, D) coordinates, without a gradient, float32."""
        if self.states_name in options:
            options = dict(options)
            arguments = (options.pop(self.states_name), *arguments)
        states, *arguments = arguments
        # Rotary modules read only the dtype, shape and device of their first argument, and return its dtype.
        if states.dtype != torch.float32:
            states = torch.empty((), dtype=torch.float32, device=states.device).expand(states.shape)
        for name, buffer in self._buffers.items():
            if buffer.device != states.device:
                self._buffers[name] = buffer.to(states.device)
        # Frameworks may have replaced `forward` on the instance that was copied.
        (copied,) = self.hidden
        _, sin = split_cos_sin(type(copied).forward(copied, states, *arguments, **options))  # (…, N, D)
        return sin.float() * (1 / UNIT)


def replace_frequencies(
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
        elif name == "rope_type":
            state[name] = _fix_frequencies(state[name])
    for name in ("forward", "_hf_hook", "_old_forward"):
        state.pop(name, None)
    state["_parameters"], state["_modules"] = {}, {}
    shapes = {name: values.shape for name, values in _values(rope).items()}
    blank = {name: torch.zeros(shape, dtype=torch.float32, device="cpu") for name, shape in shapes.items()}
    state["_buffers"] = {name: value(values) for name, values in blank.items() if name.endswith("inv_freq")}
    if LOG_FACTORS in blank:
        state["_buffers"][LOG_FACTORS] = blank[LOG_FACTORS] + (0.0 if neutral_factor else 0.5)
    state["_non_persistent_buffers_set"] = set(state["_buffers"])
    return copied.eval()


def _fix_frequencies(rope_type):
    """The type, or the types by type of layers, for a copy that does not compute its frequencies again."""
    if isinstance(rope_type, dict):
        return {name: _fix_frequencies(kind) for name, kind in rope_type.items()}
    return "default" if changes_frequencies(rope_type) else rope_type


def changes_frequencies(rope_type) -> bool:
    """Whether a rotary module of this type computes other frequencies for longer inputs."""
    return isinstance(rope_type, str) and ("dynamic" in rope_type or rope_type == "longrope")


def split_cos_sin(output: Turn) -> tuple[torch.Tensor, torch.Tensor]:
    """(…, N, D) cos and sin that a rotary module returns, also as complex numbers cos + i sin."""
    if isinstance(output, torch.Tensor):
        return output.real, output.imag
    cos, sin = output
    return cos, sin


def compute_cos_sin(rope: nn.Module, *arguments, **options) -> tuple[torch.Tensor, torch.Tensor]:
    """(N, D) cos and sin that the class of a rotary module returns; frameworks replace `forward` of the instance."""
    cos, sin = split_cos_sin(type(rope).forward(rope, *arguments, **options))
    return cos.flatten(0, -2), sin.flatten(0, -2)


def frequency_buffers(module: nn.Module) -> list[str]:
    """Names of the frequencies that a module multiplies positions with, without its copies of the original ones."""
    return [name for name in module._buffers if name.endswith("inv_freq") and "original" not in name]


def read_frequencies(rope: nn.Module, buffer: str, device: torch.device | None = None) -> torch.Tensor:
    """The frequencies of a rotary module, as it computes them: in float32, or float64."""
    given = _values(rope)
    found = [given[name] for name in (buffer, LOG_FACTORS) if name in given]
    values, *alpha = (x.to(device=device, dtype=torch.promote_types(x.dtype, torch.float32)) for x in found)
    return values * alpha[0].exp() if alpha else values


def _values(rope: nn.Module) -> dict[str, torch.Tensor]:
    """Buffers and parameters of a rotary module."""
    return {name: value for name, value in {**rope._buffers, **rope._parameters}.items() if value is not None}


def first_that_works(call: Callable[[Any], Any], ways: Iterable) -> Any:
    """
    Tries ways to call in order, and returns the first result that is not `None` and does not raise; else `None`.
    Foreign code may raise anything when it is called with unexpected arguments.
    """
    for way in ways:
        with contextlib.suppress(Exception):
            if (result := call(way)) is not None:
                return result
    return None


def find_positions(rope: nn.Module, options: dict, refusal: ValueError) -> tuple[tuple, torch.Tensor]:
    """Arguments with positions in a form that a rotary module takes, and its (…, N, D) coordinates for them."""
    probe = CoordinateProbe(rope)

    def read(proposal):
        arguments, shapes = proposal
        coordinates = probe(*arguments, **options)
        is_fit = tuple(coordinates.shape[:-1]) in shapes and coordinates.isfinite().all()
        return (arguments, coordinates) if is_fit else None

    found = first_that_works(read, _propose_arguments(rope))
    if found is None:
        raise refusal
    return found


def _propose_arguments(rope: nn.Module) -> Iterator[tuple[tuple, tuple[tuple[int, ...], ...]]]:
    """Arguments in the forms in which models pass positions, and shapes of tokens of which one must result."""
    if not takes(rope, "position_ids"):
        if (patch := getattr(getattr(rope, "config", None), "patch_size", None)) is not None and len(
            forward_arguments(rope)
        ) == 1:
            rows, columns = patch if isinstance(patch, (list, tuple)) else (patch, patch)
            yield (torch.zeros(1, 3, 2 * rows, 3 * columns, dtype=torch.float32),), ((6,),)
        return
    states = torch.zeros(1, 1, dtype=torch.float32)
    # Distinct for all tokens and axes: (3, N).
    positions = torch.arange(1, 3 * TOKENS + 1).view(3, TOKENS) * 5 % 23
    samples, packed = ((1, TOKENS),), ((TOKENS,), (1, TOKENS))
    yield (states, positions.unsqueeze(1)), samples
    # Modules of two axes would also take three.
    for axes in (2, 3):
        yield (states, positions[:axes].T.unsqueeze(0)), samples
        yield (states, positions[:axes].T), packed
    yield (states, positions[:1]), samples
