"""Detection data in COCO's format, and a generated set of coloured shapes."""

import contextlib
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from PIL.ExifTags import Base
from pycocotools.coco import COCO
from tqdm.auto import tqdm
from transformers.utils import logging

from hf_liere.errors import InputError
from hf_liere.reading.files import UnreadableError, naming
from hf_liere.reading.pictures import develop, pixels
from training.common.arguments import SampleArguments, flag
from training.common.folders import require_files
from training.common.records import write_text
from training.data.augmentation import resize
from training.data.moving_shapes import SHAPES, SPLITS, shape_mask
from training.data.sources import PARTS, DataRequest, SourceDataset, leave_out


logger = logging.get_logger(__name__)
DEFAULT_SIZES = {"train": 1000, "validation": 200}
CATEGORIES = ("disc", "square", "diamond", "cross")
MOST_SHAPES = 4
UNREADABLE = -1


@dataclass
class DetectionDataArguments(SampleArguments):
    train_files: list[str] | None = flag(None, "COCO json to train on; generated shapes where no json is given.")
    validation_files: list[str] | None = flag(None, "COCO json to evaluate.")
    image_folder: str | None = flag(
        None, "Folder of the pictures; by default the json's, one of the same name beside it, or as in COCO."
    )
    shapes_folder: str = flag("outputs/shapes", "Where the shapes are written.")
    flip_probability: float = flag(0.5, "Probability of a horizontal flip.")

    def __post_init__(self):
        super().__post_init__()
        if not 0 <= self.flip_probability <= 1:
            raise InputError(f"--flip_probability {self.flip_probability} is not a probability; accepted: 0 … 1.")


