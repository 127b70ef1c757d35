"""What files and folders contain and no run uses: hidden frames, padding, further pages, other formats, other slices"""

import json
import logging

import av
import numpy as np
import pytest
import training_helpers  # noqa: F401 (makes training importable)
from clip_files import write_clip, write_series
from PIL import Image
from published_models import vit
from transformers import ViTImageProcessor

from hf_liere.reading.clips import FrameReader
from hf_liere.reading.files import UnreadableError
from hf_liere.tools.cli import main
from training.common.arguments import DataArguments
from training.data.images import DecodedImages, load_images
from training.data.sources import DataRequest
from training.data.texts import _folder_documents
from training.data.video_data import VideoDataArguments, load_clips


@pytest.fixture
def said(caplog):
    """What scripts say."""
    logging.getLogger("transformers").propagate = True
    return caplog


def cut(path, target, key=0, hidden=0):
    """A copy without encoding again, from a key frame on; of what it contains, an edit list hides the first frames."""
    with av.open(str(path)) as source, av.open(str(target), "w") as container:
        given = source.streams.video[0]
        made, keys, start = container.add_stream_from_template(given), -1, None
        for packet in source.demux(given):
            keys += packet.is_keyframe
            if packet.dts is None or keys < key:
                continue
            start = packet.pts + hidden * packet.duration if start is None else start
            packet.pts, packet.dts, packet.stream = packet.pts - start, packet.dts - start, made
            container.mux(packet)
    return target


