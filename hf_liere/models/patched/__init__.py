"""
Learned rotations inside pretrained Transformers models, and the model classes that restore them.

Imports from every other room of `models`; none imports from it. Start at `rotary_patch.plan`, then read `vision_patch`
and `patched_forward` (vision towers) or `pretrained_patch` (models with RoPE). These offer what they plan by name, so
that a checkpoint contains what it needs.
"""

from . import pretrained_blocks, pretrained_patch, vision_patch  # noqa: F401 (offer patches)
