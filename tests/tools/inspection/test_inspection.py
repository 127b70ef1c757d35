"""`hf-liere inspect`, as it is called, and its report, as a browser shows it."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import patching_cases
import pytest
import torch
from browser import console_errors, prefer_color_scheme
from encoding_cases import perturb
from fresh_process import run_warm
from inspection_pages import Page, picture, save
from PIL import Image
from published_models import SMALL, vit
from safetensors.torch import load_file, save_file
from slow_cases import slow_except

import hf_liere
from hf_liere.tools.cli import main
from hf_liere.tools.inspection.analysis import analyse, attention_maps
from hf_liere.tools.inspection.inputs import Preparation, Sample, read_samples


@pytest.fixture(scope="module")
def inspected(tmp_path_factory):
    """A LieRE classifier, its image and the output of the command on it."""
    folder = tmp_path_factory.mktemp("inspected")
    model = vit()
    save(model, folder / "model")
    arguments = ["inspect", folder / "model", "--image", picture(folder / "a.png"), "--output", folder / "report"]
    process = run_warm("-m", "hf_liere.tools.cli", *arguments)
    assert "attention" in process.stderr and str(folder / "report" / "report.html") in process.stdout
    return model, folder


def test_report_stands_alone(inspected):
    _, folder = inspected
    text = (folder / "report" / "report.html").read_text(encoding="utf-8")
    page = Page(text)
    assert all(address.startswith("data:") for address in page.addresses)
    assert not re.search(r"https?://|@import|<script|url\(", text)
    assert len(page.images) == 8 and all(image["alt"] for image in page.images)
    text = " ".join(page.text.split())
    headings = ("Where it looks", "What it predicts", "What it is", "What it learned", "What it costs")
    places = [text.index(heading) for heading in headings]
    assert places == sorted(places)
    assert "Its position encoding is liere" in text and "block_size8" in text.replace(" ", "") and "32 × 32 px" in text


def test_numbers_are_those_of_the_analysis(inspected):
    """The image goes through the processor's numbers; three sizes, and what is in the text is in the file."""
    model, folder = inspected
    facts = json.loads((folder / "report" / "analysis.json").read_text())
    assert [entry["size"] for entry in facts["inputs"]] == [[16, 16], [24, 24], [32, 32]]
    with Image.open(folder / "a.png") as image:
        pixels = np.asarray(image.convert("RGB").resize((24, 24), Image.Resampling.BILINEAR))
    values = ((torch.from_numpy(pixels.copy()).permute(2, 0, 1).float() / 255 - 0.4) / 0.2).unsqueeze(0)
    with np.load(folder / "report" / "analysis.npz", allow_pickle=False) as arrays:
        found = arrays["inputs.1.attention.maps"]
        largest = arrays["encoding.relativity.largest"].max()
        probabilities = arrays["inputs.1.probabilities"][0]
    assert np.allclose(found, attention_maps(model, values).maps.numpy(), atol=1e-6)
    logits = model(values).logits[0]
    assert np.allclose(probabilities, logits.softmax(-1).detach().numpy(), atol=1e-6)
    text = (folder / "report" / "report.html").read_text(encoding="utf-8")
    assert f"{model.config.id2label[int(logits.argmax())]} {probabilities.max():.1%}, " in text
    cost = analyse(model).inputs[0].cost
    assert f"the maximum is {largest:.2g}." in text and f"{cost.operations / 1e6:,.2f}" in text
    assert f"{cost.encoding_parameters:,} for rotations" in text


def test_report_in_a_browser(inspected, browser):
    _, folder = inspected
    backgrounds, pictures = {}, {}
    for scheme in ("light", "dark"):
        prefer_color_scheme(browser, scheme)
        browser.get((folder / "report" / "report.html").as_uri())
        images = browser.find_elements("tag name", "img")
        assert len(images) == 8 and all(image.is_displayed() for image in images)
        assert all(browser.execute_script("return arguments[0].naturalWidth > 0", image) for image in images)
        pictures[scheme] = browser.execute_script("return arguments[0].currentSrc", images[0])
        backgrounds[scheme] = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
        wide = browser.execute_script("return document.documentElement.scrollWidth > window.innerWidth")
        assert not wide and console_errors(browser) == []
    assert pictures["light"] != pictures["dark"]
    phone = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", phone)
    try:
        widths = browser.execute_script("return [...document.images].map(image => image.offsetWidth)")
        # Several panels side by side keep legible numbers; nothing else reaches beyond the screen.
        assert min(widths) < 390 and max(widths) > 700
        assert browser.execute_script("return document.documentElement.scrollWidth") == 390
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    assert backgrounds == {"light": "rgb(255, 255, 255)", "dark": "rgb(13, 17, 23)"}


