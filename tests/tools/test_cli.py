"""The console command, as it is called."""

import os
import re
import shutil
import signal
import subprocess
import sys

import huggingface_hub.constants as constants
import pytest
import torch
from checkout import ROOT
from conversion_cases import images, liere_weights
from published_models import vit
from run_records import edit
from transformers import AutoModelForImageClassification

from hf_liere.auto import load_checkpoint
from hf_liere.errors import InputError
from hf_liere.tools.cli import UPGRADED_ENCODINGS, main
from hf_liere.tools.conversion.checkpoints import convert_state_dict
from hf_liere.tools.conversion.options import OPTIONS
from hf_liere.upgrades import LEARNED_ENCODINGS
from training.common.arguments import ModelArguments
from training.engine.model_setup import checkpoint_config, resolve_config
from training.tasks.playground.predictions import Classifier, find_checkpoints


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


def test_upgrades_are_offered_to_the_encodings_that_learn():
    """The table of the parser, which may not import the encodings."""
    assert tuple(LEARNED_ENCODINGS) == UPGRADED_ENCODINGS


def test_help_names_every_option_and_what_it_accepts(capsys):
    with pytest.raises(SystemExit):
        main(["convert", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "--layer_generators VALUE liere: official or paper (official)" in text
    assert "naver: mixed, axial or absolute" in text
    for kind, options in OPTIONS.items():
        for name, option in options.items():
            assert re.search(rf"--{name} VALUE .*{kind}[^-]*: {re.escape(str(option))}", text), (kind, name)


LAUNCHED = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("hf_liere_launcher", {launcher!r})
launcher = importlib.util.module_from_spec(spec)
spec.loader.exec_module(launcher)
sys.argv = ["hf-liere", *{arguments!r}]
try:
    status = launcher.main()
except SystemExit as stopped:
    status = stopped.code
heavy = sorted({{"torch", "transformers", "numpy", "hf_liere"}} & set(sys.modules))
print(status, heavy, file=sys.stderr)
"""


@pytest.mark.parametrize(
    "arguments, status",
    [
        (["--help"], 0),
        (["--version"], 0),
        (["inspct", "model"], 2),
        (["inspect", "model", "--ouptut", "page"], 2),
        *(
            ([command, "--help"], 0)
            for command in "card convert env export inspect predict pull push rope upgrade verify".split()
        ),
    ],
)
def test_help_and_typos_import_nothing_heavy(arguments, status):
    launcher = str(ROOT / "hf_liere" / "launcher" / "__init__.py")
    code = LAUNCHED.format(launcher=launcher, arguments=arguments)
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert process.stderr.splitlines()[-1] == f"{status} []", process.stderr
    assert bool(process.stdout) == (status == 0)


def test_a_name_that_is_no_directory_is_refused_without_asking_the_hub(tmp_path, monkeypatch):
    """With a Hub that may not be asked: a request would raise another error."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for name in ("typo", "owner/name/more", str(tmp_path / "typo")):
        with pytest.raises(InputError, match="no such file or directory"):
            resolve_config(ModelArguments(model_name_or_path=name))


def test_no_code_of_a_checkpoint_runs(saved, tmp_path, monkeypatch, capsys):
    """Where nobody says that it may: neither for a model that is not known here, nor beside one that is."""
    spy = f"open({str(tmp_path / 'ran')!r}, 'w').close()\n"
    unknown = tmp_path / "unknown"
    shutil.copytree(saved, unknown)
    for folder in (saved, unknown):
        for path in folder.glob("*.py"):
            path.write_text(spy + path.read_text())
    edit(unknown / "config.json", model_type="of_a_stranger", architectures=["OfAStranger"])
    (unknown / "preprocessor_config.json").write_text(
        '{"image_processor_type": "A", "auto_map": {"AutoImageProcessor": "configuration_liere.LieREViTConfig"}}'
    )
    # transformers asks whether code may run where nothing is said.
    monkeypatch.setattr("builtins.input", lambda *args: "y")
    (tmp_path / "image.png").write_bytes(b"?")
    for command in (
        ["convert", str(unknown), str(tmp_path / "converted")],
        ["export", str(unknown), str(tmp_path / "model.pt2")],
        ["inspect", str(unknown), "--output", str(tmp_path / "page")],
        ["predict", str(unknown), str(tmp_path / "image.png")],
        ["push", str(unknown), "owner/name"],
        ["upgrade", str(unknown), str(tmp_path / "upgraded"), "--position_encoding", "liere"],
        ["verify", str(unknown), "owner/name", "--run"],
    ):
        assert main(command) == 1, command
    for refused in (
        lambda: checkpoint_config("--model_name_or_path", str(unknown)),
        lambda: find_checkpoints([unknown]),
    ):
        with pytest.raises(InputError):
            refused()
    capsys.readouterr()
    assert main(["upgrade", str(saved), str(tmp_path / "larger"), "--image_size", "32"]) == 0
    load_checkpoint(saved)
    Classifier(*find_checkpoints([saved]))
    assert not (tmp_path / "ran").exists()
    load_checkpoint(unknown, trust_remote_code=True)
    assert (tmp_path / "ran").exists()


@pytest.fixture
def saved(tmp_path):
    vit(position_encoding="comrope_ld", num_hidden_layers=1).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def own_lines(stderr):
    """Without what torch logs on behalf of installed libraries: `W1122 02:42:29.12 16983 torch/….py:646] …`."""
    return [line for line in stderr.splitlines() if not re.match(r"W\d{4} [\d:.]+ \d+ \S+:\d+\] ", line)]


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [["card", "arrows_liere8"], ["convert", "--help"]])
def test_a_reader_that_stops_early_is_no_error(arguments):
    # A pipe that nobody reads any more.
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "hf_liere.tools.cli", *arguments]
    # With a buffer, as in a shell.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    process = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=environment)
    os.close(writer)
    assert process.returncode == 128 + signal.SIGPIPE and own_lines(process.stderr) == []


@pytest.mark.slow
def test_interrupts_end_in_one_line(tmp_path):
    """A fifo in the place of the facts holds the command up until the interrupt comes."""
    os.mkfifo(tmp_path / "facts.yaml")
    # Background jobs of a shell ignore SIGINT. A fifo is no file; reading one waits for a writer.
    code = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
    code += (
        "from hf_liere.tools import cli; from hf_liere.tools.hub import cards; cards.Path.is_file = lambda path: True; "
    )
    code += "sys.exit(cli.main(sys.argv[1:]))"
    process = subprocess.Popen(
        [sys.executable, "-c", code, "card", str(tmp_path / "facts.yaml")], stderr=subprocess.PIPE, text=True, cwd=ROOT
    )
    # Opening succeeds when the command has opened it for reading.
    with open(tmp_path / "facts.yaml", "w"):
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 128 + signal.SIGINT
    assert own_lines(process.stderr.read()) == ["hf-liere card: interrupted"]
