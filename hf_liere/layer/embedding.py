"""The public layer, which can start at the rotations of another implementation, and positions of patches for it."""

from collections.abc import Callable, Sequence
from numbers import Integral
from typing import Any

import torch

from ..encoding.positions import GridPositions, TokenPositions
from ..probing.module_probe import Sizes, find_planes
from . import rotary_embedding


class LieRotaryEmbedding(rotary_embedding.LieRotaryEmbedding):
    __doc__ = rotary_embedding.LieRotaryEmbedding.__doc__

    @classmethod
    def like(
        cls,
        module: Callable,
        num_heads: int,
        head_dim: int,
        num_axes: int,
        position_encoding: str = "rope_mixed",
        block_size: int | None = None,
        *,
        num_key_value_heads: int | None = None,
        num_layers: int = 1,
        pairing: str | Sequence[tuple[int, int]] | None = None,
        **fields: Any,
    ) -> "LieRotaryEmbedding":
        """
        A layer that starts at the rotations of any implementation of RoPE. With planes (`rope_mixed`, `liere` with
        `block_size=2`) it computes the same bits in float32, if the implementation rounds angles to float32, as most
        do; otherwise, and with blocks, the same up to rounding.

        ```python
        rotary = LieRotaryEmbedding.like(rope, num_heads=8, head_dim=60, num_axes=3)  # a module called rope(q, k, xyz)
        query, key = rotary(query, key, xyz)
        ```

        Frequencies and pairs of channels are measured: a copy of the module is called with known positions.

        Args:
            module: A module or function of one of these kinds, with states in any usual layout:

                - (query, key, positions) → rotated query and key, or (states, positions) → rotated states;
                - (states, positions) or (positions) → cos and sin, complex numbers or angles;
                - with timm's `get_embed(shape)`, where positions are indices of patches, rows first.

            num_heads, head_dim, num_axes, position_encoding, block_size: As for the class.
            num_key_value_heads, num_layers: As for the class. A table with a dimension for these has them.
            pairing: As for the class, where cos and sin do not show it; `None` means as measured.
            fields: Other arguments of the class.

        Raises:
            ValueError: if the rotations cannot be found, with the reason, or the class refuses them.
        """
        key_heads = num_heads if num_key_value_heads is None else num_key_value_heads
        planes, is_rounded = find_planes(module, Sizes(num_heads, key_heads, head_dim, num_axes, num_layers), pairing)
        is_planar = position_encoding == "rope_mixed" or (position_encoding == "liere" and block_size == 2)
        return cls(
            num_heads,
            head_dim,
            num_axes,
            position_encoding,
            block_size,
            num_key_value_heads=num_key_value_heads,
            num_layers=num_layers,
            frequencies=planes.frequencies,
            pairing=planes.pairs,
            **{"round_angles": is_rounded and is_planar, **fields},
        )


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
