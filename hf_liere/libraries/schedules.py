r"""
Schedules of frequencies: how the rotations of a pretrained diffusion transformer change with the size of an image, the
layer and the noise level, without training.

With the trained size L of an axis, s = size / L ≥ 1, d channels for the axis and frequencies ω_i = θ^(−2i/d):

| method | ω′_i | source |
|---|---|---|
| `"position_interpolation"` | ω_i / s | Chen et al., arXiv 2306.15595 |
| `"ntk"` | ω_i s^(−2i/(d−2)): θ s^(d/(d−2)) in place of θ | NTK-aware scaling, arXiv 2309.00071 §3.1 |
| `"yarn"` | (1 − γ) ω_i / s + γ ω_i, γ = (Lω_i/2π − α) / (β − α) in [0, 1] | arXiv 2309.00071 §3.2 |

DyPE (arXiv 2510.20766) lets the first two depend on the noise level t, from 1 to 0: s^κ(t) in place of s, with
κ(t) = λ_s t^λ_t.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch


METHODS = ("position_interpolation", "ntk", "yarn")


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

    # FLUX.1 at 1,024 pixels: text, rows and columns; DyPE's exponents.
    schedule = FrequencySchedule("ntk", trained_size=(None, 64, 64), dype=(2.0, 2.0))
    ```

    Args:
        method: `"position_interpolation"`, `"ntk"` or `"yarn"`.
        trained_size: Tokens of the largest image or clip of training on every axis; `None` for an axis that is not
            scaled, such as time or text.
        dype: (λ_s, λ_t) of DyPE, for the first two methods; the paper uses (2, 2). `None` means no dependence on the
            noise level.
        ramp: (α, β) of YaRN, rotations over the trained size; (1, 32) for language models.
        attention_factor: Whether YaRN multiplies cos and sin by 0.1 ln s + 1, with the largest s of all axes.
        layers: The attention modules that are scaled, by index; `None` means all.

    Raises:
        ValueError: for an unknown method, sizes below 1, or `dype` with YaRN.
    """

    method: str
    trained_size: Sequence[int | None]
    dype: tuple[float, float] | None = None
    ramp: tuple[float, float] = (1.0, 32.0)
    attention_factor: bool = True
    layers: Sequence[int] | None = None

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"method={self.method!r} must be one of {', '.join(METHODS)}.")
        if any(size is not None and size < 1 for size in self.trained_size):
            raise ValueError(f"trained_size={self.trained_size!r} must contain numbers of tokens from 1, or None.")
        if self.dype is not None and self.method == "yarn":
            raise ValueError("dype changes position_interpolation and ntk; YaRN has no exponent to change.")
        if not 0 <= self.ramp[0] < self.ramp[1]:
            raise ValueError(f"ramp={self.ramp!r} must be (α, β) with 0 ≤ α < β.")

    def __call__(self, given: ScheduleInput) -> tuple[torch.Tensor, torch.Tensor | float]:
        frequencies, axes = given.frequencies, given.axes
        if self.layers is not None and given.layer not in self.layers:
            return torch.ones_like(frequencies), 1.0
        trained = frequencies.new_tensor([size or math.inf for size in self.trained_size])  # (A,)
        scale = (given.size.to(trained) / trained).clamp(min=1)  # (A,)
        if self.dype is not None:
            assert given.noise_level is not None, "checked when the schedule was set"
            strength, exponent = self.dype
            scale = scale ** (strength * given.noise_level.to(scale) ** exponent)
        by_plane = scale[axes]  # (planes,)
        if self.method == "position_interpolation":
            return 1 / by_plane, 1.0
        if self.method == "ntk":
            # An axis of two channels has one frequency, the highest, which stays.
            return by_plane ** (-2 * given.ranks / (given.channels - 2).clamp(min=1)), 1.0
        low, high = self.ramp
        rotations = frequencies.detach() * trained[axes].nan_to_num(posinf=0) / (2 * math.pi)  # (planes,)
        kept = ((rotations - low) / (high - low)).clamp(0, 1)  # (planes,)
        factor = 0.1 * scale.max().log() + 1 if self.attention_factor else 1.0
        return 1 + (1 - kept) * (1 / by_plane - 1), factor
