"""Registration with the Auto classes: the only file that touches them."""

import os

import transformers
from transformers import (
    AutoBackbone,
    AutoConfig,
    AutoImageProcessor,
    AutoModel,
    AutoModelForImageClassification,
    AutoModelForMaskedImageModeling,
    AutoModelForVideoClassification,
    AutoModelForZeroShotImageClassification,
    AutoVideoProcessor,
)
from transformers.utils import is_torchvision_available, is_vision_available

from .configuration_liere import LieREVideoConfig, LieREViTConfig
from .modeling_liere import (
    LieREViTBackbone,
    LieREViTForImageClassification,
    LieREViTForMaskedImageModeling,
    LieREViTModel,
)
from .modeling_liere_video import LieREVideoForVideoClassification, LieREVideoModel
from .modeling_patched import (
    RotaryCLIPConfig,
    RotaryCLIPForImageClassification,
    RotaryCLIPModel,
    RotaryCLIPVisionConfig,
    RotaryCLIPVisionModel,
    RotaryCLIPVisionModelWithProjection,
    RotaryViTConfig,
    RotaryViTForImageClassification,
    RotaryViTForMaskedImageModeling,
    RotaryViTModel,
)


MODELS = {
    LieREViTConfig: {
        AutoModel: LieREViTModel,
        AutoModelForImageClassification: LieREViTForImageClassification,
        AutoModelForMaskedImageModeling: LieREViTForMaskedImageModeling,
        AutoBackbone: LieREViTBackbone,
    },
    LieREVideoConfig: {
        AutoModel: LieREVideoModel,
        AutoModelForVideoClassification: LieREVideoForVideoClassification,
    },
    RotaryCLIPConfig: {
        AutoModel: RotaryCLIPModel,
        AutoModelForImageClassification: RotaryCLIPForImageClassification,
        AutoModelForZeroShotImageClassification: RotaryCLIPModel,
    },
    RotaryCLIPVisionConfig: {AutoModel: RotaryCLIPVisionModel},
    RotaryViTConfig: {
        AutoModel: RotaryViTModel,
        AutoModelForImageClassification: RotaryViTForImageClassification,
        AutoModelForMaskedImageModeling: RotaryViTForMaskedImageModeling,
    },
}


def register() -> None:
    """
    Make the Auto classes, the pipelines and `trust_remote_code` know our models; calling it again changes nothing.

    `register_for_auto_class` makes `save_pretrained` put the modeling code beside the weights, so that a checkpoint
    also loads where this package is not installed.
    """
    for config_class, models in MODELS.items():
        AutoConfig.register(config_class.model_type, config_class, exist_ok=True)
        config_class.register_for_auto_class()
        for auto_class, model_class in models.items():
            auto_class.register(config_class, model_class, exist_ok=True)
            model_class.register_for_auto_class(auto_class.__name__)
    # As in transformers, no Auto class leads to it, but its code travels too.
    RotaryCLIPVisionModelWithProjection.register_for_auto_class("AutoModel")
    processors = _image_processors()
    if processors:
        AutoImageProcessor.register(LieREViTConfig, image_processor_classes=processors, exist_ok=True)
    if is_torchvision_available():
        from .video_processing_liere import LieREVideoProcessor

        AutoVideoProcessor.register(LieREVideoConfig, LieREVideoProcessor, exist_ok=True)
        LieREVideoProcessor.register_for_auto_class()


def _image_processors() -> dict[str, type]:
    """ViT's processors for the backends that are installed."""
    processors = {}
    if is_vision_available():
        from transformers import ViTImageProcessorPil

        processors["pil"] = ViTImageProcessorPil
    if is_torchvision_available():
        from transformers import ViTImageProcessor

        processors["torchvision"] = ViTImageProcessor
    return processors


def model_class(architecture: str) -> type:
    """
    Our model class of a name, as `architectures` in a saved configuration has it.

    Raises:
        ValueError: if none of our models has that name.
    """
    classes = {cls.__name__: cls for models in MODELS.values() for cls in models.values()}
    classes[RotaryCLIPVisionModelWithProjection.__name__] = RotaryCLIPVisionModelWithProjection
    if architecture not in classes:
        raise ValueError(f"{architecture!r} is none of our models; accepted: {', '.join(sorted(classes))}.")
    return classes[architecture]


def load_checkpoint(
    checkpoint: str | os.PathLike, revision: str | None = None, trust_remote_code: bool = False
) -> tuple[transformers.PreTrainedModel, object | None]:
    """
    Any model that `from_pretrained` reads, of the class that its configuration names, in float32 and evaluation mode,
    and its image or video processor (`None` if it has none that can be read).

    Args:
        checkpoint: Directory or repository on the Hub.
        revision: Branch, tag or commit of the repository.
        trust_remote_code: Whether code that comes with the checkpoint may run, where neither this package nor
            transformers knows its model.

    Raises:
        ValueError, OSError: if it cannot be read, or needs code that is not trusted.
    """
    options = {"revision": revision, "trust_remote_code": trust_remote_code}
    config = AutoConfig.from_pretrained(checkpoint, **options)
    (architecture,) = getattr(config, "architectures", None) or [None]
    try:
        loader = model_class(architecture)
    except ValueError:
        loader = getattr(transformers, architecture or "", AutoModel)
    model = loader.from_pretrained(checkpoint, dtype="float32", **options)
    for auto_class in (AutoVideoProcessor, AutoImageProcessor):
        if auto_class is AutoVideoProcessor and "video" not in getattr(model, "input_modalities", ()):
            continue
        try:
            return model.eval(), auto_class.from_pretrained(checkpoint, **options)
        except (ImportError, OSError, ValueError):
            continue
    return model.eval(), None
