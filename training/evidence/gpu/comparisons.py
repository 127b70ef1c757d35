"""Whole models in blocks of the steps A, X, X, A beside transformers' ViT, and the cases in order of worth."""

import contextlib
import dataclasses
import gc
import itertools
import math
import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from hf_liere.fast import dispatch
from hf_liere.kernels import cuda
from training.evidence.gpu import models
from training.evidence.gpu.privacy import describe_error
from training.evidence.gpu.record import title
from training.evidence.speed.clocks import synchronize
from training.evidence.speed.models import SIZES, Row, Settings
from training.evidence.speed.runner import Runner


BASELINE = "transformers_absolute"
ROWS = "absolute transformers_axial_rope rope_mixed comrope_ld8 liere8 liere8_with_kernel".split()
ROWS = [BASELINE, *ROWS, "comrope_ld8_with_kernel", "liere64", "liere4", "timm_rope_mixed", "naive_liere8"]
UNCOMPILED = ["rope_mixed_without_kernels", "liere8_without_kernels", "naive_liere64"]
# Whether this version has kernels that make rotations, and the value of the kernels' variable that turns it on.
HAS_KERNEL, WITH_KERNEL = hasattr(cuda, "batched_rotations"), "all"
# What a row's name ends with, and the value with which its model runs.
VARIANTS = {"_with_kernel": WITH_KERNEL, "_without_kernels": "0"}
# A measurement takes about as many seconds; median and interval are over the blocks.
SECONDS, MOST_STEPS, BLOCKS = 0.15, 20, 6


class Comparison(NamedTuple):
    settings: Settings
    phase: str

    def rows(self) -> list[str]:
        """The models that exist at this size, in order of worth."""
        size = SIZES[self.settings.model_size]
        names = ROWS if self.settings.compile else [*ROWS, *UNCOMPILED]
        if size["hidden_size"] // size["num_attention_heads"] != 64:
            names = [name for name in names if "64" not in name]
        # Its rotations need much memory, for which only one comparison makes up.
        return [name for name in names if name != "naive_liere64" or self.settings.batch_size == 256]


def _settings(size: str, batch: int, pixels: int, patch: int, dtype: str, compile: bool | str = False) -> Settings:
    depth = SIZES[size]["num_hidden_layers"]
    return Settings(size, depth, batch, pixels, patch, None, "cuda", dtype, "sdpa", compile)


SIZE_CASES = (("small", 64, 224, 16), ("small", 256, 224, 16), ("arrows", 64, 168, 12), ("base", 64, 512, 64))
SMALL, LARGE_BATCH, TWO_LAYERS = (
    Comparison(_settings(*case, dtype), "training")
    for case, dtype in zip(SIZE_CASES, ("bfloat16", "bfloat16", "float32"))
)
# The models that the goals name, and inference.
FIRST = [
    (SMALL, ROWS),
    (LARGE_BATCH, [BASELINE, "absolute", "liere64"]),
    (TWO_LAYERS, ROWS[:8]),
    (SMALL._replace(phase="inference"), ROWS),
]


def _others() -> Iterator[Comparison]:
    """The first comparison, what differs from it in one thing, and what differs in two."""
    things = range(4), ("bfloat16", "float32"), ("training", "inference"), (False, True, "reduce-overhead")
    for differences in range(3):
        for size, dtype, phase, compile in itertools.product(*things):
            if sum((size > 0, dtype != "bfloat16", phase != "training", compile is not False)) == differences:
                yield Comparison(_settings(*SIZE_CASES[size], dtype, compile), phase)


OTHERS = [(comparison, comparison.rows()) for comparison in _others()]
QUICK = {"model_size": "tiny", "num_hidden_layers": 1, "batch_size": 2, "image_size": 32, "patch_size": 16}


