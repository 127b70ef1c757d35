"""Reads a checkpoint of another project from a file, directory or Hub repository, without executing anything in it."""

import pickle
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from ...auto import CONFIGS
from ...patching.patched_configuration import TYPE_PREFIX
from ...storage.loading import explain, parse_json, refuse_diffusers, shards
from ...upgrades import ConversionError


OWN_MODEL_TYPES = tuple(config_class.model_type for config_class in CONFIGS)
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")
FILES = ("*.json", *(f"*{suffix}" for suffix in WEIGHT_SUFFIXES))


def read_checkpoint(path: Path) -> tuple[dict[str, torch.Tensor], dict | None]:
    """
    The tensors of a file or directory, and the `config.json` beside them, if any. Nothing in it is executed: a pickle
    that needs code is refused with [`ConversionError`], like checkpoints that are missing, damaged or ours.
    """
    source_config = json_beside(path, "config.json")
    if path.is_dir():
        refuse_diffusers(path)
        if str((source_config or {}).get("model_type")).startswith((*OWN_MODEL_TYPES, TYPE_PREFIX)):
            raise ConversionError(f"{path} is already a model of hf_liere; from_pretrained reads it.")
    tensors: dict[str, torch.Tensor] = {}
    for file in _weight_files(path):
        tensors.update(_read(file))
    return tensors, source_config


def json_beside(path: Path, name: str) -> dict | None:
    """The content of a json file beside the weights; `None` if it does not exist."""
    file = (path if path.is_dir() else path.parent) / name
    return parse_json(file.read_bytes(), file) if file.is_file() else None


def _weight_files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    for name in ("model.safetensors", "pytorch_model.bin"):
        if (path / name).is_file():
            return [path / name]
        if (index := path / f"{name}.index.json").is_file():
            return shards(index)
    found = sorted(file for file in path.iterdir() if file.suffix in WEIGHT_SUFFIXES)
    if len(found) != 1:
        raise ConversionError(
            f"{path.name} contains {[file.name for file in found] or 'no checkpoint'}: please name one file."
        )
    return found


def _read(file: Path) -> Mapping:
    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        checkpoint = torch.load(file, map_location="cpu", weights_only=True)
    # The readers raise any of these for other file formats.
    except (SafetensorError, pickle.UnpicklingError, RuntimeError, EOFError, OSError, LookupError, ValueError) as error:
        # Other messages describe torch's reader, not the file.
        known = isinstance(error, (SafetensorError, pickle.UnpicklingError, OSError))
        text = explain(error) if known else f"it is truncated or no checkpoint at all ({type(error).__name__})."
        raise ConversionError(f"{file.name} cannot be read: {text}") from error
    if not isinstance(checkpoint, Mapping):
        raise ConversionError(f"{file.name} contains a {type(checkpoint).__name__}, not a mapping of names to tensors.")
    return checkpoint
