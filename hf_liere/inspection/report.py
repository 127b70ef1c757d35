"""The inspection report: an HTML page about a model, its learned position encoding, its attention and its cost."""

import base64
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import jinja2
import numpy as np
import torch

from ..models.encoding.encoding_traits import ENCODING_TRAITS
from ..version import __version__
from .analysis import Analysis, InspectedModel
from .attention_plots import plot_attention, plot_distances
from .comparison import Comparison
from .encodings import EncodingAnalysis, Movement
from .plots import (
    Plot,
    axis_names,
    plot_angles,
    plot_commutators,
    plot_frequencies,
    plot_generators,
    plot_output_change,
    plot_relativity,
    plot_rotations,
    size_name,
    step_name,
)


TEMPLATE = "report.html.jinja"
IMAGES_SHOWN = 3
CLASSES_SHOWN = 3
# Accepted deviation of relative attention logits in nats: a thousand times their rounding error.
RELATIVE_UP_TO = 1e-3
# Relative deviation from a representation that rounding generators of spin 3 to float32 may cause.
REPRESENTS_UP_TO = 1e-6
ENCODINGS = {
    "none": "no positions at all",
    "absolute": "a learned table of absolute positions",
    **{name: traits.description for name, traits in ENCODING_TRAITS.items()},
}
COORDINATES = {
    "index": "patch indices 0, 1, 2, …",
    "train_grid": "0 … 1 over the trained grid",
    "centred_grid": "−½ … ½ over the trained grid",
    "fixed_grid": "0 … 1 from the first to the last patch of any grid",
    "train_index": "indices scaled to the trained grid",
    "unit": "0 … 1 over any grid",
    "unit_width": "0 … 1 over the width of any grid",
    "physical": "lengths about the centre of the input, in physical_unit",
}


def render_report(models: Sequence[InspectedModel], comparison: Comparison | None = None) -> str:
    """Render the page of one model, or of two side by side with their comparison."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).resolve().parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["data_uri"] = data_uri
    return environment.get_template(TEMPLATE).render(
        name=" and ".join(model.name for model in models),
        version=__version__,
        models=[_model_context(model) for model in models],
        comparison=comparison and _comparison_context(models, comparison),
    )


def _model_context(model: InspectedModel) -> dict:
    """The template's variables for one model."""
    analysis = model.analysis
    return {
        "name": model.name,
        "summary": summary(analysis),
        "facts": facts(analysis),
        "remarks": analysis.remarks,
        "learned": list(learned_plots(analysis)),
        "looks": list(attention_plots(analysis, model.shown, model.sources)),
        "sizes": [size_name(entry.size) for entry in analysis.inputs],
        "predictions": prediction_rows(analysis, model.sources),
        "costs": cost_rows(analysis),
        "cost_summary": cost_summary(analysis),
    }


def _comparison_context(models: Sequence[InspectedModel], comparison: Comparison) -> dict:
    """The template's variables for the comparison of two models."""
    described = [dict(facts(model.analysis)) for model in models]
    rows = [[name, *(each.get(name, "—") for each in described)] for name in dict.fromkeys(itertools.chain(*described))]
    differing = [[name, first, second] for name, first, second in rows if first != second]
    shown = {"remarks": comparison.remarks, "facts": differing, "plots": [], "layers": [], "columns": []}
    shown["step"] = step_name(models[0].analysis)
    encoding = models[0].analysis.encoding
    if comparison.frequencies is not None and encoding is not None and encoding.commutators.axes:
        first, second = (model.name for model in models)
        shown["plots"] = [
            Plot(
                "Frequencies plane by plane",
                f"A line for every plane, from its frequency in {first} to that of the plane with the same rank of "
                f"magnitude in {second} (a point). Planes without a line have not changed. Models with the same "
                "frequencies can compute the same function, whatever their encodings are called.",
                "Lines between the learned angular frequencies of two models, by layer.",
                plot_frequencies(models[0].analysis, comparison.frequencies),
            )
        ]
    columns = {}
    if comparison.generators is not None:
        columns["generators: ‖A − B‖ / ‖A‖"] = comparison.generators
    if comparison.frequencies is not None and comparison.change is not None:
        for model, frequencies in zip(models, comparison.frequencies):
            columns[f"mean frequency of {model.name}"] = frequencies.norm(dim=0).flatten(1).mean(1)
        columns["mean change of a plane"] = comparison.change.flatten(1).mean(1)
        columns["largest change of a plane"] = comparison.change.flatten(1).amax(1)
    shown["columns"] = list(columns)
    shown["layers"] = [
        [str(layer + 1), *(f"{value:.3g}" for value in row)]
        for layer, row in enumerate(zip(*(values.tolist() for values in columns.values())))
    ]
    return shown


def data_uri(svg: str) -> str:
    return "data:image/svg+xml;base64," + base64.b64encode(svg.encode()).decode()


