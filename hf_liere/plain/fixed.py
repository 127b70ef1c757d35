"""RoPE whose frequencies are not learned."""

from typing import Any

import torch

from .lie_rotary import AXIAL, GOLDEN_GATE, LieRotary, axial_frequencies, golden_gate_frequencies, planar


class AxialRoPE(LieRotary):
    """RoPE on each axis separately (VisionLLaMA; RoPE-ViT §3.1): plane i of the q of an axis rotates with θ^(−i/q)."""

    starts = ()
    rope_theta = 100.0
    default_size = 2
    fields: dict[str, Any] = AXIAL
    frequencies = staticmethod(axial_frequencies)
    accepts = staticmethod(lambda size, head_dim, num_axes: size == 2)

    def make_parameters(self) -> None:
        self.register_buffer("place", torch.empty(0), persistent=False)

    def matrices(self) -> torch.Tensor:
        return planar(self.scale * self.frequencies(self)[:, 0].to(self.place), 2)


class GoldenGateRoPE(AxialRoPE):
    """Planes with fixed frequencies of all axes, see [`golden_gate_frequencies`]."""

    fields = GOLDEN_GATE
    frequencies = staticmethod(golden_gate_frequencies)
