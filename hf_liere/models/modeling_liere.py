"""
Vision transformers with learned rotary position encodings. Unusual in this file:

- the rotations of all layers are computed once per forward, without the batch, and handed to the layers as arguments;
- the encoder is written for any number of input axes: images here, video and volumes in modeling_liere_video;
- any input size works: rotary encodings need nothing, the learned table is interpolated.
"""

import math
from collections.abc import Iterable, Iterator

import torch
from torch import nn
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

from .attention import LieREAttention
from .configuration_liere import LieREConfig, LieREViTConfig
from .embeddings import LieREEmbeddings
from .encodings import RotaryEncoding
from .folding import build_rotary_encoding, fold_rotations
from .layers import LieRELayer, LieRELayerScale
from .lie_algebra import working_dtype
from .positions import TokenPositions, check_positions, of_coordinates, of_grid, perturbation
from .rotation import Rotation
from .tracing import values_are_unknown


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
        if isinstance(module, LieREEmbeddings):
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
        A copy of the model for inference, whose rotations cost what those of RoPE do, or nothing.

        Commuting encodings become RoPE: exp(s S) = U rot(s μ) Uᵀ, with Uᵀ in the query and key weights. Dense rotations
        of LieRE become constants for the grids that are asked for; on others they are computed as before. The copy is
        saved and loaded like any model, and `config.folded_grids` says what it is.

        Args:
            grids: Patches per axis, for example `[(14, 14)]`; `None` means the grid of the training input. Needed by
                LieRE with a block size above 2 only.

        Raises:
            ValueError: if the model is folded already or has no rotations, its weights are offloaded or made by others
                (pruning), or adapters or quantized layers stand where weights would have to be turned.
            `huggingface_hub.errors.StrictDataclassError`: if a grid does not fit the model.
        """
        return fold_rotations(self, LieREEncoderModel, grids)

    def rotary_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(name, parameter) of generators and multipliers: train them without weight decay."""
        for name, parameter in self.named_parameters():
            if "rotary_encoding." in name:
                yield name, parameter


