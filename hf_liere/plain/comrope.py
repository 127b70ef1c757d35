"""ComRoPE: generators that commute."""

import torch
from torch import nn

from .lie_rotary import LieRotary, skew


class ComRoPEAxialPartition(LieRotary):
    """ComRoPE-AP (§3.3.1, eq. 8): block j rotates with coordinate j mod A alone."""

    coordinates = "unit"
    starts = ("normal", "uniform", "zeros", "axial")
    accepts = staticmethod(lambda size, head_dim, num_axes: head_dim % (size * num_axes) == 0)

    def make_parameters(self) -> None:
        """(1, heads or 1, blocks, b(b−1)/2)."""
        self.generators = nn.Parameter(torch.empty(1, self.heads, self.num_blocks, self.num_entries))

    def multiples(self) -> torch.Tensor:
        """(A, heads or 1, blocks) multiples of a block's matrix in the generators of the axes."""
        device = self.generators.device
        served = torch.arange(self.num_blocks, device=device) % self.num_axes
        return (served == torch.arange(self.num_axes, device=device).view(-1, 1, 1)).to(self.generators)

    def matrices(self) -> torch.Tensor:
        return self.multiples()[..., None, None] * skew(self.generators[0], self.block_size)

    def start_at(self, frequencies: torch.Tensor) -> None:
        entries = self.entries_of_planes(frequencies)  # (A, 1, heads, blocks, b(b−1)/2)
        self.generators.copy_(entries.sum(0))
        if not torch.equal(entries, self.multiples().unsqueeze(1).unsqueeze(-1).to(entries) * entries.sum(0)):
            raise ValueError("A block would rotate planes of several axes, or of another axis than its own.")


class ComRoPELinearlyDependent(ComRoPEAxialPartition):
    """ComRoPE-LD (§3.3.2, eq. 10): A_a = θ_a (P − Pᵀ), with one θ for each axis, head and block."""

    accepts = staticmethod(lambda size, head_dim, num_axes: head_dim % size == 0)

    def make_parameters(self) -> None:
        self.generators = nn.Parameter(torch.empty(1, self.heads, self.num_blocks, self.num_entries))
        self.multipliers = nn.Parameter(torch.empty(self.num_axes, 1, self.heads, self.num_blocks))

    def multiples(self) -> torch.Tensor:
        return self.multipliers[:, 0]

    @torch.no_grad()
    def reset_parameters(self) -> None:
        super().reset_parameters()
        if self.rotary_init != "axial":
            nn.init.normal_(self.multipliers)

    def start_at(self, frequencies: torch.Tensor) -> None:
        served = self.entries_of_planes(frequencies).any(-1)  # (A, 1, heads, blocks)
        self.multipliers.copy_(served | ~served.any(0))
        super().start_at(frequencies)
