"""
The modules that make the queries and keys of an attention module, and where their outputs contain the channels that are
rotated later: found by replacing the outputs of all modules inside by numbers, which tell where queries and keys come
from. So projections may have any name, and contain the channels of several heads in any order, of queries, keys and
values together, or of one head of keys that all heads of queries share (multi-head latent attention).
"""

from collections import Counter
from dataclasses import dataclass

import torch
from torch import nn

from .attention_probe import Probe
from .planes import Pairs
from .tables import Tables


# The digits of a number, plus one, are numbers that half types represent exactly.
BASE = 64


@dataclass(frozen=True)
class StateMaker:
    """
    Attributes:
        name: Name of the module inside the attention module.
        call: Which of its calls, from 0, where there are several: one norm may serve queries and then keys.
        is_heads_first: Whether it returns (…, H, N, D), not (…, N, H, D) or (…, N, channels).
        width: Channels of a token, of all heads.
        places: By part (queries, keys, or both), head and plane, the two channels of a token that are rotated.
    """

    name: str
    call: int | None
    is_heads_first: bool
    width: int
    places: tuple[tuple[tuple[tuple[int, int], ...], ...], ...]

    @property
    def heads(self) -> tuple[int, ...]:
        """By part, the number of heads."""
        return tuple(len(part) for part in self.places)


