"""Several encodings in one head: each rotates a share of the channels, at its own columns of the positions."""

from collections.abc import Iterable, Iterator

import torch
from torch import nn

from ..rotation.exponential import skew, skew_entries
from ..rotation.grouped_rotation import Rotation, SharedRotation
from .folding import build_encoding
from .kinds import ENCODINGS, STARTS, WHOLE, Start, generators_commute, needs_exponential
from .positions import GroupedPositions, TokenPositions
from .rotary_encoding import RotaryEncoding
from .rotary_fields import share_configs


@ENCODINGS.add("shares")
class Shares(RotaryEncoding):
    """
    R(p) = blockdiag(R_1(p), R_2(p), …): encoding i rotates its share of the channels of every head, at the axes of the
    positions that it names. Channels that no share has are not rotated.

    ```python
    from hf_liere import LieRotaryEmbedding
    shares = [("liere", {"rotary_init": "so3", "share": 0.75, "axes": [0, 1, 2]}), ("rope_mixed", {"axes": [3]})]
    rotary = LieRotaryEmbedding(num_heads=2, head_dim=32, num_axes=4, position_encoding=shares)
    assert rotary.encoding.widths == [24, 8]
    ```

    Attributes:
        parts: The encoding of each share, for heads of as many channels.
        axes: The axes that each share rotates by.
        widths: Channels of each share in a head.
    """

    description = "Shares: several encodings, each with a share of the channels of a head and its own axes"
    block_sizes = WHOLE
    fields = {"shares": [["liere", {}], ["rope_mixed", {}]]}
    commutes = False
    pretrained = "every share starts by its own rotary_init"

    @classmethod
    def obstacle(cls, config) -> str | None:
        """Raises `ValueError` for shares that do not fit the head, its axes or each other."""
        share_configs(config)
        if config.folded_grids is not None and cls.exponential(config):
            return "folded_grids: rotations of a share need exponentials, and shares fold into weights alone"
        return None

    @classmethod
    def commuting(cls, config) -> bool:
        return all(generators_commute(part) for part, _ in share_configs(config))

    @classmethod
    def exponential(cls, config) -> bool:
        return any(needs_exponential(part) for part, _ in share_configs(config))

    @classmethod
    def orientations(cls, config) -> list[list[int]]:
        # Every call with given positions asks, so no part is built.
        defaults = ([next(iter(ENCODINGS[name].rotary_inits), None), own] for name, own in config.shares)
        starts = ((STARTS.get(own.get("rotary_init") or default, Start), own) for default, own in defaults)
        return [own.get("axes", [0, 1, 2]) for start, own in starts if start.takes_orientations]

    @classmethod
    def default_coordinates(cls, config) -> str:
        """Those of the first share."""
        first, *_ = (config.shares or cls.fields["shares"])[0]
        return ENCODINGS[first].coordinates

    def __init__(self, config, num_axes: int):
        super().__init__(config, num_axes)
        shares = share_configs(config)
        self.axes = [axes for _, axes in shares]
        self.widths = [part.head_dim for part, _ in shares]
        self.parts = nn.ModuleList(build_encoding(part, part.num_axes) for part, _ in shares)
        # Folding asks instances.
        self.in_basis = any(part.in_basis for part in self.parts)

    def forward(
        self,
        positions: TokenPositions | GroupedPositions,
        dtype: torch.dtype | None = None,
        layer: int | None = None,
    ) -> Iterable[Rotation]:
        """As [`RotaryEncoding`]; every share has a cache of its own."""
        by_share = [part(positions.on_axes(axes), dtype, layer) for part, axes in zip(self.parts, self.axes)]
        layers = (SharedRotation(rotations, self.widths) for rotations in zip(*by_share))
        # Large rotations are computed layer by layer, when they are needed.
        return list(layers) if all(isinstance(each, list) for each in by_share) else layers

    def entries(self, device: torch.device) -> torch.Tensor:
        """Those of blocks of whole heads, (A, layers or 1, heads or 1, 1, D(D−1)/2), zero outside of the shares."""
        sizes = self.num_axes, self.num_layers, self.config.num_attention_heads
        whole, first = torch.zeros(*sizes, self.block_size, self.block_size, device=device), 0
        for part, axes, width in zip(self.parts, self.axes, self.widths):
            matrices = skew(part.entries(device), part.block_size)  # (axes, layers or 1, heads or 1, blocks, b, b)
            for index, block in enumerate(matrices.unbind(3)):
                channels = slice(start := first + index * part.block_size, start + part.block_size)
                whole[axes, ..., channels, channels] = block.to(whole).expand(len(axes), *sizes[1:], -1, -1)
            first += width
        return skew_entries(whole).unsqueeze(3)

    def bases(self) -> Iterator[tuple[tuple[torch.Tensor | None, int], ...]]:
        """For every layer, the basis of each share and of the channels without one, see [`projections.to_folded`]."""
        layers = [part.bases() if part.in_basis else [None] * self.num_layers for part in self.parts]
        rest = None, self.config.head_dim - sum(self.widths)
        return ((*zip(bases, self.widths), rest) for bases in zip(*layers))

    @torch.no_grad()
    def copy_rotations(self, encoding: "Shares") -> None:
        """Copy what the parts of an encoding become when they are folded."""
        for folded, part in zip(self.parts, encoding.parts):
            if type(folded) is type(part):
                folded.load_state_dict(part.state_dict())
            else:
                folded.copy_rotations(part)

    def reset_parameters(self) -> None:
        """Parts start by themselves, where they are built and where models initialise their modules."""
