"""Reports: what stands where in their sections, tables and pictures."""

import json
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image
from report_lines import cells_of, reported, seeded

from training.common.arguments import InputError
from training.evidence import report
from training.evidence.reporting import plots, result_lines, result_table, sections, sweeps


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
        (
            {"position_encoding": [["liere", {"block_size": 3}], ["rope_mixed", {}]], "rotate_values": True},
            "LieRE + RoPE-Mixed, rotate_values",
        ),
        ({"seed": 1}, "the recipe"),
    ],
)
def test_rows_have_the_names_of_the_papers(settings, name):
    assert result_table.method(settings) == name


def test_a_report_tells_ours_beside_the_paper(results, tmp_path):
    path, lines = results
    text = report.main([str(path), "--output_dir", str(tmp_path / "report")]).read_text()
    accuracy = 100 * np.mean([entry["metrics"]["eval_accuracy"] for entry in lines[4::2]])
    row = next(row for row in text.splitlines() if row.startswith("| LieRE8 | 1,234,567 | 2 |"))
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    # Two seeds show themselves, under every condition.
    for column, some in ((3, lines[4::2]), (5, lines[5::2])):
        single = [100 * entry["metrics"]["eval_accuracy"] for entry in some]
        assert cells[column] == f"{np.mean(single):.1f}<br>{single[0]:.1f}, {single[1]:.1f}"
    assert cells[4] == "70.3" and cells[6] == "12.3"
    assert "**Not tested: 2 seeds, and a test needs 5. Highest mean accuracy: as trained, LieRE8" in text
    assert (
        "12 layers of 768 channels; 3 epochs of 1,000 examples in batches of 32; seeds 0, 1; evaluated on 200" in text
    )
    assert "The paper: CIFAR-100, ViT-B (LieRE, Table 5). Its relative losses are computed" in text
    assert "which these give as 54.7. Other data, models and budgets than ours" in text
    command = f"--mini --output_dir outputs/{path.parent.name} --train_files cifar.parquet\n"
    assert f"    python training/evidence/evaluate_sweep.py training/evidence/sweeps/shuffling.yaml {command}" in text
    assert "Not measured yet: no positions; Axial RoPE; RoPE-Mixed; LieRE32; ComRoPE-AP; ComRoPE-LD; " in text
    assert "; Golden gate RoPE; Cayley-STRING; Circulant-STRING; Spherical RoPE; LieRE product." in text
    shuffled = 100 * np.mean([entry["metrics"]["eval_accuracy"] for entry in lines[5::2]])
    # The paper's 12.3 of 70.3, its Table 5.
    pairs = [[100 * entry["metrics"]["eval_accuracy"] for entry in lines[at : at + 2]] for at in (4, 6)]
    single = ", ".join(f"{100 * (before - after) / before:.1f}%" for before, after in pairs)
    assert f"| LieRE8 | {100 * (accuracy - shuffled) / accuracy:.1f}%<br>{single} | 82.5% |" in text
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
    told = "python training/evidence/evaluate_sweep.py 'my sweep.yaml' --mini --output_dir outputs/mine "
    told += "--train_files c.parquet"
    assert f"    {told}\n" in text and text.count("evaluate_sweep.py") == 1


def test_stored_results_that_are_read_are_written_as_they_were(results, tmp_path):
    """Whatever the order in which lines have their entries."""
    runs = ({"image_size": 32, "samples": 9}, {"samples": 8, "image_size": 64})
    first, second = tmp_path / "first.jsonl", tmp_path / "second.jsonl"
    result_lines.write_results(first, [{**results[1][0], "run": run} for run in runs], as_changes=True)
    result_lines.write_results(second, result_lines.read_results(first), as_changes=True)
    assert first.read_bytes() == second.read_bytes()


def test_epochs_to_the_baseline_are_those_of_figure_9(results, tmp_path):
    """Of runs with enough evaluations to tell."""
    _, lines = results
    entries = lines[::2]
    for entry, reached in zip(entries, (20, 20, 5, 5)):
        entry["history"] = [[float(epoch), 0.6 if epoch >= reached else 0.1] for epoch in range(1, 21)]
    text = reported(tmp_path, "encodings", entries)
    assert "| LieRE8 | 5 | 4.0× |" in text and "| Absolute | 20 | 1.0× |" in text
    for entry in entries:
        entry["history"] = entry["history"][1:]
    assert "Epochs until" not in reported(tmp_path, "encodings", entries)


def test_all_releases_that_ran_are_named():
    releases = [{"device": "cpu", "libraries": {"torch": "2.14.1", "transformers": name}} for name in ("5.23", "5.24")]
    assert sections._machine([*releases, *releases]) == "cpu, torch 2.14.1, transformers 5.23 or 5.24"


def test_numbers_of_seeds_in_a_row_are_ranges():
    assert sections._ranges([0, 1, 2]) == "0, 1, 2" and sections._ranges([0, 1, 2, 3, 7]) == "0 – 3, 7"


