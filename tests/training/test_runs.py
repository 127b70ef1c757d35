"""Whole runs: two processes against one, resumed against uninterrupted, and what a finished run leaves behind."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import psutil
import pytest
import torch
from checkout import PYTHONPATH, ROOT
from fresh_process import run_warm
from PIL import Image
from safetensors.torch import load_file
from training_helpers import SCRIPT, TINY_MODEL, assert_same_weights, main, train, train_with_torchrun, write_parquet
from transformers import AutoModelForImageClassification


SECRET = "hf_nobodys"


@pytest.fixture(scope="module")
def train_file(tmp_path_factory):
    return write_parquet(tmp_path_factory.mktemp("data") / "train.parquet", 40)


@pytest.fixture(scope="module")
def uneven_file(tmp_path_factory):
    """13 images: in batches of 4 on two processes neither the processes nor the last batches are of equal size."""
    return write_parquet(tmp_path_factory.mktemp("data") / "test.parquet", 13, seed=1)


@pytest.fixture(scope="module")
def one_process(train_file, uneven_file, tmp_path_factory):
    return run_once(tmp_path_factory.mktemp("one"), train_file, uneven_file, runner=train)


def run_once(folder, train_file, uneven_file, runner):
    flags = ["--train_files", train_file, "--validation_files", uneven_file, "--do_eval", "--num_train_epochs", 2]
    flags += ["--per_device_eval_batch_size", 4, "--logging_steps", 1, "--label_smoothing_factor", 0.1]
    flags += ["--learning_rate", 1e-4, "--crop_padding", 2, "--flip_probability", 0.5, "--rand_augment_ops", 1]
    flags += ["--repeated_augmentation", 2, "--random_erasing_probability", 0.5, "--hub_token", SECRET]
    runner(folder, *flags, "--total_train_batch_size", 16)
    return folder


def steps_of(folder):
    return json.loads((folder / "trainer_state.json").read_text())["global_step"]


@pytest.mark.slow
def test_deepspeed_in_two_processes_equals_one(one_process, train_file, uneven_file, tmp_path, monkeypatch):
    pytest.importorskip("deepspeed")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    sharded = {"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": "auto", "train_batch_size": "auto"}
    (tmp_path / "zero2.json").write_text(json.dumps(sharded | {"gradient_accumulation_steps": "auto"}))

    def runner(folder, *flags):
        train_with_torchrun(folder, *flags, "--deepspeed", tmp_path / "zero2.json", "--save_strategy", "no")

    run_once(tmp_path / "run", train_file, uneven_file, runner=runner)
    environment = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert environment["world_size"] == 2 and environment["distributed_type"] == "DEEPSPEED"
    assert_same_weights(one_process, tmp_path / "run", 1e-5)
    results = [json.loads((folder / "eval_results.json").read_text()) for folder in (one_process, tmp_path / "run")]
    assert results[0]["eval_loss"] == pytest.approx(results[1]["eval_loss"], abs=1e-5)


def test_logs_tell_the_rate_and_the_time_to_go(one_process):
    log = json.loads((one_process / "trainer_state.json").read_text())["log_history"]
    rated = [entry for entry in log if "examples_per_second" in entry]
    # Three steps an epoch, every one logged; the first has nothing to compare with.
    assert [entry["step"] for entry in rated] == [2, 3, 4, 5, 6]
    assert all(entry["examples_per_second"] > 0 for entry in rated)
    assert rated[0]["hours_to_go"] >= 0 and rated[-1]["hours_to_go"] == 0


@pytest.mark.slow
def test_a_log_has_two_figures_for_each_evaluation(train_file, uneven_file, tmp_path, capfd):
    """In whole lines; the table of the last evaluation follows. With --verbose, it has all that is logged."""
    flags = ["--train_files", train_file, "--validation_files", uneven_file, "--num_train_epochs", 2, "--do_eval"]
    flags += ["--eval_strategy", "epoch", "--save_strategy", "epoch", "--logging_steps", 2]
    command = [SCRIPT, "--do_train", *TINY_MODEL, "--use_cpu", "true", "--output_dir", tmp_path / "run", *flags]
    written = run_warm(*command)
    pattern = r"epoch [12]: loss \d\.\d+, accuracy \d+\.\d%"
    # DeepSpeed, if it is there, greets with a time in brackets.
    lines = [line for line in written.stdout.split("***")[0].splitlines() if not line.startswith("[20")]
    assert len(lines) == 2 and all(re.fullmatch(pattern, line) for line in lines)
    assert not re.search(r"\r|it/s|\d%\|", written.stdout + written.stderr)
    train(tmp_path / "verbose", *flags, "--verbose")
    lines = [line for line in capfd.readouterr().out.splitlines() if line.startswith("{")]
    # Five logs of the loss, three evaluations, and the whole training.
    assert len(lines) == 5 + 3 + 1 and sum("eval_loss_low" in line for line in lines) == 3
    config = json.loads((tmp_path / "verbose" / "run_config.json").read_text())
    assert "verbose" not in config["training"]


def test_the_evaluation_of_uneven_batches_is_exact(one_process, uneven_file):
    import datasets

    table = datasets.load_dataset("parquet", data_files=uneven_file, split="train")
    pixels = np.stack([np.asarray(row["image"]) for row in table]).transpose(0, 3, 1, 2) / 127.5 - 1
    labels = torch.tensor(table["label"][:])
    model = AutoModelForImageClassification.from_pretrained(one_process).eval().double()
    with torch.no_grad():
        logits = model(torch.from_numpy(pixels)).logits
    result = json.loads((one_process / "eval_results.json").read_text())
    assert result["eval_loss"] == pytest.approx(torch.nn.functional.cross_entropy(logits, labels).item(), abs=1e-6)
    assert result["eval_accuracy"] == (logits.argmax(1) == labels).double().mean().item()


def test_a_fresh_process_classifies_with_the_saved_folder(one_process, tmp_path):
    picture = Image.fromarray(np.random.default_rng(5).integers(256, size=(30, 20, 3), dtype=np.uint8))
    picture.save(tmp_path / "picture.png")
    code = (
        "import hf_liere, json, sys; from transformers import pipeline; "
        "print(json.dumps(pipeline('image-classification', sys.argv[1], device='cpu')(sys.argv[2])))"
    )
    result = run_warm("-c", code, one_process, tmp_path / "picture.png", cwd=tmp_path)
    answers = json.loads(result.stdout.splitlines()[-1])
    assert sorted(answer["label"] for answer in answers) == ["class0", "class1", "class2"]
    assert sum(answer["score"] for answer in answers) == pytest.approx(1, abs=1e-4)


def test_records_tell_the_run_but_not_the_machine(one_process, train_file):
    config = json.loads((one_process / "run_config.json").read_text())
    assert config["training"]["learning_rate"] == 1e-4 and config["training"]["label_smoothing_factor"] == 0.1
    assert config["model"]["hidden_size"] == 16 and config["augmentation"]["crop_padding"] == 2
    assert config["data"]["train_files"] == ["train.parquet"] and config["image_size"] == [16, 16]
    environment = json.loads((one_process / "environment.json").read_text())
    assert environment["world_size"] == 1 and environment["libraries"]["torch"] == torch.__version__.split("+")[0]
    assert not (one_process / "training_args.bin").exists()
    for path in one_process.glob("*.json"):
        text = path.read_text()
        assert socket.gethostname() not in text and str(one_process) not in text and str(ROOT) not in text, path.name
        assert train_file not in text and SECRET not in text, path.name


@pytest.mark.slow
def test_the_arrows_recipe_trains(tmp_path):
    """The example of the script's docstring, shortened; it runs from any folder."""
    flags = ["--recipe", ROOT / "training" / "recipes" / "arrows_mini.yaml", "--output_dir", "run"]
    flags += "--max_train_samples 64 --max_eval_samples 20 --warmup_steps 1 --total_train_batch_size 32".split()
    flags += ["--use_cpu", "true", "--lr_scheduler_kwargs", '{"num_decay_steps": 1}']
    run_warm(ROOT / "training" / "image_classification.py", *flags, cwd=tmp_path)
    assert steps_of(tmp_path / "run") == 2
    results = json.loads((tmp_path / "run" / "all_results.json").read_text())
    assert results["eval_samples"] == 20 and results["parameters"] > 10_000 and results["train_images_per_second"] > 0
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["id2label"] == {"0": "up", "1": "right", "2": "down", "3": "left"}


