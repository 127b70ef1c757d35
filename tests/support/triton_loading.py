"""The module of Triton's kernels under another name."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

import hf_liere


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SOURCE = Path(hf_liere.__file__).with_name("kernels") / "cuda.py"


EXPONENTIALS = SOURCE.with_name("cuda_exponentials.py")


def load_kernels(path=SOURCE, exponentials=EXPONENTIALS):
    """The kernels of these sources, which Triton interprets where there is no GPU."""
    with pytest.MonkeyPatch.context() as patch:
        # Triton decides between compiling and interpreting a kernel when it sees its source.
        patch.setenv("TRITON_INTERPRET", str(int(DEVICE == "cpu")))
        patch.setitem(sys.modules, "hf_liere.kernels.cuda_exponentials", load_module(exponentials))
        module = load_module(path)
    if DEVICE == "cpu":
        interpret_reductions()
    return module


def load_module(path):
    specification = importlib.util.spec_from_file_location(f"hf_liere.kernels.{path.stem}_loaded", path)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def interpret_reductions():
    """Functions of Triton that are kernels themselves: it had decided to compile them when it was imported."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpretedFunction

    for name in ("sum", "max"):
        if not isinstance(function := getattr(tl, name), InterpretedFunction):
            setattr(tl, name, InterpretedFunction(function.fn))
