"""The tables of the papers at the papers' size, as many rows as the minutes of a GPU allow.

    python training/evidence/gpu_tables.py --minutes 30 --cifar100 TRAIN.parquet TEST.parquet
    python training/evidence/gpu_tables.py --minutes 30 --rows arrows_108 base-liere8   # a table, a row
    python training/evidence/gpu_tables.py --plan --rows arrows_108                     # measures only
    python training/evidence/gpu_tables.py --scale 0.01 --bf16 false …                  # small, on a CPU too

The rows are models of LieRE's Table 3 (arrows of 108 and 168 px, 800,000 images), Figure 4 at 20% of CIFAR-100, Tables
1, 5 and 9 (ViT-B) and 6 (ViT-Tiny), in order of worth. Without --cifar100 there are the arrows alone. Fifty steps of
every row are measured, once on a machine. Then it says which rows end within the minutes, trains these in this order,
and begins the first of the others. All other flags are passed to every run, such as `--torch_compile true`.

Whatever ends it, the same command goes on, at the last checkpoint of a row that was interrupted, and measures nothing
again. When the minutes are over, the row in training saves a checkpoint and stops. `outputs/gpu_tables/` then contains

- `gpu_tables.jsonl`: the machine, and a line for what was measured and one for every finished row, with its flags,
  resolved configuration, environment, accuracies by epoch, and evaluations as trained, with shuffled patches (Table 5)
  and at other sizes;
- `results/`: the same as results of sweeps, which `report.py` puts beside the papers' figures;
- `stored/`, a file of less than 16 MB a row: logits and weights in half precision, of large models the rotations'
  parameters alone;
- `runs/`: what unfinished rows go on from.
"""

import argparse
import gc
import math
import shutil
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path


sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from hf_liere.errors import InputError
from training.common.records import remove_private
from training.engine.runs import start
from training.engine.saving import StoppedError
from training.evidence.gpu.models import Settings
from training.evidence.gpu.privacy import describe_error
from training.evidence.gpu.record import header
from training.evidence.gpu.rows import (
    MEASURED_STEPS,
    TABLES,
    Row,
    fitting,
    measure,
    result,
    result_lines,
    rows_of,
    seconds_left,
    store,
)
from training.evidence.reporting.markdown import markdown
from training.evidence.reporting.result_lines import write_results
from training.evidence.reporting.sweeps import Run
from training.evidence.speed.measurements import Records
from training.evidence.speed.models import BenchmarkError


