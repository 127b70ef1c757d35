"""Clips out of real files, and whole runs on them: what is read, what is left out, and what does not change a run."""

import json
import logging
import shutil
from fractions import Fraction

import av
import numpy as np
import pytest
import torch
from checkout import ROOT
from clip_files import cut_frames
from fresh_process import run_warm
from PIL import Image
from training_helpers import TINY_MODEL, TINY_RUN

from hf_liere import LieREVideoForVideoClassification
from training import video_classification
from training.common.arguments import AugmentationArguments, InputError
from training.data.arrows import Arrows
from training.data.augmentation import Augmentation, Collator, EvaluationView
from training.data.clips import ClipArray, ClipFile, ClipReader, EvaluationClips, TrainingClips, clip_indices
from training.data.moving_shapes import LABELS, frames, write_moving_shapes, write_video
from training.data.sources import DataRequest, Subset
from training.data.video_data import VideoDataArguments, load_clips
from training.data.video_files import FrameReader, UnreadableError
from training.engine.trainer import area_under_curve, average_views, balanced_accuracy


SCRIPT = ROOT / "training" / "video_classification.py"
TINY_CLIP = [*TINY_MODEL, "--num_frames", "4", "--patch_size", "8"]
COLOR, GREY = FrameReader(3), FrameReader(1)


def numbered_frames(count: int, size: int = 16) -> np.ndarray:
    """Frame n is a plane of grey 10 n."""
    return np.repeat(np.arange(count, dtype=np.uint8) * 10, size * size * 3).reshape(count, size, size, 3)


def run(folder, *flags):
    return video_classification.main(["--output_dir", str(folder), *TINY_CLIP, *TINY_RUN, *map(str, flags)])


def load(train=True, evaluate=True, frames=4, channels=3, spacing=False, **arguments):
    parts = ("training",) * train + ("evaluation",) * evaluate
    request = DataRequest((16, 16), channels, parts, num_frames=frames, spacing=spacing)
    return load_clips(VideoDataArguments(**arguments), request)


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("videos") / "16px"
    write_moving_shapes(folder, {"train": 24, "validation": 13}, 16)
    return folder


@pytest.fixture(scope="module")
def broken(shapes, tmp_path_factory):
    """The moving shapes with a file that cannot be opened, one cut in its middle and one of three frames."""
    folder = tmp_path_factory.mktemp("videos") / "broken"
    write_moving_shapes(folder, {"train": 24, "validation": 13}, 16)
    (folder / "train" / "up" / "not_a_video.mp4").write_bytes(b"not a video")
    for split in ("train", "validation"):
        write_video(folder / split / "up" / "short.mp4", numbered_frames(3))
        whole = sorted((folder / split).glob("*/0*.mp4"))[0]
        cut_frames(whole, folder / split / "down" / "cut.mp4")
    return folder


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


def test_what_cannot_be_read_names_the_file(tmp_path, broken):
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
    with pytest.raises(UnreadableError, match="not_a_video.mp4: cannot be read .InvalidDataError"):
        COLOR.count(broken / "train" / "up" / "not_a_video.mp4")
    assert COLOR.count(broken / "train" / "down" / "cut.mp4") == 16
    with pytest.raises(UnreadableError, match="cut.mp4: "):
        COLOR.read(broken / "train" / "down" / "cut.mp4", [1, 15])


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


def test_moving_shapes_move_in_the_direction_of_their_class():
    """Where brightness goes from frame to frame, found by correlation, is the class; no single frame knows it."""
    steps = {"up": (-1, 0), "right": (0, 1), "down": (1, 0), "left": (0, -1)}
    for index in range(20):
        video, label = frames("train", index, 48)
        grey = video.astype(float).mean(axis=-1)
        differences = np.abs(grey - np.roll(grey, 1, axis=0))[1:].mean()
        by_step = {
            name: min(
                np.abs(
                    (grey[1:] - grey.min(axis=0)) - np.roll(grey[:-1] - grey.min(axis=0), (dy * n, dx * n), (1, 2))
                ).mean()
                for n in (2, 3, 4)
            )
            for name, (dy, dx) in steps.items()
        }
        assert min(by_step, key=by_step.get) == LABELS[label] and differences > 0.5


