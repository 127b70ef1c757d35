"""
Figures of results that pages and cards quote stand in a record of this repository: a paragraph links to the record, and
the record has the figure as it is quoted.
"""

import importlib
import json
import re
from pathlib import Path

import pytest
import yaml
from checkout import ROOT
from pages import PAGES, name


TRAINING = ROOT / "training"
REPORT, SPEED = TRAINING / "evidence" / "results" / "report.md", ROOT / "docs" / "reference" / "speed_tables.md"
ARCHIVE = REPORT.parent / "archive" / "report.md"
# Reports are made from the results, as a test says; speed_tables.md has what the benchmark printed, with its commands,
# and speed.md quotes it; cards of checkpoints are made from the records beside them.
CHECKPOINTS = sorted((TRAINING / "checkpoints").glob("*/README.md"))
RECORDS = (
    REPORT,
    ARCHIVE,
    SPEED,
    ROOT / "docs" / "speed.md",
    *CHECKPOINTS,
    TRAINING / "data" / "arrows.py",
    *(TRAINING / "evidence" / "data" / f"{task}.py" for task in ("bodies", "pointers", "poses")),
)
MEASURED = TRAINING / "evidence" / "speed" / "records"
PAPERS = yaml.safe_load((TRAINING / "evidence" / "paper_results.yaml").read_text(encoding="utf-8"))
EXPERIMENTS = yaml.safe_load((TRAINING / "evidence" / "paper_experiments.yaml").read_text(encoding="utf-8"))
CARDS = sorted((ROOT / "model_cards").glob("*.yaml"))
NUMBER = r"\d+(?:,\d{3})*(?:\.\d+)?(?:e-\d+)?"
SEVERAL = rf"({NUMBER}(?:(?:,? (?:–|and|to|or) |, ){NUMBER})*)"
FIGURES = [
    re.compile(pattern)
    for pattern in (
        rf"{SEVERAL}\s?%",
        rf"\(({NUMBER} – {NUMBER})%?\)",
        rf"\bp (?:=|of) {SEVERAL}",
        rf"\b(?:mAP|AP|AUC) (?:of |for )?{SEVERAL}",
        rf"{SEVERAL} (?:percentage )?points?\b",
        rf"{SEVERAL} times as (?:long|fast)",
        rf"\bperplexit(?:y|ies) of {SEVERAL}",
    )
]
# What is a percentage and no result: the level of intervals, shares of a definition.
NO_RESULTS = re.compile(r"95% interval|\b20 … 100%")
LINK = re.compile(r"\]\(([^)\s#]*)(?:#([^)\s]+))?\)")
PAPER = re.compile(r"(LieRE v1|LieRE|ComRoPE),? (Table \d+)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


def anchor(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def sections(text: str) -> dict[str, str]:
    """The text under each heading, by anchor; that before the first under an empty one."""
    parts = HEADING.split(re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL))
    return {"": parts[0]} | {anchor(title): part for title, part in zip(parts[1::2], parts[2::2])}


def quoted(text: str) -> list[str]:
    """The numbers of a paragraph or table that are results."""
    text = NO_RESULTS.sub("", re.sub(r"`[^`]*`|\]\([^)]*\)|<[^>]*>", " ", " ".join(text.split())))
    return [number for pattern in FIGURES for found in pattern.findall(text) for number in re.findall(NUMBER, found)]


def numbers(text: str) -> set[str]:
    return set(re.findall(NUMBER, text))


def linked(text: str, page: Path) -> set[str]:
    """Numbers of the records that a text names by links, or by a table of a paper."""
    found = set()
    for target, place in LINK.findall(text):
        path = (page.parent / target).resolve()
        if path in RECORDS:
            record = path.read_text(encoding="utf-8")
            found |= numbers(sections(record)[place] if place else record)
    for paper, table in PAPER.findall(text):
        found |= numbers(" ".join(json.dumps(PAPERS.get(sweep)) for sweep in sweeps_of(paper, table)))
    return found


def sweeps_of(paper: str, table: str) -> list[str]:
    return EXPERIMENTS[paper][table].get("sweeps", [])


def unbacked(text: str, page: Path) -> list[str]:
    """Paragraphs bring their records, tables have those of their section."""
    wrong = []
    for section in sections(text).values():
        for paragraph in re.split(r"\n\s*\n", section):
            if figures := quoted(paragraph):
                record = linked(section if paragraph.lstrip().startswith("|") else paragraph, page)
                wrong += [
                    f"{figure} in: {' '.join(paragraph.split())[:80]}" for figure in figures if figure not in record
                ]
    return wrong


@pytest.mark.parametrize("page", [page for page in PAGES if page != SPEED], ids=name)
def test_quoted_figures_are_in_the_records_that_are_linked(page):
    assert unbacked(page.read_text(encoding="utf-8"), page) == []


def test_figures_of_speed_stand_under_their_command():
    text = SPEED.read_text(encoding="utf-8")
    for part in re.split(r"^## ", text, flags=re.MULTILINE):
        if quoted(re.sub(r"^```.*?^```$", "", part, flags=re.MULTILINE | re.DOTALL)):
            commands = (
                r"benchmark_speed\.py --table \w+|`--table \w+|(price_list|peer_speed|growth|whole_job)\.py --output"
            )
            assert re.search(commands, part), part[:60]


@pytest.mark.parametrize("script", ["price_list", "peer_speed", "growth", "whole_job"])
def test_tables_of_stored_records_are_on_the_page(script, capsys, monkeypatch, tmp_path):
    module, text = importlib.import_module(f"training.evidence.{script}"), SPEED.read_text(encoding="utf-8")
    monkeypatch.setattr(module, "FIGURES", tmp_path, raising=False)
    assert module.main(["--output", str(MEASURED / f"{script}.jsonl"), "--show"]) == 0
    rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()[2:]]
    # The page leaves out a column of the price list, which is the same in all rows, and says what has gone since.
    rows = [row[:2] + row[3:] if script == "price_list" else row for row in rows]
    assert rows and [row for row in rows if f"| {' | '.join(row)} |" not in text.replace(" (gone)", "")] == []


