"""
Saving of patched transformers of diffusers. With this package imported, `save_pretrained` of a patched model, or of a
pipeline around it, writes the plain model and beside it the files of `save_rotary`; `from_pretrained` of such a folder,
or of a repository on the Hub, puts the rotations back.
"""

import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import wrapt
from huggingface_hub import hf_hub_download, snapshot_download
from huggingface_hub.errors import EntryNotFoundError
from torch import nn

from ..models.patched.tower_patch import patched_towers
from ..storage.saved_model import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from .adapters import load_rotary, write_rotations


# The arguments of `from_pretrained` that locate files on the Hub.
LOCATION = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "token")


def _save(wrapped: Callable, model: nn.Module, args: tuple, kwargs: dict) -> Any:
    """Wraps `ModelMixin.save_pretrained(save_directory, is_main_process, …)`."""
    given = dict(zip(("save_directory", "is_main_process"), args)) | kwargs
    towers = [tower for _, tower in patched_towers(model)]
    if towers:
        # Before the model, because `push_to_hub` uploads what the folder contains then.
        write_rotations(model, given["save_directory"], is_main_process=given.get("is_main_process", True))
    elif (Path(given["save_directory"]) / ADAPTER_CONFIG).is_file():
        warnings.warn(
            f"{given['save_directory']} contains the rotations of another model, which from_pretrained would put into "
            f"this one: delete {ADAPTER_CONFIG} and {ADAPTER_WEIGHTS} there to load it without them.",
            stacklevel=3,
        )
    taken = [(tower, tower._modules.pop("rotary_encoding")) for tower in towers]
    try:
        return wrapped(*args, **kwargs)
    finally:
        for tower, encoding in taken:
            tower.rotary_encoding = encoding


def _load(wrapped: Callable, _: Any, args: tuple, kwargs: dict) -> Any:
    """Wraps `ModelMixin.from_pretrained(pretrained_model_name_or_path, subfolder=…)`."""
    result = wrapped(*args, **kwargs)
    source = args[0] if args else kwargs["pretrained_model_name_or_path"]
    folder = None if source is None else _find_rotations(source, **kwargs)
    if folder is not None:
        load_rotary(result[0] if isinstance(result, tuple) else result, folder)
    return result


def _find_rotations(source: str | Path, subfolder: str | None = None, **options: Any) -> Path | None:
    """The folder of the rotations beside a model, local or in the Hub's cache; `None` if there are none."""
    if Path(source).exists():
        folder = Path(source, subfolder or "")
        return folder if (folder / ADAPTER_CONFIG).is_file() else None
    try:
        place = {"subfolder": subfolder, **_choose(options)}
        files = [hf_hub_download(str(source), name, **place) for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS)]
    except EntryNotFoundError:
        return None
    return Path(files[0]).parent


def _download(wrapped: Callable, _: Any, args: tuple, kwargs: dict) -> Any:
    """Wraps `DiffusionPipeline.download(pretrained_model_name, …)`, which leaves out files that it does not know."""
    folder = wrapped(*args, **kwargs)
    source = args[0] if args else kwargs["pretrained_model_name"]
    patterns = [f"*/{name}" for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS)]
    # The folder has the name of its commit.
    snapshot_download(source, allow_patterns=patterns, **{**_choose(kwargs), "revision": Path(folder).name})
    return folder


def _choose(options: dict[str, Any]) -> dict[str, Any]:
    return {name: options[name] for name in LOCATION if options.get(name) is not None}


def _guard_models(modeling: ModuleType) -> None:
    """Install the wrappers once diffusers is imported."""
    wrapt.wrap_function_wrapper(modeling, "ModelMixin.save_pretrained", _save)
    wrapt.wrap_function_wrapper(modeling, "ModelMixin.from_pretrained", _load)


def _guard_pipelines(pipelines: ModuleType) -> None:
    wrapt.wrap_function_wrapper(pipelines, "DiffusionPipeline.download", _download)


wrapt.register_post_import_hook(_guard_models, "diffusers.models.modeling_utils")
wrapt.register_post_import_hook(_guard_pipelines, "diffusers.pipelines.pipeline_utils")
