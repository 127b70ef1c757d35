"""The pictures of the documentation are those that their script draws, and show what their page says."""

import base64
import io
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from checkout import ROOT
from PIL import Image

from hf_liere.tools.inspection.plots import THEMES
from training.evidence import pictures


FIGURES = ROOT / "training" / "evidence" / "figures"
NUMBER = re.compile(r"-?\d+\.?\d*(?:e-?\d+)?")


@pytest.fixture(scope="module")
def drawn(tmp_path_factory) -> dict[str, str]:
    return {path.name: path.read_text() for path in pictures.main(["--output_dir", str(tmp_path_factory.mktemp("p"))])}


def shapes(svg: str) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Points of all paths, and the colours of all pictures inside of the picture in the middle of each cell."""
    paths = [np.array([float(number) for number in NUMBER.findall(path)]) for path in re.findall(r' d="([^"]*)"', svg)]
    inside = re.findall(r"data:image/png;base64,([^\"]+)", svg)
    return paths, [cells(np.asarray(Image.open(io.BytesIO(base64.b64decode(pixels)))).astype(int)) for pixels in inside]


def cells(pixels: np.ndarray) -> np.ndarray:
    """Releases of Matplotlib draw the cells of a square a little larger or smaller."""
    count = 2 * pictures.REACH + 1
    rows, columns = ((np.arange(count) + 0.5) * size // count for size in pixels.shape[:2])
    return pixels[rows.astype(int)][:, columns.astype(int)]


def version(svg: str) -> str:
    return re.search(r"Matplotlib v([\d.]+)", svg)[1]


@pytest.mark.parametrize(
    "name",
    [
        f"{name}_{theme}.svg"
        for name in ("rotations", "products", "orientations", "poses", "resolutions", "costs", "diffusion")
        for theme in THEMES
    ],
)
def test_the_script_draws_the_stored_pictures(drawn, name):
    stored = (FIGURES / name).read_text()
    compared = list(zip(shapes(drawn[name]), shapes(stored)))
    if version(stored) != version(drawn[name]):
        compared = compared[1:]
        if not compared[0][0]:
            pytest.skip(f"stored by Matplotlib {version(stored)}, whose releases place lines and labels differently")
    for mine, theirs in compared:
        assert [part.shape for part in mine] == [part.shape for part in theirs]
        for part, other in zip(mine, theirs):
            # Half a pixel of the page, or two of 255 shades: rounding of the rotations differs between machines. The
            # middle of a cell of the bar of colours is one shade further where the bar is a pixel longer.
            np.testing.assert_allclose(part, other, atol=3 if part.ndim == 3 else 0.5)


def test_only_the_start_at_so3_does_not_see_the_world_turn():
    for title, settings in pictures.TURNED.items():
        logits = pictures.turned_logits(settings)
        spread = logits.amax(dim=0) - logits.amin(dim=0)
        if title == "LieRE3 from so(3)":
            # Rounding of float32; the logits of the three keys differ.
            assert spread.max() < 1e-5 and (logits[0].diff() < -0.2).all()
        else:
            assert spread.min() > 0.2, title


def test_rotations_are_those_that_the_page_describes():
    walks = {
        title: [pictures.walk(settings, direction) for direction, _ in pictures.WALKS.values()]
        for title, settings in pictures.SHOWN.items()
    }
    row, column, diagonal = walks["Axial RoPE"]
    torch.testing.assert_close(column, torch.tensor([[1.0, 0.0]]).expand_as(column))
    torch.testing.assert_close(row, diagonal)
    for title in ("Axial RoPE", "RoPE-Mixed"):
        for path in walks[title]:
            torch.testing.assert_close(path.norm(dim=-1), torch.ones(len(path)))
    for title, settings in pictures.SHOWN.items():
        first, second = (pictures.logits(settings, place) for place in pictures.PLACES)
        change = (second - first).abs().max()
        # Rounding of float32 against a change that the colours can show, and that they do not cut off.
        assert 0.1 < change <= pictures.LARGEST_CHANGE if title == "LieRE8" else change < 1e-5, title


def test_a_product_sees_no_move_along_the_first_axis():
    for title, settings in pictures.MOVED.items():
        start = pictures.logits(settings, pictures.START)
        by_rows, by_columns = ((pictures.logits(settings, at) - start).abs().max() for at in pictures.MOVES.values())
        assert 0.1 < by_columns <= pictures.LARGEST_CHANGE
        assert by_rows < 1e-5 if title == "LieRE product" else by_rows > 0.1


def test_walks_of_comrope_follow_one_curve_and_those_of_liere_do_not():
    """R(p) = exp(s(p) B) for ComRoPE-LD: the farther walk passes every point of the nearer one."""
    for title, one_curve in (("ComRoPE-LD", True), ("LieRE8", False)):
        row, _, diagonal = (pictures.walk(pictures.SHOWN[title], way) for way, _ in pictures.WALKS.values())
        farthest = torch.cdist(row, diagonal).amin(1).max()
        assert (farthest < 0.02) == one_curve, (title, farthest)


def test_accuracies_are_those_of_the_report():
    report = (ROOT / "training/evidence/results/archive/report.md").read_text()
    report = report.split("## cifar10: resolutions")[1].split("\n## ")[0]
    for row, cells in pictures.resolutions().items():
        line = next(line for line in report.splitlines() if line.startswith(f"| {row} |"))
        assert list(cells) == [16, 32, 48, 64]
        assert line.endswith(" | ".join(str(cell) for cell in cells.values()) + " |")


def test_poses_are_those_of_the_report():
    report = (ROOT / "training/evidence/results/report.md").read_text().split("## poses: poses")[1].split("\n## ")[0]
    for title, cell in pictures.poses().items():
        line = next(line for line in report.splitlines() if line.startswith(f"| {pictures.ORIENTED[title]} |"))
        assert line.endswith(f" | {cell} |")


def test_costs_are_those_of_the_page_and_their_intervals_hold_them():
    text = pictures.SPEED.read_text()
    for cells in pictures.costs().values():
        assert len(cells) == 3
        for shares in cells.values():
            assert len(shares) == 2
            for median, low, high in shares:
                shown = f"/ {low} – {high}% /" if math.isnan(median) else f"{median}% ({low} – {high}%)"
                assert not (median < low or median > high) and shown in text


@pytest.mark.parametrize(
    "page",
    [
        f"docs/{name}.md"
        for name in ("choosing", "diffusion", "orientations_and_poses", "rotary_family", "results", "speed")
    ],
)
def test_pages_have_a_picture_for_each_theme(page):
    text = (ROOT / page).read_text()
    found = re.findall(r'srcset="([^"]+)_dark\.svg">\n<img src="([^"]+)_light\.svg" [^>]*alt="[^"]{40,}"', text)
    assert found and text.count("<picture>") == len(found)
    for dark, light in found:
        assert dark == light
        assert all((ROOT / Path(page).parent / f"{light}_{theme}.svg").is_file() for theme in THEMES)
