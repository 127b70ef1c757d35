"""`hf-liere predict`, as it is called, compared with what transformers' own classes compute."""

import json

import numpy as np
import pytest
import torch
import transformers
from fresh_process import run_warm
from patching_cases import CLIP_TEXT, IMAGE, widen
from PIL import ExifTags, Image, ImageOps
from transformers import AutoImageProcessor, AutoModelForImageClassification, AutoModelForVideoClassification

import hf_liere
from hf_liere.tools.cli import main
from hf_liere.tools.inspection.attention import attention_maps, vision_tower
from hf_liere.tools.inspection.inputs import Preparation, read_file
from hf_liere.tools.inspection.prediction import prepare
from hf_liere.transformer.video_processing_liere import LieREVideoProcessor


NAMES = {0: "cat", 1: "dog", 2: "hen"}
SQUARE = {"size": {"height": 16, "width": 16}, "image_mean": [0.4, 0.5, 0.6], "image_std": [0.2, 0.3, 0.4]}
# Images are prepared and batched one by one here and there: only float32 sums in another order may differ.
CLOSE = {"abs": 1e-6}


def ours(**fields):
    config = hf_liere.LieREViTConfig(**IMAGE, id2label=NAMES, **fields)
    return hf_liere.LieREViTForImageClassification(config)


def complete():
    model = transformers.ViTForImageClassification(transformers.ViTConfig(**IMAGE, id2label=NAMES))
    hf_liere.patch(model, hf_liere.RotaryPatchConfig(position_encoding="liere", block_size=4, rotary_init="uniform"))
    return hf_liere.complete_model(model)


def clip():
    config = transformers.CLIPConfig(vision_config=IMAGE, text_config=CLIP_TEXT, projection_dim=8, id2label=NAMES)
    return transformers.CLIPForImageClassification(config)


def siglip2():
    vision = {name: value for name, value in IMAGE.items() if name != "image_size"} | {"num_patches": 16}
    return transformers.Siglip2ForImageClassification(
        transformers.Siglip2Config(vision_config=vision, text_config=CLIP_TEXT, id2label=NAMES)
    )


def cropping():
    return transformers.CLIPImageProcessor(size={"shortest_edge": 20}, crop_size=16)


def native():
    return transformers.Siglip2ImageProcessor(patch_size=4, max_num_patches=20)


CASES = {
    "ours": (ours, lambda: transformers.ViTImageProcessor(**SQUARE)),
    "ours of one channel": (
        lambda: ours(num_channels=1),
        lambda: transformers.ViTImageProcessor(size=SQUARE["size"], image_mean=[0.5], image_std=[0.5]),
    ),
    "ours in native sizes": (ours, native),
    "complete": (complete, lambda: transformers.ViTImageProcessor(**SQUARE)),
    "ViT": (
        lambda: transformers.ViTForImageClassification(transformers.ViTConfig(**IMAGE, id2label=NAMES)),
        lambda: transformers.ViTImageProcessor(**SQUARE),
    ),
    "CLIP, cropped": (clip, cropping),
    "SigLIP2": (siglip2, native),
}


@pytest.fixture
def pictures(tmp_path):
    """Photographs that no model takes as they are; the second says that it is to be turned, by a quarter (6)."""
    paths, turned = [], Image.Exif()
    turned[ExifTags.Base.Orientation] = 6
    for index, size in enumerate([(30, 50, 3), (44, 28, 3)]):
        pixels = np.random.default_rng(index).integers(0, 256, size, dtype=np.uint8)
        paths.append(tmp_path / f"{index}.png")
        Image.fromarray(pixels).save(paths[-1], exif=turned if index else None)
    return paths


def save(model, processor, folder):
    widen(model).eval().save_pretrained(folder)
    if processor is not None:
        processor.save_pretrained(folder)
    return folder


def run(capsys, *arguments):
    assert main(["predict", *map(str, arguments)]) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def expected(folder, path, mode="RGB"):
    """Probabilities by the classes of transformers alone."""
    model = AutoModelForImageClassification.from_pretrained(folder)
    picture = ImageOps.exif_transpose(Image.open(path)).convert(mode)
    inputs = AutoImageProcessor.from_pretrained(folder)(picture, return_tensors="pt")
    with torch.no_grad():
        return model.eval()(**inputs).logits[0].softmax(0)


@pytest.mark.parametrize("name", CASES)
def test_probabilities_are_those_of_processor_and_model(name, pictures, tmp_path, capsys):
    model, processor = CASES[name]
    folder = save(model(), processor(), tmp_path / "model")
    found = json.loads(run(capsys, folder, *pictures, "--json", "--top_k", 9))
    assert [entry["file"] for entry in found] == [str(path) for path in pictures]
    mode = "L" if "one channel" in name else "RGB"
    for path, entry in zip(pictures, found):
        probabilities = expected(folder, path, mode)
        order = probabilities.argsort(descending=True).tolist()
        assert [answer["index"] for answer in entry["answers"]] == order
        assert [answer["label"] for answer in entry["answers"]] == [NAMES[index] for index in order]
        assert [answer["score"] for answer in entry["answers"]] == pytest.approx(probabilities[order].tolist(), **CLOSE)


