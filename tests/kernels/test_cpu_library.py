"""Which of the libraries of kernels for CPUs is loaded, and what is done where none can be."""

import runpy
import shutil
import subprocess

import pytest
import torch
from checkout import ROOT
from cpu_library_checks import BUILT, CAPABILITY, assert_rotations_are_right, refusal
from fresh_process import run_python
from transformers.utils import logging

from hf_liere.fast import dispatch
from hf_liere.kernels import cpu as cpu_kernels
from hf_liere.kernels import cpu_library


# What each capability of a CPU includes.
CAPABILITIES = {"AVX512": ("avx512", "avx2", "default"), "AVX2": ("avx2", "default")}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder of libraries, empty, in a process that has looked for none yet."""
    monkeypatch.setattr(cpu_library, "FOLDER", tmp_path)
    monkeypatch.setattr(dispatch, "_accepted", set())
    cpu_library._find.cache_clear()
    logging.warning_once.cache_clear()
    yield tmp_path
    cpu_library._find.cache_clear()


def copy_usable(folder):
    """The slowest library that was built, under the name of the fastest that this CPU runs."""
    names = cpu_library.NAMES.get(CAPABILITY, cpu_library.ON_ANY_CPU)
    source = next(path for name in reversed(names) for path in BUILT.glob(f"{name}.*"))
    return shutil.copy(source, folder / f"{names[0]}.so")


ROTATE = """
import cpu_library_checks as test
test.assert_rotations_are_right()
print(test.refusal(), test.CAPABILITY, getattr(test.cpu_library.library(), "_name", None), sep=chr(10))
"""


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_kernels")
@pytest.mark.parametrize("capability", ["avx512", "avx2", "default"])
def test_the_fastest_library_of_the_cpu_is_loaded(capability):
    """PyTorch's variable makes this CPU a lesser one."""
    if capability not in CAPABILITIES.get(CAPABILITY, ("default",)):
        pytest.skip(f"this CPU has no {capability} (PyTorch calls it {CAPABILITY})")
    variables = {"ATEN_CPU_CAPABILITY": capability, "HF_LIERE_CPU_KERNELS": "1"}
    found, name, path = run_python("-c", ROTATE, variables=variables).stdout.splitlines()
    candidates = cpu_library.NAMES.get(name, cpu_library.ON_ANY_CPU)
    expected = [str(path) for name in candidates for path in BUILT.glob(f"{name}.*")]
    assert path == (expected[0] if expected else "None") and (name == capability.upper() or capability == "default")
    assert found == "None" if expected else f"has none for this CPU ({', '.join(candidates)})" in found


def test_what_was_not_built_is_no_reason_to_warn(folder, caplog):
    assert_rotations_are_right()
    assert f"they were not built: {folder} has none for this CPU" in refusal()
    assert "finds a C++ compiler" in refusal() and "pip install --force-reinstall" in refusal()
    assert not caplog.text


@pytest.mark.usefixtures("compiled_kernels")
def test_libraries_of_other_cpus_are_never_loaded(folder, monkeypatch, caplog):
    """A checkout has one library, and may move to a CPU that does not run it."""
    copy_usable(folder).rename(folder / "_cpu_avx2.so")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    assert_rotations_are_right()
    assert cpu_library.library() is None and "none for this CPU (_cpu_openmp, _cpu_portable)" in refusal()
    (record,) = caplog.records
    assert "Plain operations" in record.message and "pip install -e . in a checkout" in record.message


@pytest.mark.parametrize(
    "flags, library",
    [
        ("fpu sse4_2 avx2 fma avx512f avx512vl avx512dq avx512bw", "_cpu_avx512"),
        ("fpu sse4_2 avx2 fma avx512f", "_cpu_avx2"),
        ("fpu sse4_2 avx2", "_cpu_openmp"),
        (None, "_cpu_openmp"),
    ],
)
def test_a_checkout_compiles_what_its_cpu_runs(flags, library):
    """The first CPU of the machine has every instruction; on aarch64 the list has another name."""
    setup = runpy.run_path(str(ROOT / "setup.py"))
    every = " ".join({word for words in setup["VECTORS"].values() for word in words})
    text = f"processor : 0\nflags : {every}\n\nflags : {flags}\n" if flags else "Features : fp asimd\n"
    (best, *_) = setup["runnable"](setup["instructions_of"](text))
    assert f"_cpu_{best}" == library
    assert [f"_cpu_{name}" for name in setup["LIBRARIES"]] == list(cpu_library.NAMES["AVX512"])


