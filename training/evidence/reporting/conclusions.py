"""The paragraph above the tables of a sweep: what is significant, or what the table shows if nothing was tested."""

from collections import defaultdict
from itertools import combinations

import numpy as np

from training.common.chance import ABOVE_CHANCE, cannot_tell
from training.evidence.reporting.comparisons import (
    Comparison,
    Comparisons,
    columns_of,
    difference,
    margin,
    median_until,
    solved,
)
from training.evidence.reporting.result_table import AS_TRAINED, LOWER_IS_BETTER, METRICS, Cell, Table


# Rows that a sentence names before it gives their number, and tests without a result that it names.
MOST_LISTED, MOST_OPEN = 4, 2
# Characters of the sentences on significant differences in a row of the summary, of which it has one at least.
LONGEST_SUMMARY = 400
# How a setting begins that names the start of an encoding.
START = "rotary_init "
# Each row with its name in sentences.
Names = dict[str, str]


def conclude(found: Comparisons, table: Table) -> str:
    """Which differences are significant, or why there are no tests and what the table shows, in one paragraph."""
    if found.none_learned:
        return _none_learned(found)
    names = names_in_prose(table)
    parts = _significant(found, table, names)
    seeds = _numbers_of_seeds(table)
    if not found.made:
        parts.append(_not_tested(found, seeds))
        parts.append(
            _best(found, table, names) if found.solved_at is None else who_solves(table, found.solved_at, names)
        )
        parts.append(_spread(table))
    elif seeds[0] < found.fewest_seeds:
        parts.append(f"Rows of fewer than {found.fewest_seeds} seeds are not tested.")
    if found.stated and found.at_chance:
        parts.append(f"At chance: {_listed([names[row] for row in found.at_chance])}.")
    elif found.chance and not found.stated:
        parts += [f"Chance is {found.chance}.", *_guessing(found, table, names)]
    return " ".join(part for part in parts if part)


def _none_learned(found: Comparisons) -> str:
    """What stands in the place of tests and of the best row where all rows could be guessing."""
    if found.cannot_tell is not None:
        return cannot_tell(found.cannot_tell)
    # An answer without positions, which a file of a sweep states, may be the best that a model can give.
    advice = "" if found.stated else " Train longer."
    return f"No model has learned: none is above chance, {found.chance}, by {ABOVE_CHANCE} standard errors.{advice}"


def _guessing(found: Comparisons, table: Table, names: Names) -> list[str]:
    """The rows that have not learned, and those that guess under some conditions."""
    rows = [names[row] for row in found.unlearned]
    parts = (
        [f"Not above it by {ABOVE_CHANCE} standard errors, so not learned: {_listed(rows)}. Train longer."]
        if rows
        else []
    )
    for column in columns_of(table):
        some = [names[row] for row, at in found.guessing if at == column and row not in found.unlearned]
        parts += [f"Not above it with {column}: {_listed(sorted(some))}."] if some else []
    return parts


def summarise(found: Comparisons, table: Table) -> str:
    """The same in short, for a table of all sweeps: differences of means alone."""
    if found.none_learned:
        return _none_learned(found)
    if not found.made:
        return _not_tested(found, _numbers_of_seeds(table))
    names, sentences = names_in_prose(table), []
    for some in _by_question(found).values():
        if some[0].kind == "mean":
            sentences += filter(None, [_means([one for one in some if one.significant], found, table, names)])
    counted = f"{found.significant or 'None'} of {found.distinct} test{'' if found.distinct == 1 else 's'}."
    shown = [
        one for end, one in enumerate(sentences, 1) if end == 1 or len(" ".join(sentences[:end])) <= LONGEST_SUMMARY
    ]
    more = ["More below."] if len(shown) < len(sentences) else []
    return " ".join([counted, *shown, *more])


def _numbers_of_seeds(table: Table) -> list[int]:
    return sorted({len(cell.by_seed()) for cells in table.values() for cell in cells.values()})


def _not_tested(found: Comparisons, seeds: list[int]) -> str:
    if seeds[0] < found.fewest_seeds:
        counted = " or ".join(map(str, seeds)) + (" seed" if seeds == [1] else " seeds")
        return f"Not tested: {counted}, and a test needs {found.fewest_seeds}."
    only = ", or only with rows at chance" if found.at_chance else ""
    return f"Not tested: the file of the sweep names no comparison{only}."


def _by_question(found: Comparisons) -> dict[tuple, list[Comparison]]:
    """Tests against one row, or one condition, by what is asked."""
    groups: dict[tuple, list[Comparison]] = defaultdict(list)
    for one in found.made:
        groups[one.against, one.question].append(one)
    return groups


