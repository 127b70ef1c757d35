"""What a report says of a sweep: a table beside the paper's figures, tests between models, and what is missing."""

import shlex
from typing import Any

import numpy as np

from training.reporting.markdown import markdown
from training.reporting.result_table import AS_TRAINED, Cell, Table, method, told_apart_by, without
from training.reporting.significance import PairedTest, holm, paired_test, paired_test_over_seeds
from training.reporting.sweeps import TRAINING, as_flags, combinations, read_sweep


# How the names of rows of images at their own aspect ratios go on.
NATIVE = "max_num_patches "
# From so many seeds on, tests are over seeds: fewer have almost no power.
SEEDS_TO_TEST = 5


def title_of(folder: str, results: list[dict[str, Any]], table: Table, common: list[str]) -> str:
    numbers = sorted({len(next(iter(cells.values())).by_seed()) for cells in table.values()})
    seeds = "1 seed" if numbers == [1] else f"{' or '.join(map(str, numbers))} seeds"
    epochs, examples = _epochs(results[0]), results[0]["metrics"]["eval_samples"]
    budget = "".join(f"{part}, " for part in common) + f"{_count(epochs, 'epoch')}, {seeds}, {examples:,} examples"
    return f"{folder}: {results[0]['sweep']} ({budget})"


def section(folder: str, results: list[dict[str, Any]], table: Table, paper: dict[str, Any], common: list[str]) -> str:
    """Everything about one sweep, as markdown; what all its models have in `common` stands above the table."""
    lines = [f"## {folder}: {results[0]['sweep']}", _about(results, common), _command(folder, results[0])]
    conditions = list(dict.fromkeys(column for cells in table.values() for column in cells))
    papers = {
        without(row, common): cells
        for row, cells in paper.get("rows", {}).items()
        if set(common) <= set(row.split(", "))
    }
    figures = {row: cells for row, cells in papers.items() if row in table}
    shown = [column for column in conditions if any(column in row for row in figures.values())]
    if shown:
        lines.append(f"The paper: {' '.join(paper['about'].split())}")
    if shown and _is_mini(results[0]):
        lines[-1] += " Other data, models and budgets than ours: compare the order of the rows, not the figures."
    lines.append(_results_table(table, conditions, figures, shown))
    if missing := _not_measured(results, table, common):
        lines.append(f"Not measured yet: {'; '.join(missing)}.")
    first = next(iter(table.values()))
    is_accuracy = next(iter(first.values())).metric() == "eval_accuracy"
    if drops := _drops(table, conditions, figures):
        lines += ["Relative loss of accuracy under the condition:", drops]
    if is_accuracy and (pairs := _squeezed(table)) and (tests := _tests(table, pairs, conditions)):
        lines += [
            "Images at their own aspect ratios against the same model of images squeezed into squares, in points:",
            tests,
        ]
    references = [next((row for row in table if row.startswith("Absolute")), next(iter(table)))]
    references += [row for row in table if row.startswith("RoPE-Mixed")][:1]
    for against in dict.fromkeys(references if is_accuracy else []):
        if tests := _tests(table, {row: against for row in table if row != against}, conditions):
            lines += [f"Against {against}, in points:", tests]
    if is_accuracy and conditions == [AS_TRAINED] and (reached := _epochs_to_baseline(table)):
        lines += ["Epochs until the accuracy that Absolute has at the end:", reached]
    return "\n\n".join(lines)


