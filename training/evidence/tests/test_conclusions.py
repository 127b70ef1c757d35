"""What a report concludes from the tests of a sweep: tables of accuracies, and words."""

import numpy as np
import pytest
from report_lines import cells_of, named, reported, seeded, two_modes

from training.evidence.reporting import comparisons, conclusions
from training.evidence.reporting.result_lines import encode_examples


ABSOLUTE = {"compare": [{"against": {"position_encoding": "absolute"}}]}
AXIAL = {"solved_at": 0.9, "compare": [{"against": {"position_encoding": "axial_rope"}}]}
MIXED = {"compare": [{"against": {"position_encoding": "rope_mixed"}}]}
PAIR, FIVE = ("absolute", "liere"), ("absolute", "liere", "rope_mixed", "comrope_ap", "comrope_ld")
CHANCE = "33.3% (the most frequent class of the evaluation)"
GUESSING = "No model has learned: none is above chance,"


def within(*margins):
    return {"compare": [{"against": {"position_encoding": "absolute"}, "within": margin} for margin in margins]}


def answers(shares, names=PAIR, seeds=5):
    return cells_of("encodings", named(*names), shares, seeds)


def all_results(table):
    return [result for cells in table.values() for cell in cells.values() for result in cell.results]


def with_chance(shares, seeds=5, chance=1 / 3, **further):
    """Rows whose evaluations record the share of their most frequent class."""
    table = cells_of("mine", named("rope_mixed", "liere"), shares, seeds, seed=1)
    for result in all_results(table):
        result["metrics"] |= {"eval_chance": chance, **further}
    return table


def beside(table, other, column):
    """The cells of a table, and those of another one under a condition."""
    return {row: {**cells, column: other[row]["as trained"]} for row, cells in table.items()}


def with_losses():
    table = answers((0.5, 0.6, 0.6), ("absolute", "rope_mixed", "liere"))
    for result in all_results(table):
        result["metrics"]["eval_loss"] = 1 - result["metrics"]["eval_accuracy"]
    return table


def equally_solved():
    """All answers of all models are right in the end; one model is sooner there."""
    slow, fast = [[0.5, 0.4], [1.0, 0.95]], [[0.5, 0.95], [1.0, 0.96]]
    histories = {"axial_rope": slow, "rope_mixed": fast, "liere": slow}
    return {
        row: cells
        for name, history in histories.items()
        for row, cells in cells_of("arrows", named(name), (1.0,), 20, history=history).items()
    }


