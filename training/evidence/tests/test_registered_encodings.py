"""Encodings of other projects that sweeps register: the rotations of their formulas, in float64 loops."""

import math

import pytest
import torch
from checkout import ROOT

from hf_liere import LieRotaryEmbedding
from hf_liere.encoding.registration import import_file


def skew(entries, size):
    """The skew-symmetric matrix with these entries below its diagonal, column after column."""
    matrix = torch.zeros(size, size, dtype=torch.float64)
    values = iter(entries)
    for column in range(size):
        for row in range(column + 1, size):
            matrix[row, column] = next(values)
            matrix[column, row] = -matrix[row, column]
    return matrix


@pytest.mark.parametrize("name, size", [("cayley_liere", 8), ("opro", 16)])
def test_rotations_are_those_of_the_formula(name, size, registers_nothing):
    import_file(ROOT / "training" / "evidence" / "encodings" / f"{name}.py")
    torch.manual_seed(0)
    rotary = LieRotaryEmbedding(num_heads=2, head_dim=16, num_axes=2, position_encoding=name, block_size=size).double()
    for parameter in rotary.parameters():
        torch.nn.init.normal_(parameter)
    states, positions = torch.randn(1, 2, 5, 16, dtype=torch.float64), torch.randn(5, 2, dtype=torch.float64)
    rotated, _ = rotary(states, states, positions)
    entries, identity = rotary.encoding.entries("cpu").detach(), torch.eye(size, dtype=torch.float64)
    for head in range(2):
        for token in range(5):
            for block in range(16 // size):
                generator = sum(positions[token, a] * skew(entries[a, 0, head, block], size) for a in range(2))
                if name == "opro":
                    assert torch.linalg.matrix_rank(skew(entries[0, 0, head, block], size)) == 4
                    rotation = sum(torch.matrix_power(generator / 64, n) / math.factorial(n) for n in range(20))
                    rotation = torch.matrix_power(rotation, 64)
                else:
                    rotation = torch.linalg.inv(identity - generator / 2) @ (identity + generator / 2)
                channels = slice(block * size, (block + 1) * size)
                wanted = rotation @ states[0, head, token, channels]
                assert torch.allclose(rotated[0, head, token, channels], wanted, rtol=1e-9, atol=1e-9)
