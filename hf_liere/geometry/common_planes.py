"""The generators of an encoding, and the planes that they share if they commute."""

import math
from typing import NamedTuple

import torch

from ..encoding.rotary_encoding import RotaryEncoding
from ..rotation.bases import eigenbasis
from ..rotation.exponential import skew


def generator_matrices(encoding: RotaryEncoding) -> torch.Tensor:
    """
    The skew-symmetric A_a, (A, layers, heads, blocks, b, b) in float64.

    For folded ComRoPE and STRING, they are in the eigenbasis that the weights contain: plane rotations, b = 2; for a
    folded LieRE product, in the basis of its last factor.
    """
    device = next((parameter.device for parameter in encoding.parameters()), torch.device("cpu"))
    return skew(encoding.entries(device).detach().to("cpu", torch.float64), encoding.block_size)


class CommonPlanes(NamedTuple):
    """
    The planes that commuting generators A_a share: UᵀA_aU = blockdiag(f_a1 J, f_a2 J, …), J = [[0, −1], [1, 0]], and a
    last 0 if b is odd, so that exp(Σ p_a A_a) is RoPE-Mixed in the basis U (STRING, Theorem 3.4).

    Attributes:
        basis: (…, b, b) orthogonal U.
        frequencies: (A, …, ⌊b/2⌋), the f.
        error: (…), the largest ‖A_a − U blockdiag(f_a J) Uᵀ‖_F over a, divided by the largest ‖A_a‖_F. It is a matter
            of rounding for generators that commute, and only for those.
    """

    basis: torch.Tensor
    frequencies: torch.Tensor
    error: torch.Tensor


@torch.no_grad()
def find_common_planes(generators: torch.Tensor) -> CommonPlanes:
    """Finds the common planes of (A, …, b, b) skew-symmetric matrices; for b = 2 the basis is the identity."""
    axes, size = len(generators), generators.shape[-1]
    norms = generators.flatten(-2).norm(dim=-1)  # (A, …)
    # Planes that differ have different frequencies in almost every combination of the axes; the best of three.
    draws = range(1 if size == 2 else 3)
    weights = generators.new_tensor([[math.cos(1 + draw + 2 * axis) for axis in range(axes)] for draw in draws])
    directions = generators / norms.where(norms > 0, 1)[..., None, None]
    combinations = torch.tensordot(weights, directions, dims=1)  # (draws, …, b, b)
    bases = torch.eye(size).to(combinations).expand_as(combinations) if size == 2 else eigenbasis(combinations)
    rest = bases.mT @ generators[:, None] @ bases  # (A, draws, …, b, b)
    planes = torch.arange(0, size - 1, 2, device=generators.device)
    frequencies = rest[..., planes + 1, planes]
    rest[..., planes + 1, planes] = rest[..., planes, planes + 1] = 0
    largest = norms.amax(0)
    errors = rest.flatten(-2).norm(dim=-1).amax(0) / largest.where(largest > 0, 1)  # (draws, …)
    best = errors.argmin(0, keepdim=True)
    return CommonPlanes(
        bases.take_along_dim(best[..., None, None], 0).squeeze(0),
        frequencies.take_along_dim(best[None, ..., None], 1).squeeze(1),
        errors.amin(0),
    )
