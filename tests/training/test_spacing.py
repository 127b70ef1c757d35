"""The spacing of voxels and the times of frames: from files through crops to the model."""

import shutil

import numpy as np
import pytest
import torch
from clip_files import write_clip, write_nifti
from training_helpers import TINY_MODEL, TINY_RUN

from hf_liere import LieREVideoForVideoClassification
from hf_liere.reading.clips import FrameReader
from training import video_classification
from training.common.arguments import AugmentationArguments, InputError
from training.data.augmentation import Augmentation, Collator, EvaluationView
from training.data.clips import ClipArray, ClipFile, ClipReader, EvaluationClips, TrainingClips
from training.data.sources import PARTS, DataRequest
from training.data.video_data import VideoDataArguments, load_clips


def load(spacing=False, **arguments):
    request = DataRequest((16, 16), 1, PARTS, num_frames=4, spacing=spacing)
    return load_clips(VideoDataArguments(**arguments), request)


def run(folder, *flags):
    tiny = [*TINY_MODEL, "--num_frames", "4", "--patch_size", "8", *TINY_RUN]
    return video_classification.main(["--output_dir", str(folder), *tiny, *map(str, flags)])


def test_spacing_follows_crops_and_resizing():
    """Of a volume whose intensity is a multiple of the place in mm on one axis, seen in the steps of its pixels."""
    rows, columns, slices = 40, 80, 12
    arguments = AugmentationArguments(random_resized_crop=True, random_resized_crop_scale=[0.3, 0.9])
    augment = Augmentation((16, 16), 2, arguments, seed=0)
    # In both directions 12 grey levels per mm.
    for axis, plane in enumerate((np.arange(rows)[:, None] * 6, np.arange(columns) * 3)):
        plane = np.broadcast_to(plane, (rows, columns)).astype(np.uint8)
        clip = ClipArray(np.repeat(plane[None, ..., None], slices, axis=0), "ramp", (3.0, 0.5, 0.25))
        for epoch in range(4):
            example = TrainingClips([(clip, 0)], augment, ClipReader(4, None))[epoch, 0]
            edges = np.moveaxis(example["image"][0, ..., 0].astype(float), axis, 0)[[4, 11]]
            # Bytes are whole numbers: two of them are off by up to 1 over 7 steps.
            assert np.diff(edges.mean(1))[0] / 7 / 12 == pytest.approx(example["spacing"][axis], abs=1 / 7 / 12)
            assert example["frame_times"].shape == (4,) and (example["frame_times"] % 3 == 0).all()
            assert (np.diff(example["frame_times"]) > 0).all()
    several = EvaluationClips([(clip, 1)], EvaluationView((16, 16), 2), ClipReader(4, 2), 3)[0]
    assert several["image"].shape[:2] == several["frame_times"].shape == (3, 4)
    assert several["frame_times"].tolist() == [[0, 6, 12, 18], [9, 15, 21, 27], [15, 21, 27, 33]]
    assert several["spacing"].tolist() == [[0.5 * 40 / 16, 0.25 * 80 / 16]] * 3
    collated = Collator((4, 16, 16), 1, [0.5], [0.5], AugmentationArguments(), 0, has_spacing=True)
    batch = collated([{"label": -100}, several])
    assert batch["pixel_values"].shape[0] == len(batch["spacing"]) == len(batch["frame_times"]) == 6
    assert batch["frame_times"][:3].tolist() == several["frame_times"].tolist()
    assert collated([{"label": -100}])["spacing"].tolist() == [[1, 1]]


@pytest.mark.parametrize("name", ["variable.mkv", "variable.mp4"])
def test_times_of_frames_at_a_variable_rate(tmp_path, name):
    """Of frames whose brightness is their time in tenths of a second: bright ones are far apart."""
    tenths = [3, 4, 5, 8, 12, 13, 20, 24]
    frames = [np.full((16, 16, 3), 10 * time, dtype=np.uint8) for time in tenths]
    write_clip(tmp_path / name, frames, times=tenths)
    reader = FrameReader(1)
    times = reader.frame_times(tmp_path / name)
    # Containers round times to milliseconds.
    assert times == pytest.approx((np.array(tenths) - 3) / 10, abs=1e-3)
    clip = ClipFile(tmp_path / name, len(tenths), reader, reader.spacing(tmp_path / name), times)
    example = EvaluationClips([(clip, 0)], EvaluationView((8, 8), 2), ClipReader(4, None))[0]
    brightness = example["image"].reshape(4, -1).mean(1) / 100 - 0.3
    # Compression changes grey levels by a few.
    assert example["frame_times"].reshape(-1) == pytest.approx(brightness, abs=0.06)
    assert example["spacing"].reshape(-1).tolist() == [2.0, 2.0]
    assert reader.frame_times(tmp_path / "scan.npz") is None


