"""Counts the tables of results again, from the stored json lines, by other code than the report's.

    python training/evidence/recount.py

Reads results/**/*.jsonl, computes every cell of results/report.md and of the archive's report, and looks up the figures
in the tables of README.md and docs/ under the sections that they link. Rows and columns are assigned by the order of
the lines. Prints how many figures agree, those that differ, with their line, and those of no stored line, such as a
paper's, and compares the cards of checkpoints with the records beside them. Exits with 1 if a figure differs.

Means, differences and p-values have to agree as printed. A bound of an interval is an order statistic of 5,000 random
resamples: its place in the distribution follows a beta law, and the bound has to lie between the quantiles of other
resamples at places that this law exceeds once in 100,000 times.
"""

import argparse
import json
import math
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path


sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
from scipy import stats

from training.evidence.recounting.cells import FEWEST_SEEDS, Cell, fisher, lines_of, log_rank, t_test, told


HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PAGES = ("README.md", "docs/results.md", "docs/choosing.md", "docs/real_weights.md")
PRECISIONS = {"AP": "", "AP50": "_50", "AP75": "_75", "APs": "_small", "APm": "_medium", "APl": "_large"}
# The name of what tests compare, beside those of rows.
DIFFERENCE = "difference"
NUMBER = re.compile(r"[+−-]?\d[\d,]*(?:\.\d+)?")


@dataclass
class Counts:
    """Figures that agree, sentences on those that differ, and on those that no line answers."""

    page: str = ""
    agree: int = 0
    wrong: list[str] = field(default_factory=list)
    unassigned: list[str] = field(default_factory=list)

    def expect(self, good: bool, line: int, printed: str, found: object) -> None:
        if good:
            self.agree += 1
        else:
            self.wrong.append(f"{self.page}:{line}: printed {printed}, counted {found}")


def value_of(text: str) -> float:
    return float(text.replace("−", "-").replace(",", ""))


def agrees(text: str, low: float, high: float | None = None) -> bool:
    """Whether a printed number is a value, or between two, as it is rounded."""
    half = 0.5 * 10.0 ** -len(text.partition(".")[2]) * (1 + 1e-6)
    return low - half <= value_of(text) <= (low if high is None else high) + half


def p_agrees(text: str, p: float) -> bool:
    if text.startswith("<"):
        return p < 1e-4
    printed = float(text.removeprefix("= "))
    return abs(printed - p) <= 0.50001 * 10 ** (math.floor(math.log10(printed)) - 1) if printed else p == 0


