"""Positions of patches for attention that is not ours."""

from collections.abc import Sequence
from numbers import Integral

import torch

from ..models.encoding.positions import GridPositions, TokenPositions


def grid_positions(
    grid: Sequence[int],
    coordinates: str = "train_grid",
    num_prefix_tokens: int = 0,
    *,
    train_grid: Sequence[int] | None = None,
    prefix_coordinate: float = 0.0,
    device: torch.device | str | None = None,
) -> GridPositions:
    """
    Positions of the patches of an image, video or volume for [`LieRotaryEmbedding`], first axis slowest, after class
    and register tokens. Rotations of a grid are computed faster than those of arbitrary points.

    ```python
    import torch
    from hf_liere import LieRotaryEmbedding, grid_positions

    rotary = LieRotaryEmbedding(num_heads=8, head_dim=64, num_axes=2, position_encoding="liere", block_size=8)
    positions = grid_positions((14, 14), num_prefix_tokens=1)  # a class token and 196 patches
    query, key = rotary(torch.randn(1, 8, 197, 64), torch.randn(1, 8, 197, 64), positions)
    ```

    Args:
        grid: Patches per axis.
        coordinates: A convention of [`LieREPixelConfig`]: `"train_grid"` (LieRE's), `"centred_grid"` (the
            fastest for LieRE's rotations), `"index"` (RoPE's), `"unit"` (ComRoPE's), `"train_index"`, `"fixed_grid"` or
            `"unit_width"`.
        num_prefix_tokens: Number of tokens before the patches.
        train_grid: Patches per axis of a training input; `None` means `grid`.
        prefix_coordinate: Coordinate of prefix tokens on every axis; at 0 they are not rotated.

    Returns:
        Positions with (P + N, A) `coordinates`, to be read. `moved(offsets)` gives those of patches displaced by (N, A)
        or (B, N, A) `offsets` in patch extents, which are no longer treated as a grid.

    Raises:
        ValueError: if `grid` contains a number below 1, the lengths of `grid` and `train_grid` differ, or the
            convention is unknown.
    """
    train_grid = grid if train_grid is None else train_grid
    sides = [side for each in (grid, train_grid) for side in (each if isinstance(each, Sequence) else [0])]
    if not all(isinstance(side, Integral) and side > 0 for side in sides) or not len(grid) == len(train_grid) > 0:
        raise ValueError(
            f"grid={grid} and train_grid={train_grid} must have one length, and numbers of patches of at least 1, such "
            "as (14, 14)."
        )
    grid, train_grid = tuple(grid), tuple(train_grid)
    prefix, device = (num_prefix_tokens, prefix_coordinate), torch.device(device or "cpu")
    positions = TokenPositions.from_grid(grid, train_grid, coordinates, *prefix, device=device)
    assert isinstance(positions, GridPositions), "nothing moves the patches"
    return positions