TWO = {**AXIAL, "compare": [{**AXIAL["compare"][0], "within": 0.01}]}
SMALLER = beside(answers((0.5, 0.9)), answers((0.5, 0.5)), "16 px")
SHUFFLED = beside(with_chance((0.6, 0.8)), with_chance((1 / 3, 1 / 3)), "patches shuffled")
UNKNOWN = cells_of("mine", named("rope_mixed", "liere"), (1 / 3, 1 / 3), 5)
LOSS = {"compare": [{"against": {"position_encoding": "absolute"}, "metric": "loss"}]}
THIRDS = (1 / 3, 1 / 3)
NOT_SHOWN = "is not shown for any row."
# What the sweep names, the table, and parts of the conclusion; those after `NEVER` it does not have.
NEVER = "never"
SAID = [
    (
        TWO,
        two_modes(20),
        "Against Axial RoPE, better: LieRE8 +16.7 points. 90% reached by more seeds than with Axial RoPE ",
    ),
    (TWO, two_modes(20), "(10 of 20): LieRE8 20 of 20. Equality with Axial ", NEVER, "Examples until"),
    (
        AXIAL,
        two_modes(5),
        "Not tested: 5 seeds, and a test needs 20. 90% reached by every seed: LieRE8; by some seeds: ",
    ),
    (AXIAL, two_modes(5), "some seeds: Axial RoPE 2 of 5."),
    ({"solved_at": 0.9}, two_modes(20), "Not tested: the file of the sweep names no comparison. 90% reached by every"),
    (
        AXIAL,
        equally_solved(),
        "Against Axial RoPE, same answers: RoPE-Mixed, LieRE8. Examples until 90%, against Axial ",
    ),
    (AXIAL, equally_solved(), "RoPE (1,000), sooner: RoPE-Mixed 500. Significant: 1 of 4 tests."),
    (LOSS, with_losses(), "Against Absolute (loss), better: RoPE-Mixed −0."),
    (within(0.001, 0.1), answers((0.6, 0.6)), f"Equality with Absolute within ±0.1 points {NOT_SHOWN}"),
    (within(0.001, 0.1), answers((0.6, 0.6)), "Equal to Absolute within ±10.0 points: LieRE8."),
    (ABSOLUTE, answers((0.5, 0.9, 0.5, 0.5, 0.5), FIVE), " points. Significant: 1 of 4 tests."),
    (ABSOLUTE, answers((0.5,) * 5, FIVE), "No difference is significant (tests: 4). Highest mean accuracy: "),
    (ABSOLUTE, answers((0.5, 0.9, 0.9, 0.9, 0.5), FIVE), " points. Not significant: ComRoPE-LD against Absolute."),
    (
        within(0.001),
        SMALLER,
        "Against Absolute, better: LieRE8 +",
        " Not significant: LieRE8 against Absolute (16 px).",
    ),
    (within(0.001), SMALLER, *(f"Equality with Absolute within ±0.1 points{w} {NOT_SHOWN}" for w in ("", ", 16 px"))),
    (ABSOLUTE, answers((1.0, 1.0)), "Against Absolute, same answers: LieRE8."),
    (MIXED, with_chance(THIRDS), f"{GUESSING} {CHANCE}, by 3 standard errors. Train longer.", NEVER, "ighest"),
    (MIXED, with_chance(THIRDS, 1), f"{GUESSING} {CHANCE}, by 3 standard errors. Train longer."),
    (MIXED | {"chance": 0.5}, with_chance(THIRDS), f"{GUESSING} 50.0%, by 3 standard errors."),
    (
        MIXED,
        with_chance((1 / 3, 0.8)),
        "Against RoPE-Mixed, better: LieRE8 +",
        f" Chance is {CHANCE}. Not above it by 3",
    ),
    (MIXED, with_chance((1 / 3, 0.8)), " standard errors, so not learned: RoPE-Mixed. Train longer."),
    (MIXED, with_chance((0.6, 0.6)), "Highest mean", f" Chance is {CHANCE}."),
    (MIXED, with_chance((0.9, 0.9), chance=0.9, eval_auc=0.55), f"{GUESSING} 0.500 (any constant answer),"),
    (MIXED, SHUFFLED, "Not above it with patches shuffled: LieRE8, RoPE-Mixed.", NEVER, "Train longer"),
    (MIXED, with_chance((1.0, 1.0), 1, chance=1.0), "All examples of the evaluation are of one class"),
    (MIXED, with_chance((1.0, 1.0), 1, chance=0.5, eval_samples=8), "The evaluation has 8 examples, too few"),
    (MIXED, UNKNOWN, "No difference is significant (tests: 1). Highest mean accuracy: ", NEVER, "hance"),
]


@pytest.mark.parametrize("sweep, table, parts", [(sweep, table, parts) for sweep, table, *parts in SAID])
def test_conclusions_say_what_the_tests_show(sweep, table, parts):
    said = conclusions.conclude(comparisons.make_comparisons(sweep, table), table)
    place = parts.index(NEVER) if NEVER in parts else len(parts)
    assert all(part in said for part in parts[:place]) and not any(part in said for part in parts[place + 1 :]), said


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


def test_sentences_name_rows_by_what_tells_them_apart():
    learned = "rotary_learning_rate_factor"
    names = {
        "Absolute, image_size 48": "Absolute",
        f"LieRE8, coordinates index, rotary_init axial, {learned} 1": f"LieRE8 ({learned} 1)",
        f"LieRE8, coordinates index, rotary_init axial, {learned} 4": f"LieRE8 (rotary_init axial, {learned} 4)",
        f"LieRE8, coordinates train_grid, rotary_init uniform, {learned} 4": "LieRE8 (rotary_init uniform)",
        "RoPE-Mixed": "RoPE-Mixed",
        "RoPE-Mixed, share_heads": "RoPE-Mixed (share_heads)",
        "LieRE3": "LieRE3",
        "LieRE3, rotary_init so3": "LieRE3 (rotary_init so3)",
        f"LieRE3, rotary_init so3, rotate_values, {learned} 0": "LieRE3 (rotary_init so3, rotate_values)",
    }
    assert list(conclusions.names_in_prose(dict.fromkeys(names, {})).items()) == list(names.items())


