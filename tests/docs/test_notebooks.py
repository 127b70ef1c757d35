"""
The notebooks: their cells run in order, as in a notebook, with a small model under the name of a large one. They run
without Jupyter, which the tests then need not install; the first cell, which installs, is no Python and is only read.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import matplotlib
import pytest
import torch
from checkout import ROOT
from page_models import clip
from patching_cases import widen

from hf_liere import is_patched
from hf_liere.encoding.kinds import ENCODINGS


NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))


def cells(path, kind="code"):
    notebook = json.loads(path.read_text(encoding="utf-8"))
    return ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == kind]


@pytest.fixture
def ran(tmp_path, monkeypatch):
    """Runs a notebook where it lies in a checkout, beside the models that it names; returns its names."""
    folder = tmp_path / "checkout" / "docs" / "notebooks"
    folder.mkdir(parents=True)
    (tmp_path / "checkout" / "training").symlink_to(ROOT / "training")
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])
    matplotlib.use("Agg")

    def run(name, **replaced):
        path, namespace = ROOT / "docs" / "notebooks" / f"{name}.ipynb", {"__name__": "__main__"}
        for number, cell in enumerate(cells(path)[1:], start=2):
            for constant, value in replaced.items():
                cell = cell.replace(constant, value)
            exec(compile(cell, f"{path.name}, code cell {number}", "exec"), namespace)
        return namespace

    yield run
    from matplotlib import pyplot

    pyplot.close("all")


# What prints or draws when its cell runs, and not only when a function does.
SHOWS = re.compile(r"^(?:    )?print\(|^(?:    )?(?:figure.*= )?pyplot\.(?:plot|figure|subplots)\(", re.MULTILINE)
# Losses of weights on the Hub, which are not to be had everywhere.
NOT_STORED = {"clip": ["optimizer = "]}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_readers_of_the_page_see_what_cells_show(path):
    code = [cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    for cell in code[1:]:
        source = "".join(cell["source"])
        if not any(part in source for part in NOT_STORED.get(path.stem, [])):
            assert bool(cell["outputs"]) == bool(SHOWS.search(source)), source


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_opens_with_one_cell_that_installs(path):
    """That cell has no output, and the others have neither warnings nor paths of a machine."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert notebook["cells"][0] is code[0] and "%pip install" in "".join(code[0]["source"])
    assert not code[0]["outputs"] and not [cell for cell in code if cell["execution_count"]]
    outputs = [output for cell in code for output in cell["outputs"]]
    assert {output.get("name", "picture") for output in outputs} <= {"stdout", "picture"}
    assert not [output for output in outputs if "/" in "".join(output.get("text", ""))]
    assert not [cell for cell in cells(path)[1:] if cell.lstrip().startswith(("%", "!"))]
    # Ids are needed by the format from 4.5 on.
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    # As tables of contents and the site name it.
    assert notebook["cells"][1]["source"][0].startswith("# ")


def test_the_folder_that_is_installed_is_the_checkout():
    """With the extras that the notebooks import."""
    for path in NOTEBOOKS:
        (line,) = (line for line in cells(path)[0].splitlines() if line.startswith("%pip"))
        place, _, extras = line.split()[-1].strip('"').partition("[")
        assert os.path.samefile(path.parent / place, ROOT) and set(extras.strip("]").split(",")) == {"train", "inspect"}


def test_arrows(ran):
    names = ran("arrows")
    assert names["probabilities"].argmax() == names["label"]
    assert names["maps"].shape == (2, 9, 9)
    # Counting arrows is right in 44 of 100.
    assert names["accuracies"][108] > 0.95 and min(names["accuracies"].values()) > 0.8


def test_clip(ran):
    torch.manual_seed(0)
    model, _ = clip()
    widen(model, std=0.1).save_pretrained("openai/clip-vit-base-patch16")
    names = ran("clip")
    assert names["losses"][-1] < names["losses"][0]
    assert is_patched(names["clip"]) and names["after"].isfinite().all()


@pytest.mark.slow
def test_layer(ran):
    accuracies = ran("layer")["accuracies"]
    assert accuracies["liere"] > 0.95 and accuracies["no positions"] < 0.5


def test_orientations(ran):
    names = ran("orientations")
    changes, accuracies = names["changes"], names["accuracies"]
    # Rounding of float32.
    assert changes["LieRE from so(3)"] < 1e-5 < 1e-3 < changes["RoPE-Mixed"]
    assert all(accuracy[30] > 0.9 for accuracy in accuracies.values())
    assert accuracies["LieRE from so(3)"][180] > 0.95 and accuracies["RoPE-Mixed"][180] < 0.7


@pytest.mark.slow
def test_own_encoding(ran):
    """Three steps of its training; the class that it saves is the one on the page."""
    try:
        names = ran("own_encoding", **{"STEPS, BATCH = 1250, 64": "STEPS, BATCH = 3, 8"})
        assert names["same"] and names["rotations"][0].grad.abs().min() > 0
        page = (ROOT / "docs" / "own_encoding.md").read_text(encoding="utf-8")
        assert "# my_rotations.py" + Path("my_rotations.py").read_text(encoding="utf-8") in page
    finally:
        ENCODINGS.pop("geometric", None)
        sys.modules.pop("my_rotations", None)


@pytest.mark.slow
def test_a_notebook_imports_in_a_fresh_kernel(tmp_path):
    """The first cell after the installation, in a process that starts in the folder of the notebook."""
    code = cells(ROOT / "docs" / "notebooks" / "arrows.ipynb")[1]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    process = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT / "docs" / "notebooks", env=environment, capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr
    assert process.stdout == "95,940 parameters, liere\n"
