"""
Rotations that other packages compute, inside our model in place of its rotary encoding, to compare what they add.

The classes below call the packages' classes and functions as their own attention or documentation does. Embeddings of
all tokens are made once per forward pass.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn


class PeerRotation(NamedTuple):
    """
    The rotation of one layer.

    Attributes:
        apply: `apply(states, embedding)` rotates (B, heads, N, head_dim) states.
        embedding: What the package computes for the positions of all tokens.
        basis: Weights are not changed.
    """

    apply: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    embedding: torch.Tensor
    basis: None = None

    def rotate(self, query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.apply(query, self.embedding), self.apply(key, self.embedding)


class PeerEncoding(nn.Module):
    """
    In the place of a model's rotary encoding, for the grid that it was trained on.

    Args:
        config: Configuration of a model without rotations.

    Attributes:
        package: What to import. No package is required.
    """

    package: str
    # Nothing is kept from one pass to the next.
    cache: dict = {}

    def __init__(self, config):
        super().__init__()
        self.grid, self.num_prefix_tokens = config.train_grid, config.num_prefix_tokens
        self.num_layers = config.num_hidden_layers


class TimmRopeMixed(PeerEncoding):
    """timm's RoPE-Mixed, with learned frequencies of every layer and head."""

    package = "timm"

    def __init__(self, config):
        from timm.layers import RotaryEmbeddingMixed, apply_rot_embed_cat

        super().__init__(config)
        self.rope = RotaryEmbeddingMixed(
            config.hidden_size, config.num_hidden_layers, config.num_attention_heads, feat_shape=list(self.grid)
        )
        self.rotate_patches = apply_rot_embed_cat

    def forward(self, positions, dtype: torch.dtype | None = None) -> list[PeerRotation]:
        return [PeerRotation(self.rotate, embedding) for embedding in self.rope.get_embed()]

    def rotate(self, states: torch.Tensor, embedding: torch.Tensor) -> torch.Tensor:
        """As in timm's attention, which leaves out prefix tokens."""
        prefix, patches = states.tensor_split([self.num_prefix_tokens], dim=2)
        return torch.cat([prefix, self.rotate_patches(patches, embedding)], dim=2).type_as(states)


class AxialRotaryEmbedding(PeerEncoding):
    """rotary-embedding-torch with axial frequencies that all layers and heads share, and that are learned."""

    package = "rotary_embedding_torch"

    def __init__(self, config, theta: float = 100.0):
        from rotary_embedding_torch import RotaryEmbedding, apply_rotary_emb

        super().__init__(config)
        self.rope = RotaryEmbedding(config.head_dim // len(self.grid), theta=theta, learned_freq=True)
        self.rotate = lambda states, angles: apply_rotary_emb(angles, states)

    def forward(self, positions, dtype: torch.dtype | None = None) -> list[PeerRotation]:
        angles = self.rope.get_axial_freqs(*self.grid).flatten(0, -2)  # (patches, head_dim)
        # Zeros do not rotate prefix tokens.
        angles = nn.functional.pad(angles, (0, 0, self.num_prefix_tokens, 0))  # (N, head_dim)
        return [PeerRotation(self.rotate, angles)] * self.num_layers


class SequenceRotaryEmbedding(PeerEncoding):
    """x-transformers' rotations by the place of a token in the sequence, on one axis, with fixed frequencies."""

    package = "x_transformers"

    def __init__(self, config):
        from x_transformers.x_transformers import RotaryEmbedding, apply_rotary_pos_emb

        super().__init__(config)
        self.rope = RotaryEmbedding(config.head_dim)
        self.rotate = apply_rotary_pos_emb
        self.num_tokens = self.num_prefix_tokens + config.train_grid[0] * config.train_grid[1]

    def forward(self, positions, dtype: torch.dtype | None = None) -> list[PeerRotation]:
        angles, _ = self.rope.forward_from_seq_len(self.num_tokens)  # (1, N, head_dim)
        return [PeerRotation(self.rotate, angles)] * self.num_layers


# Rows by name.
PEERS: dict[str, type[PeerEncoding]] = {
    "rope_mixed_by_timm": TimmRopeMixed,
    "axial_rope_by_rotary_embedding_torch": AxialRotaryEmbedding,
    "rope_1d_by_x_transformers": SequenceRotaryEmbedding,
}