def main(arguments: list[str] | None = None) -> Path:
    """
    Returns:
        The record.

    Raises:
        InputError: if a row is unknown, or the record is of another machine, scale or code.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "--minutes", type=float, default=math.inf, help="until the last step; saving it takes seconds more (no limit)"
    )
    parser.add_argument("--rows", nargs="+", default=list(TABLES), metavar="NAME", help="tables and rows (all)")
    parser.add_argument("--cifar100", nargs=2, metavar=("TRAIN", "TEST"), help="parquet files")
    parser.add_argument("--scale", type=float, default=1.0, help="share of images and epochs; below 1 small models")
    parser.add_argument("--plan", action="store_true", help="measure only, and say what fits")
    parser.add_argument("--output_dir", type=Path, default=Path("outputs") / "gpu_tables", help="%(default)s")
    given, passed = parser.parse_known_args(arguments)
    tables = Tables(given, passed, time.time() + 60 * given.minutes)
    try:
        tables.measure_all()
        order = tables.plan()
        if not given.plan:
            tables.train(order)
    except StoppedError:
        if time.time() < tables.end:
            raise
    names = [row.name for row in tables.left]
    print(f"Not finished: {', '.join(names)}; the same command goes on." if names else "All rows have finished.")
    print(f"Report: python training/evidence/report.py {tables.folder}/results/*.jsonl --output_dir outputs/report")
    return tables.path


class Tables:
    """
    The rows that were asked for, their runs and their record.

    Args:
        end: When the minutes are over, by `time.time`.
    """

    def __init__(self, given: argparse.Namespace, passed: list[str], end: float):
        if not 0 < given.scale <= 1:
            raise InputError(f"--scale {given.scale}; accepted: above 0, up to 1.")
        self.folder, self.scale, self.end = given.output_dir, given.scale, end
        known = {row.name for row in rows_of(list(TABLES))}
        if unknown := set(given.rows) - known - set(TABLES):
            raise InputError(f"--rows {', '.join(sorted(unknown))}; accepted: {', '.join([*TABLES, *sorted(known)])}.")
        self.rows = [row for row in rows_of(given.rows) if given.cifar100 or row.draws_arrows]
        data = ["--train_files", given.cifar100[0], "--validation_files", given.cifar100[1]] if given.cifar100 else []
        self.runs = {row.name: row.run(self.folder / "runs" / row.name, data, given.scale, passed) for row in self.rows}
        self.path = self.folder / "gpu_tables.jsonl"
        device = "cuda" if torch.cuda.is_available() else "cpu"
        about = {**header(Settings(device, given.scale < 1)), "scale": given.scale, "flags": remove_private(passed)}
        try:
            self.records = Records(self.path, about, self.path.exists())
        except BenchmarkError as error:
            raise InputError(str(error).replace("--resume: ", "").replace("--output", "--output_dir")) from error

    def found(self, kind: str) -> dict[str, dict]:
        """The last line of this kind of every row."""
        return {line["row"]: line[kind] for line in self.records.lines if kind in line}

    @property
    def left(self) -> list[Row]:
        """The rows that have not finished."""
        finished = self.found("result")
        return [row for row in self.rows if row.name not in finished]

    def measure_all(self) -> None:
        """Measures the rows that were not measured here before, until those in front of a row fill the minutes."""
        place, steps = self.folder / "runs" / "measured", max(round(MEASURED_STEPS * self.scale**0.5), 2)
        taken = 0.0
        for row in self.left:
            if taken > self.end - time.time():
                break
            if row.name not in self.found("measured"):
                self.attempt(row, "measured", partial(measure, folder=place, steps=steps))
            taken += self.found("measured").get(row.name, {"whole": 0.0})["whole"]

    def plan(self) -> list[Row]:
        """Prints what the rows take; returns those that were measured, first those that end within the minutes."""
        known = self.found("measured")
        rows = [row for row in self.left if row.name in known]
        seconds = [seconds_left(self.runs[row.name], known[row.name]) for row in rows]
        fits = dict(zip([row.name for row in rows], fitting(seconds, self.end - time.time())))
        said = {
            row.name: [f"{1000 * known[row.name]['step']:.1f}", f"{one / 60:.1f}"] for row, one in zip(rows, seconds)
        }
        cells = [
            [
                row.name,
                row.table.title,
                *said.get(row.name, ["–", "not measured"]),
                "yes" if fits.get(row.name) else "no",
            ]
            for row in self.left
        ]
        print(markdown(["row", "in LieRE", "ms a step", "minutes", "fits"], cells), flush=True)
        return sorted(rows, key=lambda row: not fits[row.name])

    def train(self, rows: list[Row]) -> None:
        """Trains and evaluates rows until the minutes are over. One that fails leaves a line, and the next is tried."""
        self.keep()
        for number, row in enumerate(rows, 1):
            if time.time() > self.end:
                break
            print(f"[{number}/{len(rows)}] {row.name}", flush=True)
            self.attempt(row, "result", partial(finish, row, self.folder / "stored"))
            self.keep()

    def attempt(self, row: Row, kind: str, work: Callable[[Run], dict]) -> None:
        """Adds the line of a piece of work, or of why it failed; ends it when the minutes are over."""
        begin = time.time()
        try:
            with Alarm(self.end):
                done = {kind: work(self.runs[row.name])}
        except (RuntimeError, FloatingPointError) as error:
            done = {"failed": describe_error(error)}
            print(f"{row.name}: {done['failed']}", flush=True)
        # A row that failed, for want of memory perhaps, leaves nothing to the next.
        gc.collect()
        self.records.add(row=row.name, **done, seconds=round(time.time() - begin, 1))

    def keep(self) -> None:
        """Writes the results of finished rows as those of their sweeps, and deletes their runs."""
        sweeps: dict[str, list[dict]] = {}
        for name, found in self.found("result").items():
            sweeps.setdefault(found["first"]["sweep"], []).extend(result_lines(found))
            shutil.rmtree(self.folder / "runs" / name, ignore_errors=True)
        for name, lines in sweeps.items():
            write_results(self.folder / "results" / f"{name}.jsonl", lines)


def finish(row: Row, folder: Path, run: Run) -> dict:
    """Trains and evaluates a row, and stores its file in the folder; its line."""
    run.train_and_evaluate()
    size = store(run, folder / f"{row.name}.safetensors")
    return {**result(row, run), "bytes": size}


class Alarm:
    """
    Inside, SIGTERM comes when the minutes are over. A training saves a checkpoint and stops; anything else stops at
    once.
    """

    def __init__(self, end: float):
        self.end = end

    def __enter__(self) -> None:
        self.previous = signal.signal(signal.SIGTERM, _stop), signal.signal(signal.SIGALRM, _terminate)
        if self.end < math.inf:
            signal.setitimer(signal.ITIMER_REAL, max(self.end - time.time(), 1e-3))

    def __exit__(self, *_: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in zip((signal.SIGTERM, signal.SIGALRM), self.previous):
            signal.signal(number, handler)


def _stop(number: int, _: object) -> None:
    raise StoppedError(number)


def _terminate(*_: object) -> None:
    signal.raise_signal(signal.SIGTERM)


if __name__ == "__main__":
    start(main)
