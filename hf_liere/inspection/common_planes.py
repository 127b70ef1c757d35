"""The generators of an encoding, and the planes that they share if they commute."""

import math
from typing import NamedTuple

import torch

from ..models.encoding.rotary_encoding import RotaryEncoding
from ..models.rotation.bases import eigenbasis
from ..models.rotation.exponential import skew


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
    """
    Args:
        generators: (A, …, b, b) skew-symmetric matrices in the working type. For b = 2 the basis is the identity.
    """
    norms = generators.flatten(-2).norm(dim=-1)  # (A, …)
    candidates = []
    for draw in range(1 if generators.shape[-1] == 2 else 3):
        # Planes that differ have different frequencies in almost every combination of the axes; the best of three.
        weights = [math.cos(1 + draw + 2 * axis) for axis in range(len(generators))]
        scales = norms.new_tensor(weights).view(-1, *[1] * (norms.ndim - 1)) / norms.where(norms > 0, 1)
        candidates.append(_find_planes(generators, (scales[..., None, None] * generators).sum(0), norms))
    found, *others = candidates
    for other in others:
        better = other.error < found.error
        found = CommonPlanes(
            other.basis.where(better[..., None, None], found.basis),
            other.frequencies.where(better[..., None], found.frequencies),
            other.error.where(better, found.error),
        )
    return found


def _find_planes(generators: torch.Tensor, combination: torch.Tensor, norms: torch.Tensor) -> CommonPlanes:
    """The planes of one combination of the generators, and how well they are those of all."""
    size = generators.shape[-1]
    basis = torch.eye(size).expand_as(combination).to(combination) if size == 2 else eigenbasis(combination)
    in_basis = basis.transpose(-1, -2) @ generators @ basis
    planes = torch.arange(0, size - 1, 2, device=generators.device)
    frequencies = in_basis[..., planes + 1, planes]
    rest = in_basis.clone()
    rest[..., planes + 1, planes] = rest[..., planes, planes + 1] = 0
    largest = norms.amax(0)
    error = rest.flatten(-2).norm(dim=-1).amax(0) / largest.where(largest > 0, 1)
    return CommonPlanes(basis, frequencies, error)