def test_moving_shapes_are_written_once(shapes):
    before = {path: path.stat().st_mtime_ns for path in shapes.rglob("*.mp4")}
    assert len(before) == 37
    write_moving_shapes(shapes, {"train": 24}, 16)
    assert {path: path.stat().st_mtime_ns for path in shapes.rglob("*.mp4")} == before
    with pytest.raises(ValueError, match="Moving shapes of 15 px cannot be written as video; accepted: even sizes"):
        write_moving_shapes(shapes, {"train": 24}, 15)
    clips = load(moving_shapes_folder=str(shapes.parent), max_train_samples=10, max_eval_samples=5)
    assert (len(clips.train), len(clips.evaluation)) == (10, 5) and clips.label_names == list(LABELS)
    for number in range(5):
        clip, label = clips.evaluation[number]
        assert label == frames("validation", number, 16)[1]


def test_split_files_as_ucf101_ships_them(tmp_path):
    videos, lists = tmp_path / "UCF-101", tmp_path / "ucfTrainTestlist"
    lists.mkdir()
    for name in ("Archery/v_Archery_g01_c01", "Biking/v_Biking_g01_c01", "Biking/v_Biking_g02_c01"):
        (videos / name).parent.mkdir(parents=True, exist_ok=True)
        write_video(videos / f"{name}.avi", numbered_frames(8))
    (lists / "classInd.txt").write_text("1 Archery\n2 Biking\n3 Bowling\n")
    (lists / "trainlist01.txt").write_text(
        "Archery/v_Archery_g01_c01.avi 1\nBiking/v_Biking_g01_c01.avi 2\nBiking/v_missing.avi 2\n"
    )
    (lists / "testlist01.txt").write_text("Biking/v_Biking_g02_c01.avi\r\n")
    flags = {"train_files": [str(lists / "trainlist01.txt")], "validation_files": [str(lists / "testlist01.txt")]}
    clips = load(video_folder=str(videos), **flags)
    assert clips.label_names == ["Archery", "Biking", "Bowling"]
    assert [(clip.name, label) for clip, label in (clips.train[0], clips.train[1], clips.evaluation[0])] == [
        ("v_Archery_g01_c01.avi", 0),
        ("v_Biking_g01_c01.avi", 1),
        ("v_Biking_g02_c01.avi", 1),
    ]
    assert len(clips.train) == 2
    with pytest.raises(InputError, match="are relative to --video_folder"):
        load(**flags)
    (lists / "trainlist01.txt").write_text("Archery/v_Archery_g01_c01.avi 7\n")
    with pytest.raises(InputError, match="trainlist01.txt, line 1: class 7 is not in classInd.txt"):
        load(video_folder=str(videos), **flags)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"video_folder": "nowhere"}, "--video_folder 'nowhere' is not a folder"),
        (
            {"dataset_name": "kinetics"},
            "'kinetics'; accepted: moving_shapes, arrows.*, or a task of --register",
        ),
        ({"dataset_name": "arrows"}, "--num_channels 3: clips of arrows have one; accepted: 1"),
        ({"dataset_name": "arrows", "channels": 1}, "Arrows of 16 px cannot be drawn"),
        ({"dataset_name": "arrows", "channels": 1, "spacing": True}, "--coordinates physical: clips of arrows have no"),
        (
            {"dataset_name": "arrows", "channels": 1, "frame_stride": 2},
            "--frame_stride 2: clips of arrows.*accepted: 1",
        ),
        ({"video_folder": "a", "volume_file": "b"}, "come from --video_folder and --volume_file; accepted: one of"),
        ({"volume_file": "nowhere.npz"}, "--volume_file nowhere.npz: .*No such file"),
        ({"eval_clips": 0}, "--eval_clips 0; accepted: 1 and above"),
        ({"intensity_range": [3.0, 1.0]}, r"--intensity_range \[3.0, 1.0\]; accepted: two numbers"),
        ({"train_fraction": 0.0}, "--train_fraction 0.0; accepted: above 0, up to 1"),
    ],
)
def test_wrong_data_are_told_before_training(arguments, message):
    with pytest.raises(InputError, match=message):
        load(**arguments)