def _not_measured(results: list[dict[str, Any]], table: Table, common: list[str]) -> list[str]:
    """Models of the sweep's file that are not among the results, and seeds of those that are."""
    file = TRAINING / "sweeps" / f"{results[0]['sweep']}.yaml"
    if not file.is_file():
        return []
    sweep = read_sweep(file, _is_mini(results[0]))
    wanted: dict[str, set] = {}
    trained = combinations(sweep["train"])
    shown = told_apart_by(trained, sweep["script"])
    for settings in trained:
        wanted.setdefault(without(method(settings, sweep["script"], shown), common), set()).add(settings.get("seed"))
    missing = []
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
    """What was measured on what, from the records of the first run."""
    first = results[0]
    model, training = (first["run"].get(key, {}) for key in ("model", "training"))
    model = model.get("backbone_config") or model
    epochs, trained = _epochs(first), first["train_metrics"]
    examples = trained.get("train_samples_per_second", 0) * trained.get("train_runtime", 0) / (epochs or 1)
    processes = first["environment"].get("world_size", 1)
    batch = training.get("per_device_train_batch_size", 0) * training.get("gradient_accumulation_steps", 1) * processes
    seeds = sorted({result["settings"].get("seed", training.get("seed", 0)) for result in results})
    libraries = first["environment"].get("libraries", {})
    parts = [
        f"{model.get('num_hidden_layers', 12)} layers of {model.get('hidden_size', 768)} channels",
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
    """The command that ran the sweep; files outside of the repository are named without their folders."""
    if "command" in result:
        return f"    {shlex.join(['python', 'training/evaluate_sweep.py', *result['command']])}"
    # Older results do not hold the command. What was passed stands between the recipe and what the sweep sets.
    passed = result["flags"][1 : -len(as_flags({**result["settings"], "do_eval": True}))]
    mini = ["--mini"] if _is_mini(result) else []
    words = ["python", "training/evaluate_sweep.py", f"training/sweeps/{result['sweep']}.yaml", *mini]
    return f"    {shlex.join([*words, '--output_dir', f'outputs/{folder}', *passed])}"


def _drops(table: Table, conditions: list[str], figures: dict[str, dict]) -> str | None:
    """As LieRE's Table 5: (before − after) / before, for evaluations with shuffled patches or frames."""
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


def _squeezed(table: Table) -> dict[str, str]:
    """For every row of images at their own aspect ratios the row that differs in that only."""
    parts = {row: row.split(", ") for row in table}
    plain = {row: ", ".join(part for part in some if not part.startswith(NATIVE)) for row, some in parts.items()}
    return {row: other for row, other in plain.items() if row != other and other in table}


def _tests(table: Table, references: dict[str, str], conditions: list[str]) -> str | None:
    """Paired tests of rows, each against another one, under every condition, corrected for the number of all."""
    tests = {
        (row, column): test
        for row, against in references.items()
        for column in conditions
        if (test := _test(table[against].get(column), table[row].get(column))) is not None
    }
    corrected = dict(zip(tests, holm([test.p_value for test in tests.values()])))
    rows = [
        [row, *(_shown(tests.get((row, column)), corrected.get((row, column))) for column in conditions)]
        for row in references
        if any((row, column) in tests for column in conditions)
    ]
    return markdown(["", *conditions], rows, "---:") if rows else None


def _test(base: Cell | None, other: Cell | None) -> PairedTest | None:
    """Over seeds where both have the same, enough of them; else over examples, if both kept the same."""
    if base is None or other is None:
        return None
    seeds = [cell.by_seed() for cell in (base, other)]
    if set(seeds[0]) == set(seeds[1]) and len(seeds[0]) >= SEEDS_TO_TEST:
        return paired_test_over_seeds(*(np.array([some[seed] for seed in sorted(seeds[0])]) for some in seeds))
    examples = [cell.correct() for cell in (base, other)]
    if any(some is None for some in examples) or examples[0].shape[1] != examples[1].shape[1]:
        return None
    return paired_test(*examples)


def _shown(test: PairedTest | None, corrected: float | None) -> str:
    if test is None:
        return "–"
    bounds = (100 * value for value in (test.difference.mean, test.difference.low, test.difference.high))
    mean, low, high = (f"{value:+.1f}".replace("-", "−") for value in bounds)
    return f"{mean} ({low} – {high}), p {_p_value(test.p_value)}, Holm {_p_value(corrected)}"


def _p_value(value: float) -> str:
    return f"= {value:.2g}" if value >= 1e-99 else "< 1e-99"


def _epochs_to_baseline(table: Table) -> str | None:
    """As in LieRE's Figure 9: the epochs after which each model reaches the final accuracy of Absolute."""
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
    return markdown(["", "epochs", "fewer than Absolute's"], rows, "---:")
