"""The command `hf-liere predict`: a classifier's predictions for images, their probabilities, and its attention."""

import json
import os
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ...auto import load_checkpoint
from ...encoding.positions import needs_spacing
from ...errors import printable, require_libraries
from ...patching.vision_towers import Tower
from ...reading.clips import FrameReader
from ...reading.files import unread
from ...reading.volumes import ORIENTATION, is_scan
from ...storage.targets import new_file
from .attention import attention_maps, black_input, vision_tower
from .classes import Answer, class_names, class_probabilities, is_classifier, likeliest
from .inputs import InspectionError, Preparation, Sample, files_of, images_of_patches, read_file, require_readable


# Accepted suffixes of attention pictures.
PICTURES = (".png", ".svg", ".pdf")
# Pictures with more rows are too tall.
MOST_DRAWN = 32


@dataclass(frozen=True)
class Prediction:
    """
    Attributes:
        file: The given name.
        answers: The most probable classes, by decreasing probability.
    """

    file: str
    answers: list[Answer]

    def __str__(self) -> str:
        return f"{printable(self.file, keep='')}: {', '.join(map(str, self.answers))}"


@dataclass(frozen=True)
class Predictions:
    """
    Attributes:
        files: One entry per file, in the given order; those of a folder are sorted.
        remarks: One sentence for each assumption that was necessary, and for what was not read.
    """

    files: list[Prediction]
    remarks: list[str]

    def json(self) -> str:
        return json.dumps([asdict(prediction) for prediction in self.files], indent=2, ensure_ascii=False)


def predict(
    checkpoint: str | os.PathLike,
    files: Sequence[str],
    *,
    top_k: int = 3,
    attention: str | os.PathLike | None = None,
    revision: str | None = None,
    base: str | os.PathLike | None = None,
    trust_remote_code: bool = False,
) -> Predictions:
    """
    Classify images or videos, prepared by the checkpoint's processor.

    Args:
        checkpoint: Directory or repository on the Hub, of any vision transformer with a classifier that
            `from_pretrained` reads: ours, patched or neither, or an adapter of one.
        files: Images, videos, volumes, folders of frames or DICOM slices, or folders of these, such as class folders.
        top_k: Number of classes for each file, or all if there are fewer.
        attention: Picture to write, with the attention of every layer over the model's view of each file, see
            [`attention_maps`].
        revision, base, trust_remote_code: See [`load_checkpoint`].

    Raises:
        InspectionError: if the checkpoint contains no classifier, a file is unreadable, or an option is invalid.
        CheckpointError, HubError: as [`load_checkpoint`].
        FileExistsError: if `attention` exists.
    """
    require_libraries("Reading images", "inspect", "PIL", *([] if attention is None else ["matplotlib"]))
    if top_k < 1:
        raise InspectionError(f"--top_k {top_k}: accepted are numbers from 1.")
    for name in files:
        require_readable(Path(name))
    if attention is not None and Path(attention).suffix.lower() not in PICTURES:
        raise InspectionError(f"--attention {attention}: accepted are files in {', '.join(PICTURES)}.")
    with nullcontext() if attention is None else new_file(attention) as picture:
        model, processor = load_checkpoint(checkpoint, revision, trust_remote_code, base=base)
        names = _classes(model, checkpoint)
        tower = vision_tower(model)
        if attention is not None and tower.is_flexible:
            raise InspectionError(
                f"--attention: {type(model).__name__} takes images that each have their own grid (spatial_shapes), "
                "which this option does not support; leave it out."
            )
        preparation = Preparation.for_tower(tower, processor)
        num_frames, is_physical = preparation.num_frames, needs_spacing(tower.module.config)
        reader = FrameReader(preparation.num_channels, getattr(processor, "intensity_range", None))
        if attention is not None and is_physical:
            raise InspectionError("--attention does not know physical coordinates; leave it out for this model.")
        is_video, folders = num_frames is not None, [Path(file) for file in files if Path(file).is_dir()]
        paths = [path for file in files for path in files_of(Path(file), is_video)]
        if attention is not None and len(paths) > MOST_DRAWN:
            raise InspectionError(f"--attention draws at most {MOST_DRAWN} files; {len(paths)} were given.")
        predicted, rows, left = [], [], [sentence for folder in folders for sentence in unread(folder, paths)]
        for file in paths:
            sample = read_file(file, is_video, reader, num_frames, is_physical)
            left += sample.remarks
            inputs = prepare(sample, preparation, tower, processor)
            answers = likeliest(class_probabilities(model, **inputs)[0], names, top_k)
            predicted.append(Prediction(str(file), answers))
            if picture is not None:
                from .plots import attention_rows, save_attention

                title, pixels = f"{file.name}\n{answers[0]}", inputs["pixel_values"]
                # The frames as the model saw them: after resizing and cropping, before normalisation.
                rows += attention_rows(title, attention_maps(model, pixels).maps[:, 0], preparation.frames(pixels)[0])
        if picture is not None:
            save_attention(rows, picture)
    unknown = [str(file) for file in paths if is_scan(file)] if not hasattr(processor, "volume_orientation") else []
    return Predictions(predicted, _remarks(names, processor, unknown) + left)


