"""Checkpoints that are trained further with a more general encoding (--upgrade_encoding)."""

import json

import pytest
import transformers
from training_helpers import TINY_RUN, main, train, weights, write_parquet


TINY = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}


@pytest.fixture(scope="module")
def parquet(tmp_path_factory):
    return write_parquet(tmp_path_factory.mktemp("data") / "train.parquet", 40)


@pytest.fixture(scope="module")
def trained(parquet, tmp_path_factory):
    """The folder of a model with Axial RoPE, and its loss."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    flags = ("--train_files", parquet, "--validation_files", parquet, "--do_eval", "--position_encoding", "axial_rope")
    return folder, train(folder, *flags, "--max_steps", 4)["eval_loss"]


def go_on(checkpoint, folder, parquet, *flags):
    data = ["--train_files", parquet, "--validation_files", parquet, "--do_eval", "--upgrade_encoding"]
    paths = ["--model_name_or_path", str(checkpoint), "--output_dir", str(folder)]
    return main([*paths, *data, *TINY_RUN, *map(str, flags)])


def test_a_checkpoint_goes_on_with_an_upgraded_encoding(trained, parquet, tmp_path):
    checkpoint, loss = trained
    wanted = ("--position_encoding", "comrope_ld", "--block_size", 4)
    # The same function in another order of float32 operations.
    assert go_on(checkpoint, tmp_path / "evaluated", parquet, *wanted)["eval_loss"] == pytest.approx(loss, abs=1e-5)
    training = (*wanted, "--do_train", "--max_steps", 4, "--save_steps", 2)
    after = go_on(checkpoint, tmp_path / "run", parquet, *training)["eval_loss"]
    assert after != pytest.approx(loss, abs=1e-5)
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert (config["position_encoding"], config["block_size"]) == ("comrope_ld", 4)
    final = weights(tmp_path / "run")
    assert any("rotary_encoding.multipliers" in name for name in final)
    # What is upgraded already is taken as it is, as in the evaluations of a sweep.
    # Products of weights that lie elsewhere in memory, as those of a file do, may be rounded otherwise.
    again = go_on(tmp_path / "run", tmp_path / "again", parquet, *wanted)["eval_loss"]
    assert again == pytest.approx(after, abs=1e-6)
    resume = ("--resume_from_checkpoint", tmp_path / "run" / "checkpoint-2")
    assert go_on(checkpoint, tmp_path / "run", parquet, *training, *resume)["eval_loss"] == after
    assert all(value.equal(final[name]) for name, value in weights(tmp_path / "run").items())


@pytest.mark.parametrize(
    "flags, message",
    [
        (("--position_encoding", "liere", "--block_size", 3), "No exact upgrade to liere with block_size=3"),
        (("--position_encoding", "comrope_ap", "--block_size", 3), r"block_size=3 times 2 axes must divide head_dim=8"),
        (("--position_encoding", "absolute"), "learns no rotations"),
        (("--position_encoding", "liere", "--hidden_size", 32), "--hidden_size 32 contradicts the checkpoint's 16"),
    ],
)
def test_what_has_no_exact_upgrade_is_refused(trained, parquet, tmp_path, flags, message):
    with pytest.raises(ValueError, match=message):
        go_on(trained[0], tmp_path / "out", parquet, "--do_train", *flags)


def test_only_models_of_hf_liere_are_upgraded(parquet, tmp_path):
    config = transformers.ViTConfig(**TINY, image_size=16, patch_size=4, num_labels=3)
    transformers.ViTForImageClassification(config).save_pretrained(tmp_path / "vit")
    with pytest.raises(ValueError, match="--upgrade_encoding: the checkpoint is a vit, not a model of hf_liere"):
        go_on(tmp_path / "vit", tmp_path / "out", parquet, "--position_encoding", "liere")
    with pytest.raises(ValueError, match="--upgrade_encoding upgrades a checkpoint"):
        train(tmp_path / "out", "--train_files", parquet, "--upgrade_encoding")
