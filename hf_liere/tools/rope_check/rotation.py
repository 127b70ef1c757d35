"""A rotary position embedding in float64, right or with the faults that implementations have."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...probing.planes import Planes
from .spectrum import compute_spectrum


STATES = ("query", "key")
# Styles of planes, as users read them.
STYLE_NAMES = {"halves": "halves", "adjacent": "adjacent pairs"}
# What a file says of a rotation beside its tensors.
DESCRIBED = "name num_axes axes channels factor pairs head_dim law frequency_of_plane longest".split()


@dataclass(frozen=True)
class Rotation:
    """
    One rotation of a model.

    Attributes:
        name: The rotary module, and the type of its layers after a colon where it serves several.
        planes: What turns; axes are columns of the positions.
        channels: By channel of cos and sin, its plane.
        head_dim: Channels of a head; `None` if unknown.
        frequency_of_plane: By plane, the index of its frequency in the spectrum of the law.
        law: The formula of the frequencies, see [`compute_spectrum`]; `None` if they follow none.
        longest: The largest position that the model is made for.
        sign: −1 for an implementation whose sin has the opposite sign.
        state_sign: −1 for one that applies sin with the opposite sign.
        offset: What an implementation adds to positions.
        frequency_dtype, position_dtype, phase_dtype, output_dtype: The types to which an implementation rounds; the
            output is cos and sin.
        unrotated: The states that an implementation leaves as they are.
    """

    name: str
    planes: Planes
    channels: tuple[int, ...]
    head_dim: int | None
    frequency_of_plane: tuple[int, ...]
    law: Mapping[str, Any] | None = None
    longest: float = 0.0
    sign: int = 1
    state_sign: int = 1
    offset: float = 0.0
    frequency_dtype: torch.dtype = torch.float64
    position_dtype: torch.dtype = torch.float64
    phase_dtype: torch.dtype = torch.float64
    output_dtype: torch.dtype = torch.float64
    unrotated: tuple[str, ...] = ()

    @property
    def frequencies(self) -> torch.Tensor:
        """(planes,) ω in float64."""
        return torch.tensor(self.planes.speeds, dtype=torch.float64)

    @property
    def columns(self) -> list[int]:
        """By plane, its first column of cos and sin."""
        return [self.channels.index(plane) for plane in range(self.planes.num_planes)]

    def compute_law(self, **fields: Any) -> torch.Tensor:
        """(planes,) frequencies of the law, with other fields of it."""
        return compute_spectrum({**(self.law or {}), **fields})[0][list(self.frequency_of_plane)]

    def compute_angles(self, positions: torch.Tensor) -> torch.Tensor:
        """(N, A) positions → (N, planes) angles in radians, float64."""
        positions = _round(positions.double() + self.offset, self.position_dtype)
        planes = replace(self.planes, frequencies=_round(self.planes.frequencies, self.frequency_dtype))
        return _round(planes.angles(positions)[0, 0], self.phase_dtype)

    def compute(self, positions: torch.Tensor, states: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """
        `cos` and `sin`, (N, D) in the layout of the model, at (N, A) positions; if the pairs are known, `rotated_query`
        and `rotated_key`, (N, head_dim), of those states that are given by name.
        """
        cos, sin = self._turn(self.compute_angles(positions))  # (N, planes) each
        channels = list(self.channels)
        tensors = {"cos": cos[:, channels], "sin": sin[:, channels]}
        turn = self.state_sign * sin  # (N, planes)
        for name in states if self.planes.pairs else ():
            tensors[f"rotated_{name}"] = rotated = states[name].double().clone()  # (N, head_dim)
            if name not in self.unrotated:
                x, y = self.split(rotated)  # 2 × (N, planes)
                first, second = zip(*self.planes.pairs or ())
                rotated[:, first], rotated[:, second] = x * cos - y * turn, x * turn + y * cos
        return tensors

    def split(self, states: torch.Tensor) -> Iterable[torch.Tensor]:
        """(N, head_dim) states → (N, planes) of the first channels of the planes, and of the second ones, float64."""
        return (states[:, list(channels)].double() for channels in zip(*self.planes.pairs or ()))

    def _turn(self, angles: torch.Tensor) -> torch.Tensor:
        """(N, planes) angles → (2, N, planes) cos and sin, times the factor."""
        return _round(self.planes.factor * torch.stack([angles.cos(), self.sign * angles.sin()]), self.output_dtype)

    def compute_noise(self, positions: torch.Tensor, relative: float) -> torch.Tensor:
        """
        (N, planes) radians by which planes may turn otherwise where frequencies have this relative error: values near
        the middle of two numbers of a half type round either way.
        """
        angles = self.compute_angles(positions)
        noise = relative * angles.abs()
        if {self.frequency_dtype, self.position_dtype, self.phase_dtype, self.output_dtype} == {torch.float64}:
            return noise
        for scale in (1 - relative, 1 + relative):
            moved = self.with_planes(frequencies=scale * self.planes.frequencies).compute_angles(positions)
            noise = noise.maximum((moved - angles).abs())
            if self.output_dtype != torch.float64:
                noise = noise.maximum((self._turn(moved) - self._turn(angles)).norm(dim=0) / self.planes.factor)
        return noise

    def turning_by(self, frequencies: torch.Tensor, axes: Sequence[int] | None = None, **fields: Any) -> "Rotation":
        """The same with other (planes,) frequencies, axes and fields."""
        old = self.planes
        planes = Planes.from_pairing(frequencies, axes or old.axes, old.pairs, old.num_axes, old.factor)
        return replace(self, planes=planes, **fields)

    def with_planes(self, **fields: Any) -> "Rotation":
        """The same with planes of which some fields differ."""
        return replace(self, planes=replace(self.planes, **fields))

    def describe(self) -> dict[str, Any]:
        """As JSON, for the metadata of a file; frequencies are tensors of the file."""
        return {name: getattr(self.planes if hasattr(self.planes, name) else self, name) for name in DESCRIBED}

    @classmethod
    def from_description(cls, description: Mapping[str, Any], frequencies: torch.Tensor) -> "Rotation":
        """The reverse of [`describe`]."""
        fields = {name: description[name] for name in DESCRIBED}
        fields |= {name: tuple(fields[name]) for name in ("channels", "frequency_of_plane")}
        axes, pairs, *given = (fields.pop(name) for name in ("axes", "pairs", "num_axes", "factor"))
        pairs = None if pairs is None else tuple((first, second) for first, second in pairs)
        return cls(planes=Planes.from_pairing(frequencies, axes, pairs, *given), **fields)


def _round(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return values if dtype == torch.float64 else values.to(dtype).double()


def choose_positions(num_axes: int, longest: float) -> torch.Tensor:
    """
    (N, A) positions that tell faults apart, int64: on one axis 0 to 15, about every power of 2, and up to the longest;
    on several, the same on all axes (text), on one axis alone, and grids (images).
    """
    longest = int(longest)
    powers = [2**k + step for k in range(4, longest.bit_length() + 1) for step in (-1, 0, 1, 2**k // 3)]
    line = sorted({p for p in [*range(16), *powers, longest - 1, longest] if 0 <= p <= longest})  # L
    equal = [[p] * num_axes for p in line]
    if num_axes == 1:
        return torch.tensor(equal)
    alone = [[p if axis == a else 0 for axis in range(num_axes)] for a in range(num_axes) for p in line[1::2]]
    # The steps have no common factor, so that rows and columns meet in every way.
    mixed = [[line[(i * step + step) % len(line)] for step in (1, 5, 11)[:num_axes]] for i in range(len(line))]
    return torch.tensor(equal + alone + mixed)


def make_states(count: int, rotation: Rotation) -> dict[str, torch.Tensor]:
    """
    `query` and `key`, (N, head_dim) float64, that tell faults apart: sines, exact to write in any language, and away
    from zero. None if it is unknown which channels rotate.
    """
    if rotation.planes.pairs is None or rotation.head_dim is None:
        return {}
    grid = torch.arange(count * rotation.head_dim, dtype=torch.float64).view(count, -1)
    # Multiples of 1/64 are exact in float32, and in bfloat16 up to 4.
    return {
        name: ((grid * step).sin().mul(32).round() / 64 + torch.where((grid * step).sin() < 0, -0.25, 0.25))
        for name, step in (("query", 0.7), ("key", 1.3))
    }
