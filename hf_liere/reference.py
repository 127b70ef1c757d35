"""
Rotations as the papers write them: R(p) = exp(Σ_a p_a A_a) (LieRE eq. 4, ComRoPE eq. 3), applied to queries and keys.

Everything is in float64 and as simple as possible: nothing is shared between layers, and nothing is imported from
`models`, whose fast path is tested against this file.
"""

from collections.abc import Mapping

import torch


def generators(parameters: Mapping[str, torch.Tensor], config, num_axes: int, layer: int, head: int) -> torch.Tensor:
    """
    The skew-symmetric A_a of one head, (A, head_dim, head_dim); zero for channels that are not rotated.

    Args:
        parameters: Parameters of a rotary encoding, by name: `generators`, the entries of each block below its
            diagonal, column by column (LieRE §4, ComRoPE eq. 8), and `multipliers` θ (ComRoPE-LD, eq. 10); none for
            axial RoPE.
        config: Configuration of the encoding.
    """
    learned = {name: values.detach().double().cpu() for name, values in parameters.items()}
    size, axes = config.block_size, torch.arange(num_axes)
    if config.position_encoding == "axial_rope":
        planes = config.head_dim // (2 * num_axes)
        scale = 1.0 if config.rotary_init_scale is None else config.rotary_init_scale
        frequencies = scale * config.rope_theta ** -(torch.arange(planes, dtype=torch.float64) / planes)
        entries = torch.block_diag(*[frequencies] * num_axes).view(num_axes, 1, 1, -1, 1)  # (A, 1, 1, blocks, 1)
    elif config.position_encoding == "comrope_ap":
        served = torch.arange(config.head_dim // size) % num_axes  # (blocks,)
        entries = (served == axes.unsqueeze(-1)).view(num_axes, 1, 1, -1, 1) * learned["generators"]
    elif config.position_encoding == "comrope_ld":
        entries = learned["multipliers"].unsqueeze(-1) * learned["generators"]
    else:
        entries = learned["generators"]  # (A, layers or 1, heads or 1, blocks, b(b−1)/2)
    # Where layers or heads share generators, there is one set.
    entries = entries[:, layer % entries.shape[1], head % entries.shape[2]]  # (A, blocks, b(b−1)/2)
    below = [(row, column) for column in range(size) for row in range(column + 1, size)]
    matrices = torch.zeros(num_axes, config.head_dim, config.head_dim, dtype=torch.float64)
    for block in range(entries.shape[1]):
        for index, (row, column) in enumerate(below):
            matrices[:, block * size + row, block * size + column] = entries[:, block, index]
    return matrices - matrices.transpose(-1, -2)


def rotations(matrices: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """R(p) of (A, …, n, n) generators at (N, A) positions: (…, N, n, n)."""
    return exponential(torch.einsum("pa,a...ij->...pij", positions.double(), matrices))


def exponential(matrices: torch.Tensor) -> torch.Tensor:
    """exp(X) of skew-symmetric (…, n, n) matrices: X = V diag(−iλ) Vᴴ with the real eigenvalues λ of iX."""
    eigenvalues, vectors = torch.linalg.eigh(1j * matrices)
    return ((vectors * torch.exp(-1j * eigenvalues).unsqueeze(-2)) @ vectors.mH).real


def rotate(states: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
    """R(p) q of every token (LieRE §4): (…, N, D) queries or keys by (…, N, D, D) rotations."""
    return torch.einsum("...ij,...j->...i", matrices, states.double())
