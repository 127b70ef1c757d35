"""Generated orientations, views and pointers: that their labels are right, and what moving the world does to models."""

import itertools
import math

import numpy as np
import pytest
import torch
import yaml
from checkout import ROOT

from hf_liere import LieRETokensForTokenClassification, matrix_to_rotation_vector
from hf_liere.errors import InputError
from training import token_classification
from training.common.command_line import parse_arguments, to_flags
from training.common.tasks import with_task
from training.data.augmentation import IGNORED_LABEL
from training.data.tokens import TokenDataArguments, load_tokens
from training.evidence.data import pointers, poses, views


RECIPES = {name: str(ROOT / "training" / "evidence" / "recipes" / f"{name}_mini.yaml") for name in ("poses", "views")}
FEW = ["--max_train_samples", "640", "--max_eval_samples", "50", "--use_cpu", "true", "--disable_tqdm", "true"]


def run(folder, *flags, name="poses"):
    return token_classification.main([RECIPES[name], "--output_dir", str(folder), *FEW, *flags])


def exponentials(vectors):
    """Rotation matrices (…, 3, 3) of rotation vectors (…, 3), in float64."""
    vectors = torch.as_tensor(vectors, dtype=torch.float64)
    x, y, z = vectors.unbind(-1)
    zero = torch.zeros_like(x)
    skew = torch.stack([zero, -z, y, z, zero, -x, -y, x, zero], dim=-1)
    return torch.linalg.matrix_exp(skew.unflatten(-1, (3, 3)))


def angles(rotations):
    """Angles of rotation matrices, by their trace."""
    return ((rotations.diagonal(dim1=-2, dim2=-1).sum(-1) - 1) / 2).clamp(-1, 1).acos()


@pytest.mark.parametrize("columns", [poses.pose_columns, views.view_columns, pointers.pointer_columns])
def test_samples_depend_on_their_split_and_number_alone(columns):
    many, few = (columns("train", count, 30) for count in (poses.CHUNK + 7, 5))
    assert all(len(values) == poses.CHUNK + 7 for values in many.values())
    for name, values in few.items():
        np.testing.assert_array_equal(values, many[name][:5])
    assert not np.array_equal(few["positions"], many["positions"][poses.CHUNK : poses.CHUNK + 5])
    assert not np.array_equal(few["positions"], columns("validation", 5, 30)["positions"])


