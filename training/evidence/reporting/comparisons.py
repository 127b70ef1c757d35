"""The comparisons that a sweep names before it runs, tested where seeds are enough, and the tables of their results."""

import json
import math
from collections import defaultdict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from hf_liere.encoding.kinds import ENCODINGS
from hf_liere.encoding.rotary_fields import RotaryFields
from training.common.chance import ABOVE_CHANCE, MOST_FREQUENT, chance_of
from training.evidence.reporting.markdown import markdown, minus
from training.evidence.reporting.result_table import SEEDS, Cell, Table, condition
from training.evidence.reporting.significance import (
    FEWEST_SEEDS,
    FEWEST_SEEDS_OF_SHARES,
    LEVEL,
    Duration,
    Test,
    compare,
    compare_durations,
    compare_shares,
    exceeds,
    holm,
    share,
)
from training.evidence.reporting.sweeps import is_one_of


# A row and a condition.
Place = tuple[str, str]
# Settings that belong to an encoding: two encodings may differ in them.
OF_ENCODING = (
    *RotaryFields.__annotations__,
    *("coordinates", "position_table_size", "rotate_prefix", "rotate_values", "rotary_learning_rate_factor"),
)
# The folder of the weights may contain the seed.
NEVER_COMPARED = ("model_name_or_path",)


@dataclass(frozen=True)
class Comparison:
    """
    A test of a row against another one.

    Attributes:
        kind: "mean", "equal" (within a margin), "share" (of the seeds that reach the sweep's accuracy) or "examples"
            (until then).
        metric: compared instead of the table's, if any.
        margin: of a test of equality.
        p_value: corrected for the number of distinct tests of the sweep.
    """

    kind: str
    row: str
    against: str
    column: str
    metric: str | None
    margin: float | None
    test: Test
    p_value: float

    @property
    def question(self) -> tuple[str, str, str | None, float | None]:
        """The question to rows: equal questions share a column and, against one row, a sentence."""
        return self.column, self.kind, self.metric, self.margin

    @property
    def named_metric(self) -> str:
        """The metric in words, empty for the table's."""
        return (self.metric or "").removeprefix("eval_")

    def cell(self, table: Table) -> Cell:
        """One with results in the unit of the comparison."""
        return replace(next(iter(table[self.row].values())), of=self.metric)

    @property
    def significant(self) -> bool:
        return self.p_value < LEVEL

    @property
    def unchanged(self) -> bool:
        """Whether both sides gave the same answers."""
        return self.kind == "mean" and self.test.difference.low == self.test.difference.high == 0


@dataclass
class Comparisons:
    """
    Attributes:
        named: the number of pairs of rows under a condition that the sweep names.
        distinct: the number of different tests among those that were made.
        significant: the number of these below 5% after the correction.
        at_chance: rows at chance under the first condition. Baselines at a `chance` of the sweep's file are left out,
            and otherwise tests of two rows at chance.
        guessing: all places at chance.
        chance: in words, empty where it is not known.
        stated: whether it is that of the sweep's file.
        unlearned: rows at chance under every condition.
        none_learned: whether these are all rows.
        line: the mean of chance, and its name in a picture.
        cannot_tell: the metrics of an evaluation on which even the right answers would not exceed chance.
        solved_at: the accuracy that runs are counted by, beside the comparison of means, if the sweep names one.
    """

    made: list[Comparison] = field(default_factory=list)
    named: int = 0
    distinct: int = 0
    significant: int = 0
    at_chance: list[str] = field(default_factory=list)
    guessing: set[Place] = field(default_factory=set)
    chance: str = ""
    stated: bool = False
    unlearned: list[str] = field(default_factory=list)
    none_learned: bool = False
    line: tuple[float, str] | None = None
    cannot_tell: dict[str, Any] | None = None
    solved_at: float | None = None

    @property
    def fewest_seeds(self) -> int:
        return FEWEST_SEEDS if self.solved_at is None else FEWEST_SEEDS_OF_SHARES


def levels_of(cell: Cell, stated: float | None) -> dict[int | None, tuple[float, float]]:
    """Chance and its standard error by seed, which may choose the examples; empty unless it is known for all seeds."""
    levels = {}
    for result in cell.results:
        levels.setdefault(result["settings"].get("seed"), chance_of(cell.metric(), result["metrics"], stated))
    return {} if None in levels.values() else levels


