"""The console command, as it is called."""

import re
import subprocess
import sys
from pathlib import Path

import torch
from test_conversion import images, liere_weights
from transformers import AutoModelForImageClassification

from hf_liere.cli import main
from hf_liere.conversion import convert_state_dict


def test_convert_writes_what_from_pretrained_reads(tmp_path, capsys):
    weights = liere_weights()
    torch.save({"state_dict": {f"model.{name}": value for name, value in weights.items()}}, tmp_path / "last.ckpt")
    arguments = ["convert", str(tmp_path / "last.ckpt"), str(tmp_path / "out"), "--source", "liere"]
    arguments += ["--layer_generators", "paper", "--image_size", "[16, 16]", "--image_mean", "0.1", "0.2", "0.3"]
    assert main(arguments) == 0
    assert "LieREViTForImageClassification from a checkpoint of kind liere" in capsys.readouterr().out
    model = AutoModelForImageClassification.from_pretrained(tmp_path / "out")
    expected = convert_state_dict(weights, layer_generators="paper").model()(images(1, 3, 16, 16)).logits
    assert torch.equal(model(images(1, 3, 16, 16)).logits, expected)


def test_a_refused_checkpoint_is_one_line_on_stderr(tmp_path, capsys):
    (tmp_path / "cut.safetensors").write_bytes(b"{")
    for arguments, message in (
        (["cut.safetensors", "out"], "truncated"),
        (["absent", "out"], "neither a file"),
        (["cut.safetensors", ""], "exists already"),
    ):
        assert main(["convert", *(str(tmp_path / argument) for argument in arguments)]) == 1
        captured = capsys.readouterr()
        assert captured.out == "" and captured.err.count("\n") == 1 and message in captured.err
    assert [path.name for path in tmp_path.iterdir()] == ["cut.safetensors"]


def test_help_names_every_option_and_who_takes_it():
    process = subprocess.run(
        [sys.executable, "-m", "hf_liere.cli", "convert", "--help"], capture_output=True, text=True, check=True
    )
    text = " ".join(process.stdout.split())
    assert "--layer_generators VALUE of liere" in text and "--layer_norm_eps VALUE of comrope, naver, timm" in text


def test_the_command_is_declared():
    project = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    assert re.search(r'\[project\.scripts\]\nhf-liere = "hf_liere\.cli:main"\n', project)
