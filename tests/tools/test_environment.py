"""What `hf-liere env` prints, in a process of its own: it agrees with what computes, and shows no secret."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
import transformers
from checkout import ROOT

import hf_liere
from hf_liere.fast.dispatch import find_backend
from hf_liere.kernels import cpu_library
from hf_liere.patching.guards import GUARDS


LAUNCH = "import runpy, sys; sys.exit(runpy.run_path(sys.argv.pop(1))['main']())"
ASKED = {"apply_rotation", "angle_gradients", "outer_products", "block_rotations", "block_tangents"}
ASKED |= {"moments_gradient", "quaternion_rotations", "quaternion_gradients"}


def run(*arguments, **environment):
    """The command as the console script starts it, where no folder but those of PYTHONPATH has the package."""
    inherited = {name: value for name, value in os.environ.items() if name != "HF_LIERE_CPU_KERNELS"}
    command = [sys.executable, "-c", LAUNCH, str(ROOT / "hf_liere" / "launcher" / "__init__.py"), "env", *arguments]
    environment = inherited | {"PYTHONPATH": str(ROOT)} | {name: str(value) for name, value in environment.items()}
    process = subprocess.run(command, env=environment, cwd=os.sep, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    return process.stdout


def plant(folder, **packages):
    """A PYTHONPATH with packages of this code in front of those that are installed."""
    for name, code in packages.items():
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text(code)
    return os.pathsep.join([str(folder), str(ROOT)])


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_kernels")
def test_it_names_what_computes_real_tensors():
    found = json.loads(run("--json", HF_LIERE_SECRET="hush-1", HF_LIERE_CPU_KERNELS="1"))
    assert found["packages"] | {"hf_liere": hf_liere.__version__, "torch": torch.__version__} == found["packages"]
    assert found["variables"]["HF_LIERE_CPU_KERNELS"] == "1" and "hush-1" not in json.dumps(found)
    assert os.path.expanduser(found["system"]["CPU kernels"]).startswith(cpu_library.library()._name)
    assert {row["function"] for row in found["functions"]} == ASKED and found["problem"] is None
    for row in found["functions"]:
        tensor = torch.zeros(2, 3, 4, 16, dtype=getattr(torch, row["dtype"]), device=row["device"])
        backend = find_backend(row["function"], tensor, row["block_size"])
        assert row["computed_by"] == (backend.NAME if backend else "plain operations"), row
        assert backend or row["refusals"]
    assert {row["function"] for row in found["guards"]} == {f"{guard.module}.{guard.name}" for guard in GUARDS}
    assert all(row["is_on"] for row in found["guards"])
    on_cpu = {(row["dtype"], row["computed_by"]) for row in found["functions"] if row["device"] == "cpu"}
    assert on_cpu == {(dtype, "CPU kernels") for dtype in ("float32", "bfloat16")} | {
        (dtype, "plain operations") for dtype in ("float16", "float64")
    }


@pytest.mark.slow
def test_it_says_that_kernels_are_switched_off_and_shows_no_secret():
    names = (
        "HF_TOKEN",
        "HF_LIERE_TOKEN",
        "TORCH_API_KEY",
        "HF_LIERE_SECRETS",
        "PYTORCH_PASSWORD",
        "TORCH_access_token",
    )
    text = run(HF_LIERE_CPU_KERNELS="0", OMP_NUM_THREADS="1", **dict.fromkeys(names, "hush-2"))
    lines = text.splitlines()
    assert "hush-2" not in text and not any(name in text for name in names)
    assert {"- `HF_LIERE_CPU_KERNELS=0`", "- `OMP_NUM_THREADS=1`", f"- torch: {torch.__version__}"} <= set(lines)
    plain = lines[lines.index("- cpu, float32, bfloat16, float16, float64:") + 1 :]
    assert plain[0] == "    - plain operations: all functions"
    assert "    - no CPU kernels, because HF_LIERE_CPU_KERNELS=0 turns them off: all functions" in plain


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton interprets its kernels on a CPU here")
def test_it_shows_how_kernels_compare_with_plain_operations():
    pytest.importorskip("triton", reason="Triton is not installed (PyTorch brings it on Linux)")
    lines = run(HF_LIERE_CPU_KERNELS="0", TRITON_INTERPRET="1").splitlines()
    for dtype in ("float32", "float16"):
        for size in (2, 8):
            start = (
                f"- Triton kernels, {dtype} on cpu, block size {size}, heads of up to 64 channels: equal, with errors"
            )
            assert sum(line.startswith(start) for line in lines) == 1


@pytest.mark.slow
def test_it_says_why_there_are_no_kernels_without_the_home_directory(tmp_path):
    """Here with libraries that no compiler has made."""
    home = tmp_path / "home"
    shutil.copytree(ROOT / "hf_liere", home / "hf_liere", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    text = run(HOME=home, PYTHONPATH=home)
    assert "- CPU kernels: none (PyTorch calls this CPU " in text
    assert "no CPU kernels, because they were not built: ~/hf_liere/kernels has none for this CPU" in text
    assert "finds a C++ compiler" in text and str(home) not in text


@pytest.mark.slow
def test_packages_that_break_are_named(tmp_path):
    broken = {
        "timm": "print('noise'); raise RuntimeError('no operator\\nnms')",
        "triton": "raise OSError('no libcuda')",
    }
    found = json.loads(run("--json", PYTHONPATH=plant(tmp_path / "modules", **broken)))
    assert found["packages"]["timm"].endswith("cannot be imported (RuntimeError: no operator nms)")
    assert found["packages"]["triton"].endswith("cannot be imported (OSError: no libcuda)")


@pytest.mark.slow
def test_a_package_that_cannot_be_imported_is_reported_on(tmp_path):
    """Commands but this one need it."""
    path = plant(tmp_path, transformers="raise ImportError('of another age')")
    text = run(PYTHONPATH=path)
    installed = f"- transformers: {transformers.__version__}, cannot be imported (ImportError: of another age)\n"
    assert installed in text and f"- torch: {torch.__version__}\n" in text
    assert text.endswith("\n- unknown (ImportError: of another age)\n")
