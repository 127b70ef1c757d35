"""What the encodings of two models have learned, compared number by number."""

from dataclasses import dataclass, field
from pathlib import Path

import torch

from .analysis import Analysis, save_measurements
from .encodings import Frequencies


@dataclass
class Comparison:
    """
    Attributes:
        frequencies: (A, layers, heads, planes) canonical frequencies of each model in radians per patch, see
            [`Frequencies`]; `None` where generators do not commute or the shapes differ.
        change: (layers, heads, planes) ‖f − g‖ of the planes f and g of the same rank.
        generators: (layers,) ‖A − B‖ / ‖A‖ in the Frobenius norm over all axes and heads; `None` where the encodings
            or the units of their coordinates differ. Where the first model is what the second was trained from, this
            is its distance from the start.
        remarks: One sentence for each comparison that is not possible.
    """

    frequencies: list[torch.Tensor] | None = None
    change: torch.Tensor | None = None
    generators: torch.Tensor | None = None
    remarks: list[str] = field(default_factory=list)

    def save(self, directory: str | Path) -> None:
        """Write `comparison.json` and `comparison.npz`, as [`Analysis.save`] does."""
        save_measurements(self, directory, "comparison")


def compare(first: Analysis, second: Analysis, names: tuple[str, str]) -> Comparison:
    """Comparison of two models, of which `names` are the names in remarks."""
    found, encodings = Comparison(), [analysis.encoding for analysis in (first, second)]
    if without := [name for name, encoding in zip(names, encodings) if encoding is None]:
        found.remarks.append(f"No generators are compared: there are none of this package in {' and '.join(without)}.")
        return found
    shapes = [tuple(encoding.generators.shape) for encoding in encodings]
    kinds = [analysis.model["position_encoding"] for analysis in (first, second)]
    if kinds[0] == kinds[1] and shapes[0] == shapes[1]:
        generators = [encoding.generators.transpose(0, 1).flatten(1) for encoding in encodings]
        norms = generators[0].norm(dim=1)
        # One patch along each axis, in coordinates, in whose units generators are.
        patches = [encoding.positions for encoding in encodings]
        if not torch.equal(*patches):
            found.remarks.append("Generators are not compared: a patch is another distance in the coordinates of each.")
        elif not norms.all():
            found.remarks.append(f"Generators of {names[0]} are zero, so that there is no relative change of them.")
        else:
            found.generators = (generators[1] - generators[0]).norm(dim=1) / norms
    frequencies = [encoding.frequencies for encoding in encodings]
    if free := [name for name, known in zip(names, frequencies) if known is None]:
        found.remarks.append(
            f"No frequencies are compared: the generators of {' and '.join(free)} do not commute, so that there are no "
            "planes that they share."
        )
        return found
    found.frequencies = _aligned(*frequencies)
    if found.frequencies is None:
        found.remarks.append(
            "Frequencies are compared plane by plane in models of as many axes, layers, heads and planes; these have "
            f"{_sizes(frequencies[0])} and {_sizes(frequencies[1])}."
        )
    else:
        found.change = (found.frequencies[1] - found.frequencies[0]).norm(dim=0)
    return found


def _aligned(first: Frequencies, second: Frequencies) -> list[torch.Tensor] | None:
    """Of one shape, with what layers or heads share repeated; `None` if the shapes do not fit."""
    shapes = first.per_patch.shape, second.per_patch.shape
    if any(
        one != other and (axis not in (1, 2) or 1 not in (one, other)) for axis, (one, other) in enumerate(zip(*shapes))
    ):
        return None
    one, other = torch.broadcast_tensors(first.per_patch, second.per_patch)
    # The sign of a plane's frequencies depends on the order of its channels: that of the first model decides.
    return [one, other * torch.where((one * other).sum(0) < 0, -1, 1)]


def _sizes(frequencies: Frequencies) -> str:
    axes, layers, heads, planes = frequencies.per_patch.shape
    return f"{axes} axes, {layers} layers, {heads} heads and {planes} planes"
