"""Training steps in CUDA graphs: captured whole, and by torch.compile(mode="reduce-overhead")."""

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import torch

from hf_liere.encoding.kinds import ENCODINGS
from training.evidence.gpu import models
from training.evidence.gpu.comparisons import WITH_KERNEL, switched
from training.evidence.gpu.privacy import describe_error
from training.evidence.reporting.markdown import markdown
from training.evidence.speed.models import Row, Settings
from training.evidence.speed.runner import Runner


# Relative to the largest gradient: the same kernels in bfloat16, and other ones in float32.
CAPTURED_ERROR, COMPILED_ERROR = 1e-2, 1e-3
NAMES = ["absolute", "rope_mixed", "comrope_ld", "liere8", "liere64"]
NAMES += [name for name in ENCODINGS if name not in ("liere", *NAMES)]


def graphs_table(checks: models.Settings) -> tuple[str, list[str]]:
    """Checks what the record lacks; the table of its lines, and the names of the models whose check failed."""
    done = {line["row"] for line in _lines(checks)}
    for how, check in (("captured", _check_capture), ("reduce-overhead, float32", _check_compilation)):
        for name in NAMES[:4] if checks.quick else NAMES:
            # Without it the host reads whether eigenvalues converged.
            needs_kernel = name in ENCODINGS and ENCODINGS[name].proportional
            row = f"{name}, {'with the kernel, ' * needs_kernel}{how}"
            if row in done:
                continue
            checks.require_time()
            print(row, flush=True)
            try:
                with switched(WITH_KERNEL if needs_kernel else None):
                    found = check(checks, name)
            except Exception as error:
                found = {"failed": describe_error(error)}
            checks.add(section="graphs", row=row, **found)
            if "failed" in found and checks.device == "cuda":
                # A capture that failed leaves the allocator of memory in it.
                models.restart()
    lines = _lines(checks)
    rows, wrong = [], [line["row"] for line in lines if "failed" in line]
    for line in lines:
        if "failed" in line:
            rows.append([line["row"], line["failed"], *["–"] * 3])
            continue
        times = [line.get(name) for name in ("step", "graph")]
        cells = ["–" if value is None else f"{value:.2f}" for value in times]
        error = "–" if line["error"] is None else f"{line['error']:.1e}"
        rows.append([line["row"], error, *cells, "–" if line["waits"] is None else str(line["waits"])])
    header = ["training step", "error of gradients", "eager, ms", "in a graph, ms", "waits of the eager step"]
    return markdown(header, rows), wrong


def _lines(checks: models.Settings) -> list[dict[str, Any]]:
    return [line for line in checks.lines() if line.get("section") == "graphs" and "row" in line]


def _check_capture(checks: models.Settings, name: str) -> dict[str, float | int | None]:
    """The step of twelve layers in a graph, replayed with other weights; on CPUs the step alone."""
    runner = _build(checks, name, str(checks.half).removeprefix("torch."), 12)
    if checks.device != "cuda":
        with checks.accelerated():
            runner.step()
        return {"error": None, "waits": None}
    for _ in range(3):
        runner.step()
    found = {"step": models.milliseconds(checks, runner.step), "waits": count_waits(runner.step)}
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            runner.step()
    torch.cuda.current_stream().wait_stream(stream)
    runner.model.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        runner.step()
    found["graph"] = models.milliseconds(checks, graph.replay)
    # Rotations that the graph kept instead of computing them would not follow the weights.
    with torch.no_grad():
        for parameter in runner.model.parameters():
            parameter.mul_(1.01)
    graph.replay()
    replayed = models.gradients(runner.model)
    runner.step()
    return found | {"error": _accepted(models.largest_error(models.gradients(runner.model), replayed), CAPTURED_ERROR)}


def _check_compilation(checks: models.Settings, name: str) -> dict[str, float | int | None]:
    """The step of two layers, compiled without a break; on CPUs by another compiler, which takes seconds."""
    runner = _build(checks, name, "float32", 2)
    options = {"backend": "aot_eager"} if checks.device == "cpu" else {"mode": "reduce-overhead"}
    with checks.accelerated():
        runner.step()
        expected = models.gradients(runner.model)
        found = {"step": models.milliseconds(checks, runner.step), "waits": None}
        # The compiler counts the graphs of code that all models share.
        torch._dynamo.reset()
        runner.call = torch.compile(runner.model, dynamic=False, fullgraph=True, **options)
        runner.settings = dataclasses.replace(runner.settings, compile="reduce-overhead")
        found["graph"] = models.milliseconds(checks, runner.step)
        runner.step()
    return found | {"error": _accepted(models.largest_error(expected, models.gradients(runner.model)), COMPILED_ERROR)}


def _build(checks: models.Settings, name: str, dtype: str, depth: int) -> Runner:
    sizes = ("tiny", 2, 2, 32, 8) if checks.quick else ("small", depth, 64, 224, 16)
    return Runner(Settings(*sizes, None, checks.device, dtype, "sdpa", False), Row.parse(name), "training")


def _accepted(error: float, limit: float) -> float:
    # NaN compares as false.
    if not error < limit:
        raise models.CheckFailed(f"gradients differ by {error:.1e}; accepted: {limit}")
    return error


def count_waits(run: Callable[[], object]) -> int:
    """Calls in which the host waits for the GPU."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("called a synchronizing" in str(warning.message) for warning in found)
