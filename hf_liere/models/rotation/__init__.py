"""
Rotations from generators (`exponential`, `scaling_and_squaring`, `bases`), their application to queries and keys
(`rotation`, `application`), and the gradients of both. `dispatch` chooses the code that runs. This room imports from no
other. Start reading at `rotation.PlaneRotation`, then `exponential.block_rotations`.
"""

from . import quaternions  # noqa: F401 (offers closed forms)
