"""Attention whose queries and keys are rotated by the position of their token."""

from collections.abc import Callable

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..encoding.projections import fold_into, project
from ..rotation.rotation import Rotation


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


class LieREAttention(nn.Module):
    """
    Multi-head self-attention that rotates query and key before the attention function of the configuration.

    Commuting rotations act in the eigenbasis of their generators. Where `q_proj` and `k_proj` are plain linear layers,
    their weights are multiplied by this basis. Modules with hooks, adapters, parametrizations, or quantized, offloaded
    or sharded weights are called unchanged and their outputs multiplied: the same numbers up to rounding.

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
        rotation: Rotation | None = None,
        attention_mask: torch.Tensor | None = None,
        **kwargs,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(B, N, hidden_size) states and this layer's rotation → states and attention weights."""
        input_shape = hidden_states.shape[:-1]  # (B, N)
        hidden_shape = (*input_shape, self.config.num_attention_heads, self.head_dim)
        query = project(self.q_proj, hidden_states, rotation).view(hidden_shape).transpose(1, 2)  # (B, H, N, D)
        key = project(self.k_proj, hidden_states, rotation).view(hidden_shape).transpose(1, 2)  # (B, H, N, D)
        value = self.v_proj(hidden_states).view(hidden_shape).transpose(1, 2)  # (B, H, N, D)
        if rotation is not None:
            query, key = rotation.rotate(query, key)

        # The implementations of transformers refuse empty batches.
        implementation = self.config._attn_implementation if input_shape[0] else "eager"
        attention_interface: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager_attention_forward)
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
        return self.o_proj(attended.flatten(2)), weights  # (B, N, hidden_size), (B, H, N, N) or None

    def fold(self, basis: torch.Tensor) -> None:
        """Multiply the basis into the query and key projections, see [`fold_into`]."""
        fold_into((self.q_proj, self.k_proj), basis)
