"""
Learned rotations inside models of other libraries: diffusion transformers of diffusers, with schedules of their
frequencies, and vision transformers of timm.

It imports from `models` alone, and never these libraries: a model is recognised by the names of its classes. Start with
`diffusion_patch.plan_diffusion` or `timm_patch.plan_timm`. `families.py` and `timm_rope.py` contain what differs
between models, `rotations.py` the parameters of both, `schedules.py` the schedules. `patching` saves and loads the
rotations as it does for any other model.
"""
