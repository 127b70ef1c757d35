"""
Which channels any implementation of RoPE rotates, and with which frequencies: found by calling it with known positions,
never by the name of a class. `patching` does so for Transformers models, whose modules say more of themselves.
"""

import contextlib
import copy
import itertools
import math
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .planes import STYLES, Pairs, Planes, channel_pairs


# Positions on one axis, each at most twice the one before, so that angles are known without whole revolutions.
DYADIC = [2.0**power for power in range(-8, 12)]
# The same for modules that count tokens, of tables with 4,096 and with 64 places.
LONG, SHORT = ([2.0**power for power in range(last)] for last in (12, 6))
# How many numbers of a tensor longer sequences may take.
LARGEST = 2**24
# How far the nearest float32 number to a measured frequency may be off, in units of the last place.
NEIGHBOURS = sorted(range(-8, 9), key=abs)

Pairing = str | Sequence[tuple[int, int]] | None
# cos and sin, (layers or 1, heads or 1, N, planes) each, and the two channels of every plane.
Table = tuple[torch.Tensor, torch.Tensor, Pairs]
# One way to call a module: (N, A) positions, and the pairing if it is known, give a table.
Reader = Callable[[torch.Tensor, Pairing], Table]


class Sizes(NamedTuple):
    """Numbers of heads of the attention, see [`LieRotaryEmbedding`]."""

    heads: int
    key_heads: int
    head_dim: int
    axes: int
    layers: int


class NotARotation(ValueError):
    """The reason why a module that can be called does not rotate by angles Σ_a p_a ω_a."""


class DependsOnLength(NotARotation):
    """The module rotates as it should at one length and not at others: other calls need not be tried."""


