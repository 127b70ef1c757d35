"""
Learned rotations in pretrained models of transformers and diffusers, and small files that store them.

It imports `models.patched` and `diffusion`, which contain the mechanisms, and `storage`. Start with `apply.py` (`patch`
and `unpatch`); `adapters.py` saves and loads rotations alone, `peft_adapters.py` with adapters of peft, and
`diffusers_models.py` beside models of diffusers.
"""
