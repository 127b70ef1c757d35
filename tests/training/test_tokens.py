"""Files of tokens, generated solids, and whole runs on them."""

import json
import logging
import math

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from matplotlib.path import Path as Outline
from safetensors.numpy import load_file
from training_helpers import write_points

from hf_liere import LieRETokensForSequenceClassification, LieRETokensForTokenClassification
from hf_liere.errors import InputError
from training import token_classification
from training.common.tasks import with_task
from training.data import solids
from training.data.tokens import TokenDataArguments, TokenExamples, collate_tokens, load_tokens
from training.engine.token_setup import placement


TINY = "--hidden_size 16 --num_hidden_layers 1 --num_attention_heads 2 --intermediate_size 32".split()
TINY += "--use_cpu true --disable_tqdm true --learning_rate 1e-3 --per_device_train_batch_size 4".split()
SERIES = """# A comment
@problemName Test
@timeStamps false
@univariate false
@classLabel true low high
@data
1,2,3:4,5,6:low
7,8:9,10:high
"""


def run(folder, *flags):
    return token_classification.main(["--output_dir", str(folder), *TINY, *map(str, flags)])


def load(*parts, seed=0, **arguments):
    kind = with_task(TokenDataArguments, arguments.get("dataset_name"))
    return load_tokens(kind(**arguments), parts or ("training",), seed)


OF_POINTS = {"feature_columns": ["height"], "position_columns": ["x"], "label_column": "part"}
FLAGS_OF_POINTS = "--feature_columns height --position_columns x --label_column part".split()


def test_series_of_unequal_lengths(tmp_path):
    (tmp_path / "a.ts").write_text(SERIES)
    data = load(train_files=[str(tmp_path / "a.ts")])
    assert data.task == "sequence" and data.label_names == ["high", "low"] and data.named
    assert [table.tolist() for table in data.train.features] == [[[1, 4], [2, 5], [3, 6]], [[7, 9], [8, 10]]]
    assert [table.tolist() for table in data.train.positions] == [[[0], [1], [2]], [[0], [1]]]
    assert data.train.labels == [1, 0]


def test_arrays_with_and_without_lengths(tmp_path):
    features, positions = np.random.default_rng(0).random((2, 3, 4)), np.ones((2, 3, 2))
    np.savez(tmp_path / "equal.npz", features=features, positions=positions, labels=[0, 2])
    data = load(train_files=[str(tmp_path / "equal.npz")])
    np.testing.assert_array_equal(np.stack(data.train.features), features.astype(np.float32))
    assert data.label_names == ["0", "1", "2"] and not data.named and data.train.sizes == (4, 2)
    flat = {"features": np.arange(5.0), "labels": np.array([0, 1, -100, 1, 0]), "lengths": np.array([3, 2])}
    np.savez(tmp_path / "flat.npz", **flat)
    data = load(train_files=[str(tmp_path / "flat.npz")])
    assert [table[:, 0].tolist() for table in data.train.features] == [[0, 1, 2], [3, 4]]
    assert data.task == "token" and [labels.tolist() for labels in data.train.labels] == [[0, 1, -100], [1, 0]]


def test_columns_of_a_table_stand_side_by_side(tmp_path):
    path = write_points(tmp_path / "a.parquet", 5)
    data = load(train_files=[path], **OF_POINTS | {"feature_columns": ["x", "height"]})
    table = pyarrow.parquet.read_table(path).to_pydict()
    for index, features in enumerate(data.train.features):
        expected = np.column_stack([table["x"][index], table["height"][index]])
        np.testing.assert_array_equal(features, expected.astype(np.float32))
        np.testing.assert_array_equal(data.train.positions[index][:, 0], table["x"][index])
        names = [data.label_names[label] for label in data.train.labels[index]]
        assert names == table["part"][index]


def test_batches_are_padded():
    data = load(dataset_name="solids", max_train_samples=3)
    examples = TokenExamples(data.train, [5, 4, 3, 2, 1, 0])
    batch = collate_tokens([examples[0], examples[(7, 2)], examples[(7, -1)]])
    counts = [len(data.train.features[index]) for index in (0, 2)] + [1]
    assert batch["attention_mask"].sum(dim=1).tolist() == counts
    assert batch["inputs_embeds"].shape == (3, max(counts), 1) and batch["positions"].shape == (3, max(counts), 3)
    assert (batch["positions"][batch["attention_mask"] == 0] == 0).all()
    assert batch["labels"].tolist() == [5 - data.train.labels[0], 5 - data.train.labels[2], -100]


