"""Measures whole training jobs on JPEG files: our script beside a Trainer of transformers and a loop of timm.

    python training/evidence/whole_job.py --output outputs/jobs.jsonl                  # half an hour
    python training/evidence/whole_job.py --output outputs/jobs.jsonl --resume --processes 2

All train a ViT-S/16 (or `--model_size`) from random weights with random resized crops and flips, AdamW and the same
batches, in as many processes with as many workers each. Every job runs in a process of its own, twice: with few steps
and with more. Images per second are those of the steps in between; the time before the first step is what is left of
the shorter run. `loop` has the batches in memory, and shows forward, backward and optimizer alone: what a job takes
beyond it, in the same round, is the share outside of them. Jobs take turns, round after round; medians are shown with
their range. The files are parts of a photograph, `--images` of them, 400 px wide. `--show` prints the table of an
existing output.
"""

import argparse
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any


sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from PIL import Image
from torch import nn

from training.evidence.reporting.markdown import markdown
from training.evidence.speed.measurements import Records, read_lines
from training.evidence.speed.models import SIZES, BenchmarkError, Row, Settings, build_model, logits
from training.evidence.speed.runner import machine
from training.evidence.speed.scripts import output_parser, run_script


ROOT = Path(__file__).resolve().parents[2]
PHOTOGRAPH = ROOT / "training" / "evidence" / "figures" / "rocket.jpg"
CLASSES, WIDTH = 10, 400
JOBS = {
    "ours": "`image_classification.py`, LieRE8",
    "ours_absolute": "`image_classification.py`, absolute",
    "ours_saving": "`image_classification.py`, LieRE8, a checkpoint after each step",
    "trainer": "Trainer of transformers, its ViT",
    "timm": "loop with timm's ViT",
    "loop": "batches in memory, transformers' ViT",
}


def write_images(folder: Path, count: int) -> None:
    """JPEG files of random parts of the photograph, in folders of classes."""
    photograph = Image.open(PHOTOGRAPH).convert("RGB")
    draw = torch.Generator().manual_seed(0)
    for number in range(count):
        target = folder / "train" / f"class_{number % CLASSES}" / f"{number}.jpg"
        target.parent.mkdir(parents=True, exist_ok=True)
        side = min(photograph.size) // 2
        left, top = (int(torch.randint(length - side, (1,), generator=draw)) for length in photograph.size)
        part = photograph.crop((left, top, left + side, top + side))
        part.resize((WIDTH, WIDTH)).save(target, quality=90)


def named(flags: dict[str, Any]) -> Iterator[str]:
    return itertools.chain(*([f"--{name}", str(value)] for name, value in flags.items()))


def command(job: str, given: argparse.Namespace, folder: Path, output: Path, steps: int) -> list[str]:
    """The command line of a job, in one process or in several."""
    start = [sys.executable]
    if given.processes > 1:
        start += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(given.processes)]
    if not job.startswith("ours"):
        flags = {name: getattr(given, name) for name in ("model_size", "batch_size", "workers", "image_size")}
        return [*start, __file__, *named({**flags, "job": job, "folder": folder, "steps": steps, "output": output})]
    encoding = ["absolute"] if job == "ours_absolute" else ["liere", "--block_size", "8"]
    flags = {
        **SIZES[given.model_size],
        "image_folder": folder,
        "output_dir": output,
        "image_size": given.image_size,
        "patch_size": 16,
        "max_steps": steps,
        "per_device_train_batch_size": given.batch_size,
        "dataloader_num_workers": given.workers,
        "random_resized_crop": "true",
        "flip_probability": 0.5,
        "save_strategy": "steps" if job == "ours_saving" else "no",
        "save_steps": 1,
        "save_total_limit": 1,
        "report_to": "none",
        "use_cpu": "true",
    }
    script = str(ROOT / "training" / "image_classification.py")
    return [*start, script, "--do_train", "--position_encoding", *encoding, *named(flags)]


def image_batches(given: argparse.Namespace) -> torch.utils.data.Dataset:
    from torchvision.datasets import ImageFolder
    from torchvision.transforms import v2

    steps = [v2.PILToTensor(), v2.RandomResizedCrop(given.image_size), v2.RandomHorizontalFlip()]
    return ImageFolder(given.folder / "train", v2.Compose([*steps, v2.ToDtype(torch.float32, scale=True)]))


def run_trainer(given: argparse.Namespace, model: nn.Module) -> None:
    """What an example of transformers does: a Trainer with a dataset of transformed images."""
    from transformers import Trainer, TrainingArguments

    def collate(samples: list[tuple[torch.Tensor, int]]) -> dict[str, torch.Tensor]:
        pixels, labels = zip(*samples)
        return {"pixel_values": torch.stack(pixels), "labels": torch.tensor(labels)}

    arguments = TrainingArguments(
        output_dir=str(given.output),
        max_steps=given.steps,
        per_device_train_batch_size=given.batch_size,
        dataloader_num_workers=given.workers,
        remove_unused_columns=False,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
    )
    Trainer(model=model, args=arguments, train_dataset=image_batches(given), data_collator=collate).train()


