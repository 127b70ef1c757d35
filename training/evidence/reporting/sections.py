"""The section of a report on one sweep: a table beside the paper's figures, tests between models, missing models."""

import json
import shlex
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from training.evidence.reporting.comparisons import (
    Comparisons,
    columns_of,
    make_comparisons,
    num_epochs,
    solved_table,
    tests_table,
    train_examples,
)
from training.evidence.reporting.conclusions import conclude
from training.evidence.reporting.markdown import markdown, minus
from training.evidence.reporting.plots import plot, plot_differences, tested_models
from training.evidence.reporting.result_table import (
    AS_IN_PAPER,
    AS_TRAINED,
    MANY_SEEDS,
    QUANTILE,
    Table,
    arrange,
    common_settings,
    distinguishing_settings,
    reader_name,
    reader_names,
)
from training.evidence.reporting.significance import FEWEST_SEEDS
from training.evidence.reporting.sweeps import TRAINING, combinations, read_sweep


# With fewer evaluations during training, "twice as soon" would be the distance of two of them.
FEWEST_EVALUATIONS = 20
# A conclusion and the table below it.
Part = tuple[str, str]


@dataclass(frozen=True)
class Section:
    """
    The results of one sweep on one data set.

    Attributes:
        folder: of the data, a part of the section's name.
        sweep: the content of its file, empty if it no longer exists.
        table: cells by the names of rows for readers.
        common: settings that all models have.
        paper: the paper's figures in `training/paper_results.yaml`, by the same rows.
    """

    folder: str
    results: list[dict[str, Any]]
    sweep: dict[str, Any]
    table: Table
    common: list[str]
    paper: dict[str, Any]

    @classmethod
    def read(cls, path: Path, results: list[dict[str, Any]], papers: dict[str, Any]) -> "Section":
        """The section on the sweep whose results are in `path`."""
        sweep = _sweep(path, results)
        table = arrange(results, sweep.get("groups", ()))
        common = common_settings(table)
        names = reader_names(table, sweep.get("labels", {}), common)
        paper = {
            key: {names.get(row, ""): given for row, given in some.items()} if isinstance(some, dict) else some
            for key, some in papers.get(results[0]["sweep"], {}).items()
        }
        return cls(
            path.absolute().parent.name,
            results,
            sweep,
            {names[row]: cells for row, cells in table.items()},
            common,
            paper,
        )

    @property
    def name(self) -> str:
        return f"{self.folder}: {self.results[0]['sweep']}"

    @property
    def title(self) -> str:
        return self.sweep.get("title", self.name)

    @property
    def anchor(self) -> str:
        return self.name.replace(": ", "-")

    @cached_property
    def found(self) -> Comparisons:
        return make_comparisons(self.sweep, self.table)

    @property
    def numbers_of_seeds(self) -> list[int]:
        return sorted({len(next(iter(cells.values())).by_seed()) for cells in self.table.values()})

    @property
    def few_seeds(self) -> bool:
        """Whether a row has too few seeds for intervals."""
        return self.numbers_of_seeds[0] < FEWEST_SEEDS

    @property
    def title_of_picture(self) -> str:
        examples = f"{self.results[0]['metrics']['eval_samples']:,} test examples"
        lengths = " or ".join(_lengths(self.results))
        return f"{self.title}\n{self.folder}: {_seeds(self.numbers_of_seeds)}, {lengths}, {examples}"

    def draw(self, path: Path) -> None:
        """Differences where tests compare seeds or documents in pairs, else the results."""
        metric = next(iter(next(iter(self.table.values())).values())).metric()
        paired = self.sweep.get("paired", False) or metric == "eval_perplexity"
        if paired and tested_models(self.found, self.table):
            plot_differences(self.found, self.table, self.title_of_picture, path)
        else:
            plot(self.table, self.title_of_picture, path, self.found.line)

    @property
    def missing_hours(self) -> float:
        """Hours of training on one core, by the records, of the seeds that a test still needs."""
        seconds = 0.0
        for cells in self.table.values():
            results = next(iter(cells.values())).results
            longest = max(result["train_metrics"].get("train_runtime", 0) for result in results)
            seconds += longest * max(0, self.found.fewest_seeds - len({one["settings"].get("seed") for one in results}))
        return seconds / 3600

    def write(self) -> str:
        """
        The section as markdown: what is significant, and the tables, each below a sentence of conclusion. Tables of few
        seeds are folded.
        """
        table, found, paper, sweep = self.table, self.found, self.paper, self.sweep
        conditions = columns_of(table)
        figures = {row: cells for row, cells in paper.get("rows", {}).items() if row in table}
        shown = [column for column in conditions if any(column in row for row in figures.values())]
        lines = [_about(self.results, table, self.common), _command(self.folder, self.results[0])]
        if paper:
            lines.append(f"The paper: {' '.join(paper['about'].split())}")
        if paper and _is_mini(self.results[0]):
            lines[-1] += " Other data, models and budgets than ours: compare the order of the rows, not the figures."
        lines.append(_results_table(table, conditions, figures, shown))
        if missing := _missing_models(sweep, table, self.common) if sweep else []:
            lines.append(f"Not measured yet: {'; '.join(missing)}.")
        further = [_drops(table, conditions, figures, found), tests_table(found, table)]
        if found.solved_at is not None:
            further.insert(0, solved_table(table, found.solved_at))
        further += [FURTHER_TABLES[name](table, paper.get(name, {}), found) for name in sweep.get("report", [])]
        metric = next(iter(next(iter(table.values())).values())).metric()
        if conditions == [AS_TRAINED] and metric in ("eval_accuracy", "eval_map") and found.solved_at is None:
            further.append(_epochs(table, found))
        lines += [part for made in further if made for part in made]
        lines.append(f"![{self.title}]({self.folder}/{self.results[0]['sweep']}.png)")
        if self.few_seeds:
            said = f"{_seeds(self.numbers_of_seeds)}: tables and picture"
            lines = [f"<details>\n<summary>{said}</summary>", *lines, "</details>"]
        return "\n\n".join([f"## {self.name}", f"*{self.title}*", f"**{conclude(found, table)}**", *lines])


