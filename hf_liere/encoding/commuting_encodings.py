"""Encodings whose generators commute: rotations of planes in a basis that is the same for all positions."""

from collections.abc import Iterable

import torch
from transformers import initialization as init
from transformers.utils.generic import maybe_autocast

from ..fast.closed_forms import cos_sin
from ..fast.dispatch import batches_layers, in_forward_mode, working_dtype
from ..fast.rotation_gradients import outer_products_of_layers
from ..rotation.bases import eigenbasis, shared_eigenbases, skew_from_planes
from ..rotation.exponential import skew, skew_entries
from ..rotation.grouped_rotation import Rotation
from ..rotation.rotation import PlaneRotation
from .kinds import DIVISORS, DIVISORS_BY_AXIS, ENCODINGS, encoding_of, start_of
from .positions import TokenPositions
from .rotary_encoding import ALL_LAYERS, RotaryEncoding


# Relative deviation from proportional or axial generators that float32 rounding may cause.
ROUNDING = 1e-6


class EncodingInBasis(RotaryEncoding):
    """
    R(p) = U rot(Σ_a p_a f_a) Uᵀ in every block, with an orthogonal U and frequencies f_a of its planes, which are
    pairs of neighbouring columns of U. Attention changes queries and keys to the basis once, see [`PlaneRotation`].
    """

    in_basis = True

    def spectrum(self, device: torch.device, layers: slice = ALL_LAYERS) -> tuple[torch.Tensor, torch.Tensor]:
        """
        U, (layers or 1, heads or 1, blocks, b, b), and (A, layers or 1, heads or 1, blocks, ⌊b/2⌋) frequencies, in the
        working dtype. For odd b the last column of U is not in a plane.
        """
        raise NotImplementedError

    def entries(self, device: torch.device) -> torch.Tensor:
        with maybe_autocast(device.type, enabled=False):
            basis, frequencies = self.spectrum(device)
            return skew_entries(skew_from_planes(frequencies, basis))  # (A, layers, heads, blocks, b(b−1)/2)

    def layer_rotations(
        self, positions: TokenPositions, dtype: torch.dtype | None = None, layers: slice = ALL_LAYERS
    ) -> Iterable[Rotation]:
        """Planes, without a matrix exponential; blocks where their size is odd, which leaves one direction fixed."""
        if self.block_size % 2:
            return super().layer_rotations(positions, dtype, layers)
        placed = positions.locate()
        device = placed.coordinates.device
        with maybe_autocast(device.type, enabled=False):
            basis, frequencies = self.spectrum(device, layers)
            planes = self.planes(placed, frequencies.flatten(3))  # (1 or B, heads, N, planes, 2) per layer
            rotations = [PlaneRotation(*layer) for layer in zip(planes, basis.to(self.rotation_dtype))]
        return self.repeat_for_layers(rotations)

    def bases(self) -> list[torch.Tensor]:
        """U of every layer, (1 or H, blocks, b, b) each, for `LieREAttention.fold`."""
        basis, _ = self.spectrum(self.generators.device)
        return self.repeat_for_layers(list(basis))

    def folded_parameters(self) -> dict[str, torch.Tensor]:
        """Parameters by name of a `FoldedPlanes` with these rotations."""
        _, frequencies = self.spectrum(self.generators.device)
        return {"frequencies": frequencies.flatten(-2)}


