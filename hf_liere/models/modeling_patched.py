"""
CLIP and ViT with learned rotations, as classes with their own `model_type`. `from_pretrained` and the Auto classes
restore them with their rotations, by this package or by the code that is saved with a checkpoint.
"""

from huggingface_hub.dataclasses import strict
from transformers import (
    CLIPConfig,
    CLIPForImageClassification,
    CLIPModel,
    CLIPVisionConfig,
    CLIPVisionModel,
    CLIPVisionModelWithProjection,
    PreTrainedConfig,
    PreTrainedModel,
    ViTConfig,
    ViTForImageClassification,
    ViTForMaskedImageModeling,
    ViTModel,
)
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)

from .rotary_patch import RotaryPatchConfig, attach, patched_towers, plan


class RotaryConfigMixin:
    """Configurations that check and complete `rotary_patch`, and name every Auto class in `auto_map`."""

    def __post_init__(self, **kwargs):
        self.rotary_patch = RotaryPatchConfig.from_dict(self.rotary_patch or {}).to_dict()
        kwargs["auto_map"] = {**self._auto_map, **(kwargs.get("auto_map") or {})}
        super().__post_init__(**kwargs)


class RotaryModelMixin:
    """Model classes that attach the rotations which `config.rotary_patch` describes."""

    # A generator rounded to bfloat16 rotates distant patches by several degrees too much.
    _keep_in_fp32_modules_strict = ["rotary_encoding"]

    def __init__(self, config):
        super().__init__(config)
        attach(plan(self, RotaryPatchConfig.from_dict(config.rotary_patch)))

    def initialize_weights(self) -> None:
        super().initialize_weights()
        # transformers leaves the initialisation of a nested PreTrainedModel to that model, which knows no generators.
        # Parameters that were loaded are marked and keep their values.
        for _, tower in patched_towers(self):
            tower.rotary_encoding.reset_parameters()


@strict
class RotaryCLIPVisionConfig(RotaryConfigMixin, CLIPVisionConfig):
    """Configuration of CLIP's vision tower with learned rotations; `rotary_patch`: see [`RotaryPatchConfig`]."""

    model_type = "rotary_clip_vision_model"
    base_config_key = ""
    rotary_patch: dict | None = None

    _auto_map = {
        "AutoConfig": "modeling_patched.RotaryCLIPVisionConfig",
        "AutoModel": "modeling_patched.RotaryCLIPVisionModel",
    }


@strict
class RotaryCLIPConfig(RotaryConfigMixin, CLIPConfig):
    """Configuration of CLIP with learned rotations in its vision tower; `rotary_patch`: see [`RotaryPatchConfig`]."""

    model_type = "rotary_clip"
    rotary_patch: dict | None = None

    _auto_map = {
        "AutoConfig": "modeling_patched.RotaryCLIPConfig",
        "AutoModel": "modeling_patched.RotaryCLIPModel",
        "AutoModelForImageClassification": "modeling_patched.RotaryCLIPForImageClassification",
        "AutoModelForZeroShotImageClassification": "modeling_patched.RotaryCLIPModel",
    }


@strict
class RotaryViTConfig(RotaryConfigMixin, ViTConfig):
    """Configuration of ViT with learned rotations; `rotary_patch`: see [`RotaryPatchConfig`]."""

    model_type = "rotary_vit"
    rotary_patch: dict | None = None

    _auto_map = {
        "AutoConfig": "modeling_patched.RotaryViTConfig",
        "AutoModel": "modeling_patched.RotaryViTModel",
        "AutoModelForImageClassification": "modeling_patched.RotaryViTForImageClassification",
        "AutoModelForMaskedImageModeling": "modeling_patched.RotaryViTForMaskedImageModeling",
    }


# The class with rotations for each class of transformers.
COMPLETE_MODELS: dict[type[PreTrainedModel], type[PreTrainedModel]] = {}


def _with_rotations(model_class: type[PreTrainedModel], config_class: type[PreTrainedConfig]) -> type[PreTrainedModel]:
    """The class `Rotary…`: `model_class` with the rotations that its configuration, a `config_class`, describes."""
    members = {"__doc__": f"[`{model_class.__name__}`] with learned rotations.", "config_class": config_class}
    COMPLETE_MODELS[model_class] = type(f"Rotary{model_class.__name__}", (RotaryModelMixin, model_class), members)
    return COMPLETE_MODELS[model_class]


RotaryCLIPVisionModel = _with_rotations(CLIPVisionModel, RotaryCLIPVisionConfig)
RotaryCLIPVisionModelWithProjection = _with_rotations(CLIPVisionModelWithProjection, RotaryCLIPVisionConfig)
RotaryCLIPModel = _with_rotations(CLIPModel, RotaryCLIPConfig)
RotaryCLIPForImageClassification = _with_rotations(CLIPForImageClassification, RotaryCLIPConfig)
RotaryViTModel = _with_rotations(ViTModel, RotaryViTConfig)
RotaryViTForImageClassification = _with_rotations(ViTForImageClassification, RotaryViTConfig)
RotaryViTForMaskedImageModeling = _with_rotations(ViTForMaskedImageModeling, RotaryViTConfig)

# transformers looks up by class name how the keys of weights are renamed when they are loaded and saved.
for plain in (CLIPVisionModel, ViTModel):
    renaming = get_checkpoint_conversion_mapping(plain.__name__)
    if renaming is not None:
        register_checkpoint_conversion_mapping(COMPLETE_MODELS[plain].__name__, renaming, overwrite=True)
