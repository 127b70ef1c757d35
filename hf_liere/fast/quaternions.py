"""Exponentials of skew-symmetric 3 × 3 and 4 × 4 matrices, by quaternions."""

import functools
import itertools

import torch
from transformers.utils.generic import maybe_autocast

from .constants import constant
from .dispatch import in_portable_graph, operator
from .scaling_and_squaring import find_exponential_backend


# Sizes of blocks with a closed form.
CLOSED_FORMS = (3, 4)
# Products of the units 1, i, j, k of the quaternions: row · column = (sign, unit).
_UNIT_PRODUCTS = (
    ((1, 0), (1, 1), (1, 2), (1, 3)),
    ((1, 1), (-1, 0), (1, 3), (-1, 2)),
    ((1, 2), (-1, 3), (-1, 0), (1, 1)),
    ((1, 3), (1, 2), (-1, 1), (-1, 0)),
)
# The square of an angle below which cos is 1 and sin x is x, also in float64.
_LEAST_SQUARE = 1e-28


def quaternion_rotations(positions: torch.Tensor, generators: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """
    exp(Σ_a p_a A_a) for b = 3 and 4, in closed form: a skew-symmetric 4 × 4 matrix is v ↦ uv + vw for two imaginary
    quaternions u and w, and its exponential v ↦ exp(u) v exp(w) with exp(u) = cos |u| + u sin |u| / |u| (so(4) is the
    sum of two so(3)). A 3 × 3 matrix acts on imaginary v, with w = −u: the formula of Rodrigues.

    Args:
        positions: (P, A) in the working type.
        generators: (A, G, K, b, b), skew-symmetric.
        dtype: Type of the result.

    Returns:
        (G, P, K, b, b).
    """
    generators = _imaginary_quaternions(generators.to(positions.dtype))  # (A, G, K, 1 or 2, 3)
    if in_portable_graph():
        with maybe_autocast(positions.device.type, enabled=False):
            return _multiply_units(_exponentials(positions, generators)[0]).to(dtype)
    return _quaternion_rotations(positions, generators, dtype)


def _imaginary_quaternions(generators: torch.Tensor) -> torch.Tensor:
    """The u, and w of 4 × 4 matrices, for (…, b, b) skew-symmetric matrices: (…, 1 or 2, 3)."""
    x, y, z = (generators[..., row, column] for row, column in ((-1, -2), (-3, -1), (-2, -3)))
    imaginary = torch.stack([x, y, z], dim=-1)  # (…, 3)
    if generators.shape[-1] == 3:
        return 0.5 * imaginary.unsqueeze(-2)
    real = generators[..., 1:, 0]  # (…, 3)
    return 0.5 * torch.stack([real + imaginary, real - imaginary], dim=-2)


def _exponentials(positions: torch.Tensor, generators: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """
    exp(u) of u = Σ_a p_a u_a for the (A, G, K, 1 or 2, 3) u_a: (G, P, K, 1 or 2, 4) unit quaternions, the u (…, 3),
    |u| and sin |u| / |u| (…, 1), all in the working type: products in float32 may be rounded to TF32.
    """
    generators = generators.transpose(0, 1)  # (G, A, K, 1 or 2, 3)
    exponents = (positions @ generators.flatten(2)).unflatten(-1, generators.shape[2:])  # (G, P, K, 1 or 2, 3)
    angles = exponents.square().sum(-1, keepdim=True).clamp(min=_LEAST_SQUARE).sqrt()  # (G, P, K, 1 or 2, 1)
    cos, sinc = angles.cos(), angles.sin() / angles
    return torch.cat([cos, exponents * sinc], dim=-1), exponents, angles, sinc


def _multiply_units(units: torch.Tensor) -> torch.Tensor:
    """(…, b, b) matrices v ↦ e v f of the (…, 2, 4) unit quaternions e and f, or v ↦ e v ē of (…, 1, 4)."""
    size = 2 + units.shape[-2]
    products = units[..., 0, :, None] * units[..., -1, None, :]  # (…, 4, 4)
    return (products.flatten(-2) @ constant(_product_table(size), units)).unflatten(-1, (size, size))


@functools.cache
def _product_table(size: int) -> tuple[tuple[int, ...], ...]:
    """(16, b²) numbers of v ↦ e v f for each pair of units, v ↦ e v f̄ for b = 3."""
    entries: dict[tuple[int, ...], int] = {}
    for left, right, column in itertools.product(range(4), repeat=3):
        sign, unit = _UNIT_PRODUCTS[left][column]
        other, row = _UNIT_PRODUCTS[unit][right]
        entries[left, right, row, column] = sign * other * (-1 if size == 3 and right else 1)
    pairs, places = (list(itertools.product(range(least, 4), repeat=2)) for least in (0, 4 - size))
    return tuple(tuple(entries.get((*pair, *place), 0) for place in places) for pair in pairs)


def _fake_quaternion_rotations(positions, generators, dtype):
    _, groups, blocks, halves, _ = generators.shape
    return positions.new_empty(groups, positions.shape[0], blocks, 2 + halves, 2 + halves, dtype=dtype)


def _quaternion_gradients(ctx, gradient):
    return quaternion_rotations_backward(*ctx.saved_tensors, gradient, ctx.needs_input_grad[0])


@operator(
    "(Tensor positions, Tensor generators, ScalarType dtype) -> Tensor",
    fake=_fake_quaternion_rotations,
    gradients=_quaternion_gradients,
    save=lambda ctx, inputs, output: ctx.save_for_backward(*inputs[:2]),
)
def _quaternion_rotations(positions, generators, dtype):
    """(G, P, K, b, b) of (A, G, K, 1 or 2, 3) quaternions of generators."""
    size = 2 + generators.shape[-2]
    if backend := find_exponential_backend("quaternion_rotations", positions, generators, size, dtype):
        return backend.quaternion_rotations(positions, generators)
    return _multiply_units(_exponentials(positions, generators)[0]).to(dtype)


@operator(
    "(Tensor positions, Tensor generators, Tensor gradient, bool needs_positions) -> (Tensor, Tensor)",
    fake=lambda positions, generators, *_: tuple(torch.empty_like(x).contiguous() for x in (positions, generators)),
)
def quaternion_rotations_backward(positions, generators, gradient, needs_positions):
    """Gradients of positions, zeros unless they are needed, and of the quaternions of the generators."""
    size = gradient.shape[-1]
    if backend := find_exponential_backend("quaternion_gradients", positions, generators, size, gradient.dtype):
        exponents_gradient = backend.quaternion_gradients(positions, generators, gradient)
    else:
        exponents_gradient = _exponents_gradient(positions, generators, gradient)
    flat = exponents_gradient.flatten(2)  # (G, P, K · 3 or 6)
    generators_gradient = (positions.T.to(flat.dtype) @ flat).transpose(0, 1)  # (A, G, K · 3 or 6)
    positions_gradient = torch.zeros_like(positions).contiguous()
    if needs_positions:
        factors = generators.flatten(2).permute(1, 2, 0)  # (G, K · 3 or 6, A)
        positions_gradient += (flat.to(factors.dtype) @ factors).sum(0)
    return positions_gradient, generators_gradient.reshape(generators.shape).to(generators.dtype).contiguous()


def _exponents_gradient(positions: torch.Tensor, generators: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """(G, P, K, 1 or 2, 3) gradients of the u of [`_exponentials`], from those of the rotations."""
    units, exponents, angles, sinc = (part.to(gradient.dtype) for part in _exponentials(positions, generators))
    size = gradient.shape[-1]
    products = (gradient.flatten(-2) @ constant(_product_table(size), gradient).T).unflatten(-1, (4, 4))
    left = (products * units[..., -1, None, :]).sum(-1)  # (G, P, K, 4)
    right = (products * units[..., 0, :, None]).sum(-2)
    by_units = (left + right).unsqueeze(-2) if size == 3 else torch.stack([left, right], dim=-2)
    real, imaginary = by_units.split([1, 3], dim=-1)
    # The derivative of sin x / x, divided by x, is −1/3 near zero.
    curvature = torch.where(angles < 1e-3, -1 / 3, (units[..., :1] - sinc) / angles.square())
    along = (imaginary * exponents).sum(-1, keepdim=True) * curvature - sinc * real
    return sinc * imaginary + exponents * along
