"""Python in a fresh process, with the package or without it."""

import multiprocessing.connection
import os
import runpy
import socket
import subprocess
import sys
import textwrap
import time
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
# None of these reads the variables that tests set.
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


def run_warm(*arguments, status=0, variables=None, cwd=None) -> subprocess.CompletedProcess:
    """
    [`run_python`] in a copy of a process that has imported torch, but neither Transformers nor this package: it starts
    in a third of the time. Variables that torch reads when it is imported have no effect.
    """
    return _run_warm(arguments, cwd, [variables or {}], status)


def run_with_torchrun(*arguments) -> subprocess.CompletedProcess:
    """A script in two processes on the CPU."""
    variables = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return run_python(
        "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", *arguments, variables=variables
    )


def run_two_processes(*arguments, **variables) -> subprocess.CompletedProcess:
    return run_processes(2, *arguments, **variables)


def run_processes(count: int, *arguments, **variables) -> subprocess.CompletedProcess:
    """[`run_with_torchrun`] without torchrun: copies as of [`run_warm`], with the variables that it would set."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    variables |= {"CUDA_VISIBLE_DEVICES": "", "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    variables |= {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    ranks = map(str, range(count))
    return _run_warm(arguments, None, [{**variables, "RANK": rank, "LOCAL_RANK": rank} for rank in ranks])


def run_code(code, folder, package=True):
    """
    The lines that code prints in this folder, with its own cache of remote code. `package` says whether hf_liere can be
    imported; `None` means that it can, and is not.
    """
    source = {True: "import hf_liere\n", False: WITHOUT_PACKAGE, None: ""}[package] + textwrap.dedent(code)
    variables = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "home")}
    return run_warm("-c", source, variables=variables, cwd=folder).stdout.strip().splitlines()


def _run_warm(arguments, cwd, variables, status=0) -> subprocess.CompletedProcess:
    """One process for each of the `variables`, of which those that are `None` are unset."""
    command = list(map(str, arguments))
    with TemporaryDirectory() as outputs:
        files = [Path(outputs, stream) for stream in ("stdout", "stderr")]
        for file in files:
            file.touch()
        environments = [{**os.environ, "PYTHONPATH": PYTHONPATH, **own} for own in variables]
        started = [_SERVER.Process(target=_run, args=(command, cwd, own, files)) for own in environments]
        for process in started:
            process.start()
        running, end = started, time.monotonic() + SECONDS
        # A process that fails leaves the other one waiting for it.
        while running and not any(process.exitcode for process in started) and time.monotonic() < end:
            multiprocessing.connection.wait([process.sentinel for process in running], 1)
            running = [process for process in running if process.exitcode is None]
        codes = [process.exitcode for process in started]
        for process in started:
            process.kill()
            process.join()
        stdout, stderr = (file.read_text() for file in files)
    assert codes == [status] * len(codes), f"{codes}: {stdout[-4000:]}\n{stderr[-6000:]}"
    return subprocess.CompletedProcess(command, status, stdout, stderr)


def _run(command, cwd, environment, files) -> None:
    for file, stream in zip(files, (1, 2), strict=True):
        os.dup2(os.open(file, os.O_WRONLY | os.O_APPEND), stream)
    os.environ.clear()
    os.environ.update({name: value for name, value in environment.items() if value is not None})
    if cwd is not None:
        os.chdir(cwd)
    # Transformers put the remote code of other tests there, under the same name.
    sys.path[:] = [place for place in sys.path if not Path(place, "transformers_modules").exists()]
    sys.path[:0] = PYTHONPATH.split(os.pathsep)
    kind = command[0] if command[0] in ("-c", "-m") else None
    what, *sys.argv[1:] = command[bool(kind) :]
    sys.argv[0] = kind or what
    # As Python does: the folder of the script, or that of the process.
    sys.path.insert(0, "" if kind else str(Path(what).parent))
    if kind == "-m":
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.modules["__main__"] = main = types.ModuleType("__main__")
        exec(compile(what, "<string>", "exec"), vars(main))
    else:
        runpy.run_path(what, run_name="__main__")
