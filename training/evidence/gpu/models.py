"""Models and measurements that several sections of gpu_check.py share."""

import contextlib
import dataclasses
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch

from hf_liere import LieREViTConfig, LieREViTForImageClassification
from hf_liere.fast.dispatch import as_on_accelerators
from training.evidence.speed.measurements import read_lines


# With their block sizes: fixed and learned planes, commuting blocks, and small and large dense blocks.
ENCODINGS = {"axial_rope": 2, "rope_mixed": 2, "comrope_ld": 8, "liere": 8, "liere64": 64, "liere4": 4}
SMALL = {"hidden_size": 384, "num_hidden_layers": 12, "num_attention_heads": 6, "intermediate_size": 1536}
TINY = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}


class CheckFailed(Exception):
    """A check ran, and its result is wrong."""


def restart() -> NoReturn:
    """Runs this process again. It goes on after the lines of the record, on a GPU that it has not left unusable."""
    sys.stdout.flush()
    os.execv(sys.executable, sys.orig_argv)


class OutOfTime(Exception):
    """The minutes are over. What was measured is in the record."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """
    Attributes:
        device: The device of the checks.
        quick: Whether they use small models and few repetitions.
        record: The file of `record.py`.
        until: When the minutes are over, by `time.time`.
    """

    device: str
    quick: bool
    record: Path | None = None
    until: float = math.inf

    def add(self, **line: Any) -> None:
        """Adds a line to the record."""
        if self.record is not None:
            with self.record.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")

    def lines(self) -> list[dict[str, Any]]:
        return read_lines(self.record) if self.record is not None and self.record.exists() else []

    def require_time(self) -> None:
        """
        Raises:
            OutOfTime: when the minutes are over.
        """
        if time.time() > self.until:
            raise OutOfTime

    def accelerated(self) -> contextlib.AbstractContextManager:
        """Inside, CPUs too compute in the way of accelerators."""
        return as_on_accelerators() if self.device == "cpu" else contextlib.nullcontext()

    @property
    def half(self) -> torch.dtype:
        """The dtype of timed models."""
        return torch.bfloat16 if self.device == "cuda" else torch.float32

    @property
    def batch_size(self) -> int:
        return 2 if self.quick else 64


def build_model(settings: Settings, encoding: str, **fields: int) -> LieREViTForImageClassification:
    """ViT-S/16 at 224 px, or a small model, in float32; the same weights at every call."""
    torch.manual_seed(0)
    size = {**TINY, "image_size": 32, "patch_size": 8} if settings.quick else {**SMALL, "image_size": 224}
    name = "liere" if encoding.startswith("liere") else encoding
    config = LieREViTConfig(position_encoding=name, block_size=ENCODINGS[encoding], num_labels=10, **size | fields)
    return LieREViTForImageClassification(config).to(settings.device)


def batch(settings: Settings, config) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randn(settings.batch_size, 3, config.image_size, config.image_size, generator=generator)
    labels = torch.arange(settings.batch_size) % config.num_labels
    return {"pixel_values": pixels.to(settings.device), "labels": labels.to(settings.device)}


def step(model: Callable, inputs: dict[str, torch.Tensor], dtype: torch.dtype = torch.float32):
    """Forward and backward, under autocast for half types; the outputs."""
    device = inputs["labels"].device.type
    cast = torch.autocast(device, dtype) if dtype.itemsize == 2 else contextlib.nullcontext()
    with cast:
        outputs = model(**inputs)
    outputs.loss.backward()
    return outputs


def milliseconds(settings: Settings, run: Callable[[], object]) -> float:
    """The median time of a run, after warm-up runs."""
    repetitions, warmup = (3, 1) if settings.quick else (20, 3)
    times = []
    for number in range(warmup + repetitions):
        start = time.perf_counter()
        run()
        if settings.device == "cuda":
            torch.cuda.synchronize()
        if number >= warmup:
            times.append(time.perf_counter() - start)
    return 1000 * statistics.median(times)


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, relative to the largest expected value."""
    found, expected = found.detach().cpu().double(), expected.detach().cpu().double()
    return ((found - expected).abs().max() / expected.abs().max().clamp_min(1e-30)).item()


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def largest_error(expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> float:
    """Relative to the largest gradient of all parameters, because some gradients are zero up to rounding."""
    scale = max(gradient.abs().max().item() for gradient in expected.values())
    return max((found[name] - gradient).abs().max().item() for name, gradient in expected.items()) / scale
