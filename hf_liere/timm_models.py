"""
Vision transformers with learned rotations for `timm.create_model`, registered when this module is imported:
`liere_vit_tiny_patch16_224`, `liere_vit_small_patch16_224`, `liere_vit_base_patch16_224` and
`liere_vit_large_patch16_224`.

Each is timm's `VisionTransformer` of that size without a table of positions, patched with the rotations of `liere`.
They take the arguments of that class (`num_classes`, `img_size`, `in_chans`, `drop_path_rate`, `dynamic_img_size` …),
and those of [`RotaryPatchConfig`] for other rotations:

```python
import timm
import hf_liere.timm_models

model = timm.create_model("liere_vit_small_patch16_224", num_classes=10, position_encoding="comrope_ld", block_size=8)
```
"""

from dataclasses import fields
from typing import Any

from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from .patching.apply import patch
from .patching.rotary_patch import RotaryPatchConfig


ROTARY_FIELDS = {field.name for field in fields(RotaryPatchConfig)} - {"target", "folded_grids", "format_version"}
# Where these differ from timm's defaults.
DATA = {"crop_pct": 0.9, "fixed_input_size": True, "first_conv": "patch_embed.proj", "classifier": "head"}
# Width, layers and heads.
SIZES = {"tiny": (192, 12, 3), "small": (384, 12, 6), "base": (768, 12, 12), "large": (1024, 24, 16)}
# timm looks for this name.
default_cfgs = generate_default_cfgs({f"liere_vit_{size}_patch16_224": DATA for size in SIZES})


def _register(size: str, embed_dim: int, depth: int, num_heads: int) -> None:
    variant = f"liere_vit_{size}_patch16_224"

    def create(pretrained: bool = False, **given: Any) -> nn.Module:
        # The rotations start with values of the encoding, as no weights are pretrained.
        rotary: dict[str, Any] = {"position_encoding": "liere", "rotary_init": None}
        rotary |= {name: given.pop(name) for name in ROTARY_FIELDS & given.keys()}
        config = RotaryPatchConfig(**rotary)
        sizes = {"patch_size": 16, "embed_dim": embed_dim, "depth": depth, "num_heads": num_heads, "pos_embed": "none"}
        features = {"out_indices": given.pop("out_indices", 3), "feature_cls": "getter"}
        model = build_model_with_cfg(VisionTransformer, variant, pretrained, feature_cfg=features, **{**sizes, **given})
        return patch(model, config)

    create.__name__ = variant
    register_model(create)


for size, widths in SIZES.items():
    _register(size, *widths)
