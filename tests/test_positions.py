import math

import pytest
import torch

from hf_liere.models.positions import check_positions, of_grid, perturbation, with_prefix


def test_raster_order_and_conventions():
    index = of_grid((2, 3), (2, 3), "index").coordinates
    assert index.tolist() == [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2]]
    unit = of_grid((2, 4), (2, 4), "unit").coordinates
    assert unit[0].tolist() == [0.25, 0.125] and unit[-1].tolist() == [0.75, 0.875]


@pytest.mark.parametrize("size, trained", [(1, 4), (2, 4), (4, 4), (7, 4), (8, 4)])
def test_train_grid_is_linspace(size, trained):
    expected = torch.linspace(0, size / trained, size, dtype=torch.float64)
    torch.testing.assert_close(of_grid((size,), (trained,), "train_grid").coordinates[:, 0], expected)


@pytest.mark.parametrize("coordinates", ["index", "train_grid", "train_index", "unit", "unit_width"])
def test_offsets_are_patch_extents(coordinates):
    """Displacing every patch by one patch extent moves it to its neighbour's coordinate."""
    grid = (4, 5, 3)
    offsets = torch.ones(math.prod(grid), 3, dtype=torch.float64)
    positions, moved = (
        of_grid(grid, grid, coordinates, offsets=given).coordinates.view(*grid, 3) for given in (None, offsets)
    )
    torch.testing.assert_close(moved[:-1, :-1, :-1], positions[1:, 1:, 1:])


@pytest.mark.parametrize("strength", [1e-3, 0.1, 0.5, 1.0, 5.0])
def test_perturbation_is_a_truncated_normal(strength):
    draws = perturbation((300, 300), strength, None).flatten()
    assert draws.abs().max() <= 0.5
    # Kolmogorov–Smirnov against the truncated normal distribution; 1.95/√n is the 0.1% critical value.
    draws = draws.sort().values
    normal = torch.distributions.Normal(0.0, strength)
    low, high = normal.cdf(torch.tensor(-0.5).double()), normal.cdf(torch.tensor(0.5).double())
    expected = (normal.cdf(draws) - low) / (high - low)
    empirical = torch.arange(1, len(draws) + 1) / len(draws)
    assert (expected - empirical).abs().max() < 1.95 / math.sqrt(len(draws))


def test_perturbation_has_no_mass_at_the_border():
    """Clamping, as the official code does, would put a third of the draws on the border at strength 1."""
    draws = perturbation((100, 100), 1.0, None)
    assert (draws.abs() == 0.5).sum() == 0


def test_prefix_sits_before_the_patches():
    positions = torch.rand(2, 5, 3)
    extended = with_prefix(positions, 2, 0.5)
    assert extended.shape == (2, 7, 3)
    assert (extended[:, :2] == 0.5).all() and torch.equal(extended[:, 2:], positions)


def test_bad_input():
    with pytest.raises(
        ValueError, match="'pixels' must be one of 'index', 'train_grid', 'train_index', 'unit', 'unit_width'"
    ):
        of_grid((2,), (2,), "pixels")
    with pytest.raises(ValueError, match=r"\(3, 2\).*\(4, 2\).*\(5, 4, 2\)"):
        check_positions(torch.zeros(3, 2), 5, 4, 2)
    with pytest.raises(ValueError, match="torch.int64"):
        check_positions(torch.zeros(4, 2, dtype=torch.int64), 5, 4, 2)
    with pytest.raises(ValueError, match="2 values that are not finite"):
        check_positions(torch.tensor([[0.0, math.nan], [math.inf, 1.0]]), 1, 2, 2)
