import math
import os

import pytest
import reference
import torch

from hf_liere.fast.closed_forms import layer_plane_rotations
from hf_liere.fast.dispatch import working_dtype
from hf_liere.rotation.exponential import block_rotations, skew


pytestmark = pytest.mark.usefixtures("every_path")


def plane_rotations(positions, frequencies):
    """(K, P, 2) of one layer."""
    return layer_plane_rotations(positions, frequencies.unsqueeze(1))[0].transpose(0, 1)


def exponents(positions, generators):
    return torch.einsum("pa,akij->kpij", positions, generators.double())


def test_the_reference_is_exact():
    """Against planes of known angles, alone and small, and its gradient against differences, equal eigenvalues too."""
    for angle in (0.0, 1e-3, 0.0493, 1.0, 100.0):
        matrix = torch.tensor([[0.0, -angle], [angle, 0.0]], dtype=torch.float64)
        cos, sin = math.cos(angle), math.sin(angle)
        expected = torch.tensor([[cos, -sin], [sin, cos]], dtype=torch.float64)
        # The angle itself has sixteen digits.
        torch.testing.assert_close(reference.exponential(matrix), expected, rtol=0, atol=1e-15 * max(1, 10 * angle))
    for scale in (0.0, 1.0, 50.0):
        entries = (torch.randn(2, 6, dtype=torch.float64) * scale).requires_grad_()
        assert torch.autograd.gradcheck(lambda e: reference.exponential(skew(e, 4)), entries, atol=1e-5)


def test_skew_is_skew_and_bijective():
    entries = torch.randn(5, 28)
    matrix = skew(entries, 8)
    assert torch.equal(matrix, -matrix.transpose(-1, -2))
    row, column = torch.triu_indices(8, 8, offset=1)
    assert torch.equal(matrix[:, column, row], entries)


def test_skew_refuses_a_wrong_count():
    with pytest.raises(ValueError, match="27 entries .* size 8, which has 28"):
        skew(torch.zeros(27), 8)


