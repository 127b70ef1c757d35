"""Tables and pictures from the results of sweeps, beside the papers' figures.

    python training/report.py outputs/cifar100/*.jsonl --output_dir outputs/report

Writes report.md, and for every sweep a picture. Accuracies are means over seeds with bootstrapped 95% intervals over
examples; models are compared by paired tests over the same examples, each against the first of its sweep and against
RoPE-Mixed. A figure of a paper stands in the row of the same settings; what it was measured on is said above the table.
"""

import argparse
import json
import sys
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import yaml

from training.arguments import InputError
from training.evaluate_sweep import correct_examples
from training.significance import Interval, bootstrap_mean, paired_test


PAPER_RESULTS = Path(__file__).with_name("paper_results.yaml")
METRICS = {"eval_accuracy": "accuracy", "eval_auc": "AUC", "eval_map": "mAP"}
# Not what is compared, but what is averaged over.
SEEDS = ("seed", "evaluation_seed")
# How an encoding is set up as its paper has it, which its name says already.
AS_IN_PAPER = ("coordinates", "rotary_init", "rotate_prefix", "model_name_or_path")
# Okabe and Ito's colours, told apart with any colour vision; markers help in black and white.
COLORS = ("#000000", "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9")
MARKERS = "os^Dv<>"


@dataclass
class Cell:
    """All results of one row under one condition."""

    results: list[dict[str, Any]] = field(default_factory=list)

    def metric(self) -> str:
        return max((name for name in METRICS if name in self.results[0]["metrics"]), key=list(METRICS).index)

    def correct(self) -> np.ndarray | None:
        """(runs, examples) of 0 and 1, where every run has kept them."""
        if any(result["correct"] is None for result in self.results):
            return None
        runs = [correct_examples(result) for result in self.results]
        return np.stack(runs) if len({len(run) for run in runs}) == 1 else None

    def interval(self) -> Interval:
        """Bootstrapped from examples for accuracies; else the mean, with its own interval where there is one run."""
        name, correct = self.metric(), self.correct()
        if name == "eval_accuracy" and correct is not None:
            return bootstrap_mean(correct)
        values = [result["metrics"][name] for result in self.results]
        metrics = self.results[0]["metrics"]
        if len(values) == 1 and f"{name}_low" in metrics:
            return Interval(values[0], metrics[f"{name}_low"], metrics[f"{name}_high"])
        return Interval(float(np.mean(values)), min(values), max(values))


