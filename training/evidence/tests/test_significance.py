"""Intervals and tests against other computations."""

import math

import numpy as np
import pytest
from report_lines import line
from scipy import stats

from training.evidence.reporting import result_table
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