class LieREEncoderModel(LieREPreTrainedModel):
    """The transformer without a head, for any number of axes; see [`LieREViTModel`] and `LieREVideoModel`."""

    def __init__(self, config: LieREConfig, use_mask_token: bool = False):
        super().__init__(config)
        self.embeddings = LieREEmbeddings(config, use_mask_token)
        self.pre_layernorm = (
            nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps) if config.use_pre_layernorm else nn.Identity()
        )
        self.rotary_encoding = build_rotary_encoding(config, config.num_axes)
        self.layers = nn.ModuleList([LieRELayer(config, index) for index in range(config.num_hidden_layers)])
        self.layernorm = (
            nn.Identity()
            if config.final_norm == "none"
            else nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        )
        self.post_init()

    def pixels(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """(B, C, *sizes) view of what the user passes."""
        return pixel_values

    def grid_positions(
        self, grid: tuple[int, ...], offsets: torch.Tensor | None, device: torch.device
    ) -> TokenPositions | None:
        """Positions of all tokens of a grid of patches; `None` where nothing in the model asks for them."""
        config = self.config
        if config.coordinates is None:
            return None
        dtype = working_dtype(device)
        return of_grid(
            grid, config.train_grid, config.coordinates, config.num_prefix_tokens, self._prefix_coordinate, offsets,
            device, dtype,
        )  # fmt: skip

    def given_positions(self, positions: torch.Tensor, num_patches: int) -> TokenPositions:
        """Positions of all tokens from (…, N, A) coordinates of the patches, or (…, prefix + N, A) of all."""
        prefix_length = self.config.num_prefix_tokens
        if positions.shape[-2] > num_patches:
            return TokenPositions(positions, prefix_length)
        return of_coordinates(positions, prefix_length, self._prefix_coordinate)

    @property
    def _prefix_coordinate(self) -> float:
        """Where class and register tokens sit, for rotations or for a table that is read at coordinates."""
        placed = self.config.rotate_prefix or self.config.position_table_size is not None
        return self.config.prefix_coordinate if placed else 0.0

    def rotations(self, positions: TokenPositions | None) -> Iterable[Rotation | None]:
        """One rotation per layer for tokens at these positions, or `None` for each."""
        if self.rotary_encoding is None:
            return [None] * len(self.layers)
        if not self.config.rotate_prefix and self.config.position_table_size is not None:
            positions = positions.prefix_at_zero()
        return self.rotary_encoding(positions)

    @capture_outputs(tie_last_hidden_states=False)
    def forward(
        self,
        pixel_values: torch.Tensor,
        positions: torch.Tensor | None = None,
        bool_masked_pos: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutputWithPooling:
        """
        Args:
            pixel_values: (B, C, H, W) images or (B, T, C, H, W) clips, of any size divisible by the patch.
            positions: (N, A) or (B, N, A) coordinates of the patch tokens that replace the grid's; used as given,
                neither rescaled nor perturbed. Where class and register tokens have coordinates (`rotate_prefix`,
                `position_table_size`), theirs may come first: (prefix + N, A) or (B, prefix + N, A).
            bool_masked_pos: (B, N), true where the mask token replaces a patch; needs `use_mask_token`.
            attention_mask: (B, prefix + N), true for tokens that are attended to and pooled; or one for every pair of
                tokens, (1 or B, 1 or H, 1 or prefix + N, prefix + N), Boolean or added to the logits, of which tokens
                that no query attends to are not pooled; or what the attention implementation takes instead, such as a
                `BlockMask` (not with `pooling="mean"` and `"mean_all"`).

        Returns:
            `last_hidden_state` (B, prefix + N, hidden_size), normalised if `config.final_norm` is `"tokens"`, and
            `pooler_output` (B, pooled_size), its token, tokens or mean according to `config.pooling`, normalised
            unless `config.final_norm` is `"none"`.

        Raises:
            ValueError: if the input does not fit the configuration, positions are of the wrong shape or not finite, or
                a mask is of the wrong shape or hides all tokens that would be pooled.
        """
        pixels = self.pixels(pixel_values)
        grid = self.embeddings.patch_embeddings.grid(pixels)
        num_patches = math.prod(grid)
        if positions is not None:
            if self.config.coordinates is None:
                raise ValueError(
                    f"positions were given, but position_encoding={self.config.position_encoding!r} has no rotations."
                )
            placed_prefix = self.config.rotate_prefix or self.config.position_table_size is not None
            prefix_length = self.config.num_prefix_tokens if placed_prefix else 0
            check_positions(positions, pixels.shape[0], num_patches, len(grid), prefix_length)
        if bool_masked_pos is not None:
            self._check_mask(bool_masked_pos, pixels.shape[0], num_patches)
        visible = None
        if attention_mask is not None:
            visible = self._visible_tokens(attention_mask, pixels.shape[0], self.config.num_prefix_tokens + num_patches)

        offsets = None
        if self.training and self.config.position_perturbation:
            dtype = working_dtype(pixels.device)
            offsets = perturbation(grid, self.config.position_perturbation, pixels.device, dtype)
        if positions is None:
            positions = self.grid_positions(grid, offsets, pixels.device)
        else:
            positions = self.given_positions(positions, num_patches)
        hidden_states = self.pre_layernorm(self.embeddings(pixels, grid, offsets, bool_masked_pos, positions))
        attention_mask = create_bidirectional_mask(
            config=self.config, inputs_embeds=hidden_states, attention_mask=attention_mask
        )
        for layer, rotation in zip(self.layers, self.rotations(positions)):
            kind, tensors = (None, ()) if rotation is None else (type(rotation).__name__, rotation)
            hidden_states = layer(hidden_states, attention_mask, *tensors, kind=kind, **kwargs)
        if self.config.final_norm == "pooled":
            pooled = self.layernorm(self._pool(hidden_states, visible))
        else:
            hidden_states = self.layernorm(hidden_states)
            pooled = self._pool(hidden_states, visible)
        # A single pooled token, or class and register tokens side by side.
        return BaseModelOutputWithPooling(last_hidden_state=hidden_states, pooler_output=pooled.flatten(1))

    def _pool(self, hidden_states: torch.Tensor, visible: torch.Tensor | None) -> torch.Tensor:
        """(B, tokens, hidden_size) states, of which a mean takes those that are `visible`, (1 or B, tokens)."""
        if self.config.pooling == "cls":
            return hidden_states[:, 0]
        if self.config.pooling == "prefix":
            return hidden_states[:, : self.config.num_prefix_tokens]
        first = self._first_pooled
        if visible is None:
            return hidden_states[:, first:].mean(dim=1)
        visible = visible[:, first:, None].to(hidden_states.device)
        return hidden_states[:, first:].masked_fill(~visible, 0.0).sum(dim=1) / visible.sum(dim=1)

    @property
    def _first_pooled(self) -> int:
        """Index of the first token that `pooling` averages."""
        return self.config.num_prefix_tokens if self.config.pooling == "mean" else 0

    def _visible_tokens(self, mask: torch.Tensor, batch_size: int, num_tokens: int) -> torch.Tensor | None:
        """(1 or B, tokens), true for tokens that a query attends to; `None` where a mask that is no tensor hides it."""
        averaged = self.config.pooling in ("mean", "mean_all")
        if not isinstance(mask, torch.Tensor):
            if averaged:
                raise ValueError(
                    f"pooling={self.config.pooling!r} cannot tell which tokens a {type(mask).__name__} hides; pass an "
                    f"attention_mask of shape {(batch_size, num_tokens)}."
                )
            return None
        pairs = ((1, batch_size), (1, self.config.num_attention_heads), (1, num_tokens), (num_tokens,))
        exact = mask.dtype == torch.bool or mask.is_floating_point()
        if mask.ndim == 4 and exact and all(size in accepted for size, accepted in zip(mask.shape, pairs)):
            # Masks that are added to the logits hide a token by the smallest number of their type, or minus infinity.
            attended = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
            visible = attended.flatten(1, 2).any(dim=1)
        elif tuple(mask.shape) == (batch_size, num_tokens):
            if not values_are_unknown(mask) and (mask < 0).any():
                raise ValueError(
                    f"attention_mask of shape {tuple(mask.shape)} holds {mask.min().item()}: a mask of tokens is true "
                    "or 1 for those that are attended to, 0 for others; only a mask of pairs is added to the logits."
                )
            visible = mask.bool()
        else:
            raise ValueError(
                f"attention_mask of shape {tuple(mask.shape)} in {mask.dtype} must be {(batch_size, num_tokens)} "
                "(batch, class and register tokens and patches), or one for pairs of tokens, Boolean or floating "
                f"point, (1 or {batch_size}, 1 or {self.config.num_attention_heads}, 1 or {num_tokens}, {num_tokens})."
            )
        pooled = visible[:, self._first_pooled :] if averaged else visible
        if not values_are_unknown(visible) and not pooled.any(dim=1).all():
            samples = (~pooled.any(dim=1)).nonzero().flatten().tolist()
            raise ValueError(f"attention_mask hides all {pooled.shape[1]} tokens to be pooled of samples {samples}.")
        return visible

    def _check_mask(self, bool_masked_pos: torch.Tensor, batch_size: int, num_patches: int) -> None:
        if self.embeddings.mask_token is None:
            raise ValueError("bool_masked_pos was given, but this model was built without use_mask_token=True.")
        if tuple(bool_masked_pos.shape) != (batch_size, num_patches):
            raise ValueError(
                f"bool_masked_pos of shape {tuple(bool_masked_pos.shape)} must be (batch, patches) = "
                f"{(batch_size, num_patches)}."
            )


class LieREViTModel(LieREEncoderModel):
    """
    Image transformer without a head.

    Args:
        config: A [`LieREViTConfig`].
        use_mask_token: Whether to hold the mask token of masked image modeling.
    """

    config: LieREViTConfig


class LieREForClassification(LieREPreTrainedModel):
    """An encoder of the class `encoder_class` with a classifier on its pooled token."""

    encoder_class: type[LieREEncoderModel]

    def __init__(self, config: LieREConfig):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.liere = self.encoder_class(config)
        if config.num_labels == 0:
            self.classifier = nn.Identity()
        elif config.classifier_hidden_size is None:
            self.classifier = nn.Linear(config.pooled_size, config.num_labels)
        else:
            self.classifier = nn.Sequential(
                nn.Linear(config.pooled_size, config.classifier_hidden_size),
                nn.ReLU(),
                nn.Linear(config.classifier_hidden_size, config.num_labels),
            )
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        pixel_values: torch.Tensor,
        positions: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> ImageClassifierOutput:
        """
        As [`LieREEncoderModel.forward`], with (B,) `labels` in [0, num_labels) for a cross-entropy loss, or
        (B, num_labels) floating point ones for independent binary losses; returns `logits` (B, num_labels).
        """
        outputs = self.liere(pixel_values, positions=positions, **kwargs)
        logits = self.classifier(outputs.pooler_output)
        loss = None if labels is None else self.loss_function(labels, logits, self.config, **kwargs)
        return ImageClassifierOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


class LieREViTForImageClassification(LieREForClassification):
    """[`LieREViTModel`] with a linear classifier on the pooled token."""

    config: LieREViTConfig
    encoder_class = LieREViTModel


class LieREViTForMaskedImageModeling(LieREPreTrainedModel):
    """[`LieREViTModel`] that predicts the pixels of masked patches through one linear map (SimMIM, Xie et al. 2022)."""

    config: LieREViTConfig

    def __init__(self, config: LieREViTConfig):
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
        outputs = self.liere(pixel_values, positions=positions, bool_masked_pos=bool_masked_pos, **kwargs)
        batch_size, channels, height, width = pixel_values.shape
        patch_height, patch_width = self.config.patch_shape
        patches = self.decoder(outputs.last_hidden_state[:, self.config.num_prefix_tokens :])
        patches = patches.view(
            batch_size, height // patch_height, width // patch_width, channels, patch_height, patch_width
        )
        reconstruction = patches.permute(0, 3, 1, 4, 2, 5).reshape(pixel_values.shape)

        loss = None
        if bool_masked_pos is not None:
            mask = bool_masked_pos.view(batch_size, 1, height // patch_height, width // patch_width).bool()
            mask = mask.repeat_interleave(patch_height, 2).repeat_interleave(patch_width, 3)
            error = nn.functional.l1_loss(pixel_values.to(reconstruction.dtype), reconstruction, reduction="none")
            loss = (error * mask).sum() / (mask.sum() + 1e-5) / channels
        return MaskedImageModelingOutput(
            loss=loss,
            reconstruction=reconstruction,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


class LieREViTBackbone(BackboneMixin, LieREViTModel):
    """[`LieREViTModel`] as the backbone of detection and segmentation models."""

    def __init__(self, config: LieREViTConfig):
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
        `config.out_features` (token sequences without the prefix's reshaping if `reshape_hidden_states` is false).
        """
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


__all__ = [
    "LieREPreTrainedModel",
    "LieREViTBackbone",
    "LieREViTForImageClassification",
    "LieREViTForMaskedImageModeling",
    "LieREViTModel",
]
