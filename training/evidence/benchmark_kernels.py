"""
Compares the exponential of the folder that `make kernels-folder` writes with `torch.matrix_exp`. Needs `kernels`.

    python training/evidence/benchmark_kernels.py outputs/kernels --threads 1

Prints how many times as long `torch.matrix_exp` takes in float32 and in float64, forward alone and with the backward
pass: medians of the rounds with their 95% intervals, both functions in turn. Errors are those of the result in float32,
beside `torch.matrix_exp` in float64. The kernel computes products in float64.
"""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path


sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from kernels import get_local_kernel

from training.evidence.reporting.markdown import markdown
from training.evidence.speed.clocks import CLOCKS, measure_seconds
from training.evidence.speed.intervals import estimate


# Block size, and the number of blocks.
CASES = ((4, 16384), (8, 4096), (16, 1024), (32, 256), (64, 96))
# Standard deviation of the entries above the diagonal.
SCALE = 0.5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--threads", type=int, default=1, help="%(default)s")
    parser.add_argument("--rounds", type=int, default=15, help="%(default)s")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="%(default)s; cpu counts processor time")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    kernel = get_local_kernel(options.folder, backend="cpu")
    rows = []
    for size, count in CASES:
        generators = kernel.skew(SCALE * torch.randn(count, size * (size - 1) // 2), size)  # (count, b, b)
        exact, wide = torch.matrix_exp(generators.double()), generators.double()
        errors = [
            f"{(found(generators).double() - exact).abs().max():.0e}"
            for found in (kernel.skew_exponential, torch.matrix_exp)
        ]
        passes = ((run, values) for run in (forward, with_backward) for values in (generators, wide))
        ratios = [
            ratio(partial(run, torch.matrix_exp, values), partial(run, kernel.skew_exponential, generators), options)
            for run, values in passes
        ]
        rows.append([f"{count} of {size} × {size}", *ratios, *errors])
    header = ["blocks", "float32, forward", "float64, forward", "float32, both passes", "float64, both passes"]
    print(markdown([*header, "error", "of `torch.matrix_exp`"], rows, "---:"))


def forward(exponential: Callable, generators: torch.Tensor) -> torch.Tensor:
    return exponential(generators)


def with_backward(exponential: Callable, generators: torch.Tensor) -> None:
    generators = generators.detach().requires_grad_()
    exponential(generators).sum().backward()


def ratio(first: Callable, second: Callable, options: argparse.Namespace) -> str:
    """The time of the first relative to that of the second."""
    first(), second()
    seconds = (
        [measure_seconds(run, 1, "cpu")[options.clock] for run in (first, second)] for _ in range(options.rounds)
    )
    found = estimate([one / other for one, other in seconds])
    return f"{found.median:.1f} ({found.low:.1f} … {found.high:.1f})"


if __name__ == "__main__":
    main()
