"""What the script of the site does to its tables: a field that searches long ones, and labels of cells for phones."""

import pytest
from checkout import ROOT


@pytest.fixture
def page(browser, tmp_path):
    rows = "".join(f"<tr><td>{name}</td><td>run</td></tr>" for name in ("qwen2", "Qwen3_VL", "llama"))
    script = (ROOT / "docs" / "_static" / "tables.js").read_text(encoding="utf-8")
    table = f"<table><thead><tr><th>model type</th><th>blocks</th></tr></thead><tbody>{rows}</tbody></table>"
    (tmp_path / "page.html").write_text(f"<script>{script}</script><div class='searchable'>{table}</div>{table}")
    browser.get((tmp_path / "page.html").as_uri())
    return browser


def test_rows_stay_that_contain_all_words(page):
    (field,) = page.find_elements("css selector", "input[type=search]")
    for typed, left in (
        ("", ["qwen2", "Qwen3_VL", "llama"]),
        ("QWEN", ["qwen2", "Qwen3_VL"]),
        ("vl qwen", ["Qwen3_VL"]),
    ):
        field.clear()
        field.send_keys(typed)
        shown = page.find_elements("css selector", ".searchable tbody tr:not([hidden]) td:first-child")
        assert [cell.text for cell in shown] == left
    assert len(page.find_elements("css selector", "body > table tr:not([hidden])")) == 4


def test_cells_know_the_head_of_their_column(page):
    cells = page.find_elements("css selector", "body > table tbody tr:last-child td")
    assert [cell.get_attribute("data-label") for cell in cells] == ["model type", "blocks"]