class TensorSizes(TorchDispatchMode):
    """Records the size of the largest tensor that is created in this context."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.largest = max([self.largest, *(x.numel() for x in tree_leaves(result) if isinstance(x, torch.Tensor))])
        return result


@torch.no_grad()
def find_planes(module: Callable, sizes: Sizes, pairing: Pairing) -> tuple[Planes, bool]:
    """
    The planes of a module, and whether their frequencies in float32 give the bits of its angles, which it rounds to
    that; see [`LieRotaryEmbedding.like`]. Raises `ValueError` if the module cannot be called, or does not rotate pairs
    of channels by Σ_a p_a ω_a.
    """
    if pairing is not None:
        channel_pairs(pairing, sizes.head_dim, None)
    # Neither its state nor its caches change, and nothing is drawn.
    own = copy_module(module, {})
    own = own.eval().cpu() if isinstance(own, nn.Module) else own
    reason: object = None
    for steps, read in _propose_readers(own, sizes):
        try:
            return _measure(torch.tensor(steps), read, sizes, pairing)
        except DependsOnLength as error:
            reason = error
            break
        except NotARotation as error:
            # Later ways to call it may take rotated states for a table.
            reason = reason or error
        except Exception:
            # With other arguments than those of its user, code of any kind fails in any way.
            continue
    name = type(module).__name__ if isinstance(module, nn.Module) else getattr(module, "__name__", "the function")
    raise ValueError(
        f"The rotations of {name} with head_dim={sizes.head_dim} and {sizes.axes} axes were not found: "
        f"{reason or 'it could not be called'}. "
        "Accepted are (query, key, positions), (states, positions), (positions) and timm's get_embed; pass a function "
        "of the first kind around others, or frequencies and pairing."
    )


def _measure(steps: torch.Tensor, read: Reader, sizes: Sizes, pairing: Pairing) -> tuple[Planes, bool]:
    """With (T,) ascending positions on an axis. Raises [`NotARotation`] unless angles are Σ_a p_a ω_a at any length."""
    along = [torch.eye(sizes.axes)[axis] * steps.unsqueeze(-1) for axis in range(sizes.axes)]  # (T, A) each
    drawn = torch.rand(63, sizes.axes, generator=torch.Generator().manual_seed(0)) * min(16, steps[-1])
    drawn = drawn.floor() if steps[0] >= 1 else drawn
    positions = torch.cat([torch.zeros(1, sizes.axes), *along, drawn])
    order = positions.amax(1).argsort(stable=True)
    positions, place = positions[order], order.argsort()
    *measured, pairs = read(positions, pairing)  # 2 × (layers, heads, N, planes)
    if (measured[0][:, :, 0] != 1).any() or measured[1][:, :, 0].any():
        raise NotARotation("it does not leave states at position 0 as they are, and positions must be its coordinates")
    found = []
    for axis in range(sizes.axes):
        cos, sin = (x[:, :, place[1 + axis * len(steps) :][: len(steps)]] for x in measured)
        angles = torch.atan2(sin.double(), cos.double())  # (layers, heads, T, planes)
        frequency = angles[:, :, 0] / steps[0]
        for step, angle in zip(steps.double(), angles.unbind(2)):
            revolutions = ((frequency * step - angle) / (2 * math.pi)).round()
            frequency = (angle + 2 * math.pi * revolutions) / step
        found.append((frequency, _to_float32(frequency, steps, cos, sin)))
    exact, rounded = (torch.stack(values) for values in zip(*found))  # (A, layers, heads, planes) each
    if unused := (exact.flatten(1).abs().amax(1) == 0).nonzero().flatten().tolist():
        raise NotARotation(f"it does not rotate with axis {unused[0]}")
    near = place[-len(drawn) :]
    # Sums in the order of the axes: (layers, heads, N, planes).
    sums: Any = sum(p[:, None] * f.unsqueeze(-2) for p, f in zip(drawn.unbind(-1), rounded))
    same = torch.cat([(x == y[:, :, near]).flatten() for x, y in zip((sums.cos(), sums.sin()), measured)])
    planes = Planes(exact, pairs)
    _check_angles(positions, measured, planes, steps[-1])
    _check_lengths(read, positions, measured, planes, steps[-1], sizes)
    # A processor may round differently at the end of a row.
    is_rounded = same.float().mean().item() > 0.99
    frequencies = rounded.double() if is_rounded else exact
    # Equal layers and heads may share parameters.
    for dim in (1, 2):
        first = frequencies.narrow(dim, 0, 1)
        frequencies = first if (frequencies == first).all() else frequencies
    return replace(planes, frequencies=frequencies), is_rounded


def _to_float32(frequency: torch.Tensor, steps: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The float32 number near a frequency whose cos and sin at most steps have the measured bits."""
    nearest = frequency.float()  # (layers, heads, planes)
    candidates = torch.stack([(nearest.view(torch.int32) + offset).view(torch.float32) for offset in NEIGHBOURS])
    candidates = candidates.where(nearest != 0, nearest)  # (neighbours, layers, heads, planes)
    angles = candidates.unsqueeze(-2) * steps.unsqueeze(-1)  # (neighbours, layers, heads, T, planes)
    same = ((angles.cos() == cos).float() + (angles.sin() == sin)).sum(-2)  # (neighbours, layers, heads, planes)
    return candidates.gather(0, same.argmax(0, keepdim=True)).squeeze(0)


def _check_angles(
    positions: torch.Tensor, measured: Sequence[torch.Tensor], planes: Planes, last: torch.Tensor
) -> None:
    magnitudes = planes.frequencies.abs()
    angles, size = (x.angles(positions.double()) for x in (planes, replace(planes, frequencies=magnitudes + 1 / last)))
    # Products in float32, and frequencies that follow from cos and sin at the last step.
    tolerance = 1e-5 * max(1.0, magnitudes.max().item()) + 2.0**-20 * size
    if not all(((x - y).abs() <= tolerance).all() for x, y in zip((angles.cos(), angles.sin()), measured)):
        raise NotARotation("its angles are not sums of coordinates times frequencies")


