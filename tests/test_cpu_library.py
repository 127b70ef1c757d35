"""Compiling the kernels for CPUs on the user's machine, keeping the libraries, and what is never loaded."""

import os
import pwd
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import reference
import torch
from transformers.utils import logging

from hf_liere.kernels import cpu as cpu_kernels
from hf_liere.kernels import cpu_library
from hf_liere.models.exponential import block_rotations
from hf_liere.models.lie_algebra import skew


AVAILABLE = cpu_kernels.refusal(torch.zeros(1), torch.float32, 2) is None
needs_compiler = pytest.mark.usefixtures("compiler")

ROTATE = """
import torch
from hf_liere.kernels import cpu as cpu_kernels
from hf_liere.models.exponential import block_rotations
from hf_liere.models.lie_algebra import skew
rotations = block_rotations(torch.rand(6, 2, dtype=torch.float64), skew(torch.rand(2, 3, 28), 8))
orthogonal = torch.allclose(rotations.mT @ rotations, torch.eye(8), atol=1e-6)
print(cpu_kernels.refusal(rotations, torch.float32, 8) is None and orthogonal)
"""


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """The directory of libraries of a user who has none yet, in a process that has loaded none yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    cpu_library.forget()
    logging.warning_once.cache_clear()
    yield tmp_path / "cache" / "hf_liere"
    cpu_library.forget()


def libraries(cache):
    return sorted(path for path in cache.iterdir())


def write_script(path, text):
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o700)
    return path


@pytest.fixture
def compilations(tmp_path, monkeypatch):
    """A file that gets a line for every compilation."""
    log = tmp_path / "compilations"
    log.touch()
    compiler = shutil.which("g++") or shutil.which("clang++")
    text = f'case "$*" in *--version) ;; *) echo compiled >> {log};; esac\nexec {compiler} "$@"'
    monkeypatch.setenv("CXX", str(write_script(tmp_path / "counted", text)))
    return log


def plant(library, folder, code=""):
    """In place of a library, another one whose name is right; its code runs as soon as it is loaded."""
    source = folder / "planted.cpp"
    source.write_text(f"#include <cstdio>\n__attribute__((constructor)) static void run() {{ {code} }}\n")
    subprocess.run([*cpu_library.find_compiler(), "-shared", "-fPIC", "-o", library, source], check=True)
    digest = cpu_library._hash(library.read_bytes())
    return library.rename(library.with_name(f"{library.name.rpartition('-')[0]}-{digest}.so"))


@pytest.mark.parametrize(
    "environment, messages",
    [
        # A compiler that fails, as `false` does, one that writes nothing, and none at all.
        ({"CXX": "false"}, ["plain operations", "apt-get install g++", "HF_LIERE_CPU_KERNELS=0"]),
        ({"CXX": "true"}, ["plain operations", "wrote no library"]),
        ({"PATH": "/nowhere"}, []),
        ({"HF_LIERE_CPU_KERNELS": "0"}, []),
        ({"XDG_CACHE_HOME": "/dev/null/cache"}, ["plain operations", "/dev/null/cache", "XDG_CACHE_HOME"]),
    ],
)
def test_without_kernels_the_plain_operations_do_the_same(monkeypatch, caplog, environment, messages):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    positions, generators = torch.rand(6, 2, dtype=torch.float64), skew(torch.rand(2, 3, 28) * 6, 8)
    rotations = block_rotations(positions, generators)
    assert cpu_kernels.refusal(torch.zeros(1), torch.float32, 8)
    exact = reference.exponential(torch.einsum("pa,akij->kpij", positions, generators.double()))
    # float32 rounding of numbers up to one.
    torch.testing.assert_close(rotations.double(), exact, rtol=0, atol=2e-7)
    assert all(message in caplog.text for message in messages) if messages and AVAILABLE else not caplog.text


@needs_compiler
@pytest.mark.parametrize(
    "compiler, message",
    [
        (" ", "CXX=' ' names no program"),
        ("'", 'CXX="\'" is no command (No closing quotation)'),
        ("no-such-cache g++", "names no-such-cache, which is not installed"),
        ("no-such-compiler", "names no-such-compiler, which is not installed"),
    ],
)
def test_another_compiler_stands_in_for_one_that_is_not_there(monkeypatch, caplog, compiler, message):
    monkeypatch.setenv("CXX", compiler)
    assert cpu_library.library(2) is not None
    assert message in caplog.text and "++ compiles the kernels" in caplog.text


@needs_compiler
def test_compilers_without_openmp_make_kernels_of_one_thread(tmp_path, monkeypatch, caplog, cache):
    """As Apple's clang is, and any clang where its library for OpenMP is not installed."""
    text = 'case "$*" in *-fopenmp*) echo "unsupported option -fopenmp" >&2; exit 1;; esac\nexec g++ "$@"'
    monkeypatch.setenv("CXX", str(write_script(tmp_path / "compiler", text)))
    expected = block_rotations(torch.ones(2, 2).double(), skew(torch.ones(2, 3, 28), 8), torch.float64)
    found = block_rotations(torch.ones(2, 2).double(), skew(torch.ones(2, 3, 28), 8))
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=2e-7)
    assert "use one thread" in caplog.text and "unsupported option -fopenmp" in caplog.text
    (library,) = libraries(cache)
    written = library.stat().st_mtime_ns
    cpu_library.forget()
    assert cpu_library.library(8) is not None and library.stat().st_mtime_ns == written