def test_clips_of_arrows_are_drawn_when_they_are_asked_for():
    request = DataRequest((60, 60), 1, num_frames=5, seed=3)
    clips = load_clips(VideoDataArguments(dataset_name="arrows", max_train_samples=20), request)
    assert (len(clips.train), len(clips.evaluation)) == (20, 10_000) and len(clips.label_names) == 6
    frames, label = Arrows("train", 20, 60, seed=3, num_frames=5)[7]
    clip, number = clips.train[7]
    assert (clip.name, number) == ("train clip 7", label) and np.array_equal(clip.read(np.arange(5)), frames)


def test_clips_of_a_class_that_is_not_trained_are_refused(shapes, tmp_path):
    shutil.copytree(shapes, tmp_path / "videos")
    (tmp_path / "videos" / "validation" / "up").rename(tmp_path / "videos" / "validation" / "zebra")
    with pytest.raises(InputError, match="There are no training clips of zebra"):
        load(video_folder=str(tmp_path / "videos"))


def test_a_folder_without_splits_says_what_is_there(shapes, broken):
    with pytest.raises(InputError, match="has no folder 'test', only train, validation"):
        load(video_folder=str(shapes), eval_split="test")
    with pytest.raises(InputError, match="None of the training clips can be read and has 40 frames"):
        load(video_folder=str(broken), frames=40)


def test_a_corrupt_file_is_named_and_ends_no_run(broken, tmp_path, caplog):
    logging.getLogger("transformers").propagate = True
    flags = ["--video_folder", broken, "--do_train", "--do_eval", "--num_train_epochs", 2]
    metrics = run(tmp_path, *flags)
    text = caplog.text
    for name in ("not_a_video.mp4: cannot be read", "short.mp4: has 3 frames; a clip needs 4", "cut.mp4: "):
        assert name in text
    # The cut file announces all its frames, so that only decoding finds out; the others are never counted.
    assert metrics["eval_samples"] == 14 and metrics["eval_unreadable"] == 1
    assert metrics["eval_accuracy"] * 13 == pytest.approx(round(metrics["eval_accuracy"] * 13))


def test_frames_of_a_clip_are_augmented_alike():
    from training.common.arguments import AugmentationArguments
    from training.data.augmentation import Augmentation

    arguments = AugmentationArguments(
        random_resized_crop=True, crop_padding=2, flip_probability=0.5, rand_augment_ops=2
    )
    frame = np.random.default_rng(0).integers(256, size=(20, 24, 3), dtype=np.uint8)
    augment = Augmentation((16, 16), 3, arguments, seed=0)
    results = [augment(np.stack([frame, frame, frame]), 0, index) for index in range(5)]
    for index, clip in enumerate(results):
        assert clip.shape == (3, 16, 16, 3) and (clip[0] == clip[1]).all() and (clip[0] == clip[2]).all()
        assert (clip[0] == augment(frame, 0, index)).all()
    assert not (results[0] == results[1]).all()


def test_probabilities_of_clips_are_averaged(shapes, tmp_path):
    """Against a loop over clips in float64, from the saved model."""
    from transformers import AutoModelForVideoClassification

    run(tmp_path / "run", "--video_folder", shapes, "--do_train", "--max_steps", 1)
    flags = ["--model_name_or_path", tmp_path / "run", "--video_folder", shapes, "--do_eval", "--frame_stride", 2]
    metrics = video_classification.main(
        [*map(str, flags), "--eval_clips", "3", "--output_dir", str(tmp_path / "eval"), *TINY_RUN]
    )
    model = AutoModelForVideoClassification.from_pretrained(tmp_path / "run").eval().double()
    losses = []
    for path in sorted((shapes / "validation").glob("*/*.mp4")):
        with av.open(str(path)) as container:
            video = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])
        # 16 frames; a clip of 4 with stride 2 spans 7, so that it starts at 0 … 9.
        clips = np.stack([video[start : start + 7 : 2] for start in (0, 5, 9)])
        pixels = torch.from_numpy(clips).permute(0, 1, 4, 2, 3).double() / 127.5 - 1
        with torch.no_grad():
            probability = model(pixels).logits.softmax(1).mean(0)
        losses.append(-probability[model.config.label2id[path.parent.name]].log().item())
    # float32 pixels and logits against float64.
    assert metrics["eval_loss"] == pytest.approx(np.mean(losses), abs=1e-5)


