"""The plots of an inspection report as SVG, each drawn for a light and for a dark page."""

import io
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from matplotlib import cm, colormaps, colors, rc_context, ticker
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from .analysis import Analysis, InputAnalysis
from .attention import OutputChange, overlay, patch_distances
from .encodings import EncodingAnalysis, RelativityError
from .inputs import spaced_indices


# For any colour vision: cividis for magnitudes, and maps with the page's colour at 0 for signed values.
SEQUENTIAL = "cividis"
THEMES = {
    "light": {"text": "#1f2328", "line": "#8c959f", "signs": "PuOr", "layers": (0.0, 0.75)},
    "dark": {"text": "#e6edf3", "line": "#6e7681", "signs": "berlin", "layers": (0.35, 1.0)},
}
# The colours of Okabe and Ito that contrast with white and with black.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
# Width, in elements, of the widest mosaic that shares a row with others.
MOSAIC_WIDTH = 150
# Of the pictures of attention.
FRAMES_SHOWN = 4
LAYERS_ACROSS = 6


def is_wide(pictures: dict[str, str]) -> bool:
    """Whether a picture of [`draw`] is twice as wide as the screen of a phone, or more."""
    width = re.search(r'<svg [^>]*width="([\d.]+)pt"', next(iter(pictures.values())))
    return width is not None and float(width[1]) >= 600


def draw(paint: Callable[[Figure, dict], None], width: float, height: float) -> dict[str, str]:
    """Draw `paint(figure, theme)` as SVG for each theme, on a transparent page; sizes are in inches."""
    pictures = {}
    for name, theme in THEMES.items():
        with rc_context(style(theme)):
            figure = Figure(figsize=(width, height), layout="constrained")
            paint(figure, theme)
            file = io.StringIO()
            figure.savefig(file, format="svg", metadata={"Date": None}, dpi=144, bbox_inches="tight")
        pictures[name] = file.getvalue()
    return pictures


def style(theme: dict) -> dict:
    text = dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), theme["text"])
    return text | {
        "axes.edgecolor": theme["line"],
        "axes.facecolor": "none",
        "axes.grid": False,
        "axes.spines.right": False,
        "axes.spines.top": False,
        "figure.facecolor": "none",
        "font.family": "DejaVu Sans",
        "font.size": 9,
        "grid.color": theme["line"],
        "legend.frameon": False,
        "savefig.facecolor": "none",
        # Make equal pictures give equal files.
        "svg.hashsalt": "hf_liere",
    }


def mosaic(matrices: torch.Tensor) -> tuple[np.ndarray, tuple[int, int]]:
    """
    Arrange (layers, heads, blocks, b, b) as a picture with a tile per layer (down) and head (across); a tile contains
    the head's blocks side by side, separated by NaN. Also returns the (height, width) of a tile.
    """
    blocks, pad = matrices.shape[2], torch.nn.functional.pad
    columns = math.ceil(math.sqrt(blocks))
    rows = math.ceil(blocks / columns)
    framed = pad(matrices.float(), (1, 0, 1, 0, 0, rows * columns - blocks), value=math.nan)
    # (layers, heads, rows, columns, b + 1, b + 1) -> (layers, heads, height, width)
    tiles = framed.unflatten(2, (rows, columns)).transpose(3, 4).flatten(4).flatten(2, 3)
    tiles = pad(tiles, (0, 1, 0, 1), value=math.nan)
    return tiles.transpose(1, 2).flatten(2).flatten(0, 1).numpy(), tuple(tiles.shape[2:])