@needs_compiler
def test_a_linker_that_removes_its_output_is_quoted(tmp_path, monkeypatch, caplog, cache):
    """As GNU ld does on a full disk."""
    text = """case "$*" in *--version) exit;; esac
while [ "$1" != -o ]; do shift; done
rm -f "$2"; echo 'final link failed: No space left on device' >&2; exit 1"""
    monkeypatch.setenv("CXX", str(write_script(tmp_path / "compiler", text)))
    assert cpu_library.library(2) is None
    assert "No space left on device" in caplog.text and not libraries(cache)


@needs_compiler
def test_processes_that_start_at_once_share_one_library(cache, compilations):
    """As those of a distributed run do on a new machine."""
    command = [sys.executable, "-c", ROTATE]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert [process.communicate(timeout=300)[0].strip() for process in processes] == ["True"] * 3
    (library,) = libraries(cache)
    assert library.name.startswith("cpu_kernels-8-") and library.suffix == ".so"
    assert compilations.read_text().split() == ["compiled"]
    assert cpu_library.library(8) is not None and compilations.read_text().split() == ["compiled"]


@needs_compiler
def test_threads_that_start_at_once_compile_once(compilations):
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: cpu_library.library(2), range(8)))
    assert found[0] is not None and all(library is found[0] for library in found)
    assert compilations.read_text().split() == ["compiled"]


@needs_compiler
def test_nobody_waits_for_a_process_that_died(cache):
    cache.mkdir(parents=True)
    hold = "import fcntl, os, sys, time; fcntl.flock(os.open(sys.argv[1], os.O_RDONLY), fcntl.LOCK_EX); print()"
    command = [sys.executable, "-c", f"{hold}; sys.stdout.flush(); time.sleep(600)", cache]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process, ThreadPoolExecutor(1) as pool:
        process.stdout.readline()
        found = pool.submit(cpu_library.library, 2)
        process.kill()
        assert found.result(timeout=cpu_library.COMPILE_TIMEOUT / 2) is not None