def test_views_of_a_video_are_clips_by_crops():
    """Fifteen of a video whose frames say their number, and whose columns theirs; together or one by one."""
    frames = np.broadcast_to(np.arange(24)[:, None, None], (24, 16, 40))
    columns = np.broadcast_to(np.arange(40), (24, 16, 40))
    clip = ClipArray(np.stack([frames, columns, frames], axis=-1).astype(np.uint8), "numbered")
    settings = [(clip, 0), (clip, 1)], EvaluationView((16, 16), 2, 3), ClipReader(4, 2), 5
    together, apart = EvaluationClips(*settings), EvaluationClips(*settings, averaged=False)
    assert (len(together), len(apart)) == (2, 30)
    views = together[1]["image"]
    assert views.shape == (15, 4, 16, 16, 3)
    # A clip of 4 frames at distance 2 spans 7, so that it begins at 0 … 17.
    starts = [(begin, column) for column in (0, 12, 24) for begin in (0, 4, 9, 13, 17)]
    assert [tuple(map(int, view[0, 0, 0, :2])) for view in views] == starts
    for number, view in enumerate(views):
        example = apart[15 + number]
        assert np.array_equal(example["image"], view) and (example["label"], example["index"]) == (1, 15 + number)


def test_every_view_counts_where_they_are_not_averaged(shapes, tmp_path):
    run(tmp_path / "run", "--video_folder", shapes, "--do_train", "--max_steps", 1)
    flags = ["--model_name_or_path", tmp_path / "run", "--video_folder", shapes, "--do_eval", "--frame_stride", 2]
    flags = [*map(str, flags), "--eval_clips", "2", "--eval_crops", "1", *TINY_RUN]
    losses = {}
    for averaged in ("true", "false"):
        folder = ["--output_dir", str(tmp_path / averaged), "--eval_average_views", averaged]
        losses[averaged] = video_classification.main([*flags, *folder])
    assert losses["false"]["eval_samples"] == 2 * losses["true"]["eval_samples"]
    # The logarithm of a mean probability is no smaller than the mean of the logarithms.
    assert losses["true"]["eval_loss"] <= losses["false"]["eval_loss"] + 1e-6


def test_mean_of_views_is_the_log_of_mean_probabilities():
    logits = torch.randn(6, 5, dtype=torch.float64)
    expected = logits.view(2, 3, 5).softmax(-1).mean(1).log()
    torch.testing.assert_close(average_views(logits, 2).double(), expected, atol=1e-6, rtol=0)


@pytest.mark.slow
def test_a_fresh_process_classifies_a_video_with_the_saved_folder(shapes, tmp_path):
    """The pipeline takes the first frames of a file; a file of just a clip is one that the evaluation sees alike."""
    run(tmp_path / "run", "--video_folder", shapes, "--do_train", "--max_steps", 2)
    folder = tmp_path / "one" / "validation"
    write_video_of_clip(shapes, folder)
    metrics = video_classification.main(
        ["--model_name_or_path", str(tmp_path / "run"), "--video_folder", str(tmp_path / "one"), "--do_eval"]
        + ["--output_dir", str(tmp_path / "eval"), *TINY_RUN]
    )
    code = (
        "import hf_liere, json, sys; from transformers import pipeline; "
        "print(json.dumps(pipeline('video-classification', sys.argv[1], device='cpu')(sys.argv[2])))"
    )
    video = str(folder / "up" / "clip.mp4")
    result = run_warm("-c", code, tmp_path / "run", video, cwd=tmp_path)
    scores = {answer["label"]: answer["score"] for answer in json.loads(result.stdout.splitlines()[-1])}
    assert -np.log(scores["up"]) == pytest.approx(metrics["eval_loss"], abs=1e-5)


def write_video_of_clip(shapes, folder):
    for label in LABELS:
        (folder / label).mkdir(parents=True)
    (folder.parent / "train").mkdir()
    path = sorted((shapes / "validation").glob("*/*.mp4"))[0]
    write_video(folder / "up" / "clip.mp4", COLOR.read(path, [0, 5, 10, 15]))


def test_area_under_the_curve_is_the_rank_statistic():
    stats = pytest.importorskip("scipy.stats")
    generator = np.random.default_rng(0)
    positive = generator.random(60) < 0.3
    scores = np.round(generator.normal(size=60) + positive, 1)
    expected = stats.mannwhitneyu(scores[positive], scores[~positive]).statistic / (positive.sum() * (~positive).sum())
    result = area_under_curve(scores, positive)
    assert result["auc"] == pytest.approx(expected, abs=1e-12)
    assert result["auc_low"] < result["auc"] < result["auc_high"]


