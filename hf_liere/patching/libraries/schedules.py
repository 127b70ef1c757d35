r"""
Schedules of frequencies: how the rotations of a pretrained diffusion transformer change with the size of an image, the
layer and the noise level, without training.

With the trained size L of an axis, s = size / L ≥ 1, d channels for the axis and frequencies ω_i = θ^(−2i/d):

| method | ω′_i | source |
|---|---|---|
| `"position_interpolation"` | ω_i / s | Chen et al., arXiv 2306.15595 |
| `"ntk"` | ω_i s^(−2i/(d−2)): θ s^(d/(d−2)) in place of θ | NTK-aware scaling, arXiv 2309.00071v2 §3.1 |
| `"yarn"` | (1 − γ) ω_i / s + γ ω_i, γ = (Lω_i/2π − α) / (β − α) in [0, 1] | arXiv 2309.00071v2 §3.2, 3.4 |
| `"vision_yarn"` | that of `"position_interpolation"`, `"ntk"` or ω_i, by two ramps over i | the code of DyPE |

DyPE (arXiv 2510.20766) lets them depend on the noise level t, from 1 to 0, by κ(t) = λ_s t^λ_t: s^κ(t) takes the place
of s in the first two, and the others multiply the bounds of their ramps, such as α and β, by κ(t).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ...registers import check_name


METHODS = ("position_interpolation", "ntk", "yarn", "vision_yarn")
# Rotations over the trained size between which frequencies change from interpolated to NTK's, and to pretrained ones.
VISION_RAMPS = ((0.75, 1.25), (2.0, 16.0))


class ScheduleInput(NamedTuple):
    """
    What a schedule may depend on.

    Attributes:
        frequencies: (planes,) ω of an attention module, learned ones included.
        axes: (planes,) the axis of every plane.
        ranks: (planes,) its number i among the planes of its axis.
        channels: (planes,) the number d of channels of its axis.
        size: (A,) tokens from the first to the last coordinate of every axis.
        noise_level: 1 for noise to 0 for a clean image, a tensor without dimensions; `None` where the model does not
            tell.
        layer: Index of the attention module.

    ```python
    import torch
    from hf_liere import ScheduleInput

    def stretch_rows(given: ScheduleInput) -> tuple[torch.Tensor, float]:
        return torch.where(given.axes == 0, 0.5, 1.0), 1.0  # a schedule for set_frequency_schedule
    ```
    """

    frequencies: torch.Tensor
    axes: torch.Tensor
    ranks: torch.Tensor
    channels: torch.Tensor
    size: torch.Tensor
    noise_level: torch.Tensor | None
    layer: int


# The multipliers of the frequencies, (planes,), and the factor of cos and sin.
Schedule = Callable[[ScheduleInput], tuple[torch.Tensor, torch.Tensor | float]]


@dataclass(frozen=True)
class FrequencySchedule:
    """
    A published schedule, see the table of this module; at the trained size and below it changes nothing.

    ```python
    from hf_liere import FrequencySchedule

    # FLUX.1 at 1,024 pixels: text, rows and columns; DyPE's main variant.
    schedule = FrequencySchedule("vision_yarn", trained_size=(None, 64, 64), dype=(1.0, 2.0))
    ```

    Args:
        method: `"position_interpolation"`, `"ntk"`, `"yarn"` or `"vision_yarn"`.
        trained_size: Tokens of the largest image or clip of training on every axis; `None` for an axis that is not
            scaled, such as time or text.
        dype: (λ_s, λ_t) of DyPE, whose code has (2, 2) for `"ntk"` and (1, 2) for `"vision_yarn"`. `None` means no
            dependence on the noise level.
        ramp: (α, β) of `"yarn"`, rotations over the trained size; (1, 32) for language models.
        attention_factor: Whether YaRN multiplies cos and sin by 0.1 ln s + 1; `"yarn"` with the largest s of all axes.
        layers: The attention modules that are scaled, by index; `None` means all.

    Raises:
        ValueError: for an unknown method, sizes below 1, or a ramp that does not rise.
    """

    method: str
    trained_size: Sequence[int | None]
    dype: tuple[float, float] | None = None
    ramp: tuple[float, float] = (1.0, 32.0)
    attention_factor: bool = True
    layers: Sequence[int] | None = None

    def __post_init__(self) -> None:
        check_name("method", self.method, METHODS)
        if any(size is not None and size < 1 for size in self.trained_size):
            raise ValueError(f"trained_size={self.trained_size!r} must contain numbers of tokens from 1, or None.")
        if not 0 <= self.ramp[0] < self.ramp[1]:
            raise ValueError(f"ramp={self.ramp!r} must be (α, β) with 0 ≤ α < β.")

    def __call__(self, given: ScheduleInput) -> tuple[torch.Tensor, torch.Tensor | float]:
        frequencies, axes = given.frequencies, given.axes
        if self.layers is not None and given.layer not in self.layers:
            return torch.ones_like(frequencies), 1.0
        trained = frequencies.new_tensor([size or math.inf for size in self.trained_size])  # (A,)
        scale = (given.size.to(trained) / trained).clamp(min=1)  # (A,)
        strength = torch.ones_like(scale[0])
        if self.dype is not None:
            assert given.noise_level is not None, "checked when the schedule was set"
            strength = self.dype[0] * given.noise_level.to(scale) ** self.dype[1]
        has_ramps = self.method in ("yarn", "vision_yarn")
        by_plane = (scale if has_ramps else scale**strength)[axes]  # (planes,)
        # An axis of two channels has one frequency, the highest, which stays.
        ntk = by_plane ** (-2 * given.ranks.to(scale) / (given.channels - 2).clamp(min=1))  # (planes,)
        if not has_ramps:
            return (ntk if self.method == "ntk" else 1 / by_plane), 1.0
        slowed, factor = 1 / by_plane, 0.1 * self.attention_factor * scale.log() + 1  # (planes,), (A,)
        # Planes that turn n times over the trained size turn n / κ times over this one.
        size = trained / strength  # (A,)
        if self.method == "yarn":
            (low, high), factor = self.ramp, factor.max()
            kept = ((frequencies.detach() * size[axes] / (2 * math.pi) - low) / (high - low)).clamp(0, 1)  # (planes,)
        else:
            fast, kept = (_ramp_over_ranks(given, size, ramp) for ramp in VISION_RAMPS)  # (planes,) each
            slowed, factor = ntk + (1 - fast) * (slowed - ntk), factor[axes]  # (planes,) each
        return 1 + (1 - kept) * (slowed - 1), factor


def _ramp_over_ranks(given: ScheduleInput, size: torch.Tensor, ramp: tuple[float, float]) -> torch.Tensor:
    """
    Returns a (planes,) ramp: 0 for planes with fewer turns over (A,) sizes than its start, 1 from its end on. As in
    the code of DyPE it is linear in the rank i of ω_i = θ^(−2i/d), between whole ranks. There a ramp turns around if
    both ranks are before the first plane or both behind the last; here it ends.
    """
    count = given.channels // 2  # (planes,)
    slopes = -given.frequencies.detach().log() / given.ranks.clamp(min=1)  # (planes,)
    # Of the slowest plane of every axis: 2 ln θ / d.
    slope = torch.zeros_like(size).index_add(0, given.axes, torch.where(given.ranks == count - 1, slopes, 0))  # (A,)
    last, first = ((size / (2 * math.pi * rotations)).log() / slope for rotations in ramp)  # (A,) each
    first, last = (rank.clamp(min=0)[given.axes].minimum(count) for rank in (first.floor(), last.ceil()))
    return 1 - ((given.ranks - first) / (last - first).clamp(min=1e-3)).clamp(0, 1)
