"""
Rotation vectors, rotation matrices and quaternions of the same orientations.

An orientation is the rotation R from body to world: x_world = R x_body. Its rotation vector p is the unit axis times
the angle in radians, and R = exp([p]×) with [p]× x = p × x. All functions keep leading dimensions, types and gradients,
which are finite everywhere; at an angle of π, where p and −p are the same orientation, those of the returned vector.
"""

import torch

from ..fast.dispatch import values_are_unknown
from ..registers import check_name
from ..rotation.exponential import skew


# Largest |RᵀR − I| of accepted matrices: numbers in text files have few digits, and leave a rotation. Scaled or sheared
# axes do not.
TOLERANCE = 1e-3
# Where the real part w is in a quaternion.
REAL_PART = {"wxyz": 0, "xyzw": 3}
# (message template, offending values, mask of the offending elements), each of shape (…).
Fault = tuple[str, torch.Tensor, torch.Tensor]


def rotation_vector_to_matrix(vectors: torch.Tensor) -> torch.Tensor:
    """
    The matrices R = exp([p]×) of (…, 3) rotation vectors p: (…, 3, 3).

    ```python
    import torch
    from hf_liere import rotation_vector_to_matrix

    print(rotation_vector_to_matrix(torch.tensor([0.0, 0.0, torch.pi / 2])).round().int().tolist())  # a quarter turn
    ```

    ```text
    [[0, -1, 0], [1, 0, 0], [0, 0, 1]]
    ```

    Raises:
        ValueError: if vectors have another shape or type, or are not finite.
    """
    quaternions = rotation_vector_to_quaternion(vectors, "wxyz")
    real, imaginary = quaternions[..., :1, None], quaternions[..., 1:]  # (…, 1, 1), (…, 3)
    x, y, z = imaginary.unbind(-1)
    cross = skew(torch.stack([z, -y, x], dim=-1), 3)  # (…, 3, 3), with [v]× w = v × w
    # Rodrigues' formula at half the angle: sin θ = 2 sin(θ/2) cos(θ/2), 1 − cos θ = 2 sin²(θ/2).
    return torch.eye(3, dtype=vectors.dtype, device=vectors.device) + 2 * (real * cross + cross @ cross)


def matrix_to_rotation_vector(matrices: torch.Tensor) -> torch.Tensor:
    """
    The rotation vectors, of lengths up to π, of (…, 3, 3) rotation matrices: (…, 3).

    ```python
    import torch
    from hf_liere import matrix_to_rotation_vector

    print(matrix_to_rotation_vector(torch.tensor([[0.0, -1, 0], [1, 0, 0], [0, 0, 1]])))
    ```

    ```text
    tensor([0.0000, 0.0000, 1.5708])
    ```

    Raises:
        ValueError: as [`check_rotation_matrices`].
    """
    check_rotation_matrices(matrices)
    (xx, xy, xz), (yx, yy, yz), (zx, zy, zz) = (row.unbind(-1) for row in matrices.unbind(-2))
    # 4 q qᵀ of the quaternion q = (w, x, y, z). Every row is a multiple of q; that of the largest component is exact.
    rows = (
        (1 + xx + yy + zz, zy - yz, xz - zx, yx - xy),
        (zy - yz, 1 + xx - yy - zz, xy + yx, xz + zx),
        (xz - zx, xy + yx, 1 - xx + yy - zz, yz + zy),
        (yx - xy, xz + zx, yz + zy, 1 - xx - yy + zz),
    )
    products = torch.stack([torch.stack(row, dim=-1) for row in rows], dim=-2)  # (…, 4, 4)
    largest = products.detach().diagonal(dim1=-2, dim2=-1).argmax(-1)[..., None, None]  # (…, 1, 1)
    quaternions = products.gather(-2, largest.expand(*largest.shape[:-1], 4)).squeeze(-2)  # (…, 4)
    return _shortest_vector(quaternions[..., 0], quaternions[..., 1:])


def rotation_vector_to_quaternion(vectors: torch.Tensor, order: str) -> torch.Tensor:
    """
    The unit quaternions w + xi + yj + zk, w = cos(‖p‖/2), of (…, 3) rotation vectors p: (…, 4).

    ```python
    import torch
    from hf_liere import rotation_vector_to_quaternion

    print(rotation_vector_to_quaternion(torch.tensor([0.0, 0.0, torch.pi / 2]), order="wxyz"))
    ```

    ```text
    tensor([0.7071, 0.0000, 0.0000, 0.7071])
    ```

    Args:
        order: `"wxyz"` or `"xyzw"`, the order of the four numbers. Libraries differ, so there is no default: scipy and
            ROS write xyzw, Eigen's constructor, PyTorch3D and COLMAP wxyz.

    Raises:
        ValueError: if vectors have another shape or type, or are not finite, or for another `order`.
    """
    check_name("order", order, REAL_PART)
    _check_values("rotation vectors", vectors, (3,))
    half = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True) / 2  # (…, 1)
    imaginary = vectors * (torch.sinc(half / torch.pi) / 2)  # (…, 3)
    return torch.cat((half.cos(), imaginary) if order == "wxyz" else (imaginary, half.cos()), dim=-1)


