"""What the app computes: answers of checkpoints at any resolution, pictures that it takes and that it refuses."""

import io
import shutil
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import yaml
from app_helpers import picture_of, save_classifier, save_classifiers
from checkout import ROOT
from hub_client import client
from PIL import Image
from transformers import (
    AutoImageProcessor,
    AutoModelForImageClassification,
    Siglip2ImageProcessor,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessor,
)

import hf_liere
from hf_liere import LieREViTConfig, RotaryPatchConfig, complete_model, patch
from hf_liere.storage.client import HubError
from hf_liere.tools.hub.publishing import publish
from hf_liere.tools.inspection.analysis import attention_maps
from training.common.arguments import InputError
from training.data.arrows import LABELS, Arrows
from training.tasks.playground import pictures
from training.tasks.playground.predictions import (
    STORED_CHECKPOINTS,
    Classifiers,
    attention_pictures,
    find_checkpoints,
    image_sizes,
)
from training.tasks.playground.space import write_space


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_classifiers(tmp_path_factory.mktemp("arrows"))


@pytest.fixture(scope="module")
def checkpoints(folder):
    return find_checkpoints([str(folder)])


def test_an_answer_is_the_models_own(folder, checkpoints):
    picture, _ = pictures.draw_puzzle(3, 108)
    for checkpoint in checkpoints:
        answer = Classifiers()[checkpoint].answer(picture, 108)
        model = AutoModelForImageClassification.from_pretrained(folder / checkpoint.name)
        pixels = AutoImageProcessor.from_pretrained(folder / checkpoint.name)(picture, return_tensors="pt").pixel_values
        with torch.no_grad():
            expected = model(pixels).logits[0].softmax(-1)
        assert list(answer.probabilities.values()) == sorted(expected.tolist(), reverse=True)
        assert next(iter(answer.probabilities)) == LABELS[expected.argmax()]
        assert torch.equal(answer.attention.maps, attention_maps(model, pixels).maps)
    assert [checkpoint.encoding for checkpoint in checkpoints] == ["comrope_ld, block_size 8", "liere, block_size 8"]


def test_a_model_of_native_aspect_ratios_sees_the_squeezed_picture(tmp_path):
    """With the constants of its processor, which would cut patches."""
    constants = {"image_mean": [0.2] * 3, "image_std": [0.3] * 3, "resample": 3}
    answers = []
    for name, processor in (
        ("first", Siglip2ImageProcessor(**constants, patch_size=12, max_num_patches=81)),
        ("again", ViTImageProcessor(**constants, size={"height": 108, "width": 108})),
    ):
        processor.save_pretrained(save_classifier(tmp_path / name, processor=False))
        answers.append(Classifiers()[find_checkpoints([str(tmp_path / name)])[0]].answer(picture_of(), 108))
    assert answers[0].probabilities == answers[1].probabilities


def test_another_resolution_is_another_grid_and_another_answer(checkpoints):
    classifier = Classifiers()[checkpoints[0]]
    picture = picture_of()
    answers = {size: classifier.answer(picture, size) for size in (24, 108, 384)}
    assert {size: answer.attention.grid for size, answer in answers.items()} == {24: (2, 2), 108: (9, 9), 384: (32, 32)}
    assert len({tuple(answer.probabilities.values()) for answer in answers.values()}) == 3
    drawn = attention_pictures(picture, 384, answers[384].attention)
    assert [layer.size for layer in drawn] == [(384, 384)] * 2
    for size in (0, 12, 100, 396):
        with pytest.raises(InputError, match=f"no images of {size} px.*multiples of 12 px from 24 to 384 px"):
            classifier.answer(picture, size)


def test_sizes_suit_both_models_and_the_puzzle(tmp_path, checkpoints):
    small = save_classifier(tmp_path / "small", image_size=32, patch_size=8)
    large = save_classifier(tmp_path / "large", image_size=2800, patch_size=700)
    small, large = find_checkpoints([str(small), str(large)])
    assert image_sizes(checkpoints, puzzle=False) == range(24, 385, 12)
    assert image_sizes(checkpoints, puzzle=True) == range(60, 385, 12)
    assert image_sizes([checkpoints[0], small], puzzle=False) == range(24, 257, 24)
    assert all(Arrows("test", image_size=size)[0] for size in image_sizes([small], puzzle=True))
    with pytest.raises(InputError, match="Patches of 8, 700 px and cells of 12 px have no common image size"):
        image_sizes([small, large], puzzle=True)


def test_grey_models_and_models_without_a_processor_answer(tmp_path, caplog):
    grey = save_classifier(tmp_path / "grey", processor=False, num_channels=1)
    (checkpoint,) = find_checkpoints([str(grey)])
    classifier = Classifiers()[checkpoint]
    picture = picture_of((108, 108))
    assert "grey has no processor" in caplog.text
    expected = torch.from_numpy(np.asarray(picture.convert("L")).copy()).float() / 127.5 - 1
    # Scaling and normalising in one step instead of two.
    torch.testing.assert_close(classifier.pixel_values(picture, 108)[0, 0], expected, atol=1e-6, rtol=0)


