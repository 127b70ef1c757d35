"""The planes of a rotation of positions: which two channels turn together, along which axis and how fast."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch


# How the channels of plane i of K lie in a head: i and i + K (GPT-NeoX, Llama), or 2i and 2i + 1 (GPT-J, diffusers).
STYLES = ("halves", "adjacent")
# By plane, the two channels (c, d) of a head that it turns: c to c·cos − d·sin.
Pairs: TypeAlias = tuple[tuple[int, int], ...]


@dataclass(frozen=True, eq=False)
class Planes:
    """
    The planes of RoPE: plane i of a head turns by the angle Σ_a p_a ω_ai.

    Attributes:
        frequencies: (A, layers or 1, heads or 1, planes) ω in float64, radians per unit of a coordinate.
        pairs: The channels of a head that each plane turns; `None` if unknown.
        factor: By which cos and sin are multiplied.
        axes: By plane, the one axis along which it turns, 0 for planes that do not turn; empty if a plane turns along
            several, or those of layers or heads differ.
        speeds: By plane, its frequency on this axis.
    """

    frequencies: torch.Tensor
    pairs: Pairs | None
    factor: float = 1.0
    # Numbers, which compiled graphs contain.
    axes: tuple[int, ...] = field(init=False, default=())
    speeds: tuple[float, ...] = field(init=False, default=())

    def __post_init__(self) -> None:
        values = self.frequencies.detach().double().cpu()  # (A, layers or 1, heads or 1, planes)
        object.__setattr__(self, "frequencies", values)
        if values.shape[1:3] == (1, 1) and ((values != 0).sum(0) <= 1).all():
            object.__setattr__(self, "axes", tuple((values != 0).int().argmax(0).flatten().tolist()))
            object.__setattr__(self, "speeds", tuple(values.sum(0).flatten().tolist()))

    @classmethod
    def from_pairing(
        cls,
        speeds: Sequence[float] | torch.Tensor,
        axes: Sequence[int],
        pairing: str | Pairs | None,
        num_axes: int | None = None,
        factor: float = 1.0,
    ) -> "Planes":
        """Planes that turn along one axis each, with a style of [`pair_channels`], or the channels of each plane."""
        values = torch.as_tensor(speeds, dtype=torch.float64, device="cpu")  # (planes,)
        every_axis = torch.arange(num_axes or max(axes) + 1, device="cpu").unsqueeze(-1)  # (A, 1)
        serves = torch.tensor(axes, device="cpu") == every_axis  # (A, planes)
        pairs = pair_channels(pairing, len(values)) if isinstance(pairing, str) else pairing
        return cls((serves * values)[:, None, None], pairs, factor)

    @property
    def num_axes(self) -> int:
        return len(self.frequencies)

    @property
    def num_planes(self) -> int:
        return self.frequencies.shape[-1]

    @property
    def turning(self) -> list[int]:
        """The planes that turn."""
        return [plane for plane, speed in enumerate(self.speeds) if speed]

    @property
    def first_channel(self) -> int:
        """The first channel of a head that turns."""
        return min(min(pair) for pair in self.pairs or ((0, 0),))

    @property
    def style(self) -> str | None:
        """How the two channels of a plane lie in a head: one of `STYLES`, "other", or unknown."""
        fitting = (s for s in STYLES if self.pairs == pair_channels(s, self.num_planes, self.first_channel))
        return None if self.pairs is None else next(fitting, "other")

    def angles(self, positions: torch.Tensor) -> torch.Tensor:
        """(…, N, A) positions → (…, layers or 1, heads or 1, N, planes) angles."""
        return torch.einsum("...na,alhp->...lhnp", positions, self.frequencies.to(positions))


def pair_channels(style: str, count: int, start: int = 0) -> Pairs:
    """The two channels of each of `count` planes, from the channel `start` of a head; `style`: one of `STYLES`."""
    if style == "halves":
        return tuple((start + i, start + i + count) for i in range(count))
    return tuple((start + 2 * i, start + 2 * i + 1) for i in range(count))


def channel_pairs(pairing: str | Sequence[tuple[int, int]], head_dim: int, planes: int | None) -> Pairs:
    """
    The two channels (c, d) of so many planes, by default as many as there are channels for; see [`LieRotaryEmbedding`].
    Raises `ValueError` if `pairing` is unknown, names a channel twice or one that does not exist, or has another number
    of planes.
    """
    if not isinstance(pairing, str):
        pairs = tuple((int(first), int(second)) for first, second in pairing)
    elif pairing in STYLES:
        pairs = pair_channels(pairing, head_dim // 2 if planes is None else planes)
    else:
        raise ValueError(f"pairing={pairing!r}: accepted are adjacent, halves, or a list of two channels a plane.")
    channels = [channel for pair in pairs for channel in pair]
    if len(set(channels)) < len(channels) or not set(channels) <= set(range(head_dim)):
        raise ValueError(
            f"pairing of {len(pairs)} planes, {list(pairs[:4])} …, must name channels from 0 to {head_dim - 1}, each "
            "once at most."
        )
    if planes not in (None, len(pairs)):
        raise ValueError(f"frequencies are of {planes} planes, and pairing names the channels of {len(pairs)}.")
    return pairs