@pytest.mark.parametrize("name", solids.PLANS)
def test_plans_against_matplotlib(name):
    points = np.random.default_rng(0).uniform(-1.1, 1.1, (2000, 2))
    expected = np.zeros(2000, dtype=bool)
    for outline in solids.PLANS[name]:
        assert np.linalg.norm(outline, axis=1).max() <= 1
        expected ^= Outline(outline, closed=False).contains_points(points)
    np.testing.assert_array_equal(solids.inside(solids.PLANS[name], points), expected)


@pytest.mark.parametrize("split, points, first", [("train", (24, 64), 0), ("validation", (96, 96), 180)])
def test_solids_turn_by_halves_of_the_circle(split, points, first):
    made = [solids.solid(split, index, points) for index in range(120)]
    assert {label for _, _, label in made} == set(range(len(solids.LABELS)))
    np.testing.assert_array_equal(made[39][1], solids.solid(split, 39, points)[1])
    for features, positions, label in made:
        assert features.dtype == positions.dtype == np.float32 and points[0] <= len(positions) <= points[1]
        # Points of top and bottom lie at half of the height, up to the noise.
        ends = positions[:, 2] * features[:, 0]
        heights = ends[features[:, 0] != 0]
        assert np.ptp(heights) < 12 * solids.NOISE
        if solids.LABELS[label] == "angle":
            # The centre of its plan lies at 225 degrees; that of some points, drawn at random, is off.
            x, y, _ = positions.mean(axis=0)
            turned = math.degrees(math.atan2(y, x)) - 225 - first
            assert (turned + 60) % 360 < 180 + 2 * 60


def test_origin_and_scale_of_positions():
    data = load(dataset_name="solids", max_train_samples=20)
    everything = np.concatenate(data.train.positions)
    most = max(map(len, data.train.positions))
    for encoding, longest in (("liere", 1.0), ("absolute", 1.0), ("rope_mixed", most ** (1 / 3) - 1)):
        origin, scale = placement(data.train, encoding)
        placed = (everything - np.array(origin)) * scale
        assert placed.min() == pytest.approx(0, abs=1e-6) and placed.max() == pytest.approx(longest)


def test_indices_stay_indices_for_rope(tmp_path):
    (tmp_path / "a.ts").write_text(SERIES)
    assert placement(load(train_files=[str(tmp_path / "a.ts")]).train, "axial_rope") == ([0.0], 1.0)
    assert placement(load(train_files=[str(tmp_path / "a.ts")]).train, "liere") == ([0.0], 0.5)