def inspect(*arguments):
    return main(["inspect", *map(str, arguments)])


def test_a_model_without_rotations(tmp_path):
    """Its attention is shown all the same; without a processor the report says how pixels were scaled."""
    folder = save(vit(position_encoding="absolute"), tmp_path / "model", processor=False)
    # A name that is no element.
    image = picture(tmp_path / "a<b>.png")
    assert inspect(folder, "--image", image, "--image_sizes", 16, "--output", tmp_path / "r") == 0
    page = Page((tmp_path / "r" / "report.html").read_text(encoding="utf-8"))
    assert "no rotations of this package" in page.text and "no readable processor" in page.text
    assert [image["alt"].split()[0] for image in page.images] == ["Attention", "Attention"]


def patched(small=False):
    """With a table beside the rotations; `small` generators commute, and training leaves them with digits to show."""
    model, _ = patching_cases.build("clip_vision")
    start = {} if small else {"position_encoding": "liere", "rotary_init": None}
    hf_liere.patch(model, hf_liere.RotaryPatchConfig(**start))
    with torch.no_grad():
        for name, parameter in hf_liere.rotary_parameters(model) if small else ():
            parameter.normal_(std=2e-5 if "generators" in name else 1.0)
    return hf_liere.complete_model(model)


def video():
    config = hf_liere.LieREVideoConfig(**SMALL, image_size=8, num_frames=4, num_channels=1)
    return hf_liere.LieREVideoForVideoClassification(config)


COMMUTES = ["The generators commute", "canonical form"]
DO_NOT = ["The generators do not commute", "Π exp"]
# A model, options, what the page says, and what it does not.
SAYS = {
    "a learned basis": (lambda: perturb(vit(position_encoding="cayley_string")), "", COMMUTES, DO_NOT),
    "a product of spheres": (lambda: perturb(vit(position_encoding="spherical_rope")), "", DO_NOT, COMMUTES),
    "a product": (lambda: perturb(vit(position_encoding="liere_product")), "", DO_NOT, COMMUTES),
    "folded": (
        lambda: vit(position_encoding="comrope_ld").fold_rotations(),
        "",
        ["without images", "eigenbasis", "So does the model's attention.", "drawn with rotary_init='normal'"]
        + ["exactly relative", "frequencies"],
        ["Where it looks"],
    ),
    "patched": (patched, "--image a.png --image_sizes 24", ["patched into a pretrained model", "24 × 24 px"], []),
    "small generators": (
        lambda: patched(small=True),
        "",
        ["The generators commute: these rotations depend only", r"standard deviation is \d.*?e-05 radians"]
        + ["attention does not: absolute positions are added to its patches", "initialised to zero"],
        ["two patches' positions: attention", "What it predicts"],
    ),
    "a video": (video, "--dataset clips --image_sizes 8", ["4 frames of 8 × 8 px", "clips looked at: 2"], []),
}


@pytest.mark.parametrize("name", slow_except(["small generators"], SAYS))
def test_the_page_says_what_was_found(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    picture("a.png")
    Path("clips").mkdir()
    for clip in "ab":
        np.save(f"clips/{clip}.npy", np.zeros((6, 10, 10), np.uint8))
    build, options, shown, hidden = SAYS[name]
    build().save_pretrained("model")
    assert inspect("model", *options.split(), "--output", "r") == 0
    text = " ".join(Page(Path("r/report.html").read_text(encoding="utf-8")).text.split())
    assert not [words for words in shown if not re.search(words, text)]
    assert not [words for words in hidden if words in text]


@pytest.mark.slow
@pytest.mark.parametrize("error", ["limit", "interrupt"])
def test_a_report_is_complete_or_absent(tmp_path, error):
    """Where no file may grow beyond 20 kB, as on a full disk, or Ctrl-C comes; the next run is not refused."""
    folder = save(vit(), tmp_path / "model")
    program = {
        "limit": "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))",
        "interrupt": "import hf_liere.tools.inspection.report as report; "
        "report.render_report = lambda *arguments: __import__('signal').raise_signal(2)",
    }[error]
    program += "; import sys; from hf_liere.tools.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", program, "inspect", folder, "--output", tmp_path / "out" / "r"]
    process = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    assert process.returncode != 0
    if error == "limit":
        assert "r cannot be written: File too large" in process.stderr and "Traceback" not in process.stderr
    assert not (tmp_path / "out").exists()
    assert inspect(folder, "--output", tmp_path / "out" / "r") == 0
    assert (tmp_path / "out" / "r" / "report.html").is_file() and len(list((tmp_path / "out" / "r").iterdir())) == 3


