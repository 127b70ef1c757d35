"""What a saved model reads, and how often."""

import shutil

import pytest
import torch
from counted_reads import count_reads
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import hf_liere
from hf_liere.auto import load_checkpoint
from hf_liere.storage.loading import CheckpointError
from hf_liere.storage.saved_model import SavedModel, file_digest, weights_digest


TENSORS = {
    # Stored by the size of their dtype, digested by name.
    "a": torch.arange(600, dtype=torch.bfloat16).view(20, 30),
    "b": torch.arange(1000, dtype=torch.float64),
    "c": torch.tensor(3),
    "d": torch.zeros(0, 2),
}


@pytest.fixture
def folder(tmp_path):
    save_file(TENSORS, tmp_path / "model.safetensors")
    return tmp_path


def test_weights_are_read_once(folder):
    with count_reads() as reads:
        saved = SavedModel(folder)
        assert saved.parameters == 1601 and saved.shapes["a"] == (20, 30)
        assert not reads
        saved.require_finite_weights()
        assert saved.digest == weights_digest(TENSORS) == saved.digest
    assert [round(share) for share in reads.values()] == [1]


def test_what_was_read_stays_until_a_new_one_reads_it_again(folder):
    (folder / "config.json").write_text('{"architectures": ["A"]}')
    saved = SavedModel(folder)
    before = saved.architecture, saved.digest
    (folder / "config.json").write_text('{"architectures": ["B"]}')
    save_file({"a": torch.tensor([float("nan")])}, folder / "model.safetensors")
    assert (saved.architecture, saved.digest) == before == ("A", weights_digest(TENSORS))
    saved.require_finite_weights()
    assert SavedModel.at(saved) is saved
    now = SavedModel.at(folder)
    assert now.architecture == "B" and now.digest != saved.digest
    with pytest.raises(ValueError, match="infinite or NaN: a"):
        now.require_finite_weights()


def open_slices(path):
    with safe_open(path, "pt") as file:
        return [file.get_slice(name)[:] for name in ("a", "b")]


@pytest.mark.parametrize(
    "read",
    [
        load_file,
        open_slices,
        lambda path: path.read_bytes(),
        lambda path: file_digest(path, "sha256"),
        lambda path: shutil.copyfile(path, path.with_name("copy")),
        lambda path: SavedModel(path.parent).digest,
    ],
    ids=["load", "slices", "bytes", "hash", "copy", "digest"],
)
def test_every_way_to_read_is_counted(folder, read):
    """The count of reads during a push would notice one more, of any of these kinds."""
    with count_reads() as reads:
        for times in (1, 2):
            read(folder / "model.safetensors")
            assert round(reads[folder / "model.safetensors"]) == times


def test_shards_of_other_folders_are_not_loaded(tiny, tmp_path):
    hf_liere.LieREViTForImageClassification(tiny()).save_pretrained(tmp_path / "model", max_shard_size="10KB")
    (tmp_path / "other").mkdir()
    for shard in (tmp_path / "model").glob("*.safetensors"):
        shard.rename(tmp_path / "other" / shard.name)
    index = tmp_path / "model" / "model.safetensors.index.json"
    index.write_text(index.read_text().replace('"model-', '"../other/model-'))
    with pytest.raises(CheckpointError, match="names no files of its folder but '../other/model-00001"):
        load_checkpoint(tmp_path / "model")
