"""Decoded images in a file that the processes of a machine map into memory, and that later runs find."""

import hashlib
import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import PIL
from filelock import FileLock

import hf_liere


# Bytes of all images, one after another, and (start, height, width, channels) of each, (images, 4).
PIXELS, PLACES, REMARKS = "pixels", "places.npy", "remarks.json"


class DecodedFile:
    """
    Decoded images, uint8 (height, width, channels), by number, and the remarks of those who wrote them.

    Copies in other processes map the same file, so that its pixels are in memory once.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.places = np.load(folder / PLACES, allow_pickle=False)
        # A memmap's own slices take longer than an array's.
        self.pixels = np.memmap(folder / PIXELS, np.uint8, "r").view(np.ndarray)
        self.remarks = json.loads((folder / REMARKS).read_text(encoding="utf-8"))

    def __reduce__(self) -> tuple[type, tuple[Path]]:
        return DecodedFile, (self.folder,)

    def __len__(self) -> int:
        return len(self.places)

    def get(self, index: int) -> np.ndarray:
        start, *shape = self.places[index].tolist()
        return self.pixels[start : start + shape[0] * shape[1] * shape[2]].reshape(shape)


def place_of(table: datasets.Dataset, image_column: str, num_channels: int) -> Path:
    """
    The folder for the decoded images of this table, beside the copies that `datasets` keeps.

    Raises:
        OSError: if images are in files that cannot be asked when they changed, such as those of the Hub.
    """
    known = [table._fingerprint, image_column, num_channels, hf_liere.__version__, PIL.__version__]
    digest = hashlib.sha256(repr(known).encode())
    for batch in table.select_columns(image_column).with_format("arrow").iter(1000):
        images = batch.column(0).combine_chunks()
        for path in images.field("path").filter(images.field("bytes").is_null()).to_pylist():
            found = Path(path or "").stat()
            digest.update(repr((path, found.st_size, found.st_mtime_ns)).encode())
    return Path(datasets.config.HF_DATASETS_CACHE) / "hf_liere_decoded" / digest.hexdigest()[:32]


def decode_once(folder: Path, images: Iterable[np.ndarray], remarks: Any) -> DecodedFile:
    """
    Writes images into a new folder unless a process of this machine has; others wait.

    Args:
        images: Read only by the process that writes.
        remarks: What json can express; taken when the images have been read.

    Raises:
        OSError: if the folder cannot be written.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_suffix(".lock")):
        if not folder.is_dir():
            aside = folder.with_suffix(".incomplete")
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir()
            try:
                _write(aside, images, remarks)
                aside.rename(folder)
            finally:
                shutil.rmtree(aside, ignore_errors=True)
    return DecodedFile(folder)


def _write(folder: Path, images: Iterable[np.ndarray], remarks: Any) -> None:
    places, start = [], 0
    with (folder / PIXELS).open("wb") as file:
        for image in images:
            file.write(np.ascontiguousarray(image).data)
            places.append((start, *image.shape))
            start += image.nbytes
    np.save(folder / PLACES, np.array(places, np.int64))
    (folder / REMARKS).write_text(json.dumps(remarks), encoding="utf-8")