def plot_mosaics(panels: Sequence[tuple[str, torch.Tensor]], label: str, limit: float | None = None) -> dict[str, str]:
    """Plot mosaics with a common colour scale symmetric around zero, in a column if they are too wide for a row."""
    layers, heads = panels[0][1].shape[:2]
    mosaics = [mosaic(matrices) for _, matrices in panels]
    height, width = mosaics[0][0].shape
    extend = "neither"
    if limit is None:
        # Use a quantile as the limit, because a few large elements would hide the differences of all others.
        sizes = np.abs(np.concatenate([matrices.numpy().ravel() for _, matrices in panels]))
        # The quantile may be zero; if all elements are, any limit works.
        limit, extend = float(np.quantile(sizes, 0.995)) or float(sizes.max()) or 1.0, "both"
    stacked = width > MOSAIC_WIDTH
    rows, columns = (len(panels), 1) if stacked else (1, len(panels))

    def paint(figure: Figure, theme: dict) -> None:
        axes = figure.subplots(rows, columns, squeeze=False).ravel()
        for axis, (picture, tile), (title, _) in zip(axes, mosaics, panels):
            shown = axis.imshow(picture, cmap=theme["signs"], vmin=-limit, vmax=limit, interpolation="nearest")
            axis.set_title(title, fontsize=9)
            label_layers_and_heads(axis, layers, heads, tile)
            for border in range(layers + 1):
                axis.axhline(border * tile[0] - 0.5, color=theme["line"], linewidth=0.5)
            for border in range(heads + 1):
                axis.axvline(border * tile[1] - 0.5, color=theme["line"], linewidth=0.5)
        bar = {"location": "bottom", "fraction": 0.05, "shrink": 0.5, "aspect": 40, "extend": extend}
        few_ticks(figure.colorbar(shown, ax=list(axes), label=label, **bar).ax.xaxis)

    across = 9.0 if stacked else min(9.0 / columns, 4.5)
    return draw(paint, across * columns + 0.6, (across * height / width + 0.6) * rows + 0.6)


def label_layers_and_heads(axis: Axes, layers: int, heads: int, tile: tuple[int, int] = (1, 1)) -> None:
    """Number the tiles of extent `tile` from 1, with ticks at their centres."""
    ticks = [[place * extent + (extent - 1) / 2 for place in range(n)] for n, extent in zip((layers, heads), tile)]
    axis.set_yticks(ticks[0], [str(layer + 1) for layer in range(layers)])
    axis.set_xticks(ticks[1], [str(head + 1) for head in range(heads)])
    axis.set(xlabel="head", ylabel="layer")
    axis.spines[:].set_visible(False)
    axis.tick_params(length=0)


def plot_generators(encoding: EncodingAnalysis, axes: Sequence[str]) -> dict[str, str]:
    panels = [(f"{name} axis", matrices) for name, matrices in zip(axes, encoding.generators)]
    return plot_mosaics(panels, "element (radians per unit of the coordinate)")


def plot_rotations(encoding: EncodingAnalysis, axes: Sequence[str], step: str = "patch") -> dict[str, str]:
    first, *_, last = encoding.rotations.unbind(3)
    panels = [(f"one {step} along the {axes[0]} axis", first), (f"one {step} along every axis", last)]
    return plot_mosaics(panels, "element of R, no unit", limit=1.0)


def plot_commutators(encoding: EncodingAnalysis, axes: Sequence[str]) -> dict[str, str]:
    found = encoding.commutators
    # Smaller values are rounding errors.
    top = found.relative.max().item() if found.relative.max() > 1e-9 else 1.0

    def paint(figure: Figure, theme: dict) -> None:
        panels = figure.subplots(1, len(found.axes), squeeze=False)[0]
        for axis, (first, second), values in zip(panels, found.axes, found.relative):
            shown = axis.imshow(values.numpy(), cmap=SEQUENTIAL, vmin=0, vmax=top, aspect="auto")
            axis.set_title(f"{axes[first]} and {axes[second]}", fontsize=9)
            label_layers_and_heads(axis, *values.shape)
            if values.numel() <= 48:
                for (layer, head), value in np.ndenumerate(values.numpy()):
                    colour = "black" if value > 0.6 * top else "white"
                    axis.text(head, layer, f"{value:.2f}", ha="center", va="center", color=colour, fontsize=8)
        figure.colorbar(shown, ax=list(panels), label="relative norm, no unit")

    layers, heads = found.relative.shape[1:]
    return draw(paint, min(10.0, 2.2 + len(found.axes) * max(2.6, 0.45 * heads)), max(2.3, 0.22 * layers + 1.2))


