"""
Transformers with learned rotary position encodings.

- The rotations of all layers are computed once per forward pass and passed to the layers as arguments.
- The encoder is written for any number of input axes: images here, video and volumes in modeling_liere_video, tokens
  of any kind in modeling_liere_tokens.
- Inputs may have any size that is divisible by the patch.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.utils._pytree import tree_flatten
from transformers import initialization as init
from transformers.backbone_utils import BackboneMixin, filter_output_hidden_states
from transformers.masking_utils import create_bidirectional_mask
from transformers.modeling_outputs import (
    BackboneOutput,
    BaseModelOutputWithPooling,
    ImageClassifierOutput,
    MaskedImageModelingOutput,
)
from transformers.modeling_utils import PreTrainedModel
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs
from transformers.utils.generic import can_return_tuple
from transformers.utils.output_capturing import capture_outputs

from ..encoding.encoding_traits import DISPLACEMENTS
from ..encoding.encodings import RotaryEncoding
from ..encoding.folding import build_rotary_encoding, fold_rotations
from ..encoding.positions import (
    GroupedPositions,
    TokenPositions,
    check_coordinates,
    check_shape,
    displacements,
    of_coordinates,
    of_extents,
    of_grid,
    of_shapes,
    padded_rows,
)
from ..rotation.lie_algebra import product_dtype, working_dtype
from ..rotation.rotation import Rotation, gather_tokens
from ..rotation.tracing import values_are_unknown
from .attention import LieREAttention
from .configuration_liere import LieREConfig, LieREPixelConfig, LieREViTConfig
from .embeddings import LieREEmbeddings, LieRETokenEmbeddings, without_hidden
from .layers import LieRELayer, LieRELayerScale, build_classifier
from .patch_batches import check_patches, distinct_grids, refuse_patches
from .patch_dropout import gather_mask, kept_tokens, refuse_patch_dropout
from .physical import physical_extents, refuse_spacing
from .pooling import pool, visible_tokens


class LieREPreTrainedModel(PreTrainedModel):
    """Loading, saving and initialisation shared by all models."""

    config: LieREConfig
    base_model_prefix = "liere"
    main_input_name = "pixel_values"
    input_modalities = ("image",)
    supports_gradient_checkpointing = True
    _no_split_modules = ["LieREEmbeddings", "LieRELayer"]
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    _can_record_outputs = {"hidden_states": LieRELayer, "attentions": LieREAttention}
    _input_embed_layer = "patch_embeddings"
    # A generator rounded to bfloat16 rotates distant patches by several degrees too much.
    _keep_in_fp32_modules_strict = ["rotary_encoding"]

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, LieRETokenEmbeddings):
            for parameter in (module.cls_token, module.register_tokens, module.position_embeddings):
                if parameter is not None:
                    init.trunc_normal_(parameter, mean=0.0, std=self.config.initializer_range)
            if module.mask_token is not None:
                init.zeros_(module.mask_token)
        elif isinstance(module, LieRELayerScale):
            init.constant_(module.scale, module.initial_value)
        elif isinstance(module, RotaryEncoding):
            module.reset_parameters()

    def post_init(self) -> None:
        super().post_init()
        # Not every encoding has parameters.
        if next(self.rotary_parameters(), None) is None:
            self._keep_in_fp32_modules_strict -= {"rotary_encoding"}
        if self.config.folded_grids is not None:
            self.eval()

    def train(self, mode: bool = True):
        """
        Raises:
            ValueError: if the model is folded, see `fold_rotations`.
        """
        # transformers sets a mode before there is a configuration.
        if mode and getattr(self, "config", None) is not None and self.config.folded_grids is not None:
            raise ValueError(
                "The rotations of this model are folded (folded_grids="
                f"{self.config.folded_grids}), which is for inference: train the model it was made from."
            )
        return super().train(mode)

    def fold_rotations(self, grids: Iterable[tuple[int, ...]] | None = None) -> "LieREPreTrainedModel":
        """
        A copy of the model for inference: commuting rotations cost as much as RoPE, dense ones are constants.

        Commuting encodings become RoPE: exp(s S) = U rot(s μ) Uᵀ, with Uᵀ in the query and key weights. Dense rotations
        of LieRE become constants for the grids that are asked for; on others they are computed as before. The copy is
        saved and loaded like any model, and `config.folded_grids` says what it is.

        Args:
            grids: Patches per axis, for example `[(14, 14)]`; `None` means the grid of the training input. Needed by
                LieRE with a block size above 2 only.

        Raises:
            ValueError: if the model is folded already or has no rotations, its weights are offloaded or computed by
                hooks (pruning), or adapters or quantized layers stand where weights would have to be changed.
            `huggingface_hub.errors.StrictDataclassError`: if a grid does not fit the configuration.
        """
        return fold_rotations(self, LieREEncoderModel, grids)

    def rotary_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(name, parameter) of generators and multipliers: train them without weight decay."""
        for name, parameter in self.named_parameters():
            if "rotary_encoding." in name:
                yield name, parameter


