"""Video and volume transformers: the image transformer on three axes, frames or slices first."""

import torch

from ..encoding.given_positions import require_tensors
from .configuration_liere import LieREVideoConfig
from .modeling_liere import LieREForClassification, LieREPixelModel


class LieREVideoModel(LieREPixelModel):
    """
    Video or volume transformer without a head, on tubelets (tubelet_size × patch_size × patch_size).

    `forward` takes pixel_values (B, T, C, H, W) with any number of channels, as in VideoMAE; positions have three axes:
    frames, rows, columns.

    ```python
    import torch
    from hf_liere import LieREVideoConfig, LieREVideoModel

    config = LieREVideoConfig(hidden_size=96, num_hidden_layers=2, num_attention_heads=3, image_size=64)
    clip = torch.randn(1, 8, 3, 64, 64)  # (batch, frames, channels, height, width)
    features = LieREVideoModel(config)(clip).last_hidden_state  # (1, 1 + 4 · 4 · 4, 96)
    ```

    Args:
        config: A [`LieREVideoConfig`].
        use_mask_token: Whether to create the mask token of masked modeling.
    """

    config: LieREVideoConfig
    input_modalities = ("video",)  # volumes too: transformers has no modality for them

    def pixels(self, pixel_values: torch.Tensor) -> torch.Tensor:
        require_tensors(pixel_values=pixel_values)
        if pixel_values.ndim != 5:  # (B, T, C, H, W)
            raise ValueError(
                f"pixel_values of shape {tuple(pixel_values.shape)} must be (batch, frames, channels, height, width)."
            )
        return pixel_values.transpose(1, 2)  # (B, C, T, H, W)


class LieREVideoForVideoClassification(LieREForClassification):
    """
    [`LieREVideoModel`] with a classifier on its pooled output, see [`LieREForClassification`].

    ```python
    import torch
    from hf_liere import LieREVideoConfig, LieREVideoForVideoClassification

    config = LieREVideoConfig(hidden_size=96, num_hidden_layers=2, num_attention_heads=3, image_size=64, num_labels=5)
    model = LieREVideoForVideoClassification(config)
    model(torch.randn(1, 8, 3, 64, 64), labels=torch.tensor([2])).loss.backward()
    ```
    """

    config: LieREVideoConfig
    input_modalities = ("video",)
    encoder_class = LieREVideoModel
