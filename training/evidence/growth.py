"""Measures how the time and memory of a training step grow with tokens, layers and axes, and draws it.

    python training/evidence/growth.py --output outputs/growth.jsonl      # half an hour
    python training/evidence/growth.py --output training/evidence/speed/records/growth.jsonl --show

Models of images have 14 × 14 to 64 × 64 patches and one image; models of points with one to four coordinates have 196
tokens. A time is the median over the rounds of the processor time of one thread; all models take turns. The process
keeps freed memory, as the training scripts do. Memory is the peak of PyTorch's allocator, the model included. An
exponent is the slope between the last value and the largest of at most a quarter of it, on logarithmic scales. Results
are json lines; `--resume` goes on, and `--show` writes figures/growth_*.svg of them.
"""

import dataclasses
import math
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from matplotlib import ticker
from tqdm.auto import tqdm

from hf_liere import LieRETokensConfig, LieRETokensForSequenceClassification
from hf_liere.tools.inspection.plots import COLOURS, draw
from training.common.heap import keep_freed_memory
from training.common.records import write_text
from training.evidence.reporting.markdown import markdown
from training.evidence.speed.clocks import measure_seconds
from training.evidence.speed.measurements import Records, read_lines
from training.evidence.speed.models import SIZES, Row, Settings
from training.evidence.speed.runner import Runner, machine, peak_cpu_allocation
from training.evidence.speed.scripts import output_parser, run_script


FIGURES = Path(__file__).resolve().parent / "figures"
MODEL = Settings("small", 2, 1, 224, 16, None, "cpu", "float32", "sdpa", False)
ROWS = {"absolute": "no rotations", "comrope_ld8": "ComRoPE-LD", "liere8": "LieRE8", "liere64": "LieRE64"}
TITLES = {"tokens": "tokens", "layers": "layers, 196 tokens", "axes": "axes of points, 196 tokens"}
SIDES, LAYERS, AXES = (14, 22, 32, 45, 64), (3, 6, 12, 24), (1, 2, 3, 4)
NUM_POINTS, FEATURES = 196, 16


class Points:
    """A training step of a model of points in a space of as many axes."""

    def __init__(self, name: str, num_axes: int):
        torch.manual_seed(0)
        row = Row.parse(name if name != "absolute" else "none")
        config = LieRETokensConfig(
            **{**SIZES[MODEL.model_size], "num_hidden_layers": MODEL.num_hidden_layers},
            feature_size=FEATURES,
            num_axes=num_axes,
            position_encoding=row.encoding,
            block_size=row.block_size,
        )
        self.model = LieRETokensForSequenceClassification(config)
        self.given = {"inputs_embeds": torch.randn(1, NUM_POINTS, FEATURES), "labels": torch.zeros(1, dtype=torch.long)}
        self.given["positions"] = torch.rand(1, NUM_POINTS, num_axes)

    def step(self) -> None:
        self.model.zero_grad(set_to_none=True)
        self.model(**self.given).loss.backward()

    def peak_memory(self) -> int:
        self.model.zero_grad(set_to_none=True)
        return sum(parameter.nbytes for parameter in self.model.parameters()) + peak_cpu_allocation(self.step)


def cases(name: str) -> dict[tuple[str, int], Callable[[], Runner | Points]]:
    """By axis of growth and value: a function that builds a model ready to step."""

    def images(**changed: int) -> Callable[[], Runner]:
        return lambda: Runner(dataclasses.replace(MODEL, **changed), Row.parse(name), "training")

    found: dict[tuple[str, int], Callable[[], Runner | Points]] = {}
    found |= {("tokens", side**2): images(image_size=side * MODEL.patch_size) for side in SIDES}
    found |= {("layers", depth): images(num_hidden_layers=depth) for depth in LAYERS}
    return found | {("axes", axes): lambda axes=axes: Points(name, axes) for axes in AXES}


