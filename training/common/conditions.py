"""Evaluations under changed conditions: patches that change places (LieRE §5.5), shifted positions (ComRoPE §4.3.1).

Both act on evaluation batches only and need no other model: patches are permuted as pixels, which is the same as
permuting their tokens before they get positions.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from hf_liere.errors import InputError
from hf_liere.models.transformer.configuration_liere import LieREConfig
from training.common.arguments import flag


SHUFFLES = ("none", "patches", "frames")
# Coordinates that count patches; in the others a training input has an extent of 1.
COUNTING_COORDINATES = ("index", "train_index")


@dataclass
class ConditionArguments:
    evaluation_shuffle: str = flag(
        "none", "Evaluate with permuted `patches` (of clips tubelets) or `frames`, every image in an order of its own."
    )
    evaluation_offset: float = flag(
        0.0,
        "ρ: evaluate with coordinates shifted by a common offset from N(0, ρ²) per axis, in extents of a "
        "training input.",
    )
    evaluation_seed: int = flag(0, "Seed of the permutations and of the offset.")

    def __post_init__(self):
        if self.evaluation_shuffle not in SHUFFLES:
            raise InputError(f"--evaluation_shuffle {self.evaluation_shuffle!r}; accepted: {', '.join(SHUFFLES)}.")
        if not 0 <= self.evaluation_offset < math.inf:
            raise InputError(f"--evaluation_offset {self.evaluation_offset}; accepted: 0 and above.")


class ConditionCollator:
    """
    A collator whose evaluation batches are under the given condition.

    Raises:
        InputError: if the model has nothing that the condition changes.
    """

    def __init__(
        self, collator: Callable[[list], dict[str, Any]], model: PreTrainedModel, arguments: ConditionArguments
    ):
        self.collator = collator
        self.arguments = arguments
        self.encoder = None
        if arguments.evaluation_shuffle == "none" and not arguments.evaluation_offset:
            return
        config = model.config
        if not isinstance(config, LieREConfig):
            raise InputError(f"Shuffles and offsets need a model of this library, not {config.model_type!r}.")
        if arguments.evaluation_shuffle == "frames" and config.num_axes != 3:
            raise InputError("--evaluation_shuffle frames: images have none; accepted: none, patches.")
        if arguments.evaluation_offset and config.coordinates is None:
            raise InputError(
                f"--evaluation_offset: position_encoding={config.position_encoding!r} has no coordinates to shift."
            )
        if arguments.evaluation_offset and config.coordinates == "physical":
            raise InputError("--evaluation_offset: physical coordinates follow from each volume; accepted: 0.")
        self.encoder = model.base_model

    def __call__(self, examples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        batch = self.collator(examples)
        if self.encoder is None or "key" in examples[0]:
            return batch
        seed = self.arguments.evaluation_seed
        # A convolution sees channels first, then the axes of the patches.
        pixels = self.encoder.pixels(batch["pixel_values"])
        patch_shape = self.encoder.config.patch_shape
        if self.arguments.evaluation_shuffle == "frames":
            patch_shape = (1, *pixels.shape[3:])
        if self.arguments.evaluation_shuffle != "none":
            # `pixels` exchanges two axes of a batch, so applying it twice restores their order.
            orders = [np.random.default_rng((seed, index)) for index in _indices(examples, len(pixels))]
            batch["pixel_values"] = self.encoder.pixels(shuffle_patches(pixels, patch_shape, orders)).contiguous()
        if self.arguments.evaluation_offset:
            grid = tuple(size // patch for size, patch in zip(pixels.shape[2:], self.encoder.config.patch_shape))
            batch["positions"] = shifted_positions(self.encoder, grid, self.arguments.evaluation_offset, seed)
        return batch


def _indices(examples: list[dict[str, Any]], count: int) -> list[int]:
    """For every input of a batch the index of its example, of which a collator puts those without an image last."""
    indices = [example["index"] for example in examples if "image" in example]
    indices += [0] * (len(examples) - len(indices))
    return np.repeat(indices, count // len(examples)).tolist()


def shuffle_patches(
    pixels: torch.Tensor, patch_shape: tuple[int, ...], generators: Sequence[np.random.Generator]
) -> torch.Tensor:
    """Inputs (B, C, *sizes) with their patches permuted, each in the order that its generator draws."""
    axes = len(patch_shape)
    counts = [size // patch for size, patch in zip(pixels.shape[2:], patch_shape)]
    split = [extent for pair in zip(counts, patch_shape) for extent in pair]
    outer, inner = range(2, 2 + 2 * axes, 2), range(3, 3 + 2 * axes, 2)
    patches = pixels.reshape(*pixels.shape[:2], *split).permute(0, 1, *outer, *inner).flatten(2, 1 + axes)
    orders = [torch.from_numpy(generator.permutation(math.prod(counts))) for generator in generators]
    patches = torch.stack([image[:, order] for image, order in zip(patches, orders, strict=True)]).unflatten(2, counts)
    back = [axis for pair in zip(range(2, 2 + axes), range(2 + axes, 2 + 2 * axes)) for axis in pair]
    return patches.permute(0, 1, *back).reshape(pixels.shape)


def shifted_positions(encoder: PreTrainedModel, grid: tuple[int, ...], strength: float, seed: int) -> torch.Tensor:
    """(tokens, A) coordinates of a grid, all moved by the same offset; ComRoPE eq. (12) with ρ = `strength`.

    Where class and register tokens have coordinates these move as well; else an encoding of relative positions sees
    the offset in what these tokens attend to.
    """
    config = encoder.config
    positions = encoder.grid_positions(grid, torch.device("cpu")).coordinates
    if not config.rotate_prefix and config.position_table_size is None:
        positions = positions[config.num_prefix_tokens :]
    extents = config.train_grid if config.coordinates in COUNTING_COORDINATES else (1,) * len(grid)
    generator = torch.Generator().manual_seed(seed)
    offset = torch.randn(len(grid), generator=generator, dtype=torch.float64) * strength
    return positions + (offset * torch.tensor(extents)).to(positions.dtype)
