"""
Models of transformers with learned rotations, as classes with their own `model_type`: `RotaryLlamaForCausalLM` is
`LlamaForCausalLM` with rotations, `RotaryLlamaConfig` its configuration, and so on for every class that transformers
exports. This module makes them when they are first requested, as its attributes. A patched model becomes one of them,
in place. `from_pretrained` and the Auto classes restore them with their rotations, by this package or by the code that
is saved with a checkpoint.
"""

import functools
import warnings
from collections.abc import Iterable
from contextvars import ContextVar
from dataclasses import replace
from fnmatch import fnmatchcase
from types import MethodType
from typing import TYPE_CHECKING, Any

import transformers
from huggingface_hub.dataclasses import strict
from torch import nn
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers import initialization as init
from transformers.conversion_mapping import (
    USER_REGISTERED_MAPPINGS,
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.core_model_loading import revert_weight_conversion
from transformers.models.auto import modeling_auto
from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY

from ..transformer.losses import AcceptsCount
from .composed import take_positions
from .head_share import HeadShare
from .patched_configuration import RotaryConfigMixin, RotaryModelType, replace_config
from .pretrained_patch import plan_rope
from .rotary_patch import RotaryPatchConfig, require_unpatched
from .tower_patch import TowerPlan, detach, patched_towers
from .vision_patch import plan_towers


# For type checkers: classes combine the mixin with a `PreTrainedModel`.
if TYPE_CHECKING:
    from transformers import PreTrainedModel as ModelBase
else:
    ModelBase = object

# Names of classes begin with it.
PREFIX = "Rotary"
# The configuration of the model under construction. `LlamaForSequenceClassification` and others make their base by an
# Auto class, of the same configuration: it is patched as a part of them.
_under_construction = ContextVar("_under_construction", default=None)


class _Pickled:
    """Objects of classes that are made here: pickle cannot find those of users' classes by name."""

    plain_class: type

    def __reduce__(self):
        return _new, (self.plain_class,), vars(self).copy()


class RotaryModelMixin(_Pickled, ModelBase):
    """
    Model classes whose rotations `config.rotary_patch` describes. In a model with several parts, those around the
    rotations have such classes too, and their own configurations.
    """

    accepts_loss_kwargs: Any = AcceptsCount()

    def __init__(self, config):
        is_part = _under_construction.get() is config
        token = _under_construction.set(config)
        try:
            super().__init__(config)
        finally:
            _under_construction.reset(token)
        if not is_part:
            patch = RotaryPatchConfig.from_dict(config.rotary_patch)
            patch = replace(patch, target=_find_target(self, patch.target))
            config.rotary_patch = patch.to_dict()
            patch_in_place(self, plan(self, patch))

    def train(self, mode: bool = True):
        """Raises `ValueError` if the rotations are folded."""
        if mode and any(tower.rotary_patch.config.folded_grids is not None for _, tower in patched_towers(self)):
            raise ValueError(
                "The rotations of this model are folded, which is for inference: train the original model."
            )
        return super().train(mode)

    def fold_rotations(self, grids: Iterable[tuple[int, ...]] | None = None) -> PreTrainedModel:
        """As [`folding.fold_rotations`]."""
        from .folding import fold_rotations

        return fold_rotations(self, grids)

    @classmethod
    def register_for_auto_class(cls, auto_class="AutoModel") -> None:
        """Code is saved with the configuration; transformers would copy the files of the package."""

    def initialize_weights(self) -> None:
        super().initialize_weights()
        # transformers leaves the initialisation of a nested PreTrainedModel to that model, which knows no generators.
        # Parameters that were loaded are marked and keep their values.
        for _, tower in patched_towers(self):
            tower.rotary_patch.reset_parameters(tower)
            if (content := tower.rotary_encoding.content) is not None:
                init.zeros_(content.weight)

    def to_empty(self, *, device, recurse: bool = True):
        """Buffers that no file contains, such as the frequencies of RoPE, have their values again."""
        result = super().to_empty(device=device, recurse=recurse)
        for model in self.modules():
            for module in model.modules() if isinstance(model, PreTrainedModel) else []:
                if module._non_persistent_buffers_set:
                    model._init_weights(module)
        return result

    @classmethod
    def maybe_distribute_model(cls, model, *args, **kwargs):
        """transformers divides the heads of attention modules among processes here, before it loads weights."""
        model = super().maybe_distribute_model(model, *args, **kwargs)
        split_rotations(model)
        return model

    def load_state_dict(self, state_dict, *args, **kwargs):
        """Also takes the names that `save_pretrained` writes: `Trainer` passes them when it resumes."""
        own = {name: value.to("meta") for name, value in self.state_dict().items()}
        if state_dict.keys() <= own.keys():
            return super().load_state_dict(state_dict, *args, **kwargs)
        places = {id(value): name for name, value in own.items()}
        saved = {name: places.get(id(value)) for name, value in revert_weight_conversion(self, own).items()}
        if merged := [name for name in state_dict if name not in own and saved.get(name, name) is None]:
            raise ValueError(
                f"{merged[0]} is stored apart in files and part of a larger weight in {self._get_name()}: load the "
                "folder with from_pretrained, which joins them. Trainer resumes no such model."
            )
        renamed = {name if name in own else saved.get(name, name): value for name, value in state_dict.items()}
        return super().load_state_dict(renamed, *args, **kwargs)

    def save_pretrained(
        self, save_directory, is_main_process: bool = True, state_dict: dict | None = None, push_to_hub=False, **kwargs
    ) -> None:
        """
        As the plain class, with the rotations in weights and configuration. Where transformers does not export the
        plain class, or only adapters of peft are saved, the files of `save_rotary` are written beside them.
        """
        options = {"is_main_process": is_main_process, "state_dict": state_dict, **kwargs}
        if not any(True for _ in patched_towers(self)):
            # The part with rotations was unpatched alone.
            unpatch_in_place(self)
            self.save_pretrained(save_directory, push_to_hub=push_to_hub, **options)
            return
        if not isinstance(self.config, RotaryConfigMixin):
            _build_whole(self).save_pretrained(save_directory, push_to_hub=push_to_hub, **options)
            return
        self._describe_patches()
        self._name_in_auto_map()
        are_enough = is_restorable(self.plain_class) and not getattr(self, "_hf_peft_config_loaded", False)
        if are_enough:
            super().save_pretrained(save_directory, push_to_hub=push_to_hub, **options)
        else:
            names = ("repo_id", "commit_message", "private", "create_pr")
            hub = {"token": kwargs.get("token"), **{name: options.pop(name) for name in names if name in options}}
            super().save_pretrained(save_directory, **options)
            from .adapters import write_rotations

            write_rotations(self, save_directory, state_dict, is_main_process)
            if push_to_hub:
                self.push_to_hub(hub.pop("repo_id", str(save_directory)), **hub)

    def _describe_patches(self) -> None:
        """
        Derive `config.rotary_patch` from the current rotations, because parts may have been patched or unpatched alone.
        If no single patch describes all of them, the configuration stores one that cannot be loaded.
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
        """Let AutoModel restore a class that no other Auto class restores."""
        place = f"modeling_patched.{type(self).__name__}"
        if is_restorable(self.plain_class) and place not in self.config.auto_map.values():
            self.config.auto_map = {**self.config.auto_map, "AutoModel": place}

    def _get_name(self) -> str:
        # Trainer looks up by this name whether labels are shifted.
        return self.plain_class.__name__


def plan(model: nn.Module, config: RotaryPatchConfig) -> list[TowerPlan]:
    """
    Check a configuration against a model, before the model is changed. Raises `ValueError` if the model is patched
    already, has nothing to patch, or the configuration does not fit it.
    """
    require_unpatched(model)
    if split := [name for name, value in model.named_parameters() if hasattr(value, "device_mesh")]:
        raise ValueError(
            f"{split[0]} and others are split over processes: patch the whole model, save it with save_pretrained, and "
            "load that folder with tp_plan or distributed_config; or split the patched model."
        )
    return (plan_rope if config.compose or config.rotary_init == "pretrained" else plan_towers)(model, config)


def patch_in_place(model: nn.Module, plans: list[TowerPlan], encodings: list[nn.Module] | None = None) -> None:
    """
    Attach rotations, new ones or those of a loaded adapter. Every model of transformers around them gets the class with
    rotations. The outermost gets a configuration with `rotary_patch` in place of its own; a configuration that another
    model shares is not changed.
    """
    # All are built first: one that cannot be must not leave a model half patched.
    encodings = encodings or [planned.build_encoding() for planned in plans]
    for planned in plans:
        planned.patch.config = _change_classes(model, planned.tower.name, planned.patch.config)
    for planned, encoding in zip(plans, encodings):
        planned.attach(encoding)


def split_rotations(model: nn.Module) -> None:
    """Let rotations follow the heads that a `tp_plan` has divided. Raises `ValueError` if they cannot."""
    plan = model.tp_plan if (getattr(model, "_tp_size", None) or 1) > 1 else {}
    rules = [rule for rule, style in plan.items() if style == "colwise"]
    split = {module: name for name, module in model.named_modules() for rule in rules if fnmatchcase(name, rule)}
    for name, tower in patched_towers(model):
        share = None
        for attention in tower.rotary_patch.attentions(tower):
            for part in filter(split.get, attention.modules()):
                mesh = part.weight.device_mesh
                share = HeadShare(mesh if mesh.ndim == 1 else mesh["tp"])
                share.count(part.out_features // getattr(attention, "head_dim", 1), split[part])
        if share is not None and (not hasattr(tower.rotary_encoding, "split_heads") or tower.rotary_encoding.content):
            raise ValueError(
                f"tensor parallelism (tp_plan) divides the heads of {name or model._get_name()} without rotations; "
                "accepted: rotary_init='pretrained' without content_positions, or a tp_plan without this tower."
            )
        if share is not None:
            tower.rotary_encoding.split_heads(share)


def patch_around(model: nn.Module) -> None:
    """Give a model classes and configuration as [`patch_in_place`] does, for parts that were patched alone."""
    towers = list(patched_towers(model))
    for name, tower in towers:
        target = name if len(towers) == 1 and name else None
        tower.rotary_patch.config = _change_classes(model, name, replace(tower.rotary_patch.config, target=target))


def _change_classes(model: nn.Module, tower_name: str, config: RotaryPatchConfig) -> RotaryPatchConfig:
    """Change classes and configuration around one tower; return its patch with the target that the outermost uses."""
    names = tower_name.split(".") if tower_name else []
    paths = [".".join(names[:length]) for length in range(len(names) + 1)]
    around = [(path, model.get_submodule(path)) for path in paths]
    around = [(path, module) for path, module in around if isinstance(module, PreTrainedModel)]
    for _, module in around:
        if not isinstance(module, RotaryModelMixin):
            _set_class(module, rotary_class(type(module)))
            # The keys are names of classes; items of newer releases of transformers are set by the model.
            _CAN_RECORD_REGISTRY.update({str(type(module)): module._can_record_outputs})
    if not around:
        return config
    path, outermost = around[0]
    if path and config.target is not None:
        # Inside the outermost model of transformers, the target has a shorter name.
        config = replace(config, target=config.target.removeprefix(path).removeprefix(".") or None)
    if not isinstance(outermost.config, RotaryConfigMixin):
        replace_config(outermost, _add_patch(outermost.config, config))
    own = {id(module.config) for _, module in around}
    parts = [name for name in outermost.config.sub_configs if id(getattr(outermost.config, name, None)) in own]
    outermost.config.rotary_parts = sorted({*outermost.config.rotary_parts, *parts})
    return config


def _set_class(module: PreTrainedModel, kind: Any) -> None:
    """A module that accelerate has dispatched calls the forward of its new class."""
    module.__class__ = kind
    if isinstance(vars(module).get("_old_forward"), MethodType):
        module._old_forward = MethodType(kind.forward, module)
        functools.update_wrapper(module.forward, module._old_forward)


def unpatch_in_place(model: nn.Module) -> None:
    """Undo [`patch_in_place`]: weights stay as they are."""
    for _, tower in list(patched_towers(model)):
        detach(tower)
    for module in model.modules():
        if isinstance(module, RotaryModelMixin):
            _set_class(module, module.plain_class)
            if isinstance(module.config, RotaryConfigMixin):
                _remove_patch(module.config)


def _find_target(model: PreTrainedModel, target: str | None) -> str | None:
    """Translates a saved `target`: names of modules differ between classes with a head and without one."""
    if target is None:
        return None
    names, prefix = {name for name, _ in model.named_modules()}, f"{model.base_model_prefix}."
    places = (target, f"{target}.".removeprefix(prefix)[:-1], f"{prefix}{target}")
    return next((place for place in places if place in names), target) or None


def _add_patch(config: PreTrainedConfig, patch: RotaryPatchConfig) -> PreTrainedConfig:
    """A copy with `rotary_patch`."""
    copied = _new(type(config))
    vars(copied).update(vars(config))
    copied.rotary_patch = patch.to_dict()
    copied.auto_map = {**(getattr(config, "auto_map", None) or {}), **copied._auto_map}
    return copied


def _remove_patch(config: PreTrainedConfig) -> None:
    """Undo [`_add_patch`], in place."""
    config.__class__ = config.plain_class
    del config.rotary_patch, config.rotary_parts
    code = f"{__name__.rpartition('.')[2]}."
    config.auto_map = {name: place for name, place in config.auto_map.items() if code not in place}
    if not config.auto_map:
        del config.auto_map
    if config.architectures:
        config.architectures = [name.removeprefix(PREFIX) for name in config.architectures]


def _build_whole(part: PreTrainedModel) -> PreTrainedModel:
    """A model with the modules of a part of a patched model, and a configuration with `rotary_patch`."""
    name, tower = next(patched_towers(part))
    config = tower.rotary_patch.config
    whole = _new(part.plain_class)
    vars(whole).update(vars(part))
    whole.config = _add_patch(part.config, config if config.target is None else replace(config, target=name or None))
    return whole


def _new(plain: type) -> PreTrainedModel | PreTrainedConfig:
    """An object without attributes, of the class with rotations."""
    kind: Any = rotary_config(plain) if issubclass(plain, PreTrainedConfig) else rotary_class(plain)
    return kind.__new__(kind)


def __getattr__(name: str) -> type:
    plain = getattr(transformers, name.removeprefix(PREFIX), None) if name.startswith(PREFIX) else None
    if isinstance(plain, type) and issubclass(plain, PreTrainedConfig):
        return rotary_config(plain)
    if isinstance(plain, type) and issubclass(plain, PreTrainedModel) and getattr(plain, "config_class", None):
        return rotary_class(plain)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def rotary_config(plain: type[PreTrainedConfig]) -> type[PreTrainedConfig]:
    """The configuration class with `rotary_patch` (see [`RotaryPatchConfig`]) of a configuration class."""
    return _make_classes(plain)[plain]  # type: ignore[arg-type]  # mypy takes classes for unhashable


def rotary_class(plain: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """
    The class with rotations of a model class. If transformers does not export the class, see [`is_restorable`], reload
    its checkpoints by `rotary_class(MyModel).from_pretrained(…)`.
    """
    # Users' classes may lack it.
    config = plain.config_class or PreTrainedConfig
    classes = _make_classes(config)
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
def _make_classes(plain: type[PreTrainedConfig]) -> dict[type, type]:
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
                # Some families need a library that is missing, or name a class that does not exist.
                continue
            model = models[0] if isinstance(models, (list, tuple)) else models
            # The configuration of a text part also leads to models of text and images.
            if getattr(model, "config_class", None) is plain:
                found[name] = model
    return found


def _make_config(plain: type[PreTrainedConfig]) -> type[PreTrainedConfig]:
    class Made(_Pickled, RotaryConfigMixin, plain):
        model_type = RotaryModelType(plain.model_type)
        plain_class = plain
        rotary_patch: dict | None = None

    parts = [plain, *(kind for kind in plain.sub_configs.values() if kind is not None)]
    if any("rope" in name for part in parts for name in getattr(part, "__dataclass_fields__", ())):
        Made._default_patch = {"position_encoding": "rope_mixed", "rotary_init": "pretrained"}
    return strict(_name_class(Made, plain, f"[`{plain.__name__}`] with `rotary_patch`: [`RotaryPatchConfig`]."))


def _make_model(plain: type[PreTrainedModel], config: type[PreTrainedConfig]) -> type[PreTrainedModel]:
    class Made(RotaryModelMixin, plain):
        config_class = config
        plain_class = plain
        forward = take_positions(plain.forward)
        # A generator rounded to bfloat16 rotates distant patches by several degrees too much.
        _keep_in_fp32_modules_strict = [*(plain._keep_in_fp32_modules_strict or ()), "rotary_encoding"]

    made = _name_class(Made, plain, f"[`{plain.__name__}`] with learned rotations.")
    _keep_renaming(plain, made)
    return made


def _name_class(made: type, plain: type, doc: str) -> type:
    made.__name__ = made.__qualname__ = f"{PREFIX}{plain.__name__}"
    made.__module__, made.__doc__ = __name__, doc
    return made


def _keep_renaming(plain: type[PreTrainedModel], made: type[PreTrainedModel]) -> None:
    """
    transformers looks up by class name, else by model type, how to rename the keys of weights when it loads and saves
    them. For foreign classes it does so only if their name is registered.
    """
    renaming = get_checkpoint_conversion_mapping(plain.__name__)
    if renaming is None:
        # The type is that of the plain configuration.
        USER_REGISTERED_MAPPINGS.add(made.__name__)
    else:
        register_checkpoint_conversion_mapping(made.__name__, renaming, overwrite=True)
