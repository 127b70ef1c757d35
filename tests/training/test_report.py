"""Reports: intervals and tests against other computations, and what stands where in the tables."""

import base64
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import yaml
from checkout import ROOT
from PIL import Image
from scipy import stats

from training.common.arguments import InputError
from training.evidence import report
from training.evidence.reporting import comparisons, conclusions, plots, result_lines, result_table, sections, sweeps
from training.evidence.reporting.significance import (
    Outcomes,
    bootstrap_mean,
    compare,
    compare_durations,
    compare_shares,
    holm,
    share,
)


def outcomes(generator, seeds, draws=1, examples=1, spread=0.05):
    """Runs of a model: every seed and every draw has an effect, and every example a difficulty, around one half."""
    effects = [
        generator.normal(0, spread, shape)
        for shape, count in (((seeds, 1, 1), seeds), ((1, draws, 1), draws), ((1, 1, examples), examples))
        if count > 1
    ]
    return np.broadcast_to(sum(effects, np.array(0.5)), (seeds, draws, examples))


def test_with_seeds_alone_tests_are_welchs():
    """Against scipy, and the interval against a table of Student's distribution."""
    first, second = np.array([0.50, 0.52, 0.49, 0.51, 0.50]), np.array([0.53, 0.55, 0.50, 0.55, 0.51, 0.58])
    test = compare(*(Outcomes(some[:, None, None]) for some in (first, second)))
    expected = stats.ttest_ind(second, first, equal_var=False)
    assert test.p_value == pytest.approx(expected.pvalue)
    assert (test.difference.low, test.difference.high) == pytest.approx(expected.confidence_interval())
    # The same models evaluated twice are paired.
    paired = compare(*(Outcomes(some[:5, None, None]) for some in (first, second)), paired_seeds=True)
    assert paired.p_value == pytest.approx(stats.ttest_rel(second[:5], first).pvalue)
    same = Outcomes(np.full((5, 1, 3), 0.5))
    assert compare(same, same).p_value == 1.0


def test_equivalence_is_shown_where_the_90_percent_interval_lies_within_the_margin():
    """Schuirmann's two one-sided tests: at 5%, exactly then."""
    generator = np.random.default_rng(2)
    first, second = (Outcomes(generator.normal(mean, 0.01, (8, 1, 1))) for mean in (0.5, 0.502))
    both = (stats.ttest_ind(second.values.ravel(), first.values.ravel(), equal_var=False)).confidence_interval(0.9)
    edge = max(abs(both.low), abs(both.high))
    assert compare(first, second, edge).p_value == pytest.approx(0.05)
    assert compare(first, second, 2 * edge).p_value < 0.05 < compare(first, second, edge / 2).p_value


@pytest.mark.parametrize("draws, examples", [(1, 1), (1, 150), (4, 1), (3, 150)])
def test_tests_reject_a_true_hypothesis_as_often_as_they_say(draws, examples):
    """Of two models of one kind, with other seeds, on the same draws and examples, which have effects of their own."""
    generator = np.random.default_rng(1)
    rejected = 0
    for _ in range(400):
        shared = outcomes(generator, 1, draws, examples) - 0.5
        pair = []
        for _ in range(2):
            own = outcomes(generator, 5) + outcomes(generator, 1, draws, examples) - 0.5
            pair.append(Outcomes(own + shared))
        rejected += compare(*pair).p_value < 0.05
    # 20 expected; 37 is four standard deviations more. Fewer are no error: some variances are counted twice.
    assert rejected <= 37


@pytest.mark.parametrize("seeds, draws, examples, spread", [(5, 1, 1, 0.05), (10, 1, 200, 0.05), (8, 5, 1, 0.05)])
def test_intervals_cover_what_other_seeds_draws_and_examples_would_give(seeds, draws, examples, spread):
    generator = np.random.default_rng(3)
    covered = 0
    for _ in range(100):
        interval = bootstrap_mean(Outcomes(outcomes(generator, seeds, draws, examples, spread)))
        covered += interval.low <= 0.5 <= interval.high
    # 95 expected. Percentiles of five values cannot leave their range, which costs some coverage: of 600, 91% covered.
    # 80 is four standard deviations below.
    assert covered >= 80


def test_intervals_contain_the_spread_of_seeds_and_of_examples():
    generator = np.random.default_rng(0)
    one = (generator.random((1, 1, 500)) < 0.7).astype(float)
    same_seeds = bootstrap_mean(Outcomes(np.repeat(one, 10, axis=0)))
    error = one.std() / math.sqrt(500)
    assert same_seeds.high - same_seeds.low == pytest.approx(2 * 1.96 * error, rel=0.1)
    seeds = generator.normal(0, 0.1, (10, 1, 1))
    both = bootstrap_mean(Outcomes(one + seeds))
    expected = math.hypot(error, seeds.std(ddof=1) / math.sqrt(10))
    assert both.high - both.low == pytest.approx(2 * 2.2 * expected, rel=0.2)
    # Where only a standard error of the examples is known.
    known = bootstrap_mean(Outcomes(one.mean() + seeds, error))
    assert known.high - known.low == pytest.approx(both.high - both.low, rel=0.1)


