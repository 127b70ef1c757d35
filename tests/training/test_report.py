"""Reports: intervals and tests against other computations, and what stands where in the tables."""

import base64
import json
import math
import re

import numpy as np
import pytest
import yaml
from checkout import ROOT
from PIL import Image
from scipy import stats

from training import report
from training.common.arguments import InputError
from training.reporting import plots, result_lines, result_table, sections, sweeps
from training.reporting.significance import bootstrap_mean, holm, paired_test, paired_test_over_seeds


def test_paired_tests_are_those_of_the_paper():
    """LieRE's Table 7: the interval around -0.0118 is 1.96 · 0.0118/1.81 wide, and z = -1.81 has p = 0.070."""
    generator = np.random.default_rng(0)
    first, second = (generator.random((1, 10_000)) < share for share in (0.70, 0.68))
    test = paired_test(first, second)
    differences = second[0].astype(float) - first[0]
    assert test.difference.mean == pytest.approx(differences.mean())
    assert test.statistic == pytest.approx(differences.mean() / (differences.std(ddof=1) / 100))
    assert test.difference.high - test.difference.mean == pytest.approx(
        1.96 * abs(differences.mean() / test.statistic), rel=1e-4
    )
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


def test_tests_over_seeds_are_students():
    """Against scipy's own paired test, and the interval against a table of Student's distribution."""
    first, second = np.array([0.50, 0.52, 0.49, 0.51, 0.50]), np.array([0.53, 0.55, 0.50, 0.55, 0.51])
    test = paired_test_over_seeds(first, second)
    expected = stats.ttest_rel(second, first)
    assert (test.statistic, test.p_value) == pytest.approx((expected.statistic, expected.pvalue))
    error = (second - first).std(ddof=1) / math.sqrt(5)
    # The 97.5% quantile with four degrees of freedom.
    assert test.difference.high - test.difference.mean == pytest.approx(2.776 * error, rel=1e-3)
    with pytest.raises(ValueError, match="seeds cannot be paired"):
        paired_test_over_seeds(first, second[:4])


def test_corrected_tests_seldom_reject_any_of_many_true_hypotheses():
    # Holm (1979): 4 · 0.005, then 3 · 0.01, then 2 · 0.03, and the last no less than that.
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    generator = np.random.default_rng(0)
    found = sum(min(holm(generator.random(20))) < 0.05 for _ in range(1000))
    # 49 expected (1 − 0.9975²⁰); without the correction it would be 640. Four standard deviations are 27.
    assert found <= 76
    assert holm([]) == []


def test_models_that_differ_in_coordinates_only_have_rows_of_their_own():
    trained = [
        {"position_encoding": encoding, "coordinates": coordinates}
        for encoding in ("liere", "rope_mixed")
        for coordinates in (None, "unit")
    ]
    shown = result_table.distinguishing_settings(trained, "image_classification")
    rows = [result_table.method(settings, "image_classification", shown) for settings in trained]
    assert rows == ["LieRE8", "LieRE8, coordinates unit", "RoPE-Mixed", "RoPE-Mixed, coordinates unit"]
    assert result_table.distinguishing_settings(trained[::2], "image_classification") == ()


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
    assert result_table.method(settings) == name


def test_every_further_table_is_one_that_sweeps_can_name():
    assert tuple(sections.FURTHER_TABLES) == sweeps.REPORT_TABLES