def names_in_prose(rows: Table) -> Names:
    """Each row by its encoding and, in parentheses, the fewest settings that tell it from others of the encoding."""
    names, settings = {}, {}
    for row in rows:
        names[row], *settings[row] = row.split(", ")
    told = {}
    for row, name in names.items():
        others = [set(settings[other]) for other in names if other != row and names[other] == name]
        # Where an encoding starts tells more than its coordinates.
        order = sorted(settings[row], key=lambda setting: not setting.startswith(START))
        # Beside a row that names no start, as it has its own, others name theirs.
        is_named = all(any(setting.startswith(START) for setting in other) for other in others)
        kept = () if is_named else tuple(setting for setting in order if setting.startswith(START))
        rest = order[len(kept) :]
        subsets = ((*kept, *some) for size in range(len(rest) + 1) for some in combinations(rest, size))
        telling = next((some for some in subsets if not any(set(some) <= other for other in others)), order)
        told[row] = f"{name} ({', '.join(telling)})" if telling else name
    return told


def _significant(found: Comparisons, table: Table, names: Names) -> list[str]:
    """A sentence on the significant tests of every question, and one on the others."""
    by_share = {(one.row, one.against, one.column) for one in found.made if one.kind == "share" and one.significant}
    parts = []
    for some in _by_question(found).values():
        kind = some[0].kind
        # That more or fewer seeds reach an accuracy implies that it takes less or more time.
        told = [one for one in some if kind != "examples" or (one.row, one.against, one.column) not in by_share]
        parts += [SENTENCES[kind](told, found, table, names)] if told else []
    differences = [one for one in found.made if one.kind != "equal"]
    significant = [one for one in differences if one.significant]
    open_ones = [one for one in differences if not one.significant and not one.unchanged]
    if open_ones and not significant:
        parts.append(f"No difference is significant (tests: {found.distinct}).")
        parts += [_best(found, table, names)] if found.solved_at is None else []
    elif len(open_ones) <= MOST_OPEN:
        parts += [f"Not significant: {', '.join(_pair(one, names) for one in open_ones)}."] if open_ones else []
    else:
        parts.append(f"Significant: {found.significant} of {found.distinct} tests.")
    return parts


def _pair(one: Comparison, names: Names) -> str:
    """Both sides of a test, with what tells it from other tests of them."""
    what = {"share": "share of seeds", "examples": "examples until then"}.get(one.kind, "")
    pair, column = f"{names[one.row]} with {one.column}", ""
    if one.against in names:
        pair, column = f"{names[one.row]} against {names[one.against]}", one.column
    about = ", ".join(filter(None, (what, one.named_metric, "" if column == AS_TRAINED else column)))
    return f"{pair} ({about})" if about else pair


def _means(some: list[Comparison], found: Comparisons, table: Table, names: Names) -> str:
    """Rows that are better or worse than one of them, or than they are under another condition."""
    if not some:
        return ""
    cell, column = some[0].cell(table), some[0].column
    lower = cell.metric() in LOWER_IS_BETTER
    groups: dict[str, list[Comparison]] = {"better": [], "worse": []}
    for one in sorted(some, key=lambda one: one.test.difference.mean, reverse=not lower):
        if one.significant:
            groups["better" if (one.test.difference.mean < 0) == lower else "worse"].append(one)
    unit = _unit(cell)
    said = [f"{name}: {_by_size(rows, table, names)}{unit}" for name, rows in groups.items() if rows]
    if same := [names[one.row] for one in some if one.unchanged]:
        said.append(f"same answers: {_listed(same)}")
    if some[0].against in names:
        title = f"Against {names[some[0].against]}{'' if column == AS_TRAINED else f', {column}'}"
    else:
        title = _change(some[0].against, column)
    metric = f" ({some[0].named_metric})" if some[0].metric else ""
    return f"{title}{metric}, {'; '.join(said)}." if said else ""


def _change(before: str, after: str) -> str:
    """The difference of two conditions and, in parentheses, their common part."""
    old, new = ([part for part in each.split(", ") if part != AS_TRAINED] for each in (before, after))
    added, gone = [part for part in new if part not in old], [part for part in old if part not in new]
    title = f"With {', '.join(added)}" if added else f"Without {', '.join(gone)}"
    title += f" instead of {', '.join(gone)}" if added and gone else ""
    shared = [part for part in new if part in old]
    return f"{title} ({', '.join(shared)})" if shared else title


def _by_size(some: list[Comparison], table: Table, names: Names) -> str:
    sizes = [difference(one, one.cell(table)) for one in some]
    if len(some) <= MOST_LISTED:
        return ", ".join(f"{names[one.row]} {size}" for one, size in zip(some, sizes))
    return f"{len(some)} rows, from {names[some[0].row]} {sizes[0]} to {names[some[-1].row]} {sizes[-1]}"


