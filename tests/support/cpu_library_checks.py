"""The loaded library of kernels for CPUs, and whether its rotations are right."""

import reference
import torch

from hf_liere.fast import dispatch
from hf_liere.kernels import cpu_library
from hf_liere.rotation.exponential import block_rotations, skew


BUILT = cpu_library.FOLDER
CAPABILITY = torch.backends.cpu.get_cpu_capability()


def refusal():
    return dispatch.ask_backend("block_rotations", torch.zeros(1), 8)[1]


def assert_rotations_are_right():
    positions, generators = torch.rand(6, 2, dtype=torch.float64), skew(torch.rand(2, 3, 28) * 6, 8)
    exact = reference.exponential(torch.einsum("pa,akij->kpij", positions, generators.double()))
    # float32 rounding of numbers up to one.
    torch.testing.assert_close(block_rotations(positions, generators).double(), exact, rtol=0, atol=2e-7)
