"""Frames of videos, folders and volumes by their numbers, and the spacing of volumes."""

import numpy as np
import pytest
from clip_files import cut_frames, numbered_frames, write_nifti
from PIL import Image

from hf_liere.reading.clips import FrameReader, clip_indices
from hf_liere.reading.files import UnreadableError
from training.data.moving_shapes import write_video


COLOR, GREY = FrameReader(3), FrameReader(1)


def test_frames_of_a_video_are_the_ones_asked_for(tmp_path):
    write_video(tmp_path / "video.mp4", numbered_frames(12))
    assert COLOR.count(tmp_path / "video.mp4") == 12
    for reader, channels in ((COLOR, 3), (GREY, 1)):
        read = reader.read(tmp_path / "video.mp4", [1, 4, 11])
        assert read.shape == (3, 16, 16, channels) and read.dtype == np.uint8
        # H.264 with limited colour range loses a few grey levels; neighbouring frames are ten apart.
        assert np.abs(read.astype(int).mean(axis=(1, 2, 3)) - [10, 40, 110]).max() < 3
    with pytest.raises(UnreadableError, match=r"video.mp4: ends after 12 frames; frame 13 was requested"):
        COLOR.read(tmp_path / "video.mp4", [3, 12])


def test_folders_of_frames_are_in_numerical_order(tmp_path):
    for number in (10, 9, 1):
        Image.fromarray(np.full((6, 8, 3), number, np.uint8)).save(tmp_path / f"frame_{number}.png")
    assert COLOR.count(tmp_path) == 3
    assert COLOR.read(tmp_path, [0, 1, 2])[:, 0, 0, 0].tolist() == [1, 9, 10]


@pytest.mark.parametrize("suffix", ["nii.gz", "nii", "npz", "npy"])
def test_volumes_are_slices(suffix, tmp_path):
    """(slices, height, width) = (5, 3, 2); NIfTI lists its axes the other way round."""
    volume = np.arange(30, dtype=np.int16).reshape(5, 3, 2) * 100 - 500
    path = tmp_path / f"volume.{suffix}"
    if suffix.startswith("nii"):
        nibabel = pytest.importorskip("nibabel")
        nibabel.Nifti1Image(volume.transpose(2, 1, 0), np.eye(4)).to_filename(path)
    elif suffix == "npz":
        np.savez(path, volume=volume)
    else:
        np.save(path, volume)
    assert GREY.count(path) == 5
    expected = (np.arange(30).reshape(5, 3, 2) / 29 * 255).round()
    assert np.array_equal(GREY.read(path, [1, 3])[..., 0], expected[[1, 3]])
    windowed = FrameReader(3, (0, 1000)).read(path, [0, 1, 2, 3, 4])
    assert windowed.shape == (5, 3, 2, 3)
    assert np.array_equal(windowed[..., 2], (volume.clip(0, 1000) / 1000 * 255).round())


def test_what_cannot_be_read_names_the_file(tmp_path):
    (tmp_path / "text.nii").write_text("no volume")
    np.savez(tmp_path / "two.npz", a=np.zeros(3), b=np.zeros(3))
    np.save(tmp_path / "flat.npy", np.zeros((3, 3)))
    np.save(tmp_path / "objects.npy", np.array([{}]), allow_pickle=True)
    for name, reason in (
        ("text.nii", "cannot be read"),
        ("two.npz", "contains the arrays"),
        ("flat.npy", r"shape \(3, 3\)"),
        ("objects.npy", "allow_pickle"),
    ):
        with pytest.raises(UnreadableError, match=f"{name}: .*{reason}"):
            GREY.read(tmp_path / name, [0])
    (tmp_path / "text.mp4").write_text("no video")
    with pytest.raises(UnreadableError, match="text.mp4: cannot be read .InvalidDataError"):
        COLOR.count(tmp_path / "text.mp4")
    write_video(tmp_path / "whole.mp4", numbered_frames(16))
    cut_frames(tmp_path / "whole.mp4", tmp_path / "cut.mp4")
    assert COLOR.count(tmp_path / "cut.mp4") == 16
    with pytest.raises(UnreadableError, match="cut.mp4: "):
        COLOR.read(tmp_path / "cut.mp4", [1, 15])


@pytest.mark.parametrize("length", [8, 9, 30, 301])
@pytest.mark.parametrize("stride", [None, 1])
def test_clips_lie_within_the_video(length, stride):
    starts = [0.0, 0.5, 1 - 1e-9]
    clips = [clip_indices(length, 8, stride, start) for start in starts]
    assert all((np.diff(clip) > 0).all() and clip[0] >= 0 and clip[-1] < length for clip in clips)
    assert clips[0][0] == 0 and clips[-1][-1] == length - 1
    if stride:
        assert all((np.diff(clip) == stride).all() for clip in clips)
    else:
        drawn = clip_indices(length, 8, None, np.random.default_rng(0).random(8))
        segments = np.arange(9) * length / 8
        assert (drawn >= np.floor(segments[:-1])).all() and (drawn < np.ceil(segments[1:])).all()


def test_spacing_of_volumes(tmp_path):
    volume = np.zeros((5, 3, 2), np.int16)
    for name, measure, factor in (("a.nii.gz", "mm", 1), ("b.nii", "micron", 1e-3), ("c.nii", "unknown", 1)):
        write_nifti(tmp_path / name, volume, (5.0, 0.75, 0.5), measure)
        assert GREY.spacing(tmp_path / name) == pytest.approx((5.0 * factor, 0.75 * factor, 0.5 * factor))
        assert GREY.count(tmp_path / name) == 5
    np.savez(tmp_path / "d.npz", volume=volume, spacing=np.array([2, 1.5, 1]))
    assert GREY.spacing(tmp_path / "d.npz") == (2.0, 1.5, 1.0) and GREY.count(tmp_path / "d.npz") == 5
    np.savez(tmp_path / "flat.npz", volume=volume, spacing=np.array([2, 1.5]))
    np.savez(tmp_path / "zero.npz", volume=volume, spacing=np.array([2, 1.5, 0]))
    np.savez(tmp_path / "none.npz", volume=volume)
    np.save(tmp_path / "none.npy", volume)
    for name, message in (
        ("flat.npz", r"flat.npz: has the spacing \[2.0, 1.5\]; accepted: three positive"),
        ("zero.npz", r"zero.npz: has the spacing \[2.0, 1.5, 0.0\]"),
        ("none.npz", "none.npz: has no voxel spacing.*array 'spacing'"),
        ("none.npy", "none.npy: has no voxel spacing"),
    ):
        with pytest.raises(UnreadableError, match=message):
            GREY.spacing(tmp_path / name)
