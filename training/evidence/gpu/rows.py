"""The rows of gpu_tables.py: models of the papers' tables, what they take, and what stays of them."""

import itertools
import json
import math
import shutil
import statistics
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save

from hf_liere.storage.saved_code import replace_file
from hf_liere.storage.saved_model import WEIGHTS
from training.common.folders import CONFIG_FILE, EXAMPLES_FILE, RESULTS_FILE, STATE_FILE, last_complete_checkpoint
from training.evidence.reporting.sweeps import TRAINING, Run, combinations, read_sweep, slug


# A stored file has at most so many bytes.
LARGEST_FILE = 16 * 2**20
MEASURED_STEPS = 50
# Steps are timed over so many intervals, of which the first warms up.
INTERVALS = 5
LIERE = (("absolute", None), ("axial_rope", None), ("rope_mixed", None), ("liere", 8), ("liere", 64))
FOUR = (("absolute", None), ("rope_mixed", None), ("liere", 8), ("comrope_ld", 8))
OTHERS = (("axial_rope", None), ("liere", 64))
SHUFFLED = {"evaluation_shuffle": "patches"}
# With --scale: two layers of one head, which still has 64 channels, in small batches.
SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 1, "intermediate_size": 128}
SMALL_BATCH = 64
FEWEST_EVALUATED = 20
Line = dict[str, Any]


class Table(NamedTuple):
    """
    Rows of a sweep.

    Attributes:
        title: The table of LieRE.
        settings: What the settings of its rows contain.
        encodings: Encodings and block sizes of its rows.
        conditions: Under which they are evaluated, besides as trained.
        epochs: The recipe's.
        saves: Share of the training after which a checkpoint is written, about every minute or two on an H100.
    """

    title: str
    sweep: str
    settings: dict[str, Any]
    encodings: tuple[tuple[str, int | None], ...]
    conditions: tuple[dict[str, Any], ...]
    epochs: int
    saves: float


SIZES = (SHUFFLED, {"image_size": 48}, {"image_size": 64})
CIFAR = {"epochs": 200, "saves": 0.1}
# In order of worth.
TABLES = {
    "arrows_108": Table(
        *("Table 3, 108 px", "arrows", {"image_size": 108}, (*LIERE, FOUR[-1])),
        *(({"image_size": 168}, {"image_size": 276}), 1, 0.5),
    ),
    "fraction": Table("Figure 4, 20% of the images", "data_fraction", {"train_fraction": 0.2}, LIERE, SIZES, **CIFAR),
    "base": Table("Tables 1, 5, 9", "encodings", {"seed": 0}, FOUR, SIZES, **CIFAR),
    "arrows_168": Table(
        *("Table 3, 168 px", "arrows", {"image_size": 168}, (*LIERE, FOUR[-1])),
        *(({"image_size": 276},), 1, 0.25),
    ),
    "tiny": Table("Table 6, ViT-Tiny", "model_size", {"hidden_size": 384}, FOUR, SIZES, **CIFAR),
    "base_others": Table("Tables 1, 5, 9", "encodings", {"seed": 0}, OTHERS, SIZES, **CIFAR),
    "tiny_others": Table("Table 6, ViT-Tiny", "model_size", {"hidden_size": 384}, OTHERS, SIZES, **CIFAR),
}


class Row(NamedTuple):
    """A model of a table."""

    name: str
    table: Table
    settings: dict[str, Any]

    @property
    def draws_arrows(self) -> bool:
        return self.table.sweep == "arrows"

    def run(self, folder: Path, data: list[str], scale: float, passed: list[str]) -> Run:
        """
        The run that trains and evaluates it.

        Args:
            folder: Of the run.
            data: Flags of CIFAR-100.
            scale: Share of the images and of the epochs.
            passed: Further flags.
        """
        sweep = read_sweep(TRAINING / "evidence" / "sweeps" / f"{self.table.sweep}.yaml", mini=False)
        sweep = {**sweep, "evaluate": [[{}, *self.table.conditions]]}
        shown = 0.05 if self.draws_arrows else 0.01
        often = {"save_steps": self.table.saves, "eval_steps": shown, "save_total_limit": 1, "save_logits": True}
        # A GPU takes as long for 64 small images as for hundreds.
        chosen = {**often, "save_strategy": "steps", "eval_strategy": "steps", "per_device_eval_batch_size": 500}
        settings = self.settings
        if scale < 1:
            settings = {**settings, **SMALL}
            images, evaluated = (800_000, 2_000) if self.draws_arrows else (50_000, 10_000)
            chosen |= {"max_train_samples": math.ceil(images * scale), "total_train_batch_size": SMALL_BATCH}
            chosen |= {"max_eval_samples": max(math.ceil(evaluated * scale), FEWEST_EVALUATED)}
            chosen |= {"num_train_epochs": math.ceil(self.table.epochs * scale), "eval_steps": max(shown, 0.25)}
        words = [word for name, value in chosen.items() for word in (f"--{name}", str(value))]
        return Run(sweep, settings, [*words, *([] if self.draws_arrows else data), *passed], folder)