def is_at_chance(cell: Cell, stated: float | None) -> bool:
    """Whether every seed's result could be chance, and so could their mean."""
    levels, values = levels_of(cell, stated), cell.by_seed()
    if not levels or any(values[seed] > level + ABOVE_CHANCE * error for seed, (level, error) in levels.items()):
        return False
    if cell.interval is None or cell.outcomes.error_of_examples() == 0:
        return True
    return not exceeds(cell.outcomes, float(np.mean([level for level, _ in levels.values()])))


def _find_chance(found: Comparisons, sweep: dict[str, Any], table: Table) -> None:
    """Writes into `found` which rows are at chance, and what chance is."""
    stated, first = sweep.get("chance"), columns_of(table)[0]
    cells = {(row, column): cell for row, some in table.items() for column, cell in some.items()}
    found.stated = stated is not None
    found.guessing = {place for place, cell in cells.items() if is_at_chance(cell, stated)}
    found.at_chance = [row for row in table if (row, first) in found.guessing]
    found.unlearned = [row for row, some in table.items() if all((row, column) in found.guessing for column in some)]
    found.none_learned = len(found.unlearned) == len(table)
    levels = [level for cell in cells.values() for level in levels_of(cell, stated).values()]
    if levels:
        some, values = next(iter(cells.values())), [level for level, _ in levels]
        shown = list(dict.fromkeys(some.number(bound(values)) for bound in (min, max)))
        about = "" if found.stated else f" ({'any constant answer' if some.metric() == 'eval_auc' else MOST_FREQUENT})"
        unit = "%" if some.metric() == "eval_accuracy" else ""
        found.chance = f"{' – '.join(shown)}{unit}{about}"
        found.line = float(np.mean(values)), "without positions" if found.stated else "chance"
    if found.none_learned and all(level + ABOVE_CHANCE * error >= 1 for level, error in levels):
        found.cannot_tell = next(iter(cells.values())).results[0]["metrics"]


def make_comparisons(sweep: dict[str, Any], table: Table) -> Comparisons:
    """The tests of the pairs that `compare` of the sweep names, corrected together."""
    found = Comparisons(solved_at=sweep.get("solved_at"))
    _find_chance(found, sweep, table)
    tests: dict[tuple, tuple[Any, Test]] = {}
    for entry in sweep.get("compare", []):
        same_models = "against" not in entry
        metric = f"eval_{entry['metric']}" if "metric" in entry else None
        for (row, column), (base_row, base_column) in find_pairs(entry, table):
            base, other = table[base_row].get(base_column), table[row].get(column)
            if base is None or other is None:
                continue
            guessing = [place in found.guessing for place in ((base_row, base_column), (row, column))]
            if all(guessing) or (found.stated and guessing[0]):
                continue
            if same_models and np.array_equal(base.outcomes.values, other.outcomes.values):
                # One evaluation under two names.
                continue
            found.named += 1
            base, other = (replace(cell, of=metric) for cell in (base, other))
            against = base_column if same_models else base_row
            paired_seeds = same_models or sweep.get("paired", False)
            for kind, margin, test in _tests(base, other, found, entry.get("within"), paired_seeds):
                compared = frozenset(_compared(cell, kind, found.solved_at) for cell in (base, other))
                tests[kind, row, against, column, metric, margin] = (kind, metric, margin, compared), test
    # What several pairs share, such as a condition under two names, counts once.
    p_values = {identity: test.p_value for identity, test in tests.values()}
    corrected = dict(zip(p_values, holm(list(p_values.values()))))
    found.distinct, found.significant = len(p_values), sum(p_value < LEVEL for p_value in corrected.values())
    found.made = [Comparison(*where, test, corrected[identity]) for where, (identity, test) in tests.items()]
    return found


def columns_of(table: Table) -> list[str]:
    return list(dict.fromkeys(column for cells in table.values() for column in cells))


def find_pairs(entry: dict[str, Any], table: Table) -> Iterable[tuple[Place, Place]]:
    """The places that an entry of `compare` names, each beside the one that it is compared with."""
    return row_pairs(entry, table) if "against" in entry else condition_pairs(entry, table)


def row_pairs(entry: dict[str, Any], table: Table) -> Iterable[tuple[Place, Place]]:
    """
    Every row beside the row that has the settings `against` and otherwise the same, but for those `beside` them and, if
    encodings are compared, all that belong to an encoding; under every condition, or those of `under`. The other row is
    under the same condition, or under the one that differs only in having `against_condition`.
    """
    given = {row: next(iter(cells.values())).results[0]["settings"] for row, cells in table.items()}
    ignored = {*SEEDS, *NEVER_COMPARED, *entry.get("beside", ())}
    if "position_encoding" in entry["against"]:
        ignored |= {*OF_ENCODING}
    under = [condition(one) for one in entry["under"]] if "under" in entry else columns_of(table)
    of_base = _base_conditions(entry, table) if "against_condition" in entry else dict(zip(under, under))
    pairs = pair({row: _with_coordinates(settings) for row, settings in given.items()}, entry["against"], ignored)
    for row, base in pairs.items():
        if is_one_of(given[row], entry):
            yield from (((row, column), (base, of_base[column])) for column in under if column in of_base)


