"""Embeddings of tokens: patches, class and register tokens, and the learned position table."""

import math
from typing import Any

import torch
from torch import nn

from ..encoding.given_positions import require_tensors
from ..encoding.positions import GroupedPositions, TokenPositions
from ..fast.dispatch import in_portable_graph
from .configuration_liere import LieREConfig, LieREPixelConfig
from .patch_batches import cut_patches
from .position_tables import patch_table, read_table


class LieREPatchEmbeddings(nn.Module):
    """Linear embedding of non-overlapping patches: (B, C, *sizes) → (B, patches, hidden_size), in raster order."""

    def __init__(self, config: LieREPixelConfig):
        super().__init__()
        self.num_channels = config.num_channels
        self.patch_shape = config.patch_shape
        convolution = {2: nn.Conv2d, 3: nn.Conv3d}[config.num_axes]
        self.projection = convolution(self.num_channels, config.hidden_size, self.patch_shape, stride=self.patch_shape)

    def grid(self, pixels: torch.Tensor) -> tuple[int, ...]:
        """
        Patches per axis of (B, C, *sizes) pixels. Raises `ValueError` if the number of axes or channels is wrong or a
        size is not divisible by the patch.
        """
        if not isinstance(pixels, torch.Tensor):
            require_tensors(pixel_values=pixels)
        if pixels.ndim != 2 + len(self.patch_shape):
            raise ValueError(
                f"pixel_values of shape {tuple(pixels.shape)} have {pixels.ndim} dimensions; accepted: "
                f"{2 + len(self.patch_shape)}, batch and channels included."
            )
        channels, sizes = pixels.shape[1], pixels.shape[2:]
        if channels != self.num_channels:
            raise ValueError(
                f"pixel_values have {channels} channels; this model takes num_channels={self.num_channels}."
            )
        if any(size < patch or size % patch for size, patch in zip(sizes, self.patch_shape)):
            raise ValueError(f"An input of {tuple(sizes)} is not divisible into patches of {self.patch_shape}.")
        return tuple(size // patch for size, patch in zip(sizes, self.patch_shape))

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """(B, C, *sizes) pixels or (B, N, *patch_shape · C) patches, channels last → (B, N, hidden_size)."""
        projection = self.projection
        pixels = pixels.to(projection.weight.dtype)
        if pixels.ndim > 3 and in_portable_graph():
            # The graph lacks the checks of `grid`, and a convolution would drop the remainder of a size.
            pixels = cut_patches(pixels, self.patch_shape)  # (B, N, patch pixels)
        if pixels.ndim == 3:
            return nn.functional.linear(pixels, projection.weight.movedim(1, -1).flatten(1), projection.bias)
        return projection(pixels).flatten(2).transpose(1, 2)  # (B, N, hidden_size)


class LieRETokenEmbeddings(nn.Module):
    """
    The learned parts beside an input: class, register and mask tokens and the position table. Register tokens come
    after the class token.

    A table with `position_table_size` is read at the coordinates of every token; any other belongs to a subclass.
    """

    def __init__(self, config: LieREConfig, table_length: int, use_mask_token: bool = False):
        super().__init__()
        width = config.hidden_size
        self.table_size = None if config.position_table_size is None else tuple(config.position_table_size)
        self.cls_token = nn.Parameter(torch.empty(1, 1, width)) if config.use_class_token else None
        self.register_tokens = (
            nn.Parameter(torch.empty(1, config.num_register_tokens, width)) if config.num_register_tokens else None
        )
        self.mask_token = nn.Parameter(torch.empty(1, 1, width)) if use_mask_token else None
        self.position_embeddings: Any = None
        if config.use_absolute_position_embeddings:
            self.position_embeddings = nn.Parameter(torch.empty(1, table_length, width))
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def assemble(
        self,
        embeddings: torch.Tensor,
        positions: TokenPositions | GroupedPositions | None = None,
        bool_masked_pos: torch.Tensor | None = None,
        table: torch.Tensor | None = None,
        cls_entry: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """
        (B, N, hidden_size) embeddings of an input → (B, prefix + N, hidden_size) of all tokens, at `positions`.
        The mask token replaces those where (B, N) `bool_masked_pos` is true; (1 or B, N, hidden_size) `table` is added
        to them, (1, 1, hidden_size) `cls_entry` to the class token. Raises `ValueError` if `bool_masked_pos` has
        another shape or the model has no mask token.
        """
        batch_size, num_tokens = embeddings.shape[:2]
        if bool_masked_pos is not None:
            if self.mask_token is None:
                raise ValueError("bool_masked_pos was given, but this model was built without use_mask_token=True.")
            if tuple(bool_masked_pos.shape) != (batch_size, num_tokens):
                raise ValueError(
                    f"bool_masked_pos of shape {tuple(bool_masked_pos.shape)} must be (batch, patches) = "
                    f"{(batch_size, num_tokens)}."
                )
            mask = bool_masked_pos.unsqueeze(-1).to(embeddings.dtype)  # (B, N, 1)
            embeddings = embeddings * (1 - mask) + self.mask_token * mask  # (B, N, hidden_size)
        if table is not None:
            embeddings = embeddings + table
        cls_token = self.cls_token
        if cls_entry is not None and cls_token is not None:
            cls_token = cls_token + cls_entry  # (1, 1, hidden_size)
        prefix = [token.expand(batch_size, -1, -1) for token in (cls_token, self.register_tokens) if token is not None]
        embeddings = torch.cat([*prefix, embeddings], dim=1)  # (B, prefix + N, hidden_size)
        if self.table_size is not None:
            assert positions is not None, "the table is read at positions"
            if isinstance(positions, GroupedPositions):
                coordinates = positions.padded(embeddings.shape[1])
            else:
                coordinates = positions.locate().coordinates
            embeddings = embeddings + read_table(self.position_embeddings, self.table_size, coordinates)
        return self.dropout(embeddings)


class LieREEmbeddings(LieRETokenEmbeddings):
    """
    Patch embeddings with mask token, learned table, class token and register tokens as configured.

    Register tokens have no entry in the table of training patches (DINOv2's convention).
    """

    def __init__(self, config: LieREPixelConfig, use_mask_token: bool = False):
        length = math.prod(config.position_table_size or config.train_grid)
        if config.position_table_size is None:
            length += int(config.use_class_token)
        super().__init__(config, length, use_mask_token)
        self.train_grid = config.train_grid
        self.table_resize = config.position_table_resize
        # Whether the training patches have a learned table.
        self.has_table = config.use_absolute_position_embeddings and self.table_size is None
        self.patch_embeddings = LieREPatchEmbeddings(config)

    def patch_table(self, grid: tuple[int, ...], offsets: torch.Tensor | None) -> torch.Tensor | None:
        """(1, patches, hidden_size) table for a grid, `None` without a table, see [`position_tables.patch_table`]."""
        if not self.has_table:
            return None
        return patch_table(self.position_embeddings, self.train_grid, grid, self.table_resize, offsets)

    def forward(
        self,
        pixels: torch.Tensor,
        table: torch.Tensor | None = None,
        bool_masked_pos: torch.Tensor | None = None,
        positions: TokenPositions | GroupedPositions | None = None,
    ) -> torch.Tensor:
        """
        (B, C, *sizes) pixels or (B, N, patch pixels) patches → (B, prefix + N, hidden_size), with the `positions` of
        all tokens and the `table` from [`patch_table`]. Raises as [`assemble`].
        """
        cls_entry = self.position_embeddings[:, :1] if self.has_table else None
        embeddings = self.patch_embeddings(pixels)  # (B, N, hidden_size)
        return self.assemble(embeddings, positions, bool_masked_pos, table, cls_entry)
