"""Measures speed, memory and exactness of every encoding relative to learned absolute embeddings.

    python training/evidence/benchmark_speed.py --table added --folded --threads 1      # ViT-S/16, 224 px, batch 8
    python training/evidence/benchmark_speed.py --table growth --batch_size 1 --threads 1
    python training/evidence/benchmark_speed.py --model_size base --batch_size 256 --dtype bfloat16 --compile

`--table added` measures what an encoding adds to a step of `absolute` and nothing else: the rotations of all layers and
their application to query and key, in training with the backward pass, by the parts of the model itself. The added
share is the median over the rounds of its time divided by that of a whole step of `absolute` right before, with the 95%
interval of the median in brackets. The rounds of a share end when the interval is narrower than one percentage point
(of a share above 50%: than 2% of the share); of a share whose interval is wider, tables show the interval alone. If
an interval is wider than all differences between the shares, no table is printed. Inference keeps the rotations of a
grid from the pass before, except in compiled graphs; the first image of a size computes them.

Beside the shares are the limit and, as a check, the interval by which whole models differ. The limit is the time that
the bytes and products of the mathematics take at the bandwidth and the rates of products measured in the same run. In
short steps whole models differ by more than the share, because a rotation between other operations takes longer than
one after another rotation. `--table growth` shows how the shares change with batch size, resolution, depth, block size
and frames. Rows such as rope_mixed_by_timm are our model with the rotations of another package, where it is installed.
They have no limit; rope_1d_by_x_transformers has one axis, and those that learn no frequencies have fewer gradients.

`--table epochs` names the models of ComRoPE's Table 9 and prints what the paper does: minutes of a training epoch of
ImageNet-1k and seconds of its validation split, computed from the median times of steps on this machine, without
loading of data and without the optimizer's step.

`--table encodings` compares whole models, also with those of other code: naive models are the papers' pseudo-code, and
timm's have its own code throughout. All models are measured in turn, round after round, each right after `absolute`; a
ratio is the median over the rounds with its 95% interval (the range of fewer than six), and the row of `absolute` shows
the noise, which is often several percent. Memory is the peak of PyTorch's allocator in a training step: the model and
everything that the step allocates.

A training step is forward, loss and backward. The optimizer's step is excluded: it costs the same for every model and
would draw the ratios towards 1. On a machine with other work, `--clock cpu` compares processor time instead. Every
measurement is written to the output file immediately. Ctrl-C prints the tables of existing measurements, and `--resume`
with the same output continues, or prints the tables again.
"""

import argparse
import dataclasses
import gc
import signal
import sys
import time
from pathlib import Path


sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import transformers

from hf_liere.encoding.registration import import_file
from training.evidence.speed.clocks import CLOCKS
from training.evidence.speed.measurements import BASELINE, Case, Records, growth_cases
from training.evidence.speed.models import SIZES, BenchmarkError, Row, Settings, check_row
from training.evidence.speed.peers import PEERS
from training.evidence.speed.rounds import CaseRounds, Plan
from training.evidence.speed.runner import machine
from training.evidence.speed.tables import (
    contradictions,
    encodings_table,
    epochs_table,
    failures,
    growth_table,
    limits_table,
    noise,
    shares_table,
)


ENCODING_ROWS = "absolute none axial_rope golden_gate_rope rope_mixed comrope_ap8 comrope_ld8".split()
ENCODING_ROWS += "cayley_string circulant_string spherical_rope liere_product liere8 liere64".split()
ENCODING_ROWS += "centred_liere8 centred_liere64".split()
# The models of every table. naive_liere64 is measured only where --rows names it: a step takes minutes.
ROWS = {
    "encodings": [*ENCODING_ROWS, *"naive_liere8 naive_comrope_ld8 timm_absolute timm_rope_mixed".split()],
    # ComRoPE, Table 9.
    "epochs": "axial_rope liere8 comrope_ld4 comrope_ap4 comrope_ld8 comrope_ap8".split(),
    "added": [*ENCODING_ROWS, *PEERS],
    "growth": "absolute rope_mixed comrope_ld8 liere8 liere64".split(),
}
GROWTH_AXES = ("batch_size", "resolution", "depth", "block_size", "frames")
# These compare whole models.
WHOLE_TABLES = ("encodings", "epochs")


def parse_arguments(arguments: list[str] | None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", choices=ROWS, default="encodings")
    parser.add_argument("--rows", nargs="+", metavar="MODEL", help="models, such as liere64 naive_liere8 (all)")
    parser.add_argument("--register", action="append", default=[], metavar="FILE", help="registers encodings of yours")
    parser.add_argument("--axes", nargs="+", choices=GROWTH_AXES, default=GROWTH_AXES, help="what grows (everything)")
    parser.add_argument("--folded", action="store_true", help="also models with folded rotations, at inference")
    parser.add_argument("--model_size", choices=SIZES, default="small")
    parser.add_argument("--num_hidden_layers", type=int, help="another depth than the model size's")
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--image_size", type=int, default=224)
    parser.add_argument("--patch_size", type=int, default=16)
    parser.add_argument("--num_frames", type=int, help="video models, with this many frames")
    parser.add_argument("--device", help="such as cpu, cuda, cuda:1 (the accelerator, where there is one)")
    parser.add_argument("--dtype", choices=("float32", "float64", "bfloat16", "float16"), default="float32")
    parser.add_argument("--attn_implementation", default="sdpa")
    parser.add_argument("--compile", action="store_true", help="torch.compile every model")
    parser.add_argument("--rounds", type=int, help="at most (15 of whole models, 100 of added shares)")
    parser.add_argument("--whole_rounds", type=int, default=6, help="of whole models beside added shares (6)")
    parser.add_argument("--warmup", type=int, default=1, help="steps of each model before the first round (1)")
    parser.add_argument("--steps", type=int, help="steps per measurement (1 on CPU, 10 elsewhere)")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="of the ratios (wall); all are recorded")
    parser.add_argument("--threads", type=int, help="threads on CPU (PyTorch's choice)")
    parser.add_argument("--output", type=Path, help="json lines (outputs/speed-<time>.jsonl)")
    parser.add_argument("--resume", action="store_true", help="go on with an output that exists")
    options = parser.parse_args(arguments)
    try:
        for file in options.register:
            import_file(file)
    except ValueError as error:
        parser.error(f"--register: {error}")
    options.rounds = options.rounds if options.rounds is not None else 15 if options.table in WHOLE_TABLES else 100
    for name in ("batch_size", "image_size", "patch_size", "rounds"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} {getattr(options, name)}: accepted are 1 and more")
    return options