def test_outcomes_of_two_modes_are_compared_by_shares_and_durations():
    """Against formulas: Clopper and Pearson's interval of 0 of 20 ends at 1 − 0.025^(1/20)."""
    assert share(0, 20).high == pytest.approx(1 - 0.025 ** (1 / 20)) and share(0, 20).low == 0
    shares = [True] * 20, [False] * 20
    assert compare_shares(*shares).p_value == pytest.approx(2 / math.comb(40, 20))
    assert compare_shares(*shares).difference.mean == -1
    never, soon = [(5.0, False)] * 20, [(1.0, True)] * 19 + [(2.0, True)]
    assert compare_durations(never, soon).p_value < 1e-6
    assert (
        compare_durations(never, never).p_value
        == 1.0
        == compare_durations([(1.0, True)] * 9, [(1.0, True)] * 9).p_value
    )


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
    paper = yaml.safe_load((ROOT / "training" / "evidence" / "paper_results.yaml").read_text())
    for name, content in paper.items():
        sweep = sweeps.read_sweep(ROOT / "training" / "evidence" / "sweeps" / f"{name}.yaml", mini=False)
        settings = sweeps.combinations(sweep["train"])
        rows = {result_table.method(given, sweep["script"]) for given in settings}
        runs = [sweeps.Run(sweep, row, [], ROOT) for row in settings]
        columns = {result_table.condition(given) for run in runs for given in run.conditions}
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
    for encoding, part, epochs in (("absolute", 0.6, (0.3, 0.5, 0.6)), ("liere", 0.8, (0.61, 0.7, 0.8))):
        for seed in (0, 1):
            history = [[number, accuracy] for number, accuracy in enumerate(epochs, 1)]
            lines.append(line(encoding, seed, generator.random(200) < part, history=history))
            shuffled = generator.random(200) < part / 4
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


def test_the_comparisons_of_a_sweep_of_ones_own_are_tested(tmp_path):
    """Its file lies beside its results. Encodings that answer 60 and 80% of 300 examples differ."""
    rows = [{"position_encoding": "absolute"}, {"position_encoding": "liere"}]
    lines = seeded("mine", rows, (0.6, 0.8), seeds=5)
    assert "Holm" not in reported(tmp_path, "mine", lines).split("\n## ")[-1]
    sweep = {
        "script": "image_classification",
        "recipe": "images_mini",
        "train": [rows],
        "compare": [{"against": rows[0]}],
    }
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(sweep))
    assert "Holm" in reported(tmp_path, "mine", lines).split("\n## ")[-1]


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


def reported(tmp_path, sweep, entries):
    path = tmp_path / f"{sweep}.jsonl"
    path.write_text("".join(json.dumps({**entry, "sweep": sweep}) + "\n" for entry in entries))
    return report.main([str(path), "--output_dir", str(tmp_path / "report")]).read_text()


def seeded(sweep, settings, shares, seeds, seed=0, history=()):
    """Lines of models with these settings, of which each seed answers a share of 300 examples."""
    generator = np.random.default_rng(seed)
    return [
        {
            **line("liere", number, generator.random(300) < share, history=history),
            **{"sweep": sweep, "flags": ["cifar100.yaml", "--do_eval", "true"]},
            **{"settings": {**given, "seed": number}},
        }
        for given, share in zip(settings, shares)
        for number in range(seeds)
    ]


def test_the_two_starts_of_an_encoding_are_compared_as_in_table_7(tmp_path):
    """2π against 1, as the paper, with the variances of seeds and of examples, computed here in other words."""
    settings = [
        {"position_encoding": "liere", "block_size": 8, "rotary_init_scale": scale} for scale in (2 * math.pi, 1.0)
    ]
    entries = seeded("init_scale", settings, (0.53, 0.6), 5)
    text = reported(tmp_path, "init_scale", entries)
    large, small = (
        np.array([result_lines.correct_examples(entry) for entry in some], float) for some in (entries[:5], entries[5:])
    )
    parts = [np.var(some.mean(axis=1), ddof=1) / 5 for some in (large, small)]
    parts.append(np.var(large.mean(axis=0) - small.mean(axis=0), ddof=1) / 300)
    freedom = sum(parts) ** 2 / (parts[0] ** 2 / 4 + parts[1] ** 2 / 4 + parts[2] ** 2 / 299)
    error, mean = math.sqrt(sum(parts)), (large - small).mean()
    p_value = 2 * stats.t.sf(abs(mean) / error, freedom)
    low, high = (f"{100 * (mean + sign * stats.t.isf(0.025, freedom) * error):+.1f}" for sign in (-1, 1))
    expected = f"{100 * mean:+.1f} ({low} – {high})".replace("-", "−")
    assert p_value > 1e-4
    row = f"| LieRE8, rotary_init_scale 6.283 | LieRE8, rotary_init_scale 1 | {expected}, p = {p_value:.2g}"
    assert row in text and "1 of 1 distinct test is significant at 5% after Holm's correction." in text
    against = "**Against LieRE8 (rotary_init_scale 1), worse:"
    assert f"{against} LieRE8 (rotary_init_scale 6.283) {expected.split()[0]} points.**" in text


