"""The module of Triton's kernels under another name."""

import importlib.util
from pathlib import Path

import pytest
import torch

import hf_liere


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SOURCE = Path(hf_liere.__file__).with_name("kernels") / "cuda.py"


def load_kernels(path=SOURCE):
    """The kernels of this source, which Triton interprets where there is no GPU."""
    specification = importlib.util.spec_from_file_location(f"hf_liere.kernels.{path.stem}_loaded", path)
    module = importlib.util.module_from_spec(specification)
    with pytest.MonkeyPatch.context() as patch:
        # Triton decides between compiling and interpreting a kernel when it sees its source.
        patch.setenv("TRITON_INTERPRET", str(int(DEVICE == "cpu")))
        specification.loader.exec_module(module)
    return module