def test_the_highest_accuracy_of_all_epochs_is_that_of_figure_4(results, tmp_path):
    """The mean over seeds of the highest, not the highest of the mean."""
    _, lines = results
    histories = [[[1.0, 0.3], [2.0, 0.9], [3.0, 0.6]], [[1.0, 0.7], [2.0, 0.2], [3.0, 0.4]]]
    entries = [{**entry, "history": history} for entry, history in zip(lines[:4:2], histories)]
    text = reported(tmp_path, "data_fraction", entries)
    assert (
        "| Absolute | 80.0<br>90.0, 70.0 | 50.0<br>60.0, 40.0 |"
        in text.split(
            "highest for Absolute (80.0%). From the best to the last epoch, a seed loses at most 30.0 points."
        )[1]
    )
    assert "Best epoch" not in reported(tmp_path, "block_size", entries)


def test_losses_stand_beside_those_of_table_9(results, tmp_path):
    _, lines = results
    entries = []
    for entry, loss in zip(lines[::2], (1.5, 1.7, 1.2, 1.4)):
        losses = {"eval_loss": loss, "eval_loss_low": loss - 0.1, "eval_loss_high": loss + 0.2}
        entries.append({**entry, "metrics": {**entry["metrics"], **losses}})
    text = reported(tmp_path, "encodings", entries).split("Lowest loss: ")[1]
    assert text.startswith("LieRE8 (1.300).")
    assert "| Absolute | 1.600<br>1.500, 1.700 | 1.56 (1.47 – 1.56) |" in text
    assert "| LieRE8 | 1.300<br>1.200, 1.400 | 1.36 (1.31 – 1.41) |" in text


def test_precisions_and_iterations_of_detectors(results, tmp_path):
    """As ComRoPE's Table 2 and Figure 4: against the epoch in which Absolute is best, which need not be its last."""
    _, lines = results
    curves = {
        "absolute": (*[0.1] * 16, 0.1, 0.3, 0.5, 0.4),
        "comrope_ld": (*[0.1] * 16, 0.2, 0.4, 0.5, 0.6),
    }
    entries = []
    for encoding, curve in curves.items():
        metrics = {"eval_samples": 9, "eval_map": curve[-1], "eval_map_50": 0.75, "eval_map_large": 0.625}
        entry = {**lines[0], "settings": {"position_encoding": encoding}, "metrics": metrics, "correct": None}
        entry |= {"script": "object_detection", "flags": ["coco.yaml"], "examples": None}
        entries.append({**entry, "history": [[float(epoch), value] for epoch, value in enumerate(curve, 1)]})
    text = reported(tmp_path, "detection", entries)
    assert "|  | AP | paper | AP50 | paper | APl | paper |" in text
    assert "| ComRoPE-LD | 60.0 | 44.7 | 75.0 | 67.6 | 62.5 | 60.0 |" in text
    reached = text.split("Epochs until the highest mAP of Absolute")[1]
    assert "| Absolute | 19 | 0% |" in reached and "| ComRoPE-LD | 19 | 0% |" in reached
    entries[1]["history"][12][1] = 0.5
    assert "| ComRoPE-LD | 13 | 32% |" in reported(tmp_path, "detection", entries)


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
        "Absolute (evaluated: offset 0)": [24, 32, 48],
        "Absolute (evaluated: offset 0.5)": [24, 32, 48],
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
    assert "| 99.5 (99.2 – 99.8) |" in text


def test_metrics_without_single_examples_have_the_intervals_that_there_are():
    def cell(*runs):
        return result_table.Cell(
            [
                {"correct": None, "settings": {"seed": seed}, "condition": {}, "metrics": {"eval_samples": 9, **run}}
                for seed, run in enumerate(runs)
            ]
        )

    areas = [
        {"eval_accuracy": 0.5, "eval_auc": a, "eval_auc_low": a - 0.1, "eval_auc_high": a + 0.1}
        for a in (0.6, 0.7, 0.6, 0.7, 0.65)
    ]
    assert str(cell(*areas[:2])) == "AUC 0.650<br>0.600, 0.700"
    assert str(cell({"eval_map": 0.2}, {"eval_map": 0.3})) == "mAP 0.250<br>0.200, 0.300"
    interval = cell(*areas).interval
    # The examples alone have a standard error of 0.1/1.96.
    assert interval.mean == pytest.approx(0.65) and interval.high - interval.low > 0.2
    assert str(cell(*areas)).startswith(f"AUC 0.650 ({interval.low:.3f} – {interval.high:.3f})<br>0.600, ")


def test_numbers_of_patches_make_no_line(results):
    _, lines = results
    entries = [
        {**entry, "settings": {**entry["settings"], "max_num_patches": patches}}
        for patches in (81, 64)
        for entry in lines[::2]
    ]
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