def rows_of(names: list[str]) -> list[Row]:
    """The rows of these tables, or with these names, in order of worth."""
    rows = []
    for name, table in TABLES.items():
        sweep = read_sweep(TRAINING / "evidence" / "sweeps" / f"{table.sweep}.yaml", mini=False)
        for settings in combinations(sweep["train"]):
            encoding = settings["position_encoding"], settings.get("block_size")
            if table.settings.items() <= settings.items() and encoding in table.encodings:
                row = Row(f"{name}-{encoding[0]}{encoding[1] or ''}", table, settings)
                rows += [row] if {name, row.name} & set(names) else []
    return rows


def measure(run: Run, folder: Path, steps: int) -> Line:
    """
    Trains some steps and evaluates once, in a folder that is deleted.

    Returns:
        The steps of the whole run; seconds of a step (the median of the intervals after the first), of an evaluation,
        of what precedes and follows the steps, and of the whole run; the peak of the accelerator's memory in bytes.
    """
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    shutil.rmtree(folder, ignore_errors=True)
    every = max(steps // INTERVALS, 1)
    flags = [*run.flags, "--max_steps", str(steps), "--logging_steps", str(every), "--output_dir", str(folder)]
    begin = time.perf_counter()
    run.call([*flags, "--eval_strategy", "no", "--save_strategy", "no"])
    seconds = time.perf_counter() - begin
    about, results, state = (read_json(folder / name) for name in (CONFIG_FILE, RESULTS_FILE, STATE_FILE))
    training, evaluation = about["training"], results["eval_runtime"]
    batch = training["per_device_train_batch_size"]
    rates = [entry["examples_per_second"] for entry in state["log_history"] if "examples_per_second" in entry]
    step = batch / statistics.median(rates)
    total = math.ceil(math.ceil(about["examples"]["train"]["samples"] / batch) * training["num_train_epochs"])
    evaluations = round(1 / training["eval_steps"]) + 1
    start = max(seconds - steps * step - evaluation, 0.0)
    # Larger images take longer than those of the training.
    conditions = (len(run.conditions) - 1) * (start + 3 * evaluation)
    whole = start + total * step + evaluations * evaluation + conditions
    shutil.rmtree(folder)
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None
    found = {"steps": total, "step": step, "evaluation": evaluation, "start": start, "whole": whole}
    return {**{name: round(value, 5) for name, value in found.items()}, "memory": peak}


def seconds_left(run: Run, measured: Line) -> float:
    """What a run still takes, from its last checkpoint on."""
    last = last_complete_checkpoint(run.output_dir / slug(run.settings))
    done = int(last.rpartition("-")[2]) if last else 0
    return measured["whole"] - done * measured["step"]


def fitting(seconds: list[float], available: float) -> list[bool]:
    """Which of the rows, taken in this order, end in time."""
    fits = []
    for one in seconds:
        fits.append(one <= available)
        available -= one if fits[-1] else 0
    return fits


def result(row: Row, run: Run) -> Line:
    """What a line of the record says of a finished row: what its evaluations share, once, and the evaluations."""
    lines = run.read(row.table.sweep)
    own = [{name: value for name, value in line.items() if value != lines[0].get(name)} for line in lines[1:]]
    return {"first": lines[0], "others": own}


def result_lines(found: Line) -> list[Line]:
    """The lines of a sweep's results that `result` keeps."""
    return [found["first"], *({**found["first"], **own} for own in found["others"])]


def store(run: Run, target: Path) -> int:
    """
    Writes the logits and the weights in half precision, or the rotations' parameters alone where all weights would make
    a file of 16 MB or more; its bytes.
    """
    folder = run.output_dir / slug(run.settings)
    kept = {"logits": load_file(folder / EXAMPLES_FILE)["logits"]}
    weights = {name: value.half() for name, value in load_file(folder / WEIGHTS).items()}
    if sum(value.nbytes for value in itertools.chain(kept.values(), weights.values())) >= LARGEST_FILE:
        weights = {name: value for name, value in weights.items() if "rotary_encoding." in name}
    content = save(kept | weights)
    target.parent.mkdir(parents=True, exist_ok=True)
    replace_file(target, content)
    return len(content)


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))