def quaternion_to_rotation_vector(quaternions: torch.Tensor, order: str) -> torch.Tensor:
    """
    The rotation vectors, of lengths up to π, of (…, 4) quaternions of any length but 0: (…, 3). q and −q have the same.

    ```python
    import torch
    from hf_liere import quaternion_to_rotation_vector

    print(quaternion_to_rotation_vector(torch.tensor([0.0, 0.0, 1.0, 1.0]), order="xyzw"))
    ```

    ```text
    tensor([0.0000, 0.0000, 1.5708])
    ```

    Args:
        order: As in [`rotation_vector_to_quaternion`].

    Raises:
        ValueError: if quaternions have another shape or type, are not finite or zero, or for another `order`.
    """
    check_name("order", order, REAL_PART)
    _check_values("quaternions", quaternions, (4,))
    largest = quaternions.detach().abs().amax(-1, keepdim=True)  # (…, 1)
    if not values_are_unknown(quaternions):
        is_zero = largest.squeeze(-1) == 0
        refuse("quaternions", "a rotation", ("it is zero, {}; accepted is any other length", quaternions, is_zero))
    # Squares of small numbers would be zero.
    quaternions = quaternions / largest
    real = REAL_PART[order]
    imaginary = quaternions[..., 1:] if real == 0 else quaternions[..., :3]
    return _shortest_vector(quaternions[..., real], imaginary)


def check_rotation_matrices(matrices: torch.Tensor) -> None:
    """
    Raises:
        ValueError: if matrices are not (…, 3, 3) in float32 or float64, not finite, not orthogonal (RᵀR − I above 1e-3
            in any entry) or reflections.
    """
    _check_values("rotation matrices", matrices, (3, 3))
    if not values_are_unknown(matrices):
        refuse("matrices", "a rotation", *rotation_faults(matrices.detach()))


def rotation_faults(matrices: torch.Tensor) -> list[Fault]:
    """Finds the (…, 3, 3) matrices that are not rotations, and says why."""
    identity = torch.eye(3, dtype=matrices.dtype, device=matrices.device)
    deviation = (matrices.mT @ matrices - identity).abs().amax((-2, -1))  # (…)
    determinants = torch.linalg.det(matrices)  # (…)
    accepted = f"up to {TOLERANCE:g} is accepted: axes of length 1 at right angles"
    return [
        # Comparisons with NaN are false.
        (f"RᵀR differs from the identity by {{:.2g}}; {accepted}", deviation, ~(deviation <= TOLERANCE)),
        ("its determinant is {:.3g}, a reflection: change the sign of an axis", determinants, determinants < 0),
    ]


def refuse(name: str, accepted: str, *faults: Fault) -> None:
    """Raises `ValueError` if any element has a fault, with the index of the first one and its first fault."""
    refused = torch.stack([present for _, _, present in faults]).any(0)  # (…)
    if not refused.any():
        return
    index = tuple(refused.nonzero()[0].tolist())
    phrase, value = next((phrase, values[index]) for phrase, values, present in faults if present[index])
    raise ValueError(
        f"{name}[{', '.join(map(str, index)) or '…'}] is not {accepted}: {phrase.format(value.tolist())}. "
        f"{int(refused.sum())} of {refused.numel()} are refused."
    )


def _check_values(name: str, values: torch.Tensor, shape: tuple[int, ...]) -> None:
    """Raises `ValueError` unless values are (…, `shape`) in float32 or float64, and finite."""
    if tuple(values.shape[-len(shape) :]) != shape:
        raise ValueError(f"{name} of shape {tuple(values.shape)} must be (…, {', '.join(map(str, shape))}).")
    if values.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"{name} are {values.dtype}; float32 or float64 is needed.")
    if not values_are_unknown(values) and not torch.isfinite(values).all():
        raise ValueError(f"{name} contain {int((~torch.isfinite(values)).sum())} values that are not finite.")


def _shortest_vector(real: torch.Tensor, imaginary: torch.Tensor) -> torch.Tensor:
    """Rotation vectors with angles in [0, π] of quaternions of any length: (…) and (…, 3) → (…, 3)."""
    # q and −q are the same rotation. The first component that is not zero becomes positive.
    components = torch.cat([real.unsqueeze(-1), imaginary], dim=-1).detach()  # (…, 4)
    first = (components != 0).int().argmax(-1, keepdim=True)  # (…, 1)
    sign = components.gather(-1, first).sign()  # (…, 1)
    real, imaginary = real.unsqueeze(-1) * sign, imaginary * sign
    squares = imaginary.square().sum(-1, keepdim=True)  # (…, 1)
    # 2 atan(t) / t with t = |imaginary| / real, by its series near t = 0, where the square root has no gradient.
    near = squares.detach() < torch.finfo(squares.dtype).eps ** 0.5 * real.detach().square()
    length = torch.where(near, 1, squares).sqrt()
    ratio = squares / torch.where(near, real, 1).square()
    series = (1 - ratio / 3 + ratio.square() / 5) / torch.where(near, real, 1)
    return 2 * imaginary * torch.where(near, series, torch.atan2(length, real) / length)
