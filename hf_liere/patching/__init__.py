"""
Learned rotations in pretrained models of transformers, and small files that store them.

It imports `models.patched`, which contains the mechanism, and `storage`. Start with `apply.py` (`patch`, `unpatch`);
`adapters.py` saves and loads rotations alone, and `peft_adapters.py` with adapters of peft.
"""
