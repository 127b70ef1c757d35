"""
Saving of patched diffusers models, see `guards.py`: `save_pretrained` of a patched model, or of a pipeline
around it, writes the plain model and beside it the files of `save_rotary`; `from_pretrained` of such a folder, or of a
repository on the Hub, puts the rotations back. The configuration of a patched model names its patch, so that
`from_config`, by which `EMAModel` builds a model for its averages, patches the new model too.
"""

from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from torch import nn

from ..storage.loading import choose_place, find_beside
from ..storage.saved_model import ADAPTER_CONFIG, ADAPTER_WEIGHTS, CONFIG
from .adapters import load_rotary, remove_rotations, require_saved_together, write_rotations
from .apply import is_patched, patch
from .libraries.diffusion_patch import CONFIG_FIELD
from .rotary_patch import RotaryPatchConfig
from .tower_patch import patched_towers


# Whether `from_pretrained` is building a model, whose rotations `load_model` reads.
_loading = ContextVar("_loading", default=False)


def save_model(wrapped: Callable, model: nn.Module, args: tuple, kwargs: dict) -> Any:
    """Wraps `ModelMixin.save_pretrained(save_directory, is_main_process, …)`."""
    given = dict(zip(("save_directory", "is_main_process"), args)) | kwargs
    towers = [tower for _, tower in patched_towers(model)]
    is_main_process = given.get("is_main_process", True)
    if towers:
        # Before the model, because `push_to_hub` uploads what the folder contains then.
        write_rotations(model, given["save_directory"], is_main_process=is_main_process)
    elif is_main_process:
        remove_rotations(given["save_directory"])
    taken = [(tower, tower._modules.pop("rotary_encoding")) for tower in towers]
    try:
        return wrapped(*args, **kwargs)
    finally:
        for tower, encoding in taken:
            tower.rotary_encoding = encoding


def load_model(wrapped: Callable, _: Any, args: tuple, kwargs: dict) -> Any:
    """Wraps `ModelMixin.from_pretrained(pretrained_model_name_or_path, subfolder=…)`."""
    token = _loading.set(True)
    try:
        result = wrapped(*args, **kwargs)
    finally:
        _loading.reset(token)
    source = args[0] if args else kwargs["pretrained_model_name_or_path"]
    path = None if source is None else find_beside(source, ADAPTER_CONFIG, kwargs)
    model = result[0] if isinstance(result, tuple) else result
    is_described = CONFIG_FIELD in model.config
    if path is None and is_described:
        raise ValueError(
            f"{source} lacks the rotations that its {CONFIG} names ({CONFIG_FIELD}): copy {ADAPTER_CONFIG} and "
            f"{ADAPTER_WEIGHTS} there, or delete the field to load the model without them."
        )
    if path is not None:
        find_beside(source, ADAPTER_WEIGHTS, kwargs)
        if require_saved_together(path) and not is_described:
            raise ValueError(
                f"{source} contains the rotations of another model: its {CONFIG} names none ({CONFIG_FIELD}). Delete "
                f"{ADAPTER_CONFIG} and {ADAPTER_WEIGHTS} to load it without them."
            )
        load_rotary(model, path.parent)
    return result


def build_model(wrapped: Callable, _: Any, args: tuple, kwargs: dict) -> Any:
    """Wraps `ConfigMixin.from_config(config, …)`, which `from_pretrained` also calls."""
    result = wrapped(*args, **kwargs)
    model = result[0] if isinstance(result, tuple) else result
    is_new = not _loading.get() and CONFIG_FIELD in model.config and not is_patched(model)
    # A model without values has no frequencies to start from.
    if is_new and not any(parameter.is_meta for parameter in model.parameters()):
        patch(model, RotaryPatchConfig.from_dict(model.config[CONFIG_FIELD]))
    return result


def match_averages(wrapped: Callable, averages: Any, args: tuple, kwargs: dict) -> Any:
    """Wraps methods of `EMAModel`, which pair its averages with parameters by their order alone."""
    (parameters,) = (*args, *kwargs.values())
    parameters = list(parameters.parameters() if isinstance(parameters, nn.Module) else parameters)
    if len(parameters) != len(averages.shadow_params):
        raise ValueError(
            f"This EMAModel has averages of {len(averages.shadow_params)} parameters, not of {len(parameters)}: make "
            "it from the parameters and the config of the model after patch."
        )
    return wrapped(parameters)


def download(wrapped: Callable, _: Any, args: tuple, kwargs: dict) -> Any:
    """Wraps `DiffusionPipeline.download(pretrained_model_name, …)`, which leaves out files that it does not know."""
    folder = wrapped(*args, **kwargs)
    source = args[0] if args else kwargs["pretrained_model_name"]
    patterns = [f"*/{name}" for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS)]
    # The folder has the name of its commit.
    snapshot_download(source, allow_patterns=patterns, **{**choose_place(kwargs), "revision": Path(folder).name})
    return folder
