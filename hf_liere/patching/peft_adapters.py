"""
peft adapters that were trained on a model with learned rotations. peft alone saves them without the patch, and when
loading, drops rotations that the base lacks. Here saving an adapter also writes the files of `save_rotary`, and loading
one first puts these rotations into the base, see `guards.py`.
"""

import dataclasses
import json
import traceback
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ..storage.loading import find_beside, parse_json
from ..storage.saved_code import replace_file
from ..storage.saved_model import ADAPTER_CONFIG, ADAPTER_WEIGHTS, LABELS, PEFT_CONFIG, open_weights
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
from .apply import is_patched, require_patched
from .folding import fold_rotations
from .libraries.library_patch import LibraryPatch
from .modeling_patched import RotaryModelMixin, auto_classes, patch_around
from .patched_configuration import TYPE_PREFIX
from .tower_patch import patched_towers


if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel


COPIES = 'modules_to_save=["rotary_encoding"]'


def with_rotations(config: "PeftConfig") -> "PeftConfig":
    """
    A copy of a configuration of peft that also trains and saves the rotations of a patched model.

    ```python
    import hf_liere
    from peft import LoraConfig, get_peft_model
    from transformers import CLIPModel

    base = CLIPModel.from_pretrained("openai/clip-vit-base-patch16")
    hf_liere.patch(base, hf_liere.RotaryPatchConfig(position_encoding="comrope_ld", block_size=8))
    model = get_peft_model(base, hf_liere.with_rotations(LoraConfig(target_modules=["q_proj", "v_proj"])))
    ```
    """
    return dataclasses.replace(config, modules_to_save=[*(config.modules_to_save or ()), "rotary_encoding"])


def merge_and_fold(model: "PeftModel", grids: Iterable[tuple[int, ...]] | None = None) -> PreTrainedModel:
    """
    The model of peft with its adapters merged and its rotations folded, for inference, see [`folding.fold_rotations`].
    As after peft's `merge_and_unload`, the model given is used up.

    ```python
    import hf_liere
    from peft import LoraConfig, get_peft_model
    from transformers import CLIPModel

    base = CLIPModel.from_pretrained("openai/clip-vit-base-patch16")
    hf_liere.patch(base, hf_liere.RotaryPatchConfig(position_encoding="comrope_ld", block_size=8))
    model = get_peft_model(base, hf_liere.with_rotations(LoraConfig(target_modules=["q_proj", "v_proj"])))
    hf_liere.merge_and_fold(model).save_pretrained("clip-merged")
    ```

    Args:
        grids: As for [`folding.fold_rotations`].

    Raises:
        ValueError: if the model is not of peft, its adapters cannot be merged, or its rotations cannot be folded.
    """
    if not hasattr(model, "merge_and_unload"):
        raise ValueError(f"{type(model).__name__} is no model of peft; of a model without adapters, fold_rotations().")
    require_patched(model)
    return fold_rotations(model.merge_and_unload(), grids)


def restore_rotations(model: nn.Module, source: str | Path, place: dict, is_loaded: bool = False) -> None:
    """
    Give a base, or peft's model around it, the rotations that a peft adapter was saved with, before it is loaded.

    Args:
        place: Arguments of the loading function, among them those that locate files on the Hub.
        is_loaded: Whether the model already has an adapter of that name, whose values will be replaced.

    Raises:
        ValueError: if the rotations do not fit the base, the adapter has rotations without a patch and the base none,
            or a file cannot be read.
    """
    path = find_beside(source, ADAPTER_CONFIG, place)
    if path is None:
        if not is_patched(model) and (names := _rotations_in_weights(source, place)):
            raise ValueError(
                f"The adapter {source} contains rotations, {', '.join(names)}, which {model._get_name()} would drop: "
                "patch it first with the RotaryPatchConfig of their training."
            )
        return
    for name in (ADAPTER_WEIGHTS, *PEFT_WEIGHTS):
        find_beside(source, name, place)
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
            f"base before any adapter, and train with LoraConfig(…, {COPIES}), so that every adapter has its own."
        )
    load_rotary(model, path.parent)


