"""From images and clips to batches: augmentation, normalisation, Mixup and CutMix.

All randomness is seeded by (seed, epoch, image index), for mixing by all images of the batch, and never by a global
generator. A run therefore sees the same pixels if it resumes within an epoch or uses several workers. The epoch is
part of the key `(epoch, index)`, because persistent workers receive nothing else.
"""

import contextlib
import functools
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from PIL import Image
from torchvision.transforms import RandAugment, RandomErasing

from hf_liere.errors import InputError
from hf_liere.reading.files import UnreadableError
from training.common.arguments import AugmentationArguments
from training.data.rand_augment import LieRERandAugment
from training.data.sources import SourceDataset, leave_out


PADDING = -1
IGNORED_LABEL = -100
# Makes random erasing independent of the other augmentations, which have the same (seed, epoch, index).
ERASING_STREAM = 2
# Likewise for an augmentation before the crop, so that the crop does not depend on it.
FIRST_STREAM = 3
# By `rand_augment_ranges`.
RAND_AUGMENTS = {"torchvision": RandAugment, "liere": LieRERandAugment}

# Height and width of the model's input, or a function from an image's height and width to these.
ImageSize = tuple[int, int] | Callable[[tuple[int, int]], tuple[int, int]]


class EpochSampler(torch.utils.data.Sampler):
    """
    Keys `(epoch, index)` of a training set in a random order that depends on (seed, epoch) only.

    With repeated augmentation (Hoffer et al., 2020, as in DeiT) the views of an image are adjacent. They are then in
    the same optimizer step for any number of processes, and an epoch uses `size / repeats` images. Index
    `image + size · v` is view v of an image.

    Args:
        size: number of images, and of keys in an epoch without `PADDING`.
        multiple: the epoch is padded to a multiple of this with `PADDING`, which the loss ignores. Otherwise the
            processes would repeat images to fill the last batch.
        trainer_state: a function that returns an object with the current `epoch`.
    """

    def __init__(self, size: int, seed: int, multiple: int, trainer_state, repeats: int = 1):
        self.size = size
        self.seed = seed
        self.repeats = repeats
        self.length = -(-size // multiple) * multiple
        self.trainer_state = trainer_state

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[tuple[int, int]]:
        epoch = int(self.trainer_state().epoch or 0)
        images = np.random.default_rng((self.seed, epoch)).permutation(self.size)
        views = images[:, None] + self.size * np.arange(self.repeats)
        for index in views.ravel()[: self.size].tolist():
            yield epoch, index
        for _ in range(self.size, self.length):
            yield epoch, PADDING


@dataclass
class TrainingImages(SourceDataset):
    """
    Augmented images by key `(epoch, index)`: `image` (height, width, C) uint8, `label` and `key`. An unreadable image
    is left out, and has the label that the loss ignores.
    """

    augment: "Augmentation"

    @property
    def repeats(self) -> int:
        return self.augment.arguments.repeated_augmentation

    def __getitem__(self, key: tuple[int, int]) -> dict[str, Any]:
        epoch, index = key
        if index == PADDING:
            return {"label": IGNORED_LABEL, "key": key}
        try:
            image, label = self.source[index % len(self)]
        except UnreadableError as error:
            leave_out(self, error)
            return {"label": IGNORED_LABEL, "key": key}
        return {"image": self.augment(image, epoch, index), "label": label, "key": key}


@dataclass(frozen=True)
class EvaluationView:
    """
    The part of an image that an evaluation uses, as the saved image processor does.

    Args:
        crops: 0 for whole images, squeezed into the model's input; else the number of crops of that size, evenly spaced
            along the longer side; a single crop is central.
        ratio: shorter side of the resized image, relative to the crop.
    """

    image_size: ImageSize
    resample: int
    crops: int = 0
    ratio: float = 1.0

    def parts(self, image: np.ndarray) -> list[np.ndarray]:
        """(…, height, width, C) → views of the image or clip, (…, *image_size, C)."""
        if not self.crops:
            return [resize(image, self.image_size, self.resample)]
        image = resize(image, covering_size(image.shape[-3:-1], self.image_size, self.ratio), self.resample)
        room = [extent - size for extent, size in zip(image.shape[-3:-1], self.image_size)]
        longer = int(room[1] > room[0])
        parts = []
        for number in range(self.crops):
            start = [extent // 2 for extent in room]
            if self.crops > 1:
                start[longer] = number * room[longer] // (self.crops - 1)
            parts.append(_part(image, start, self.image_size))
        return parts

    def extent(self, size: tuple[int, int]) -> tuple[float, float]:
        """Height and width of the region that a view shows of an image of this size."""
        return _extent(size, self.image_size, self.ratio) if self.crops else size


@dataclass
class EvaluationImages(SourceDataset):
    """Images for evaluation: `image` (*image_size, C), `label` and `index`; unreadable ones as in training."""

    view: EvaluationView

    def __getitem__(self, index: int) -> dict[str, Any]:
        try:
            image, label = self.source[index]
        except UnreadableError as error:
            leave_out(self, error)
            return {"label": IGNORED_LABEL}
        (part,) = self.view.parts(image)
        return {"image": part, "label": label, "index": index}


class Augmentation:
    """
    Crops, flips and augments a uint8 image (height, width, C) to (*image_size, C), or a clip (T, height, width, C), all
    of whose frames are changed in the same way. If the size depends on the image, crops keep its aspect ratio.
    """

    def __init__(self, image_size: ImageSize, resample: int, arguments: AugmentationArguments, seed: int):
        self.image_size = image_size
        self.resample = resample
        self.arguments = arguments
        self.seed = seed
        self.policy = None
        if arguments.auto_augment:
            self.policy = functools.partial(_apply_timm, _timm_policy(arguments.auto_augment, image_size, resample))
        elif arguments.rand_augment_ops:
            self.policy = RAND_AUGMENTS[arguments.rand_augment_ranges](
                arguments.rand_augment_ops, arguments.rand_augment_magnitude
            )
        crops = arguments.random_resized_crop or arguments.random_crop_ratio or arguments.crop_padding > 0
        self.is_random = crops or arguments.flip_probability > 0 or self.policy is not None

    def __call__(self, image: np.ndarray, epoch: int, index: int) -> np.ndarray:
        if not self.is_random:
            return resize(image, self.image_size, self.resample)
        if image.ndim == 4:
            # Every frame uses the same seed.
            return np.stack([self(frame, epoch, index) for frame in image])
        rng = np.random.default_rng((self.seed, epoch, index))
        if self.policy is not None and self.arguments.augment_first:
            image = self._augment(image, np.random.default_rng((self.seed, epoch, index, FIRST_STREAM)))
        if self.arguments.random_resized_crop:
            image = image[self._random_part(image.shape[:2], rng)]
        if self.arguments.random_crop_ratio:
            image = self._random_crop(image, rng)
        else:
            image = resize(image, self.image_size, self.resample)
        if self.arguments.crop_padding:
            image = _padded_crop(image, self.arguments.crop_padding, rng)
        if rng.random() < self.arguments.flip_probability:
            image = image[:, ::-1]
        if self.policy is not None and not self.arguments.augment_first:
            image = self._augment(image, rng)
        return image

    def _augment(self, image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        with _seed_globals(rng):
            return _from_pil(self.policy(_to_pil(image)))

    def _random_crop(self, image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        larger = covering_size(image.shape[:2], self.image_size, self.arguments.random_crop_ratio)
        image = resize(image, larger, self.resample)
        start = [int(rng.integers(extent - size + 1)) for extent, size in zip(larger, self.image_size)]
        return _part(image, start, self.image_size)

    def extent(self, size: tuple[int, int], epoch: int, index: int) -> tuple[float, float]:
        """Height and width of the region that the augmented image shows, without black borders."""
        if self.arguments.random_crop_ratio:
            return _extent(size, self.image_size, self.arguments.random_crop_ratio)
        if not self.arguments.random_resized_crop:
            return size
        # The same first draw as in `__call__`.
        rng = np.random.default_rng((self.seed, epoch, index))
        rows, columns = self._random_part(size, rng)
        return rows.stop - rows.start, columns.stop - columns.start

    def _random_part(self, size: tuple[int, int], rng: np.random.Generator) -> tuple[slice, slice]:
        return _random_part(size, self.arguments.random_resized_crop_scale, rng, callable(self.image_size))


@contextlib.contextmanager
def _seed_globals(rng: np.random.Generator) -> Iterator[None]:
    """
    Inside, seeds the global generators, which torchvision and timm use, from `rng`. Restores their states afterwards.
    """
    seed, states = int(rng.integers(2**63)), (random.getstate(), np.random.get_state())
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])


def _timm_policy(name: str, image_size: ImageSize, resample: int) -> Callable[[Image.Image], Image.Image]:
    """
    timm's RandAugment with timm's constants for images of this size.

    Raises:
        InputError: if timm is not installed or does not know the policy.
    """
    try:
        from timm.data.auto_augment import rand_augment_transform
    except ImportError:
        raise InputError(f"--auto_augment {name}: timm is not installed; accepted: pip install timm.") from None
    try:
        # The largest translation, as in timm and VideoMAE.
        largest = {} if callable(image_size) else {"translate_const": int(0.45 * min(image_size))}
        constants = {"translate_const": 250, "interpolation": Image.Resampling(resample), **largest}
        return rand_augment_transform(name, constants)
    except (AssertionError, KeyError, ValueError) as error:
        raise InputError(f"--auto_augment {name!r} is not a policy of timm; accepted: rand-m9-mstd0.5-inc1.") from error


def _apply_timm(policy: Callable[[Image.Image], Image.Image], image: Image.Image) -> Image.Image:
    # The policies fill with RGB colours.
    return policy(image.convert("RGB")).convert(image.mode)


class Collator:
    """
    Stacks and normalises images or clips; erases parts of training images and mixes them, as DeiT does.

    Args:
        image_size: (height, width), or (T, height, width) for clips.

    Returns:
        `labels` (B,), with `IGNORED_LABEL` for padding and unreadable examples, and `pixel_values`: (B, C, height,
        width) for images, (B, T, C, height, width) for clips, (B·clips, T, …) for several clips per video.

        A mixed batch also has `mixed_labels` (B,) and `mixing_weights` (B,): the target is w · label + (1 − w) · mixed
        label. Two hard labels keep Trainer's count of examples right and cannot be mistaken for targets of a binary
        cross entropy.

        With `has_spacing` also `spacing` (B or B·clips, 2) and `frame_times` (B or B·clips, T) of clips, for models
        with physical coordinates.
    """

    def __init__(
        self,
        image_size: tuple[int, ...],
        num_channels: int,
        image_mean: Sequence[float],
        image_std: Sequence[float],
        arguments: AugmentationArguments,
        seed: int,
        has_spacing: bool = False,
    ):
        self.image_size = image_size
        self.has_spacing = has_spacing
        self.num_channels = num_channels
        self.scale = (1 / (255 * torch.tensor(image_std))).view(-1, 1, 1)
        self.shift = (-torch.tensor(image_mean) / torch.tensor(image_std)).view(-1, 1, 1)
        self.arguments = arguments
        self.seed = seed
        self.erase = RandomErasing(arguments.random_erasing_probability, value="random", inplace=True)

    def __call__(self, examples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        # Examples without an image come last, so that images are the first rows.
        examples = sorted(examples, key=lambda example: "image" not in example)
        labels = torch.tensor([example["label"] for example in examples])
        images = [example["image"] for example in examples if "image" in example]
        # Evaluation inputs may have another size than training inputs, and several clips.
        *views, height, width = images[0].shape[:-1] if images else self.image_size
        pixels = torch.zeros(len(examples), *views, self.num_channels, height, width)
        if images:
            self.normalise(torch.from_numpy(np.stack(images)).movedim(-1, -3), out=pixels[: len(images)])
        if len(views) > 1:
            pixels = pixels.flatten(0, 1)
        batch = {"labels": labels, "pixel_values": pixels}
        if self.has_spacing:
            batch |= _places(examples, views)
        self.erase_parts(pixels, examples)
        if "key" in examples[0] and (self.arguments.mixup_alpha or self.arguments.cutmix_alpha):
            batch.update(self._mix(pixels, labels, len(images), examples))
        return batch

    def normalise(self, images: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Normalises uint8 images (…, C, height, width); grey images are repeated for every channel."""
        return torch.addcmul(self.shift, images, self.scale, out=out)

    def erase_parts(self, pixels: Iterable[torch.Tensor], examples: list[dict[str, Any]]) -> None:
        """Replaces parts of training images by noise, in place."""
        if "key" not in examples[0] or not self.erase.p:
            return
        for image, example in zip(pixels, examples):
            if "image" in example:
                with _seed_globals(np.random.default_rng((self.seed, *example["key"], ERASING_STREAM))):
                    self.erase(image)

    def _mix(
        self, pixels: torch.Tensor, labels: torch.Tensor, count: int, examples: list[dict[str, Any]]
    ) -> dict[str, torch.Tensor]:
        """Mixes the first `count` images in place; returns their mixed labels and weights."""
        epoch = examples[0]["key"][0]
        rng = np.random.default_rng((self.seed, epoch, *(example["key"][1] for example in examples[:count])))
        mixup, cutmix = self.arguments.mixup_alpha, self.arguments.cutmix_alpha
        mixed = rng.random() < self.arguments.mixing_probability
        use_cutmix = rng.random() < 0.5 if mixup and cutmix else cutmix > 0
        weight = float(rng.beta(cutmix, cutmix) if use_cutmix else rng.beta(mixup, mixup)) if mixed else 1.0
        partners = torch.from_numpy(rng.permutation(count))
        if mixed and use_cutmix:
            weight = _cutmix(pixels[:count], partners, weight, rng)
        elif mixed:
            pixels[:count] = weight * pixels[:count] + (1 - weight) * pixels[partners]
        mixed_labels = labels.clone()
        mixed_labels[:count] = labels[partners]
        return {"mixed_labels": mixed_labels, "mixing_weights": torch.full((len(labels),), weight)}


def _places(examples: list[dict[str, Any]], views: Sequence[int]) -> dict[str, torch.Tensor]:
    """`spacing` and `frame_times` of a batch of clips with (T,) or (clips, T) = `views` frames."""
    values = {"spacing": torch.ones(len(examples), *views[:-1], 2), "frame_times": torch.ones(len(examples), *views)}
    for row, example in enumerate(examples):
        if "image" in example:
            for name, places in values.items():
                places[row] = torch.tensor(example[name])
    return {name: places.flatten(0, 1) if len(views) > 1 else places for name, places in values.items()}


def resize(image: np.ndarray, size: ImageSize, resample: int) -> np.ndarray:
    """Resizes a uint8 image (…, height, width, C), unless it has that size already."""
    size = size(image.shape[-3:-1]) if callable(size) else size
    if image.shape[-3:-1] == tuple(size):
        return image
    if image.ndim > 3:
        return np.stack([resize(frame, size, resample) for frame in image])
    return _from_pil(_to_pil(image).resize((size[1], size[0]), resample))


def covering_size(size: tuple[int, int], part: tuple[int, int], ratio: float) -> tuple[int, int]:
    """
    The smallest size with the aspect ratio of `size` (height, width) that covers `ratio` times `part`. The longer side
    is rounded down, as in torchvision and transformers' processors.
    """
    least = [round(ratio * extent) for extent in part]
    scale = max(Fraction(target, extent) for target, extent in zip(least, size))
    return tuple(max(target, int(extent * scale)) for target, extent in zip(least, size))


def _extent(size: tuple[int, int], part: tuple[int, int], ratio: float) -> tuple[float, float]:
    """Height and width, in pixels of an image of `size`, of a `part` that is cut from the resized image."""
    return tuple(
        extent * shown / whole
        for extent, shown, whole in zip(size, part, covering_size(size, part, ratio), strict=True)
    )


def _part(image: np.ndarray, start: Sequence[int], size: tuple[int, int]) -> np.ndarray:
    rows, columns = (slice(first, first + extent) for first, extent in zip(start, size))
    return image[..., rows, columns, :]


def _to_pil(image: np.ndarray) -> Image.Image:
    return Image.fromarray(np.ascontiguousarray(image.squeeze(-1) if image.shape[-1] == 1 else image))


def _from_pil(image: Image.Image) -> np.ndarray:
    array = np.asarray(image)
    return array if array.ndim == 3 else array[..., None]


def _padded_crop(image: np.ndarray, padding: int, rng: np.random.Generator) -> np.ndarray:
    height, width, _ = image.shape
    top, left = rng.integers(2 * padding + 1, size=2).tolist()
    padded = np.zeros_like(image, shape=(height + 2 * padding, width + 2 * padding, image.shape[2]))
    padded[padding : padding + height, padding : padding + width] = image
    return padded[top : top + height, left : left + width]


def _random_part(
    size: tuple[int, int], scale: Sequence[float], rng: np.random.Generator, keeps_ratio: bool = False
) -> tuple[slice, slice]:
    """
    A part with a random share of the area. Its aspect ratio is ¾ … 4⁄3, as in Inception and torchvision, or that of the
    image.
    """
    height, width = size
    for _ in range(10):
        area = height * width * rng.uniform(*scale)
        ratio = width / height if keeps_ratio else np.exp(rng.uniform(np.log(3 / 4), np.log(4 / 3)))
        part_width, part_height = round(np.sqrt(area * ratio)), round(np.sqrt(area / ratio))
        if 0 < part_width <= width and 0 < part_height <= height:
            top, left = int(rng.integers(height - part_height + 1)), int(rng.integers(width - part_width + 1))
            return slice(top, top + part_height), slice(left, left + part_width)
    side_height, side_width = min(height, round(width * 4 / 3)), min(width, round(height * 4 / 3))
    top, left = (height - side_height) // 2, (width - side_width) // 2
    return slice(top, top + side_height), slice(left, left + side_width)


def _cutmix(pixels: torch.Tensor, partners: torch.Tensor, weight: float, rng: np.random.Generator) -> float:
    """Pastes a box with about `1 - weight` of the area from the partners; returns the exact share that remains."""
    height, width = pixels.shape[-2:]
    side = np.sqrt(1 - weight)
    row, column = int(rng.integers(height)), int(rng.integers(width))
    half_height, half_width = round(height * side) // 2, round(width * side) // 2
    rows = slice(max(row - half_height, 0), min(row + half_height, height))
    columns = slice(max(column - half_width, 0), min(column + half_width, width))
    pixels[..., rows, columns] = pixels[partners][..., rows, columns]
    return 1 - (rows.stop - rows.start) * (columns.stop - columns.start) / (height * width)
