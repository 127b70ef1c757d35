"""
Compiles the kernels for CPUs; the rest of the installation is in pyproject.toml.

They are shared libraries that know nothing of Python, one for each kind of CPU: hf_liere/kernels/cpu_library.py loads
the fastest that the CPU can run. A library that the compiler cannot build, because it is missing or does not know a
flag, is left out. Without OpenMP kernels use one thread, and without any library plain operations compute the same.

Wheels carry all libraries. A checkout (`pip install -e .`) compiles the fastest that its CPU runs, and no other.
HF_LIERE_BUILD_KERNELS chooses otherwise: `all`, or `none`.
"""

import os
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext


KERNELS = Path("hf_liere", "kernels")
VECTORS = {
    "avx512": ["avx512f", "avx512vl", "avx512dq", "avx512bw", "fma"],
    "avx2": ["avx2", "fma"],
}
TUNED_FOR = {"avx512": "icelake-server", "avx2": "haswell"}
FLAGS = ["-std=c++17", "-O3", "-g0", "-fno-math-errno", "-Wno-psabi"]
# The fastest first. The instructions are those that PyTorch looks for before it says that a CPU has AVX-512 or AVX2.
LIBRARIES = ("avx512", "avx2", "openmp", "portable")


def extension(name: str) -> Extension:
    """The library of this name."""
    vectors = [f"-m{instructions}" for instructions in VECTORS.get(name, ())]
    tuning = [f"-mtune={TUNED_FOR[name]}"] if vectors else []
    openmp = [] if name == "portable" else ["-fopenmp"]
    return Extension(
        f"hf_liere.kernels._cpu_{name}",
        [str(KERNELS / "cpu.cpp")],
        depends=sorted(map(str, KERNELS.glob("*.h"))),
        language="c++",
        extra_compile_args=[*FLAGS, *vectors, *tuning, *openmp],
        extra_link_args=openmp,
        py_limited_api=True,
        optional=True,
    )


def instructions_of(cpuinfo: str) -> set[str]:
    """The instructions that all CPUs of this machine have, from the text of /proc/cpuinfo."""
    lines = [line.partition(":") for line in cpuinfo.splitlines()]
    found = [set(words.split()) for key, _, words in lines if key.strip() == "flags"]
    return set.intersection(*found) if found else set()


def runnable(instructions: set[str]) -> list[str]:
    """The libraries that a CPU with these instructions runs, the fastest first."""
    return [name for name in LIBRARIES if instructions.issuperset(VECTORS.get(name, ()))]


class BuildKernels(build_ext):
    """All libraries, or in a checkout the fastest one that this machine runs."""

    def run(self) -> None:
        # The base class builds elsewhere and copies, and forgets meanwhile that this is a checkout.
        self.is_checkout = self.inplace
        super().run()

    def build_extensions(self) -> None:
        chosen, cpuinfo = os.environ.get("HF_LIERE_BUILD_KERNELS", "") or "fastest", Path("/proc/cpuinfo")
        if chosen not in ("all", "fastest", "none"):
            raise ValueError(f"HF_LIERE_BUILD_KERNELS is {chosen!r}; accepted: all, fastest, none.")
        if chosen == "none":
            self.extensions = []
        # Elsewhere than on Linux, the compiler itself leaves out what the CPU does not run.
        if not self.is_checkout or chosen != "fastest" or not cpuinfo.is_file():
            super().build_extensions()
            return
        declared = {extension.name.rpartition("_")[2]: extension for extension in self.extensions}
        for name in runnable(instructions_of(cpuinfo.read_text())):
            print(f"Compiling the kernels for this CPU ({name}), which takes about a minute.", flush=True)
            self.extensions = [declared[name]]
            super().build_extensions()
            if Path(self.get_ext_fullpath(declared[name].name)).is_file():
                return


if __name__ == "__main__":
    setup(ext_modules=[extension(name) for name in LIBRARIES], cmdclass={"build_ext": BuildKernels})
