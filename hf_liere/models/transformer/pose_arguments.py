"""Poses of tokens, which only some attention implementations use: such as `"pose_embedding"` of the package."""

import inspect
from collections.abc import Callable
from typing import Any

from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..saved_code import SavesItsCode


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

    def to_dict(self) -> dict[str, Any]:
        values: dict[str, Any] = super().to_dict()
        function = ALL_ATTENTION_FUNCTIONS.get(self._attn_implementation)
        if function is not None and _takes_poses(function):
            values["attn_implementation"] = self._attn_implementation
        return values
