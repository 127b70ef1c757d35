"""Volumes of two bodies: their labels, their best guess, and the requests that they refuse."""

import itertools
from collections import Counter

import numpy as np
import pytest

from hf_liere.errors import InputError
from training.common.tasks import with_task
from training.data.sources import DataRequest
from training.data.video_data import VideoDataArguments, load_clips
from training.evidence.data import bodies


def test_the_label_is_the_class_of_a_distance_in_millimetres():
    """Found by the places of the discs in mm; without the spacing, the best guess is what the module states."""
    source, labels = bodies.Bodies("validation", 2000, 16), []
    assert np.array_equal(source[7][0].frames, bodies.Bodies("validation", 8, 16)[7][0].frames)
    for clip, label in (source[number] for number in range(2000)):
        cells = clip.frames[..., 0].reshape(4, 4, 4, 4, 4).swapaxes(2, 3)  # (slices, rows, columns, 4, 4)
        first, second = np.argwhere(cells.max(axis=(-2, -1)) >= 160)
        extents = np.array(clip.spacing) * (1, 4, 4)
        assert (extents >= bodies.EXTENTS[0]).all() and (extents <= bodies.EXTENTS[1]).all()
        distance = np.sqrt(sum((extents * (second - first)) ** 2))
        assert label == sum(distance > bound for bound in bodies.BOUNDS)
        labels.append(label)
    # Three standard errors of two thousand volumes.
    assert np.bincount(labels) / 2000 == pytest.approx(0.25, abs=0.03)
    # Without extents the steps between the cells are all that a volume tells; extents by the midpoint rule.
    extents = np.geomspace(*bodies.EXTENTS, 2 * 60 + 1)[1::2]
    drawn = np.stack(np.meshgrid(extents, extents, extents), axis=-1).reshape(-1, 3)
    pairs = Counter(
        tuple(sorted(np.abs(first - second)))
        for first, second in itertools.permutations(np.argwhere(np.ones((4, 4, 4))), 2)
    )
    guesses = {
        step: np.bincount(np.searchsorted(bodies.BOUNDS, np.linalg.norm(drawn * step, axis=1))).max() / len(drawn)
        for step in pairs
    }
    blind = sum(count * guesses[step] for step, count in pairs.items()) / pairs.total()
    assert blind == pytest.approx(bodies.BLIND_ACCURACY, abs=1e-3)


def test_three_further_channels_tell_the_extents_of_a_cell():
    low, high = bodies.EXTENTS
    for number in range(20):
        (plain, label), (clip, same) = (bodies.Bodies("validation", 20, 16, count)[number] for count in (1, 4))
        assert np.array_equal(clip.frames[..., :1], plain.frames) and same == label and clip.spacing == plain.spacing
        levels = np.unique(clip.frames[..., 1:].reshape(-1, 3), axis=0)
        assert len(levels) == 1
        # Half a level of 255 on a logarithmic scale.
        told = low * (high / low) ** (levels[0] / 255)
        assert told == pytest.approx(np.array(clip.spacing) * (1, 4, 4), rel=np.log(high / low) / 509)


def test_resampled_volumes_show_the_same_bodies_at_their_places_in_millimetres():
    for number in range(20):
        (plain, label), (clip, same) = (
            bodies.Bodies("validation", 20, 16)[number],
            bodies.Bodies("validation", 20, 32, resampled=True)[number],
        )
        assert clip.spacing == (4.0, 4.0, 4.0) and clip.frames.shape == (32, 32, 32, 1) and same == label
        # The voxel of the volume at the centre of one of 4 mm, looked up one by one.
        for place in np.random.default_rng(number).integers(32, size=(200, 3)):
            source = tuple(int(x) for x in (place + 0.5) * 4.0 / np.array(plain.spacing))
            value = plain.frames[source][0] if max(source[0] / 4, source[1] / 16, source[2] / 16) < 1 else 0
            assert clip.frames[tuple(place)][0] == value


@pytest.mark.parametrize(
    "size, task, asked, message",
    [
        (18, {}, {}, "Bodies of 18 px cannot be drawn; accepted: multiples of 4 px from 16 on"),
        (16, {}, {"num_frames": 5}, "--num_frames 5: bodies have 4 slices; accepted: as many"),
        (16, {"resampled": True}, {"num_frames": 32}, "Resampled bodies of 16 px; accepted: 32 px"),
        (16, {}, {"num_channels": 3}, "--num_channels 3: accepted: 1, or 4, of which three"),
    ],
)
def test_requests_that_bodies_do_not_fit(size, task, asked, message):
    arguments = with_task(VideoDataArguments, "bodies")(dataset_name="bodies", **task)
    with pytest.raises(InputError, match=message):
        load_clips(arguments, DataRequest((size, size), **{"num_channels": 1, "num_frames": 4, **asked}))