def test_a_process_prints_lines_and_draws_attention(pictures, tmp_path):
    folder = save(ours(), transformers.ViTImageProcessor(**SQUARE), tmp_path / "model")
    options = ["--top_k", 2, "--attention", tmp_path / "looks.png"]
    process = run_warm("-m", "hf_liere.tools.cli", "predict", folder, *pictures, *options)
    lines = []
    for path in pictures:
        scores, indices = expected(folder, path).topk(2)
        answers = [f"{NAMES[index]} {score:.1%}" for score, index in zip(scores.tolist(), indices.tolist())]
        lines.append(f"{path}: {', '.join(answers)}")
    assert process.stdout.splitlines() == lines
    assert "not sharded" not in process.stderr
    with Image.open(tmp_path / "looks.png") as picture:
        width, height = picture.size
        colours = len(set(np.asarray(picture.convert("RGB").reduce(4)).reshape(-1, 3).sum(1).tolist()))
    # An input and two layers side by side, two files below one another.
    assert min(width, height) > 300 and colours > 100


@pytest.mark.parametrize("name", ["ours", "CLIP, cropped", "ours in native sizes"])
def test_attention_lies_over_what_the_model_saw(name, pictures, tmp_path):
    """After resizing and cropping, which is what the processor makes without its normalisation."""
    from hf_liere.tools.inspection.plots import attention_rows

    model, processor = CASES[name]
    model, processor = widen(model()).eval(), processor()
    tower = vision_tower(model)
    preparation = Preparation.for_tower(tower, processor)
    pixels = prepare(read_file(pictures[0], False), preparation, tower, processor)["pixel_values"]
    (row,) = attention_rows("title", attention_maps(model, pixels).maps[:, 0], preparation.frames(pixels)[0])
    plain = type(processor).from_dict(processor.to_dict() | {"do_normalize": False, "do_rescale": False})
    seen = plain(Image.open(pictures[0]), return_tensors="pt")
    if "spatial_shapes" in seen:
        rows, columns = seen["spatial_shapes"][0].tolist()
        corner = seen["pixel_values"][0, 0].reshape(4, 4, 3)
        assert row.picture.shape == (4 * rows, 4 * columns, 3) and row.maps[0].shape == (rows, columns)
        # A grey value of rounding.
        assert np.abs(row.picture[:4, :4].astype(int) - corner.numpy()).max() <= 1
    else:
        assert np.abs(row.picture.astype(int) - seen["pixel_values"][0].permute(1, 2, 0).numpy()).max() <= 1
        assert row.maps[0].shape == (4, 4)
    assert len(row.maps) == 2


def test_a_clip(tiny_video, tmp_path, capsys):
    model = hf_liere.LieREVideoForVideoClassification(tiny_video(id2label=NAMES))
    processor = LieREVideoProcessor(size={"shortest_edge": 8}, crop_size={"height": 8, "width": 8})
    folder = save(model, processor, tmp_path / "model")
    clip = np.random.default_rng(0).integers(0, 256, (4, 12, 10, 3), dtype=np.uint8)
    np.save(tmp_path / "clip.npy", clip)
    picture = tmp_path / "looks.svg"
    found = json.loads(run(capsys, folder, tmp_path / "clip.npy", "--json", "--top_k", 1, "--attention", picture))
    inputs = processor([Image.fromarray(frame) for frame in clip], return_tensors="pt")
    with torch.no_grad():
        logits = AutoModelForVideoClassification.from_pretrained(folder).eval()(**inputs).logits[0]
    (answer,) = found[0]["answers"]
    assert answer["label"] == NAMES[int(logits.argmax())]
    assert answer["score"] == pytest.approx(logits.softmax(0).max().item(), **CLOSE)
    # Rows of the frames of both tubelets, each with the input and two layers, and the scale of the colours.
    assert picture.read_text().count("<image") == 2 * 3 + 1


def test_several_labels_at_once(pictures, tmp_path, capsys):
    """Independent probabilities, as such a classifier is trained."""
    model = ours(problem_type="multi_label_classification")
    folder = save(model, transformers.ViTImageProcessor(**SQUARE), tmp_path / "model")
    (entry,) = json.loads(run(capsys, folder, pictures[0], "--json"))
    pixels = AutoImageProcessor.from_pretrained(folder)(Image.open(pictures[0]), return_tensors="pt")
    expected = model(**pixels).logits[0].sigmoid().sort(descending=True).values
    assert [answer["score"] for answer in entry["answers"]] == pytest.approx(expected.tolist(), **CLOSE)


def test_what_is_assumed_is_said(pictures, tmp_path, capsys):
    """Without processor and names of classes; pixels are from −1 to 1."""
    config = hf_liere.LieREViTConfig(**IMAGE, num_labels=3)
    model = hf_liere.LieREViTForImageClassification(config)
    folder = save(model, None, tmp_path / "model")
    assert main(["predict", str(folder), str(pictures[0]), "--json"]) == 0
    captured = capsys.readouterr()
    assert "does not name its classes" in captured.err and "has no readable processor" in captured.err
    pixels = Image.open(pictures[0]).resize((16, 16), Image.Resampling.BILINEAR)
    pixels = torch.from_numpy(np.asarray(pixels).copy()).permute(2, 0, 1)[None] / 127.5 - 1
    probabilities = model(pixels).logits[0].softmax(0)
    answer = json.loads(captured.out)[0]["answers"][0]
    assert answer["label"] == f"LABEL_{int(probabilities.argmax())}"
    # Division by 127.5 rounds otherwise than a product with 1/255.
    assert answer["score"] == pytest.approx(probabilities.max().item(), abs=1e-5)
