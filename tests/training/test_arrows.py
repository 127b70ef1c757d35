"""The arrows task: what stands in an image, and that nothing but the Y and its arrow tells the label."""

import itertools
import math
from collections import Counter

import numpy as np
import pytest
import training_helpers  # noqa: F401 (makes training importable)

from training.data.arrows import (
    BAG_OF_ARROWS_ACCURACY,
    BAG_OF_CLIP_ARROWS_ACCURACY,
    CELL,
    CLIP_LABELS,
    CLIP_STEPS,
    LABELS,
    NUM_ARROWS,
    STEPS,
    Arrows,
    rectangles,
)


FIRST_Y, FIRST_LETTER = 4, 8


@pytest.fixture(scope="module")
def scenes():
    images = Arrows("train", 6000)
    return [images.scene(index) for index in range(len(images))]


def dependence(first, second):
    """Pearson's chi-square of two numbers from 0 on of the same scenes."""
    observed = np.zeros((max(first) + 1, max(second) + 1))
    np.add.at(observed, (first, second), 1)
    expected = observed.sum(1, keepdims=True) * observed.sum(0, keepdims=True) / len(first)
    return ((observed - expected) ** 2 / expected).sum()


@pytest.mark.parametrize("rectangular", [False, True], ids=["squares", "rectangles"])
@pytest.mark.parametrize("image_size, grid", [(108, 9), (168, 14), (276, 23), (60, 5)])
def test_every_scene_asks_one_question_with_one_answer(image_size, grid, rectangular):
    images = Arrows("train", 300, image_size, rectangular=rectangular)
    shapes = {images.grid(index) for index in range(300)}
    assert shapes == (set(rectangles(grid)) if rectangular else {(grid, grid)})
    for index in range(300):
        stamps, cells, label = images.scene(index)
        rows, columns = images.grid(index)
        assert len(set(cells.tolist())) == 14 and cells.min() >= 0 and cells.max() < rows * columns <= grid**2
        arrows = {cell: stamp for stamp, cell in zip(stamps.tolist(), cells.tolist()) if stamp < FIRST_Y}
        assert len(arrows) == NUM_ARROWS
        ((base, y_cell),) = [
            (stamp - FIRST_Y, cell) for stamp, cell in zip(stamps, cells) if FIRST_Y <= stamp < FIRST_LETTER
        ]
        assert sorted(stamp for stamp in stamps if stamp >= FIRST_LETTER) == list(range(FIRST_LETTER, FIRST_LETTER + 5))
        row, column = divmod(int(y_cell), columns)
        on_ray = []
        while True:
            row, column = row + STEPS[base][0], column + STEPS[base][1]
            if not (0 <= row < rows and 0 <= column < columns):
                break
            if row * columns + column in arrows:
                on_ray.append(arrows[row * columns + column])
        assert on_ray == [label]


@pytest.mark.parametrize("rectangular", [False, True], ids=["squares", "rectangles"])
def test_the_image_shows_the_scene(rectangular):
    images = Arrows("validation", 50, rectangular=rectangular)
    for index in range(50):
        image, label = images[index]
        stamps, cells, scene_label = images.scene(index)
        rows, columns = images.grid(index)
        assert image.shape == (12 * rows, 12 * columns, 1) and image.dtype == np.uint8 and label == scene_label
        inked = {
            (row, column)
            for row, column in itertools.product(range(rows), range(columns))
            if (image[row * CELL : (row + 1) * CELL, column * CELL : (column + 1) * CELL] == 0).any()
        }
        assert inked == {divmod(int(cell), columns) for cell in cells}


def test_rectangles_have_as_many_cells_as_fit():
    assert rectangles(9) == ((5, 16), (6, 13), (7, 11), (8, 10), (9, 9), (10, 8), (11, 7), (13, 6), (16, 5))
    assert rectangles(5) == ((5, 5),)
    labels = np.array([Arrows("train", 4000, rectangular=True).scene(index)[2] for index in range(4000)])
    grids = [Arrows("train", 4000, rectangular=True).grid(index) for index in range(4000)]
    numbers = np.array([rectangles(9).index(grid) for grid in grids])
    counts = np.zeros((9, 4))
    np.add.at(counts, (numbers, labels), 1)
    # Every shape and label is as frequent, and they are independent: 35 degrees of freedom, the 0.1% quantile.
    assert ((counts - 4000 / 36) ** 2 / (4000 / 36)).sum() < 66.6


