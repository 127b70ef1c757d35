"""Free generators: LieRE, and RoPE-Mixed, whose blocks are planes."""

from collections.abc import Sequence

import torch

from ..models.rotation.spins import representation
from .lie_rotary import STARTS, LieRotary


class LieRE(LieRotary):
    """
    Free generators for every axis (LieRE §4). `rotary_init="so3"` starts at the representation of so(3) with `spins` l
    in every block of Σ (2l + 1) channels, for positions that are rotation vectors.
    """

    coordinates = "train_grid"
    starts = ("uniform", "normal", "zeros", *STARTS, "so3")
    fields = {"spins": None}
    accepts = staticmethod(lambda size, head_dim, num_axes: True)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        if self.rotary_init != "so3":
            super().reset_parameters()
            return
        spins: Sequence[int] = self.spins or [(self.block_size - 1) // 2]
        matrices = representation(spins)
        if matrices.shape[-1] != self.block_size or self.num_axes != 3:
            raise ValueError(
                f"spins={list(spins)} need {matrices.shape[-1]} channels, which is block_size, and 3 axes."
            )
        row, column = torch.triu_indices(self.block_size, self.block_size, offset=1)
        self.generators.copy_(matrices[:, None, None, None, column, row].expand_as(self.generators))


class RoPEMixed(LieRotary):
    """Planes with learned frequencies of all axes (RoPE-ViT §3.2): LieRE with blocks of two."""

    starts = (*STARTS, "uniform", "normal", "zeros")
    default_size = 2
    accepts = staticmethod(lambda size, head_dim, num_axes: size == 2)
