"""
Learned rotations inside the diffusion transformers of diffusers, and schedules of their frequencies.

It imports from `models` alone, and never diffusers: a model is recognised by the names of its classes. Start with
`diffusion_patch.plan_diffusion`; `families.py` contains what differs between models, `rotations.py` the parameters,
`schedules.py` the schedules. `patching` saves and loads the rotations as those of any other model.
"""