def cells_of(sweep, settings, shares, seeds, **further):
    return result_table.arrange(seeded(sweep, settings, shares, seeds, **further))


def test_what_is_tested_twice_is_counted_once_and_baselines_at_chance_are_left_out():
    settings = [{"position_encoding": name} for name in ("absolute", "rope_mixed", "liere")]
    table = cells_of("encodings", settings, (0.5, 0.6, 0.6), 5)
    twice = [{"against": {"position_encoding": name}} for name in ("absolute", "rope_mixed")]
    found = comparisons.make_comparisons({"compare": twice}, table)
    # RoPE-Mixed against Absolute is Absolute against RoPE-Mixed.
    assert found.named == 4 and found.distinct == 3
    one = {(each.row, each.against): each.test.p_value for each in found.made}
    assert one["RoPE-Mixed", "Absolute"] == pytest.approx(one["Absolute", "RoPE-Mixed"])
    assert {(each.row, each.against): each.p_value for each in found.made} == pytest.approx(
        dict(zip(one, np.array(holm([*list(one.values())[:2], one["LieRE8", "RoPE-Mixed"]]))[[0, 1, 0, 2]]))
    )
    at_chance = comparisons.make_comparisons({"compare": twice, "chance": 0.5}, table)
    assert at_chance.at_chance == ["Absolute"]
    assert {each.against for each in at_chance.made} == {"RoPE-Mixed"}
    # A loss is another metric and another test, and less of it is better.
    for result in (result for cells in table.values() for cell in cells.values() for result in cell.results):
        result["metrics"]["eval_loss"] = 1 - result["metrics"]["eval_accuracy"]
    losses = comparisons.make_comparisons({"compare": [*twice[:1], {**twice[0], "metric": "loss"}]}, table)
    assert losses.distinct == 4 and "Against Absolute (loss), better: RoPE-Mixed −0." in (
        conclusions.conclude(losses, table)
    )
    fewer = comparisons.make_comparisons({"compare": twice}, cells_of("encodings", settings, (0.5, 0.6, 0.6), 4))
    assert fewer.named == 4 and fewer.made == []


def test_outcomes_of_two_modes_are_shares_of_twenty_seeds():
    """Half of the seeds of one model solve the task, all of the other, and after half of the examples."""
    settings = [{"position_encoding": name} for name in ("axial_rope", "liere")]
    half, solved = [[0.5, 0.4], [1.0, 0.95]], [[0.5, 0.95], [1.0, 0.96]]
    sweep = {"solved_at": 0.9, "compare": [{"against": {"position_encoding": "axial_rope"}, "within": 0.01}]}

    def table(seeds):
        slow = cells_of("arrows", settings[:1], (1.0,), seeds, history=half)
        for result in slow["Axial RoPE"]["as trained"].results[::2]:
            result |= {"correct": result_lines.encode_examples(np.arange(300) < 200), "history": [[1.0, 0.6]]}
        return slow | cells_of("arrows", settings[1:], (1.0,), seeds, history=solved)

    found = comparisons.make_comparisons(sweep, table(20))
    p_values = {each.kind: each.test.p_value for each in found.made}
    assert set(p_values) == {"mean", "share", "examples", "equal"} and found.distinct == 4
    # Accuracies are 2/3 with every second seed of one model, on the same 200 examples, and else 1.
    right = np.ones((20, 300))
    right[::2, 200:] = 0
    parts = [np.var(right.mean(axis=1), ddof=1) / 20, np.var(right.mean(axis=0), ddof=1) / 300]
    freedom = sum(parts) ** 2 / (parts[0] ** 2 / 19 + parts[1] ** 2 / 299)
    assert p_values["mean"] == pytest.approx(2 * stats.t.sf((1 / 6) / math.sqrt(sum(parts)), freedom))
    assert p_values["share"] == pytest.approx(stats.fisher_exact([[10, 10], [20, 0]]).pvalue)
    censored = stats.CensoredData([1000] * 10, right=[1000] * 10)
    assert p_values["examples"] == pytest.approx(stats.logrank(censored, [500] * 20).pvalue)
    said, text = comparisons.solved_table(table(20), 0.9)
    assert said.startswith(
        "Seeds that reach 90%, and the median of the training examples until then. As trained, both "
    )
    assert (
        "| LieRE8 | 20 of 20 (83% – 100%) | 500 |" in text
        and "| Axial RoPE | 10 of 20 (27% – 73%) | not reached |" in text
    )
    said = conclusions.conclude(found, table(20))
    assert said.startswith(
        "Against Axial RoPE, better: LieRE8 +16.7 points. 90% reached by more seeds than with Axial RoPE (10 of 20): "
        "LieRE8 20 of 20. Equality with Axial "
    )
    # What follows from the share is not said again.
    assert "Examples until" not in said
    _, text = comparisons.tests_table(found, table(20))
    assert "| +50% of the seeds, p = 0.0" in text and "| 500 against not reached, p " in text
    few = comparisons.make_comparisons(sweep, table(5))
    said = conclusions.conclude(few, table(5))
    assert few.made == [] and said.startswith("Not tested: 5 seeds, and a test needs 20. 90% reached by every ")
    assert "every seed: LieRE8; by some seeds: Axial RoPE 2 of 5." in said
    unnamed = conclusions.conclude(comparisons.make_comparisons({"solved_at": 0.9}, table(20)), table(20))
    assert unnamed.startswith("Not tested: the file of the sweep names no comparison. 90% reached by every")


