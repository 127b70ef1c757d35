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
`solved_at` say what the report tests (training/README.md). `mini` replaces any of these for a small computer.
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
    sweep = read_sweep(given.sweep, given.mini)
    if given.recipe:
        sweep["recipe"] = given.recipe
    # Every run with the conditions of its evaluations, in order.
    runs = [(settings, combinations(sweep.get("evaluate", []))) for settings in combinations(sweep["train"])]
    if given.dry_run:
        for settings, conditions in runs:
            print(" ".join(build_flags(sweep, settings, passed)), f"  # evaluated under {len(conditions)} conditions")
        return given.output_dir
    # Created before a script creates it, so that the processes are connected from the start.
    PartialState(cpu=launched_on_cpus())
    results_file = given.output_dir / f"{given.sweep.stem}.jsonl"
    results = []
    for number, (settings, conditions) in enumerate(runs, 1):
        if PartialState().is_main_process:
            print(f"[{number}/{len(runs)}] {slug(settings) or 'the recipe as it is'}", flush=True)
        made = train_and_evaluate(sweep, given.sweep.stem, settings, conditions, passed, given.output_dir)
        results += [{**result, "command": remove_private(arguments)} for result in made]
        if PartialState().is_main_process:
            write_results(results_file, results)
    return results_file


if __name__ == "__main__":
    start(lambda: print(f"Results: {main()}"))
