"""Checkpoints of the page: finding them, loading them on demand, and predicting the class of a picture."""

import logging
import math
import re
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from PIL import Image
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModelForImageClassification,
    PreTrainedConfig,
    ViTImageProcessor,
)

from hf_liere.auto import models_of
from hf_liere.errors import InputError
from hf_liere.reading.files import visible
from hf_liere.storage.client import HubError
from hf_liere.storage.loading import require_loaded_keys
from hf_liere.storage.saved_model import first_line
from hf_liere.tools.hub.pulling import pull
from hf_liere.tools.inspection.attention import AttentionMaps, attention_maps, overlay
from hf_liere.transformer.configuration_liere import pair
from training.data.arrows import CELL, LABELS, SMALLEST_GRID


logger = logging.getLogger(__name__)

ROOT = Path(__file__).resolve().parents[3]
DEMO_CHECKPOINTS = ROOT / "outputs" / "arrows"
# Checkpoints of the repository.
STORED_CHECKPOINTS = ROOT / "training" / "checkpoints"
MIN_PATCHES_PER_SIDE = 2
# Attention of 12 heads and 1,024 patches takes 50 MB per layer.
MAX_PATCHES_PER_SIDE = 32
MODELS_IN_MEMORY = 4
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class Checkpoint:
    """
    An image classifier, described by its configuration.

    Args:
        name: A unique name among the checkpoints of an app.
        repo_id: Its repository on the Hub, if any.
        image_size: The longer side of its training images.
    """

    name: str
    folder: Path
    repo_id: str | None
    encoding: str
    image_size: int
    patch_shape: tuple[int, int]
    num_channels: int
    class_names: tuple[str, ...]

    @property
    def solves_puzzles(self) -> bool:
        return sorted(self.class_names) == sorted(LABELS)


@dataclass(frozen=True)
class Answer:
    """Probabilities of all classes, the most probable first, and the attention."""

    probabilities: dict[str, float]
    attention: AttentionMaps


def find_checkpoints(sources: Sequence[str] | None = None) -> list[Checkpoint]:
    """
    The checkpoints in folders, in the folders of a folder, and on the Hub, from where they are downloaded.

    Args:
        sources: `None` for those of the demo, if it was run, and of the repository.

    Raises:
        InputError: if a source contains no image classifier.
        HubError: if a download from the Hub fails.
    """
    if sources is None:
        demo = [DEMO_CHECKPOINTS] if any(DEMO_CHECKPOINTS.glob("*/config.json")) else []
        sources = [str(folder) for folder in (*demo, STORED_CHECKPOINTS)]
    folders = list(dict.fromkeys(found for source in sources for found in _folders(source)))
    names = _shorten_paths([repo_id or folder.as_posix() for folder, repo_id in folders])
    return [_describe(repo_id or name, folder, repo_id) for name, (folder, repo_id) in zip(names, folders)]


def _folders(source: str) -> list[tuple[Path, str | None]]:
    folder = Path(source)
    if (folder / "config.json").is_file():
        return [(folder.resolve(), None)]
    if folder.is_dir():
        inner = [path for path in visible(folder.resolve()) if (path / "config.json").is_file()]
        usable = []
        for path in inner:
            try:
                _describe(path.name, path, None)
                usable.append((path, None))
            except InputError as error:
                logger.warning(f"Left out: {error}")
        if not usable:
            raise InputError(
                f"The folder {source} contains no checkpoint of an image classifier, at most one level below."
            )
        return usable
    if not HUB_NAME.fullmatch(source):
        raise InputError(f"There is no folder {source!r}; accepted: folders, and names on the Hub such as me/model.")
    try:
        return [(pull(source).folder, source)]
    except HubError as error:
        raise HubError(f"There is no folder {source}, and as a name on the Hub: {error}") from None


def _shorten_paths(paths: list[str]) -> list[str]:
    """The shortest distinct suffixes of paths."""
    parts = [path.split("/") for path in paths]
    names = []
    for own in parts:
        length = 1
        while sum(other[-length:] == own[-length:] for other in parts) > 1:
            length += 1
        names.append("/".join(own[-length:]))
    return names


def _describe(name: str, folder: Path, repo_id: str | None) -> Checkpoint:
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:
        raise InputError(f"{name} has no configuration that can be read: {first_line(error)}") from error
    model_class = models_of(type(config)).get("AutoModelForImageClassification")
    if model_class is None or model_class.__name__ not in (config.architectures or []):
        held = ", ".join(config.architectures or []) or config.model_type
        raise InputError(
            f"{name} is {held}; accepted: LieREViTForImageClassification, and patched image classifiers such as "
            "RotaryViTForImageClassification."
        )
    # Dual encoders have the sizes in their vision configuration.
    vision = getattr(config, "vision_config", config)
    if vision.num_channels not in (1, 3):
        raise InputError(f"{name} takes images of {vision.num_channels} channels; accepted: 1 and 3.")
    return Checkpoint(
        name=name,
        folder=folder,
        repo_id=repo_id,
        encoding=_encoding(config),
        image_size=max(pair("image_size", vision.image_size)),
        patch_shape=pair("patch_size", vision.patch_size),
        num_channels=vision.num_channels,
        class_names=_class_names(config),
    )


def _class_names(config: PreTrainedConfig) -> tuple[str, ...]:
    """Names of the classes, with their numbers if several share a name, as two of ImageNet's do."""
    names = [str(config.id2label[number]) for number in range(config.num_labels)]
    counts = Counter(names)
    return tuple(f"{name} ({number})" if counts[name] > 1 else name for number, name in enumerate(names))


