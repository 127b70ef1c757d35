"""
Rotations as the papers write them: R(p) = exp(Σ_a p_a A_a) (LieRE eq. 4, ComRoPE eq. 3), applied to queries and keys.

Everything is in float64 and as simple as possible. It imports nothing from `models`, whose tests use it.
"""

from collections.abc import Mapping
from typing import Any

import torch


def generators(
    parameters: Mapping[str, torch.Tensor], config: Any, num_axes: int, layer: int, head: int
) -> torch.Tensor:
    """
    The skew-symmetric A_a of one head, (A, head_dim, head_dim); zero for channels that are not rotated.

    Args:
        parameters: Parameters of a rotary encoding, by name: `generators`, the entries of each block below its
            diagonal, column by column (LieRE §4, ComRoPE eq. 8), and `multipliers` θ (ComRoPE-LD, eq. 10); `skew`, the
            same entries of S (Cayley-STRING; LieRE product, for every axis). Circulant-STRING's `generators` are the
            entries of a row right of the diagonal, Spherical RoPE's the frequencies of the blocks. Fixed encodings have
            none.
        config: Configuration of the encoding.
    """
    learned = {name: values.detach().double().cpu() for name, values in parameters.items()}
    size, axes, encoding = config.block_size, torch.arange(num_axes), config.position_encoding
    if encoding == "axial_rope":
        frequencies = [axial_frequencies(config, num_axes, axis, head) for axis in range(num_axes)]
        entries = torch.stack(frequencies).view(num_axes, 1, 1, -1, 1)  # (A, 1, 1, blocks, 1)
    elif encoding == "golden_gate_rope":
        entries = fixed_scale(config) * golden_gate_frequencies(config, num_axes)[:, None, :, :, None]
    elif encoding == "comrope_ap":
        served = torch.arange(config.head_dim // size) % num_axes  # (blocks,)
        entries = (served == axes.unsqueeze(-1)).view(num_axes, 1, 1, -1, 1) * learned["generators"]
    elif encoding == "comrope_ld":
        entries = learned["multipliers"].unsqueeze(-1) * learned["generators"]
    else:
        entries = learned["generators"]  # (A, layers or 1, heads or 1, blocks, b(b−1)/2)
    # Layers or heads that share generators have one set.
    entries = entries[:, layer % entries.shape[1], head % entries.shape[2]]  # (A, blocks, b(b−1)/2)
    if encoding == "circulant_string":
        return torch.stack([torch.block_diag(*map(circulant, blocks, [size] * len(blocks))) for blocks in entries])
    if encoding == "spherical_rope":
        # The axis of the first factor rotates channels 0 and 1, the other one channels 1 and 2.
        below, first = entries.new_zeros(*entries.shape, 3), config.relative_axis
        below[first, :, 0], below[1 - first, :, 2] = entries[first], entries[1 - first]
        entries = below
    if "skew" not in learned:
        return block_diagonal(entries, size, config.head_dim)
    skew = learned["skew"] if encoding == "liere_product" else learned["skew"].unsqueeze(0)  # (A or 1, layers or 1, …)
    blocks = skew[:, layer % skew.shape[1], head % skew.shape[2]]  # (A or 1, blocks, b(b−1)/2)
    skew, identity = block_diagonal(blocks, size, config.head_dim), torch.eye(config.head_dim).double()
    basis = (identity - skew) @ torch.linalg.inv(identity + skew)
    return basis @ block_diagonal(entries, 2, config.head_dim) @ basis.mT


def block_diagonal(entries: torch.Tensor, size: int, width: int) -> torch.Tensor:
    """Skew-symmetric (A, width, width) from (A, blocks, b(b−1)/2) entries below the diagonal, column by column."""
    below = [(row, column) for column in range(size) for row in range(column + 1, size)]
    matrices = torch.zeros(len(entries), width, width, dtype=torch.float64)
    for block in range(entries.shape[1]):
        for index, (row, column) in enumerate(below):
            matrices[:, block * size + row, block * size + column] = entries[:, block, index]
    return matrices - matrices.transpose(-1, -2)


def circulant(entries: torch.Tensor, size: int) -> torch.Tensor:
    """C − Cᵀ (Circulant-STRING), C being circulant with the first row 0, c₁, c₂, …, 0 of ⌊(b−1)/2⌋ `entries` c."""
    row = torch.zeros(size, dtype=torch.float64)
    row[1 : len(entries) + 1] = entries
    matrix = torch.stack([row.roll(shift) for shift in range(size)])
    return matrix - matrix.T


def fixed_scale(config: Any) -> float:
    """The factor of the frequencies of fixed encodings."""
    return 1.0 if config.rotary_init_scale is None else config.rotary_init_scale


def axial_frequencies(config: Any, num_axes: int, axis: int, head: int) -> torch.Tensor:
    """Frequencies of all planes of a head for one axis (VisionLLaMA), zero for planes of other axes."""
    if config.axial_layout == "heads":
        ranks = torch.arange(config.head_dim // 2, dtype=torch.float64)
        serves = head * num_axes // config.num_attention_heads == axis
        return serves * fixed_scale(config) * config.rope_theta ** -(ranks / len(ranks))
    count, scale = config.head_dim // (2 * num_axes), fixed_scale(config)
    frequencies = torch.zeros(num_axes * count, dtype=torch.float64)
    for rank in range(count):
        plane = axis * count + rank if config.axial_layout == "blocks" else rank * num_axes + axis
        share = rank / count if config.axial_spectrum == "full" else plane / (num_axes * count)
        frequencies[plane] = scale * config.rope_theta**-share
    return frequencies


def golden_gate_frequencies(config: Any, num_axes: int) -> torch.Tensor:
    """(A, heads, planes) of golden gate RoPE (jerryxio.ng/posts/nd-rope), as `LieREConfig` describes it."""
    heads, planes = 1 if config.share_heads else config.num_attention_heads, config.head_dim // 2
    # The positive root of x^(A+1) = x + 1.
    low, high = 1.0, 2.0
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if middle ** (num_axes + 1) < middle + 1 else (low, middle)
    unrotated = round(config.unrotated_share * planes)
    frequencies = torch.zeros(num_axes, heads, planes, dtype=torch.float64)
    for head in range(heads):
        for plane in range(unrotated, planes):
            index, share = head * planes + plane + 1, (plane - unrotated) / max(planes - unrotated - 1, 1)
            uniform = [index / low ** (axis + 1) % 1 for axis in range(num_axes)]
            direction = torch.special.ndtri(torch.tensor(uniform, dtype=torch.float64))
            magnitude = config.min_frequency ** (1 - share) * config.max_frequency**share
            frequencies[:, head, plane] = magnitude * direction / direction.norm()
    return frequencies


def rotations(matrices: torch.Tensor, positions: torch.Tensor, relative_axis: int | None = None) -> torch.Tensor:
    """
    R(p) of (A, …, n, n) generators at (N, A) positions: (…, N, n, n). For a product (Spherical RoPE, LieRE product),
    exp(p_r A_r) exp(p_(r+1) A_(r+1)) … exp(p_(r−1) A_(r−1)) with the `relative_axis` r, axis 0 after the last.
    """
    if relative_axis is not None:
        axes = [(relative_axis + offset) % len(matrices) for offset in range(len(matrices))]
        first, *others = (rotations(matrices[a : a + 1], positions[:, a : a + 1]) for a in axes)
        for other in others:
            first = first @ other
        return first
    return exponential(torch.einsum("pa,a...ij->...pij", positions.double(), matrices))


def exponential(matrices: torch.Tensor) -> torch.Tensor:
    """exp(X) of skew-symmetric (…, n, n) matrices: X = V diag(−iλ) Vᴴ with the real eigenvalues λ of iX."""
    eigenvalues, vectors = torch.linalg.eigh(1j * matrices)
    return ((vectors * torch.exp(-1j * eigenvalues).unsqueeze(-2)) @ vectors.mH).real


def rotate(states: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
    """R(p) q of every token (LieRE §4): (…, N, D) queries or keys by (…, N, D, D) rotations."""
    return torch.einsum("...ij,...j->...i", matrices, states.double())
