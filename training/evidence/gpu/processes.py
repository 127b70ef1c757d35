"""Sections in separate processes, so that a crash or a broken CUDA context does not affect the others."""

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

from training.evidence.gpu.report import Section
from training.evidence.gpu.run_section import OUT_OF_TIME
from training.evidence.gpu.sections import Settings


ROOT = Path(__file__).resolve().parents[3]
# Seconds that a section may take beyond the minutes, to end what it measures.
GRACE = 60
LOG_LINES = 60
UNFINISHED = "The minutes were over; --resume goes on."


def run_section(name: str, settings: Settings, time_limit: float) -> Section:
    """
    Runs a section; adds the end of its output if it fails. Ctrl-C, the time limit, and a minute after the minutes end
    its processes.
    """
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        text, log = Path(folder, "text.md"), Path(folder, "log.txt")
        text.touch()
        command = [sys.executable, "-m", "training.evidence.gpu.run_section", name, str(text), settings.device]
        # Sections make their tables from the record.
        command += ["--record", str(settings.record or Path(folder, "record.jsonl")), "--until", str(settings.until)]
        with log.open("wb") as output, _interruptions() as interrupted:
            process = subprocess.Popen(
                [*command, *["--quick"] * settings.quick],
                cwd=ROOT,
                env=_environment(name, settings),
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            outcome, reason = _wait(process, log, interrupted, start, time_limit, settings.until + GRACE)
        found = text.read_text(encoding="utf-8")
        if outcome == "unfinished":
            found += f"\n\n{reason}"
        elif outcome != "passed":
            # Progress bars overwrite their line.
            lines = log.read_text(encoding="utf-8", errors="replace").replace("\r", "\n").splitlines()[-LOG_LINES:]
            found += f"\n\n{reason} The end of what it printed:\n\n" + "\n".join(["```text", *lines, "```"])
    return Section(name, outcome, time.monotonic() - start, found)


def _environment(name: str, settings: Settings) -> dict[str, str]:
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "TOKENIZERS_PARALLELISM": "false"}
    if settings.device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
        if name in ("self_check", "kernels"):
            # Triton's kernels need the interpreter on CPUs.
            environment["TRITON_INTERPRET"] = "1"
    return environment


@contextlib.contextmanager
def _interruptions() -> Iterator[threading.Event]:
    """An event that SIGINT and SIGTERM set. If they raised while a process starts, nothing would end that process."""
    event, numbers = threading.Event(), (signal.SIGINT, signal.SIGTERM)
    previous = [signal.signal(number, lambda *_: event.set()) for number in numbers]
    try:
        yield event
    finally:
        for number, handler in zip(numbers, previous):
            signal.signal(number, handler)


def _wait(
    process: subprocess.Popen, log: Path, interrupted: threading.Event, start: float, time_limit: float, latest: float
) -> tuple[str, str]:
    """The outcome and, unless it is `passed`, a sentence on the reason."""
    while process.poll() is None:
        seconds = time.monotonic() - start
        if interrupted.is_set() or seconds > time_limit or time.time() > latest:
            _end(process)
            if interrupted.is_set():
                return "interrupted", "It was interrupted."
            if seconds <= time_limit:
                return "unfinished", UNFINISHED
            return "failed", f"It was ended after {seconds:.0f} s, by --time_limit {time_limit}."
        if sys.stderr.isatty():
            print(f"\r      {seconds:.0f} s  {_last_line(log)}\033[K", end="", file=sys.stderr, flush=True)
        time.sleep(0.2)
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr, flush=True)
    if process.returncode == 0:
        return "passed", ""
    if process.returncode == OUT_OF_TIME:
        return "unfinished", UNFINISHED
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
    """Ends the process and its children, which share its session. torchrun needs a moment to end its workers."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            for _ in range(100):
                time.sleep(0.1)
                process.poll()
                os.killpg(process.pid, 0)
        except ProcessLookupError:
            return
