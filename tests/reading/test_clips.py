"""Clips and volumes, against arrays that were turned by hand, affines that were applied by hand, and their times."""

import json

import numpy as np
import pytest
import torch
import training_helpers  # noqa: F401 (makes training importable)
from clip_files import write_clip, write_series
from PIL import Image

import hf_liere
from hf_liere.reading.clips import FrameReader
from hf_liere.reading.files import UnreadableError
from hf_liere.tools.cli import main
from hf_liere.transformer.video_processing_liere import LieREVideoProcessor
from training.data.clips import ClipReader
from training.data.sources import DataRequest
from training.data.video_data import VideoDataArguments, load_clips


COLOR, GREY = FrameReader(3), FrameReader(1)


def with_matrix(path, target, *entries):
    """A copy of an mp4 whose header has another matrix (a, b, c, d): columns run along (a, b), rows along (c, d)."""
    number = [(value * 65536 % 2**32).to_bytes(4, "big") for value in (1, 0, *entries)]
    one, zero, a, b, c, d = number
    last, data = (1 << 30).to_bytes(4, "big"), path.read_bytes()
    place = data.index(one + zero * 3 + one + zero * 3 + last, data.index(b"tkhd"))
    matrix = a + b + zero + c + d + zero * 3 + last
    target.write_bytes(data[:place] + matrix + data[place + len(matrix) :])
    return target


def corners():
    """A picture with four grey levels, each in a quarter, which turning permutes."""
    return np.kron([[30, 90], [150, 210]], np.ones((24, 32)))[..., None].repeat(3, -1).astype(np.uint8)


@pytest.mark.parametrize(
    "matrix, turned",
    [
        ((0, 1, -1, 0), lambda a: np.rot90(a, -1)),
        ((-1, 0, 0, -1), lambda a: np.rot90(a, 2)),
        ((0, -1, 1, 0), lambda a: np.rot90(a, 1)),
        ((-1, 0, 0, 1), lambda a: a[:, ::-1]),
        ((1, 0, 0, -1), lambda a: a[::-1]),
        ((0, 1, 1, 0), lambda a: a.swapaxes(0, 1)),
    ],
)
def test_clips_are_turned_as_players_show_them(matrix, turned, tmp_path):
    plain = write_clip(tmp_path / "plain.mp4", [corners()] * 4)
    path = with_matrix(plain, tmp_path / "turned.mp4", *matrix)
    stored = COLOR.read(plain, [0, 3])
    # The codec moves grey levels by a few, apart from edges.
    assert np.abs(stored[0].astype(int) - corners())[4:20, 4:28].max() < 8
    assert np.array_equal(COLOR.read(path, [0, 3]), np.stack([turned(frame) for frame in stored]))
    assert np.array_equal(GREY.read(path, [1])[0], turned(GREY.read(plain, [1])[0]))


def test_pixels_that_are_not_square(tmp_path):
    """64 columns of pixels of 4 : 3, and turned: then they are rows."""
    path = write_clip(tmp_path / "wide.mp4", [corners()] * 3, aspect="4/3")
    assert COLOR.read(path, [0]).shape == (1, 48, 85, 3)
    turned = with_matrix(path, tmp_path / "turned.mp4", 0, 1, -1, 0)
    assert COLOR.read(turned, [0]).shape == (1, 85, 48, 3)
    frame = COLOR.read(path, [0])[0, 12, :, 0].astype(int)
    assert np.abs(frame[5:38] - 30).max() < 8 and np.abs(frame[48:80] - 90).max() < 8


@pytest.mark.parametrize("suffix", ["mp4", "mkv"])
def test_frames_of_a_variable_rate_are_spread_over_time(suffix, tmp_path):
    """A frame every tenth of a second, then two of four seconds: half of the time shows the last three."""
    times = [*range(20), 60, 100]
    frames = [np.full((16, 16, 3), 10 * number, np.uint8) for number in range(22)]
    for split in ("train", "validation"):
        for name in ("a", "b"):
            (tmp_path / split / name).mkdir(parents=True)
            write_clip(tmp_path / split / name / f"clip.{suffix}", frames, times=times)
    arguments = VideoDataArguments(video_folder=str(tmp_path))
    clip, _ = load_clips(arguments, DataRequest((16, 16), num_frames=5)).train[0]
    assert clip.frame_times == pytest.approx(np.array(times) / 10, abs=1e-3)
    # The last frame lasts as long as the mean of others, 10 / 21 s: five parts of the time have their middles here.
    middles = (np.arange(5) + 0.5) / 5 * (10 + 10 / 21)
    expected = [max(n for n, time in enumerate(times) if time / 10 <= middle) for middle in middles]
    assert expected == [10, 19, 19, 20, 20]
    indices = ClipReader(5, None).indices(clip, 0.5)
    assert indices.tolist() == expected
    found = clip.read(indices).mean(axis=(1, 2, 3))
    assert found == pytest.approx(10 * np.array(expected), abs=4)


