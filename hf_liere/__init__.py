"""Learned Lie-group position encodings (LieRE, ComRoPE) for Hugging Face vision transformers."""

from .auto import register
from .configuration_liere import LieREVideoConfig, LieREViTConfig
from .modeling_liere import (
    LieREViTBackbone,
    LieREViTForImageClassification,
    LieREViTForMaskedImageModeling,
    LieREViTModel,
)
from .modeling_liere_video import LieREVideoForVideoClassification, LieREVideoModel
from .version import __version__


register()

__all__ = [
    "__version__",
    "LieREVideoConfig",
    "LieREVideoForVideoClassification",
    "LieREVideoModel",
    "LieREViTBackbone",
    "LieREViTConfig",
    "LieREViTForImageClassification",
    "LieREViTForMaskedImageModeling",
    "LieREViTModel",
]
