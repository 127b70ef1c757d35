"""
Learned rotations in pretrained models of Transformers, diffusers and timm, and small files that store them.

Start with `apply.py` (`patch`, `unpatch`) and `modeling_patched.plan`, then read `vision_patch` and `patched_forward`
(vision towers) or `pretrained_patch` (models with RoPE); `libraries` has models of diffusers and timm. `adapters.py`
saves and loads rotations alone, `peft_adapters.py` with adapters of peft, and `diffusers_models.py` beside diffusers
models. `guards.py` lists what is replaced in these libraries for that.
"""
