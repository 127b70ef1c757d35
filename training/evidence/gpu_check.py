"""Checks that need a GPU, in one report to send back.

    python training/evidence/gpu_check.py --minutes 10                      # or: make gpu
    python training/evidence/gpu_check.py --sections attention compilation  # these again, in the same report
    python training/evidence/gpu_check.py --device cpu                      # small models, without a GPU
    python training/evidence/gpu_check.py --show --output FILE.md           # goals and tables of FILE.jsonl

Sections run in order of worth: first whether kernels, rotations and gradients are right, then the models that the goals
name, patched models beside LoRA, and CUDA graphs; then everything else. Each runs in a separate process, so that the
others run even if one fails. The report contains its message.

Every model that was measured is a line of the record beside the report, `gpu_check.jsonl`, at once: whatever ends the
check, `--resume` goes on with the next model, and with the sections that have not passed. The report is written after
every section. Its first table names the page to which the text of each section belongs. Report and record contain no
tokens, user name or host name, and the report shows the home directory as ~. `device_speed.py` makes the table of
speed_tables.md from records in training/evidence/speed/records/gpu_*.jsonl.
"""

import argparse
import math
import sys
import time
from pathlib import Path


sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from hf_liere.errors import InputError
from training.evidence.gpu.processes import run_section
from training.evidence.gpu.record import comparison_tables, goals_table, open_record
from training.evidence.gpu.report import Report, heading
from training.evidence.gpu.sections import SECTIONS, Settings
from training.evidence.speed.measurements import read_lines
from training.evidence.speed.models import BenchmarkError


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("outputs") / "gpu_check.md", help="%(default)s")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="%(default)s; cpu implies --quick")
    parser.add_argument("--quick", action="store_true", help="small models and few repetitions")
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, metavar="NAME", help=f"of: {', '.join(SECTIONS)}")
    parser.add_argument("--resume", action="store_true", help="go on with a report that exists")
    parser.add_argument("--show", action="store_true", help="run nothing; print the tables of a record that exists")
    parser.add_argument("--minutes", type=float, help="measure nothing after that (no limit)")
    parser.add_argument("--time_limit", type=int, default=7200, metavar="SECONDS", help="of a section (%(default)s)")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """
    Returns:
        0, 1 if a section did not pass, or 130 after an interruption.

    Raises:
        InputError: if there is no GPU, or a report exists that is not resumed or is of another machine or other code.
    """
    options = parse_arguments(arguments)
    record = options.output.with_suffix(".jsonl")
    if options.show:
        lines = read_lines(record)
        print(f"{goals_table(lines)}\n\n{comparison_tables(lines)}")
        return 0
    if options.device == "cuda" and not torch.cuda.is_available():
        raise InputError(
            f"torch {torch.__version__} finds no CUDA GPU. Accepted: a machine with one, and --device cpu, which runs "
            "everything with small models."
        )
    end = time.time() + 60 * (math.inf if options.minutes is None else options.minutes)
    settings = Settings(options.device, options.quick or options.device == "cpu", record.resolve(), end)
    go_on = options.resume or options.sections is not None
    report = Report(options.output, heading(settings), go_on)
    open_record(settings, go_on)
    names = options.sections or [name for name in SECTIONS if not report.passed(name)]
    for number, name in enumerate(names, 1):
        if time.time() > end and number > 1:
            print(f"{options.minutes:g} minutes are over; go on with --resume --output {options.output}")
            break
        print(f"[{number}/{len(names)}] {name}: {SECTIONS[name].__doc__.splitlines()[0]}", flush=True)
        section = run_section(name, settings, options.time_limit)
        open_record(settings, go_on=True)
        settings.add(section=name, outcome=section.outcome, duration=section.seconds)
        report.add(section, settings.lines())
        print(f"      {section.outcome} in {section.seconds:.0f} s", flush=True)
        if section.outcome == "interrupted":
            print(f"Interrupted; go on with --resume --output {options.output}")
            return 130
    print(f"\n{goals_table(settings.lines())}\n")
    failed = [name for name in SECTIONS if not report.passed(name)]
    unfinished = f" (not passed: {', '.join(failed)})" if failed else ""
    print(f"Report: {options.output}{unfinished}. Its first table names the page to which each section belongs.")
    return int(any(name in failed for name in names))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (InputError, BenchmarkError) as error:
        sys.exit(f"error: {error}")
