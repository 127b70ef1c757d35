"""
The tables of docs/reference/speed_tables.md about GPUs: steps beside transformers' ViT, of the records of `make gpu` in
speed/records/gpu_*.jsonl, and images per second of the stored runs on accelerators, by device, encoding and size.

    python training/evidence/device_speed.py
"""

import argparse
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any


ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from training.evidence.gpu.record import describe, goals_table, overview  # noqa: E402
from training.evidence.reporting.result_lines import read_results  # noqa: E402
from training.evidence.speed.measurements import read_lines  # noqa: E402


RESULTS, RECORDS = Path(__file__).parent / "results", Path(__file__).parent / "speed" / "records"
NOT_MEASURED = "Steps beside Transformers' ViT on a GPU: not measured. `make gpu` measures them."
COLUMNS = ("sweep", "device", "pixels", "encoding, block_size", "trains", "runs", "images/s", "ms a step")


def rows(results: Iterable[dict[str, Any]]) -> list[tuple[str, ...]]:
    """
    Medians over the runs of one sweep, device, size and model; steps take as many images as a device gets. Runs that a
    second sweep stores too are those of the first.
    """
    groups: dict[tuple[str, ...], list[tuple[float, float]]] = defaultdict(list)
    first: dict[tuple[Any, ...], str] = {}
    for result in results:
        settings, measured = result["settings"], result["train_metrics"]
        accelerator = result["environment"].get("accelerator")
        sweep = first.setdefault((*result["flags"], measured.get("train_runtime")), result["sweep"])
        if accelerator and sweep == result["sweep"]:
            model = {**result["run"].get("model", {}), **settings}
            batch = result["run"]["training"]["per_device_train_batch_size"]
            speed = measured.get("train_images_per_second", measured["train_samples_per_second"])
            rotates = model["position_encoding"] not in ("none", "absolute")
            parts = settings.get("trainable", "all").split("+")
            trained = " + ".join(part for part in parts if rotates or part != "rotary")
            name = model["position_encoding"] + (f" {model['block_size']}" if rotates else "")
            key = result["sweep"], accelerator, str(settings["image_size"]), name, trained
            groups[key].append((speed, 1000 * batch / speed))
    found = []
    for key, values in sorted(groups.items()):
        speeds, milliseconds = (statistics.median(column) for column in zip(*values))
        found.append((*key, str(len(values)), f"{speeds:.0f}", f"{milliseconds:.1f}"))
    return found


def stored_results() -> list[dict[str, Any]]:
    return [result for path in sorted(RESULTS.rglob("*.jsonl")) for result in read_results(path)]


def steps(folder: Path = RECORDS) -> str:
    """Goals and times of every stored record of `make gpu`."""
    records = map(read_lines, sorted(folder.glob("gpu_*.jsonl")))
    parts = [f"{describe(lines)}:\n\n{goals_table(lines)}\n\n{overview(lines)}" for lines in records]
    return "\n\n".join(parts) or NOT_MEASURED


def table() -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (COLUMNS, ["---"] * len(COLUMNS), *rows(stored_results())))


def main(arguments: list[str] | None = None) -> int:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args(
        arguments
    )
    print(f"{steps()}\n\n{table()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