def test_labels_name_the_models_of_a_sweep(tmp_path):
    """Of an entry with its encoding, or beside the encoding's name; papers' rows and missing models have them too."""
    axes = [
        [{"seed": 0}, {"seed": 1}],
        [{"position_encoding": "absolute"}, {"position_encoding": "liere", "block_size": 8, "label": "LieRE8, ours"}],
        [{"share_heads": None}, {"share_heads": True, "label": "shared"}],
    ]
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump({"script": "image_classification", "recipe": "cifar100", "train": axes}))
    sweep = sweeps.read_sweep(path, mini=False)
    settings = sweeps.combinations(sweep["train"])
    assert len(settings) == 8 and not any("label" in given for given in settings)
    labels = sweep["labels"]
    names = [result_table.reader_name(given, sweep["script"], (), [], labels) for given in settings[:4]]
    assert names == ["Absolute", "Absolute, shared", "LieRE8, ours", "LieRE8, ours, shared"]
    table = cells_of("mine", settings[:4], (0.5,) * 4, 1)
    assert list(result_table.reader_names(table, labels, []).values()) == names
    equal = {identity: ({}, ["the same"]) for identity in labels}
    with pytest.raises(InputError, match="The label 'the same' names .* and another model; accepted: labels that"):
        result_table.reader_names(table, equal, [])


def test_ten_seeds_are_in_the_picture_alone():
    nine, ten = (cells_of("encodings", [{"position_encoding": "liere"}], (0.5,), count) for count in (9, 10))
    assert "<br>" in str(nine["LieRE8"]["as trained"]) and "<br>" not in str(ten["LieRE8"]["as trained"])


def test_the_report_opens_with_a_summary_and_folds_few_seeds(results, tmp_path):
    path, lines = results
    text = report.main([str(path), "--output_dir", str(tmp_path / "report")]).read_text()
    row = next(row for row in text.splitlines() if row.startswith("| ["))
    name = f"{path.parent.name}: shuffling"
    assert row == (
        f"| [Shuffled patches: encodings](#{name.replace(': ', '-')}) (2 models) | {path.parent.name} | 2 | "
        "Not tested: 2 seeds, and a test needs 5. |"
    )
    assert text.index(row) < text.index("## How to read this page") < text.index(f"## {name}")
    folded = text.split("<summary>2 seeds: tables and picture</summary>\n\n")[1].split("\n\n</details>")[0]
    assert folded.startswith("Ours: ") and "| LieRE8 |" in folded and "shuffling.png" in folded
    many = seeded("encodings", [{"position_encoding": name} for name in ("absolute", "liere")], (0.5, 0.9), 5)
    text = reported(tmp_path, "encodings", many)
    assert "<details>" not in text and " | 5 | 1 of 1 test. Against Absolute, better: LieRE8 +" in text


def test_differences_are_drawn_where_seeds_are_paired(tmp_path):
    """From the baseline, with the interval of the test and the single seeds."""
    settings = [{"position_encoding": name} for name in ("none", "rope_mixed")]
    entries = seeded("language", settings, (0.5, 0.8), 5)
    one = sections.Section.read(Path("python", "language.jsonl"), entries, {})
    assert one.sweep["paired"] and len(plots.tested_models(one.found, one.table)) == 1
    drawn = []
    original = plots._save
    try:
        plots._save = lambda figure, *_: drawn.append(figure)
        one.draw(tmp_path / "picture.png")
    finally:
        plots._save = original
    (axes,) = drawn[0].axes
    seeds = next(line for line in axes.lines if len(line.get_xdata()) == 5)
    before, after = (cells["as trained"].by_seed() for cells in one.table.values())
    assert list(seeds.get_xdata()) == pytest.approx([100 * (after[seed] - before[seed]) for seed in before])
    assert axes.get_xlabel() == "difference of accuracy from no positions (points)"


def test_what_a_fine_tuned_checkpoint_is_and_for_how_long(results, tmp_path):
    """Its record may contain its name alone, and flags may limit the steps. Bars in settings do not end a cell."""
    _, lines = results
    path = tmp_path / "towers.jsonl"
    for entry in lines:
        entry["run"] = entry["run"] | {"model": {"model_name_or_path": "outputs/tower"}}
        entry["run"]["training"] = entry["run"]["training"] | {"max_steps": 30}
        entry["settings"] = entry["settings"] | {"lora_targets": f"query|{entry['settings']['position_encoding']}"}
    path.write_text("".join(json.dumps(entry) + "\n" for entry in lines))
    text = report.main([str(path), "--output_dir", str(tmp_path / "report")]).read_text()
    assert "Ours: outputs/tower; 30 steps in batches of 32; seeds 0, 1" in text and "epoch" not in text
    assert "| LieRE8, lora_targets query\\|liere | " in text


def test_what_are_no_results_is_said(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"sweep": "x"}\n')
    with pytest.raises(InputError, match="a.jsonl, line 1 is not a result of evaluate_sweep.py"):
        report.main([str(tmp_path / "a.jsonl"), "--output_dir", str(tmp_path)])
    (tmp_path / "b.jsonl").write_text("")
    with pytest.raises(InputError, match="b.jsonl contains no results"):
        report.main([str(tmp_path / "b.jsonl"), "--output_dir", str(tmp_path)])
    with pytest.raises(InputError, match="There are no results"):
        report.main([str(tmp_path / "c.jsonl"), "--output_dir", str(tmp_path)])