def _seeds(numbers: list[int]) -> str:
    return "1 seed" if numbers == [1] else f"{' or '.join(map(str, numbers))} seeds"


def _sweep(path: Path, results: list[dict[str, Any]]) -> dict[str, Any]:
    """The content of the sweep's file: the copy beside the results, or that of the repository, if it still exists."""
    copy = path.with_suffix(".yaml")
    if copy.is_file():
        return read_sweep(copy, "--mini" in results[0].get("command", ()))
    file = TRAINING / "evidence" / "sweeps" / f"{results[0]['sweep']}.yaml"
    return read_sweep(file, _is_mini(results[0])) if file.is_file() else {}


def _missing_models(sweep: dict[str, Any], table: Table, common: list[str]) -> list[str]:
    """Models of the sweep's file without results or with results of other settings, and missing seeds."""
    wanted: dict[str, set] = {}
    changed: dict[str, list[str]] = {}
    trained = combinations(sweep["train"])
    shown = distinguishing_settings(trained, sweep["script"])
    for settings in trained:
        row = reader_name(settings, sweep["script"], shown, common, sweep["labels"])
        wanted.setdefault(row, set()).add(settings.get("seed"))
        if row in table:
            measured = next(iter(table[row].values())).results[0]["settings"]
            # The names of the rows contain all other settings; model_name_or_path is a folder.
            hidden = set(AS_IN_PAPER) - {"model_name_or_path"}
            differing = {name: value for name, value in settings.items() if measured.get(name) != value}
            changed[row] = [f"{name} {value}" for name, value in differing.items() if name in hidden]
    missing = [f"{row} with {', '.join(differing)}" for row, differing in changed.items() if differing]
    for row, seeds in wanted.items():
        measured = set(next(iter(table[row].values())).by_seed()) if row in table else set()
        # Sweeps without seeds may have run with --seeds.
        left = set() if seeds == {None} and measured else seeds - measured
        named = sorted(left - {None})
        if left:
            seeds = f" (seed{'s' * (len(named) > 1)} {_ranges(named)})"
            missing.append(f"{row}{seeds}" if row in table and named else row)
    return missing


