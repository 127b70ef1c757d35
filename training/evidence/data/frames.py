"""Frames of real bodies, such as residues and atoms: made from three points each, and turned with their world."""

import numpy as np
import torch

from hf_liere import matrix_to_rotation_vector, quaternion_to_rotation_vector, rotation_vector_to_matrix


def frames_of(origins: np.ndarray, ahead: np.ndarray, beside: np.ndarray) -> np.ndarray:
    """
    Right-handed orthonormal frames, from body to world: the x axis points from a body's origin to the point `ahead`,
    and the point `beside` lies in its half-plane of x and positive y.

    Args:
        origins, ahead, beside: (…, 3), not on one line.

    Returns:
        (…, 3, 3), whose columns are the axes.
    """
    x = _unit(ahead - origins)
    towards = beside - origins
    y = _unit(towards - (towards * x).sum(axis=-1, keepdims=True) * x)
    return np.stack([x, y, np.cross(x, y)], axis=-1)


def _unit(vectors: np.ndarray) -> np.ndarray:
    return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)


def draw_rotations(rng: np.random.Generator, *shape: int) -> torch.Tensor:
    """(…, 3) rotation vectors of uniformly distributed rotations, of which four normal numbers are a quaternion."""
    return quaternion_to_rotation_vector(torch.from_numpy(rng.standard_normal((*shape, 4))), "wxyz")


def pose_rows(rotations: torch.Tensor, translations: torch.Tensor | float) -> torch.Tensor:
    """(…, 16) 4 × 4 matrices, row by row, of (…, 3, 3) rotations and (…, 3) translations."""
    poses = torch.eye(4, dtype=rotations.dtype).repeat(*rotations.shape[:-2], 1, 1)
    poses[..., :3, :3], poses[..., :3, 3] = rotations, translations
    return poses.flatten(-2)


def columns_in(
    frames: torch.Tensor,
    origins: torch.Tensor | float,
    rotations: torch.Tensor,
    translations: torch.Tensor,
    name: str = "relative",
) -> dict[str, torch.Tensor]:
    """
    Poses as seen from a frame of each sample, which turns with its world.

    Args:
        frames, origins: (samples, 1, 3, 3), from the frame to the world, and (samples, 1, 3).
        rotations, translations: (samples, N, 3, 3) and (samples, N, 3), in the world.

    Returns:
        `NAME_matrices` (samples, N, 9), row by row, and `NAME_translations` (samples, N, 3).
    """
    from_world = frames.mT
    return {
        f"{name}_matrices": (from_world @ rotations).flatten(-2),
        f"{name}_translations": (from_world @ (translations - origins).unsqueeze(-1)).squeeze(-1),
    }


def turned_columns(
    rotations: np.ndarray, translations: np.ndarray, largest_angle: float, rng: np.random.Generator
) -> dict[str, np.ndarray]:
    """
    Turns the world of every sample at random. The rotation of a sample depends on its number alone.

    Args:
        rotations: (samples, N, 3, 3), from body to world.
        translations: (samples, N, 3).
        largest_angle: in degrees. At 180, all rotations are equally likely; other angles shrink their rotation vectors.

    Returns:
        float32 columns of N tokens: `positions` (samples, N, 3), rotation vectors of the orientations; `matrices`
        (samples, N, 9), the same as matrices row by row; `translations` (samples, N, 3); `poses` (samples, N, 16), both
        as 4 × 4 matrices row by row. `relative_matrices` and `relative_translations` are both in the frame of the first
        token, which turns with the world: they depend on neither the rotation nor the place of the world.
    """
    turns = draw_rotations(rng, len(rotations)) * largest_angle / 180  # (samples, 3)
    world = rotation_vector_to_matrix(turns).unsqueeze(1)  # (samples, 1, 3, 3)
    turned = world @ torch.from_numpy(rotations)  # (samples, N, 3, 3)
    moved = (world @ torch.from_numpy(translations).unsqueeze(-1)).squeeze(-1)  # (samples, N, 3)
    columns = {
        "positions": matrix_to_rotation_vector(turned),
        "matrices": turned.flatten(-2),
        "translations": moved,
        "poses": pose_rows(turned, moved),
        **columns_in(turned[:, :1], moved[:, :1], turned, moved),
    }
    return {name: values.float().numpy() for name, values in columns.items()}
