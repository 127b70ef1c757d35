"""A finished run as training scripts leave it: a model and the records from which its card is made."""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from published_models import SMALL

import hf_liere
from hf_liere.storage.saved_model import SavedModel


# Facts that such a run agrees with.
AGREEING = {
    "title": "Small",
    "encoding": "liere",
    "dataset": "cifar10",
    "architecture": "LieREViTForImageClassification",
    "model": {"hidden_size": 48, "image_size": [16, 16], "num_labels": 10},
    "training_data": {"split": "train", "samples": 49_000},
    "recipe": {"num_train_epochs": 10.0, "total_train_batch_size": 64, "optimizer": "planned"},
    "seeds": [7],
    "environment": {"libraries": {"torch": "2.15.0"}},
    "cost": {"train_runtime": 1039.2},
    "notes": "What no record knows.",
}


def save_run(folder: Path) -> str:
    """A classifier of ten classes with its records; returns the digest of its weights."""
    torch.manual_seed(0)
    config = hf_liere.LieREViTConfig(**SMALL, image_size=16, block_size=4, num_labels=10)
    hf_liere.LieREViTForImageClassification(config).save_pretrained(folder)
    digest = SavedModel(folder).digest
    write_records(folder, digest, accuracy=0.625, size=16)
    return digest


def write_records(folder: Path, digest: str, accuracy: float, size: int) -> None:
    folder.mkdir(exist_ok=True)
    metrics = {"eval_accuracy": accuracy, "eval_accuracy_low": accuracy - 0.01, "eval_accuracy_high": accuracy + 0.01}
    metrics |= {"eval_loss": 1.25, "eval_samples": 10_000}
    sides = {"name": "uoft-cs/cifar10", "config": None, "files": [], "folder": None}
    training = {"seed": 7, "learning_rate": 1e-3, "num_train_epochs": 10, "bf16": False}
    run = {
        "training": training | {"per_device_train_batch_size": 64},
        "data": {"dataset_name": "uoft-cs/cifar10", "eval_split": None},
        "augmentation": {
            "crop_padding": 4,
            "rand_augment_ops": 0,
            "rand_augment_magnitude": 9,
            "mixing_probability": 1.0,
        },
        "image_size": [size, size],
        "examples": {
            "train": sides | {"split": "train", "samples": 49_000},
            "evaluation": sides | {"split": "test", "samples": 10_000},
        },
    }
    libraries = {"torch": "2.15.0", "transformers": "5.23.0"}
    for name, content in {
        "eval_results": metrics,
        "all_results": metrics | {"train_images_per_second": 481.0, "train_runtime": 1039.2},
        "run_config": run,
        "environment": {"libraries": libraries, "world_size": 1, "device": "cpu", "accelerator": None},
        "weights": {"sha256": digest, "step": 100},
    }.items():
        (folder / f"{name}.json").write_text(json.dumps(content))


def edit(path: Path, **fields) -> None:
    """Change fields of a json file; functions get its content and return the value."""
    content = json.loads(path.read_text())
    fields = {name: value(content) if callable(value) else value for name, value in fields.items()}
    path.write_text(json.dumps(content | fields))


def edited(name: str, **fields) -> Callable[[Path], None]:
    """A function that changes fields of a json file in a folder."""
    return lambda folder: edit(folder / name, **fields)


def written(name: str, text: str) -> Callable[[Path], None]:
    """A function that writes a file into a folder."""

    def write(folder: Path) -> None:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)

    return write
