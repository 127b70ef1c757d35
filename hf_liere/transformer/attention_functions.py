"""Attention functions: the eager one, and those that take poses of tokens."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..storage.saved_code import SavesItsCode


def eager_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention that also returns its (B, H, N, N) weights."""
    weights = torch.matmul(query, key.transpose(-1, -2)) * scaling  # (B, H, N, N)
    if attention_mask is not None and attention_mask.dtype == torch.bool:
        weights = weights.masked_fill(~attention_mask, torch.finfo(weights.dtype).min)
    elif attention_mask is not None:
        weights = weights + attention_mask
    weights = nn.functional.softmax(weights, dim=-1, dtype=torch.promote_types(query.dtype, torch.float32))
    weights = nn.functional.dropout(weights.to(query.dtype), p=dropout, training=module.training)
    return torch.matmul(weights, value).transpose(1, 2).contiguous(), weights  # (B, N, H, D), (B, H, N, N)


def find_attention(implementation: str, eager: Callable, poses: Any = None) -> Callable:
    """The function of an attention implementation. Raises as [`refuse_ignored_poses`]."""
    function = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager)
    refuse_ignored_poses(function, implementation, poses)
    return function


def refuse_ignored_poses(function: Callable, implementation: str, poses: Any) -> None:
    """Raises `ValueError` if poses were given, and the function of an attention implementation would ignore them."""
    if poses is not None and not _takes_poses(function):
        raise ValueError(
            f"poses were given, but attn_implementation={implementation!r} ignores them: call "
            "model.set_attn_implementation('pose_embedding') first, or leave poses out."
        )


def _takes_poses(function: Callable) -> bool:
    return "poses" in inspect.signature(function).parameters


class SavesPoseAttention(SavesItsCode):
    """Mixin of configurations: an attention implementation by poses is saved, as weights mean nothing under another."""

    @property
    def attends_by_poses(self) -> bool:
        function = ALL_ATTENTION_FUNCTIONS.get(self._attn_implementation)
        return function is not None and _takes_poses(function)

    def to_dict(self) -> dict[str, Any]:
        values: dict[str, Any] = super().to_dict()
        if self.attends_by_poses:
            values["attn_implementation"] = self._attn_implementation
        return values
