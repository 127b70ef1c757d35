"""The section of a report on one sweep: a table beside the paper's figures, tests between models, missing models."""

import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from hf_liere.models.encoding.encoding_traits import ENCODING_TRAITS, EncodingTraits
from training.reporting.markdown import markdown
from training.reporting.result_table import (
    AS_IN_PAPER,
    AS_TRAINED,
    SEEDS,
    Cell,
    Table,
    distinguishing_settings,
    drop_common,
    method,
)
from training.reporting.significance import PairedTest, holm, paired_test, paired_test_over_seeds
from training.reporting.sweeps import TRAINING, combinations, read_sweep


# With at least this number of seeds, tests are over seeds; with fewer they would have almost no power.
SEEDS_TO_TEST = 5


def title_of(folder: str, results: list[dict[str, Any]], table: Table, common: list[str]) -> str:
    numbers = sorted({len(next(iter(cells.values())).by_seed()) for cells in table.values()})
    seeds = "1 seed" if numbers == [1] else f"{' or '.join(map(str, numbers))} seeds"
    epochs, examples = _epochs(results[0]), results[0]["metrics"]["eval_samples"]
    budget = "".join(f"{part}, " for part in common) + f"{_count(epochs, 'epoch')}, {seeds}, {examples:,} examples"
    return f"{folder}: {results[0]['sweep']} ({budget})"


def section(folder: str, results: list[dict[str, Any]], table: Table, paper: dict[str, Any], common: list[str]) -> str:
    """The section on one sweep, as markdown. Settings that all models have in `common` are above the table."""
    lines = [f"## {folder}: {results[0]['sweep']}", _about(results, common), _command(folder, results[0])]
    conditions = list(dict.fromkeys(column for cells in table.values() for column in cells))
    papers = _rename_rows(paper.get("rows", {}), common)
    figures = {row: cells for row, cells in papers.items() if row in table}
    shown = [column for column in conditions if any(column in row for row in figures.values())]
    if paper:
        lines.append(f"The paper: {' '.join(paper['about'].split())}")
    if paper and _is_mini(results[0]):
        lines[-1] += " Other data, models and budgets than ours: compare the order of the rows, not the figures."
    lines.append(_results_table(table, conditions, figures, shown))
    if missing := _missing_models(results, table, common):
        lines.append(f"Not measured yet: {'; '.join(missing)}.")
    first = next(iter(table.values()))
    metric = next(iter(first.values())).metric()
    is_accuracy = metric == "eval_accuracy"
    further = [("Relative loss of accuracy under the condition:", _drops(table, conditions, figures))]
    for title, pairing in PAIRINGS.items() if is_accuracy else ():
        further.append((title, _tests(table, pairing.rows(table), conditions)))
    for name in _sweep(results).get("report", []):
        title, make = FURTHER_TABLES[name]
        further.append((title, make(table, _rename_rows(paper.get(name, {}), common))))
    references = [next((row for row in table if row.startswith("Absolute")), next(iter(table)))]
    references += [row for row in table if row.startswith("RoPE-Mixed")][:1]
    for against in dict.fromkeys(references if is_accuracy else []):
        pairs = {row: against for row in table if row != against}
        further.append((f"Against {against}, in points:", _tests(table, pairs, conditions)))
    if conditions == [AS_TRAINED] and metric in ("eval_accuracy", "eval_map"):
        goal = "the accuracy that Absolute has at the end" if is_accuracy else "the highest mAP of Absolute"
        further.append((f"Epochs until {goal}:", _epochs_to_baseline(table, is_accuracy)))
    return "\n\n".join([*lines, *(part for title, made in further if made for part in (title, made))])


def _rename_rows(papers: dict[str, Any], common: list[str]) -> dict[str, Any]:
    """A paper's figures by row, with names that omit the settings that all our rows have in common."""
    return {drop_common(row, common): given for row, given in papers.items() if set(common) <= set(row.split(", "))}


def _sweep(results: list[dict[str, Any]]) -> dict[str, Any]:
    """The content of the sweep's file, if it still exists."""
    file = TRAINING / "sweeps" / f"{results[0]['sweep']}.yaml"
    return read_sweep(file, _is_mini(results[0])) if file.is_file() else {}


