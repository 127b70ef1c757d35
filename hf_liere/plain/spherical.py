"""Spherical RoPE: products of rotations about two axes."""

import torch
from torch import nn

from .lie_rotary import LieRotary, skew


class SphericalRoPE(LieRotary):
    """R(p) = R_z(ω₀ p₀) R_x(ω₁ p₁) in blocks of three channels (arXiv 2511.08368)."""

    starts = ("frequencies", "uniform", "normal", "zeros")
    rope_theta = 100.0
    default_size = 3
    product = True
    accepts = staticmethod(lambda size, head_dim, num_axes: size == 3 and num_axes == 2)

    def make_parameters(self) -> None:
        """(2, 1, heads or 1, blocks) frequencies."""
        self.generators = nn.Parameter(torch.empty(2, 1, self.heads, self.num_blocks))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        if self.rotary_init != "frequencies":
            super().reset_parameters()
            return
        magnitudes = self.rope_theta ** -(torch.arange(self.num_blocks) / self.num_blocks)
        self.generators.copy_((magnitudes * self.scale).expand_as(self.generators))

    def matrices(self) -> torch.Tensor:
        # The first factor rotates channels 0 and 1, the second one channels 1 and 2.
        entries = self.generators.new_zeros(2, self.heads, self.num_blocks, 3)
        entries[0, ..., 0], entries[1, ..., 2] = self.generators[:, 0]
        return skew(entries, 3)