@pytest.mark.parametrize("largest", [30.0, 180.0])
def test_the_target_is_turned_from_the_query_and_its_class_is_the_label(largest):
    columns = poses.pose_columns("validation", 1000, largest)
    rotations = exponentials(columns["positions"])  # (1000, N, 3, 3)
    # All columns are the same orientations, rounded to float32, at one place.
    torch.testing.assert_close(
        rotations.flatten(-2), torch.tensor(columns["matrices"], dtype=torch.float64), atol=1e-6, rtol=0
    )
    placed = np.tile(np.eye(4, dtype=np.float32), (1000, poses.TOKENS, 1, 1))
    placed[..., :3, :3] = columns["matrices"].reshape(1000, -1, 3, 3)
    np.testing.assert_array_equal(columns["poses"], placed.reshape(1000, -1, 16))
    seen = columns["relative_matrices"].reshape(1000, -1, 3, 3)
    np.testing.assert_allclose(rotations[:, :1].numpy() @ seen, rotations, atol=1e-6)
    assert angles(rotations[:, 0]).max() <= math.radians(largest) + 1e-3
    wanted = rotations[:, :1] @ exponentials(poses.RELATIVE)
    distances = angles(wanted.mT @ rotations)[:, 1:]
    nearest = distances.argmin(dim=1) + 1
    classes, labels = columns["features"][:, :, : poses.CLASSES], columns["labels"]
    np.testing.assert_array_equal(classes.sum(axis=-1), np.arange(poses.TOKENS)[None] > np.zeros((1000, 1)))
    np.testing.assert_array_equal(columns["features"][..., -1], 1 - classes.sum(axis=-1))
    assert (labels[:, 1:] == IGNORED_LABEL).all()
    right = classes[np.arange(1000), nearest].argmax(axis=-1) == labels[:, 0]
    # Another token is nearer than the target by chance in less than one sample of a hundred.
    assert right.mean() > 0.99 and distances.min(dim=1).values.max() < 6 * poses.NOISE
    assert np.bincount(labels[:, 0], minlength=poses.CLASSES).min() > 200
    if largest == 180:
        # The mean angle of uniformly distributed rotations; their matrices average to zero.
        assert angles(rotations[:, 0]).mean() == pytest.approx(math.pi / 2 + 2 / math.pi, abs=0.06)
        assert rotations[:, 0].mean(dim=0).abs().max() < 0.07


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Models of the recipe after a few steps, by the name of their encoding."""
    models = {}
    for name, changed in {
        "so3": ["--rotary_learning_rate_factor", "0"],
        "rope_mixed": ["--position_encoding", "rope_mixed", "--block_size", "None", "--rotary_init", "None"],
    }.items():
        folder = tmp_path_factory.mktemp(name) / "run"
        run(folder, *changed)
        models[name] = LieRETokensForTokenClassification.from_pretrained(folder).double().eval()
    return models


def test_answers_of_relative_rotations_do_not_change_when_the_world_turns(trained):
    """Trained in one frame; the generators of so(3) are kept. Commuting rotations see the frame."""
    columns = poses.pose_columns("validation", 200, 30)
    features, positions = (torch.tensor(columns[name], dtype=torch.float64) for name in ("features", "positions"))
    turned = matrix_to_rotation_vector(exponentials([1.0, -2.0, 1.5]) @ exponentials(positions))
    changes = {}
    for name, model in trained.items():
        with torch.no_grad():
            before, after = (model(features, some).logits[:, 0] for some in (positions, turned))
        changes[name] = ((after - before).abs().max() / before.abs().max()).item()
        if name == "so3":
            assert torch.equal(before.argmax(dim=-1), after.argmax(dim=-1))
    # Float64 products of the exponentials; commuting encodings change by as much as the logits are large.
    assert changes["so3"] < 1e-10 and changes["rope_mixed"] > 1e-2


def test_orientations_can_be_features(tmp_path):
    columns = ["--feature_columns", "features", "matrices", "--max_steps", "1"]
    unused = ["--block_size", "None", "--rotary_init", "None"]
    metrics = run(tmp_path / "run", *columns, "--position_encoding", "none", *unused)
    config = LieRETokensForTokenClassification.from_pretrained(tmp_path / "run").config
    assert (config.feature_size, config.num_labels, metrics["eval_samples"]) == (5 + 9, 4, 50)
    arguments = with_task(TokenDataArguments, "poses")(
        dataset_name="poses", feature_columns=["matrices"], max_train_samples=3
    )
    table = load_tokens(arguments, ("training",), 0).train
    np.testing.assert_array_equal(table.features[2], poses.pose_columns("train", 3, 30)["matrices"][2])


@pytest.mark.parametrize("largest", [30.0, 180.0])
def test_cameras_that_see_the_marked_point_are_labelled(largest):
    columns = views.view_columns("validation", 1000, largest)
    placed = torch.tensor(columns["poses"], dtype=torch.float64).unflatten(-1, (4, 4))  # (1000, N, 4, 4)
    # In the frames of the first camera and of the marked point, which depend on no motion.
    for frame, token in (("relative", 0), ("marked", 4)):
        seen = (torch.linalg.inv(placed[:, token : token + 1]) @ placed)[..., :3, :]  # (1000, N, 3, 4)
        told = [columns[f"{frame}_{name}"].reshape(1000, 8, 3, -1) for name in ("matrices", "translations")]
        np.testing.assert_allclose(np.concatenate(told, axis=-1), seen, atol=1e-5)
    # All columns are the same poses, rounded to float32.
    for part in (exponentials(columns["orientations"]), torch.tensor(columns["matrices"]).unflatten(-1, (3, 3))):
        torch.testing.assert_close(placed[..., :3, :3], part.double(), atol=1e-6, rtol=0)
    parts = [columns[name] for name in ("orientations", "translations")]
    np.testing.assert_array_equal(columns["positions"], np.concatenate(parts, axis=-1))
    np.testing.assert_array_equal(columns["poses"].reshape(1000, -1, 4, 4)[..., :3, 3], columns["translations"])
    kinds = columns["features"].argmax(axis=-1)
    assert (kinds == [0, 0, 0, 0, 1, 2, 2, 2]).all() and (columns["labels"][:, 4:] == IGNORED_LABEL).all()
    marked = torch.linalg.inv(placed[:, :4]) @ placed[:, 4:5, :, 3:]  # (1000, 4, 4, 1), seen from the cameras
    away = torch.atan2(marked[..., :2, 0].norm(dim=-1), marked[..., 2, 0])
    # Poses are rounded to float32.
    decided = (away - views.FIELD).abs() > 1e-5
    assert torch.equal((away < views.FIELD)[decided], torch.tensor(columns["labels"][:, :4] == 1)[decided])
    assert 0.4 < (columns["labels"][:, :4] == 1).mean() < 0.6
    # Cameras look ahead, and with a scene that is turned by any rotation in all directions.
    ahead = angles(placed[:, :4, :3, :3]).mean()
    assert ahead < 1 if largest == 30 else abs(ahead - (math.pi / 2 + 2 / math.pi)) < 0.06


@pytest.mark.parametrize(
    "columns, others, expected",
    [
        (poses.pose_columns, poses.TOKENS - 1, poses.BAG_OF_CLASSES_ACCURACY),
        (pointers.pointer_columns, pointers.CELLS - 1, pointers.BAG_OF_GLYPHS_ACCURACY),
    ],
)
def test_without_positions_the_most_frequent_class_is_right_as_often_as_stated(columns, others, expected):
    """The sweeps state the same as their `chance`."""
    exact = 0.0
    for first, second, third in itertools.product(range(others + 1), repeat=3):
        if (fourth := others - first - second - third) >= 0:
            counts = (first, second, third, fourth)
            exact += math.factorial(others) / math.prod(map(math.factorial, counts)) * max(counts) / 4**others
    assert exact / others == pytest.approx(expected, rel=1e-12)
    drawn = columns("validation", 4000, 30)
    classes, labels = drawn["features"][..., :4], drawn["labels"]
    right = np.mean(classes.sum(axis=1).argmax(axis=1) == labels[labels != IGNORED_LABEL])
    # Three standard errors of 4,000 samples.
    assert right == pytest.approx(expected, abs=0.024)
    sweep = yaml.safe_load(
        (ROOT / "training" / "evidence" / "sweeps" / f"{columns.__module__.split('.')[-1]}.yaml").read_text("utf-8")
    )
    assert sweep["chance"] == round(expected, 3)


@pytest.mark.parametrize("largest", [0.0, 6.0])
def test_the_header_names_the_step_to_the_glyph_that_is_its_label(largest):
    """Found by the distances of positions: a shift of the whole grid changes them in no sample."""
    columns = pointers.pointer_columns("validation", 1000, largest)
    features, positions, labels = (columns[name] for name in ("features", "positions", "labels"))
    glyphs, steps = features[..., : pointers.CLASSES], features[..., pointers.CLASSES :]
    headers, samples = glyphs.sum(axis=-1).argmin(axis=1), np.arange(1000)
    # A glyph or two steps, never both.
    np.testing.assert_array_equal(glyphs.sum(axis=-1) + steps.sum(axis=-1) / 2, 1)
    np.testing.assert_array_equal(steps.sum(axis=(1, 2)), 2)
    named = steps[samples, headers].reshape(1000, 2, pointers.STEPS).argmax(axis=-1) - (pointers.SIZE - 1)
    away = np.abs(positions - (positions[samples, headers] + named)[:, None]).max(axis=-1)  # (1000, N)
    # One token alone is there, up to the rounding of the shifted positions to float32.
    np.testing.assert_array_equal((away < 1e-5).sum(axis=1), 1)
    np.testing.assert_array_equal(labels[samples, headers], glyphs[samples, away.argmin(axis=1)].argmax(axis=-1))
    assert ((labels != IGNORED_LABEL).sum(axis=1) == 1).all()
    assert np.bincount(labels[samples, headers], minlength=pointers.CLASSES).min() > 200
    origins = positions.min(axis=1)
    assert np.abs(origins).max() <= largest and (largest == 0 or (np.abs(origins).max(axis=0) > 5).all())


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--pose_columns", "translations"], r"translations have shape \(8, 3\); poses of 8 tokens are \(8, 16\)"),
        (["--pose_columns", "motions"], "views has no column 'motions'"),
        (["--use_class_token", "true"], "1 class and register tokens have no pose; accepted: --use_class_token false"),
        (["--num_attention_heads", "8"], "--pose_columns: head_dim=6: 4 × 4 matrices need multiples of 4"),
        (["--attn_implementation", "sdpa"], "--attn_implementation sdpa: poses need attention of their own"),
    ],
)
def test_poses_that_do_not_fit_are_refused(tmp_path, flags, message):
    with pytest.raises(InputError, match=message):
        run(tmp_path / "run", *flags, name="views")


def test_settings_of_a_sweep_are_flags():
    """Lists of columns are several words, and lists of a configuration one."""
    settings = {"feature_columns": ["features", "matrices"], "position_table_size": [2, 3, 4], "block_size": None}
    settings |= {"dataset_name": "solids"}
    flags = to_flags({**settings, "training_points": [3, 5]}, token_classification.ARGUMENT_CLASSES)
    model, data, _ = parse_arguments(
        [*flags, "--do_train", "--output_dir", "unused"], token_classification.ARGUMENT_CLASSES
    )
    assert data.feature_columns == ["features", "matrices"] and data.training_points == [3, 5]
    assert model.architecture() == {"position_table_size": [2, 3, 4], "block_size": None}


@pytest.mark.parametrize(
    "name, setting, message",
    [
        ("poses", {"evaluation_angle": 200.0}, "--evaluation_angle 200.0; accepted: 0 … 180"),
        ("pointers", {"evaluation_shift": -1.0}, "--evaluation_shift -1.0; accepted: 0 and above"),
    ],
)
def test_settings_that_a_task_does_not_have(name, setting, message):
    with pytest.raises(InputError, match=message):
        with_task(TokenDataArguments, name)(dataset_name=name, **setting)