def _missing_models(results: list[dict[str, Any]], table: Table, common: list[str]) -> list[str]:
    """Models of the sweep's file without results or with results of other settings, and missing seeds."""
    sweep = _sweep(results)
    if not sweep:
        return []
    wanted: dict[str, set] = {}
    changed: dict[str, list[str]] = {}
    trained = combinations(sweep["train"])
    shown = distinguishing_settings(trained, sweep["script"])
    for settings in trained:
        row = drop_common(method(settings, sweep["script"], shown), common)
        wanted.setdefault(row, set()).add(settings.get("seed"))
        if row in table:
            measured = next(iter(table[row].values())).results[0]["settings"]
            # The names of the rows contain all other settings; model_name_or_path is a folder.
            hidden = set(AS_IN_PAPER) - {"model_name_or_path"}
            differing = {name: value for name, value in settings.items() if measured.get(name) != value}
            changed[row] = [f"{name} {value}" for name, value in differing.items() if name in hidden]
    missing = [f"{row} with {', '.join(differing)}" for row, differing in changed.items() if differing]
    for row, seeds in wanted.items():
        left = seeds - set(next(iter(table[row].values())).by_seed()) if row in table else seeds
        names = ", ".join(str(seed) for seed in sorted(left - {None}))
        if left:
            missing.append(f"{row} (seed {names})" if row in table and names else row)
    return missing


def _results_table(table: Table, conditions: list[str], figures: dict[str, dict], shown: list[str]) -> str:
    header = ["", "parameters", "seeds", *(["single seeds"] if _seeds_differ(table) else [])]
    for column in conditions:
        header += [column, *(["paper"] if column in shown else [])]
    rows = []
    for row, cells in table.items():
        some = next(iter(cells.values()))
        parameters, by_seed = some.results[0]["train_metrics"].get("parameters"), some.by_seed()
        line = [row, f"{parameters:,}" if parameters else "", str(len(by_seed))]
        if _seeds_differ(table):
            form = "{:.1%}" if some.metric() == "eval_accuracy" else "{:.3f}"
            line.append(", ".join(form.format(value).rstrip("%") for value in by_seed.values()))
        for column in conditions:
            line.append(str(cells[column]) if column in cells else "not measured")
            if column in shown:
                line.append(str(figures.get(row, {}).get(column, "–")))
        rows.append(line)
    return markdown(header, rows, "---:")


def _seeds_differ(table: Table) -> bool:
    return any(len(cell.by_seed()) > 1 for cells in table.values() for cell in cells.values())


def _about(results: list[dict[str, Any]], common: list[str]) -> str:
    """Model, data and machine, from the records of the first run."""
    first = results[0]
    model, training = (first["run"].get(key, {}) for key in ("model", "training"))
    model = model.get("backbone_config") or model
    epochs, trained = _epochs(first), first["train_metrics"]
    examples = trained.get("train_samples_per_second", 0) * trained.get("train_runtime", 0) / (epochs or 1)
    # The recorded time of a resumed run covers only its last part.
    examples = first["run"].get("examples", {}).get("train", {}).get("samples", examples)
    processes = first["environment"].get("world_size", 1)
    batch = training.get("per_device_train_batch_size", 0) * training.get("gradient_accumulation_steps", 1) * processes
    seeds = sorted({result["settings"].get("seed", training.get("seed", 0)) for result in results})
    libraries = first["environment"].get("libraries", {})
    parts = [
        f"{_count(model.get('num_hidden_layers', 12), 'layer')} of {model.get('hidden_size', 768)} channels",
        *common,
        f"{_count(epochs, 'epoch')} of {round(examples):,} examples in batches of {batch}",
        f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}",
        f"evaluated on {first['metrics']['eval_samples']:,} examples",
        f"{first['environment'].get('accelerator') or first['environment'].get('device', '')}, "
        f"torch {libraries.get('torch')}, transformers {libraries.get('transformers')}",
    ]
    return f"Ours: {'; '.join(parts)}."


def _epochs(result: dict[str, Any]) -> float:
    return result["run"].get("training", {}).get("num_train_epochs", 0)


def _count(number: float, noun: str) -> str:
    return f"{number:g} {noun}{'' if number == 1 else 's'}"


def _is_mini(result: dict[str, Any]) -> bool:
    return "--mini" in result.get("command", ()) or any(flag.endswith("_mini.yaml") for flag in result["flags"][:1])


def _command(folder: str, result: dict[str, Any]) -> str:
    """The command that ran the sweep. Files outside the repository are named without their folders."""
    if "command" in result:
        return f"    {shlex.join(['python', 'training/evaluate_sweep.py', *result['command']])}"
    # Older results lack the command. The passed flags are between the recipe and the flags of the sweep, two words for
    # every setting and for do_eval.
    passed = result["flags"][1 : -2 * (len(result["settings"]) + 1)]
    mini = ["--mini"] if _is_mini(result) else []
    words = ["python", "training/evaluate_sweep.py", f"training/sweeps/{result['sweep']}.yaml", *mini]
    return f"    {shlex.join([*words, '--output_dir', f'outputs/{folder}', *passed])}"