@pytest.mark.parametrize("per_token", [pytest.param(True, marks=pytest.mark.slow), False])
def test_a_run_and_an_evaluation_of_its_model(per_token, tmp_path):
    train, test = (write_points(tmp_path / f"{seed}.parquet", 30, seed, per_token) for seed in (0, 1))
    files = ["--train_files", train, "--validation_files", test, *FLAGS_OF_POINTS]
    given = ["--do_train", "--do_eval", "--num_train_epochs", "2", "--position_encoding", "comrope_ld"]
    metrics = run(tmp_path / "run", *files, *given, "--block_size", "4", "--pooling", "mean")
    assert metrics["eval_samples"] == 30
    assert metrics["eval_accuracy_low"] < metrics["eval_accuracy"] < metrics["eval_accuracy_high"]
    make = LieRETokensForTokenClassification if per_token else LieRETokensForSequenceClassification
    model = make.from_pretrained(tmp_path / "run").eval()
    config = model.config
    assert (config.feature_size, config.num_axes, config.id2label) == (2, 1, {0: "lower", 1: "upper"})
    # What the script measured, computed by hand from the saved model, one sample at a time.
    data = load("evaluation", validation_files=[test], **OF_POINTS).evaluation
    right = []
    with torch.no_grad():
        for features, positions, labels in zip(data.features, data.positions, data.labels):
            logits = model(torch.tensor(features[None]), torch.tensor(positions)).logits[0]
            right.append(np.atleast_1d(logits.argmax(-1).numpy() == labels))
    assert metrics["eval_accuracy"] == pytest.approx(np.concatenate(right).mean())
    again = run(tmp_path / "again", *files, "--do_eval", "--model_name_or_path", tmp_path / "run")
    assert again["eval_accuracy"] == metrics["eval_accuracy"]
    assert again["eval_loss"] == pytest.approx(metrics["eval_loss"], rel=1e-6)
    recorded = json.loads((tmp_path / "run" / "run_config.json").read_text())
    assert recorded["examples"]["train"] == {
        "config": None,
        "files": ["0.parquet"],
        "folder": None,
        "name": None,
        "samples": 30,
        "split": None,
    }
    kept = load_file(tmp_path / "run" / "eval_examples.safetensors")
    if per_token:
        assert kept["right"].tolist() == [sample.sum() for sample in right]
        assert kept["sizes"].tolist() == [len(sample) for sample in right]
        assert np.average(kept["losses"], weights=kept["sizes"]) == pytest.approx(metrics["eval_loss"], rel=1e-6)
    else:
        assert (kept["ranks"] == 0).tolist() == np.concatenate(right).tolist()


@pytest.mark.slow
def test_positions_are_learned_from(tmp_path):
    """The class of a token is on which side of the origin it lies, which its features do not tell."""
    train, test = (write_points(tmp_path / f"{seed}.parquet", 200, seed) for seed in (0, 1))
    files = ["--train_files", train, "--validation_files", test, *FLAGS_OF_POINTS, "--do_train", "--do_eval"]
    given = ["--num_train_epochs", "8", "--learning_rate", "1e-2", "--overwrite_output_dir"]
    accuracy = {
        encoding: run(tmp_path / "run", *files, *given, "--position_encoding", encoding, *more)["eval_accuracy"]
        for encoding, more in (("none", []), ("absolute", ["--position_table_size", "[9]"]))
    }
    assert accuracy["none"] < 0.65 and accuracy["absolute"] > 0.9


def write(path, **columns):
    pyarrow.parquet.write_table(pyarrow.table(columns), path)


BAD_FILES = [
    ({"features": [[1.0]], "labels": [0]}, {"position_columns": ["x", "y"]}, "no column 'x'; it has features, labels"),
    ({"values": [[1.0]], "labels": [0]}, {}, "no column 'features'; it has values, labels"),
    ({"features": [[1.0]], "class": [0]}, {}, "no column 'labels'; it has features, class"),
    ({"features": [[1.0, 2.0]], "positions": [[1.0]], "labels": [0]}, {}, "sample 0 has 2 tokens .* and 1 with pos"),
    ({"features": [[1.0, math.nan]], "labels": [0]}, {}, "sample 0: 'features' contains 1 values that are not finite"),
    ({"features": [[]], "labels": [0]}, {}, r"sample 0: 'features' has shape \(0, 1\)"),
    ({"features": [["a"]], "labels": [0]}, {}, "'features' has shape .* type <U1; accepted: numbers"),
    ({"features": [[[1.0], [1.0, 2.0]]], "labels": [0]}, {}, "row 0: the lists in 'features' have different lengths"),
    ({"features": [[1.0]], "labels": [[0, 1]]}, {}, r"labels have shape \(2,\).* for each of the 1 tokens"),
    ({"features": [[1.0]], "labels": [0.5]}, {}, "labels have shape .* type float64"),
    ({"features": [[1.0]], "labels": [-3]}, {}, "Labels start at -3"),
    ({"features": [[1.0]], "labels": [[-100]]}, {}, "All labels are -100"),
    (
        {"features": [[1.0], [2.0]], "labels": [[0], [1]]},
        {"task": "sequence"},
        "--task sequence, but .* labels each token",
    ),
    (
        {"features": [[[1.0, 2.0]], [[1.0]]], "labels": [0, 1]},
        {},
        "samples 0 and 1 differ: 2 features, 1 axes, labels of samples; 1 features",
    ),
]


