"""Seconds by every clock, and the machine's bandwidth and rates of products."""

import statistics
import time
from collections.abc import Callable

import torch

from hf_liere.fast.dispatch import working_dtype


CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
# 256 MB of float32, larger than a core's caches.
COPIED_ELEMENTS = 1 << 26
RATE_SAMPLES = 5


def synchronize(device: str) -> None:
    if device != "cpu":
        torch.accelerator.synchronize()


def measure_seconds(run: Callable[[], object], steps: int, device: str) -> dict[str, float]:
    """Mean seconds of `run()` by every clock."""
    synchronize(device)
    start = {name: clock() for name, clock in CLOCKS.items()}
    for _ in range(steps):
        run()
    synchronize(device)
    return {name: (clock() - start[name]) / steps for name, clock in CLOCKS.items()}


def machine_rates(device: str) -> dict[str, dict[str, float]]:
    """
    Rates by clock: `bandwidth`, the bytes per second that a copy reads and writes, and the multiply-adds per second of
    large matrix products in `float32` and in `float64`, the dtype of rotations (float32 on devices without float64).
    """
    side = 1024 if device == "cpu" else 4096
    rates = {}
    source = torch.ones(COPIED_ELEMENTS, device=device)
    target = torch.ones_like(source)
    rates["bandwidth"] = _rate(lambda: target.copy_(source), 2 * source.nbytes, device)
    types = {"float32": torch.float32, "float64": working_dtype(torch.device(device))}
    for name, dtype in types.items():
        factor, product = (torch.ones(side, side, device=device, dtype=dtype) for _ in range(2))
        rates[name] = _rate(lambda a=factor, out=product: torch.mm(a, a, out=out), side**3, device)
    return rates


def _rate(run: Callable[[], object], amount: int, device: str) -> dict[str, float]:
    run()
    samples = [measure_seconds(run, 1, device) for _ in range(RATE_SAMPLES)]
    return {name: amount / statistics.median(sample[name] for sample in samples) for name in CLOCKS}