def test_empty_and_truncated_clips(tmp_path):
    write_clip(tmp_path / "a.mkv", [corners()] * 4)
    (tmp_path / "empty.mp4").write_bytes(b"")
    (tmp_path / "cut.mkv").write_bytes((tmp_path / "a.mkv").read_bytes()[:600])
    (tmp_path / "folder").mkdir()
    for name in ("empty.mp4", "cut.mkv", "folder"):
        with pytest.raises(UnreadableError, match=name):
            COLOR.read(tmp_path / name, [0, 1])


AFFINE = np.diag([0.8, 0.9, 3.0, 1.0])


def scan(shape=(12, 14, 10)):
    """Axes from left to right, from back to front and from foot to head."""
    return (np.random.default_rng(0).random(shape) * 1000).astype(np.int16)


def reorient(array, codes):
    """An array of RAS axes and its affine, as a scanner of other axes stores it, by hand."""
    world = {"R": (0, 1), "L": (0, -1), "A": (1, 1), "P": (1, -1), "S": (2, 1), "I": (2, -1)}
    axes = [world[code] for code in codes]
    stored = array.transpose([axis for axis, _ in axes] + [*range(3, array.ndim)])
    affine, origin = np.zeros((4, 4)), np.zeros(3)
    for place, (axis, sign) in enumerate(axes):
        affine[axis, place] = sign * AFFINE[axis, axis]
        if sign < 0:
            stored = np.flip(stored, place)
            origin[axis] = AFFINE[axis, axis] * (array.shape[axis] - 1)
    affine[:3, 3], affine[3, 3] = origin, 1
    return np.ascontiguousarray(stored), affine


@pytest.mark.parametrize("codes", ["RAS", "LPS", "ASR", "PIR", "SRP"])
@pytest.mark.parametrize("suffix", ["nii", "nii.gz", "img", "hdr"])
def test_scanners_store_the_same_scan_in_any_axes(codes, suffix, tmp_path):
    nibabel = pytest.importorskip("nibabel")
    array, affine = reorient(scan(), codes)
    image = (nibabel.Nifti1Pair if suffix in ("img", "hdr") else nibabel.Nifti1Image)(array[..., None], affine)
    path = tmp_path / f"a.{suffix}"
    nibabel.save(image, path)
    low, high = scan().min(), scan().max()
    expected = ((scan().transpose(2, 1, 0).astype(float) - low) / (high - low) * 255).round()
    assert GREY.count(path) == 10 and GREY.spacing(path) == pytest.approx((3.0, 0.9, 0.8))
    # float32 may round a half the other way.
    assert np.abs(GREY.read(path, range(10))[..., 0] - expected).max() <= 1
    # Place of a voxel in mm, by the affine of the file, and by the spacing of what is read.
    place = np.unravel_index(array.argmax(), array.shape)
    found = np.unravel_index(scan().argmax(), scan().shape)
    assert (affine @ [*place, 1])[:3] == pytest.approx(np.array(found) * GREY.spacing(path)[::-1])


def test_oblique_scans_take_their_closest_axes(tmp_path):
    nibabel = pytest.importorskip("nibabel")
    cosine, sine = np.cos(0.3), np.sin(0.3)
    turn = np.array([[cosine, -sine, 0], [sine, cosine, 0], [0, 0, 1]])
    array, affine = reorient(scan(), "LPS")
    affine[:3, :3] = turn @ affine[:3, :3]
    nibabel.save(nibabel.Nifti1Image(array, affine), tmp_path / "a.nii")
    nibabel.save(nibabel.Nifti1Image(scan(), AFFINE), tmp_path / "b.nii")
    assert np.array_equal(GREY.read(tmp_path / "a.nii"), GREY.read(tmp_path / "b.nii"))
    # float32 in the header.
    assert GREY.spacing(tmp_path / "a.nii") == pytest.approx((3.0, 0.9, 0.8), rel=1e-5)


def test_several_volumes_in_a_file_are_refused_and_colours_read(tmp_path):
    nibabel = pytest.importorskip("nibabel")
    nibabel.save(nibabel.Nifti1Image(np.zeros((4, 5, 6, 7), np.int16), np.eye(4)), tmp_path / "time.nii")
    with pytest.raises(UnreadableError, match=r"time.nii: contains an array of shape \(4, 5, 6, 7\); accepted: one"):
        GREY.count(tmp_path / "time.nii")
    colours = np.random.default_rng(0).integers(0, 256, (4, 5, 6, 3), dtype=np.uint8)
    kind = np.dtype([("R", "u1"), ("G", "u1"), ("B", "u1")])
    nibabel.save(nibabel.Nifti1Image(colours.view(kind)[..., 0], np.eye(4)), tmp_path / "colour.nii")
    assert np.array_equal(COLOR.read(tmp_path / "colour.nii"), colours.transpose(2, 1, 0, 3))


