"""
Generated tokens with orientations: which of them has a given orientation relative to the query?

A sample has eight tokens. The first is the query. The others carry one of four classes, and one of them, the target,
is turned from the query by `RELATIVE`, up to `NOISE`. The class of the target is the label of the query. An orientation
is a rotation from body to world, R(target) = R(query) R(relative), so that no answer changes if the world is turned,
R → G R for all tokens. The largest angle of the query is a setting: a model that is trained near the world's axes and
asked in all directions has to know this.
"""

import math

import numpy as np

from training.data.augmentation import IGNORED_LABEL


SPLITS = ("train", "validation")
DEFAULT_SIZES = {"train": 51200, "validation": 2000}
TOKENS, CLASSES = 8, 4
# Rotation vector from the query to the target, in radians, in the query's frame.
RELATIVE = (0.0, 0.0, 2.0)
# Standard deviation of the target's orientation about each axis, in radians.
NOISE = 0.1
# Samples that are drawn together; the samples of a split are the same however many are drawn.
CHUNK = 1024


def pose_columns(split: str, count: int, largest_angle: float) -> dict[str, np.ndarray]:
    """
    Args:
        largest_angle: the largest angle between the query's axes and the world's, in degrees. At 180, all orientations
            are equally likely; other angles shrink their rotation vectors.

    Returns:
        `count` samples of N tokens: `features` (count, N, 5), the class as one of four channels, which are zero for the
        query, and a channel that marks the query; `positions` (count, N, 3), rotation vectors of the orientations;
        `matrices` (count, N, 9), the same as rotation matrices, row by row; `labels` (count, N), the class of the
        target at the query, and `IGNORED_LABEL` elsewhere.
    """
    chunks = [_chunk(split, chunk, largest_angle) for chunk in range(math.ceil(count / CHUNK))]
    return {name: np.concatenate([columns[name] for columns in chunks])[:count] for name in chunks[0]}


def _chunk(split: str, chunk: int, largest_angle: float) -> dict[str, np.ndarray]:
    rng = np.random.default_rng((SPLITS.index(split), chunk))
    # Normalised, four normal numbers are uniformly distributed rotations.
    orientations = rng.standard_normal((CHUNK, TOKENS, 4))  # quaternions, the real part first
    orientations /= np.linalg.norm(orientations, axis=-1, keepdims=True)
    query = quaternions(rotation_vectors(orientations[:, 0]) * (largest_angle / 180))  # (CHUNK, 4)
    targets, samples = rng.integers(1, TOKENS, CHUNK), np.arange(CHUNK)
    noise = quaternions(NOISE * rng.standard_normal((CHUNK, 3)))
    orientations[:, 0] = query
    orientations[samples, targets] = compose(compose(query, quaternions(np.array(RELATIVE))), noise)
    classes = rng.integers(CLASSES, size=(CHUNK, TOKENS))
    features = np.zeros((CHUNK, TOKENS, CLASSES + 1), np.float32)
    features[..., :CLASSES] = np.eye(CLASSES)[classes]
    features[:, 0] = np.eye(CLASSES + 1)[CLASSES]
    labels = np.full((CHUNK, TOKENS), IGNORED_LABEL)
    labels[:, 0] = classes[samples, targets]
    return {
        "features": features,
        "positions": rotation_vectors(orientations).astype(np.float32),
        "matrices": matrices(orientations).reshape(CHUNK, TOKENS, 9).astype(np.float32),
        "labels": labels,
    }


def quaternions(vectors: np.ndarray) -> np.ndarray:
    """Unit quaternions (…, 4), the real part first, of rotation vectors (…, 3)."""
    half = np.linalg.norm(vectors, axis=-1, keepdims=True) / 2
    # NumPy's sinc(x) is sin(πx) / (πx), finite at zero.
    return np.concatenate([np.cos(half), vectors / 2 * np.sinc(half / math.pi)], axis=-1)


def rotation_vectors(rotations: np.ndarray) -> np.ndarray:
    """Rotation vectors (…, 3), at most π long, of unit quaternions (…, 4)."""
    rotations = np.where(rotations[..., :1] < 0, -rotations, rotations)
    sines = np.linalg.norm(rotations[..., 1:], axis=-1, keepdims=True)
    half = np.arctan2(sines, rotations[..., :1])
    return 2 * rotations[..., 1:] / np.sinc(half / math.pi)


def compose(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """The product of unit quaternions (…, 4): the rotation `second`, then `first`."""
    a, b = first[..., :1], second[..., :1]
    u, v = first[..., 1:], second[..., 1:]
    real = a * b - (u * v).sum(axis=-1, keepdims=True)
    return np.concatenate([real, a * v + b * u + np.cross(u, v)], axis=-1)


def matrices(rotations: np.ndarray) -> np.ndarray:
    """Rotation matrices (…, 3, 3) of unit quaternions (…, 4)."""
    real, vector = rotations[..., :1, None], rotations[..., 1:]
    turned = np.cross(vector[..., None, :], np.eye(3))  # row i is vector × eᵢ
    return (
        (2 * real**2 - 1) * np.eye(3)
        + 2 * vector[..., :, None] * vector[..., None, :]
        + 2 * real * turned.swapaxes(-1, -2)
    )
