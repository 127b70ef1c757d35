"""Numerical comparison of the learned encodings of two models."""

from dataclasses import dataclass, field

import torch

from .analysis import Analysis, Measurements
from .encodings import Frequencies


@dataclass
class Comparison(Measurements):
    """
    Attributes:
        frequencies: (A, layers, heads, planes) canonical frequencies `per_patch` of each model, see
            [`Frequencies`]; `None` if generators do not commute or the shapes differ.
        change: (layers, heads, planes) ‖f − g‖ of the planes f and g of the same rank.
        generators: (layers,) ‖A − B‖ / ‖A‖ in the Frobenius norm over all axes and heads; `None` if the encodings or
            the units of their coordinates differ. For a model trained from the first, its distance from the start.
        remarks: One sentence for each impossible comparison.
    """

    frequencies: list[torch.Tensor] | None = None
    change: torch.Tensor | None = None
    generators: torch.Tensor | None = None
    remarks: list[str] = field(default_factory=list)


def compare(first: Analysis, second: Analysis, names: tuple[str, str]) -> Comparison:
    """Compare two models; remarks use `names`."""
    found, encodings = Comparison(), [analysis.encoding for analysis in (first, second)]
    if without := [name for name, encoding in zip(names, encodings) if encoding is None]:
        found.remarks.append(f"Generators are not compared: there are none of this package in {' and '.join(without)}.")
        return found
    encodings = [encoding for encoding in encodings if encoding is not None]
    shapes = [tuple(encoding.generators.shape) for encoding in encodings]
    kinds = [analysis.model["position_encoding"] for analysis in (first, second)]
    if kinds[0] == kinds[1] and shapes[0] == shapes[1]:
        generators = [encoding.generators.transpose(0, 1).flatten(1) for encoding in encodings]
        norms = generators[0].norm(dim=1)
        # One patch along each axis, in coordinates: generators are per unit of a coordinate.
        patches = [encoding.positions for encoding in encodings]
        if not torch.equal(*patches):
            found.remarks.append("Generators are not compared: the size of a patch in coordinates differs.")
        elif not norms.all():
            found.remarks.append(f"The generators of {names[0]} are zero, so their relative change is undefined.")
        else:
            found.generators = (generators[1] - generators[0]).norm(dim=1) / norms
    frequencies = [encoding.frequencies for encoding in encodings]
    if free := [name for name, known in zip(names, frequencies) if known is None]:
        found.remarks.append(f"Frequencies are not compared: the generators of {' and '.join(free)} do not commute.")
        return found
    frequencies = [known for known in frequencies if known is not None]
    found.frequencies = _align(frequencies[0], frequencies[1])
    if found.frequencies is None:
        found.remarks.append(
            "Frequencies are compared only if the numbers of axes, layers, heads and planes are equal; these models "
            f"have {_sizes(frequencies[0])} and {_sizes(frequencies[1])}."
        )
    else:
        found.change = (found.frequencies[1] - found.frequencies[0]).norm(dim=0)
    return found


def _align(first: Frequencies, second: Frequencies) -> list[torch.Tensor] | None:
    """Frequencies of the same shape, with shared layers or heads repeated; `None` if the shapes do not fit."""
    shapes = first.per_patch.shape, second.per_patch.shape
    if any(
        one != other and (axis not in (1, 2) or 1 not in (one, other)) for axis, (one, other) in enumerate(zip(*shapes))
    ):
        return None
    one, other = torch.broadcast_tensors(first.per_patch, second.per_patch)
    # The sign of a plane's frequencies depends on the order of its channels: use the first model's.
    return [one, other * torch.where((one * other).sum(0) < 0, -1, 1)]


def _sizes(frequencies: Frequencies) -> str:
    axes, layers, heads, planes = frequencies.per_patch.shape
    return f"{axes} axes, {layers} layers, {heads} heads and {planes} planes"