def measure(records: Records, names: list[str], rounds: int) -> None:
    """Makes the missing measurements; models are built anew for every round, as all together would fill the memory."""
    for number in range(rounds):
        for name in tqdm(names, desc=f"round {number + 1} of {rounds}", unit="model"):
            for (grown, value), build in cases(name).items():
                case = {"row": name, "grown": grown, "value": value}
                known = [line for line in records.lines if all(line.get(key) == case[key] for key in case)]
                if len(known) > number:
                    continue
                ready = build()
                ready.step()
                seconds = measure_seconds(ready.step, 1, "cpu")["cpu"]
                records.add(**case, seconds=seconds, bytes=known[0]["bytes"] if known else ready.peak_memory())


def curves(lines: list[dict[str, Any]], quantity: str) -> dict[tuple[str, str], dict[int, float]]:
    """By axis of growth and model: the median of a quantity at each value."""
    values: dict[tuple[str, str], dict[int, list[float]]] = {}
    for line in lines:
        if "row" in line:
            values.setdefault((line["grown"], line["row"]), {}).setdefault(line["value"], []).append(line[quantity])
    return {key: {value: statistics.median(found) for value, found in sorted(by.items())} for key, by in values.items()}


def exponent(curve: dict[int, float]) -> float:
    """The slope at the upper end, over a factor of four or, where there is none, over all values."""
    last = max(curve)
    first = max((value for value in curve if 4 * value <= last), default=min(curve))
    return math.log(curve[last] / curve[first]) / math.log(last / first)


def table(lines: list[dict[str, Any]]) -> str:
    header, rows = ["growing", "model", "exponent of time", "exponent of memory"], []
    seconds, held = curves(lines, "seconds"), curves(lines, "bytes")
    for (grown, name), curve in seconds.items():
        rows.append([TITLES[grown], ROWS[name], f"{exponent(curve):.2f}", f"{exponent(held[grown, name]):.2f}"])
    return markdown(header, sorted(rows, key=lambda row: list(TITLES.values()).index(row[0])))


def paint_growth(lines: list[dict[str, Any]]) -> Callable[[Any, dict], None]:
    quantities = {"seconds": ("s of a training step", 1.0), "bytes": ("peak memory, MB", 1e-6)}

    def paint(figure, theme: dict) -> None:
        panels = figure.subplots(2, len(TITLES), sharex="col")
        for row, (quantity, (label, unit)) in zip(panels, quantities.items()):
            found = curves(lines, quantity)
            for panel, (grown, title) in zip(row, TITLES.items()):
                for (name, shown), colour, marker in zip(ROWS.items(), (theme["line"], *COLOURS), "xo^s"):
                    curve = found[grown, name]
                    legend = f"{shown}: {exponent(curve):.2f}"
                    panel.plot(
                        list(curve), [unit * y for y in curve.values()], marker, ls="-", color=colour, label=legend
                    )
                panel.set(xscale="log", yscale="log")
                panel.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
                panel.yaxis.set_major_formatter("{x:g}")
                panel.yaxis.set_minor_formatter(ticker.NullFormatter())
                panel.set_xticks(list(curve), map("{:,}".format, curve), minor=False)
                panel.set_xticks([], minor=True)
                panel.grid(alpha=0.3)
                panel.legend(fontsize=7, title="exponents", title_fontsize=7)
                if quantity == "bytes":
                    panel.set_xlabel(title)
            row[0].set_ylabel(label)

    return paint


def main(arguments: list[str] | None = None) -> int:
    parser = output_parser(__doc__)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), metavar="MODEL")
    parser.add_argument("--rounds", type=int, default=5, help="steps of each model (5)")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    keep_freed_memory()
    if given.show:
        lines = read_lines(given.output)
        for theme, picture in draw(paint_growth(lines), 10, 5.6).items():
            write_text(FIGURES / f"growth_{theme}.svg", picture)
    else:
        records = Records(given.output, machine("cpu"), given.resume)
        measure(records, given.rows, given.rounds)
        lines = records.lines
    print(table(lines))
    return 0


if __name__ == "__main__":
    run_script(main)