@pytest.mark.parametrize("block_size", [3, 4, 8, 24, 64])
@pytest.mark.parametrize("scale", [0.0, 1e-4, 1.0, 2 * math.pi, 30.0])
def test_block_rotations_match_float64_and_are_orthogonal(block_size, scale):
    positions = torch.rand(7, 2, dtype=torch.float64)
    generators = skew(torch.rand(2, 3, block_size * (block_size - 1) // 2) * scale, block_size)
    rotations = block_rotations(positions, generators)
    assert rotations.dtype == torch.float32
    # float32 rounding of numbers up to one; everything before it is float64. Kernels of closed forms add four products
    # of float32 cosines and sines.
    tolerance = 6e-7 if block_size < 5 and os.environ["HF_LIERE_CPU_KERNELS"] == "1" else 2e-7
    torch.testing.assert_close(
        rotations.double(), reference.exponential(exponents(positions, generators)), rtol=0, atol=tolerance
    )
    identity = torch.eye(block_size, dtype=torch.float64).expand_as(rotations)
    gram = rotations.double() @ rotations.double().transpose(-1, -2)
    torch.testing.assert_close(gram, identity, rtol=0, atol=1e-6)


@pytest.mark.parametrize("block_size", [3, 4])
@pytest.mark.parametrize("scale", [0.0, 1e-8, 1e-3, 1.0, 50.0])
def test_closed_forms_have_exact_gradients_in_float32(block_size, scale):
    """Of more blocks than a vector contains, also where |u| is zero or tiny."""
    positions = torch.randn(5, 3, dtype=torch.float64)
    positions[0] = 0
    entries = torch.randn(3, 2, 19, block_size * (block_size - 1) // 2, dtype=torch.float64) * scale
    weight = torch.randn(2, 19, 5, block_size, block_size, dtype=torch.float64)
    found, expected = [], []
    for results, rotate in (
        (found, lambda p, g: block_rotations(p, g).double()),
        (expected, lambda p, g: reference.exponential(torch.einsum("pa,agkij->gkpij", p, g))),
    ):
        leaves = positions.clone().requires_grad_(), entries.clone().requires_grad_()
        results += torch.autograd.grad((rotate(leaves[0], skew(leaves[1], block_size)) * weight).sum(), leaves)
    for ours, exact in zip(found, expected):
        # Sums of up to hundreds of products of float32 numbers.
        torch.testing.assert_close(ours, exact, rtol=0, atol=1e-6 * float(exact.abs().max()) + 1e-12)


def test_position_zero_is_exactly_the_identity():
    generators = skew(torch.rand(2, 3, 28) * 30, 8)
    positions = torch.tensor([[0.0, 0.0], [1.0, 1.0]], dtype=torch.float64)
    assert torch.equal(block_rotations(positions, generators)[:, 0], torch.eye(8).expand(3, 8, 8))
    assert torch.equal(plane_rotations(positions, torch.rand(2, 3))[:, 0], torch.tensor([1.0, 0.0]).expand(3, 2))


def test_plane_rotations_match_float64_after_many_turns():
    positions, frequencies = torch.rand(50, 2, dtype=torch.float64) * 1000, torch.rand(2, 4) * 2 * math.pi
    angles = torch.einsum("pa,ak->kp", positions, frequencies.double())
    expected = torch.stack([angles.cos(), angles.sin()], -1)
    # One rounding to float32 of an angle below 2π and one of the result.
    torch.testing.assert_close(plane_rotations(positions, frequencies).double(), expected, rtol=0, atol=5e-7)


@pytest.mark.parametrize("block_size, axes", [(3, 2), (4, 2), (5, 2), (4, 3), (4, 5)])
@pytest.mark.parametrize("scale", [0.0, 1.0, 50.0])
def test_gradient_is_exact(scale, block_size, axes):
    """Of positions too; at zero and, with one repeated generator, at repeated eigenvalues."""
    positions = torch.rand(3, axes, dtype=torch.float64, requires_grad=True)
    entries = torch.randn(axes, 1, block_size * (block_size - 1) // 2, dtype=torch.float64) * scale
    assert torch.autograd.gradcheck(
        lambda p, e: block_rotations(p, skew(e, block_size), p.dtype),
        (positions, entries.repeat(1, 2, 1).requires_grad_()),
        atol=1e-5,
    )


def test_gradient_at_a_large_norm():
    positions = torch.rand(6, 2, dtype=torch.float64)
    entries = torch.rand(2, 2, 120, dtype=torch.float64) * 100
    weight = torch.randn(2, 6, 16, 16, dtype=torch.float64)
    ours, exact = entries.clone().requires_grad_(), entries.clone().requires_grad_()
    (block_rotations(positions, skew(ours, 16), torch.float64) * weight).sum().backward()
    (reference.exponential(exponents(positions, skew(exact, 16))) * weight).sum().backward()
    assert exponents(positions, skew(entries, 16)).flatten(-2).norm(dim=-1).max() > 1000
    # Ours loses about ten digits of sixteen to eleven squarings of a matrix of norm 1e3.
    torch.testing.assert_close(ours.grad, exact.grad, rtol=1e-6, atol=1e-6)


def test_pieces_do_not_change_the_result(monkeypatch):
    positions, generators = torch.rand(9, 2, dtype=torch.float64), skew(torch.randn(2, 5, 10), 5).requires_grad_()
    whole = block_rotations(positions, generators)
    (gradient,) = torch.autograd.grad(whole.square().sum() + whole.sum(), generators)
    for elements in (25, 100, 300, 25 * 9 * 2):
        monkeypatch.setattr("hf_liere.fast.scaling_and_squaring.CHUNK_ELEMENTS", elements)
        pieces = block_rotations(positions, generators)
        assert torch.equal(pieces, whole)
        (piecewise,) = torch.autograd.grad(pieces.square().sum() + pieces.sum(), generators)
        torch.testing.assert_close(piecewise, gradient)


def test_float32_only_devices_stay_close():
    """MPS has no float64; the same code in float32 loses digits with the squarings, within its own tolerance."""
    assert working_dtype(torch.device("mps")) == torch.float32 and working_dtype(torch.device("cpu")) == torch.float64
    positions, generators = torch.rand(6, 2), skew(torch.rand(2, 3, 28) * 2 * math.pi, 8)
    expected = reference.exponential(exponents(positions.double(), generators))
    # Seven squarings double a relative error of 6e-8 each.
    torch.testing.assert_close(block_rotations(positions, generators).double(), expected, rtol=0, atol=5e-5)


def test_a_generator_that_is_not_finite_reaches_the_loss():
    generators = skew(torch.full((1, 1, 6), math.nan), 4)
    assert block_rotations(torch.ones(2, 1, dtype=torch.float64), generators).isnan().any()
