"""Reports: intervals and tests against other computations, and what stands where in the tables."""

import base64
import json
import math

import numpy as np
import pytest
import yaml
from PIL import Image
from training_helpers import ROOT

from training import evaluate_sweep, report
from training.arguments import InputError
from training.significance import bootstrap_mean, paired_test


def test_paired_tests_are_those_of_the_paper():
    """LieRE's Table 7: the interval around -0.0118 is 1.96 · 0.0118/1.81 wide, and z = -1.81 has p = 0.070."""
    generator = np.random.default_rng(0)
    first, second = (generator.random((1, 10_000)) < share for share in (0.70, 0.68))
    test = paired_test(first, second)
    differences = second[0].astype(float) - first[0]
    assert test.difference.mean == pytest.approx(differences.mean())
    assert test.z == pytest.approx(differences.mean() / (differences.std(ddof=1) / 100))
    assert test.difference.high - test.difference.mean == pytest.approx(
        1.96 * abs(differences.mean() / test.z), rel=1e-4
    )
    stats = pytest.importorskip("scipy.stats")
    # With 10,000 examples Student's distribution is normal to four digits.
    assert test.p_value == pytest.approx(stats.ttest_rel(second[0], first[0].astype(float)).pvalue, rel=1e-2)
    assert math.erfc(1.81 / math.sqrt(2)) == pytest.approx(0.070, abs=5e-4)
    assert paired_test(first, first).p_value == 1.0
    with pytest.raises(ValueError, match="10000 and 9 examples cannot be paired"):
        paired_test(first, second[:, :9])


def test_tests_reject_a_true_hypothesis_as_often_as_they_say():
    generator = np.random.default_rng(1)
    rejected = sum(
        paired_test(generator.random((2, 400)) < 0.6, generator.random((2, 400)) < 0.6).p_value < 0.05
        for _ in range(400)
    )
    # 20 expected; 8 … 35 is four standard deviations around it.
    assert 8 <= rejected <= 35


def test_intervals_are_over_examples_and_not_over_runs():
    generator = np.random.default_rng(0)
    one = (generator.random((1, 500)) < 0.7).astype(float)
    single, repeated = bootstrap_mean(one), bootstrap_mean(np.repeat(one, 4, axis=0))
    assert single == repeated
    error = one.std() / math.sqrt(500)
    assert single.high - single.low == pytest.approx(2 * 1.96 * error, rel=0.1)


@pytest.mark.parametrize(
    "settings, name",
    [
        ({"position_encoding": "liere", "block_size": 64, "seed": 3}, "LieRE64"),
        ({"position_encoding": "liere"}, "LieRE8"),
        ({"position_encoding": "comrope_ld", "block_size": 4}, "ComRoPE-LD, block_size 4"),
        ({"position_encoding": "axial_rope", "coordinates": "train_grid"}, "Axial RoPE"),
        (
            {"position_encoding": "absolute", "rotate_prefix": False, "train_fraction": 0.2},
            "Absolute, train_fraction 0.2",
        ),
        ({"seed": 1}, "the recipe"),
    ],
)
def test_rows_have_the_names_of_the_papers(settings, name):
    assert report.method(settings) == name


def test_every_figure_of_the_papers_has_its_row():
    """A name that no sweep makes would never be shown."""
    paper = yaml.safe_load((ROOT / "training" / "paper_results.yaml").read_text())
    for name, content in paper.items():
        sweep = evaluate_sweep.read_sweep(ROOT / "training" / "sweeps" / f"{name}.yaml", mini=False)
        rows = {report.method(settings) for settings in evaluate_sweep.combinations(sweep["train"])}
        columns = {report.condition(given) for given in evaluate_sweep.combinations(sweep.get("evaluate", []))}
        for row, cells in content.get("rows", {}).items():
            assert row in rows, (name, row, rows)
            assert set(cells) <= columns, (name, row)


