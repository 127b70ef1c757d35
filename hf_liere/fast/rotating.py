"""The rotation of queries and keys as an operator with gradients."""

import torch

from .application import apply_rotation, drop_empty_key, match_layout, restore_empty_key
from .dispatch import in_portable_graph, operator, refuse_tangents
from .rotation_gradients import collects_outer_products, rotate_backward


def _rotate_plainly(query, key, rotation, generators, phases, inverse):
    """As [`_rotate`]; the eigenbasis of `generators` has no derivative in forward mode."""
    if generators is not None and not in_portable_graph():
        refuse_tangents()
    rotated = apply_rotation(drop_empty_key(query, key), rotation, inverse, portable=True)  # (B, H, N, D) each
    return restore_empty_key(rotated, key)


def _save_rotated(ctx, inputs, output):
    _, _, *rotation, ctx.inverse = inputs
    # Attention saves the rotated states anyway; those before the rotation are not needed.
    ctx.save_for_backward(*(output if ctx.needs_input_grad[2] else (None, None)), *rotation)


def _states_gradients(ctx, *gradients):
    query, key, *rotation = ctx.saved_tensors
    if query is None:
        return _rotate(*gradients, *rotation, not ctx.inverse)
    if ctx.inverse:
        raise NotImplementedError("Inverse rotations have no gradient of the rotation.")
    found = rotate_backward(*gradients, query, key, *rotation)
    return (*found[:2], None, found[3]) if collects_outer_products(*rotation[1:]) else found


@operator(
    "(Tensor query, Tensor key, Tensor rotation, Tensor? generators, Tensor? phases, bool inverse) -> (Tensor, Tensor)",
    fake=lambda query, key, *_: (torch.empty_like(query), torch.empty_like(key)),
    gradients=_states_gradients,
    save=_save_rotated,
    plainly=_rotate_plainly,
)
def _rotate(query, key, rotation, generators, phases, inverse):
    """
    (B, H, N, D) query and key by the cos and sin, generators and phases of [`PlaneRotation`], by the blocks of
    [`BlockRotation`], or by the inverse.
    """
    rotated = apply_rotation(drop_empty_key(query, key), rotation, inverse)  # (B, H, N, D) each
    return match_layout(restore_empty_key(rotated, key), (query, key))
