"""Skew-symmetric generators: their free entries, rotations of planes, and the basis in which they rotate planes."""

import math
from typing import NamedTuple

import torch
from transformers.utils.generic import maybe_autocast


def working_dtype(device: torch.device) -> torch.dtype:
    """
    The type in which rotations are computed: float64, because rounding the exponent to float32 causes an error of 3e-5
    at LieRE64's initial norm, and float32 on MPS, which has no float64.
    """
    return torch.float32 if device.type == "mps" else torch.float64


def product_dtype(states: torch.Tensor) -> torch.dtype:
    """The type that linear layers give to their results for these states, that of autocast where it is on."""
    device = states.device.type
    # The meta device has no autocast.
    has_autocast = device != "meta" and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if has_autocast else states.dtype


def skew(entries: torch.Tensor, block_size: int) -> torch.Tensor:
    """
    Skew-symmetric matrices from their free entries.

    A[j, i] = −A[i, j] = the entry of the pair i < j, pairs in row-major order (0,1), (0,2), …; so for b = 2 the entry
    is the angular frequency of a counter-clockwise rotation, as in RoPE.

    Args:
        entries: (…, b(b−1)/2).

    Returns:
        (…, b, b).

    Raises:
        ValueError: if the number of entries is not b(b−1)/2.
    """
    found, needed = entries.shape[-1], block_size * (block_size - 1) // 2
    if found != needed:
        raise ValueError(
            f"{found} entries do not make a skew-symmetric matrix of size {block_size}, which has {needed}."
        )
    row, column = torch.triu_indices(block_size, block_size, offset=1, device=entries.device)
    lower = entries.new_zeros(*entries.shape[:-1], block_size, block_size)
    lower[..., column, row] = entries
    return lower - lower.transpose(-1, -2)


def skew_entries(matrices: torch.Tensor) -> torch.Tensor:
    """Free entries of skew-symmetric (…, b, b) matrices, the inverse of [`skew`]: (…, b(b−1)/2)."""
    row, column = torch.triu_indices(matrices.shape[-1], matrices.shape[-1], offset=1, device=matrices.device)
    return matrices[..., column, row]


def in_basis(frequencies: torch.Tensor, basis: torch.Tensor) -> torch.Tensor:
    """
    U blockdiag(f₁J, f₂J, …) Uᵀ with J = [[0, −1], [1, 0]] for (…, ⌊b/2⌋) frequencies and (…, b, b) bases: (…, b, b).
    """
    planes = 2 * frequencies.shape[-1]
    first, second = basis[..., 0:planes:2], basis[..., 1:planes:2]
    product = (second * frequencies.unsqueeze(-2)) @ first.transpose(-1, -2)
    return product - product.transpose(-1, -2)


def cayley_map(matrices: torch.Tensor) -> torch.Tensor:
    """(I − S)(I + S)⁻¹ of skew-symmetric (…, b, b) S: orthogonal, without the eigenvalue −1; exactly I for zeros."""
    identity = torch.eye(matrices.shape[-1], dtype=matrices.dtype, device=matrices.device)
    # Both factors commute.
    return torch.linalg.solve(identity + matrices, identity - matrices)


def fourier_basis(size: int, device: torch.device) -> torch.Tensor:
    """
    (b, b) real orthogonal basis, in the working type, in which circulant skew-symmetric matrices rotate planes:
    columns sin and cos of 2πmi/b for m = 1 … ⌊(b−1)/2⌋, then for even b the alternating, and last the constant vector.
    """
    dtype = working_dtype(device)
    place, wave = torch.arange(size, device=device), torch.arange(1, (size + 1) // 2, device=device)
    # Whole revolutions are taken out of exact integers.
    angles = 2 * math.pi / size * (torch.outer(place, wave) % size).to(dtype)
    columns = [math.sqrt(2) * torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)]
    if size % 2 == 0:
        columns.append((1 - 2 * (place % 2)).to(dtype).unsqueeze(-1))
    return torch.cat([*columns, torch.ones(size, 1, dtype=dtype, device=device)], dim=1) / math.sqrt(size)


