"""
What importing this package replaces in other libraries: the functions by which they save and load models, so that
learned rotations are neither lost nor mixed up. `HF_LIERE_GUARDS=0` leaves all libraries as they are.
"""

import importlib
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from inspect import getattr_static
from types import ModuleType
from typing import Any

import wrapt
from torch import nn

from .modeling_patched import RotaryModelMixin


@dataclass
class Guard:
    """
    A function of another library, replaced as soon as its module is imported: some libraries take seconds.

    Attributes:
        module, name: Where the library looks it up.
        wrapper: A function (wrapped, instance, args, kwargs) of this folder, as module.name.
        why: What it does beside what the function does.
        is_on: Whether it is replaced, or will be.
        replaced: Where and by what, once it is.
    """

    module: str
    name: str
    wrapper: str
    why: str
    is_on: bool = field(default=False, init=False)
    replaced: tuple[Any, str, wrapt.FunctionWrapper] | None = field(default=None, init=False)

    def install(self) -> None:
        if not self.is_on:
            self.is_on = True
            # These hooks cannot be removed; one that is called again finds nothing to do.
            wrapt.register_post_import_hook(self._replace, self.module)

    def uninstall(self) -> None:
        self.is_on = False
        if self.replaced is not None:
            parent, name, replacement = self.replaced
            # If another library has wrapped it since, leave it in place; it does nothing.
            if getattr_static(parent, name) is replacement:
                _put(parent, name, replacement, replacement.__wrapped__)
                self.replaced = None

    def _replace(self, module: ModuleType) -> None:
        if not self.is_on or self.replaced is not None:
            return
        try:
            parent, name, original = wrapt.resolve_path(module, self.name)
        except AttributeError:
            warnings.warn(
                f"This release has no {self.module}.{self.name}, which hf_liere replaces so that {self.why}. Save "
                "rotations with save_rotary, and load them with load_rotary.",
                stacklevel=2,
            )
        else:
            self.replaced = parent, name, wrapt.FunctionWrapper(original, self._call, enabled=lambda: self.is_on)
            _put(parent, name, original, self.replaced[2])

    def _call(self, wrapped: Callable, instance: Any, args: tuple, kwargs: dict) -> Any:
        module, _, name = self.wrapper.partition(".")
        return getattr(importlib.import_module(f".{module}", __package__), name)(wrapped, instance, args, kwargs)


def _put(parent: Any, name: str, current: Any, wanted: Any) -> None:
    """Set a function where it is looked up, also by modules that have imported it before."""
    setattr(parent, name, wanted)
    for module in [*sys.modules.values()] if isinstance(parent, ModuleType) else []:
        if getattr(module, "__dict__", {}).get(name) is current:
            setattr(module, name, wanted)


SAVES = "a model with a patched part is saved as a patched one, and one without rotations removes those in the folder"
BESIDE = "rotations are saved beside the adapter or the model"
RESTORES = "rotations beside the adapter or the model are put into it"
NAMES = "rotations that it leaves out are named"
FITS = "rotations without a place are refused"
MIXED = "mixed batches are refused where adapters have rotations of their own"
FINDS = "modules to adapt are found for patched models too"
BUILDS = "a model whose configuration names a patch is patched"
AVERAGES = "averages of other parameters are refused"
DOWNLOADS = "files of rotations are downloaded too"
PEFT, STATE, TUNERS = "peft.peft_model", "peft.utils.save_and_load", "peft.tuners.tuners_utils"
MODELING, EMA = "diffusers.models.modeling_utils", "diffusers.training_utils"
CONFIGURATION, PIPELINES = "diffusers.configuration_utils", "diffusers.pipelines.pipeline_utils"
GUARDS = (
    Guard("transformers.modeling_utils", "PreTrainedModel.save_pretrained", "peft_adapters.save_model", SAVES),
    Guard("transformers.integrations.peft", "PeftAdapterMixin.load_adapter", "peft_adapters.load_natively", RESTORES),
    Guard(PEFT, "PeftModel.save_pretrained", "peft_adapters.save_adapter", BESIDE),
    Guard(PEFT, "PeftModel.from_pretrained", "peft_adapters.load_model", RESTORES),
    Guard(PEFT, "PeftModel.load_adapter", "peft_adapters.load_adapter", RESTORES),
    Guard(PEFT, "PeftModel._enable_peft_forward_hooks", "peft_adapters.refuse_mixture", MIXED),
    Guard("peft.utils.hotswap", "hotswap_adapter", "peft_adapters.swap_adapter", RESTORES),
    Guard(STATE, "get_peft_model_state_dict", "peft_adapters.read_state", NAMES),
    Guard(STATE, "set_peft_model_state_dict", "peft_adapters.write_state", FITS),
    Guard(TUNERS, "BaseTuner.get_model_config", "peft_adapters.describe_model", FINDS),
    Guard(MODELING, "ModelMixin.save_pretrained", "diffusers_models.save_model", BESIDE),
    Guard(MODELING, "ModelMixin.from_pretrained", "diffusers_models.load_model", RESTORES),
    Guard(CONFIGURATION, "ConfigMixin.from_config", "diffusers_models.build_model", BUILDS),
    Guard(EMA, "EMAModel.step", "diffusers_models.match_averages", AVERAGES),
    Guard(EMA, "EMAModel.copy_to", "diffusers_models.match_averages", AVERAGES),
    Guard(PIPELINES, "DiffusionPipeline.download", "diffusers_models.download", DOWNLOADS),
)


def install_guards() -> None:
    """Replace the functions of `GUARDS`, now or once they are imported, unless `HF_LIERE_GUARDS=0`."""
    if os.environ.get("HF_LIERE_GUARDS") != "0":
        for guard in GUARDS:
            guard.install()


def uninstall_guards() -> None:
    """Restore the functions of `GUARDS`, which `install_guards` can replace again."""
    for guard in GUARDS:
        guard.uninstall()


def warn_unguarded(encoding: nn.Module, prefix: str, keep_vars: bool) -> None:
    """State dict pre-hook of rotations: without guards, a `save_pretrained` that needs one says what it leaves out."""
    for frame, _ in [] if any(guard.is_on for guard in GUARDS) else traceback.walk_stack(None):
        saved = frame.f_locals.get("self")
        if frame.f_code.co_name == "save_pretrained" and not isinstance(saved, RotaryModelMixin):
            warnings.warn(
                f"{type(saved).__name__}.save_pretrained does not save how the model is patched, because hf_liere has "
                "replaced no functions (HF_LIERE_GUARDS=0 or uninstall_guards): call save_rotary too.",
                stacklevel=2,
            )
            return
