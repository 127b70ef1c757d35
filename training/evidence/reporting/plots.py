"""Pictures of sweeps, by [`plot`]. An encoding has the same colour and marker in all of them."""

import math
import textwrap
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib import pyplot

from training.common.records import save_figure
from training.evidence.reporting.comparisons import Comparison, Comparisons
from training.evidence.reporting.conclusions import names_in_prose
from training.evidence.reporting.result_table import AS_TRAINED, METRICS, SEEDS, Cell, Table, condition, method
from training.evidence.reporting.significance import Interval


matplotlib.use("Agg")
# Okabe and Ito's colours without their yellow, told apart with any colour vision; markers help in black and white.
STYLES = tuple(
    {"color": color, "marker": marker}
    for color, marker in zip(
        ("#000000", "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#888888"), "osD^v<>X"
    )
)
ENCODINGS = ("Absolute", "LieRE", "RoPE-Mixed", "ComRoPE-LD", "ComRoPE-AP", "", "Axial RoPE", "no positions")
AXES = {
    "image_size": "image size in the evaluation (px)",
    "block_size": "block size b of the generators",
    "evaluation_offset": "offset ρ of all coordinates (extents of a training image)",
    "train_fraction": "share of the training images",
    "position_perturbation": "perturbation σ in training (patches)",
    "hidden_size": "channels",
    "max_length": "tokens in a block of the evaluation",
}
# Not comparable with squares, which have no such number.
NOT_ON_AXES = ("max_num_patches",)
# Smallest axis span, in percent for accuracies, so that small differences look small.
LEAST_SPAN = {"accuracy": 5.0, "AUC": 0.05, "mAP": 0.05, "perplexity": 0.05}
# Characters per line above a picture.
TITLE_WIDTH = 90
# The same in the names beside rows.
ROW_WIDTH = 42
# The same in a legend below it, and what a handle takes of them.
LEGEND_WIDTH, LEGEND_HANDLE = 112, 8
# The axis is logarithmic if the largest number is this many times the smallest.
LOGARITHMIC = 8


