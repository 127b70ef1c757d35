"""
Learned rotations inside pretrained models of transformers, and the model classes that restore them.

May import from `rotation`, `encoding`, `transformer` and `saved_code`; no other room of `models` imports from it.
Start at `rotary_patch.plan`, then read `patched_forward` (vision towers) or `pretrained_patch` (models with RoPE).
"""
