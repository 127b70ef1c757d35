"""The public layer, which can start at the rotations of another implementation."""

from collections.abc import Callable, Sequence
from typing import Any

from ..models.encoding import rotary_embedding
from .module_probe import Sizes, find_planes


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
        sizes = Sizes(num_heads, key_heads, head_dim, num_axes, num_layers)
        planes, is_rounded = find_planes(module, sizes, pairing)
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
