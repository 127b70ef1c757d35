"""Python in a fresh process, with the package or without it."""

import os
import subprocess
import sys
import textwrap

from checkout import PYTHONPATH


WITHOUT_PACKAGE = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "hf_liere":
            raise ModuleNotFoundError(f"No module named {name!r}")

sys.meta_path.insert(0, Absent())
"""


def run_python(*arguments, status=0, variables=None, **options) -> subprocess.CompletedProcess:
    """Python with these arguments: it finds the package and the modules of the tests, and exits with this status."""
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH, **(variables or {})}
    command = [sys.executable, *map(str, arguments)]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, **options)
    assert process.returncode == status, f"{process.stdout[-4000:]}\n{process.stderr[-6000:]}"
    return process


def run_two_processes(*arguments, **variables) -> subprocess.CompletedProcess:
    """A script in two processes on the CPU."""
    variables |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
    return run_python(*launcher, *arguments, variables=variables)


def run_code(code, folder, package=True):
    """The lines that code prints in this folder, with its own cache of remote code."""
    source = ("import hf_liere\n" if package else WITHOUT_PACKAGE) + textwrap.dedent(code)
    variables = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "home")}
    return run_python("-c", source, cwd=folder, variables=variables, timeout=300).stdout.strip().splitlines()
