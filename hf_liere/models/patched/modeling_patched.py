"""
Models of transformers with learned rotations, as classes with their own `model_type`: `RotaryLlamaForCausalLM` is
`LlamaForCausalLM` with rotations, `RotaryLlamaConfig` its configuration, and so on for every class that transformers
exports. They are made when they are first asked for, as attributes of this module. A model that is patched becomes one
of them, in place. `from_pretrained` and the Auto classes restore them with their rotations, by this package or by the
code that is saved with a checkpoint.
"""

import functools
import warnings
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import replace
from typing import get_args

import transformers
from huggingface_hub.dataclasses import strict
from torch import nn
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import (
    USER_REGISTERED_MAPPINGS,
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.models.auto import modeling_auto
from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY

from ..saved_code import SavesItsCode
from .rotary_patch import RotaryPatchConfig, attach, detach, patched_towers, plan


# Of the names of classes, and of model types.
PREFIX, TYPE_PREFIX = "Rotary", "rotary_"
PRETRAINED_PLANES = {"position_encoding": "rope_mixed", "rotary_init": "pretrained"}
# In files, the value of one plain field is inside of a dictionary with this note. Plain classes, which would drop the
# rotations, refuse such a value, and their error contains the note. Most families have one of these fields.
NOTE = "note"
HOW_TO_LOAD = (
    "These weights have learned rotations: import hf_liere and load them with an Auto class, or pass "
    "trust_remote_code=True to one."
)
CARRIERS = ("initializer_range", "initializer_factor", "tie_word_embeddings")
# The configuration of the model under construction. `LlamaForSequenceClassification` and others make their base by an
# Auto class, of the same configuration: it is patched as a part of them.
_being_made = ContextVar("_being_made", default=None)


class _ModelType:
    """
    `rotary_…` as an attribute of a configuration class, and in files. A configuration answers with the plain type: by
    that, other libraries look up what they know of a model.
    """

    def __init__(self, plain: str):
        self.plain = plain

    def __get__(self, config: PreTrainedConfig | None, kind: type | None = None) -> str:
        return f"{TYPE_PREFIX}{self.plain}" if config is None else self.plain


class _Made:
    """Objects of classes that are made here: pickle does not find those of users' classes by their names."""

    plain_class: type

    def __reduce__(self):
        return _new, (self.plain_class,), vars(self).copy()


class RotaryConfigMixin(_Made, SavesItsCode):
    """Configurations that check and complete `rotary_patch`, and name every Auto class in `auto_map`."""

    # The part for images of a configuration with several is another class.
    base_config_key = ""
    # Names of configurations in this one whose models contain rotations.
    rotary_parts = ()
    _default_patch = {}

    def __post_init__(self, **kwargs):
        self.rotary_patch = RotaryPatchConfig.from_dict(self.rotary_patch or self._default_patch).to_dict()
        kwargs["auto_map"] = {**self._auto_map, **(kwargs.get("auto_map") or {})}
        super().__post_init__(**kwargs)

    @classmethod
    def get_config_dict(cls, *args, **kwargs) -> tuple[dict, dict]:
        """Files of the plain model are read without a warning: its rotations start neutral."""
        values, unused = super().get_config_dict(*args, **kwargs)
        if values.get("model_type") == cls.plain_class.model_type:
            values["model_type"] = cls.model_type
        return values, unused

    @classmethod
    def from_dict(cls, config_dict: dict, **kwargs):
        return super().from_dict(_without_notes(config_dict), **kwargs)

    @classmethod
    def from_json_file(cls, json_file):
        return cls.from_dict(cls._dict_from_json_file(json_file))

    def to_diff_dict(self) -> dict:
        """What is written to files."""
        values = super().to_diff_dict()
        _add_note(values, self)
        for name in self.rotary_parts:
            _add_note(values[name], getattr(self, name))
        return values


def _add_note(values: dict, config: PreTrainedConfig) -> None:
    carrier = _carrier(config.plain_class if isinstance(config, RotaryConfigMixin) else type(config))
    if carrier is not None:
        values[carrier] = {"value": getattr(config, carrier), NOTE: HOW_TO_LOAD}


def _without_notes(value):
    if not isinstance(value, dict):
        return value
    # A label may be called "note", too.
    if value.keys() == {"value", NOTE} and isinstance(value[NOTE], str):
        return value["value"]
    return {name: _without_notes(inner) for name, inner in value.items()}


@functools.cache
def _carrier(plain: type[PreTrainedConfig]) -> str | None:
    """The first field that refuses dictionaries."""
    fields = plain.__dataclass_fields__
    own = [name for name in fields if name not in PreTrainedConfig.__dataclass_fields__]
    for name in (*CARRIERS, *own):
        if name in own and set(get_args(fields[name].type) or [fields[name].type]) <= {int, float, bool, type(None)}:
            return name
    return None


class RotaryModelMixin(_Made):
    """
    Model classes whose rotations `config.rotary_patch` describes. In a model with several parts, those around the
    rotations have such classes too, and their own configurations.
    """

    # Writes what `save_rotary` writes; the package sets it, as that is not part of the code of a checkpoint.
    write_rotations: Callable | None = None

    def __init__(self, config):
        is_part = _being_made.get() is config
        token = _being_made.set(config)
        try:
            super().__init__(config)
        finally:
            _being_made.reset(token)
        if not is_part:
            patch = RotaryPatchConfig.from_dict(config.rotary_patch)
            patch = replace(patch, target=_target_in(self, patch.target))
            config.rotary_patch = patch.to_dict()
            patch_in_place(self, plan(self, patch))

    def initialize_weights(self) -> None:
        super().initialize_weights()
        # transformers leaves the initialisation of a nested PreTrainedModel to that model, which knows no generators.
        # Parameters that were loaded are marked and keep their values.
        for _, tower in patched_towers(self):
            tower.rotary_patch.reset_parameters(tower)

    def save_pretrained(
        self, save_directory, is_main_process: bool = True, state_dict: dict | None = None, push_to_hub=False, **kwargs
    ) -> None:
        """
        As of the plain class, with the rotations in weights and configuration. Where the plain class is not one of
        transformers, or only adapters of peft are saved, the files of `save_rotary` are written beside them.
        """
        given = {"is_main_process": is_main_process, "state_dict": state_dict, **kwargs}
        if not any(True for _ in patched_towers(self)):
            # A part of it was unpatched by itself.
            unpatch_in_place(self)
            self.save_pretrained(save_directory, push_to_hub=push_to_hub, **given)
            return
        if not isinstance(self.config, RotaryConfigMixin):
            _as_whole(self).save_pretrained(save_directory, push_to_hub=push_to_hub, **given)
            return
        self._describe_patches()
        self._name_in_auto_map()
        are_enough = is_restorable(self.plain_class) and not getattr(self, "_hf_peft_config_loaded", False)
        if are_enough or self.write_rotations is None:
            super().save_pretrained(save_directory, push_to_hub=push_to_hub, **given)
        else:
            names = ("repo_id", "commit_message", "private", "create_pr")
            hub = {"token": kwargs.get("token"), **{name: given.pop(name) for name in names if name in given}}
            super().save_pretrained(save_directory, **given)
            type(self).write_rotations(self, save_directory, state_dict, is_main_process)
            if push_to_hub:
                self.push_to_hub(hub.pop("repo_id", str(save_directory)), **hub)

    def _describe_patches(self) -> None:
        """
        Derive `config.rotary_patch` from the rotations that there are, which parts may have got or lost by themselves.
        Where no patch describes all of them, the configuration says so to whoever loads it.
        """
        patches = {name: tower.rotary_patch.config for name, tower in patched_towers(self)}
        target = self.config.rotary_patch.get("target")
        first, *others = (replace(patch, target=None) for patch in patches.values())
        if all(other == first for other in others) and not (others and target):
            self.config.rotary_patch = {**first.to_dict(), "target": target}
            return
        warnings.warn(
            f"{self._get_name()} has parts that are patched differently, so what is saved cannot be loaded as one "
            "model: save_pretrained of each part can.",
            stacklevel=3,
        )
        described = {name: patch.to_dict() for name, patch in patches.items()}
        self.config.rotary_patch = {"different_patches_of_parts": described}

    def _name_in_auto_map(self) -> None:
        """AutoModel restores a class that no other Auto class does."""
        place = f"modeling_patched.{type(self).__name__}"
        if is_restorable(self.plain_class) and place not in self.config.auto_map.values():
            self.config.auto_map = {**self.config.auto_map, "AutoModel": place}

    def _get_name(self) -> str:
        # By this name, Trainer finds whether labels are to be shifted.
        return self.plain_class.__name__


def patch_in_place(model: nn.Module, plans: list, encodings: list[nn.Module] | None = None) -> None:
    """
    Attach rotations, new ones or those of a loaded adapter. Every model of transformers around them becomes one of the
    class with rotations, and the outermost gets a configuration with `rotary_patch`, in the place of its own
    everywhere in it; a configuration that another model shares is not changed.
    """
    # All are built first: one that cannot be must not leave a model half patched.
    encodings = encodings or [planned.build_encoding() for planned in plans]
    for planned in plans:
        planned.config = _take_classes(model, planned.tower.name, planned.config)
    attach(plans, encodings)


def patch_around(model: nn.Module) -> None:
    """Give a model classes and configuration as [`patch_in_place`] does, for parts that were patched by themselves."""
    towers = list(patched_towers(model))
    for name, tower in towers:
        target = name if len(towers) == 1 and name else None
        tower.rotary_patch.config = _take_classes(model, name, replace(tower.rotary_patch.config, target=target))


def _take_classes(model: nn.Module, tower_name: str, config: RotaryPatchConfig) -> RotaryPatchConfig:
    """What is said in [`patch_in_place`], for one tower; returns its patch as the outermost model names it."""
    names = tower_name.split(".") if tower_name else []
    paths = [".".join(names[:length]) for length in range(len(names) + 1)]
    around = [(path, model.get_submodule(path)) for path in paths]
    around = [(path, module) for path, module in around if isinstance(module, PreTrainedModel)]
    for _, module in around:
        if not isinstance(module, RotaryModelMixin):
            module.__class__ = rotary_class(type(module))
            # The keys are names of classes; items of newer releases of transformers are set by the model.
            _CAN_RECORD_REGISTRY.update({str(type(module)): module._can_record_outputs})
    if not around:
        return config
    path, outermost = around[0]
    config = _within(path, config)
    if not isinstance(outermost.config, RotaryConfigMixin):
        _replace_config(outermost, _with_patch(outermost.config, config))
    own = {id(module.config) for _, module in around}
    parts = [name for name in outermost.config.sub_configs if id(getattr(outermost.config, name, None)) in own]
    outermost.config.rotary_parts = sorted({*outermost.config.rotary_parts, *parts})
    return config


def unpatch_in_place(model: nn.Module) -> None:
    """Undo [`patch_in_place`]: weights stay as they are."""
    for _, tower in list(patched_towers(model)):
        detach(tower)
    for module in model.modules():
        if isinstance(module, RotaryModelMixin):
            module.__class__ = module.plain_class
            if isinstance(module.config, RotaryConfigMixin):
                _without_patch(module.config)


def _within(path: str, config: RotaryPatchConfig) -> RotaryPatchConfig:
    """The same patch of the module at `path`, in which its target has a shorter name."""
    if not path or config.target is None:
        return config
    return replace(config, target=config.target.removeprefix(path).removeprefix(".") or None)


def _target_in(model: PreTrainedModel, target: str | None) -> str | None:
    """The name of a target here, which another class of the family saved, with another head or without one."""
    if target is None:
        return None
    names, prefix = {name for name, _ in model.named_modules()}, f"{model.base_model_prefix}."
    places = (target, f"{target}.".removeprefix(prefix)[:-1], f"{prefix}{target}")
    return next((place for place in places if place in names), target) or None


def _with_patch(config: PreTrainedConfig, patch: RotaryPatchConfig) -> PreTrainedConfig:
    """A copy with `rotary_patch`."""
    made = _new(type(config))
    vars(made).update(vars(config))
    made.rotary_patch = patch.to_dict()
    made.auto_map = {**(getattr(config, "auto_map", None) or {}), **made._auto_map}
    return made


def _without_patch(config: PreTrainedConfig) -> None:
    """Undo [`_with_patch`], in place."""
    config.__class__ = config.plain_class
    del config.rotary_patch, config.rotary_parts
    code = f"{__name__.rpartition('.')[2]}."
    config.auto_map = {name: place for name, place in config.auto_map.items() if code not in place}
    if not config.auto_map:
        del config.auto_map
    if config.architectures:
        config.architectures = [name.removeprefix(PREFIX) for name in config.architectures]


def _replace_config(model: nn.Module, config: PreTrainedConfig) -> None:
    replaced = model.config
    for module in model.modules():
        for name, value in vars(module).items():
            if value is replaced:
                vars(module)[name] = config


def _as_whole(part: PreTrainedModel) -> PreTrainedModel:
    """A model with the modules of a part of a patched one, and a configuration that says how it is patched."""
    name, tower = next(patched_towers(part))
    config = tower.rotary_patch.config
    whole = _new(part.plain_class)
    vars(whole).update(vars(part))
    whole.config = _with_patch(part.config, config if config.target is None else replace(config, target=name or None))
    return whole


def _new(plain: type) -> PreTrainedModel | PreTrainedConfig:
    """An object without attributes, of the class with rotations."""
    kind = rotary_config(plain) if issubclass(plain, PreTrainedConfig) else rotary_class(plain)
    return kind.__new__(kind)


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
    The class with rotations of a model class. Those of classes that transformers does not export, see
    [`is_restorable`], reload in a process that makes them so again: `rotary_class(MyModel).from_pretrained(…)`.
    """
    # Classes of users may leave it out.
    config = plain.config_class or PreTrainedConfig
    classes = _classes(config)
    if plain not in classes:
        classes[plain] = _make_model(plain, classes[config])
    return classes[plain]


def is_restorable(plain: type) -> bool:
    """Whether the name of a model class, or the `model_type` of its configuration, leads to it in transformers."""
    config = getattr(plain, "config_class", None)
    return getattr(transformers, plain.__name__, None) is plain and config is not None and _is_known(config)


def _is_known(plain: type[PreTrainedConfig]) -> bool:
    return plain.model_type in CONFIG_MAPPING and CONFIG_MAPPING[plain.model_type] is plain


@functools.cache
def _classes(plain: type[PreTrainedConfig]) -> dict[type, type]:
    """The configuration class with rotations of a plain one, and the models that the Auto classes find for it."""
    config = _make_config(plain)
    classes, autos = {plain: config}, auto_classes(plain) if _is_known(plain) else {}
    for auto_name, model in autos.items():
        if model not in classes:
            classes[model] = _make_model(model, config)
        getattr(transformers, auto_name).register(config, classes[model], exist_ok=True)
    config._auto_map = {
        name: f"modeling_patched.{classes[model].__name__}" for name, model in autos.items() if is_restorable(model)
    }
    if _is_known(plain):
        config._auto_map["AutoConfig"] = f"modeling_patched.{config.__name__}"
    return classes


def auto_classes(plain: type[PreTrainedConfig]) -> dict[str, type[PreTrainedModel]]:
    """By name of an Auto class, the model that it returns for a configuration class."""
    found = {}
    for name, auto_class in vars(modeling_auto).items():
        mapping = getattr(auto_class, "_model_mapping", None)
        if name.startswith("Auto") and mapping is not None and hasattr(transformers, name) and plain in mapping:
            try:
                models = mapping[plain]
            except (ImportError, ValueError):
                # Of some families a library is missing, or the class that transformers names.
                continue
            model = models[0] if isinstance(models, (list, tuple)) else models
            # Models of text and images are also found as their part for text.
            if getattr(model, "config_class", None) is plain:
                found[name] = model
    return found


def _make_config(plain: type[PreTrainedConfig]) -> type[PreTrainedConfig]:
    class Made(RotaryConfigMixin, plain):
        model_type = _ModelType(plain.model_type)
        plain_class = plain
        rotary_patch: dict | None = None

    parts = [plain, *(kind for kind in plain.sub_configs.values() if kind is not None)]
    if any("rope" in name for part in parts for name in getattr(part, "__dataclass_fields__", ())):
        Made._default_patch = PRETRAINED_PLANES
    return strict(_named(Made, plain, f"Configuration of {plain.__name__} and `rotary_patch`: [`RotaryPatchConfig`]."))


def _make_model(plain: type[PreTrainedModel], config: type[PreTrainedConfig]) -> type[PreTrainedModel]:
    class Made(RotaryModelMixin, plain):
        config_class = config
        plain_class = plain
        # A generator rounded to bfloat16 rotates distant patches by several degrees too much.
        _keep_in_fp32_modules_strict = [*(plain._keep_in_fp32_modules_strict or ()), "rotary_encoding"]

    made = _named(Made, plain, f"[`{plain.__name__}`] with learned rotations.")
    _keep_renaming(plain, made)
    return made


def _named(made: type, plain: type, doc: str) -> type:
    made.__name__ = made.__qualname__ = f"{PREFIX}{plain.__name__}"
    made.__module__, made.__doc__ = __name__, doc
    return made


def _keep_renaming(plain: type[PreTrainedModel], made: type[PreTrainedModel]) -> None:
    """
    transformers looks up by class name, else by type, how keys of weights are renamed when they are loaded and saved.
    For classes that are not its own it does so only if their name is registered.
    """
    renaming = get_checkpoint_conversion_mapping(plain.__name__)
    if renaming is None:
        # The type is that of the plain configuration.
        USER_REGISTERED_MAPPINGS.add(made.__name__)
    else:
        register_checkpoint_conversion_mapping(made.__name__, renaming, overwrite=True)
