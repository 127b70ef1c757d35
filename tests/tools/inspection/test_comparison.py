"""`hf-liere inspect --compare`: two models on one page, and the distances between what they have learned."""

import json

import numpy as np
import pytest
import torch
from browser import console_errors
from inspection_pages import Page, picture, save
from published_models import vit
from transformers import ViTConfig, ViTForImageClassification

import hf_liere
from hf_liere.tools.cli import main
from hf_liere.tools.inspection.analysis import analyse, compare


NAMES = ("one", "other")


def copy_of(model):
    other = type(model)(model.config)
    other.load_state_dict(model.state_dict())
    return other.eval()


def compared(first, second):
    return compare(analyse(first), analyse(second), NAMES)


def test_the_change_of_every_plane():
    """Frequencies that are multiplied by 1.5 have moved by half of their magnitude, and so have the generators."""
    first = vit(position_encoding="rope_mixed")
    second = copy_of(first)
    with torch.no_grad():
        for _, parameter in second.rotary_parameters():
            parameter.mul_(1.5)
    found = compared(first, second)
    before, after = found.frequencies
    torch.testing.assert_close(after, 1.5 * before)
    torch.testing.assert_close(found.change, 0.5 * before.norm(dim=0))
    torch.testing.assert_close(found.generators, torch.full((2,), 0.5))
    assert not found.remarks


def test_another_basis_is_no_change():
    """Folding puts the basis of the planes into the weights, in float32: another encoding of the same frequencies."""
    first = vit(position_encoding="comrope_ld", block_size=8)
    found = compared(first, copy_of(first).fold_rotations())
    assert found.generators is None
    assert found.change.max() < 1e-5 * found.frequencies[0].abs().max()


def test_a_plane_that_turns_the_other_way_has_not_jumped():
    """Frequencies (1, ε) become (1, −ε), and (ε, 1) becomes (−ε, 1), which is (ε, −1) up to the order of channels."""
    first = vit(position_encoding="rope_mixed", num_hidden_layers=1)
    second = copy_of(first)
    step = 1e-2
    for model, sign in ((first, 1), (second, -1)):
        ((_, parameter),) = model.rotary_parameters()
        with torch.no_grad():
            parameter.zero_()
            # (A, layers, heads, planes, 1)
            parameter[:, 0, 0, 0, 0] = torch.tensor([sign * step, 1.0])
            parameter[:, 0, 1, 0, 0] = torch.tensor([1.0, sign * step])
    change = compared(first, second).change[0, :, 0]
    torch.testing.assert_close(change, torch.full((2,), 2 * step, dtype=change.dtype), atol=1e-6, rtol=0)


