"""
Generated tokens with orientations: which of them has a given orientation relative to the query?

A sample has eight tokens. The first is the query. The others carry one of four classes, and one of them, the target,
is turned from the query by `RELATIVE`, up to `NOISE`. The class of the target is the label of the query. An orientation
is a rotation from body to world, R(target) = R(query) R(relative), so that no answer changes if the world is turned,
R → G R for all tokens. The largest angle of the query is a setting: a model that is trained near the world's axes and
asked in all directions has to know this. Guessing the most frequent class of a sample is right with probability
`BAG_OF_CLASSES_ACCURACY` = 45.5%.
"""

from dataclasses import dataclass

import numpy as np
import torch

from hf_liere import matrix_to_rotation_vector, rotation_vector_to_matrix
from training.common.tasks import register_task
from training.data.augmentation import IGNORED_LABEL
from training.evidence.data.drawing import CHUNK, TurnedTask, draw_columns
from training.evidence.data.frames import columns_in, draw_rotations, pose_rows


TOKENS, CLASSES = 8, 4
# E[max of multinomial(7, ¼)] / 7, the expected share of the most frequent class.
BAG_OF_CLASSES_ACCURACY = 0.455078125
# Rotation vector from the query to the target, in radians, in the query's frame.
RELATIVE = (0.0, 0.0, 2.0)
# Standard deviation of the target's orientation about each axis, in radians.
NOISE = 0.1


def pose_columns(split: str, count: int, largest_angle: float) -> dict[str, np.ndarray]:
    """
    Args:
        largest_angle: the largest angle between the query's axes and the world's, in degrees. At 180, all orientations
            are equally likely; other angles shrink their rotation vectors.

    Returns:
        `count` samples of N tokens: `features` (count, N, 5), the class as one of four channels, which are zero for the
        query, and a channel that marks the query; `positions` (count, N, 3), rotation vectors of the orientations;
        `matrices` (count, N, 9), the same as rotation matrices, row by row; `poses` (count, N, 16), the same at one
        place; `relative_matrices` (count, N, 9), in the frame of the query, and `relative_translations` (count, N, 3),
        which are zero; `labels` (count, N), the class of the target at the query, and `IGNORED_LABEL` elsewhere.
    """
    return draw_columns(split, count, lambda rng: _chunk(rng, largest_angle))


@register_task
@dataclass
class Poses(TurnedTask):
    name = "poses"
    sizes = {"training": 51200, "evaluation": 2000}
    draw = staticmethod(pose_columns)


def _chunk(rng: np.random.Generator, largest_angle: float) -> dict[str, np.ndarray]:
    vectors = draw_rotations(rng, CHUNK, TOKENS)  # (CHUNK, N, 3)
    vectors[:, 0] *= largest_angle / 180
    rotations = rotation_vector_to_matrix(vectors)  # (CHUNK, N, 3, 3)
    targets, samples = rng.integers(1, TOKENS, CHUNK), np.arange(CHUNK)
    noise = torch.from_numpy(NOISE * rng.standard_normal((CHUNK, 3)))
    relative = rotation_vector_to_matrix(torch.tensor(RELATIVE, dtype=noise.dtype)) @ rotation_vector_to_matrix(noise)
    rotations[samples, targets] = rotations[:, 0] @ relative
    classes = rng.integers(CLASSES, size=(CHUNK, TOKENS))
    features = np.zeros((CHUNK, TOKENS, CLASSES + 1), np.float32)
    features[..., :CLASSES] = np.eye(CLASSES)[classes]
    features[:, 0] = np.eye(CLASSES + 1)[CLASSES]
    labels = np.full((CHUNK, TOKENS), IGNORED_LABEL)
    labels[:, 0] = classes[samples, targets]
    columns = {
        "positions": matrix_to_rotation_vector(rotations),
        "matrices": rotations.flatten(-2),
        "poses": pose_rows(rotations, 0.0),
        **columns_in(rotations[:, :1], 0.0, rotations, torch.zeros_like(vectors)),
    }
    return {"features": features, **{name: x.float().numpy() for name, x in columns.items()}, "labels": labels}
