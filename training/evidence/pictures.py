"""Draws the pictures of the documentation, each for light and dark pages:

    python training/evidence/pictures.py

It writes to training/evidence/figures, or `--output_dir`:

- rotations_*.svg: the effect of four encodings on a query and on attention logits, computed by [`LieRotaryEmbedding`]
- products_*.svg: which moves of all tokens the attention logits of two encodings see, computed likewise
- orientations_*.svg: attention logits of four encodings of orientations while the world turns, computed by it too
- poses_*.svg: accuracy of five models in orientations that they were not trained in, from training/evidence/results
- resolutions_*.svg: accuracy against image size, from results/archive
- costs_*.svg: time that encodings add to a step against the number of tokens, from the table of speed_tables.md
- diffusion_*.svg: losses of a small diffusion transformer at a larger size than in training, from results
"""

import argparse
import json
import re
import sys
from pathlib import Path


sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import yaml
from matplotlib.patches import Circle

from hf_liere import LieRotaryEmbedding, matrix_to_rotation_vector, rotation_vector_to_matrix
from hf_liere.encoding.kinds import ENCODINGS
from hf_liere.encoding.positions import TokenPositions
from hf_liere.tools.inspection.plots import COLOURS, draw
from training.common.records import write_text
from training.engine.runs import start
from training.evidence.reporting.plots import reaches, styles
from training.evidence.reporting.result_lines import read_results
from training.evidence.reporting.result_table import AS_TRAINED, Cell, arrange
from training.evidence.reporting.sections import Section


TRAINING = Path(__file__).resolve().parents[1]
FIGURES = TRAINING / "evidence" / "figures"
RESULTS = TRAINING / "evidence" / "results"
SWEEPS = TRAINING / "evidence" / "sweeps"
SPEED = TRAINING.parent / "docs" / "reference" / "speed_tables.md"
# Rows of the benchmark with their names in pictures; a share in percent with its interval, or only an interval.
COSTS = {"rope_mixed": "RoPE-Mixed", "comrope_ld8": "ComRoPE-LD", "liere8": "LieRE8"}
SHARE = re.compile(r"(?:([\d.]+)% \()?([\d.]+) – ([\d.]+)%")
# Encodings with their default coordinates and initial values, by the title of their column.
SHOWN = {
    "Axial RoPE": {"position_encoding": "axial_rope"},
    "RoPE-Mixed": {"position_encoding": "rope_mixed"},
    "ComRoPE-LD": {"position_encoding": "comrope_ld", "block_size": 8},
    "LieRE8": {"position_encoding": "liere", "block_size": 8},
}
# The same for pictures of moves along one axis, which ends at another row or column of the query.
MOVED = {"LieRE product": {"position_encoding": "liere_product"}, "LieRE8": SHOWN["LieRE8"]}
START, MOVES = (8, 8), {"all moved by 11 rows": (19, 8), "all moved by 11 columns": (8, 19)}
# Standard deviation of the entries of bases, which start at the identity.
BASES_STD = 0.05
GRID, HEAD_DIM, REACH = 28, 64, 8
# Points per patch of a path.
FINE = 8
# A plane that Axial RoPE rotates with the column, by 0.42 radians per patch.
PLANE = 38
# Row and column of the query, before and after it moves together with the key; largest change on the colour scale.
PLACES = ((8, 19), (19, 8))
LARGEST_CHANGE = 0.25
# Encodings of orientations, in rotation vectors as they are, by the title of their panel.
TURNED = {
    "RoPE-Mixed": SHOWN["RoPE-Mixed"],
    "ComRoPE-LD": SHOWN["ComRoPE-LD"],
    "LieRE8": SHOWN["LieRE8"],
    "LieRE3 from so(3)": {"position_encoding": "liere", "block_size": 3, "rotary_init": "so3"},
}
# Rotation vectors of the keys as the query sees them, in radians, by name; the axis and the angles of the world's turn.
SEEN = {"turned by 29°": (0.0, 0.0, 0.5), "by 69°": (0.0, 1.2, 0.0), "by 115°": (2.0, 0.0, 0.0)}
WORLD_AXIS, WORLD_ANGLES = (1 / 3, 2 / 3, 2 / 3), torch.linspace(0, 2 * torch.pi, 240, dtype=torch.float64)
# Rows of the sweep `poses` by their names in the picture, those that start at the rotations of space first.
ORIENTED = {
    "LieRE from so(3), frozen": "LieRE from so(3), frozen",
    "LieRE from so(3), learned": "LieRE from so(3), learned",
    "features in the query's frame": "rotation matrices in the frame of the query, as features, two layers",
    "features in the world's frame": "rotation matrices as features, two layers",
    "Axial RoPE": "Axial RoPE",
    "LieRE8 from its usual start": "LieRE8, usual start",
}
WALKS = {
    "along a row": ((0, 1), {"color": COLOURS[0], "linestyle": "-", "linewidth": 3.6, "marker": "o"}),
    "along a column": ((1, 0), {"color": COLOURS[1], "linestyle": "--", "linewidth": 2.2, "marker": "s"}),
    "along the diagonal": ((1, 1), {"color": COLOURS[2], "linestyle": ":", "linewidth": 1.6, "marker": "^"}),
}
# Line styles by row of the sweep. Colours and markers are those of the report.
LINES = {
    "no positions": ":",
    "Absolute": "-",
    "Axial RoPE": "--",
    "RoPE-Mixed": "--",
    "LieRE8": "-",
    "LieRE32": ":",
    "ComRoPE-AP": "-.",
    "ComRoPE-LD": "-.",
}


