"""
The inspection report: an HTML page about a model, its attention, its learned position encoding and its cost. The
templates have the text of the page; this file computes the tables in it.
"""

import base64
import itertools
from collections.abc import Sequence
from pathlib import Path

import jinja2

from ...encoding.kinds import ENCODINGS
from ...encoding.positions import CONVENTIONS
from ...version import __version__
from . import plots
from .analysis import Analysis, Comparison, InspectedModel


# Facts that the sentence above the table states.
IN_WORDS = ("class", "patched", "num_axes", "parameters", "classes")
UNROTATED = {"none": "no positions at all", "absolute": "a learned table of absolute positions"}


def environment() -> jinja2.Environment:
    """The jinja environment that renders the templates."""
    found = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).resolve().parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters |= {"data_uri": data_uri, "size_name": plots.size_name}
    found.tests["wide"] = plots.is_wide
    encodings = UNROTATED | {name: encoding.description for name, encoding in ENCODINGS.items()}
    found.globals |= {"plots": plots, "encodings": encodings, "traits": ENCODINGS, "facts": facts}
    return found


def render_report(models: Sequence[InspectedModel], comparison: Comparison | None = None) -> str:
    """Render the page of one model, or of two side by side with their comparison."""
    page = environment().get_template("report.html.jinja")
    return page.render(
        name=" and ".join(model.name for model in models),
        version=__version__,
        models=models,
        comparison=comparison and _comparison_context(models, comparison),
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


def facts(analysis: Analysis) -> list[tuple[str, str]]:
    """Rows of the configuration table, named as in the configuration."""
    rows = {name: value for name, value in analysis.model.items() if name not in IN_WORDS and value is not None}
    rows |= {name: " × ".join(map(str, rows[name])) for name in ("train_grid", "patch_size") if name in rows}
    if "coordinates" in rows:
        rows["coordinates"] += f" ({CONVENTIONS[rows['coordinates']].description})"
    return [(name, str(value)) for name, value in rows.items()]
