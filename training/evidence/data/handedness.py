"""
Carbon atoms with their four neighbours: which hand are they, R or S?

A sample is a carbon atom of a molecule, or its mirror image, with the four atoms that it is bound to. Its features are
the element of each atom, those of the atoms bound to it, and its distance from the centre. They are equal in mirror
images, whose labels are not: without orientations, exactly half of the answers are right.

Every atom has a frame that its surroundings determine. The x axis of a neighbour points to the centre, and another atom
that it is bound to lies beside it. The frame of the centre is made in the same way from two neighbours. Which atoms
these are is drawn at random.

The file is one of `evidence/carbon_centres.py`. Molecules with equal scaffolds are all for training or all for the
evaluation, those without rings for training. Scaffolds are drawn, and a centre of each: the evaluation has one of every
scaffold. Every centre comes with its mirror image.
"""

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch

from hf_liere.errors import InputError
from training.common.tasks import SPLITS, register_task
from training.evidence.data.drawing import StructuresTask
from training.evidence.data.frames import columns_in, frames_of, turned_columns
from training.evidence.data.molecules import Centres


TRAINING_SAMPLES = 128000
LABELS = ("R", "S")
# Atomic numbers with a channel of their own; all others share one.
ELEMENTS = (1, 6, 7, 8, 9, 15, 16, 17, 35, 53)
# One scaffold of so many is for the evaluation.
EVALUATED = 5
# Sine of the smallest angle at a neighbour between the centre and the atom beside it.
STRAIGHT = 0.1