@pytest.mark.slow
def test_larger_arrows_are_larger_grids(tmp_path):
    flags = [*TINY_MODEL, "--dataset_name", "arrows", "--image_size", "108", "--patch_size", "12", "--use_cpu", "true"]
    flags += ["--max_train_samples", "8", "--max_eval_samples", "8", "--disable_tqdm", "true"]
    main([*flags, "--do_train", "--output_dir", str(tmp_path / "run")])
    flags = ["--model_name_or_path", str(tmp_path / "run"), "--dataset_name", "arrows", "--max_eval_samples", "8"]
    flags += ["--do_eval", "--use_cpu", "true", "--disable_tqdm", "true", "--image_size", "168"]
    assert main([*flags, "--output_dir", str(tmp_path / "at_168")])["eval_samples"] == 8


@pytest.mark.slow
def test_the_demo_runs_stops_and_finishes(tmp_path):
    """Far too few images to learn anything, which the exit code says."""
    command = [ROOT / "training" / "demo.py", "--images", 512, "--output_dir", tmp_path]
    first = run_warm(*command, status=1)
    assert "did not beat counting arrows" in first.stdout, first.stdout + first.stderr
    for name in (
        "accuracy.png",
        "example.png",
        "table.md",
        "puzzles/7_left.png",
        "liere8/model.safetensors",
        "comrope_ld_at_168/eval_results.json",
        "comrope_ld/config.json",
    ):
        assert (tmp_path / name).stat().st_size > 0
    assert "| accuracy at 168 px (95% interval) |" in first.stdout and "new images right" in first.stdout
    before = load_file(tmp_path / "liere8" / "model.safetensors")
    (tmp_path / "liere8" / "eval_results.json").unlink()
    (tmp_path / "absolute_at_168" / "eval_results.json").unlink()
    again = run_warm(*command, status=1)
    assert re.findall("(.*) is finished already", again.stdout) == ["rope_mixed", "comrope_ld"], again.stdout
    assert (tmp_path / "absolute_at_168" / "eval_results.json").is_file()
    after = load_file(tmp_path / "liere8" / "model.safetensors")
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.slow
def test_a_signal_ends_the_demo_and_its_runs(tmp_path):
    command = [sys.executable, ROOT / "training" / "demo.py", "--output_dir", tmp_path]
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH}
    with subprocess.Popen(map(str, command), env=environment, stdout=subprocess.PIPE, text=True) as demo:
        assert "60,000 images each, 2 at a time" in demo.stdout.readline()
        while len(runs := psutil.Process(demo.pid).children()) < 2:
            assert demo.poll() is None
            time.sleep(0.1)
        demo.terminate()
        assert demo.wait(120) == 128 + signal.SIGTERM
    assert not any(run.is_running() and run.status() != psutil.STATUS_ZOMBIE for run in runs)
