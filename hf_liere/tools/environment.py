"""
The facts of a machine for a bug report: versions, hardware, environment variables, and what computes the functions that
`models.fast.dispatch` may give to kernels. The report must work where a library or this package cannot be imported:
so this file imports only the standard library at the top, the rest where it can report failures; `cli` runs it as a
file.
"""

import contextlib
import importlib.metadata
import importlib.util
import itertools
import json
import os
import platform
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


PACKAGES = ("hf_liere", "torch", "transformers", "huggingface_hub", "safetensors", "tokenizers", "accelerate", "timm")
PACKAGES += ("diffusers", "triton", "numpy", "torchvision", "PIL")
VARIABLES = "(?!.*(TOKEN|KEY|SECRET|PASSWORD))(HF_LIERE_.*|(PY)?TORCH_.*|TRITON_.*|OMP_NUM_THREADS|HF_HOME"
VARIABLES += "|ATEN_CPU_CAPABILITY|HF_HUB_OFFLINE|CUDA_VISIBLE_DEVICES|XDG_CACHE_HOME)"
TYPES = ("float32", "bfloat16", "float16", "float64")
# (function, block size); planes have block size 2.
FUNCTIONS = (("apply_rotation", 2), ("apply_rotation", 8), ("angle_gradients", 2), ("outer_products", 8))
FUNCTIONS += (("block_rotations", 8), ("block_tangents", 8), ("moments_gradient", 8))
FUNCTIONS += (("quaternion_rotations", 4), ("quaternion_gradients", 4))
# Kernels may depend on the width of a head; this is the usual one.
HEAD_DIM = 64
PLAIN = "plain operations"


def report(as_json: bool) -> str:
    """[`environment`] as json or Markdown, with `~` for the home directory."""
    # Some libraries print when they are imported.
    with contextlib.redirect_stdout(sys.stderr):
        found = environment()
    text, home = json.dumps(found, indent=2) if as_json else "\n".join(_markdown(found)), os.path.expanduser("~")
    for path in {home, os.path.realpath(home)} - {"/"}:
        # JSON doubles backslashes.
        text = re.sub(re.escape(json.dumps(path)[1:-1] if as_json else path) + r"(?![\w.-])", "~", text)
    # File names may contain bytes that are not valid text.
    return text.encode(errors="backslashreplace").decode()


def environment() -> dict:
    """
    The report as a dictionary. `functions` has an entry for each function, device and dtype, unless `problem` explains
    why it is empty. `comparisons` are the checks of kernels against plain operations before their first use, and
    `guards` the functions of other libraries that importing this package replaces.
    """
    variables = {name: value for name, value in sorted(os.environ.items()) if re.fullmatch(VARIABLES, name, re.I)}
    packages = {name: _attempt(_version, name) for name in PACKAGES}
    rows: list[dict] = []
    problem = _attempt(lambda: rows.extend(_functions()))
    found = {"packages": packages, "system": _system(), "variables": variables, "functions": rows, "problem": problem}
    if problem:
        return found | {"comparisons": [], "guards": []}
    from ..kernels.cuda import NAME, self_check
    from ..patching.guards import GUARDS

    outcomes = self_check.outcomes.items()
    guards = [{"function": f"{guard.module}.{guard.name}", "is_on": guard.is_on, "why": guard.why} for guard in GUARDS]
    compared = [{"kernels": NAME, "case": str(case), **outcome._asdict()} for case, outcome in outcomes]
    return found | {"comparisons": compared, "guards": guards}


def cpu_name() -> str:
    """The model of this machine's CPU, if the system reports it."""
    with contextlib.suppress(OSError):
        if found := re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(errors="replace"), re.M):
            return found[1]
    return platform.processor() or platform.machine()


def _attempt(question: Callable[..., Any], *arguments: Any, otherwise: str = "unknown") -> Any:
    """The result of the call, or the text of its error: drivers fail, MPS lacks float64."""
    try:
        return question(*arguments)
    except Exception as error:
        return " ".join(f"{otherwise} ({type(error).__name__}: {error})".split())


def _version(name: str) -> str:
    if importlib.util.find_spec(name) is None:
        return "not installed"
    version = _attempt(importlib.metadata.version, name)
    broken = f"{version}, cannot be imported"
    return _attempt(lambda: str(getattr(importlib.import_module(name), "__version__", version)), otherwise=broken)