def _results_table(table: Table, conditions: list[str], figures: dict[str, dict], shown: list[str]) -> str:
    header = ["", "parameters", "seeds"]
    for column in conditions:
        header += [column, *(["paper"] if column in shown else [])]
    rows = []
    for row, cells in table.items():
        some = next(iter(cells.values()))
        parameters, by_seed = some.results[0]["train_metrics"].get("parameters"), some.by_seed()
        line = [row, f"{parameters:,}" if parameters else "", str(len(by_seed))]
        for column in conditions:
            line.append(str(cells[column]) if column in cells else "not measured")
            if column in shown:
                line.append(str(figures.get(row, {}).get(column, "–")))
        rows.append(line)
    return markdown(header, rows, "---:")


def _about(results: list[dict[str, Any]], table: Table, common: list[str]) -> str:
    """Model, data and machine, from the records of the first run that trains, and what the examples leave open."""
    first = next((result for result in results if train_examples(result)), results[0])
    model, training = (first["run"].get(key, {}) for key in ("model", "training"))
    model = model.get("backbone_config") or model
    # The record of a tower may be the flags alone: the fields of a new one, or the name of a checkpoint.
    if isinstance(tower := model.get("vision_config"), str):
        model = json.loads(tower)
    size = f"{_count(model.get('num_hidden_layers', 12), 'layer')} of {model.get('hidden_size', 768)} channels"
    lengths = [
        words + (f" of {round(examples):,} examples" if examples else "")
        for words, examples in _lengths(results).items()
    ]
    processes = first["environment"].get("world_size", 1)
    batch = training.get("per_device_train_batch_size", 0) * training.get("gradient_accumulation_steps", 1) * processes
    seeds = sorted({result["settings"].get("seed", training.get("seed", 0)) for result in results})
    parts = [
        model.get("model_name_or_path") or size,
        *common,
        f"{' or '.join(lengths)} in batches of {batch}",
        f"seed{'s' * (len(seeds) > 1)} {_ranges(seeds)}",
        f"evaluated on {first['metrics']['eval_samples']:,} examples",
        _machine([result["environment"] for result in results]),
    ]
    return f"Ours: {'; '.join(parts)}.{_reach_of_examples(table)}"


def _lengths(results: list[dict[str, Any]]) -> dict[str, float]:
    """Examples by the length of the training. Flags may limit the steps instead of the epochs."""
    lengths: dict[str, float] = {}
    for result in [result for result in results if train_examples(result)] or results[:1]:
        steps = result["run"].get("training", {}).get("max_steps", -1)
        words = _count(steps, "step") if steps > 0 else _count(num_epochs(result), "epoch")
        lengths.setdefault(words, 0 if steps > 0 else train_examples(result))
    return lengths


def _machine(environments: list[dict[str, Any]]) -> str:
    devices = (given.get("accelerator") or given.get("device", "") for given in environments)
    libraries = [given.get("libraries", {}) for given in environments]
    versions = [[some.get(name) for some in libraries] for name in ("torch", "transformers")]
    device, torch, transformers = (" or ".join(map(str, dict.fromkeys(some))) for some in (devices, *versions))
    return f"{device}, torch {torch}, transformers {transformers}"


def _ranges(numbers: list[int]) -> str:
    """Ascending numbers, with a dash between the ends of four or more in a row."""
    groups: list[list[int]] = []
    for number in numbers:
        if groups and number == groups[-1][-1] + 1:
            groups[-1].append(number)
        else:
            groups.append([number])
    return ", ".join(f"{some[0]} – {some[-1]}" if len(some) > 3 else ", ".join(map(str, some)) for some in groups)


def _reach_of_examples(table: Table) -> str:
    """How far another choice of examples could move a figure."""
    cells = [cell for some in table.values() for cell in some.values()]
    reach = QUANTILE * max(cell.outcomes.error_of_examples() for cell in cells)
    if reach == 0:
        return ""
    shown = {"eval_accuracy": f"{100 * reach:.1f} points", "eval_perplexity": f"{100 * np.expm1(reach):.0f}%"}
    moved = shown.get(cells[0].metric(), f"{reach:.3f}")
    drawn = f"{len(cells[0].groups)} other groups of test examples" if cells[0].groups else "Other test examples"
    return f" {drawn} alone would move a figure by up to ±{moved}, in 95 of 100 draws."


def _count(number: float, noun: str) -> str:
    return f"{number:g} {noun}{'' if number == 1 else 's'}"


def _is_mini(result: dict[str, Any]) -> bool:
    return "--mini" in result.get("command", ()) or any(flag.endswith("_mini.yaml") for flag in result["flags"][:1])