def test_tables_of_tests_and_of_seeds():
    table, margins = answers((0.6, 0.6)), within(0.001, 0.1)
    _, text = comparisons.tests_table(comparisons.make_comparisons(margins, table), table)
    heading = [cell.strip() for cell in text.splitlines()[0].strip("|").split("|")]
    assert heading == ["", "against", "as trained", *(f"as trained: equivalence within ±{p}" for p in ("0.1", "10.0"))]
    table = answers((1.0, 1.0))
    assert "| unchanged |" in comparisons.tests_table(comparisons.make_comparisons(ABSOLUTE, table), table)[1]
    table = two_modes(20)
    said, text = comparisons.solved_table(table, 0.9)
    assert said.startswith(
        "Seeds that reach 90%, and the median of the training examples until then. As trained, both "
    )
    for row in ("| LieRE8 | 20 of 20 (83% – 100%) | 500 |", "| Axial RoPE | 10 of 20 (27% – 73%) | not reached |"):
        assert row in text
    _, text = comparisons.tests_table(comparisons.make_comparisons(AXIAL, table), table)
    assert "| +50% of the seeds, p = 0.0" in text and "| 500 against not reached, p " in text


def test_a_section_in_which_no_model_learned_ranks_nothing(tmp_path):
    history = [[1.0, 0.3], [2.0, 0.35]]
    lines = seeded("data_fraction", named("rope_mixed", "liere"), (1 / 3, 1 / 3), 2, history=history)
    for entry in lines:
        entry["metrics"] |= {"eval_chance": 1 / 3}
    section = reported(tmp_path, "data_fraction", lines).split("\n## ")[-1].lower()
    assert "no model has learned" in section and "best epoch, mean over seeds. from the best" in section
    assert "highest mean" not in section and "highest for" not in section and "lowest" not in section


@pytest.mark.parametrize("seeds, chance, unlearned", [(5, {}, 2), (5, {"chance": 0.5}, 2), (5, {"chance": 1 / 6}, 0)])
def test_models_that_guess_are_not_tested(seeds, chance, unlearned):
    """What the file of a sweep states wins: half of the answers, or a sixth."""
    table = with_chance((1 / 3, 1 / 3), seeds)
    found = comparisons.make_comparisons(MIXED | chance, table)
    assert len(found.unlearned) == unlearned and bool(found.made) == (unlearned == 0)
    assert unlearned == 0 or conclusions.conclude(found, table) == conclusions.summarise(found, table)


def test_conditions_under_which_models_guess_are_not_tested():
    found = comparisons.make_comparisons(MIXED, SHUFFLED)
    assert [one.column for one in found.made] == ["as trained"] and found.unlearned == []
    found = comparisons.make_comparisons(MIXED, with_chance((1 / 3, 0.8)))
    assert found.significant == 1 and found.unlearned == ["RoPE-Mixed"]
    learned = with_chance((0.9, 0.9), chance=0.9, eval_auc=0.8)
    assert comparisons.make_comparisons(MIXED, learned).unlearned == []


def test_many_seeds_slightly_above_chance_have_learned():
    """No seed alone exceeds chance by three standard errors of 300 examples, but their mean does."""
    guess, slight = (cells["as trained"] for cells in with_chance((1 / 3, 0.39), 20).values())
    for seed, result in enumerate(slight.results):
        result["correct"] = encode_examples(np.random.default_rng(seed).permutation(300) < 117)
    assert max(slight.by_seed().values()) < 1 / 3 + 3 * np.sqrt(2 / 9 / 300)
    assert comparisons.is_at_chance(guess, None) and not comparisons.is_at_chance(slight, None)