def plot(table: Table, title: str, path: Path, chance: tuple[float, str] | None = None) -> None:
    """
    Draws a sweep: lines if a condition or setting is a number, else a row of points for each model.

    Args:
        chance: The result of an answer without looking, drawn as a line, and its name.
    """
    label = METRICS[next(iter(next(iter(table.values())).values())).metric()]
    lines, number = find_lines(table)
    if len(lines) > len(STYLES):
        # More lines than styles would be indistinguishable.
        lines = {}
    conditions = max(len(cells) for cells in table.values())
    height = 4.5 if lines else 1.5 + 0.16 * (1 + conditions) * len(table)
    figure, axes = pyplot.subplots(figsize=(7, height), layout="constrained")
    scale = f"{label} (%)" if label == "accuracy" else label
    if lines:
        _plot_lines(axes, lines, number, label)
        axes.set_xlabel(AXES.get(number, number))
        axes.set_ylabel(scale)
        axes.grid(axis="y", color="#DDDDDD")
        handles, labels = axes.get_legend_handles_labels()
        columns = min(4, LEGEND_WIDTH // max(len(name) + LEGEND_HANDLE for name in labels))
        figure.legend(handles, labels, frameon=False, loc="outside lower center", ncols=max(1, columns))
    else:
        _plot_rows(axes, table, label)
        axes.set_xlabel(scale)
        axes.grid(axis="x", color="#DDDDDD")
        axes.set_axisbelow(True)
        if conditions > 1:
            figure.legend(frameon=False, loc="outside lower center", ncols=3)
    if chance is not None:
        level, name = chance
        _draw_chance(axes, (100 if label == "accuracy" else 1) * level, name, across=not lines)
    low, high = axes.get_ylim() if lines else axes.get_xlim()
    missing = max(LEAST_SPAN[label] - (high - low), 0) / 2
    (axes.set_ylim if lines else axes.set_xlim)(low - missing, high + missing)
    _save(figure, title, path)


def plot_differences(found: Comparisons, table: Table, title: str, path: Path) -> None:
    """
    Draws tested differences between models with their intervals. Where seeds or documents are compared in pairs, the
    results of the single models say little about them.
    """
    made = tested_models(found, table)
    names, cell = names_in_prose(table), made[0].cell(table)
    pairs, columns = ([*dict.fromkeys(some)] for some in zip(*(((one.row, one.against), one.column) for one in made)))
    bases = list(dict.fromkeys(names[against] for _, against in pairs))
    told = [_pair(names[row], names[against]) if len(bases) > 1 else names[row] for row, against in pairs]
    told = [textwrap.fill(words, ROW_WIDTH) for words in told]
    height = max(0.2 * (1 + len(columns)), 0.18 * max(1 + words.count("\n") for words in told))
    figure, axes = pyplot.subplots(figsize=(7, 1.6 + height * len(pairs)), layout="constrained")
    axes.axvline(0, color="#555555", linestyle=":", linewidth=1.2)
    for one in made:
        index = columns.index(one.column)
        place = pairs.index((one.row, one.against)) + (index - (len(columns) - 1) / 2) * 0.8 / (1 + len(columns))
        sides = [table[row][one.column].outcomes.values.mean(axis=(1, 2)) for row in (one.against, one.row)]
        single = sides[1] - sides[0] if len(sides[0]) == len(sides[1]) else []
        interval = one.test.difference
        mean, low, high, *seeds = (
            _percent(value, cell) for value in (interval.mean, interval.low, interval.high, *single)
        )
        style = {**STYLES[index], "linestyle": ""}
        reach = [[mean - low], [high - mean]]
        axes.errorbar(mean, place, xerr=reach, label=one.column, capsize=2.5, markersize=5, linewidth=1.2, **style)
        axes.plot(seeds, [place] * len(seeds), **style | {"marker": "o"}, markerfacecolor="none", markersize=3)
    axes.set_yticks(range(len(pairs)), told)
    axes.set_ylim(len(pairs) - 0.5, -0.5)
    unit = "points" if cell.metric() == "eval_accuracy" else "%"
    axes.set_xlabel(f"difference of {METRICS[cell.metric()]}{f' from {bases[0]}' if len(bases) == 1 else ''} ({unit})")
    axes.grid(axis="x", color="#DDDDDD")
    axes.set_axisbelow(True)
    if len(columns) > 1:
        handles = dict(zip(*reversed(axes.get_legend_handles_labels())))
        figure.legend(handles.values(), handles, frameon=False, loc="outside lower center", ncols=3)
    _save(figure, title, path)


def _pair(row: str, against: str) -> str:
    """Both names. What they have in parentheses is said once if it is the same."""
    shared = row.partition(" (")[2] == against.partition(" (")[2]
    return f"{row.partition(' (')[0] if shared else row} against {against}"


def tested_models(found: Comparisons, table: Table) -> list[Comparison]:
    """The tests of two models by the metric of the table."""
    return [one for one in found.made if one.kind == "mean" and one.metric is None and one.against in table]


def _percent(value: float, cell: Cell) -> float:
    """A difference of outcomes as a picture shows it: in points, or of perplexities in percent."""
    return 100 * (math.expm1(value) if cell.metric() == "eval_perplexity" else value)


def _save(figure, title: str, path: Path) -> None:
    figure.suptitle("\n".join(textwrap.fill(line, TITLE_WIDTH) for line in title.splitlines()), fontsize=10)
    save_figure(figure, path, dpi=110)
    pyplot.close(figure)


def _draw_chance(axes, accuracy: float, name: str, across: bool) -> None:
    """A line with its name at one end."""
    (axes.axvline if across else axes.axhline)(accuracy, color="#555555", linestyle=":", linewidth=1.2)
    place = {"x": accuracy, "y": 1.0} if across else {"x": 1.0, "y": accuracy}
    transform = axes.get_xaxis_transform() if across else axes.get_yaxis_transform()
    aligned = {"ha": "center", "va": "bottom"} if across else {"ha": "right", "va": "bottom"}
    axes.text(**place, s=name, transform=transform, color="#555555", fontsize=8, **aligned)


def find_lines(table: Table) -> tuple[dict[str, list[tuple[float, Cell]]], str]:
    """Points by line, and the name of the horizontal axis: the one numeric condition or setting that varies."""
    lines: dict[str, list[tuple[float, Cell]]] = defaultdict(list)
    conditions = [cell.results[0]["condition"] for cells in table.values() for cell in cells.values()]
    numbers = {name for given in conditions for name, value in given.items() if _is_number(name, value)}
    # If several conditions are numbers, the first one is the axis and the others make lines.
    number = next((name for name in [*AXES, *sorted(numbers)] if name in numbers), "")
    for row, cells in table.items():
        for cell in cells.values() if number else ():
            result = cell.results[0]
            place = result["condition"].get(number, _as_trained(result, number))
            if place is not None:
                others = condition({name: value for name, value in result["condition"].items() if name != number})
                name = row if others == AS_TRAINED or len(cells) == 1 else f"{row} (evaluated: {others})"
                lines[name].append((place, cell))
    if lines and all(len(points) > 1 for points in lines.values()):
        return lines, number
    lines.clear()
    settings = [next(iter(cells.values())).results[0]["settings"] for cells in table.values()]
    numbers = {name for given in settings for name, value in given.items() if _is_number(name, value)}
    # Scales are one number, or one for each axis.
    numbers -= {name for given in settings for name, value in given.items() if isinstance(value, list)}
    varying = [name for name in sorted(numbers) if len({given.get(name) for given in settings}) > 2]
    if len(varying) != 1:
        return {}, ""
    for given, cells in zip(settings, table.values()):
        if varying[0] == "block_size" and given.get("position_encoding") == "rope_mixed":
            # RoPE-Mixed is LieRE in blocks of 2.
            given = {"position_encoding": "liere", "block_size": 2}
        if varying[0] in given:
            row = method({name: value for name, value in given.items() if name != varying[0]})
            row = row.replace("LieRE8", "LieRE, b = 2: RoPE-Mixed") if varying[0] == "block_size" else row
            lines[row].append((given[varying[0]], next(iter(cells.values()))))
    # Comparisons of encodings are not drawn as lines, even if some encodings have a number.
    return (lines, varying[0]) if all(len(points) > 1 for points in lines.values()) else ({}, "")


def _as_trained(result: dict[str, Any], number: str) -> float | None:
    """The training value of a condition that the evaluation did not set."""
    if number == "image_size":
        size = result["run"].get("image_size")
        return size[-1] if size else None
    return result["run"]["data"]["max_length"] if number == "max_length" else None


def _plot_lines(axes, lines: dict[str, list[tuple[float, Cell]]], number: str, label: str) -> None:
    numbers = sorted({place for points in lines.values() for place, _ in points})
    logarithmic = numbers[0] > 0 and numbers[-1] / numbers[0] >= LOGARITHMIC
    if logarithmic:
        axes.set_xscale("log", base=2)
    axes.set_xticks(numbers, [f"{value:g}" for value in numbers])
    axes.minorticks_off()
    looks = styles(list(lines))
    for index, (row, points) in enumerate(lines.items()):
        points = sorted(points, key=lambda point: point[0])
        # Shift points sideways, so that no interval hides another.
        aside = (index - (len(lines) - 1) / 2) / 150
        width = numbers[-1] - numbers[0]
        places = [
            place * (numbers[-1] / numbers[0]) ** aside if logarithmic else place + width * aside for place, _ in points
        ]
        _draw(axes, places, [cell for _, cell in points], label, looks[row], row, "-")


def _plot_rows(axes, table: Table, label: str) -> None:
    """Draws models from top to bottom with their conditions below each other."""
    conditions = list(dict.fromkeys(column for cells in table.values() for column in cells))
    for index, column in enumerate(conditions):
        places = [
            (place + (index - (len(conditions) - 1) / 2) * 0.8 / (1 + len(conditions)), cells[column])
            for place, cells in enumerate(table.values())
            if column in cells
        ]
        heights, cells = zip(*places)
        _draw(axes, heights, cells, label, STYLES[index % len(STYLES)], column, "", across=True)
    axes.set_yticks(range(len(table)), [textwrap.fill(row, ROW_WIDTH) for row in names_in_prose(table).values()])
    axes.set_ylim(len(table) - 0.5, -0.5)


def _draw(
    axes, places: Sequence[float], cells: Sequence[Cell], label: str, style: dict, name: str, line: str, across=False
) -> None:
    """Draws means, intervals if there are any, and single seeds. With `across`, places are on the vertical axis."""
    scale = 100 if label == "accuracy" else 1
    means = [cell.mean * scale for cell in cells]
    x, y = (means, places) if across else (places, means)
    bars = {"xerr" if across else "yerr": reaches(cells, scale)}
    axes.errorbar(x, y, **bars, **style, label=name, linestyle=line, capsize=2.5, markersize=5, linewidth=1.2)
    seeds = [(place, value * scale) for place, cell in zip(places, cells) for value in cell.by_seed().values()]
    if len(seeds) > len(cells):
        places, values = zip(*seeds)
        x, y = (values, places) if across else (places, values)
        axes.plot(x, y, linestyle="", marker="o", markerfacecolor="none", color=style["color"], markersize=3)


def reaches(cells: Sequence[Cell], scale: float) -> tuple[list[float], list[float]]:
    """How far intervals reach below and above the means; NaN, which is not drawn, without one."""
    intervals = [cell.interval or Interval(cell.mean, math.nan, math.nan) for cell in cells]
    below = [scale * (interval.mean - interval.low) for interval in intervals]
    return below, [scale * (interval.high - interval.mean) for interval in intervals]


def styles(rows: list[str]) -> dict[str, dict[str, Any]]:
    """The style of each row's encoding. A row whose style is taken gets a free one."""
    owners = {}
    for row in rows:
        owners.setdefault(_encoding(row), row)
    owners.pop(None, None)
    places = {row: place for place, row in owners.items()}
    # Prefer styles that belong to no encoding, so that styles do not depend on the other rows.
    free = [place for place in range(len(STYLES)) if place not in owners]
    left = sorted(free, key=lambda place: ENCODINGS[place] != "") or [0]
    others = [row for row in rows if row not in places]
    places |= {row: left[number % len(left)] for number, row in enumerate(others)}
    return {row: STYLES[place] for row, place in places.items()}


def _encoding(row: str) -> int | None:
    return next((place for place, name in enumerate(ENCODINGS) if name and row.startswith(name)), None)


def _is_number(name: str, value: Any) -> bool:
    return name not in (*SEEDS, *NOT_ON_AXES) and isinstance(value, int | float) and not isinstance(value, bool)
