"""Compares the speed of whole models with what users would take instead: ViT and DINOv3 of transformers, ViTs of timm.

    python training/evidence/peer_speed.py --output outputs/peers.jsonl     # ViT-S/16, 224 px, batch 8: an hour

A block is a step of transformers' ViT, two of the other model, and one of transformers' ViT (A X X A), in processor
time of one thread. A ratio is the median over the blocks of X/A, with the 90% interval of the median by order
statistics. The models take turns. The optimizer's step is excluded. Results are json lines; `--resume` goes on with an
interrupted comparison.
"""

import sys
from pathlib import Path
from typing import Any


sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from tqdm.auto import tqdm

from training.evidence.reporting.markdown import markdown
from training.evidence.speed.measurements import PHASES, Records, phases_of, read_lines
from training.evidence.speed.models import SIZES, Row, Settings, check_row
from training.evidence.speed.runner import Runner, machine
from training.evidence.speed.scripts import block_parser, block_ratio, run_script


DEPTH = SIZES["small"]["num_hidden_layers"]
MODEL = Settings("small", DEPTH, 8, 224, 16, None, "cpu", "float32", "sdpa", False)
BASELINE = "transformers_absolute"
ROWS = "transformers_axial_rope timm_absolute timm_rope_mixed absolute rope_mixed liere8 comrope_ld8".split()
ROWS += [f"folded_{name}" for name in ROWS[-3:]]


def table(lines: list[dict[str, Any]]) -> str:
    rows = []
    for name in dict.fromkeys(line["row"] for line in lines):
        cells = [f"`{name}`"]
        for phase in PHASES:
            blocks = [line["seconds"] for line in lines if (line["row"], line["phase"]) == (name, phase)]
            if not blocks:
                cells.append("–")
                continue
            found = block_ratio(blocks)
            cells.append(f"{found.median:.3f} ({found.low:.3f} – {found.high:.3f})")
        rows.append(cells)
    return markdown(["model", *PHASES], rows)


def main(arguments: list[str] | None = None) -> int:
    parser = block_parser(__doc__)
    parser.add_argument("--rows", nargs="+", default=ROWS, metavar="MODEL", help="as of benchmark_speed.py")
    given = parser.parse_args(arguments)
    if given.show:
        print(table([line for line in read_lines(given.output) if "row" in line]))
        return 0
    torch.set_num_threads(1)
    rows = [Row.parse(name) for name in given.rows]
    for row in rows:
        check_row(MODEL, row)
    records = Records(given.output, machine("cpu"), given.resume)
    for phase in PHASES:
        baseline = Runner(MODEL, Row.parse(BASELINE), phase)
        others = {row.name: Runner(MODEL, row, phase) for row in rows if phase in phases_of(row)}
        for runner in (baseline, *others.values()):
            runner.step()
        for block in tqdm(range(given.blocks), desc=phase, unit="block"):
            for name, runner in others.items():
                done = [line for line in records.lines if line.get("row") == name and line["phase"] == phase]
                if len(done) <= block:
                    seconds = [each.seconds(1)["cpu"] for each in (baseline, runner, runner, baseline)]
                    records.add(row=name, phase=phase, seconds=seconds)
    print(table([line for line in records.lines if "row" in line]))
    return 0


if __name__ == "__main__":
    run_script(main)
