"""The tables of a benchmark, from its measurements: medians over the rounds of ratios to `absolute`."""

import statistics

from training.reporting.markdown import markdown
from training.speed.measurements import BASELINE, PHASES, Case, Records
from training.speed.models import Row


def ratios(records: Records, case: Case, row: Row, phase: str, clock: str) -> list[float]:
    """Time over that of `absolute`, of every round."""
    lines = records.steps(case, row, phase).values()
    return [line["value"][clock] / line["baseline"][clock] for line in lines if "baseline" in line]


def format_ratio(values: list[float], spread: bool = True) -> str:
    if not values:
        return "not measured"
    median = f"{statistics.median(values):.3f}"
    if not spread or len(values) < 2:
        return median
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{median} ({low:.3f} – {high:.3f})"


def format_rate(records: Records, case: Case, row: Row, phase: str) -> str:
    seconds = [line["value"]["wall"] for line in records.steps(case, row, phase).values()]
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
            if phase == "training" and not row.trains:
                cells += ["–"] * 2
                continue
            cells += [format_rate(records, case, row, phase), format_ratio(ratios(records, case, row, phase, clock))]
        memory, error = records.value(case, row, "memory"), records.value(case, row, "error")
        cells.append("–" if not row.trains else "not measured" if memory is None else f"{memory / 1e6:,.0f}")
        cells.append("–" if not row.trains else memory_over_baseline(records, case, row))
        cells.append("–" if error is None else f"{error:.0e}")
        rows.append(cells)
    return markdown(header, rows)


def growth_table(records: Records, cases: list[Case], clock: str) -> str:
    """One line per case; in each cell the ratios of inference and of training, and the memory over absolute."""
    names = list(dict.fromkeys(column(case, row) for case in cases for row in case.rows))
    header, rows = ["growing", "value", "absolute: inference, training, images/s", *names[1:]], []
    for case in cases:
        cells = {}
        for row in case.rows:
            parts = [format_ratio(ratios(records, case, row, "inference", clock), spread=False)]
            if row.trains:
                parts.append(format_ratio(ratios(records, case, row, "training", clock), spread=False))
                parts.append(memory_over_baseline(records, case, row))
            cells[column(case, row)] = " / ".join(parts)
        rates = (format_rate(records, case, case.rows[0], phase) for phase in PHASES)
        rows.append([case.axis, case.value, ", ".join(rates), *(cells.get(name, "–") for name in names[1:])])
    return markdown(header, rows)


def column(case: Case, row: Row) -> str:
    return row.name.rstrip("0123456789") if case.axis == "block_size" else row.name


def failures(records: Records) -> str:
    lines = [line for line in records.lines if line.get("quantity") == "failed"]
    return "\n".join(f"{line['row']} failed ({line['case'][:2]}): {line['value']}" for line in lines)