def layer_styles(count: int, theme: dict) -> list[dict]:
    """A visible colour for each layer, from dark to light; labels for a few layers."""
    shades = colormaps["viridis"](np.linspace(*theme["layers"], count))
    labelled = range(count) if count <= 6 else (0, count - 1)
    labels = [f"layer {layer + 1}" if layer in labelled else None for layer in range(count)]
    return [{"color": colour, "label": label} for colour, label in zip(shades, labels)]


def plot_relativity(found: RelativityError) -> dict[str, str]:
    offsets = found.offsets.numpy()

    def paint(figure: Figure, theme: dict) -> None:
        axis = figure.subplots()
        curves = found.mean.mean(-1).T.numpy()  # (layers, offsets)
        for curve, style in zip(curves, layer_styles(len(curves), theme)):
            axis.plot(offsets, curve, "o-", markersize=3, **style)
        largest = found.largest.amax((1, 2)).numpy()
        axis.plot(offsets, largest, "--", color=theme["text"], label="largest of all")
        axis.set(xlabel="common offset c of both tokens (patches)", ylabel="e(c), spectral norm, no unit")
        if largest.max() < 1e-5:
            axis.set_yscale("symlog", linthresh=1e-15)
            axis.set_ylim(0, 1e-3)
        else:
            axis.set_ylim(0, 2.05)
        axis.grid(alpha=0.4)
        axis.legend(ncols=2, fontsize=8)

    return draw(paint, 6.5, 3.4)


def plot_output_change(found: OutputChange) -> dict[str, str]:
    offsets, change = found.offsets.numpy(), found.change.numpy()

    def paint(figure: Figure, theme: dict) -> None:
        axis = figure.subplots()
        axis.plot(offsets, change.mean(1), "o-", color=COLOURS[0])
        axis.fill_between(offsets, *np.quantile(change, (0.25, 0.75), axis=1), color=COLOURS[0], alpha=0.2, linewidth=0)
        axis.set(xlabel="common offset of all patches (patches)", ylabel="‖change‖ / ‖output‖, no unit")
        # Do not let rounding errors fill the plot.
        axis.set_ylim(0, max(1.1 * change.max(), 1e-2))
        axis.grid(alpha=0.4)

    return draw(paint, 6.5, 3.2)


def plot_angles(encoding: EncodingAnalysis) -> dict[str, str]:
    found, start = encoding.angles, encoding.initialization
    edges, learned = (found.edges, found.density) if start is None else (start.edges, start.learned_density)
    centres = ((edges[1:] + edges[:-1]) / 2).numpy()
    layer_std = found.layer_std.numpy()
    top = 1.15 * max(layer_std.max(), 0 if start is None else start.std) or 1.0

    def paint(figure: Figure, theme: dict) -> None:
        linear, logarithmic, layers = panels = figure.subplots(1, 3)
        untrained = {"color": theme["text"], "linestyle": "--", "linewidth": 1}
        densities = [(learned, {"label": "in the model", "color": COLOURS[0]})]
        if start is not None and start.std:
            densities.append((start.density, {"label": f"at the start: rotary_init={start.name!r}", **untrained}))
        for axis, scale in zip(panels, ("linear", "log")):
            for values, look in densities:
                shown = values.where(values > 0, math.nan) if scale == "log" else values
                axis.step(centres, shown.numpy(), where="mid", **look)
            if start is not None and not start.std:
                axis.axvline(0, label="at the start: all zero", **untrained)
            axis.set(xlabel="element (radians per unit)", ylabel="density (per radian)", title=f"{scale} scale")
            axis.set_yscale(scale)
            few_ticks(axis.xaxis)
        layers.plot(range(1, len(layer_std) + 1), layer_std, "o-", color=COLOURS[0], markersize=4)
        layers.set(xlabel="layer", ylabel="standard deviation (radians)", title="by layer", ylim=(0, top))
        layers.xaxis.get_major_locator().set_params(integer=True)
        few_ticks(linear.yaxis, layers.yaxis)
        for axis in panels:
            axis.title.set_fontsize(9)
            axis.grid(alpha=0.4)
        if start is not None:
            layers.axhline(start.std, **untrained)
            figure.legend(*linear.get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=8)

    return draw(paint, 10.0, 3.1)


