"""
The frequencies that a configuration asks for, in float64: formulas of the papers, which share nothing with the code of
transformers that is checked against them.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch


# The relative error of frequencies in float32: a power and a division, each rounded, and its exponent.
ROUNDING = 2.0**-20
# Fields of `rope_parameters` that the formulas read.
FIELDS = """
    attention_factor beta_fast beta_slow factor high_freq_factor low_freq_factor mscale mscale_all_dim
    original_max_position_embeddings short_factor truncate
""".split()


def compute_spectrum(law: Mapping[str, Any]) -> tuple[torch.Tensor, float]:
    """
    The frequencies of RoPE, θ^(−i/n) for i < n (Su et al. 2021, section 3.2.2), after the scaling of a `rope_type`.
    Raises `ValueError` if the type is unknown here, or a field is missing.

    Args:
        law: `rope_type`, `rope_theta` (θ), `count` (n, half of the rotated channels), and the fields of
            `rope_parameters` that the type reads; `dim` is the number of rotated channels, if it is odd.

    Returns:
        (count,) frequencies in radians for each position, float64, and the factor of cos and sin.
    """
    kind, count, theta = law["rope_type"], law["count"], float(law["rope_theta"])
    exponents = 2 * torch.arange(count, dtype=torch.float64) / law.get("dim", 2 * count)  # (n,)
    plain = theta**-exponents  # (n,)
    try:
        # Dynamic frequencies are as they are up to max_position_embeddings.
        if kind in ("default", "axial", "dynamic"):
            return plain, 1.0
        if kind == "linear":
            return plain / law["factor"], 1.0
        if kind == "proportional":
            rotated = int(law.get("partial_rotary_factor", 1.0) * count)
            return plain * (torch.arange(count) < rotated) / law.get("factor", 1.0), 1.0
        if kind == "llama3":
            return _scale_llama3(plain, law), 1.0
        if kind == "longrope":
            return plain / torch.tensor(law["short_factor"], dtype=torch.float64), _attention_factor(law)  # (n,)
        if kind == "yarn":
            return _scale_yarn(plain, law), _attention_factor(law)
    except KeyError as error:
        raise ValueError(
            f"rope_type={kind!r} needs {error.args[0]} in rope_parameters; there are {sorted(law)}."
        ) from None
    raise ValueError(f"rope_type={kind!r} is unknown here.")


def _scale_llama3(plain: torch.Tensor, law: Mapping[str, Any]) -> torch.Tensor:
    """
    Waves longer than the trained context are divided by the factor, those much shorter are kept, and between the two
    the frequency is a weighted mean (Llama 3.1, `use_scaled_rope` of the reference implementation).
    """
    low, high = law["low_freq_factor"], law["high_freq_factor"]
    periods = law["original_max_position_embeddings"] * plain / (2 * math.pi)  # (n,) periods in the trained context
    kept = ((periods - low) / (high - low)).clamp(0, 1)  # (n,)
    return plain * kept + plain / law["factor"] * (1 - kept)


def _scale_yarn(plain: torch.Tensor, law: Mapping[str, Any]) -> torch.Tensor:
    """ "NTK-by-parts" (YaRN, Peng et al. 2023, section 3.2), with a ramp over the index of the frequency."""
    count, theta = len(plain), float(law["rope_theta"])

    def find_index(periods: float) -> float:
        """The index of the frequency with so many periods in the trained context."""
        return count * math.log(law["original_max_position_embeddings"] / (2 * math.pi * periods)) / math.log(theta)

    first, last = find_index(law.get("beta_fast") or 32), find_index(law.get("beta_slow") or 1)
    if law.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * count - 1)
    # Models count a ramp of no length as one of a thousandth.
    divided = ((torch.arange(count, dtype=torch.float64) - first) / ((last - first) or 1e-3)).clamp(0, 1)  # (n,)
    return plain * (1 - divided) + plain / law["factor"] * divided


def _attention_factor(law: Mapping[str, Any]) -> float:
    """
    The attention factor: as given, of LongRoPE (as in Phi-3), or of YaRN (equation 22), with the exponents of
    DeepSeek-V2 where these are given.
    """
    if law.get("attention_factor") is not None:
        return float(law["attention_factor"])
    factor = law["factor"]
    if factor <= 1:
        return 1.0
    if law["rope_type"] == "longrope":
        return math.sqrt(1 + math.log(factor) / math.log(law["original_max_position_embeddings"]))

    def temper(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1

    if law.get("mscale") and law.get("mscale_all_dim"):
        return temper(law["mscale"]) / temper(law["mscale_all_dim"])
    return temper(1.0)


def read_law(config: object | None, layer_type: str | None, count: int) -> dict[str, Any] | None:
    """
    What the configuration of a rotary module asks for, as [`compute_spectrum`] reads it, for so many frequencies;
    `None` if it names no base. `layer_type` selects the parameters of one type of layers.
    """
    parameters = getattr(config, "rope_parameters", None) or {}
    if layer_type is not None and isinstance(parameters.get(layer_type), Mapping):
        parameters = parameters[layer_type]
    if not isinstance(parameters.get("rope_theta"), (int, float)):
        return None
    law = {name: parameters[name] for name in FIELDS if parameters.get(name) is not None}
    law |= {"rope_type": parameters.get("rope_type", "default"), "rope_theta": parameters["rope_theta"], "count": count}
    original = law.get("original_max_position_embeddings")
    if law["rope_type"] in ("yarn", "longrope") and "factor" not in law and original:
        law["factor"] = getattr(config, "max_position_embeddings", original) / original
    if law["rope_type"] == "proportional":
        law["partial_rotary_factor"] = parameters.get("partial_rotary_factor", 1.0)
    return law


def recognise_law(values: torch.Tensor) -> dict[str, Any] | None:
    """The geometric sequence θ^(−i/n) that (n,) frequencies follow within the rounding of float32, or `None`."""
    count = len(values)
    if count < 2 or not (values > 0).all():
        return None
    for theta in fit_bases(torch.arange(count, dtype=torch.float64) / count, values):
        law = {"rope_type": "default", "rope_theta": theta, "count": count}
        if _agree(compute_spectrum(law)[0], values):
            return law
    return None


def fit_bases(steps: torch.Tensor, values: torch.Tensor, base: float = 1.0) -> list[float]:
    """
    Bases near the θ with which (θ / base)^(−step) is nearest to (n,) positive values, in their logarithms; rounder ones
    first. The values are frequencies, or with `base` their ratios to those of this base; some step is not zero.
    """
    theta = base * math.exp(-float((steps * values.log()).sum() / steps.square().sum()))
    return list(dict.fromkeys(float(f"{theta:.{digits}g}") for digits in range(1, 7)))


def match_spectrum(wanted: torch.Tensor, found: torch.Tensor) -> list[int] | None:
    """For each of the frequencies found, the index of the wanted one that it is within rounding; `None` without one."""
    distances = (found[:, None] - wanted[None]).abs()  # (found, wanted)
    # Zeros are equal to each other; the first ones count.
    indices = torch.arange(len(found)) if _agree(wanted, found) else distances.argmin(1)
    if not _agree(wanted[indices], found) or set(indices.tolist()) != set(range(len(wanted))):
        return None
    return indices.tolist()


def _agree(wanted: torch.Tensor, found: torch.Tensor) -> bool:
    return wanted.shape == found.shape and bool(((wanted - found).abs() <= ROUNDING * wanted.abs()).all())