def handedness_columns(file: str, split: str, limit: int | None, largest_angle: float) -> dict[str, np.ndarray]:
    """
    Args:
        limit: the number of samples, by default two for each scaffold.
        largest_angle: of the random rotation of each sample from the frame of its molecule, in degrees.

    Returns:
        Columns of N = 5 tokens, the centre first: `features` (samples, N, 24) and `labels` (samples,); those of
        [`turned_columns`], in Å; `ordered_matrices` (samples, N, 9) and `ordered_translations` (samples, N, 3), in the
        frame of the centre that [`ordered_columns`] makes of its neighbours.
    """
    centres, seed = select(read_centres(file), split), SPLITS.index(split)
    count = limit or 2 * len(np.unique(centres.scaffolds))
    # A centre and its mirror image follow each other.
    chosen = np.repeat(_draw(centres, (count + 1) // 2, split, np.random.default_rng((seed, 0))), 2)[:count]
    mirrored = np.arange(len(chosen)) % 2 == 1
    mirror = np.where(mirrored[:, None], [-1.0, 1.0, 1.0], 1.0)  # (samples, 3)
    places, further = centres.places[chosen] * mirror[:, None], centres.further[chosen] * mirror[:, None, None]
    rotations = _frames(places, further, np.random.default_rng((seed, 1)))
    translations = np.concatenate([np.zeros_like(places[:, :1]), places], axis=1)
    turned = turned_columns(rotations, translations, largest_angle, np.random.default_rng((seed, 2)))
    names = np.where(centres.is_r[chosen] != mirrored, *LABELS)
    ordered = ordered_columns(centres.numbers[chosen], centres.spheres[chosen], turned)
    return {"features": _features(centres)[chosen], **turned, **ordered, "labels": names}


@register_task
@dataclass
class Handedness(StructuresTask):
    name = "handedness"
    sizes = {"training": TRAINING_SAMPLES, "evaluation": None}
    read = staticmethod(handedness_columns)


def select(centres: Centres, split: str) -> Centres:
    evaluated = (centres.scaffolds % EVALUATED == 0) & (centres.scaffolds != 0)
    wanted = evaluated if split != "train" else ~evaluated
    return Centres(*(values[wanted] for values in vars(centres).values()))


def _draw(centres: Centres, count: int, split: str, rng: np.random.Generator) -> np.ndarray:
    """Numbers of centres: one of each of `count` scaffolds, which may be drawn again for training."""
    order = centres.scaffolds.argsort(kind="stable")
    _, first, sizes = np.unique(centres.scaffolds[order], return_index=True, return_counts=True)
    if split == "train":
        shares = rng.random((count, 2))
        drawn = (shares[:, 0] * len(sizes)).astype(int)
    else:
        shares = rng.random((len(sizes), 2))[:count]
        drawn = rng.permutation(len(sizes))[:count]
    return order[first[drawn] + (shares[:, 1] * sizes[drawn]).astype(int)]


def _features(centres: Centres) -> np.ndarray:
    """(centres, 5, 24): marks of the centre, elements, numbers of each element around, distances from the centre."""
    count = len(centres.is_r)
    numbers = np.concatenate([np.full((count, 1), 6), centres.numbers], axis=1)  # (centres, 5)
    own = np.zeros((count, 1, centres.spheres.shape[-1]), centres.spheres.dtype)
    own[:, 0, : centres.numbers.shape[1]] = centres.numbers
    spheres = np.concatenate([own, centres.spheres], axis=1)  # (centres, 5, 8)
    kinds, around = _kinds(numbers), _kinds(spheres).sum(axis=-2)  # (centres, 5, 11)
    distances = np.pad(np.linalg.norm(centres.places, axis=-1), ((0, 0), (1, 0)))[..., None]
    marks = np.broadcast_to(np.eye(5)[:, :1], (count, 5, 1))
    return np.concatenate([marks, kinds, around, distances], axis=-1).astype(np.float32)


def ordered_columns(numbers: np.ndarray, spheres: np.ndarray, columns: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """
    Poses in a frame that their molecule determines: of the neighbours in order, the x axis points from the centre to
    the first one, and the second one lies in the half-plane of positive y. Atoms with larger numbers come first, then
    those with a larger sum of the numbers around them, then those farther from the centre.

    Args:
        numbers, spheres: (samples, 4) and (samples, 4, 8), those of [`Centres`].
        columns: `matrices` (samples, 5, 9) and `translations` (samples, 5, 3).
    """
    places = columns["translations"].astype(np.float64)  # (samples, 5, 3)
    centre, around = places[:, :1], places[:, 1:]
    distances = np.linalg.norm(around - centre, axis=-1)
    order = np.lexsort((-distances, -spheres.sum(axis=-1, dtype=int), -numbers.astype(int)), axis=-1)  # (samples, 4)
    first, second = (np.take_along_axis(around, order[:, n : n + 1, None], axis=1) for n in range(2))
    rotations = columns["matrices"].astype(np.float64).reshape(*places.shape, 3)
    given = (frames_of(centre, first, second), centre, rotations, places)
    ordered = columns_in(*map(torch.from_numpy, given), name="ordered")
    return {name: values.float().numpy() for name, values in ordered.items()}


def _kinds(numbers: np.ndarray) -> np.ndarray:
    """(…) atomic numbers → (…, 11), one channel for each of `ELEMENTS` and one for all others; zeros for 0."""
    own = numbers[..., None] == ELEMENTS
    other = (numbers > 0) & ~own.any(axis=-1)
    return np.concatenate([own, other[..., None]], axis=-1)


def _frames(places: np.ndarray, further: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """
    (samples, 5, 3, 3) frames of a centre, which lies at the origin, and its neighbours.

    Args:
        places: (samples, 4, 3), of the neighbours.
        further: (samples, 4, 3, 3), of other atoms bound to them, NaN where there are fewer.
    """
    shares = rng.random((len(places), 4, 1 + further.shape[2]))
    order = shares[..., 0].argsort(axis=1)
    first, second, third = (np.take_along_axis(places, order[:, n : n + 1, None], axis=1) for n in range(3))
    # Hydrogen has no other atom, and one on the line through the centre makes no frame: then another neighbour of the
    # centre lies beside.
    along = further - places[:, :, None]
    sines = np.linalg.norm(np.cross(along, places[:, :, None]), axis=-1) / np.linalg.norm(along, axis=-1)
    sines = sines / np.linalg.norm(places, axis=-1)[..., None]  # (samples, 4, 3)
    usable = sines > STRAIGHT
    drawn = np.where(usable, shares[..., 1:], -1).argmax(axis=-1)  # (samples, 4)
    beside = np.take_along_axis(further, drawn[..., None, None], axis=2)[:, :, 0]
    is_first = order[:, :1] == np.arange(4)  # (samples, 4)
    instead = np.where(is_first[..., None], second, first)
    beside = np.where(usable.any(axis=-1)[..., None], beside, instead)
    origin = np.zeros_like(first)
    return np.concatenate([frames_of(origin, first, third), frames_of(places, origin, beside)], axis=1)


@lru_cache(maxsize=1)
def read_centres(file: str) -> Centres:
    """
    The centres of a file.

    Raises:
        InputError: if it is missing or no file of `training/evidence/carbon_centres.py`.
    """
    if not Path(file).is_file():
        raise InputError(f"--structures {file!r} is not a file; accepted: one of evidence/carbon_centres.py.")
    try:
        with np.load(file, allow_pickle=False) as arrays:
            return Centres(**arrays)
    except (OSError, ValueError, TypeError, EOFError) as error:
        raise InputError(
            f"--structures {file!r} cannot be read: {error}; accepted: a file of evidence/carbon_centres.py."
        ) from error