def test_a_series_of_slices_is_a_volume(tmp_path):
    """DICOM counts to the left, to the back and to the head, so rows and columns of an axial series run backwards."""
    volume = np.random.default_rng(0).integers(0, 1000, (5, 6, 7))
    folder = write_series(tmp_path / "axial", volume)
    reader = FrameReader(1, (-1000, 1000))
    expected = ((volume[:, ::-1, ::-1] * 2.0) / 2000 * 255).round()
    assert reader.count(folder) == 5 and np.array_equal(reader.read(folder)[..., 0], expected)
    assert reader.spacing(folder) == pytest.approx((2.5, 0.5, 0.7))
    # Coronal: columns to the left, rows to the foot, slices to the back.
    folder = write_series(tmp_path / "coronal", volume, (1, 0, 0, 0, 0, -1))
    turned = volume.transpose(1, 0, 2)[::-1, ::-1, ::-1]
    assert np.array_equal(reader.read(folder)[..., 0], (turned * 2.0 / 2000 * 255).round())
    assert reader.count(folder) == 6 and reader.spacing(folder) == pytest.approx((0.5, 2.5, 0.7))
    gap = write_series(tmp_path / "gap", volume, gaps=[0, 2.5, 5, 10, 12.5])
    with pytest.raises(UnreadableError, match=r"gap: has slices at distances of 2.5 to 5 mm; accepted: a complete"):
        reader.read(gap, [0])


@pytest.mark.parametrize("kind", ["nifti", "dicom"])
def test_a_model_of_scans_predicts_from_scans(kind, tiny_video, tmp_path, capsys):
    """As the model does from slices that are chosen, scaled by the stored range and placed in mm by hand."""
    nibabel = pytest.importorskip("nibabel")
    physical = {"coordinates": "physical", "physical_unit": [8.0, 8.0, 8.0]}
    model = hf_liere.LieREVideoForVideoClassification(tiny_video(num_channels=1, num_labels=3, **physical)).eval()
    fields = {"size": {"height": 8, "width": 8}, "do_center_crop": False, "image_mean": [0.5], "image_std": [0.5]}
    processor = LieREVideoProcessor(**fields, volume_orientation="RAS", intensity_range=[-1000.0, 1000.0])
    model.save_pretrained(tmp_path / "model")
    processor.save_pretrained(tmp_path / "model")
    volume = np.random.default_rng(0).integers(0, 1000, (9, 8, 8))
    if kind == "nifti":
        path, spacing = tmp_path / "a.nii.gz", (3.0, 0.9, 0.8)
        nibabel.save(nibabel.Nifti1Image((volume * 2 - 1000).transpose(2, 1, 0).astype(np.int16), AFFINE), path)
    else:
        path, spacing = write_series(tmp_path / "a", volume[:, ::-1, ::-1]), (2.5, 0.5, 0.7)
    assert main(["predict", str(tmp_path / "model"), str(path), "--json"]) == 0, capsys.readouterr().err
    (entry,) = json.loads(capsys.readouterr().out)
    # The middles of four parts of nine slices.
    chosen = [1, 3, 5, 7]
    pixels = (volume[chosen] * 2.0 / 2000 * 255).round() / 127.5 - 1
    with torch.no_grad():
        outputs = model(
            torch.tensor(pixels, dtype=torch.float32)[None, :, None],
            spacing=torch.tensor([spacing[1:]]),
            frame_times=torch.tensor([[spacing[0] * index for index in chosen]]),
        )
    scores = outputs.logits[0].softmax(0)
    # The processor normalises in two steps.
    found = {answer["index"]: answer["score"] for answer in entry["answers"]}
    assert [found[index] for index in range(3)] == pytest.approx(scores.tolist(), abs=1e-5)


def test_nothing_hidden_is_a_class_a_clip_or_a_frame(tmp_path):
    for split in ("train", "validation", ".cache"):
        for name in ("cat", "dog", ".ipynb_checkpoints", "__MACOSX"):
            for number in range(2):
                (tmp_path / split / name / str(number)).mkdir(parents=True)
                for frame in range(4):
                    place = tmp_path / split / name / str(number)
                    Image.new("RGB", (8, 8)).save(place / f"{frame}.png")
                    (place / f"._{frame}.png").write_bytes(b"left behind")
            np.save(tmp_path / split / name / "._clip.npy", np.zeros(3))
            (tmp_path / split / name / "Thumbs.db").write_bytes(b"left behind")
    clips = load_clips(VideoDataArguments(video_folder=str(tmp_path)), DataRequest((8, 8), num_frames=4))
    assert clips.label_names == ["cat", "dog"] and len(clips.train) == len(clips.evaluation) == 4
    assert all(len(clip) == 4 for clip, _ in clips.train)
