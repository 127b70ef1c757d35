"""
Saving of patched transformers of diffusers. With this package imported, `save_pretrained` of a patched model, or of a
pipeline around it, writes the plain model and beside it the files of `save_rotary`; `from_pretrained` of such a folder
puts the rotations back.
"""

import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import wrapt
from torch import nn

from ..models.patched.tower_patch import patched_towers
from ..storage.saved_model import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from .adapters import load_rotary, write_rotations


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
    folder = Path(source or "", kwargs.get("subfolder") or "")
    if source is not None and (folder / ADAPTER_CONFIG).is_file():
        load_rotary(result[0] if isinstance(result, tuple) else result, folder)
    return result


def _guard(modeling: ModuleType) -> None:
    """Install the wrappers once diffusers is imported."""
    wrapt.wrap_function_wrapper(modeling, "ModelMixin.save_pretrained", _save)
    wrapt.wrap_function_wrapper(modeling, "ModelMixin.from_pretrained", _load)


wrapt.register_post_import_hook(_guard, "diffusers.models.modeling_utils")