def _shares(some: list[Comparison], found: Comparisons, table: Table, names: Names) -> str:
    """Rows of which more or fewer seeds reach the sweep's accuracy than of one of them."""
    column, counts = some[0].column, {}
    for row in (some[0].against, *(one.row for one in some)):
        seeds = solved(table[row][column], found.solved_at)
        counts[row] = f"{sum(seeds)} of {len(seeds)}"
    base = f"{names[some[0].against]} ({counts[some[0].against]})"
    said = []
    for word, sign in (("more", 1), ("fewer", -1)):
        rows = [one.row for one in some if one.significant and sign * one.test.difference.mean > 0]
        if rows:
            by = ", ".join(f"{names[row]} {counts[row]}" for row in rows)
            said.append(f"by {word} seeds than with {base}: {by}")
    where = "" if column == AS_TRAINED else f" with {column}"
    return f"{found.solved_at:.0%} reached{where} {'; '.join(said)}." if said else ""


def _durations(some: list[Comparison], found: Comparisons, table: Table, names: Names) -> str:
    """Rows that reach the sweep's accuracy sooner or later than one of them, with the medians."""
    base, said = some[0].against, []
    for word, sign in (("sooner", -1), ("later", 1)):
        rows = [one.row for one in some if one.significant and sign * one.test.difference.mean > 0]
        if rows:
            said.append(f"{word}: {', '.join(f'{names[row]} {median_until(table[row], found)}' for row in rows)}")
    title = f"Examples until {found.solved_at:.0%}, against {names[base]} ({median_until(table[base], found)})"
    return f"{title}, {'; '.join(said)}." if said else ""


def _equal(some: list[Comparison], found: Comparisons, table: Table, names: Names) -> str:
    rows, cell = [names[one.row] for one in some if one.significant], some[0].cell(table)
    unit = _unit(cell)
    within = f"{names.get(some[0].against, some[0].against)} within {margin(some[0].margin, cell)}{unit}"
    where = "" if some[0].column == AS_TRAINED else f", {some[0].column}"
    if rows:
        return f"Equal to {within}{where}: {', '.join(rows)}."
    return f"Equality with {within}{where} is not shown for any row."


SENTENCES = {"mean": _means, "share": _shares, "examples": _durations, "equal": _equal}


def who_solves(table: Table, goal: float, names: Names) -> str:
    """The rows of which every seed reaches `goal`, some or none."""
    groups: dict[str, list[str]] = {"every seed": [], "some seeds": [], "no seed": []}
    column = columns_of(table)[0]
    for row, cells in table.items():
        if column in cells:
            seeds = solved(cells[column], goal)
            name = "every seed" if all(seeds) else "some seeds" if any(seeds) else "no seed"
            groups[name].append(names[row] + (f" {sum(seeds)} of {len(seeds)}" if name == "some seeds" else ""))
    rest = [name for name, some in groups.items() if some]
    if len(rest) > 1 and "no seed" in rest:
        groups["no seed"] = [
            "the other row" if len(groups["no seed"]) == 1 else f"the other {len(groups['no seed'])} rows"
        ]
    by = "; by ".join(f"{name}: {_listed(groups[name])}" for name in rest)
    return f"{goal:.0%} reached{'' if column == AS_TRAINED else f' with {column}'} by {by}."


def _unit(cell: Cell) -> str:
    return " points" if cell.metric() == "eval_accuracy" else ""


def _listed(names: list[str]) -> str:
    """The first of many names."""
    more = f" and {len(names) - MOST_LISTED} more" if len(names) > MOST_LISTED else ""
    return ", ".join(names[:MOST_LISTED]) + more


def _best(found: Comparisons, table: Table, names: Names) -> str:
    """
    The best rows under every condition, and the worst if there is one condition. Rows that guess have no order among
    themselves.
    """
    parts, columns, lower = [], columns_of(table), False
    for column in columns:
        cells = {row: some[column] for row, some in table.items() if column in some}
        guessing = [row for row in cells if (row, column) in found.guessing]
        if len(cells) < 2 or len(guessing) == len(cells):
            continue
        first = next(iter(cells.values()))
        lower = first.metric() in LOWER_IS_BETTER
        order = sorted(cells, key=lambda row: cells[row].mean, reverse=not lower)
        shown = {row: first.number(cell.mean) for row, cell in cells.items()}
        best, worst = (
            f"{_listed([names[row] for row in cells if shown[row] == shown[order[end]]])} ({shown[order[end]]})"
            for end in (0, -1)
        )
        where = "" if len(columns) == 1 else "as trained, " if column == AS_TRAINED else f"with {column}, "
        parts.append(
            where
            + best
            + (
                f"; {'highest' if lower else 'lowest'}: {worst}"
                if len(columns) == 1 and best != worst and len(guessing) < 2
                else ""
            )
        )
    if not parts:
        return ""
    metric = METRICS[next(iter(next(iter(table.values())).values())).metric()]
    return f"{'Lowest' if lower else 'Highest'} mean {metric}: {'; '.join(parts)}."


def _spread(table: Table) -> str:
    """How far seeds of one row differ."""
    cells = [cell for some in table.values() for cell in some.values() if len(cell.by_seed()) > 1]
    if not cells:
        return ""
    widest = max(float(np.ptp(list(cell.by_seed().values()))) for cell in cells)
    unit = _unit(cells[0])
    return f"Seeds of one row differ by up to {cells[0].number(widest)}{unit}."
