"""Attention between cameras depends on their relative poses, as GTA and PRoPE write it."""

import inspect
import logging
import math
import re

import pytest
import torch
from torch.nn import functional as F
from transformers import (
    AttentionInterface,
    AutoModelForImageClassification,
    AutoModelForTokenClassification,
    LlamaConfig,
    LlamaForCausalLM,
    ViTConfig,
    ViTForImageClassification,
)

from hf_liere import (
    LieRETokensConfig,
    LieRETokensForTokenClassification,
    LieREVideoConfig,
    LieREVideoForVideoClassification,
    LieREViTBackbone,
    LieREViTConfig,
    LieREViTForImageClassification,
    LieRotaryEmbedding,
    PoseEmbedding,
    RotaryPatchConfig,
    grid_positions,
    matrix_to_rotation_vector,
    patch,
)
from hf_liere.plain.encodings import representation


HEADS, HEAD_DIM = 2, 16


def random_poses(*shape, distance=1.0, dtype=torch.float64):
    """Camera to world, (*shape, 4, 4), with translations of standard deviation `distance` on every axis."""
    rotation, _ = torch.linalg.qr(torch.randn(*shape, 3, 3, dtype=torch.float64))
    rotation = rotation * torch.linalg.det(rotation)[..., None, None]
    poses = torch.eye(4, dtype=torch.float64).repeat(*shape, 1, 1)
    poses[..., :3, :3], poses[..., :3, 3] = rotation, distance * torch.randn(*shape, 3, dtype=torch.float64)
    return poses.to(dtype)


def random_states(batch, *tokens, dtype=torch.float64):
    query, *others = tokens if len(tokens) == 3 else tokens * 3
    return [torch.randn(batch, HEADS, count, HEAD_DIM, dtype=dtype) for count in (query, *others)]


def random_intrinsics(*shape):
    """In pixels of images of 192 × 256, with a skew."""
    intrinsics = torch.zeros(*shape, 3, 3, dtype=torch.float64)
    intrinsics[..., 0, 0], intrinsics[..., 1, 1] = 200 + 20 * torch.rand(2, *shape, dtype=torch.float64)
    intrinsics[..., 0, 1], intrinsics[..., 0, 2], intrinsics[..., 1, 2] = 5, 130, 90
    intrinsics[..., 2, 2] = 1
    return intrinsics


def attend(layer, states, *frames):
    query, key, value = layer(*states, *frames)
    output = F.scaled_dot_product_attention(query, key, value, enable_gqa=query.shape[1] != key.shape[1])
    return layer.undo(output, frames[0])


def pairwise(query, key, value, transforms, key_transforms):
    """
    GTA's attention in float64, with a (N, D, D) matrix ρ(g) for every token: oᵢ = Σⱼ softmaxⱼ(sᵢⱼ) ρ(gᵢ) ρ(gⱼ)⁻¹ vⱼ
    with sᵢⱼ = qᵢᵀ ρ(gᵢ) ρ(gⱼ)⁻¹ kⱼ / √D. One sample and head, pair after pair.
    """
    rows = []
    for i in range(len(query)):
        relative = [transforms[i] @ torch.linalg.inv(other) for other in key_transforms]
        scores = torch.stack([query[i] @ each @ k for each, k in zip(relative, key)]) / math.sqrt(query.shape[-1])
        weights = scores.softmax(0)
        rows.append(sum(weight * each @ v for weight, each, v in zip(weights, relative, value)))
    return torch.stack(rows)


def expected(states, transforms, key_transforms=None):
    """(B, H, N, D) outputs for (B, N, D, D) transforms."""
    key_transforms = transforms if key_transforms is None else key_transforms
    samples = [
        torch.stack(
            [
                pairwise(*(x[b, head].double() for x in states), transforms[b], key_transforms[b])
                for head in range(HEADS)
            ]
        )
        for b in range(len(transforms))
    ]
    return torch.stack(samples)


def tiled(matrices, width=HEAD_DIM):
    """(B, N, 4, 4) → (B, N, width, width), I ⊗ matrix (PRoPE eq. 18)."""
    return torch.stack([torch.stack([torch.block_diag(*[m] * (width // 4)) for m in sample]) for sample in matrices])


def largest_difference(found, wanted):
    return ((found - wanted).abs().max() / wanted.abs().max()).item()


@pytest.mark.parametrize("scale", [1.0, 0.1])
def test_equals_gta(scale):
    poses, states = random_poses(2, 5), random_states(2, 5)
    worlds_to_cameras = torch.linalg.inv(poses)
    worlds_to_cameras[..., :3, 3] *= scale
    found = attend(PoseEmbedding(HEAD_DIM, translation_scale=scale), states, poses)
    # Rounding of float64.
    torch.testing.assert_close(found, expected(states, tiled(worlds_to_cameras)), rtol=1e-11, atol=1e-11)


def prope_transforms(poses, intrinsics, columns, width):
    """
    (B, N, width, width) matrices of tokens in images of 192 × 256 with `columns` patches in a row: projections, and
    for the last half of the channels axial RoPE of base 100 by the indices of patches.
    """
    pixels = torch.tensor([[1 / 256, 0, -0.5], [0, 1 / 192, -0.5], [0, 0, 1]], dtype=torch.float64)
    projections = torch.eye(4, dtype=torch.float64).repeat(*poses.shape[:2], 1, 1)
    # f_x / w, f_y / h, c_x / w − ½, c_y / h − ½, as the code of PRoPE normalises them.
    projections[..., :3, :3] = pixels @ intrinsics.double()
    half, planes = width // 2, width // 8
    transforms = torch.zeros(*poses.shape[:2], width, width, dtype=torch.float64)
    transforms[..., :half, :half] = tiled(projections @ torch.linalg.inv(poses.double()), half)
    for token in range(poses.shape[1]):
        for axis, place in enumerate(divmod(token, columns)):
            for plane in range(planes):
                angle = torch.tensor(-place * 100 ** (-plane / planes), dtype=torch.float64)
                first = half + 2 * (planes * axis + plane)
                turn = torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()]).view(2, 2)
                transforms[:, token, first : first + 2, first : first + 2] = turn
    return transforms


def test_equals_prope():
    """Two cameras with six patches each."""
    poses, intrinsics = (each.repeat_interleave(6, dim=1) for each in (random_poses(2, 2), random_intrinsics(2, 2)))
    states, layer = random_states(2, 12), PoseEmbedding(HEAD_DIM, patch_share=0.5).double()
    frames = layer.frames(poses, intrinsics=intrinsics, image_size=(192, 256), patches=grid_positions((2, 3), "index"))
    cameras = [prope_transforms(poses[:, part], intrinsics[:, part], 3, 16) for part in (slice(6), slice(6, 12))]
    transforms = torch.cat(cameras, dim=1)
    # Rounding of float64.
    assert largest_difference(attend(layer, states, frames), expected(states, transforms)) < 1e-13


def test_equals_models_of_gta():
    """
    Half of the channels SE(3), half SO(2) of patches at 0, 1/h … and 0, 1/w …, with the frequencies 2π 2^(k−n) for
    k = 1 … n in turn on rows and columns, the slowest first. The layer has another order of channels.
    """
    rows, columns, scale, q = 2, 3, 0.01, HEAD_DIM // 8
    poses = random_poses(2, 2).repeat_interleave(rows * columns, dim=1)
    extrinsics = torch.linalg.inv(poses)
    extrinsics[..., :3, 3] *= scale
    places = [(row / rows, column / columns) for row in range(rows) for column in range(columns)] * 2
    turns = []
    for place in places:
        angles = [2 * math.pi * 2.0 ** (k - q) * side for k in range(1, q + 1) for side in place]
        # Queries and keys turn by the angle, so ρ, which stands before queries transposed, by its opposite.
        planes = [[[math.cos(a), math.sin(a)], [-math.sin(a), math.cos(a)]] for a in angles]
        turns.append(torch.block_diag(*torch.tensor(planes, dtype=torch.float64)))
    half = tiled(extrinsics, HEAD_DIM // 2)
    transforms = torch.stack([torch.stack([torch.block_diag(*both) for both in zip(sample, turns)]) for sample in half])
    layer = PoseEmbedding(HEAD_DIM, patch_share=0.5, translation_scale=scale, rope_theta=2**q).double()
    frames = layer.frames(poses, patches=2 * math.pi * torch.tensor(places, dtype=torch.float64))
    # Channels of the layer: rows before columns, the fastest plane of each first.
    order = [HEAD_DIM // 2 + 4 * (q - 1 - plane) + 2 * axis for axis in range(2) for plane in range(q)]
    order = [*range(HEAD_DIM // 2), *(channel for first in order for channel in (first, first + 1))]
    states = random_states(2, 2 * rows * columns)
    found = attend(layer, [x[..., order] for x in states], frames)
    # Rounding of float64.
    assert largest_difference(found, expected(states, transforms)[..., order]) < 1e-13

    # With eight more channels that orientations turn, as in one of its models of MSN-Hard.
    turned = matrix_to_rotation_vector(poses[..., :3, :3])
    turns = torch.linalg.matrix_exp(torch.einsum("bna,aij->bnij", turned, representation([1, 2])))
    both = zip(transforms.flatten(0, 1), turns.mT.flatten(0, 1))
    transforms = torch.stack([torch.block_diag(*pair) for pair in both]).unflatten(0, poses.shape[:2])
    torch.set_default_dtype(torch.float64)
    try:
        spins = LieRotaryEmbedding(HEADS, 8, 3, rotary_init="so3", spins=[1, 2])
    finally:
        torch.set_default_dtype(torch.float32)
    more = [torch.cat([x, torch.randn(*x.shape[:3], 8, dtype=x.dtype)], dim=-1) for x in states]
    posed = layer(*(x[..., order] for x in more), frames)
    states = [torch.cat([x, spins.rotate(y[..., HEAD_DIM:], turned)], dim=-1) for x, y in zip(posed, more)]
    output = F.scaled_dot_product_attention(*states)
    parts = layer.undo(output[..., :HEAD_DIM], frames), spins.undo(output[..., HEAD_DIM:], turned)
    # The exponential's polynomial is off by 2e-13.
    wanted = expected(more, transforms)[..., [*order, *range(HEAD_DIM, HEAD_DIM + 8)]]
    assert largest_difference(torch.cat(parts, dim=-1), wanted) < 1e-11


def test_keys_of_other_tokens():
    poses, key_poses, states = random_poses(2, 3), random_poses(2, 5), random_states(2, 3, 5, 5)
    layer = PoseEmbedding(HEAD_DIM)
    wanted = expected(states, *(tiled(torch.linalg.inv(each)) for each in (poses, key_poses)))
    torch.testing.assert_close(attend(layer, states, poses, key_poses), wanted, rtol=1e-11, atol=1e-11)
    frames = layer.frames(poses)
    key_frames = layer.frames(key_poses, reference=frames.reference)
    torch.testing.assert_close(attend(layer, states, frames, key_frames), wanted, rtol=1e-11, atol=1e-11)
    with pytest.raises(ValueError, match="key_poses"):
        layer(*states, poses)
    with pytest.raises(ValueError, match="different references"):
        layer(*states, frames, layer.frames(key_poses))


@pytest.mark.parametrize(
    "distance, away, given, bound",
    [
        (1.0, 1.0, torch.float32, 1e-5),
        (15.0, 30.0, torch.float32, 1e-5),
        (15.0, 5000.0, torch.float64, 1e-5),
    ],
)
def test_invariant_under_motions_of_the_scene(distance, away, given, bound):
    """States in float32, the largest output as the unit; cameras in 50 m around the origin or kilometres away."""
    motion = random_poses()
    motion[:3, 3] = away * F.normalize(torch.randn(3, dtype=torch.float64), dim=0)
    poses, states = random_poses(2, 8, distance=distance), random_states(2, 8, dtype=torch.float32)
    layer = PoseEmbedding(HEAD_DIM)
    still, moved = (attend(layer, states, each.to(given)) for each in (poses, motion @ poses))
    assert largest_difference(moved, still) < bound


def test_float64_is_exact_kilometres_away():
    """Positions of 5 km are rounded by 5e-13 in float64."""
    motion = random_poses(distance=5000.0)
    poses, states, layer = random_poses(2, 8), random_states(2, 8), PoseEmbedding(HEAD_DIM)
    assert largest_difference(attend(layer, states, motion @ poses), attend(layer, states, poses)) < 1e-10


def test_a_reference_does_not_matter():
    poses, states, layer = random_poses(2, 6), random_states(2, 6), PoseEmbedding(HEAD_DIM)
    wanted = attend(layer, states, poses)
    for reference in (random_poses(), random_poses(2)):
        found = attend(layer, states, layer.frames(poses, reference=reference))
        torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-11)


def test_keys_are_cached_with_a_fixed_reference():
    poses, states, layer = random_poses(1, 6), random_states(1, 6), PoseEmbedding(HEAD_DIM)
    reference = random_poses()
    wanted = attend(layer, states, poses)
    frames = [layer.frames(poses[:, at : at + 1], reference=reference) for at in range(6)]
    parts = [layer(*(x[:, :, at : at + 1] for x in states), frames[at]) for at in range(6)]
    query, key, value = (torch.cat(each, dim=2) for each in zip(*parts))
    output = F.scaled_dot_product_attention(query[:, :, 5:], key, value)
    torch.testing.assert_close(layer.undo(output, frames[5]), wanted[:, :, 5:], rtol=1e-11, atol=1e-11)


def test_unknown_poses():
    """They stand in the frame of the first known camera: invariance remains, and their values reach nothing."""
    poses, states, layer = random_poses(2, 6), random_states(2, 6), PoseEmbedding(HEAD_DIM)
    known = torch.tensor([[False, True, True, False, True, True], [True, False, True, True, True, True]])
    intrinsics = random_intrinsics(2, 6)
    options = {"intrinsics": intrinsics, "image_size": (192, 256), "known": known}
    placed = torch.linalg.inv(poses[[0, 1], [1, 0]])[:, None] @ poses
    transforms = torch.eye(4, dtype=torch.float64).repeat(2, 6, 1, 1)
    pixels = torch.tensor([[1 / 256, 0, -0.5], [0, 1 / 192, -0.5], [0, 0, 1]], dtype=torch.float64)
    transforms[..., :3, :3] = pixels @ intrinsics
    transforms = torch.where(known[..., None, None], transforms @ torch.linalg.inv(placed), torch.eye(4).double())
    poses[~known], intrinsics[~known] = torch.nan, torch.inf
    poses.requires_grad_()
    found = attend(layer, states, layer.frames(poses, **options))
    torch.testing.assert_close(found, expected(states, tiled(transforms)), rtol=1e-10, atol=1e-10)
    moved = attend(layer, states, layer.frames(random_poses() @ poses, **options))
    torch.testing.assert_close(moved, found, rtol=1e-10, atol=1e-10)
    found.square().sum().backward()
    assert poses.grad[~known].eq(0).all() and poses.grad[known].isfinite().all()


def test_without_known_poses_nothing_changes():
    states, layer = random_states(2, 4), PoseEmbedding(HEAD_DIM)
    frames = layer.frames(torch.full((4, 4, 4), torch.nan), known=torch.zeros(4, dtype=torch.bool))
    for before, after in zip(states, layer(*states, frames)):
        torch.testing.assert_close(after, before, rtol=0, atol=0)


def test_examples_run_and_the_second_is_prope():
    blocks = re.findall(r"```python\n(.*?)```", inspect.getdoc(PoseEmbedding), re.DOTALL)
    assert len(blocks) == 2
    example: dict = {}
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        for block in blocks:
            exec(block, example)
    finally:
        torch.set_default_dtype(default)
    poses, intrinsics, width = example["poses"], example["intrinsics"], example["prope"].head_dim
    cameras = range(0, poses.shape[1], 16)
    parts = [prope_transforms(poses[:, at : at + 16], intrinsics[:, at : at + 16], 4, width) for at in cameras]
    transforms = torch.cat(parts, dim=1)
    query, key = torch.randn(2, *poses.shape[:2], width, dtype=torch.float64)
    wanted = (query[:, :, None] @ transforms).squeeze(2) @ (torch.linalg.inv(transforms) @ key[..., None])[..., 0].mT
    found_query, found_key, _ = example["prope"](*(each[:, None] for each in (query, key, key)), example["frames"])
    # Rounding of float64.
    assert largest_difference((found_query @ found_key.mT)[:, 0], wanted) < 1e-13


def test_samples_share_poses():
    poses, states, layer = random_poses(5), random_states(3, 5), PoseEmbedding(HEAD_DIM)
    wanted = attend(layer, states, poses.expand(3, -1, -1, -1))
    torch.testing.assert_close(attend(layer, states, poses), wanted, rtol=0, atol=0)


def test_grouped_heads():
    poses, layer = random_poses(2, 5), PoseEmbedding(HEAD_DIM, patch_share=0.25)
    frames = layer.frames(poses, patches=torch.rand(2, 5, 2, dtype=torch.float64))
    query = torch.randn(2, 4, 5, HEAD_DIM).double()
    _, key, value = random_states(2, 5)
    every = [query, key.repeat_interleave(2, dim=1), value.repeat_interleave(2, dim=1)]
    found = attend(layer, (query, key, value), frames)
    torch.testing.assert_close(found, attend(layer, every, frames), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype, bound", [(torch.bfloat16, 2**-7), (torch.float16, 2**-10)])
def test_half_types(dtype, bound):
    """Transformed states are those of float64 rounded once, also under autocast."""
    poses, layer = random_poses(2, 5, dtype=torch.float32), PoseEmbedding(HEAD_DIM, patch_share=0.5)
    frames = layer.frames(poses, patches=torch.rand(5, 2))
    states = [x.to(dtype) for x in random_states(2, 5)]
    wanted = layer(*(x.double() for x in states), frames)
    with torch.autocast("cpu", torch.bfloat16):
        frames = layer.frames(poses, patches=torch.rand(5, 2)) if dtype == torch.float16 else frames
        found = layer(*states, frames)
        single = layer(*(x.float() for x in states), poses_only := layer.frames(poses, patches=torch.zeros(5, 2)))
    for half, exact in zip(found, wanted):
        assert half.dtype == dtype
        half, exact = half[..., :8].double(), exact[..., :8]
        assert (half - exact).abs().max() <= bound * exact.abs().max()
    exact = layer(*(x.double() for x in states), poses_only)
    # Autocast rounds nothing: float32 stays exact to float32.
    for narrow, wide in zip(single, exact):
        assert narrow.dtype == torch.float32
        torch.testing.assert_close(narrow.double(), wide, rtol=1e-6, atol=1e-6)


def test_gradients():
    """Of states, and of all entries of poses and intrinsics that are not fixed."""
    layer, known = PoseEmbedding(8, patch_share=0.5), torch.tensor([True, False, True])
    states = [torch.randn(1, 1, 3, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    poses, intrinsics = random_poses(1, 3), random_intrinsics(1, 3)
    rigid = poses[..., :3, :].clone().requires_grad_()
    projection = intrinsics[..., [0, 0, 0, 1, 1], [0, 1, 2, 1, 2]].requires_grad_()

    def output(query, key, value, rigid, projection):
        last = poses[..., 3:, :]
        upper = torch.cat([projection[..., :3], torch.zeros(1, 3, 1), projection[..., 3:]], dim=-1).unflatten(
            -1, (2, 3)
        )
        frames = layer.frames(
            torch.cat([rigid, last], dim=-2),
            intrinsics=torch.cat([upper, intrinsics[..., 2:, :]], dim=-2),
            image_size=(192, 256),
            known=known,
            patches=torch.arange(6.0).view(3, 2),
        )
        return attend(layer, (query, key, value), frames)

    # A step of 1e-6 leaves poses within their tolerance.
    assert torch.autograd.gradcheck(output, (*states, rigid, projection), eps=1e-6, atol=1e-6)


def test_compiles_into_one_graph():
    layer = PoseEmbedding(HEAD_DIM, patch_share=0.5)
    states, poses = random_states(2, 8, dtype=torch.float32), random_poses(2, 8, dtype=torch.float32)
    known, intrinsics = torch.rand(2, 8) > 0.3, random_intrinsics(2, 8).float()

    def queries(query, poses, intrinsics, known):
        frames = layer.frames(
            poses, intrinsics=intrinsics, image_size=(192, 256), known=known, patches=grid_positions((2, 2), "index")
        )
        return layer.undo(query, frames)

    arguments = (states[0], poses.requires_grad_(), intrinsics, known)
    found, wanted = torch.compile(queries, fullgraph=True, backend="aot_eager")(*arguments), queries(*arguments)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    gradients = [torch.autograd.grad(each.square().sum(), poses)[0] for each in (found, wanted)]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)


def test_exports():
    class Attention(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.pose = PoseEmbedding(HEAD_DIM)

        def forward(self, query, key, value, poses):
            return attend(self.pose, (query, key, value), poses)

    arguments = (*random_states(2, 5, dtype=torch.float32), random_poses(2, 5, dtype=torch.float32))
    model = Attention()
    program = torch.export.export(model, arguments).module()
    torch.testing.assert_close(program(*arguments), model(*arguments), rtol=1e-6, atol=1e-6)


def test_transforms_of_functions():
    """`torch.func.vmap` over scenes and `jacrev` of poses agree with a loop."""
    layer, states, poses = PoseEmbedding(HEAD_DIM), random_states(2, 3), random_poses(4, 2, 3)
    found = torch.func.vmap(lambda each: attend(layer, states, each))(poses)
    wanted = torch.stack([attend(layer, states, each) for each in poses])
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_a_motion_has_no_gradient():
    """Moving all cameras changes nothing, so the gradients of their translations add to zero."""
    poses, states = random_poses(1, 5).requires_grad_(), random_states(1, 5)
    attend(PoseEmbedding(HEAD_DIM), states, poses).square().sum().backward()
    forces = poses.grad[..., :3, 3]
    assert forces.abs().max() > 1e-2
    torch.testing.assert_close(forces.sum(1), torch.zeros(1, 3).double(), rtol=0, atol=1e-11 * forces.abs().max())


def damaged(change):
    poses = random_poses(2, 3)
    change(poses[1, 2])
    return poses


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda pose: pose[:3, :3].mul_(1.01), r"poses\[1, 2\] is not a pose.*RᵀR differs from the identity by 0\.02;"),
        (lambda pose: pose[:3, 0].neg_(), r"poses\[1, 2\].*determinant is -1"),
        (lambda pose: pose[3].copy_(torch.tensor([1.0, 2.0, 3.0, 1.0])), r"last row is \[1.0, 2.0, 3.0, 1.0\] instead"),
        (lambda pose: pose[0, 3].fill_(torch.nan), r"not finite.* 1 of 6 are refused"),
    ],
)
def test_matrices_that_are_not_poses(change, message):
    layer, states = PoseEmbedding(HEAD_DIM), random_states(2, 3)
    with pytest.raises(ValueError, match=message):
        layer(*states, damaged(change))
    with pytest.raises(ValueError, match="reference"):
        layer.frames(random_poses(2, 3), reference=damaged(change)[:, 2])
    layer.frames(damaged(change), known=torch.tensor([True, True, False]))


def test_states_that_do_not_fit():
    layer, states = PoseEmbedding(HEAD_DIM), random_states(2, 4)
    with pytest.raises(ValueError, match=r"head_dim=16"):
        layer(*(x[..., :8] for x in states), random_poses(2, 4))
    with pytest.raises(ValueError, match="poses of 4 tokens in 3 samples"):
        layer(*states, random_poses(3, 4))
    with pytest.raises(ValueError, match="torch.int64"):
        layer.undo(states[0].long(), random_poses(2, 4))
    with pytest.raises(ValueError, match="none were given"):
        PoseEmbedding(HEAD_DIM, patch_share=0.5)(*states, random_poses(2, 4))
    layer = PoseEmbedding(HEAD_DIM, patch_share=0.5)
    with pytest.raises(ValueError, match="coordinates of patches='train_grid'.*accepted are index, train_index"):
        layer.frames(random_poses(2, 4), patches=grid_positions((2, 2)))
    with pytest.raises(ValueError, match="3 tokens and poses of 4"):
        layer.frames(random_poses(2, 4), patches=torch.rand(3, 2))
    with pytest.raises(ValueError, match="patches of 4 tokens in 3 samples"):
        layer(*states, layer.frames(random_poses(2, 4), patches=torch.rand(3, 4, 2)))
    with pytest.raises(ValueError, match="query is a list"):
        layer([[1.0]], *states[1:], layer.frames(random_poses(2, 4), patches=torch.rand(4, 2)))
    with pytest.raises(ValueError, match="translation_scale=1.0; this one has .*patch_share=0.5"):
        layer(*states, PoseEmbedding(HEAD_DIM).frames(random_poses(2, 4)))


@pytest.mark.parametrize("options", [{"translation_scale": 0.1}, {"patch_share": 0.5, "rope_theta": 50.0}])
def test_frames_of_another_layer(options):
    fixed, poses = torch.eye(4, dtype=torch.float64), random_poses(2, 4)
    other = PoseEmbedding(HEAD_DIM, **options)
    patches = None if other.rotary is None else grid_positions((2, 2), "index")
    layer, states = PoseEmbedding(HEAD_DIM, patch_share=other.patch_share), random_states(2, 4)
    own, others = (each.frames(poses, reference=fixed, patches=patches) for each in (layer, other))
    name, value = list(options.items())[-1]
    with pytest.raises(ValueError, match=f"{name}={value}.*this one has .*{name}={getattr(layer, name)}"):
        layer(*states, own, others)
    with pytest.raises(ValueError, match=f"{name}={value}"):
        layer.undo(states[0], others)


@pytest.mark.parametrize("dtype, warned", [(torch.float32, True), (torch.float64, False)])
def test_distant_poses_in_float32_are_reported(dtype, warned, caplog):
    poses = random_poses(2, 4, dtype=dtype)
    poses[0, 0, 0, 3] = 1000.0
    name = "hf_liere.geometry.pose_embedding"
    logger = logging.getLogger(name)
    # transformers' loggers do not hand their messages on.
    logger.addHandler(caplog.handler)
    try:
        # A scale of its own, so that the warning has not appeared yet.
        PoseEmbedding(HEAD_DIM, translation_scale=0.99).frames(poses)
        assert ("more than 169 units" in caplog.text) == warned
    finally:
        logger.removeHandler(caplog.handler)


def tokens_model(**fields):
    """A model of transformers that attends by poses, with weights that are large enough to tell tokens apart."""
    sizes = {"hidden_size": HEADS * HEAD_DIM, "num_attention_heads": HEADS, "num_hidden_layers": 2}
    sizes |= {"intermediate_size": 48, "feature_size": 3, "num_labels": 2, "num_axes": 6, "initializer_range": 0.3}
    sizes |= {"position_encoding": "none", "use_class_token": False, "pooling": "mean"}
    model = LieRETokensForTokenClassification(LieRETokensConfig(**sizes | fields)).eval()
    model.set_attn_implementation("pose_embedding")
    return model


def test_attention_of_a_model_is_that_of_every_pair_of_tokens():
    model = tokens_model().double()
    attention = model.liere.layers[0].attention
    states, poses = torch.randn(1, 6, HEADS * HEAD_DIM, dtype=torch.float64), random_poses(1, 6)
    to_camera = torch.linalg.inv(poses[0])
    transforms = [torch.block_diag(*[each] * (HEAD_DIM // 4)) for each in to_camera]
    heads = [getattr(attention, f"{name}_proj")(states)[0].unflatten(-1, (HEADS, -1)) for name in "qkv"]
    attended = [pairwise(*(part[:, head] for part in heads), transforms, transforms) for head in range(HEADS)]
    with torch.no_grad():
        found, _ = attention(states, poses=poses)
        torch.testing.assert_close(found[0], attention.o_proj(torch.cat(attended, -1)), rtol=0, atol=1e-10)


def test_outputs_of_a_model_do_not_change_when_the_scene_moves():
    model, features, poses = tokens_model(), torch.randn(2, 6, 3), random_poses(2, 6)
    visible = torch.tensor([[1] * 6, [1, 1, 1, 1, 0, 0]])
    with torch.no_grad():
        before = model(features, poses=poses, attention_mask=visible).logits
        moved = random_poses(2, 1, distance=50.0) @ poses
        after = model(features, poses=moved, attention_mask=visible).logits
        # Poses in float64 become relative before they are rounded.
        torch.testing.assert_close(after, before, rtol=0, atol=1e-5 * before.abs().max().item())
        frames = PoseEmbedding(HEAD_DIM).frames(poses)
        assert torch.equal(model(features, poses=frames, attention_mask=visible).logits, before)
        assert (model(features, poses=poses.roll(1, 1), attention_mask=visible).logits - before).abs().max() > 1e-2
        # Hidden tokens are not attended to, wherever they are.
        hidden = torch.where(visible.bool()[..., None, None], poses, random_poses(2, 6))
        other = model(features, poses=hidden, attention_mask=visible).logits
        torch.testing.assert_close(other[visible.bool()], before[visible.bool()], rtol=0, atol=1e-5)


def test_a_model_needs_the_poses_of_all_tokens():
    features, poses = torch.randn(1, 6, 3), random_poses(1, 6)
    with pytest.raises(ValueError, match=r"attn_implementation='pose_embedding' needs the poses of all tokens"):
        tokens_model()(features)
    with pytest.raises(ValueError, match="poses of 6 tokens in 1 samples, but query of shape"):
        tokens_model(use_class_token=True)(features, poses=poses)


def test_a_saved_model_attends_by_poses(tmp_path):
    """Also when a patched model of transformers is saved; a name that is asked for comes before the saved one."""
    features, poses = torch.randn(2, 6, 3), random_poses(2, 6)
    model = tokens_model()
    model.save_pretrained(tmp_path / "tokens")
    loaded = AutoModelForTokenClassification.from_pretrained(tmp_path / "tokens").eval()
    with torch.no_grad():
        assert torch.equal(loaded(features, poses=poses).logits, model(features, poses=poses).logits)
    loaded = AutoModelForTokenClassification.from_pretrained(tmp_path / "tokens", attn_implementation="sdpa")
    loaded.save_pretrained(tmp_path / "sdpa")
    assert "attn_implementation" not in (tmp_path / "sdpa" / "config.json").read_text()

    images, poses = torch.randn(1, 3, 16, 16), random_poses(5)
    patched = patched_vit()
    patched.set_attn_implementation("pose_embedding")
    patched.save_pretrained(tmp_path / "patched")
    loaded = AutoModelForImageClassification.from_pretrained(tmp_path / "patched").eval()
    with torch.no_grad():
        wanted = patched(images, poses=poses).logits
        assert torch.equal(loaded(images, poses=poses).logits, wanted)
        assert (patched(images, poses=poses.flip(0)).logits - wanted).abs().max() > 1e-4


SIZES = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
IMAGES = {"image_size": 16, "patch_size": 8, **SIZES}


def patched_vit():
    model = ViTForImageClassification(ViTConfig(initializer_range=0.3, **IMAGES)).eval()
    patch(model, RotaryPatchConfig(position_encoding="liere"))
    return model


def patched_llama():
    model = LlamaForCausalLM(LlamaConfig(vocab_size=20, **SIZES)).eval()
    patch(model, RotaryPatchConfig(position_encoding="rope_mixed", rotary_init="pretrained"))
    return model


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize(
    "build, inputs",
    [
        (lambda: LieREViTForImageClassification(LieREViTConfig(**IMAGES)), torch.randn(1, 3, 16, 16)),
        (lambda: LieREViTBackbone(LieREViTConfig(**IMAGES)), torch.randn(1, 3, 16, 16)),
        (
            lambda: LieREVideoForVideoClassification(LieREVideoConfig(num_frames=2, **IMAGES)),
            torch.randn(1, 2, 3, 16, 16),
        ),
        (tokens_model, torch.randn(1, 5, 3)),
        (patched_vit, torch.randn(1, 3, 16, 16)),
        (patched_llama, torch.arange(5)[None]),
    ],
)
def test_poses_that_attention_would_ignore(build, inputs, implementation):
    model = build().eval()
    model.set_attn_implementation(implementation)
    with pytest.raises(ValueError, match=f"poses were given, but attn_implementation='{implementation}' ignores them"):
        model(inputs, poses=random_poses(5))
    model(inputs, poses=None)


def test_other_attention_that_takes_poses(tmp_path):
    """The name of a user's own attention function is saved as well, and frames keep the options of their layer."""

    def scaled(module, query, key, value, mask, poses=None, **kwargs):
        frames = PoseEmbedding(HEAD_DIM, translation_scale=0.1).frames(poses)
        return AttentionInterface()["pose_embedding"](module, query, key, value, mask, poses=frames, **kwargs)

    AttentionInterface.register("scaled_poses", scaled)
    try:
        model, features, poses = tokens_model(), torch.randn(1, 6, 3), random_poses(1, 6)
        model.set_attn_implementation("scaled_poses")
        model.save_pretrained(tmp_path)
        loaded = AutoModelForTokenClassification.from_pretrained(tmp_path).eval()
        shrunk = poses.clone()
        shrunk[..., :3, 3] *= 0.1
        with torch.no_grad():
            found = loaded(features, poses=poses).logits
            assert torch.equal(found, model(features, poses=poses).logits)
            loaded.set_attn_implementation("pose_embedding")
            torch.testing.assert_close(found, loaded(features, poses=shrunk).logits, rtol=1e-5, atol=1e-5)
    finally:
        del AttentionInterface._global_mapping["scaled_poses"]
