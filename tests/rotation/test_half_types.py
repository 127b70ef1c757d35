"""Rotations for queries and keys of half types: products in float32 where these types hide the difference."""

import pytest
import torch

from hf_liere.encoding.positions import TokenPositions
from hf_liere.fast.dispatch import plain_operations
from hf_liere.fast.scaling_and_squaring import exponential_dtype
from hf_liere.rotation.exponential import block_rotations, skew


@pytest.mark.parametrize("states", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("block_size", [8, 64])
@pytest.mark.parametrize("times", [0.02, 0.1, 0.4, 1, 10])
@pytest.mark.parametrize("coordinates", ["train_grid", "centred_grid", "index"])
def test_half_types_get_rotations_that_are_exact_for_them(states, block_size, times, coordinates):
    """Around LieRE's initial norms, errors are less than a tenth of what rounding causes."""
    placed = TokenPositions.from_grid((14, 14), (14, 14), coordinates)
    generators = skew(2 * torch.pi * times * torch.rand(2, 1, 2, block_size * (block_size - 1) // 2), block_size)
    rays = placed.facts.rays()
    exact = block_rotations(placed.coordinates, generators.double(), torch.float64, rays)
    found = [block_rotations(placed.coordinates, generators, torch.float32, rays, states)]
    with plain_operations():
        found.append(block_rotations(placed.coordinates, generators, torch.float32, rays, states))
    for rotations in found:
        assert rotations.dtype == torch.float32
        assert (rotations.double() - exact).abs().max() < torch.finfo(states).eps / 2 / 10


def test_products_for_half_types_are_float32():
    squarings = torch.tensor([0, 5, 3])
    positions = torch.zeros(3, 2, dtype=torch.float64)
    assert exponential_dtype(positions, squarings, torch.bfloat16) == torch.float32
    assert exponential_dtype(positions, squarings + 1, torch.bfloat16) == torch.float64
    assert exponential_dtype(positions, squarings * 0, torch.float16) == torch.float64
    assert exponential_dtype(positions, squarings, torch.float32) == torch.float64
