"""The papers' tables from model objects: which cells agree, and which do not."""

import sys

import pytest

from training.evidence import paper_tables


def test_table_8_agrees_in_all_cells_but_two():
    rows = paper_tables.table_8(measured=False)
    differing = {(size, encoding): ours for size, encoding, ours, paper, _ in rows if ours != paper}
    assert len(rows) == 15
    assert differing == {("Tiny", "LieRE64"): "1.002", ("Large", "VisionLLaMA"): "19.857"}
    assert [row[2] for row in rows if row[0] == "Base"] == ["5.607", "5.607", "5.609", "5.617", "5.684"]


def test_convention_from_first_principles():
    """ViT-Base by hand: 64 patches of 48 values, 12 layers of 768, 65 tokens, MLP 3072, 100 classes."""
    layer = 65 * 768 * 3 * 768 + 65 * 768 * 768 + 2 * 65 * 65 * 768 + 2 * 65 * 768 * 3072
    norms = 12 * 2 * 65 * 768 + 768
    flops = 64 * 48 * 768 + 12 * layer + 768 * 100 + 5 * norms + 2 * 12 * 65 * 768 * 8
    assert paper_tables.convention("Base", "LieRE8") == flops / 1e9


def test_our_model_costs_what_the_convention_counts():
    """Per image, rotations aside: for LieRE the same products are executed, so the measurement must agree exactly."""
    fields = {**paper_tables.CIFAR, **paper_tables.SIZES["Tiny"], **paper_tables.ENCODINGS["LieRE8"]}
    image, rotations = paper_tables.measure(fields)
    assert image == pytest.approx(paper_tables.convention("Tiny", "LieRE8"), rel=1e-12)
    assert rotations > 0


def test_parameters():
    assert [row[1] for row in paper_tables.size_rows()] == ["14.3", "85.2", "302.5"]
    table = paper_tables.table_10()
    assert [row[3] for row in table] == ["+0"] * 6
    # A third axis adds half.
    assert [int(row[5].replace(",", "")) * 2 for row in table] == [
        3 * count for count in paper_tables.TABLE_10.values()
    ]


def test_comrope_table_7():
    rows = {row[0]: row[1:] for row in paper_tables.table_7(measured=False)}
    assert [row[0].split()[0] for row in rows.values()] == ["–", "Yes", "No", "Yes", "Yes"]
    # The paper's formulas for n = 196, d = 768, L = 12, N = 2, b = 8, and the free entries stored here.
    assert [row[3] for row in rows.values()] == ["150,528", "0", "147,456", "73,728", "76,032"]
    assert [row[2] for row in rows.values()] == ["151,296", "0", "64,512", "32,256", "34,560"]


def test_script_prints_every_table(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["paper_tables.py", "--no_measure"])
    assert paper_tables.main() == 0
    printed = capsys.readouterr().out
    for text in ("LieRE Table 8", "LieRE Table 10", "ComRoPE Table 7", "14.3 million", "3096", "do not follow"):
        assert text in printed
