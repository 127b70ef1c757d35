"""The command `hf-liere inspect`: the analysis of a checkpoint as json, arrays and an HTML page."""

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import nn

from ...auto import load_checkpoint
from ...errors import require_libraries
from ...patching.vision_towers import Tower
from ...reading.clips import FrameReader
from ...reading.files import unread
from ...storage.targets import new_directory
from .analysis import InspectedModel, analyse, compare, find_transformer
from .attention import black_input, size_options
from .inputs import InspectionError, Preparation, Sample, files_of, read_samples


REPORT_NAME = "report.html"
# Multiples of the trained height and width; encodings differ most with more patches than in training.
DEFAULT_SCALES = (1.0, 1.5, 2.0)


def inspect_checkpoint(
    checkpoint: str | os.PathLike,
    output: str | os.PathLike,
    images: Sequence[str] = (),
    dataset: str | None = None,
    *,
    revision: str | None = None,
    base: str | os.PathLike | None = None,
    compare_with: str | os.PathLike | None = None,
    compare_revision: str | None = None,
    split: str | None = None,
    max_samples: int = 16,
    image_sizes: Sequence[int] | None = None,
    batch_size: int = 8,
    trust_remote_code: bool = False,
) -> Path:
    """
    Write `report.html`, `analysis.json` and `analysis.npz` to a directory, which appears only when it is complete;
    returns the path of the report. With a second checkpoint, the page shows both side by side, analysed on the same
    images, and the directory also contains `compared.json`, `compared.npz`, `comparison.json` and `comparison.npz`.

    The arguments are those of `hf-liere inspect`. Raises [`InspectionError`] if a checkpoint has no vision transformer,
    images cannot be read, the model refuses a size, or one model takes images and the other videos.
    """
    if compare_with is None and compare_revision is not None:
        raise InspectionError(f"--compare_revision {compare_revision} needs --compare.")
    checkpoints = [(checkpoint, revision)] + ([] if compare_with is None else [(compare_with, compare_revision)])
    require_libraries("A report", "inspect", "matplotlib", "PIL")
    from .report import render_report

    with new_directory(output) as partial:
        loaded = [load_checkpoint(*place, trust_remote_code, base=base) for place in checkpoints]
        is_video = _input_kind([model for model, _ in loaded]) == "videos"
        reader = FrameReader(3, getattr(loaded[0][1], "intensity_range", None))
        samples = read_samples(images, dataset, split, max_samples, is_video, reader)
        if not samples and image_sizes is not None:
            raise InspectionError(f"--image_sizes {image_sizes} needs images; give some with --image or --dataset.")
        names = _names(checkpoints)
        inspected = [_inspect(name, *found, samples, image_sizes, batch_size) for name, found in zip(names, loaded)]
        first, *others = inspected
        if dataset is not None and Path(dataset).is_dir():
            first.analysis.remarks += unread(Path(dataset), files_of(Path(dataset), is_video))
        comparison = compare(first.analysis, others[0].analysis, (names[0], names[1])) if others else None
        page = render_report(inspected, comparison)
        try:
            first.analysis.save(partial)
            if comparison is not None:
                others[0].analysis.save(partial, "compared")
                comparison.save(partial)
            (partial / REPORT_NAME).write_text(page, encoding="utf-8")
        except OSError as error:
            raise InspectionError(f"{output} cannot be written: {error.strerror or error}.") from error
    return Path(output) / REPORT_NAME


def _input_kind(models: Sequence[nn.Module]) -> str:
    towers = [find_transformer(model)[1] for model in models]
    kinds = ["tokens" if each is None else "videos" if len(each.train_grid) == 3 else "images" for each in towers]
    if len(set(kinds)) > 1:
        described = " and ".join(f"{type(model).__name__} takes {kind}" for model, kind in zip(models, kinds))
        raise InspectionError(f"--compare: {described}; accepted are two models of one kind.")
    return kinds[0]


def _inspect(
    name: str,
    model: nn.Module,
    processor: object | None,
    samples: Sequence[Sample],
    image_sizes: Sequence[int] | None,
    batch_size: int,
) -> InspectedModel:
    _, tower = find_transformer(model)
    if tower is None and samples:
        raise InspectionError(f"{type(model).__name__} takes tokens with positions: leave out --image and --dataset.")
    shown, inputs, remarks = [], [], [remark for sample in samples for remark in sample.remarks]
    if tower is not None and samples and not tower.is_flexible:
        preparation = Preparation.for_tower(tower, processor)
        if processor is None:
            remarks.append("The checkpoint has no readable processor: pixels are scaled to −1 … 1, as for ViT.")
        sizes, refused = _sizes(tower, image_sizes)
        shown = [np.stack([preparation.resize(sample, size) for sample in samples]) for size in sizes]
        inputs = [preparation.pixel_values(clips) for clips in shown]
        remarks += refused
    analysis = analyse(model, inputs, batch_size, progress=True)
    analysis.remarks += remarks
    return InspectedModel(name, analysis, shown, [sample.name for sample in samples])


def _sizes(tower: Tower, image_sizes: Sequence[int] | None) -> tuple[list[tuple[int, int]], list[str]]:
    """
    The (height, width) of inputs, and remarks on default sizes that the model refuses. Raises [`InspectionError`] if it
    refuses one of `image_sizes`.
    """
    blank, patch = black_input(tower), tower.patch_embedding.kernel_size[-2:]
    sides = list(zip(blank.shape[-2:], patch))
    sizes = [tuple(round(scale * side / extent) * extent for side, extent in sides) for scale in DEFAULT_SCALES]
    if image_sizes is not None:
        sizes = [(size, size) for size in image_sizes]
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
            remarks.append(f"Inputs of {size[0]} × {size[1]} px are left out: the model refuses them ({reason})")
    return accepted, remarks


def _names(wanted: Sequence[tuple[str | os.PathLike, str | None]]) -> list[str]:
    """The name of a repository, or the last part of a directory's path; longer names if these are the same."""
    names = [Path(place).resolve().name if Path(place).is_dir() else str(place) for place, _ in wanted]
    if len(set(names)) < len(names):
        names = [f"{place} at {revision}" if revision else str(place) for place, revision in wanted]
    return names
