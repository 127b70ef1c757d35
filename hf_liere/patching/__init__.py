"""
Learned rotations in pretrained models of Transformers, diffusers and timm, and small files that store them.

It imports `models.patched` and `libraries`, which contain the mechanisms, and `storage`. Start with `apply.py` (`patch`
and `unpatch`); `adapters.py` saves and loads rotations alone, `peft_adapters.py` with adapters of peft, and
`diffusers_models.py` beside diffusers models. `guards.py` lists what is replaced in these libraries for that.
"""
