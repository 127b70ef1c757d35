"""The recount of results by a second program: it finds a changed figure, and none in the pages as they are."""

import re
import shutil

import pytest
from checkout import ROOT

from training.evidence import recount


RESULTS = ROOT / "training" / "evidence" / "results"
SWEEPS = RESULTS.parent / "sweeps"
TEST_OF_TWO_SEEDS = (
    "|  | against | as trained |\n|---|---|---|\n| LieRE8 | Absolute | −0.005 (−0.01 – 0.001), p = 0.1, Holm = 0.1 |"
)


@pytest.fixture
def report(tmp_path):
    """A report with two sections: one has seeds, intervals and tests, the other two seeds."""
    text = (RESULTS / "report.md").read_text(encoding="utf-8")
    sections = re.findall(r"^## (?:views: views|\w+: series)\n.*?(?=^## )", text, re.MULTILINE | re.DOTALL)
    page = tmp_path / "report.md"
    page.write_text("".join(sections), encoding="utf-8")
    return page


@pytest.mark.parametrize(
    "printed, changed",
    [
        ("| 38,306 | 5 |", "| 38,306 | 6 |"),
        ("87.9 (86.5 – 89.1)<br>88.5", "87.8 (86.5 – 89.1)<br>88.5"),
        ("87.9 (86.5 – 89.1)<br>88.5", "87.9 (85.5 – 89.1)<br>88.5"),
        ("89.1)<br>88.5, 87.5", "89.1)<br>88.5, 87.6"),
        ("−11.7 (−13.0 – −10.4)", "−11.7 (−13.0 – −10.5)"),
        ("−11.2 (−12.1 – −10.3), p < 0.0001", "−11.2 (−12.1 – −10.3), p = 0.0002"),
        ("AUC 0.986<br>", "AUC 0.986 (0.985 – 0.987)<br>"),
        ("![Time", f"{TEST_OF_TWO_SEEDS}\n\n![Time"),
    ],
    ids=["seeds", "mean", "interval", "seed", "difference", "p", "interval of two seeds", "test of two seeds"],
)
def test_a_changed_cell_is_found(report, printed, changed):
    text = report.read_text(encoding="utf-8")
    assert printed in text and recount.recount_report(report, RESULTS, SWEEPS)[0].wrong == []
    report.write_text(text.replace(printed, changed, 1), encoding="utf-8")
    (wrong,) = recount.recount_report(report, RESULTS, SWEEPS)[0].wrong
    told = changed.partition("\n\n")[0].splitlines()[-1]
    line = report.read_text(encoding="utf-8").partition(told)[0].count("\n") + 1
    assert wrong.startswith(f"report.md:{line}: printed ")


def test_a_changed_quotation_is_found(report, tmp_path):
    _, sections = recount.recount_report(report, RESULTS, SWEEPS)
    page = tmp_path / "page.md"
    row = "| features ([results](report.md#views-views)) | {} | {} (1.0 – 2.0), as in Table 3 |\n"
    for figure, wrong in (
        ("57.2% (55.8 – 58.7)", 0),
        ("57.2% (55.8 – 58.9)", 1),
        ("42.4 points", 0),
        ("42.3 points", 1),
    ):
        page.write_text(
            f"| task | here | there |\n|---|---|---|\n{row.format(figure, 1.5).replace(', as in Table 3', '')}",
            encoding="utf-8",
        )
        # The other figure is of no cell.
        assert len(recount.recount_page(page, sections).wrong) == 1 + wrong
    page.write_text(f"| task | here | there |\n|---|---|---|\n{row.format('57.2%', 1.5)}", encoding="utf-8")
    assert len(recount.recount_page(page, sections).unassigned) == 2


@pytest.mark.parametrize(
    "row, wrong",
    [
        ("| `PoseEmbedding` | 99.6% |", 0),
        ("| `PoseEmbedding` | 57.2% |", 1),
        ("| in the world's frame | `PoseEmbedding` 99.6%, poses as features 57.2% |", 0),
        ("| in the world's frame | `PoseEmbedding` 57.2%, poses as features 99.6% |", 2),
    ],
)
def test_the_figure_of_another_row_is_found(report, tmp_path, row, wrong):
    """By the name of its row, or by the words before it in its cell."""
    _, sections = recount.recount_report(report, RESULTS, SWEEPS)
    page = tmp_path / "page.md"
    page.write_text(
        f"([results](report.md#views-views)):\n\n| model | accuracy |\n|---|---|\n{row}\n", encoding="utf-8"
    )
    assert len(recount.recount_page(page, sections).wrong) == wrong


def test_a_changed_card_is_found(tmp_path):
    folder = tmp_path / "arrows_liere8"
    shutil.copytree(ROOT / "training" / "checkpoints" / "arrows_liere8", folder)
    card = folder / "README.md"
    counts = recount.recount_card(card)
    assert counts.agree == 4 and not counts.wrong
    card.write_text(card.read_text(encoding="utf-8").replace("93.3% (92.2%", "93.3% (92.1%"), encoding="utf-8")
    assert len(recount.recount_card(card).wrong) == 1


@pytest.mark.slow
def test_pages_have_no_figure_that_differs(capsys):
    assert recount.main([]) == 0, capsys.readouterr().out
    assert "report.md: 0 agree" not in capsys.readouterr().out
