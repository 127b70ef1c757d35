"""Storing a run as a checkpoint with a card: weights in half precision, evaluations of these, and what is refused."""

import re
import shutil

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from training_helpers import main, train, write_parquet
from transformers import AutoModelForImageClassification

from hf_liere.storage.saved_model import weights_digest
from training.evidence import store_checkpoint


@pytest.fixture(scope="module")
def uneven_file(tmp_path_factory):
    return write_parquet(tmp_path_factory.mktemp("data") / "test.parquet", 13, seed=1)


@pytest.fixture(scope="module")
def one_process(uneven_file, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    train_file = write_parquet(folder / "train.parquet", 16)
    train(folder / "one", "--train_files", train_file, "--validation_files", uneven_file, "--do_eval")
    return folder / "one"


def test_a_run_is_stored_in_half_precision(one_process, uneven_file, tmp_path, capsys):
    """With evaluations of these weights, also under changed conditions, and with a picture of attention."""
    AutoModelForImageClassification.from_pretrained(one_process, dtype=torch.float16).save_pretrained(tmp_path / "half")
    evaluate = ["--do_eval", "--validation_files", uneven_file, "--use_cpu", "true", "--disable_tqdm", "true"]
    for name, model, *flags in (
        ("at_16", tmp_path / "half"),
        ("at_24", tmp_path / "half", "--image_size", "24"),
        ("shuffled", tmp_path / "half", "--evaluation_shuffle", "patches"),
        ("shifted", tmp_path / "half", "--evaluation_offset", "0.5", "--evaluation_seed", "3"),
        ("of_the_run", one_process, "--evaluation_shuffle", "patches"),
    ):
        main([*evaluate, "--model_name_or_path", str(model), *flags, "--output_dir", str(tmp_path / name)])
    Image.new("RGB", (40, 40), "red").save(tmp_path / "red.png")

    def store(target, weights="half", evaluations=("at_16", "at_24"), conditions=("shuffled", "shifted")):
        about = "--title Tiny --made_by nobody --intended_use None. --data Noise Dots Free.".split()
        about += ["--attention", str(tmp_path / "red.png"), "--attention_of", "It is red."]
        folders = [[str(tmp_path / name) for name in names] for names in (evaluations, conditions)]
        flags = ["--weights", str(tmp_path / weights), "--evaluation", *folders[0], "--conditions", *folders[1]]
        store_checkpoint.main([str(one_process), str(tmp_path / target), *flags, *about])

    store("stored")
    card = (tmp_path / "stored" / "README.md").read_text()
    saved = load_file(tmp_path / "stored" / "model.safetensors")
    assert {value.dtype for name, value in saved.items() if "rotary_encoding" not in name} == {torch.float16}
    model = AutoModelForImageClassification.from_pretrained(tmp_path / "stored")
    assert {value.dtype for value in model.parameters()} == {torch.float32}
    assert f"`{weights_digest(saved)}`" in card and "| 24 × 24 | 13 |" in card and "Noise: Dots. Free." in card
    for row in ("patches of each image shuffled", "coordinates shifted, ρ = 0.5, draw 3"):
        assert re.search(rf"^\| {row} \| 16 \| 13 \| [\d.]+% \(", card, re.MULTILINE), card
    assert "](attention.png)" in card and "It is red." in card and (tmp_path / "stored" / "attention.png").is_file()
    assert f'checkpoint = "{tmp_path / "stored"}"' in card
    for message, changes in (
        ("exists already and is not an empty directory", {"target": "stored"}),
        ("is not a rounded copy of .*classifier", {"weights": "other"}),
        (r"the first must be at \[16, 16\] px", {"evaluations": ("at_24",)}),
        ("of_the_run was measured with other weights", {"conditions": ("of_the_run",)}),
        ("at_24 evaluates unchanged images", {"conditions": ("at_24",)}),
    ):
        shutil.copytree(tmp_path / "half", tmp_path / "other", dirs_exist_ok=True)
        save_file(saved | {"classifier.bias": saved["classifier.bias"] + 1}, tmp_path / "other" / "model.safetensors")
        with pytest.raises(SystemExit):
            store(**{"target": "refused", **changes})
        assert re.search(message, " ".join(capsys.readouterr().err.split()))
        assert not (tmp_path / "refused").exists()
