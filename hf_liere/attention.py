"""Attention whose queries and keys are rotated by the position of their token."""

from collections.abc import Callable

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


def rotate(states: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """
    R(p) applied to consecutive blocks of channels of every token and head (LieRE §4: q′ = R(p) q, k′ = R(p) k).

    Args:
        states: (B, H, N, D) queries or keys.
        rotation: (1 or B, 1 or H, N, blocks, 2) with cos and sin, or (1 or B, 1 or H, N, blocks, b, b); channels
            beyond blocks · b are passed through.

    Returns:
        (B, H, N, D) in the type of `states`.
    """
    blocks, block_size = rotation.shape[3], rotation.shape[-1]
    rotation = rotation.to(states.dtype)
    rotated, tail = states[..., : blocks * block_size], states[..., blocks * block_size :]
    rotated = rotated.unflatten(-1, (blocks, block_size))
    if rotation.ndim == 5:
        cos, sin = rotation.unbind(-1)
        first, second = rotated.unbind(-1)
        rotated = torch.stack([first * cos - second * sin, first * sin + second * cos], dim=-1)
    elif rotation.shape[0] == 1:
        # One product per token, head and block takes the whole batch as its columns.
        rotated = torch.einsum("hnmij,bhnmj->bhnmi", rotation[0].expand(states.shape[1], *rotation.shape[2:]), rotated)
    else:
        rotated = (rotation @ rotated.unsqueeze(-1)).squeeze(-1)
    rotated = rotated.flatten(-2)
    return torch.cat([rotated, tail], dim=-1) if tail.shape[-1] else rotated


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
    weights = torch.matmul(query, key.transpose(-1, -2)) * scaling
    if attention_mask is not None:
        weights = weights + attention_mask
    weights = nn.functional.softmax(weights, dim=-1, dtype=torch.promote_types(query.dtype, torch.float32))
    weights = nn.functional.dropout(weights.to(query.dtype), p=dropout, training=module.training)
    return torch.matmul(weights, value).transpose(1, 2).contiguous(), weights


class LieREAttention(nn.Module):
    """
    Multi-head self-attention that rotates query and key before the attention function of the configuration.

    Args:
        config: A [`LieREConfig`].
    """

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.head_dim = config.head_dim
        self.scaling = config.head_dim**-0.5
        self.is_causal = False
        width = config.num_attention_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, width, bias=config.qkv_bias)
        self.k_proj = nn.Linear(config.hidden_size, width, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.hidden_size, width, bias=config.qkv_bias)
        self.o_proj = nn.Linear(width, config.hidden_size)

    def forward(
        self,
        hidden_states: torch.Tensor,
        rotation: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        **kwargs,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(B, N, hidden_size) states and this layer's rotation, see [`rotate`] → states and attention weights."""
        input_shape = hidden_states.shape[:-1]
        hidden_shape = (*input_shape, -1, self.head_dim)
        query = self.q_proj(hidden_states).view(hidden_shape).transpose(1, 2)
        key = self.k_proj(hidden_states).view(hidden_shape).transpose(1, 2)
        value = self.v_proj(hidden_states).view(hidden_shape).transpose(1, 2)
        if rotation is not None:
            query, key = rotate(query, rotation), rotate(key, rotation)

        attention_interface: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        attended, weights = attention_interface(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=self.config.attention_probs_dropout_prob if self.training else 0.0,
            scaling=self.scaling,
            **kwargs,
        )
        return self.o_proj(attended.reshape(*input_shape, -1)), weights
