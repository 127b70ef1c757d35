"""Rotary patches in runs: flags, checks before anything is loaded, LoRA, and saving."""

import copy
import dataclasses
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from hf_liere import RotaryPatchConfig, is_patched, load_rotary, save_rotary, unpatch
from hf_liere.errors import InputError
from hf_liere.patching.adapters import read_adapter
from hf_liere.patching.modeling_patched import plan
from hf_liere.patching.peft_adapters import write_labels
from hf_liere.storage.saved_model import ADAPTER_CONFIG
from training.common.arguments import flag, require_numbers
from training.common.help import WRITTEN
from training.common.messages import abbreviate


UNPATCHED = "none"
# Subfolders of a run, see `save_patched`.
ROTARY, LORA = "rotary", "lora"


def _patch_flags(kind: type) -> type:
    """Decorator that adds the other fields of RotaryPatchConfig, whose docstring describes them, as flags."""
    flags = []
    for patch_field in dataclasses.fields(RotaryPatchConfig):
        accepted = patch_field.type
        if {float, int} <= set(get_args(accepted)):
            # A flag has one type; a float flag also takes integers.
            accepted = float | None if type(None) in get_args(accepted) else float
        elif any(get_origin(part) is Literal for part in get_args(accepted)):
            # RotaryPatchConfig checks the values, and `None` is one of them.
            accepted = str | None
        if patch_field.name not in (*WRITTEN, *kind.__annotations__):
            flags.append((patch_field.name, accepted, dataclasses.field(default=patch_field.default)))
    made = dataclasses.make_dataclass(kind.__name__, flags, bases=(dataclasses.dataclass(kind),))
    made.__module__ = kind.__module__
    return made


@_patch_flags
class PatchArguments:
    config_class = RotaryPatchConfig
    position_encoding: str | None = flag(
        None,
        "By default that of a patched checkpoint. Here `none` patches nothing, and `absolute` is refused. The names:",
    )


def refuse_other_patch(arguments: PatchArguments, own: dict | None, trains: bool) -> None:
    """Raises [`InputError`] for an encoding that differs from the checkpoint's `own`, or that would not be trained."""
    encoding = arguments.position_encoding
    if own is not None and encoding not in (None, own["position_encoding"]):
        raise InputError(
            f"--position_encoding {encoding}: the checkpoint is patched with {own['position_encoding']}; accepted: the "
            "same encoding, or an unpatched checkpoint."
        )
    if not trains and own is None and encoding not in (None, UNPATCHED):
        raise InputError(f"--position_encoding {encoding}: accepted with --do_train only.")


def patch_config(arguments: PatchArguments) -> RotaryPatchConfig:
    """The configuration that the flags describe. Raises [`InputError`] for values that no model accepts."""
    given = {name: None if value == "None" else value for name, value in vars(arguments).items()}
    if given["position_encoding"] is None:
        del given["position_encoding"]
    try:
        return RotaryPatchConfig(**given)
    except ValueError as error:
        raise InputError(str(error)) from error


def build_on_meta(auto_class: type, config: PreTrainedConfig) -> PreTrainedModel:
    """A model on the meta device, which has only shapes. Raises [`InputError`] if the class refuses `config`."""
    try:
        with torch.device("meta"):
            return auto_class.from_config(copy.deepcopy(config))
    except ValueError as error:
        # The other lines of the message list all classes of transformers.
        raise InputError(str(error).splitlines()[0]) from error


def check_patch(auto_class: type, config: PreTrainedConfig, patched: RotaryPatchConfig) -> None:
    """Raises [`InputError`] if a model of this configuration does not take the patch. Creates only its shapes."""
    model = build_on_meta(auto_class, config)
    try:
        plan(model, patched)
    except ValueError as error:
        raise InputError(" ".join(str(error).split())) from error


@dataclasses.dataclass
class LoraArguments:
    lora_rank: int = flag(8, "Rank of LoRA's matrices.")
    lora_alpha: float = flag(16.0, "LoRA's products are multiplied by lora_alpha / lora_rank.")
    lora_targets: str = flag(
        "", "Regular expression found in the names of the linear layers that get LoRA; by default all in attention."
    )

    def __post_init__(self):
        require_numbers(self, "lora_rank", lowest=1)
        require_numbers(self, "lora_alpha")
        try:
            re.compile(self.lora_targets)
        except re.error as error:
            found = f"--lora_targets {self.lora_targets!r}: {error}"
            raise InputError(f"{found}; accepted: a regular expression.") from error