def test_code_of_a_checkpoint_runs_only_if_asked(tmp_path, capsys):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "own.py").write_text("raise ValueError('the code of the checkpoint ran')\n")
    config = {"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModel": "own.OwnModel"}}
    (folder / "config.json").write_text(json.dumps(config))
    assert inspect(folder, "--output", tmp_path / "r") == 1
    refused = capsys.readouterr().err
    assert "trust_remote_code" in refused and "ran" not in refused
    assert inspect(folder, "--trust_remote_code", "--output", tmp_path / "r") == 1
    assert "the code of the checkpoint ran" in capsys.readouterr().err


def test_samples_of_a_table(tmp_path):
    datasets = pytest.importorskip("datasets")
    pictures = [Image.open(picture(tmp_path / f"{seed}.png", seed=seed)) for seed in range(4)]
    columns = {"label": [0, 1, 2, 3], "picture": pictures}
    features = datasets.Features({"label": datasets.Value("int64"), "picture": datasets.Image()})
    datasets.Dataset.from_dict(columns, features=features).to_parquet(tmp_path / "data.parquet")
    found = read_samples([], str(tmp_path / "data.parquet"), None, 3, is_video=False)
    assert [sample.name for sample in found] == ["data.parquet 0", "data.parquet 1", "data.parquet 2"]
    assert all(np.array_equal(sample.frames[0], np.asarray(image)) for sample, image in zip(found, pictures))
    from_folder = read_samples([], str(tmp_path), None, 2, is_video=False)
    assert [sample.name for sample in from_folder] == ["0.png", "3.png"]


def test_mosaic():
    """Three blocks of 2 in a tile of 2 × 2 places, layers down, heads across, nothing between blocks."""
    inspection_plots = pytest.importorskip("hf_liere.tools.inspection.plots")
    matrices = torch.arange(1, 2 * 2 * 3 * 4 + 1, dtype=torch.float32).view(2, 2, 3, 2, 2)
    picture, tile = inspection_plots.mosaic(matrices)
    assert tile == (7, 7) and picture.shape == (14, 14)
    assert np.array_equal(picture[8:10, 4:6], matrices[1, 0, 1].numpy())
    assert np.array_equal(picture[4:6, 8:10], matrices[0, 1, 2].numpy())
    assert np.isfinite(picture).sum() == matrices.numel()


def test_frames_of_a_clip():
    """As many as the model takes, evenly; a still image stands for a clip of itself."""
    frames = np.arange(7, dtype=np.uint8).reshape(7, 1, 1, 1) * np.ones((1, 4, 4, 1), np.uint8)
    preparation = Preparation(num_channels=1, num_frames=4)
    assert preparation.resize(Sample("clip", frames), (8, 6)).shape == (4, 8, 6, 1)
    assert preparation.resize(Sample("clip", frames), (4, 4))[:, 0, 0, 0].tolist() == [0, 2, 4, 6]
    still = preparation.resize(Sample("image", frames[3:4]), (4, 4))
    assert (still == 3).all() and preparation.pixel_values([still]).shape == (1, 4, 1, 4, 4)


@pytest.mark.slow
def test_a_converted_checkpoint(shared, tmp_path):
    """A golden of LieRE's code, converted by the command, inspected by the command."""
    tensors = load_file(shared / "goldens" / "liere_liere4_2d.safetensors")
    facts = json.loads((shared / "goldens" / "liere_liere4_2d.json").read_text())
    weights = {name.removeprefix("weights/"): value for name, value in tensors.items() if name.startswith("weights/")}
    save_file(weights, tmp_path / "golden.safetensors")
    options = {
        "source": "liere",
        "position_encoding": facts["architecture_name_in_official_code"],
        "image_size": facts["image_size"],
        "patch_size": facts["patch_size"],
        "num_channels": facts["channels"],
        "pooling": facts["pool"],
    }
    given = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    assert main(["convert", str(tmp_path / "golden.safetensors"), str(tmp_path / "model"), *given]) == 0
    assert inspect(tmp_path / "model", "--image", picture(tmp_path / "a.png"), "--output", tmp_path / "r") == 0
    found = json.loads((tmp_path / "r" / "analysis.json").read_text())
    assert found["model"]["position_encoding"] == "liere" and found["model"]["block_size"] == 4
    page = Page((tmp_path / "r" / "report.html").read_text(encoding="utf-8"))
    assert "do not commute" in page.text and any("Attention maps" in image["alt"] for image in page.images)
