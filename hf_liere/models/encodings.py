"""The rotary encodings: what each one learns, and the rotations it gives to every layer."""

import math
from collections.abc import Callable, Iterable

import torch
from torch import nn
from transformers import initialization as init
from transformers.utils import logging
from transformers.utils.generic import maybe_autocast

from .exponential import Rays, layer_block_rotations
from .lie_algebra import cos_sin, eigenbasis, plane_rotations, skew, working_dtype
from .positions import GroupedPositions, TokenPositions
from .rotation import BlockRotation, EigenRotation, GroupedRotation, PlaneRotation, Rotation
from .rotation_cache import RotationCache


logger = logging.get_logger(__name__)

# All layers at once take fewer calls, but the rotations of LieRE64 with ViT-B at 3,136 tokens need 7.4 GB.
ALL_LAYERS_BYTES = 1 << 30
ALL_LAYERS = slice(None)


class LearnedRotations(nn.Module):
    """Parameters of rotations, which half types must not round; `config` names the encoding."""

    @staticmethod
    def new_parameter(*shape: int) -> nn.Parameter:
        """In the default type, or float32 for half types: rounded generators rotate distant patches wrongly."""
        return nn.Parameter(torch.empty(shape, dtype=torch.promote_types(torch.get_default_dtype(), torch.float32)))

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "LearnedRotations":
        before = {parameter.dtype for parameter in self.parameters()}
        result = super()._apply(fn, recurse)
        rounded = ({parameter.dtype for parameter in self.parameters()} - before) & {torch.float16, torch.bfloat16}
        if rounded:
            logger.warning_once(
                f"The generators of {self.config.position_encoding} were rounded to {rounded.pop()}: rotations of "
                "distant patches are off by up to 0.1 on a 64 × 64 grid. Keep them in float32: load the model with "
                "from_pretrained(…, dtype=…), which keeps them, or train it with autocast."
            )
        return result

    @property
    def rotation_dtype(self) -> torch.dtype:
        """float64 for float64 parameters, else float32: attention casts them when it applies them."""
        is_double = any(parameter.dtype == torch.float64 for parameter in self.parameters())
        return torch.float64 if is_double else torch.float32


