"""Time and memory of single models."""

import contextlib
import os
import platform
import sys

import torch
import transformers
from torch import nn

import hf_liere
from hf_liere.fast.dispatch import ask_backend
from hf_liere.tools.environment import cpu_name
from training.evidence.speed.clocks import measure_seconds, synchronize
from training.evidence.speed.models import Row, Settings, build_model, compile_function, logits


def machine(device: str) -> dict:
    """Hardware and versions of the measurements."""
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    versions |= {"transformers": transformers.__version__, "hf_liere": hf_liere.__version__}
    found = {"cpu": cpu_name(), "cores": os.cpu_count(), "threads": torch.get_num_threads(), **versions}
    if device.startswith("cuda"):
        found["gpu"] = torch.cuda.get_device_name(device)
    elif device == "cpu":
        found["kernels"] = "none" if ask_backend("apply_rotation", torch.zeros(1), 2)[1] else "C++"
    return found


class Runner:
    """One model ready to be timed in one phase."""

    def __init__(self, settings: Settings, row: Row, phase: str):
        self.settings, self.training = settings, phase == "training"
        self.model = build_model(settings, row, self.training)
        self.call = compile_function(settings, self.model)
        torch.manual_seed(0)
        self.pixels, self.labels = settings.pixels(), torch.arange(settings.batch_size, device=settings.device)
        if not (self.training and settings.half):
            self.pixels = self.pixels.to(settings.torch_dtype)

    def step(self) -> None:
        if isinstance(self.settings.compile, str):
            # The graphs of a step may overwrite the tensors of the step before.
            torch.compiler.cudagraph_mark_step_begin()
        if not self.training:
            with torch.no_grad():
                logits(self.call, self.pixels)
            return
        self.model.zero_grad(set_to_none=True)
        with self.settings.autocast():
            loss = self.loss()
        loss.backward()

    def loss(self) -> torch.Tensor:
        return nn.functional.cross_entropy(logits(self.call, self.pixels), self.labels)

    def seconds(self, steps: int) -> dict[str, float]:
        """Mean seconds of a step by every clock."""
        seconds = measure_seconds(self.step, steps, self.settings.device)
        self.model.zero_grad(set_to_none=True)
        return seconds

    def peak_memory(self) -> int | None:
        """Bytes of model and input plus the peak allocation of a step; `None` if PyTorch cannot measure it."""
        self.model.zero_grad(set_to_none=True)
        device = torch.device(self.settings.device)
        tensors = [*self.model.parameters(), *self.model.buffers(), self.pixels]
        held = sum(tensor.untyped_storage().nbytes() for tensor in tensors)
        if device.type == "cpu":
            return held + peak_cpu_allocation(self.step)
        if device.type != "cuda":
            return None
        synchronize(self.settings.device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        self.step()
        synchronize(self.settings.device)
        return held + torch.cuda.max_memory_allocated(device) - before


@contextlib.contextmanager
def silence_profiler():
    """Hides stderr from PyTorch's profiler, which would write into the progress bar."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def peak_cpu_allocation(run) -> int:
    """
    Peak allocation of PyTorch's allocator during `run()`, in bytes above the initial one. Unlike the process size, it
    does not depend on earlier work. Scratch memory of mathematics libraries is not included.
    """
    with silence_profiler(), torch.autograd.profiler.profile(profile_memory=True) as profile:
        run()
    held = peak = 0
    for event in profile.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak
