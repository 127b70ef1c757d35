"""Attention between cameras depends on their relative poses, as GTA and PRoPE write it."""

import inspect
import math
import re

import pytest
import torch
from pose_reference import HEAD_DIM, HEADS, by_distance, expected, random_poses, random_states, tiled
from torch.nn import functional as F

from hf_liere import PoseEmbedding, grid_positions


PATCHES, SIZE = (2, 3), (192, 256)


def random_intrinsics(*shape):
    """In pixels of images of `SIZE`, with a skew."""
    intrinsics = torch.zeros(*shape, 3, 3, dtype=torch.float64)
    intrinsics[..., 0, 0], intrinsics[..., 1, 1] = 200 + 20 * torch.rand(2, *shape, dtype=torch.float64)
    intrinsics[..., 0, 1], intrinsics[..., 0, 2], intrinsics[..., 1, 2] = 5, 130, 90
    intrinsics[..., 2, 2] = 1
    return intrinsics


def attend(layer, states, *frames):
    query, key, value = layer(*states, *frames)
    bias = None if layer.distance_weight is None else layer.distance_bias(*frames).to(query.dtype)
    output = F.scaled_dot_product_attention(query, key, value, bias, enable_gqa=query.shape[1] != key.shape[1])
    return layer.undo(output, frames[0])


def weighted(layer, *weights):
    with torch.no_grad():
        layer.distance_weight.copy_(torch.tensor(weights))
    return layer


def with_turns(matrices, angles):
    """(B, N, 2w, 2w): (B, N, w, w) matrices, then planes that turn back by (N, w/2) angles."""
    cos, sin = angles.double().cos(), angles.double().sin()
    planes = torch.stack([torch.stack([cos, sin], -1), torch.stack([-sin, cos], -1)], -2)  # (N, w/2, 2, 2)
    turns = torch.stack([torch.block_diag(*each) for each in planes]).expand_as(matrices)
    nothing = torch.zeros_like(matrices)
    return torch.cat([torch.cat([matrices, nothing], -1), torch.cat([nothing, turns], -1)], -2)


def projections(poses, intrinsics):
    """f_x / w, f_y / h, c_x / w − ½, c_y / h − ½, as the code of PRoPE normalises them, times world to camera."""
    pixels = torch.tensor([[1 / SIZE[1], 0, -0.5], [0, 1 / SIZE[0], -0.5], [0, 0, 1]], dtype=torch.float64)
    found = torch.eye(4, dtype=torch.float64).repeat(*poses.shape[:2], 1, 1)
    found[..., :3, :3] = pixels @ intrinsics.double()
    return found @ torch.linalg.inv(poses.double())