def _check_lengths(
    read: Reader, positions: torch.Tensor, table: Sequence, planes: Planes, last: torch.Tensor, sizes: Sizes
) -> None:
    """
    Read ascending positions again: beside further ones, as far as the module takes these, without the last of them,
    and among more tokens. Raises [`NotARotation`] if they are rotated otherwise then.
    """

    def compare(tokens: int, count: int) -> None:
        # As a size of the states, the number of tokens would be ambiguous.
        tokens = next(number for number in itertools.count(tokens) if number not in sizes)
        index = torch.arange(tokens) * count // tokens
        found = _try_to_read(read, positions[index], planes.pairs)
        if found and not all((x - y[:, :, index]).abs().max() <= 1e-5 for x, y in zip(found[:2], table)):
            raise DependsOnLength(
                f"positions up to {positions[count - 1].max():g} among {tokens} tokens are rotated otherwise than in "
                f"sequences up to {positions.max():g}, and frequencies that depend on the length (dynamic, longrope) "
                "cannot be followed; pass those of one length as frequencies"
            )

    with TensorSizes() as made:
        # float32 counts to 2²⁴.
        for power in range(int(positions.max()).bit_length(), 25):
            further = torch.cat([positions, torch.full_like(positions[:1], 2.0**power)])
            longer = _try_to_read(read, further, planes.pairs)
            if longer is None:
                break
            table, positions = longer, further
            if made.largest > LARGEST:
                break
    longest = positions.amax(1)  # (N,)
    for count in sorted({int((longest <= 4.0**power).sum()) for power in range(-4, 13)} - {0, 1}):
        compare(count, count)
    _check_angles(positions, table[:2], planes, last)
    compare(len(positions) + LARGEST // 4 // (sizes.heads * sizes.head_dim), len(positions))


def _try_to_read(read: Reader, positions: torch.Tensor, pairs: Pairing) -> Table | None:
    """Returns `None` if the table of the module is too short."""
    try:
        return read(positions, pairs)
    except NotARotation:
        raise
    except Exception:
        return None


def _propose_readers(module: Any, sizes: Sizes) -> Iterator[tuple[list[float], Reader]]:
    """Positions on one axis that a module may take, ascending, and a way to call it."""
    if hasattr(module, "get_embed"):
        yield _read_grid(module, sizes)
        return
    one_axis: list[Callable] = [lambda p: p[None, :, 0], lambda p: p[:, 0]] if sizes.axes == 1 else []
    shapes: list[Callable] = [lambda p: p.unsqueeze(0), lambda p: p, *one_axis]
    layouts: list[Callable] = [lambda x: x, lambda x: x.transpose(1, 2), lambda x: x[0].transpose(0, 1)]
    styles = [(DYADIC, torch.float32), (LONG, torch.float32), (LONG, torch.int64), (SHORT, torch.int64)]
    calls = [(layouts[0], "positions"), *itertools.product(layouts, ("query and key", "key", "torchtune"))]
    for (steps, dtype), shape, (layout, form) in itertools.product(styles, shapes, calls):
        yield steps, _Call(module, sizes, shape, dtype, layout, form).read


# What a module is called with.
_FORMS: dict[str, Callable] = {
    "positions": lambda module, query, key, positions: module(positions),
    "query and key": lambda module, query, key, positions: module(query, key, positions),
    "key": lambda module, query, key, positions: module(key, positions),
    "torchtune": lambda module, query, key, positions: module(key, input_pos=positions),
}


class _Call(NamedTuple):
    """A form of a module's arguments, one of [`_FORMS`]: of (N, A) positions, and of (1, H, N, head_dim) states."""

    module: Callable
    sizes: Sizes
    shape: Callable
    dtype: torch.dtype
    layout: Callable
    form: str

    def read(self, positions: torch.Tensor, pairing: Pairing) -> Table:
        """A [`Reader`] of a module that rotates states, or makes a table."""
        tokens, width = len(positions), self.sizes.head_dim
        result = self._rotate(torch.zeros(tokens, width), positions)
        is_table = not isinstance(result, torch.Tensor) or result.shape[-2:] != (tokens, width) or result.is_complex()
        if self.form == "positions" or is_table:
            return _read_table(result, tokens, self.sizes, pairing)
        # Distinct on all axes, and whole numbers, which every module takes.
        place = torch.arange(1.0, self.sizes.axes + 1).expand(width, self.sizes.axes)
        columns = self._rotate(torch.eye(width), place)[0]  # (H, D, D): R e_c by head and c
        others = columns.masked_fill(torch.eye(width, dtype=torch.bool), 0).abs().amax(0)  # (D, D)
        pairs = [(c, int(others[c].argmax())) for c in range(width) if others[c].any()]
        pairs = [(c, d) for c, d in pairs if c < d and (d, c) in pairs and others[c].count_nonzero() == 1]
        if not pairs or 2 * len(pairs) < others.any(1).sum():
            raise NotARotation("it does not rotate every channel with one other")
        first, second = (list(channels) for channels in zip(*pairs))
        states = torch.zeros(tokens, width)
        states[:, first] = 1
        rotated = self._rotate(states, positions)  # (1, H, N, D)
        return rotated[..., first], rotated[..., second], tuple(pairs)

    def _rotate(self, states: torch.Tensor, positions: torch.Tensor) -> Any:
        """
        (1, H, N, head_dim) rotated states of the key heads, or whatever else the module returns, for the (N, head_dim)
        states of every head.
        """
        heads = self.sizes.heads, self.sizes.key_heads
        query, key = (self.layout(states.expand(1, count, *states.shape)).clone() for count in heads)
        result = _FORMS[self.form](copy_module(self.module, {}), query, key, self.shape(positions.to(self.dtype)))
        rotated_query, rotated = result[:2] if self.form == "query and key" else (None, result)
        if not isinstance(rotated, torch.Tensor) or rotated.shape != key.shape:
            return result
        rotated = self._restore(rotated)
        if isinstance(rotated_query, torch.Tensor) and rotated_query.shape == query.shape:
            expected = rotated.repeat_interleave(self.sizes.heads // self.sizes.key_heads, dim=1)  # (1, H, N, head_dim)
            found = self._restore(rotated_query)
            if found.shape == expected.shape and not torch.allclose(found, expected, rtol=0, atol=1e-5):
                raise NotARotation("it changes queries in another way than the keys that they attend to")
        return rotated

    def _restore(self, states: torch.Tensor) -> torch.Tensor:
        """(1, H, N, head_dim) of states in the layout of the module."""
        return states.transpose(0, 1).unsqueeze(0) if states.ndim == 3 else self.layout(states)


def _read_grid(module: Any, sizes: Sizes) -> tuple[list[float], Reader]:
    """timm's tables of a grid, whose positions are indices of patches."""
    known = getattr(module, "feat_shape", None) or getattr(module, "ref_feat_shape", None)
    first = tuple(known or [64 if sizes.axes <= 2 else 16] * sizes.axes)
    steps = [step for step in LONG if step < min(first)]

    def read(positions: torch.Tensor, pairing: Pairing) -> Table:
        # A module without a shape of its own makes any.
        shape = first if known else (2 ** int(positions.max() + 1).bit_length(),) * sizes.axes
        if positions.max() >= min(4 * max(first), max(shape)):
            raise IndexError(f"{positions.max():g} is beyond a grid of {first}")
        places = torch.zeros(len(positions), dtype=torch.long)
        for size, index in zip(shape, positions.long().unbind(-1)):
            places = places * size + index
        cos, sin, pairs = _read_table(copy_module(module, {}).get_embed(shape), math.prod(shape), sizes, pairing)
        return cos[:, :, places], sin[:, :, places], pairs

    return steps, read


def _read_table(result: Any, tokens: int, sizes: Sizes, pairing: Pairing) -> Table:
    """
    Builds a table from what a module returns for tokens from position 0: cos and sin (in either order, or
    concatenated), complex numbers, or angles.
    """
    is_complex = isinstance(result, torch.Tensor) and result.is_complex()
    if is_complex:
        cos, sin = result.real, result.imag
    elif not isinstance(result, torch.Tensor):
        cos, sin = result
        cos, sin = (sin, cos) if cos.reshape(-1)[0] == 0 else (cos, sin)
    elif result.shape[-1] == 2 * sizes.head_dim:
        # timm.
        sin, cos = result.chunk(2, dim=-1)
    else:
        cos, sin = result.cos(), result.sin()
    cos, sin = (_arrange(x, tokens, sizes) for x in (cos, sin))  # (layers, heads, N, D or D/2) each
    if 2 * cos.shape[-1] != sizes.head_dim:
        pairs = _pair_equal_columns(torch.cat([cos, sin], dim=-2).flatten(0, 2), pairing)
        first = [channel for channel, _ in pairs]
        return cos[..., first], sin[..., first], pairs
    if pairing is None and not is_complex:
        raise NotARotation("cos and sin of half the channels do not show which two a plane has, pass pairing")
    return cos, sin, channel_pairs(pairing or "adjacent", sizes.head_dim, cos.shape[-1])


def _arrange(values: torch.Tensor, tokens: int, sizes: Sizes) -> torch.Tensor:
    """Cos or sin of some shape → (layers or 1, heads or 1, N, channels), float32."""
    values = values.squeeze().float().cpu()
    if values.ndim == 3 and values.shape[0] == tokens:
        values = values.transpose(0, 1)
    if values.shape[-2] != tokens or values.shape[-1] > sizes.head_dim:
        raise NotARotation(f"its cos and sin have the shape {tuple(values.shape)}, for {tokens} tokens")
    while values.ndim < 4:
        values = values.unsqueeze(1 if values.ndim == 3 and values.shape[0] != sizes.key_heads else 0)
    if values.shape[0] not in (1, sizes.layers) or values.shape[1] not in (1, sizes.key_heads):
        raise NotARotation(
            f"it rotates {values.shape[0]} layers of {values.shape[1]} heads, but num_layers={sizes.layers} and "
            f"num_key_value_heads={sizes.key_heads}"
        )
    return values


def _pair_equal_columns(table: torch.Tensor, pairing: Pairing) -> Pairs:
    """The channels of every plane, from a (rows, channels) table in which both have the same values."""
    width = table.shape[-1]
    _, group, counts = table.unique(dim=1, return_inverse=True, return_counts=True)  # (channels,), (groups,)
    if pairing is None and (counts == 2).all():
        return tuple(sorted(map(tuple, group.argsort(stable=True).view(-1, 2).tolist())))
    # Planes of equal frequencies.
    names = STYLES if pairing is None else (pairing,)
    proposed = (channel_pairs(name, width, width // 2 if isinstance(name, str) else None) for name in names)
    fitting = [pairs for pairs in proposed if all(torch.equal(table[:, c], table[:, d]) for c, d in pairs)]
    if len(fitting) != 1:
        raise NotARotation("which two channels a plane has does not follow from its cos and sin, pass pairing")
    return fitting[0]


def copy_module(value: Any, memo: dict[int, Any]) -> Any:
    """A copy that shares no state: of a function, also of what it closes over and of the globals that it names."""
    if id(value) in memo:
        return memo[id(value)]
    if not isinstance(value, types.FunctionType):
        try:
            return copy.deepcopy(value, memo)
        except Exception:
            # Modules of Python, locks, open files.
            return value
    scope, cells = dict(value.__globals__), tuple(types.CellType() for _ in value.__closure__ or ())
    memo[id(value)] = copied = types.FunctionType(value.__code__, scope, value.__name__, value.__defaults__, cells)
    copied.__kwdefaults__ = value.__kwdefaults__
    for name in _names(value.__code__) & scope.keys():
        scope[name] = _copy_used(scope[name], memo)
    for cell, own in zip(cells, value.__closure__ or ()):
        with contextlib.suppress(ValueError):
            # An empty cell has no contents.
            cell.cell_contents = _copy_used(own.cell_contents, memo)
    return copied


def _names(code: types.CodeType) -> set[str]:
    return set(code.co_names).union(*(_names(x) for x in code.co_consts if isinstance(x, types.CodeType)))


def _copy_used(value: Any, memo: dict[int, Any]) -> Any:
    """Copies a module and shares its large weights, for functions that call a part of a whole model."""
    weights = value.parameters() if isinstance(value, nn.Module) else ()
    memo.update({id(weight): weight for weight in weights if weight.numel() > 2**20})
    return copy_module(value, memo)
