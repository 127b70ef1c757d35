"""Runs one section of gpu_check.py and appends its Markdown to a file."""

import argparse
import faulthandler
from pathlib import Path

import torch

from training.evidence.gpu.sections import SECTIONS, Settings


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("section", choices=SECTIONS)
    parser.add_argument("output", type=Path)
    parser.add_argument("device")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    faulthandler.enable()
    # With TF32, float32 convolutions have errors of 1e-3 on GPUs.
    torch.backends.cudnn.allow_tf32 = False
    with options.output.open("a", encoding="utf-8") as file:
        for text in SECTIONS[options.section](Settings(options.device, options.quick)):
            print(text, file=file, flush=True)


if __name__ == "__main__":
    main()