def main(arguments: list[str] | None = None) -> Path:
    """Writes the report of the given files; its path."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+", help="json lines of evaluate_sweep.py")
    parser.add_argument("--output_dir", type=Path, required=True)
    given = parser.parse_args(arguments)
    paper = yaml.safe_load(PAPER_RESULTS.read_text(encoding="utf-8"))
    given.output_dir.mkdir(parents=True, exist_ok=True)
    parts = ["# Report"]
    for path in given.results:
        results = read_results(path)
        name = results[0]["sweep"]
        table = arrange(results)
        parts.append(section(name, results, table, paper.get(name, {})))
        picture = given.output_dir / f"{name}.png"
        plot(name, table, picture)
        parts.append(f"![{name}]({picture.name})")
    report = given.output_dir / "report.md"
    report.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    return report


def read_results(path: Path) -> list[dict[str, Any]]:
    """
    The lines of a file of results.

    Raises:
        InputError: naming the file and line that is none.
    """
    if not path.is_file():
        raise InputError(f"There are no results {str(path)!r}.")
    results = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            result = json.loads(line)
            results.append({key: result[key] for key in result})
            result["metrics"]["eval_samples"]
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise InputError(f"{path.name}, line {number} is no result of evaluate_sweep.py.") from error
    if not results:
        raise InputError(f"{path.name} holds no results.")
    return results


def arrange(results: list[dict[str, Any]]) -> dict[str, dict[str, Cell]]:
    """Cells by the names of settings and of conditions, in the order of the results; seeds go into the same cell."""
    table: dict[str, dict[str, Cell]] = defaultdict(lambda: defaultdict(Cell))
    for result in results:
        table[method(result["settings"])][condition(result["condition"])].results.append(result)
    return {row: dict(cells) for row, cells in table.items()}


def method(settings: dict[str, Any]) -> str:
    """The name that a model has in the papers, and what else was set."""
    ignored = (*SEEDS, *AS_IN_PAPER)
    rest = {name: value for name, value in settings.items() if name not in ignored and value is not None}
    encoding, block = rest.pop("position_encoding", None), rest.pop("block_size", None)
    if encoding is None:
        rest |= {} if block is None else {"block_size": block}
        return ", ".join(f"{name} {_short(value)}" for name, value in rest.items()) or "the recipe"
    name = {
        "none": "no positions",
        "absolute": "Absolute",
        "axial_rope": "Axial RoPE",
        "rope_mixed": "RoPE-Mixed",
        "liere": f"LieRE{block or 8}",
        "comrope_ap": "ComRoPE-AP",
        "comrope_ld": "ComRoPE-LD",
    }[encoding]
    if encoding.startswith("comrope") and block not in (None, 8):
        name += f", block_size {block}"
    return ", ".join([name, *(f"{key} {_short(value)}" for key, value in rest.items())])


def condition(given: dict[str, Any]) -> str:
    rest = {name: value for name, value in given.items() if name not in SEEDS}
    return ", ".join(f"{name} {_short(value)}" for name, value in rest.items()) or "as trained"


def section(name: str, results: list[dict[str, Any]], table: dict[str, dict[str, Cell]], paper: dict[str, Any]) -> str:
    """Everything about one sweep, as markdown."""
    lines = [f"## {name}", _about(results), *([f"The paper: {paper['about']}"] if paper else [])]
    figures = paper.get("rows", {})
    conditions = list(dict.fromkeys(column for cells in table.values() for column in cells))
    header = ["", "parameters", "seeds"]
    for column in conditions:
        header += [column, *(["paper"] if any(column in row for row in figures.values()) else [])]
    rows = []
    for row, cells in table.items():
        some = next(iter(cells.values())).results
        parameters = some[0]["train_metrics"].get("parameters")
        seeds = len({result["settings"].get("seed") for result in some})
        line = [row, f"{parameters:,}" if parameters else "", str(seeds)]
        for column in conditions:
            line.append(_format(cells[column]) if column in cells else "not measured")
            if any(column in other for other in figures.values()):
                line.append(str(figures.get(row, {}).get(column, "–")))
        rows.append(line)
    lines.append(markdown(header, rows))
    drops = _drops(table, conditions)
    if drops:
        lines += ["Relative loss of accuracy under the condition:", drops]
    for against in dict.fromkeys([next(iter(table)), "RoPE-Mixed"]):
        column = "as trained" if "as trained" in conditions else conditions[0]
        tests = _tests(table, against, column)
        if tests:
            lines += [f"Paired tests against {against}, {column}:", tests]
    reached = _epochs_to_baseline(table)
    if reached:
        lines += ["Epochs until the accuracy that Absolute has at the end:", reached]
    return "\n\n".join(lines)


def markdown(header: list[str], rows: list[list[str]]) -> str:
    rule = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [header, rule, *rows])


def _about(results: list[dict[str, Any]]) -> str:
    """What was measured on what, from the records of the first run."""
    first = results[0]
    model, training, data = (first["run"].get(key, {}) for key in ("model", "training", "data"))
    model = model.get("backbone_config") or model
    source = next(
        (
            data[key]
            for key in ("dataset_name", "train_files", "video_folder", "volume_file", "image_folder")
            if data.get(key)
        ),
        "generated data",
    )
    source = source if isinstance(source, str) else ", ".join(Path(name).name for name in source)
    layers, channels = model.get("num_hidden_layers", 12), model.get("hidden_size", 768)
    epochs = training.get("num_train_epochs", 0)
    device = first["environment"].get("accelerator") or first["environment"].get("device", "")
    return (
        f"Ours: {source}; {layers} layers of {channels} channels; {epochs:g} epochs; evaluated on "
        f"{first['metrics']['eval_samples']:,} examples; {device}."
    )


def _format(cell: Cell) -> str:
    interval, name = cell.interval(), cell.metric()
    if name == "eval_accuracy":
        return f"{100 * interval.mean:.1f} ({100 * interval.low:.1f} – {100 * interval.high:.1f})"
    return f"{METRICS[name]} {interval.mean:.3f} ({interval.low:.3f} – {interval.high:.3f})"


def _drops(table: dict[str, dict[str, Cell]], conditions: list[str]) -> str | None:
    """As LieRE's Table 5: (before − after) / before, for evaluations with shuffled patches or frames."""
    shuffles = [column for column in conditions if "evaluation_shuffle" in column]
    if not shuffles or "as trained" not in conditions:
        return None
    rows = []
    for row, cells in table.items():
        if "as trained" in cells:
            before = cells["as trained"].interval().mean
            after = [cells[column].interval().mean if column in cells else np.nan for column in shuffles]
            rows.append([row, *(f"{100 * (before - value) / before:.1f}%" if before else "–" for value in after)])
    return markdown(["", *shuffles], rows)


def _tests(table: dict[str, dict[str, Cell]], against: str, column: str) -> str | None:
    base = table.get(against, {}).get(column)
    base = base and base.correct()
    if base is None:
        return None
    rows = []
    for row, cells in table.items():
        other = cells[column].correct() if column in cells and row != against else None
        if other is None or other.shape[1] != base.shape[1]:
            continue
        test = paired_test(base, other)
        mean, low, high = (100 * value for value in (test.difference.mean, test.difference.low, test.difference.high))
        rows.append([row, f"{mean:+.2f} ({low:+.2f} – {high:+.2f})", f"{test.z:.2f}", f"{test.p_value:.2g}"])
    return markdown(["", "difference in points", "z", "p"], rows) if rows else None