def summary(analysis: Analysis) -> str:
    """The model in one or two sentences."""
    model = analysis.model
    if model["train_grid"] is None:
        inputs = f"for tokens with positions on {model['num_axes']} {'axis' if model['num_axes'] == 1 else 'axes'}"
    else:
        inputs = f"trained on grids of {' × '.join(map(str, model['train_grid']))} patches"
    text = (
        f"{model['class']} with {model['parameters']:,} parameters: {model['layers']} layers, {model['heads']} heads, "
        f"{model['hidden_size']} wide, {inputs}. "
    )
    encoding = model["position_encoding"]
    if encoding is None:
        return text + "Its positions are encoded as in its family."
    kind = ENCODINGS[encoding]
    if encoding in ENCODING_TRAITS and not ENCODING_TRAITS[encoding].planar:
        kind += f", in blocks of {model['block_size']} channels"
    text += f"Its position encoding is {encoding} — {kind}"
    if model["patched"]:
        text += ", patched into a pretrained model"
    if model["absolute_table"] and encoding != "absolute":
        text += ", in addition to absolute positions that the model adds to its patches"
    return text + "."


def facts(analysis: Analysis) -> list[tuple[str, str]]:
    """Rows of the configuration table, named as in the configuration."""
    model = analysis.model
    rows = [("model_type", model["model_type"]), ("position_encoding", model["position_encoding"])]
    if analysis.encoding is not None:
        rows += [
            ("block_size", model["block_size"]),
            *((name, model[name]) for name in ("spins", "relative_axis", "position_scale") if name in model),
            *(("coordinates", f"{name} ({COORDINATES[name]})") for name in [model.get("coordinates")] if name),
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


def learned_plots(analysis: Analysis) -> Iterator[Plot]:
    encoding, axes = analysis.encoding, axis_names(analysis)
    if encoding is None:
        return
    product = ENCODING_TRAITS[analysis.model["position_encoding"]].product
    form = "Π exp(pₐ Aₐ)" if product else "exp(Σ pₐ Aₐ)"
    blocks = "with the blocks of each layer's and head's block-diagonal matrix side by side"
    yield Plot(
        "Generators",
        f"The skew-symmetric Aₐ of every axis, {blocks}. The common colour scale excludes half a percent of them.",
        "Heat maps of the generators of every axis by layer and head.",
        plot_generators(encoding, axes),
    )
    yield Plot(
        "Rotations",
        f"R(p) = {form} for a displacement of one {step_name(analysis)}, {blocks}. Matrices close to the identity "
        "hardly distinguish such neighbours; matrices far from it tell them apart.",
        "Heat maps of rotation matrices by layer and head.",
        plot_rotations(encoding, axes, step_name(analysis)),
    )
    yield from _commutation_plots(analysis, axes)
    paper = ""
    if encoding.generators.shape[-1] == 8:
        paper = " (ComRoPE's Table 8, for models with b = 8: LieRE 0.195, AP 0.171, LD 0.238)"
    yield Plot(
        "Elements of the angle matrices",
        "Distribution of the upper triangles of the generators (ComRoPE App. F, Fig. 8). Their standard deviation "
        f"is {encoding.angles.std:.3g} radians per unit of the coordinate{paper}. "
        f"{describe_start(encoding, step_name(analysis))}",
        "Density of the generators' elements on a linear and on a logarithmic scale, and their standard deviation by "
        "layer, compared with untrained ones.",
        plot_angles(encoding),
    )
    if encoding.frequencies is not None and encoding.commutators.axes:
        largest, step = encoding.frequencies.per_patch.abs().max().item(), step_name(analysis)
        beyond = ""
        if largest > np.pi:
            beyond = f" Outside the dashed square, a plane rotates by more than π per {step}: it aliases."
        yield Plot(
            "Frequencies in the plane",
            "Each point is a common plane of the generators, which rotates by f · (q − p) between tokens p and q. "
            "These frequencies are the canonical form of the encoding: in the basis of the planes, which the query and "
            "key weights can absorb, it is RoPE-Mixed. So they allow comparing all encodings whose generators commute. "
            f"The largest component is {largest:.3g} radians per {step}.{beyond}",
            "Scatter plot of the learned angular frequencies, by layer.",
            plot_frequencies(analysis, [encoding.frequencies.per_patch]),
        )


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


def _commutation_plots(analysis: Analysis, axes: list[str]) -> Iterator[Plot]:
    encoding = analysis.encoding
    assert encoding is not None, "plots are of an encoding"
    if encoding.commutators.axes:
        largest = encoding.commutators.relative.max().item()
        if largest < 1e-9:
            verdict = (
                "The generators commute: these rotations depend only on the difference of two tokens' positions. "
                f"{describe_relativity(analysis)}"
            )
        elif encoding.representation is not None:
            verdict = describe_representation(encoding.representation)
        else:
            verdict = (
                "The generators do not commute: attention between two tokens depends on both positions, and no basis "
                "turns these rotations into RoPE-Mixed."
            )
        yield Plot(
            "Commutators",
            f"‖AB − BA‖ / (‖A‖ ‖B‖) of the generators A and B of two axes, Frobenius norms over a head; at most "
            f"{largest:.2g}. {verdict}",
            "Heat map of relative commutator norms by layer and head.",
            plot_commutators(encoding, axes),
        )
    if encoding.relativity is None:
        return
    largest = encoding.relativity.largest.max().item()
    price = (
        "Zero up to rounding in float64: these rotations are exactly relative."
        if largest < 1e-5
        else "Generators that do not commute cause this error; the maximum is 2."
    )
    yield Plot(
        "Deviation from relativity",
        "e(c) = ‖R(p + c)ᵀR(q + c) − R(p)ᵀR(q)‖, the spectral norm, over pairs of patches (the RoPE equation, ComRoPE "
        f"eq. 2, requires 0). Lines are means over heads, blocks and pairs; the maximum is {largest:.2g}. {price}",
        "Curves of the relativity error over the offset, by layer.",
        plot_relativity(encoding.relativity),
    )
    for entry in analysis.inputs:
        if entry.output_change is not None:
            yield Plot(
                "Effect of a common offset on the output",
                "Change of the pooled output if the coordinates of all patches move by the same offset (ComRoPE Fig. "
                f"5) at {size_name(entry.size)}, mean and quartiles over images. Class and register tokens without "
                "rotations do not move, so their attention to patches changes with every encoding. Other sources of "
                "positions, such as a table, do not move either: 0 is a statement only about these rotations.",
                "Curve of the relative change of the output over the offset.",
                plot_output_change(entry.output_change),
            )


def describe_representation(error: torch.Tensor) -> str:
    """Describe the (layers, heads) distances of generators from a representation of so(3)."""
    largest, mean = error.max().item(), error.mean().item()
    measured = (
        "The generators do not commute. They started at a representation of so(3), where [A₁, A₂] = A₃ and cyclically: "
        f"‖[Aₐ, A_b] − A_c‖ / ‖A_c‖ is at most {largest:.2g}, and {mean:.2g} on average over layers and heads. "
    )
    if largest <= REPRESENTS_UP_TO:
        return f"{measured}They are one up to rounding: these rotations depend only on relative orientations."
    return f"{measured}They are no longer one, so that attention depends on the frame of the orientations."


def describe_relativity(analysis: Analysis) -> str:
    """Describe whether the model's attention depends only on position differences, with the measured figure."""
    found = analysis.attention_relativity
    reason = "absolute positions are added to its patches" if analysis.model["absolute_table"] else None
    if found is None:
        return f"The model's attention does not: {reason}." if reason else "The model's attention was not measured."
    largest = found.max().item()
    measured = f"On equal patches, the first layer's logits at equal position differences vary by up to {largest:.2g}"
    if reason is None and largest > RELATIVE_UP_TO:
        reason = "something else in the model encodes positions"
    if reason is not None:
        return f"The model's attention does not: {reason}. {measured}."
    return f"So does the model's attention. {measured}, which is rounding."


def attention_plots(analysis: Analysis, shown: Sequence[np.ndarray], sources: Sequence[str]) -> Iterator[Plot]:
    entries = [entry for entry in analysis.inputs if entry.attention is not None]
    if not entries:
        return
    first = entries[0].attention
    assert first is not None, "entries have attention"
    query = {
        "class token": "of the class token to every patch, mean over heads",
        "mean of patches": "to every patch, mean over all patches as queries and over heads",
    }[first.query]
    is_video = len(first.grid) == 3
    sizes, rescaled = ("by frame", "layer") if is_video else ("by input size", "map")
    for image, source in enumerate(sources[:IMAGES_SHOWN]):
        yield Plot(
            f"Attention on {source}",
            f"Attention {query}, {sizes}. Every {rescaled} is rescaled from its least to its most (LieRE App. G).",
            f"Attention maps of every layer laid over {source}, {sizes}.",
            plot_attention(entries[:1] if is_video else entries, shown, image),
        )
    extent = " × ".join(map(str, analysis.model["patch_size"]))
    inputs, units = ("clips", "frames and pixels") if is_video else ("images", "pixels")
    yield Plot(
        "Attention distance",
        "Mean distance between patches as queries and keys, weighted by attention (ViT, Fig. 11), a point per head, "
        f"{inputs} looked at: {len(sources)}; one patch is {extent} {units}. The dashed line is attention to all "
        "patches alike.",
        "Attention distance of every head over the layers, by input size.",
        plot_distances(entries),
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


def cost_rows(analysis: Analysis) -> list[list[str]]:
    """Rows of size, million operations, those for computing and for applying rotations, and the share of both."""
    rows = []
    for size, cost in ((entry.size, entry.cost) for entry in analysis.inputs):
        counts = (cost.operations, cost.rotation_operations, cost.rotating_operations)
        rows.append([size_name(size), *(f"{count / 1e6:,.2f}" for count in counts), f"{cost.operation_share:.1%}"])
    return rows


def cost_summary(analysis: Analysis) -> str:
    if not analysis.inputs:
        return ""
    cost = analysis.inputs[0].cost
    return (
        f"The vision tower has {cost.parameters:,} parameters: {cost.encoding_parameters:,} for rotations and "
        f"{cost.table_parameters:,} for a table of absolute positions, together {cost.parameter_share:.2%}."
    )
