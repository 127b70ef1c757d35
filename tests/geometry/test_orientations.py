"""Rotation vectors, matrices and quaternions, against scipy in float64."""

import math

import pytest
import torch
from scipy.spatial.transform import Rotation

from hf_liere import (
    matrix_to_rotation_vector,
    quaternion_to_rotation_vector,
    rotation_vector_to_matrix,
    rotation_vector_to_quaternion,
)


# A few units in the last place of numbers up to π.
ROUNDING = {torch.float32: 2e-6, torch.float64: 4e-15}
ORDERS = ("wxyz", "xyzw")
DTYPES = (torch.float32, torch.float64)
RETURNS = {
    "matrix": (rotation_vector_to_matrix, matrix_to_rotation_vector),
    **{
        order: (
            lambda vectors, order=order: rotation_vector_to_quaternion(vectors, order),
            lambda quaternions, order=order: quaternion_to_rotation_vector(quaternions, order),
        )
        for order in ORDERS
    },
}


def vectors(dtype=torch.float64):
    """(9, 20, 3): random ones of every length up to π, and the axes at half a turn."""
    axes = torch.from_numpy(Rotation.random(20, random_state=0).as_rotvec())
    axes[:3] = torch.eye(3)
    axes = torch.nn.functional.normalize(axes, dim=-1)
    lengths = [0, 1e-30, 1e-12, 1e-5, 0.02, 1, 3, math.pi - 1e-5, math.pi]
    return (torch.tensor(lengths, dtype=torch.float64).view(-1, 1, 1) * axes).to(dtype)


def as_scipy(vectors):
    return Rotation.from_rotvec(vectors.double().view(-1, 3).numpy())


@pytest.mark.parametrize("dtype", DTYPES)
def test_matrices_and_quaternions_are_those_of_scipy(dtype):
    given = vectors(dtype)
    matrices = torch.from_numpy(as_scipy(given).as_matrix()).view(9, 20, 3, 3)
    found = rotation_vector_to_matrix(given)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), matrices, atol=ROUNDING[dtype], rtol=0)
    for order in ORDERS:
        quaternions = torch.from_numpy(as_scipy(given).as_quat(scalar_first=order == "wxyz")).view(9, 20, 4)
        found = rotation_vector_to_quaternion(given, order)
        # Real parts near zero have either sign.
        found = found * (found * quaternions).sum(-1, keepdim=True).sign()
        torch.testing.assert_close(found.double(), quaternions, atol=ROUNDING[dtype], rtol=0)


