"""
Learned rotations inside pretrained Transformers models, and the model classes that restore them.

Imports from every other room of `models`; none imports from it. Start at `modeling_patched.plan`, then read
`vision_patch` and `patched_forward` (vision towers) or `pretrained_patch` (models with RoPE).
"""
