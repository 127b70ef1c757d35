"""Streams of training images: every image once, the same after resuming, and shares of several processes."""

import json

import datasets
import numpy as np
import pytest
import torch
from training_helpers import main, train, train_with_torchrun, write_parquet

from training.common.arguments import AugmentationArguments, DataArguments, InputError, RunArguments
from training.data.augmentation import Augmentation
from training.data.sources import PARTS, DataRequest
from training.data.streaming import StreamedImages, open_stream


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    return [write_parquet(folder / f"train{part}.parquet", 10 + 2 * part, seed=part) for part in range(4)]


@pytest.fixture(scope="module")
def validation(tmp_path_factory):
    return write_parquet(tmp_path_factory.mktemp("data") / "test.parquet", 13, seed=9)


def build_flags(shards, validation):
    return ["--streaming", "--train_files", *shards, "--validation_files", validation, "--max_train_samples", 52]


class State:
    epoch = 0.0


TRAINING = DataRequest((16, 16), parts=PARTS[:1])


class PlaceOfProcess:
    """Training arguments as another process would have them."""

    def __init__(self, args, rank, world):
        self.args = args
        self.process_index = rank
        self.world_size = world

    def __getattr__(self, name):
        return getattr(self.args, name)


def images_of(shards, epoch=0, batch=4, workers=0, rank=0, world=1, **augmentation):
    arguments = DataArguments(streaming=True, train_files=shards, max_train_samples=52)
    _, stream = open_stream(arguments, TRAINING)
    args = RunArguments(output_dir="unused", use_cpu=True, do_train=True, seed=0, dataloader_num_workers=workers)
    args.per_device_train_batch_size = batch
    # What torchrun would tell.
    place = PlaceOfProcess(args, rank, world)
    augment = Augmentation((16, 16), 3, AugmentationArguments(**augmentation), args.order_seed)
    images = StreamedImages(stream, [0, 1, 2], 3, augment, place)
    state = State()
    state.epoch = epoch
    images.trainer_state = lambda: state
    return images


def pixels(examples):
    return sorted(example["image"].tobytes() for example in examples)


def originals(shards):
    table = datasets.load_dataset("parquet", data_files=shards, split="train")
    return sorted(np.asarray(row["image"]).tobytes() for row in table)


def test_an_epoch_holds_every_image_once_in_an_order_of_its_own(shards):
    first, again, second = (list(images_of(shards, epoch)) for epoch in (0, 0, 1))
    assert len(first) == 52 and pixels(first) == originals(shards) == pixels(second)
    assert [e["image"].tobytes() for e in first] == [e["image"].tobytes() for e in again]
    assert [e["image"].tobytes() for e in first] != [e["image"].tobytes() for e in second]
    assert len({example["key"] for example in first}) == 52 and first[0]["key"][0] == 0 and second[0]["key"][0] == 1


def test_views_of_an_image_follow_each_other(shards):
    once, views = (list(images_of(shards, repeated_augmentation=repeats)) for repeats in (1, 3))
    assert len(views) == len({example["key"] for example in views}) == 52
    assert [view["image"].tobytes() for view in views] == [
        image.tobytes() for example in once for image in [example["image"]] * 3
    ][:52]


def test_processes_read_different_images_in_as_many_steps(shards):
    parts = [list(images_of(shards, batch=4, rank=rank, world=2)) for rank in (0, 1)]
    # Shards of 10 + 14 and 12 + 16 images, or another pair; seven steps of eight images hold all 52.
    assert (
        [len(part) for part in parts]
        == [28, 28]
        == [len(images_of(shards, batch=4, rank=rank, world=2)) for rank in (0, 1)]
    )
    assert not set(pixels(parts[0])) & set(pixels(parts[1]))
    keys = [example["key"] for part in parts for example in part]
    assert len(set(keys)) == len(keys)


def test_workers_share_the_steps(shards):
    images = images_of(shards, batch=4, workers=2)
    loader = torch.utils.data.DataLoader(images, batch_size=4, num_workers=2, collate_fn=list)
    batches = list(loader)
    assert [len(batch) for batch in batches] == [4] * 13
    with pytest.raises(
        InputError, match="--dataloader_num_workers 5: each process reads 4 shards .*; accepted: up to 4"
    ):
        images_of(shards, workers=5)


@pytest.mark.slow
def test_a_streamed_run_is_evaluated_as_another(shards, validation, tmp_path):
    flags = [*build_flags(shards, validation), "--do_eval", "--num_train_epochs", 2, "--crop_padding", 2]
    metrics = train(tmp_path / "whole", *flags)
    assert metrics["eval_samples"] == 13
    assert json.loads((tmp_path / "whole" / "trainer_state.json").read_text())["global_step"] == 14
    plain = ["--model_name_or_path", str(tmp_path / "whole"), "--validation_files", validation, "--do_eval"]
    plain += ["--use_cpu", "true", "--disable_tqdm", "true", "--output_dir", str(tmp_path / "plain")]
    assert main(plain)["eval_loss"] == metrics["eval_loss"]


@pytest.mark.slow
def test_two_processes_stream(shards, validation, tmp_path):
    train_with_torchrun(tmp_path, *build_flags(shards, validation), "--do_eval", "--per_device_train_batch_size", 4)
    state = json.loads((tmp_path / "trainer_state.json").read_text())
    assert state["global_step"] == 21
    assert json.loads((tmp_path / "eval_results.json").read_text())["eval_samples"] == 13


def test_sizes_are_counted_and_what_cannot_be_streamed_is_said(shards, tmp_path):
    for limit, size in ((None, 52), (30, 30), (99, 52)):
        _, stream = open_stream(DataArguments(streaming=True, train_files=shards, max_train_samples=limit), TRAINING)
        assert stream.size == size
    with pytest.raises(InputError, match="--streaming cannot be combined with --train_fraction or --validation"):
        DataArguments(streaming=True, train_fraction=0.5)
    with pytest.raises(InputError, match="--streaming reads --dataset_name or parquet files"):
        open_stream(DataArguments(streaming=True, image_folder="x"), TRAINING)
    table = datasets.load_dataset("parquet", data_files=shards, split="train")
    table.cast_column("label", datasets.Value("int64")).to_parquet(tmp_path / "numbers.parquet")
    with pytest.raises(InputError, match="column 'label' has type Value, whose classes .*accepted: ClassLabel"):
        open_stream(
            DataArguments(streaming=True, train_files=[str(tmp_path / "numbers.parquet")], label_column_name="label"),
            TRAINING,
        )
