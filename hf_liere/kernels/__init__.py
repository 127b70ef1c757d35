"""Compiled implementations of what `models` computes with plain operations; importing this package registers them."""

from ..models.rotation.backends import register_backend
from . import cpu, cuda


register_backend(cuda)
register_backend(cpu)
