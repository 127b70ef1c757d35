"""Writes generated tasks as data sets with fixed splits, in folders that `datasets` reads and the Hub shows.

    python training/evidence/write_datasets.py outputs/datasets      # or: make datasets

A folder has a card, README.md, whose yaml names the files of every split, `data/` with a parquet file a split, and
`SHA256SUMS`. Its owner uploads it by `hf upload me/arrows outputs/datasets/arrows --repo-type dataset`. The bytes of
parquet files depend on the versions of pyarrow and zlib; the digests of the samples in the card do not.
"""

import argparse
import hashlib
import io
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import yaml
from PIL import Image


sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from hf_liere.errors import InputError
from hf_liere.storage.targets import new_directory
from training.data.arrows import BAG_OF_ARROWS_ACCURACY, LABELS, Arrows
from training.evidence.data.pointers import BAG_OF_GLYPHS_ACCURACY, SIZE, pointer_columns
from training.evidence.data.poses import BAG_OF_CLASSES_ACCURACY, pose_columns
from training.evidence.reporting.markdown import markdown


class Split(NamedTuple):
    """
    Attributes:
        count: Of samples.
        setting: The pixels of arrows, the largest shift of pointers, or the largest angle of poses.
        drawn: The split of the task, whose first samples it has.
    """

    name: str
    count: int
    setting: float
    drawn: str


class Task(NamedTuple):
    """
    A data set.

    Attributes:
        about: What a sample is, and what its label.
        columns: What the columns contain.
        chance: Accuracy of the best answer without positions.
        write: Writes a split into a file; returns a digest of its samples.
    """

    title: str
    category: str
    about: str
    columns: dict[str, str]
    chance: float
    splits: tuple[Split, ...]
    write: Callable[[Split, Path], str]


def write_arrows(split: Split, path: Path) -> str:
    source, digest = Arrows(split.drawn, split.count, int(split.setting)), hashlib.sha256()
    rows: dict[str, list] = {"image": [], "label": []}
    for index in range(len(source)):
        image, label = source[index]
        digest.update(image.tobytes() + bytes([label]))
        file = io.BytesIO()
        Image.fromarray(image[..., 0]).save(file, "png")
        rows["image"].append({"bytes": file.getvalue(), "path": None})
        rows["label"].append(label)
    kinds = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=list(LABELS))})
    datasets.Dataset.from_dict(rows, kinds).to_parquet(path)
    return digest.hexdigest()


def tokens_by(draw: Callable[[str, int, float], dict[str, np.ndarray]]) -> Callable[[Split, Path], str]:
    def write(split: Split, path: Path) -> str:
        columns, digest = draw(split.drawn, split.count, split.setting), hashlib.sha256()
        for name, values in columns.items():
            digest.update(name.encode() + values.astype("<f4").tobytes())
        table = pyarrow.table({name: _nested(values) for name, values in columns.items()})
        pyarrow.parquet.write_table(table, path, compression="zstd")
        return digest.hexdigest()

    return write


def _nested(values: np.ndarray) -> pyarrow.Array:
    """(samples, …) → one list a sample, of lists where there are more axes."""
    array = pyarrow.array(values.ravel())
    for size in reversed(values.shape[1:]):
        array = pyarrow.ListArray.from_arrays(np.arange(0, len(array) + 1, size, dtype=np.int32), array)
    return array


def _splits(train: int, rest: int, setting: float, moved: dict[str, float]) -> tuple[Split, ...]:
    """Training, validation and test, and the test under other settings."""
    usual = (Split(name, rest if name != "train" else train, setting, name) for name in ("train", "validation", "test"))
    return (*usual, *(Split(name, rest, value, "test") for name, value in moved.items()))


