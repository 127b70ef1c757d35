"""The gradient of the dense exponential against float64 and finite differences, where its parts could fail."""

import pytest
import reference
import torch

from hf_liere.fast.exponential_gradient import derivative_coefficients
from hf_liere.fast.scaling_and_squaring import largest_norm
from hf_liere.rotation.exponential import block_rotations, skew


pytestmark = pytest.mark.usefixtures("every_path")


def relative_error(positions, entries, block_size):
    """Of the float32 gradient, against the exact one in float64."""
    weight = torch.randn(entries.shape[1], len(positions), block_size, block_size)
    ours, exact = entries.clone().requires_grad_(), entries.double().requires_grad_()
    (block_rotations(positions, skew(ours, block_size)) * weight).sum().backward()
    exponents = torch.einsum("pa,akij->kpij", positions, skew(exact, block_size))
    (reference.exponential(exponents) * weight.double()).sum().backward()
    return ((ours.grad.double() - exact.grad).norm() / exact.grad.norm()).item()


@pytest.mark.parametrize("axes", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype, error", [(torch.float32, 1e-7), (torch.float64, 2e-13)])
def test_the_polynomial_is_the_derivative_on_the_imaginary_axis(axes, dtype, error):
    z = 2j * largest_norm(axes) * torch.linspace(-1, 1, 1000, dtype=torch.float64)
    coefficients = derivative_coefficients(largest_norm(axes), dtype)
    polynomial = sum(coefficient * z**power for power, coefficient in enumerate(coefficients))
    assert (polynomial - (z.exp() - 1) / z).abs().max() < error


@pytest.mark.parametrize("axes", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("scale", [0.0, 1e-3, 1.0, 6.3, 100.0])
@pytest.mark.parametrize("block_size", [3, 8])
def test_float32_gradients_keep_their_digits_at_every_norm(axes, scale, block_size):
    torch.manual_seed(axes)
    positions = torch.rand(9, axes, dtype=torch.float64)
    entries = torch.rand(axes, 2, block_size * (block_size - 1) // 2) * scale
    # Four squarings double a rounding of 6e-8 each before the next square that was kept.
    assert relative_error(positions, entries, block_size) < 2e-6


@pytest.mark.parametrize("scales", [(1e-6, 1e6), (1e6, 1e-6), (0.0, 1.0)])
def test_axes_of_very_different_sizes(scales):
    """High powers of coordinates in the thousands or thousandths would leave the range of float32."""
    torch.manual_seed(0)
    positions = torch.rand(12, 2, dtype=torch.float64) * torch.tensor(scales, dtype=torch.float64)
    entries = torch.rand(2, 2, 28) * 6 / torch.tensor([scale or 1.0 for scale in scales])[:, None, None]
    assert relative_error(positions, entries, 8) < 2e-6
