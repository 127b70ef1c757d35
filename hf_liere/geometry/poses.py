"""Rigid motions and intrinsics as 4 × 4 matrices, and the checks of those that are given."""

from collections.abc import Sequence

import torch

from ..fast.dispatch import values_are_unknown
from .orientations import TOLERANCE, refuse, rotation_faults


def relative_poses(poses: torch.Tensor, reference: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """
    G⁻¹ P with the reference G, its translations times `scale`: (B, N, 4, 4) from (B, N, 4, 4) and (1 or B, 4, 4).

    Translations are subtracted before they are rotated, so that their difference is exact far from the origin. That
    this is unchanged by a common motion of P and G does not depend on how exactly their rotations are orthogonal.
    """
    turn = reference[:, None, :3, :3].mT  # (1 or B, 1, 3, 3)
    moved = (poses[..., :3, 3:] - reference[:, None, :3, 3:]) * scale  # (B, N, 3, 1)
    return _homogeneous(turn @ poses[..., :3, :3], turn @ moved)


def invert_poses(poses: torch.Tensor) -> torch.Tensor:
    """[[Rᵀ, −Rᵀt], [0, 1]] of (…, 4, 4) poses [[R, t], [0, 1]]."""
    turn = poses[..., :3, :3].mT
    return _homogeneous(turn, -turn @ poses[..., :3, 3:])


def first_pose(poses: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
    """(1 or B, 4, 4), the first pose of every sample that is true in (1 or B, N) `known`, else the very first."""
    first = known.to(torch.uint8).argmax(dim=1)  # (1 or B,)
    return torch.take_along_dim(poses, first[:, None, None, None], dim=1)[:, 0]


def lift_intrinsics(intrinsics: torch.Tensor, image_size: Sequence[int | float]) -> tuple[torch.Tensor, torch.Tensor]:
    """
    lift(K) = [[K, 0], [0, 1]] (PRoPE, eqs. 3 and 4) of normalised intrinsics, and its inverse: (…, 4, 4) from (…, 3, 3)
    in pixels. With (h, w) `image_size`, rows are divided by w, h and 1, and the principal point is counted from the
    centre of the image: f_x/w, f_y/h, c_x/w − ½, c_y/h − ½.
    """
    height, width = image_size
    centre = intrinsics.new_tensor([[0.0, 0.0, 0.5], [0.0, 0.0, 0.5], [0.0, 0.0, 0.0]])
    normalised = intrinsics / intrinsics.new_tensor([[width], [height], [1.0]]) - centre  # (…, 3, 3)
    identity = torch.eye(3, dtype=intrinsics.dtype, device=intrinsics.device)
    inverse = torch.linalg.solve_triangular(normalised, identity, upper=True)  # (…, 3, 3)
    first, second = (_homogeneous(each, torch.zeros_like(each[..., :1])) for each in (normalised, inverse))
    return first, second


def check_poses(name: str, poses: torch.Tensor) -> None:
    """
    Raises `ValueError` if a (…, 4, 4) pose is not a rotation and a translation above 0, 0, 0, 1, with its index and
    deviation.
    """
    if values_are_unknown(poses):
        return
    matrices = poses.detach().double() if poses.device.type != "mps" else poses.detach()
    last = matrices[..., 3, :]  # (…, 4)
    differs = (last - last.new_tensor([0, 0, 0, 1])).abs().amax(dim=-1) > TOLERANCE  # (…,)
    refuse(
        name,
        "a pose [[R, t], [0, 1]] from camera to world",
        ("it contains values that are not finite: {}", matrices, ~matrices.isfinite().all(-1).all(-1)),
        ("its last row is {} instead of 0, 0, 0, 1", last, differs),
        *rotation_faults(matrices[..., :3, :3]),
    )


def check_intrinsics(intrinsics: torch.Tensor) -> None:
    """Raises `ValueError` if a (…, 3, 3) matrix is not [[f_x, s, c_x], [0, f_y, c_y], [0, 0, 1]], f_x and f_y not 0."""
    if values_are_unknown(intrinsics):
        return
    given = intrinsics.detach()
    zeros = (given[..., 1, 0] == 0) & (given[..., 2, :2] == 0).all(-1) & (given[..., 2, 2] == 1)
    accepted = zeros & (given[..., 0, 0] != 0) & (given[..., 1, 1] != 0) & given.isfinite().all(-1).all(-1)
    wanted = "finite [[f_x, s, c_x], [0, f_y, c_y], [0, 0, 1]] with f_x and f_y that are not 0"
    refuse("intrinsics", wanted, ("it is {}", given, ~accepted))


def _homogeneous(rotation: torch.Tensor, translation: torch.Tensor) -> torch.Tensor:
    """[[R, t], [0, 1]] of (…, 3, 3) and (…, 3, 1)."""
    above = torch.cat([rotation, translation], dim=-1)  # (…, 3, 4)
    last = torch.cat([torch.zeros_like(above[..., :1, :3]), torch.ones_like(above[..., :1, 3:])], dim=-1)
    return torch.cat([above, last], dim=-2)
