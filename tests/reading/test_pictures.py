"""Pictures of every kind of header, against arrays that were turned, mixed and named by hand."""

import io

import datasets
import numpy as np
import pytest
import training_helpers  # noqa: F401 (makes training importable)
from PIL import Image

from hf_liere.errors import InputError
from hf_liere.reading.clips import FrameReader
from hf_liere.reading.files import UnreadableError
from hf_liere.reading.pictures import read_picture
from hf_liere.tools.inspection.inputs import read_file, read_samples
from training.common.arguments import DataArguments
from training.data.augmentation import EvaluationImages, EvaluationView
from training.data.detection_data import DetectionDataArguments, DetectionExamples, load_detections
from training.data.images import DecodedImages, load_images
from training.data.sources import DataRequest
from training.tasks.playground.pictures import open_picture


ORIENTATION = 0x0112
# How a camera of each orientation stored an upright array, by the definition in EXIF: what its row 0 and column 0 show.
STORED = {
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.swapaxes(0, 1),
    6: lambda a: np.rot90(a, 1),
    7: lambda a: np.rot90(a, 2).swapaxes(0, 1),
    8: lambda a: np.rot90(a, -1),
}


def upright(seed=0):
    return np.random.default_rng(seed).integers(0, 256, (6, 10, 3), dtype=np.uint8)


def read_for_training(path):
    table = datasets.Dataset.from_dict({"image": [{"bytes": path.read_bytes(), "path": None}]})
    table = table.cast_column("image", datasets.Image(decode=False))
    return DecodedImages(table, "image", np.zeros(1), 3, 0)[0][0]


# A file that is alone in its folder, as every part of the repository reads it.
READERS = {
    "training": read_for_training,
    "predict": lambda path: read_file(path, False).frames[0],
    "inspect": lambda path: read_samples([], str(path.parent), None, 1, False)[0].frames[0],
    "page": lambda path: np.asarray(open_picture(path)[0]),
    "frames": lambda path: FrameReader(3).read(path, [0])[0],
    "folder of frames": lambda path: FrameReader(3).read(path.parent, [0])[0],
}


@pytest.mark.parametrize("orientation", STORED)
def test_cameras_say_how_they_were_held(orientation, tmp_path):
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    Image.fromarray(np.ascontiguousarray(STORED[orientation](upright()))).save(tmp_path / "a.png", exif=exif)
    for name, read in READERS.items():
        assert np.array_equal(read(tmp_path / "a.png"), upright()), name


@pytest.mark.parametrize("suffix", ["webp", "png"])
def test_animations_and_folders_of_frames_are_turned_too(suffix, tmp_path):
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    frames = [Image.fromarray(np.ascontiguousarray(STORED[6](upright(seed)))) for seed in range(3)]
    options = {"lossless": True} if suffix == "webp" else {}
    later = {"save_all": True, "append_images": frames[1:], "duration": [100, 300, 100], **options}
    frames[0].save(tmp_path / f"moving.{suffix}", exif=exif, **later)
    reader, path = FrameReader(3), tmp_path / f"moving.{suffix}"
    assert reader.count(path) == 3
    assert np.array_equal(reader.read(path, [0, 2, 2]), [upright(0), upright(2), upright(2)])
    assert reader.frame_times(path) == pytest.approx([0, 0.1, 0.4])
    (tmp_path / "folder").mkdir()
    for number, frame in enumerate(frames):
        frame.save(tmp_path / "folder" / f"{number}.{suffix}", exif=exif, **options)
    assert np.array_equal(reader.read(tmp_path / "folder", [0, 1, 2]), [upright(seed) for seed in range(3)])