def apply_lora(
    model: PreTrainedModel,
    attentions: Iterable[tuple[str, nn.Module]],
    arguments: LoraArguments,
    copied: list[str] | None = None,
) -> nn.Module:
    """
    Adds LoRA (Hu et al., 2022) to the linear layers of these attention modules that `lora_targets` matches.

    Args:
        attentions: (name in the model, module).
        copied: names of modules to copy; the copies are trained.

    Raises:
        InputError: if peft is not installed, or no linear layer matches.
    """
    peft = _peft()
    linear = [
        ".".join(filter(None, (attention_name, name)))
        for attention_name, attention in attentions
        for name, module in attention.named_modules()
        if isinstance(module, nn.Linear)
    ]
    targets = [name for name in linear if re.search(arguments.lora_targets, name)]
    if not targets:
        raise InputError(f"--lora_targets {arguments.lora_targets!r} matches none of {abbreviate(linear)}.")
    lora = peft.LoraConfig(
        r=arguments.lora_rank, lora_alpha=arguments.lora_alpha, target_modules=targets, modules_to_save=copied
    )
    return peft.get_peft_model(model, lora)


def unwrap_peft(model: nn.Module) -> PreTrainedModel:
    """The transformers model inside a peft model, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def save_patched(model: nn.Module, folder: Path, *processors: Any) -> None:
    """
    Saves what loads without the scripts: `rotary` for `load_rotary`, and either `lora` for peft and `hf-liere`, with
    the names of its classes, or the whole model.

    Args:
        model: a transformers model, patched or not, or a peft model around it.
        processors: of images or text, saved beside the adapter or the model.
    """
    if is_patched(model):
        save_rotary(model, folder / ROTARY, overwrite=True)
    base = unwrap_peft(model)
    place = folder if base is model else folder / LORA
    model.save_pretrained(place)
    if base is not model:
        write_labels(base.config, place)
    for processor in processors:
        processor.save_pretrained(place)


@dataclasses.dataclass(frozen=True)
class Adapters:
    """
    LoRA and rotations that [`save_patched`] wrote into a folder without the whole model.

    Attributes:
        base: Folder or name of the model that they adapt.
        rotary_patch: Configuration of the patch; `None` without rotations.
    """

    folder: Path
    base: str
    rotary_patch: dict | None

    def attach(self, model: PreTrainedModel, trains: bool) -> nn.Module:
        """
        The model with rotations and LoRA.

        Raises:
            ValueError: if the adapters do not fit the model, or peft is missing.
        """
        if is_patched(model):
            # The saved rotations replace those of the base.
            model = unpatch(model)
        if self.rotary_patch is not None:
            load_rotary(model, self.folder / ROTARY)
        return _peft().PeftModel.from_pretrained(model, self.folder / LORA, is_trainable=trains)


def find_adapters(name: str | None) -> Adapters | None:
    """
    The adapters in a folder, unless it contains a whole model.

    Raises:
        InputError: if they cannot be read or do not name their base model.
    """
    folder = Path(name or "")
    if name is None or (folder / "config.json").is_file():
        return None
    has_rotary, lora_config = (folder / ROTARY / ADAPTER_CONFIG).is_file(), folder / LORA / "adapter_config.json"
    if not lora_config.is_file():
        return None
    try:
        base = json.loads(lora_config.read_text(encoding="utf-8"))["base_model_name_or_path"]
        patched = read_adapter(folder / ROTARY)[0].to_dict() if has_rotary else None
    except (KeyError, ValueError) as error:
        raise InputError(f"--model_name_or_path {name}: its adapters cannot be read ({error}).") from error
    return Adapters(folder, base, patched)


def _peft():
    # Imported here because only runs with LoRA need peft.
    try:
        import peft
    except ImportError as error:
        raise InputError("LoRA needs peft, which is not installed: pip install peft.") from error
    return peft
