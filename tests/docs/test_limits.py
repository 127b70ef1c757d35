"""Front pages stay short: how many lines they have, and how many words a cell of their tables."""

import re

import pytest
from checkout import ROOT
from pages import commands


README = ROOT / "README.md"
INTERVAL = re.compile(r"\d%? [–…-] [+−-]?\d|\bp [=<]|Holm")


def cells(text: str) -> list[str]:
    """What a reader sees of each: links without their targets."""
    rows = re.findall(r"^\|(?!-)(.*)\|$", text, re.MULTILINE)
    return [re.sub(r"\]\([^)]*\)", "]", cell) for row in rows for cell in row.split("|")]


@pytest.mark.parametrize(
    "page, lines, words",
    [("README.md", 90, 8), ("docs/choosing.md", 45, 14), ("docs/results.md", 300, None), ("docs/speed.md", 250, None)],
)
def test_pages_stay_short(page, lines, words):
    text = (ROOT / page).read_text(encoding="utf-8")
    assert len(text.splitlines()) <= lines
    assert cells(text)
    assert words is None or [cell for cell in cells(text) if len(cell.split()) > words] == []


def test_the_guide_has_one_figure_in_a_row():
    rows = re.findall(r"^\|.*\|$", (ROOT / "docs/choosing.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert rows and [row for row in rows if len(re.findall(r"\d%|\d points\b|\bAUC\b", row)) > 1] == []


def test_the_readme_begins_with_commands_and_leaves_intervals_to_the_results():
    text = README.read_text(encoding="utf-8")
    assert {("make", "demo"), ("make", "test")} <= set(map(tuple, commands(README)))
    assert not INTERVAL.search(text)
    opening = text.split("\n## ")[0]
    assert all(name in opening for name in ("`AutoModel`", "`Trainer`", "the Hub", "CLIP"))


@pytest.mark.parametrize("text", ["70.3% (69.4 – 71.2)", "−0.7 (−1.5 – +0.1)", "p = 0.05", "43 … 46%"])
def test_intervals_are_found(text):
    assert INTERVAL.search(text)