TOKENS = {
    "features": "numbers of each token",
    "positions": "coordinates of each token",
    "labels": "the class of the token that is asked, and −100 at the others, which the loss ignores",
}
TASKS = {
    "arrows": Task(
        "Arrows",
        "image-classification",
        "A grid of cells with eight arrows, the letters A … E, and a Y in one of four rotations. Exactly one arrow "
        "lies on the ray from the base of the Y: its direction is the label (LieRE, section 5.2). The paper trains on "
        "800,000 images. `training/data/arrows.py` draws as many as are wanted; these are the first.",
        {"image": "grey PNG", "label": "up, right, down, left"},
        BAG_OF_ARROWS_ACCURACY,
        _splits(20_000, 2_000, 108, {"test_168px": 168, "test_276px": 276}),
        write_arrows,
    ),
    "pointers": Task(
        "Pointers",
        "token-classification",
        f"A grid of {SIZE} × {SIZE} tokens. One is the header, which names a step in rows and columns; the others "
        "carry one of four glyphs. The glyph where the step leads is the label of the header. In `test_shifted` each "
        "grid is moved by up to six cells on each axis, which changes no answer.",
        TOKENS,
        BAG_OF_GLYPHS_ACCURACY,
        _splits(51_200, 2_000, 0.0, {"test_shifted": 6.0}),
        tokens_by(pointer_columns),
    ),
    "poses": Task(
        "Poses",
        "token-classification",
        "Eight tokens with orientations. The first is the query, and one of the others is turned from it by a fixed "
        "rotation, up to noise; that one's class is the label of the query. Queries lie within 30 degrees of the "
        "world's axes, and in `test_turned` anywhere, which changes no answer.",
        {
            **TOKENS,
            "positions": "rotation vectors from body to world",
            "matrices": "the same as rotation matrices, row by row",
            "poses": "the same as 4 × 4 matrices, row by row",
        },
        BAG_OF_CLASSES_ACCURACY,
        _splits(51_200, 2_000, 30.0, {"test_turned": 180.0}),
        tokens_by(pose_columns),
    ),
}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="new folders are written here")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS), metavar="NAME", help="(all)")
    parser.add_argument("--fraction", type=float, default=1.0, help="of the samples of every split, to try it")
    given = parser.parse_args(arguments)
    for name in given.tasks:
        write(name, given.folder / name, given.fraction)
        print(given.folder / name)


def write(name: str, folder: Path, fraction: float = 1.0) -> None:
    """Writes a data set into a new folder, completely or not at all. Raises [`ValueError`] for a folder with files."""
    task = TASKS[name]
    with new_directory(folder) as partial:
        (partial / "data").mkdir()
        rows, sizes = [], []
        for split in (split._replace(count=max(round(split.count * fraction), 1)) for split in task.splits):
            file = partial / "data" / f"{split.name}.parquet"
            rows.append([f"`{split.name}`", f"{split.count:,}", f"`{task.write(split, file)[:16]}`"])
            sizes.append(split.count)
        (partial / "README.md").write_text(card(name, task, rows, sum(sizes)), encoding="utf-8")
        (partial / "SHA256SUMS").write_text("".join(_sums(partial)), encoding="utf-8")


def card(name: str, task: Task, rows: list[list[str]], total: int) -> str:
    """The text of README.md: what the Hub reads, then what people read."""
    thousands = "n<1K" if total < 1000 else "1K<n<10K" if total < 10_000 else "10K<n<100K"
    files = [{"split": split.name, "path": f"data/{split.name}.parquet"} for split in task.splits]
    about: dict[str, Any] = {
        "license": "apache-2.0",
        "pretty_name": task.title,
        "task_categories": [task.category],
        "size_categories": [thousands],
        "tags": ["synthetic", "position-encoding"],
        "configs": [{"config_name": "default", "data_files": files}],
    }
    script = "image_classification" if task.category.startswith("image") else "token_classification"
    columns = markdown(["column", "contents"], [[f"`{column}`", said] for column, said in task.columns.items()])
    splits = markdown(["split", "samples", "SHA-256 of the samples"], rows)
    return f"""\
---
{yaml.safe_dump(about, sort_keys=False).strip()}
---

# {task.title}

{task.about}

Generated by hf_liere; no picture or text of others is in it. Without positions, the best answer is right for
{task.chance:.1%} of the samples.

{columns}

{splits}

The digests, of which the beginnings are shown, are those of the samples. `SHA256SUMS` has those of the files.

```python
from datasets import load_dataset

data = load_dataset("{name}")
```

Here `{name}` is this folder, or its name on the Hub. hf_liere trains on its files by
`training/{script}.py --train_files data/train.parquet --validation_files data/validation.parquet`.
"""


def _sums(folder: Path) -> Iterator[str]:
    for path in sorted(folder.rglob("*.*")):
        yield f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.relative_to(folder).as_posix()}\n"


if __name__ == "__main__":
    try:
        main()
    except (InputError, ValueError, OSError) as error:
        sys.exit(f"error: {error}")
