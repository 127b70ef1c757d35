"""
The complete analysis of a model without labels: description, learned position encoding, attention, and cost; and the
numerical comparison of the learned encodings of two models.

    analysis = analyse(model, [pixel_values])
    analysis.save("outputs/analysis")          # analysis.json and analysis.npz
    attention_maps(model, pixel_values).maps   # a single measurement
"""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ...encoding.commuting_encodings import FoldedPlanes
from ...encoding.folding import FoldedLieRE
from ...encoding.rotary_encoding import RotaryEncoding
from ...patching.apply import is_patched
from ...patching.vision_towers import Tower, position_table
from ...probing.module_inspection import head_shape
from ...storage.loading import require_finite_parameters
from ...transformer.modeling_liere_tokens import LieRETokensModel
from .attention import (
    AttentionMaps,
    OutputChange,
    attention_distances,
    attention_maps,
    attention_relativity,
    black_input,
    evaluation_mode,
    output_change,
    size_options,
    vision_tower,
)
from .classes import class_names, class_probabilities, likeliest
from .costs import Cost, count_cost
from .encodings import EncodingAnalysis, analyse_encoding, rotary_encoding


CLASSES_SHOWN = 3


class Measurements:
    """A dataclass of measurements, which may contain others."""

    def save(self, directory: str | Path, name: str | None = None) -> None:
        """
        Write `{name}.json`, nested and with shapes in place of tensors, and `{name}.npz`, which contains every tensor
        under the path of its attribute: `encoding.commutators.norm`, `inputs.0.attention.maps`, …

        Args:
            name: File name without suffix; `None` means that of the class: `analysis`, `comparison`.
        """
        directory, name = Path(directory), name or type(self).__name__.lower()
        directory.mkdir(parents=True, exist_ok=True)
        arrays: dict[str, np.ndarray] = {}
        facts = _collect(self, (), arrays)
        np.savez_compressed(directory / f"{name}.npz", **arrays)
        (directory / f"{name}.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


@dataclass
class InputAnalysis:
    """
    The measurements for inputs of one size.

    Attributes:
        size: (height, width), or (frames, height, width), in pixels.
        cost: The cost of one input.
        attention, distances: See [`attention_maps`] and [`attention_distances`]; `None` without inputs.
        output_change: See [`output_change`]; only for the first size; `None` without inputs or rotations.
        probabilities: See [`class_probabilities`]; `None` without inputs or a classifier.
    """

    size: tuple[int, ...]
    cost: Cost
    attention: AttentionMaps | None = None
    distances: torch.Tensor | None = None
    output_change: OutputChange | None = None
    probabilities: torch.Tensor | None = None


@dataclass
class Analysis(Measurements):
    """
    Attributes:
        model: Description of the model, see [`describe`].
        encoding: `None` for a model without rotations.
        attention_relativity: See [`attention_relativity`]; `None` without rotations, or if it could not be measured.
        inputs: One entry for each input size.
        remarks: One sentence for each measurement that was not possible or needs an explanation.
    """

    model: dict
    encoding: EncodingAnalysis | None
    attention_relativity: torch.Tensor | None = None
    inputs: list[InputAnalysis] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    @property
    def step(self) -> str:
        """The displacement that rotations and frequencies are shown for."""
        return "unit of the position" if self.model["train_grid"] is None else "patch"

    @property
    def axes(self) -> list[str]:
        """Names of the axes of positions."""
        if self.model["train_grid"] is None:
            return ["first", "second", "third", "fourth", "fifth", "sixth"][: self.model["num_axes"]]
        return ["frame", "row", "column"][-len(self.model["train_grid"]) :]


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


@dataclass
class InspectedModel:
    """
    A model with everything that a report shows.

    Attributes:
        name: Name of the model.
        analysis: The measurements.
        shown: For each entry of `analysis.inputs`, its (images, T, H, W, C) uint8 inputs as the model saw them.
        sources: Names of the images.
    """

    name: str
    analysis: Analysis
    shown: Sequence[np.ndarray] = ()
    sources: Sequence[str] = ()

    @property
    def predictions(self) -> list[list[str]]:
        """For each image, its name and the most probable classes at each size; empty for models without classes."""
        measured = [entry.probabilities for entry in self.analysis.inputs if entry.probabilities is not None]
        names = self.analysis.model["classes"]
        shown = [[", ".join(map(str, likeliest(each, names, CLASSES_SHOWN))) for each in size] for size in measured]
        return [list(row) for row in zip(self.sources, *shown)] if shown else []


def analyse(
    model: nn.Module, inputs: Sequence[torch.Tensor] = (), batch_size: int = 8, progress: bool = False
) -> Analysis:
    """
    Args:
        model: A model of this package or of transformers, folded, patched or neither; it is not changed.
        inputs: `pixel_values` of each size, (B, C, H, W) or (B, T, C, H, W). Without inputs, costs are counted on a
            black input of the trained size, and attention is not measured. Of models of tokens, which take none, only
            the encoding is measured.
        batch_size: Number of inputs in a batch.
        progress: Whether to show progress bars.

    Raises:
        ValueError: if the model has no vision tower and is not one of tokens, contains weights that are not finite, or
            refuses an input.
    """
    transformer, tower = find_transformer(model)
    if tower is None and inputs:
        raise ValueError(f"{type(model).__name__} takes tokens with positions; no images or videos are accepted.")
    require_finite_parameters(transformer, type(transformer).__name__)
    encoding = rotary_encoding(transformer)
    analysis = Analysis(describe(model), None if encoding is None else analyse_encoding(encoding, progress))
    analysis.remarks += _remarks(transformer, tower, encoding, bool(inputs))
    if tower is None or tower.is_flexible:
        return analysis
    if encoding is not None:
        try:
            analysis.attention_relativity = attention_relativity(model)
        except ValueError as error:
            analysis.remarks.append(f"The relativity of the model's attention is not measured: {error}")
    with evaluation_mode(model):
        for pixel_values in inputs or [black_input(tower)]:
            device = next(tower.module.parameters()).device
            cost = count_cost(tower.module, pixel_values[:1].to(device), **size_options(tower, pixel_values))
            measured = InputAnalysis((*pixel_values.shape[1:-3], *pixel_values.shape[-2:]), cost)
            if inputs:
                options: dict[str, Any] = {"batch_size": batch_size, "progress": progress}
                measured.attention = attention_maps(model, pixel_values, **options)
                measured.distances = attention_distances(model, pixel_values, **options)
                measured.probabilities = class_probabilities(model, pixel_values, **options)
                if encoding is not None and not analysis.inputs:
                    measured.output_change = output_change(model, pixel_values, **options)
            analysis.inputs.append(measured)
    return analysis


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


def find_transformer(model: nn.Module) -> tuple[nn.Module, Tower | None]:
    """The module to inspect: a token model's transformer and `None`, or a vision tower's module and the tower."""
    base = getattr(model, "base_model", model)
    if isinstance(base, LieRETokensModel):
        return base, None
    tower = vision_tower(model)
    return tower.module, tower


def describe(model: nn.Module) -> dict:
    """A description of a model, with the names of its configuration fields."""
    transformer, tower = find_transformer(model)
    encoding, config, names = rotary_encoding(transformer), transformer.config, class_names(model)
    if tower is None:
        layers, heads, head_dim = config.num_hidden_layers, config.num_attention_heads, config.head_dim
    else:
        layers, (heads, head_dim) = len(tower.attentions), head_shape(tower.attentions[0][1])
    description = {
        "class": type(model).__name__,
        "model_type": getattr(getattr(model, "config", config), "model_type", None),
        "patched": is_patched(model),
        "position_encoding": getattr(config, "position_encoding", None),
        "absolute_table": config.use_absolute_position_embeddings if tower is None else _reads_table(tower),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "head_dim": head_dim,
        "hidden_size": config.hidden_size,
        "train_grid": None if tower is None else list(tower.train_grid),
        "patch_size": None if tower is None or tower.is_flexible else list(tower.patch_embedding.kernel_size),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "classes": names,
    }
    if tower is None:
        description["num_axes"] = config.num_axes
    if encoding is not None:
        names = ["position_encoding", "block_size", "share_heads", "share_layers", "rotate_prefix"]
        names.append("position_scale" if tower is None else "coordinates")
        names += [name for name in ("spins", "rotate_values") if getattr(encoding.config, name, None)]
        description |= {name: getattr(encoding.config, name) for name in names}
        description["rotated_layers"] = encoding.num_layers
        description["folded"] = encoding.config.folded_grids is not None
    return description


def _reads_table(tower: Tower) -> bool:
    """Whether a table or sinusoids add absolute positions to the patches."""
    adapter = getattr(tower.module, "rotary_patch", None)
    if adapter is not None and (adapter.config.keep_absolute == "drop" or adapter.config.absolute_weight == 0):
        return False
    return position_table(tower.embeddings) is not None


def _remarks(
    transformer: nn.Module, tower: Tower | None, encoding: RotaryEncoding | None, has_inputs: bool
) -> list[str]:
    remarks = []
    if encoding is None and getattr(transformer, "rotary_patch", None) is not None:
        remarks.append("The rotations are learned from the model's own RoPE, whose generators are not shown here.")
    elif encoding is None:
        remarks.append(
            "The model contains no rotations of this package, so there are no generators or frequencies to show."
        )
    if isinstance(encoding, FoldedPlanes):
        remarks.append(
            "The model is folded: its query and key weights contain the eigenbasis, so generators are shown in that "
            "basis, where they are plane rotations. Their elements are not comparable with ComRoPE's Table 8."
        )
    if isinstance(encoding, FoldedLieRE):
        grids = ", ".join("×".join(map(str, grid)) for grid in encoding.config.folded_grids) or "none"
        remarks.append(f"The model is folded: rotations are constants for the grids {grids} and count as parameters.")
    if tower is None:
        remarks.append("Attention, cost and relativity are not measured, because positions of tokens form no grid.")
    elif tower.is_flexible:
        remarks.append("Attention and cost are not measured, because every image has its own grid (spatial_shapes).")
    elif not has_inputs:
        remarks.append("Attention is not measured without images.")
    return remarks


def _collect(value: Any, path: tuple[str, ...], arrays: dict[str, np.ndarray]) -> Any:
    """A value for json; adds its tensors to `arrays`."""
    if isinstance(value, torch.Tensor):
        arrays[".".join(path)] = value.numpy()
        return {"shape": list(value.shape)}
    if dataclasses.is_dataclass(value):
        value = vars(value)
    elif hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, dict):
        return {name: _collect(entry, (*path, name), arrays) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_collect(entry, (*path, str(index)), arrays) for index, entry in enumerate(value)]
    return value
