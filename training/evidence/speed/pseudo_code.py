"""Rotations after the papers' pseudo-code and those of `hf_liere.plain`, to compare with the package's."""

import torch
from torch import nn

from hf_liere.encoding.positions import TokenPositions
from hf_liere.plain import plain_layer
from hf_liere.plain.encodings import rotate


def _positions(config) -> torch.Tensor:
    """(N, A) coordinates of all tokens of a training input. Class and register tokens at 0 are not rotated."""
    count, placed = config.prefix
    grid, coordinates, centre = config.train_grid, config.coordinates, placed if config.rotate_prefix else 0.0
    return TokenPositions.from_grid(grid, grid, coordinates, count, centre).coordinates


class PlainRotation(nn.Module):
    """
    Rotations of one layer as `hf_liere.plain` computes them, in float64.

    Args:
        config, parameters, layer: As for [`NaiveRotation`].
    """

    def __init__(self, config, parameters: dict[str, torch.Tensor], layer: int):
        super().__init__()
        self.plain, self.positions = plain_layer(config, config.num_axes, parameters, layer), _positions(config)
        self.heads, self.head_dim = config.num_attention_heads, config.head_dim

    def dense(self) -> torch.Tensor:
        """(N, heads, head_dim, head_dim)."""
        columns = torch.eye(self.head_dim, dtype=torch.float64)
        # Each column of the identity is a sample with the same states in all tokens.
        states = columns[:, None, None].expand(-1, self.heads, len(self.positions), -1)
        return rotate(states, self.plain.rotations(self.positions)[0]).detach().permute(2, 1, 3, 0)


class NaiveRotation(nn.Module):
    """
    Rotations of one layer by the papers' pseudo-code (LieRE appendix C, ComRoPE algorithm 1): `torch.matrix_exp` of
    skew-symmetric bases times positions, summed over the axes, at every call.

    Args:
        config: Configuration with the rotary encoding.
        parameters: Our encoding's parameters, `generators` and, for comrope_ld, `multipliers`.
        layer: Index of the layer.

    Attributes:
        raw: (A or 1, heads, blocks, b, b); the strictly lower triangle acts.
    """

    def __init__(self, config, parameters: dict[str, torch.Tensor], layer: int):
        super().__init__()
        size = config.block_size
        self.encoding, self.num_axes, self.head_dim = config.position_encoding, config.num_axes, config.head_dim
        if self.encoding == "axial_rope":
            planes = config.head_dim // (2 * config.num_axes)
            frequencies = config.rope_theta ** -(torch.arange(planes, dtype=torch.float64) / planes)
            entries = torch.block_diag(*[frequencies.unsqueeze(0)] * config.num_axes)[:, None, :, None]
        elif self.encoding in ("liere", "rope_mixed"):
            entries = parameters["generators"][:, layer]
        else:
            entries = parameters["generators"][layer].unsqueeze(0)
        raw = entries.new_zeros(*entries.shape[:-1], size, size)
        # Stored pairs i < j are in row-major order of the upper triangle.
        first, second = torch.triu_indices(size, size, offset=1)
        raw[..., second, first] = entries
        self.raw = nn.Parameter(raw)
        self.multipliers = (
            nn.Parameter(parameters["multipliers"][:, layer].clone()) if "multipliers" in parameters else None
        )
        self.register_buffer("positions", _positions(config))

    def forward(self) -> torch.Tensor:
        """(N, heads, blocks, b, b)."""
        lower = self.raw.tril(-1)
        bases = lower - lower.mT
        if self.encoding == "comrope_ld":
            bases = bases * self.multipliers[..., None, None]
        elif self.encoding == "comrope_ap":
            block = torch.arange(bases.shape[2], device=bases.device)
            serves = block % self.num_axes == torch.arange(self.num_axes, device=bases.device)[:, None]
            bases = bases * serves[:, None, :, None, None]
        positions = self.positions.to(bases.dtype)
        exponents = (positions[:, :, None, None, None, None] * bases).sum(dim=1)
        return torch.matrix_exp(exponents)

    def dense(self) -> torch.Tensor:
        """(N, heads, head_dim, head_dim); channels without a block keep the identity."""
        blocks = self()
        size = blocks.shape[-1]
        matrices = torch.eye(self.head_dim, dtype=blocks.dtype, device=blocks.device)
        matrices = matrices.repeat(*blocks.shape[:2], 1, 1)
        for block in range(blocks.shape[2]):
            channels = slice(block * size, (block + 1) * size)
            matrices[..., channels, channels] = blocks[:, :, block]
        return matrices

    def rotate(self, *states: torch.Tensor) -> list[torch.Tensor]:
        """Rotates (B, heads, N, head_dim) each: blockwise for LieRE, by whole matrices for ComRoPE, as in its paper."""
        with torch.autocast(states[0].device.type, enabled=False):
            rotation = self.dense() if self.encoding.startswith("comrope") else self()
        rotation = rotation.to(states[0].dtype).transpose(0, 1)
        rotation = rotation.expand(states[0].shape[1], *rotation.shape[1:])
        if rotation.ndim == 4:
            return [torch.einsum("hnij,bhnj->bhni", rotation, state) for state in states]
        blocks, size = rotation.shape[2:4]
        results = []
        for state in states:
            rotated, tail = state[..., : blocks * size].unflatten(-1, (blocks, size)), state[..., blocks * size :]
            rotated = torch.einsum("hnmij,bhnmj->bhnmi", rotation, rotated).flatten(-2)
            results.append(torch.cat([rotated, tail], dim=-1))
        return results
