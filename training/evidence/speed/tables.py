"""The tables of a benchmark: medians, over the rounds, of times relative to `absolute`."""

import math
import statistics

from training.evidence.reporting.markdown import markdown
from training.evidence.speed.intervals import FEWEST_VALUES, Estimate, estimate
from training.evidence.speed.limits import Work
from training.evidence.speed.measurements import BASELINE, PHASES, Case, Records, phases_of
from training.evidence.speed.models import Row


TITLES = {
    "added_inference": "inference",
    "added_first": "inference, first image of a size",
    "added_training": "training step",
}


# ImageNet-1k, and the figures of ComRoPE's Table 9.
TRAINING_IMAGES, VALIDATION_IMAGES = 1_281_167, 50_000
PAPER_MINUTES = {"axial_rope": 16, "liere8": 21, "comrope_ld4": 19, "comrope_ap4": 19}
PAPER_MINUTES |= {"comrope_ld8": 20, "comrope_ap8": 20}
PAPER_SECONDS = {"axial_rope": 32, "liere8": 36, "comrope_ld4": 35, "comrope_ap4": 34}
PAPER_SECONDS |= {"comrope_ld8": 35, "comrope_ap8": 35}


def format_ratio(values: list[float]) -> str:
    if not values:
        return "not measured"
    found = estimate(values)
    spread = f" ({found.low:.3f} – {found.high:.3f})" if found.count > 1 else ""
    return f"{found.median:.3f}{spread}"


def format_rate(case: Case, seconds: list[float]) -> str:
    return f"{case.settings.batch_size / statistics.median(seconds):.4g}" if seconds else "not measured"


def memory_over_baseline(records: Records, case: Case, row: Row) -> str:
    own, base = records.value(case, row, "memory"), records.value(case, Row.parse(BASELINE), "memory")
    return "not measured" if own is None or base is None else f"{100 * (own / base - 1):+.1f}%"


def encodings_table(records: Records, case: Case, clock: str) -> str:
    header = ["model", "inference, images/s", "ratio", "training, images/s", "ratio"]
    header += ["peak memory, MB", "over absolute", "error of rotations"]
    rows = []
    for row in case.rows:
        cells = [row.name]
        for phase in PHASES:
            if phase not in phases_of(row):
                cells += ["–"] * 2
                continue
            seconds = [line["value"]["wall"] for line in records.steps(case, row, phase).values()]
            cells += [format_rate(case, seconds), format_ratio(records.ratios(case, row, phase, clock))]
        memory, error = records.value(case, row, "memory"), records.value(case, row, "error")
        cells.append("–" if not row.trains else "not measured" if memory is None else f"{memory / 1e6:,.0f}")
        cells.append("–" if not row.trains else memory_over_baseline(records, case, row))
        cells.append("–" if error is None else f"{error:.0e}")
        rows.append(cells)
    return markdown(header, rows)


def epochs_table(records: Records, case: Case) -> str:
    """One line per model: minutes of a training epoch of ImageNet-1k and seconds of its validation split, by row."""
    header = ["model", "training, min per epoch", "paper, 4 A800", "validation split, s", "paper, 4 A800"]
    rows = []
    for row in case.rows:
        cells = [row.name]
        for phase, images, unit, paper in (
            ("training", TRAINING_IMAGES, 60, PAPER_MINUTES),
            ("inference", VALIDATION_IMAGES, 1, PAPER_SECONDS),
        ):
            seconds = [line["value"]["wall"] for line in records.steps(case, row, phase).values()]
            per_image = statistics.median(seconds) / case.settings.batch_size if seconds else None
            cells.append("not measured" if per_image is None else f"{per_image * images / unit:,.1f}")
            cells.append(str(paper.get(row.name, "–")))
        rows.append(cells)
    return markdown(header, rows)


def share(records: Records, case: Case, row: Row, quantity: str, clock: str) -> Estimate | None:
    """The time of an addition relative to a step of `absolute`; `None` if not measured."""
    ratios = records.ratios(case, row, quantity, clock)
    return estimate(ratios) if ratios else None


def format_interval(low: float, high: float) -> str:
    return f"{100 * low:.1f} – {100 * high:.1f}%"


def format_share(found: Estimate | None) -> str:
    """The share in percent with its interval, or the interval alone if it is too wide."""
    if found is None:
        return "not measured"
    if not found.is_resolved:
        return format_interval(found.low, found.high)
    return f"{100 * found.median:.1f}% ({format_interval(found.low, found.high)})"


def shares_table(records: Records, case: Case, clock: str) -> str:
    """One line per encoding: what it adds to inference and to training."""
    names, rows = case.additions(Row.parse(BASELINE)), []
    for row in (row for row in case.rows if row.rotates):
        own = case.additions(row)
        cells = (format_share(share(records, case, row, name, clock)) if name in own else "–" for name in names)
        rows.append([row.name, *cells])
    return markdown(["added to absolute", *(TITLES[name] for name in names)], rows)


