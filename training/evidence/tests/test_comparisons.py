"""Which models of a sweep are compared, and what a report says about them."""

import math

import numpy as np
import pytest
import yaml
from checkout import ROOT
from report_lines import cells_of, line, reported, seeded, two_modes
from scipy import stats

from training.common.chance import chance_of
from training.evidence.reporting import comparisons, conclusions, result_lines, result_table, sweeps
from training.evidence.reporting.significance import (
    compare,
    holm,
)


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
    assert losses.distinct == 4
    fewer = comparisons.make_comparisons({"compare": twice}, cells_of("encodings", settings, (0.5, 0.6, 0.6), 4))
    assert fewer.named == 4 and fewer.made == []


def test_outcomes_of_two_modes_are_shares_of_twenty_seeds():
    """Half of the seeds of one model solve the task, all of the other, and after half of the examples."""
    sweep = {"solved_at": 0.9, "compare": [{"against": {"position_encoding": "axial_rope"}, "within": 0.01}]}
    assert comparisons.make_comparisons(sweep, two_modes(5)).made == []
    found = comparisons.make_comparisons(sweep, two_modes(20))
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
            entry = line(encoding, seed, [True]) | {"sweep": "language", "script": "language_modeling", "correct": None}
            entry["metrics"] = {"eval_samples": 9, "eval_perplexity": math.exp(loss), "eval_loss": loss}
            entry |= {"losses": result_lines.encode_numbers(losses), "sizes": result_lines.encode_numbers(sizes)}
            lines.append(entry)
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


def test_an_area_of_one_half_is_chance():
    """Whatever the share of the classes. Its error is that of areas of scores without information."""
    share, count = 0.9, 300
    generator = np.random.default_rng(0)
    positive = np.arange(count) < share * count
    ranks = [stats.rankdata(generator.random(count))[positive].sum() for _ in range(4000)]
    areas = (np.array(ranks) - positive.sum() * (positive.sum() + 1) / 2) / (positive.sum() * (~positive).sum())
    level, error = chance_of("eval_auc", {"eval_samples": count, "eval_chance": share})
    assert level == 0.5 and error == pytest.approx(areas.std(), rel=0.05)
