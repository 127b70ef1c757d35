"""Locating checkpoints, and the checks of a loaded model before it is used."""

import json
import os
import pickle
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from safetensors import SafetensorError
from torch import nn
from transformers.utils import cached_file

from ..errors import InputError, silence
from .client import HubError, UnreachableError, retry, translate_hub_errors


class CheckpointError(InputError):
    """A checkpoint that is missing, unreadable or incomplete."""


class DiffusersCheckpointError(CheckpointError):
    """A diffusers model or pipeline, where Transformers models are accepted."""


def local_path(checkpoint: str | os.PathLike) -> Path | None:
    """
    The file or folder of a given name; `None` for the name of a repository on the Hub, `owner/name`. Raises
    [`CheckpointError`] if it is neither, or if its first part is a folder without the second.
    """
    path = Path(checkpoint)
    if path.exists():
        return path
    text = str(checkpoint)
    try:
        validate_repo_id(text)
        is_repository = text.count("/") == 1
    except HFValidationError:
        is_repository = False
    if isinstance(checkpoint, os.PathLike) or not is_repository or path.parent.is_dir():
        raise CheckpointError(f"{checkpoint}: no such file or directory; a repository on the Hub would be owner/name.")
    return None


def choose_place(options: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a loading function of transformers, peft or diffusers that locate files."""
    names = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")
    return {name: options[name] for name in names if options.get(name) is not None}


def find_beside(source: str | Path, name: str, options: dict[str, Any]) -> Path | None:
    """A file of the model or adapter that a loading function gets with these options; `None` if it has none."""
    found = cached_file(str(source), name, _raise_exceptions_for_missing_entries=False, **choose_place(options))
    return None if found is None else Path(found)


def loading_options(checkpoint: str | os.PathLike, revision: str | None = None) -> dict:
    """
    Arguments of `from_pretrained` that locate a checkpoint without long attempts to reach an unreachable Hub. Raises
    [`CheckpointError`] if the directory does not exist, [`HubError`] if the Hub has no such repository or refuses, or
    neither the Hub nor the cache is available.
    """
    folder = local_path(checkpoint)
    if folder is not None:
        index = folder / "model.safetensors.index.json"
        if index.is_file() and not (folder / "model.safetensors").is_file():
            # transformers would read shards of other folders.
            shards(index)
        return {"revision": revision}
    repo_id, api = str(checkpoint), HfApi()
    try:
        with translate_hub_errors(api, repo_id, revision):
            retry(lambda: api.model_info(repo_id, revision=revision), attempts=2)
    except UnreachableError:
        names = ("config.json", "adapter_config.json", "rotary_config.json")
        if not any(isinstance(try_to_load_from_cache(repo_id, name, revision=revision), str) for name in names):
            raise
        return {"revision": revision, "local_files_only": True}
    return {"revision": revision}


def locate(checkpoint: str | os.PathLike, patterns: Sequence[str], revision: str | None = None) -> Path:
    """A file or folder itself, or the downloaded files of a repository; may raise CheckpointError or HubError."""
    if (path := local_path(checkpoint)) is not None:
        return path
    options = loading_options(checkpoint, revision)
    with translate_hub_errors(HfApi(), str(checkpoint), revision):
        return Path(snapshot_download(str(checkpoint), allow_patterns=list(patterns), **options))


def find_diffusers_config(checkpoint: str | os.PathLike, revision: str | None = None) -> dict[str, Any] | None:
    """
    The configuration of a model or pipeline that diffusers saved, with its `_class_name`; `None` for others, and for
    what cannot be read.
    """
    for name in ("model_index.json", "config.json"):
        try:
            path = locate(checkpoint, (name,), revision) / name
            content = parse_json(path.read_bytes(), path) if path.is_file() else {}
        except (CheckpointError, HubError, OSError):
            continue
        if "_class_name" in content:
            return content
    return None


def refuse_diffusers(checkpoint: str | os.PathLike, revision: str | None = None) -> None:
    """Raise [`DiffusersCheckpointError`] for a model or pipeline that diffusers saved."""
    found = find_diffusers_config(checkpoint, revision)
    if found is not None:
        raise DiffusersCheckpointError(
            f"{checkpoint} contains the {found['_class_name']} of diffusers; accepted here are models with an Auto "
            "class of transformers. `hf-liere rope` describes this one, its own push_to_hub publishes it together with "
            "its rotations, and `hf-liere push` publishes rotations that save_rotary wrote to another folder."
        )


@contextmanager
def translate_loading_errors(checkpoint: str | os.PathLike, revision: str | None = None) -> Iterator[None]:
    """Turn any error that a damaged or foreign checkpoint causes into [`CheckpointError`]."""
    try:
        # transformers would also log a table of keys, and those that its tensor-parallel plan (a moving module) leaves
        # out.
        plans = [f"transformers.{package}.tensor_parallel" for package in ("distributed", "integrations")]
        with silence("transformers.modeling_utils", *plans):
            yield
    except (InputError, HubError):
        raise
    except Exception as error:
        refuse_diffusers(checkpoint, revision)
        raise CheckpointError(f"{checkpoint} cannot be loaded: {explain(error)}") from error


def explain(error: Exception) -> str:
    """One sentence on why a file cannot be read."""
    text = " ".join(str(error).split())
    if isinstance(error, pickle.UnpicklingError):
        # torch's message recommends weights_only=False, which would execute the code.
        if needed := re.search(r"GLOBAL (\S+)", text):
            return (
                f"it is a pickle that needs more than tensors ({needed[1]}), and code in a checkpoint is never "
                "executed here; if you trust it, load it elsewhere and save only its state_dict."
            )
        return "it is truncated or no checkpoint at all."
    # torch's archive reader raises a plain RuntimeError.
    if isinstance(error, (SafetensorError, EOFError)) or "PytorchStreamReader" in text:
        return f"it is truncated or no checkpoint at all ({type(error).__name__})."
    return text if isinstance(error, (OSError, ValueError)) and text else f"{type(error).__name__}: {text}"


def parse_json(content: bytes, path: Path) -> dict[str, Any]:
    """The object in the content of a json file. Raises [`CheckpointError`] if it contains anything else."""
    try:
        parsed = json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not a json file: {error}.") from None
    if not isinstance(parsed, dict):
        raise CheckpointError(f"{path} contains a {type(parsed).__name__}; accepted: a json object.")
    return parsed


def shards(index: Path) -> list[Path]:
    """
    The files that the index of a sharded checkpoint names. Raises [`CheckpointError`] if it is not an index, or a shard
    is missing or outside of the folder.
    """
    names = parse_json(index.read_bytes(), index).get("weight_map")
    if not isinstance(names, dict) or not names or not all(isinstance(name, str) for name in names.values()):
        raise CheckpointError(f"{index} names no files of its folder: it has no weight_map from tensors to files.")
    files = sorted(set(names.values()))
    for name in files:
        if Path(name).name != name:
            raise CheckpointError(f"{index} names no files of its folder but {name!r}; accepted are files beside it.")
        if not (index.parent / name).is_file():
            raise CheckpointError(f"{index.parent} contains no {name}: {index} names {name!r}, which is not beside it.")
    return [index.parent / name for name in files]


def require_loaded_keys(loading: Mapping, checkpoint: str | os.PathLike, besides: tuple[str, ...] = ()) -> None:
    """
    Raises [`CheckpointError`] naming the keys that are missing, of another shape or left over, by the key report of
    `from_pretrained` with `output_loading_info=True`; keys with the prefixes `besides` may be.
    """
    mismatched = {entry[0] if isinstance(entry, tuple) else entry for entry in loading["mismatched_keys"]}
    missing, unexpected = set(loading["missing_keys"]) | mismatched, loading["unexpected_keys"]
    missing, unexpected = ({key for key in keys if not key.startswith(besides)} for keys in (missing, unexpected))
    require_all_keys(missing, unexpected, checkpoint)


def require_all_keys(missing: Collection[str], unexpected: Collection[str], checkpoint: str | os.PathLike) -> None:
    """Raise [`CheckpointError`] naming the keys, if there are any."""
    if missing or unexpected:
        raise CheckpointError(
            f"The checkpoint {checkpoint} does not fit the model. Missing: {join_names(missing)}. "
            f"Unexpected: {join_names(unexpected)}."
        )


def require_finite_parameters(model: nn.Module, origin: str) -> None:
    """Raise [`CheckpointError`] naming the parameters that contain NaN or infinity, if any do; `origin` has them."""
    if broken := [name for name, parameter in model.named_parameters() if not torch.isfinite(parameter).all()]:
        raise CheckpointError(
            f"{origin} contains NaN or infinity in {join_names(broken)}; accepted are finite weights."
        )


def join_names(keys: Iterable[str], most: int = 10) -> str:
    """The first names in order, and the number of others."""
    keys = sorted(keys)
    more = f" and {len(keys) - most} more" if len(keys) > most else ""
    return f"{', '.join(keys[:most])}{more}" if keys else "none"