def rotary_layer(settings: dict, num_axes: int = 2) -> LieRotaryEmbedding:
    """One head of a newly initialised encoding, the same in every run, with drawn bases."""
    torch.manual_seed(0)
    layer = LieRotaryEmbedding(num_heads=1, head_dim=HEAD_DIM, num_axes=num_axes, **settings)
    for name, parameter in layer.named_parameters():
        if name.endswith("skew"):
            torch.nn.init.normal_(parameter, std=BASES_STD)
    return layer


def unit_query() -> torch.Tensor:
    """(1, 1, 1, head_dim): a query of length 1, the same in every run."""
    query = torch.randn(HEAD_DIM, generator=torch.Generator().manual_seed(1))
    return (query / query.norm()).view(1, 1, 1, HEAD_DIM)


def positions_of(settings: dict, patches: torch.Tensor) -> torch.Tensor:
    """Coordinates (N, 2) of the patches (N, 2) of the grid in the convention of the encoding."""
    convention = ENCODINGS[settings["position_encoding"]].coordinates
    coordinates = TokenPositions.from_grid((GRID, GRID), (GRID, GRID), convention).coordinates
    return coordinates.view(GRID, GRID, 2)[patches[:, 0], patches[:, 1]].float()


@torch.no_grad()
def walk(settings: dict, direction: tuple[int, int]) -> torch.Tensor:
    """(points, 2): R(p) q in one plane of channels for a query q = (1, 0) of that plane, p from the origin onwards."""
    first, second = positions_of(settings, torch.tensor([(0, 0), direction]))
    positions = torch.arange(REACH * FINE + 1)[:, None] / FINE * (second - first)
    query = torch.zeros(1, 1, len(positions), HEAD_DIM)
    query[..., PLANE] = 1.0
    return rotary_layer(settings).rotate(query, positions)[0, 0, :, PLANE : PLANE + 2]


@torch.no_grad()
def logits(settings: dict, place: tuple[int, int]) -> torch.Tensor:
    """
    (2 · reach + 1, 2 · reach + 1): q · R(p)ᵀ R(p′) q for a q of length 1, the query's patch p at `place` and the
    keys' patches p′ in the square around it; 1 at the centre.
    """
    query = unit_query()
    rows, columns = (torch.arange(at - REACH, at + REACH + 1) for at in place)
    keys = torch.cartesian_prod(rows, columns)
    layer = rotary_layer(settings)
    rotated = layer.rotate(query, positions_of(settings, torch.tensor([place])))
    key = layer.rotate(query.expand(-1, -1, len(keys), -1), positions_of(settings, keys))
    return (rotated @ key.mT).view(len(rows), len(columns))


