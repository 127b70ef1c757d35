"""
Exponentials of dense blocks on accelerators, where launches cost more than products: all layers, heads and blocks are
one batch, every exponent is squared equally often, and the host reads no value.

The backward pass is that of `exponential_gradient`, with squares that are computed again instead of stored.
"""

import math
from collections.abc import Iterator

import torch

from .dispatch import operator
from .exponential_gradient import gradient_by_moments, gradients_by_token, moments_are_fewer, upper_entries
from .scaling_and_squaring import POLYNOMIAL_NORM, PORTABLE_SQUARINGS, exponential_within


SQUARINGS = PORTABLE_SQUARINGS[torch.float64]
# Numbers in one batch: a product of this many takes longer than its launch, and more would only need more memory.
BATCH_ELEMENTS = 1 << 22


def batched_rotations(
    positions: torch.Tensor, generators: torch.Tensor, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, ...]:
    """
    exp(Σ_a p_a A_a) of every token (LieRE eq. 4), NaN where the norm of an exponent exceeds 3.2 · 2¹⁶.

    Args:
        positions: (P, A) in float64, of P tokens.
        generators: (A, G, K, b, b), skew-symmetric, of G layers and K blocks.
        dtype: Type of the result.

    Returns:
        For each of the G layers (P, K, b, b).
    """
    return _batched_rotations(positions, generators, dtype).unbind()


def _batches(positions: torch.Tensor, generators: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
    """
    Slices of the tokens whose exponents of all layers are computed together, and room for matrices, (9, tokens · G · K,
    b, b), of which the first are the exponents.
    """
    flat = generators.flatten(1)  # (A, G · K · b²)
    step = max(1, BATCH_ELEMENTS // flat.shape[1])
    for start in range(0, len(positions), step):
        tokens = slice(start, start + step)
        memory = positions.new_empty(9, len(positions[tokens]) * flat.shape[1])
        torch.mm(positions[tokens], flat, out=memory[0].view(-1, flat.shape[1]))
        yield tokens, memory.view(9, -1, *generators.shape[-2:])


def _fake_rotations(positions, generators, dtype):
    return positions.new_empty(generators.shape[1], positions.shape[0], *generators.shape[2:], dtype=dtype)


def _save(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:2], output)


def _gradients(ctx, gradient):
    return batched_rotations_backward(*ctx.saved_tensors, gradient, ctx.needs_input_grad[0])


@operator(
    "(Tensor positions, Tensor generators, ScalarType dtype) -> Tensor",
    fake=_fake_rotations,
    gradients=_gradients,
    save=_save,
)
def _batched_rotations(positions, generators, dtype):
    """(G, P, K, b, b)."""
    rotations = _fake_rotations(positions, generators, dtype)
    for tokens, memory in _batches(positions * 2.0**-SQUARINGS, generators.to(positions.dtype)):
        square, sixth = exponential_within(memory), memory[3]  # (tokens · G · K, b, b) each
        # The spectrum consists of pairs ±iλ: the Frobenius norm of the sixth power is at least √2 λ⁶.
        square.masked_fill_(sixth.norm(dim=(-2, -1), keepdim=True) > math.sqrt(2) * POLYNOMIAL_NORM**6, torch.nan)
        other = sixth
        for _ in range(SQUARINGS):
            square, other = torch.bmm(square, square, out=other), square
        rotations[:, tokens] = square.view(-1, *generators.shape[1:]).transpose(0, 1)
    return rotations


@operator(
    "(Tensor positions, Tensor generators, Tensor rotations, Tensor gradient, bool needs_positions) "
    "-> (Tensor, Tensor)",
    fake=lambda positions, generators, *_: tuple(torch.empty_like(x).contiguous() for x in (positions, generators)),
)
def batched_rotations_backward(positions, generators, rotations, gradient, needs_positions):
    """Gradients of positions, zeros unless they are needed, and of generators; (G, P, K, b, b) `rotations`."""
    size = generators.shape[-1]
    scaled = positions * 2.0**-SQUARINGS
    entries = rotations.new_empty(*rotations.shape[:2], rotations.shape[2] * (size * (size - 1) // 2))
    for tokens, memory in _batches(scaled, generators.to(positions.dtype)):
        square, (other, product, tangents) = exponential_within(memory), memory[:3]
        # W = Rᵀ dL/dR
        by_layer = rotations[:, tokens].mT @ gradient[:, tokens]  # (G, tokens, K, b, b)
        tangents.view(-1, *generators.shape[1:]).copy_(by_layer.transpose(0, 1))
        for _ in range(SQUARINGS):
            # (1 + e^(2ʲ ad Y)) W
            tangents.baddbmm_(torch.bmm(square, tangents, out=product), square.mT)
            square, other = torch.bmm(square, square, out=other), square
        upper = upper_entries(tangents).view(by_layer.shape[1], len(entries), -1)  # (tokens, G, K·b(b−1)/2)
        entries[:, tokens] = upper.transpose(0, 1)
    positions_gradient = torch.zeros_like(positions).contiguous()
    if needs_positions or not moments_are_fewer(positions, entries.dtype):
        scaled_gradient, generators_gradient = gradients_by_token(scaled, generators, entries)
        positions_gradient.add_(scaled_gradient, alpha=2.0**-SQUARINGS)
    else:
        generators_gradient = gradient_by_moments(scaled, generators, entries)
    return positions_gradient, generators_gradient.to(generators.dtype).contiguous()
