"""
Models of transformers with learned rotations, as classes with their own `model_type`: `RotaryLlamaForCausalLM` is
`LlamaForCausalLM` with rotations, `RotaryLlamaConfig` its configuration, and so on for every class that transformers
exports. They are made when they are first asked for, as attributes of this module. `from_pretrained` and the Auto
classes restore them with their rotations, by this package or by the code that is saved with a checkpoint.
"""

import functools

import transformers
from huggingface_hub.dataclasses import strict
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.models.auto import modeling_auto

from .rotary_patch import RotaryPatchConfig, attach, patched_towers, plan


# Of the names of classes, and of model types.
PREFIX, TYPE_PREFIX = "Rotary", "rotary_"
PRETRAINED_PLANES = {"position_encoding": "rope_mixed", "rotary_init": "pretrained"}


class RotaryConfigMixin:
    """Configurations that check and complete `rotary_patch`, and name every Auto class in `auto_map`."""

    # The part for images of a configuration with several is another class.
    base_config_key = ""
    _default_patch = {}

    def __post_init__(self, **kwargs):
        self.rotary_patch = RotaryPatchConfig.from_dict(self.rotary_patch or self._default_patch).to_dict()
        kwargs["auto_map"] = {**self._auto_map, **(kwargs.get("auto_map") or {})}
        super().__post_init__(**kwargs)


class RotaryModelMixin:
    """Model classes that attach the rotations which `config.rotary_patch` describes."""

    def __init__(self, config):
        super().__init__(config)
        attach(plan(self, RotaryPatchConfig.from_dict(config.rotary_patch)))

    def initialize_weights(self) -> None:
        super().initialize_weights()
        # transformers leaves the initialisation of a nested PreTrainedModel to that model, which knows no generators.
        # Parameters that were loaded are marked and keep their values.
        for _, tower in patched_towers(self):
            tower.rotary_patch.reset_parameters(tower)


def __getattr__(name: str) -> type:
    plain = getattr(transformers, name.removeprefix(PREFIX), None) if name.startswith(PREFIX) else None
    if isinstance(plain, type) and issubclass(plain, PreTrainedConfig):
        return rotary_config(plain)
    if isinstance(plain, type) and issubclass(plain, PreTrainedModel) and plain.config_class is not None:
        return rotary_class(plain)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def rotary_config(plain: type[PreTrainedConfig]) -> type[PreTrainedConfig]:
    """The configuration class with `rotary_patch` (see [`RotaryPatchConfig`]) of a configuration class."""
    return _classes(plain)[plain]


def rotary_class(plain: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """
    The class with rotations of a model class.

    Raises:
        ValueError: if its name, or the `model_type` of its configuration, do not lead to it in transformers, so that
            nothing could restore it.
    """
    if not is_restorable(plain):
        raise ValueError(
            f"{plain.__name__} has no class that reloads with rotations: it is no model that transformers exports with "
            "a model_type of its own."
        )
    classes = _classes(plain.config_class)
    if plain not in classes:
        classes[plain] = _make_model(plain, classes[plain.config_class])
    return classes[plain]


def is_restorable(plain: type) -> bool:
    """Whether [`rotary_class`] has a class with rotations of a model class."""
    kind = getattr(getattr(plain, "config_class", None), "model_type", None)
    is_exported = getattr(transformers, plain.__name__, None) is plain
    return is_exported and kind in CONFIG_MAPPING and CONFIG_MAPPING[kind] is plain.config_class


@functools.cache
def _classes(plain: type[PreTrainedConfig]) -> dict[type, type]:
    """The configuration class with rotations of a plain one, and the models that the Auto classes find for it."""
    config = _make_config(plain)
    classes, autos = {plain: config}, auto_classes(plain)
    for auto_name, model in autos.items():
        if model not in classes:
            classes[model] = _make_model(model, config)
            classes[model].register_for_auto_class(auto_name)
        getattr(transformers, auto_name).register(config, classes[model], exist_ok=True)
    config._auto_map = {name: f"modeling_patched.{classes[model].__name__}" for name, model in autos.items()}
    config._auto_map["AutoConfig"] = f"modeling_patched.{config.__name__}"
    config.register_for_auto_class()
    return classes


def auto_classes(plain: type[PreTrainedConfig]) -> dict[str, type[PreTrainedModel]]:
    """By name of an Auto class, the model that it returns for a configuration class."""
    found = {}
    for name, auto_class in vars(modeling_auto).items():
        mapping = getattr(auto_class, "_model_mapping", None)
        if name.startswith("Auto") and mapping is not None and hasattr(transformers, name) and plain in mapping:
            models = mapping[plain]
            model = models[0] if isinstance(models, (list, tuple)) else models
            # Models of text and images are also found as their part for text.
            if getattr(model, "config_class", None) is plain:
                found[name] = model
    return found


def _make_config(plain: type[PreTrainedConfig]) -> type[PreTrainedConfig]:
    class Made(RotaryConfigMixin, plain):
        model_type = f"{TYPE_PREFIX}{plain.model_type}"
        rotary_patch: dict | None = None

    parts = [plain, *(kind for kind in plain.sub_configs.values() if kind is not None)]
    if any("rope" in name for part in parts for name in getattr(part, "__dataclass_fields__", ())):
        Made._default_patch = PRETRAINED_PLANES
    _keep_renaming(plain.model_type, Made.model_type)
    return strict(_named(Made, plain, f"Configuration of {plain.__name__} and `rotary_patch`: [`RotaryPatchConfig`]."))


def _make_model(plain: type[PreTrainedModel], config: type[PreTrainedConfig]) -> type[PreTrainedModel]:
    class Made(RotaryModelMixin, plain):
        config_class = config
        plain_class = plain
        # A generator rounded to bfloat16 rotates distant patches by several degrees too much.
        _keep_in_fp32_modules_strict = [*(plain._keep_in_fp32_modules_strict or ()), "rotary_encoding"]

    made = _named(Made, plain, f"[`{plain.__name__}`] with learned rotations.")
    _keep_renaming(plain.__name__, made.__name__)
    # Where no Auto class returns the model, its code must be saved too.
    made.register_for_auto_class("AutoModel")
    return made


def _named(made: type, plain: type, doc: str) -> type:
    made.__name__ = made.__qualname__ = f"{PREFIX}{plain.__name__}"
    made.__module__, made.__doc__ = __name__, doc
    return made


def _keep_renaming(plain: str, rotary: str) -> None:
    """transformers looks up by class name or type how keys of weights are renamed when they are loaded and saved."""
    renaming = get_checkpoint_conversion_mapping(plain)
    if renaming is not None:
        register_checkpoint_conversion_mapping(rotary, renaming, overwrite=True)