def draw_rotations() -> dict[str, str]:
    walks = {title: [walk(settings, direction) for direction, _ in WALKS.values()] for title, settings in SHOWN.items()}
    squares = {title: [logits(settings, place) for place in PLACES] for title, settings in SHOWN.items()}
    (row, column), (to_row, to_column) = PLACES
    named = (
        (f"query in row {row}, column {column}", 1.0),
        (f"moved to row {to_row}, column {to_column}", LARGEST_CHANGE),
    )

    def paint(figure, theme: dict) -> None:
        panels = figure.subplots(3, len(SHOWN))
        for axis, title in zip(panels[0], SHOWN):
            axis.set_title(title, fontsize=11)
            axis.add_patch(Circle((0, 0), 1, fill=False, edgecolor=theme["line"], linewidth=0.6))
            for path, (label, (_, style)) in zip(walks[title], WALKS.items()):
                axis.plot(*path.T.numpy(), markersize=4, markevery=FINE, label=label, **style)
            axis.set(xlim=(-1.15, 1.15), ylim=(-1.15, 1.15), aspect="equal", xticks=[-1, 0, 1], yticks=[-1, 0, 1])
        panels[0, 0].set_ylabel("two channels of\nthe rotated query")
        for line, (label, bound) in zip(panels[1:], named):
            for axis, (first, second) in zip(line, squares.values()):
                shown = paint_square(axis, first if axis in panels[1] else second - first, theme, bound)
            line[0].set_ylabel(f"{label}\nrows to the key")
            quantity = "attention logit" if bound == 1 else "change of the logit"
            figure.colorbar(shown, ax=line.tolist(), label=quantity, aspect=15, ticks=[-bound, 0, bound])
        for axis in panels[-1]:
            axis.set_xlabel("columns to the key")
        figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=3, handlelength=5)

    return draw(paint, 9.0, 7.2)


def draw_products() -> dict[str, str]:
    squares = {
        title: [logits(settings, place) for place in (START, *MOVES.values())] for title, settings in MOVED.items()
    }

    def paint(figure, theme: dict) -> None:
        panels = figure.subplots(len(MOVED), 1 + len(MOVES))
        for line, (title, (first, *others)) in zip(panels, squares.items()):
            shown = paint_square(line[0], first, theme, 1.0)
            figure.colorbar(shown, ax=line[0], label="attention logit", ticks=[-1, 0, 1])
            for axis, moved in zip(line[1:], others):
                shown = paint_square(axis, moved - first, theme, LARGEST_CHANGE)
            ticks = [-LARGEST_CHANGE, 0, LARGEST_CHANGE]
            figure.colorbar(shown, ax=line[1:].tolist(), label="change of the logit", ticks=ticks)
            line[0].set_ylabel(f"{title}\nrows to the key")
        for axis, title in zip(panels[0], (f"query in row {START[0]}, column {START[1]}", *MOVES)):
            axis.set_title(title, fontsize=10)
        for axis in panels[-1]:
            axis.set_xlabel("columns to the key")

    return draw(paint, 9.0, 5.0)


def paint_square(axis, values: torch.Tensor, theme: dict, bound: float):
    """Draws a value between −bound and bound for every key around the query."""
    edge = REACH + 0.5
    style = {"cmap": theme["signs"], "vmin": -bound, "vmax": bound, "interpolation": "nearest"}
    axis.set(xticks=[-REACH, 0, REACH], yticks=[-REACH, 0, REACH])
    axis.spines[:].set_visible(False)
    if values.abs().max() < 1e-5:
        axis.text(0, 0, "unchanged", ha="center", va="center", color=theme["text"])
    return axis.imshow(values.numpy(), extent=(-edge, edge, edge, -edge), **style)


@torch.no_grad()
def turned_logits(settings: dict) -> torch.Tensor:
    """
    (angles, keys): q · R(p)ᵀ R(p′) q for a q of length 1, the query's orientation p and the keys' p′, while the world
    turns.
    """
    seen = torch.tensor([(0.0, 0.0, 0.0), *SEEN.values()], dtype=torch.float64)
    world = rotation_vector_to_matrix(WORLD_ANGLES[:, None] * torch.tensor(WORLD_AXIS, dtype=torch.float64))
    orientations = world[:, None] @ rotation_vector_to_matrix(seen)  # (angles, 1 + keys, 3, 3)
    positions = matrix_to_rotation_vector(orientations).float()
    states = unit_query().expand(*positions.shape[:1], 1, len(seen), HEAD_DIM)
    rotated = rotary_layer(settings, num_axes=3).rotate(states, positions)[:, 0]  # (angles, 1 + keys, head_dim)
    return (rotated[:, 1:] @ rotated[:, :1].mT).squeeze(-1)


