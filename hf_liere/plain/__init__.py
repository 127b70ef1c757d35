"""
Every encoding in a few lines of plain PyTorch: what the tests compare with, and what `hf-liere bundle layer` writes for
people who copy.
"""

from collections.abc import Mapping
from typing import Any

import torch

from .comrope import ComRoPEAxialPartition, ComRoPELinearlyDependent
from .fixed import AxialRoPE, GoldenGateRoPE
from .free import LieRE, RoPEMixed
from .lie_rotary import LieRotary, grid_positions
from .spherical import SphericalRoPE
from .string import CayleyString, CirculantString, LieREProduct


PLAIN_ENCODINGS: dict[str, type[LieRotary]] = {
    "axial_rope": AxialRoPE,
    "golden_gate_rope": GoldenGateRoPE,
    "rope_mixed": RoPEMixed,
    "liere": LieRE,
    "comrope_ap": ComRoPEAxialPartition,
    "comrope_ld": ComRoPELinearlyDependent,
    "cayley_string": CayleyString,
    "circulant_string": CirculantString,
    "spherical_rope": SphericalRoPE,
    "liere_product": LieREProduct,
}

__all__ = ["PLAIN_ENCODINGS", "LieRotary", "grid_positions", "plain_layer"]


@torch.no_grad()
def plain_layer(config: Any, num_axes: int, parameters: Mapping[str, torch.Tensor], layer: int) -> LieRotary:
    """
    One layer of a rotary encoding, in float64 on the CPU.

    Args:
        config: Configuration of the encoding.
        parameters: Its parameters by name, of all layers.
    """
    kind = PLAIN_ENCODINGS[config.position_encoding]
    plain = kind(
        config.num_attention_heads,
        config.head_dim,
        num_axes,
        config.block_size,
        share_heads=config.share_heads,
        rotary_init="zeros" if kind.starts else None,
        rotary_init_scale=config.rotary_init_scale,
        rope_theta=config.rope_theta,
        **{name: getattr(config, name) for name in kind.fields},
    ).double()
    for name, parameter in plain.named_parameters():
        values = parameters[name].detach()
        for axis, (size, needed) in enumerate(zip(values.shape, parameter.shape, strict=True)):
            if size != needed:
                # The axis of layers.
                values = values.narrow(axis, layer, 1)
        parameter.copy_(values)
    return plain
