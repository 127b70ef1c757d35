"""Generators, the orthogonal bases in which commuting ones rotate planes, and states and weights in such a basis."""

import itertools
import math
import threading

import torch
from transformers.utils.generic import maybe_autocast

from ..fast.constants import constant
from ..fast.dispatch import find_backend, in_portable_graph, operator, values_are_unknown


def skew_from_planes(frequencies: torch.Tensor, basis: torch.Tensor) -> torch.Tensor:
    """
    U blockdiag(f₁J, f₂J, …) Uᵀ with J = [[0, −1], [1, 0]] for (…, ⌊b/2⌋) frequencies and (…, b, b) bases: (…, b, b).
    """
    planes = 2 * frequencies.shape[-1]
    first, second = basis[..., 0:planes:2], basis[..., 1:planes:2]
    product = (second * frequencies.unsqueeze(-2)) @ first.transpose(-1, -2)
    return product - product.transpose(-1, -2)


def _splitting(size: int) -> tuple[tuple[float, ...], ...]:
    """A skew-symmetric (b, b) matrix without a kernel of more than one dimension."""
    matrix = [[0.0] * size for _ in range(size)]
    for number, (row, column) in enumerate(itertools.combinations(range(size), 2), start=1):
        matrix[column][row] = math.cos(number)
        matrix[row][column] = -matrix[column][row]
    return tuple(map(tuple, matrix))


# While a patched model runs in this thread and its parameters stay: by encoding, the eigenbases of all layers.
shared_eigenbases = threading.local()


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
    # eigh refuses values that are not finite; they still propagate to the loss through S.
    matrices = matrices.nan_to_num(0.0, 0.0, 0.0)
    is_known = torch.compiler.is_dynamo_compiling() or not values_are_unknown(matrices)
    if is_known and not in_portable_graph() and _has_kernel(device, size):
        return _eigenbases(matrices).to(generators)
    # In a kernel of two or more dimensions the eigenvectors of iS are not pairs of conjugates; a perturbation (2e-12
    # for float64) splits it.
    splitting = constant(_splitting(size), matrices)
    norms = matrices.flatten(-2).norm(dim=-1)[..., None, None]
    strength = torch.finfo(matrices.dtype).eps ** 0.75
    _, vectors = torch.linalg.eigh(1j * matrices.addcmul(norms, splitting, value=strength))
    # S x = μ y and S y = −μ x for an eigenvector (x + iy)/√2 of a frequency μ ≥ 0, which are the upper half.
    planes = vectors[..., (size + 1) // 2 :] * math.sqrt(2)
    basis = torch.view_as_real(planes).flatten(-2)
    if size % 2:
        kernel = vectors[..., size // 2]
        phase = kernel.gather(-1, kernel.abs().argmax(-1, keepdim=True)).conj()
        kernel = torch.nn.functional.normalize((kernel * phase).real, dim=-1)
        basis = torch.cat([basis, kernel.unsqueeze(-1)], dim=-1)
    # Rounding mixes the vectors of nearly opposite frequencies; Newton's iteration makes them orthonormal again.
    flat = basis.flatten(0, -3)
    for _ in range(4):
        flat = torch.baddbmm(flat, flat, flat.mT @ flat, beta=1.5, alpha=-0.5)
    basis = flat.view_as(basis)
    identity = torch.eye(size, dtype=basis.dtype, device=basis.device)
    return torch.where(norms > 0, basis, identity).to(generators)


@torch.compiler.assume_constant_result
def _has_kernel(device: torch.device, size: int) -> bool:
    """It computes in float64 and is compared with those of rotations in float32. Graphs are compiled for the answer."""
    return find_backend("eigenbases", torch.empty(1, device=device), size, torch.float32) is not None


@operator("(Tensor matrices) -> Tensor", fake=torch.empty_like)
def _eigenbases(matrices):
    """[`eigenbasis`] of finite matrices, by a kernel that CUDA graphs can record."""
    backend = find_backend("eigenbases", matrices, matrices.shape[-1], torch.float32)
    return backend.eigenbases(matrices) if backend else eigenbasis(matrices)


def change_basis(states: torch.Tensor, basis: torch.Tensor, tokens_first: bool = True) -> torch.Tensor:
    """
    Uᵀ applied to (B, H, N, D) states, U of shape (1 or H, blocks, b, b).

    Args:
        tokens_first: Whether tokens come before heads in memory, as projections leave them. Without it, blocks of whole
            heads save a copy.
    """
    batch, heads, tokens, width = states.shape
    _, blocks, size, _ = basis.shape
    with maybe_autocast(states.device.type, enabled=False):
        # One product per head and block, with all tokens of all samples as rows.
        rows = states.unflatten(-1, (blocks, size)).permute(1, 3, 0, 2, 4).flatten(2, 3).flatten(0, 1)
        basis = basis.to(states.dtype).expand(heads, blocks, size, size).flatten(0, 1)  # (H·blocks, b, b)
        product = torch.bmm(rows, basis).view(heads, blocks, batch, tokens, size)
    if not tokens_first and blocks == 1:
        return product.squeeze(1).transpose(0, 1)
    changed = product.permute(2, 3, 0, 1, 4)
    return changed.reshape(batch, tokens, heads, width).transpose(1, 2)


def to_basis(projected: torch.Tensor, basis: torch.Tensor) -> torch.Tensor:
    """
    Uᵀ applied to what a query or key projection puts out, or to its weight or bias.

    Args:
        projected: (H · D, …), output channels first.
        basis: (1 or H, blocks, b, b).

    Returns:
        The same shape and type.
    """
    _, blocks, size, _ = basis.shape
    with maybe_autocast(projected.device.type, enabled=False):
        dtype = torch.promote_types(projected.dtype, torch.float32)
        rows = projected.to(dtype).reshape(-1, blocks, size, projected[0].numel())  # (H, blocks, b, …)
        changed = torch.matmul(basis.to(dtype).transpose(-1, -2), rows)
    return changed.view(projected.shape).to(projected.dtype)


def basis_gradients(projected: torch.Tensor, gradients: torch.Tensor, basis: torch.Tensor) -> torch.Tensor:
    """Gradient of the basis from that of [`to_basis`]`(projected, basis)`, in the shape and type of the basis."""
    heads, blocks, size, _ = basis.shape
    with maybe_autocast(projected.device.type, enabled=False):
        before, after = (x.to(basis.dtype).reshape(-1, blocks, size, x[0].numel()) for x in (projected, gradients))
        gradient = torch.matmul(before, after.transpose(-1, -2))  # (H, blocks, b, b)
    return gradient if heads > 1 else gradient.sum(0, keepdim=True)
