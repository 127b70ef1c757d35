"""STRING (arXiv 2502.02562), and the product of such rotations."""

import torch
from torch import nn

from .lie_rotary import STARTS, LieRotary, planar, skew


class CayleyString(LieRotary):
    """Cayley-STRING: planes with frequencies of all axes in the basis (I − S)(I + S)⁻¹, S skew-symmetric."""

    starts: tuple[str, ...] = (*STARTS, "uniform", "normal", "zeros")
    default_size = None
    accepts = staticmethod(lambda size, head_dim, num_axes: head_dim % size == 0 and size % 2 == 0)

    def make_parameters(self) -> None:
        """Frequencies (A, 1, heads or 1, planes, 1), and entries of S, (1, heads or 1, blocks, b(b−1)/2)."""
        self.generators = nn.Parameter(torch.empty(self.num_axes, 1, self.heads, self.num_planes, 1))
        self.skew = nn.Parameter(torch.empty(1, self.heads, self.num_blocks, self.num_entries))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.zeros_(self.skew)

    def start_at(self, frequencies: torch.Tensor) -> None:
        self.generators.copy_(frequencies.unsqueeze(-1))

    def matrices(self) -> torch.Tensor:
        entries = self.skew[..., 0, :, :, :]  # ((A,) heads or 1, blocks, b(b−1)/2)
        matrices, identity = skew(entries, self.block_size), torch.eye(self.block_size).to(entries)
        basis = torch.linalg.solve(identity + matrices, identity - matrices)
        return basis @ planar(self.generators[:, 0, ..., 0], self.block_size) @ basis.mT


class LieREProduct(CayleyString):
    """R(p) = Π_a U_a rot(p_a ω_a) U_aᵀ with a basis U_a for every axis."""

    product = True

    def make_parameters(self) -> None:
        super().make_parameters()
        self.skew = nn.Parameter(torch.empty(self.num_axes, *self.skew.shape))


class CirculantString(LieRotary):
    """Circulant-STRING (eq. 11): A = C − Cᵀ with a circulant C in every block."""

    starts = ("frequencies", "golden_gate", "uniform", "normal", "zeros")
    default_size = 16
    accepts = staticmethod(lambda size, head_dim, num_axes: head_dim % size == 0 and size > 2)

    def make_parameters(self) -> None:
        """The first row's entries right of the diagonal, (A, 1, heads or 1, blocks, ⌊(b−1)/2⌋)."""
        count = (self.block_size - 1) // 2
        self.num_planes = self.num_blocks * count
        self.generators = nn.Parameter(torch.empty(self.num_axes, 1, self.heads, self.num_blocks, count))

    def start_at(self, frequencies: torch.Tensor) -> None:
        """Planes of the Fourier basis: s = f · sin(2πmk/b) · 2/b."""
        index = torch.arange(1, (self.block_size + 1) // 2, dtype=torch.float64)
        sines = 2 * (2 * torch.pi / self.block_size * torch.outer(index, index)).sin()
        by_block = frequencies.unflatten(-1, (self.num_blocks, -1)).double()
        self.generators.copy_(by_block @ sines / self.block_size)

    def matrices(self) -> torch.Tensor:
        entries = self.generators[:, 0]  # (A, heads or 1, blocks, ⌊(b−1)/2⌋)
        row = nn.functional.pad(entries, (1, self.block_size - 1 - entries.shape[-1]))
        circulant = torch.stack([row.roll(shift, -1) for shift in range(self.block_size)], dim=-2)
        return circulant - circulant.mT