def condition_pairs(entry: dict[str, Any], table: Table) -> Iterable[tuple[Place, Place]]:
    """The same models under every condition beside the one that differs only in having `against_condition`."""
    pairs = _base_conditions(entry, table)
    for row, cells in table.items():
        if is_one_of(next(iter(cells.values())).results[0]["settings"], entry):
            yield from (((row, column), (row, base)) for column, base in pairs.items())


def _base_conditions(entry: dict[str, Any], table: Table) -> dict[str, str]:
    """For conditions the one that differs only in having `against_condition`."""
    given = {column: cell.results[0]["condition"] for cells in table.values() for column, cell in cells.items()}
    against = entry["against_condition"]
    return pair(
        {column: dict.fromkeys(against) | conditions for column, conditions in given.items()}, against, {*SEEDS}
    )


def pair(given: dict[str, dict[str, Any]], against: dict[str, Any], ignored: set[str]) -> dict[str, str]:
    """
    For each name the first one that has the values `against` and is otherwise equal. Names that do not state these
    settings are skipped, unless the value is `None`.
    """
    references: dict[str, str] = {}
    others: dict[str, str] = {}
    for name, values in given.items():
        if any(key not in values and value is not None for key, value in against.items()):
            continue
        rest = {key: value for key, value in values.items() if key not in (*against, *ignored) and value is not None}
        described = json.dumps(rest, sort_keys=True)
        if described not in references and all(values.get(key) == value for key, value in against.items()):
            references[described] = name
        else:
            others[name] = described
    return {name: references[rest] for name, rest in others.items() if rest in references}