def test_balanced_accuracy_is_the_mean_recall_and_one_half_for_a_constant_answer():
    generator = np.random.default_rng(0)
    positive, answers = generator.random(200) < 0.2, generator.random(200) < 0.4
    result = balanced_accuracy(answers == positive, positive)
    pairs = list(zip(positive.tolist(), answers.tolist()))
    sensitivity = pairs.count((True, True)) / positive.sum()
    specificity = pairs.count((False, False)) / (~positive).sum()
    assert result["balanced_accuracy"] == pytest.approx((sensitivity + specificity) / 2, abs=1e-12)
    # Means of 40 and of 160 draws: against the standard error of their mean.
    rates = zip((sensitivity, specificity), (positive.sum(), (~positive).sum()))
    error = np.sqrt(sum(rate * (1 - rate) / number for rate, number in rates)) / 2
    width = result["balanced_accuracy_high"] - result["balanced_accuracy_low"]
    # Quantiles of a thousand resamples are within a tenth of the width.
    assert width == pytest.approx(2 * 1.96 * error, rel=0.1)
    assert set(balanced_accuracy(~positive, positive).values()) == {0.5}


def test_real_volumes_are_trained_and_measured_by_their_auc(shared, tmp_path):
    flags = ["--volume_file", shared / "data" / "mito_em3d" / "mito_em3d.npz", "--num_channels", 1, "--do_train"]
    flags += ["--do_eval", "--max_train_samples", 16, "--max_eval_samples", 40, "--eval_split", "test"]
    metrics = run(tmp_path, *flags)
    assert 0 <= metrics["eval_auc_low"] <= metrics["eval_auc"] <= metrics["eval_auc_high"] <= 1
    assert 0 <= metrics["eval_balanced_accuracy"] <= 1 and metrics["eval_samples"] == 40
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["num_channels"] == 1 and len(config["id2label"]) == 2


def test_a_smaller_fraction_lies_in_a_larger_one():
    from training.data.sources import take_fraction

    parts = [take_fraction(list(range(50)), fraction, seed=3) for fraction in (0.2, 0.5, 1.0)]
    assert isinstance(parts[0], Subset) and [len(part) for part in parts] == [10, 25, 50]
    assert set(parts[0].indices) < set(parts[1].indices)


def write_nifti(path, volume, spacing, measure="mm"):
    """(slices, height, width) with distances of slices, rows and columns, which NIfTI lists the other way round."""
    nibabel = pytest.importorskip("nibabel")
    image = nibabel.Nifti1Image(volume.transpose(2, 1, 0), np.diag([*spacing[::-1], 1.0]))
    image.header.set_xyzt_units(measure, "sec")
    path.parent.mkdir(parents=True, exist_ok=True)
    image.to_filename(path)


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
    with av.open(str(tmp_path / name), "w") as container:
        stream = container.add_stream("mpeg4", rate=10)
        stream.width = stream.height = 16
        stream.time_base = stream.codec_context.time_base = Fraction(1, 10)
        for time in tenths:
            frame = av.VideoFrame.from_ndarray(np.full((16, 16, 3), 10 * time, dtype=np.uint8), format="rgb24")
            frame.pts, frame.time_base = time, Fraction(1, 10)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
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
    clips = load(volume_file=str(tmp_path / "some.npz"), channels=1, spacing=True)
    assert [clip.spacing for clip, _ in clips.train] == [(3.0, 1.0, 1.0), (2.0, 1.0, 1.0), (5.0, 0.5, 1.0)]
    assert [clip.spacing for clip, _ in clips.evaluation] == [(4.0, 1.0, 2.0)] * 3
    for spacing, message in (
        ({}, "neither train_spacing .* nor spacing"),
        ({"spacing": np.ones(2)}, r"spacing has shape \(2,\); accepted: \(3,\) or \(3, 3\)"),
        ({"train_spacing": own - 3}, r"train_spacing has the spacing \[0.0, -2.0, -2.0\]"),
    ):
        np.savez(tmp_path / "none.npz", **arrays, **spacing)
        with pytest.raises(InputError, match=message):
            load(volume_file=str(tmp_path / "none.npz"), channels=1, spacing=True)


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