def test_kernels_that_are_turned_off_are_not_looked_for(folder, monkeypatch, caplog):
    monkeypatch.setenv("HF_LIERE_CPU_KERNELS", "0")
    (folder / "_cpu_portable.so").write_text("no library")
    assert_rotations_are_right()
    assert refusal() == "HF_LIERE_CPU_KERNELS=0 turns them off" and not caplog.text


def test_a_broken_library_is_warned_of_once(folder, caplog):
    (folder / "_cpu_portable.so").write_text("no library")
    for _ in range(2):
        assert_rotations_are_right()
    assert f"{folder / '_cpu_portable.so'} cannot be used" in refusal() and "pip install --force-reinstall" in refusal()
    (record,) = caplog.records
    assert "Plain operations" in record.message and refusal() in record.message


@pytest.mark.usefixtures("compiled_kernels")
def test_another_library_stands_in_for_a_broken_one(folder, caplog):
    broken, usable = f"{cpu_library.ON_ANY_CPU[0]}.so", f"{cpu_library.ON_ANY_CPU[1]}.so"
    copy_usable(folder).rename(folder / usable)
    (folder / broken).write_text("no library")
    for _ in range(2):
        assert_rotations_are_right()
    assert refusal() is None and cpu_library.library()._name == str(folder / usable)
    (record,) = caplog.records
    assert f"{folder / broken} cannot be used" in record.message and f"{usable} is used instead" in record.message


@pytest.mark.usefixtures("compiled_kernels")
def test_a_library_of_other_sources_is_refused(folder, monkeypatch, caplog):
    """Its functions would take other arguments. It stays behind where a checkout changes and nothing is built again."""
    path, built = copy_usable(folder), cpu_library.INTERFACE
    monkeypatch.setattr(cpu_library, "INTERFACE", built + 1)
    assert_rotations_are_right()
    assert f"{path} cannot be used: it was built from other sources (interface {built}, not {built + 1})" in refusal()
    assert "pip install -e ." in refusal() and len(caplog.records) == 1


WITH_OPENMP_OF_LLVM = """
import ctypes, pathlib, sys
ctypes.CDLL(sys.argv[1], ctypes.RTLD_GLOBAL)
import cpu_library_checks as test
test.cpu_library.FOLDER = pathlib.Path(sys.argv[2])
print(test.refusal())
"""


@pytest.mark.slow
def test_a_second_copy_of_llvm_s_openmp_is_not_loaded(tmp_path):
    """It would end the process."""
    if (compiler := shutil.which("g++") or shutil.which("clang++")) is None:
        pytest.skip("there is no C++ compiler")
    source, copy = tmp_path / "openmp.cpp", tmp_path / "openmp.so"
    source.write_text('extern "C" void __kmpc_fork_call() {}')
    subprocess.run([compiler, "-shared", "-fPIC", source, "-o", copy], check=True)
    source.write_text('extern "C" void __kmpc_fork_call(); void kernel() { __kmpc_fork_call(); }')
    subprocess.run([compiler, "-shared", "-fPIC", source, "-o", tmp_path / "_cpu_openmp.so"], check=True)
    process = run_python("-c", WITH_OPENMP_OF_LLVM, copy, tmp_path, variables={"HF_LIERE_CPU_KERNELS": "1"})
    assert "_cpu_openmp.so cannot be used: it is linked to LLVM's OpenMP" in process.stdout


@pytest.mark.usefixtures("compiled_kernels")
def test_blocks_of_other_sizes_are_left_to_plain_operations():
    for size, has_kernels in ((1, True), (64, True), (65, False), (127, False), (128, True), (129, False)):
        found = cpu_kernels.refusal(torch.zeros(1), torch.float32, size)
        assert (found is None) == has_kernels and (has_kernels or f"not of {size}" in found)
    states = torch.zeros(1, 1, 1, 65)
    with pytest.raises(RuntimeError, match="No CPU kernels for blocks of 65: they take blocks of at most 64"):
        cpu_kernels.apply_rotation((states, states), torch.eye(65).expand(1, 1, 1, 1, 65, 65))
