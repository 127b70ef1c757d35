"""Sections in processes of their own: a CUDA context that one breaks, or a crash, does not affect the others."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from training.gpu.report import Section
from training.gpu.sections import Settings


ROOT = Path(__file__).resolve().parents[2]
LOG_LINES = 60


def run_section(name: str, settings: Settings, time_limit: float) -> Section:
    """A section, with the end of what it printed if it failed; Ctrl-C and the time limit end its processes."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        text, log = Path(folder, "text.md"), Path(folder, "log.txt")
        text.touch()
        command = [sys.executable, "-m", "training.gpu.run_section", name, str(text), settings.device]
        with log.open("wb") as output, _interruptions() as interrupted:
            process = subprocess.Popen(
                [*command, *["--quick"] * settings.quick],
                cwd=ROOT,
                env=_environment(name, settings),
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            outcome, reason = _wait(process, log, interrupted, start, time_limit)
        found = text.read_text(encoding="utf-8")
        if outcome != "passed":
            # Progress bars write over their line.
            lines = log.read_text(encoding="utf-8", errors="replace").replace("\r", "\n").splitlines()[-LOG_LINES:]
            found += f"\n\n{reason} The end of what it printed:\n\n" + "\n".join(["```text", *lines, "```"])
    return Section(name, outcome, time.monotonic() - start, found)


def _environment(name: str, settings: Settings) -> dict[str, str]:
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "TOKENIZERS_PARALLELISM": "false"}
    if settings.device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
        if name == "self_check":
            # Triton's kernels run on CPUs only so.
            environment["TRITON_INTERPRET"] = "1"
    return environment


@contextlib.contextmanager
def _interruptions() -> Iterator[threading.Event]:
    """Set by SIGINT and SIGTERM, which would otherwise raise while a process starts that nobody would end then."""
    event, numbers = threading.Event(), (signal.SIGINT, signal.SIGTERM)
    previous = [signal.signal(number, lambda *_: event.set()) for number in numbers]
    try:
        yield event
    finally:
        for number, handler in zip(numbers, previous):
            signal.signal(number, handler)


def _wait(
    process: subprocess.Popen, log: Path, interrupted: threading.Event, start: float, time_limit: float
) -> tuple[str, str]:
    """The outcome, and a sentence on what happened where it is not passed."""
    while process.poll() is None:
        seconds = time.monotonic() - start
        if interrupted.is_set() or seconds > time_limit:
            _end(process)
            if interrupted.is_set():
                return "interrupted", "It was interrupted."
            return "failed", f"It was ended after {seconds:.0f} s, by --time_limit {time_limit}."
        if sys.stderr.isatty():
            print(f"\r      {seconds:.0f} s  {_last_line(log)}\033[K", end="", file=sys.stderr, flush=True)
        time.sleep(0.2)
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr, flush=True)
    if process.returncode == 0:
        return "passed", ""
    how = f"with exit code {process.returncode}"
    if process.returncode < 0:
        how = f"by signal {signal.Signals(-process.returncode).name}"
    return "failed", f"It ended {how}."


def _last_line(log: Path) -> str:
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 400))
        lines = file.read().decode(errors="replace").replace("\r", "\n").split("\n")
    return next((line for line in reversed(lines) if line.strip()), "")[:80]


def _end(process: subprocess.Popen) -> None:
    """End the process and all that it started, which share its session; torchrun needs a moment to end its workers."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            for _ in range(100):
                time.sleep(0.1)
                process.poll()
                os.killpg(process.pid, 0)
        except ProcessLookupError:
            return