def test_arrows_and_ys_point_where_they_should():
    """An arrow's head and a Y's arms hold more ink than the other half."""
    images = Arrows("train", 200)
    seen = set()
    for index in range(200):
        image, _ = images[index]
        for stamp, cell in zip(*images.scene(index)[:2]):
            if stamp >= FIRST_LETTER:
                continue
            row, column = divmod(int(cell), 9)
            ink = image[row * CELL : (row + 1) * CELL, column * CELL : (column + 1) * CELL, 0] == 0
            toward = STEPS[stamp % 4]
            halves = [ink[:6].sum() - ink[6:].sum(), ink[:, :6].sum() - ink[:, 6:].sum()]
            heavy = -(toward[0] * halves[0] + toward[1] * halves[1])
            assert heavy > 0 if stamp < FIRST_Y else heavy < 0
            seen.add(int(stamp))
    assert seen == set(range(8))


def test_images_depend_on_seed_split_and_index_only():
    first, again = Arrows("train", 20), Arrows("train", 50_000)
    for index in range(20):
        assert np.array_equal(first[index][0], again[index][0]) and first[index][1] == again[index][1]
    for other in (Arrows("train", 20, seed=1), Arrows("validation", 20), Arrows("test", 20)):
        assert not any(np.array_equal(first[index][0], other[index][0]) for index in range(20))
    assert len({first[index][0].tobytes() for index in range(20)}) == 20


