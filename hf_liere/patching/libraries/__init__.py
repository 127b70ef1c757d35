"""
Learned rotations inside models of other libraries: diffusers models, with schedules of their
frequencies, and vision transformers of timm.

It never imports these libraries: a model is recognised by the names of its classes. Start with
`library_patch.plan_library`, then read `diffusion_patch` or `timm_patch`. `families.py` contains what differs between
models of diffusers, `rotations.py` the parameters of both, `schedules.py` the schedules.
"""

from .diffusion_patch import DiffusionTower
from .timm_patch import TimmTower


TOWERS = (DiffusionTower, TimmTower)