@dataclass
class Detections:
    """
    Pictures with boxes from one json file.

    Args:
        coco: content of the file, for the evaluation.
        image_ids: COCO's image id of every index.
        category_ids: COCO's category id of every label of the model.
    """

    coco: COCO
    image_ids: list[int]
    category_ids: list[int]
    folder: Path

    def __len__(self) -> int:
        return len(self.image_ids)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Picture (height, width, 3), corners of boxes (objects, 4) relative to its width and height, and labels.

        Raises:
            UnreadableError: naming a picture that cannot be read.
        """
        image_id = self.image_ids[index]
        entry = self.coco.imgs[image_id]
        name, size = entry["file_name"], (entry.get("width"), entry.get("height"))
        with naming(f"The picture {name}", " has ", " cannot be read"), Image.open(self.folder / name) as image:
            # Boxes may be those of a picture that lies on its side as it is stored: its size in the json tells.
            is_stored = image.size == size != size[::-1] and image.getexif().get(Base.Orientation, 1) > 4
            picture = pixels(develop(image, turn=not is_stored))
        objects = [entry for entry in self.coco.imgToAnns[image_id] if is_trained(entry)]
        boxes = np.array([entry["bbox"] for entry in objects], np.float32).reshape(-1, 4)
        boxes[:, 2:] += boxes[:, :2]
        boxes = (boxes / np.tile(picture.shape[1::-1], 2)).clip(0, 1).astype(np.float32)
        labels = np.array([self.category_ids.index(entry["category_id"]) for entry in objects], np.int64)
        return picture, boxes, labels


def is_trained(entry: dict[str, Any]) -> bool:
    """Whether an annotation is a single object with an area. The evaluation ignores crowds."""
    return not entry.get("iscrowd") and entry["bbox"][2] > 0 and entry["bbox"][3] > 0


@dataclass
class DetectionExamples(SourceDataset):
    """
    Examples by key `(epoch, index)` in training and by index in evaluation: `image`, `boxes` as centre and size
    relative to the picture, `class_labels` and `index`. For a picture that cannot be read, the next one stands in
    training; evaluations get a black one whose index is `UNREADABLE`.
    """

    image_size: tuple[int, int]
    resample: int
    flip_probability: float
    seed: int

    def __getitem__(self, key: int | tuple[int, int]) -> dict[str, Any]:
        epoch, index = key if isinstance(key, tuple) else (None, key)
        # Keys beyond the last image pad the last batch of several processes.
        for place in range(index, index + (1 if epoch is None else len(self))):
            try:
                picture, boxes, labels = self.source[place % len(self.source)]
                break
            except UnreadableError as error:
                leave_out(self, error)
        else:
            if epoch is not None:
                raise InputError(f"None of the {len(self)} pictures to train on can be read.")
            picture, boxes, labels = np.zeros((1, 1, 3), np.uint8), np.empty((0, 4), np.float32), np.empty(0, np.int64)
            index = UNREADABLE
        image = resize(picture, self.image_size, self.resample)
        if epoch is not None and np.random.default_rng((self.seed, epoch, index % len(self))).random() < (
            self.flip_probability
        ):
            image, boxes = image[:, ::-1], np.stack([1 - boxes[:, 2], boxes[:, 1], 1 - boxes[:, 0], boxes[:, 3]], 1)
        centers = np.concatenate([(boxes[:, :2] + boxes[:, 2:]) / 2, boxes[:, 2:] - boxes[:, :2]], 1)
        return {"image": image, "boxes": centers, "class_labels": labels, "index": index}


class DetectionCollator:
    """Stacks and normalises: `pixel_values` (B, 3, height, width), `pixel_mask` (all ones), `labels` per image."""

    def __init__(self, image_mean: Sequence[float], image_std: Sequence[float]):
        self.mean = torch.tensor(image_mean).view(-1, 1, 1)
        self.std = torch.tensor(image_std).view(-1, 1, 1)

    def __call__(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        pixels = torch.from_numpy(np.stack([example["image"] for example in examples])).permute(0, 3, 1, 2) / 255
        pixels = (pixels - self.mean) / self.std
        labels = [
            {
                "class_labels": torch.from_numpy(example["class_labels"]),
                "boxes": torch.from_numpy(example["boxes"]),
                "index": torch.tensor([example["index"]]),
            }
            for example in examples
        ]
        mask = torch.ones(len(examples), *pixels.shape[-2:], dtype=torch.long)
        return {"pixel_values": pixels, "pixel_mask": mask, "labels": labels}


def load_detections(
    arguments: DetectionDataArguments, request: DataRequest
) -> tuple[Detections | None, Detections | None, list[str]]:
    """
    Training pictures, evaluation pictures, and the names of the categories.

    Raises:
        InputError: naming the wrong file, annotation or category and what is accepted.
    """
    files = {"training": arguments.train_files, "evaluation": arguments.validation_files}
    if not any(files.values()):
        files = _shapes(arguments, request)
    found: dict[str, Detections] = {}
    names: list[str] = []
    for part in request.parts:
        if not files[part] or len(files[part]) != 1:
            flag = "--train_files" if part == "training" else "--validation_files"
            raise InputError(f"The {part} requires one COCO json, not {files[part]}; accepted: {flag} file.json.")
        coco, folder = read_coco(Path(files[part][0]), arguments.image_folder)
        categories = {entry["name"]: entry["id"] for entry in coco.dataset["categories"]}
        names = names or sorted(categories, key=categories.get)
        if set(categories) != set(names):
            raise InputError(f"The {part} data have the categories {sorted(categories)}, the training {sorted(names)}.")
        image_ids = sorted(coco.imgs)[: arguments.limits[part]]
        found[part] = Detections(coco, image_ids, [categories[name] for name in names], folder)
    return found.get("training"), found.get("evaluation"), names


def read_coco(file: Path, image_folder: str | None) -> tuple[COCO, Path]:
    """
    Reads and checks a COCO json; returns it and the folder of its pictures.

    Raises:
        InputError: naming what is missing or wrong.
    """
    require_files([str(file)])
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            coco = COCO(str(file))
        content = coco.dataset
        for key in ("images", "annotations", "categories"):
            if not content.get(key):
                raise InputError(f"{file.name} has no {key!r}; accepted: COCO's format.")
        known = {entry["id"] for entry in content["categories"]}
        for entry in content["annotations"]:
            if entry["category_id"] not in known:
                raise InputError(
                    f"{file.name}: annotation {entry['id']} has the unknown category {entry['category_id']}."
                )
            if entry["image_id"] not in coco.imgs:
                raise InputError(f"{file.name}: annotation {entry['id']} has the unknown image {entry['image_id']}.")
            if len(entry["bbox"]) != 4 or not np.isfinite(entry["bbox"]).all():
                raise InputError(
                    f"{file.name}: annotation {entry['id']} has the box {entry['bbox']}; accepted: left, top, width, "
                    "height."
                )
            # COCO's evaluation requires both, but many converters omit them.
            entry.setdefault("iscrowd", 0)
            entry.setdefault("area", entry["bbox"][2] * entry["bbox"][3])
    except (json.JSONDecodeError, KeyError, TypeError, AssertionError) as error:
        raise InputError(f"{file.name} is not in COCO's format ({type(error).__name__}: {error}).") from error
    empty = sum(not entry["iscrowd"] and not is_trained(entry) for entry in content["annotations"])
    if empty:
        logger.warning(f"{file.name}: ignored {empty} boxes without an area.")
    return coco, find_pictures(file, content["images"][0]["file_name"], image_folder)


def find_pictures(file: Path, name: str, image_folder: str | None) -> Path:
    """The folder of the picture `name` of a COCO json."""
    # COCO has annotations/instances_train2017.json and the pictures in train2017.
    of_coco = file.absolute().parent.parent / file.stem.removeprefix("instances_")
    folders = [Path(image_folder)] if image_folder else [file.parent, file.with_suffix(""), of_coco]
    for folder in folders:
        if (folder / name).is_file():
            return folder
    raise InputError(
        f"{file.name}: there is no picture {name!r} in {' or '.join(map(str, folders))}; accepted: --image_folder."
    )


def scene(split: str, index: int, image_size: tuple[int, int]) -> tuple[np.ndarray, list[tuple[int, list]]]:
    """A picture (height, width, 3) of 1 … 4 shapes, and for each its category and box (left, top, width, height)."""
    rng = np.random.default_rng((SPLITS.index(split), index))
    height, width = image_size
    picture = rng.integers(0, 60, (height, width, 1)) + rng.integers(0, 60, 3)
    objects = []
    for _ in range(rng.integers(1, MOST_SHAPES + 1)):
        category, radius = int(rng.integers(len(CATEGORIES))), rng.uniform(0.08, 0.2) * min(image_size)
        center = rng.uniform(radius, np.array(image_size) - radius)
        mask = shape_mask(SHAPES[category], center, radius, image_size)
        picture[mask] = rng.integers(120, 256, 3)
        rows, columns = np.flatnonzero(mask.any(axis=1)), np.flatnonzero(mask.any(axis=0))
        box = [columns[0], rows[0], columns[-1] + 1 - columns[0], rows[-1] + 1 - rows[0]]
        objects.append((category, [int(value) for value in box]))
    return picture.astype(np.uint8), objects


def write_shapes(folder: Path, split: str, size: int, image_size: tuple[int, int]) -> Path:
    """
    Writes `folder/<split>_<height>x<width>/<number>.png` and their json, unless the json exists; returns its path.
    """
    height, width = image_size
    pictures = folder / f"{split}_{height}x{width}"
    file = pictures.with_name(f"{pictures.name}_{size}.json")
    if file.is_file():
        return file
    pictures.mkdir(parents=True, exist_ok=True)
    images, annotations = [], []
    for index in tqdm(range(size), desc=f"Writing {split} pictures", unit="img", leave=False, disable=None):
        picture, objects = scene(split, index, image_size)
        name = f"{pictures.name}/{index:06}.png"
        Image.fromarray(picture).save(folder / name)
        images.append({"id": index + 1, "file_name": name, "height": height, "width": width})
        for category, box in objects:
            entry = {"id": len(annotations) + 1, "image_id": index + 1, "category_id": category + 1, "bbox": box}
            annotations.append({**entry, "area": box[2] * box[3], "iscrowd": 0})
    categories = [{"id": number, "name": name} for number, name in enumerate(CATEGORIES, 1)]
    content = {"images": images, "annotations": annotations, "categories": categories}
    # The json comes last: if it exists, the pictures are complete.
    write_text(file, json.dumps(content))
    return file


def _shapes(arguments: DetectionDataArguments, request: DataRequest) -> dict[str, list[str] | None]:
    """The generated data. They do not depend on the training seed, so runs can be compared."""
    folder = Path(arguments.shapes_folder)
    sizes = {part: arguments.limits[part] or DEFAULT_SIZES[split] for part, split in zip(PARTS, SPLITS)}
    return {
        part: [str(write_shapes(folder, split, sizes[part], request.image_size))]
        for part, split in zip(PARTS, SPLITS)
        if part in request.parts
    }
