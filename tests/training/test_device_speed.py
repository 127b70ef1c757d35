"""The table of docs/speed.md about runs on accelerators, from the lines that are stored."""

import statistics

from checkout import ROOT

from training.evidence.device_speed import rows, stored_results, table


def test_the_page_has_the_table():
    assert table() in (ROOT / "docs/speed.md").read_text(encoding="utf-8")


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