@pytest.mark.parametrize("mode", ["RGBA", "LA", "PA", "P"])
def test_colours_under_transparency_decide_nothing(mode, tmp_path):
    """Two pictures that look the same; where they are transparent, one is black and one red."""
    suffix = "tif" if mode == "PA" else "png"
    found = []
    for hidden in (0, 200):
        pixels = np.zeros((6, 8, 4), np.uint8)
        pixels[..., 3] = 255
        pixels[:, :4, :3], pixels[:, 4:] = 40, (hidden, 0, 0, 0)
        image = Image.fromarray(pixels)
        if mode == "P":
            image = Image.fromarray(np.repeat([[0, 0, 0, 0, 1, 1, 1, 1]], 6, 0).astype(np.uint8), "P")
            image.putpalette([40, 40, 40, hidden, 0, 0])
            image.save(tmp_path / f"{hidden}.png", transparency=1)
        elif mode == "PA":
            image.save(tmp_path / f"{hidden}.tif")
        else:
            image.convert(mode).save(tmp_path / f"{hidden}.png")
        found.append(read_picture(tmp_path / f"{hidden}.{suffix}"))
    expected = np.full((6, 8, 3), 255, np.uint8)
    expected[:, :4] = 40
    assert np.array_equal(found[0], expected) and np.array_equal(found[1], expected)


def test_half_transparent_pixels_are_mixed_with_white(tmp_path):
    Image.new("RGBA", (8, 8), (100, 0, 200, 51)).save(tmp_path / "a.png")
    # 51 is a fifth of 255.
    expected = np.array([100, 0, 200]) / 5 + 255 * 4 / 5
    for name, read in READERS.items():
        assert np.abs(read(tmp_path / "a.png") - expected).max() <= 1, name


# The page takes no TIFF.
@pytest.mark.parametrize("reader", [name for name in READERS if name != "page"])
@pytest.mark.parametrize("dtype, suffix", [("<u2", "png"), (">u2", "tif"), ("i4", "tif"), ("f4", "tif")])
def test_depths_without_a_range_are_refused_everywhere(dtype, suffix, reader, tmp_path):
    path = tmp_path / f"deep.{suffix}"
    Image.fromarray((np.arange(64).reshape(8, 8) * 1000).astype(dtype)).save(path)
    with pytest.raises(ValueError, match="has mode|: mode"):
        READERS[reader](path)


def test_colours_of_sixteen_bits_use_their_range(tmp_path):
    """As the same colours of eight bits; Pillow writes no such file, so a PNG is put together here."""
    import struct
    import zlib

    eight = upright()
    rows = b"".join(b"\0" + (row.astype(">u2") * 257).tobytes() for row in eight)

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 10, 6, 16, 2, 0, 0, 0)
    content = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    (tmp_path / "a.png").write_bytes(content)
    for name, read in READERS.items():
        assert np.array_equal(read(tmp_path / "a.png"), eight), name


def test_rare_files(tmp_path):
    """CMYK, one bit, a BMP from its last row up, and AVIF where Pillow reads it."""
    Image.new("CMYK", (8, 8), (0, 255, 255, 0)).save(tmp_path / "cmyk.tif")
    assert (read_picture(tmp_path / "cmyk.tif") == [255, 0, 0]).all()
    Image.fromarray(np.eye(8, dtype=bool)).save(tmp_path / "bit.png")
    assert np.array_equal(read_picture(tmp_path / "bit.png", "L")[..., 0], np.eye(8) * 255)
    Image.fromarray(upright()).save(tmp_path / "up.bmp")
    content = bytearray((tmp_path / "up.bmp").read_bytes())
    height = int.from_bytes(content[22:26], "little", signed=True)
    assert height > 0 and np.array_equal(read_picture(tmp_path / "up.bmp"), upright())
    content[22:26] = (-height).to_bytes(4, "little", signed=True)
    (tmp_path / "down.bmp").write_bytes(content)
    assert np.array_equal(read_picture(tmp_path / "down.bmp"), upright()[::-1])
    if ".avif" in Image.registered_extensions():
        Image.fromarray(np.full((16, 16, 3), 90, np.uint8)).save(tmp_path / "a.avif")
        assert np.abs(read_file(tmp_path / "a.avif", False).frames.astype(int) - 90).max() <= 3
    (tmp_path / "a.heic").write_bytes(b"\0\0\0\x18ftypheic")
    with pytest.raises(InputError, match="Reading a.heic needs pillow_heif; .*heic|a.heic cannot be read"):
        read_file(tmp_path / "a.heic", False)


