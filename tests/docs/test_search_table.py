"""The field above long tables of the site."""

from checkout import ROOT


def test_rows_stay_that_contain_all_words(browser, tmp_path):
    rows = "".join(f"<tr><td>{name}</td><td>run</td></tr>" for name in ("qwen2", "Qwen3_VL", "llama"))
    script = (ROOT / "docs" / "_static" / "search_table.js").read_text(encoding="utf-8")
    table = f"<table><thead><tr><th>model type</th></tr></thead><tbody>{rows}</tbody></table>"
    page = tmp_path / "page.html"
    page.write_text(f"<script>{script}</script><div class='searchable'>{table}</div>{table}", encoding="utf-8")
    browser.get(page.as_uri())
    (field,) = browser.find_elements("css selector", "input[type=search]")
    for typed, left in (
        ("", ["qwen2", "Qwen3_VL", "llama"]),
        ("QWEN", ["qwen2", "Qwen3_VL"]),
        ("vl qwen", ["Qwen3_VL"]),
    ):
        field.clear()
        field.send_keys(typed)
        shown = browser.find_elements("css selector", ".searchable tbody tr:not([hidden]) td:first-child")
        assert [cell.text for cell in shown] == left
    assert len(browser.find_elements("css selector", "body > table tr:not([hidden])")) == 4
