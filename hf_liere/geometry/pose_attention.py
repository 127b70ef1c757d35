"""
Attention by poses for Transformers models: the attention implementation `"pose_embedding"`.

Importing the package registers it. It works in every model that hands further arguments of `forward` on to its
attention, as the models of tokens of this package do.
"""

from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from .pose_embedding import PoseEmbedding, PoseFrames


POSE_ATTENTION = "pose_embedding"


def pose_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    poses: torch.Tensor | PoseFrames | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """
    Scaled dot-product attention of queries, keys and values that [`PoseEmbedding`] transforms (GTA, eqs. 4–6).

    Args:
        query, key, value: (B, H, N, head_dim), keys and values also of fewer heads.
        poses: As for [`PoseEmbedding.forward`]: (B, N, 4, 4) or (N, 4, 4) of all tokens, class and register tokens
            included, or the result of [`PoseEmbedding.frames`], with any options.

    Returns:
        (B, N, H, head_dim), and `None` for the weights.

    Raises:
        ValueError: without poses, or as [`PoseEmbedding`].
    """
    if poses is None:
        raise ValueError(
            f"attn_implementation={POSE_ATTENTION!r} needs the poses of all tokens, and none were given: call "
            "model(…, poses=poses) with (batch, tokens, 4, 4) matrices from camera to world."
        )
    options = {"head_dim": query.shape[-1], **(poses.options if isinstance(poses, PoseFrames) else {})}
    embedding = PoseEmbedding(**options)
    frames = poses if isinstance(poses, PoseFrames) else embedding.frames(poses)
    query, key, value = embedding(query, key, value, frames)
    output, _ = sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    return embedding.undo(output.transpose(1, 2), frames).transpose(1, 2).contiguous(), None


AttentionInterface.register(POSE_ATTENTION, pose_attention_forward)
AttentionMaskInterface.register(POSE_ATTENTION, sdpa_mask)