def write_long(path, codec, **options):
    """Sixty frames, which become brighter, in groups of twelve."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=30, options=options)
        stream.width, stream.height, stream.pix_fmt, stream.gop_size = 32, 32, "yuv420p", 12
        for number in range(60):
            picture = np.full((32, 32, 3), 20 + 3 * number, np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())
    return path


GREY = FrameReader(1)
OPEN = {"x264-params": "open-gop=1:keyint=12:scenecut=0:bframes=3:threads=1"}


@pytest.mark.parametrize("codec, options", [("mpeg4", {}), ("libx264", OPEN), ("mpeg2video", {"bf": "2"})])
@pytest.mark.parametrize("suffix", ["mp4", "mov", "mkv"])
@pytest.mark.parametrize("key, hidden", [(0, 7), (1, 0), (1, 3)])
def test_hidden_frames_are_neither_counted_nor_chosen(codec, options, suffix, key, hidden, tmp_path):
    """Of clips cut at any place, also where the first frames need those that were cut off."""
    if codec not in av.codecs_available:
        pytest.skip(f"PyAV was built without {codec}")
    path = cut(write_long(tmp_path / "a.mp4", codec, **options), tmp_path / f"b.{suffix}", key, hidden)
    with av.open(str(path)) as container:
        shown = [frame.to_ndarray(format="gray").mean() for frame in container.decode(video=0)]
    assert 30 < len(shown) < 60 or suffix == "mkv"
    reader = FrameReader(1)
    assert reader.count(path) == len(shown) == len(reader.frame_times(path)) == len(reader.read(path))
    last = reader.read(path, [0, len(shown) - 1]).mean(axis=(1, 2, 3))
    assert last == pytest.approx([shown[0], shown[-1]], abs=20)


def test_a_clip_without_a_video_and_one_with_two(tmp_path):
    with av.open(str(tmp_path / "sound.mp4"), "w") as container:
        stream = container.add_stream("aac", rate=8000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        frame.sample_rate = 8000
        container.mux([*stream.encode(frame), *stream.encode()])
    with pytest.raises(UnreadableError, match="sound.mp4: has no video; accepted: a file with one"):
        GREY.count(tmp_path / "sound.mp4")
    with av.open(str(tmp_path / "two.mp4"), "w") as container:
        streams = [container.add_stream("mpeg4", rate=10) for _ in range(2)]
        for stream in streams:
            stream.width, stream.height, stream.pix_fmt = 16, 16, "yuv420p"
        for stream in streams:
            picture = av.VideoFrame.from_ndarray(np.zeros((16, 16, 3), np.uint8), format="rgb24")
            container.mux([*stream.encode(picture), *stream.encode()])
    assert "two.mp4: has 2 videos" in GREY.unused(tmp_path / "two.mp4")[0]
    assert GREY.unused(write_clip(tmp_path / "one.mp4", [np.zeros((16, 16, 3), np.uint8)])) == []


def edit_series(folder, edit):
    """Changes the header of every slice; `edit` gets its number from the foot."""
    pydicom = pytest.importorskip("pydicom")
    files = sorted(folder.glob("[0-9]*.dcm"), key=lambda path: -int(path.stem))
    for number, file in enumerate(files):
        header = pydicom.dcmread(file)
        edit(header, number)
        header.save_as(file)
    return folder


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("limit", [None, 63540])
def test_padding_is_no_intensity(signed, limit, tmp_path):
    """As the header names it, signed or not, alone or as a range; nothing else of the volume changes."""
    volume = np.random.default_rng(0).integers(0, 1000, (3, 6, 7))
    outside = np.zeros(volume.shape, bool)
    outside[:, :2, 3:] = True
    padded = np.where(outside, 63536, volume)
    if limit:
        padded[0, 0, 3:] = 63538

    def edit(header, number):
        # 63536 is −2000 in 16 signed bits. Some writers name it without its sign.
        header.PixelRepresentation = int(signed)
        header.add_new(0x00280120, "US", 63536)
        if limit:
            header.add_new(0x00280121, "US", limit)

    found = GREY.read(edit_series(write_series(tmp_path / "a", padded), edit))[:, ::-1, ::-1, 0]
    measured = volume[~outside]
    expected = (measured - measured.min()) / np.ptp(measured) * 255
    assert np.abs(found[~outside] - expected).max() <= 0.5 + 1e-3 and not found[outside].any()
    with pytest.raises(UnreadableError, match="padding alone"):
        GREY.read(edit_series(write_series(tmp_path / "b", np.full((2, 4, 4), 63536)), edit))


def test_slopes_are_those_of_each_slice(tmp_path):
    """As PET scanners store them."""
    volume = np.random.default_rng(0).integers(0, 1000, (4, 6, 7))
    folder = write_series(tmp_path / "a", volume)
    edit_series(folder, lambda header, number: setattr(header, "RescaleSlope", 1.0 + number))
    expected = volume * np.arange(1.0, 5.0)[:, None, None] - 1000
    found = FrameReader(1, (-1000, 4000)).read(folder)[:, ::-1, ::-1, 0]
    assert np.abs(found - (expected + 1000) / 5000 * 255).max() <= 0.5 + 1e-3


@pytest.mark.parametrize(
    "name, value",
    [
        ("PixelSpacing", [0.5, 0.8]),
        ("ImageOrientationPatient", [1.0, 0.0, 0.0, 0.0, 0.8, 0.6]),
        ("PhotometricInterpretation", "MONOCHROME1"),
        ("NumberOfFrames", 2),
        ("RescaleType", "OD"),
        ("Units", "BQML"),
        ("SeriesInstanceUID", "1.2.3"),
        ("FrameOfReferenceUID", "1.2.3"),
        ("BitsStored", 12),
        ("Rows", 3),
    ],
)
@pytest.mark.parametrize("number", [0, 2, 3])
def test_every_slice_is_compared(name, value, number, tmp_path):
    folder = write_series(tmp_path / "a", np.zeros((4, 6, 7)))
    edit_series(folder, lambda header, at: setattr(header, name, value) if at == number else None)
    with pytest.raises(UnreadableError, match=rf"a: \d.dcm has {name} .*, \d.dcm .*; accepted: slices of one series"):
        GREY.count(folder)


@pytest.mark.parametrize("aside", [lambda k: 30 * (k > 1), lambda k: 30 * (k == 3), lambda k: 30 * k, lambda k: k % 2])
def test_slices_lie_on_one_line(aside, tmp_path):
    def move(header, number):
        header.ImagePositionPatient = [float(aside(number)), 0.0, 2.5 * number]

    folder = edit_series(write_series(tmp_path / "a", np.zeros((4, 6, 7))), move)
    with pytest.raises(UnreadableError, match=r"slices beside one line: \d.dcm is at \["):
        GREY.spacing(folder)


def test_a_tilted_gantry_is_one_line(tmp_path):
    """By 20°, with positions of two decimals."""

    def tilt(header, number):
        header.ImagePositionPatient = [
            0.0,
            round(2.5 * number * np.sin(0.35), 2),
            round(2.5 * number * np.cos(0.35), 2),
        ]

    folder = edit_series(write_series(tmp_path / "a", np.zeros((9, 6, 7))), tilt)
    assert GREY.count(folder) == 9 and GREY.spacing(folder) == pytest.approx((2.5, 0.5, 0.7), rel=0.01)


def pages(path, count=3):
    pictures = [Image.fromarray(np.full((8, 8, 3), 40 * number, np.uint8)) for number in range(count)]
    options = {"lossless": True} if path.suffix == ".webp" else {}
    pictures[0].save(path, save_all=True, append_images=pictures[1:], **options)
    return path


@pytest.fixture
def classifier(tmp_path):
    vit(image_size=8, id2label={0: "cat", 1: "dog"}).save_pretrained(tmp_path / "model")
    ViTImageProcessor(size={"height": 8, "width": 8}).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("suffix", ["tif", "gif", "webp", "png"])
def test_further_pages_of_a_picture_are_said(suffix, classifier, tmp_path, capsys, said):
    for split in ("train", "validation"):
        for name in ("cat", "dog"):
            (tmp_path / "data" / split / name).mkdir(parents=True)
            pages(tmp_path / "data" / split / name / f"a.{suffix}", 1)
    path = pages(tmp_path / "data" / "train" / "cat" / f"b.{suffix}")
    images = load_images(DataArguments(image_folder=str(tmp_path / "data")), DataRequest((8, 8)))
    assert len(images.train) == 3 and sorted(image.mean() for image, _ in images.train) == [0, 0, 0]
    assert "1 training images have several pages" in said.text and f"b.{suffix} has 3" in said.text
    assert "not read" not in said.text
    # The same where only headers are read.
    source = DecodedImages(images.train.table, "image", images.train.labels, 3, 0)
    source.fill_cache("pictures")
    assert [*source.several.values()] == [3]
    assert main(["predict", str(classifier), str(path)]) == 0
    assert f"b.{suffix}: has 3 pages or frames; the first is read." in capsys.readouterr().err


def test_pages_are_a_clip_where_clips_are_read(tmp_path):
    path = pages(tmp_path / "stack.tif")
    assert FrameReader(3).read(path).mean(axis=(1, 2, 3)).tolist() == [0, 40, 80]
    with pytest.raises(UnreadableError, match="stack.tif: has 3 pages or frames without times"):
        FrameReader(3).frame_times(path)
    (tmp_path / "frames").mkdir()
    pages(tmp_path / "frames" / "0.tif")
    with pytest.raises(UnreadableError, match=r"frames: 0.tif has 3 pages or frames; accepted: one"):
        FrameReader(3).read(tmp_path / "frames")


def test_files_of_an_image_folder_that_are_not_read_are_said(tmp_path, said, monkeypatch):
    """By number, suffix and folder, also those of a folder that is no split; hidden ones are nothing."""
    for place, names in {
        "train/cat": ["a.png", "b.HEIC", ".DS_Store", "._a.png", "Thumbs.db"],
        "train/dog": ["a.jpg", "notes.txt"],
        "train/hen": ["a.heic", "b.heic"],
        "validation/cat": ["a.png"],
        "validation/dog": ["a.bmp"],
        "more/cat": ["c.png"],
    }.items():
        (tmp_path / place).mkdir(parents=True)
        for name in names:
            if name[0] != "." and name.endswith(("png", "jpg", "bmp")):
                Image.new("RGB", (8, 8)).save(tmp_path / place / name)
            else:
                (tmp_path / place / name).write_bytes(b"\0\0\0\x18ftypheic")
    monkeypatch.setattr("training.data.tables.register_formats", lambda: None)
    monkeypatch.setattr("training.data.tables.HEIC_SUFFIXES", ())
    images = load_images(DataArguments(image_folder=str(tmp_path)), DataRequest((8, 8)))
    assert len(images.train) == len(images.evaluation) == 2
    text = (
        f"--image_folder {str(tmp_path)!r}: 5 files are not read: 3 .heic, 1 .png, 1 .txt. Nothing is read in cat, hen."
    )
    assert text in said.text and "pip install -e '.[heic]'" in said.text


def test_photographs_of_phones_are_read_with_their_library(tmp_path, said):
    pillow_heif = pytest.importorskip("pillow_heif")
    pillow_heif.register_heif_opener()
    for split in ("train", "validation"):
        for number, name in enumerate(("cat", "dog")):
            (tmp_path / split / name).mkdir(parents=True)
            Image.new("RGB", (64, 64), (80 * number,) * 3).save(tmp_path / split / name / "a.HEIC", format="HEIF")
            Image.new("RGB", (8, 8)).save(tmp_path / split / name / "b.png")
    images = load_images(DataArguments(image_folder=str(tmp_path)), DataRequest((8, 8)))
    assert len(images.train) == 4 and "not read" not in said.text
    assert sorted(round(image.mean()) for image, _ in images.train)[-1] == pytest.approx(80, abs=3)


def test_files_beside_clips_are_said(tmp_path, said):
    for split in ("train", "validation"):
        for name in ("cat", "dog"):
            (tmp_path / split / name / "frames").mkdir(parents=True)
            for number in range(4):
                Image.new("L", (8, 8)).save(tmp_path / split / name / "frames" / f"{number}.png")
            np.save(tmp_path / split / name / "a.npy", np.zeros((4, 8, 8), np.uint8))
    (tmp_path / "train" / "cat" / "a.wmv").write_bytes(b"0")
    (tmp_path / "train" / "cat" / ".b.wmv").write_bytes(b"0")
    (tmp_path / "train" / "dog" / "sub" / "deep").mkdir(parents=True)
    (tmp_path / "train" / "dog" / "sub" / "deep" / "notes.txt").write_bytes(b"0")
    (tmp_path / "train" / "dog" / "frames" / "clip.mp4").write_bytes(b"0")
    clips = load_clips(VideoDataArguments(video_folder=str(tmp_path)), DataRequest((8, 8), 1, num_frames=4))
    assert len(clips.train) == len(clips.evaluation) == 4
    assert f"--video_folder {str(tmp_path)!r}: 2 files are not read: 1 .txt, 1 .wmv." in said.text
    assert "frames: 1 file is not read: 1 .mp4." in said.text


def test_files_beside_texts_are_said(tmp_path, said):
    for split in ("train", "validation"):
        (tmp_path / split).mkdir()
        (tmp_path / split / "a.txt").write_text("text")
        (tmp_path / split / "a.md").write_text("text")
    _folder_documents(tmp_path, ["**/*.txt"])
    assert f"--text_folder {str(tmp_path)!r}: 2 files are not read: 2 .md." in said.text


def test_a_folder_for_a_model_of_images_is_its_images(classifier, tmp_path, capsys):
    for name in ("oak", "pine"):
        (tmp_path / "data" / name).mkdir(parents=True)
        for number in range(2):
            Image.new("RGB", (9 + number, 12)).save(tmp_path / "data" / name / f"{number}.png")
    for name in ("oak/notes.txt", "oak/.DS_Store", "oak/clip.mp4"):
        (tmp_path / "data" / name).write_bytes(b"0")
    for place, count, said in (("data", 4, "2 files are not read: 1 .mp4, 1 .txt."), ("data/pine", 2, "")):
        assert main(["predict", str(classifier), str(tmp_path / place), "--json"]) == 0
        output = capsys.readouterr()
        assert [entry["file"] for entry in json.loads(output.out)] == [
            str(path) for path in sorted((tmp_path / place).rglob("*.png"))
        ]
        assert len(json.loads(output.out)) == count and said in output.err
    (tmp_path / "empty").mkdir()
    assert main(["predict", str(classifier), str(tmp_path / "empty")]) == 1
    assert "is not a file, nor a folder of images" in capsys.readouterr().err