def test_folded_and_patched_models_answer_at_any_resolution(tmp_path, folder):
    shutil.copytree(folder / "liere8", tmp_path / "folded")
    AutoModelForImageClassification.from_pretrained(folder / "liere8").fold_rotations().save_pretrained(
        tmp_path / "folded"
    )
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    vit = ViTForImageClassification(ViTConfig(**shape, image_size=24, patch_size=12)).eval()
    patch(vit, RotaryPatchConfig(position_encoding="rope_mixed"))
    complete_model(vit).save_pretrained(tmp_path / "patched")
    folded, patched = map(Classifiers().__getitem__, find_checkpoints([str(tmp_path)]))
    plain = Classifiers()[find_checkpoints([str(folder / "liere8")])[0]]
    for size in (48, 108):
        answer, expected = folded.answer(picture_of(), size), plain.answer(picture_of(), size)
        # Folding rounds the rotations to float32.
        assert answer.probabilities == pytest.approx(expected.probabilities, abs=1e-5)
        answer = patched.answer(picture_of(), size)
        with torch.no_grad():
            expected = vit(patched.pixel_values(picture_of(), size)).logits[0].softmax(-1)
        assert sorted(answer.probabilities.values()) == pytest.approx(sorted(expected.tolist()), abs=1e-6)
        assert answer.attention.grid == (size // 12, size // 12)
    assert patched.checkpoint.encoding == "rope_mixed"


def test_models_are_loaded_once_and_make_room(checkpoints, tmp_path):
    classifiers = Classifiers(kept=1)
    with ThreadPoolExecutor(4) as threads:
        loaded = list(threads.map(lambda _: classifiers[checkpoints[0]], range(4)))
    assert all(classifier is loaded[0] for classifier in loaded)
    assert classifiers[checkpoints[1]].checkpoint == checkpoints[1]
    assert classifiers[checkpoints[0]] is not loaded[0]


def test_simultaneous_answers_do_not_disturb_each_other(checkpoints):
    classifier = Classifiers()[checkpoints[0]]
    puzzles = [pictures.draw_puzzle(number, 108)[0] for number in range(6)]
    alone = [classifier.answer(picture, 108) for picture in puzzles]
    with ThreadPoolExecutor(4) as threads:
        together = list(threads.map(lambda picture: classifier.answer(picture, 108), puzzles))
    for one, other in zip(alone, together):
        assert one.probabilities == other.probabilities and torch.equal(one.attention.maps, other.attention.maps)


def test_checkpoints_that_are_none_are_refused_by_name(tmp_path, folder, monkeypatch, caplog):
    monkeypatch.setattr("training.tasks.playground.predictions.DEMO_CHECKPOINTS", ROOT / "outputs" / "of nobody")
    arrows, *others = find_checkpoints()
    assert arrows.name == "arrows_liere8" and arrows.solves_puzzles
    found = {each.name: len(each.class_names) for each in others}
    assert found == {"cifar100_comrope_ld": 100, "cifar100_liere8": 100}
    with pytest.raises(InputError, match="There is no folder '.*absent/deep/down'"):
        find_checkpoints([str(tmp_path / "absent/deep/down")])
    with pytest.raises(InputError, match="contains no checkpoint of an image classifier"):
        find_checkpoints([str(tmp_path)])
    hf_liere.LieREViTModel(LieREViTConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2)).save_pretrained(
        tmp_path / "headless"
    )
    with pytest.raises(InputError, match="headless is LieREViTModel; accepted: LieREViTForImageClassification, "):
        find_checkpoints([str(tmp_path / "headless")])
    shutil.copytree(folder / "liere8", tmp_path / "damaged")
    weights = tmp_path / "damaged" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    (damaged,) = find_checkpoints([str(tmp_path)])
    assert "Left out: headless is LieREViTModel" in caplog.text
    with pytest.raises(InputError, match="weights of damaged cannot be loaded"):
        Classifiers()[damaged]


def test_checkpoints_of_the_hub_are_downloaded_and_named_in_a_space(folder, hub, tmp_path):
    pytest.importorskip("gradio", reason="gradio is not installed")
    publish(folder / "liere8", "tester/liere8", message="liere8", api=client(hub))
    found = find_checkpoints(["tester/liere8", str(folder / "comrope_ld")])
    assert [checkpoint.name for checkpoint in found] == ["tester/liere8", "comrope_ld"]
    picture, _ = pictures.draw_puzzle(0, 108)
    (local,) = find_checkpoints([str(folder / "liere8")])
    answers = [Classifiers()[checkpoint].answer(picture, 108).probabilities for checkpoint in (found[0], local)]
    assert answers[0] == answers[1]
    with pytest.raises(HubError, match="There is no folder tester/absent, and as a name on the Hub: There is no"):
        find_checkpoints(["tester/absent"])
    write_space(tmp_path / "space", found)
    assert "tester/liere8" in yaml.safe_load((tmp_path / "space" / "README.md").read_text().split("---\n")[1])["models"]
    assert "['tester/liere8', 'checkpoints/comrope_ld']" in (tmp_path / "space" / "app.py").read_text()
    assert [path.name for path in (tmp_path / "space" / "checkpoints").iterdir()] == ["comrope_ld"]