@pytest.mark.parametrize("columns, arguments, message", BAD_FILES)
def test_bad_files(columns, arguments, message, tmp_path):
    write(tmp_path / "a.parquet", **columns)
    with pytest.raises(InputError, match=f"(?s){message}"):
        load(train_files=[str(tmp_path / "a.parquet")], **arguments)


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("a.ts", SERIES.replace("8:9", "?:9"), "line 8: could not convert string to float: '.'; accepted: numbers"),
        ("a.ts", SERIES.replace("7,8", "7"), "line 8: the dimensions of a series have different lengths"),
        ("a.ts", SERIES.replace("@classLabel true low high\n", ""), "line 6: there is no '@classLabel true"),
        ("a.ts", SERIES.replace("Stamps false", "Stamps true"), "time stamps; accepted: series of values"),
        ("a.csv", "", "files of type '.csv' are not read; accepted: .npz, .parquet, .ts"),
        ("a.npz", "no archive", "a.npz: cannot be read"),
        ("a.parquet", "no table", "a.parquet: cannot be read"),
        (None, None, "There is no file"),
    ],
)
def test_files_that_cannot_be_read(name, content, message, tmp_path):
    if name is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(InputError, match=message):
        load(train_files=[str(tmp_path / (name or "absent.ts"))])


def test_lengths_that_do_not_fit(tmp_path):
    np.savez(tmp_path / "a.npz", features=np.zeros(7), labels=np.zeros(2, int), lengths=np.array([3, 3]))
    with pytest.raises(InputError, match="'features' has 7 entries; accepted are 2, one per sample, and 6"):
        load(train_files=[str(tmp_path / "a.npz")])


@pytest.mark.parametrize(
    "flags, message",
    [
        ([], "There are no training data; accepted: --train_files"),
        (["--dataset_name", "cubes"], "'cubes'; accepted: solids.*, or a task of --register"),
        (["--dataset_name", "solids", "--train_files", "a.npz"], "--dataset_name solids takes no files"),
        (
            ["--dataset_name", "solids", "--feature_columns", "x"],
            "solids has no column 'x'; it has features,",
        ),
        (["--dataset_name", "solids", "--task", "token"], "labels each sample; accepted: --task sequence"),
        (["--dataset_name", "solids", "--num_axes", "2"], "--num_axes 2, but the data have 3"),
        (["--dataset_name", "solids", "--position_encoding", "absolute"], "needs position_table_size"),
        (["--dataset_name", "solids", "--training_points", "5", "2"], r"--training_points \[5, 2\]"),
        (["--dataset_name", "solids", "--image_size", "32"], "no flag '--image_size'"),
        (["--dataset_name", "solids", "--push_to_hub", "--do_eval"], "write README.md into the finished run's folder"),
        (["--dataset_name", "solids", "--max_train_samples", "0"], "0 examples of the training data"),
    ],
)
def test_bad_flags(flags, message, tmp_path):
    with pytest.raises(InputError, match=message):
        run(tmp_path / "run", "--do_train", *flags)


def test_checkpoints_that_do_not_fit_the_data(tmp_path):
    train = write_points(tmp_path / "train.parquet", 6)
    run(tmp_path / "run", "--do_train", "--train_files", train, *FLAGS_OF_POINTS, "--max_steps", "1")
    evaluation = ["--do_eval", "--model_name_or_path", tmp_path / "run", *FLAGS_OF_POINTS]
    samples = write_points(tmp_path / "samples.parquet", 6, per_token=False)
    with pytest.raises(InputError, match="LieRETokensForTokenClassification, but the data label each sample"):
        run(tmp_path / "other", *evaluation, "--validation_files", samples)
    with pytest.raises(InputError, match="The checkpoint has feature_size=2, the data have 3"):
        more = ["--feature_columns", "x", "height"]
        run(tmp_path / "other", *evaluation, *more, "--validation_files", train)


def test_unusual_features_are_told(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "a.npz", features=rng.random((6, 4, 2)) * [1, 1e4], labels=[0, 1] * 3)
    run(tmp_path / "run", "--do_train", "--train_files", tmp_path / "a.npz", "--max_steps", "1")
    assert "of feature 1. Features are not scaled" in caplog.text and "feature 0" not in caplog.text
