"""Inspection of models of tokens: what they learned, and whether generators still represent rotations in space."""

import json

import numpy as np
import pytest
import torch
from encoding_cases import perturb
from inspection_pages import Page
from published_models import tokens

from hf_liere.rotation.exponential import skew, skew_entries
from hf_liere.tools.cli import main
from hf_liere.tools.inspection.analysis import analyse
from hf_liere.tools.inspection.encodings import representation_error


def inspect(model, folder, *arguments):
    model.save_pretrained(folder / "model")
    status = main(["inspect", str(folder / "model"), *map(str, arguments), "--output", str(folder / "report")])
    return status, folder / "report"


def text_of(report):
    return " ".join(Page((report / "report.html").read_text(encoding="utf-8")).text.split())


@pytest.mark.parametrize("fields", [{}, {"block_size": 7}, {"spins": [1, 2]}])
@torch.no_grad()
def test_the_error_of_a_representation(fields):
    """[sL_x, sL_y] − sL_z = (s² − s) L_z, so it is |s − 1|; another basis of the channels changes nothing."""
    model = tokens(rotary_init="so3", **fields)
    encoding = model.liere.rotary_encoding
    generators, size = encoding.generators, encoding.block_size
    # Generators of norms up to 25 are rounded to float32.
    rounding = {"atol": 5e-6, "rtol": 0}
    torch.testing.assert_close(representation_error(encoding), torch.zeros(2, 2).double(), **rounding)
    basis = torch.linalg.qr(torch.randn(2, 2, 24 // size, size, size)).Q
    generators.copy_(skew_entries(basis.mT @ skew(generators, size) @ basis))
    torch.testing.assert_close(representation_error(encoding), torch.zeros(2, 2).double(), **rounding)
    scales = torch.tensor([[1.0, 1.25], [0.5, 3.0]])
    generators.mul_(scales[..., None, None])
    torch.testing.assert_close(representation_error(encoding), (scales - 1).abs().double(), **rounding)
    # One entry of one block of one axis, and a generator that is gone.
    generators.div_(scales[..., None, None])
    generators[1, 0, 0, -1, 0] += 0.1
    generators[2, 1, 1, 0] = 0
    found = representation_error(encoding)
    assert found[0, 0] > 0.02 and found[0, 1] < 5e-6 and found[1, 0] < 5e-6 and found[1, 1] == torch.inf


def test_only_starts_at_so3_are_measured_against_it():
    assert representation_error(tokens().liere.rotary_encoding) is None
    assert analyse(tokens(position_encoding="rope_mixed")).encoding.representation is None


@pytest.mark.parametrize("trained", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_the_report_says_how_far_generators_are_from_a_representation(tmp_path, trained):
    model = tokens(rotary_init="so3", spins=[0, 1, 2])
    if trained:
        perturb(model, 0.05)
    status, report = inspect(model, tmp_path)
    assert status == 0
    largest = representation_error(model.liere.rotary_encoding).max().item()
    with np.load(report / "analysis.npz", allow_pickle=False) as arrays:
        assert arrays["encoding.representation"].max() == largest
    text = text_of(report)
    assert f"is at most {largest:.2g}, and" in text and "[0, 1, 2]" in text and "one unit of the position" in text
    assert ("attention depends on the frame" in text) == trained
    assert ("depend only on relative orientations" in text) == (not trained)
    assert ("Training moved them from their start, rotary_init='so3'" in text) == trained
    assert ("as initialised by rotary_init='so3': nothing has been learned" in text) == (not trained)
    assert "in blocks of 9 channels" in text and "positions on 3 axes" in text


@pytest.mark.slow
def test_frequencies_are_per_unit_of_the_position(tmp_path):
    status, report = inspect(tokens(position_encoding="rope_mixed", num_axes=2, position_scale=[0.5, 2.0]), tmp_path)
    assert status == 0 and "radians per unit of the position." in text_of(report)
    with np.load(report / "analysis.npz", allow_pickle=False) as arrays:
        scaled, plain = (arrays[f"encoding.frequencies.{name}"] for name in ("per_patch", "per_coordinate"))
    assert np.allclose(scaled, plain * np.array([0.5, 2.0]).reshape(2, 1, 1, 1), rtol=1e-12)
    facts = json.loads((report / "analysis.json").read_text())
    assert facts["model"]["position_scale"] == [0.5, 2.0] and facts["encoding"]["relativity"] is None


@pytest.mark.parametrize(
    "fields",
    [
        {"position_encoding": "none"},
        pytest.param({"position_encoding": "comrope_ld", "num_axes": 1}, marks=pytest.mark.slow),
    ],
)
def test_models_of_tokens_with_any_encoding(tmp_path, fields):
    status, report = inspect(tokens(**fields), tmp_path)
    assert status == 0 and "positions of tokens form no grid" in text_of(report)
    assert ("no rotations of this package" in text_of(report)) == (fields["position_encoding"] == "none")


@pytest.mark.slow
def test_two_models_of_tokens(tmp_path):
    """Training from a start moves the generators by the distance that the page shows."""
    start = tokens(rotary_init="so3")
    start.save_pretrained(tmp_path / "start")
    perturb(start, 0.05).save_pretrained(tmp_path / "trained")
    arguments = [str(tmp_path / "start"), "--compare", str(tmp_path / "trained"), "--output", str(tmp_path / "report")]
    assert main(["inspect", *arguments]) == 0
    with np.load(tmp_path / "report" / "comparison.npz", allow_pickle=False) as arrays:
        assert arrays["generators"].shape == (2,) and 0.03 < arrays["generators"].min() < 0.2
