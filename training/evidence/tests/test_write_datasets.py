"""evidence/write_datasets.py: what others read from the folders is what our tasks draw."""

import subprocess

import numpy as np
from datasets import load_dataset

from training.data.arrows import Arrows
from training.data.sources import PARTS
from training.data.tokens import TokenDataArguments, load_tokens
from training.evidence import write_datasets
from training.evidence.data.poses import pose_columns


def test_folders_are_data_sets(tmp_path):
    write_datasets.main([str(tmp_path), "--fraction", "0.002"])
    for name, task in write_datasets.TASKS.items():
        subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=tmp_path / name, check=True)
        found = load_dataset(str(tmp_path / name), cache_dir=str(tmp_path / "cache"))
        rows = [str(row) for split in found.values() for row in split.data.to_pylist()]
        assert len(set(rows)) == len(rows) and {*found} == {split.name for split in task.splits}
    split = load_dataset(str(tmp_path / "arrows"), split="test_276px", cache_dir=str(tmp_path / "cache"))
    image, label = Arrows("test", 4, 276)[3]
    assert np.array_equal(np.asarray(split[3]["image"]), image[..., 0]) and split[3]["label"] == label
    files = [[str(tmp_path / "poses" / "data" / f"{name}.parquet")] for name in ("train", "test_turned")]
    read = load_tokens(TokenDataArguments(train_files=files[0], validation_files=files[1]), PARTS, 0)
    for table, drawn in ((read.train, ("train", 102, 30.0)), (read.evaluation, ("test", 4, 180.0))):
        assert np.array_equal(np.stack(table.positions), pose_columns(*drawn)["positions"])
