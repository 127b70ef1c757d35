"""Configurations of models with learned rotations, and what their files contain."""

import functools
from typing import Any, get_args

from transformers import PreTrainedConfig

from ..encoding.rotary_fields import require_modules
from ..plain import model_code, towers_code
from ..registers import UserFile
from ..transformer.attention_functions import SavesPoseAttention
from .rotary_patch import RotaryPatchConfig


TYPE_PREFIX = "rotary_"
# In files, a dictionary with this note contains the value of one plain field. Plain classes, which would drop the
# rotations, refuse such a value, and their error contains the note. Most families have one of these fields.
NOTE = "note"
HOW_TO_LOAD = (
    "These weights have learned rotations: import hf_liere and load them with an Auto class, or pass "
    "trust_remote_code=True to one."
)
CARRIERS = ("initializer_range", "initializer_factor", "tie_word_embeddings")


class RotaryModelType:
    """
    `rotary_…` as an attribute of a configuration class, and in files. A configuration answers with the plain type, by
    which other libraries look up what they know of a model.
    """

    def __init__(self, plain: str):
        self.plain = plain

    def __get__(self, config: PreTrainedConfig | None, kind: type | None = None) -> str:
        return f"{TYPE_PREFIX}{self.plain}" if config is None else self.plain

    def __set__(self, config: PreTrainedConfig, value: str) -> None:
        """Ignore the type in a file: transformers sets it on the configuration that it reads."""


class RotaryConfigMixin(SavesPoseAttention):
    """Configurations that check and complete `rotary_patch`, and name every Auto class in `auto_map`."""

    # The part for images of a configuration with several is another class.
    base_config_key = ""
    code_file = "modeling_patched"
    # Names of configurations in this one whose models contain rotations.
    rotary_parts: tuple[str, ...] = ()
    _default_patch: dict[str, str] = {}
    rotary_patch: dict | None

    def __post_init__(self, **kwargs):
        self.rotary_patch = RotaryPatchConfig.from_dict(self.rotary_patch or self._default_patch).to_dict()
        kwargs["auto_map"] = {**self._auto_map, **(kwargs.get("auto_map") or {})}
        super().__post_init__(**kwargs)

    def _patches(self) -> list[dict]:
        patch = self.rotary_patch or {}
        # Parts that are patched differently are saved, but cannot be loaded as one model.
        return list(patch.get("different_patches_of_parts", {"": patch}).values())

    def user_files(self) -> list[UserFile]:
        found = [file for patch in self._patches() for file in RotaryPatchConfig.from_dict(patch).user_files()]
        return list(dict.fromkeys(found))

    def plain_code(self) -> dict[str, str] | None:
        """Vision towers in the plain files, if these know the family."""
        # Registers an attention function, which only models of these files use.
        from ..plain.towers import refusal

        first, *others = self._patches()
        if others or self.attends_by_poses or refusal(first, self.plain_class.model_type):
            return None
        return {"modeling_liere.py": model_code(), "modeling_patched.py": towers_code()}

    @classmethod
    def get_config_dict(cls, *args, **kwargs) -> tuple[dict, dict]:
        """Read files of the plain model without a warning: its rotations start neutral."""
        values, unused = super().get_config_dict(*args, **kwargs)
        if values.get("model_type") == cls.plain_class.model_type:
            values["model_type"] = cls.model_type
        return values, unused

    @classmethod
    def from_dict(cls, config_dict: dict, **kwargs):
        require_modules(config_dict.get("rotary_patch") or {}, config_dict.get("modules_of_parts"))
        return super().from_dict(_remove_notes(config_dict), **kwargs)

    @classmethod
    def from_json_file(cls, json_file):
        return cls.from_dict(cls._dict_from_json_file(json_file))

    def to_diff_dict(self) -> dict:
        """The content of files."""
        values = super().to_diff_dict()
        _add_note(values, self)
        for name in self.rotary_parts:
            _add_note(values[name], getattr(self, name))
        return values


def _add_note(values: dict, config: PreTrainedConfig) -> None:
    plain: Any = config.plain_class if isinstance(config, RotaryConfigMixin) else type(config)
    carrier = _find_carrier(plain)
    if carrier is not None:
        values[carrier] = {"value": getattr(config, carrier), NOTE: HOW_TO_LOAD}


def _remove_notes(value):
    if not isinstance(value, dict):
        return value
    # A label may also be called "note".
    if value.keys() == {"value", NOTE} and isinstance(value[NOTE], str):
        return value["value"]
    return {name: _remove_notes(inner) for name, inner in value.items()}


@functools.cache
def _find_carrier(plain: type[PreTrainedConfig]) -> str | None:
    """The first field that refuses dictionaries."""
    fields = plain.__dataclass_fields__
    own = [name for name in fields if name not in PreTrainedConfig.__dataclass_fields__]
    for name in (*CARRIERS, *own):
        if name in own and set(get_args(fields[name].type) or [fields[name].type]) <= {int, float, bool, type(None)}:
            return name
    return None


def replace_config(model, config: PreTrainedConfig) -> None:
    """Put a configuration in the place of a model's own, everywhere in the model."""
    replaced = model.config
    for module in model.modules():
        for name, value in vars(module).items():
            if value is replaced:
                vars(module)[name] = config
