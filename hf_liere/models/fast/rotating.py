"""The rotation of queries and keys as operators with gradients."""

import torch

from .application import apply_rotation, drop_empty_key, match_layout, restore_empty_key
from .dispatch import operator
from .rotation_gradients import rotate_blocks_backward, rotate_planes_backward


def _save_rotated(ctx, inputs, output):
    _, _, rotation, *others, ctx.inverse = inputs
    # Attention saves the rotated states anyway; those before the rotation are not needed.
    ctx.save_for_backward(*(output if ctx.needs_input_grad[2] else (None, None)), rotation, *others)


def _states_gradients(ctx, *gradients):
    query, key, rotation, *others = ctx.saved_tensors
    if query is None:
        rotate = _rotate_planes if others else _rotate_blocks
        return rotate.operator(*gradients, rotation, *others, not ctx.inverse)
    if ctx.inverse:
        raise NotImplementedError("Inverse rotations have no gradient of the rotation.")
    backward = rotate_planes_backward if others else rotate_blocks_backward
    return backward(*gradients, query, key, rotation, *others)


def _fake_states(query, key, *_):
    return torch.empty_like(query), torch.empty_like(key)


@operator(
    "(Tensor query, Tensor key, Tensor cos_sin, Tensor? generators, Tensor? phases, bool inverse) -> (Tensor, Tensor)",
    fake=_fake_states,
    gradients=_states_gradients,
    save=_save_rotated,
)
def _rotate_planes(query, key, cos_sin, generators, phases, inverse):
    """(B, H, N, D) query and key by the fields of [`PlaneRotation`], or by its inverse."""
    rotated = apply_rotation(drop_empty_key(query, key), cos_sin, inverse)  # (B, H, N, D) each
    return match_layout(restore_empty_key(rotated, key), (query, key))


@operator(
    "(Tensor query, Tensor key, Tensor blocks, bool inverse) -> (Tensor, Tensor)",
    fake=_fake_states,
    gradients=_states_gradients,
    save=_save_rotated,
)
def _rotate_blocks(query, key, blocks, inverse):
    """(B, H, N, D) query and key by [`BlockRotation`], or by its inverse."""
    rotated = apply_rotation(drop_empty_key(query, key), blocks, inverse)  # (B, H, N, D) each
    return match_layout(restore_empty_key(rotated, key), (query, key))
