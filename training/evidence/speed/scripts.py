"""What the scripts that write json lines have in common: flags of the output, blocks A X X A, errors in one line."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from training.evidence.speed.intervals import Estimate, estimate
from training.evidence.speed.models import BenchmarkError


CONFIDENCE = 0.90


def output_parser(description: str | None) -> argparse.ArgumentParser:
    """A parser with the flags that [`Records`] takes."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="json lines")
    parser.add_argument("--resume", action="store_true", help="go on with an output that exists")
    parser.add_argument("--show", action="store_true", help="measure nothing; print the table of an output that exists")
    return parser


def block_parser(description: str | None) -> argparse.ArgumentParser:
    """An [`output_parser`] of a script that compares by blocks of the steps A, X, X, A."""
    parser = output_parser(description)
    parser.add_argument("--blocks", type=int, default=15, help="blocks of four steps (15)")
    return parser


def block_ratio(blocks: list[list[float]]) -> Estimate:
    """The median over the blocks of X/A, with its interval."""
    return estimate([(x + y) / (a + b) for a, x, y, b in blocks], CONFIDENCE)


def run_script(main: Callable[[], int]) -> NoReturn:
    """Ends the process with the result of `main`, or with its [`BenchmarkError`] in one line."""
    try:
        sys.exit(main())
    except BenchmarkError as error:
        sys.exit(f"error: {error}")
