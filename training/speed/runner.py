"""Measuring: time and memory of single models, and of all models of a case in turn, round after round."""

import contextlib
import gc
import os
import platform
import sys
import time

import torch
import transformers
from torch import nn
from tqdm.auto import tqdm

import hf_liere
from hf_liere.environment import cpu_name
from hf_liere.kernels import cpu as cpu_kernels
from training.speed.measurements import BASELINE, PHASES, Case, Records
from training.speed.models import Row, Settings, build_model, logits, rotation_error


CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def machine(device: str) -> dict:
    """What the measurements were made on and with."""
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    versions |= {"transformers": transformers.__version__, "hf_liere": hf_liere.__version__}
    found = {"cpu": cpu_name(), "cores": os.cpu_count(), "threads": torch.get_num_threads(), **versions}
    if device.startswith("cuda"):
        found["gpu"] = torch.cuda.get_device_name(device)
    elif device == "cpu":
        found["kernels"] = "none" if cpu_kernels.refusal(torch.zeros(1), torch.float32, 2) else "C++"
    return found


def synchronize(device: str) -> None:
    if device != "cpu":
        torch.accelerator.synchronize()


class Runner:
    """One model ready to be timed in one phase."""

    def __init__(self, settings: Settings, row: Row, phase: str):
        self.settings, self.training = settings, phase == "training"
        self.model = build_model(settings, row, self.training)
        self.call = torch.compile(self.model) if settings.compile else self.model
        torch.manual_seed(0)
        self.pixels, self.labels = settings.pixels(), torch.arange(settings.batch_size, device=settings.device)
        if not (self.training and settings.half):
            self.pixels = self.pixels.to(settings.torch_dtype)

    def step(self) -> None:
        if not self.training:
            with torch.no_grad():
                logits(self.call, self.pixels)
            return
        self.model.zero_grad(set_to_none=True)
        device = torch.device(self.settings.device).type
        cast = torch.autocast(device, self.settings.torch_dtype) if self.settings.half else contextlib.nullcontext()
        with cast:
            loss = nn.functional.cross_entropy(logits(self.call, self.pixels), self.labels)
        loss.backward()

    def seconds(self, steps: int) -> dict[str, float]:
        """Mean seconds of a step by every clock."""
        synchronize(self.settings.device)
        start = {name: clock() for name, clock in CLOCKS.items()}
        for _ in range(steps):
            self.step()
        synchronize(self.settings.device)
        seconds = {name: (clock() - start[name]) / steps for name, clock in CLOCKS.items()}
        self.model.zero_grad(set_to_none=True)
        return seconds

    def peak_memory(self) -> int | None:
        """Bytes of model and input and of what a step allocates at its peak; `None` where PyTorch does not tell."""
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
def profiler_silenced():
    """PyTorch's profiler announces itself on the descriptor of stderr, in the middle of the progress bar."""
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
    Bytes that PyTorch's allocator holds at most at once during `run()`, above what it held before. Unlike the size of
    the process, it does not depend on what ran before; scratch memory of the mathematics libraries is not in it.
    """
    with profiler_silenced(), torch.autograd.profiler.profile(profile_memory=True) as profile:
        run()
    held = peak = 0
    for event in profile.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak


def measure(case: Case, records: Records, rounds: int, warmup: int, steps: int, with_error: bool) -> None:
    """Everything about a case that the records do not hold yet."""
    done = set(range(rounds))
    for row in case.rows:
        for phase in PHASES:
            if (row.trains or phase == "inference") and records.value(case, row, "failed") is None:
                done &= set(records.steps(case, row, phase))
    title = "encodings" if case.axis is None else f"{case.axis} {case.value}"
    runners = {}
    for row in tqdm(case.rows, desc=f"{title}: memory, errors", leave=False):
        if records.value(case, row, "failed") is not None:
            continue
        try:
            if with_error and not records.find(case, "error", row=row.name):
                error = rotation_error(case.settings, row)
                records.add(case=case.key, quantity="error", row=row.name, value=error)
            if len(done) == rounds and (not row.trains or records.find(case, "memory", row=row.name)):
                continue
            for phase in PHASES:
                if phase == "training" and not row.trains:
                    continue
                runner = runners[row, phase] = Runner(case.settings, row, phase)
                for _ in range(warmup):
                    runner.step()
                if phase == "training" and not records.find(case, "memory", row=row.name):
                    records.add(case=case.key, quantity="memory", row=row.name, value=runner.peak_memory())
                runner.model.zero_grad(set_to_none=True)
        except (RuntimeError, TypeError) as error:
            # The device lacks memory or an operation; the other rows can still be measured.
            records.add(case=case.key, quantity="failed", row=row.name, value=f"{type(error).__name__}: {error}")
            for phase in PHASES:
                runners.pop((row, phase), None)
            gc.collect()

    waiting = [number for number in range(rounds) if number not in done]
    with tqdm(total=len(waiting) * len(runners), desc=f"{title}: {len(waiting)} rounds", leave=False) as progress:
        for number in waiting:
            for phase in PHASES:
                order = [key for key in runners if key[1] == phase]
                shift = number % max(len(order), 1)
                # The order rotates, so that no model always runs after the same other one.
                for key in order[shift:] + order[:shift]:
                    baseline = runners.get((Row.parse(BASELINE), phase))
                    fields = {} if baseline is None else {"baseline": baseline.seconds(steps)}
                    fields |= {"row": key[0].name, "round": number, "value": runners[key].seconds(steps)}
                    records.add(case=case.key, quantity=phase, **fields)
                    progress.update()