def _drops(table: Table, conditions: list[str], figures: dict[str, dict]) -> str | None:
    """(before − after) / before for evaluations with shuffled patches or frames, as in LieRE's Table 5."""
    shuffles = [column for column in conditions if "evaluation_shuffle" in column]
    if not shuffles or AS_TRAINED not in conditions:
        return None

    def drop(row: dict[str, Any], column: str, value) -> str:
        if AS_TRAINED not in row or column not in row or not (before := value(row[AS_TRAINED])):
            return "–"
        return f"{100 * (before - value(row[column])) / before:.1f}%".replace("-", "−")

    header, rows = [""], [[row] for row in table]
    for column in shuffles:
        header += [column, "paper"]
        for line, (row, cells) in zip(rows, table.items()):
            of_paper = {name: float(str(value).split()[0]) for name, value in figures.get(row, {}).items()}
            line += [drop(cells, column, lambda cell: cell.interval.mean), drop(of_paper, column, float)]
    return markdown(header, rows, "---:")


UNKNOWN = object()


@dataclass(frozen=True)
class Pairing:
    """
    Tests of rows against the row that differs only in having the `reference` value of a setting. Rows whose value is
    unknown are skipped.

    Attributes:
        default: The value of an unstated setting, by the row's encoding, if any.
        beside: Related settings that may differ too.
    """

    setting: str
    reference: object
    default: Callable[[EncodingTraits | None], object] = lambda traits: UNKNOWN
    beside: tuple[str, ...] = ()

    def rows(self, table: Table) -> dict[str, str]:
        """The reference of every row that has one."""
        references: dict[str, str] = {}
        others: dict[str, str] = {}
        for row, cells in table.items():
            settings = dict(next(iter(cells.values())).results[0]["settings"])
            default = self.default(ENCODING_TRAITS.get(settings.get("position_encoding")))
            value = settings.pop(self.setting, default)
            if value is UNKNOWN:
                continue
            for name in (*SEEDS, *self.beside):
                settings.pop(name, None)
            rest = json.dumps(settings, sort_keys=True)
            if value == self.reference:
                references[rest] = row
            else:
                others[row] = rest
        return {row: references[rest] for row, rest in others.items() if rest in references}


# Tests in addition to those against the baselines, by their titles.
PAIRINGS = {
    "Images at their own aspect ratios against the same model of images squeezed into squares, in points:": Pairing(
        "max_num_patches", None, lambda traits: None
    ),
    "Coordinates against `index`, with the same encoding, in points:": Pairing(
        "coordinates",
        "index",
        lambda traits: traits.coordinates if traits else UNKNOWN,
        # The scale of the initial generators depends on the unit of the coordinates.
        beside=("rotary_init_scale",),
    ),
    "`rotary_init_scale` against 1, with the same encoding, in points:": Pairing("rotary_init_scale", 1.0),
    "Rotated class tokens against class tokens that are not rotated, with the same encoding, in points:": Pairing(
        "rotate_prefix", False
    ),
    "Pooling against the class token, with the same encoding, in points:": Pairing("pooling", "cls"),
    "Perturbation against none, with the same encoding, in points:": Pairing("position_perturbation", 0.0),
}


def _peaks(table: Table, papers: dict[str, Any]) -> str | None:
    """The highest accuracy of all epochs, as in LieRE's Figure 4, beside the last."""
    rows = []
    for row, cells in table.items():
        runs = [result["history"] for result in next(iter(cells.values())).results]
        if all(runs):
            highest = [max(accuracy for _, accuracy in run) for run in runs]
            last = [run[-1][1] for run in runs]
            rows.append([row, *(f"{100 * np.mean(values):.1f}" for values in (highest, last))])
    return markdown(["", "highest of all epochs", "last epoch"], rows, "---:") if rows else None


def _losses(table: Table, papers: dict[str, Any]) -> str | None:
    """Cross entropies with the means of the runs' intervals, as in LieRE's Table 9."""
    return _means(table, papers, "eval_loss", "loss")


def _balanced(table: Table, papers: dict[str, Any]) -> str | None:
    """Balanced accuracies with the means of the runs' intervals."""
    return _means(table, papers, "eval_balanced_accuracy", "balanced accuracy")


def _means(table: Table, papers: dict[str, Any], metric: str, title: str) -> str | None:
    header, rows = ["", title, *(["paper"] if papers else [])], []
    for row, cells in table.items():
        metrics = [result["metrics"] for result in next(iter(cells.values())).results]
        names = (metric, f"{metric}_low", f"{metric}_high")
        if all(name in some for some in metrics for name in names):
            mean, low, high = (np.mean([some[name] for some in metrics]) for name in names)
            rows.append([row, f"{mean:.3f} ({low:.3f} – {high:.3f})", *([str(papers.get(row, "–"))] if papers else [])])
    return markdown(header, rows, "---:") if rows else None