def _rotations_in_weights(source: str | Path, place: dict) -> list[str]:
    """Names of rotation parameters among the weights of an adapter."""
    path = next(filter(None, (find_beside(source, file_name, place) for file_name in PEFT_WEIGHTS)), None)
    if path is None:
        return []
    if path.suffix == ".safetensors":
        with open_weights(path) as file:
            names = list(file.keys())
    else:
        names = list(torch.load(path, map_location="meta", weights_only=True))
    return _rotations_among(names)


def _rotations_among(names: Iterable[str]) -> list[str]:
    return [name for name in names if "rotary_encoding" in name.split(".")]


def read_state(wrapped: Callable, _: Any, args: tuple, kwargs: dict) -> Any:
    """Wraps `get_peft_model_state_dict(model, …)`, which diffusers' `save_lora_weights` gets its values from."""
    found, model = wrapped(*args, **kwargs), args[0] if args else kwargs["model"]
    # That writes them beside the adapter.
    is_saving = any(frame.f_code.co_name == "save_pretrained" for frame, _ in traceback.walk_stack(None))
    if is_patched(model) and not is_saving and not _rotations_among(found):
        warnings.warn(
            f"get_peft_model_state_dict leaves out the learned rotations of {type(model).__name__}: call save_rotary "
            f"too and load_rotary before loading, or adapt with LoraConfig(…, {COPIES}).",
            stacklevel=3,
        )
    return found


def write_state(wrapped: Callable, _: Any, args: tuple, kwargs: dict) -> Any:
    """Wraps `set_peft_model_state_dict(model, …)`, by which diffusers' `load_lora_weights` loads too."""
    result, model = wrapped(*args, **kwargs), args[0] if args else kwargs["model"]
    if lost := _rotations_among(result.unexpected_keys):
        raise ValueError(
            f"{type(model).__name__} has no place for the rotations {', '.join(lost)}: first patch it with the "
            f"RotaryPatchConfig of their training, then adapt with LoraConfig(…, {COPIES})."
        )
    return result


def refuse_mixture(wrapped: Callable, model: Any, args: tuple, kwargs: dict) -> Any:
    """Wraps what `PeftModel` does before a batch; one that fails later leaves hooks behind."""
    has_copies = any(hasattr(tower.rotary_encoding, "modules_to_save") for _, tower in patched_towers(model))
    if kwargs.get("adapter_names") is not None and has_copies:
        raise ValueError(
            f"adapter_names={kwargs['adapter_names']}: these adapters have rotations of their own ({COPIES}), each for "
            "a whole batch; accepted: one batch for each adapter (set_adapter), or rotations that adapters share."
        )
    return wrapped(*args, **kwargs)


def save_model(wrapped: Callable, model: PreTrainedModel, args: tuple, kwargs: dict) -> Any:
    """
    Wraps `save_pretrained` of transformers: a model with a patched part is saved as a patched model, and one that has
    adapters writes only these.
    """
    if not is_patched(model):
        if getattr(model, "_hf_peft_config_loaded", False) and kwargs.get("is_main_process", True):
            remove_rotations(args[0] if args else kwargs["save_directory"])
    elif not isinstance(model, RotaryModelMixin):
        for name, tower in patched_towers(model):
            if isinstance(tower.rotary_patch, LibraryPatch):
                raise ValueError(
                    f"{type(model).__name__} contains the rotations of {name} ({type(tower).__name__}), which "
                    f"from_pretrained cannot restore: save them with save_rotary(model.{name}, folder), and the model "
                    "after unpatch(model)."
                )
        patch_around(model)
        return model.save_pretrained(*args, **kwargs)
    return wrapped(*args, **kwargs)


def save_adapter(wrapped: Callable, model: Any, args: tuple, kwargs: dict) -> Any:
    """Wraps `PeftModel.save_pretrained`."""
    directory = Path(args[0] if args else kwargs["save_directory"])
    values, is_main = kwargs.get("state_dict"), kwargs.get("is_main_process", True)
    names = kwargs.get("selected_adapters") or model.peft_config
    folders = {name: directory if name == "default" else directory / name for name in names}
    if is_main and not is_patched(model):
        for folder in folders.values():
            remove_rotations(folder)
            (folder / LABELS).unlink(missing_ok=True)
    result = wrapped(*args, **kwargs)
    if is_patched(model):
        for name, folder in folders.items():
            write_rotations(model, folder, values, is_main, name)
            if is_main:
                _name_plain_class(type(model.get_base_model()), folder / PEFT_CONFIG)
                write_labels(getattr(model.get_base_model(), "config", None), folder)
    return result


