"""The command `hf-liere inspect`: the analysis of a checkpoint as json, arrays and one HTML page."""

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from ..auto import load_checkpoint
from ..errors import require_libraries
from ..models.vision_towers import Tower
from ..storage.targets import new_directory
from .analysis import analyse, black_input, vision_tower
from .attention import size_options
from .inputs import InspectionError, Preparation, Sample, read_samples


REPORT_NAME = "report.html"
# Multiples of the trained height and width: encodings differ most with more patches than in training.
DEFAULT_SCALES = (1.0, 1.5, 2.0)


def inspect_checkpoint(
    checkpoint: str | os.PathLike,
    output: str | os.PathLike,
    images: Sequence[str] = (),
    dataset: str | None = None,
    *,
    split: str | None = None,
    max_samples: int = 16,
    image_sizes: Sequence[int] | None = None,
    batch_size: int = 8,
    revision: str | None = None,
    trust_remote_code: bool = False,
    progress: bool = False,
) -> Path:
    """
    Write `report.html`, `analysis.json` and `analysis.npz` to a directory, which appears only when it is complete.

    Args:
        checkpoint: Directory or repository on the Hub, of any vision transformer that `from_pretrained` reads.
        output: Directory, which must not exist or be empty.
        images: Images, videos or `.npy` clips.
        dataset, split, max_samples: Further inputs, see [`read_samples`].
        image_sizes: Heights and widths of square inputs; `None` means the trained size, and 1.5 and 2 times that size
            if the model accepts it.
        batch_size: Number of inputs in a batch.
        revision, trust_remote_code: See [`load_checkpoint`].
        progress: Whether to show progress bars.

    Returns:
        The path of the report.

    Raises:
        InspectionError: if the checkpoint is none of these, images cannot be read or the model refuses a size.
        InputError: if nothing can be written beside `output`.
        FileExistsError: if `output` is not empty.
    """
    require_libraries("A report", "inspect", "matplotlib", "PIL")
    from .report import render

    with new_directory(output) as partial:
        model, processor = load_checkpoint(checkpoint, revision, trust_remote_code)
        tower = vision_tower(model)
        samples = read_samples(images, dataset, split, max_samples, len(tower.train_grid) == 3)
        if not samples and image_sizes is not None:
            raise InspectionError(
                f"--image_sizes {image_sizes} are sizes of images; give some with --image or --dataset."
            )
        if tower.is_flexible:
            samples = []
        shown, inputs, remarks = _prepare(tower, processor, samples, image_sizes)
        analysis = analyse(model, inputs, batch_size, progress)
        analysis.remarks += remarks
        page = render(analysis, [np.stack(clips) for clips in shown], _name(checkpoint), [s.name for s in samples])
        try:
            analysis.save(partial)
            (partial / REPORT_NAME).write_text(page, encoding="utf-8")
        except OSError as error:
            raise InspectionError(f"{output} cannot be written: {error.strerror or error}.") from error
    return Path(output) / REPORT_NAME


def _prepare(tower: Tower, processor, samples: Sequence[Sample], image_sizes: Sequence[int] | None):
    """For each size the samples as they are shown and as `pixel_values`, and remarks on what is left out."""
    if not samples:
        return [], [], []
    blank, remarks, shown = black_input(tower), [], []
    preparation = Preparation.of(processor, blank.shape[-3], blank.shape[1] if blank.ndim == 5 else None)
    if processor is None:
        remarks.append("The checkpoint has no processor that can be read: pixels are scaled to −1 … 1, as for ViT.")
    sizes, refused = _sizes(tower, blank, image_sizes)
    for size in sizes:
        shown.append([preparation.resize(sample, size) for sample in samples])
    return shown, [preparation.pixel_values(clips) for clips in shown], remarks + refused


def _sizes(
    tower: Tower, blank: torch.Tensor, image_sizes: Sequence[int] | None
) -> tuple[list[tuple[int, int]], list[str]]:
    """
    (height, width) of inputs that the model accepts, and remarks on default sizes that it refuses.

    Raises:
        InspectionError: if it refuses one of `image_sizes`.
    """
    patch, trained = tower.patch_embedding.kernel_size[-2:], tuple(blank.shape[-2:])
    if image_sizes is not None:
        sizes = [(size, size) for size in image_sizes]
    else:
        sizes = [
            tuple(round(scale * side / extent) * extent for side, extent in zip(trained, patch))
            for scale in DEFAULT_SCALES
        ]
    accepted, remarks = [], []
    for size in dict.fromkeys(sizes):
        try:
            if any(side < extent or side % extent for side, extent in zip(size, patch)):
                raise ValueError(f"it is not divisible into patches of {patch}")
            pixels = blank.new_zeros(*blank.shape[:-2], *size)
            with torch.no_grad():
                tower.module(pixels, **size_options(tower, pixels))
            accepted.append(size)
        except (RuntimeError, ValueError) as error:
            reason = str(error).splitlines()[0]
            if image_sizes is not None:
                raise InspectionError(f"--image_sizes {size[0]}: {reason}") from error
            remarks.append(f"Inputs of {size[0]} × {size[1]} px are not looked at: the model refuses them ({reason})")
    return accepted, remarks


def _name(checkpoint: str | os.PathLike) -> str:
    """The name of a repository, or the last part of a directory's path."""
    return Path(checkpoint).resolve().name if Path(checkpoint).is_dir() else str(checkpoint)
