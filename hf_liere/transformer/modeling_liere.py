"""
Transformers with learned rotary position encodings.

- The rotations of all layers are computed once per forward pass and passed to the layers as arguments.
- The encoder works for any number of input axes: images here, video and volumes in modeling_liere_video, tokens in
  modeling_liere_tokens.
- Inputs may have any size that is divisible by the patch.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.masking_utils import create_bidirectional_mask
from transformers.modeling_outputs import BaseModelOutputWithPooling, ImageClassifierOutput
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs
from transformers.utils.generic import can_return_tuple
from transformers.utils.output_capturing import capture_outputs

from ..encoding.folding import build_rotary_encoding
from ..encoding.given_positions import place_given, refuse_spacing, zero_hidden
from ..encoding.placement import place_batch, place_input, place_patches
from ..encoding.positions import GroupedPositions, TokenPositions, pad_rows
from ..fast.dispatch import product_dtype
from ..rotation.rotation import gather_tokens
from .configuration_liere import LieREConfig, LieREPixelConfig, LieREViTConfig
from .embeddings import LieREEmbeddings, LieRETokenEmbeddings
from .layers import LieRELayer
from .losses import sequence_loss
from .patch_batches import check_patches
from .patch_dropout import draw_kept_tokens, gather_mask
from .pooling import build_classifier, pool, visible_tokens
from .pretrained import LieREPreTrainedModel


@dataclass
class LieREModelOutput(BaseModelOutputWithPooling):
    """Output of [`LieREEncoderModel`]; `kept_patches` (B, kept) are `None` unless patches were dropped."""

    kept_patches: torch.LongTensor | None = None


class LieREEncoderModel(LieREPreTrainedModel):
    """The transformer without a head, for any number of axes; `embeddings_class` embeds the input."""

    embeddings_class: type[LieRETokenEmbeddings]

    def __init__(self, config: LieREConfig, *embeddings_arguments):
        super().__init__(config)
        norm = partial(nn.LayerNorm, config.hidden_size, eps=config.layer_norm_eps)
        self.embeddings = self.embeddings_class(config, *embeddings_arguments)
        self.pre_layernorm = norm() if config.use_pre_layernorm else nn.Identity()
        self.rotary_encoding = build_rotary_encoding(config, config.num_axes)
        self.layers = nn.ModuleList([LieRELayer(config, index) for index in range(config.num_hidden_layers)])
        self.layernorm = nn.Identity() if config.final_norm == "none" else norm()
        self.post_init()

    def rotations(
        self,
        positions: TokenPositions | GroupedPositions | None,
        dtype: torch.dtype | None = None,
        moves: torch.Tensor | None = None,
        kept: torch.Tensor | None = None,
    ) -> Iterable[Any]:
        """
        One rotation per layer of all or (B, kept) tokens, for queries of this dtype; `None` without a rotary encoding.
        Where content moves the tokens of (1 or B, tokens) `moves`, a function of the states of the layer.
        """
        if self.rotary_encoding is None:
            return [None] * len(self.layers)
        if positions is not None and self.config.position_table_size is not None and not self.config.rotate_prefix:
            # A learned table places prefix tokens that are not rotated.
            positions = positions.unrotate_prefix()
        if moves is None:
            rotations = self.rotary_encoding(positions, dtype)
            return rotations if kept is None else (rotation.select(kept) for rotation in rotations)
        assert positions is not None, "a model whose tokens move has positions"
        if isinstance(positions, GroupedPositions):
            positions = TokenPositions(positions.padded(moves.shape[1]))
        places = positions.locate().coordinates  # (…, tokens, A)
        if kept is not None:
            places, moves = gather_tokens(places.view(-1, *places.shape[-2:]), kept), gather_tokens(moves, kept)
        rotate = partial(self.rotary_encoding.rotate_moved, TokenPositions(places), moves, dtype)
        return [partial(rotate, layer) for layer in range(len(self.layers))]

    def transform(
        self,
        embeddings: torch.Tensor,
        positions: TokenPositions | GroupedPositions | None,
        attention_mask: torch.Tensor | object | None,
        patch_dropout_prob: float = 0.0,
        **kwargs: Any,
    ) -> LieREModelOutput:
        """
        Drop a share of the patches, then apply all layers to the embeddings (B, prefix + N, hidden_size) of all tokens.
        """
        kept = visible = moves = None
        if attention_mask is not None:
            visible = visible_tokens(self.config, attention_mask, *embeddings.shape[:2])  # (1 or B, prefix + N)
        if self.config.content_positions is not None:
            is_input = torch.arange(embeddings.shape[1], device=embeddings.device) >= self.config.num_prefix_tokens
            moves = is_input.unsqueeze(0) if visible is None else visible.to(embeddings.device) & is_input
        if patch_dropout_prob:
            prefix = self.config.num_prefix_tokens
            kept = draw_kept_tokens(embeddings, prefix, patch_dropout_prob, visible)  # (B, tokens)
            embeddings, visible = gather_tokens(embeddings, kept), gather_tokens(visible, kept)
            attention_mask = gather_mask(attention_mask, kept)
        hidden_states = self.pre_layernorm(embeddings)  # (B, tokens, hidden_size)
        if hidden_states.shape[0]:
            attention_mask = create_bidirectional_mask(
                config=self.config, inputs_embeds=hidden_states, attention_mask=attention_mask
            )
        else:
            attention_mask = None
        rotations = self.rotations(positions, product_dtype(hidden_states), moves, kept)
        for layer, rotation in zip(self.layers, rotations):
            hidden_states = layer(hidden_states, rotation, attention_mask, **kwargs)  # (B, tokens, hidden_size)
        if self.config.final_norm == "pooled":
            pooled = self.layernorm(pool(self.config, hidden_states, visible))
        else:
            hidden_states = self.layernorm(hidden_states)  # (B, tokens, hidden_size)
            pooled = pool(self.config, hidden_states, visible)  # (B, hidden_size)
        if kept is not None:
            kept = kept[:, prefix:] - prefix  # (B, kept patches)
        return LieREModelOutput(hidden_states, pooled, kept_patches=kept)


class LieREPixelModel(LieREEncoderModel):
    """The transformer on a grid of patches of pixels, for two or three axes."""

    config: LieREPixelConfig
    embeddings_class = LieREEmbeddings

    def __init__(self, config: LieREPixelConfig, use_mask_token: bool = False):
        super().__init__(config, use_mask_token)

    def pixels(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """`pixel_values` as (B, C, *sizes)."""
        return pixel_values

    def grid_positions(self, grid: tuple[int, ...], device: torch.device) -> TokenPositions | None:
        """Positions of all tokens of a grid of patches; `None` where nothing in the model uses them."""
        return place_patches(self.config, grid, device)

    @capture_outputs(tie_last_hidden_states=False)
    def forward(
        self,
        pixel_values: torch.Tensor,
        positions: torch.Tensor | None = None,
        bool_masked_pos: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        spacing: torch.Tensor | None = None,
        frame_times: torch.Tensor | None = None,
        pixel_attention_mask: torch.Tensor | None = None,
        spatial_shapes: torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> LieREModelOutput:
        """
        Args:
            pixel_values: (B, C, H, W) images or (B, T, C, H, W) clips, of any size divisible by the patch. With
                `spatial_shapes`, (B, N, patch pixels) padded patches of inputs of different sizes, as from
                transformers' `Siglip2ImageProcessor` or [`batch_of_patches`].
            positions: (N, A) or (B, N, A) coordinates that replace the grid's. The model neither rescales, perturbs nor
                augments them, and reads a learned table on the grid. Where class and register tokens have coordinates
                (`rotate_prefix`, `position_table_size`), theirs may come first: (prefix + N, A) or (B, prefix + N, A).
            bool_masked_pos: (B, N), true where the mask token replaces a patch; needs `use_mask_token`.
            attention_mask: (B, prefix + N), true for tokens to attend to and average. Or a mask of pairs of tokens,
                (1 or B, 1 or H, 1 or prefix + N, prefix + N), Boolean or added to attention scores; tokens that no
                query attends to are not averaged. Or another mask that the attention implementation takes, such as a
                `BlockMask` (not with `pooling="mean"` and `"mean_all"`).
            spacing: (A,) or (B, A), only for `coordinates="physical"`: the extent of a pixel on every axis (rows,
                columns; frames or slices, rows, columns), in the unit of `config.physical_unit`, such as mm.
            frame_times: (T,) or (B, T), for clips at irregular times: the time of every frame or the place of every
                slice, not decreasing. The coordinate of a tubelet is the mean of its frames, relative to the middle
                between first and last; `spacing` is then (2,) or (B, 2), of rows and columns.
            pixel_attention_mask: (B, N), 1 for patches and 0 for padding, as `spatial_shapes` implies. Padding is
                neither attended to nor averaged, even if it is NaN; `last_hidden_state` is meaningless there.
            spatial_shapes: (B, A) patches per axis of every sample. Rotations are computed once for each distinct grid,
                in compiled graphs for each sample.

        Returns:
            `last_hidden_state` (B, prefix + N, hidden_size), normalised if `config.final_norm` is `"tokens"`, and
            `pooler_output` (B, hidden_size), the token or mean selected by `config.pooling`, normalised unless
            `config.final_norm` is `"none"`. Training with `config.patch_dropout_prob` returns the kept tokens, and in
            `kept_patches` (B, kept) the ascending indices of their patches.

        Raises:
            ValueError: if the input does not fit the configuration; if positions, spacing or times have the wrong shape
                or are not finite, missing or unused; if a mask has the wrong shape, or hides every token of a sample or
                all that are averaged.
        """
        if spacing is not None or frame_times is not None:
            refuse_spacing(self.config, spacing, frame_times, positions)
        config, embeddings, present = self.config, self.embeddings, None
        # `positions` replace those of the grid.
        options = {"spacing": spacing, "training": self.training, "needs_positions": positions is None}
        if spatial_shapes is None and pixel_attention_mask is None:
            pixels = self.pixels(pixel_values)  # (B, C, *sizes)
            grid = embeddings.patch_embeddings.grid(pixels)
            num_patches = math.prod(grid)
            place = place_input(config, grid, pixels.shape[0], pixels.device, frame_times=frame_times, **options)
            placed, table = place.positions, embeddings.patch_table(grid, place.offsets)
        else:
            if attention_mask is not None or frame_times is not None:
                raise ValueError(
                    "attention_mask and frame_times were given beside spatial_shapes: inputs of different sizes take "
                    "pixel_attention_mask and spacing."
                )
            present = check_patches(config, pixel_values, pixel_attention_mask, spatial_shapes)  # (B, N)
            pixels, num_patches = zero_hidden(pixel_values, present), pixel_values.shape[1]
            places, samples, placed = place_batch(
                config, spatial_shapes, num_patches, pixels.device, has_table=embeddings.has_table, **options
            )
            table = None
            if embeddings.has_table:
                tables = [embeddings.patch_table(place.grid, place.offsets)[0] for place in places]
                table = pad_rows(tables, samples, num_patches)  # (B, N, hidden_size)
            prefix = present.new_ones(present.shape[0], config.num_prefix_tokens)  # (B, prefix)
            attention_mask = torch.cat([prefix, present], dim=1)  # (B, prefix + N)
        if positions is not None:
            placed = place_given(config, positions, pixels.shape[0], num_patches, present)
        hidden_states = embeddings(pixels, table, bool_masked_pos, placed)  # (B, prefix + N, hidden_size)
        dropped = config.patch_dropout_prob if self.training else 0.0
        return self.transform(hidden_states, placed, attention_mask, dropped, **kwargs)


class LieREViTModel(LieREPixelModel):
    """
    Image transformer without a head.

    ```python
    import torch
    from hf_liere import LieREViTConfig, LieREViTModel
    model = LieREViTModel(LieREViTConfig(hidden_size=96, num_hidden_layers=2, num_attention_heads=3))
    features = model(torch.randn(1, 3, 224, 160)).last_hidden_state  # (1, 1 + 14 · 10, 96)
    ```

    Args:
        config: A [`LieREViTConfig`].
        use_mask_token: Whether to create the mask token of masked image modeling.
    """

    config: LieREViTConfig


class LieREForClassification(LieREPreTrainedModel):
    """An encoder, `encoder_class`, with a classifier on its pooled output: linear, or with one hidden layer."""

    encoder_class: type[LieREEncoderModel]

    def __init__(self, config: LieREConfig):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.liere = self.encoder_class(config)
        self.classifier = build_classifier(config)
        if self.loss_type != "ForTokenClassification":
            self.loss_function = sequence_loss
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        pixel_values: torch.Tensor,
        positions: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        pixel_attention_mask: torch.Tensor | None = None,
        spatial_shapes: torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> ImageClassifierOutput:
        """
        As [`LieREPixelModel.forward`], with (B,) `labels` in [0, num_labels) for a cross-entropy loss, or floating
        point (B, num_labels) `labels` for independent binary losses; returns `logits` (B, num_labels).
        """
        outputs = self.liere(
            pixel_values, positions, pixel_attention_mask=pixel_attention_mask, spatial_shapes=spatial_shapes, **kwargs
        )
        logits = self.classifier(outputs.pooler_output)  # (B, num_labels)
        loss = None if labels is None else self.loss_function(labels, logits, self.config, **kwargs)
        return ImageClassifierOutput(loss, logits, outputs.hidden_states, outputs.attentions)


class LieREViTForImageClassification(LieREForClassification):
    """
    [`LieREViTModel`] with a classifier on its pooled output, see [`LieREForClassification`].

    ```python
    import torch
    from hf_liere import LieREViTConfig, LieREViTForImageClassification
    config = LieREViTConfig(hidden_size=96, num_hidden_layers=2, num_attention_heads=3, num_labels=10)
    outputs = LieREViTForImageClassification(config)(torch.randn(2, 3, 224, 224), labels=torch.tensor([3, 7]))
    outputs.loss.backward()  # the logits are outputs.logits, (2, 10)
    ```
    """

    config: LieREViTConfig
    encoder_class = LieREViTModel