def _epochs_to_baseline(table: dict[str, dict[str, Cell]]) -> str | None:
    """As LieRE's Figure 9: by how much fewer epochs than Absolute's all of them."""
    histories = {}
    for row, cells in table.items():
        runs = [dict(map(tuple, result["history"])) for result in next(iter(cells.values())).results]
        epochs = sorted(set.intersection(*(set(run) for run in runs)))
        if len(epochs) > 1:
            histories[row] = [(epoch, float(np.mean([run[epoch] for run in runs]))) for epoch in epochs]
    if len(histories) < 2 or "Absolute" not in histories:
        return None
    last, goal = histories["Absolute"][-1]
    rows = []
    for row, history in histories.items():
        reached = next((epoch for epoch, accuracy in history if accuracy >= goal), None)
        rows.append([row, "never" if reached is None else f"{reached:g}", f"{last / reached:.1f}×" if reached else "–"])
    return markdown(["", "epochs", "fewer than Absolute's"], rows)


def plot(name: str, table: dict[str, dict[str, Cell]], path: Path) -> None:
    """A picture of a sweep: lines where a condition or a setting is a number, else a point for each row."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    label = METRICS[next(iter(next(iter(table.values())).values())).metric()]
    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    lines, title = _lines(table)
    if lines:
        places = [place for points in lines.values() for place, _ in points]
        # Side by side, so that no interval hides another.
        aside = (max(places) - min(places)) / 150
        for number, (row, points) in enumerate(lines.items()):
            places, intervals = zip(*sorted(points, key=lambda point: point[0]))
            places = [place + (number - (len(lines) - 1) / 2) * aside for place in places]
            _draw(axes, places, intervals, number, label, row, line=True)
        axes.set_xlabel(title)
        figure.legend(frameon=False, loc="outside lower center", ncols=3)
    else:
        cells = [(row, next(iter(cells.values()))) for row, cells in table.items()]
        for number, (_, cell) in enumerate(cells):
            _draw(axes, [number], [cell.interval()], number, label, None, line=False)
        axes.set_xticks(range(len(cells)), [row for row, _ in cells], rotation=30, ha="right")
    axes.set_ylabel(f"{label} (%)" if label == "accuracy" else label)
    axes.set_title(name)
    axes.grid(axis="y", color="#DDDDDD")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _lines(table: dict[str, dict[str, Cell]]) -> tuple[dict[str, list[tuple[float, Interval]]], str]:
    """Points by line, and what the horizontal axis is: the one condition or setting that is a number and varies."""
    lines: dict[str, list[tuple[float, Interval]]] = defaultdict(list)
    for row, cells in table.items():
        for cell in cells.values():
            result = cell.results[0]
            varied = {name: value for name, value in result["condition"].items() if _is_number(name, value)}
            if not varied and len(cells) > 1 and not result["condition"]:
                # Under the condition that it was trained at.
                names = {name for other in cells.values() for name in other.results[0]["condition"]}
                size = result["run"].get("image_size")
                varied = {"image_size": size[-1]} if "image_size" in names and size else {}
            for name, value in varied.items():
                lines[row].append((value, cell.interval()))
                title = name
    if lines and all(len(points) > 1 for points in lines.values()):
        return lines, title
    lines.clear()
    settings = [next(iter(cells.values())).results[0]["settings"] for cells in table.values()]
    numbers = {
        name for given in settings for name, value in given.items() if _is_number(name, value) and name not in SEEDS
    }
    varying = [name for name in sorted(numbers) if len({given.get(name) for given in settings}) > 2]
    if len(varying) != 1:
        return {}, ""
    for given, cells in zip(settings, table.values()):
        if varying[0] in given:
            row = method({name: value for name, value in given.items() if name != varying[0]})
            row = row.replace("LieRE8", "LieRE") if varying[0] == "block_size" else row
            lines[row].append((given[varying[0]], next(iter(cells.values())).interval()))
    return lines, varying[0]


def _draw(axes, places, intervals: list[Interval], number: int, label: str, row: str | None, line: bool) -> None:
    scale = 100 if label == "accuracy" else 1
    means = np.array([interval.mean for interval in intervals]) * scale
    bars = np.array([[i.mean - i.low for i in intervals], [i.high - i.mean for i in intervals]]).clip(0) * scale
    style = {"color": COLORS[number % len(COLORS)], "marker": MARKERS[number % len(MARKERS)], "capsize": 3}
    axes.errorbar(places, means, yerr=bars, linestyle="-" if line else "", label=row, **style)


def _is_number(name: str, value: Any) -> bool:
    return name not in SEEDS and isinstance(value, int | float) and not isinstance(value, bool)


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    try:
        print(f"Report: {main()}")
    except InputError as error:
        sys.exit(f"error: {error}")
