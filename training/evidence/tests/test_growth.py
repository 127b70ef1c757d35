"""training/evidence/growth.py: exponents, a list that goes on, and its picture."""

import dataclasses
import json
import re

import pytest

from training.evidence import growth


def test_exponents_are_those_of_powers():
    curve = {196: 4.0, 484: 1.0, 1024: 2 * 1024**1.7, 4096: 2 * 4096**1.7}
    assert growth.exponent(curve) == pytest.approx(1.7)
    assert growth.exponent({value: 3 / value for value in (1, 2, 3)}) == pytest.approx(-1)


@pytest.mark.slow
def test_a_comparison_goes_on_and_is_drawn(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(growth, "MODEL", dataclasses.replace(growth.MODEL, model_size="tiny", num_hidden_layers=1))
    monkeypatch.setattr(growth, "SIDES", (1, 2))
    monkeypatch.setattr(growth, "LAYERS", (1, 2))
    monkeypatch.setattr(growth, "NUM_POINTS", 4)
    monkeypatch.setattr(growth, "FIGURES", tmp_path)
    output = tmp_path / "growth.jsonl"
    assert growth.main(["--output", str(output), "--rounds", "1"]) == 0
    assert growth.main(["--output", str(output), "--rounds", "2", "--resume"]) == 0
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    # Two rounds of four models at eight values, after the line of the machine.
    assert len(lines) == 1 + 2 * 4 * 8 and all(line["bytes"] > 4 * 192**2 for line in lines[1:])
    assert growth.main(["--output", str(output), "--show"]) == 0
    row = r"^\| .* \| LieRE64 \| -?\d+\.\d\d \| -?\d+\.\d\d \|$"
    assert len(re.findall(row, capsys.readouterr().out, re.MULTILINE)) == 3 * 3
    assert all((tmp_path / f"growth_{theme}.svg").read_text().endswith("</svg>\n") for theme in ("light", "dark"))
