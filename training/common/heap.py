"""Memory that a process keeps between steps."""

import ctypes
import os
import platform


# Numbers of the two thresholds in malloc.h, and the largest that mallopt takes.
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
LARGEST = 2**31 - 1
VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def keep_freed_memory() -> None:
    """
    Lets glibc keep the memory that a step frees for the next step.

    By default, it returns large blocks to the system, which then gives them back page by page: on a CPU, a step of
    LieRE64 takes a tenth longer for that (docs/speed.md). Does nothing where the C library is another one (macOS,
    Windows, musl), or where the environment has set these thresholds.
    """
    if platform.libc_ver()[0] == "glibc" and not any(name in os.environ for name in VARIABLES):
        library = ctypes.CDLL(None)
        for threshold in (TRIM_THRESHOLD, MMAP_THRESHOLD):
            library.mallopt(threshold, LARGEST)
