"""
Loads the library compiled from cpu.cpp, or compiles it with the machine's C++ compiler: $CXX, else g++ or clang++.

Libraries are cached in `hf_liere` in the user's cache directory, one for each block size, source, compiler and kind of
CPU. A library is code that this process runs, so it is loaded only from a directory and a file that belong to the user
and that nobody else may write to, and only if its bytes have the digest that its name ends in.
"""

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import secrets
import shlex
import shutil
import stat
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from transformers.utils import logging

from .cpu_interface import ARGUMENTS


try:
    import fcntl
    import pwd
except ImportError:
    # Windows has neither these modules nor kernels.
    fcntl = pwd = None

logger = logging.get_logger(__name__)

SOURCE = Path(__file__).with_name("cpu.cpp")
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fno-math-errno", "-shared", "-fPIC")
COMPILERS = ("g++", "clang++")
# In seconds; a few are usual.
COMPILE_TIMEOUT = 120
REMEDY = (
    "Rotations on the CPU are computed by plain operations, which are slower. GCC and clang compile the kernels (known "
    "to work: GCC 11 and 12, clang 14): install one (Debian and Ubuntu: apt-get install g++) or name it in CXX. "
    "HF_LIERE_CPU_KERNELS=0 turns the kernels and this warning off."
)

# For each block size its library, or why there is none.
_found: dict[int, tuple[ctypes.CDLL | None, str | None]] = {}
_lock = threading.Lock()


class Unusable(Exception):
    """A directory or library that this process cannot use, or that others may have written to."""


def library(block_size: int) -> ctypes.CDLL | None:
    """
    The kernels for blocks of this size, compiled now if they never were, or `None` where plain operations must do; a
    warning says why, unless there is no compiler at all.
    """
    return _library_or_failure(block_size)[0]


def failure(block_size: int) -> str | None:
    """Why [`library`] returns `None` for blocks of this size, or `None` if there is a library."""
    return _library_or_failure(block_size)[1]


def forget() -> None:
    """Forgets all libraries, as if the process were new."""
    _found.clear()
    find_compiler.cache_clear()


def _new_lock() -> None:
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    # The thread that holds the lock does not exist in a forked child.
    os.register_at_fork(after_in_child=_new_lock)


def _library_or_failure(block_size: int) -> tuple[ctypes.CDLL | None, str | None]:
    if block_size not in _found:
        with _lock:
            if block_size not in _found:
                _found[block_size] = _find(block_size)
    return _found[block_size]


def _find(block_size: int) -> tuple[ctypes.CDLL | None, str | None]:
    lacking = None
    if fcntl is None:
        lacking = "there are none for this operating system"
    elif not SOURCE.is_file():
        lacking = f"their source {SOURCE.name} is missing"
    elif find_compiler() is None:
        lacking = f"there is no C++ compiler (CXX, {' or '.join(COMPILERS)})"
    if lacking:
        logger.info("Rotations on the CPU are computed by plain operations: no kernels, because %s.", lacking)
        return None, lacking
    try:
        with _cache_directory() as directory:
            return _load_or_compile(find_compiler(), block_size, directory), None
    except Unusable as error:
        reason = str(error)
        logger.warning_once(
            f"Rotations on the CPU are computed by plain operations, which are slower, because {error}. Compiled "
            "code is kept and loaded only where nobody but the user can write: set XDG_CACHE_HOME to such a directory, "
            "or HF_LIERE_CPU_KERNELS=0 to do without."
        )
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        reason = f"{SOURCE.name} did not compile or load: {_reason(error)}"
        logger.warning_once(f"{reason}\n{REMEDY}")
    return None, reason


