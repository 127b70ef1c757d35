"""
The inspection report: an HTML page about a model, its learned position encoding, its attention and its cost. The
template has the text of the page; this file computes the tables in it.
"""

import base64
import itertools
from collections.abc import Sequence
from pathlib import Path

import jinja2
import torch

from ..models.encoding.kinds import CONVENTIONS, ENCODINGS
from ..version import __version__
from . import plots
from .analysis import Analysis, InspectedModel
from .comparison import Comparison
from .encodings import EncodingAnalysis, Movement


TEMPLATE = "report.html.jinja"
CLASSES_SHOWN = 3
UNROTATED = {"none": "no positions at all", "absolute": "a learned table of absolute positions"}


def render_report(models: Sequence[InspectedModel], comparison: Comparison | None = None) -> str:
    """Render the page of one model, or of two side by side with their comparison."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).resolve().parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"data_uri": data_uri, "size_name": plots.size_name}
    environment.tests["wide"] = plots.is_wide
    return environment.get_template(TEMPLATE).render(
        name=" and ".join(model.name for model in models),
        version=__version__,
        models=[
            {
                "facts": facts(model.analysis),
                "predictions": prediction_rows(model.analysis, model.sources),
                "axes": plots.axis_names(model.analysis),
                "step": plots.step_name(model.analysis),
                **vars(model),
            }
            for model in models
        ],
        comparison=comparison and _comparison_context(models, comparison),
        plots=plots,
        encodings=UNROTATED | {name: encoding.description for name, encoding in ENCODINGS.items()},
        traits=ENCODINGS,
        describe_start=describe_start,
    )


def _comparison_context(models: Sequence[InspectedModel], comparison: Comparison) -> dict:
    """The template's variables for the comparison of two models."""
    described = [dict(facts(model.analysis)) for model in models]
    rows = [[name, *(each.get(name, "—") for each in described)] for name in dict.fromkeys(itertools.chain(*described))]
    columns = {}
    if comparison.generators is not None:
        columns["generators: ‖A − B‖ / ‖A‖"] = comparison.generators
    if comparison.frequencies is not None and comparison.change is not None:
        for model, frequencies in zip(models, comparison.frequencies):
            columns[f"mean frequency of {model.name}"] = frequencies.norm(dim=0).flatten(1).mean(1)
        columns["mean change of a plane"] = comparison.change.flatten(1).mean(1)
        columns["largest change of a plane"] = comparison.change.flatten(1).amax(1)
    return {
        "remarks": comparison.remarks,
        "facts": [[name, first, second] for name, first, second in rows if first != second],
        "frequencies": comparison.frequencies,
        "columns": list(columns),
        "layers": [
            [str(layer + 1), *(f"{value:.3g}" for value in row)]
            for layer, row in enumerate(zip(*(values.tolist() for values in columns.values())))
        ],
    }


def data_uri(svg: str) -> str:
    return "data:image/svg+xml;base64," + base64.b64encode(svg.encode()).decode()


def _describe(coordinates: str) -> str:
    return f"{coordinates} ({CONVENTIONS[coordinates].description})"


def facts(analysis: Analysis) -> list[tuple[str, str]]:
    """Rows of the configuration table, named as in the configuration."""
    model = analysis.model
    rows = [("model_type", model["model_type"]), ("position_encoding", model["position_encoding"])]
    if analysis.encoding is not None:
        rows += [
            ("block_size", model["block_size"]),
            *((name, model[name]) for name in ("spins", "relative_axis", "position_scale") if name in model),
            *(("coordinates", _describe(name)) for name in [model.get("coordinates")] if name),
            ("share_heads, share_layers", f"{model['share_heads']}, {model['share_layers']}"),
            ("rotate_prefix", model["rotate_prefix"]),
            *((name, model[name]) for name in ("rotate_values",) if name in model),
            ("absolute positions", "added to the patches" if model["absolute_table"] else "none"),
            ("rotated layers", f"{model['rotated_layers']} of {model['layers']}"),
            ("folded", model["folded"]),
        ]
    rows += [("num_hidden_layers", model["layers"]), ("num_attention_heads", model["heads"])]
    rows += [(name, model[name]) for name in ("head_dim", "hidden_size")]
    rows += [(name, " × ".join(map(str, model[name]))) for name in ("train_grid", "patch_size") if model[name]]
    return [(name, "—" if value is None else str(value)) for name, value in rows]


def describe_start(encoding: EncodingAnalysis, step: str = "patch") -> str:
    """Compare the generators with untrained ones of the same configuration."""
    start = encoding.initialization
    if start is None:
        return "They are fixed, not learned."
    if start.movement is not None:
        return _describe_movement(start.name, start.movement, step)
    drawn = (
        f"Untrained ones, drawn with rotary_init={start.name!r} and rotary_init_scale={start.scale:.4g}, have "
        f"{start.std:.3g}. The cumulative distributions of both differ by at most {start.distance:.2g} "
        f"(Kolmogorov–Smirnov); untrained ones differ from each other by up to {start.chance:.2g}"
    )
    if start.distance <= start.chance:
        return (
            f"{drawn}, so their distribution does not show that anything was learned. Single elements may have changed "
            "nevertheless: checkpoints do not contain the initial ones."
        )
    return f"{drawn}: the distribution has changed in training."


def _describe_movement(name: str, movement: Movement, step: str) -> str:
    """How far training moved the generators from a start that the configuration determines."""
    moved, start = (part.square().sum((0, 2)).sqrt() for part in movement)  # (layers,) each
    if not moved.any():
        zero = "" if start.any() else "all zero, "
        return f"They are {zero}as initialised by rotary_init={name!r}: nothing has been learned."
    if not start.any():
        return (
            f"They were initialised to zero (rotary_init={name!r}): all of this was learned. The Frobenius norm of a "
            f"layer is now {moved.min():.2g} to {moved.max():.2g} radians per {step}."
        )
    relative = moved / start
    least, most = relative.argmin().item(), relative.argmax().item()
    return (
        f"Training moved them from their start, rotary_init={name!r}, by {moved.norm() / start.norm():.1%} of its "
        f"Frobenius norm, in radians per {step}: by {relative[least]:.1%} in layer {least + 1} to {relative[most]:.1%} "
        f"in layer {most + 1}."
    )


def prediction_rows(analysis: Analysis, sources: Sequence[str]) -> list[list[str]]:
    """For each image, its name and the most probable classes at each size; empty for models without classes."""
    measured = [entry.probabilities for entry in analysis.inputs if entry.probabilities is not None]
    if not measured:
        return []
    names = analysis.model["classes"]

    def likeliest(probabilities: torch.Tensor) -> str:
        found = probabilities.topk(min(CLASSES_SHOWN, len(names)))
        return ", ".join(f"{names[index]} {value:.1%}" for value, index in zip(*(part.tolist() for part in found)))

    return [
        [source, *(likeliest(probabilities[image]) for probabilities in measured)]
        for image, source in enumerate(sources)
    ]