DAMAGES = {
    "empty": lambda content: b"",
    "half": lambda content: content[: len(content) // 2],
    "zeros": lambda content: content[: len(content) // 2] + bytes(len(content) - len(content) // 2),
    "one bit": lambda content: content[:-9] + bytes([content[-9] ^ 1]) + content[-8:],
    "something else": lambda content: b"not a library",
}


@needs_compiler
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_library_is_compiled_again(cache, damage):
    """The system maps a file without looking at it; the process dies when it comes to what is missing."""
    assert cpu_library.library(2) is not None
    (library,) = libraries(cache)
    whole = library.read_bytes()
    # In a new file: this process still has the old one mapped.
    library.unlink()
    library.write_bytes(DAMAGES[damage](whole))
    library.chmod(0o700)
    cpu_library.forget()
    assert cpu_library.library(2) is not None
    (library,) = libraries(cache)
    assert len(library.read_bytes()) == len(whole)
    assert library.stem.endswith(cpu_library._hash(library.read_bytes()))


@needs_compiler
def test_a_library_without_the_kernels_or_for_other_blocks_is_compiled_again(cache, tmp_path):
    assert cpu_library.library(2) is not None
    plant(libraries(cache)[0], tmp_path)
    cpu_library.forget()
    assert cpu_library.library(2).hf_liere_block_size() == 2
    (right,) = libraries(cache)
    assert cpu_library.library(3) is not None
    (other,) = set(libraries(cache)) - {right}
    other.rename(cache / f"{right.stem.rpartition('-')[0]}-{other.stem.rpartition('-')[2]}.so")
    right.unlink()
    cpu_library.forget()
    assert cpu_library.library(2).hf_liere_block_size() == 2


def give_away(path):
    if os.geteuid() != 0:
        pytest.skip("only root can give files away")
    os.chown(path, pwd.getpwnam("nobody").pw_uid, -1)


STRANGE = {
    "a directory everyone writes to": (lambda cache, library: cache.chmod(0o777), "mode 777; chmod go-w"),
    "a directory a group writes to": (lambda cache, library: cache.chmod(0o770), "mode 770; chmod go-w"),
    "another user's directory": (lambda cache, library: give_away(cache), "belongs to user"),
    "a library everyone writes to": (lambda cache, library: library.chmod(0o722), "mode 722; chmod go-w"),
    "another user's library": (lambda cache, library: give_away(library), "belongs to user"),
    "a link for a directory": (
        lambda cache, library: cache.rename(cache.with_name("elsewhere")) and cache.symlink_to("elsewhere"),
        "is a link",
    ),
}


@needs_compiler
@pytest.mark.parametrize("case", STRANGE)
def test_what_others_may_have_written_is_not_loaded(cache, tmp_path, caplog, case):
    assert cpu_library.library(2) is not None
    library = plant(libraries(cache)[0], tmp_path, f'std::fclose(std::fopen("{tmp_path}/ran", "w"));')
    make, message = STRANGE[case]
    make(cache, library)
    cpu_library.forget()
    assert cpu_library.library(2) is None
    assert not (tmp_path / "ran").exists()
    assert message in caplog.text and str(cache) in caplog.text and "XDG_CACHE_HOME" in caplog.text


@needs_compiler
def test_a_link_in_place_of_a_library_is_not_followed(cache, tmp_path):
    assert cpu_library.library(2) is not None
    library = plant(libraries(cache)[0], tmp_path, f'std::fclose(std::fopen("{tmp_path}/ran", "w"));')
    library.rename(tmp_path / "planted.so")
    library.symlink_to(tmp_path / "planted.so")
    cpu_library.forget()
    assert cpu_library.library(2) is not None
    assert not (tmp_path / "ran").exists() and not any(path.is_symlink() for path in libraries(cache))


@needs_compiler
def test_libraries_are_for_their_owner_alone(cache):
    """Whatever new files are for, as on machines where every user has a group."""
    before = os.umask(0o002)
    try:
        assert cpu_library.library(2) is not None
    finally:
        os.umask(before)
    assert [path.stat().st_mode & 0o077 for path in (cache, *libraries(cache))] == [0, 0]


@pytest.mark.parametrize("environment", [{"HOME": ""}, {"HOME": "."}, {"XDG_CACHE_HOME": "cache", "HOME": ""}])
def test_the_cache_does_not_depend_on_the_working_directory(monkeypatch, tmp_path, environment):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.chdir(tmp_path)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert cpu_library._cache_path() == Path(pwd.getpwuid(os.geteuid()).pw_dir) / ".cache" / "hf_liere"