class FoldedPlanes(RotaryEncoding):
    """
    An [`EncodingInBasis`] for inference: RoPE with a frequency per axis and plane. The basis is in the query and key
    weights, which put the channels that odd blocks do not rotate after all planes of their head. Products of
    exponentials keep the constant matrices between their factors.

    Attributes:
        frequencies: (A, layers or 1, heads or 1, planes).
        inner: (A − 1, layers or 1, heads or 1, blocks, b, b) of products, in the order of the factors, see
            [`PlaneRotation`]; else `None`.
    """

    def __init__(self, config, num_axes: int):
        super().__init__(config, num_axes)
        planes = self.num_blocks * (self.block_size // 2)
        self.frequencies = self.new_parameter(num_axes, self.layers, self.heads, planes).requires_grad_(False)
        self.inner = None
        if encoding_of(config).product and num_axes > 1:
            shape = (num_axes - 1, self.layers, self.heads, self.num_blocks, self.block_size, self.block_size)
            self.inner = self.new_parameter(*shape).requires_grad_(False)
        else:
            self.block_size = 2

    def entries(self, device: torch.device) -> torch.Tensor:
        """In the basis that the weights contain, which is that of the last factor."""
        frequencies = self.frequencies.detach()
        if self.inner is None:
            return frequencies.unsqueeze(-1)
        bases = [torch.eye(self.block_size, dtype=self.inner.dtype, device=self.inner.device).expand_as(self.inner[0])]
        for inner in reversed(self.inner.detach().unbind()):
            bases.insert(0, bases[0] @ inner)
        planes = frequencies.unflatten(-1, (self.num_blocks, -1))
        return skew_entries(skew_from_planes(planes, torch.stack(bases)))  # factor after factor

    def sources(self, device: torch.device, layers: slice = ALL_LAYERS) -> tuple[torch.Tensor, ...]:
        inner = () if self.inner is None else (self.inner[:, layers],)
        return *super().sources(device, layers), *inner

    def layer_rotations(
        self, positions: TokenPositions, dtype: torch.dtype | None = None, layers: slice = ALL_LAYERS
    ) -> Iterable[Rotation]:
        if self.inner is None:
            return super().layer_rotations(positions, dtype, layers)
        planes = self.axis_planes(positions.locate(), self.frequencies.detach()[:, layers])
        inner = self.inner.detach()[:, layers].unbind(1)
        return self.repeat_for_layers([PlaneRotation(cos_sin, inner=each) for cos_sin, each in zip(planes, inner)])

    @torch.no_grad()
    def copy_rotations(self, encoding: EncodingInBasis) -> None:
        for name, values in encoding.folded_parameters().items():
            getattr(self, name).copy_(values)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        init.zeros_(self.frequencies)
        if self.inner is not None:
            init.copy_(self.inner, torch.eye(self.inner.shape[-1]).expand_as(self.inner))


@ENCODINGS.add("comrope_ap")
class ComRoPEAxialPartition(EncodingInBasis):
    """
    ComRoPE-AP (§3.3.1, eq. 8): block j rotates with coordinate j mod A only, so generators of different axes act on
    different channels and commute.

    ComRoPE's Table 7 counts full b×b matrices P. Only P − Pᵀ acts, so its b(b−1)/2 free entries are stored here: 32,256
    instead of 73,728 numbers for ViT-B with b = 8.

    Attributes:
        generators: (layers or 1, heads or 1, blocks, b(b−1)/2).
    """

    description = "ComRoPE-AP: learned rotations whose generators commute, each block serving one axis"
    block_sizes = DIVISORS_BY_AXIS
    rotary_inits = ("normal", "uniform", "zeros")
    coordinates = "unit"
    rotate_prefix = True
    serves_one_axis = True
    proportional = True

    def __init__(self, config, num_axes: int):
        super().__init__(config, num_axes)
        self.generators = self.new_parameter(self.layers, self.heads, self.num_blocks, self.num_entries)

    def axis_multipliers(self, device: torch.device) -> torch.Tensor:
        """(A, layers or 1, heads or 1, blocks) multiples of a block's matrix in the generators of the axes."""
        served = torch.arange(self.num_blocks, device=device) % self.num_axes  # (blocks,)
        serves = served == torch.arange(self.num_axes, device=device).unsqueeze(-1)  # (A, blocks)
        return serves.view(self.num_axes, 1, 1, self.num_blocks)

    def entries(self, device: torch.device) -> torch.Tensor:
        # In float32, rounding this product would dominate the error of the rotations.
        dtype = working_dtype(device)
        return self.axis_multipliers(device).to(dtype).unsqueeze(-1) * self.generators.to(dtype)

    def layer_rotations(
        self, positions: TokenPositions, dtype: torch.dtype | None = None, layers: slice = ALL_LAYERS
    ) -> Iterable[Rotation]:
        """As [`EncodingInBasis.layer_rotations`], by one eigenbasis for each block, which has no forward derivative."""
        if self.block_size % 2 or in_forward_mode():
            return RotaryEncoding.layer_rotations(self, positions, dtype, layers)
        placed = positions.locate()
        coordinates = placed.coordinates
        dtype, device = working_dtype(coordinates.device), coordinates.device
        batch, tokens = coordinates.shape[:-2] or (1,), coordinates.shape[-2]
        with maybe_autocast(device.type, enabled=False):
            basis, generators, frequencies = self.diagonalise(dtype, layers)  # (layers, H, blocks, …)
            multipliers = self.axis_multipliers(device).to(dtype).expand(-1, self.layers, self.heads, -1)
            multipliers = placed.by_head(multipliers[:, layers])  # (A, layers, H, blocks)
            coordinates = coordinates.to(dtype).reshape(-1, len(multipliers))  # (B · N, A)
            basis, generators = basis.to(self.rotation_dtype), generators.to(self.rotation_dtype)
            generators = generators.expand(-1, multipliers.shape[2], -1, -1, -1)
            phases, cos_sins = [], []
            outer: list[torch.Tensor | None] = []
            step = len(generators) if batches_layers(device) else 1
            for chosen, *parts in zip(generators.split(step), multipliers.split(step, 1), frequencies.split(step)):
                some_multipliers, some_frequencies = parts
                phase = coordinates @ some_multipliers.flatten(1)  # (B · N, layers · H · blocks)
                phase = phase.unflatten(1, some_multipliers.shape[1:]).unflatten(0, (*batch, tokens))
                phase = phase.movedim(2, 0)  # (layers, B, N, H, blocks)
                # (layers, B, N, H, planes)
                angles = (phase.unsqueeze(-1) * some_frequencies[:, None, None]).flatten(-2)
                cos_sins.extend(cos_sin(angles, self.rotation_dtype).transpose(2, 3).unbind())
                phase = phase.transpose(2, 3).to(self.rotation_dtype)  # (layers, B, H, N, blocks)
                phases.extend(phase.detach().unbind())
                outer.extend(outer_products_of_layers(phase, chosen))
        layers_of = zip(cos_sins, basis, generators, phases, outer)
        rotations = [PlaneRotation(*layer[:4], outer=layer[4]) for layer in layers_of]
        return self.repeat_for_layers(rotations)

    def spectrum(self, device: torch.device, layers: slice = ALL_LAYERS) -> tuple[torch.Tensor, torch.Tensor]:
        dtype = working_dtype(device)
        basis, _, frequencies = self.diagonalise(dtype, layers)
        multipliers = self.axis_multipliers(device).to(dtype).expand(-1, self.layers, self.heads, -1)[:, layers]
        return basis, multipliers.unsqueeze(-1) * frequencies

    @torch.no_grad()
    def scale_generators(self, factors: torch.Tensor) -> dict[str, torch.Tensor]:
        """As [`RotaryEncoding.scale_generators`]: each block by the factor of its axis."""
        factors = factors.to(self.generators).view(-1, 1, 1, 1)
        by_block = (self.axis_multipliers(factors.device) * factors).sum(0)  # (1, 1, blocks)
        return {"generators": self.generators * by_block.unsqueeze(-1)}

    def parameters_for_entries(self, entries: torch.Tensor) -> dict[str, torch.Tensor]:
        """As [`RotaryEncoding.parameters_for_entries`]: block j rotates with axis j mod A alone."""
        serves = self.axis_multipliers(entries.device).unsqueeze(-1)  # (A, 1, 1, blocks, 1)
        if (entries * ~serves).norm() > ROUNDING * entries.norm():
            raise ValueError("each of its blocks rotates with one axis alone, the axes in turn")
        return {"generators": (entries * serves).sum(0)}

    def diagonalise(
        self, dtype: torch.dtype, layers: slice = ALL_LAYERS
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """
        Eigenbasis U, UᵀSU and frequencies μ of the one matrix S of every block, in `dtype`, see
        [`bases.eigenbasis`]: (layers or 1, heads or 1, blocks, b, b) twice and (layers or 1, heads or 1, blocks,
        ⌊b/2⌋).
        """
        generators = skew(self.generators[layers].to(dtype), self.block_size)  # (layers, heads, blocks, b, b)
        known = getattr(shared_eigenbases, "known", None) if batches_layers(generators.device) else None
        if known is not None and self not in known:
            # Eigenvalues wait for the device: once for all layers that ask one after the other.
            known[self] = eigenbasis(skew(self.generators.detach().to(dtype), self.block_size))
        basis = eigenbasis(generators.detach()) if known is None else known[self][layers]
        generators = basis.transpose(-1, -2) @ generators @ basis
        return basis, generators, generators[..., 1::2, ::2].diagonal(dim1=-2, dim2=-1)


@ENCODINGS.add("comrope_ld")
class ComRoPELinearlyDependent(ComRoPEAxialPartition):
    """
    ComRoPE-LD (§3.3.2, eq. 10): A_a = θ_a (P − Pᵀ); the generators of all axes are multiples of one matrix and commute.

    As in the paper, there is one multiplier θ per axis, block and head (the official code shares them over heads):
    ViT-B with b = 8 has 32,256 entries of P − Pᵀ (73,728 as full matrices in ComRoPE's Table 7) and 2,304 multipliers.

    Attributes:
        generators: (layers or 1, heads or 1, blocks, b(b−1)/2), entries of P − Pᵀ.
        multipliers: (A, layers or 1, heads or 1, blocks), the θ_a.
    """

    description = "ComRoPE-LD: learned rotations whose generators commute, being multiples of one matrix"
    block_sizes = DIVISORS
    serves_one_axis = False

    def __init__(self, config, num_axes: int):
        super().__init__(config, num_axes)
        self.multipliers = self.new_parameter(num_axes, self.layers, self.heads, self.num_blocks)

    def axis_multipliers(self, device: torch.device) -> torch.Tensor:
        return self.multipliers

    @torch.no_grad()
    def scale_generators(self, factors: torch.Tensor) -> dict[str, torch.Tensor]:
        """As [`RotaryEncoding.scale_generators`], by the multipliers."""
        return {"multipliers": self.multipliers * factors.to(self.multipliers).view(-1, 1, 1, 1)}

    def parameters_for_entries(self, entries: torch.Tensor) -> dict[str, torch.Tensor]:
        """As [`RotaryEncoding.parameters_for_entries`]: P and θ with A_a = θ_a P; θ = 1 for a block of zeros."""
        entries = entries.to(working_dtype(entries.device))
        largest = entries.norm(dim=-1).argmax(dim=0, keepdim=True)  # (1, layers, heads, blocks)
        base = entries.gather(0, largest.unsqueeze(-1).expand(1, *entries.shape[1:]))  # (1, layers, heads, blocks, …)
        squared = base.square().sum(dim=-1)
        multipliers = (entries * base).sum(dim=-1) / squared.where(squared > 0, 1)  # (A, layers, heads, blocks)
        multipliers = multipliers.where(squared > 0, 1)
        difference = (entries - multipliers.unsqueeze(-1) * base).norm(dim=-1)
        if (different := difference > ROUNDING * base.norm(dim=-1)).any():
            raise ValueError(
                "the generators of a block's axes must be multiples of one matrix, and in "
                f"{different.any(dim=0).sum().item()} blocks they are not"
            )
        return {"generators": base.squeeze(0), "multipliers": multipliers}

    @torch.no_grad()
    def reset_parameters(self) -> None:
        super().reset_parameters()
        if not start_of(self.config).has_planes:
            init.normal_(self.multipliers)