def _with_coordinates(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings with the coordinates that an encoding has unless they are stated."""
    encoding = settings.get("position_encoding")
    traits = ENCODINGS.get(encoding) if isinstance(encoding, str) else None
    stated = settings if settings.get("coordinates") else {**settings, "coordinates": traits and traits.coordinates}
    return {key: value for key, value in stated.items() if key != "coordinates" or value is not None}


def _tests(
    base: Cell, other: Cell, found: Comparisons, margin: float | None, paired_seeds: bool
) -> Iterable[tuple[str, float | None, Test]]:
    """The tests of a pair with their kinds and margins; none with too few seeds, or with others if these are paired."""
    seeds = [list(cell.by_seed()) for cell in (base, other)]
    if min(map(len, seeds)) < found.fewest_seeds or (paired_seeds and seeds[0] != seeds[1]):
        return
    yield "mean", None, compare(base.outcomes, other.outcomes, None, paired_seeds)
    if found.solved_at is not None:
        yield "share", None, compare_shares(*(solved(cell, found.solved_at) for cell in (base, other)))
        durations = [examples_until(cell, found.solved_at) for cell in (base, other)]
        if all(durations) and not base.results[0]["condition"]:
            yield "examples", None, compare_durations(*durations)
    if margin is not None:
        yield "equal", margin, compare(base.outcomes, other.outcomes, margin, paired_seeds)


def _compared(cell: Cell, kind: str, goal: float | None) -> Hashable:
    """The values that a test of this kind compares: equal for cells with the same results."""
    if kind == "examples" and goal is not None:
        return tuple(examples_until(cell, goal))
    return cell.outcomes.values.tobytes()


def solved(cell: Cell, goal: float) -> list[bool]:
    """Whether each seed reaches `goal`."""
    return [value >= goal for value in cell.by_seed().values()]


def examples_until(cell: Cell, goal: float) -> list[Duration]:
    """
    The training examples of each seed until its first evaluation at `goal` or above, or all of them and `False`; empty
    without evaluations during training.
    """
    durations = []
    for result in cell.results:
        if not result["history"]:
            return []
        reached = next((epoch for epoch, accuracy in result["history"] if accuracy >= goal), None)
        epochs = result["history"][-1][0] if reached is None else reached
        durations.append((round(epochs * train_examples(result)), reached is not None))
    return durations


def num_epochs(result: dict[str, Any]) -> float:
    return result["run"].get("training", {}).get("num_train_epochs", 0)


def train_examples(result: dict[str, Any]) -> float:
    """The number of training examples in an epoch."""
    trained, epochs = result["train_metrics"], num_epochs(result)
    # The recorded time of a resumed run covers only its last part.
    counted = trained.get("train_samples_per_second", 0) * trained.get("train_runtime", 0) / (epochs or 1)
    return (result["run"].get("examples", {}).get("train") or {}).get("samples", counted)


def solved_table(table: Table, goal: float) -> tuple[str, str]:
    """Shares of the seeds that reach `goal`, and the median of the examples until then, with a caption."""
    columns = columns_of(table)
    rows = [
        [
            row,
            *(_share(solved(cells[column], goal)) if column in cells else "not measured" for column in columns),
            _median(examples_until(next(iter(cells.values())), goal)),
        ]
        for row, cells in table.items()
    ]
    said = (
        f"Seeds that reach {goal:.0%}, and the median of the training examples until then. As trained, both say how "
        "fast models learn, not what they would reach with more examples."
    )
    return said, markdown(["", *columns, f"examples until {goal:.0%}"], rows, "---:")


def _share(seeds: list[bool]) -> str:
    text = f"{sum(seeds)} of {len(seeds)}"
    if len(seeds) < FEWEST_SEEDS:
        return text
    interval = share(sum(seeds), len(seeds))
    return f"{text} ({interval.low:.0%} – {interval.high:.0%})"


def _median(durations: list[Duration]) -> str:
    """The median, which is known if more than half of the seeds reach the goal."""
    if not durations:
        return "not recorded"
    median = float(np.median([time if reached else math.inf for time, reached in durations]))
    return f"{median:,.0f}" if math.isfinite(median) else "not reached"


def tests_table(found: Comparisons, table: Table) -> tuple[str, str] | None:
    """All tests, with how many of them are significant; `None` without a test."""
    if not found.made:
        return None
    lines: dict[tuple[str, str], dict[tuple, Comparison]] = defaultdict(dict)
    for comparison in found.made:
        lines[comparison.row, comparison.against][comparison.question] = comparison
    asked = {one.question: one for one in found.made}
    header = ["", "against", *(_heading(one, found, table) for one in asked.values())]
    rows = []
    for (row, against), some in lines.items():
        rows.append([row, against, *(_shown(some.get(question), found, table) for question in asked)])
    tests = f"distinct test{'' if found.distinct == 1 else 's'} {'is' if found.significant == 1 else 'are'}"
    said = f"{found.significant} of {found.distinct} {tests} significant at 5% after Holm's correction."
    return said, markdown(header, rows, "---:")


def _heading(one: Comparison, found: Comparisons, table: Table) -> str:
    goal = f"{found.solved_at or 0:.0%}"
    titles = {"mean": "", "share": f": seeds at {goal}", "examples": f": examples until {goal}"}
    title = titles[one.kind] if one.margin is None else f": equivalence within {margin(one.margin, one.cell(table))}"
    return f"{one.column}{title}{f': {one.named_metric}' if one.metric else ''}"


def _shown(comparison: Comparison | None, found: Comparisons, table: Table) -> str:
    if comparison is None:
        return "–"
    if comparison.unchanged:
        return "unchanged"
    interval, cell = comparison.test.difference, comparison.cell(table)
    if comparison.kind == "examples":
        text = " against ".join(median_until(table[row], found) for row in (comparison.row, comparison.against))
    else:
        text = difference(comparison, cell)
    if comparison.kind in ("mean", "equal"):
        text += f" ({_signed(interval.low, cell)} – {_signed(interval.high, cell)})"
    return f"{text}, p {_p_value(comparison.test.p_value)}, Holm {_p_value(comparison.p_value)}"


def median_until(cells: dict[str, Cell], found: Comparisons) -> str:
    """The median of the examples until a row reaches the sweep's accuracy."""
    return _median(examples_until(next(iter(cells.values())), found.solved_at))


def difference(comparison: Comparison, cell: Cell) -> str:
    """The difference with its sign, in the unit of the metric or as a share of the seeds."""
    value = comparison.test.difference.mean
    return minus(f"{100 * value:+.0f}% of the seeds") if comparison.kind == "share" else _signed(value, cell)


def _signed(value: float, cell: Cell) -> str:
    if cell.metric() == "eval_accuracy":
        return minus(f"{100 * value:+.1f}")
    if cell.metric() == "eval_perplexity":
        return minus(f"{100 * math.expm1(value):+.1f}%")
    return minus(f"{value:+.3f}")


def margin(value: float, cell: Cell) -> str:
    return _signed(value, cell).replace("+", "±")


def _p_value(value: float) -> str:
    return f"= {value:.2g}" if value >= 1e-4 else "< 0.0001"
