"""
Saving of patched transformers of diffusers. With this package imported, `save_pretrained` of a patched model, or of a
pipeline around it, writes the plain model and beside it the files of `save_rotary`; `from_pretrained` of such a folder,
or of a repository on the Hub, puts the rotations back. The configuration of a patched model names its patch, so that
`from_config`, by which `EMAModel` builds a model for its averages, patches the new model too.
"""

from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download, snapshot_download
from huggingface_hub.errors import EntryNotFoundError
from torch import nn

from ..libraries.diffusion_patch import CONFIG_FIELD
from ..models.patched.rotary_patch import RotaryPatchConfig
from ..models.patched.tower_patch import patched_towers
from ..storage.saved_model import ADAPTER_CONFIG, ADAPTER_WEIGHTS, CONFIG
from .adapters import load_rotary, remove_rotations, require_saved_together, write_rotations
from .apply import is_patched, patch, wrap_once_imported


# The arguments of `from_pretrained` that locate files on the Hub.
LOCATION = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "token")

# Whether `from_pretrained` is building a model, whose rotations `_load` reads.
_loading = ContextVar("_loading", default=False)


def _save(wrapped: Callable, model: nn.Module, args: tuple, kwargs: dict) -> Any:
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


def _load(wrapped: Callable, _: Any, args: tuple, kwargs: dict) -> Any:
    """Wraps `ModelMixin.from_pretrained(pretrained_model_name_or_path, subfolder=…)`."""
    token = _loading.set(True)
    try:
        result = wrapped(*args, **kwargs)
    finally:
        _loading.reset(token)
    source = args[0] if args else kwargs["pretrained_model_name_or_path"]
    folder = None if source is None else _find_rotations(source, **kwargs)
    model = result[0] if isinstance(result, tuple) else result
    is_described = CONFIG_FIELD in model.config
    if folder is None and is_described:
        raise ValueError(
            f"{source} lacks the rotations that its {CONFIG} names ({CONFIG_FIELD}): copy {ADAPTER_CONFIG} and "
            f"{ADAPTER_WEIGHTS} there, or delete the field to load the model without them."
        )
    if folder is not None:
        if require_saved_together(folder / ADAPTER_CONFIG) and not is_described:
            raise ValueError(
                f"{source} contains the rotations of another model: its {CONFIG} names none ({CONFIG_FIELD}). Delete "
                f"{ADAPTER_CONFIG} and {ADAPTER_WEIGHTS} to load it without them."
            )
        load_rotary(model, folder)
    return result


def _build(wrapped: Callable, _: Any, args: tuple, kwargs: dict) -> Any:
    """Wraps `ConfigMixin.from_config(config, …)`, which `from_pretrained` also calls."""
    result = wrapped(*args, **kwargs)
    model = result[0] if isinstance(result, tuple) else result
    is_new = not _loading.get() and CONFIG_FIELD in model.config and not is_patched(model)
    # A model without values has no frequencies to start from.
    if is_new and not any(parameter.is_meta for parameter in model.parameters()):
        patch(model, RotaryPatchConfig.from_dict(model.config[CONFIG_FIELD]))
    return result


def _match_averages(wrapped: Callable, averages: Any, args: tuple, kwargs: dict) -> Any:
    """Wraps methods of `EMAModel`, which pair its averages with parameters by their order alone."""
    (parameters,) = (*args, *kwargs.values())
    parameters = list(parameters.parameters() if isinstance(parameters, nn.Module) else parameters)
    if len(parameters) != len(averages.shadow_params):
        raise ValueError(
            f"This EMAModel has averages of {len(averages.shadow_params)} parameters, not of {len(parameters)}: make "
            "it from the parameters and the config of the model after patch."
        )
    return wrapped(parameters)


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


wrap_once_imported(
    "diffusers.models.modeling_utils", {"ModelMixin.save_pretrained": _save, "ModelMixin.from_pretrained": _load}
)
wrap_once_imported("diffusers.configuration_utils", {"ConfigMixin.from_config": _build})
wrap_once_imported("diffusers.training_utils", {"EMAModel.step": _match_averages, "EMAModel.copy_to": _match_averages})
wrap_once_imported("diffusers.pipelines.pipeline_utils", {"DiffusionPipeline.download": _download})
