"""Clips out of real files, and whole runs on them: what is read, what is left out, and what does not change a run."""

import json
import logging
import shutil

import av
import numpy as np
import pytest
import torch
from checkout import ROOT
from clip_files import cut_frames, numbered_frames
from fresh_process import run_warm
from training_helpers import TINY_MODEL, TINY_RUN

from hf_liere.reading.clips import FrameReader
from training import video_classification
from training.common.arguments import AugmentationArguments, InputError
from training.data.arrows import Arrows
from training.data.augmentation import Augmentation, EvaluationView
from training.data.clips import ClipArray, ClipReader, EvaluationClips
from training.data.moving_shapes import LABELS, frames, write_moving_shapes, write_video
from training.data.sources import DataRequest, Subset
from training.data.video_data import VideoDataArguments, load_clips


SCRIPT = ROOT / "training" / "video_classification.py"
TINY_CLIP = [*TINY_MODEL, "--num_frames", "4", "--patch_size", "8"]
COLOR, GREY = FrameReader(3), FrameReader(1)


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
def trained(shapes, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained") / "run"
    run(folder, "--video_folder", shapes, "--do_train", "--max_steps", 1)
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


def test_probabilities_of_clips_are_averaged(trained, shapes, tmp_path):
    """Against a loop over clips in float64, from the saved model."""
    from transformers import AutoModelForVideoClassification

    flags = ["--model_name_or_path", trained, "--video_folder", shapes, "--do_eval", "--frame_stride", 2]
    metrics = video_classification.main(
        [*map(str, flags), "--eval_clips", "3", "--output_dir", str(tmp_path / "eval"), *TINY_RUN]
    )
    model = AutoModelForVideoClassification.from_pretrained(trained).eval().double()
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


def test_every_view_counts_where_they_are_not_averaged(trained, shapes, tmp_path):
    flags = ["--model_name_or_path", trained, "--video_folder", shapes, "--do_eval", "--frame_stride", 2]
    flags = [*map(str, flags), "--eval_clips", "2", "--eval_crops", "1", *TINY_RUN]
    losses = {}
    for averaged in ("true", "false"):
        folder = ["--output_dir", str(tmp_path / averaged), "--eval_average_views", averaged]
        losses[averaged] = video_classification.main([*flags, *folder])
    assert losses["false"]["eval_samples"] == 2 * losses["true"]["eval_samples"]
    # The logarithm of a mean probability is no smaller than the mean of the logarithms.
    assert losses["true"]["eval_loss"] <= losses["false"]["eval_loss"] + 1e-6


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
