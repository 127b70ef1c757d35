"""training/evidence/peer_speed.py: whole models beside those of other packages."""

import dataclasses
import re

import pytest

from training.evidence import peer_speed
from training.evidence.speed.models import BenchmarkError, Row, build_model


SMALL = dataclasses.replace(peer_speed.MODEL, num_hidden_layers=1, batch_size=1, image_size=64)


@pytest.mark.parametrize("name", ["transformers_absolute", "transformers_axial_rope", "timm_absolute"])
def test_peers_have_the_size_of_ours(name):
    """Equal layers and classifiers; DINOv3 has a mask token, biases of fewer projections and scales of layers."""
    if name.startswith("timm"):
        pytest.importorskip("timm")
    rows = [Row.parse(name), Row.parse("absolute" if name.endswith("absolute") else "axial_rope")]
    peer, ours = (
        {tuple(parameter.shape) for parameter in build_model(SMALL, row, True).parameters() if parameter.ndim > 1}
        for row in rows
    )
    matrices = {shape for shape in ours if len(shape) != 3}
    assert matrices <= peer | ({(3 * 384, 384)} if name.startswith("timm") else set())


def test_a_comparison_goes_on(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(peer_speed, "MODEL", SMALL)
    command = ["--output", str(tmp_path / "peers.jsonl"), "--rows", "transformers_axial_rope", "folded_liere8"]
    assert peer_speed.main([*command, "--blocks", "1"]) == 0
    assert peer_speed.main([*command, "--blocks", "2", "--resume"]) == 0
    printed = capsys.readouterr().out
    number = r"\d\.\d{3} \(\d\.\d{3} – \d\.\d{3}\)"
    assert len(re.findall(rf"`transformers_axial_rope` \| {number} \| {number} \|", printed)) == 2
    assert len(re.findall(rf"`folded_liere8` \| {number} \| – \|", printed)) == 2
    assert len((tmp_path / "peers.jsonl").read_text().splitlines()) == 1 + 2 * 3
    with pytest.raises(BenchmarkError, match="is not a model; accepted are .*transformers_absolute"):
        peer_speed.main([*command[:3], "vit", "--resume"])


def test_ratios_are_those_of_neighbours():
    """A machine that slows down in a block leaves the ratio alone."""
    lines = [
        {"row": "x", "phase": "training", "seconds": [2 * slow, 3.3 * slow, 3.3 * slow, 4 * slow]} for slow in (1, 9)
    ]
    assert "1.100 (1.100 – 1.100)" in peer_speed.table(lines)
