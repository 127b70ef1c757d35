"""Learned Lie-group position encodings (LieRE, ComRoPE) for Hugging Face Transformers."""

from . import kernels  # noqa: F401 (registers itself)
from .auto import load_peft, register
from .encoding.kinds import PLANES, BlockSizes, Start
from .encoding.positions import Convention
from .encoding.registration import register_coordinates, register_encoding, register_start
from .encoding.rotary_encoding import RotaryEncoding
from .geometry.orientations import (
    matrix_to_rotation_vector,
    quaternion_to_rotation_vector,
    rotation_vector_to_matrix,
    rotation_vector_to_quaternion,
)
from .geometry.pose_embedding import PoseEmbedding
from .layer.embedding import LieRotaryEmbedding, grid_positions
from .patching import modeling_patched
from .patching.adapters import load_rotary, save_rotary
from .patching.apply import complete_model, is_patched, patch, rotary_parameters, set_absolute_weight, unpatch
from .patching.guards import install_guards
from .patching.libraries.diffusion_patch import set_frequency_schedule
from .patching.libraries.schedules import FrequencySchedule, ScheduleInput
from .patching.peft_adapters import merge_and_fold, with_rotations
from .patching.rotary_patch import RotaryPatchConfig
from .transformer.configuration_liere import LieREVideoConfig, LieREViTConfig
from .transformer.configuration_liere_tokens import LieRETokensConfig
from .transformer.modeling_liere import LieREViTForImageClassification, LieREViTModel
from .transformer.modeling_liere_heads import LieREViTBackbone, LieREViTForMaskedImageModeling
from .transformer.modeling_liere_tokens import (
    LieRETokensForSequenceClassification,
    LieRETokensForTokenClassification,
    LieRETokensModel,
)
from .transformer.modeling_liere_video import LieREVideoForVideoClassification, LieREVideoModel
from .transformer.patch_batches import batch_of_patches
from .upgrades import upgrade_encoding
from .version import __version__


register()
install_guards()


def __getattr__(name: str) -> type:
    """`RotaryLlamaForCausalLM` and the like, which checkpoints of patched models import."""
    if not name.startswith(modeling_patched.PREFIX):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(modeling_patched, name)


__all__ = [
    "PLANES",
    "BlockSizes",
    "Convention",
    "FrequencySchedule",
    "LieRETokensConfig",
    "LieRETokensForSequenceClassification",
    "LieRETokensForTokenClassification",
    "LieRETokensModel",
    "LieREViTBackbone",
    "LieREViTConfig",
    "LieREViTForImageClassification",
    "LieREViTForMaskedImageModeling",
    "LieREViTModel",
    "LieREVideoConfig",
    "LieREVideoForVideoClassification",
    "LieREVideoModel",
    "LieRotaryEmbedding",
    "PoseEmbedding",
    "RotaryEncoding",
    "RotaryPatchConfig",
    "ScheduleInput",
    "Start",
    "__version__",
    "batch_of_patches",
    "complete_model",
    "grid_positions",
    "is_patched",
    "load_peft",
    "load_rotary",
    "matrix_to_rotation_vector",
    "merge_and_fold",
    "patch",
    "quaternion_to_rotation_vector",
    "register_coordinates",
    "register_encoding",
    "register_start",
    "rotary_parameters",
    "rotation_vector_to_matrix",
    "rotation_vector_to_quaternion",
    "save_rotary",
    "set_absolute_weight",
    "set_frequency_schedule",
    "unpatch",
    "upgrade_encoding",
    "with_rotations",
]