def _classes(model: nn.Module, checkpoint: str | os.PathLike) -> list[str]:
    if not is_classifier(model):
        raise InspectionError(
            f"{checkpoint} contains {type(model).__name__}, which has no classifier; accepted are models for image or "
            "video classification, such as LieREViTForImageClassification and ViTForImageClassification."
        )
    names = class_names(model)
    if not names:
        raise InspectionError(
            f"{checkpoint} has a classifier without classes (num_labels=0); accepted is at least one class."
        )
    return names


def _remarks(names: list[str], processor: object | None, unknown: list[str]) -> list[str]:
    remarks = []
    if names == [f"LABEL_{index}" for index in range(len(names))]:
        remarks.append("The checkpoint does not name its classes (id2label): labels are numbers.")
    if processor is None:
        scaled = "inputs are resized to the trained size and pixels scaled to −1 … 1, as for ViT."
        remarks.append(f"The checkpoint has no readable processor: {scaled}")
    if unknown:
        remarks.append(
            f"The checkpoint does not say how its volumes were turned; {', '.join(unknown)} is read in {ORIENTATION}+."
        )
    return remarks


def prepare(sample: Sample, preparation: Preparation, tower: Tower, processor: Any) -> dict[str, torch.Tensor]:
    """One image or clip as the processor prepares it for the model, a batch of one."""
    if processor is None:
        pixels = preparation.pixel_values([preparation.resize(sample, tuple(black_input(tower).shape[-2:]))])
        return {"pixel_values": pixels} | _place(sample, processor, pixels)
    pictures, options = preparation.pictures(sample), {}
    if preparation.num_frames is not None and preparation.num_channels == 1:
        # Processors of videos find channels of tensors alone, and would make three of one.
        pictures, options = torch.from_numpy(np.stack(pictures))[:, None], {"do_convert_rgb": False}
    try:
        tensors = dict(processor(pictures, return_tensors="pt", **options))
    except Exception as error:
        # Processors raise errors of many types for pictures that they do not accept.
        raise InspectionError(f"{sample.name} cannot be prepared by {type(processor).__name__}: {error}") from error
    if "spatial_shapes" in tensors and not tower.is_flexible:
        extent = tower.patch_embedding.kernel_size
        tensors = {"pixel_values": images_of_patches(tensors["pixel_values"], tensors["spatial_shapes"], extent)}
    return tensors | _place(sample, processor, tensors["pixel_values"])


def _place(sample: Sample, processor: Any, pixels: torch.Tensor) -> dict[str, torch.Tensor]:
    """Distances of rows, columns (after resizing and cropping) and frames, for physical coordinates."""
    if sample.places is None:
        return {}
    shown, (extents, times) = sample.frames.shape[1:3], sample.places
    if getattr(processor, "do_center_crop", False) and "shortest_edge" in processor.size:
        shown = [side * min(shown) / processor.size["shortest_edge"] for side in pixels.shape[-2:]]
    spacing = [extent * side / size for extent, side, size in zip(extents, shown, pixels.shape[-2:])]
    return {"spacing": torch.tensor([spacing]), "frame_times": torch.tensor(times)[None]}