PHYSICAL = ["--coordinates", "physical", "--physical_unit", "[12,8,8]", "--num_channels", 1]


@pytest.fixture
def scans(tmp_path):
    """Volumes of 4 slices of 16 × 16 voxels of various sizes, and one that cannot be read."""
    generator, folder = np.random.default_rng(0), tmp_path / "scans"
    for number in range(12):
        split, label = ("train" if number < 8 else "validation"), ("left", "right")[number % 2]
        volume = generator.integers(0, 256, (4, 16, 16)).astype(np.uint8)
        spacing = generator.uniform(0.3, 3.0, 3)
        write_nifti(folder / split / label / f"scan_{number}.nii.gz", volume, spacing)
    (folder / "train" / "left" / "broken.nii").write_text("no volume")
    return folder


def test_a_run_sees_the_spacing_of_every_volume(scans, tmp_path, caplog):
    """The loss of its evaluation is that of the saved model, volume by volume, with the spacing that was written."""
    import nibabel

    metrics = run(tmp_path / "run", "--video_folder", scans, *PHYSICAL, "--do_train", "--do_eval", "--max_steps", 2)
    assert "broken.nii" in caplog.text
    model = LieREVideoForVideoClassification.from_pretrained(tmp_path / "run").eval()
    assert model.config.coordinates == "physical" and list(model.config.physical_unit) == [12, 8, 8]
    losses, without = [], []
    for path in sorted((scans / "validation").glob("*/*")):
        image = nibabel.load(path)
        pixels = torch.from_numpy(np.asarray(image.dataobj).T.copy())[None, :, None] / 127.5 - 1
        label = torch.tensor([model.config.label2id[path.parent.name]])
        with torch.no_grad():
            for found, spacing in ((losses, image.header.get_zooms()[::-1]), (without, (1.0, 1.0, 1.0))):
                found.append(model(pixels, spacing=spacing, labels=label).loss.item())
    # Places are rounded to float32.
    assert metrics["eval_loss"] == pytest.approx(np.mean(losses), abs=1e-5)
    assert metrics["eval_loss"] != pytest.approx(np.mean(without), abs=1e-5)


def test_volumes_of_an_npz_have_spacings(tmp_path):
    arrays = {f"{split}_images": np.zeros((3, 4, 16, 16), np.uint8) for split in ("train", "val")}
    arrays |= {f"{split}_labels": np.array([[0], [1], [1]]) for split in ("train", "val")}
    own = np.array([[3, 1, 1], [2, 1, 1], [5, 0.5, 1]])
    np.savez(tmp_path / "some.npz", **arrays, spacing=np.array([4.0, 1, 2]), train_spacing=own)
    clips = load(volume_file=str(tmp_path / "some.npz"), spacing=True)
    assert [clip.spacing for clip, _ in clips.train] == [(3.0, 1.0, 1.0), (2.0, 1.0, 1.0), (5.0, 0.5, 1.0)]
    assert [clip.spacing for clip, _ in clips.evaluation] == [(4.0, 1.0, 2.0)] * 3
    for spacing, message in (
        ({}, "neither train_spacing .* nor spacing"),
        ({"spacing": np.ones(2)}, r"spacing has shape \(2,\); accepted: \(3,\) or \(3, 3\)"),
        ({"train_spacing": own - 3}, r"train_spacing has the spacing \[0.0, -2.0, -2.0\]"),
    ):
        np.savez(tmp_path / "none.npz", **arrays, **spacing)
        with pytest.raises(InputError, match=message):
            load(volume_file=str(tmp_path / "none.npz"), spacing=True)


def test_what_has_no_spacing_is_refused_with_its_name(scans, tmp_path):
    others = tmp_path / "others"
    shutil.copytree(scans, others)
    np.save(next((others / "train").rglob("*.nii*")).with_name("bare.npy"), np.zeros((4, 16, 16), dtype=np.uint8))
    with pytest.raises(InputError, match="--coordinates physical: bare.npy: has no voxel spacing"):
        run(tmp_path / "run", "--video_folder", others, *PHYSICAL, "--do_train", "--max_steps", 1)
    with pytest.raises(InputError, match="mix volumes of different spacing"):
        run(tmp_path / "run", "--video_folder", scans, *PHYSICAL, "--do_train", "--max_steps", 1, "--mixup_alpha", 0.2)
    with pytest.raises(InputError, match="--evaluation_offset: physical coordinates follow from each volume"):
        run(tmp_path / "run", "--video_folder", scans, *PHYSICAL, "--do_eval", "--evaluation_offset", 0.2)
