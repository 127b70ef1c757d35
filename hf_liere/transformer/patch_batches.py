"""Batches of images, clips or volumes of different sizes, as padded sequences of patches like those of SigLIP 2."""

import math
from collections.abc import Sequence

import torch

from ..fast.dispatch import values_are_unknown


def batch_of_patches(
    inputs: Sequence[torch.Tensor], config, max_num_patches: int | None = None
) -> dict[str, torch.Tensor]:
    """
    Batch inputs of different sizes, in the format of transformers' `Siglip2ImageProcessor`, which also resizes and
    normalises images.

    ```python
    import torch
    from hf_liere import LieREViTConfig, LieREViTModel, batch_of_patches

    model = LieREViTModel(LieREViTConfig(hidden_size=96, num_hidden_layers=2, num_attention_heads=3))
    images = [torch.randn(3, 224, 160), torch.randn(3, 64, 96)]
    outputs = model(**batch_of_patches(images, model.config))
    ```

    Args:
        inputs: Images (C, H, W) or clips (T, C, H, W), of sizes divisible by the patch.
        config: A [`LieREPixelConfig`].
        max_num_patches: Number N of patches of a padded sample; `None` means the largest of the batch.

    Returns:
        `pixel_values` (B, N, patch pixels), patches in raster order, each with its channels last;
        `pixel_attention_mask` (B, N), 1 for patches and 0 for padding; and `spatial_shapes` (B, A), patches per axis.

    Raises:
        ValueError: without inputs, or if one does not divide into patches or has more than `max_num_patches`.
    """
    if not inputs:
        raise ValueError("A batch needs at least one input; inputs are empty.")
    patches, shapes = zip(*(_cut_input(pixels, config, index) for index, pixels in enumerate(inputs)))
    longest = max(map(len, patches))
    if max_num_patches is not None and longest > max_num_patches:
        sample = max(range(len(patches)), key=lambda index: len(patches[index]))
        raise ValueError(f"Input {sample} has {longest} patches, {shapes[sample]}; max_num_patches={max_num_patches}.")
    length = longest if max_num_patches is None else max_num_patches
    padded = [torch.nn.functional.pad(part, (0, 0, 0, length - len(part))) for part in patches]  # (N, pixels)
    counts = torch.tensor([len(part) for part in patches])
    return {
        "pixel_values": torch.stack(padded),  # (B, N, patch pixels)
        "pixel_attention_mask": (torch.arange(length) < counts.unsqueeze(-1)).long(),  # (B, N)
        "spatial_shapes": torch.tensor(shapes),  # (B, A)
    }


def _cut_input(pixels: torch.Tensor, config, index: int) -> tuple[torch.Tensor, tuple[int, ...]]:
    """Cut one input into (patches, patch pixels), and return its grid as well."""
    patch_shape = config.patch_shape
    if pixels.ndim == 1 + len(patch_shape) and len(patch_shape) == 3:
        pixels = pixels.transpose(0, 1)  # (C, T, H, W)
    sizes = tuple(pixels.shape[1:])
    fits = pixels.ndim == 1 + len(patch_shape) and pixels.shape[0] == config.num_channels
    if not fits or any(size < patch or size % patch for size, patch in zip(sizes, patch_shape)):
        raise ValueError(
            f"Input {index} with {pixels.shape[0]} channels and of size {sizes} does not divide into patches of "
            f"{patch_shape} with num_channels={config.num_channels}."
        )
    grid = tuple(size // patch for size, patch in zip(sizes, patch_shape))
    return cut_patches(pixels.unsqueeze(0), patch_shape)[0], grid  # (patches, patch pixels)


def cut_patches(pixels: torch.Tensor, patch_shape: tuple[int, ...]) -> torch.Tensor:
    """
    (B, C, *sizes) → (B, N, *patch_shape · C), patches in raster order, each with its channels last. Exported graphs
    keep its check that sizes are divisible.
    """
    for axis, patch in enumerate(patch_shape):
        pixels = pixels.unflatten(2 + 2 * axis, (pixels.shape[2 + 2 * axis] // patch, patch))  # (B, C, n₁, P₁, …)
    axes = range(len(patch_shape))
    pixels = pixels.permute(0, *(2 + 2 * axis for axis in axes), *(3 + 2 * axis for axis in axes), 1)  # (B, n₁, …, C)
    return pixels.flatten(1 + len(axes)).flatten(1, len(axes))


def check_patches(
    config,
    pixel_values: torch.Tensor,
    pixel_attention_mask: torch.Tensor | None,
    spatial_shapes: torch.Tensor | None,
) -> torch.Tensor:
    """
    (B, N), true for patches and false for padding, of what [`batch_of_patches`] returns; the mask follows from the
    shapes and is optional. Raises `ValueError` if they do not fit the configuration or each other.
    """
    width, axes = config.num_channels * math.prod(config.patch_shape), config.num_axes
    if spatial_shapes is None:
        raise ValueError("pixel_attention_mask was given without spatial_shapes, the patches per axis of every sample.")
    if pixel_values.ndim != 3 or pixel_values.shape[2] != width:
        raise ValueError(
            f"pixel_values of shape {tuple(pixel_values.shape)} beside spatial_shapes must be (batch, patches, "
            f"{width}): patches of {config.patch_shape} pixels with num_channels={config.num_channels}."
        )
    batch_size, length, _ = pixel_values.shape
    if tuple(spatial_shapes.shape) != (batch_size, axes) or spatial_shapes.is_floating_point():
        raise ValueError(
            f"spatial_shapes of shape {tuple(spatial_shapes.shape)} in {spatial_shapes.dtype} must be "
            f"{(batch_size, axes)} integers, the patches per axis of every sample."
        )
    shapes = spatial_shapes.to(pixel_values.device)
    counts = shapes.prod(dim=1, keepdim=True)  # (B, 1)
    present = torch.arange(length, device=pixel_values.device) < counts  # (B, N)
    if not values_are_unknown(shapes):
        wrong = (shapes < 1).any(dim=1) | (counts.squeeze(1) > length)  # (B,)
        if wrong.any():
            raise ValueError(
                f"spatial_shapes contain {shapes[wrong].tolist()}: every number must be at least 1, their product at "
                f"most the {length} patches of pixel_values."
            )
    if pixel_attention_mask is not None:
        _check_mask(pixel_attention_mask, present)
    return present


def _check_mask(mask: torch.Tensor, present: torch.Tensor) -> None:
    if mask.shape != present.shape:
        raise ValueError(f"pixel_attention_mask of shape {tuple(mask.shape)} must be {tuple(present.shape)}.")
    if values_are_unknown(mask, present):
        return
    if wrong := (mask.to(present.device).bool() != present).any(dim=1).nonzero().flatten().tolist():
        raise ValueError(
            f"pixel_attention_mask of samples {wrong} does not fit spatial_shapes; accepted: 1 for the patches of a "
            "sample, which come first, then 0 for padding."
        )


def refuse_patches(what: str, arguments: dict) -> None:
    """Raise `ValueError` if a model's `arguments` are a batch of patches, which `what` does not take."""
    if given := [name for name in ("pixel_attention_mask", "spatial_shapes") if arguments.get(name) is not None]:
        raise ValueError(f"{what} takes inputs of one size, as (batch, channels, height, width); {given} were given.")