def test_what_cannot_be_compared_is_said():
    mixed, free = vit(position_encoding="rope_mixed"), vit(position_encoding="liere")
    found = compared(mixed, free)
    assert found.frequencies is None and found.generators is None
    assert found.remarks[0].startswith("Frequencies are not compared: the generators of other do not commute.")
    assert compared(free, free).generators.max() == 0
    narrow = vit(position_encoding="rope_mixed", num_attention_heads=4)
    (remark,) = compared(mixed, narrow).remarks
    assert "2 axes, 2 layers, 2 heads and 12 planes and 2 axes, 2 layers, 4 heads and 6 planes" in remark
    shared = vit(position_encoding="rope_mixed", share_layers=True)
    assert compared(mixed, shared).change.shape == (2, 2, 12)
    (remark,) = compared(mixed, vit(position_encoding="absolute")).remarks
    assert remark == "Generators are not compared: there are none of this package in other."
    elsewhere = vit(position_encoding="rope_mixed", coordinates="unit")
    found = compared(mixed, elsewhere)
    assert found.generators is None and found.frequencies is not None
    assert found.remarks == ["Generators are not compared: the size of a patch in coordinates differs."]
    (remark,) = compared(vit(position_encoding="rope_mixed", rotary_init="zeros"), mixed).remarks
    assert remark == "The generators of one are zero, so their relative change is undefined."


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The folder of a report on two models that were saved under one name, of one image."""
    folder = tmp_path_factory.mktemp("compared")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    for place, encoding in (("a", "rope_mixed"), ("b", "comrope_ld")):
        config = hf_liere.LieREViTConfig(**sizes, image_size=16, patch_size=4, position_encoding=encoding)
        save(hf_liere.LieREViTForImageClassification(config), folder / place / "model")
    models = [str(folder / place / "model") for place in "ab"]
    arguments = ["inspect", models[0], "--compare", models[1], "--image", picture(folder / "a.png")]
    assert main([*arguments, "--image_sizes", "16", "--output", str(folder / "report")]) == 0
    return folder


def test_one_page_and_the_numbers_behind_it(page):
    report = Page((page / "report" / "report.html").read_text(encoding="utf-8"))
    assert all(address.startswith("data:") for address in report.addresses)
    text = " ".join(report.text.split())
    headings = ["Where it looks", "What it predicts", "What it is", "How they differ", "What it learned", "What it co"]
    places = [text.index(heading) for heading in headings]
    assert places == sorted(places)
    # The names are alike, so that the page has the paths.
    assert f"{page}/a/model and {page}/b/model" in text
    assert "position_encodingrope_mixedcomrope_ld" in text.split("How they differ")[1]
    facts = {name: json.loads((page / "report" / f"{name}.json").read_text()) for name in ("analysis", "compared")}
    assert [facts[name]["model"]["position_encoding"] for name in facts] == ["rope_mixed", "comrope_ld"]
    with np.load(page / "report" / "comparison.npz") as arrays, np.load(page / "report" / "compared.npz") as second:
        change, frequencies = arrays["change"], [arrays[f"frequencies.{index}"] for index in range(2)]
        assert second["inputs.0.probabilities"].shape == (1, 2)
        assert np.allclose(np.abs(frequencies[1]), np.abs(second["encoding.frequencies.per_patch"]))
    assert np.allclose(change, np.linalg.norm(frequencies[0] - frequencies[1], axis=0))
    assert f"{change[0].max():.3g}" in text


@pytest.mark.slow
def test_side_by_side_or_below_one_another(page, browser):
    browser.get((page / "report" / "report.html").as_uri())
    original = browser.get_window_size()
    try:
        for width, columns in ((1600, 2), (600, 1)):
            browser.set_window_size(width, 900)
            first, second = browser.find_elements("css selector", ".models > section")[:2]
            beside = first.location["y"] == second.location["y"] and first.location["x"] < second.location["x"]
            assert beside == (columns == 2), width
            assert not browser.execute_script("return document.documentElement.scrollWidth > window.innerWidth")
        assert console_errors(browser) == []
    finally:
        browser.set_window_size(original["width"], original["height"])


def test_a_plain_vit_beside_ours(tmp_path):
    plain = ViTForImageClassification(
        ViTConfig(hidden_size=48, num_hidden_layers=1, num_attention_heads=2, image_size=16)
    )
    first, second = save(vit(), tmp_path / "ours"), save(plain, tmp_path / "plain")
    assert main(["inspect", str(first), "--compare", str(second), "--output", str(tmp_path / "page")]) == 0
    text = Page((tmp_path / "page" / "report.html").read_text(encoding="utf-8")).text
    assert "ours and plain" in text and "there are none of this package in plain" in text


def test_widths_and_numbers_of_heads_and_layers_of_plain_vits_differ(tmp_path):
    for name, width, heads, layers in (("narrow", 24, 2, 1), ("wide", 48, 3, 2)):
        sizes = {"hidden_size": width, "num_attention_heads": heads, "num_hidden_layers": layers}
        save(ViTForImageClassification(ViTConfig(**sizes, intermediate_size=32, image_size=16)), tmp_path / name)
    names = [str(tmp_path / name) for name in ("narrow", "wide")]
    assert main(["inspect", names[0], "--compare", names[1], "--output", str(tmp_path / "page")]) == 0
    text = Page((tmp_path / "page" / "report.html").read_text(encoding="utf-8")).text
    # The cells of a row stand without a space.
    for row in ("hidden_size2448", "num_attention_heads23", "num_hidden_layers12", "head_dim1216"):
        assert row in text
