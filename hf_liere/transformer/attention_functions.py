"""Attention functions: the eager one, and those that take poses of tokens."""

import inspect
from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..storage.saved_code import SavesItsCode


def add_mask(attention_mask: torch.Tensor | None, scores: torch.Tensor) -> torch.Tensor:
    """(1 or B, H, N, N) scores and a mask of pairs."""
    if attention_mask is None:
        return scores
    if attention_mask.dtype == torch.bool:
        return scores.masked_fill(~attention_mask, torch.finfo(scores.dtype).min)  # (B, H, N, N)
    return scores + attention_mask  # (B, H, N, N)


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
    weights = add_mask(attention_mask, torch.matmul(query, key.transpose(-1, -2)) * scaling)  # (B, H, N, N)
    weights = nn.functional.softmax(weights, dim=-1, dtype=torch.promote_types(query.dtype, torch.float32))
    weights = nn.functional.dropout(weights.to(query.dtype), p=dropout, training=module.training)
    return torch.matmul(weights, value).transpose(1, 2).contiguous(), weights  # (B, N, H, D), (B, H, N, N)


def takes_poses(implementation: str | None) -> bool:
    """Whether the function of an attention implementation has an argument `poses`."""
    function = ALL_ATTENTION_FUNCTIONS.get(implementation)
    return function is not None and "poses" in inspect.signature(function).parameters


def refuse_ignored_poses(implementation: str, poses: Any) -> None:
    """Raises `ValueError` if poses were given, and an attention implementation would ignore them."""
    if poses is not None and not takes_poses(implementation):
        raise ValueError(
            f"poses were given, but attn_implementation={implementation!r} ignores them: call "
            "model.set_attn_implementation('pose_embedding') first, or leave poses out."
        )


class SavesPoseAttention(SavesItsCode):
    """Mixin of configurations: an attention implementation by poses is saved, as weights mean nothing under another."""

    @property
    def attends_by_poses(self) -> bool:
        return takes_poses(self._attn_implementation)

    def to_dict(self) -> dict[str, Any]:
        values: dict[str, Any] = super().to_dict()
        if self.attends_by_poses:
            values["attn_implementation"] = self._attn_implementation
        return values
