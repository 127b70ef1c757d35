"""Records that a run writes beside its checkpoint: file names, resolved configuration and environment.

Others read these files, so they contain no folders, host names or tokens.
"""

import io
import json
import os
import platform
import re
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState

import hf_liere
from hf_liere.storage.saved_code import replace_file


LIBRARIES = "torch torchvision transformers accelerate datasets evaluate huggingface_hub numpy pillow".split()
# Arguments with folders, addresses or identities, or of the log: they describe where a run happened, not what it did.
PRIVATE_ARGUMENTS = re.compile(
    r"(^|_)(dir|token|hub|run_name|local_rank|n_gpu|resume_from_checkpoint|trackio|verbose)(_|$)"
)


def write_record(folder: str | Path, name: str, content: dict[str, Any]) -> None:
    write_text(Path(folder) / name, json.dumps(content, indent=2, sort_keys=True, default=str) + "\n")


def write_text(path: Path, text: str) -> None:
    """
    Writes a file atomically: after an interruption it has its old content. Several processes may write it, each with a
    part of its own; the last one to finish wins.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, text.encode())


def save_figure(figure: Any, path: Path, **options: Any) -> None:
    """Saves a figure of matplotlib as `write_text` does."""
    content = io.BytesIO()
    figure.savefig(content, format=path.suffix[1:], **options)
    replace_file(path, content.getvalue())


def remove_private(value: Any) -> Any:
    """Arguments without folders, names and tokens, which mean nothing on other machines."""
    if isinstance(value, dict):
        return {key: remove_private(item) for key, item in value.items() if not PRIVATE_ARGUMENTS.search(str(key))}
    if isinstance(value, list | tuple):
        return [remove_private(item) for item in value]
    if isinstance(value, str) and (os.path.isabs(value) or value.startswith(("~", ".."))):
        return Path(value).name
    return value


@dataclass
class Examples:
    """Resolved training and evaluation data: `name`, `files` or `folder`, with `config`, `split` and `samples`."""

    train: dict[str, Any] | None = None
    evaluation: dict[str, Any] | None = None


def describe_examples(arguments: Any, splits: dict[str, str], train: int | None, evaluation: int | None) -> Examples:
    """
    Args:
        arguments: the data arguments of any script.
        splits: names of the data set's splits, if any, under `train` and `evaluation`.
        train, evaluation: numbers of examples; `None` if the run does not train or evaluate.
    """

    def side(name: str, files: str, samples: int | None) -> dict[str, Any] | None:
        if samples is None:
            return None
        dataset = getattr(arguments, "dataset_name", None)
        folders = ("image_folder", "video_folder", "volume_file", "text_folder", "structures")
        folder = next((value for place in folders if (value := getattr(arguments, place, None))), None)
        if dataset and Path(dataset).exists():
            dataset, folder = None, dataset
        return {
            "name": dataset,
            "config": getattr(arguments, "dataset_config_name", None),
            "files": [Path(file).name for file in getattr(arguments, files) or []],
            "folder": folder and Path(folder).resolve().name,
            "split": splits.get(name),
            "samples": samples,
        }

    return Examples(side("train", "train_files", train), side("evaluation", "validation_files", evaluation))


def environment() -> dict[str, Any]:
    """Versions, processes and hardware that can affect a result."""
    state = PartialState()
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "libraries": {"hf_liere": hf_liere.__version__} | {name: _version(name) for name in LIBRARIES},
        "world_size": state.num_processes,
        "distributed_type": str(state.distributed_type.value),
        "device": str(state.device.type),
        "accelerator": torch.cuda.get_device_name() if state.device.type == "cuda" else None,
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }


def _version(library: str) -> str | None:
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return None