def test_unbacked_figures_are_found():
    page = ROOT / "docs" / "choosing.md"
    link = "([table](../training/evidence/results/archive/report.md#cifar10-encodings))"
    assert unbacked(f"LieRE8 reaches 50.5% {link}, and seeds differ by 2.6 points.", page) == []
    for wrong, figure in (
        (f"LieRE8 reaches 55.1% {link}.", "55.1"),
        ("LieRE8 reaches 50.5%.", "50.5"),
        (f"It is 50.5% (49.3 – 51.9) {link}.", "51.9"),
        (f"It is better {link}, with p = 0.0871.", "0.0871"),
        # In the report, under another heading.
        (f"With an offset 42.8 and 39.6% {link}.", "42.8"),
        ("CLIP reaches 79.92% (ComRoPE, Table 4).", "79.92"),
        (f"| LieRE8 | 55.4% |\n\nThe table {link}.", "55.4"),
        ("It takes 1.713 times as long ([speed](speed.md)).", "1.713"),
    ):
        assert any(entry.startswith(f"{figure} in") for entry in unbacked(wrong, page)), wrong


@pytest.mark.parametrize("card", CARDS, ids=lambda path: path.stem)
def test_cards_quote_papers_and_records(card):
    """The papers' figures are those of the table that is named; own results name the weights; prose has none."""
    facts = yaml.safe_load(card.read_text(encoding="utf-8"))
    for figure in facts.get("paper_figures", []):
        paper, table = PAPER.search(figure["where"]).groups()
        record = {
            float(number) for sweep in sweeps_of(paper, table) for number in numbers(json.dumps(PAPERS.get(sweep)))
        }
        for key in ("accuracy", "low", "high"):
            if key in figure:
                assert round(100 * figure[key], 2) in record, (figure, key)
    for result in facts.get("results", []):
        assert re.fullmatch("[0-9a-f]{64}", result["weights"]) and result["samples"] and facts["environment"]
    prose = strings({**facts, "paper_figures": None, "results": None})
    assert not [text for text in prose if quoted(text)]


def strings(value) -> list[str]:
    if isinstance(value, dict | list):
        inside = value.values() if isinstance(value, dict) else value
        return [text for part in inside for text in strings(part)]
    return [value] if isinstance(value, str) else []