def write_labels(config: Any, folder: Path) -> None:
    """Write the classes beside the adapter of a classifier, because the base's configuration has others or none."""
    # Models of other libraries have no such configuration.
    if isinstance(config, PreTrainedConfig) and "id2label" in config.to_diff_dict():
        names = [config.id2label[number] for number in sorted(config.id2label)]
        content = {"names": names, "problem_type": config.problem_type}
        replace_file(folder / LABELS, (json.dumps(content, indent=2) + "\n").encode())


def read_labels(folder: Path) -> dict[str, Any]:
    """What [`write_labels`] wrote, as fields of a configuration; empty if there is nothing."""
    if not (path := folder / LABELS).is_file():
        return {}
    content = parse_json(path.read_bytes(), path)
    names = [str(name) for name in content.get("names", ())]
    numbers = {name: number for number, name in enumerate(names)}
    return {"id2label": dict(enumerate(names)), "label2id": numbers, "problem_type": content.get("problem_type")}


def _name_plain_class(kind: type, path: Path) -> None:
    """An adapter without a task names the class of its base for `AutoPeftModel`; Auto classes read both kinds."""
    content = json.loads(path.read_bytes())
    if issubclass(kind, RotaryModelMixin) and content["auto_mapping"] and content["task_type"] is None:
        plain: Any = kind.plain_class
        autos = (name for name, one in auto_classes(plain.config_class).items() if one is plain)
        named = getattr(transformers, next(autos, ""), plain)
        content["auto_mapping"] = {"base_model_class": named.__name__, "parent_library": named.__module__}
        replace_file(path, json.dumps(content, indent=2, sort_keys=True).encode())


def describe_model(wrapped: Callable, _: Any, args: tuple, kwargs: dict) -> Any:
    """Wraps `BaseTuner.get_model_config`, by whose model type peft knows the modules to adapt."""
    found = wrapped(*args, **kwargs)
    is_rotary = isinstance(found, dict) and "rotary_patch" in found and "model_type" in found
    return {**found, "model_type": found["model_type"].removeprefix(TYPE_PREFIX)} if is_rotary else found


def _restoring(source: str, is_loaded: bool = False) -> Callable:
    """Wraps a function (model, source, …)."""

    def wrapper(wrapped: Callable, _: Any, args: tuple, kwargs: dict) -> Any:
        given = dict(zip(("model", source), args)) | kwargs
        restore_rotations(given["model"], given[source], kwargs, is_loaded=is_loaded)
        return wrapped(*args, **kwargs)

    return wrapper


# `PeftModel.from_pretrained` and `hotswap_adapter`.
load_model, swap_adapter = _restoring("model_id"), _restoring("model_name_or_path", is_loaded=True)


def load_adapter(wrapped: Callable, model: Any, args: tuple, kwargs: dict) -> Any:
    """Wraps `PeftModel.load_adapter(model_id, adapter_name, …)`."""
    if model is None:
        # `PeftMixedModel`, another class, passes itself as an argument.
        model, *args = args
        wrapped = partial(wrapped, model)
    given = dict(zip(("model_id", "adapter_name"), args)) | kwargs
    restore_rotations(model, given["model_id"], kwargs, is_loaded=given["adapter_name"] in model.peft_config)
    return wrapped(*args, **kwargs)


def load_natively(wrapped: Callable, model: Any, args: tuple, kwargs: dict) -> Any:
    """Wraps `load_adapter(peft_model_id, …)` of transformers models, which `from_pretrained` also calls."""
    options = kwargs.get("load_config")
    source = args[0] if args else kwargs.get("peft_model_id") or getattr(options, "pretrained_model_name_or_path", None)
    if source is not None:
        restore_rotations(model, source, {**kwargs, **(kwargs.get("adapter_kwargs") or {})})
    return wrapped(*args, **kwargs)