def read_rows(options) -> list[Row]:
    names = options.rows
    if names is None:
        rows = [row for row in map(Row.parse, ROWS[options.table]) if row.rotates or options.table != "added"]
        names = [row.name for row in rows if row.is_installed]
        if options.num_frames is not None:
            # A head of 64 channels cannot be divided among three axes.
            left_out = ("comrope_ap8", "spherical_rope")
            names = [row.name for row in rows if row.package is None and row.name not in left_out]
    if options.folded:
        names = [*names, *(f"folded_{row.name}" for row in map(Row.parse, names) if row.kind == "own" and row.learns)]
    rows = [Row.parse(name) for name in dict.fromkeys([BASELINE, *names])]
    for row in rows[1:]:
        if options.table not in WHOLE_TABLES and not row.rotates:
            raise BenchmarkError(
                f"{row.name}: --table {options.table} takes our models that rotate, such as rope_mixed, liere8 and "
                "folded_liere8; --table encodings compares all models."
            )
    return rows


def read_cases(options) -> list[Case]:
    given = {field.name: getattr(options, field.name) for field in dataclasses.fields(Settings)}
    given["num_hidden_layers"] = given["num_hidden_layers"] or SIZES[options.model_size]["num_hidden_layers"]
    if given["device"] is None:
        is_available = torch.accelerator.is_available()
        given["device"] = torch.accelerator.current_accelerator().type if is_available else "cpu"
    settings = Settings(**given)
    rows = read_rows(options)
    cases = [Case(settings, tuple(rows))]
    if options.table == "growth":
        cases = growth_cases(settings, rows, options.axes)
    for case in cases:
        for row in case.rows:
            check_row(case.settings, row)
    return cases


def read_plan(options, device: str) -> Plan:
    added = options.table not in WHOLE_TABLES
    whole_rounds = {"added": options.whole_rounds, "growth": 0}
    return Plan(
        whole_rounds=whole_rounds.get(options.table, options.rounds),
        added_rounds=options.rounds if added else 0,
        warmup=options.warmup,
        steps=options.steps or (1 if device == "cpu" else 10),
        clock=options.clock,
        errors=options.table == "encodings",
        memory=options.table in ("encodings", "growth"),
    )


def report(options, cases: list[Case], records: Records) -> tuple[str, bool]:
    """The tables, or the reasons why there are none, and whether there are tables."""
    case, clock = cases[0], options.clock
    if options.table == "encodings":
        return encodings_table(records, case, clock), True
    if options.table == "epochs":
        return epochs_table(records, case), True
    if reasons := noise(records, cases, clock):
        advice = (
            "No table, because it would show noise: continue with --resume and more --rounds, on a machine without "
            "other work, or with --clock cpu."
        )
        return "\n".join([advice, *reasons]), False
    if options.table == "growth":
        return growth_table(records, cases, clock), True
    tables = [shares_table(records, case, clock), limits_table(records, case, clock)]
    return "\n\n".join([*tables, "\n".join(contradictions(records, case, clock))]), True


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    transformers.logging.set_verbosity_error()
    if options.threads:
        torch.set_num_threads(options.threads)
    output = options.output or Path("outputs") / f"speed-{time.strftime('%Y%m%d-%H%M%S')}.jsonl"
    interrupted = False
    try:
        cases = read_cases(options)
        settings = cases[0].settings
        records = Records(output, machine(settings.device), options.resume)
        plan = read_plan(options, settings.device)
        try:
            for case in cases:
                CaseRounds(case, records, plan).measure()
                gc.collect()
        except KeyboardInterrupt:
            interrupted = True
    except BenchmarkError as error:
        print(f"benchmark_speed.py: {error}", file=sys.stderr)
        return 1
    print(", ".join(f"{name} {value}" for name, value in machine(settings.device).items()))
    print(", ".join(f"{name} {value}" for name, value in dataclasses.asdict(settings).items()))
    text, has_table = report(options, cases, records)
    print(f"\n{text}\n\n{failures(records)}".rstrip())
    print(f"\n{'Interrupted; --resume --output' if interrupted else 'Every measurement is in'} {output}")
    return 130 if interrupted else 0 if has_table else 1


if __name__ == "__main__":
    # Schedulers end jobs with SIGTERM, and background jobs ignore SIGINT. Both must print the tables.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    sys.exit(main())