@functools.cache
def find_compiler() -> tuple[str, ...] | None:
    """$CXX, split into words, if it names a program, else the first of `COMPILERS` that is installed."""
    asked, problem = os.environ.get("CXX", ""), "names no program"
    try:
        words = tuple(shlex.split(asked))
        if words and shutil.which(words[0]):
            return words
        problem = f"names {words[0]}, which is not installed" if words else problem
    except ValueError as error:
        problem = f"is no command ({error})"
    found = next((program for program in COMPILERS if shutil.which(program)), None)
    if asked:
        instead = f"{found} compiles" if found else f"no {' or '.join(COMPILERS)} either compiles"
        logger.warning_once(f"CXX={asked!r} {problem}; {instead} the kernels for rotations on the CPU instead.")
    return found and (found,)


@contextlib.contextmanager
def _cache_directory() -> Iterator[int]:
    """
    A descriptor of the cache directory, locked so that processes that start later find what the first one compiled.
    Its files are opened relative to the descriptor, because the path may lead elsewhere by then.
    """
    path = _cache_path()
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        kind = "is a link and not a directory" if path.is_symlink() else "cannot be used"
        raise Unusable(f"{path} {kind} ({error.strerror})") from error
    try:
        _check_owner(os.fstat(directory), path)
        if os.fstatvfs(directory).f_flag & getattr(os, "ST_NOEXEC", 0):
            raise Unusable(f"{path} is on a file system from which nothing may be executed (noexec)")
        _wait_for(directory)
        yield directory
    finally:
        # A copy of the descriptor in a forked process must not hold the lock.
        with contextlib.suppress(OSError):
            fcntl.flock(directory, fcntl.LOCK_UN)
        os.close(directory)


def _cache_path() -> Path:
    # Relative paths would depend on the working directory, where anybody may have left libraries.
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not cache.is_absolute():
        home = Path(os.environ.get("HOME", ""))
        try:
            home = home if home.is_absolute() else Path(pwd.getpwuid(os.geteuid()).pw_dir)
        except KeyError:
            raise Unusable("there is no home directory for a cache") from None
        cache = home / ".cache"
    return cache / "hf_liere"


def _check_owner(status: os.stat_result, path: Path | str) -> None:
    if status.st_uid != os.geteuid():
        raise Unusable(f"{path} belongs to user {status.st_uid}, not to user {os.geteuid()} who runs this")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise Unusable(
            f"others may write to {path} (mode {stat.S_IMODE(status.st_mode):o}; chmod go-w {path} prevents that)"
        )


def _wait_for(directory: int) -> None:
    """
    Waits until no other process compiles. The system releases the lock of one that dies; one that hangs, and a file
    system without locks, cost no more than compiling the same twice.
    """
    deadline = time.monotonic() + COMPILE_TIMEOUT
    with contextlib.suppress(OSError):
        while time.monotonic() < deadline:
            with contextlib.suppress(BlockingIOError):
                return fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
            time.sleep(0.05)


def compiler_version(compiler: tuple[str, ...]) -> str:
    """
    All that the compiler says of itself.

    Raises:
        OSError, subprocess.SubprocessError: if it does not run.
    """
    return _run([*compiler, "--version"])


def _load_or_compile(compiler: tuple[str, ...], block_size: int, directory: int) -> ctypes.CDLL:
    version = compiler_version(compiler)
    # A process ends if it loads a second copy of LLVM's OpenMP. Without OpenMP the kernels use one thread.
    has_copy = "clang" in version and hasattr(ctypes.CDLL(None), "__kmpc_fork_call")
    commands = {}
    for threads in [()] if has_copy else [("-fopenmp",), ()]:
        command = (*compiler, *FLAGS, *threads, f"-DBLOCK_SIZE={block_size}")
        commands[f"cpu_kernels-{block_size}-{_digest(command, version)}-"] = command
    cached = sorted(os.listdir(directory))
    for name in [name for start in commands for name in cached if name.startswith(start)]:
        try:
            return _load(directory, block_size, name)
        except OSError as error:
            logger.info("%s in the cache is compiled again: %s", name, error)
            os.unlink(name, dir_fd=directory)
    if not os.access(".", os.W_OK, dir_fd=directory):
        raise Unusable(f"{_cache_path()} cannot be written to")
    logger.info("Compiling the kernels for blocks of %d with %s, once for this machine.", block_size, compiler[0])
    failure = None
    for start, command in commands.items():
        try:
            loaded = _load(directory, block_size, _store(directory, start, _compile(command)))
        except (OSError, RuntimeError, subprocess.SubprocessError) as error:
            failure = failure or error
            continue
        if "-fopenmp" not in command:
            logger.warning_once(
                f"The kernels for rotations on the CPU use one thread: {compiler[0]} compiled them without OpenMP"
                + (f", with which it fails: {_reason(failure)}" if failure else ", of which PyTorch has a copy.")
            )
        return loaded
    raise failure


def _reason(error: Exception) -> str:
    reason = error.stderr if isinstance(error, subprocess.CalledProcessError) and error.stderr else str(error)
    return reason.strip()[-2000:]


def _digest(command: tuple[str, ...], version: str) -> str:
    """Of all that a library depends on: machines of several kinds may share a home directory."""
    information = Path("/proc/cpuinfo")
    lines = information.read_text(errors="replace").split("\n\n")[0].splitlines() if information.is_file() else []
    kinds = ("flags", "Features", "model name", "CPU implementer", "CPU part")
    cpu = [platform.machine(), *(line for line in lines if line.startswith(kinds))]
    sources = b"".join(path.read_bytes() for path in [SOURCE, *sorted(SOURCE.parent.glob("*.h"))])
    return _hash(sources + "\n".join([*command, version, *cpu]).encode(errors="surrogateescape"))


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:32]


def _compile(command: tuple[str, ...]) -> bytes:
    with tempfile.TemporaryDirectory(prefix="hf_liere-") as folder:
        path = Path(folder) / "cpu_kernels.so"
        _run([*command, "-o", str(path), str(SOURCE)])
        if not path.is_file():
            raise RuntimeError(f"{command[0]} wrote no library")
        return path.read_bytes()


def _run(command: list[str]) -> str:
    return subprocess.run(
        command, capture_output=True, text=True, errors="replace", check=True, timeout=COMPILE_TIMEOUT
    ).stdout


def _store(directory: int, start: str, content: bytes) -> str:
    """
    The name under which the content is in the directory, whole and on the disk.

    Raises:
        Unusable: if it cannot be written there.
    """
    name, unfinished = f"{start}{_hash(content)}.so", f"unfinished-{secrets.token_hex(8)}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    try:
        with open(os.open(unfinished, flags, mode=0o700, dir_fd=directory), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, name, src_dir_fd=directory, dst_dir_fd=directory)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(unfinished, dir_fd=directory)
        if isinstance(error, OSError):
            raise Unusable(f"{_cache_path()} cannot be written to ({error.strerror})") from error
        raise
    return name


def _load(directory: int, block_size: int, name: str) -> ctypes.CDLL:
    """
    Raises:
        Unusable: if others may have written to the file.
        OSError: if it is damaged or does not load.
    """
    with open(os.open(name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=directory), "rb") as file:
        _check_owner(os.fstat(file.fileno()), _cache_path() / name)
        if _hash(file.read()) != name.removesuffix(".so").rpartition("-")[2]:
            raise OSError("its bytes are not those that were written")
    # By the descriptor where the system allows it, because the path may lead elsewhere by now.
    path = Path(f"/proc/self/fd/{directory}")
    loaded = ctypes.CDLL(str((path if path.exists() else _cache_path()) / name))
    if missing := [name for name in ARGUMENTS if not hasattr(loaded, name)]:
        raise OSError(f"it lacks {', '.join(missing)}")
    for name, arguments in ARGUMENTS.items():
        getattr(loaded, name).argtypes = arguments
    if loaded.hf_liere_block_size() != block_size:
        raise OSError(f"it is for blocks of {loaded.hf_liere_block_size()}")
    return loaded
