import math

import pytest
import torch
from encoding_cases import GRID_CONVENTIONS
from transformers.models.dinov3_vit import modeling_dinov3_vit as dinov3

from hf_liere import LieREViTConfig, LieRotaryEmbedding, grid_positions
from hf_liere.encoding.given_positions import check_coordinates, check_shape
from hf_liere.encoding.placement import draw_displacements, draw_perturbation
from hf_liere.encoding.positions import TokenPositions


CPU = torch.device("cpu")


def draw_augmentation(grid, given=None, shift=0.0, jitter=None, rescale=None):
    strengths = {"position_shift": shift, "position_jitter": jitter, "position_rescale": rescale}
    return draw_displacements(LieREViTConfig(**strengths), grid, given, CPU)[1]


@pytest.mark.parametrize("size, trained", [(1, 4), (2, 4), (4, 4), (7, 4), (8, 4)])
def test_train_grid_is_linspace(size, trained):
    expected = torch.linspace(0, size / trained, size, dtype=torch.float64)
    torch.testing.assert_close(TokenPositions.from_grid((size,), (trained,), "train_grid").coordinates[:, 0], expected)
    fixed = torch.linspace(0, 1, size, dtype=torch.float64)
    torch.testing.assert_close(TokenPositions.from_grid((size,), (trained,), "fixed_grid").coordinates[:, 0], fixed)
    centred = TokenPositions.from_grid((size,), (trained,), "centred_grid").coordinates[:, 0]
    torch.testing.assert_close(centred, expected - (expected[0] + expected[-1]) / 2)
    assert torch.equal(centred, -centred.flip(0))


@pytest.mark.parametrize("coordinates", GRID_CONVENTIONS)
def test_offsets_are_patch_extents(coordinates):
    """Displacing every patch by one patch extent moves it to its neighbour's coordinate."""
    grid = (4, 5, 3)
    offsets = torch.ones(math.prod(grid), 3, dtype=torch.float64)
    positions, moved = (
        TokenPositions.from_grid(grid, grid, coordinates, offsets=given).coordinates.view(*grid, 3)
        for given in (None, offsets)
    )
    torch.testing.assert_close(moved[:-1, :-1, :-1], positions[1:, 1:, 1:])


@pytest.mark.parametrize("strength", [1e-3, 0.1, 0.5, 1.0, 5.0])
def test_perturbation_is_a_truncated_normal(strength):
    draws = draw_perturbation((300, 300), strength, CPU).flatten()
    assert draws.abs().max() <= 0.5
    # Kolmogorov–Smirnov against the truncated normal distribution; 1.95/√n is the 0.1% critical value.
    draws = draws.sort().values
    normal = torch.distributions.Normal(0.0, strength)
    low, high = normal.cdf(torch.tensor(-0.5).double()), normal.cdf(torch.tensor(0.5).double())
    expected = (normal.cdf(draws) - low) / (high - low)
    empirical = torch.arange(1, len(draws) + 1) / len(draws)
    assert (expected - empirical).abs().max() < 1.95 / math.sqrt(len(draws))


def test_bad_input():
    with pytest.raises(ValueError, match=r"\(3, 2\).*\(4, 2\).*\(5, 4, 2\)"):
        check_shape(torch.zeros(3, 2), 5, 4, 2)
    with pytest.raises(ValueError, match="torch.int64"):
        check_coordinates(torch.zeros(4, 2, dtype=torch.int64))
    with pytest.raises(ValueError, match="2 values that are not finite"):
        check_coordinates(torch.tensor([[0.0, math.nan], [math.inf, 1.0]]))


def test_other_coordinates_are_no_grid():
    positions = grid_positions((2, 3), "index", num_prefix_tokens=1, prefix_coordinate=0.5)
    expected, offsets = positions.coordinates.clone(), torch.randn(6, 2, dtype=torch.float64)
    assert positions.facts.grid == (2, 3) and positions.shape == expected.shape
    zero = positions.unrotate_prefix()
    assert zero.facts.grid == (2, 3) and not zero.coordinates[0].any()
    moved = positions.moved(offsets)
    assert moved.num_prefix_tokens == 1 and torch.equal(moved.coordinates[0], expected[0])
    torch.testing.assert_close(moved.coordinates[1:], expected[1:] + offsets, rtol=0, atol=1e-14)
    replaced = positions._replace(coordinates=expected + 1)
    assert {type(moved), type(replaced)} == {TokenPositions}
    assert positions.facts.grid == (2, 3) and torch.equal(positions.coordinates, expected)
    away = positions.to("meta")
    assert away.facts.grid == (2, 3) and away.coordinates.is_meta and replaced.to("meta").coordinates.is_meta