def _precisions(table: Table, papers: dict[str, list[float]]) -> str | None:
    """COCO's average precisions in percent, as in ComRoPE's Table 2, without sizes that no object has."""
    names = ("map", "map_50", "map_75", "map_small", "map_medium", "map_large")
    some = [result["metrics"] for cells in table.values() for cell in cells.values() for result in cell.results]
    shown = [index for index, name in enumerate(names) if any(f"eval_{name}" in metrics for metrics in some)]
    header, rows = [""], []
    for index in shown:
        header += [("AP", "AP50", "AP75", "APs", "APm", "APl")[index], *(["paper"] if papers else [])]
    for row, cells in table.items():
        line = [row]
        for index in shown:
            results = next(iter(cells.values())).results
            values = [metrics[f"eval_{names[index]}"] for metrics in (result["metrics"] for result in results)]
            line.append(f"{100 * np.mean(values):.1f}")
            if papers:
                line.append(str(papers[row][index]) if row in papers else "–")
        rows.append(line)
    return markdown(header, rows, "---:") if shown else None


FURTHER_TABLES = {
    "epochs": (
        "Epochs until the accuracy that Absolute has at the end:",
        lambda table, _: _epochs_to_baseline(table, True),
    ),
    "peak": ("Accuracies of epochs, means over seeds:", _peaks),
    "losses": ("Losses of the evaluation:", _losses),
    "precisions": ("Average precisions, means over seeds:", _precisions),
    "balanced": ("Means of the accuracies of both classes, one half for a constant answer:", _balanced),
}


def _tests(table: Table, references: dict[str, str], conditions: list[str]) -> str | None:
    """Paired tests of rows against their references under every condition, corrected for the number of tests."""
    tests = {
        (row, column): test
        for row, against in references.items()
        for column in conditions
        if (test := _test(table[against].get(column), table[row].get(column))) is not None
    }
    corrected = dict(zip(tests, holm([test.p_value for test in tests.values()])))
    rows = [
        [row, *(_format_test(tests.get((row, column)), corrected.get((row, column))) for column in conditions)]
        for row in references
        if any((row, column) in tests for column in conditions)
    ]
    return markdown(["", *conditions], rows, "---:") if rows else None


def _test(base: Cell | None, other: Cell | None) -> PairedTest | None:
    """A test over seeds if both have the same seeds and enough of them; else over examples if both stored the same."""
    if base is None or other is None:
        return None
    seeds = [cell.by_seed() for cell in (base, other)]
    if set(seeds[0]) == set(seeds[1]) and len(seeds[0]) >= SEEDS_TO_TEST:
        return paired_test_over_seeds(*(np.array([some[seed] for seed in sorted(seeds[0])]) for some in seeds))
    examples = [cell.correct() for cell in (base, other)]
    if any(some is None for some in examples) or examples[0].shape[1] != examples[1].shape[1]:
        return None
    return paired_test(*examples)


def _format_test(test: PairedTest | None, corrected: float | None) -> str:
    if test is None:
        return "–"
    bounds = (100 * value for value in (test.difference.mean, test.difference.low, test.difference.high))
    mean, low, high = (f"{value:+.1f}".replace("-", "−") for value in bounds)
    statistic = f"{test.statistic:+.2f}".replace("-", "−")
    return f"{mean} ({low} – {high}), statistic {statistic}, p {_p_value(test.p_value)}, Holm {_p_value(corrected)}"


def _p_value(value: float) -> str:
    return f"= {value:.2g}" if value >= 1e-99 else "< 1e-99"


def _epochs_to_baseline(table: Table, is_accuracy: bool) -> str | None:
    """
    The epochs after which each model reaches Absolute's last accuracy, as in LieRE's Figure 9, or its highest mAP, as
    in ComRoPE's Figure 4, which counts iterations of equal batches.
    """
    histories = {}
    for row, cells in table.items():
        runs = [dict(map(tuple, result["history"])) for result in next(iter(cells.values())).results]
        epochs = sorted(set.intersection(*(set(run) for run in runs)))
        if len(epochs) > 1:
            histories[row] = [(epoch, float(np.mean([run[epoch] for run in runs]))) for epoch in epochs]
    if len(histories) < 2 or "Absolute" not in histories:
        return None
    last, goal = histories["Absolute"][-1] if is_accuracy else max(histories["Absolute"], key=lambda point: point[1])
    rows = []
    for row, history in histories.items():
        reached = next((epoch for epoch, value in history if value >= goal), None)
        fewer = "–"
        if reached:
            fewer = f"{last / reached:.1f}×" if is_accuracy else f"{100 * (1 - reached / last):.0f}%".replace("-", "−")
        rows.append([row, "never" if reached is None else f"{reached:g}", fewer])
    return markdown(["", "epochs", "fewer than Absolute's"], rows, "---:")
