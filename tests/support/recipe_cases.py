"""Recipes and their lines in training/README.md, and data that stand for those of the lines."""

import importlib
import re
from pathlib import Path

import numpy as np
from checkout import ROOT
from pages import TRAINING, commands
from training_helpers import TINY_RUN, write_dinov2, write_dual_encoder, write_images_folder, write_parquet

from training.common.command_line import parse_arguments


RECIPES = {path.stem: path for path in (ROOT / "training" / "recipes").glob("*.yaml")}
# Of the laboratory.
RESEARCH_RECIPES = {path.stem: path for path in (ROOT / "training" / "evidence" / "recipes").glob("*.yaml")}
ALL_RECIPES = RECIPES | RESEARCH_RECIPES
# The script and the flags of every recipe's line; lines with the output of another name are examples.
LINES = {
    Path(recipe).stem: (Path(script).stem, flags)
    for _, script, recipe, *flags in commands(TRAINING)
    if f"outputs/{Path(recipe).stem}" in flags
}


def script_of(name):
    return importlib.import_module(f"training.{LINES[name][0]}")


def parse(name, *flags):
    """A recipe's line with more flags; the recipes' bfloat16 is for GPUs."""
    command = [str(ALL_RECIPES[name]), *LINES[name][1], "--use_cpu", "true", "--bf16", "false", *flags]
    return parse_arguments(command, script_of(name).ARGUMENT_CLASSES)


def write_data(folder: Path) -> dict[str, str]:
    """What stands for the data of the lines, by their names there."""
    volumes = np.random.default_rng(0).integers(256, size=(8, 8, 32, 32), dtype=np.uint8)
    labels = np.arange(8)[:, None] % 2
    np.savez(folder / "volumes.npz", train_images=volumes, train_labels=labels, val_images=volumes, val_labels=labels)
    (folder / "texts").mkdir()
    for number in range(20):
        (folder / "texts" / f"{number}.py").write_text("def f(x):\n    return x\n" * 100)
    return {
        "TEXTS": str(folder / "texts"),
        "DINOV2": write_dinov2(folder / "dinov2"),
        "DINOV3_CLIP": write_dual_encoder(folder / "dual_encoder"),
        "TRAIN.parquet": write_parquet(folder / "train.parquet", 12),
        "TEST.parquet": write_parquet(folder / "test.parquet", 6, seed=1),
        "VOLUMES.npz": str(folder / "volumes.npz"),
        "IMAGES": write_images_folder(folder / "images", {"train": 12, "validation": 6}),
        "TRAIN.ts": _write_series(folder / "train.ts", 12),
        "TEST.ts": _write_series(folder / "test.ts", 6),
    }


def _write_series(path: Path, count: int) -> str:
    """Series of five to seven numbers, of two classes in turn; the path of their file."""
    lines = [f"{','.join(map(str, range(5 + number % 3)))}:{number % 2}" for number in range(count)]
    path.write_text("\n".join(["@timeStamps false", "@classLabel true 0 1", "@data", *lines]))
    return str(path)


def run_small(name: str, folder: Path, data: dict[str, str]) -> Path:
    """A small recipe by its line, on very few examples, once, after those that it starts from; its folder."""
    if (folder / name).exists():
        return folder / name
    script, flags = LINES[name]
    for needed in {flag.split("/")[1] for flag in flags if flag.startswith("outputs/")} - {name}:
        run_small(needed, folder, data)
    flags = [data.get(flag, re.sub("^outputs/", f"{folder}/", flag)) for flag in flags]
    flags += ["--max_train_samples", "8", "--max_eval_samples", "6", "--num_train_epochs", "1"]
    flags += [flag for flag in TINY_RUN if flag not in ("--per_device_train_batch_size", "8")]
    if script == "video_classification" and "VOLUMES.npz" not in LINES[name][1]:
        flags += ["--moving_shapes_folder", str(folder / "shapes")]
    if script == "object_detection":
        flags += ["--shapes_folder", str(folder / "pictures")]
    if name in ("arrows_mini", "arrows_clips_mini"):
        flags += ["--lr_scheduler_kwargs", '{"num_decay_steps": 1}', "--warmup_steps", "0"]
    script_of(name).main([str(ALL_RECIPES[name]), *flags])
    return folder / name