def draw_orientations() -> dict[str, str]:
    curves = {title: turned_logits(settings) for title, settings in TURNED.items()}

    def paint(figure, theme: dict) -> None:
        panels = figure.subplots(1, len(TURNED), sharey=True)
        for axis, (title, logits_of) in zip(panels, curves.items()):
            for values, label, (_, style) in zip(logits_of.mT, SEEN, WALKS.values()):
                line = {"color": style["color"], "linestyle": style["linestyle"], "linewidth": 1.8}
                axis.plot(torch.rad2deg(WORLD_ANGLES).numpy(), values.numpy(), label=label, **line)
            axis.set_title(title, fontsize=11)
            axis.set(xlim=(0, 360), ylim=(-1.05, 1.05), xticks=[0, 180, 360], yticks=[-1, 0, 1])
            axis.set_xlabel("turn of the world (degrees)")
        panels[0].set_ylabel("attention logit")
        legend = figure.legend(
            *panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=3, handlelength=5
        )
        legend.set_title("the key as the query sees it")

    return draw(paint, 9.0, 3.4)


def poses() -> dict[str, Cell]:
    """Cells of the models by their names in the picture, evaluated in all orientations."""
    path = RESULTS / "poses" / "poses.jsonl"
    table = Section.read(path, read_results(path), {}).table
    return {title: table[row]["turned by up to 180°"] for title, row in ORIENTED.items()}


def draw_poses() -> dict[str, str]:
    bars = {title: 100 * cell.mean for title, cell in poses().items()}
    bars["the most frequent answer"] = 100 * yaml.safe_load((SWEEPS / "poses.yaml").read_text())["chance"]

    def paint(figure, theme: dict) -> None:
        axis = figure.subplots()
        for place, (title, right) in enumerate(bars.items()):
            color = COLOURS[0] if "so(3)" in title else theme["line"]
            axis.barh(place, right, height=0.4, facecolor=color if title in ORIENTED else "none", edgecolor=color)
            # Names above the bars leave the width of a phone to the bars.
            axis.text(0, place - 0.27, title, va="bottom", fontsize=11)
            axis.text(right + 1, place, f"{right:.1f}%", va="center", fontsize=11)
        axis.set(xlim=(0, 115), ylim=(len(bars) - 0.7, -1.1), xticks=[], yticks=[])
        axis.spines[:].set_visible(False)
        title = "Rotations from so(3), and the query's frame, answer\n"
        title += "in all orientations after training within 30° of one"
        axis.set_title(title, fontsize=12, loc="left", weight="bold")
        axis.text(0, -0.85, "right answers, mean of ten seeds", va="bottom", fontsize=10)

    return draw(paint, 4.6, 4.0)


def resolutions() -> dict[str, dict[int, Cell]]:
    """Cells of the models by the size of the images, in px."""
    results = read_results(RESULTS / "archive" / "cifar10" / "resolutions.jsonl")
    table: dict[str, dict[int, Cell]] = {}
    for row, cells in arrange(results).items():
        if row not in LINES:
            # Too many lines for the picture; the table has all rows.
            continue
        trained = cells[AS_TRAINED].results[0]["run"]["image_size"][0]
        sizes = {name: trained if name == AS_TRAINED else int(name.removesuffix(" px")) for name in cells}
        table[row] = {sizes[name]: cells[name] for name in sorted(cells, key=sizes.get)}
    return table


