"""Embeddings of tokens: patches, class and register tokens, and the learned position table."""

import math

import torch
from torch import nn

from .configuration_liere import LieREConfig
from .positions import TokenPositions, patch_indices


class LieREPatchEmbeddings(nn.Module):
    """Linear embedding of non-overlapping patches: (B, C, *sizes) → (B, patches, hidden_size), in raster order."""

    def __init__(self, config: LieREConfig):
        super().__init__()
        self.num_channels = config.num_channels
        self.patch_shape = config.patch_shape
        convolution = {2: nn.Conv2d, 3: nn.Conv3d}[config.num_axes]
        self.projection = convolution(
            config.num_channels, config.hidden_size, kernel_size=config.patch_shape, stride=config.patch_shape
        )

    def grid(self, pixels: torch.Tensor) -> tuple[int, ...]:
        """
        Patches per axis of (B, C, *sizes) pixels.

        Raises:
            ValueError: if the number of axes or channels is wrong or a size is not divisible by its patch extent.
        """
        if pixels.ndim != 2 + len(self.patch_shape):
            raise ValueError(
                f"pixel_values have {pixels.ndim} dimensions, shape {tuple(pixels.shape)}; {2 + len(self.patch_shape)} "
                "are needed (batch and channels among them)."
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
        return self.projection(pixels.to(self.projection.weight.dtype)).flatten(2).transpose(1, 2)


class LieREEmbeddings(nn.Module):
    """
    Patch embeddings with, where configured, mask token, learned table, class token and register tokens.

    Register tokens come after the class token and have no entry in the table of training patches (DINOv2's
    convention). A table with a size of its own is read at the coordinates of every token instead.
    """

    def __init__(self, config: LieREConfig, use_mask_token: bool = False):
        super().__init__()
        width = config.hidden_size
        self.train_grid = config.train_grid
        self.table_size = None if config.position_table_size is None else tuple(config.position_table_size)
        self.table_resize = config.position_table_resize
        self.patch_embeddings = LieREPatchEmbeddings(config)
        self.cls_token = nn.Parameter(torch.empty(1, 1, width)) if config.use_class_token else None
        self.register_tokens = (
            nn.Parameter(torch.empty(1, config.num_register_tokens, width)) if config.num_register_tokens else None
        )
        self.mask_token = nn.Parameter(torch.empty(1, 1, width)) if use_mask_token else None
        self.position_embeddings = None
        if config.use_absolute_position_embeddings:
            length = math.prod(self.table_size or self.train_grid)
            if self.table_size is None:
                length += int(config.use_class_token)
            self.position_embeddings = nn.Parameter(torch.empty(1, length, width))
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def patch_table(self, grid: tuple[int, ...], offsets: torch.Tensor | None) -> torch.Tensor:
        """
        (1, patches, hidden_size) learned table for a grid: resized where the grid is not the trained one, as
        `position_table_resize` says, and read between its entries where patches are displaced by `offsets`.

        Raises:
            ValueError: if a table that can only be truncated has fewer entries than the grid.
        """
        table = self.position_embeddings[:, -math.prod(self.train_grid) :]  # (1, N, hidden_size)
        fits = grid == self.train_grid
        if not fits and self.table_resize == "truncate":
            if math.prod(grid) > table.shape[1]:
                raise ValueError(
                    f"The input has {math.prod(grid)} patches, the learned table {table.shape[1]}, and "
                    "position_table_resize='truncate' cannot enlarge it; 'interpolate' can."
                )
            table, fits = table[:, : math.prod(grid)], True
        if fits and offsets is None:
            return table
        table = table.transpose(1, 2).unflatten(-1, grid if fits else self.train_grid)  # (1, hidden_size, *grid)
        if not fits:
            mode = "bicubic" if len(grid) == 2 else "trilinear"
            antialias = self.table_resize == "antialias"
            resized = nn.functional.interpolate(
                table.float(), size=grid, mode=mode, align_corners=False, antialias=antialias
            )
            table = resized.to(table.dtype)
        if offsets is not None:
            sizes = offsets.new_tensor(grid)
            indices = patch_indices(grid, offsets, offsets.device, offsets.dtype)
            # grid_sample takes the last axis first; −1 and 1 are the outer borders of the first and last entry.
            points = ((2 * indices + 1) / sizes - 1).flip(-1).view(1, *grid, len(grid)).to(table.dtype)
            table = nn.functional.grid_sample(table, points, padding_mode="border", align_corners=False)
        return table.flatten(2).transpose(1, 2)

    def coordinate_table(self, positions: torch.Tensor) -> torch.Tensor:
        """(1 or B, N, hidden_size) values, at positions (N, A) or (B, N, A), of a table with `position_table_size`."""
        table = (
            self.position_embeddings.transpose(1, 2).unflatten(-1, self.table_size).float()
        )  # (1, hidden_size, *size)
        points = (2 * positions - 1).flip(-1).float()
        points = points.view(-1, *[1] * (len(self.table_size) - 1), *points.shape[-2:])  # (1 or B, …, N, A)
        table = table.expand(points.shape[0], *table.shape[1:])
        entries = nn.functional.grid_sample(table, points, padding_mode="border", align_corners=True)
        return entries.flatten(2).transpose(1, 2).to(self.position_embeddings.dtype)

    def forward(
        self,
        pixels: torch.Tensor,
        grid: tuple[int, ...],
        offsets: torch.Tensor | None = None,
        bool_masked_pos: torch.Tensor | None = None,
        positions: TokenPositions | None = None,
    ) -> torch.Tensor:
        """
        (B, C, *sizes) pixels → (B, prefix + patches, hidden_size); `positions` are those of all tokens.

        Raises:
            ValueError: if patches are to be masked without a mask token or by a mask of another shape.
        """
        batch_size, num_patches = pixels.shape[0], math.prod(grid)
        if bool_masked_pos is not None and self.mask_token is None:
            raise ValueError("bool_masked_pos was given, but this model was built without use_mask_token=True.")
        if bool_masked_pos is not None and tuple(bool_masked_pos.shape) != (batch_size, num_patches):
            raise ValueError(
                f"bool_masked_pos of shape {tuple(bool_masked_pos.shape)} must be (batch, patches) = "
                f"{(batch_size, num_patches)}."
            )
        embeddings = self.patch_embeddings(pixels)  # (B, patches, hidden_size)
        if bool_masked_pos is not None:
            mask = bool_masked_pos.unsqueeze(-1).to(embeddings.dtype)
            embeddings = embeddings * (1 - mask) + self.mask_token * mask
        tabulated = self.position_embeddings is not None and self.table_size is None
        if tabulated:
            embeddings = embeddings + self.patch_table(grid, offsets)
        cls_token = self.cls_token
        if tabulated and cls_token is not None:
            cls_token = cls_token + self.position_embeddings[:, :1]
        prefix = [token.expand(batch_size, -1, -1) for token in (cls_token, self.register_tokens) if token is not None]
        embeddings = torch.cat([*prefix, embeddings], dim=1)
        if self.table_size is not None:
            embeddings = embeddings + self.coordinate_table(positions.coordinates)
        return self.dropout(embeddings)