def test_every_figure_of_the_papers_has_its_row():
    """A name that no sweep makes would never be shown."""
    paper = yaml.safe_load((ROOT / "training" / "paper_results.yaml").read_text())
    for name, content in paper.items():
        sweep = sweeps.read_sweep(ROOT / "training" / "sweeps" / f"{name}.yaml", mini=False)
        settings = sweeps.combinations(sweep["train"])
        rows = {result_table.method(given, sweep["script"]) for given in settings}
        columns = {result_table.condition(given) for given in sweeps.combinations(sweep.get("evaluate", []))}
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
        "flags": ["cifar100_mini.yaml", "--train_files", "cifar.parquet", "--position_encoding", encoding]
        + ["--seed", str(seed), "--do_eval", "true"],
        "run": {"model": {}, "training": {"num_train_epochs": 3, "per_device_train_batch_size": 32}},
        "train_metrics": {"parameters": 1234567, "train_samples_per_second": 300.0, "train_runtime": 10.0},
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
    single = [100 * entry["metrics"]["eval_accuracy"] for entry in lines[4::2]]
    assert cells[3] == f"{single[0]:.1f}, {single[1]:.1f}"
    assert cells[4].startswith(f"{accuracy:.1f} (") and cells[5] == "70.3" and cells[7] == "12.3"
    assert (
        "12 layers of 768 channels; 3 epochs of 1,000 examples in batches of 32; seeds 0, 1; evaluated on 200" in text
    )
    assert "The paper: CIFAR-100, ViT-B (LieRE, Table 5). Its relative losses are computed" in text
    assert "which these give as 54.7. Other data, models and budgets than ours" in text
    command = f"--mini --output_dir outputs/{path.parent.name} --train_files cifar.parquet\n"
    assert f"    python training/evaluate_sweep.py training/sweeps/shuffling.yaml {command}" in text
    assert "Not measured yet: no positions; Axial RoPE; RoPE-Mixed; LieRE32; ComRoPE-AP; ComRoPE-LD; " in text
    assert "; Golden gate RoPE; Cayley-STRING; Circulant-STRING; Spherical RoPE; LieRE product." in text
    shuffled = 100 * np.mean([entry["metrics"]["eval_accuracy"] for entry in lines[5::2]])
    # The paper's 12.3 of 70.3, its Table 5.
    assert f"| LieRE8 | {100 * (accuracy - shuffled) / accuracy:.1f}% | 82.5% |" in text
    both = [
        np.mean([result_lines.correct_examples(entry) for entry in some], axis=0) for some in (lines[4::2], lines[:4:2])
    ]
    assert f"| LieRE8 | +{100 * np.mean(both[0] - both[1]):.1f} (" in text
    with Image.open(tmp_path / "report" / path.parent.name / "shuffling.png") as picture:
        assert picture.size[0] > 700 and len(set(picture.convert("L").resize((64, 64)).tobytes())) > 10


def test_the_command_that_ran_is_the_one_that_is_told(results, tmp_path):
    """A sweep of one's own, in another folder and with a recipe of another name."""
    _, lines = results
    command = ["my sweep.yaml", "--mini", "--output_dir", "outputs/mine", "--train_files", "c.parquet"]
    path = tmp_path / "mine.jsonl"
    result_lines.write_results(path, [{**entry, "command": command} for entry in lines[::2]], as_changes=True)
    assert [entry["command"] for entry in result_lines.read_results(path)] == [command] * 4
    text = report.main([str(path), "--output_dir", str(tmp_path / "report")]).read_text()
    told = "python training/evaluate_sweep.py 'my sweep.yaml' --mini --output_dir outputs/mine --train_files c.parquet"
    assert f"    {told}\n" in text and text.count("evaluate_sweep.py") == 1


def test_epochs_to_the_baseline_are_those_of_figure_9(results, tmp_path):
    _, lines = results
    path = tmp_path / "encodings.jsonl"
    path.write_text("".join(json.dumps({**entry, "sweep": "encodings"}) + "\n" for entry in lines[::2]))
    text = report.main([str(path), "--output_dir", str(tmp_path / "report")]).read_text()
    assert "| LieRE8 | 1 | 3.0× |" in text and "| Absolute | 3 | 1.0× |" in text


def reported(tmp_path, sweep, entries):
    path = tmp_path / f"{sweep}.jsonl"
    path.write_text("".join(json.dumps({**entry, "sweep": sweep}) + "\n" for entry in entries))
    return report.main([str(path), "--output_dir", str(tmp_path / "report")]).read_text()


def test_the_two_starts_of_an_encoding_are_compared_as_in_table_7(results, tmp_path):
    """2π against 1, as the paper: the difference and Z of the same examples."""
    _, lines = results
    entries = []
    for entry, scale in zip(lines[4::2] + lines[:4:2], (2 * math.pi, 2 * math.pi, 1.0, 1.0)):
        settings = {**entry["settings"], "position_encoding": "liere", "rotary_init_scale": scale}
        entries.append({**entry, "settings": settings})
    text = reported(tmp_path, "init_scale", entries)
    large, small = (
        np.mean([result_lines.correct_examples(entry) for entry in some], axis=0) for some in (entries[:2], entries[2:])
    )
    z = (large - small).mean() / ((large - small).std(ddof=1) / math.sqrt(len(large)))
    part = text.split("`rotary_init_scale` against 1, with the same encoding, in points:")[1].split("Against")[0]
    row = next(row for row in part.splitlines() if row.startswith("| LieRE8, rotary_init_scale 6.283"))
    assert f"+{100 * (large - small).mean():.1f} (" in row and f"statistic +{z:.2f}, p = " in row


