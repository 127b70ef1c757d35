"""STRING, the LieRE product and Spherical RoPE: commuting generators in learned bases, and products of rotations."""

import math
from collections.abc import Iterable

import torch
from transformers import initialization as init
from transformers.utils.generic import maybe_autocast

from ..fast.dispatch import working_dtype
from ..rotation.exponential import skew
from ..rotation.grouped_rotation import Rotation
from ..rotation.rotation import BlockRotation, PlaneRotation
from .commuting_encodings import EncodingInBasis
from .kinds import CIRCULANTS, ENCODINGS, EVEN_DIVISORS, TRIPLES
from .positions import TokenPositions
from .rotary_encoding import ALL_LAYERS, RotaryEncoding


@ENCODINGS.add("cayley_string")
class CayleyString(EncodingInBasis):
    """
    Cayley-STRING (Schenck et al., "Learning the RoPEs", arXiv 2502.02562): R(p) = P RoPE-Mixed(p) Pᵀ with P =
    (I − S)(I + S)⁻¹ for a learned skew-symmetric S, which starts at zero, so that P starts at the identity. Each block
    has its S; in the paper, and by default, a block is a whole head.

    The paper rotates by RoPE(p) P (its §3.2, eq. 10), because the first factor of eq. 9, P RoPE(p) Pᵀ, cancels in the
    scores. They are ours with −S for S. It learns S and the frequencies as we do, and counts d/2 frequencies for each
    head of d channels; here each plane has one for every axis, so that every commuting encoding can be represented
    (Theorem 3.4). Its body does not state the values that training starts from; our frequencies start as RoPE-Mixed's.

    Attributes:
        generators: (A, layers or 1, heads or 1, head_dim/2, 1), the frequencies, as those of RoPE-Mixed.
        skew: (layers or 1, heads or 1, blocks, b(b−1)/2), free entries of each S.

        ViT-B, 2-D, has 9,216 frequencies and, for b = head_dim = 64, 290,304 entries of S.
    """

    description = "Cayley-STRING: RoPE-Mixed in a learned orthogonal basis, the Cayley map of a skew matrix"
    block_sizes = EVEN_DIVISORS
    rotary_inits = ("frequencies", "uniform", "normal", "zeros")
    rope_theta = 10.0

    def __init__(self, config, num_axes: int):
        super().__init__(config, num_axes)
        self.generators = self.new_parameter(num_axes, self.layers, self.heads, self.num_planes, 1)
        self.skew = self.new_parameter(self.layers, self.heads, self.num_blocks, self.num_entries)

    def sources(self, device: torch.device, layers: slice = ALL_LAYERS) -> tuple[torch.Tensor, ...]:
        return self.generators[:, layers], self.skew[..., layers, :, :, :]

    def spectrum(self, device: torch.device, layers: slice = ALL_LAYERS) -> tuple[torch.Tensor, torch.Tensor]:
        dtype = working_dtype(device)
        # (A, layers, heads, blocks, b/2)
        frequencies = self.generators[:, layers].to(dtype).squeeze(-1).unflatten(-1, (self.num_blocks, -1))
        return cayley_map(skew(self.skew[..., layers, :, :, :].to(dtype), self.block_size)), frequencies

    def parameters_for_planes(self, frequencies: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"generators": frequencies.unsqueeze(-1), "skew": torch.zeros(self.skew.shape)}

    @torch.no_grad()
    def reset_parameters(self) -> None:
        super().reset_parameters()
        init.zeros_(self.skew)