def test_labels_are_uniform_and_independent_of_everything_else(scenes):
    """Pearson's chi-square of the label against what a shortcut could use; 0.1% quantiles of chi-square."""
    labels = np.array([label for _, _, label in scenes])
    bases = np.array([stamps[1] - FIRST_Y for stamps, _, _ in scenes])
    y_rows = np.array([cells[1] // 9 for _, cells, _ in scenes])
    target_columns = np.array([cells[0] % 9 for _, cells, _ in scenes])
    distances = np.array(
        [sum(map(abs, np.subtract(divmod(cells[0], 9), divmod(cells[1], 9)))) for _, cells, _ in scenes]
    )
    counts = np.bincount(labels, minlength=4)
    assert ((counts - len(labels) / 4) ** 2 / (len(labels) / 4)).sum() < 16.27
    for other, quantile in ((bases, 27.88), (y_rows, 51.18), (target_columns, 51.18), (distances - 1, 46.80)):
        assert dependence(labels, other) < quantile
    assert np.bincount(bases, minlength=4).min() > len(labels) / 4 * 0.9


def test_counting_arrows_is_right_in_44_percent(scenes):
    exact = sum(max(Counter(d).values()) for d in itertools.product(range(4), repeat=NUM_ARROWS))
    assert exact / (NUM_ARROWS * 4**NUM_ARROWS) == BAG_OF_ARROWS_ACCURACY
    right = 0
    for stamps, _, label in scenes:
        right += np.bincount(stamps[stamps < FIRST_Y], minlength=4).argmax() == label
    assert abs(right / len(scenes) - BAG_OF_ARROWS_ACCURACY) < 3.3 * np.sqrt(0.25 / len(scenes))
    assert len(LABELS) == 4


@pytest.fixture(scope="module")
def clips():
    return Arrows("train", 3000, 60, num_frames=4)


def test_clips_ask_one_question_across_frames(clips):
    num_directions, labels, bases, frames = len(CLIP_LABELS), [], [], []
    for index in range(len(clips)):
        stamps, cells, label = clips.scene(index)
        places = dict(zip(zip(*(axis.tolist() for axis in np.unravel_index(cells, (4, 5, 5)))), stamps.tolist()))
        assert len(places) == 14 and clips.grid(index) == (4, 5, 5)
        arrows = {place: stamp for place, stamp in places.items() if stamp < num_directions}
        ((place, base),) = [
            (p, s - num_directions) for p, s in places.items() if num_directions <= s < 2 * num_directions
        ]
        assert len(arrows) == NUM_ARROWS
        bases.append(base)
        frames.append(place[0])
        on_ray = []
        while all(0 <= at < size for at, size in zip(place, (4, 5, 5))):
            on_ray.append(arrows.get(place))
            place = tuple(np.add(place, CLIP_STEPS[base]).tolist())
        assert [stamp for stamp in on_ray if stamp is not None] == [label]
        labels.append(label)
    # 0.1% quantiles of chi-square: labels and directions of the Y are uniform, and the label tells nothing of its
    # direction and frame.
    for numbers in (labels, bases):
        assert ((np.bincount(numbers, minlength=6) - 500) ** 2 / 500).sum() < 20.52
    for other, quantile in ((bases, 52.62), (frames, 37.70)):
        assert dependence(labels, other) < quantile
    assert np.array_equal(CLIP_STEPS[:4, 1:], STEPS) and CLIP_LABELS[:4] == LABELS


def test_clips_depend_on_seed_split_and_index_only(clips):
    again = Arrows("train", 50_000, 60, num_frames=4)
    others = [Arrows("train", 20, 60, seed=1, num_frames=4), Arrows("validation", 20, 60, num_frames=4)]
    for index in range(20):
        assert np.array_equal(clips[index][0], again[index][0])
        assert not any(np.array_equal(clips[index][0], other[index][0]) for other in others)


def test_clips_show_their_scenes(clips):
    """Every stamp has one picture, and no two have the same."""
    pictures = {}
    for index in range(300):
        frames, label = clips[index]
        stamps, cells, scene_label = clips.scene(index)
        assert frames.shape == (4, 60, 60, 1) and frames.dtype == np.uint8 and label == scene_label
        tiles = frames.reshape(4, 5, CELL, 5, CELL).swapaxes(2, 3).reshape(100, CELL, CELL)
        assert set(np.flatnonzero((tiles == 0).any(axis=(1, 2)))) == set(cells.tolist())
        for stamp, cell in zip(stamps.tolist(), cells):
            pictures.setdefault(stamp, set()).add(tiles[cell].tobytes())
    assert sorted(pictures) == list(range(2 * 6 + 5))
    assert len(set.union(*pictures.values())) == sum(map(len, pictures.values())) == 17


def test_counting_arrows_of_clips_is_right_in_37_percent(clips):
    # Of every choice of eight directions the highest count, times the number of orders in which they can be drawn.
    choices = [Counter(d).values() for d in itertools.combinations_with_replacement(range(6), NUM_ARROWS)]
    orders = [math.factorial(NUM_ARROWS) // math.prod(map(math.factorial, counts)) for counts in choices]
    exact = sum(max(counts) * number for counts, number in zip(choices, orders))
    assert sum(orders) == 6**NUM_ARROWS and exact / (NUM_ARROWS * 6**NUM_ARROWS) == BAG_OF_CLIP_ARROWS_ACCURACY
    scenes = map(clips.scene, range(len(clips)))
    right = sum(np.bincount(stamps[stamps < 6], minlength=6).argmax() == label for stamps, _, label in scenes)
    assert abs(right / len(clips) - BAG_OF_CLIP_ARROWS_ACCURACY) < 3.3 * np.sqrt(0.25 / len(clips))


def test_what_cannot_be_drawn_is_refused():
    with pytest.raises(ValueError, match="2 frames or more, not 1"):
        Arrows("train", image_size=60, num_frames=1)
    with pytest.raises(ValueError, match="110 px cannot be drawn; accepted: multiples of 12 px, .*108, 168"):
        Arrows("train", image_size=110)
    with pytest.raises(ValueError, match="no split 'training'; accepted: train, validation, test"):
        Arrows("training")
    with pytest.raises(IndexError, match="has 3 arrows images, no number 3"):
        Arrows("train", 3)[3]