def test_one_image_that_cannot_be_read_ends_no_run(tmp_path, caplog):
    """Of a data set too large for memory: the image is named once, and the others are evaluated."""
    import logging

    logging.getLogger("transformers").propagate = True
    content = io.BytesIO()
    Image.fromarray(upright()).save(content, "JPEG")
    whole = content.getvalue()
    table = datasets.Dataset.from_dict({"image": [{"bytes": data, "path": None} for data in (whole, whole[:-200])]})
    table = table.cast_column("image", datasets.Image(decode=False))
    source = DecodedImages(table, "image", np.array([0, 1]), 3, 0)
    examples = EvaluationImages(source, EvaluationView((8, 8), 2))
    assert examples[0]["label"] == 0 and examples[0]["image"].shape == (8, 8, 3)
    assert examples[1] == examples[1] == {"label": -100}
    assert caplog.text.count("Left out: The image in row 1") == 1
    with pytest.raises(UnreadableError):
        source[1]


def test_names_of_any_script_and_nothing_hidden(tmp_path):
    for split in ("train", "validation"):
        for name in ("кошка", "🐕", ".ipynb_checkpoints", "__MACOSX"):
            (tmp_path / split / name).mkdir(parents=True)
            Image.fromarray(upright()).save(tmp_path / split / name / "пример 🐾.png")
        (tmp_path / split / "кошка" / "._пример 🐾.png").write_bytes(b"\0\5\x16\7")
        (tmp_path / split / "кошка" / "Thumbs.db").write_bytes(b"no picture")
    images = load_images(DataArguments(image_folder=str(tmp_path)), DataRequest((8, 8)))
    assert sorted(images.label_names) == ["кошка", "🐕"]
    assert len(images.train) == len(images.evaluation) == 2
    found = read_samples([], str(tmp_path / "train"), None, 9, False)
    assert [sample.name for sample in found] == ["пример 🐾.png"] * 2


@pytest.mark.parametrize("stored", [False, True])
def test_boxes_lie_where_the_json_says(stored, tmp_path):
    """On a photograph of a camera that was held upright, in the upright picture or in that which was stored."""
    import json

    exif = Image.Exif()
    exif[ORIENTATION] = 6
    as_stored = np.ascontiguousarray(STORED[6](upright()))
    Image.fromarray(as_stored).save(tmp_path / "a.png", exif=exif)
    (tmp_path / "broken.png").write_bytes(b"no picture")
    shown = as_stored if stored else upright()
    height, width = shown.shape[:2]
    content = {
        "images": [
            {"id": 1, "file_name": "a.png", "width": width, "height": height},
            {"id": 2, "file_name": "broken.png", "width": 8, "height": 8},
        ],
        "annotations": [{"id": 1, "image_id": 1, "category_id": 1, "bbox": [1, 2, 3, 4]}],
        "categories": [{"id": 1, "name": "thing"}],
    }
    (tmp_path / "data.json").write_text(json.dumps(content))
    arguments = DetectionDataArguments(train_files=[str(tmp_path / "data.json")])
    source, _, _ = load_detections(arguments, DataRequest((8, 8), parts=("training",)))
    picture, boxes, _ = source[0]
    assert np.array_equal(picture, shown)
    assert boxes[0] == pytest.approx([1 / width, 2 / height, 4 / width, 6 / height])
    examples = DetectionExamples(source, (8, 8), 2, 0.0, 0)
    assert examples[1]["index"] == -1 and len(examples[1]["boxes"]) == 0
    # In training, the next picture stands in.
    assert np.array_equal(examples[0, 1]["image"], examples[0, 0]["image"])