def plane_rotations(
    positions: torch.Tensor, frequencies: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """
    exp(Σ_a p_a A_a) for b = 2, in closed form: a rotation by the angle Σ_a p_a f_a (RoPE-Mixed, Heo et al., eq. 6).

    Args:
        positions: (P, A) in the working type.
        frequencies: (A, K), one per axis and plane.
        dtype: Type of the result.

    Returns:
        (K, P, 2) cos and sin, in `dtype`.
    """
    with maybe_autocast(positions.device.type, enabled=False):
        return cos_sin(positions @ frequencies.to(positions.dtype), dtype).transpose(0, 1)


def cos_sin(angles: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """(…, 2) cos and sin, in `dtype`, of (…) angles in the working type."""
    # Whole revolutions are subtracted in the working type, so that the arguments of float32 cos and sin are small.
    revolutions = (angles.detach() / (2 * math.pi)).round_().mul_(2 * math.pi)
    angles = (angles - revolutions).to(dtype)
    return torch.stack([angles.cos(), angles.sin()], dim=-1)


@torch.no_grad()
def eigenbasis(generators: torch.Tensor) -> torch.Tensor:
    """
    Orthogonal U with UᵀSU = blockdiag(μ₁J, μ₂J, …), J = [[0, −1], [1, 0]], and a last 0 if b is odd, for
    skew-symmetric S.

    S may have repeated frequencies and a kernel. Where S is zero, U is exactly the identity, so that a model with zero
    generators computes the same bits as one without rotations.

    Args:
        generators: (…, b, b) in the working type.

    Returns:
        (…, b, b), detached.
    """
    size, device = generators.shape[-1], generators.device
    # MPS has neither float64 nor complex eigenvectors; the matrices are few.
    matrices = generators.to("cpu", torch.float64) if device.type == "mps" else generators
    # In a kernel of two or more dimensions the eigenvectors of iS are not pairs of conjugates; a perturbation (2e-12
    # for float64) splits it.
    row, column = torch.triu_indices(size, size, offset=1)
    splitting = skew(torch.cos(torch.arange(1, len(row) + 1, device=matrices.device, dtype=matrices.dtype)), size)
    # eigh refuses values that are not finite; they still propagate to the loss through S.
    matrices = matrices.nan_to_num(0.0, 0.0, 0.0)
    norms = matrices.flatten(-2).norm(dim=-1)[..., None, None]
    strength = torch.finfo(matrices.dtype).eps ** 0.75
    _, vectors = torch.linalg.eigh(1j * (matrices + strength * norms * splitting))
    # S x = μ y and S y = −μ x for an eigenvector (x + iy)/√2 of a frequency μ ≥ 0, which are the upper half.
    planes = vectors[..., (size + 1) // 2 :] * math.sqrt(2)
    basis = torch.stack([planes.real, planes.imag], dim=-1).flatten(-2)
    if size % 2:
        kernel = vectors[..., size // 2]
        phase = kernel.gather(-1, kernel.abs().argmax(-1, keepdim=True)).conj()
        kernel = torch.nn.functional.normalize((kernel * phase).real, dim=-1)
        basis = torch.cat([basis, kernel.unsqueeze(-1)], dim=-1)
    # Rounding mixes the vectors of nearly opposite frequencies; Newton's iteration makes them orthonormal again.
    for _ in range(4):
        gram = basis.transpose(-1, -2) @ basis
        basis = 1.5 * basis - 0.5 * (basis @ gram)
    identity = torch.eye(size, dtype=basis.dtype, device=basis.device)
    return torch.where(norms > 0, basis, identity).to(generators)


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
def common_planes(generators: torch.Tensor) -> CommonPlanes:
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
        candidates.append(_planes_of(generators, (scales[..., None, None] * generators).sum(0), norms))
    found, *others = candidates
    for other in others:
        better = other.error < found.error
        found = CommonPlanes(
            other.basis.where(better[..., None, None], found.basis),
            other.frequencies.where(better[..., None], found.frequencies),
            other.error.where(better, found.error),
        )
    return found


def _planes_of(generators: torch.Tensor, combination: torch.Tensor, norms: torch.Tensor) -> CommonPlanes:
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
