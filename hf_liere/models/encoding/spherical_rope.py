"""Spherical RoPE: products of rotations of three channels, one for each axis."""

from collections.abc import Iterable

import torch
from transformers import initialization as init

from ..rotation.grouped_rotation import Rotation
from ..rotation.rotation import BlockRotation
from .kinds import ENCODINGS, TRIPLES
from .positions import TokenPositions
from .rotary_encoding import ALL_LAYERS, RotaryEncoding


@ENCODINGS.add("spherical_rope")
class SphericalRoPE(RotaryEncoding):
    """
    Spherical RoPE ("A Circular Argument", arXiv 2511.08368): R(p) = R_z(ω₀ p₀) R_x(ω₁ p₁) in blocks of three channels,
    with R_z a rotation of the first two channels and R_x of the last two, counter-clockwise. The rotations of both axes
    do not commute: R(p)ᵀR(q) depends on q₀ − p₀ alone in the first coordinate, but on both p₁ and q₁. The last
    head_dim mod 3 channels are not rotated.

    Its §4 turns a triplet about the axis of x first and about that of y second, on images, and leaves class tokens as
    they are; so it is here, with p = (y, x). Its frequencies are ω_d = 100^(−2d/D) on both axes, fixed or learned
    (Table 2, appendix G). Here block i of K starts at θ^(−i/K), the same for D = 2K, and is learned;
    `requires_grad_(False)` keeps it. Its coordinates run from −π to π over the trained image and further over larger
    ones: `centred_grid` with `rotary_init_scale=2π`. We know no published form for
    other numbers of axes.

    Attributes:
        generators: (2, layers or 1, heads or 1, blocks), the ω; 6,048 numbers for ViT-B.
    """

    description = "Spherical RoPE: products of rotations of three channels about two of their axes"
    block_sizes = TRIPLES
    rotary_inits = ("frequencies", "uniform", "normal", "zeros")
    rope_theta = 100.0
    commutes = False
    product = True
    only_axes = 2
    pretrained = "it rotates three channels, not pairs of channels as RoPE does"

    def __init__(self, config, num_axes: int):
        super().__init__(config, num_axes)
        self.generators = self.new_parameter(num_axes, self.layers, self.heads, self.num_blocks)

    def entries(self, device: torch.device) -> torch.Tensor:
        # Pairs (0, 1), (0, 2), (1, 2) of channels: the first factor rotates the first, the second factor the last.
        first, second = self.generators.unbind(0)  # (layers or 1, heads or 1, blocks)
        zero = torch.zeros_like(first)
        return torch.stack([torch.stack([first, zero, zero], -1), torch.stack([zero, zero, second], -1)])

    def layer_rotations(
        self, positions: TokenPositions, dtype: torch.dtype | None = None, layers: slice = ALL_LAYERS
    ) -> Iterable[Rotation]:
        """The product of both rotations in closed form."""
        rotations = []
        for cos_sin in self.axis_planes(positions.locate(), self.generators[:, layers]):
            cos, sin = cos_sin.transpose(1, 2).unbind(-1)  # (1 or B, N, H, 2 · blocks)
            (cos_z, cos_x), (sin_z, sin_x) = cos.chunk(2, dim=-1), sin.chunk(2, dim=-1)
            rows = (
                (cos_z, -sin_z * cos_x, sin_z * sin_x),
                (sin_z, cos_z * cos_x, -cos_z * sin_x),
                (torch.zeros_like(sin_x), sin_x, cos_x),
            )
            blocks = torch.stack([torch.stack(row, -1) for row in rows], -2)  # (1 or B, N, H, blocks, 3, 3)
            rotations.append(BlockRotation(blocks.transpose(1, 2)))
        return self.repeat_for_layers(rotations)

    @property
    def num_planes(self) -> int:
        return self.num_blocks

    @torch.no_grad()
    def reset_parameters(self) -> None:
        if self.config.rotary_init != "frequencies":
            super().reset_parameters()
            return
        magnitudes = self.config.rope_theta ** -(torch.arange(self.num_blocks) / self.num_blocks)
        init.copy_(self.generators, (magnitudes * self.config.rotary_init_scale).expand_as(self.generators))
