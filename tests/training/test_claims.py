"""Runs that start in one folder at the same time: one gets it, and whoever has it may be killed."""

import os
import re
import subprocess
import sys

import pytest
from checkout import ROOT

from hf_liere.errors import InputError
from training import token_classification
from training.common.arguments import RunArguments
from training.engine.claims import CLAIM, claim, giving_back, release
from training.engine.runs import prepare_output_dir


IN_USE = "is that of a run that has not ended"
# Takes a folder once it is told to, says whether it could, and keeps it until its input ends.
TAKER = """
import sys
from pathlib import Path
from hf_liere.errors import InputError
from training.engine.claims import claim

sys.stdin.readline()
try:
    claim(Path(sys.argv[1]))
    print("taken", flush=True)
except InputError as error:
    print(error, flush=True)
sys.stdin.read()
"""


def start_taker(folder):
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen([sys.executable, "-c", TAKER, str(folder)], env=environment, **pipes)


def take(taker):
    taker.stdin.write("\n")
    taker.stdin.flush()


def arguments(folder, **options):
    return RunArguments(output_dir=str(folder), do_train=True, use_cpu=True, **options)


@pytest.mark.parametrize("second", [{}, {"overwrite_output_dir": True}, {"seed": 1}])
def test_a_second_run_of_this_process_is_refused(tmp_path, second):
    first = arguments(tmp_path / "run")
    with giving_back():
        prepare_output_dir(first)
        with pytest.raises(InputError, match=rf"{IN_USE} \(process {os.getpid()} on .*another folder"):
            prepare_output_dir(arguments(tmp_path / "run", **second))
        with pytest.raises(InputError, match=IN_USE):
            prepare_output_dir(arguments(tmp_path / "elsewhere" / ".." / "run", **second))
    prepare_output_dir(first)


def test_who_keeps_the_error_of_a_run_keeps_no_folder(tmp_path):
    """As notebooks do."""
    run = ["--dataset_name", "solids", "--output_dir", str(tmp_path / "run"), "--use_cpu", "true", "--do_train", "true"]
    with pytest.raises(InputError, match="absent") as kept:
        token_classification.main([*run, "--model_name_or_path", str(tmp_path / "absent")])
    assert kept.traceback and not (tmp_path / "run" / CLAIM).exists()


def test_a_refused_folder_stays_free(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    wanted = arguments(tmp_path)
    for _ in range(2):
        with pytest.raises(InputError, match="contains other files .notes.txt."):
            prepare_output_dir(wanted)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.slow
def test_one_of_several_processes_gets_a_folder_until_it_is_killed(tmp_path):
    takers = [start_taker(tmp_path) for _ in range(4)]
    try:
        for taker in takers:
            take(taker)
        answers = [taker.stdout.readline().strip() for taker in takers]
        (winner,) = (taker for taker, answer in zip(takers, answers) if answer == "taken")
        told = {re.search(rf"{IN_USE}.*", answer)[0] for answer in answers if answer != "taken"}
        # Who loses while the winner still writes its name does not read it.
        assert all(f"(process {winner.pid} on " in answer or answer.startswith(f"{IN_USE};") for answer in told)
        with pytest.raises(InputError, match=rf"{IN_USE} \(process {winner.pid} on "):
            prepare_output_dir(arguments(tmp_path))
        winner.kill()
        winner.wait()
        # Its claim is left, and means nothing.
        assert (tmp_path / CLAIM).exists()
        prepare_output_dir(arguments(tmp_path))
        assert str(os.getpid()) in (tmp_path / CLAIM).read_text()
    finally:
        for taker in takers:
            taker.kill()
            taker.wait()


@pytest.mark.parametrize("ends", ["worker", "run"])
def test_workers_neither_keep_nor_end_a_claim(tmp_path, ends):
    claim(tmp_path)
    (tmp_path / CLAIM).read_text()
    reading, writing = os.pipe()
    worker = os.fork()
    if worker == 0:
        os.close(writing)
        if ends == "run":
            os.read(reading, 1)
        release(tmp_path)
        os._exit(0)
    if ends == "worker":
        os.waitpid(worker, 0)
    with pytest.raises(InputError, match=IN_USE):
        claim(tmp_path)
    release(tmp_path)
    assert not (tmp_path / CLAIM).exists()
    claim(tmp_path)
    os.close(writing)
    if ends == "run":
        os.waitpid(worker, 0)