class Section:
    """The lines of a sweep as cells, and its tables in a page."""

    def __init__(self, path: Path, sweeps: Path):
        file = sweeps / f"{path.stem}.yaml"
        text = file.read_text(encoding="utf-8") if file.is_file() else ""
        groups = re.search(r"^groups: \[([\d, ]+)\]", text, re.MULTILINE)
        self.groups = list(map(int, groups[1].split(","))) if groups else []
        self.paired = bool(re.search(r"^paired: true", text, re.MULTILINE))
        self.rows: dict[str, dict[str, list[dict]]] = {}
        for line in lines_of(path):
            self.rows.setdefault(told(line["settings"]), {}).setdefault(told(line["condition"]), []).append(line)
        self.columns = list(dict.fromkeys(column for cells in self.rows.values() for column in cells))
        self.made: dict[tuple, Cell] = {}
        self.row_of: dict[str, str] = {}
        self.column_of: dict[str, str] = {}
        # For pages that quote: figures by rows, or "difference", and where the bounds of their intervals lie, if any.
        self.known: dict[str, list[tuple[float, list[tuple[float, float]] | None]]] = {}

    def cell(self, row: str, column: str, metric: str | None = None) -> Cell | None:
        lines = self.rows[row].get(column)
        if lines and (row, column, metric) not in self.made:
            self.made[row, column, metric] = Cell(lines, self.groups, metric)
        return self.made[row, column, metric] if lines else None

    def read_tables(self, tables: list[tuple[int, list[list[str]]]], counts: Counts) -> None:
        for line, (header, _, *rows) in tables:
            if "parameters" in header:
                columns = [name for name in header[3:] if name != "paper"]
                if (len(rows), len(columns)) != (len(self.rows), len(self.columns)):
                    counts.wrong.append(
                        f"{counts.page}:{line}: {len(rows)} × {len(columns)} cells, counted "
                        f"{len(self.rows)} × {len(self.columns)}"
                    )
                    return
                self.row_of = dict(zip([row[0] for row in rows], self.rows))
                self.column_of = dict(zip(columns, self.columns))
            if header[1] == "against":
                self.check_tests(line, header, rows, counts)
                continue
            for number, row in enumerate(rows, line + 2):
                for name, text in zip(header[1:], row[1:]):
                    self.check(number, header, name, row[0], text, counts)

    def check(self, line: int, header: list[str], name: str, row: str, text: str, counts: Counts) -> None:
        """One cell of a table of results."""
        self.quotable = self.known.setdefault(row, [])
        key, first = self.row_of[row], self.columns[0]
        cell = self.cell(key, self.column_of.get(name, first))
        goal = re.search(r"examples until (\d+)%", header[-1])
        if name == "paper" or text in ("–", "not measured", ""):
            counts.unassigned += [f"{counts.page}:{line}: {name} {text}"] if name == "paper" and text != "–" else []
        elif name == "parameters":
            found = cell.lines[0]["train_metrics"].get("parameters")
            counts.expect(bool(found) and agrees(text, found), line, text, found)
        elif name == "seeds":
            counts.expect(int(text) == len(cell.seeds), line, text, len(cell.seeds))
        elif goal and name == header[-1]:
            self.check_median(line, text, cell.durations(int(goal[1]) / 100), counts)
        elif goal:
            self.check_share(line, text, [seed >= int(goal[1]) / 100 * cell.scale for seed in cell.by_seed], counts)
        elif name in self.column_of and ("parameters" in header or not name.endswith(" shuffled")):
            self.check_result(line, text, cell, counts)
        else:
            self.check_further(line, name, row, text, counts)

    def check_further(self, line: int, name: str, row: str, text: str, counts: Counts) -> None:
        """One cell of a table that the sweep's file asks for."""
        key, first = self.row_of[row], self.columns[0]
        cell = self.cell(key, self.column_of.get(name, first))
        if name in ("highest of all epochs", "last epoch"):
            runs = [[accuracy for _, accuracy in one["history"]] for one in cell.lines]
            values = [100 * (max(run) if name[0] == "h" else run[-1]) for run in runs]
            self.check_numbers(line, text, [np.mean(values), *(values if len(values) < 10 else ())], counts)
        elif name in PRECISIONS:
            values = [100 * one["metrics"][f"eval_map{PRECISIONS[name]}"] for one in cell.lines]
            self.check_numbers(line, text, [np.mean(values), *(values if len(values) > 1 else ())], counts)
        elif name in ("loss", "balanced accuracy"):
            self.check_result(line, text, self.cell(key, first, f"eval_{name.replace(' ', '_')}"), counts)
        elif name in ("epochs", "fewer than Absolute's"):
            self.check_epochs(line, name, text, key, counts)
        elif name in self.column_of:
            before = self.cell(key, self.column_of["as trained"])
            pairs = zip([before.mean, *before.by_seed], [cell.mean, *cell.by_seed])
            values = [100 * (a - b) / a for a, b in pairs]
            self.check_numbers(line, text, values if len(values) > 2 else values[:1], counts)
        else:
            counts.unassigned.append(f"{counts.page}:{line}: {name} {text}")

    def check_numbers(self, line: int, text: str, values: list[float], counts: Counts) -> None:
        printed = NUMBER.findall(text)
        good = len(printed) == len(values) and all(map(agrees, printed, values))
        counts.expect(good, line, text, values)
        self.quotable += [(value, None) for value in values]

    def check_result(self, line: int, text: str, cell: Cell, counts: Counts) -> None:
        """A mean with its interval, the seeds, and the range of draws."""
        shown, *rest = text.split("<br>")
        printed, bounds = NUMBER.findall(shown), cell.bounds()
        good = len(printed) == (1 if bounds is None else 3) and agrees(printed[0], cell.mean)
        good = good and all(agrees(end, *place) for end, place in zip(printed[1:], bounds or ()))
        counts.expect(good, line, text, (cell.mean, bounds))
        self.quotable += [(cell.mean, bounds), *((seed, None) for seed in cell.by_seed)]
        draws = [cell.shown(draw.mean()) for draw in cell.values.transpose(1, 0, 2)]
        for part in rest:
            values = [min(draws), max(draws)] if part.startswith("draws") else cell.by_seed
            self.check_numbers(line, part, values, counts)

    def check_share(self, line: int, text: str, reached: list[bool], counts: Counts) -> None:
        k, n = sum(reached), len(reached)
        low, high = stats.beta.ppf(0.025, k, n - k + 1) if k else 0, stats.beta.ppf(0.975, k + 1, n - k) if k < n else 1
        self.check_numbers(line, text, [k, n, *((100 * low, 100 * high) if n >= 5 else ())], counts)

    def check_median(self, line: int, text: str, durations: list[tuple[int, bool]], counts: Counts) -> None:
        found = float(np.median([time if ended else math.inf for time, ended in durations]))
        good = agrees(text, found) if text[0].isdigit() else text == "not reached" and found == math.inf
        counts.expect(good, line, text, found)

    def check_epochs(self, line: int, name: str, text: str, key: str, counts: Counts) -> None:
        means = {}
        for row in {self.row_of["Absolute"], key}:
            lines = self.cell(row, self.columns[0]).lines
            means[row] = [
                (run[0][0], np.mean([value for _, value in run])) for run in zip(*(x["history"] for x in lines))
            ]
        base = means[self.row_of["Absolute"]]
        if is_accuracy := self.cell(key, self.columns[0]).metric == "eval_accuracy":
            last, goal = base[-1]
        else:
            last, goal = max(base, key=lambda point: point[1])
        found = next((epoch for epoch, value in means[key] if value >= goal), math.inf)
        if name != "epochs":
            found = last / found if is_accuracy else 100 * (1 - found / last)
        good = agrees(NUMBER.search(text)[0], found) if NUMBER.search(text) else not 0 < found < math.inf
        counts.expect(good, line, text, found)

    def check_tests(self, line: int, header: list[str], rows: list[list[str]], counts: Counts) -> None:
        """All tests of a sweep: the correction is for the number of the distinct ones."""
        tests, p_of = [], {}
        self.quotable = self.known.setdefault(DIFFERENCE, [])
        for number, row in enumerate(rows, line + 2):
            for name, text in zip(header[2:], row[2:]):
                tested = [self.row_of[side] for side in row[:2] if side in self.row_of]
                if any(len(self.cell(key, next(iter(self.rows[key]))).seeds) < FEWEST_SEEDS for key in tested):
                    counts.wrong.append(f"{counts.page}:{number}: printed {text}, but {FEWEST_SEEDS} seeds are tested")
                elif text != "–":
                    identity, gap, p = self.test(row[0], row[1], name)
                    tests.append((number, text, identity, gap))
                    p_of[identity] = p
        order = sorted(p_of, key=p_of.get)
        holm = np.maximum.accumulate([min(1, (len(order) - i) * p_of[one]) for i, one in enumerate(order)])
        corrected = dict(zip(order, holm))
        for number, text, identity, gap in tests:
            figures, *said = text.split(", p ")
            if text == "unchanged":
                counts.expect(all(abs(value) < 1e-12 for value in gap), number, text, gap)
                continue
            p, corrected_p = said[0].split(", Holm ")
            good = p_agrees(p, p_of[identity]) and p_agrees(corrected_p, corrected[identity])
            counts.expect(good, number, said[0], (p_of[identity], corrected[identity]))
            if gap and isinstance(gap[0], list):
                for side, durations in zip(figures.split(" against "), gap):
                    self.check_median(number, side, durations, counts)
            else:
                self.check_numbers(number, figures, gap, counts)
                self.quotable += [(gap[0], [(end, end) for end in gap[1:]])] if len(gap) == 3 else []

    def test(self, row: str, against: str, name: str) -> tuple[tuple, list, float]:
        """What is compared, the figures of the difference, and p."""
        column, *rest = name.split(": ")
        if same := against in self.column_of:
            sides = [(row, column), (row, against)]
        else:
            sides = [(row, column), (against, column)]
        kind = rest[0] if rest else "mean"
        metric = f"eval_{kind}" if kind == "loss" else None
        cell, base = (self.cell(self.row_of[one], self.column_of[at], metric) for one, at in sides)
        if base is None:
            # Rows that are trained otherwise stand beside the condition without what this one changes.
            changed = json.loads(self.column_of[column])
            without = [told({k: v for k, v in changed.items() if k != key}) for key in changed]
            base = next(filter(None, (self.cell(self.row_of[against], one, metric) for one in without)))
        if goal := re.match(r"(seeds at|examples until) (\d+)%", kind):
            level = int(goal[2]) / 100
            if goal[1] == "seeds at":
                first, second = ([seed >= level * c.scale for seed in c.by_seed] for c in (cell, base))
                compared = frozenset(c.values.tobytes() for c in (cell, base))
                return (kind, compared), [100 * (np.mean(first) - np.mean(second))], fisher(first, second)
            sides = [c.durations(level) for c in (cell, base)]
            return (kind, frozenset(map(tuple, sides))), sides, log_rank(*sides)
        margin = re.match(r"equivalence within ±([\d.]+)", kind)
        bound = float(margin[1]) / cell.scale if margin else None
        *gap, p = t_test(cell, base, same or self.paired, bound)
        compared = frozenset(c.values.tobytes() for c in (cell, base))
        return (kind, compared), [cell.difference(value) for value in gap], p