def _command(folder: str, result: dict[str, Any]) -> str:
    """The command that ran the sweep. Files outside the repository are named without their folders."""
    if "command" in result:
        return f"    {shlex.join(['python', 'training/evidence/evaluate_sweep.py', *result['command']])}"
    # Older results lack the command. The passed flags are between the recipe and the flags of the sweep, two words for
    # every setting and for do_eval.
    passed = result["flags"][1 : -2 * (len(result["settings"]) + 1)]
    mini = ["--mini"] if _is_mini(result) else []
    words = ["python", "training/evidence/evaluate_sweep.py", f"training/evidence/sweeps/{result['sweep']}.yaml", *mini]
    return f"    {shlex.join([*words, '--output_dir', f'outputs/{folder}', *passed])}"


def _drops(table: Table, conditions: list[str], figures: dict[str, dict], found: Comparisons) -> Part | None:
    """(before − after) / before for evaluations with shuffled patches or frames, as in LieRE's Table 5."""
    shuffles = [column for column in conditions if column.endswith(" shuffled")]
    if not shuffles or AS_TRAINED not in conditions:
        return None

    def drop(before: float, after: float) -> float:
        return 100 * (before - after) / before

    header, rows, said = [""], [[row] for row in table], []
    for column in shuffles:
        header += [column, "paper"]
        known = {}
        for line, (row, cells) in zip(rows, table.items()):
            ours, papers = ([some.get(name) for name in (AS_TRAINED, column)] for some in (cells, figures.get(row, {})))
            if all(ours) and ours[0].mean:
                known[row] = drop(*(cell.mean for cell in ours))
                before, after = (cell.by_seed() for cell in ours)
                seeds = [drop(before[seed], after[seed]) for seed in before if seed in after and before[seed]]
                line.append(_with_seeds(known[row], seeds, _percent))
            else:
                line.append("–")
            line.append(_percent(drop(*(float(str(value).split()[0]) for value in papers))) if all(papers) else "–")
        if len(set(known.values())) < 2 or found.none_learned:
            said.append(column)
        else:
            most, least = max(known, key=known.get), min(known, key=known.get)
            said.append(
                f"{column}: {most} loses most ({_percent(known[most])}), {least} least ({_percent(known[least])})"
            )
    return f"Relative loss of accuracy with {'; '.join(said)}.", markdown(header, rows, "---:")


def _percent(value: float) -> str:
    return minus(f"{value:.1f}%")


def _in_percent(value: float) -> str:
    return f"{100 * value:.1f}"


def _with_seeds(mean: float, seeds: Iterable[float], form: Callable[[float], str]) -> str:
    """A mean above the values of the single seeds, unless they are many."""
    single = list(map(form, seeds))
    return f"{form(mean)}<br>{', '.join(single)}" if 1 < len(single) < MANY_SEEDS else form(mean)


def _peaks(table: Table, papers: dict[str, Any], found: Comparisons) -> Part | None:
    """The highest accuracy of all epochs, as in LieRE's Figure 4, beside the last."""
    rows, highest, lost = [], {}, 0.0
    for row, cells in table.items():
        runs = [result["history"] for result in next(iter(cells.values())).results]
        if all(runs):
            both = [max(accuracy for _, accuracy in run) for run in runs], [run[-1][1] for run in runs]
            highest[row] = float(np.mean(both[0]))
            lost = max(lost, *(best - last for best, last in zip(*both)))
            rows.append([row, *(_with_seeds(np.mean(values), values, _in_percent) for values in both)])
    if not rows:
        return None
    best = (
        "Best epoch, mean over seeds."
        if found.none_learned
        else f"Best epoch, mean over seeds: highest for {_first(highest)}."
    )
    said = f"{best} From the best to the last epoch, a seed loses at most {_in_percent(lost)} points."
    return said, markdown(["", "highest of all epochs", "last epoch"], rows, "---:")


def _first(values: dict[str, float], form: str = "{:.1%}", lowest: bool = False) -> str:
    """The rows with the highest or lowest value as it is shown, and this value."""
    shown = form.format((min if lowest else max)(values.values()))
    return f"{', '.join(row for row, value in values.items() if form.format(value) == shown)} ({shown})"


