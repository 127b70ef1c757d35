"""
peft adapters that were trained on a model with learned rotations. peft alone saves them without the patch, and when
loading, drops rotations that the base lacks. With this package imported, saving an adapter also writes the files of
`save_rotary`, and loading one first puts these rotations into the base.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import transformers
import wrapt
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers.utils import cached_file

from ..models.patched.modeling_patched import auto_classes
from ..models.patched.patched_configuration import TYPE_PREFIX
from ..storage.saved_model import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from .adapters import (
    PEFT_WEIGHTS,
    load_rotary,
    read_adapter,
    remove_rotations,
    require_same_patch,
    require_saved_together,
    stored_parameters,
    write_rotations,
)
from .apply import is_patched, wrap_once_imported


# The arguments of peft and transformers that locate files.
PLACE = ("revision", "subfolder", "cache_dir", "token", "local_files_only")


def restore_rotations(model: nn.Module, source: str | Path, place: dict, is_loaded: bool = False) -> None:
    """
    Give a base the rotations that a peft adapter was saved with, in place, before loading the adapter.

    Args:
        model: The base, or peft's model around it.
        source: Folder or repository of the adapter.
        place: Arguments of the loading function, among them those that locate files on the Hub.
        is_loaded: Whether the model already has an adapter of that name, whose values will be replaced.

    Raises:
        ValueError: if the rotations do not fit the base, the adapter has rotations without a patch and the base none,
            or a file cannot be read.
    """
    path = _find(source, ADAPTER_CONFIG, place)
    if path is None:
        if not is_patched(model) and (names := _rotations_in_weights(source, place)):
            raise ValueError(
                f"The adapter {source} contains rotations, {', '.join(names)}, which {model._get_name()} would drop: "
                "patch it first with the RotaryPatchConfig of their training."
            )
        return
    for name in (ADAPTER_WEIGHTS, *PEFT_WEIGHTS):
        _find(source, name, place)
    require_saved_together(path)
    config, _, tensors = read_adapter(path.parent)
    require_same_patch(model, config, source)
    if is_patched(model):
        if _rotations_in_weights(source, place):
            # peft loads trained copies (`modules_to_save`).
            return
        current = stored_parameters(model)
        if all(torch.equal(value, current[name].detach().cpu()) for name, value in tensors.items()):
            return
    if not is_loaded and any(hasattr(module, "base_layer") for module in model.modules()):
        raise ValueError(
            f"The rotations of the adapter {source} differ from those that this model's adapters share. Patch the "
            'base before any adapter, and train with LoraConfig(…, modules_to_save=["rotary_encoding"]), so that every '
            "adapter has its own."
        )
    load_rotary(model, path.parent)


def _find(source: str | Path, name: str, place: dict) -> Path | None:
    options = {key: place[key] for key in PLACE if place.get(key)}
    found = cached_file(str(source), name, _raise_exceptions_for_missing_entries=False, **options)
    return None if found is None else Path(found)


def _rotations_in_weights(source: str | Path, place: dict) -> list[str]:
    """Names of rotation parameters among the weights of an adapter."""
    path = next(filter(None, (_find(source, file_name, place) for file_name in PEFT_WEIGHTS)), None)
    if path is None:
        return []
    if path.suffix == ".safetensors":
        try:
            with safe_open(path, framework="pt") as file:
                names = list(file.keys())
        except SafetensorError as error:
            raise ValueError(f"{path} cannot be read ({error}): it is damaged or truncated.") from error
    else:
        names = list(torch.load(path, map_location="meta", weights_only=True))
    return [name for name in names if "rotary_encoding" in name.split(".")]


def _save(wrapped: Callable, model: Any, args: tuple, kwargs: dict) -> Any:
    """Wraps `PeftModel.save_pretrained`."""
    directory = Path(args[0] if args else kwargs["save_directory"])
    values, is_main = kwargs.get("state_dict"), kwargs.get("is_main_process", True)
    names = kwargs.get("selected_adapters") or model.peft_config
    folders = {name: directory if name == "default" else directory / name for name in names}
    if is_main and not is_patched(model):
        for folder in folders.values():
            remove_rotations(folder)
    result = wrapped(*args, **kwargs)
    if is_patched(model):
        for name, folder in folders.items():
            write_rotations(model, folder, values, is_main, name)
    return result


def _save_in_transformers(wrapped: Callable, model: Any, args: tuple, kwargs: dict) -> Any:
    """Wraps `save_pretrained` of transformers, which writes only the adapters of a model that has any."""
    has_adapters = getattr(model, "_hf_peft_config_loaded", False)
    if has_adapters and kwargs.get("is_main_process", True) and not is_patched(model):
        remove_rotations(args[0] if args else kwargs["save_directory"])
    return wrapped(*args, **kwargs)


def _restore_first(source: str, is_loaded: bool, wrapped: Callable, _: Any, args: tuple, kwargs: dict) -> Any:
    """Wraps `PeftModel.from_pretrained(model, model_id, …)` and `hotswap_adapter(model, model_name_or_path, …)`."""
    given = dict(zip(("model", source), args)) | kwargs
    restore_rotations(given["model"], given[source], kwargs, is_loaded)
    return wrapped(*args, **kwargs)


def _load_adapter(wrapped: Callable, model: Any, args: tuple, kwargs: dict) -> Any:
    """Wraps `PeftModel.load_adapter(model_id, adapter_name, …)`."""
    if model is None:
        # `PeftMixedModel`, another class, passes itself as an argument.
        model, *args = args
        wrapped = partial(wrapped, model)
    given = dict(zip(("model_id", "adapter_name"), args)) | kwargs
    restore_rotations(model, given["model_id"], kwargs, is_loaded=given["adapter_name"] in model.peft_config)
    return wrapped(*args, **kwargs)


def _load_into_transformers(wrapped: Callable, model: Any, args: tuple, kwargs: dict) -> Any:
    """Wraps `load_adapter(peft_model_id, …)` of transformers models, which `from_pretrained` also calls."""
    options = kwargs.get("load_config")
    source = args[0] if args else kwargs.get("peft_model_id") or getattr(options, "pretrained_model_name_or_path", None)
    if source is not None:
        restore_rotations(model, source, {**kwargs, **(kwargs.get("adapter_kwargs") or {})})
    return wrapped(*args, **kwargs)


def _base_model_class(wrapped: Callable, _: Any, args: tuple, kwargs: dict) -> type:
    """Wraps the lookup of a task-less adapter's base class for `AutoPeftModel`; Auto classes read both kinds."""
    found = wrapped(*args, **kwargs)
    plain = getattr(found, "plain_class", found)
    autos = auto_classes(plain.config_class) if plain is not found else {}
    return next((getattr(transformers, name) for name, kind in autos.items() if kind is plain), plain)


def _adapt_alike(peft: ModuleType) -> None:
    """In the tables by which peft looks up what to adapt, repeat every model type for the model with rotations."""
    for table in vars(peft.utils.constants).values():
        if isinstance(table, dict):
            table |= {f"{TYPE_PREFIX}{name}": value for name, value in table.items() if isinstance(name, str)}


PEFT_WRAPPERS: dict[str, Callable] = {
    "PeftModel.save_pretrained": _save,
    "PeftModel.from_pretrained": partial(_restore_first, "model_id", False),
    "PeftModel.load_adapter": _load_adapter,
    "PeftModel._get_base_model_class": _base_model_class,
}
wrap_once_imported("peft", PEFT_WRAPPERS)
wrapt.register_post_import_hook(_adapt_alike, "peft")
wrap_once_imported("peft.utils.hotswap", {"hotswap_adapter": partial(_restore_first, "model_name_or_path", True)})
wrap_once_imported("transformers.modeling_utils", {"PreTrainedModel.save_pretrained": _save_in_transformers})
wrap_once_imported("transformers.integrations.peft", {"PeftAdapterMixin.load_adapter": _load_into_transformers})