def run_loop(given: argparse.Namespace, model: nn.Module) -> None:
    """A loop over a DataLoader, or over one batch in memory; in several processes with DistributedDataParallel."""
    sampler = None
    dataset = image_batches(given)
    if "LOCAL_RANK" in os.environ:
        torch.distributed.init_process_group("gloo")
        sampler = torch.utils.data.DistributedSampler(dataset)
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    if given.job == "loop":
        size = (given.image_size, given.image_size)
        batches = itertools.repeat((torch.rand(given.batch_size, 3, *size), torch.arange(given.batch_size) % CLASSES))
    else:
        loader = torch.utils.data.DataLoader(
            dataset, given.batch_size, shuffle=sampler is None, sampler=sampler, num_workers=given.workers
        )
        batches = itertools.chain.from_iterable(itertools.repeat(loader))
    for pixels, labels in itertools.islice(batches, given.steps):
        loss = nn.functional.cross_entropy(logits(model, pixels), labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def run_job(given: argparse.Namespace) -> None:
    """One of the jobs that are not ours, in this process."""
    depth = SIZES[given.model_size]["num_hidden_layers"]
    size = (given.model_size, depth, given.batch_size, given.image_size, 16, None)
    settings = Settings(*size, "cpu", "float32", "sdpa", False)
    model = build_model(settings, Row.parse("timm_absolute" if given.job == "timm" else "transformers_absolute"), True)
    (run_trainer if given.job == "trainer" else run_loop)(given, model)


def seconds_of(job: str, given: argparse.Namespace, folder: Path, steps: int) -> float:
    with tempfile.TemporaryDirectory() as output:
        start = time.perf_counter()
        line = command(job, given, folder, Path(output) / "run", steps)
        done = subprocess.run(line, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        if done.returncode:
            raise BenchmarkError(f"{' '.join(line)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
        return time.perf_counter() - start


def rate(line: dict[str, Any]) -> float:
    return line["images"] / (line["long"] - line["short"])


def table(lines: list[dict[str, Any]]) -> str:
    """Images per second, the share outside the loop, and seconds before the first step, by the number of processes."""
    rows = []
    for processes in sorted({line["processes"] for line in lines}):
        found = {job: [line for line in lines if (line["job"], line["processes"]) == (job, processes)] for job in JOBS}
        loops = {line["round"]: rate(line) for line in found["loop"]}
        for job, title in JOBS.items():
            if not found[job]:
                continue
            rates = [rate(line) for line in found[job]]
            shares = [1 - rate(line) / loops[line["round"]] for line in found[job] if line["round"] in loops]
            steps = [(line["long"] - line["short"]) / line["between"] for line in found[job]]
            starts = [line["short"] - line["few"] * step for line, step in zip(found[job], steps)]
            cells = [title, str(processes)]
            cells += [f"{statistics.median(rates):.2f} ({min(rates):.2f} – {max(rates):.2f})"]
            outside = f"{statistics.median(shares):.1%}" if shares and job != "loop" else ""
            cells += [outside, f"{statistics.median(starts):.1f} s"]
            rows.append(cells)
    return markdown(["job", "processes", "images/s", "outside the loop", "before the first step"], rows)


def main(arguments: list[str] | None = None) -> int:
    parser = output_parser(__doc__)
    parser.add_argument("--jobs", nargs="+", choices=JOBS, default=list(JOBS), metavar="JOB")
    parser.add_argument("--model_size", choices=SIZES, default="small")
    parser.add_argument("--image_size", type=int, default=224)
    parser.add_argument("--batch_size", type=int, default=16, help="of every process (16)")
    parser.add_argument("--workers", type=int, default=2, help="of every process (2)")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--images", type=int, default=640)
    parser.add_argument("--steps", type=int, nargs="+", default=[3, 15], help="of the two runs (3 15)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--job", choices=JOBS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.job:
        given.steps = given.steps[0]
        run_job(given)
        return 0
    if given.show:
        print(table([line for line in read_lines(given.output) if "job" in line]))
        return 0
    few, many = given.steps
    records = Records(given.output, machine("cpu"), given.resume)
    with tempfile.TemporaryDirectory() as folder:
        write_images(Path(folder), given.images)
        for number, job in itertools.product(range(given.rounds), given.jobs):
            case = {"job": job, "processes": given.processes, "round": number}
            if any(case.items() <= line.items() for line in records.lines):
                continue
            short, long = (seconds_of(job, given, Path(folder), steps) for steps in (few, many))
            images = (many - few) * given.batch_size * given.processes
            records.add(**case, short=short, long=long, few=few, between=many - few, images=images)
    print(table([line for line in records.lines if "job" in line]))
    return 0


if __name__ == "__main__":
    run_script(main)
