"""
Learned rotations in pretrained models of transformers, diffusers and timm, and small files that store them.

It imports `models.patched` and `libraries`, which contain the mechanisms, and `storage`. Start with `apply.py` (`patch`
and `unpatch`); `adapters.py` saves and loads rotations alone, `peft_adapters.py` with adapters of peft, and
`diffusers_models.py` beside models of diffusers. `guards.py` lists what is replaced in these libraries for that.
"""
