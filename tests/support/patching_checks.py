"""The configuration that tests of patches share, and coordinates by loops."""

import torch
from patching_cases import build, randomize

from hf_liere import RotaryPatchConfig, patch


SHARED_CONFIG = RotaryPatchConfig(position_encoding="comrope_ld", block_size=4)


def unit_grid(*sizes):
    """(N, A) coordinates (i + ½)/n of ComRoPE, by loops."""
    rows = [[]]
    for size in sizes:
        rows = [[*row, (index + 0.5) / size] for row in rows for index in range(size)]
    return torch.tensor(rows, dtype=torch.float64)


def build_patched(name, implementation="sdpa"):
    """A case with rotations away from their neutral start, and its inputs."""
    model, inputs = build(name, implementation)
    randomize(patch(model, SHARED_CONFIG))
    return model, inputs
