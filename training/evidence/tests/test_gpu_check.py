"""evidence/gpu_check.py on the CPU: its sections run with small models; report and record survive what ends them."""

import json
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
from training.evidence.gpu.comparisons import BASELINE, FIRST, OTHERS, compare, measure_cases
from training.evidence.gpu.models import OutOfTime, Settings
from training.evidence.gpu.privacy import remove_secrets
from training.evidence.gpu.processes import run_section
from training.evidence.gpu.record import GOALS, comparison_tables, goals_table, open_record
from training.evidence.gpu.report import Report, Section, heading
from training.evidence.gpu.sections import DESTINATIONS, SECTIONS


SETTINGS = Settings("cpu", quick=True)
COMMAND = [str(ROOT / "training" / "evidence" / "gpu_check.py"), "--device", "cpu", "--output"]


def outcomes(path):
    """Of the table at the top of a report."""
    top = path.read_text().partition("\n## ")[0]
    return dict(re.findall(r"^\| (\w+) \| (passed|failed|unfinished|interrupted|not run) \|", top, re.M))


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


def cells(table):
    return [re.split(r" *\| *", line)[1:-1] for line in table.splitlines()[2:]]


def lines_of(case, **steps):
    """Lines of a record of models whose steps take so many times the baseline's."""
    fields = {"device": "cuda", "compile": False, "image_size": 224, "patch_size": 16, "batch_size": 64, **case}
    return [
        {
            "case": fields,
            "phase": "training",
            "row": row,
            "memory": 10**9,
            "seconds": [[0.1, 0.1 * x, 0.1 * x, 0.1]] * 6,
        }
        for row, x in steps.items()
    ]


def test_goals_are_found_in_a_record():
    small = {"model_size": "small", "dtype": "bfloat16"}
    arrows = {"model_size": "arrows", "dtype": "float32", "image_size": 168}
    lines = [{"machine": {}}, {"section": "environment", "outcome": "passed"}]
    assert {row[3] for row in cells(goals_table(lines))} == {"not measured"}
    lines += lines_of(small, transformers_axial_rope=1.1, rope_mixed=1.13, comrope_ld8=1.14, liere8=1.39, liere64=9)
    # What was compiled, ran in float32 or with another batch does not count, nor what failed.
    lines += lines_of({**small, "compile": True}, liere8_with_kernel=1) + lines_of(
        {**small, "dtype": "float32"}, liere8=2
    )
    lines += lines_of({**small, "batch_size": 256}, liere64=2.1) + lines_of(arrows, absolute=2, liere8=2.2)
    lines += [{**lines[-1], "row": "liere8_with_kernel", "seconds": None, "failed": "why"}]
    del lines[-1]["seconds"]
    found = [row[2:] for row in cells(goals_table(lines))]
    assert found == [
        *(["0.030", "yes"], ["0.040", "no"], ["1.390", "yes"], ["–", "not measured"], ["2.100", "no"], ["1.100", "yes"])
    ]
    table = comparison_tables(lines)
    assert "| liere8 | 139.00 | 460 | 1.390 (1.390 – 1.390) | 1,000 | 1.00 |" in table
    assert (
        "ViT-S/16 at 224 px, batch 256, bfloat16, eager, training:" in table and "| liere8_with_kernel | why |" in table
    )


def test_what_is_worth_most_comes_first():
    names = list(SECTIONS)
    assert names[:6] == ["environment", "self_check", "precision", "speed", "patched", "graphs"]
    for goal in GOALS:
        rows = [
            rows
            for (settings, phase), rows in FIRST
            if phase == "training" and goal.case.items() <= vars(settings).items() and not settings.compile
        ]
        assert len(rows) == 1 and {goal.row, goal.above, goal.over} - {None} <= set(rows[0]) and rows[0][0] == BASELINE
    (settings, phase), rows = FIRST[0]
    assert (settings.dtype, settings.batch_size, phase) == ("bfloat16", 64, "training")
    # The last section completes what the first leaves out.
    others = {comparison: set(rows) for comparison, rows in OTHERS}
    assert all(set(rows) <= others[comparison] for comparison, rows in FIRST)
    assert {settings.compile for settings, _ in others} == {False, True, "reduce-overhead"}


def test_a_record_that_was_cut_is_resumed(tmp_path):
    settings = Settings("cpu", True, tmp_path / "record.jsonl")
    open_record(settings, go_on=False)
    measure_cases(settings, "speed", FIRST)
    lines = settings.lines()
    assert [line["row"] for line in lines[1:]] == 2 * [BASELINE, "liere8", "liere8_with_kernel"]
    assert all(min(map(min, line["seconds"])) > 0 and line["memory"] > 0 for line in lines[1:] if "seconds" in line)
    # The last line but one is left out, and the last is cut.
    *kept, _, last = settings.record.read_text().splitlines(keepends=True)
    settings.record.write_text("".join(kept) + last[:-9])
    with pytest.raises(InputError, match="--resume"):
        open_record(settings, go_on=False)
    open_record(settings, go_on=True)
    with pytest.raises(OutOfTime):
        measure_cases(Settings("cpu", True, settings.record, until=0), "speed", FIRST)
    assert settings.record.read_text() == "".join(kept)
    measure_cases(settings, "speed", FIRST)
    again = settings.lines()
    assert again[: len(kept)] == lines[:-2] and len(again) == len(lines)
    assert [line.get("row") for line in again] == [line.get("row") for line in lines]


def test_models_that_fail_do_not_end_the_others(tmp_path):
    settings = Settings("cpu", True, tmp_path / "record.jsonl")

    def build(name):
        raise RuntimeError(f"no {name}")

    compare(settings, "patched", {"case": {"title": "a"}, "phase": "training"}, ["lora", "liere8"], build)
    assert [line["failed"] for line in settings.lines()] == ["RuntimeError: no lora", "RuntimeError: no lora"]
    assert "| liere8 | RuntimeError: no lora |" in comparison_tables(settings.lines())


def test_records_of_other_code_are_not_continued(tmp_path):
    settings = Settings("cpu", True, tmp_path / "record.jsonl")
    (first,) = open_record(settings, go_on=True)
    first["machine"]["code"] = "another"
    settings.record.write_text(json.dumps(first) + "\n")
    with pytest.raises(InputError, match="measured with code=another, .*choose another --output"):
        open_record(settings, go_on=True)


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
    rows = re.findall(r"^\| (\w+)(?:, 10 times.*)? \| ([\d.e-]+) \| (–|[\d.e-]+) \|$", path.read_text(), re.M)
    assert [row[0] for row in rows[::2]] == ["axial_rope", "rope_mixed", "comrope_ld", "liere", "liere64", "liere4"]
    # Float32 has errors, and they are small.
    assert all(1e-9 < float(value) < 1e-3 for row in rows for value in row[1:] if value != "–")


@pytest.mark.slow
def test_whole_check(tmp_path):
    path = tmp_path / "report.md"
    assert gpu_check.main(["--device", "cpu", "--output", str(path)]) == 0
    assert outcomes(path) == dict.fromkeys(SECTIONS, "passed")
    text = path.read_text()
    needed = ("| liere8 |", "| lora |", "| liere8, captured |", "| sdpa | agrees |", "1 passed")
    needed += (
        "float16 on cpu, block size 8, heads of up to 128 channels | equal",
        "the weights after a step differ by",
    )
    assert not [part for part in needed if part not in text]
