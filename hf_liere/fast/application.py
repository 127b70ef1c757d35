"""
Rotations applied to queries and keys, without gradients, by the backend of the device or by plain operations.

States are a query and a key, (B, H, N, D) each, or one of them. A key without samples, (0, H, N, D), stands for none.
"""

import functools
from collections.abc import Callable, Sequence

import torch

from .constants import constant
from .dispatch import find_backend


States = tuple[torch.Tensor, ...]
# Samples of query, and of key, in one product: the fastest on CPUs for blocks of 8.
SAMPLES_AT_ONCE = 8


def drop_empty_key(query: torch.Tensor, key: torch.Tensor) -> States:
    """Query and key, or the query alone where the key has no samples."""
    return (query, key) if key.shape[0] else (query,)


def restore_empty_key(states: States, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Inverse of [`drop_empty_key`] for its results."""
    # An operator must not return its argument.
    return states if len(states) == 2 else (*states, torch.empty_like(key))


def match_layout(values: Sequence[torch.Tensor], like: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Each of the values in the layout of `torch.empty_like`, which fake results have."""
    strides = (torch.empty_like(tensor, device="meta").stride() for tensor in like)
    return tuple(
        x if x.stride() == stride else torch.empty_like(tensor).copy_(x)
        for x, tensor, stride in zip(values, like, strides)
    )


def apply_rotation(states: States, rotation: torch.Tensor, inverse: bool = False, portable: bool = False) -> States:
    """States rotated by (1 or B, 1 or H, N, planes, 2) cos and sin, or by (1 or B, 1 or H, N, blocks, b, b)."""
    if not portable and (backend := find_backend("apply_rotation", states[0], rotation.shape[-1])):
        return backend.apply_rotation(states, rotation, inverse)
    if rotation.ndim == 5:
        rotation = rotation * constant((1.0, -1.0), rotation) if inverse else rotation
        return rotate_channels(states, rotation, portable)
    if rotation.shape[0] == 1 and not portable:
        return _multiply_shared_blocks(states, rotation, inverse)
    return multiply_blocks(states, rotation.transpose(-1, -2) if inverse else rotation)


def _pass_other_channels(rotate: Callable) -> Callable:
    """Decorator of a function that rotates all channels: it passes on those beyond the last plane or block."""

    @functools.wraps(rotate)
    def rotate_leading(states, rotation, *arguments, **options):
        width, head_dim = rotation.shape[3] * rotation.shape[-1], states[0].shape[-1]
        if width == head_dim:
            return rotate(states, rotation, *arguments, **options)
        rotated = rotate(tuple(part[..., :width] for part in states), rotation, *arguments, **options)
        return tuple(torch.cat([part, whole[..., width:]], dim=-1) for part, whole in zip(rotated, states))

    return rotate_leading


@_pass_other_channels
def rotate_channels(states: States, cos_sin: torch.Tensor, portable: bool = False) -> States:
    """Rotate pairs of channels; if `portable`, by operations that compilers fuse and other runtimes have."""
    cos_sin = cos_sin.to(torch.promote_types(states[0].dtype, torch.float32))
    rotated = []
    for part in states:
        wide = part.to(cos_sin.dtype)  # (B, H, N, D)
        if not portable and _can_be_complex(wide):
            # One pass over memory instead of six.
            product = torch.view_as_complex(wide.unflatten(-1, (-1, 2))) * torch.view_as_complex(cos_sin.contiguous())
            pairs = torch.view_as_real(product)  # (B, H, N, planes, 2)
        else:
            (cos, sin), (first, second) = cos_sin.unbind(-1), wide.unflatten(-1, (-1, 2)).unbind(-1)
            pairs = torch.stack([first * cos - second * sin, first * sin + second * cos], dim=-1)
        rotated.append(pairs.flatten(-2).to(part.dtype))  # (B, H, N, D)
    return tuple(rotated)


def _can_be_complex(states: torch.Tensor) -> bool:
    """Whether pairs of channels can be viewed as complex numbers, which MPS lacks."""
    if states.device.type == "mps":
        return False
    return states.stride(-1) == 1 and all(s % 2 == 0 for s in (states.storage_offset(), *states.stride()[:-1]))


@_pass_other_channels
def multiply_blocks(states: States, blocks: torch.Tensor) -> States:
    """Multiply blocks of channels by the matrices of each sample, or of all."""
    blocks = blocks.to(states[0].dtype)  # (1 or B, 1 or H, N, blocks, b, b)
    columns = (part.unflatten(-1, (-1, blocks.shape[-1])).unsqueeze(-1) for part in states)  # (B, H, N, blocks, b, 1)
    return tuple((blocks @ column).squeeze(-1).flatten(-2) for column in columns)


@_pass_other_channels
def _multiply_shared_blocks(states: States, blocks: torch.Tensor, inverse: bool = False) -> States:
    """Multiply blocks of channels by the (1, 1 or H, N, blocks, b, b) matrices of all samples, or their transposes."""
    batch, heads, tokens, _ = states[0].shape
    count, size = blocks.shape[3], blocks.shape[-1]
    matrices = blocks[0].expand(heads, *blocks.shape[2:]).transpose(0, 1).reshape(-1, size, size)
    matrices = matrices.to(states[0].dtype)  # (N · H · blocks, b, b)
    # Tokens before heads in memory, as projections leave them.
    rotated = tuple(part.new_empty(batch, tokens, heads, count * size).transpose(1, 2) for part in states)
    # One product per token, head and block takes several samples as its columns; more of them fall out of the cache.
    for start in range(0, batch, SAMPLES_AT_ONCE):
        samples = slice(start, start + SAMPLES_AT_ONCE)
        rows = block_rows(torch.cat([part[samples].transpose(1, 2) for part in states]).transpose(1, 2), size)
        # (N · H · blocks, samples, b)
        product = torch.bmm(rows, matrices) if inverse else torch.bmm(matrices, rows.transpose(1, 2)).transpose(1, 2)
        product = product.unflatten(0, (tokens, heads, count)).permute(3, 1, 0, 2, 4)  # (samples, H, N, blocks, b)
        for whole, part in zip(rotated, product.chunk(len(states))):
            whole[samples].unflatten(-1, (count, size)).copy_(part)
    return rotated


def block_rows(states: torch.Tensor, size: int) -> torch.Tensor:
    """(B, H, N, blocks · size) → (N · H · blocks, B, size)."""
    return states.unflatten(-1, (-1, size)).permute(2, 1, 3, 0, 4).flatten(0, 2)
