"""HF_LIERE_REQUIRE: what a machine lacks skips tests, and fails them where it is said to be there."""

import os
import subprocess
import sys

import pytest
from checkout import ROOT, TESTS


@pytest.mark.slow
@pytest.mark.parametrize("required, outcome", [("", "1 skipped"), ("kernels,browser", "1 error"), ("compiler", "")])
def test_a_machine_without_kernels(required, outcome):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "number_of_threads"]
    environment = {**os.environ, "HF_LIERE_CPU_KERNELS": "0", "HF_LIERE_REQUIRE": required}
    result = subprocess.run(
        [*command, str(TESTS / "kernels" / "test_cpu_kernels.py")],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert (result.returncode == 0) == (required == "")
    assert outcome in result.stdout
    if required == "compiler":
        assert "HF_LIERE_REQUIRE is 'compiler'; accepted, with commas: kernels, browser, common." in result.stderr
