"""Python in a fresh process, with the package or without it."""

import multiprocessing
import os
import runpy
import socket
import subprocess
import sys
import textwrap
import types
from pathlib import Path
from tempfile import TemporaryDirectory

from checkout import PYTHONPATH


WITHOUT_PACKAGE = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "hf_liere":
            raise ModuleNotFoundError(f"No module named {name!r}")

sys.meta_path.insert(0, Absent())
"""
# Most of the time that a process takes to start. None of these reads the variables that tests set.
_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(["torch", "torch._dynamo", "torchvision", "scipy.optimize", "pandas"])
SECONDS = 300


def run_python(*arguments, status=0, variables=None, **options) -> subprocess.CompletedProcess:
    """Python with these arguments: it finds the package and the modules of the tests, and exits with this status."""
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH, **(variables or {})}
    command = [sys.executable, *map(str, arguments)]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, **options)
    assert process.returncode == status, f"{process.stdout[-4000:]}\n{process.stderr[-6000:]}"
    return process


def run_two_processes(script, *arguments, **variables) -> subprocess.CompletedProcess:
    """A script in two processes on the CPU, as torchrun would start them."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    variables |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": PYTHONPATH}
    variables |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
    return _run_warm([str(script), *map(str, arguments)], None, Path.cwd(), [variables | rank for rank in ranks])


def run_code(code, folder, package=True):
    """The lines that code prints in this folder, with its own cache of remote code."""
    source = ("import hf_liere\n" if package else WITHOUT_PACKAGE) + textwrap.dedent(code)
    variables = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "home"), "PYTHONPATH": PYTHONPATH}
    return _run_warm(["-c"], source, folder, [variables]).stdout.strip().splitlines()


def _run_warm(argv, source, folder, processes) -> subprocess.CompletedProcess:
    """
    Runs a file, or `source`, once with each of these variables. Processes are copies of one that has imported torch, but
    neither Transformers nor this package.
    """
    with TemporaryDirectory() as outputs:
        files = [Path(outputs, name) for name in ("out", "err")]
        for file in files:
            file.touch()
        environments = [{**os.environ, **variables} for variables in processes]
        started = [_SERVER.Process(target=_run, args=(argv, source, folder, env, files)) for env in environments]
        for process in started:
            process.start()
        # One that fails leaves the others waiting for it.
        for process in started:
            process.join(SECONDS)
        failed = [process.exitcode for process in started if process.exitcode != 0]
        for process in started:
            process.kill()
            process.join()
        stdout, stderr = (file.read_text() for file in files)
    assert not failed, f"{failed}: {stdout[-4000:]}\n{stderr[-6000:]}"
    return subprocess.CompletedProcess(argv, 0, stdout, stderr)


def _run(argv, source, folder, environment, files) -> None:
    for file, stream in zip(files, (1, 2), strict=True):
        os.dup2(os.open(file, os.O_WRONLY | os.O_APPEND), stream)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv = argv
    sys.path[:0] = [str(Path(argv[0]).parent) if source is None else "", *PYTHONPATH.split(os.pathsep)]
    if source is None:
        runpy.run_path(argv[0], run_name="__main__")
    else:
        sys.modules["__main__"] = main = types.ModuleType("__main__")
        exec(compile(source, "<string>", "exec"), vars(main))
    sys.stdout.flush()
