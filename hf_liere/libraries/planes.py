"""The planes in which attention rotates channels: their frequencies, axes and pairs of channels."""

from dataclasses import dataclass


ADJACENT, HALVES = "adjacent", "halves"


@dataclass(frozen=True)
class PlaneTable:
    """
    The planes of an attention module in the order of its channels.

    Attributes:
        frequencies: ω of every plane, 0 for planes that the model does not rotate.
        axes: For every plane, the axis a of its angle p_a ω.
    """

    frequencies: tuple[float, ...]
    axes: tuple[int, ...]

    @property
    def num_axes(self) -> int:
        return max(self.axes) + 1

    @property
    def rotated(self) -> list[int]:
        """The planes that rotate."""
        return [plane for plane, frequency in enumerate(self.frequencies) if frequency]


def geometric_planes(*axes: tuple[float, int]) -> PlaneTable:
    """RoPE's planes of several axes, one after the other: ω_i = θ^(−2i/d) for (θ, d) of every axis."""
    spectra = [[theta ** (-index / channels) for index in range(0, channels, 2)] for theta, channels in axes]
    numbers = [axis for axis, spectrum in enumerate(spectra) for _ in spectrum]
    return PlaneTable(tuple(frequency for spectrum in spectra for frequency in spectrum), tuple(numbers))
