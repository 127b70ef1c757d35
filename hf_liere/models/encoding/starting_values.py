"""Spectra of frequencies that encodings start from, or keep."""

import math

import torch
from torch import nn

from ..rotation.dispatch import working_dtype
from .encoding_traits import axis_of_plane
from .positions import grid_steps


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


def axial_frequencies(config, num_axes: int, device: torch.device) -> torch.Tensor:
    """
    (A, A·q) frequencies of `axial_rope` without scale, in the working dtype: plane i of the q of an axis rotates with
    θ^(−i/q) (RoPE-ViT §3.1), in the order of `axial_layout`, see [`encodings.AxialRoPE`].
    """
    count = config.head_dim // (2 * num_axes)
    plane = torch.arange(num_axes * count, device=device, dtype=working_dtype(device))  # (planes,)
    axis = axis_of_plane(plane, count, num_axes, config.axial_layout)  # (planes,)
    rank = plane // num_axes if config.axial_layout == "interleaved" else plane % count
    exponents = rank / count if config.axial_spectrum == "full" else plane / (num_axes * count)
    serves = axis == torch.arange(num_axes, device=device).unsqueeze(-1)  # (A, planes)
    return config.rope_theta**-exponents * serves


def axial_start(config, num_axes: int, layers: int, heads: int, planes: int) -> torch.Tensor:
    """
    The frequencies with which an encoding rotates patches of the training grid as `axial_rope` with `index`
    coordinates: those of `axial_rope` divided by the distance of neighbouring patches in the encoding's `coordinates`.
    Models of tokens and the layer have no grid and take coordinates as given. Planes beyond those of `axial_rope` are
    not rotated.

    Returns:
        (A, layers, heads, planes) in float64 on the CPU.
    """
    frequencies = axial_frequencies(config, num_axes, torch.device("cpu"))  # (A, A·q)
    train_grid = getattr(config, "train_grid", None)
    if train_grid is not None:
        frequencies = frequencies / frequencies.new_tensor(grid_steps(train_grid, config.coordinates)).unsqueeze(-1)
    padded = nn.functional.pad(frequencies, (0, planes - frequencies.shape[-1]))  # (A, planes)
    return padded[:, None, None].expand(num_axes, layers, heads, planes)


# Values of `rotary_init` that give every plane a frequency: (A, layers, heads, planes) from config and these numbers.
FREQUENCIES = {"frequencies": geometric_frequencies, "golden_gate": golden_gate_frequencies, "axial": axial_start}