def test_the_highest_accuracy_of_all_epochs_is_that_of_figure_4(results, tmp_path):
    """The mean over seeds of the highest, not the highest of the mean."""
    _, lines = results
    histories = [[[1.0, 0.3], [2.0, 0.9], [3.0, 0.6]], [[1.0, 0.7], [2.0, 0.2], [3.0, 0.4]]]
    entries = [{**entry, "history": history} for entry, history in zip(lines[:4:2], histories)]
    text = reported(tmp_path, "data_fraction", entries)
    assert "| Absolute | 80.0 | 50.0 |" in text.split("Accuracies of epochs, means over seeds:")[1]
    assert "Accuracies of epochs" not in reported(tmp_path, "block_size", entries)


def test_losses_stand_beside_those_of_table_9(results, tmp_path):
    _, lines = results
    entries = []
    for entry, loss in zip(lines[::2], (1.5, 1.7, 1.2, 1.4)):
        losses = {"eval_loss": loss, "eval_loss_low": loss - 0.1, "eval_loss_high": loss + 0.2}
        entries.append({**entry, "metrics": {**entry["metrics"], **losses}})
    text = reported(tmp_path, "encodings", entries).split("Losses of the evaluation:")[1]
    assert "| Absolute | 1.600 (1.500 – 1.800) | 1.56 (1.47 – 1.56) |" in text
    assert "| LieRE8 | 1.300 (1.200 – 1.500) | 1.36 (1.31 – 1.41) |" in text


def test_precisions_and_iterations_of_detectors(results, tmp_path):
    """As ComRoPE's Table 2 and Figure 4: against the epoch in which Absolute is best, which need not be its last."""
    _, lines = results
    curves = {"absolute": (0.1, 0.3, 0.5, 0.4), "comrope_ld": (0.2, 0.4, 0.5, 0.6)}
    entries = []
    for encoding, curve in curves.items():
        metrics = {"eval_samples": 9, "eval_map": curve[-1], "eval_map_50": 0.75, "eval_map_large": 0.625}
        entry = {**lines[0], "settings": {"position_encoding": encoding}, "metrics": metrics, "correct": None}
        entry |= {"script": "object_detection", "flags": ["coco.yaml"], "examples": None}
        entries.append({**entry, "history": [[float(epoch), value] for epoch, value in enumerate(curve, 1)]})
    text = reported(tmp_path, "detection", entries)
    assert "|  | AP | paper | AP50 | paper | APl | paper |" in text
    assert "| ComRoPE-LD | 60.0 | 44.7 | 75.0 | 67.6 | 62.5 | 60.0 |" in text
    reached = text.split("Epochs until the highest mAP of Absolute:")[1]
    assert "| Absolute | 3 | 0% |" in reached and "| ComRoPE-LD | 3 | 0% |" in reached
    entries[1]["history"][1][1] = 0.5
    assert "| ComRoPE-LD | 2 | 33% |" in reported(tmp_path, "detection", entries)


def test_a_model_measured_with_other_settings_is_not_called_measured(results, tmp_path):
    _, lines = results
    entry = {**lines[0], "settings": {"position_encoding": "axial_rope", "coordinates": "train_grid", "seed": 0}}
    text = reported(tmp_path, "encodings", [entry, {**entry, "settings": {**entry["settings"], "seed": 1}}])
    assert "Axial RoPE with rope_theta 96.68213" in text.split("Not measured yet: ")[1].splitlines()[0]


def test_of_two_numbers_one_is_the_axis_and_the_other_makes_lines(results):
    """ComRoPE's Figure 5: offsets at several sizes, of which one is that of the training."""
    _, lines = results
    entry = {**lines[0], "run": {**lines[0]["run"], "image_size": [32, 32]}}
    conditions = [
        {"evaluation_offset": offset} | ({} if size == 32 else {"image_size": size})
        for offset in (0.0, 0.5)
        for size in (24, 32, 48)
    ]
    table = result_table.arrange([{**entry, "condition": condition} for condition in conditions])
    drawn, title = plots.find_lines(table)
    assert title == "image_size" and {row: sorted(p[0] for p in points) for row, points in drawn.items()} == {
        "Absolute, evaluation_offset 0": [24, 32, 48],
        "Absolute, evaluation_offset 0.5": [24, 32, 48],
    }


