"""Runs that are killed, stopped, or out of disk: what they leave is whole, and going on ends at the same weights."""

import glob
import os
import re
import resource
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch
from checkout import ROOT
from fresh_process import run_python
from slow_cases import slow_except
from torch.utils.data import DataLoader
from training_helpers import SCRIPT, TINY_MODEL, TINY_RUN, assert_same_weights, main, train, write_parquet

from training.common.folders import last_complete_checkpoint
from training.common.messages import is_lost_worker
from training.engine.saving import ASIDE


LAST = "checkpoint-80"
SCHEDULE = ["--num_train_epochs", 16, "--save_steps", 10, "--drop_path_rate", 0.2, "--hidden_dropout_prob", 0.1]
SCHEDULE += ["--position_perturbation", 0.5, "--crop_padding", 2, "--flip_probability", 0.5, "--mixup_alpha", 0.8]
# What else the recipe cifar100_small draws, and how it computes.
SCHEDULE += ["--cutmix_alpha", 1.0, "--rand_augment_ops", 2, "--bf16", "true", "--attn_implementation", "eager"]


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """As in the processes that are started here: sums in another order would differ in the last bit."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    return ["--train_files", write_parquet(tmp_path_factory.mktemp("data") / "train.parquet", 40), *SCHEDULE]


@pytest.fixture(scope="module")
def whole(flags, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    train(folder, *flags)
    return folder


def start(folder, flags, *launcher, **kwargs) -> subprocess.Popen:
    command = [sys.executable, *launcher, str(SCRIPT), "--output_dir", str(folder), "--do_train"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    # A test that runs in the background may have to ignore SIGINT, which its processes would inherit.
    kwargs.setdefault("preexec_fn", lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    return subprocess.Popen([*command, *TINY_MODEL, *TINY_RUN, *map(str, flags)], env=environment, **pipes, **kwargs)


def read_until_it_learns(process: subprocess.Popen) -> str:
    """What a process says until it logs a loss of its third epoch."""
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith("epoch 2"):
            break
    return "".join(lines)


def wait_for(condition, process: subprocess.Popen) -> None:
    limit = time.monotonic() + 240
    while not condition():
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < limit
        time.sleep(0.0005)


@pytest.mark.parametrize("moment", [pytest.param("while training", marks=pytest.mark.slow), "while saving"])
def test_a_killed_run_resumes_to_the_same_weights(moment, flags, whole, tmp_path):
    process = start(tmp_path, flags)
    wait_for(lambda: (tmp_path / "checkpoint-20").is_dir(), process)
    if moment == "while saving":
        # Unlike pathlib's, this one takes a folder that goes meanwhile.
        wait_for(lambda: glob.glob(str(tmp_path / ASIDE / "*" / "*")), process)
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL and not (tmp_path / "model.safetensors").exists()
    for path in tmp_path.glob("checkpoint-*"):
        assert {entry.name for entry in path.iterdir()} == {entry.name for entry in (whole / LAST).iterdir()}
    train(tmp_path, *flags, "--resume_from_checkpoint", "last")
    assert_same_weights(whole, tmp_path)
    assert not (tmp_path / ASIDE).exists()


def test_a_half_written_checkpoint_is_never_picked_up(whole, flags, tmp_path):
    for step in (20, 30, 40):
        (tmp_path / f"checkpoint-{step}").mkdir()
    (tmp_path / ASIDE / "checkpoint-50").mkdir(parents=True)
    (tmp_path / ASIDE / "checkpoint-50" / "trainer_state.json").write_text("{}")
    (tmp_path / "checkpoint-best").mkdir()
    assert last_complete_checkpoint(tmp_path) is None
    with pytest.raises(ValueError, match="--resume_from_checkpoint last: .* contains no complete checkpoint"):
        train(tmp_path, *flags, "--resume_from_checkpoint", "last")
    (tmp_path / "checkpoint-20" / "trainer_state.json").write_text("{}")
    assert last_complete_checkpoint(tmp_path) == str(tmp_path / "checkpoint-20")
    assert last_complete_checkpoint(whole) == str(whole / LAST)


@pytest.mark.slow
def test_a_worker_that_dies_is_one_sentence(flags, tmp_path):
    workers = ["--dataloader_num_workers", 2, "--dataloader_persistent_workers", "true"]
    process = start(tmp_path, [*flags, *workers, "--logging_steps", 1])
    read_until_it_learns(process)
    psutil.Process(process.pid).children()[-1].kill()
    output = process.communicate(timeout=240)[0]
    # Python itself reports a progress bar whose construction the signal interrupted.
    ignored = r"Exception ignored in: .*tqdm.*\n\s*Traceback.*\n(\s+.*\n)*?\s*AttributeError: .*\n"
    output = re.sub(ignored, "", output)
    assert process.returncode == 1 and "Traceback" not in output, output
    # A line of the log that is still open may come before it. What is noticed while saving names the checkpoint, too.
    assert re.search(r"error: .*a data loader worker died \(.*--dataloader_num_workers.*\n$", output), output


def test_an_example_that_cannot_be_read_is_no_dead_worker(tmp_path):
    """Neither in a worker, whose error comes back, nor in the process itself."""
    for workers in (0, 1):
        with pytest.raises(FileNotFoundError) as caught:
            next(iter(DataLoader([1], num_workers=workers, collate_fn=partial(open_first, tmp_path / "absent"))))
        assert not is_lost_worker(caught.value)


def open_first(path, batch):
    path.open()


@pytest.mark.parametrize(
    "number, processes, workers",
    [
        pytest.param(signal.SIGTERM, 1, 0, marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, 1, 2, marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, 2, 0, marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, 2, 0, marks=pytest.mark.slow),
    ],
)
def test_a_run_that_is_told_to_stop_saves_and_goes_on(number, processes, workers, flags, whole, tmp_path):
    """Two processes get the signal at different moments and must stop at the same step."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"] if processes == 2 else []
    batch = ["--total_train_batch_size", 8, "--save_steps", 1000, "--dataloader_num_workers", workers]
    process = start(tmp_path, [*flags, *batch, "--logging_steps", 1], *launcher, start_new_session=True)
    output = read_until_it_learns(process)
    if number == signal.SIGINT and processes == 1:
        # A terminal sends it to the workers of the data loader as well.
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)
    output += process.communicate()[0]
    stopped = last_complete_checkpoint(tmp_path)
    assert stopped is not None, output
    assert f"Stopped by {number.name}; {Path(stopped).name} is saved, --resume_from_checkpoint last resumes" in output
    assert not (tmp_path / "model.safetensors").exists()
    if processes == 1:
        assert process.returncode == 128 + number and "Traceback" not in output
        train(tmp_path, *flags, "--resume_from_checkpoint", "last")
        assert_same_weights(whole, tmp_path)
    else:
        assert process.returncode != 0
        # Of as many processes: every one drops other paths.
        uninterrupted = tmp_path / "uninterrupted"
        for folder, more in ((tmp_path, ["--resume_from_checkpoint", "last"]), (uninterrupted, [])):
            rest = start(folder, [*flags, *batch, *more], *launcher)
            output = rest.communicate()[0]
            assert rest.returncode == 0, output
        assert_same_weights(uninterrupted, tmp_path)