def few_ticks(*axes: Axis) -> None:
    """Limit the labels so that they do not overlap, whatever the size of the values."""
    for axis in axes:
        axis.set_major_locator(ticker.MaxNLocator(4))
        axis.set_major_formatter(ticker.StrMethodFormatter("{x:.4g}"))


def plot_frequencies(analysis: Analysis, models: Sequence[torch.Tensor]) -> dict[str, str]:
    """
    Plot a point for every plane; with two models, also a line to it from its frequency in the first model. `models`
    are (A, layers, heads, planes) frequencies per [`Analysis.step`]; the analysis of either names the axes.
    """
    assert analysis.encoding is not None, "planes belong to an encoding"
    axes, step, pairs = analysis.axes, analysis.step, analysis.encoding.commutators.axes
    bound = max(frequencies.abs().max().item() for frequencies in models) * 1.08 or 0.1
    size = 14 if models[-1][0].numel() < 500 else 5

    def paint(figure: Figure, theme: dict) -> None:
        panels = figure.subplots(1, len(pairs), squeeze=False)[0]
        for axis, (first, second) in zip(panels, pairs):
            for layer, look in enumerate(layer_styles(models[-1].shape[1], theme)):
                ends = [model[[second, first], layer].flatten(1).T for model in models]  # (planes, 2) each
                if len(ends) > 1:
                    lines = torch.stack(ends, dim=1).numpy()
                    axis.add_collection(LineCollection(lines, colors=look["color"], alpha=0.7))
                axis.scatter(*ends[-1].T.numpy(), s=size, alpha=0.7, linewidths=0, **look)
            if bound > math.pi:
                # Rotations alias outside this square.
                style = {"fill": False, "linestyle": "--", "linewidth": 0.8, "edgecolor": theme["line"]}
                axis.add_patch(Rectangle((-math.pi, -math.pi), 2 * math.pi, 2 * math.pi, **style))
            axis.axhline(0, color=theme["line"], linewidth=0.6)
            axis.axvline(0, color=theme["line"], linewidth=0.6)
            axis.set(xlim=(-bound, bound), ylim=(bound, -bound), aspect="equal")
            axis.set(xlabel=f"{axes[second]}: radians per {step}", ylabel=f"{axes[first]}: radians per {step}")
            few_ticks(axis.xaxis, axis.yaxis)
        panels[0].legend(fontsize=8, loc="upper right")

    return draw(paint, min(10.0, 4.6 * len(pairs)), 4.4)


def plot_attention(entries: Sequence[InputAnalysis], shown: Sequence[np.ndarray], image: int) -> dict[str, str]:
    """
    Plot a row for each size (or for each frame of a clip) with one of its (images, T, H, W, C) uint8 inputs and the
    attention map of each layer.
    """
    rows = [
        row
        for entry, inputs in zip(entries, shown)
        if entry.attention is not None
        for row in attention_rows(size_name(entry.size), entry.attention.maps[:, image], inputs[image])
    ]
    return draw(*attention_figure(rows))


class AttentionRow(NamedTuple):
    """A row of pictures: an (H, W, C) uint8 input, the map of each layer over it, and the limits of its colours."""

    title: str
    picture: np.ndarray
    maps: list[torch.Tensor]
    limits: Sequence[tuple[float, float] | None]


def attention_rows(title: str, maps: torch.Tensor, frames: np.ndarray) -> list[AttentionRow]:
    """
    One row for an image, or rows for some frames of a clip, which share a colour scale per layer: the (layers, *grid)
    maps over (T, H, W, C) uint8 frames.
    """
    if maps.ndim == 3:
        return [AttentionRow(title, frames[0], list(maps), [None] * len(maps))]
    limits = [(layer.min().item(), layer.max().item()) for layer in maps]
    per_tubelet, rows = len(frames) // maps.shape[1], []
    for tubelet in spaced_indices(maps.shape[1], min(maps.shape[1], FRAMES_SHOWN)):
        first = tubelet * per_tubelet
        rows.append(AttentionRow(f"frame {first + 1}", frames[first], list(maps[:, tubelet]), limits))
    return rows