def _system() -> dict[str, str]:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "Python": f"{platform.python_version()} ({platform.python_implementation()})",
        "operating system": platform.platform(),
        "CPU": f"{cpu_name()} ({platform.machine()})",
        "cores": f"{os.cpu_count()}, {usable} of them for this process",
        "threads of torch": _attempt(lambda: str(importlib.import_module("torch").get_num_threads())),
        "GPUs": _attempt(lambda: "; ".join(f"{device}, {gpu}" for device, gpu in _gpus().items()) or "none"),
        "CPU kernels": _attempt(_cpu_kernels),
    }


def _gpus() -> dict[str, str]:
    import torch

    def describe(index: int) -> str:
        gpu = torch.cuda.get_device_properties(index)
        return f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB, compute capability {gpu.major}.{gpu.minor}"

    found = {f"cuda:{index}": _attempt(describe, index) for index in range(torch.cuda.device_count())}
    if torch.backends.mps.is_available():
        found["mps"] = f"{torch.mps.recommended_max_memory() / 2**30:.0f} GiB recommended at most"
    return found


def _cpu_kernels() -> str:
    """The library of the kernels, even where HF_LIERE_CPU_KERNELS turns it off."""
    from torch.backends.cpu import get_cpu_capability

    from ..kernels import cpu_library

    library = cpu_library.library()
    return f"{library._name if library else 'none'} (PyTorch calls this CPU {get_cpu_capability()})"


def _functions() -> Iterator[dict]:
    import torch

    # After a failed import of a package, Python keeps its imported submodules; only importing the package fails again.
    from .. import kernels  # noqa: F401 (registers itself)
    from ..fast.dispatch import ask_backend

    def ask(row: dict) -> str:
        tensor = torch.zeros(1, 1, 1, HEAD_DIM, dtype=getattr(torch, row["dtype"]), device=row["device"])
        backend, refusal = ask_backend(row["function"], tensor, row["block_size"])
        row["refusals"] = {backend.NAME: refusal} if backend is not None and refusal else {}
        return PLAIN if refusal or backend is None else backend.NAME

    for device, dtype, (function, size) in itertools.product(("cpu", *_gpus()), TYPES, FUNCTIONS):
        row = {"function": function, "block_size": size, "device": device, "dtype": dtype, "refusals": {}}
        yield row | {"computed_by": _attempt(ask, row)}


def _markdown(found: dict) -> Iterator[str]:
    yield from (f"- {name}: {value}" for name, value in (found["packages"] | found["system"]).items())
    yield from (f"- `{name}={' '.join(value.split())}`" for name, value in found["variables"].items())
    yield "\nWhat computes each function:\n"
    yield from [f"- {found['problem']}"] if found["problem"] else []
    # Dtypes of a device with the same result share a line.
    types: dict[tuple[str, str], list[str]] = {}
    for (device, dtype), rows in itertools.groupby(found["functions"], lambda row: (row["device"], row["dtype"])):
        statements: dict[str, list[str]] = {}
        for row in rows:
            kind = {2: " of planes", 8: " of blocks"}[row["block_size"]] if row["function"] == "apply_rotation" else ""
            reasons = row["refusals"].items() if row["computed_by"] == PLAIN else ()
            for statement in (row["computed_by"], *(f"no {name}, because {reason}" for name, reason in reasons)):
                statements.setdefault(" ".join(statement.split()), []).append(f"`{row['function']}`{kind}")
        text = ""
        for statement, names in statements.items():
            text += f"\n    - {statement}: {', '.join(names) if len(names) < len(FUNCTIONS) else 'all functions'}"
        types.setdefault((device, text), []).append(dtype)
    yield from (f"- {device}, {', '.join(dtypes)}:{text}" for (device, text), dtypes in types.items())
    if found["comparisons"]:
        yield "\nKernels compared with plain operations in float64, before their first use:\n"
    for row in found["comparisons"]:
        said = row["failure"] or f"equal, with errors of up to {row['error']:.2f} of the rounding bound"
        yield f"- {row['kernels']}, {row['case']}: {said} ({row['seconds']:.1f} s)"
    if guarded := [row for row in found["guards"] if row["is_on"]]:
        yield "\nReplaced in other libraries (not with HF_LIERE_GUARDS=0):\n"
        yield from (f"- `{row['function']}`: {row['why']}" for row in guarded)