CHANGES = (
    lambda coordinates: coordinates.add_(0.5),
    lambda coordinates: coordinates[3].mul_(2),
    lambda coordinates: coordinates.requires_grad_(),
    lambda coordinates: coordinates.data.mul_(2),
    lambda coordinates: coordinates.numpy().fill(1),
)


@pytest.mark.parametrize("change, is_inference", [*((change, False) for change in CHANGES), (CHANGES[0], True)])
def test_a_grid_that_was_written_into_is_refused(change, is_inference):
    with torch.inference_mode(is_inference):
        grid = grid_positions((2, 3), "index")
        change(grid.coordinates)
        with pytest.raises(ValueError, match="changed in place; accepted: positions.moved"):
            grid.locate()


def test_a_graph_follows_coordinates_that_were_read():
    """Where it sees no change of them, they count as those of any tokens do; what is not read stays a grid."""
    rotary, states = LieRotaryEmbedding(1, 8, 2, block_size=4), torch.randn(1, 1, 6, 8)

    def rotate(states, change):
        grid = grid_positions((2, 3))
        if change:
            grid.coordinates.add_(change)
            assert grid.facts is None and grid.to("cpu").facts is None
        return rotary.rotate(states, grid)

    places = grid_positions((2, 3)).locate().coordinates
    compiled = torch.compile(rotate, backend="eager")
    for change in (0, 0.7):
        wanted = rotary.rotate(states, places + change)
        torch.testing.assert_close(compiled(states, change), wanted, rtol=0, atol=1e-6)


def dinov3_coordinates(grid, **strengths):
    """What transformers' DINOv3 computes, (N, A) from −1 to 1 on two axes."""
    coordinates = dinov3.get_patches_center_coordinates(*grid, dtype=torch.float64, device=CPU)
    return dinov3.augment_patches_center_coordinates(coordinates, **strengths)


@pytest.mark.parametrize("strengths", [{"shift": 0.5}, {"jitter": 1.5}, {"rescale": 3.0}])
def test_augmentation_is_that_of_dinov3(strengths):
    """
    Both are x ← (x + s) f. With the numbers s and f that fit ours, all patches agree; and s, log f are distributed as
    DINOv3's (Kolmogorov–Smirnov; 1.95 √(2/n) is the 0.1% critical value of two samples).
    """
    grid, count = (3, 5), 1000
    regular, offsets = dinov3_coordinates(grid), [draw_augmentation(grid, **strengths) for _ in range(count)]
    drawn = [TokenPositions.from_grid(grid, grid, "unit", offsets=one).coordinates * 2 - 1 for one in offsets]
    draws = []
    for places in (drawn, [dinov3_coordinates(grid, **strengths) for _ in range(count)]):
        places = torch.stack(places)  # (draws, N, A)
        factor = (places[:, -1:] - places[:, :1]) / (regular[-1] - regular[0])  # (draws, 1, A)
        shift = places[:, :1] / factor - regular[0]  # (draws, 1, A)
        torch.testing.assert_close(places, (regular + shift) * factor)
        draws.append(torch.cat([shift, factor.log()], -1).squeeze(1))
    ours, theirs = draws
    if "rescale" in strengths:
        torch.testing.assert_close(ours[:, 2], ours[:, 3])
    else:
        assert (ours[:, ::2] - ours[:, 1::2]).abs().max() > 0.1
    for one, other in zip(ours.T, theirs.T):
        if one.abs().max() < 1e-9:
            assert other.abs().max() < 1e-9
            continue
        both = torch.cat([one, other]).sort().values
        shares = [torch.searchsorted(x.sort().values, both, right=True) / count for x in (one, other)]
        assert (shares[0] - shares[1]).abs().max() < 1.95 * math.sqrt(2 / count)
