"""
Generated cameras and points: which cameras see the marked point?

A sample has four cameras and four points, one of which is marked. Every camera looks at one of the points, up to
`NOISE`. Its label is whether the marked point lies within `FIELD` of its optical axis, the z axis; it does for half of
the cameras. A point is a body that is turned at random, which means nothing. Most cameras stand on one side of the
points and look ahead, so that the scene has a frame; then a rigid motion moves the whole scene, P → G P, which changes
no label. The largest angle of this motion is a setting, as for the generated orientations (`poses.py`), and its
translation grows with it.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch

from hf_liere import matrix_to_rotation_vector, rotation_vector_to_matrix
from training.common.tasks import register_task
from training.data.augmentation import IGNORED_LABEL
from training.evidence.data.drawing import CHUNK, TurnedTask, draw_columns
from training.evidence.data.frames import columns_in, draw_rotations, pose_rows


CAMERAS, POINTS = 4, 4
# Half the angle of view, in radians.
FIELD = 0.4
# Standard deviation of the direction that a camera looks in, about each axis, in radians.
NOISE = 0.15
# Distance of the centres of cameras and points, and the standard deviation of both about them.
DISTANCE, SPREAD = 2.0, 0.7
# Standard deviation of the scene's translation on each axis if it is turned by up to 180 degrees.
FAR = 2.0


def view_columns(split: str, count: int, largest_angle: float) -> dict[str, np.ndarray]:
    """
    Args:
        largest_angle: the largest angle that the scene is turned by, in degrees. At 180, all orientations are equally
            likely; other angles shrink their rotation vectors, and the translations.

    Returns:
        `count` samples of N tokens, cameras first: `features` (count, N, 3), whether a token is a camera, the marked
        point or another point; `poses` (count, N, 16), matrices from body to world, row by row; `positions` (count, N,
        6), rotation vectors and translations of the poses; `orientations` (count, N, 3), `matrices` (count, N, 9) and
        `translations` (count, N, 3), their parts; `relative_matrices` and `relative_translations`, the same in the
        frame of the first camera; `marked_matrices` and `marked_translations`, in that of the marked point; `labels`
        (count, N), 1 for cameras that see the marked point, 0 for others, and `IGNORED_LABEL` for points.
    """
    return draw_columns(split, count, lambda rng: _chunk(rng, largest_angle))


@register_task
@dataclass
class Views(TurnedTask):
    name = "views"
    sizes = {"training": 38400, "evaluation": 2000}
    draw = staticmethod(view_columns)


def _chunk(rng: np.random.Generator, largest_angle: float) -> dict[str, np.ndarray]:
    def normal(*shape: int) -> torch.Tensor:
        return torch.from_numpy(rng.standard_normal((CHUNK, *shape)))

    motion = draw_rotations(rng, CHUNK) * largest_angle / 180  # (CHUNK, 3)
    moved = FAR * largest_angle / 180 * normal(3)
    turned = rotation_vector_to_matrix(draw_rotations(rng, CHUNK, POINTS))  # (CHUNK, points, 3, 3)
    cameras = SPREAD * normal(CAMERAS, 3)
    points = SPREAD * normal(POINTS, 3) + torch.tensor([0.0, 0.0, DISTANCE])
    # The first point is the marked one.
    seen = torch.from_numpy(rng.integers(POINTS, size=(CHUNK, CAMERAS)))
    looking = points.take_along_dim(seen.unsqueeze(-1), dim=1) - cameras  # (CHUNK, cameras, 3)
    axes = _looking_at(looking) @ rotation_vector_to_matrix(NOISE * normal(CAMERAS, 3))  # (CHUNK, cameras, 3, 3)
    to_marked = torch.nn.functional.normalize(points[:, :1] - cameras, dim=-1)
    sees = (axes[..., 2] * to_marked).sum(dim=-1) > math.cos(FIELD)  # (CHUNK, cameras)
    world = rotation_vector_to_matrix(motion).unsqueeze(1)  # (CHUNK, 1, 3, 3)
    rotations = world @ torch.cat([axes, turned], dim=1)  # (CHUNK, N, 3, 3)
    translations = (world @ torch.cat([cameras, points], dim=1).unsqueeze(-1)).squeeze(-1) + moved.unsqueeze(1)
    marked = slice(CAMERAS, CAMERAS + 1)
    kinds = np.repeat([0, 1, 2], [CAMERAS, 1, POINTS - 1])
    orientations = matrix_to_rotation_vector(rotations)
    columns = {
        "poses": pose_rows(rotations, translations),
        "positions": torch.cat([orientations, translations], dim=-1),
        "orientations": orientations,
        "matrices": rotations.flatten(-2),
        "translations": translations,
        **columns_in(rotations[:, :1], translations[:, :1], rotations, translations),
        **columns_in(rotations[:, marked], translations[:, marked], rotations, translations, name="marked"),
    }
    labels = np.full((CHUNK, CAMERAS + POINTS), IGNORED_LABEL)
    labels[:, :CAMERAS] = sees.numpy()
    features = np.broadcast_to(np.eye(3, dtype=np.float32)[kinds], (CHUNK, CAMERAS + POINTS, 3))
    return {"features": features, **{name: x.float().numpy() for name, x in columns.items()}, "labels": labels}


def _looking_at(directions: torch.Tensor) -> torch.Tensor:
    """(…, 3, 3) rotations whose z axis is along (…, 3) directions and whose x axis is level, across the y axis."""
    ahead = torch.nn.functional.normalize(directions, dim=-1)
    down = torch.tensor([0.0, 1.0, 0.0], dtype=ahead.dtype).expand_as(ahead)
    right = torch.nn.functional.normalize(torch.linalg.cross(down, ahead), dim=-1)
    return torch.stack([right, torch.linalg.cross(ahead, right), ahead], dim=-1)
