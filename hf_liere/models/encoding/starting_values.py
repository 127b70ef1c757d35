"""Spectra of frequencies that encodings start from, or keep."""

import math

import torch
from torch import nn


def geometric_frequencies(config, num_axes: int, layers: int, heads: int, planes: int) -> torch.Tensor:
    """
    RoPE-Mixed's initial spectrum (RoPE-ViT §3.2): the planes of a head form one group per axis, plane i of q in a group
    rotates with θ^(−i/q), and the groups' directions are random and orthonormal, drawn for every layer and head.

    Returns:
        (A, layers, heads, planes).
    """
    group_size = math.ceil(planes / num_axes)
    plane = torch.arange(planes)  # (planes,)
    magnitudes = config.rope_theta ** -((plane % group_size) / group_size)  # (planes,)
    # torch has no QR decomposition of half types. (layers, heads, A, A)
    directions, _ = torch.linalg.qr(torch.randn(layers, heads, num_axes, num_axes, dtype=torch.float32))
    return (directions[..., plane // group_size] * magnitudes).permute(2, 0, 1, 3)


def golden_gate_frequencies(config, num_axes: int, layers: int, heads: int, planes: int) -> torch.Tensor:
    """
    Golden gate RoPE's spectrum (Xiong, jerryxio.ng/posts/nd-rope): plane i
    of head h rotates with ω_i d_hi, where the ω are `min_frequency` … `max_frequency` in geometric progression after
    `unrotated_share` of the planes with ω = 0, and the unit vector d of the n-th plane of a layer, n = 1 … heads ·
    planes, has the direction of Φ⁻¹(n g⁻ᵃ mod 1), a = 1 … A: normal quantiles of the Kronecker sequence of the
    golden ratio's generalisation g, the root of g^(A+1) = g + 1, so that directions are spread evenly.

    We did not have its text: that n counts the planes of all heads of a layer and starts at 1 is second-hand. The
    defaults of `min_frequency` and `max_frequency` are ours, the band of RoPE-Mixed's spectrum with θ = 10.

    Returns:
        (A, layers, heads, planes) in float64 on the CPU, the same in every layer.
    """
    unrotated, real = round(config.unrotated_share * planes), {"dtype": torch.float64, "device": "cpu"}
    steps = torch.linspace(0, 1, planes - unrotated, **real)
    ratio = config.max_frequency / config.min_frequency
    magnitudes = torch.cat([steps.new_zeros(unrotated), config.min_frequency * ratio**steps])  # (planes,)
    golden = 2.0
    for _ in range(64):
        golden = (1 + golden) ** (1 / (num_axes + 1))
    exponents = torch.arange(1, num_axes + 1, **real).unsqueeze(-1)  # (A, 1)
    shares = torch.arange(1, heads * planes + 1, **real) * golden**-exponents % 1  # (A, heads · planes)
    directions = nn.functional.normalize(torch.erfinv(2 * shares - 1), dim=0).unflatten(1, (1, heads, planes))
    return (directions * magnitudes).expand(num_axes, layers, heads, planes)
