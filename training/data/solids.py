"""Points on the surfaces of generated solids: upright prisms, classified by their ground plan.

Each token is a point with a position on three axes. Its only feature is the vertical component of the surface normal,
−1, 0 or 1. Heights vary, so the numbers of points on top, bottom and sides reveal almost nothing about the class: the
positions do. Training and evaluation differ in the number of points and in the rotation about the vertical axis, from
the first or the second half of the circle.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from hf_liere.errors import InputError
from training.common.arguments import flag
from training.common.tasks import SPLITS, Task, register_task


# Standard deviation of the measured positions, in units of the plan's radius.
NOISE = 0.02


def _circle(radius: float, corners: int = 48) -> np.ndarray:
    angles = np.arange(corners) * (2 * math.pi / corners)
    return radius * np.stack([np.cos(angles), np.sin(angles)], axis=1)


# The right and the upper arm; the others lie opposite.
CROSS = np.array([(0.3, -0.95), (0.3, -0.3), (0.95, -0.3), (0.95, 0.3), (0.3, 0.3), (0.3, 0.95)])
# Ground plans as closed outlines, (corners, 2) each, in the unit circle. A point in an odd number of them is inside.
PLANS = {
    "triangle": [_circle(1.0, 3)],
    "square": [_circle(1.0, 4)],
    "disc": [_circle(0.9)],
    "ring": [_circle(0.95), _circle(0.55)],
    "angle": [np.array([[-0.7, -0.7], [0.7, -0.7], [0.7, -0.1], [-0.1, -0.1], [-0.1, 0.7], [-0.7, 0.7]])],
    "cross": [np.array([*CROSS, *(-CROSS)])],
}
LABELS = tuple(PLANS)


def solid(split: str, index: int, num_points: tuple[int, int]) -> tuple[np.ndarray, np.ndarray, int]:
    """
    Args:
        num_points: the smallest and the largest number of points.

    Returns:
        (N, 1) features and (N, 3) positions, float32, and the label, an index into `LABELS`.
    """
    rng = np.random.default_rng((SPLITS.index(split), index))
    label, count = int(rng.integers(len(LABELS))), int(rng.integers(num_points[0], num_points[1] + 1))
    outlines, height = PLANS[LABELS[label]], rng.uniform(0.4, 1.6)
    sides = rng.random(count) < _share_of_sides(outlines, height)
    plan = np.where(sides[:, None], _on_outlines(rng, outlines, count), _inside(rng, outlines, count))
    ends = rng.integers(2, size=count) * 2 - 1
    heights = np.where(sides, rng.uniform(-1, 1, count), ends) * height / 2
    angle = math.pi * (rng.random() + (split != "train"))
    rotation = np.array([[math.cos(angle), math.sin(angle)], [-math.sin(angle), math.cos(angle)]])
    positions = rng.uniform(0.7, 1.0) * np.column_stack([plan @ rotation, heights])
    positions += NOISE * rng.standard_normal(positions.shape)
    features = np.where(sides, 0, ends)[:, None]
    return features.astype(np.float32), positions.astype(np.float32), label


@register_task
@dataclass
class Solids(Task):
    name = "solids"
    inputs = "tokens"
    sizes = {"training": 5000, "evaluation": 1000}
    training_points: list[int] = flag([16, 48], "Smallest and largest number of points of a solid to train on.")
    evaluation_points: int = flag(72, "Points of a solid to evaluate.")

    def __post_init__(self):
        super().__post_init__()
        points = self.training_points
        if len(points) != 2 or not 1 <= points[0] <= points[1] or self.evaluation_points < 1:
            raise InputError(
                f"--training_points {points} --evaluation_points {self.evaluation_points}; accepted: two numbers, the "
                "smaller first, and one number, all at least 1."
            )

    def samples(self, part: str, request: Any = None) -> dict[str, list]:
        points = tuple(self.training_points) if part == "training" else (self.evaluation_points,) * 2
        drawn = (solid(self.split(part), index, points) for index in range(self.count(part)))
        features, positions, labels = zip(*drawn)
        return {"features": features, "positions": positions, "labels": [LABELS[label] for label in labels]}


def _edges(outlines: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """First and last point of all edges, (edges, 2) each."""
    return np.concatenate(outlines), np.concatenate([np.roll(outline, -1, axis=0) for outline in outlines])


def _share_of_sides(outlines: list[np.ndarray], height: float) -> float:
    """Area of the sides as a share of the surface."""
    areas = [abs(_doubled_areas(outline).sum()) / 2 for outline in outlines]
    # The first outline is the outer one.
    area, (first, last) = 2 * areas[0] - sum(areas), _edges(outlines)
    sides = height * np.linalg.norm(last - first, axis=1).sum()
    return sides / (sides + 2 * area)


def _doubled_areas(outline: np.ndarray) -> np.ndarray:
    """Twice the signed area of the triangle of each edge and the origin."""
    (x, y), (next_x, next_y) = outline.T, np.roll(outline, -1, axis=0).T
    return x * next_y - next_x * y


def _on_outlines(rng: np.random.Generator, outlines: list[np.ndarray], count: int) -> np.ndarray:
    """(count, 2) points, uniform on the outlines."""
    first, last = _edges(outlines)
    lengths = np.linalg.norm(last - first, axis=1)
    edges = rng.choice(len(lengths), size=count, p=lengths / lengths.sum())
    return first[edges] + rng.random((count, 1)) * (last - first)[edges]


def _inside(rng: np.random.Generator, outlines: list[np.ndarray], count: int) -> np.ndarray:
    """(count, 2) points, uniform inside the outlines, by rejection sampling."""
    found = np.empty((0, 2))
    while len(found) < count:
        points = rng.uniform(-1, 1, (4 * count, 2))
        found = np.concatenate([found, points[inside(outlines, points)]])
    return found[:count]


def inside(outlines: list[np.ndarray], points: np.ndarray) -> np.ndarray:
    """Whether (N, 2) points are inside: a ray to the right crosses an odd number of edges."""
    first, last = _edges(outlines)
    (x, y), (left, bottom), (right, top) = points.T[..., None], first.T, last.T
    crosses = (bottom > y) != (top > y)
    with np.errstate(divide="ignore", invalid="ignore"):
        at = left + (y - bottom) / (top - bottom) * (right - left)
    return (crosses & (x < at)).sum(axis=1) % 2 == 1
