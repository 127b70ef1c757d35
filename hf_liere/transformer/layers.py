"""The transformer block: attention that rotates query and key by the position of their token, and the MLP."""

from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..rotation.grouped_rotation import Rotation
from ..rotation.model_basis import rotate_back
from ..rotation.projections import fold_into, project
from .attention_functions import add_mask, eager_attention_forward, refuse_ignored_poses
from .configuration_liere import LieREConfig


class LieREAttention(nn.Module):
    """
    Multi-head self-attention that rotates query and key before the attention function of the configuration. With
    `rotate_values` it also rotates values, and token i receives R(pᵢ)ᵀ Σⱼ wᵢⱼ R(pⱼ) vⱼ (GTA, eqs. 4–6).

    Commuting rotations act in the eigenbasis of their generators. Where `q_proj` and `k_proj` are plain linear layers,
    their weights are multiplied by this basis. Modules with hooks, adapters, parametrizations, or quantized, offloaded
    or sharded weights are called unchanged and their outputs multiplied: the same numbers up to rounding.
    """

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.head_dim = config.head_dim
        self.scaling = config.head_dim**-0.5
        self.is_causal = False
        heads, has_distances = config.num_attention_heads, getattr(config, "distance_axes", None) is not None
        self.distance_weight = nn.Parameter(torch.zeros(heads)) if has_distances else None
        width = heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, width, bias=config.qkv_bias)
        self.k_proj = nn.Linear(config.hidden_size, width, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.hidden_size, width, bias=config.qkv_bias)
        self.o_proj = nn.Linear(width, config.hidden_size)

    def forward(
        self,
        hidden_states: torch.Tensor,
        rotation: Rotation | partial | None = None,
        attention_mask: torch.Tensor | None = None,
        distances: Any = None,
        **kwargs,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(B, N, hidden_size) states and this layer's rotation, or what makes it of them → states and weights."""
        rotation = rotation(hidden_states) if isinstance(rotation, partial) else rotation
        input_shape = hidden_states.shape[:-1]  # (B, N)
        hidden_shape = (*input_shape, self.config.num_attention_heads, self.head_dim)
        of_values = rotation if self.config.rotate_values else None
        query, key, value = (
            projection(hidden_states) if by is None or by.basis is None else project(projection, hidden_states, by)
            for projection, by in ((self.q_proj, rotation), (self.k_proj, rotation), (self.v_proj, of_values))
        )
        query, key, value = (x.view(hidden_shape).transpose(1, 2) for x in (query, key, value))  # (B, H, N, D)
        if rotation is not None:
            query, key = rotation.rotate(query, key)
        if of_values is not None:
            value, _ = of_values.rotate(value, value[:0])

        implementation = self.config._attn_implementation
        if (poses := kwargs.get("poses")) is not None:
            refuse_ignored_poses(implementation, poses)
        attention_interface = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager_attention_forward)
        if self.distance_weight is not None:
            has_pairs = isinstance(attention_mask, torch.Tensor) and attention_mask.ndim == 4
            if not has_pairs and (attention_mask is not None or "flash" in implementation):
                raise ValueError(f"attn_{implementation=}: distance_axes need eager, sdpa or pose_embedding.")
            bias = -self.distance_weight[:, None, None] * distances.unsqueeze(1)  # (1 or B, H, N, N)
            attention_mask = add_mask(attention_mask, bias.to(query.dtype))
        # The implementations of transformers refuse empty batches.
        attended, weights = (attention_interface if input_shape[0] else eager_attention_forward)(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=self.config.attention_probs_dropout_prob if self.training else 0.0,
            scaling=self.scaling,
            **kwargs,
        )
        if of_values is not None:
            attended = rotate_back(of_values, attended.transpose(1, 2)).transpose(1, 2)  # (B, N, H, D)
        return self.o_proj(attended.flatten(2)), weights  # (B, N, hidden_size), (B, H, N, N) or None

    def fold(self, basis: torch.Tensor) -> None:
        """Multiply the basis into the projections of what is rotated, see [`fold_into`]."""
        if self.config.rotate_values:
            fold_into((self.q_proj, self.k_proj, self.v_proj), basis, self.o_proj)
        else:
            fold_into((self.q_proj, self.k_proj), basis)


class LieREMLP(nn.Module):
    """fc2(act(fc1(x)))."""

    def __init__(self, config: LieREConfig):
        super().__init__()
        self.activation = ACT2FN[config.hidden_act]
        self.fc1 = nn.Linear(config.hidden_size, config.intermediate_size)
        self.dropout = nn.Dropout(config.mlp_dropout_prob)
        self.fc2 = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        inner = self.activation(self.fc1(hidden_states))  # (B, N, intermediate_size)
        return self.fc2(self.dropout(inner))  # (B, N, hidden_size)


class LieRELayerScale(nn.Module):
    """A learned factor per channel (CaiT, Touvron et al. 2021, eq. 4)."""

    def __init__(self, config: LieREConfig):
        super().__init__()
        self.initial_value = config.layerscale_value
        self.scale = nn.Parameter(torch.empty(config.hidden_size))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states * self.scale  # (B, N, hidden_size)


class LieREDropPath(nn.Module):
    """Stochastic depth: drops the residual branch of random samples in training (Huang et al. 2016)."""

    def __init__(self, rate: float):
        super().__init__()
        self.rate = rate

    def forward(self, branch: torch.Tensor) -> torch.Tensor:
        if not self.training or self.rate == 0:
            return branch
        survives = torch.rand(branch.shape[0], *[1] * (branch.ndim - 1), device=branch.device) >= self.rate  # (B, 1, 1)
        return branch * survives.to(branch.dtype) / (1 - self.rate)  # (B, N, hidden_size)


class LieRELayer(GradientCheckpointingLayer):
    """Pre-norm transformer block."""

    def __init__(self, config: LieREConfig, index: int):
        super().__init__()
        scaled = config.layerscale_value is not None
        self.layernorm_before = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.attention = LieREAttention(config)
        self.layer_scale1 = LieRELayerScale(config) if scaled else nn.Identity()
        self.layernorm_after = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.mlp = LieREMLP(config)
        self.layer_scale2 = LieRELayerScale(config) if scaled else nn.Identity()
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.drop_path = LieREDropPath(config.drop_path_rate * index / max(config.num_hidden_layers - 1, 1))

    def forward(
        self,
        hidden_states: torch.Tensor,
        rotation: Rotation | partial | None = None,
        attention_mask: torch.Tensor | None = None,
        **kwargs,
    ) -> torch.Tensor:
        """(B, N, hidden_size) states and this layer's rotation → states of the same shape."""
        attended, _ = self.attention(self.layernorm_before(hidden_states), rotation, attention_mask, **kwargs)
        hidden_states = hidden_states + self.drop_path(self.layer_scale1(self.dropout(attended)))
        transformed = self.mlp(self.layernorm_after(hidden_states))  # (B, N, hidden_size)
        return hidden_states + self.drop_path(self.layer_scale2(self.dropout(transformed)))  # (B, N, hidden_size)
