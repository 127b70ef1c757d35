"""Video and volume transformers: the image transformer on three axes, frames (or slices) first."""

import torch

from .configuration_liere import LieREVideoConfig
from .modeling_liere import LieREForClassification, LieREPixelModel


class LieREVideoModel(LieREPixelModel):
    """
    Video or volume transformer without a head, on tubelets (tubelet_size × patch_size × patch_size).

    `forward` takes pixel_values (B, T, C, H, W), as VideoMAE does, with any number of channels; positions have three
    axes: frames, rows, columns.

    Args:
        config: A [`LieREVideoConfig`].
        use_mask_token: Whether to hold a mask token.
    """

    config: LieREVideoConfig
    input_modalities = ("video",)

    def pixels(self, pixel_values: torch.Tensor) -> torch.Tensor:
        if pixel_values.ndim != 5:
            raise ValueError(
                f"pixel_values of shape {tuple(pixel_values.shape)} must be (batch, frames, channels, height, width)."
            )
        return pixel_values.transpose(1, 2)


class LieREVideoForVideoClassification(LieREForClassification):
    """[`LieREVideoModel`] with a linear classifier on the pooled token."""

    config: LieREVideoConfig
    input_modalities = ("video",)
    encoder_class = LieREVideoModel