def test_margins_of_one_pair_are_separate_tests():
    """A difference of about one point: within ten points, but not within one tenth of a point."""
    settings = [{"position_encoding": name} for name in ("absolute", "liere")]
    table = cells_of("encodings", settings, (0.6, 0.6), 5)
    margins = (0.001, 0.1)
    entries = [{"against": settings[0], "within": margin} for margin in margins]
    found = comparisons.make_comparisons({"compare": entries}, table)
    # The test of the difference is the same in both.
    assert [(one.kind, one.margin) for one in found.made] == [("mean", None), ("equal", 0.001), ("equal", 0.1)]
    assert found.distinct == 3 and found.significant == 1
    pair = [table[row]["as trained"].outcomes for row in ("Absolute", "LieRE8")]
    for margin, one in zip(margins, found.made[1:]):
        assert one.test.p_value == compare(*pair, margin).p_value
    _, text = comparisons.tests_table(found, table)
    heading = [cell.strip() for cell in text.splitlines()[0].strip("|").split("|")]
    narrow, wide = (f"as trained: equivalence within ±{points}" for points in ("0.1", "10.0"))
    assert heading == ["", "against", "as trained", narrow, wide]
    said = conclusions.conclude(found, table)
    assert "Equality with Absolute within ±0.1 points is not shown for any row." in said
    assert "Equal to Absolute within ±10.0 points: LieRE8." in said


def test_many_rows_that_no_test_tells_apart_are_counted():
    settings = [{"position_encoding": name} for name in ("absolute", "liere", "rope_mixed", "comrope_ap", "comrope_ld")]
    sweep = {"compare": [{"against": {"position_encoding": "absolute"}}]}
    for shares, said in (
        ((0.5, 0.9, 0.5, 0.5, 0.5), " points. Significant: 1 of 4 tests."),
        ((0.5, 0.5, 0.5, 0.5, 0.5), "No difference is significant (tests: 4). Highest mean accuracy: "),
        ((0.5, 0.9, 0.9, 0.9, 0.5), " points. Not significant: ComRoPE-LD against Absolute."),
    ):
        table = cells_of("encodings", settings, shares, 5)
        assert said in conclusions.conclude(comparisons.make_comparisons(sweep, table), table)


def test_tests_of_one_pair_with_different_results_are_told_apart():
    """Significant as trained, open under another condition."""
    settings = [{"position_encoding": name} for name in ("absolute", "liere")]
    table = cells_of("encodings", settings, (0.5, 0.9), 5)
    smaller = cells_of("encodings", settings, (0.5, 0.5), 5)
    table = {row: {**cells, "16 px": smaller[row]["as trained"]} for row, cells in table.items()}
    sweep = {"compare": [{"against": {"position_encoding": "absolute"}, "within": 0.001}]}
    said = conclusions.conclude(comparisons.make_comparisons(sweep, table), table)
    assert said.startswith("Against Absolute, better: LieRE8 +")
    assert said.endswith(" Not significant: LieRE8 against Absolute (16 px).")
    for where in ("", ", 16 px"):
        assert f"Equality with Absolute within ±0.1 points{where} is not shown for any row." in said


@pytest.mark.parametrize(
    "before, after, said",
    [
        ("16 px", "fixed_grid, 16 px", "With fixed_grid (16 px)"),
        ("as trained", "16 px", "With 16 px"),
        ("offset 0", "offset 1", "With offset 1 instead of offset 0"),
        ("train_grid, 16 px", "16 px", "Without train_grid (16 px)"),
        ("16 px", "as trained", "Without 16 px"),
    ],
)
def test_changes_of_a_condition_in_words(before, after, said):
    assert conclusions._change(before, after) == said


def test_rows_that_are_always_right_have_the_same_answers():
    settings = [{"position_encoding": name} for name in ("absolute", "liere")]
    table = cells_of("encodings", settings, (1.0, 1.0), 5)
    found = comparisons.make_comparisons({"compare": [{"against": {"position_encoding": "absolute"}}]}, table)
    assert conclusions.conclude(found, table) == "Against Absolute, same answers: LieRE8."
    assert "| unchanged |" in comparisons.tests_table(found, table)[1]


def test_sentences_name_rows_by_what_tells_them_apart():
    rows = (
        "Absolute, image_size 48",
        "LieRE8, coordinates index, rotary_init axial, rotary_learning_rate_factor 1",
        "LieRE8, coordinates index, rotary_init axial, rotary_learning_rate_factor 4",
        "LieRE8, coordinates train_grid, rotary_init uniform, rotary_learning_rate_factor 4",
        "RoPE-Mixed",
        "RoPE-Mixed, share_heads",
        "LieRE3",
        "LieRE3, rotary_init so3",
        "LieRE3, rotary_init so3, rotate_values, rotary_learning_rate_factor 0",
    )
    names = conclusions.names_in_prose(dict.fromkeys(rows, {}))
    assert list(names) == list(rows) and list(names.values()) == [
        "Absolute",
        "LieRE8 (rotary_learning_rate_factor 1)",
        "LieRE8 (rotary_init axial, rotary_learning_rate_factor 4)",
        "LieRE8 (rotary_init uniform)",
        "RoPE-Mixed",
        "RoPE-Mixed (share_heads)",
        "LieRE3",
        "LieRE3 (rotary_init so3)",
        "LieRE3 (rotary_init so3, rotate_values)",
    ]


def test_all_releases_that_ran_are_named():
    releases = [{"device": "cpu", "libraries": {"torch": "2.14.1", "transformers": name}} for name in ("5.23", "5.24")]
    assert sections._machine([*releases, *releases]) == "cpu, torch 2.14.1, transformers 5.23 or 5.24"


def test_numbers_of_seeds_in_a_row_are_ranges():
    assert sections._ranges([0, 1, 2]) == "0, 1, 2" and sections._ranges([0, 1, 2, 3, 7]) == "0 – 3, 7"


def test_durations_of_models_that_solve_a_task_equally_are_distinct_tests():
    """All answers of all models are right in the end: one model is as slow as the baseline, and one is faster."""
    slow, fast = [[0.5, 0.4], [1.0, 0.95]], [[0.5, 0.95], [1.0, 0.96]]
    table = {}
    for name, history in (("axial_rope", slow), ("rope_mixed", fast), ("liere", slow)):
        table |= cells_of("arrows", [{"position_encoding": name}], (1.0,), 20, history=history)
    sweep = {"solved_at": 0.9, "compare": [{"against": {"position_encoding": "axial_rope"}}]}
    found = comparisons.make_comparisons(sweep, table)
    p_values = {each.row: (each.test.p_value, each.p_value) for each in found.made if each.kind == "examples"}
    (alone, corrected), (equal, _) = p_values["RoPE-Mixed"], p_values["LieRE8"]
    said = conclusions.conclude(found, table)
    assert said == (
        "Against Axial RoPE, same answers: RoPE-Mixed, LieRE8. Examples until 90%, against Axial RoPE (1,000), sooner: "
        "RoPE-Mixed 500. Significant: 1 of 4 tests."
    )
    # Accuracies and shares are equal for both.
    assert found.distinct == 4 and alone < 1e-6 < 1 == equal and corrected == pytest.approx(4 * alone)


def test_losses_of_documents_are_compared_by_their_tokens(tmp_path):
    """Documents weigh as much as they have tokens, in a line that is written and read."""
    generator = np.random.default_rng(4)
    sizes, means = generator.integers(1, 200, 60), generator.gamma(2, 1, 60)
    lines = []
    for encoding, added in (("none", 0.0), ("rope_mixed", -0.02)):
        for seed in range(5):
            losses = (means + added + generator.normal(0, 0.005, 60)).astype(np.float32)
            loss = float(np.average(losses, weights=sizes))
            entry = {
                **line(encoding, seed, [True]),
                "sweep": "language",
                "script": "language_modeling",
                "correct": None,
            }
            entry["metrics"] = {"eval_samples": 9, "eval_perplexity": math.exp(loss), "eval_loss": loss}
            lines.append(
                entry | {"losses": result_lines.encode_numbers(losses), "sizes": result_lines.encode_numbers(sizes)}
            )
    result_lines.write_results(tmp_path / "language.jsonl", lines, as_changes=True)
    table = result_table.arrange(result_lines.read_results(tmp_path / "language.jsonl"))
    cell = next(iter(table.values()))["as trained"]
    # Half precision rounds losses by at most one in 2,000.
    assert cell.outcomes.values.shape == (5, 1, 60)
    assert list(cell.by_seed().values()) == pytest.approx(
        [entry["metrics"]["eval_perplexity"] for entry in lines[:5]], rel=1e-3
    )
    found = comparisons.make_comparisons({"compare": [{"against": {"position_encoding": "none"}}]}, table)
    assert ", better: RoPE-Mixed −" in conclusions.conclude(found, table)
    # Documents differ by 1.4 and models by 0.02, which only pairs show.
    assert found.made[0].significant and found.made[0].test.difference.mean == pytest.approx(-0.02, abs=0.005)