@pytest.mark.parametrize("form", RETURNS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_way_back_keeps_the_orientation(form, dtype):
    there, back = RETURNS[form]
    given = vectors(dtype)
    found = back(there(given))
    assert found.dtype == dtype and found.shape == given.shape
    # Half a turn about an axis and about its opposite are the same.
    torch.testing.assert_close(found[:8], given[:8], atol=ROUNDING[dtype], rtol=0)
    # π in float32 is above π.
    assert found.norm(dim=-1).max() <= math.pi + ROUNDING[dtype]
    torch.testing.assert_close(
        rotation_vector_to_matrix(found), rotation_vector_to_matrix(given), atol=ROUNDING[dtype], rtol=0
    )


@pytest.mark.parametrize("order", ORDERS)
def test_quaternions_of_any_length_and_sign_are_one_orientation(order):
    quaternions = rotation_vector_to_quaternion(vectors(), order)
    found = quaternion_to_rotation_vector(quaternions, order)
    # Half a turn has a real part of exactly zero here.
    turn = torch.tensor([-0.6, 0.8, 0.0]), torch.zeros(1)
    turn = torch.cat(turn[:: -1 if order == "wxyz" else 1])
    for given in (quaternions, turn):
        back = [quaternion_to_rotation_vector(sign * given, order) for sign in (1, -1)]
        assert torch.equal(*back)
    matrices = rotation_vector_to_matrix(found)
    for length in (1e-200, 3.0, 1e200):
        scaled = rotation_vector_to_matrix(quaternion_to_rotation_vector(length * quaternions, order))
        torch.testing.assert_close(scaled, matrices, atol=ROUNDING[torch.float64], rtol=0)


def test_orders_are_not_the_same():
    quarter = torch.tensor([math.sqrt(0.5), 0.0, 0.0, math.sqrt(0.5)])
    about_z, about_x = (quaternion_to_rotation_vector(quarter, order) for order in ORDERS)
    torch.testing.assert_close(about_z, torch.tensor([0, 0, math.pi / 2]))
    torch.testing.assert_close(about_x, torch.tensor([math.pi / 2, 0, 0]))


@pytest.mark.parametrize("form", RETURNS)
def test_gradients_are_those_of_finite_differences(form):
    there, back = RETURNS[form]
    given = vectors()[4:7, ::7].clone().requires_grad_()
    assert torch.autograd.gradcheck(there, given)
    assert torch.autograd.gradcheck(back, there(given).detach().requires_grad_())


@pytest.mark.parametrize("form", RETURNS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_at_zero_and_at_half_a_turn(form, dtype):
    """The derivative of there and back is I; where the result is the opposite vector p − 2πp/|p|, it is another one."""
    there, back = RETURNS[form]
    given = torch.cat([vectors(dtype)[:4].flatten(0, 1), vectors(dtype)[8]]).requires_grad_()
    found = back(there(given))
    rows = [torch.autograd.grad(found[:, i].sum(), given, retain_graph=True)[0] for i in range(3)]
    length = given.detach().norm(dim=-1).clamp(min=1e-30)[:, None, None]
    axis, identity = given.detach().unsqueeze(-1) / length, torch.eye(3, dtype=dtype)
    # I − (2π/|p|)(I − pp ᵀ/|p|²)
    opposite = identity - 2 * math.pi / length * (identity - axis @ axis.mT)
    is_same = (found * given).sum(-1)[:, None, None] >= 0
    wanted = torch.where(is_same, identity, opposite)
    jacobians = torch.stack(rows, dim=1)
    torch.testing.assert_close(jacobians[:80], wanted[:80], atol=ROUNDING[dtype], rtol=0)
    torch.testing.assert_close(jacobians[80:], wanted[80:], atol=10 * ROUNDING[dtype], rtol=0)


BAD = [
    (
        matrix_to_rotation_vector,
        2 * torch.eye(3),
        "is not a rotation: RᵀR differs from the identity by 3; up to 0.001 is accepted.* 1 of 1 are refused",
    ),
    (
        matrix_to_rotation_vector,
        torch.stack([torch.eye(3), -torch.eye(3)]),
        r"matrices\[1\].*determinant is -1,.* 1 of 2",
    ),
    (matrix_to_rotation_vector, torch.full((3, 3), torch.nan), "contain 9 values that are not finite"),
    (matrix_to_rotation_vector, torch.eye(4), r"shape \(4, 4\) must be \(…, 3, 3\)"),
    (matrix_to_rotation_vector, torch.eye(3, dtype=torch.bfloat16), "bfloat16; float32 or float64 is needed"),
    (rotation_vector_to_matrix, torch.zeros(2, 4), r"shape \(2, 4\) must be \(…, 3\)"),
    (rotation_vector_to_matrix, torch.zeros(2, 3, dtype=torch.long), "int64; float32 or float64"),
    (
        RETURNS["wxyz"][1],
        torch.tensor([[0.0, 0, 0, 0], [1.0, 0, 0, 0]]),
        r"quaternions\[0\].* zero, .*any other.* 1 of 2",
    ),
    (RETURNS["xyzw"][1], torch.tensor([0.0, torch.inf, 0, 0]), "contain 1 values that are not finite"),
    (RETURNS["xyzw"][1], torch.zeros(3), r"shape \(3,\) must be \(…, 4\)"),
    (
        lambda values: quaternion_to_rotation_vector(values, "zyxw"),
        torch.ones(4),
        "order='zyxw'.*; accepted are wxyz, xyzw",
    ),
    (lambda values: rotation_vector_to_quaternion(values, "w"), torch.ones(3), "order='w'.*; accepted are wxyz, xyzw"),
]


@pytest.mark.parametrize("convert, values, message", BAD)
def test_what_is_no_orientation_is_refused_with_its_deviation(convert, values, message):
    with pytest.raises(ValueError, match=message):
        convert(values)


def test_batches_may_be_empty():
    assert matrix_to_rotation_vector(torch.zeros(0, 4, 3, 3)).shape == (0, 4, 3)
    assert quaternion_to_rotation_vector(torch.zeros(2, 0, 4), "wxyz").shape == (2, 0, 3)
    assert rotation_vector_to_matrix(torch.zeros(0, 3)).shape == (0, 3, 3)