def test_a_report_is_made_again_from_the_results_that_it_keeps(results, tmp_path):
    """Compact lines hold what the whole ones did, settings that come and go and more digits than are kept included."""
    path, lines = results
    lines[3]["settings"]["coordinates"], lines[4]["metrics"]["eval_loss"] = "unit", 0.123456789
    lines[5]["run"] = {"model": {"block_size": None}, "training": lines[5]["run"]["training"]}
    path.write_text("".join(json.dumps(entry) + "\n" for entry in lines))
    first = report.main([str(path), "--output_dir", str(tmp_path / "first"), "--keep_results"])
    kept = first.parent / path.parent.name / "shuffling.jsonl"
    lines[4]["metrics"]["eval_loss"] = 0.123457
    for entry, before in zip(result_lines.read_results(kept), lines, strict=True):
        before["metrics"] = {name: float(f"{value:.6g}") for name, value in before["metrics"].items()}
        assert entry == before
    assert kept.stat().st_size < 0.7 * path.stat().st_size
    again = report.main([str(kept), "--output_dir", str(tmp_path / "again")])
    assert again.read_text() == first.read_text()


def test_what_all_models_have_is_said_once(results, tmp_path):
    _, lines = results
    settings = [{**entry, "sweep": "arrows"} for entry in lines[::2]]
    for entry in settings:
        entry["settings"] = {"image_size": 108, **entry["settings"]}
    (tmp_path / "arrows.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in settings))
    text = report.main([str(tmp_path / "arrows.jsonl"), "--output_dir", str(tmp_path / "report")]).read_text()
    assert "64 channels; image_size 108; 3 epochs" in text.replace("768", "64") and "| LieRE8 | 1,234,567 | 2 |" in text
    # The paper's cell for 108 px, not another size's.
    assert "| 99.5 (99.2 – 99.8) |" in text and "Against Absolute, in points:" in text


def test_metrics_without_single_examples_have_the_intervals_that_there_are():
    def cell(*runs):
        plain = {"correct": None, "settings": {"seed": 0}}
        return result_table.Cell([{**plain, "metrics": {"eval_samples": 9, **run}} for run in runs])

    areas = [
        {"eval_accuracy": 0.5, "eval_auc": a, "eval_auc_low": a - 0.1, "eval_auc_high": a + 0.2} for a in (0.6, 0.7)
    ]
    assert str(cell(*areas)) == "AUC 0.650 (0.550 – 0.850)"
    assert str(cell({"eval_map": 0.2}, {"eval_map": 0.3})) == "mAP 0.250 [0.200, 0.300]"


def test_coordinates_stand_against_indices(results, tmp_path):
    """Of the same encoding with the same blocks, whether they are its own or were set."""
    _, lines = results
    settings = [
        {"position_encoding": "rope_mixed"},
        {"position_encoding": "rope_mixed", "coordinates": "unit", "rotary_init_scale": 9},
        {"position_encoding": "comrope_ld"},
        {"position_encoding": "comrope_ld", "coordinates": "index", "rotary_init_scale": 0.1},
        {"position_encoding": "comrope_ld", "block_size": 4, "coordinates": "index"},
        {"position_encoding": "liere", "coordinates": "unit"},
    ]
    entries = [{**lines[0], "sweep": "rotary_family", "settings": given} for given in settings]
    path = tmp_path / "rotary_family.jsonl"
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    text = report.main([str(path), "--output_dir", str(tmp_path / "report")]).read_text()
    part = text.split("Coordinates against `index`")[1].split("\n\n")[1]
    rows = [line.split(" | ")[0].removeprefix("| ") for line in part.splitlines()[2:]]
    assert rows == ["RoPE-Mixed, coordinates unit, rotary_init_scale 9", "ComRoPE-LD"]


@pytest.mark.parametrize(
    "title, setting, reference, others",
    [
        ("Rotated class tokens against class tokens that are not rotated", "rotate_prefix", False, [True]),
        ("Pooling against the class token", "pooling", "cls", ["mean", "mean_all"]),
        ("Perturbation against none", "position_perturbation", 0.0, [0.5, 1.0]),
    ],
)
def test_models_stand_against_those_that_differ_in_one_setting(title, setting, reference, others, results, tmp_path):
    _, lines = results
    encodings = ("comrope_ap", "comrope_ld")
    settings = [{"position_encoding": name, setting: value} for value in (*others, reference) for name in encodings]
    # One without a reference, one that states nothing.
    settings += [{"position_encoding": "liere", setting: others[0]}, {"position_encoding": "comrope_ld"}]
    text = reported(tmp_path, "pooling", [{**lines[0], "settings": given} for given in settings])
    part = text.split(f"{title}, with the same encoding, in points:")[1].split("\n\n")[1]
    rows = [line.split(" | ")[0].removeprefix("| ") for line in part.splitlines()[2:]]
    assert [row.split(",")[0] for row in rows] == ["ComRoPE-AP", "ComRoPE-LD"] * len(others)
    assert all(setting in row for row in rows)


def test_native_aspect_ratios_stand_against_squares(results, tmp_path):
    """Of the same encoding, whichever stands first; a number of patches makes no line in the picture."""
    _, lines = results
    entries = []
    for number, patches in enumerate((None, 81, 64)):
        for entry in lines[::2]:
            given = {} if patches is None else {"max_num_patches": patches}
            correct = result_lines.correct_examples(entry)
            correct[: 10 * number] = True
            entries.append(
                {**entry, "sweep": "aspect_ratios", "settings": {**entry["settings"], **given}}
                | {"correct": result_lines.encode_examples(correct)}
            )
    path = tmp_path / "aspect_ratios.jsonl"
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    text = report.main([str(path), "--output_dir", str(tmp_path / "report")]).read_text()
    part = text.split("squeezed into squares, in points:")[1].split("Against Absolute")[0]
    rows = [row.split(" | ") for row in part.splitlines() if row.startswith("| LieRE8") or row.startswith("| Absolute")]
    assert [row[0] for row in rows] == [
        f"| {name}, max_num_patches {patches}" for patches in (81, 64) for name in ("Absolute", "LieRE8")
    ]
    before, after = (
        np.mean([result_lines.correct_examples(entry) for entry in some]) for some in (entries[2:4], entries[6:8])
    )
    assert rows[1][1].startswith(f"+{100 * (after - before):.1f} (")
    assert plots.find_lines(result_table.arrange(entries)) == ({}, "")


def test_no_two_encodings_of_a_picture_look_alike():
    names = ["no positions", "Absolute", "Axial RoPE", "RoPE-Mixed", "LieRE8", "LieRE32", "ComRoPE-AP", "ComRoPE-LD"]
    styles = plots.styles(names)
    for name in ("color", "marker"):
        assert len({style[name] for style in styles.values()}) == 8
    some = plots.styles(["ComRoPE-LD", "LieRE8", "LieRE32"])
    assert all(styles[name] == style for name, style in some.items())


def test_numbers_on_the_horizontal_axis_make_lines(results):
    _, lines = results
    sizes = [{**entry, "condition": {"image_size": size}} for size in (48, 64) for entry in lines[::2]]
    trained = [{**entry, "run": {**entry["run"], "image_size": [32, 32]}} for entry in lines[::2]]
    drawn, title = plots.find_lines(result_table.arrange([*trained, *sizes]))
    assert title == "image_size" and {row: sorted(p[0] for p in points) for row, points in drawn.items()} == {
        "Absolute": [32, 48, 64],
        "LieRE8": [32, 48, 64],
    }
    fractions = [
        {**entry, "settings": {**entry["settings"], "train_fraction": share}}
        for share in (0.2, 0.5, 1.0)
        for entry in lines[::2]
    ]
    drawn, title = plots.find_lines(result_table.arrange(fractions))
    assert title == "train_fraction" and set(drawn) == {"Absolute", "LieRE8"}


def test_the_stored_report_is_made_from_the_stored_results(tmp_path):
    folder = ROOT / "training" / "results"
    files = sorted(folder.glob("*/*.jsonl"))
    assert files
    text = report.main([*map(str, files), "--output_dir", str(tmp_path), "--keep_results"]).read_text()
    assert text == (folder / "report.md").read_text()
    for file in files:
        assert (tmp_path / file.relative_to(folder)).read_bytes() == file.read_bytes()
        assert file.with_suffix(".png").is_file()
        # Folders, hosts and users are nobody's business.
        told = json.dumps([{**result, "correct": None} for result in result_lines.read_results(file)])
        assert not re.search(r"[\s\"'=](/|~|\.\.)\w|localhost|root", told)


def test_what_are_no_results_is_said(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"sweep": "x"}\n')
    with pytest.raises(InputError, match="a.jsonl, line 1 is not a result of evaluate_sweep.py"):
        report.main([str(tmp_path / "a.jsonl"), "--output_dir", str(tmp_path)])
    (tmp_path / "b.jsonl").write_text("")
    with pytest.raises(InputError, match="b.jsonl contains no results"):
        report.main([str(tmp_path / "b.jsonl"), "--output_dir", str(tmp_path)])
    with pytest.raises(InputError, match="There are no results"):
        report.main([str(tmp_path / "c.jsonl"), "--output_dir", str(tmp_path)])
