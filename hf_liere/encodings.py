"""The rotary encodings: what each one learns, and the rotations it gives to every layer."""

import math

import torch
from torch import nn
from transformers import initialization as init

from .lie_algebra import block_rotations, plane_rotations, skew, working_dtype


class RotaryEncoding(nn.Module):
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

    def entries(self, device: torch.device) -> torch.Tensor:
        """
        Free entries of the generators, see [`lie_algebra.skew`]: (A, layers or 1, heads or 1, blocks, b(b−1)/2), on
        `device` where they are not parameters.
        """
        raise NotImplementedError

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialise the parameters as `rotary_init` says, leaving alone those that came from a checkpoint."""

    def forward(self, positions: torch.Tensor) -> list[torch.Tensor]:
        """
        Args:
            positions: (N, A), or (B, N, A) for positions of their own for each sample, prefix tokens included.

        Returns:
            One tensor per layer: (1 or B, 1 or heads, N, blocks, 2) holding cos and sin for b = 2, or
            (1 or B, 1 or heads, N, blocks, b, b) rotation matrices. Shared layers get the same tensor.
        """
        entries = self.entries(positions.device)
        positions = positions.to(working_dtype(positions.device))
        batch, tokens = positions.shape[:-2], positions.shape[-2]
        flat_positions = positions.reshape(-1, self.num_axes)
        flat_entries = entries.flatten(1, 3)
        if self.block_size == 2:
            rotations = plane_rotations(flat_positions, flat_entries.squeeze(-1), self.rotation_dtype)
        else:
            rotations = block_rotations(flat_positions, skew(flat_entries, self.block_size), self.rotation_dtype)
        layers, heads, blocks = entries.shape[1:4]
        rotations = rotations.view(layers, heads, blocks, *(batch or (1,)), tokens, *rotations.shape[2:])
        rotations = rotations.permute(0, 3, 1, 4, 2, *range(5, rotations.ndim)).contiguous()
        return list(rotations.unbind(0)) * (self.num_layers // layers)

    @property
    def rotation_dtype(self) -> torch.dtype:
        """float64 for float64 parameters, else float32: attention casts to its own type last."""
        is_double = any(parameter.dtype == torch.float64 for parameter in self.parameters())
        return torch.float64 if is_double else torch.float32

    def initialize(self, parameter: nn.Parameter) -> None:
        """Fill generators as `rotary_init` and `rotary_init_scale` say."""
        name, scale = self.config.rotary_init, self.config.rotary_init_scale
        if name == "uniform":
            init.uniform_(parameter, 0.0, scale)
        elif name == "normal":
            init.normal_(parameter, 0.0, scale)
        elif name == "zeros":
            init.zeros_(parameter)
        else:
            init.copy_(parameter, self.frequency_entries().to(parameter).mul(scale))

    def frequency_entries(self) -> torch.Tensor:
        """
        RoPE-Mixed's initial spectrum (RoPE-ViT §3.2): the planes of a head fall into one group per axis, plane i of q
        in a group turns with θ^(−i/q), and the groups' directions form a randomly turned orthonormal frame, its own in
        every layer and head.
        """
        planes = self.num_blocks * self.block_size // 2
        group_size = math.ceil(planes / self.num_axes)
        plane = torch.arange(planes)
        magnitudes = self.config.rope_theta ** -((plane % group_size) / group_size)
        frames, _ = torch.linalg.qr(torch.randn(self.layers, self.heads, self.num_axes, self.num_axes))
        # (layers, heads, axes, planes) -> axes first
        frequencies = (frames[..., plane // group_size] * magnitudes).permute(2, 0, 1, 3)
        entries = frequencies.new_zeros(*frequencies.shape[:3], self.num_blocks, self.num_entries)
        row, column = torch.triu_indices(self.block_size, self.block_size, offset=1)
        in_plane = (row % 2 == 0) & (column == row + 1)
        entries[..., in_plane] = frequencies.unflatten(-1, (self.num_blocks, self.block_size // 2))
        return entries


class AxialRoPE(RotaryEncoding):
    """
    RoPE on each axis by itself, nothing learned (VisionLLaMA; RoPE-ViT §3.1): q = ⌊head_dim / 2A⌋ planes per axis, all
    planes of the first axis first, plane i turning with θ^(−i/q); channels left over are not rotated.
    """

    def __init__(self, config, num_axes: int):
        super().__init__(config, num_axes)
        self.layers = self.heads = 1
        self.planes_per_axis = config.head_dim // (2 * num_axes)

    def entries(self, device: torch.device) -> torch.Tensor:
        plane = torch.arange(self.planes_per_axis, device=device, dtype=working_dtype(device))
        frequencies = self.config.rope_theta ** -(plane / self.planes_per_axis)
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
        self.generators = nn.Parameter(torch.empty(shape))

    def entries(self, device: torch.device) -> torch.Tensor:
        return self.generators

    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.initialize(self.generators)


class ComRoPEAxialPartition(RotaryEncoding):
    """
    ComRoPE-AP (§3.3.1, eq. 8): block j serves axis j mod A alone, so generators of different axes act on different
    channels and commute.

    ComRoPE's Table 7 counts full b×b matrices F, of which only F − Fᵀ acts; stored here are its b(b−1)/2 free entries,
    that is 32,256 instead of 73,728 numbers for ViT-B with b = 8.

    Attributes:
        generators: (layers or 1, heads or 1, blocks, b(b−1)/2).
    """

    def __init__(self, config, num_axes: int):
        super().__init__(config, num_axes)
        self.generators = nn.Parameter(torch.empty(self.layers, self.heads, self.num_blocks, self.num_entries))

    def entries(self, device: torch.device) -> torch.Tensor:
        served = torch.arange(self.num_blocks, device=device) % self.num_axes
        serves = served == torch.arange(self.num_axes, device=device).unsqueeze(-1)
        return self.generators * serves.view(self.num_axes, 1, 1, self.num_blocks, 1)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.initialize(self.generators)


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
        self.multipliers = nn.Parameter(torch.empty(num_axes, self.layers, self.heads, self.num_blocks))

    def entries(self, device: torch.device) -> torch.Tensor:
        # A product rounded to float32 would be the largest error of the rotations.
        dtype = working_dtype(device)
        return self.multipliers.to(dtype).unsqueeze(-1) * self.generators.to(dtype)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        super().reset_parameters()
        init.normal_(self.multipliers)


ROTARY_ENCODINGS = {
    "axial_rope": AxialRoPE,
    "rope_mixed": LieRE,
    "liere": LieRE,
    "comrope_ap": ComRoPEAxialPartition,
    "comrope_ld": ComRoPELinearlyDependent,
}


def build_rotary_encoding(config, num_axes: int) -> RotaryEncoding | None:
    """The module for `config.position_encoding`, or `None` for `none` and `absolute`, which rotate nothing."""
    encoding = ROTARY_ENCODINGS.get(config.position_encoding)
    return None if encoding is None else encoding(config, num_axes)
