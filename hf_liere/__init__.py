"""Learned Lie-group position encodings (LieRE, ComRoPE) for Hugging Face Transformers."""

from . import kernels  # noqa: F401 (registers itself)
from .auto import load_peft, register
from .geometry.orientations import (
    matrix_to_rotation_vector,
    quaternion_to_rotation_vector,
    rotation_vector_to_matrix,
    rotation_vector_to_quaternion,
)
from .geometry.pose_embedding import PoseEmbedding
from .layer.embedding import LieRotaryEmbedding, grid_positions
from .libraries.diffusion_patch import set_frequency_schedule
from .libraries.schedules import FrequencySchedule, ScheduleInput
from .models.encoding.kinds import PLANES, BlockSizes, Start
from .models.encoding.positions import Convention
from .models.encoding.registration import register_coordinates, register_encoding, register_start
from .models.encoding.rotary_encoding import RotaryEncoding
from .models.patched import modeling_patched
from .models.patched.rotary_patch import RotaryPatchConfig
from .models.transformer.configuration_liere import LieREVideoConfig, LieREViTConfig
from .models.transformer.configuration_liere_tokens import LieRETokensConfig
from .models.transformer.modeling_liere import LieREViTForImageClassification, LieREViTModel
from .models.transformer.modeling_liere_heads import LieREViTBackbone, LieREViTForMaskedImageModeling
from .models.transformer.modeling_liere_tokens import (
    LieRETokensForSequenceClassification,
    LieRETokensForTokenClassification,
    LieRETokensModel,
)
from .models.transformer.modeling_liere_video import LieREVideoForVideoClassification, LieREVideoModel
from .models.transformer.patch_batches import batch_of_patches
from .patching.adapters import load_rotary, save_rotary
from .patching.apply import complete_model, is_patched, patch, rotary_parameters, set_absolute_weight, unpatch
from .patching.guards import install_guards
from .patching.peft_adapters import merge_and_fold, with_rotations
from .tools.conversion.upgrades import upgrade_encoding
from .version import __version__


register()
install_guards()


def __getattr__(name: str) -> type:
    """`RotaryLlamaForCausalLM` and the like, which checkpoints of patched models import."""
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
