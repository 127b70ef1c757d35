"""Image models for masked image modeling, and as backbones."""

import math

import torch
from torch import nn
from transformers.backbone_utils import BackboneMixin, filter_output_hidden_states
from transformers.modeling_outputs import BackboneOutput, MaskedImageModelingOutput
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs
from transformers.utils.generic import can_return_tuple

from .configuration_liere import LieREViTConfig
from .modeling_liere import LieREViTModel
from .patch_batches import refuse_patches
from .patch_dropout import refuse_patch_dropout
from .pretrained import LieREPreTrainedModel


class LieREViTForMaskedImageModeling(LieREPreTrainedModel):
    """
    [`LieREViTModel`] that predicts the pixels of masked patches with one linear map (SimMIM, Xie et al. 2022).

    ```python
    import torch
    from hf_liere import LieREViTConfig, LieREViTForMaskedImageModeling
    model = LieREViTForMaskedImageModeling(LieREViTConfig(hidden_size=96, num_hidden_layers=2, num_attention_heads=3))
    model(torch.randn(2, 3, 224, 224), bool_masked_pos=torch.rand(2, 196) < 0.6).loss.backward()
    ```
    """

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
        patches = self.decoder(outputs.last_hidden_state[:, self.config.num_prefix_tokens :])  # (B, N, patch pixels)
        patches = patches.view(batch_size, *grid, channels, patch_height, patch_width)
        reconstruction = patches.permute(0, 3, 1, 4, 2, 5).reshape(pixel_values.shape)  # (B, C, H, W)

        loss = None
        if bool_masked_pos is not None:
            mask = bool_masked_pos.view(batch_size, 1, *grid).bool()
            mask = mask.repeat_interleave(patch_height, 2).repeat_interleave(patch_width, 3)  # (B, 1, H, W)
            error = nn.functional.l1_loss(pixel_values.to(reconstruction.dtype), reconstruction, reduction="none")
            loss = (error * mask).sum() / (mask.sum() + 1e-5) / channels
        return MaskedImageModelingOutput(loss, reconstruction, outputs.hidden_states, outputs.attentions)


class LieREViTBackbone(BackboneMixin, LieREViTModel):
    """
    [`LieREViTModel`] as the backbone of detection and segmentation models.

    ```python
    import torch
    from hf_liere import LieREViTBackbone, LieREViTConfig
    config = LieREViTConfig(hidden_size=96, num_hidden_layers=4, num_attention_heads=3, out_indices=[2, 4])
    maps = LieREViTBackbone(config)(torch.randn(1, 3, 224, 160)).feature_maps  # two of (1, 96, 14, 10)
    ```
    """

    def __init__(self, config: LieREViTConfig):
        refuse_patch_dropout(config, "feature maps contain all patches")
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
        # super() would find the forward of BackboneMixin.
        outputs = LieREViTModel.forward(self, pixel_values, positions=positions, **kwargs)
        grid = self.embeddings.patch_embeddings.grid(pixel_values)
        feature_maps = ()
        for stage, hidden_states in zip(self.stage_names, outputs.hidden_states):
            if stage not in self.out_features:
                continue
            if self.config.apply_layernorm:
                hidden_states = self.layernorm(hidden_states)  # (B, prefix + N, hidden_size)
            if self.config.reshape_hidden_states:
                patches = hidden_states[:, self.config.num_prefix_tokens :]  # (B, N, hidden_size)
                hidden_states = patches.transpose(1, 2).unflatten(-1, grid).contiguous()  # (B, hidden_size, *grid)
            feature_maps += (hidden_states,)
        return BackboneOutput(
            feature_maps=feature_maps, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )
