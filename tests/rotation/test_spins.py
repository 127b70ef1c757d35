"""Generators of so(3), against harmonic polynomials and the commutation relations."""

import math

import pytest
import reference
import torch
from scipy.spatial.transform import Rotation

from hf_liere.plain.encodings import representation, spin_generators


# In float64: entries are rounded once, and products of up to spin 4 add a few units in the last place.
EXACT = 1e-14


def harmonics(spin, points):
    """
    (P, 2l + 1) real solid harmonics, as textbooks list them, up to one factor for all. Turning the points turns
    these vectors by the irreducible representation.
    """
    x, y, z = points.unbind(-1)
    r = (points**2).sum(-1)
    columns = {
        1: (x, y, z),
        2: (math.sqrt(3) * x * z, math.sqrt(3) * y * z, math.sqrt(3) / 2 * (x**2 - y**2), math.sqrt(3) * x * y)
        + ((3 * z**2 - r) / 2,),
        3: (math.sqrt(3 / 8) * x * (5 * z**2 - r), math.sqrt(3 / 8) * y * (5 * z**2 - r))
        + (math.sqrt(15) / 2 * (x**2 - y**2) * z, math.sqrt(15) * x * y * z)
        + (math.sqrt(5 / 8) * (x**3 - 3 * x * y**2), math.sqrt(5 / 8) * (3 * x**2 * y - y**3))
        + (z * (5 * z**2 - 3 * r) / 2,),
    }
    return torch.stack(columns[spin], dim=-1)


def turned_harmonics(spin, rotation):
    """(2l + 1, 2l + 1) matrix D with Y(R x) = D Y(x) for all x, by least squares."""
    points = torch.randn(40, 3, dtype=torch.float64)
    before, after = harmonics(spin, points), harmonics(spin, points @ torch.from_numpy(rotation.as_matrix()).T)
    return torch.linalg.lstsq(before, after).solution.T


@pytest.mark.parametrize("spin", [1, 2, 3])
def test_exponentials_turn_harmonic_polynomials(spin):
    generators = spin_generators(spin)
    for seed in range(5):
        rotation = Rotation.random(random_state=seed)
        vector = torch.from_numpy(rotation.as_rotvec())
        found = reference.rotations(generators, vector[None])[0]
        # The least squares problem has a condition number below 100.
        torch.testing.assert_close(found, turned_harmonics(spin, rotation), atol=1e-12, rtol=0)


@pytest.mark.parametrize("spins", [(1,), (2,), (3,), (4,), (1, 2, 3), (0, 1, 1, 3), (9,)])
def test_generators_commute_as_rotations_do(spins):
    generators = representation(spins)
    size = sum(2 * spin + 1 for spin in spins)
    assert generators.shape == (3, size, size) and generators.dtype == torch.float64
    assert torch.equal(generators, -generators.mT)
    for axis in range(3):
        first, second, third = generators.roll(-axis, dims=0)
        assert (first @ second - second @ first - third).abs().max() <= EXACT * max(spins) ** 2
    # Casimir's operator −Σ L_a² is l(l + 1) in each of the blocks, which makes them irreducible.
    casimir = torch.cat([torch.full((2 * spin + 1,), float(spin * (spin + 1))) for spin in spins]).diag().double()
    torch.testing.assert_close(-(generators @ generators).sum(0), casimir, atol=EXACT * max(spins) ** 2, rtol=0)


def test_spin_one_rotates_the_axes_of_space():
    """The block is the rotation matrix itself: L_a b = e_a × b, with no rounding."""
    generators, axes = spin_generators(1), torch.eye(3, dtype=torch.float64)
    for axis, generator in zip(axes, generators):
        assert torch.equal(generator, torch.linalg.cross(axis.expand(3, 3), axes).T)