@ENCODINGS.add("circulant_string")
class CirculantString(EncodingInBasis):
    """
    Circulant-STRING (arXiv 2502.02562, eq. 11): A_a = C_a − C_aᵀ with a circulant C_a in every block. Circulant
    matrices commute and share the discrete Fourier basis, so that nothing is diagonalised: with s_k = c_k − c_(b−k),
    [A]_ij = s_((j−i) mod b), plane m of cosines and sines rotates with the frequency μ_m = 2 Σ_k s_k sin(2πmk/b), k and
    m = 1 … ⌊(b−1)/2⌋.

    Only the s_k act, so only they are stored. The constant vector and, for even b, the alternating one are not rotated.
    In the paper a block is a whole head, `block_size=head_dim`; the default is ours. Its body does not state the values
    that training starts from: here the μ start with RoPE-Mixed's spectrum.

    Attributes:
        generators: (A, layers or 1, heads or 1, blocks, ⌊(b−1)/2⌋), the s_k; ViT-B, 2-D, b = 16: 8,064 numbers.
    """

    description = "Circulant-STRING: learned rotations whose generators commute, being circulant"
    block_sizes = CIRCULANTS
    rotary_inits = ("frequencies", "uniform", "normal", "zeros")
    rope_theta = 10.0
    pretrained = "its blocks rotate the planes of a Fourier basis, not pairs of channels as RoPE does"

    def __init__(self, config, num_axes: int):
        super().__init__(config, num_axes)
        shape = (num_axes, self.layers, self.heads, self.num_blocks, (self.block_size - 1) // 2)
        self.generators = self.new_parameter(*shape)

    def sources(self, device: torch.device, layers: slice = ALL_LAYERS) -> tuple[torch.Tensor, ...]:
        return (self.generators[:, layers],)

    @property
    def num_planes(self) -> int:
        return self.num_blocks * ((self.block_size - 1) // 2)

    def sines(self, device: torch.device) -> torch.Tensor:
        """The symmetric (⌊(b−1)/2⌋, ⌊(b−1)/2⌋) matrix of 2 sin(2πmk/b), whose square is b."""
        index = torch.arange(1, (self.block_size + 1) // 2, device=device)
        # Exact integers lose whole revolutions without rounding.
        products = torch.outer(index, index) % self.block_size  # (⌊(b−1)/2⌋, ⌊(b−1)/2⌋)
        return 2 * (2 * math.pi / self.block_size * products.to(working_dtype(device))).sin()

    def spectrum(self, device: torch.device, layers: slice = ALL_LAYERS) -> tuple[torch.Tensor, torch.Tensor]:
        sines = self.sines(device)
        frequencies = self.generators[:, layers].to(sines.dtype) @ sines
        # For even b, the constant and the alternating vector span the last plane. (A, layers, heads, blocks, ⌊b/2⌋)
        frequencies = torch.nn.functional.pad(frequencies, (0, self.block_size // 2 - frequencies.shape[-1]))
        basis = fourier_basis(self.block_size, device).expand(*frequencies.shape[1:4], -1, -1)  # (…, b, b)
        return basis, frequencies

    def plane_basis(self, device: torch.device) -> torch.Tensor:
        """As [`RotaryEncoding.plane_basis`]: the Fourier basis."""
        return fourier_basis(self.block_size, device)

    def parameters_for_planes(self, frequencies: torch.Tensor) -> dict[str, torch.Tensor]:
        """As [`RotaryEncoding.parameters_for_planes`], for the planes of the Fourier basis."""
        sines = self.sines(frequencies.device)
        by_block = frequencies.unflatten(-1, (self.num_blocks, -1)).to(sines.dtype)  # (A, …, blocks, ⌊(b−1)/2⌋)
        return {"generators": by_block @ sines / self.block_size}


@ENCODINGS.add("liere_product")
class LieREProduct(CayleyString):
    """
    R(p) = Π_a U_a rot(p_a ω_a) U_aᵀ: Cayley-STRING for every axis alone, each with a learned basis U_a. Rotations of
    different axes do not commute and mix all channels of a block, without an exponential for each token: R(p)ᵀR(q)
    depends on q₀ − p₀ alone in the first coordinate, and on both positions in the others. We know no published form;
    [`spherical_rope.SphericalRoPE`] is a case of it, with one plane in blocks of three channels and fixed bases.

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
            planes = self.axis_planes(placed, frequencies.flatten(3))  # (1 or B, heads, N, A · planes, 2) per layer
            last, inner = bases[-1].to(self.rotation_dtype), inner_bases(bases).to(self.rotation_dtype)
            of_layers = zip(planes, last, inner.unbind(1))
            rotations = [PlaneRotation(cos_sin, basis, inner=between) for cos_sin, basis, between in of_layers]
        return self.repeat_for_layers(rotations)

    def bases(self) -> list[torch.Tensor]:
        """The last basis of every layer, which acts first, (1 or H, blocks, b, b) each."""
        bases, _ = self.spectrum(self.generators.device)
        return self.repeat_for_layers(list(bases[-1]))

    def folded_parameters(self) -> dict[str, torch.Tensor]:
        if self.num_axes == 1:
            return super().folded_parameters()
        bases, _ = self.spectrum(self.generators.device)
        return super().folded_parameters() | {"inner": inner_bases(bases)}


def inner_bases(bases: torch.Tensor) -> torch.Tensor:
    """U_(a+1)ᵀU_a of (A, …, b, b) bases in the order of the factors: (A − 1, …, b, b)."""
    return bases[1:].transpose(-1, -2) @ bases[:-1]


def cayley_map(matrices: torch.Tensor) -> torch.Tensor:
    """(I − S)(I + S)⁻¹ of skew-symmetric (…, b, b) S: orthogonal, without the eigenvalue −1; exactly I for zeros."""
    identity = torch.eye(matrices.shape[-1], dtype=matrices.dtype, device=matrices.device)
    # Both factors commute, and I + S is never singular: nothing is to be read from the device.
    return torch.linalg.solve_ex(identity + matrices, identity - matrices).result


def fourier_basis(size: int, device: torch.device) -> torch.Tensor:
    """
    (b, b) real orthogonal basis, in the working type, in which circulant skew-symmetric matrices rotate planes:
    columns sin and cos of 2πmi/b for m = 1 … ⌊(b−1)/2⌋, then for even b the alternating, and last the constant vector.
    """
    dtype = working_dtype(device)
    place, wave = torch.arange(size, device=device), torch.arange(1, (size + 1) // 2, device=device)
    # Whole revolutions are taken out of exact integers.
    angles = 2 * math.pi / size * (torch.outer(place, wave) % size).to(dtype)
    columns = [math.sqrt(2) * torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)]
    if size % 2 == 0:
        columns.append((1 - 2 * (place % 2)).to(dtype).unsqueeze(-1))
    return torch.cat([*columns, torch.ones(size, 1, dtype=dtype, device=device)], dim=1) / math.sqrt(size)


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