def save_attention(rows: Sequence[AttentionRow], path: Path) -> None:
    """Write a picture of the rows on a white page, in the format of the suffix."""
    paint, width, height = attention_figure(rows)
    with rc_context(style(THEMES["light"]) | {"savefig.facecolor": "white"}):
        figure = Figure(figsize=(width, height), layout="constrained")
        paint(figure, THEMES["light"])
        figure.savefig(path, dpi=144, bbox_inches="tight")


def attention_figure(rows: Sequence[AttentionRow]) -> tuple[Callable[[Figure, dict], None], float, float]:
    """The arguments of [`draw`]."""
    layers = len(rows[0].maps)
    columns = min(layers, LAYERS_ACROSS)
    lines = math.ceil(layers / columns)
    cell = min(2.0, 9.5 / (columns + 1))
    width, height = cell * (columns + 1) + 1, cell * len(rows) * lines + 0.4

    def paint(figure: Figure, theme: dict) -> None:
        panels = figure.subplots(len(rows) * lines, columns + 1, squeeze=False)
        for axis in panels.ravel():
            axis.set(xticks=[], yticks=[])
            axis.spines[:].set_visible(False)
        for row, (name, picture, maps, limits) in enumerate(rows):
            panels[row * lines, 0].imshow(picture.squeeze(), cmap="gray", vmin=0, vmax=255)
            panels[row * lines, 0].set_ylabel(name, fontsize=8)
            for layer, values in enumerate(maps):
                axis = panels[row * lines + layer // columns, 1 + layer % columns]
                axis.imshow(overlay(picture, values, limits=limits[layer]))
                if row == 0 or lines > 1:
                    axis.set_title(f"layer {layer + 1}", fontsize=8)
        panels[0, 0].set_title("input", fontsize=8)
        shades = cm.ScalarMappable(colors.Normalize(0, 1), "viridis")
        bar = figure.colorbar(shades, ax=panels.ravel().tolist(), shrink=min(0.8, 4 / height), aspect=25, ticks=[0, 1])
        bar.set_label(f"attention (per {'map' if rows[0][3][0] is None else 'layer'})")

    return paint, width, height


def plot_distances(entries: Sequence[InputAnalysis]) -> dict[str, str]:
    # The distance if every patch attends to all patches equally.
    uniform = [patch_distances(entry.attention.grid).mean().item() for entry in entries if entry.attention is not None]
    measured = [entry.distances.mean(1) for entry in entries if entry.distances is not None]  # (layers, heads) each
    highest = max(*uniform, *(distances.max().item() for distances in measured))

    def paint(figure: Figure, theme: dict) -> None:
        panels = figure.subplots(1, len(entries), squeeze=False, sharey=True)[0]
        for axis, entry, distances, alike in zip(panels, entries, measured, uniform):
            heads = distances.numpy()
            for head, values in enumerate(heads.T):
                layers = np.arange(1, len(values) + 1)
                axis.plot(layers, values, "o", color=COLOURS[head % len(COLOURS)], alpha=0.8, markersize=4)
            axis.plot(layers, heads.mean(1), "-", color=theme["text"], linewidth=1, label="mean of the heads")
            axis.axhline(alike, color=theme["line"], linestyle="--", label="uniform")
            axis.set(xlabel="layer", ylim=(0, 1.1 * highest))
            axis.set_title(size_name(entry.size), fontsize=9)
            axis.xaxis.get_major_locator().set_params(integer=True)
            axis.grid(alpha=0.4)
        panels[0].set_ylabel("attention distance (patches)")
        panels[0].legend(fontsize=8, loc="lower right")

    return draw(paint, min(10.0, 1.2 + 3.2 * len(entries)), 3.2)


def size_name(size: tuple[int, ...]) -> str:
    """(224, 224) → "224 × 224 px", (8, 112, 112) → "8 frames of 112 × 112 px"."""
    *frames, height, width = size
    return (f"{frames[0]} frames of " if frames else "") + f"{height} × {width} px"