@pytest.mark.slow
def test_a_second_interrupt_ends_a_run_at_once():
    code = (
        "import os, signal; from training.engine.saving import StopRequest; request = StopRequest(None); "
        "request.on_train_begin(None, None, None); os.kill(os.getpid(), signal.SIGINT); "
        "print('goes on', flush=True); os.kill(os.getpid(), signal.SIGINT); print('still there', flush=True)"
    )
    # As in `start`, SIGINT may be ignored here.
    options = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)}
    process = run_python("-c", code, status=-signal.SIGINT, **options)
    assert process.stdout == "goes on\n" and "Traceback" not in process.stderr, process.stderr


@pytest.mark.slow
def test_a_full_disk_ends_with_a_message_and_a_whole_checkpoint(flags, tmp_path):
    """A limit on the size of files, which weights exceed in the middle of being written."""
    train(tmp_path, *flags, "--max_steps", 20)
    before = {path.name: path.read_bytes() for path in (tmp_path / "checkpoint-20").iterdir()}
    limit = (tmp_path / "checkpoint-20" / "optimizer.pt").stat().st_size - 1000

    process = start(
        tmp_path,
        [*flags, "--resume_from_checkpoint", "last"],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )
    output = process.communicate()[0]
    assert process.returncode == 1 and "Traceback" not in output, output
    assert "error: checkpoint-30 could not be saved (" in output
    assert "checkpoint-20 is intact, --resume_from_checkpoint last resumes from it." in output
    assert {path.name: path.read_bytes() for path in (tmp_path / "checkpoint-20").iterdir()} == before
    assert not (tmp_path / ASIDE).exists() and not (tmp_path / "checkpoint-30").exists()