def test_checkpoints_of_one_name_are_told_apart(tmp_path, folder):
    for run in ("a", "b"):
        shutil.copytree(folder / "liere8", tmp_path / run / "liere8")
    sources = [tmp_path / "a", tmp_path / "b" / "liere8", folder / "comrope_ld", tmp_path / "a" / "liere8"]
    found = find_checkpoints(list(map(str, sources)))
    assert [checkpoint.name for checkpoint in found] == ["a/liere8", "b/liere8", "comrope_ld"]


def test_pictures_are_read_as_they_are_meant(tmp_path):
    original = picture_of()
    original.save(tmp_path / "plain.png")
    opened, notes = pictures.open_picture(tmp_path / "plain.png")
    assert np.array_equal(opened, original) and notes == []

    exif = Image.Exif()
    exif[0x0112] = 6
    original.save(tmp_path / "turned.PNG", exif=exif)
    assert np.array_equal(pictures.open_picture(tmp_path / "turned.PNG")[0], original.transpose(Image.ROTATE_270))

    half = original.convert("RGBA")
    half.paste((0, 0, 0, 0), (0, 0, 25, 40))
    half.save(tmp_path / "transparent.webp", lossless=True)
    opened, notes = pictures.open_picture(tmp_path / "transparent.webp")
    assert (np.asarray(opened)[:, :25] == 255).all() and notes == ["transparent parts on white"]

    frames = [Image.new("L", (20, 20), shade) for shade in (50, 200)]
    frames[0].save(tmp_path / "moving.gif", save_all=True, append_images=frames[1:])
    opened, notes = pictures.open_picture(tmp_path / "moving.gif")
    assert opened.getpixel((0, 0)) == (50, 50, 50) and notes == ["the first of 2 frames"]
    for mode in ("L", "CMYK"):
        picture_of(mode=mode).save(tmp_path / f"{mode}.jpg")
        assert pictures.open_picture(tmp_path / f"{mode}.jpg")[0].mode == "RGB"


def png(image):
    content = io.BytesIO()
    image.save(content, "PNG")
    return content.getvalue()


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("notes.txt", b"hello", "notes.txt cannot be used: the name ends in '.txt'; accepted are .png, .jpg"),
        ("notes.png", b"hello", "notes.png cannot be used: it is not a GIF, JPEG, PNG, WEBP picture, or damaged"),
        ("empty.png", b"", "the file is empty"),
        ("cut.png", png(picture_of())[:-200], "not a .* picture, or damaged"),
        ("picture.exe", png(picture_of()), "ends in '.exe'"),
        ("picture", png(picture_of()), "ends in ''"),
        ("tiff.png", b"II*\0" + bytes(200), "not a .* picture, or damaged"),
        ("deep.png", png(Image.new("I;16", (8, 8))), "cannot be used: mode I;16; accepted are 8-bit images"),
        ("long.png", b"\x89PNG" + bytes(10 * 2**20), "it has 10.0 MB; accepted are files up to 10 MB"),
        # A few kilobytes that would take a hundred megabytes, and gigabytes that PIL itself refuses.
        ("wide.png", png(Image.new("1", (8000, 5000))), "8000 × 5000 pixels; accepted are up to 32 megapixels"),
        ("bomb.png", png(Image.new("1", (20_000, 10_000))), "far more than 32 megapixels"),
    ],
)
def test_uploads_that_are_no_pictures_are_refused(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=message):
        pictures.open_picture(tmp_path / name)


def test_puzzles_are_drawn_at_the_size_that_is_asked_for():
    picture, answer = pictures.draw_puzzle(7, 168)
    pixels, label = Arrows("test", image_size=168)[7]
    assert np.array_equal(np.asarray(picture)[..., 0], pixels[..., 0]) and answer == LABELS[label]
    for number in (-1, 10_000, None):
        with pytest.raises(InputError, match=f"no puzzle {number}; accepted: 0 … 9,999"):
            pictures.draw_puzzle(number, 108)


def test_the_stored_models_are_side_by_side_on_a_photograph():
    """The first of them solves puzzles, and no other does."""
    page = pytest.importorskip("training.tasks.playground.page", exc_type=ImportError, reason="gradio is not installed")
    app = page.App(find_checkpoints([str(STORED_CHECKPOINTS)]))
    (first, second), source, sizes = page.initial_view(app)
    assert (first, second) == ("cifar100_comrope_ld", "cifar100_liere8") and 32 in sizes
    shown, *columns = app.compare(first, second, source, 32, 0, None)
    assert "an example, 296 × 296 px" in shown
    # One of them knows what it is, and both answer.
    answers = [columns[1], columns[5]]
    assert all(len(answer) == 5 for answer in answers) and "rocket" in {next(iter(answer)) for answer in answers}
