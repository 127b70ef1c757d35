"""
Adapters of peft that were trained on a model with learned rotations. By itself, peft saves them without the patch, and
drops rotations that a base lacks when it loads them. With this package imported, every save of an adapter also writes
the files of `save_rotary`, and every load puts these rotations into the base first.
"""

from functools import partial
from pathlib import Path

import torch
import transformers

# Post-import hooks (PEP 369), because importing peft takes seconds, and wrappers that keep signatures.
import wrapt
from safetensors import safe_open
from torch import nn
from transformers.utils import cached_file

from ..models.patched.modeling_patched import TYPE_PREFIX, auto_classes
from ..storage.saved_weights import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from .adapters import load_rotary, read_adapter, require_same_patch, stored_parameters, write_rotations
from .apply import is_patched


WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
# Of the arguments of peft and transformers, those that say where files are.
PLACE = ("revision", "subfolder", "cache_dir", "token", "local_files_only")


def restore_rotations(model: nn.Module, source: str | Path, is_loaded: bool = False, **place) -> None:
    """
    Give a base the rotations that an adapter of peft was saved with, in place, before the adapter itself is loaded.

    Args:
        model: The base, or peft's model around it.
        source: Folder or repository of the adapter.
        is_loaded: Whether the model has an adapter of that name, whose values are to be replaced.
        place: `revision`, `subfolder` and other arguments that find files on the Hub.

    Raises:
        ValueError: if the rotations do not fit the base, which may have others, or the adapter contains rotations that
            were saved without their patch and the base has none.
    """
    path = _find(source, ADAPTER_CONFIG, place)
    if path is None:
        if not is_patched(model) and (names := _rotations_in_weights(source, place)):
            raise ValueError(
                f"The adapter {source} contains rotations, {', '.join(names)}, which {model._get_name()} would drop: "
                "patch it before, with the RotaryPatchConfig that they were trained with."
            )
        return
    _find(source, ADAPTER_WEIGHTS, place)
    config, _, tensors = read_adapter(path.parent)
    require_same_patch(model, config, source)
    if is_patched(model):
        if _rotations_in_weights(source, place):
            # Trained copies (`modules_to_save`) are loaded by peft.
            return
        current = stored_parameters(model)
        if all(torch.equal(value, current[name].detach().cpu()) for name, value in tensors.items()):
            return
    if not is_loaded and _has_adapters(model):
        raise ValueError(
            f"The adapter {source} has other rotations than the adapters of this model, which share theirs. Patch the "
            'base before any adapter, and train with LoraConfig(…, modules_to_save=["rotary_encoding"]), so that every '
            "adapter has its own."
        )
    load_rotary(model, path.parent)


def _has_adapters(model: nn.Module) -> bool:
    return any(hasattr(module, "base_layer") for module in model.modules())


def _find(source: str | Path, name: str, place: dict) -> Path | None:
    options = {"_raise_exceptions_for_missing_entries": False}
    found = cached_file(str(source), name, **options, **{key: value for key, value in place.items() if value})
    return None if found is None else Path(found)


def _rotations_in_weights(source: str | Path, place: dict) -> list[str]:
    """Names of the rotations among the weights of an adapter."""
    for file_name in WEIGHTS:
        path = _find(source, file_name, place)
        if path is None:
            continue
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt") as file:
                names = list(file.keys())
        else:
            names = list(torch.load(path, map_location="meta", weights_only=True))
        return [name for name in names if "rotary_encoding" in name.split(".")]
    return []


def _save(wrapped, model, args, kwargs):
    """Around `PeftModel.save_pretrained`."""
    result = wrapped(*args, **kwargs)
    if is_patched(model):
        directory = Path(args[0] if args else kwargs["save_directory"])
        values, is_main = kwargs.get("state_dict"), kwargs.get("is_main_process", True)
        for name in kwargs.get("selected_adapters") or model.peft_config:
            write_rotations(model, directory if name == "default" else directory / name, values, is_main, name)
    return result


def _from_pretrained(wrapped, _, args, kwargs):
    """Around `PeftModel.from_pretrained(model, model_id, …)`."""
    given = dict(zip(("model", "model_id"), args)) | kwargs
    restore_rotations(given["model"], given["model_id"], **_place(kwargs))
    return wrapped(*args, **kwargs)


def _load_adapter(wrapped, model, args, kwargs):
    """Around `PeftModel.load_adapter(model_id, adapter_name, …)`."""
    if model is None:
        # `PeftMixedModel` is another class, and calls the function with itself.
        model, *args = args
        wrapped = partial(wrapped, model)
    given = dict(zip(("model_id", "adapter_name"), args)) | kwargs
    is_loaded = given["adapter_name"] in model.peft_config
    restore_rotations(model, given["model_id"], is_loaded, **_place(kwargs))
    return wrapped(*args, **kwargs)


def _load_into_transformers(wrapped, model, args, kwargs):
    """Around `load_adapter(peft_model_id, …)` of models of transformers, which `from_pretrained` calls too."""
    options = kwargs.get("load_config")
    source = args[0] if args else kwargs.get("peft_model_id") or getattr(options, "pretrained_model_name_or_path", None)
    if source is not None:
        restore_rotations(model, source, **_place({**kwargs, **(kwargs.get("adapter_kwargs") or {})}))
    return wrapped(*args, **kwargs)


def _swap(wrapped, _, args, kwargs):
    """Around `hotswap_adapter(model, model_name_or_path, …)`, which replaces the weights of an adapter."""
    given = dict(zip(("model", "model_name_or_path"), args)) | kwargs
    restore_rotations(given["model"], given["model_name_or_path"], is_loaded=True, **_place(kwargs))
    return wrapped(*args, **kwargs)


def _base_model_class(wrapped, _, args, kwargs):
    """Around what an adapter without a task names for `AutoPeftModel`: an Auto class reads a base of both kinds."""
    found = wrapped(*args, **kwargs)
    plain = getattr(found, "plain_class", found)
    autos = auto_classes(plain.config_class) if plain is not found else {}
    return next((getattr(transformers, name) for name, kind in autos.items() if kind is plain), plain)


def _place(arguments: dict) -> dict:
    return {name: arguments[name] for name in PLACE if name in arguments}


def _guard(peft) -> None:
    """What happens once peft is imported."""
    for name, wrapper in {
        "save_pretrained": _save,
        "from_pretrained": _from_pretrained,
        "load_adapter": _load_adapter,
        "_get_base_model_class": _base_model_class,
    }.items():
        wrapt.wrap_function_wrapper(peft.PeftModel, name, wrapper)
    # By these tables, peft finds what to adapt in a model of a type.
    for table in vars(peft.utils.constants).values():
        if isinstance(table, dict):
            table |= {f"{TYPE_PREFIX}{name}": value for name, value in table.items() if isinstance(name, str)}


wrapt.register_post_import_hook(_guard, "peft")
wrapt.register_post_import_hook(
    lambda hotswap: wrapt.wrap_function_wrapper(hotswap, "hotswap_adapter", _swap), "peft.utils.hotswap"
)
wrapt.wrap_function_wrapper("transformers.integrations.peft", "PeftAdapterMixin.load_adapter", _load_into_transformers)