@pytest.mark.slow
def test_a_model_that_does_not_fit_the_disk_leaves_nothing_of_itself(flags, whole, tmp_path):
    """The weights exceed the size that files may have; configuration and code, which come before them, do not."""
    limit = (whole / "model.safetensors").stat().st_size - 1000
    process = start(
        tmp_path,
        [*flags, "--save_strategy", "no", "--max_steps", 2],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )
    output = process.communicate()[0]
    assert process.returncode == 1 and "Traceback" not in output, output
    assert "error: The model could not be saved (" in output
    assert "there is no checkpoint to resume from." in output
    assert {path.name for path in tmp_path.iterdir()} == {"run_config.json", "environment.json"}


@pytest.mark.parametrize("flag", [*slow_except((), ("resume", "overwrite")), None])
def test_a_run_does_not_write_among_files_of_others(flag, flags, tmp_path):
    (tmp_path / "holiday.txt").write_text("mine")
    if flag is None:
        with pytest.raises(ValueError, match=r"contains other files \(holiday.txt\); accepted: a new or empty folder"):
            train(tmp_path, *flags)
        assert [path.name for path in tmp_path.iterdir()] == ["holiday.txt"]
        return
    train(tmp_path, *flags, "--max_steps", 10, "--overwrite_output_dir")
    again = ["--resume_from_checkpoint", "last"] if flag == "resume" else ["--overwrite_output_dir"]
    train(tmp_path, *flags, "--max_steps", 20, *again)
    assert (tmp_path / "holiday.txt").read_text() == "mine" and (tmp_path / "checkpoint-20").is_dir()


def test_a_folder_that_takes_no_files_is_found_before_training(flags, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ValueError, match="--output_dir .*file/run' is not writable: Not a directory"):
        train(tmp_path / "file" / "run", *flags)


def test_old_checkpoints_go_and_the_best_one_stays(tmp_path, flags):
    """The state names the folder that the checkpoint has, not the one in which it was written."""
    import json

    validation = write_parquet(tmp_path / "test.parquet", 12, seed=1)
    best = ["--validation_files", validation, "--eval_strategy", "steps", "--eval_steps", 10, "--save_total_limit", 2]
    best += ["--load_best_model_at_end", "true", "--metric_for_best_model", "loss", "--max_steps", 60]
    train(tmp_path / "run", *flags, *best, "--learning_rate", 1e-2)
    state = json.loads((tmp_path / "run" / "trainer_state.json").read_text())
    left = {path.name for path in (tmp_path / "run").glob("checkpoint-*")}
    losses = {entry["step"]: entry["eval_loss"] for entry in state["log_history"] if "eval_loss" in entry}
    expected = f"checkpoint-{min(losses, key=losses.get)}"
    assert left == {expected, "checkpoint-60"}
    assert state["best_model_checkpoint"] == str(tmp_path / "run" / expected)
    saved = json.loads((tmp_path / "run" / expected / "trainer_state.json").read_text())
    assert saved["best_model_checkpoint"] == str(tmp_path / "run" / expected)
    flags = ["--model_name_or_path", str(tmp_path / "run"), "--validation_files", validation, "--do_eval", *TINY_RUN]
    flags += ["--bf16", "true", "--attn_implementation", "eager"]  # as the losses of the run were computed
    metrics = main([*flags, "--output_dir", str(tmp_path / "eval")])
    assert metrics["eval_loss"] == pytest.approx(min(losses.values()), abs=1e-6)