class RotatedChannels(Tables):
    """
    Takes the rotated channels of queries and keys out of what a [`StateMaker`] returns, and puts them back.

    Attributes:
        planes: The planes of a head, in the order in which blocks contain them.
        order: (width,) the channel at every place: those of queries, of keys, then those that are not rotated; heads
            contain planes, whose two channels are neighbours.
        inverse: (width,) the place of every channel.
    """

    def __init__(self, maker: StateMaker, planes: tuple[int, ...]):
        super().__init__()
        self.planes = planes
        self.order: torch.Tensor
        self.follow(maker)

    def follow(self, maker: StateMaker) -> None:
        """Take the channels out of what another module returns, or the same one with other heads."""
        self.maker = maker
        heads = [head for part in maker.places for head in part]
        rotated = [channel for head in heads for plane in self.planes for channel in head[plane]]
        order = torch.tensor(rotated + sorted(set(range(maker.width)) - set(rotated)), device="cpu")  # (width,)
        self.set_tables(order=order, inverse=order.argsort())  # (width,) each

    def take(self, states: torch.Tensor, samples: int, tokens: int) -> tuple[list[torch.Tensor], torch.Tensor]:
        """States → (B, H, N, rotated channels) of queries, of keys or of both, and (B, N, other channels)."""
        states = states.transpose(-3, -2) if self.maker.is_heads_first else states
        ordered = states.reshape(samples, tokens, self.maker.width)  # (B, N, width)
        ordered = ordered.index_select(-1, self.order.to(states.device))
        widths = [2 * len(self.planes) * heads for heads in self.maker.heads]
        *rotated, others = ordered.split([*widths, self.maker.width - sum(widths)], dim=-1)
        return [x.unflatten(-1, (-1, 2 * len(self.planes))).transpose(1, 2) for x in rotated], others

    def put(self, rotated: list[torch.Tensor], others: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """The inverse of `take`: as `states`, with other rotated channels."""
        ordered = torch.cat([*(x.transpose(1, 2).flatten(-2) for x in rotated), others], dim=-1)  # (B, N, width)
        found = ordered.index_select(-1, self.inverse.to(states.device))
        if not self.maker.is_heads_first:
            return found.reshape(states.shape)
        return found.reshape(states.transpose(-3, -2).shape).transpose(-3, -2)


@torch.no_grad()
def find_makers(probe: Probe, pairs: Pairs) -> list[StateMaker]:
    """
    Finds the modules whose outputs become the rotated channels of queries and keys unchanged, or of queries alone if
    another layer makes the keys. Raises `ValueError` if there is none, or if it makes the channels of a token from
    several tokens or several times.
    """
    if probe.has_other_keys():
        raise ValueError(
            f"{probe.name} ({type(probe.attention).__name__}) may attend to other tokens than those of its queries, "
            "whose positions are unknown to blocks; accepted: position_encoding='rope_mixed', and layers whose queries "
            "and keys belong to the same tokens, named in layers."
        )
    numbers, captured = _Numbers(probe), []
    while numbers.digit < numbers.count_digits():
        states = probe.capture(probe.quarter[0], None, numbers.replace)
        captured.append(states[: 1 if probe.layer in probe.tower.sources else 2])
        numbers.digit += 1
        numbers.calls.clear()
    found: dict[tuple[str, int | None, bool, int], list[tuple]] = {}
    channels = torch.tensor(pairs, device="cpu")  # (planes, 2)
    for states in zip(*captured):
        # (1 + digits, H, N, planes, 2)
        with torch.device("cpu"):
            *made, places = numbers.decode(torch.stack([x[0][..., channels] for x in states]))
        found.setdefault(tuple(made), []).append(places)
    makers = [StateMaker(*made, tuple(parts)) for made, parts in found.items()]
    if len({(maker.name, maker.call) for maker in makers}) < len(makers):
        raise numbers.refusal
    return makers


class _Numbers:
    """
    Numbers every value that inner modules return, then calls the attention module once per digit: inner modules
    return ones in call 0, and minus the k-th digit in call k.
    """

    def __init__(self, probe: Probe):
        self.digit, self.total, self.tokens = 0, 0, probe.coordinates.shape[-2]
        # By name of a module and number of its call.
        self.starts: dict[tuple[str, int], tuple[int, tuple[int, ...]]] = {}
        self.calls: Counter[str] = Counter()
        self.pass_later = probe.later_modules
        self.refusal = probe.make_error("makes queries or keys in a way that is unknown")

    def count_digits(self) -> int:
        """With the first call."""
        return 1 if not self.digit else 2 + next(n for n in range(9) if BASE ** (n + 1) > self.total)

    def replace(self, name: str, module: nn.Module, args, output):
        """See [`Replacement`]."""
        passed = self.pass_later(name, module, args, output)
        if passed is not None or not isinstance(output, torch.Tensor) or not output.is_floating_point():
            return passed
        key = (name, self.calls[name])
        self.calls[name] += 1
        if not self.digit:
            self.starts[key] = (self.total, tuple(output.shape))
            self.total += output.numel()
            return torch.ones_like(output)
        start, shape = self.starts[key]
        numbers = torch.arange(start, start + output.numel(), device=output.device)
        return -(numbers // BASE ** (self.digit - 1) % BASE + 1).to(output.dtype).view(shape)

    def decode(self, states: torch.Tensor) -> tuple:
        """(1 + digits, H, N, planes, 2) states of all calls → the fields of a [`StateMaker`], for one part."""
        scale, digits = states[:1], -states[1:] / states[:1] - 1
        # One factor for all channels of a head and token commutes with rotations; NaN fails both.
        has_factor = ((scale / scale[..., :1, :1] - 1).abs() < 1e-3).all()
        if not has_factor or not ((digits - digits.round()).abs() < 0.1).all():
            raise self.refusal
        powers = torch.tensor([BASE**n for n in range(len(digits))]).view(-1, 1, 1, 1, 1)
        numbers = (digits.round().long() * powers).sum(0)  # (H, N, planes, 2)
        for (name, call), (start, shape) in self.starts.items():
            local, count = numbers - start, torch.Size(shape).numel()
            if ((local >= 0) & (local < count)).all():
                return name, call if (name, 1) in self.starts else None, *self._locate(local, shape)
        raise self.refusal

    def _locate(self, local: torch.Tensor, shape: tuple[int, ...]) -> tuple[bool, int, tuple]:
        """Whether heads come first, the width and the places, from (H, N, planes, 2) indices into flattened results."""
        width, tokens = torch.Size(shape).numel() // self.tokens, torch.arange(self.tokens).view(-1, 1, 1)
        last, is_heads_first = shape[-1], False
        places = local % width  # (H, N, planes, 2)
        if not (local // width == tokens).all():
            # (…, H, N, D)
            is_heads_first = True
            places = local // (self.tokens * last) * last + local % last
            if not (local // last % self.tokens == tokens).all():
                raise self.refusal
        if not (places == places[:, :1]).all():
            raise self.refusal
        # Heads of queries may share one of keys.
        heads = torch.unique_consecutive(places[:, 0], dim=0)  # (key heads, planes, 2)
        if heads.unique().numel() != heads.numel() or len(places) % len(heads):
            raise self.refusal
        return is_heads_first, width, tuple(tuple(tuple(pair) for pair in head) for head in heads.tolist())