def tables_of(text: str, start: int = 1) -> list[tuple[int, list[list[str]]]]:
    """The tables of a text with the numbers of their first lines."""
    tables: list[tuple[int, list[list[str]]]] = []
    before = False
    for number, line in enumerate(text.splitlines(), start):
        if line.startswith("|"):
            if not before:
                tables.append((number, []))
            tables[-1][1].append([part.strip() for part in line.strip()[1:-1].split(" | ")])
        before = line.startswith("|")
    return tables


def recount_report(page: Path, results: Path, sweeps: Path) -> tuple[Counts, dict[str, Section]]:
    """Every section of a report, by its anchor."""
    counts, sections = Counts(page.name), {}
    text = page.read_text(encoding="utf-8")
    for found in re.finditer(r"^## (\w+): (\w+)\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL):
        section = Section(results / found[1] / f"{found[2]}.jsonl", sweeps)
        section.read_tables(tables_of(found[3], text[: found.start(3)].count("\n") + 1), counts)
        sections[f"{found[1]}-{found[2]}"] = section
    return counts, sections


LINK = re.compile(r"report\.md#([\w-]+)")
QUOTED = re.compile(r"(\d[\d,]*\.\d+)(?!\d| times)(?:\s?%)?(?: points)?(?: \(([+−-]?[\d.]+) – ([+−-]?[\d.]+)\))?")


# What pages call otherwise than the report does.
ALIASES = (
    (r"so\(3\)", "so"),
    (r"absolute positions|(?:position )?table\b", "Absolute"),
    (r"(?:in the )?query's frame", "rotation matrices in the frame of the query"),
    (r" in the world's frame(?=,)", ""),
    (r"(?:in the )?world's(?: frame)?", "rotation matrices as features, two layers"),
    (r"trained in all", "51,200 samples, rotation matrices as features, two layers, all directions"),
    (r"`physical`", "in mm"),
    (r"from their published start.*", "usual start"),
    (r"^and both", "rotations and LoRA of rank 1"),
    (r"^and (?=LoRA|rotations)", ""),
    (r"so on half a head, RoPE-Mixed of translations on the other", "so and RoPE-Mixed"),
    (r"poses as features in (?:other frames.*|random frames)", "poses as features"),
)


def words(text: str) -> set[str]:
    for old, new in ALIASES:
        text = re.sub(old, new, text)
    return set(re.findall(r"[\w×]+", text.lower()))


def rows_named(label: str, names: Iterable[str]) -> list[str]:
    """The rows that share most words with a label, and those with all its words and further ones."""
    told = words(label)
    shares = {name: len(told & words(name)) / len(told | words(name)) for name in names if name != DIFFERENCE}
    best = max(shares.values(), default=0)
    return [name for name, share in shares.items() if share == best or (best < 1 and told <= words(name))]


def recount_page(page: Path, sections: dict[str, Section]) -> Counts:
    """
    The figures with decimals in the tables of a page. A row of the linked sections that is named like the figure has to
    have it: by the words before it in its cell, or by its row and column. Differences are those of tests.
    """
    counts, text = Counts(page.name), page.read_text(encoding="utf-8")
    for part in re.finditer(r"(?:^#|\A).*?(?=^#|\Z)", text, re.MULTILINE | re.DOTALL):
        for line, rows in tables_of(part[0], text[: part.start()].count("\n") + 1):
            # Of two columns with one name, the first belongs to the column before it, and so does the second.
            names = [
                f"{rows[0][at - 1]} {name}" if rows[0].count(name) > 1 else name for at, name in enumerate(rows[0])
            ]
            for number, row in enumerate(rows[2:], line + 2):
                # A table whose rows link sections has other sources in the rows that do not.
                of_row, of_table, of_part = (LINK.findall(str(some)) for some in (row, rows, part[0]))
                linked = [sections[anchor] for anchor in (of_row if of_table else of_part) if anchor in sections]
                bare = [re.sub(r"\]\([^)]*\)|\[", "", cell) for cell in row]
                label = " ".join(cell for cell in bare if re.search("[a-z]", cell) and not QUOTED.search(cell))
                for name, cell in zip(names, bare):
                    end = 0
                    for figure in QUOTED.finditer(cell):
                        before, end = cell[end : figure.start()], figure.end()
                        if not linked or "Table " in " ".join(bare):
                            counts.unassigned.append(f"{page.name}:{number}: {figure[0]}")
                            continue
                        said = before if re.search("[a-zA-Z]{4}", before) else f"{label} {name}"
                        tested = DIFFERENCE in name or "points" in figure[0]
                        known = [
                            some
                            for one in linked
                            for of in ([DIFFERENCE] if tested else rows_named(said, one.known))
                            for some in one.known.get(of, [])
                        ]
                        good = any(is_quoted(figure, *some) for some in known)
                        counts.expect(good, number, figure[0], f"none like it for {said.strip()!r} in what is linked")
    return counts


def is_quoted(figure: re.Match, value: float, bounds: list[tuple[float, float]] | None) -> bool:
    """Whether a figure is a value, which may be a difference in the other direction."""
    printed, *ends = figure.groups()
    if ends[0] is None:
        return agrees(printed, abs(value))
    if bounds is None:
        return False
    turned = [(-high, -low) for low, high in bounds[::-1]]
    return agrees(printed, abs(value)) and any(all(map(lambda e, b: agrees(e, *b), ends, s)) for s in (bounds, turned))


def triples_of(record: object) -> Iterable[tuple[float, float, float]]:
    """Every value of a json record that stands beside its bounds."""
    for part in record.values() if isinstance(record, dict) else record if isinstance(record, list) else ():
        yield from triples_of(part)
    if isinstance(record, dict):
        ends = [(key, f"{key}_low", f"{key}_high") for key in record if f"{key}_low" in record]
        yield from (tuple(record[key] for key in keys) for keys in ends)


# Cards print evaluations with changed positions, of which no record is stored.
NOT_STORED = ("condition", "coordinates")


def recount_card(card: Path) -> Counts:
    """The figures with intervals in the tables of a checkpoint's card, by its metadata and the records beside it."""
    counts, text = Counts(f"{card.parent.name}/{card.name}"), card.read_text(encoding="utf-8")
    metadata = re.findall(r"value: (\S+)\n.*?low: (\S+)\n\s+high: (\S+)", text, re.DOTALL)
    known = [tuple(map(float, some)) for some in metadata]
    for record in card.parent.glob("*.json"):
        known += triples_of(json.loads(record.read_text(encoding="utf-8")))
    for line, rows in tables_of(text):
        for number, row in enumerate(rows, line):
            for figure in re.finditer(r"([\d.]+)(%?) \(([\d.]+)%? – ([\d.]+)%?\)", " | ".join(row)):
                scale, printed = 100 if figure[2] else 1, (figure[1], *figure.groups()[2:])
                good = any(all(agrees(p, scale * v) for p, v in zip(printed, some)) for some in known)
                if rows[0][0] in NOT_STORED:
                    counts.unassigned.append(f"{counts.page}:{number}: {figure[0]}")
                else:
                    counts.expect(good, number, figure[0], "none like it in the records beside the card")
    return counts


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=HERE / "results", help="the folder of json lines and reports")
    parser.add_argument("--pages", type=Path, nargs="*", default=[ROOT / page for page in PAGES])
    given = parser.parse_args(arguments)
    made, sections = [], {}
    for folder in (given.results, given.results / "archive"):
        counts, some = recount_report(folder / "report.md", folder, HERE / "sweeps")
        made.append(counts)
        sections |= some
    made += [recount_page(page, sections) for page in given.pages]
    made += map(recount_card, sorted((ROOT / "training" / "checkpoints").glob("*/README.md")))
    for counts in made:
        print("\n".join(counts.wrong + [f"no stored line: {one}" for one in counts.unassigned]))
        print(f"{counts.page}: {counts.agree} agree, {len(counts.wrong)} differ, {len(counts.unassigned)} not assigned")
    return int(any(counts.wrong for counts in made))


if __name__ == "__main__":
    sys.exit(main())
