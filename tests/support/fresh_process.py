"""Code in a fresh process, with the package or without it."""

import os
import subprocess
import sys
import textwrap

import hf_liere


WITHOUT_PACKAGE = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "hf_liere":
            raise ModuleNotFoundError(f"No module named {name!r}")

sys.meta_path.insert(0, Absent())
"""


def run(code, tmp_path, package=True):
    """Run code in a fresh process, from another directory, with its own cache of remote code."""
    source = ("import hf_liere\n" if package else WITHOUT_PACKAGE) + textwrap.dedent(code)
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
    if package:
        environment["PYTHONPATH"] = os.path.dirname(os.path.dirname(hf_liere.__file__))
    process = subprocess.run(
        [sys.executable, "-c", source], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert process.returncode == 0, process.stderr
    return process.stdout.strip().splitlines()
