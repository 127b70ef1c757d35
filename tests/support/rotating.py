"""Queries and keys rotated by tensors: the kind of rotation follows from their number of dimensions."""

import torch

from hf_liere.rotation.rotation import BlockRotation, PlaneRotation


def rotation_of(rotation):
    """(…, planes, 2) cos and sin, or (…, blocks, b, b) matrices, as a rotation; rotations as they are."""
    if not isinstance(rotation, torch.Tensor):
        return rotation
    return PlaneRotation(rotation) if rotation.ndim == 5 else BlockRotation(rotation)


def rotate_query_key(query, key, rotation):
    return rotation_of(rotation).rotate(query, key)


def rotate(states, rotation):
    return rotate_query_key(states, states, rotation)[0]
