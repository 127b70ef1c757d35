"""evidence/gpu_check.py on the CPU: its sections run with small models, and a report survives what ends them."""

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from checkout import ROOT
from fresh_process import run_warm

from hf_liere.errors import InputError
from training.evidence import gpu_check
from training.evidence.gpu.models import Settings
from training.evidence.gpu.processes import run_section
from training.evidence.gpu.report import Report, Section, heading, remove_secrets
from training.evidence.gpu.sections import DESTINATIONS, SECTIONS


SETTINGS = Settings("cpu", quick=True)
COMMAND = [str(ROOT / "training" / "evidence" / "gpu_check.py"), "--device", "cpu", "--output"]


def outcomes(path):
    """Of the table at the top of a report."""
    top = path.read_text().partition("\n## ")[0]
    return dict(re.findall(r"^\| (\w+) \| ([\w ]+) \| [\d–]", top, re.M))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_machines_without_a_gpu_are_refused(tmp_path):
    with pytest.raises(InputError, match="finds no CUDA GPU. Accepted: .*--device cpu"):
        gpu_check.main(["--output", str(tmp_path / "report.md")])
    assert not list(tmp_path.iterdir())


def test_report_keeps_what_passed(tmp_path):
    path = tmp_path / "new" / "report.md"
    report = Report(path, heading(SETTINGS), go_on=False)
    text = "A table.\n\n## Not a section\n\n```text\n## tests\n```"
    report.add(Section("speed", "passed", 3.4, text))
    report.add(Section("precision", "failed", 2.0, "why"))
    again = Report(path, heading(SETTINGS), go_on=True)
    assert again.sections["speed"] == Section("speed", "passed", 3.0, text)
    assert again.passed("speed") and not again.passed("precision") and not again.passed("tests")
    again.add(Section("precision", "passed", 1.0, ""))
    not_run = dict.fromkeys(SECTIONS, "not run")
    assert outcomes(path) == not_run | {"speed": "passed", "precision": "passed"}
    # In the order of the sections, not in that of the runs.
    assert path.read_text().index("## precision") < path.read_text().index("## speed")
    assert [file.name for file in path.parent.iterdir()] == ["report.md"]


def test_reports_of_others_are_not_touched(tmp_path):
    path = tmp_path / "report.md"
    Report(path, heading(SETTINGS), go_on=False).add(Section("speed", "passed", 1, ""))
    before = path.read_bytes()
    with pytest.raises(InputError, match="--resume"):
        Report(path, heading(SETTINGS), go_on=False)
    with pytest.raises(InputError, match="another --output"):
        Report(path, "hf_liere 0.0\n\nDevices: another", go_on=True)
    assert path.read_bytes() == before


def test_secrets_and_names_are_left_out(monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setenv("LOGNAME", "someone")
    monkeypatch.setenv("MY_API_KEY", "hush-hush-1")
    monkeypatch.setattr("socket.gethostname", lambda: "node-17")
    text = "/home/someone/x /home/someone-else /data/someone/y someone@node-17 hush-hush-1 hf_abcdefghijklmnopqrst"
    assert remove_secrets(text) == "~/x /home/someone-else /data/user/y user@host … …"
    assert remove_secrets("someone said hf_liere.kernels") == "someone said hf_liere.kernels"


@pytest.mark.slow
def test_no_section_starts_after_the_minutes(tmp_path, capsys):
    path = tmp_path / "report.md"
    assert gpu_check.main(["--device", "cpu", "--output", str(path), "--minutes", "0.0001"]) == 1
    assert "0.0001 minutes are over; go on with --resume" in capsys.readouterr().out
    assert outcomes(path) == dict.fromkeys(SECTIONS, "not run") | {"environment": "passed"}


def test_every_section_belongs_to_a_place_that_is_there():
    for destination in set(DESTINATIONS.values()):
        page, _, section = destination.partition(", section ")
        assert not section or f"\n## {section}\n" in (ROOT / page).read_text(), destination


@pytest.mark.slow
def test_failures_and_time_limits_are_outcomes():
    failed = run_section("no_such_section", SETTINGS, time_limit=300)
    assert failed.outcome == "failed" and "exit code 2" in failed.text and "invalid choice" in failed.text
    ended = run_section("compilation", SETTINGS, time_limit=0.5)
    assert ended.outcome == "failed" and "by --time_limit 0.5" in ended.text and ended.seconds < 60


@pytest.mark.slow
def test_interrupted_check_is_resumed(tmp_path):
    path = tmp_path / "report.md"
    with subprocess.Popen(
        [sys.executable, *COMMAND, str(path), "--sections", "precision", "speed"],
        stdout=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    ) as process:
        assert process.stdout.readline().startswith("[1/2] precision: Rotations in float32")
        # Until the section has a process.
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        while children.exists() and not children.read_text() and process.poll() is None:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        assert "--resume" in process.communicate(timeout=60)[0]
    assert process.returncode == 130
    assert outcomes(path) == dict.fromkeys(SECTIONS, "not run") | {"precision": "interrupted"}
    assert "It was interrupted." in path.read_text()

    report = Report(path, heading(SETTINGS), go_on=True)
    for name in SECTIONS:
        if name != "precision":
            report.add(Section(name, "passed", 1, f"of {name}"))
    process = run_warm(*COMMAND, path, "--resume", cwd=tmp_path)
    assert process.stdout.startswith("[1/1] precision") and str(path) in process.stdout
    assert set(outcomes(path).values()) == {"passed"} and "of speed" in path.read_text()
    rows = re.findall(r"^\| (\w+) \| ([\d.e-]+) \| (–|[\d.e-]+) \|$", path.read_text(), re.M)
    assert [row[0] for row in rows] == ["axial_rope", "rope_mixed", "comrope_ld", "liere", "liere64"]
    # Float32 has errors, and they are small.
    assert all(1e-9 < float(value) < 1e-3 for row in rows for value in row[1:] if value != "–")


@pytest.mark.slow
def test_whole_check(tmp_path):
    path = tmp_path / "report.md"
    run_warm(*COMMAND, path, cwd=tmp_path)
    assert outcomes(path) == dict.fromkeys(SECTIONS, "passed")
    text = path.read_text()
    assert "| liere8 |" in text and "the weights after a step differ by" in text and "1 passed" in text
    assert "float16 on cpu, block size 8, heads of up to 128 channels | equal" in text and "| sdpa | agrees |" in text