def prope_transforms(poses, intrinsics, grid, cameras, width=HEAD_DIM):
    """(B, N, width, width): projections, and for half of the channels axial RoPE of base 100 by indices of patches."""
    places = torch.cartesian_prod(*(torch.arange(size) for size in grid)).repeat(cameras, 1)
    frequencies = 100 ** -(torch.arange(width // 8).double() / (width // 8))
    angles = (places.unsqueeze(-1) * frequencies).flatten(1)  # rows before columns
    return with_turns(tiled(projections(poses, intrinsics), width // 2), angles)


def largest_difference(found, wanted):
    return ((found - wanted).abs().max() / wanted.abs().max()).item()


def by_patches(cameras):
    """Each camera, (B, C, …), for every patch of its image."""
    return cameras.repeat_interleave(math.prod(PATCHES), dim=1)


@pytest.mark.parametrize("scale", [1.0, 0.1])
def test_equals_gta(scale):
    poses, states = random_poses(2, 5), random_states(2, 5)
    worlds_to_cameras = torch.linalg.inv(poses)
    worlds_to_cameras[..., :3, 3] *= scale
    found = attend(PoseEmbedding(HEAD_DIM, translation_scale=scale), states, poses)
    # Rounding of float64.
    torch.testing.assert_close(found, expected(states, tiled(worlds_to_cameras)), rtol=1e-11, atol=1e-11)


def test_equals_prope():
    """Two cameras with six patches each."""
    poses, intrinsics = by_patches(random_poses(2, 2)), by_patches(random_intrinsics(2, 2))
    states, layer = random_states(2, 12), PoseEmbedding(HEAD_DIM, patch_share=0.5).double()
    frames = layer.frames(poses, intrinsics=intrinsics, image_size=SIZE, patches=grid_positions(PATCHES, "index"))
    wanted = expected(states, prope_transforms(poses, intrinsics, PATCHES, cameras=2))
    # Rounding of float64.
    assert largest_difference(attend(layer, states, frames), wanted) < 1e-13


def test_equals_models_of_gta():
    """
    Half of the channels SE(3), half SO(2) of patches at 0, 1/h … and 0, 1/w …, with the frequencies 2π 2^(k−n) for
    k = 1 … n in turn on rows and columns, the slowest first.
    """
    scale, q = 0.01, HEAD_DIM // 8
    poses = by_patches(random_poses(2, 2))
    extrinsics = torch.linalg.inv(poses)
    extrinsics[..., :3, 3] *= scale
    places = torch.cartesian_prod(*(torch.arange(size).double() / size for size in PATCHES)).repeat(2, 1)  # (N, 2)
    frequencies = 2 * math.pi * 2.0 ** (torch.arange(1, q + 1).double() - q)
    transforms = with_turns(tiled(extrinsics, HEAD_DIM // 2), (frequencies.unsqueeze(-1) * places[:, None]).flatten(1))
    layer = PoseEmbedding(HEAD_DIM, patch_share=0.5, translation_scale=scale, rope_theta=2**q).double()
    frames = layer.frames(poses, patches=2 * math.pi * places)
    # Channels of the layer: rows before columns, the fastest plane of each first.
    planes = torch.arange(HEAD_DIM // 2, HEAD_DIM).view(q, 2, 2).flip(0).transpose(0, 1)
    order = [*range(HEAD_DIM // 2), *planes.flatten().tolist()]
    states = random_states(2, 12)
    found = attend(layer, [x[..., order] for x in states], frames)
    # Rounding of float64.
    assert largest_difference(found, expected(states, transforms)[..., order]) < 1e-13


def test_keys_of_other_tokens():
    poses, key_poses, states = random_poses(2, 3), random_poses(2, 5), random_states(2, 3, 5, 5)
    transforms = [tiled(torch.linalg.inv(each)) for each in (poses, key_poses)]
    layer, places = PoseEmbedding(HEAD_DIM, num_heads=HEADS).double(), [each[..., :3, 3] for each in (poses, key_poses)]
    assert not layer.distance_bias(poses, key_poses).any()
    torch.testing.assert_close(attend(layer, states, poses, key_poses), expected(states, *transforms))
    wanted = expected(states, *transforms, by_distance([-0.5, 0.25], *places))
    frames = weighted(layer, 0.5, -0.25).frames(poses)
    for given in ((poses, key_poses), (frames, layer.frames(key_poses, reference=frames.reference))):
        torch.testing.assert_close(attend(layer, states, *given), wanted, rtol=1e-11, atol=1e-11)
    with pytest.raises(ValueError, match="key_poses"):
        layer(*states, poses)
    with pytest.raises(ValueError, match="different references"):
        layer(*states, frames, layer.frames(key_poses))


def test_distances_are_scaled():
    poses = random_poses(2, 3)
    layer = weighted(PoseEmbedding(HEAD_DIM, translation_scale=0.1, num_heads=1), 2.0)
    places = 0.1 * poses[..., :3, 3]
    wanted = by_distance([-2.0], places, places).float()
    torch.testing.assert_close(layer.distance_bias(poses), wanted, rtol=1e-6, atol=1e-7)
    assert layer.distance_bias(poses[0]).shape == (1, 1, 3, 3)
    with pytest.raises(ValueError, match="num_heads=None"):
        PoseEmbedding(HEAD_DIM).distance_bias(poses)


@pytest.mark.parametrize(
    "distance, away, given, states, bound",
    [
        (1.0, 1.0, torch.float32, torch.float32, 1e-5),
        (15.0, 30.0, torch.float32, torch.float32, 1e-5),
        (15.0, 5000.0, torch.float64, torch.float32, 1e-5),
        # Positions of 5 km are rounded by 5e-13.
        (1.0, 5000.0, torch.float64, torch.float64, 1e-10),
    ],
)
def test_invariant_under_motions_of_the_scene(distance, away, given, states, bound):
    """The largest output is the unit; cameras are in 50 m around the origin or kilometres away, near ones preferred."""
    motion = random_poses()
    motion[:3, 3] = away * F.normalize(torch.randn(3, dtype=torch.float64), dim=0)
    poses, states = random_poses(2, 8, distance=distance), random_states(2, 8, dtype=states)
    layer = weighted(PoseEmbedding(16, num_heads=HEADS).to(states[0]), 1 / distance**2, -0.1 / distance**2)
    still, moved = (attend(layer, states, each.to(given)) for each in (poses, motion @ poses))
    assert largest_difference(moved, still) < bound


def test_keys_are_cached_with_a_fixed_reference():
    """Whichever it is, for all samples or for each."""
    poses, states, layer = random_poses(2, 6), random_states(2, 6), PoseEmbedding(HEAD_DIM)
    wanted = attend(layer, states, poses)
    for reference in (random_poses(), random_poses(2)):
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
    options = {"image_size": SIZE, "known": known}
    placed = torch.linalg.inv(poses[[0, 1], [1, 0]])[:, None] @ poses
    transforms = torch.where(known[..., None, None], projections(placed, intrinsics), torch.eye(4).double())
    poses[~known], intrinsics[~known] = torch.nan, torch.inf
    poses.requires_grad_()
    found = attend(layer, states, layer.frames(poses, intrinsics=intrinsics, **options))
    torch.testing.assert_close(found, expected(states, tiled(transforms)), rtol=1e-10, atol=1e-10)
    moved = attend(layer, states, layer.frames(random_poses() @ poses, intrinsics=intrinsics, **options))
    torch.testing.assert_close(moved, found, rtol=1e-10, atol=1e-10)
    found.square().sum().backward()
    assert poses.grad[~known].eq(0).all() and poses.grad[known].isfinite().all()
    nothing = layer.frames(torch.full((6, 4, 4), torch.nan), known=torch.zeros(6, dtype=torch.bool))
    assert all(map(torch.equal, layer(*states, nothing), states))


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
    poses, width = example["poses"], example["prope"].head_dim
    transforms = prope_transforms(poses, example["intrinsics"], (4, 4), poses.shape[1] // 16, width)
    query, key = torch.randn(2, *poses.shape[:2], width, dtype=torch.float64)
    wanted = (query[:, :, None] @ transforms).squeeze(2) @ (torch.linalg.inv(transforms) @ key[..., None])[..., 0].mT
    found_query, found_key, _ = example["prope"](*(each[:, None] for each in (query, key, key)), example["frames"])
    # Rounding of float64.
    assert largest_difference((found_query @ found_key.mT)[:, 0], wanted) < 1e-13


def test_samples_share_poses_and_queries_share_keys():
    poses, layer = random_poses(5), PoseEmbedding(HEAD_DIM, patch_share=0.25)
    frames, all_frames = (
        layer.frames(each, patches=torch.arange(10.0).view(5, 2)) for each in (poses, poses.expand(3, -1, -1, -1))
    )
    query, (_, key, value) = torch.randn(3, 4, 5, HEAD_DIM).double(), random_states(3, 5)
    every = [query, key.repeat_interleave(2, dim=1), value.repeat_interleave(2, dim=1)]
    wanted = attend(layer, every, all_frames)
    for given in (frames, all_frames):
        torch.testing.assert_close(attend(layer, (query, key, value), given), wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype, bound", [(torch.bfloat16, 2**-7), (torch.float16, 2**-10), (torch.float32, 1e-6)])
def test_states_are_rounded_once(dtype, bound):
    """Also under autocast."""
    poses, layer = random_poses(2, 5, dtype=torch.float32), PoseEmbedding(HEAD_DIM, patch_share=0.5)
    patches, states = torch.rand(5, 2), [x.to(dtype) for x in random_states(2, 5)]
    wanted = layer(*(x.double() for x in states), layer.frames(poses, patches=patches))
    with torch.autocast("cpu", torch.bfloat16):
        found = layer(*states, layer.frames(poses, patches=patches))
    for half, exact in zip(found, wanted):
        assert half.dtype == dtype and largest_difference(half.double(), exact) <= bound


def test_gradients():
    """Of states and weights, and of all entries of poses and intrinsics that are not fixed."""
    layer, known = PoseEmbedding(8, patch_share=0.5, num_heads=1).double(), torch.tensor([True, False, True])
    states = [torch.randn(1, 1, 3, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    poses, intrinsics = random_poses(1, 3), random_intrinsics(1, 3)
    rigid = poses[..., :3, :].clone().requires_grad_()
    projection = intrinsics[..., [0, 0, 0, 1, 1], [0, 1, 2, 1, 2]].requires_grad_()

    def output(query, key, value, rigid, projection, weight):
        rows = torch.cat([projection[..., :3], torch.zeros(1, 3, 1), projection[..., 3:]], -1).unflatten(-1, (2, 3))
        frames = layer.frames(
            torch.cat([rigid, poses[..., 3:, :]], dim=-2),
            intrinsics=torch.cat([rows, intrinsics[..., 2:, :]], dim=-2),
            image_size=SIZE,
            known=known,
            patches=torch.arange(6.0).view(3, 2),
        )
        return attend(layer, (query, key, value), frames)

    # A step of 1e-6 leaves poses within their tolerance.
    inputs = *states, rigid, projection, weighted(layer, 0.3).distance_weight
    assert torch.autograd.gradcheck(output, inputs, eps=1e-6, atol=1e-6)


def test_compiles_into_one_graph():
    layer = PoseEmbedding(HEAD_DIM, patch_share=0.5)
    states, poses = random_states(2, 6, dtype=torch.float32), random_poses(2, 6, dtype=torch.float32)
    known, intrinsics = torch.rand(2, 6) > 0.3, random_intrinsics(2, 6).float()

    def queries(query, poses, intrinsics, known):
        patches = grid_positions(PATCHES, "index")
        return layer.undo(
            query, layer.frames(poses, intrinsics=intrinsics, image_size=SIZE, known=known, patches=patches)
        )

    arguments = (states[0], poses.requires_grad_(), intrinsics, known)
    found, wanted = torch.compile(queries, fullgraph=True, backend="aot_eager")(*arguments), queries(*arguments)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    gradients = [torch.autograd.grad(each.square().sum(), poses)[0] for each in (found, wanted)]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)


class Attention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.pose = PoseEmbedding(HEAD_DIM)

    def forward(self, query, key, value, poses):
        return attend(self.pose, (query, key, value), poses)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_exports_and_is_transformed():
    """As a program, and by `vmap` over scenes."""
    states, poses, model = random_states(2, 3, dtype=torch.float32), random_poses(4, 2, 3).float(), Attention()
    wanted = torch.stack([model(*states, each) for each in poses])
    program = torch.export.export(model, (*states, poses[0])).module()
    torch.testing.assert_close(program(*states, poses[1]), wanted[1], rtol=1e-5, atol=1e-6)
    found = torch.func.vmap(lambda each: model(*states, each))(poses)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
