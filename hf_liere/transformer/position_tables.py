"""Learned tables of absolute positions: read at coordinates, or resized to a grid of patches."""

import itertools
import math
from typing import Any

import torch
from torch import nn

from ..encoding.positions import patch_indices


def read_table(table: torch.Tensor, size: tuple[int, ...], positions: torch.Tensor) -> torch.Tensor:
    """
    (1 or B, N, hidden_size) multilinear interpolation, in the type of the table, between its (1, entries, hidden_size)
    entries, last axis fastest; (N, A) or (B, N, A) positions run from 0 at the first entry of an axis to 1 at the last.
    """
    entries = table[0].float()  # (entries, hidden_size)
    last = positions.new_tensor(size) - 1  # (A,)
    places = (positions * last).clamp(min=torch.zeros_like(last), max=last)  # (…, N, A)
    first = places.floor().clamp(max=(last - 1).clamp(min=0))  # (…, N, A)
    shares = places - first  # (…, N, A), weight of the entry after `first`
    strides = [math.prod(size[axis + 1 :]) for axis in range(len(size))]
    values: Any = 0.0
    for corner in itertools.product((0, 1), repeat=len(size)):
        weights: Any = 1.0
        index = 0
        for axis, step in enumerate(corner):
            share = shares[..., axis]  # (…, N)
            weights = weights * (share if step else 1 - share)
            index = index + (first[..., axis].long() + min(step, size[axis] - 1)) * strides[axis]  # (…, N)
        values = values + nn.functional.embedding(index, entries) * weights.unsqueeze(-1).to(entries.dtype)
    values = values if values.ndim == 3 else values.unsqueeze(0)  # (1 or B, N, hidden_size)
    return values.to(table.dtype)


def patch_table(
    table: torch.Tensor, train_grid: tuple[int, ...], grid: tuple[int, ...], resize: str, offsets: torch.Tensor | None
) -> torch.Tensor:
    """
    (1, patches, hidden_size) entries of a grid of patches.

    Args:
        table: (1, entries, hidden_size), whose last entries are those of the training patches.
        resize: `position_table_resize` of the configuration; `"truncate"` raises `ValueError` for larger grids.
        offsets: (N, A) displacements in patch extents; displaced patches read between the entries of `grid`.
    """
    table = table[:, -math.prod(train_grid) :]  # (1, N, hidden_size)
    # torch.jit.trace would keep the answer for inputs of every shape.
    fits = not torch.jit.is_tracing() and grid == train_grid
    if not fits and resize == "truncate":
        if math.prod(grid) > table.shape[1]:
            raise ValueError(
                f"The input has {math.prod(grid)} patches, the learned table {table.shape[1]}, and "
                "position_table_resize='truncate' cannot enlarge it; 'interpolate' can."
            )
        table, fits = table[:, : math.prod(grid)], True
    if fits and offsets is None:
        return table
    table = table.transpose(1, 2).unflatten(-1, grid if fits else train_grid)  # (1, hidden_size, *grid)
    if not fits:
        mode = "bicubic" if len(grid) == 2 else "trilinear"
        resized = nn.functional.interpolate(table.float(), size=grid, mode=mode, align_corners=False)
        table = resized.to(table.dtype)  # (1, hidden_size, *grid)
    if offsets is not None:
        sizes = offsets.new_tensor(grid)
        indices = patch_indices(grid, offsets.device) + offsets  # (N, A)
        # grid_sample takes the last axis first; −1 and 1 are the outer borders of the first and last entry.
        points = ((2 * indices + 1) / sizes - 1).flip(-1).view(1, *grid, len(grid)).to(table.dtype)
        table = nn.functional.grid_sample(table, points, padding_mode="border", align_corners=False)
    return table.flatten(2).transpose(1, 2)  # (1, N, hidden_size)