def limits_table(records: Records, case: Case, clock: str) -> str:
    """
    One line per encoding and phase: its added share, the limit, their ratio, and, as a check, the difference of whole
    models. The lines of `absolute` show the noise of whole models.
    """
    header = ["encoding", "phase", "added share", "limit", "times the limit", "whole models"]
    rows = []
    for phase in PHASES:
        whole = format_whole(records, case, Row.parse(BASELINE), phase, clock)
        rows.append([BASELINE, TITLES[f"added_{phase}"], "–", "–", "–", whole])
    for row in (row for row in case.rows if row.rotates):
        for name, phase in case.additions(row).items():
            found, limit = share(records, case, row, name, clock), limit_share(records, case, row, name, clock)
            cells = [row.name, TITLES[name], format_share(found)]
            missing = "–" if row.kind == "peer" else "not measured"
            cells.append(missing if limit is None else f"{100 * limit:.2f}%")
            is_known = limit and found and found.is_resolved
            cells.append(f"{found.median / limit:.1f}" if is_known else "–")
            cells.append("–" if name == "added_first" else format_whole(records, case, row, phase, clock))
            rows.append(cells)
    return markdown(header, rows)


def limit_share(records: Records, case: Case, row: Row, quantity: str, clock: str) -> float | None:
    """The time of the needed work at the machine's rates, relative to a step of `absolute`."""
    rates = records.value(case, Row.parse(BASELINE), "rates")
    work = records.find(case, "work", row=row.name, of=quantity)
    baseline = [line["baseline"][clock] for line in records.steps(case, row, quantity).values()]
    if rates is None or not work or not baseline:
        return None
    return Work(**work[-1]["value"]).seconds(rates, clock) / statistics.median(baseline)


def format_whole(records: Records, case: Case, row: Row, phase: str, clock: str) -> str:
    """The interval of a whole model's extra time over `absolute`. It is only a check, so without the median."""
    ratios = records.ratios(case, row, phase, clock)
    if not ratios:
        return "not measured"
    found = estimate(ratios)
    return format_interval(found.low - 1, found.high - 1)


def contradictions(records: Records, case: Case, clock: str) -> list[str]:
    """Cases in which the intervals of whole models and of the added share do not overlap."""
    found = []
    for row in (row for row in case.rows if row.rotates):
        for phase in phases_of(row):
            name = f"added_{phase}"
            whole = records.ratios(case, row, phase, clock)
            added = share(records, case, row, name, clock)
            if not whole or added is None or math.isinf(estimate(whole).width + added.width):
                continue
            low, high = (bound - 1 for bound in estimate(whole)[1:3])
            if low > added.high or high < added.low:
                found.append(
                    f"{row.name}, {TITLES[name]}: whole models differ by {format_interval(low, high)}, the added share "
                    f"is {format_interval(added.low, added.high)}."
                )
    return found


def noise(records: Records, cases: list[Case], clock: str) -> list[str]:
    """
    Reasons why a table of shares would show noise: in one of its phases, an interval is wider than the largest
    difference between the shares, including that of `absolute`, which is zero.
    """
    found = []
    for name, title in TITLES.items():
        shares = [share(records, case, row, name, clock) for case in cases for row in case.rows]
        shares = [known for known in shares if known is not None]
        if not shares:
            continue
        medians = [0.0, *(known.median for known in shares)]
        widest, difference = max(known.width for known in shares), max(medians) - min(medians)
        if math.isinf(widest):
            found.append(f"{title}: not every share has the {FEWEST_VALUES} rounds that an interval takes.")
        elif widest >= difference:
            found.append(
                f"{title}: an interval is {100 * widest:.1f} percentage points wide, the largest difference of shares "
                f"{100 * difference:.1f}."
            )
    return found


def growth_table(records: Records, cases: list[Case], clock: str) -> str:
    """One line per case; cells contain the shares added to inference and training, and the memory over absolute."""
    names = list(dict.fromkeys(column(case, row) for case in cases for row in case.rows if row.rotates))
    header, rows = ["growing", "value", "absolute: inference, training, images/s", *names], []
    for case in cases:
        cells = {}
        for row in (row for row in case.rows if row.rotates):
            parts = [format_share(share(records, case, row, f"added_{phase}", clock)) for phase in phases_of(row)]
            cells[column(case, row)] = " / ".join(parts + [memory_over_baseline(records, case, row)] * row.trains)
        rates = (format_rate(case, baseline_seconds(records, case, phase)) for phase in PHASES)
        rows.append([case.axis, case.value, ", ".join(rates), *(cells.get(name, "–") for name in names)])
    return markdown(header, rows)


def baseline_seconds(records: Records, case: Case, phase: str) -> list[float]:
    """Seconds of every step of `absolute` next to an addition."""
    steps = (records.steps(case, row, f"added_{phase}").values() for row in case.rows)
    return [line["baseline"]["wall"] for lines in steps for line in lines]


def column(case: Case, row: Row) -> str:
    return row.name.rstrip("0123456789") if case.axis == "block_size" else row.name


def failures(records: Records) -> str:
    lines = [line for line in records.lines if line.get("quantity") == "failed"]
    return "\n".join(f"{line['row']} failed ({line['case'][:2]}): {line['value']}" for line in lines)