@dataclass
class LieREModelOutput(BaseModelOutputWithPooling):
    """What [`LieREEncoderModel`] returns; `kept_patches` (B, kept) are `None` unless patches were dropped."""

    kept_patches: torch.LongTensor | None = None


class LieREEncoderModel(LieREPreTrainedModel):
    """
    The transformer without a head, for any number of axes.

    Attributes:
        embeddings_class: Embeds the input; built from the configuration and the arguments that follow it.
    """

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

    def given_positions(
        self, coordinates: torch.Tensor, batch_size: int, num_tokens: int, visible: torch.Tensor | None = None
    ) -> TokenPositions:
        """
        Positions of all tokens from coordinates of the input's `num_tokens`, or of all, as `forward` takes them; those
        of tokens that are not `visible`, (B, N), are not looked at.

        Raises:
            ValueError: as [`check_shape`] and [`check_coordinates`], or if nothing in the model uses positions.
        """
        config = self.config
        if not config.uses_positions:
            raise ValueError(
                f"positions were given, but position_encoding={config.position_encoding!r} has no rotations."
            )
        placed = config.num_prefix_tokens if self._prefix_is_placed else 0
        check_shape(coordinates, batch_size, num_tokens, config.num_axes, placed)
        coordinates = without_hidden(coordinates, visible)
        check_coordinates(coordinates)
        prefix_coordinate = config.prefix_coordinate if placed else 0.0
        has_prefix = coordinates.shape[-2] > num_tokens
        coordinates = self.scaled(coordinates)
        return of_coordinates(coordinates, config.num_prefix_tokens, None if has_prefix else prefix_coordinate)

    def scaled(self, positions: torch.Tensor) -> torch.Tensor:
        """(…, N, A) positions as the user gives them → coordinates of the encoding: the same."""
        return positions

    @property
    def _prefix_is_placed(self) -> bool:
        """Whether class and register tokens have coordinates, for rotations or a table that is read at coordinates."""
        return self.config.rotate_prefix or self.config.position_table_size is not None

    @property
    def _prefix(self) -> tuple[int, float]:
        """Number of class and register tokens, and their coordinate on every axis."""
        return self.config.num_prefix_tokens, self.config.prefix_coordinate if self._prefix_is_placed else 0.0

    def rotations(
        self, positions: TokenPositions | GroupedPositions | None, states: torch.dtype | None = None
    ) -> Iterable[Rotation | None]:
        """One rotation per layer for tokens at these positions and queries of type `states`, or `None` for each."""
        if self.rotary_encoding is None:
            return [None] * len(self.layers)
        if not self.config.rotate_prefix and self.config.position_table_size is not None:
            positions = positions.prefix_at_zero()
        return self.rotary_encoding(positions, states)

    def transform(
        self,
        embeddings: torch.Tensor,
        positions: TokenPositions | GroupedPositions | None,
        attention_mask: torch.Tensor | object | None,
        patch_dropout_prob: float = 0.0,
        **kwargs: Unpack[TransformersKwargs],
    ) -> LieREModelOutput:
        """
        All layers, from the embeddings (B, prefix + N, hidden_size) of all tokens, of which a share is dropped; see
        `forward`.
        """
        prefix, kept = self.config.num_prefix_tokens, None
        visible = visible_tokens(self.config, attention_mask, *embeddings.shape[:2])
        if patch_dropout_prob:
            kept = kept_tokens(embeddings, prefix, patch_dropout_prob, visible)
            embeddings, visible = gather_tokens(embeddings, kept), gather_tokens(visible, kept)
            attention_mask = gather_mask(attention_mask, kept)
        hidden_states = self.pre_layernorm(embeddings)
        if hidden_states.shape[0]:
            attention_mask = create_bidirectional_mask(
                config=self.config, inputs_embeds=hidden_states, attention_mask=attention_mask
            )
        else:
            attention_mask = None
        for layer, rotation in zip(self.layers, self.rotations(positions, product_dtype(hidden_states))):
            rotation = rotation if rotation is None or kept is None else rotation.select(kept)
            tensors, structure = ((), None) if rotation is None else tree_flatten(rotation)
            hidden_states = layer(hidden_states, attention_mask, *tensors, structure=structure, **kwargs)
        if self.config.final_norm == "pooled":
            pooled = self.layernorm(pool(self.config, hidden_states, visible))
        else:
            hidden_states = self.layernorm(hidden_states)
            pooled = pool(self.config, hidden_states, visible)
        patches = None if kept is None else kept[:, prefix:] - prefix
        # A single pooled token, or class and register tokens side by side.
        return LieREModelOutput(hidden_states, pooled.flatten(1), kept_patches=patches)


