"""evidence/write_datasets.py: what others read from the folders is what our tasks draw."""

import subprocess

import datasets
import numpy as np
import yaml

from training.data.arrows import Arrows
from training.data.sources import PARTS
from training.data.tokens import TokenDataArguments, load_tokens
from training.evidence import write_datasets
from training.evidence.data.poses import pose_columns


def test_folders_are_data_sets(tmp_path):
    write_datasets.main([str(tmp_path), "--fraction", "0.002"])
    for name, task in write_datasets.TASKS.items():
        found = datasets.load_dataset(str(tmp_path / name), cache_dir=str(tmp_path / "cache"))
        assert {split: len(table) for split, table in found.items()} == {
            one.name: one.count // 500 for one in task.splits
        }
        rows = [str(row) for table in found.values() for row in table.data.to_pylist()]
        assert len(set(rows)) == len(rows)
        assert yaml.safe_load((tmp_path / name / "README.md").read_text().split("---")[1])["license"] == "apache-2.0"
        subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=tmp_path / name, check=True)
    arrows = datasets.load_dataset(str(tmp_path / "arrows"), cache_dir=str(tmp_path / "cache"))
    for split, size in (("train", 108), ("test_276px", 276)):
        (image, label), row = Arrows(split.partition("_")[0], 5, size)[3], arrows[split][3]
        assert np.array_equal(np.asarray(row["image"]), image[..., 0]) and row["label"] == label
    # Our scripts read the tokens.
    files = [[str(tmp_path / "poses" / "data" / f"{name}.parquet")] for name in ("train", "test_turned")]
    read = load_tokens(TokenDataArguments(train_files=files[0], validation_files=files[1]), PARTS, 0)
    for table, drawn in ((read.train, ("train", 102, 30.0)), (read.evaluation, ("test", 4, 180.0))):
        for name in ("features", "positions", "labels"):
            assert np.array_equal(np.stack(getattr(table, name)), pose_columns(*drawn)[name])
