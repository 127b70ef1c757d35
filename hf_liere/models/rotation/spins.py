"""Generators of rotations in space: the real irreducible representations of so(3), and their direct sums."""

import math
from collections.abc import Sequence

import torch


def representation(spins: Sequence[int]) -> torch.Tensor:
    """Direct sum of [`spin_generators`] in the order of `spins`: (3, b, b), b = Σ (2l + 1), in float64 on the CPU."""
    return torch.stack([torch.block_diag(*axis) for axis in zip(*map(spin_generators, spins))])


def spin_generators(spin: int) -> torch.Tensor:
    """
    L_x, L_y, L_z of spin l: real skew-symmetric matrices with [L_x, L_y] = L_z, and cyclically, so that exp(p · L) is
    the rotation by the angle ‖p‖ about p in the irreducible representation of size 2l + 1 (Hall 2015, §4.6).

    The entries are those of the ladder operators, ½√((l − m)(l + m + 1)) between m and m + 1. The basis consists of the
    real spherical harmonics: √2 (−1)ᵐ Re Yₗᵐ and √2 (−1)ᵐ Im Yₗᵐ for m = 1 … l, then Yₗ⁰. L_z rotates its pairs of
    neighbouring channels with the frequencies 1 … l. Spin 1 is the rotation of (x, y, z) itself; spin 0 is constant.

    Returns:
        (3, 2l + 1, 2l + 1), in float64 on the CPU.
    """
    lower = torch.zeros(3, 2 * spin + 1, 2 * spin + 1, dtype=torch.float64, device="cpu")
    x, y, z = lower
    # Channels of the cosines for m = 0 … l; that of a sine is the next one, and m = 0 has none.
    channels = [2 * spin, *range(0, 2 * spin, 2)]
    for m, cosine in enumerate(channels):
        sine = cosine + 1
        if m > 0:
            z[sine, cosine] = m
        if m == spin:
            break
        upper = channels[m + 1]
        step = math.sqrt((spin - m) * (spin + m + 1) / (4 if m > 0 else 2))
        y[upper, cosine], x[upper + 1, cosine] = step, -step
        if m > 0:
            y[upper + 1, sine], x[upper, sine] = step, step
    return lower - lower.transpose(-1, -2)