def test_groups_of_examples_are_drawn_together():
    """Examples that repeat one another within a group, which weighs as much as it has examples."""
    generator, sizes = np.random.default_rng(5), [10, 40, 20, 30, 15, 25]
    by_group = {encoding: generator.random((5, 6)) < 0.7 for encoding in ("none", "rope_mixed")}
    lines = [
        line(encoding, seed, np.repeat(right, sizes).tolist())
        for encoding, seeds in by_group.items()
        for seed, right in enumerate(seeds)
    ]
    alone, grouped = (next(iter(result_table.arrange(lines, some).values()))["as trained"] for some in ((), sizes))
    right = by_group["none"]
    assert grouped.outcomes.values.shape == (5, 1, 6) and grouped.mean == pytest.approx(alone.mean)
    assert grouped.by_seed() == pytest.approx(alone.by_seed())
    # Of a ratio: shares of the groups differ from the mean, and each counts by its size (Cochran 1977, §6.3).
    shares, mean = right.mean(axis=0), np.average(right.mean(axis=0), weights=sizes)
    error = math.sqrt(((np.array(sizes) * (shares - mean)) ** 2).sum() / (6 * 5)) / np.mean(sizes)
    assert grouped.outcomes.error_of_examples() == pytest.approx(error)
    assert error > 3 * alone.outcomes.error_of_examples()
    with pytest.raises(ValueError, match="groups: 10, 40 are 50 examples; accepted: sizes of 140 examples"):
        str(next(iter(result_table.arrange(lines, (10, 40)).values()))["as trained"])


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


def test_draws_of_an_offset_are_random_and_told(results):
    """Seeds with three draws have no interval, but a test; the range of the draws is that of their means over seeds."""
    _, lines = results
    generator = np.random.default_rng(0)
    entries = []
    for name, given in (("absolute", 0.6), ("liere", 0.8)):
        for seed in range(5):
            for draw, moved in enumerate((-0.2, 0.0, 0.1)):
                condition = {"evaluation_offset": 1.0, "evaluation_seed": draw}
                entries.append(line(name, seed, generator.random(200) < given + moved, condition))
    table = result_table.arrange(entries)
    cell = table["Absolute"]["offset 1"]
    assert cell.outcomes.values.shape == (5, 3, 200) and cell.interval is None
    draws = [np.mean([entry["metrics"]["eval_accuracy"] for entry in entries[start:15:3]]) for start in range(3)]
    assert str(cell).endswith(f"<br>draws {100 * min(draws):.1f} – {100 * max(draws):.1f}")
    found = comparisons.make_comparisons({"compare": [{"against": {"position_encoding": "absolute"}}]}, table)
    assert found.made[0].significant


def test_conditions_are_compared_unless_they_are_one_evaluation():
    generator = np.random.default_rng(0)
    entries = []
    for seed in range(5):
        right = {size: generator.random(200) for size in (32, 64)}
        for size, gained in ((32, 0.0), (64, 0.3)):
            for coordinates in ("train_grid", "fixed_grid"):
                condition = {"coordinates": coordinates, "image_size": size}
                share = 0.5 + gained * (coordinates == "fixed_grid")
                entries.append(line("liere", seed, right[size] < share, condition))
    table = result_table.arrange(entries)
    sweep = {"compare": [{"against_condition": {"coordinates": "train_grid"}}]}
    found = comparisons.make_comparisons(sweep, table)
    assert (found.named, found.distinct, found.significant) == (1, 1, 1)
    said = conclusions.conclude(found, table)
    assert said.startswith("With fixed_grid instead of train_grid (64 px), better: LieRE8 +")


def test_rows_under_a_condition_are_compared_with_a_row_under_another():
    """Absolute positions have no coordinates: in `fixed_grid` others are beside its only evaluation of that size."""
    generator, entries = np.random.default_rng(0), []
    for seed in range(5):
        for size, accuracy in (({"image_size": 32}, 0.5), ({"image_size": 64}, 0.3)):
            entries.append(line("absolute", seed, generator.random(200) < accuracy, size))
            for given, own in (({}, accuracy), ({"coordinates": "fixed_grid"}, 0.8)):
                entries.append(line("liere", seed, generator.random(200) < own, given | size))
    table = result_table.arrange(entries)
    entry = {
        "against": {"position_encoding": "absolute"},
        "against_condition": {"coordinates": None},
        "under": [{"coordinates": "fixed_grid", "image_size": 64}],
    }
    found = comparisons.make_comparisons({"compare": [entry]}, table)
    (one,) = found.made
    base, other = table["Absolute"]["64 px"], table["LieRE8"]["fixed_grid, 64 px"]
    assert one.test == compare(base.outcomes, other.outcomes)
    gained = f"{100 * (other.mean - base.mean):+.1f}"
    said = f"Against Absolute, fixed_grid, 64 px, better: LieRE8 {gained} points."
    assert conclusions.conclude(found, table) == said
    everywhere = {name: value for name, value in entry.items() if name != "under"}
    assert comparisons.make_comparisons({"compare": [everywhere]}, table).named == 2


