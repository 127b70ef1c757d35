"""What others expect of a Trainer and of a model: records for TensorBoard, Lightning, and several machines."""

import json
import os
import socket
import subprocess
import sys

import pytest
import torch
from checkout import ROOT
from training_helpers import SCRIPT, TINY_MODEL, TINY_RUN, assert_same_weights, train, write_parquet

import hf_liere


@pytest.fixture(scope="module")
def train_file(tmp_path_factory):
    return write_parquet(tmp_path_factory.mktemp("data") / "train.parquet", 16)


def test_tensorboard_has_what_the_run_logged(train_file, tmp_path, monkeypatch):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "board"))
    flags = ["--train_files", train_file, "--max_steps", 2, "--logging_steps", 1, "--report_to", "tensorboard"]
    train(tmp_path / "run", *flags)
    board = events.EventAccumulator(str(tmp_path / "board"))
    board.Reload()
    history = json.loads((tmp_path / "run" / "trainer_state.json").read_text())["log_history"]
    logged = [entry["loss"] for entry in history if "loss" in entry]
    assert len(logged) == 2
    assert [event.value for event in board.Scalars("train/loss")] == pytest.approx(logged, rel=1e-6)


def test_lightning_trains_by_the_snippet_of_the_page(tmp_path, monkeypatch):
    lightning = pytest.importorskip("lightning", reason="lightning is not installed")
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "fine_tuning.md").read_text()
    (snippet,) = (part.partition("```")[0] for part in page.split("```py\n")[1:])
    namespace = {}
    exec(compile(snippet, "fine_tuning.md", "exec"), namespace)
    trainer, module = namespace["trainer"], namespace["module"]
    assert isinstance(trainer, lightning.Trainer) and trainer.global_step == 2
    decays = {
        id(parameter): group["weight_decay"]
        for group in trainer.optimizers[0].param_groups
        for parameter in group["params"]
    }
    rotations = {id(parameter) for _, parameter in module.model.rotary_parameters()}
    assert rotations and {decays[each] for each in rotations} == {0.0}
    assert {decays[id(parameter)] for parameter in module.model.parameters()} == {0.0, 0.05}
    loaded = hf_liere.LieREViTForImageClassification.from_pretrained("outputs/lightning")
    for name, value in module.model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name


@pytest.mark.slow
def test_two_machines_equal_one(train_file, tmp_path):
    """`accelerate launch` on each, with its rank and the address of the first; here both are this machine."""
    flags = ["--train_files", train_file, "--max_steps", 2, "--logging_steps", 1, "--total_train_batch_size", 8]
    train(tmp_path / "one", *flags)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--mixed_precision", "no", "--num_processes", "2"]
    launch += ["--config_file", str(ROOT / "training" / "recipes" / "accelerate" / "multi_node.yaml")]
    launch += ["--main_process_ip", "127.0.0.1", "--main_process_port", str(port)]
    script = [SCRIPT, "--output_dir", tmp_path / "two", "--do_train", *TINY_MODEL, *TINY_RUN, *flags]
    # No flag says that there is no GPU: the script finds out.
    script += ["--use_cpu", "false", "--per_device_train_batch_size", 4]
    machines = [
        subprocess.Popen(
            [*launch, "--machine_rank", str(rank), *map(str, script)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    printed = [machine.communicate(timeout=300)[0] for machine in machines]
    assert [machine.returncode for machine in machines] == [0, 0], "\n".join(printed)[-6000:]
    found = json.loads((tmp_path / "two" / "environment.json").read_text())
    assert found["world_size"] == 2
    # float32 sums of two halves.
    assert_same_weights(tmp_path / "one", tmp_path / "two", 1e-6)
