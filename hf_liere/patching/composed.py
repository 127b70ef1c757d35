"""
Learned rotations behind a model's own RoPE: R(p) R_RoPE(p′) q, where R is the identity at the start. The positions p
are those of the model, p′, or others that `forward` gets as `rotary_positions`, such as panels (OPRO, 2603.27637).
"""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from ..encoding.given_positions import check_coordinates, require_tensors
from ..probing.module_inspection import CACHES
from .tower_patch import Pass


@dataclass(eq=False)
class PositionsPass(Pass):
    """
    A forward pass of a model that got `rotary_positions`.

    Attributes:
        positions: (1 or B, M, A) of all tokens, also of those in the cache.
        seen: The number of tokens in the cache; `None` for models without one.
        tower: The tower that has taken the positions.
    """

    positions: torch.Tensor
    seen: int | torch.Tensor | None
    tower: nn.Module | None = None


def take_positions(forward: Callable) -> Callable:
    """The `forward` of a model class, with `rotary_positions` as one more argument."""
    described = inspect.signature(forward)
    names = list(described.parameters)[1:]

    @functools.wraps(forward)
    def take(self, *args, rotary_positions: torch.Tensor | None = None, **kwargs):
        if rotary_positions is None:
            return forward(self, *args, **kwargs)
        require_tensors(rotary_positions=rotary_positions)
        check_coordinates(rotary_positions)
        options = {**dict.fromkeys(names), **dict(zip(names, args)), **kwargs}
        caches = [options[name] for name in CACHES if name in options]
        seen = sum(cache.get_seq_length() for cache in caches if cache is not None)
        current = PositionsPass(self, rotary_positions, seen if caches else None)
        output = current.resume(forward, self, *args, **kwargs)
        if current.tower is None:
            raise ValueError("Nothing in this model takes rotary_positions; accepted: patches with compose=True.")
        return output

    positions = inspect.Parameter("rotary_positions", inspect.Parameter.KEYWORD_ONLY, default=None)
    order = sorted([*described.parameters.values(), positions], key=lambda each: each.kind)
    take.__signature__ = described.replace(parameters=order)  # type: ignore[attr-defined]
    # Wrappers of bound methods copy attributes, and a copied signature would have `self`.
    return functools.wraps(take, updated=())(lambda self, *args, **kwargs: take(self, *args, **kwargs))


def choose_positions(tower: nn.Module, coordinates: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
    """
    (…, N, A) coordinates of some states, or positions that `forward` got instead. In a model with a cache, tokens after
    the last position have the last one. Raises `ValueError` if they do not fit.
    """
    *batch, tokens, axes = coordinates.shape
    given, num_axes = PositionsPass.current(), tower.rotary_patch.config.num_axes
    samples, axes = states.shape[0] if states.ndim > 2 else 1, num_axes or axes
    if given is None:
        if num_axes is not None:
            check_shape(tower, None, samples, tokens, axes)
        return coordinates
    positions = given.positions.to(coordinates.device)
    if given.seen is not None and positions.ndim == 3:
        rows = torch.arange(tokens, device=positions.device) + given.seen
        positions = positions.index_select(1, rows.clamp(max=positions.shape[1] - 1))  # (1 or B, N, A)
    check_shape(tower, positions, samples, tokens, axes)
    if given.tower not in (None, tower):
        raise ValueError("rotary_positions are for one part of a model, and several are patched; name its target.")
    given.tower = tower
    return positions[0].expand(*batch, -1, -1) if positions.shape[0] == 1 else positions


def check_shape(tower: nn.Module, positions: torch.Tensor | None, samples: int, tokens: int, axes: int) -> None:
    """Raise `ValueError` if there are no positions, or not those of so many tokens."""
    shape = None if positions is None else tuple(positions.shape)
    if shape not in ((1, tokens, axes), (samples, tokens, axes)):
        raise ValueError(
            f"{type(tower).__name__} needs rotary_positions of shape (1, {tokens}, {axes}) or ({samples}, {tokens}, "
            f"{axes}), (batch, tokens, axes), in every forward pass, and got {shape}."
        )


def rotate_planes(cos: torch.Tensor, sin: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
    """
    (B, H, prefix + N, 2 · planes) states; those of the last N tokens are rotated, each plane two neighbouring channels,
    by (…, N, planes) cos and sin, with the operations of models, to the bit.
    """
    cos, sin = (x.to(states.device).unsqueeze(-3) for x in (cos, sin))  # (…, 1, N, planes) each
    prefix, moved = states.split([states.shape[-2] - cos.shape[-2], cos.shape[-2]], dim=-2)
    x, y = moved.unflatten(-1, (-1, 2)).unbind(-1)  # (B, H, N, planes) each
    rotated = torch.stack([x * cos - y * sin, y * cos + x * sin], dim=-1).flatten(-2)
    return torch.cat([prefix, rotated.to(states.dtype)], dim=-2)