def measure_cases(checks: models.Settings, section: str, chosen: list[tuple[Comparison, list[str]]]) -> None:
    """Adds the lines that the record lacks; with small models one of training, inference and a compiled model."""
    if checks.quick:
        chosen = chosen[::3] if chosen is FIRST else [each for each in chosen if each[0].settings.compile][:1]
    for (settings, phase), names in chosen:
        settings = dataclasses.replace(settings, device=checks.device)
        if checks.quick:
            settings = dataclasses.replace(settings, dtype="float32", **QUICK)
            names = [BASELINE, "liere8", "liere8_with_kernel"]
        compare(
            checks,
            section,
            {"case": dataclasses.asdict(settings), "phase": phase},
            names,
            lambda name, settings=settings, phase=phase: Runner(settings, Row.parse(name), phase),
        )


def compare(
    checks: models.Settings, section: str, key: dict[str, Any], names: list[str], build: Callable[[str], Runner]
) -> None:
    """
    Adds a line with seconds of a step and bytes at its peak to the record for every model that has none there. A
    baseline and one model are in memory at a time.

    Args:
        checks: Settings with the record.
        section: The section that measures.
        key: `case` and `phase` of the lines.
        names: The baseline, which is also compared with itself, and the models.
        build: Makes one ready to be timed.

    Raises:
        OutOfTime: before the next model when the minutes are over.
    """
    done = {line["row"] for line in checks.lines() if key.items() <= line.items()}
    baseline = None
    for name in names:
        if name in done:
            continue
        checks.require_time()
        print(f"{title(key['case'])}, {key['phase']}: {name}", flush=True)
        line = {"section": section, **key, "row": name}
        try:
            if baseline is None:
                baseline = _warm(checks, build(names[0]))
            with _variant(name) as (plain_name, reason):
                if reason is None:
                    runner = baseline if name == names[0] else _warm(checks, build(plain_name))
                    line |= {"memory": _peak_memory(runner), **_blocks(checks, baseline, runner)}
                else:
                    line["skipped"] = reason
        except Exception as error:
            line["failed"] = describe_error(error)
        checks.add(**line)
        runner = None
        gc.collect()
        if checks.device == "cuda":
            try:
                synchronize(checks.device)
                torch.cuda.empty_cache()
            except RuntimeError:
                # An illegal access left it unusable.
                models.restart()


@contextlib.contextmanager
def _variant(name: str) -> Iterator[tuple[str, str | None]]:
    """The name of the model without that of a variant, with whose kernels it runs inside; and why it cannot run."""
    ending = next((ending for ending in VARIANTS if name.endswith(ending)), None)
    plain_name = name.removesuffix(ending or "")
    if ending is None:
        row = Row.parse(name) if name in (*ROWS, *UNCOMPILED) else None
        yield plain_name, None if row is None or row.is_installed else f"{row.package} is not installed"
    elif VARIANTS[ending] == WITH_KERNEL and not HAS_KERNEL:
        yield plain_name, "this version has no kernels that make rotations"
    else:
        with switched(VARIANTS[ending]):
            yield plain_name, None


@contextlib.contextmanager
def switched(value: str | None) -> Iterator[None]:
    """Inside, the variable of the kernels for GPUs has this value; `None` leaves it."""
    before = os.environ.get(cuda.SWITCH)
    os.environ |= {} if value is None else {cuda.SWITCH: value}
    try:
        # What a backend once took, it is not asked about again.
        dispatch._accepted.clear()
        yield
    finally:
        dispatch._accepted.clear()
        os.environ.pop(cuda.SWITCH, None)
        os.environ |= {} if before is None else {cuda.SWITCH: before}


def _warm(checks: models.Settings, runner: Runner) -> Runner:
    for _ in range(1 if checks.quick else 5):
        runner.step()
    return runner


def _peak_memory(runner: Runner) -> int | None:
    """`None` for CUDA graphs, which keep their memory between steps."""
    return None if isinstance(runner.settings.compile, str) else runner.peak_memory()


def _blocks(checks: models.Settings, baseline: Runner, runner: Runner) -> dict[str, Any]:
    """Mean seconds of a step in the four measurements of every block, and the number of their steps."""
    steps, blocks = 1, 2
    if not checks.quick:
        steps, blocks = max(1, min(MOST_STEPS, math.ceil(SECONDS / runner.seconds(1)["wall"]))), BLOCKS
    order = (baseline, runner, runner, baseline)
    return {"steps": steps, "seconds": [[each.seconds(steps)["wall"] for each in order] for _ in range(blocks)]}
