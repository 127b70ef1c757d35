"""Runs one section of gpu_check.py and appends its Markdown to a file, and what it measures to the record."""

import argparse
import faulthandler
import math
import sys
from pathlib import Path

import torch

from training.evidence.gpu.models import OutOfTime
from training.evidence.gpu.sections import SECTIONS, TIMED, Settings


OUT_OF_TIME = 75


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("section", choices=SECTIONS)
    parser.add_argument("output", type=Path)
    parser.add_argument("device")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--record", type=Path)
    parser.add_argument("--until", type=float, default=math.inf)
    options = parser.parse_args()
    faulthandler.enable()
    # With TF32, float32 convolutions have errors of 1e-3 on GPUs. What is timed runs as users run it.
    torch.backends.cudnn.allow_tf32 = options.section in TIMED
    settings = Settings(options.device, options.quick, options.record, options.until)
    with options.output.open("a", encoding="utf-8") as file:
        try:
            for text in SECTIONS[options.section](settings):
                print(text, file=file, flush=True)
        except OutOfTime:
            sys.exit(OUT_OF_TIME)


if __name__ == "__main__":
    main()
