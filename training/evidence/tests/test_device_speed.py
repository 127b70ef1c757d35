"""The tables of docs/reference/speed_tables.md about GPUs, from the lines that are stored."""

import json
import statistics

from checkout import ROOT

from training.evidence.device_speed import NOT_MEASURED, rows, steps, stored_results, table


def test_the_page_has_the_tables():
    page = (ROOT / "docs/reference/speed_tables.md").read_text(encoding="utf-8")
    assert table() in page and steps() in page


def test_records_of_gpus_become_a_table(tmp_path):
    assert steps(tmp_path) == NOT_MEASURED
    machine = {"gpu": "A GPU", "cpu": "a CPU", "torch": "2.9", "transformers": "5.17", "code": "abc"}
    case = {"model_size": "small", "patch_size": 16, "image_size": 224, "batch_size": 64, "dtype": "bfloat16"}
    line = {"case": {**case, "compile": False, "device": "cuda"}, "phase": "training", "row": "liere8"}
    seconds = [[0.1, 0.12, 0.12, 0.1], [0.1, 0.13, 0.13, 0.1], [0.1, 0.2, 0.2, 0.1]]
    lines = [{"machine": machine}, {"section": "environment"}, {**line, "seconds": seconds}]
    (tmp_path / "gpu_a.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    found = steps(tmp_path)
    assert found.startswith("A GPU, torch 2.9, transformers 5.17, code abc:") and "| ≤ 1.4 | 1.300 | yes |" in found
    assert found.endswith(
        "| model | ViT-S/16 at 224 px, batch 64, bfloat16, eager, training |\n| --- | --- |\n"
        "| `liere8` | 1.300 (130.0 ms) |"
    )


def test_a_row_is_the_median_of_its_runs():
    """Counted from the stored lines by hand: LieRE8 on an H100 with images of 168 px."""
    found = [
        result["train_metrics"]["train_images_per_second"]
        for result in stored_results()
        if result["sweep"] == "arrows_sizes"
        and result["environment"].get("accelerator", "").startswith("NVIDIA H100")
        and (result["settings"]["image_size"], result["settings"]["position_encoding"]) == (168, "liere")
    ]
    (row,) = [row for row in rows(stored_results()) if "H100" in row[1] and row[2:4] == ("168", "liere 8")]
    assert row[5:] == (str(len(found)), f"{statistics.median(found):.0f}", f"{64_000 / statistics.median(found):.1f}")


def test_runs_on_cpus_are_left_out():
    on_cpu = [result for result in stored_results() if not result["environment"].get("accelerator")]
    assert on_cpu and rows(on_cpu) == []