def line(encoding, seed, correct, condition=None, history=()):
    bits = base64.b64encode(np.packbits(correct).tobytes()).decode()
    return {
        "sweep": "shuffling",
        "script": "image_classification",
        "settings": {"position_encoding": encoding, "seed": seed},
        "condition": condition or {},
        "flags": [],
        "run": {"model": {}, "training": {"num_train_epochs": 3}, "data": {"train_files": ["cifar.parquet"]}},
        "train_metrics": {"parameters": 1234567},
        "metrics": {"eval_accuracy": float(np.mean(correct)), "eval_samples": len(correct)},
        "history": list(history),
        "examples": len(correct),
        "correct": bits,
        "environment": {"device": "cpu"},
    }


@pytest.fixture
def results(tmp_path):
    generator = np.random.default_rng(0)
    lines = []
    for encoding, share, epochs in (("absolute", 0.6, (0.3, 0.5, 0.6)), ("liere", 0.8, (0.61, 0.7, 0.8))):
        for seed in (0, 1):
            history = [[number, accuracy] for number, accuracy in enumerate(epochs, 1)]
            lines.append(line(encoding, seed, generator.random(200) < share, history=history))
            shuffled = generator.random(200) < share / 4
            lines.append(line(encoding, seed, shuffled, {"evaluation_shuffle": "patches"}))
    path = tmp_path / "shuffling.jsonl"
    path.write_text("".join(json.dumps(entry) + "\n" for entry in lines))
    return path, lines


def test_a_report_tells_ours_beside_the_paper(results, tmp_path):
    path, lines = results
    text = report.main([str(path), "--output_dir", str(tmp_path / "report")]).read_text()
    accuracy = 100 * np.mean([entry["metrics"]["eval_accuracy"] for entry in lines[4::2]])
    row = next(row for row in text.splitlines() if row.startswith("| LieRE8 | 1,234,567 | 2 |"))
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[3].startswith(f"{accuracy:.1f} (") and cells[4] == "70.3" and cells[6] == "12.3"
    assert "cifar.parquet; 12 layers of 768 channels; 3 epochs; evaluated on 200 examples; cpu." in text
    assert "The paper: CIFAR-100, ViT-B (LieRE, Table 5)." in text
    shuffled = 100 * np.mean([entry["metrics"]["eval_accuracy"] for entry in lines[5::2]])
    assert f"| LieRE8 | {100 * (accuracy - shuffled) / accuracy:.1f}% |" in text
    assert (
        "Paired tests against Absolute" in text
        and "| LieRE8 | 1 | 3.0× |" in text
        and "| Absolute | 3 | 1.0× |" in text
    )
    with Image.open(tmp_path / "report" / "shuffling.png") as picture:
        assert picture.size[0] > 800 and len(set(picture.convert("L").resize((64, 64)).tobytes())) > 10


def test_numbers_on_the_horizontal_axis_make_lines(results):
    _, lines = results
    sizes = [{**entry, "condition": {"image_size": size}} for size in (48, 64) for entry in lines[::2]]
    trained = [{**entry, "run": {**entry["run"], "image_size": [32, 32]}} for entry in lines[::2]]
    drawn, title = report._lines(report.arrange([*trained, *sizes]))
    assert title == "image_size" and {row: sorted(p[0] for p in points) for row, points in drawn.items()} == {
        "Absolute": [32, 48, 64],
        "LieRE8": [32, 48, 64],
    }
    fractions = [
        {**entry, "settings": {**entry["settings"], "train_fraction": share}}
        for share in (0.2, 0.5, 1.0)
        for entry in lines[::2]
    ]
    drawn, title = report._lines(report.arrange(fractions))
    assert title == "train_fraction" and set(drawn) == {"Absolute", "LieRE8"}


def test_what_are_no_results_is_said(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"sweep": "x"}\n')
    with pytest.raises(InputError, match="a.jsonl, line 1 is no result of evaluate_sweep.py"):
        report.main([str(tmp_path / "a.jsonl"), "--output_dir", str(tmp_path)])
    (tmp_path / "b.jsonl").write_text("")
    with pytest.raises(InputError, match="b.jsonl holds no results"):
        report.main([str(tmp_path / "b.jsonl"), "--output_dir", str(tmp_path)])
    with pytest.raises(InputError, match="There are no results"):
        report.main([str(tmp_path / "c.jsonl"), "--output_dir", str(tmp_path)])
