"""Evaluation under changed conditions: shuffled patches (LieRE §5.5) and shifted positions (ComRoPE §4.3.1).

Both change evaluation batches only and leave the model as it is. Permuting the pixels of patches is the same as
permuting their tokens before positions are assigned.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from hf_liere.errors import InputError
from hf_liere.transformer.configuration_liere import LieREConfig
from training.common.arguments import flag


SHUFFLES = ("none", "patches", "frames")
# Coordinates that count patches. In all others a training input has extent 1.
COUNTING_COORDINATES = ("index", "train_index")


@dataclass
class ConditionArguments:
    evaluation_shuffle: str = flag(
        "none", "Evaluate with permuted `patches` (tubelets of clips) or `frames`; each image is permuted differently."
    )
    evaluation_offset: float = flag(
        0.0,
        "ρ: evaluate with all coordinates shifted by one offset from N(0, ρ²) per axis, in units of the training "
        "input's extent.",
    )
    evaluation_seed: int = flag(0, "Seed of the permutations and of the offset.")
    save_logits: bool = flag(False, "Save the logits of the evaluation, in half precision, with the ranks and losses.")

    def __post_init__(self):
        if self.evaluation_shuffle not in SHUFFLES:
            raise InputError(f"--evaluation_shuffle {self.evaluation_shuffle!r}; accepted: {', '.join(SHUFFLES)}.")
        if not 0 <= self.evaluation_offset < math.inf:
            raise InputError(f"--evaluation_offset {self.evaluation_offset}; accepted: 0 and above.")


class ConditionCollator:
    """
    Wraps a collator and applies the condition to evaluation batches.

    Raises:
        InputError: if the condition does not apply to the model.
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
            raise InputError(f"Shuffles and offsets require a model of this library, not {config.model_type!r}.")
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
        # (B, C, *sizes): channels first, then the axes of the patches.
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
    """The example index of every input of a batch. A collator puts examples without an image last."""
    indices = [example["index"] for example in examples if "image" in example]
    indices += [0] * (len(examples) - len(indices))
    return np.repeat(indices, count // len(examples)).tolist()


def shuffle_patches(
    pixels: torch.Tensor, patch_shape: tuple[int, ...], generators: Sequence[np.random.Generator]
) -> torch.Tensor:
    """Permutes the patches of inputs (B, C, *sizes), each in the order that its generator draws."""
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
    """(tokens, A) coordinates of a grid, all shifted by one offset; ComRoPE eq. (12) with ρ = `strength`.

    Class and register tokens shift too if they have coordinates. Otherwise a relative encoding sees the offset in what
    these tokens attend to.
    """
    config = encoder.config
    positions = encoder.grid_positions(grid, torch.device("cpu")).coordinates
    if not config.rotate_prefix and config.position_table_size is None:
        positions = positions[config.num_prefix_tokens :]
    extents = config.train_grid if config.coordinates in COUNTING_COORDINATES else (1,) * len(grid)
    generator = torch.Generator().manual_seed(seed)
    offset = torch.randn(len(grid), generator=generator, dtype=torch.float64) * strength
    return positions + (offset * torch.tensor(extents)).to(positions.dtype)
