"""
CLIP, ViT, DINOv3 and Llama with learned rotations, as classes with their own `model_type`. `from_pretrained` and the
Auto classes restore them with their rotations, by this package or by the code that is saved with a checkpoint.
"""

from huggingface_hub.dataclasses import strict
from transformers import (
    CLIPConfig,
    CLIPForImageClassification,
    CLIPModel,
    CLIPVisionConfig,
    CLIPVisionModel,
    CLIPVisionModelWithProjection,
    DINOv3ViTConfig,
    DINOv3ViTModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
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

    _default_patch = {}

    def __post_init__(self, **kwargs):
        self.rotary_patch = RotaryPatchConfig.from_dict(self.rotary_patch or self._default_patch).to_dict()
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
            tower.rotary_patch.reset_parameters(tower)


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


PRETRAINED_PLANES = {"position_encoding": "rope_mixed", "rotary_init": "pretrained"}


@strict
class RotaryDINOv3ViTConfig(RotaryConfigMixin, DINOv3ViTConfig):
    """Configuration of DINOv3 with learned rotations; `rotary_patch`: see [`RotaryPatchConfig`]."""

    model_type = "rotary_dinov3_vit"
    rotary_patch: dict | None = None

    _default_patch = PRETRAINED_PLANES
    _auto_map = {
        "AutoConfig": "modeling_patched.RotaryDINOv3ViTConfig",
        "AutoModel": "modeling_patched.RotaryDINOv3ViTModel",
    }


@strict
class RotaryLlamaConfig(RotaryConfigMixin, LlamaConfig):
    """Configuration of Llama with learned rotations; `rotary_patch`: see [`RotaryPatchConfig`]."""

    model_type = "rotary_llama"
    rotary_patch: dict | None = None

    _default_patch = PRETRAINED_PLANES
    _auto_map = {
        "AutoConfig": "modeling_patched.RotaryLlamaConfig",
        "AutoModel": "modeling_patched.RotaryLlamaModel",
        "AutoModelForCausalLM": "modeling_patched.RotaryLlamaForCausalLM",
    }


class RotaryCLIPVisionModel(RotaryModelMixin, CLIPVisionModel):
    """[`CLIPVisionModel`] with learned rotations."""

    config_class = RotaryCLIPVisionConfig


class RotaryCLIPVisionModelWithProjection(RotaryModelMixin, CLIPVisionModelWithProjection):
    """[`CLIPVisionModelWithProjection`] with learned rotations."""

    config_class = RotaryCLIPVisionConfig


class RotaryCLIPModel(RotaryModelMixin, CLIPModel):
    """[`CLIPModel`] with learned rotations in its vision tower."""

    config_class = RotaryCLIPConfig


class RotaryCLIPForImageClassification(RotaryModelMixin, CLIPForImageClassification):
    """[`CLIPForImageClassification`] with learned rotations."""

    config_class = RotaryCLIPConfig


class RotaryViTModel(RotaryModelMixin, ViTModel):
    """[`ViTModel`] with learned rotations."""

    config_class = RotaryViTConfig


class RotaryViTForImageClassification(RotaryModelMixin, ViTForImageClassification):
    """[`ViTForImageClassification`] with learned rotations."""

    config_class = RotaryViTConfig


class RotaryViTForMaskedImageModeling(RotaryModelMixin, ViTForMaskedImageModeling):
    """[`ViTForMaskedImageModeling`] with learned rotations."""

    config_class = RotaryViTConfig


class RotaryDINOv3ViTModel(RotaryModelMixin, DINOv3ViTModel):
    """[`DINOv3ViTModel`] with learned rotations."""

    config_class = RotaryDINOv3ViTConfig


class RotaryLlamaModel(RotaryModelMixin, LlamaModel):
    """[`LlamaModel`] with learned rotations."""

    config_class = RotaryLlamaConfig


class RotaryLlamaForCausalLM(RotaryModelMixin, LlamaForCausalLM):
    """[`LlamaForCausalLM`] with learned rotations."""

    config_class = RotaryLlamaConfig


# The class with rotations for each class of transformers.
COMPLETE_MODELS = {
    CLIPVisionModel: RotaryCLIPVisionModel,
    CLIPVisionModelWithProjection: RotaryCLIPVisionModelWithProjection,
    CLIPModel: RotaryCLIPModel,
    CLIPForImageClassification: RotaryCLIPForImageClassification,
    ViTModel: RotaryViTModel,
    ViTForImageClassification: RotaryViTForImageClassification,
    ViTForMaskedImageModeling: RotaryViTForMaskedImageModeling,
    DINOv3ViTModel: RotaryDINOv3ViTModel,
    LlamaModel: RotaryLlamaModel,
    LlamaForCausalLM: RotaryLlamaForCausalLM,
}

# transformers looks up by class name or type how the keys of weights are renamed when they are loaded and saved.
RENAMED = {plain.__name__: COMPLETE_MODELS[plain].__name__ for plain in (CLIPVisionModel, ViTModel)}
RENAMED[DINOv3ViTConfig.model_type] = RotaryDINOv3ViTConfig.model_type
for plain, complete in RENAMED.items():
    renaming = get_checkpoint_conversion_mapping(plain)
    if renaming is not None:
        register_checkpoint_conversion_mapping(complete, renaming, overwrite=True)
