"""Numerical comparison of the learned encodings of two models."""

from dataclasses import dataclass, field

import torch

from .analysis import Analysis, Measurements


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
    found, one, other = Comparison(), first.encoding, second.encoding
    if one is None or other is None:
        without = [name for name, encoding in zip(names, (one, other)) if encoding is None]
        found.remarks.append(f"Generators are not compared: there are none of this package in {' and '.join(without)}.")
        return found
    kinds = [analysis.model["position_encoding"] for analysis in (first, second)]
    if kinds[0] == kinds[1] and one.generators.shape == other.generators.shape:
        start, end = (encoding.generators.transpose(0, 1).flatten(1) for encoding in (one, other))
        norms = start.norm(dim=1)
        # One patch along each axis, in coordinates: generators are per unit of a coordinate.
        if not torch.equal(one.positions, other.positions):
            found.remarks.append("Generators are not compared: the size of a patch in coordinates differs.")
        elif not norms.all():
            found.remarks.append(f"The generators of {names[0]} are zero, so their relative change is undefined.")
        else:
            found.generators = (end - start).norm(dim=1) / norms
    if one.frequencies is None or other.frequencies is None:
        free = [name for name, encoding in zip(names, (one, other)) if encoding.frequencies is None]
        found.remarks.append(f"Frequencies are not compared: the generators of {' and '.join(free)} do not commute.")
        return found
    planes = [one.frequencies.per_patch, other.frequencies.per_patch]
    unequal = [axis for axis, numbers in enumerate(zip(*(values.shape for values in planes))) if len({*numbers}) > 1]
    # Shared layers or heads fit any number of them.
    if any(axis not in (1, 2) or 1 not in (planes[0].shape[axis], planes[1].shape[axis]) for axis in unequal):
        sizes = ("{} axes, {} layers, {} heads and {} planes".format(*values.shape) for values in planes)
        found.remarks.append(
            "Frequencies are compared only if the numbers of axes, layers, heads and planes are equal; these models "
            f"have {' and '.join(sizes)}."
        )
        return found
    before, after = torch.broadcast_tensors(*planes)
    # The sign of a plane's frequencies depends on the order of its channels: use the first model's.
    after = after * torch.where((before * after).sum(0) < 0, -1, 1)
    found.frequencies, found.change = [before, after], (after - before).norm(dim=0)
    return found