class RotaryEncoding(LearnedRotations):
    """
    R(p) = exp(Σ_a p_a A_a) (LieRE eq. 4, ComRoPE eq. 3) for all layers at once, with block-diagonal skew-symmetric A_a.

    Subclasses say what is learned and how it makes the generators' free entries. Parameters live here, at the root of
    the model and outside its layers, in one tensor of shape (…, layers or 1, heads or 1, blocks, …) per kind.

    Args:
        config: A [`LieREConfig`] whose `position_encoding` is rotary.
        num_axes: Number A of axes of a position.
    """

    def __init__(self, config, num_axes: int):
        super().__init__()
        self.config = config
        self.num_axes = num_axes
        self.num_layers = config.num_hidden_layers
        self.block_size = config.block_size
        self.num_blocks = config.head_dim // config.block_size
        self.num_entries = config.block_size * (config.block_size - 1) // 2
        self.layers = 1 if config.share_layers else config.num_hidden_layers
        self.heads = 1 if config.share_heads else config.num_attention_heads
        self.cache = RotationCache()

    def entries(self, device: torch.device) -> torch.Tensor:
        """
        Free entries of the generators, see [`lie_algebra.skew`]: (A, layers or 1, heads or 1, blocks, b(b−1)/2), on
        `device` where they are not parameters.
        """
        raise NotImplementedError

    def forward(
        self,
        positions: TokenPositions | GroupedPositions,
        states: torch.dtype | None = None,
        layer: int | None = None,
    ) -> Iterable[Rotation]:
        """
        One rotation per layer for all tokens; inference keeps those of the last grids, see [`RotationCache`].

        Args:
            states: Type of the queries and keys that will be rotated, float32 if `None`: half types need no better
                rotations than they can hold, see [`exponential.block_rotations`].
            layer: Compute only the rotation of this layer.
        """
        if isinstance(positions, GroupedPositions):
            groups = zip(*self._of_groups(positions.groups, states))
            return [GroupedRotation(rotations, positions.samples) for rotations in groups]
        if layer is not None:
            return [next(iter(self.layer_rotations(positions, states, self._generators_of(layer))))]
        return self.cache.rotations(self, positions, states)

    def _of_groups(self, groups: tuple[TokenPositions, ...], states: torch.dtype | None) -> list[Iterable[Rotation]]:
        """For every group of tokens the rotation of every layer, all computed together."""
        lengths = [group.coordinates.shape[0] for group in groups]
        together = TokenPositions(torch.cat([group.coordinates for group in groups]))
        return list(zip(*(rotation.split(lengths) for rotation in self.forward(together, states))))

    def _generators_of(self, layer: int) -> slice:
        """The generators of a layer among those of all."""
        return slice(layer, layer + 1) if self.layers > 1 else ALL_LAYERS

    def layer_rotations(
        self, positions: TokenPositions, states: torch.dtype | None = None, layers: slice = ALL_LAYERS
    ) -> Iterable[Rotation]:
        """The rotations that `forward` returns, for some or all layers, in the form that attention applies fastest."""
        return self.rotations_from(positions, self.entries(positions.coordinates.device)[:, layers], states)

    def rotations_from(
        self, positions: TokenPositions, entries: torch.Tensor, states: torch.dtype | None, rays: Rays | None = None
    ) -> list[Rotation]:
        """Planes or blocks in the basis of the model, for the layers whose `entries` are given."""
        coordinates = positions.coordinates.to(working_dtype(positions.coordinates.device))
        batch, tokens = coordinates.shape[:-2], coordinates.shape[-2]
        coordinates = coordinates.reshape(-1, self.num_axes)  # (B · N, A)
        layers, heads, blocks = entries.shape[1:4]
        if self.block_size == 2:
            rotation_class = PlaneRotation
            # Layer by layer the angles stay in a core's cache.
            rotations = [
                plane_rotations(coordinates, frequencies, self.rotation_dtype)  # (H · planes, B · N, 2)
                for frequencies in entries.flatten(2).unbind(1)
            ]
        else:
            rotation_class = BlockRotation
            generators = skew(entries.flatten(2, 3), self.block_size)  # (A, layers, H · blocks, b, b)
            rotations = layer_block_rotations(coordinates, generators, self.rotation_dtype, rays, states)
        # Tokens before heads in memory, as in the queries and keys that will be rotated.
        rotations = [
            layer.transpose(0, 1).contiguous().unflatten(1, (heads, blocks)).unflatten(0, (*(batch or (1,)), tokens))
            for layer in rotations
        ]
        rotations = [rotation_class(layer.transpose(1, 2)) for layer in rotations]
        return rotations * (self.num_layers // self.layers if layers == self.layers else 1)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Fill `generators` as `rotary_init` and `rotary_init_scale` say, unless they came from a checkpoint."""
        name, scale = self.config.rotary_init, self.config.rotary_init_scale
        if name == "uniform":
            init.uniform_(self.generators, 0.0, scale)
        elif name == "normal":
            init.normal_(self.generators, 0.0, scale)
        elif name == "zeros":
            init.zeros_(self.generators)
        elif name == "frequencies":
            init.copy_(self.generators, self.frequency_entries().to(self.generators).mul(scale))

    def frequency_entries(self) -> torch.Tensor:
        """
        RoPE-Mixed's initial spectrum (RoPE-ViT §3.2): the planes of a head fall into one group per axis, plane i of q
        in a group rotates with θ^(−i/q), and the groups' directions are random and orthonormal, drawn for
        every layer and head.
        """
        planes = self.num_blocks * self.block_size // 2
        group_size = math.ceil(planes / self.num_axes)
        plane = torch.arange(planes)
        magnitudes = self.config.rope_theta ** -((plane % group_size) / group_size)
        # Half types have no QR decomposition.
        shape = (self.layers, self.heads, self.num_axes, self.num_axes)
        directions, _ = torch.linalg.qr(torch.randn(shape, dtype=torch.float32))
        frequencies = directions[..., plane // group_size] * magnitudes  # (layers, heads, A, planes)
        frequencies = frequencies.permute(2, 0, 1, 3)
        entries = frequencies.new_zeros(*frequencies.shape[:3], self.num_blocks, self.num_entries)
        row, column = torch.triu_indices(self.block_size, self.block_size, offset=1)
        in_plane = (row % 2 == 0) & (column == row + 1)
        entries[..., in_plane] = frequencies.unflatten(-1, (self.num_blocks, self.block_size // 2))
        return entries


class AxialRoPE(RotaryEncoding):
    """
    RoPE on each axis by itself, nothing learned (VisionLLaMA; RoPE-ViT §3.1): q = ⌊head_dim / 2A⌋ planes per axis, all
    planes of the first axis first, plane i rotating with s θ^(−i/q); channels left over are not rotated. The scale s
    is `rotary_init_scale`, 1 by default.
    """

    def __init__(self, config, num_axes: int):
        super().__init__(config, num_axes)
        self.layers = self.heads = 1
        self.planes_per_axis = config.head_dim // (2 * num_axes)

    def entries(self, device: torch.device) -> torch.Tensor:
        plane = torch.arange(self.planes_per_axis, device=device, dtype=working_dtype(device))
        scale = 1.0 if self.config.rotary_init_scale is None else self.config.rotary_init_scale
        frequencies = scale * self.config.rope_theta ** -(plane / self.planes_per_axis)
        planes = torch.block_diag(*[frequencies.unsqueeze(0)] * self.num_axes)
        return planes.view(self.num_axes, 1, 1, -1, 1)


class LieRE(RotaryEncoding):
    """
    Free generators for every axis (LieRE §4). With `block_size` 2 this is RoPE-Mixed (LieRE §5.4), which differs only
    in its initialisation and coordinates. The last head_dim mod b channels of a head are not rotated.

    Attributes:
        generators: (A, layers or 1, heads or 1, blocks, b(b−1)/2); ViT-B, 2-D: 9,216 / 27,648 / 64,512 / 138,240 /
            285,696 / 580,608 numbers for b = 2, 4, 8, 16, 32, 64 (LieRE Table 10).
    """

    def __init__(self, config, num_axes: int):
        super().__init__(config, num_axes)
        shape = (num_axes, self.layers, self.heads, self.num_blocks, self.num_entries)
        self.generators = self.new_parameter(*shape)

    def entries(self, device: torch.device) -> torch.Tensor:
        return self.generators

    def _of_groups(self, groups: tuple[TokenPositions, ...], states: torch.dtype | None) -> list[Iterable[Rotation]]:
        # A grid by itself has multiples, and may be in the cache.
        return [self.forward(group, states) for group in groups]

    def layer_rotations(
        self, positions: TokenPositions, states: torch.dtype | None = None, layers: slice = ALL_LAYERS
    ) -> Iterable[Rotation]:
        """
        On a grid that starts at zero, the rotations at multiples of a position are powers, see [`exponential.Rays`].
        Above `ALL_LAYERS_BYTES` a layer's rotations are computed when it is reached.
        """
        coordinates = positions.coordinates
        entries = self.entries(coordinates.device)[:, layers]
        rays = Rays(positions.grid, positions.num_prefix_tokens) if positions.proportional else None
        num_layers = entries.shape[1]
        elements = num_layers * self.heads * self.num_blocks * self.block_size**2 * coordinates[..., 0].numel()
        if num_layers == 1 or elements * self.rotation_dtype.itemsize <= ALL_LAYERS_BYTES:
            return self.rotations_from(positions, entries, states, rays)
        # Copies, because frameworks that shard parameters take them away when this module returns.
        parts = [part.clone() for part in entries.split(1, dim=1)]
        return (self.rotations_from(positions, part, states, rays)[0] for part in parts)


class ComRoPEAxialPartition(RotaryEncoding):
    """
    ComRoPE-AP (§3.3.1, eq. 8): block j rotates with coordinate j mod A only, so generators of different axes act on
    different channels and commute.

    ComRoPE's Table 7 counts full b×b matrices P, of which only P − Pᵀ acts; stored here are its b(b−1)/2 free entries,
    that is 32,256 instead of 73,728 numbers for ViT-B with b = 8.

    Attributes:
        generators: (layers or 1, heads or 1, blocks, b(b−1)/2).
    """

    def __init__(self, config, num_axes: int):
        super().__init__(config, num_axes)
        self.generators = self.new_parameter(self.layers, self.heads, self.num_blocks, self.num_entries)

    def axis_multipliers(self, device: torch.device) -> torch.Tensor:
        """(A, layers or 1, heads or 1, blocks) factors of a block's one matrix in the generators of the axes."""
        served = torch.arange(self.num_blocks, device=device) % self.num_axes
        serves = served == torch.arange(self.num_axes, device=device).unsqueeze(-1)
        return serves.view(self.num_axes, 1, 1, self.num_blocks)

    def entries(self, device: torch.device) -> torch.Tensor:
        # In float32, the rounding of this product would dominate the error of the rotations.
        dtype = working_dtype(device)
        return self.axis_multipliers(device).to(dtype).unsqueeze(-1) * self.generators.to(dtype)

    def layer_rotations(
        self, positions: TokenPositions, states: torch.dtype | None = None, layers: slice = ALL_LAYERS
    ) -> list[Rotation]:
        """
        Without a matrix exponential: each block is diagonalised once for all tokens.

        Returns:
            One [`rotation.EigenRotation`] per layer, or [`rotation.BlockRotation`] for blocks of odd size, which have
            one direction outside of every plane.
        """
        if self.block_size % 2:
            return super().layer_rotations(positions, states, layers)
        coordinates = positions.coordinates
        dtype, device = working_dtype(coordinates.device), coordinates.device
        batch, tokens = coordinates.shape[:-2] or (1,), coordinates.shape[-2]
        with maybe_autocast(device.type, enabled=False):
            basis, generators, frequencies = self.spectrum(dtype, layers)
            multipliers = self.axis_multipliers(device).to(dtype).expand(-1, self.layers, self.heads, -1)
            multipliers = multipliers[:, layers]  # (A, layers, H, blocks)
            coordinates = coordinates.to(dtype).reshape(-1, self.num_axes)  # (B · N, A)
            phases, cos_sins = [], []
            for layer_multipliers, layer_frequencies in zip(multipliers.unbind(1), frequencies):
                phase = (coordinates @ layer_multipliers.flatten(1)).view(*batch, tokens, self.heads, self.num_blocks)
                angles = (phase.unsqueeze(-1) * layer_frequencies).flatten(-2)  # (B, N, H, planes)
                cos_sins.append(cos_sin(angles, self.rotation_dtype).transpose(1, 2))
                phases.append(phase.detach().transpose(1, 2).to(self.rotation_dtype))
        basis, generators = basis.to(self.rotation_dtype), generators.to(self.rotation_dtype)
        rotations = [EigenRotation(*layer) for layer in zip(cos_sins, basis, generators, phases)]
        return rotations * (self.num_layers // self.layers if len(rotations) == self.layers else 1)

    def bases(self) -> list[torch.Tensor]:
        """Eigenbasis of every layer, (1 or H, blocks, b, b) each, for `LieREAttention.fold`."""
        basis, _, _ = self.spectrum(working_dtype(self.generators.device))
        return list(basis) * (self.num_layers // self.layers)

    def folded_frequencies(self) -> torch.Tensor:
        """Angular frequency of every axis and plane, (A, layers or 1, heads or 1, planes)."""
        dtype = working_dtype(self.generators.device)
        _, _, frequencies = self.spectrum(dtype)
        return (self.axis_multipliers(frequencies.device).to(dtype).unsqueeze(-1) * frequencies).flatten(-2)

    def spectrum(
        self, dtype: torch.dtype, layers: slice = ALL_LAYERS
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """
        Eigenbasis U, UᵀSU and frequencies μ of the one matrix S of every block, in `dtype`, see
        [`lie_algebra.eigenbasis`]: (layers or 1, heads or 1, blocks, b, b) twice and (layers or 1, heads or 1, blocks,
        ⌊b/2⌋).
        """
        generators = skew(self.generators[layers].to(dtype), self.block_size)
        basis = eigenbasis(generators.detach())
        generators = basis.transpose(-1, -2) @ generators @ basis
        planes = range(0, self.block_size - 1, 2)
        return basis, generators, torch.stack([generators[..., plane + 1, plane] for plane in planes], dim=-1)


class ComRoPELinearlyDependent(ComRoPEAxialPartition):
    """
    ComRoPE-LD (§3.3.2, eq. 10): A_a = θ_a (P − Pᵀ); the generators of all axes are multiples of one matrix and commute.

    As in the paper there is one multiplier θ per axis, block and head (the official code shares them over heads), so
    ViT-B with b = 8 has 32,256 entries of P − Pᵀ (73,728 as full matrices in ComRoPE's Table 7) and 2,304 multipliers.

    Attributes:
        generators: (layers or 1, heads or 1, blocks, b(b−1)/2), entries of P − Pᵀ.
        multipliers: (A, layers or 1, heads or 1, blocks), the θ_a.
    """

    def __init__(self, config, num_axes: int):
        super().__init__(config, num_axes)
        self.multipliers = self.new_parameter(num_axes, self.layers, self.heads, self.num_blocks)

    def axis_multipliers(self, device: torch.device) -> torch.Tensor:
        return self.multipliers

    @torch.no_grad()
    def reset_parameters(self) -> None:
        super().reset_parameters()
        init.normal_(self.multipliers)


ENCODING_CLASSES = {
    "axial_rope": AxialRoPE,
    "rope_mixed": LieRE,
    "liere": LieRE,
    "comrope_ap": ComRoPEAxialPartition,
    "comrope_ld": ComRoPELinearlyDependent,
}
