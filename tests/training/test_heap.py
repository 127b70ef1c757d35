"""Scripts keep the memory that a step frees: the next step finds its pages, instead of asking the system for each."""

import os
import platform

import pytest
from fresh_process import run_python

from training.common.heap import VARIABLES


# Four steps that allocate and free 64 MiB, in pages of 4 KiB at most 16,384; faults of the last.
CODE = """
import resource, torch
from training.engine.runs import start

def steps():
    for _ in range(4):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.empty(2**24).fill_(1)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

start(steps)
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no such thresholds")
def test_a_step_finds_the_pages_that_the_last_one_freed():
    if any(name in os.environ for name in VARIABLES):
        pytest.skip("the environment sets the thresholds")
    kept = int(run_python("-c", CODE).stdout)
    returned = int(run_python("-c", CODE, variables={"MALLOC_MMAP_THRESHOLD_": "65536"}).stdout)
    assert kept < returned / 4, (kept, returned)
