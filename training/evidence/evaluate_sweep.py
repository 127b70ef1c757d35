"""Trains the same recipe in several settings and evaluates every model under several conditions.

A sweep is a yaml file in training/evidence/sweeps, one per figure or table of the papers:

    python training/evidence/evaluate_sweep.py training/evidence/sweeps/block_size.yaml --output_dir outputs/cifar100 \
        --train_files train.parquet --validation_files test.parquet
    python training/evidence/evaluate_sweep.py training/evidence/sweeps/shuffling.yaml --mini --output_dir outputs …
    torchrun --nproc_per_node 8 training/evidence/evaluate_sweep.py …

All other flags are passed to every run; `--recipe` replaces the sweep's recipe. Results are json lines in
output_dir/<sweep>.jsonl (reporting/result_lines.py), which report.py compares with the papers' figures. An interrupted
sweep resumes when started again, and sweeps that share models in one output directory train them once. Processes on
several cores or GPUs share a sweep with `--part 1/2`, `--part 2/2`. `--stored` names results of this sweep, such as
those in `results/`, or of another one, whose runs are not repeated: only seeds and settings that they lack are trained.
`--seeds 20` trains seeds 0 … 19 of every model. `--dry_run` only lists the runs.

A sweep names its `script` and `recipe`. `train` contains lists of settings, all of whose combinations are trained, by
another script if `script` is among them, and `evaluate` lists of conditions, all of whose combinations are evaluated; a
condition with `rows` only for models with some of these settings. `report` names further tables: the `peak` over the
epochs, `losses`, COCO's average `precisions`, and the `balanced` accuracy of two classes. `compare`, `chance`,
`solved_at`, `paired` and `groups` say what the report tests (training/README.md); `title` names the sweep, and `label`
in an entry of `train` its settings, for readers of reports and pictures. `after` names a sweep that is run first, in a
folder of that name in output_dir; `model_name_or_path` then names folders in there. `mini` replaces any of these for a
small computer.
"""

import argparse
import re
import shutil
import sys
from pathlib import Path
from typing import Any


sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from accelerate import PartialState

from hf_liere.errors import InputError
from training.common.arguments import launched_on_cpus
from training.common.records import remove_private
from training.engine.runs import start
from training.evidence.reporting.result_lines import read_results, write_results
from training.evidence.reporting.sweeps import (
    TRAINING,
    Run,
    combinations,
    read_sweep,
    require_packages,
    slug,
    with_seeds,
)


def main(arguments: list[str] | None = None) -> Path:
    """Runs a sweep; returns the file of its results."""
    share = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    share.add_argument(
        "--part", type=part_of, default=(1, 1), metavar="K/N", help="the K-th of every N runs, beside other processes"
    )
    share.add_argument("--stored", type=Path, metavar="FILE", help="json lines whose runs are finished")
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        parents=[share],
    )
    parser.add_argument("sweep", type=Path, help="yaml file")
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--mini", action="store_true", help="the sweep's small version")
    parser.add_argument("--recipe", help="instead of the sweep's")
    parser.add_argument(
        "--seeds", type=int, metavar="N", help="seeds 0 … N − 1 of every model, instead of the sweep's own"
    )
    parser.add_argument("--dry_run", action="store_true", help="list the runs only")
    arguments = sys.argv[1:] if arguments is None else arguments
    given, passed = parser.parse_known_args(arguments)
    # Created before a script creates it, so that the processes are connected from the start.
    if not given.dry_run:
        PartialState(cpu=launched_on_cpus())
    # What repeats a result does not depend on who shared the work, and when.
    command = remove_private(share.parse_known_args(arguments)[1])
    return run_sweep(given, passed, given.sweep, given.output_dir, command)


def run_sweep(given: argparse.Namespace, passed: list[str], file: Path, output_dir: Path, command: list[str]) -> Path:
    """Runs a sweep after the one whose models it starts from, if any; returns the file of its results."""
    sweep = with_seeds(read_sweep(file, given.mini), given.seeds)
    if given.recipe and file == given.sweep:
        sweep["recipe"] = given.recipe
    if "after" in sweep and given.part != (1, 1):
        raise InputError(
            f"--part: {file.name} starts from the models of {sweep['after']}, which one process trains; accepted: "
            "without --part."
        )
    if "after" in sweep:
        run_sweep(given, passed, file.with_name(f"{sweep['after']}.yaml"), output_dir / sweep["after"], command)
    runs = [Run(sweep, settings, passed, output_dir) for settings in combinations(sweep["train"])]
    lines = read_results(given.stored) if given.stored and file == given.sweep else []
    stored = [run.pick_stored(lines) for run in runs]
    part, parts = given.part
    mine = [run for run, finished in zip(runs, stored) if not finished][part - 1 :: parts]
    if given.dry_run:
        for run in mine:
            print(" ".join(run.flags), f"  # evaluated under {len(run.conditions)} conditions")
        return output_dir
    require_packages(mine)
    results_file = output_dir / f"{file.stem}.jsonl"
    if PartialState().is_main_process and file.resolve().parent != TRAINING / "evidence" / "sweeps":
        # The report reads what a file of the user's compares.
        output_dir.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, results_file.with_suffix(".yaml"))
    for number, run in enumerate(mine, 1):
        if PartialState().is_main_process:
            print(f"[{number}/{len(mine)}] {slug(run.settings) or 'the recipe as it is'}", flush=True)
        run.train_and_evaluate()
        collect(results_file, runs, stored, command)
    if not mine:
        collect(results_file, runs, stored, command)
    return results_file


def collect(path: Path, runs: list[Run], stored: list[list[dict[str, Any]]], command: list[str]) -> None:
    """Writes the results of the runs that have finished, in any process, or are stored."""
    if not PartialState().is_main_process:
        return
    results = [result for run, finished in zip(runs, stored) for result in finished or run.read(path.stem)]
    write_results(path, [{**result, "sweep": path.stem, "command": command} for result in results])


def part_of(text: str) -> tuple[int, int]:
    """Reads K/N, the K-th of N parts."""
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    part, parts = map(int, match.groups()) if match else (0, 0)
    if not 1 <= part <= parts:
        raise argparse.ArgumentTypeError(f"{text!r}; accepted: K/N with K from 1 to N, such as 1/2")
    return part, parts


def run_and_tell() -> None:
    results = main()
    if results.is_file():
        print(f"Results: {results}")
        print(f"Report:  python training/evidence/report.py {results} --output_dir {results.with_name('report')}")


if __name__ == "__main__":
    start(run_and_tell)