def _encoding(config: PreTrainedConfig) -> str:
    patched = getattr(config, "rotary_patch", None)
    name = patched["position_encoding"] if patched else config.position_encoding
    block_size = patched["block_size"] if patched else config.block_size
    return name if block_size in (None, 2) else f"{name}, block_size {block_size}"


def image_sizes(checkpoints: Sequence[Checkpoint], puzzle: bool) -> range:
    """
    Sides of square images, in pixels, that all checkpoints take within the limits on patches.

    Args:
        puzzle: Whether arrows puzzles are drawn at these sizes.

    Raises:
        InputError: if no size fits all checkpoints.
    """
    extents = [extent for checkpoint in checkpoints for extent in checkpoint.patch_shape]
    step = math.lcm(*extents, CELL if puzzle else 1)
    smallest = max(MIN_PATCHES_PER_SIDE * max(extents), SMALLEST_GRID * CELL if puzzle else 1)
    sizes = range(-(-smallest // step) * step, MAX_PATCHES_PER_SIDE * min(extents) + 1, step)
    if not sizes:
        raise InputError(
            f"Patches of {', '.join(map(str, sorted(set(extents))))} px{f' and cells of {CELL} px' if puzzle else ''} "
            f"have no common image size of {MIN_PATCHES_PER_SIDE} … {MAX_PATCHES_PER_SIDE} patches per side; choose "
            f"other models{' or upload an image' if puzzle else ''}."
        )
    return sizes


def nearest_size(sizes: range, size: float) -> int:
    return min(sizes, key=lambda accepted: abs(accepted - size))


class Classifier:
    """
    A checkpoint in memory.

    Raises:
        InputError: if its weights cannot be read or do not fit its configuration.
    """

    def __init__(self, checkpoint: Checkpoint):
        self.checkpoint = checkpoint
        local = {"local_files_only": True, "trust_remote_code": False}
        try:
            self.model, loading = AutoModelForImageClassification.from_pretrained(
                checkpoint.folder, dtype=torch.float32, use_safetensors=True, output_loading_info=True, **local
            )
        except Exception as error:
            raise InputError(f"The weights of {checkpoint.name} cannot be loaded: {first_line(error)}") from error
        require_loaded_keys(loading, checkpoint.name)
        try:
            saved = AutoImageProcessor.from_pretrained(checkpoint.folder, **local)
            self.processor = saved
            if hasattr(saved, "max_num_patches"):
                # Pictures are squeezed here, even if the model's processor keeps their aspect ratio.
                constants = {"image_mean": saved.image_mean, "image_std": saved.image_std, "resample": saved.resample}
                self.processor = ViTImageProcessor(**constants)
        except OSError:
            logger.warning(f"{checkpoint.name} has no processor; mean and deviation are 0.5.")
            half = [0.5] * checkpoint.num_channels
            self.processor = ViTImageProcessor(image_mean=half, image_std=half)
        self.model.eval()
        # Computing attention maps changes the model's attention function temporarily.
        self._lock = threading.Lock()

    def pixel_values(self, picture: Image.Image, size: int) -> torch.Tensor:
        """
        (1, C, size, size): the whole picture, squeezed into a square by the checkpoint's processor.

        Raises:
            InputError: if the size is not a multiple of the patches, or has too many.
        """
        sizes = image_sizes([self.checkpoint], puzzle=False)
        if size not in sizes:
            raise InputError(
                f"{self.checkpoint.name} takes no images of {size} px: accepted are multiples of {sizes.step} px from "
                f"{sizes[0]} to {sizes[-1]} px."
            )
        crop = {"do_center_crop": False} if hasattr(self.processor, "do_center_crop") else {}
        picture = picture.convert("L" if self.checkpoint.num_channels == 1 else "RGB")
        square = {"height": size, "width": size}
        return self.processor(picture, do_resize=True, size=square, return_tensors="pt", **crop).pixel_values

    def answer(self, picture: Image.Image, size: int) -> Answer:
        """Raises [`InputError`] if [`pixel_values`] or the model refuses the size."""
        pixel_values = self.pixel_values(picture, size)
        try:
            with self._lock, torch.no_grad():
                logits = self.model(pixel_values).logits[0]
                attention = attention_maps(self.model, pixel_values)
        except ValueError as error:
            raise InputError(f"{self.checkpoint.name} refuses {size} px: {error}") from error
        if not logits.isfinite().all():
            raise InputError(f"The outputs of {self.checkpoint.name} are not finite; its weights are damaged.")
        order = logits.argsort(descending=True).tolist()
        probabilities = logits.softmax(dim=-1).tolist()
        names = self.checkpoint.class_names
        return Answer({names[number]: probabilities[number] for number in order}, attention)


class Classifiers:
    """Checkpoints in memory, loaded on first use. The least recently used ones are dropped."""

    def __init__(self, kept: int = MODELS_IN_MEMORY):
        self._load = lru_cache(maxsize=kept)(Classifier)
        self._lock = threading.Lock()

    def __getitem__(self, checkpoint: Checkpoint) -> Classifier:
        # Without the lock, two requests at once would load it twice.
        with self._lock:
            return self._load(checkpoint)


def model_view(picture: Image.Image, size: int) -> Image.Image:
    """The picture at the resolution of the model's input."""
    return picture if picture.size == (size, size) else picture.resize((size, size), Image.Resampling.BICUBIC)


def attention_pictures(picture: Image.Image, size: int, attention: AttentionMaps) -> list[Image.Image]:
    """The attention of every layer over the model's input, each scaled separately (LieRE App. G)."""
    return [Image.fromarray(overlay(model_view(picture, size), layer[0])) for layer in attention.maps]
