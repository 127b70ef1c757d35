"""
Compiled implementations of functions of `fast`, which computes the same with plain operations.

It imports only `models.fast`; importing this package registers the kernels there. Start with `cuda.py` or `cpu.py`,
which both implement the functions of `fast/dispatch.py`; `self_check.py` compares kernels before their use.
"""

from ..fast.dispatch import register_backend
from . import cpu, cuda


register_backend("cuda", cuda)
# Under Triton's interpreter its kernels run on CPUs.
register_backend("cpu", cuda if cuda.is_interpreted() else cpu)
