"""The plots of an inspection report, each drawn for a light and for a dark page, as SVG."""

import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from matplotlib import cm, colormaps, colors, rc_context
from matplotlib.figure import Figure

from .analysis import Analysis, EncodingAnalysis, InputAnalysis, OutputChange
from .attention_analysis import overlay


# Told apart with any colour vision: cividis for quantities; for signs two maps whose zero is the page's own colour.
SEQUENTIAL = "cividis"
THEMES = {
    "light": {"text": "#1f2328", "line": "#8c959f", "signs": "PuOr", "layers": (0.0, 0.75)},
    "dark": {"text": "#e6edf3", "line": "#6e7681", "signs": "berlin", "layers": (0.35, 1.0)},
}
# Okabe and Ito's colours that stand out from white and from black.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
# A mosaic of matrices has a pixel per number; beyond this many of them nobody sees any.
MOSAIC_PIXELS = 1600
FRAMES_SHOWN = 4


@dataclass
class Plot:
    """
    Attributes:
        title, caption, alt: What is to be seen; `alt` in place of the picture.
        svg: The picture, for each theme.
    """

    title: str
    caption: str
    alt: str
    svg: dict[str, str]


def draw(paint: Callable[[Figure, dict], None], width: float, height: float) -> dict[str, str]:
    """SVG for each theme of what `paint(figure, theme)` draws, on a transparent page; sizes in inches."""
    pictures = {}
    for name, theme in THEMES.items():
        text = {key: theme["text"] for key in ("text.color", "axes.labelcolor", "xtick.color", "ytick.color")}
        style = text | {
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
            # The same picture gives the same file.
            "svg.hashsalt": "hf_liere",
        }
        with rc_context(style):
            figure = Figure(figsize=(width, height), layout="constrained")
            paint(figure, theme)
            file = io.StringIO()
            figure.savefig(file, format="svg", metadata={"Date": None}, dpi=144, bbox_inches="tight")
        pictures[name] = file.getvalue()
    return pictures