class LieREPixelModel(LieREEncoderModel):
    """
    The transformer on a grid of patches of pixels, for two or three axes.

    Args:
        config: A [`LieREPixelConfig`].
        use_mask_token: Whether to create the mask token of masked image modeling.
    """

    config: LieREPixelConfig
    embeddings_class = LieREEmbeddings

    def __init__(self, config: LieREPixelConfig, use_mask_token: bool = False):
        super().__init__(config, use_mask_token)

    def pixels(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """(B, C, *sizes) view of what the user passes."""
        return pixel_values

    def grid_positions(
        self,
        grid: tuple[int, ...],
        offsets: torch.Tensor | None,
        device: torch.device,
        extents: torch.Tensor | None = None,
    ) -> TokenPositions | None:
        """
        Positions of all tokens of a grid of patches; `None` where nothing in the model uses them. Those that are
        `physical` need the `extents` of a patch, see [`physical_extents`].
        """
        config = self.config
        if not config.uses_positions:
            return None
        if extents is not None:
            return of_extents(grid, extents, *self._prefix, offsets)
        return of_grid(
            grid, config.train_grid, config.coordinates, *self._prefix, offsets, device, working_dtype(device)
        )

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
            pixel_values: (B, C, H, W) images or (B, T, C, H, W) clips, of any size divisible by the patch; or, beside
                `spatial_shapes`, (B, N, patch pixels) patches of inputs of different sizes, padded, as from
                transformers' `Siglip2ImageProcessor` or [`batch_of_patches`].
            positions: (N, A) or (B, N, A) coordinates of the patch tokens that replace the grid's; used as given,
                neither rescaled nor perturbed nor augmented (a learned table is still read on the grid). Where class
                and register tokens have coordinates (`rotate_prefix`, `position_table_size`), theirs may come first:
                (prefix + N, A) or (B, prefix + N, A).
            bool_masked_pos: (B, N), true where the mask token replaces a patch; needs `use_mask_token`.
            attention_mask: (B, prefix + N), true for tokens that are attended to, which alone are averaged; or one for
                every pair of tokens, (1 or B, 1 or H, 1 or prefix + N, prefix + N), Boolean or added to attention
                scores, where tokens that no query attends to are not averaged; or what the attention implementation
                takes instead, such as a `BlockMask` (not with `pooling="mean"` and `"mean_all"`).
            spacing: (A,) or (B, A), for `coordinates="physical"` alone: the extent of a pixel on every axis (rows,
                columns; frames or slices, rows, columns), in what `config.physical_unit` is given in, such as mm.
            frame_times: (T,) or (B, T), for clips at irregular times: the time of every frame, or the place of every
                slice, that must not decrease. A tubelet sits at the mean of its frames, relative to the middle between
                first and last; `spacing` is then (2,) or (B, 2), of rows and columns.
            pixel_attention_mask: (B, N), 1 for patches and 0 for padding, which follows from `spatial_shapes`. Padding
                is not attended to and not averaged, and whatever it contains, such as NaN, is not looked at;
                `last_hidden_state` is meaningless there.
            spatial_shapes: (B, A) patches per axis of every sample. Rotations are computed once for each distinct grid,
                in compiled graphs for each sample.

        Returns:
            `last_hidden_state` (B, prefix + N, hidden_size), normalised if `config.final_norm` is `"tokens"`, and
            `pooler_output` (B, pooled_size), its token, tokens or mean according to `config.pooling`, normalised
            unless `config.final_norm` is `"none"`. In training with `config.patch_dropout_prob` tokens are the kept
            ones, and `kept_patches` (B, kept) are the indices of the patches among them, ascending.

        Raises:
            ValueError: if the input does not fit the configuration, positions, spacing or times are of the wrong shape
                or not finite, missing or of no use, or a mask is of the wrong shape, hides every token of a sample, or
                all that are averaged.
        """
        refuse_spacing(self.config, spacing, frame_times, positions)
        present = None
        if spatial_shapes is None and pixel_attention_mask is None:
            pixels = self.pixels(pixel_values)
            grid = self.embeddings.patch_embeddings.grid(pixels)
            num_patches = math.prod(grid)
            table, placed = self.placed(grid, pixels.shape[0], pixels.device, spacing, frame_times, positions is None)
        else:
            if attention_mask is not None or frame_times is not None:
                raise ValueError(
                    "attention_mask and frame_times were given beside spatial_shapes: inputs of different sizes take "
                    "pixel_attention_mask and spacing."
                )
            present = check_patches(self.config, pixel_values, pixel_attention_mask, spatial_shapes)
            pixels, num_patches = without_hidden(pixel_values, present), pixel_values.shape[1]
            table, placed = self.placed_patches(spatial_shapes, pixels, spacing, positions is None)
            prefix = present.new_ones(present.shape[0], self.config.num_prefix_tokens)
            attention_mask = torch.cat([prefix, present], dim=1)
        if positions is not None:
            placed = self.given_positions(positions, pixels.shape[0], num_patches, present)
        embeddings = self.embeddings(pixels, table, bool_masked_pos, placed)
        dropped = self.config.patch_dropout_prob if self.training else 0.0
        return self.transform(embeddings, placed, attention_mask, dropped, **kwargs)

    def placed(
        self,
        grid: tuple[int, ...],
        batch_size: int,
        device: torch.device,
        spacing: torch.Tensor | None = None,
        frame_times: torch.Tensor | None = None,
        needs_positions: bool = True,
    ) -> tuple[torch.Tensor | None, TokenPositions | None]:
        """
        The learned table (1, N, hidden_size) for a grid and, if needed, the positions of all tokens, both displaced as
        training asks for; `None` where the model has none.
        """
        config, dtype = self.config, working_dtype(device)
        extents = offsets = displaced = None
        if config.coordinates == "physical" and needs_positions:
            extents, displaced = physical_extents(config, grid, batch_size, spacing, frame_times, device, dtype)
        if self.training:
            offsets, displaced = displacements(config, grid, displaced, device, dtype)
        table = self.embeddings.patch_table(grid, offsets)
        return table, self.grid_positions(grid, displaced, device, extents) if needs_positions else None

    def placed_patches(
        self,
        spatial_shapes: torch.Tensor,
        pixels: torch.Tensor,
        spacing: torch.Tensor | None,
        needs_positions: bool,
    ) -> tuple[torch.Tensor | None, TokenPositions | GroupedPositions | None]:
        """
        As [`placed`], for (B, N, patch pixels) patches of samples with (B, A) grids of their own: (B, N, hidden_size)
        and positions that exist once for every distinct grid.
        """
        config, num_patches, device = self.config, pixels.shape[1], pixels.device
        has_table, needs_positions = self.embeddings.has_table, needs_positions and config.uses_positions
        if not has_table and not needs_positions:
            return None, None
        drawn = self.training and any(getattr(config, name) != value for name, value in DISPLACEMENTS.items())
        by_grid = has_table or config.coordinates == "physical" or drawn
        if values_are_unknown(spatial_shapes) and not by_grid:
            shapes = spatial_shapes.to(device, working_dtype(device))
            return None, of_shapes(shapes, num_patches, config.train_grid, config.coordinates, *self._prefix)
        grids = distinct_grids(spatial_shapes, spacing, device)
        samples = tuple(indices for *_, indices in grids)
        tables, groups = zip(
            *(
                self.placed(grid, len(rows), device, of_grid, needs_positions=needs_positions)
                for grid, of_grid, rows in grids
            )
        )
        table = padded_rows([part[0] for part in tables], samples, num_patches) if has_table else None
        return table, GroupedPositions(groups, samples) if needs_positions else None


class LieREViTModel(LieREPixelModel):
    """
    Image transformer without a head.

    Args:
        config: A [`LieREViTConfig`].
        use_mask_token: Whether to create the mask token of masked image modeling.
    """

    config: LieREViTConfig


class LieREForClassification(LieREPreTrainedModel):
    """An encoder, `encoder_class`, with a classifier on its pooled output: linear, or with one hidden layer."""

    encoder_class: type[LieREPixelModel]

    def __init__(self, config: LieREPixelConfig):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.liere = self.encoder_class(config)
        self.classifier = build_classifier(config, config.pooled_size)
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
        As [`LieREPixelModel.forward`], with (B,) `labels` in [0, num_labels) for a cross-entropy loss, or
        (B, num_labels) floating point ones for independent binary losses; returns `logits` (B, num_labels).
        """
        outputs = self.liere(
            pixel_values, positions, pixel_attention_mask=pixel_attention_mask, spatial_shapes=spatial_shapes, **kwargs
        )
        logits = self.classifier(outputs.pooler_output)
        loss = None if labels is None else self.loss_function(labels, logits, self.config, **kwargs)
        return ImageClassifierOutput(loss, logits, outputs.hidden_states, outputs.attentions)


class LieREViTForImageClassification(LieREForClassification):
    """[`LieREViTModel`] with a classifier on its pooled output, see [`LieREForClassification`]."""

    config: LieREViTConfig
    encoder_class = LieREViTModel


class LieREViTForMaskedImageModeling(LieREPreTrainedModel):
    """[`LieREViTModel`] that predicts the pixels of masked patches through one linear map (SimMIM, Xie et al. 2022)."""

    config: LieREViTConfig

    def __init__(self, config: LieREViTConfig):
        refuse_patch_dropout(config, "the pixels of all patches are predicted from their own tokens")
        super().__init__(config)
        self.liere = LieREViTModel(config, use_mask_token=True)
        patch_pixels = config.num_channels * math.prod(config.patch_shape)
        self.decoder = nn.Linear(config.hidden_size, patch_pixels)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        pixel_values: torch.Tensor,
        bool_masked_pos: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> MaskedImageModelingOutput:
        """
        As [`LieREViTModel.forward`]; with `bool_masked_pos` (B, N) the loss is the mean absolute error over the pixels
        of masked patches (SimMIM §3.3). Returns `reconstruction` of the shape of `pixel_values`.
        """
        refuse_patches("Masked image modeling", kwargs)
        outputs = self.liere(pixel_values, positions=positions, bool_masked_pos=bool_masked_pos, **kwargs)
        batch_size, channels, height, width = pixel_values.shape
        patch_height, patch_width = self.config.patch_shape
        grid = height // patch_height, width // patch_width
        patches = self.decoder(outputs.last_hidden_state[:, self.config.num_prefix_tokens :])
        patches = patches.view(batch_size, *grid, channels, patch_height, patch_width)
        reconstruction = patches.permute(0, 3, 1, 4, 2, 5).reshape(pixel_values.shape)

        loss = None
        if bool_masked_pos is not None:
            mask = bool_masked_pos.view(batch_size, 1, *grid).bool()
            mask = mask.repeat_interleave(patch_height, 2).repeat_interleave(patch_width, 3)
            error = nn.functional.l1_loss(pixel_values.to(reconstruction.dtype), reconstruction, reduction="none")
            loss = (error * mask).sum() / (mask.sum() + 1e-5) / channels
        return MaskedImageModelingOutput(loss, reconstruction, outputs.hidden_states, outputs.attentions)


class LieREViTBackbone(BackboneMixin, LieREViTModel):
    """[`LieREViTModel`] as the backbone of detection and segmentation models."""

    def __init__(self, config: LieREViTConfig):
        refuse_patch_dropout(config, "feature maps hold all patches")
        super().__init__(config)
        self.num_features = [config.hidden_size] * (config.num_hidden_layers + 1)

    @can_return_tuple
    @filter_output_hidden_states
    def forward(
        self,
        pixel_values: torch.Tensor,
        positions: torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BackboneOutput:
        """
        As [`LieREViTModel.forward`]; returns `feature_maps`, one (B, hidden_size, H/patch, W/patch) per entry of
        `config.out_features`, or (B, prefix + N, hidden_size) token sequences if `reshape_hidden_states` is false.
        """
        refuse_patches("A backbone", kwargs)
        # BackboneMixin has a forward of its own, which comes first.
        outputs = LieREViTModel.forward(self, pixel_values, positions=positions, **kwargs)
        grid = self.embeddings.patch_embeddings.grid(pixel_values)
        feature_maps = ()
        for stage, hidden_states in zip(self.stage_names, outputs.hidden_states):
            if stage not in self.out_features:
                continue
            if self.config.apply_layernorm:
                hidden_states = self.layernorm(hidden_states)
            if self.config.reshape_hidden_states:
                patches = hidden_states[:, self.config.num_prefix_tokens :]
                hidden_states = patches.transpose(1, 2).unflatten(-1, grid).contiguous()
            feature_maps += (hidden_states,)
        return BackboneOutput(
            feature_maps=feature_maps, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )
