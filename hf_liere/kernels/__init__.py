"""
Compiled implementations of functions of `models`, which computes the same with plain operations.

It imports only `models.rotation`; importing this package registers the kernels there. Start with `cuda.py` or `cpu.py`,
which both implement the functions of `models/rotation/backends.py`; `self_check.py` compares kernels before their use.
"""

from ..models.rotation.backends import register_backend
from . import cpu, cuda


register_backend(cuda)
register_backend(cpu)