def test_models_that_start_equally_are_compared_seed_by_seed():
    """Seeds differ by more than models: pairs tell the models apart, as scipy's test of pairs does."""
    generator = np.random.default_rng(0)
    effects, examples = generator.normal(0.5, 0.1, 6), np.arange(300) / 300
    settings, gains = ("none", "liere"), (0.0, 0.04)
    entries = [
        line(name, seed, examples < effect + gain + generator.normal(0, 0.01))
        for name, gain in zip(settings, gains)
        for seed, effect in enumerate(effects)
    ]
    for entry in entries:
        # Without single examples, seeds alone vary.
        entry["correct"] = None
    sweep = {"compare": [{"against": {"position_encoding": "none"}}]}
    made = [
        comparisons.make_comparisons(given, result_table.arrange(entries)).made
        for given in (sweep, sweep | {"paired": True})
    ]
    means = np.array([entry["metrics"]["eval_accuracy"] for entry in entries]).reshape(2, 6)
    assert made[0][0].test.p_value == pytest.approx(stats.ttest_ind(*means, equal_var=False).pvalue)
    assert made[1][0].test.p_value == pytest.approx(stats.ttest_rel(*means).pvalue)
    assert made[1][0].significant and not made[0][0].significant
    # Another seed has no partner.
    entries[-1]["settings"]["seed"] = 9
    assert comparisons.make_comparisons(sweep | {"paired": True}, result_table.arrange(entries)).made == []


def test_examples_are_paired_with_the_evaluation_without_an_offset():
    """A model that an offset does not change has no error, one that loses the same in all draws none due to draws."""
    generator = np.random.default_rng(0)
    right = generator.random((5, 1, 300)) < 0.7
    first, moved = Outcomes(right), np.repeat(right, 5, axis=1)
    test = compare(first, Outcomes(moved), paired_seeds=True)
    assert (test.difference.low, test.difference.high, test.p_value) == (0, 0, 1)
    moved[:, :, :30] = False
    lost = right[:, 0, :30].sum(axis=1) / 300
    test = compare(first, Outcomes(moved), paired_seeds=True)
    examples = (moved[:, 0].mean(axis=0) - right[:, 0].mean(axis=0)).var(ddof=1) / 300
    error = math.sqrt(lost.var(ddof=1) / 5 + examples)
    assert test.difference.mean == pytest.approx(-lost.mean())
    assert (test.difference.high - test.difference.low) / error == pytest.approx(2 * 1.97, rel=0.2)


@pytest.mark.parametrize(
    "against, settings, expected, beside",
    [
        # Of the same encoding with the same blocks, whether coordinates are its own or were set.
        (
            {"coordinates": "index"},
            [
                {"position_encoding": "rope_mixed"},
                {"position_encoding": "rope_mixed", "coordinates": "unit", "rotary_init_scale": 9},
                {"position_encoding": "comrope_ld"},
                {"position_encoding": "comrope_ld", "coordinates": "index", "rotary_init_scale": 0.1},
                {"position_encoding": "comrope_ld", "block_size": 4, "coordinates": "index"},
                {"position_encoding": "liere", "coordinates": "unit"},
            ],
            {1: 0, 2: 3},
            ["rotary_init_scale"],
        ),
        # One without a reference, one that states nothing.
        (
            {"rotate_prefix": False},
            [
                {"position_encoding": "comrope_ap", "rotate_prefix": True},
                {"position_encoding": "comrope_ld", "rotate_prefix": True},
                {"position_encoding": "comrope_ap", "rotate_prefix": False},
                {"position_encoding": "liere", "rotate_prefix": True},
                {"position_encoding": "comrope_ap"},
            ],
            {0: 2},
            [],
        ),
        # Where nothing stated is a value.
        (
            {"max_num_patches": None},
            [
                {"position_encoding": name} | ({"max_num_patches": patches} if patches else {})
                for patches in (None, 81, 64)
                for name in ("absolute", "liere")
            ],
            {2: 0, 3: 1, 4: 0, 5: 1},
            [],
        ),
        # Encodings differ in all that belongs to them, and in nothing else.
        (
            {"position_encoding": "absolute"},
            [
                {"position_encoding": name, "coordinates": coordinates, "train_fraction": share}
                for share in (0.2, 1.0)
                for name, coordinates in (("absolute", None), ("liere", "unit"))
            ],
            {1: 0, 3: 2},
            [],
        ),
    ],
)
def test_models_stand_against_those_that_differ_in_what_is_named(against, settings, expected, beside, results):
    _, lines = results
    table = {
        str(number): {"as trained": result_table.Cell([{**lines[0], "settings": {**given, "seed": 0}}])}
        for number, given in enumerate(settings)
    }
    found = comparisons.row_pairs({"against": against, "beside": beside}, table)
    assert {int(row): int(base) for (row, _), (base, _) in found} == expected


