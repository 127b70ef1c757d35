"""Scenes: generated pictures of one shape before a horizon, which look the same at every size.

A scene has a sky, a ground and a disc, square, diamond or cross, whose name is its class. Places and extents are
fractions of the picture, so that the same scene can be drawn at the size of training and at a larger one.
"""

import numpy as np

from training.data.moving_shapes import SHAPES, SPLITS, shape_mask


# Points per pixel and axis, whose mean is the pixel.
FINE = 4


def scene(split: str, index: int, image_size: int) -> tuple[np.ndarray, int]:
    """A picture, float32 of shape (image_size, image_size, 3) from −1 to 1, and its label, an index into `SHAPES`."""
    rng = np.random.default_rng((SPLITS.index(split), index))
    label = int(rng.integers(len(SHAPES)))
    sky, ground = rng.uniform(-1, 0.2, 3), rng.uniform(-1, 0.2, 3)
    color, horizon = rng.uniform(0.2, 1, 3), rng.uniform(0.6, 0.8)
    radius = rng.uniform(0.18, 0.26)
    row, column = rng.uniform(radius, horizon), rng.uniform(radius, 1 - radius)

    points = image_size * FINE
    picture = np.empty((points, points, 3), np.float32)
    is_sky = np.arange(points) < horizon * points
    picture[is_sky], picture[~is_sky] = sky, ground
    mask = shape_mask(SHAPES[label], points * np.array([row, column]), radius * points, (points, points))
    picture[mask] = color
    return picture.reshape(image_size, FINE, image_size, FINE, 3).mean((1, 3)), label