def draw_resolutions() -> dict[str, str]:
    table = resolutions()
    looks = styles(list(table))

    def paint(figure, theme: dict) -> None:
        axis = figure.subplots()
        for place, (row, cells) in enumerate(table.items()):
            means, errors = [100 * cell.mean for cell in cells.values()], reaches(list(cells.values()), 100)
            # Shift models sideways, so that their intervals and seeds do not overlap.
            places = [size + 0.55 * (place - (len(table) - 1) / 2) for size in cells]
            # Replace black by the text colour, which is light on a dark page.
            color = looks[row]["color"].replace("#000000", theme["text"])
            style = looks[row] | {"color": color, "linestyle": LINES[row]}
            axis.errorbar(places, means, errors, label=row, capsize=2, markersize=5, linewidth=1.4, **style)
            for at, cell in zip(places, cells.values()):
                seeds = [100 * value for value in cell.by_seed().values()]
                axis.plot([at] * len(seeds), seeds, "o", markerfacecolor="none", color=color, markersize=2.5)
        axis.set_xticks(list(cells), [f"{size} px" for size in cells])
        axis.set(xlabel="size of the images in the evaluation; trained at 32 px", ylabel="accuracy (%)")
        axis.grid(axis="y", alpha=0.4)
        figure.legend(*axis.get_legend_handles_labels(), loc="outside right center", handlelength=4)

    return draw(paint, 8.0, 4.4)


def costs() -> dict[str, dict[int, list[tuple[float, ...]]]]:
    """
    By encoding and number of tokens: median, low and high of the shares in inference and training, in percent. The
    median of a share that has only an interval is NaN.
    """
    lines = [line.strip("| ").split(" | ") for line in SPEED.read_text(encoding="utf-8").splitlines()]
    header = next(line for line in lines if line[:2] == ["growing", "value"])
    rows = [line for line in lines if line[0] == "resolution"]
    return {
        title: {
            int(row[1].split()[0]): [
                (float(median or "nan"), float(low), float(high))
                for median, low, high in SHARE.findall(row[header.index(name)])
            ]
            for row in rows
        }
        for name, title in COSTS.items()
    }


def draw_costs() -> dict[str, str]:
    table = costs()
    looks = styles(list(table))

    def paint(figure, theme: dict) -> None:
        panels = figure.subplots(1, 2, sharey=True)
        for phase, (axis, title) in enumerate(zip(panels, ("inference", "training step"))):
            for row, cells in table.items():
                medians, lows, highs = zip(*(shares[phase] for shares in cells.values()))
                style = looks[row] | {"linestyle": LINES[row]}
                axis.plot(list(cells), medians, label=row, markersize=5, linewidth=1.4, **style)
                axis.vlines(list(cells), lows, highs, color=style["color"], linewidth=1.4)
            axis.set_xscale("log")
            axis.set_xticks(list(cells), list(map(str, cells)))
            axis.minorticks_off()
            axis.set(title=title, xlabel="tokens")
            axis.grid(axis="y", alpha=0.4)
        panels[0].set(ylabel="added to absolute positions (%)", ylim=(0, None))
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right center", handlelength=4)

    return draw(paint, 8.0, 3.4)


def draw_diffusion() -> dict[str, str]:
    measured = json.loads((RESULTS / "scenes" / "diffusion.json").read_text(encoding="utf-8"))
    # The losses at each level by the frequencies of the model, those of training first.
    levels, ((_, before), *others) = measured["noise_levels"], measured["losses"].items()

    def paint(figure, theme: dict) -> None:
        axis = figure.subplots()
        axis.axhline(0, color=theme["line"], linewidth=1)
        for number, (name, values) in enumerate(others):
            changes = [100 * (loss / first - 1) for loss, first in zip(values, before)]
            style = "-" if name == "learned frequencies" else ("--", ":", "-.")[number % 3]
            axis.plot(levels, changes, marker="o", markersize=3, label=name, color=COLOURS[number], linestyle=style)
        axis.set(xlabel="noise level", ylabel="change of the loss at 64 px (%)")
        axis.grid(axis="y", alpha=0.4)
        figure.legend(*axis.get_legend_handles_labels(), loc="outside right center", handlelength=4)

    return draw(paint, 8.0, 3.4)


def main(arguments: list[str] | None = None) -> list[Path]:
    """Writes the pictures; returns their paths."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, default=FIGURES)
    folder = parser.parse_args(arguments).output_dir
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    drawn = {
        "rotations": draw_rotations(),
        "products": draw_products(),
        "orientations": draw_orientations(),
        "poses": draw_poses(),
        "resolutions": draw_resolutions(),
        "costs": draw_costs(),
        "diffusion": draw_diffusion(),
    }
    for name, pictures in drawn.items():
        for theme, svg in pictures.items():
            written.append(folder / f"{name}_{theme}.svg")
            write_text(written[-1], svg)
    return written


if __name__ == "__main__":
    start(lambda: print(*main(), sep="\n"))