def test_every_comparison_of_a_sweep_has_its_rows():
    for path in sorted((ROOT / "training" / "evidence" / "sweeps").glob("*.yaml")):
        versions = [sweeps.read_sweep(path, mini) for mini in (False, True)]
        for number, entry in enumerate(versions[0].get("compare", [])):
            found = []
            for sweep in versions:
                cells = [
                    {"settings": settings, "condition": condition, "script": sweep["script"]}
                    for settings in sweeps.combinations(sweep["train"])
                    for condition in sweeps.Run(sweep, settings, [], ROOT).conditions
                ]
                table, entry = result_table.arrange(cells), sweep["compare"][number]
                pairs = comparisons.find_pairs(entry, table)
                found += [one for one in pairs if all(column in table[row] for row, column in one)]
            assert found, (path.stem, entry)


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


RESULTS = ROOT / "training" / "evidence" / "results"
# Sections with few seeds that stay although their missing seeds take long, with what rests on them.
KEPT = {"cifar10: rotate_prefix": "the default of rotate_prefix"}
# Archived sections whose missing seeds take minutes on the GPU that ran them, and hours on a CPU.
BEGUN = {"arrows: arrows_sizes"}


def stored(folder):
    papers = yaml.safe_load(report.PAPER_RESULTS.read_text())
    files = sorted(folder.glob("*/*.jsonl"))
    return [sections.Section.read(path, result_lines.read_results(path), papers) for path in files]


def test_the_report_and_its_archive_follow_the_rule():
    """At most a quarter of the sections of the report has too few seeds for a test, and each of them has a reason."""
    shown, archived = stored(RESULTS), stored(RESULTS / "archive")
    few = [one for one in shown if one.few_seeds]
    assert few and archived and len(few) <= len(shown) / 4
    assert all(one.missing_hours <= 0.5 or one.name in KEPT for one in few)
    quoted = "".join((ROOT / page).read_text() for page in ("README.md", "docs/choosing.md"))
    for one in archived:
        assert one.few_seeds and (one.missing_hours > 0.5 or one.name in BEGUN) and one.name not in KEPT
        assert f"archive/report.md#{one.anchor}" not in quoted


def test_stored_results_have_names_for_readers():
    """Titles, and rows without settings. Names of coordinates are those of the configuration."""
    for one in [*stored(RESULTS), *stored(RESULTS / "archive")]:
        assert one.title != one.name
        settings = {name for result in one.results for name in result["settings"] if "_" in name}
        named = " ".join([*one.table, *(column for cells in one.table.values() for column in cells)])
        assert not [name for name in settings if name in named], one.name
    for path in (ROOT / "training" / "evidence" / "sweeps").glob("*.yaml"):
        assert all(sweeps.read_sweep(path, mini).get("title") for mini in (False, True)), path.name


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


def test_the_stored_report_is_made_from_the_stored_results(tmp_path):
    folder = RESULTS
    files = [*sorted(folder.glob("*/*.jsonl")), *sorted(folder.glob("archive/*/*.jsonl"))]
    assert files
    report.main([*map(str, files), "--output_dir", str(tmp_path), "--keep_results"])
    for page in ("report.md", "archive/report.md"):
        assert (tmp_path / page).read_text() == (folder / page).read_text()
    for file in files:
        assert (tmp_path / file.relative_to(folder)).read_bytes() == file.read_bytes()
        assert file.with_suffix(".png").is_file()
        # Folders, hosts and users are nobody's business.
        encoded = dict.fromkeys(("correct", "losses", "sizes", "right"))
        told = json.dumps([{**result, **encoded} for result in result_lines.read_results(file)])
        assert not re.search(r"[\s\"'=](/|~|\.\.)\w|localhost|root", told)


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


def test_below_five_seeds_the_stored_report_has_no_p_and_no_interval():
    """The papers' own, in their column and their paragraph, aside."""
    found = 0
    pages = [(RESULTS / page).read_text() for page in ("report.md", "archive/report.md")]
    for part in (part for page in pages for part in page.split("\n## ")[1:] if not part.startswith("How to read")):
        for row in part.splitlines():
            cells = row.strip("| ").split(" | ")
            if len(cells) > 3 and re.fullmatch("[1-4]", cells[2]):
                ours = [cell for cell in cells[3:] if "<br>" in cell or cells[2] == "1"]
                assert ours and not any(re.search(r"\d \(", cell) for cell in ours), row
                found += 1
        if "Not tested" in part:
            text = "\n".join(row for row in part.splitlines() if not row.startswith("The paper:"))
            assert "Holm" not in text and not re.search(r"\bp [=<]", text)
    assert found


def test_what_are_no_results_is_said(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"sweep": "x"}\n')
    with pytest.raises(InputError, match="a.jsonl, line 1 is not a result of evaluate_sweep.py"):
        report.main([str(tmp_path / "a.jsonl"), "--output_dir", str(tmp_path)])
    (tmp_path / "b.jsonl").write_text("")
    with pytest.raises(InputError, match="b.jsonl contains no results"):
        report.main([str(tmp_path / "b.jsonl"), "--output_dir", str(tmp_path)])
    with pytest.raises(InputError, match="There are no results"):
        report.main([str(tmp_path / "c.jsonl"), "--output_dir", str(tmp_path)])
