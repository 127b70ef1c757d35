"""Encodings whose rotations are products of exponentials, one for each axis."""

from collections.abc import Iterable

import torch
from transformers import initialization as init
from transformers.utils.generic import maybe_autocast

from ..rotation.grouped_rotation import Rotation
from ..rotation.rotation import BlockRotation, PlaneRotation
from .commuting_encodings import CayleyString
from .kinds import ENCODINGS, TRIPLES
from .positions import TokenPositions
from .rotary_encoding import ALL_LAYERS, RotaryEncoding


PRODUCT_FIELDS = {"relative_axis": 0}


@ENCODINGS.offer("liere_product")
class LieREProduct(CayleyString):
    """
    R(p) = Π_a U_a rot(p_a ω_a) U_aᵀ: Cayley-STRING for every axis alone, each with a learned basis U_a. Rotations of
    different axes do not commute and mix all channels of a block, without an exponential for each token: R(p)ᵀR(q)
    depends on q₀ − p₀ alone in the first coordinate, and on both positions in the others; `relative_axis` chooses the
    axis that comes first. We know no published form; [`SphericalRoPE`] is a case of it, with one plane in blocks of
    three channels and fixed bases.

    In attention the basis of the first factor cancels next to its neighbour, that of the last factor acts on queries
    and keys first and folds into their weights, and the A − 1 products U_(a+1)ᵀU_a between them are one matrix for each
    head, see [`PlaneRotation`].

    The bases are Cayley maps, so that any values of their parameters are orthogonal: one linear system for each basis
    and step, where an exponential takes about ten products. They are exactly I at zero, where the encoding is
    RoPE-Mixed or, with planes that serve one axis each, Axial RoPE. They lack the eigenvalue −1, and the same planes
    have other bases without it.

    Attributes:
        generators: (A, layers or 1, heads or 1, head_dim/2, 1), the ω, as those of RoPE-Mixed.
        skew: (A, layers or 1, heads or 1, blocks, b(b−1)/2), free entries of each S with U = (I − S)(I + S)⁻¹.

        ViT-B, 2-D, has 9,216 frequencies and, for b = head_dim = 64, 580,608 entries of S.
    """

    description = "LieRE product: R(p) = Π Uₐ rot(pₐ ωₐ) Uₐᵀ, planes of each axis in a learned basis"
    commutes = False
    product = True
    fields = PRODUCT_FIELDS

    def __init__(self, config, num_axes: int):
        super().__init__(config, num_axes)
        self.skew = self.new_parameter(num_axes, self.layers, self.heads, self.num_blocks, self.num_entries)

    def layer_rotations(
        self, positions: TokenPositions, dtype: torch.dtype | None = None, layers: slice = ALL_LAYERS
    ) -> Iterable[Rotation]:
        placed = positions.locate()
        device = placed.coordinates.device
        with maybe_autocast(device.type, enabled=False):
            bases, frequencies = self.spectrum(device, layers)
            bases = self.to_factors(bases)
            planes = self.axis_planes(placed, frequencies.flatten(3))  # (1 or B, heads, N, A · planes, 2) per layer
            last, inner = bases[-1].to(self.rotation_dtype), inner_bases(bases).to(self.rotation_dtype)
            of_layers = zip(planes, last, inner.unbind(1))
            rotations = [PlaneRotation(cos_sin, basis, inner=between) for cos_sin, basis, between in of_layers]
        return self.repeat_for_layers(rotations)

    def bases(self) -> list[torch.Tensor]:
        """The last basis of every layer, which acts first, (1 or H, blocks, b, b) each."""
        bases, _ = self.spectrum(self.generators.device)
        return self.repeat_for_layers(list(self.to_factors(bases)[-1]))

    def folded_parameters(self) -> dict[str, torch.Tensor]:
        if self.num_axes == 1:
            return super().folded_parameters()
        bases, _ = self.spectrum(self.generators.device)
        return super().folded_parameters() | {"inner": inner_bases(self.to_factors(bases))}


def inner_bases(bases: torch.Tensor) -> torch.Tensor:
    """U_(a+1)ᵀU_a of (A, …, b, b) bases in the order of the factors: (A − 1, …, b, b)."""
    return bases[1:].transpose(-1, -2) @ bases[:-1]


@ENCODINGS.offer("spherical_rope")
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
    ones: `centred_grid` with `rotary_init_scale=2π`. With `relative_axis=1` x takes the place of y. We
    know no published form for other numbers of axes.

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
    fields = PRODUCT_FIELDS

    def __init__(self, config, num_axes: int):
        super().__init__(config, num_axes)
        self.generators = self.new_parameter(num_axes, self.layers, self.heads, self.num_blocks)

    def entries(self, device: torch.device) -> torch.Tensor:
        # Pairs (0, 1), (0, 2), (1, 2) of channels: the first factor rotates the first, the second factor the last.
        first, second = self.to_factors(self.generators).unbind(0)  # (layers or 1, heads or 1, blocks)
        zero = torch.zeros_like(first)
        factors = torch.stack([torch.stack([first, zero, zero], -1), torch.stack([zero, zero, second], -1)])
        # The order of two factors is its own inverse.
        return self.to_factors(factors)

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
