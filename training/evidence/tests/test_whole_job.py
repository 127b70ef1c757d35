"""training/evidence/whole_job.py: our script, a Trainer of transformers and a loop of timm on the same files."""

import json

import pytest

from training.evidence import whole_job


@pytest.mark.slow
def test_rates_are_those_of_the_steps_in_between():
    line = {"processes": 1, "images": 8, "between": 4, "few": 2, "round": 0}
    lines = [{**line, "job": "trainer", "short": 7.0, "long": 11.0}, {**line, "job": "loop", "short": 4.0, "long": 6.0}]
    table = whole_job.table(lines).splitlines()
    assert table[2].endswith("| 1 | 2.00 (2.00 – 2.00) | 50.0% | 5.0 s |")
    assert table[3].endswith("| 4.00 (4.00 – 4.00) |  | 3.0 s |")


@pytest.mark.slow
def test_every_job_trains_in_two_processes(tmp_path):
    pytest.importorskip("timm")
    sizes = ["--model_size", "tiny", "--image_size", "32", "--batch_size", "4", "--images", "40", "--workers", "1"]
    output = tmp_path / "jobs.jsonl"
    times = ["--steps", "1", "2", "--rounds", "1", "--processes", "2"]
    assert whole_job.main(["--output", str(output), *sizes, *times]) == 0
    lines = [json.loads(line) for line in output.read_text().splitlines()][1:]
    assert [line["job"] for line in lines] == list(whole_job.JOBS)
    assert {line["images"] for line in lines} == {4 * 2}
