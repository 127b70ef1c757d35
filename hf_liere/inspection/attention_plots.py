"""Plots of attention maps and distances."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from matplotlib import cm, colors, rc_context
from matplotlib.figure import Figure

from .analysis import InputAnalysis
from .attention import overlay, patch_distances
from .plots import COLOURS, THEMES, draw, size_name, spaced_indices, style


FRAMES_SHOWN = 4
LAYERS_ACROSS = 6


def plot_attention(entries: Sequence[InputAnalysis], shown: Sequence[np.ndarray], image: int) -> dict[str, str]:
    """
    Plot a row for each size (or for each frame of a clip) with the input and the attention map of each layer.

    Args:
        entries: One for each size.
        shown: For each size, the (images, T, H, W, C) uint8 inputs of the model.
        image: Index of the image.
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
    One row for an image, or rows for some frames of a clip; the frames share a colour scale per layer.

    Args:
        maps: (layers, *grid), see [`AttentionMaps`].
        frames: (T, H, W, C) uint8.
    """
    if maps.ndim == 3:
        return [AttentionRow(title, frames[0], list(maps), [None] * len(maps))]
    limits = [(layer.min().item(), layer.max().item()) for layer in maps]
    per_tubelet, rows = len(frames) // maps.shape[1], []
    for tubelet in spaced_indices(maps.shape[1], FRAMES_SHOWN):
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
        bar.set_label(f"attention, least to most of a {'map' if rows[0][3][0] is None else 'layer'}")

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
