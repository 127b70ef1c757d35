"""Images with their aspect ratios: resized to at most a number of patches, and padded to that number in batches."""

import json
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedConfig
from transformers.models.siglip2.image_processing_siglip2 import get_image_size_for_max_num_patches

from hf_liere import LieREViTConfig, batch_of_patches
from hf_liere.errors import InputError
from hf_liere.transformer.configuration_liere import pair
from training.common.arguments import AugmentationArguments, ImageDataArguments, ModelArguments
from training.common.conditions import ConditionArguments
from training.data.augmentation import Collator


@dataclass(frozen=True)
class NativeSize:
    """
    The largest size, in whole patches and at most `max_num_patches`, that keeps an image's aspect ratio up to rounding.
    The rule and its code are those of transformers' `Siglip2ImageProcessor`.
    """

    patch_size: int
    max_num_patches: int

    def __call__(self, size: tuple[int, int]) -> tuple[int, int]:
        """Height and width of an image in pixels → those of the model's input."""
        return get_image_size_for_max_num_patches(*size, self.patch_size, self.max_num_patches)


class PatchCollator(Collator):
    """
    A [`Collator`] for images of different sizes: `labels` (B,), and `pixel_values` (B, max_num_patches, patch pixels),
    `pixel_attention_mask` and `spatial_shapes` from [`batch_of_patches`]. An example without an image becomes one patch
    of zeros, because attention needs a token. Images are not mixed.

    Args:
        config: A [`LieREViTConfig`].
    """

    def __init__(
        self,
        config: LieREViTConfig,
        max_num_patches: int,
        image_mean: list[float],
        image_std: list[float],
        arguments: AugmentationArguments,
        seed: int,
    ):
        super().__init__(config.patch_shape, config.num_channels, image_mean, image_std, arguments, seed)
        self.config = config
        self.max_num_patches = max_num_patches

    def __call__(self, examples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        images = [self._pixels(example) for example in examples]
        self.erase_parts(images, examples)
        labels = torch.tensor([example["label"] for example in examples])
        return {"labels": labels, **batch_of_patches(images, self.config, self.max_num_patches)}

    def _pixels(self, example: dict[str, Any]) -> torch.Tensor:
        """(C, height, width)."""
        if "image" not in example:
            return torch.zeros(self.num_channels, *self.image_size)
        # A copy, because flipped images have negative strides and others may be read-only.
        return self.normalise(torch.from_numpy(np.array(example["image"], order="C")).movedim(-1, -3))


def default_to_square(arguments: ModelArguments, data_arguments: ImageDataArguments) -> None:
    """Gives a new model without an image size the largest square of at most `max_num_patches` patches."""
    given = arguments.architecture()
    if data_arguments.max_num_patches is None or arguments.model_name_or_path or "image_size" in given:
        return
    patch, side = given.get("patch_size", LieREViTConfig.patch_size), math.isqrt(data_arguments.max_num_patches)
    sides = patch if isinstance(patch, list) else [patch]
    # The configuration refuses other values.
    if all(isinstance(extent, int) for extent in sides):
        arguments.image_size = json.dumps([side * extent for extent in sides] if sides is patch else side * patch)


def check_native_sizes(
    size: NativeSize,
    image_size: tuple[int, int],
    config: PreTrainedConfig,
    augmentation: AugmentationArguments,
    condition: ConditionArguments,
) -> None:
    """
    Raises:
        InputError: if a flag requires images of one size or has no effect on images of different sizes.
    """
    flag = f"--max_num_patches {size.max_num_patches}"
    if tuple(pair("image_size", config.image_size)) != image_size:
        raise InputError(
            f"--image_size {image_size[0]}×{image_size[1]} has no effect with {flag}: coordinates refer to the "
            f"checkpoint's {config.image_size}. Accepted: leave it out."
        )
    if augmentation.random_crop_ratio:
        raise InputError(f"--random_crop_ratio cuts parts of one size; accepted with {flag}: 0.")
    for name in ("mixup_alpha", "cutmix_alpha"):
        if getattr(augmentation, name):
            raise InputError(f"--{name} mixes images of one size; accepted with {flag}: 0.")
    if condition.evaluation_shuffle != "none":
        raise InputError(f"--evaluation_shuffle permutes the patches of one size; accepted with {flag}: none.")
    if condition.evaluation_offset:
        raise InputError(f"--evaluation_offset shifts the coordinates of one size; accepted with {flag}: 0.")
