"""Trains the same recipe in several settings and evaluates every model under several conditions.

A sweep is a yaml file in training/sweeps, one per figure or table of the papers:

    python training/evaluate_sweep.py training/sweeps/block_size.yaml --output_dir outputs/cifar100 \
        --train_files train.parquet --validation_files test.parquet
    python training/evaluate_sweep.py training/sweeps/shuffling.yaml --mini --output_dir outputs/cifar10 …
    torchrun --nproc_per_node 8 training/evaluate_sweep.py …

All other flags are passed to every run; `--recipe` replaces the sweep's recipe. Results are json lines in
output_dir/<sweep>.jsonl (training/reporting/result_lines.py), which training/report.py compares with the papers'
figures. An interrupted sweep resumes when started again, and sweeps that share models in one output directory train
them once. `--dry_run` only lists the runs.

A sweep names its `script` and `recipe`. `train` contains lists of settings, all of whose combinations are trained, and
`evaluate` lists of conditions, all of whose combinations are evaluated. `report` names further tables: the `peak` over
the epochs, `losses`, COCO's average `precisions`, and the `balanced` accuracy of two classes. `compare`, `chance` and
`solved_at` say what the report tests (training/README.md). `after` names a sweep that is run first, in a folder of that
name in output_dir; `model_name_or_path` then names folders in there. `mini` replaces any of these for a small computer.
"""

import argparse
import sys
from pathlib import Path


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from accelerate import PartialState

from training.common.arguments import launched_on_cpus
from training.common.records import remove_private
from training.engine.runs import start
from training.reporting.result_lines import write_results
from training.reporting.sweeps import build_flags, combinations, read_sweep, slug, train_and_evaluate


def main(arguments: list[str] | None = None) -> Path:
    """Runs a sweep; returns the file of its results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("sweep", type=Path, help="yaml file")
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--mini", action="store_true", help="the sweep's small version")
    parser.add_argument("--recipe", help="instead of the sweep's")
    parser.add_argument("--dry_run", action="store_true", help="list the runs only")
    arguments = sys.argv[1:] if arguments is None else arguments
    given, passed = parser.parse_known_args(arguments)
    # Created before a script creates it, so that the processes are connected from the start.
    if not given.dry_run:
        PartialState(cpu=launched_on_cpus())
    return run_sweep(given, passed, given.sweep, given.output_dir, remove_private(arguments))


def run_sweep(given: argparse.Namespace, passed: list[str], file: Path, output_dir: Path, command: list[str]) -> Path:
    """Runs a sweep after the one whose models it starts from, if any; returns the file of its results."""
    sweep = read_sweep(file, given.mini)
    if given.recipe and file == given.sweep:
        sweep["recipe"] = given.recipe
    if "after" in sweep:
        run_sweep(given, passed, file.with_name(f"{sweep['after']}.yaml"), output_dir / sweep["after"], command)
    # Every run with the conditions of its evaluations, in order.
    runs = [(settings, combinations(sweep.get("evaluate", []))) for settings in combinations(sweep["train"])]
    if given.dry_run:
        for settings, conditions in runs:
            flags = build_flags(sweep, settings, passed, output_dir)
            print(" ".join(flags), f"  # evaluated under {len(conditions)} conditions")
        return output_dir
    results_file = output_dir / f"{file.stem}.jsonl"
    results = []
    for number, (settings, conditions) in enumerate(runs, 1):
        if PartialState().is_main_process:
            print(f"[{number}/{len(runs)}] {slug(settings) or 'the recipe as it is'}", flush=True)
        made = train_and_evaluate(sweep, file.stem, settings, conditions, passed, output_dir)
        results += [{**result, "command": command} for result in made]
        if PartialState().is_main_process:
            write_results(results_file, results)
    return results_file


if __name__ == "__main__":
    start(lambda: print(f"Results: {main()}"))