def _further_metric(
    metric: str, title: str, said: str, table: Table, papers: dict[str, Any], found: Comparisons
) -> Part | None:
    header, rows, means = ["", title, *(["paper"] if papers else [])], [], {}
    for row, cells in table.items():
        cell = replace(next(iter(cells.values())), of=metric)
        if cell.has(metric):
            means[row] = cell.mean
            rows.append([row, str(cell), *([str(papers.get(row, "–"))] if papers else [])])
    if not rows:
        return None
    if found.none_learned:
        return f"{title.capitalize()}, mean over seeds.", markdown(header, rows, "---:")
    return f"{said}: {_first(means, '{:.3f}', metric == 'eval_loss')}.", markdown(header, rows, "---:")


def _precisions(table: Table, papers: dict[str, list[float]], found: Comparisons) -> Part | None:
    """COCO's average precisions in percent, as in ComRoPE's Table 2, without sizes that no object has."""
    names = ("map", "map_50", "map_75", "map_small", "map_medium", "map_large")
    some = [result["metrics"] for cells in table.values() for cell in cells.values() for result in cell.results]
    shown = [index for index, name in enumerate(names) if any(f"eval_{name}" in metrics for metrics in some)]
    header, rows, means = [""], [], {}
    for index in shown:
        header += [("AP", "AP50", "AP75", "APs", "APm", "APl")[index], *(["paper"] if papers else [])]
    for row, cells in table.items():
        line = [row]
        for index in shown:
            results = next(iter(cells.values())).results
            values = [metrics[f"eval_{names[index]}"] for metrics in (result["metrics"] for result in results)]
            means.setdefault(row, float(np.mean(values)))
            line.append(_with_seeds(np.mean(values), values, _in_percent))
            if papers:
                line.append(str(papers[row][index]) if row in papers else "–")
        rows.append(line)
    if not shown:
        return None
    return f"Highest AP, mean over seeds: {_first(means)}.", markdown(header, rows, "---:")


def _epochs(table: Table, found: Comparisons) -> Part | None:
    """
    The epochs after which each model reaches Absolute's last accuracy, as in LieRE's Figure 9, or its highest mAP, as
    in ComRoPE's Figure 4, which counts iterations of equal batches. There is nothing to reach if Absolute is at chance.
    Left out with few evaluations.
    """
    histories = {}
    for row, cells in table.items():
        runs = [dict(map(tuple, result["history"])) for result in next(iter(cells.values())).results]
        epochs = sorted(set.intersection(*(set(run) for run in runs)))
        if len(epochs) > 1:
            histories[row] = [(epoch, float(np.mean([run[epoch] for run in runs]))) for epoch in epochs]
    if len(histories) < 2 or len(histories.get("Absolute", ())) < FEWEST_EVALUATIONS:
        return None
    column, cell = next(iter(table["Absolute"].items()))
    if ("Absolute", column) in found.guessing:
        return None
    is_accuracy = cell.metric() == "eval_accuracy"
    last, goal = histories["Absolute"][-1] if is_accuracy else max(histories["Absolute"], key=lambda point: point[1])
    rows, sooner = [], []
    for row, history in histories.items():
        reached = next((epoch for epoch, value in history if value >= goal), None)
        fewer = "–"
        if reached:
            fewer = f"{last / reached:.1f}×" if is_accuracy else f"{100 * (1 - reached / last):.0f}%".replace("-", "−")
            sooner += [row] if reached < last and row != "Absolute" else []
        rows.append([row, "never" if reached is None else f"{reached:g}", fewer])
    goal = "the accuracy that Absolute has at the end" if is_accuracy else "the highest mAP of Absolute"
    earlier = ", ".join(sooner) or "none"
    said = f"Epochs until {goal}, by the means over seeds, not tested. Sooner than Absolute: {earlier}."
    return said, markdown(["", "epochs", "fewer than Absolute's"], rows, "---:")


FURTHER_TABLES = {
    "epochs": lambda table, _, found: _epochs(table, found),
    "peak": _peaks,
    # As in LieRE's Table 9.
    "losses": partial(_further_metric, "eval_loss", "loss", "Lowest loss"),
    "precisions": _precisions,
    "balanced": partial(
        _further_metric,
        *("eval_balanced_accuracy", "balanced accuracy", "Highest balanced accuracy (0.5 for a constant answer)"),
    ),
}