def mosaic(matrices: torch.Tensor) -> np.ndarray:
    """
    (layers, heads, blocks, b, b) → one picture with a block-diagonal matrix per layer (down) and head (across), NaN
    between them and outside of the blocks; fewer layers and heads where there are too many numbers to be seen.
    """
    layers, heads, blocks, size, _ = matrices.shape
    side = blocks * size + 1
    rows, columns = (min(count, max(1, MOSAIC_PIXELS // side)) for count in (layers, heads))
    picture = np.full((rows * side + 1, columns * side + 1), np.nan, dtype=np.float32)
    for row, layer in enumerate(chosen(layers, rows)):
        for column, head in enumerate(chosen(heads, columns)):
            for block in range(blocks):
                top, left = (place * side + 1 + block * size for place in (row, column))
                picture[top : top + size, left : left + size] = matrices[layer, head, block]
    return picture


def chosen(count: int, most: int) -> list[int]:
    """At most so many of the numbers up to `count`, first and last among them."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(int)).tolist()


def plot_mosaics(panels: Sequence[tuple[str, torch.Tensor]], label: str, limit: float | None = None) -> dict[str, str]:
    """Mosaics side by side on one scale that is symmetric around zero."""
    pictures = [mosaic(matrices) for _, matrices in panels]
    limit = limit or max(float(np.nanmax(np.abs(picture), initial=0.0)) for picture in pictures) or 1.0
    layers, heads, blocks, size, _ = panels[0][1].shape
    side = blocks * size + 1
    aspect = pictures[0].shape[0] / pictures[0].shape[1]

    def paint(figure: Figure, theme: dict) -> None:
        axes = figure.subplots(1, len(panels), squeeze=False)[0]
        for axis, picture, (title, _) in zip(axes, pictures, panels):
            norm = colors.Normalize(-limit, limit)
            shown = axis.imshow(picture, cmap=theme["signs"], norm=norm, interpolation="nearest")
            axis.set_title(title, fontsize=9)
            for set_ticks, count, places in (
                (axis.set_xticks, heads, picture.shape[1] // side),
                (axis.set_yticks, layers, picture.shape[0] // side),
            ):
                names = chosen(count, places)
                set_ticks([place * side + side / 2 for place in range(places)], [str(name + 1) for name in names])
            for border in range(0, picture.shape[0], side):
                axis.axhline(border, color=theme["line"], linewidth=0.5)
            for border in range(0, picture.shape[1], side):
                axis.axvline(border, color=theme["line"], linewidth=0.5)
            axis.tick_params(length=0)
            axis.spines[:].set_visible(False)
            axis.set(xlabel="head", ylabel="layer" if axis is axes[0] else "")
        figure.colorbar(shown, ax=list(axes), label=label, shrink=0.8, aspect=30)

    width = 10.0
    panel = (width - 1) / len(panels)
    return draw(paint, width, min(panel * aspect, 9.0) + 0.9)


def plot_generators(encoding: EncodingAnalysis, axes: Sequence[str]) -> dict[str, str]:
    panels = [(f"{name} axis", matrices) for name, matrices in zip(axes, encoding.generators)]
    return plot_mosaics(panels, "element (radians per unit of the coordinate)")


def plot_rotations(encoding: EncodingAnalysis, axes: Sequence[str]) -> dict[str, str]:
    first, *_, last = encoding.rotations.unbind(3)
    panels = [(f"one {axes[0]} further", first), ("one patch further on every axis", last)]
    return plot_mosaics(panels, "element of R, no unit", limit=1.0)


def plot_commutators(encoding: EncodingAnalysis, axes: Sequence[str]) -> dict[str, str]:
    found = encoding.commutators
    # Below, it is rounding.
    top = found.relative.max().item() if found.relative.max() > 1e-9 else 1.0

    def paint(figure: Figure, theme: dict) -> None:
        panels = figure.subplots(1, len(found.axes), squeeze=False)[0]
        for axis, (first, second), values in zip(panels, found.axes, found.relative):
            shown = axis.imshow(values.numpy(), cmap=SEQUENTIAL, vmin=0, vmax=top, aspect="auto")
            axis.set_title(f"{axes[first]} and {axes[second]}", fontsize=9)
            label_layers_and_heads(axis, values)
            if values.numel() <= 48:
                for (layer, head), value in np.ndenumerate(values.numpy()):
                    colour = "black" if value > 0.6 * top else "white"
                    axis.text(head, layer, f"{value:.2f}", ha="center", va="center", color=colour, fontsize=8)
        figure.colorbar(shown, ax=list(panels), label="relative norm, no unit")

    layers, heads = found.relative.shape[1:]
    return draw(paint, min(10.0, 2.2 + len(found.axes) * max(2.6, 0.45 * heads)), max(2.3, 0.3 * layers + 1.2))


def label_layers_and_heads(axis, values) -> None:
    layers, heads = values.shape
    axis.set_xticks(range(heads), [str(head + 1) for head in range(heads)])
    axis.set_yticks(range(layers), [str(layer + 1) for layer in range(layers)])
    axis.set(xlabel="head", ylabel="layer")
    axis.spines[:].set_visible(False)
    axis.tick_params(length=0)


def layer_colours(count: int, theme: dict) -> np.ndarray:
    """A colour per layer, from dark to light, without those that vanish on the page."""
    return colormaps["viridis"](np.linspace(*theme["layers"], count))


def plot_relativity(encoding: EncodingAnalysis) -> dict[str, str]:
    found = encoding.relativity
    offsets = found.offsets.numpy()

    def paint(figure: Figure, theme: dict) -> None:
        axis = figure.subplots()
        layers = found.mean.shape[1]
        for layer, colour in enumerate(layer_colours(layers, theme)):
            label = f"layer {layer + 1}" if layers <= 6 or layer in (0, layers - 1) else None
            axis.plot(offsets, found.mean[:, layer].mean(-1).numpy(), "o-", markersize=3, color=colour, label=label)
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
        # Rounding is not a result.
        axis.set_ylim(0, max(1.1 * change.max(), 1e-2))
        axis.grid(alpha=0.4)

    return draw(paint, 6.5, 3.2)


def plot_angles(encoding: EncodingAnalysis) -> dict[str, str]:
    found = encoding.angles
    centres = ((found.edges[1:] + found.edges[:-1]) / 2).numpy()
    layer_std = found.layer_std.numpy()

    def paint(figure: Figure, theme: dict) -> None:
        linear, logarithmic, layers = figure.subplots(1, 3)
        for axis, scale in ((linear, "linear"), (logarithmic, "log")):
            density = found.density.where(found.density > 0, math.nan) if scale == "log" else found.density
            axis.step(centres, density.numpy(), where="mid", color=COLOURS[0])
            axis.set_yscale(scale)
            axis.set(xlabel="element (radians per unit)", ylabel="density (per radian)", title=f"{scale} scale")
        layers.plot(range(1, len(layer_std) + 1), layer_std, "o-", color=COLOURS[5], markersize=4)
        layers.set(xlabel="layer", ylabel="standard deviation (radians)", title="by layer")
        layers.set_ylim(0, 1.15 * layer_std.max() or 1.0)
        layers.xaxis.get_major_locator().set_params(integer=True)
        for axis in (linear, logarithmic, layers):
            axis.title.set_fontsize(9)
            axis.grid(alpha=0.4)

    return draw(paint, 10.0, 2.9)


def plot_frequencies(encoding: EncodingAnalysis, axes: Sequence[str]) -> dict[str, str]:
    frequencies = encoding.frequencies.per_patch
    layers = frequencies.shape[1]
    pairs = encoding.commutators.axes
    bound = max(frequencies.abs().max().item() * 1.08, 0.1)

    def paint(figure: Figure, theme: dict) -> None:
        panels = figure.subplots(1, len(pairs), squeeze=False)[0]
        for axis, (first, second) in zip(panels, pairs):
            for layer, colour in enumerate(layer_colours(layers, theme)):
                points = (frequencies[index, layer].flatten().numpy() for index in (second, first))
                label = f"layer {layer + 1}" if layers <= 6 or layer in (0, layers - 1) else None
                axis.scatter(*points, s=14, color=colour, alpha=0.75, linewidths=0, label=label)
            if bound > math.pi:
                corner = (-math.pi, -math.pi)
                axis.add_patch(_square(corner, 2 * math.pi, theme["line"]))
            axis.axhline(0, color=theme["line"], linewidth=0.6)
            axis.axvline(0, color=theme["line"], linewidth=0.6)
            axis.set(xlim=(-bound, bound), ylim=(bound, -bound), aspect="equal")
            axis.set(xlabel=f"{axes[second]}: radians per patch", ylabel=f"{axes[first]}: radians per patch")
        panels[0].legend(fontsize=8, loc="upper right")

    return draw(paint, min(10.0, 4.6 * len(pairs)), 4.4)


def _square(corner, side, colour):
    from matplotlib.patches import Rectangle

    return Rectangle(corner, side, side, fill=False, linestyle="--", linewidth=0.8, edgecolor=colour)


def plot_attention(entries: Sequence[InputAnalysis], shown: Sequence[np.ndarray], image: int) -> dict[str, str]:
    """
    Rows of sizes (or of frames of a clip, for one size), columns of layers after the input itself.

    Args:
        entries: One for each size.
        shown: (images, T, H, W, C) uint8, what the model was given of each size.
        image: Which of the images.
    """
    rows = []
    for entry, inputs in zip(entries, shown):
        maps = entry.attention.maps[:, image]
        if maps.ndim == 3:
            rows.append((size_name(entry.size), inputs[image, 0], maps, None))
            continue
        per_tubelet = inputs.shape[1] // maps.shape[1]
        for frame in chosen(maps.shape[1], FRAMES_SHOWN):
            limits = [(layer.min().item(), layer.max().item()) for layer in maps]
            rows.append(
                (f"frame {frame * per_tubelet + 1}", inputs[image, frame * per_tubelet], maps[:, frame], limits)
            )
    layers = entries[0].attention.maps.shape[0]
    columns = chosen(layers, 12)

    def paint(figure: Figure, theme: dict) -> None:
        panels = figure.subplots(len(rows), len(columns) + 1, squeeze=False)
        for panel_row, (name, picture, maps, limits) in zip(panels, rows):
            panel_row[0].imshow(picture.squeeze(), cmap="gray", vmin=0, vmax=255)
            panel_row[0].set_ylabel(name, fontsize=8)
            for axis, layer in zip(panel_row[1:], columns):
                axis.imshow(overlay(picture, maps[layer], limits=None if limits is None else limits[layer]))
            for axis in panel_row:
                axis.set(xticks=[], yticks=[])
                axis.spines[:].set_visible(False)
        panels[0, 0].set_title("input", fontsize=8)
        for axis, layer in zip(panels[0, 1:], columns):
            axis.set_title(f"layer {layer + 1}", fontsize=8)
        shades = cm.ScalarMappable(colors.Normalize(0, 1), "viridis")
        bar = figure.colorbar(shades, ax=panels.ravel().tolist(), shrink=0.8, aspect=25, ticks=[0, 1])
        bar.set_label(
            "attention, least to most of a map" if rows[0][3] is None else "attention, least to most of a layer"
        )

    cell = min(2.0, 9.5 / (len(columns) + 1))
    return draw(paint, cell * (len(columns) + 1) + 1, cell * len(rows) + 0.4)


def plot_distances(entries: Sequence[InputAnalysis]) -> dict[str, str]:
    uniform = [uniform_distance(entry.attention.grid) for entry in entries]
    highest = max(*uniform, *(entry.distances.mean(1).max().item() for entry in entries))

    def paint(figure: Figure, theme: dict) -> None:
        panels = figure.subplots(1, len(entries), squeeze=False, sharey=True)[0]
        for axis, entry, alike in zip(panels, entries, uniform):
            heads = entry.distances.mean(1).numpy()
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


def uniform_distance(grid: tuple[int, ...]) -> float:
    """Attention distance where every patch looks at all patches alike."""
    places = torch.cartesian_prod(*[torch.arange(size, dtype=torch.float32) for size in grid])
    return torch.cdist(places, places).mean().item()


def size_name(size: tuple[int, ...]) -> str:
    """(224, 224) → "224 × 224 px", (8, 112, 112) → "8 frames of 112 × 112 px"."""
    *frames, height, width = size
    return (f"{frames[0]} frames of " if frames else "") + f"{height} × {width} px"


def axis_names(analysis: Analysis) -> list[str]:
    return ["frame", "row", "column"][-len(analysis.model["train_grid"]) :]
