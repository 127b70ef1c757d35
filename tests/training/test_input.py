"""Recipes, flags and data sets of training/: what is inferred, what overrides what, and how mistakes are told."""

import dataclasses
import gc
import json
import re
from pathlib import Path

import datasets
import huggingface_hub
import numpy as np
import pytest
import torch
from checkout import ROOT
from huggingface_hub.dataclasses import type_validator
from PIL import Image
from training_helpers import TINY_MODEL, TINY_RUN, main, pictures, write_images_folder, write_parquet

from hf_liere.storage.client import HubError
from training.common.arguments import (
    AugmentationArguments,
    DataArguments,
    InputError,
    ModelArguments,
    RunArguments,
    TokensModelArguments,
    VideoModelArguments,
    architecture_fields,
)
from training.common.command_line import parse_arguments
from training.data import images
from training.data.images import load_images
from training.data.sources import PARTS, DataRequest
from training.data.tables import infer_columns
from training.engine import saving


CLASSES = (ModelArguments, DataArguments, AugmentationArguments, RunArguments)


def parse(*arguments):
    return parse_arguments([*map(str, arguments), "--output_dir", "unused", "--use_cpu", "true"], CLASSES)


def load(*, size=(16, 16), channels=3, evaluate=True, **arguments):
    return load_images(DataArguments(**arguments), DataRequest(size, channels, PARTS[: 1 + evaluate]))


@pytest.fixture(scope="module")
def parquet(tmp_path_factory):
    return write_parquet(tmp_path_factory.mktemp("data") / "train.parquet", 12)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="needs a machine without an accelerator")
def test_a_cpu_takes_bfloat16_without_further_flags():
    arguments = parse_arguments(["--do_train", "--bf16", "true", "--output_dir", "unused"], CLASSES)[-1]
    assert arguments.bf16 and arguments.device.type == "cpu"


def test_the_command_line_overrides_the_recipe(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "learning_rate: 2e-3\nhidden_size: 48\nblock_size: null\nimage_mean: [0.1, 0.2, 0.3]\ndo_train: true\n"
        "lr_scheduler_type: warmup_stable_decay\nlr_scheduler_kwargs: {num_decay_steps: 5}\nqkv_bias: false\n"
    )
    model, data, _, training = parse(recipe)
    assert model.architecture() == {"hidden_size": 48, "qkv_bias": False}
    assert training.learning_rate == 2e-3 and training.lr_scheduler_kwargs == {"num_decay_steps": 5}
    assert data.image_mean == [0.1, 0.2, 0.3]
    for flags in (("--recipe", recipe), (f"--recipe={recipe}",)):
        model, data, _, training = parse(
            "--learning_rate",
            1e-4,
            "--hidden_size=32",
            "--image_mean",
            0.5,
            0.5,
            0.5,
            "--layer_norm_eps",
            "1e-6",
            *flags,
        )
        assert model.architecture() == {"hidden_size": 32, "qkv_bias": False, "layer_norm_eps": 1e-6}
        assert training.learning_rate == 1e-4 and data.image_mean == [0.5, 0.5, 0.5]


def test_sizes_of_two_sides_are_lists():
    for text in ("96,128", "[96,128]", "[96, 128]"):
        assert parse("--do_train", "--image_size", text)[0].architecture() == {"image_size": [96, 128]}


def test_every_field_of_the_configuration_is_a_flag():
    fields = [field.name for field in dataclasses.fields(ModelArguments)]
    assert {"position_encoding", "block_size", "pooling", "drop_path_rate", "patch_size"} <= set(fields)
    assert not {"id2label", "format_version", "architectures"} & set(fields)


@pytest.mark.parametrize(
    "columns, image, label",
    [
        ({"image": datasets.Image(), "label": datasets.ClassLabel(2)}, "image", "label"),
        ({"img": datasets.Image(), "fine_label": datasets.ClassLabel(2)}, "img", "fine_label"),
        ({"photo": datasets.Image(), "kind": datasets.ClassLabel(2), "id": datasets.Value("int64")}, "photo", "kind"),
        ({"image": datasets.Value("string"), "label": datasets.Value("int64")}, "image", "label"),
        ({"image": datasets.Image(), "mask": datasets.Image(), "target": datasets.Value("int64")}, "image", "target"),
    ],
)
def test_columns_are_inferred(columns, image, label):
    features = datasets.Features(columns)
    assert infer_columns(features, DataArguments()) == (image, label)


def test_columns_can_be_given():
    features = datasets.Features({"a": datasets.Image(), "b": datasets.Image(), "fine": datasets.ClassLabel(2)})
    assert infer_columns(features, DataArguments(image_column_name="b")) == ("b", "fine")
    with pytest.raises(InputError, match=r"several image columns \(a, b\).*--image_column_name.*fine \(ClassLabel\)"):
        infer_columns(features, DataArguments())
    with pytest.raises(InputError, match="--image_column_name 'c': there is no such column; the data set has a "):
        infer_columns(features, DataArguments(image_column_name="c"))
    with pytest.raises(InputError, match="no label column; name one by --label_column_name"):
        infer_columns(datasets.Features({"a": datasets.Image()}), DataArguments())


def test_a_folder_of_images(tmp_path):
    images = load(image_folder=write_images_folder(tmp_path, {"train": 6, "validation": 4}))
    assert images.label_names == ["cat", "dog"] and (len(images.train), len(images.evaluation)) == (6, 4)
    pixels, label = images.train[0]
    assert pixels.shape == (16, 16, 3) and pixels.dtype == np.uint8 and label in (0, 1)


def test_image_folders_that_hold_no_classes_or_untrained_ones(tmp_path):
    (tmp_path / "empty").mkdir()
    write_images_folder(tmp_path / "one", {"train": 3}, classes=("cat",))
    write_images_folder(tmp_path / "more", {"train": 6})
    write_images_folder(tmp_path / "more", {"validation": 6}, classes=("cat", "dog", "zebra"))
    for name, message in (
        ("empty", "empty' cannot be read .EmptyDatasetError: The directory .* doesn't contain any data files"),
        ("one", "one' has no class folders: its images are in cat; accepted: at least two classes"),
        ("more", "more' has no images of zebra in the split 'train'; accepted: classes with training images"),
    ):
        with pytest.raises(InputError, match=message):
            load(image_folder=str(tmp_path / name), evaluate=name == "more")


def test_a_corrupt_image_of_a_folder_is_named_by_its_file(tmp_path):
    folder = write_images_folder(tmp_path, {"train": 6})
    broken = tmp_path / "train" / "dog" / "3.png"
    broken.write_bytes(broken.read_bytes()[:60])
    with pytest.raises(InputError, match=f"The image {re.escape(str(broken))} cannot be decoded"):
        load(image_folder=folder, evaluate=False)


@pytest.mark.parametrize("streaming", [False, True])
def test_files_that_hold_no_table(streaming, tmp_path):
    (tmp_path / "text.parquet").write_text("no parquet at all")
    with pytest.raises(InputError, match="text.parquet cannot be read .ArrowInvalid: Parquet magic bytes not found"):
        run(
            "--output_dir",
            tmp_path / "run",
            "--train_files",
            tmp_path / "text.parquet",
            "--streaming",
            "true" if streaming else "false",
        )


def test_a_table_without_rows_and_a_json_file_that_ends_early(tmp_path):
    empty = write_rows(tmp_path / "empty.parquet", [], [], datasets.ClassLabel(2))
    with pytest.raises(InputError, match="empty.parquet cannot be read .it has no rows"):
        load(train_files=[str(empty)], evaluate=False)
    (tmp_path / "bad.json").write_text('{"image": ')
    with pytest.raises(InputError, match="bad.json cannot be read .*JSON"):
        load(train_files=[str(tmp_path / "bad.json")], evaluate=False)


@pytest.mark.parametrize("streaming", [False, True])
def test_a_data_set_that_cannot_be_reached(streaming, tmp_path, monkeypatch):
    for settings in (datasets.config, huggingface_hub.constants):
        monkeypatch.setattr(settings, "HF_HUB_OFFLINE", True)
    flags = ["--dataset_name", "nobody/nothing", "--output_dir", tmp_path / "run"]
    with pytest.raises(InputError, match="--dataset_name 'nobody/nothing' cannot be read .*Offline"):
        run(*flags, "--streaming", "true" if streaming else "false")


def test_a_json_file_names_images_beside_itself(tmp_path):
    picture = pictures(1)[0]
    (tmp_path / "images").mkdir()
    picture.save(tmp_path / "images" / "one.png")
    rows = [{"image": "images/one.png", "label": "pig"}, {"image": "images/one.png", "label": "cow"}]
    (tmp_path / "train.json").write_text("\n".join(map(json.dumps, rows)))
    images = load(train_files=[str(tmp_path / "train.json")], evaluate=False)
    assert images.label_names == ["cow", "pig"] and [images.train[i][1] for i in range(2)] == [1, 0]
    assert np.array_equal(images.train[0][0], np.asarray(picture))


def test_a_validation_split_can_be_held_out(parquet):
    images = load(train_files=[parquet], validation_fraction=0.25)
    assert (len(images.train), len(images.evaluation)) == (9, 3)
    with pytest.raises(InputError, match="no split to evaluate among train; accepted: --eval_split"):
        load(train_files=[parquet])


def test_images_beyond_the_cache_are_decoded_on_access(parquet):
    cached, lazy = (
        load(train_files=[parquet], evaluate=False, image_cache_gigabytes=gigabytes) for gigabytes in (1, 2000 / 2**30)
    )
    assert len(cached.train.cache) == 12 and not lazy.train.cache
    for index in range(12):
        assert np.array_equal(cached.train[index][0], lazy.train[index][0])


@pytest.mark.parametrize("name, processes", [("ddp", 8), ("fsdp", 8), ("deepspeed_zero2", 8), ("multi_node", 16)])
def test_accelerate_reads_the_launch_files(name, processes):
    from accelerate.commands.config.config_args import load_config_from_file

    config = load_config_from_file(str(ROOT / "training" / "recipes" / "accelerate" / f"{name}.yaml"))
    assert config.num_processes == processes and config.mixed_precision == "bf16"


def run(*flags):
    return main(["--do_train", *TINY_MODEL, *TINY_RUN, *map(str, flags)])


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--image_size", 18], r"--image_size 18×18|\(18, 18\) is not divisible into patches of \(4, 4\)"),
        (["--num_channels", 4], "--num_channels 4: image files are read with 1 or 3 channels"),
        (
            ["--num_channels", 1],
            "row 0, column 'image', has mode RGB, but the model takes num_channels=1; accepted: grey",
        ),
        (["--num_labels", 7], "--num_labels 7 contradicts the data set, which has 3 labels: class0, class1, class2"),
        (["--train_split", "training"], "--train_split 'training': there is no such split; accepted: train"),
        (["--do_eval", "--eval_split", "tset"], "--eval_split 'tset': there is no such split; accepted: train"),
        (["--image_column_name", "pixels"], r"--image_column_name 'pixels'.*has image \(Image\), label \(ClassLabel\)"),
        (["--position_encoding", "rope"], "position_encoding.*rope_mixed"),
        (["--block_size", 5, "--position_encoding", "comrope_ld"], "block_size=5 must divide head_dim=8"),
        (["--coordinates", "physical", "--physical_unit", 8], "--coordinates physical: images have no pixel spacing"),
        (["--leraning_rate", 1], "There is no flag '--leraning_rate'; the closest is 'learning_rate'"),
        (["--flip_probability", 1.5], "--flip_probability 1.5 is not a probability; accepted: 0 … 1"),
        (["--learning_rate", "nan"], "--learning_rate nan; accepted: 0 and above"),
        (["--learning_rate", -1], "--learning_rate -1.0; accepted: 0 and above"),
        (["--weight_decay", "inf"], "--weight_decay inf; accepted: 0 and above"),
        (["--per_device_train_batch_size", 0], "--per_device_train_batch_size 0; accepted: 1 and above"),
        (["--total_train_batch_size", 0], "--total_train_batch_size 0 cannot be shared by 1 processes"),
        (["--num_train_epochs", 0], "--num_train_epochs 0.0; accepted: numbers above 0"),
        (["--warmup_steps", -1], "warmup_steps"),
        (["--repeated_augmentation", 0], "--repeated_augmentation 0; accepted: 1 and above"),
        (["--image_mean", 0.5], "--image_mean .* has 1 values; accepted: one per channel, 3"),
        (["--image_folder", "nowhere"], "data come from image_folder and train_files; accepted: one of"),
        (["--resume_from_checkpoint", "last"], "contains no complete checkpoint"),
        (["--dataloader_drop_last", "true"], "--dataloader_drop_last would also drop images from the evaluation"),
        (["--logging_nan_inf_filter", "true"], "--logging_nan_inf_filter must stay off"),
    ],
)
def test_mistakes_are_told_before_training(flags, message, parquet, tmp_path):
    with pytest.raises(InputError, match=message):
        run("--train_files", parquet, "--output_dir", tmp_path / "run", *flags)
    assert not (tmp_path / "run" / "model.safetensors").exists()


def test_checkpoints_that_are_not_there(parquet, tmp_path, monkeypatch):
    """Neither is the Hub asked for a folder, nor does its answer come as a traceback."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "outputs" / "empty").mkdir(parents=True)
    for name, message in (
        ("outputs/typo", "--model_name_or_path outputs/typo: no such file or directory; a repository on the Hub would"),
        (str(tmp_path / "typo"), "typo: no such file or directory"),
        ("./typo", "./typo: no such file or directory"),
        ("outputs/empty", "--model_name_or_path outputs/empty cannot be loaded: "),
        ("nobody/nothing", "nobody/nothing"),
    ):
        with pytest.raises((InputError, HubError), match=message):
            main(["--model_name_or_path", name, "--train_files", parquet, "--do_train", "--output_dir", "run"])


def test_a_checkpoint_without_weights(parquet, tmp_path):
    ModelArguments.config_class(hidden_size=16, num_attention_heads=2).save_pretrained(tmp_path / "bare")
    flags = ["--train_files", parquet, "--do_train", "--output_dir", str(tmp_path / "run")]
    with pytest.raises(InputError, match="bare cannot be loaded: .*model.safetensors"):
        main(["--model_name_or_path", str(tmp_path / "bare"), *flags])


def test_a_missing_recipe_and_an_unknown_key_in_one(tmp_path):
    with pytest.raises(InputError, match="There is no recipe 'nothing.yaml'"):
        main(["nothing.yaml", "--output_dir", str(tmp_path)])
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("do_train: true\nlearning_rate: 1e-3: 2\n")
    with pytest.raises(InputError, match="mine.yaml, line 2, column 20: this is not yaml .mapping values"):
        main([str(recipe), "--output_dir", str(tmp_path)])
    recipe.write_text("weight_decya: 0.1\n")
    with pytest.raises(InputError, match="no key in mine.yaml 'weight_decya'; the closest is 'weight_decay'"):
        main([str(recipe), "--output_dir", str(tmp_path)])


def test_missing_data_and_missing_columns(tmp_path):
    with pytest.raises(InputError, match="There are no data; accepted: one of --dataset_name"):
        run("--output_dir", tmp_path / "run")
    with pytest.raises(InputError, match="There is no file 'nothing.parquet'"):
        run("--output_dir", tmp_path / "run", "--train_files", "nothing.parquet")
    table = datasets.Dataset.from_dict({"text": ["a"], "label": [0]})
    table.to_parquet(tmp_path / "text.parquet")
    with pytest.raises(InputError, match=r"no image column; name one by.*columns are text \(string\), label \(int64\)"):
        run("--output_dir", tmp_path / "run", "--train_files", tmp_path / "text.parquet")


def write_rows(path, images, labels, label_feature):
    features = datasets.Features({"image": datasets.Image(), "label": label_feature})
    datasets.Dataset.from_dict({"image": images, "label": labels}, features=features).to_parquet(path)
    return path


def test_an_image_that_cannot_be_decoded_is_named(tmp_path):
    whole = tmp_path / "whole.png"
    pictures(1)[0].save(whole)
    images = [{"bytes": whole.read_bytes(), "path": None}] * 3 + [{"bytes": b"\x89PNG no image", "path": None}]
    path = write_rows(tmp_path / "train.parquet", images, [0, 1, 0, 1], datasets.ClassLabel(2))
    with pytest.raises(InputError, match="image in row 3, column 'image', cannot be decoded"):
        run("--output_dir", tmp_path / "run", "--train_files", path)


def test_sixteen_bit_images_are_refused(tmp_path):
    deep = Image.fromarray(np.zeros((16, 16), np.uint16))
    path = write_rows(tmp_path / "train.parquet", [*pictures(1), deep], [0, 1], datasets.ClassLabel(2))
    with pytest.raises(InputError, match="image in row 1, column 'image', has mode I;16; accepted are 8-bit"):
        run("--output_dir", tmp_path / "run", "--train_files", path)


def test_images_of_other_modes_are_found_before_training_decodes_them(tmp_path, monkeypatch):
    """Of more images than the cache holds, without decoding those that are right."""
    folder = write_images_folder(tmp_path, {"train": 70})
    deep = tmp_path / "train" / "dog" / "69.png"
    Image.fromarray(np.zeros((16, 16), np.uint16)).save(deep)
    decoded = []
    decode = images.DecodedImages.decode
    monkeypatch.setattr(images.DecodedImages, "decode", lambda *given: decoded.append(given[2]) or decode(*given))
    with pytest.raises(InputError, match=f"The image {re.escape(str(deep))} has mode I;16; accepted are 8-bit"):
        load(image_folder=folder, evaluate=False, image_cache_gigabytes=0)
    assert len(decoded) == 64 + 1
    monkeypatch.setattr(images, "HEADER_SECONDS", 0)
    assert len(load(image_folder=folder, evaluate=False, image_cache_gigabytes=0).train) == 70


@pytest.mark.filterwarnings("error::ResourceWarning", "error::pytest.PytestUnraisableExceptionWarning")
def test_animations_leave_no_file_open(tmp_path):
    folder = write_images_folder(tmp_path, {"train": 2})
    for name in ("cat", "dog"):
        frames = pictures(3)
        frames[0].save(tmp_path / "train" / name / "moving.gif", save_all=True, append_images=frames[1:])
    assert len(load(image_folder=folder, evaluate=False).train) == 4
    gc.collect()


@pytest.mark.parametrize(
    "labels, message",
    [
        ([0, 1, -1], "contains the label -1; accepted: 0 and above"),
        ([0.5, 1.5, 2.5], r"contains \[0.5, 1.5, 2.5\].*accepted: class numbers or names"),
    ],
)
def test_labels_out_of_range(labels, message, tmp_path):
    feature = datasets.Value("int64" if isinstance(labels[0], int) else "float32")
    path = write_rows(tmp_path / "train.parquet", pictures(3), labels, feature)
    with pytest.raises(InputError, match=message):
        run("--output_dir", tmp_path / "run", "--train_files", path)


def test_labels_that_training_never_names(tmp_path, parquet):
    train = write_rows(tmp_path / "train.parquet", pictures(3), [0, 1, 1], datasets.Value("int64"))
    test = write_rows(tmp_path / "test.parquet", pictures(3), [0, 1, 4], datasets.Value("int64"))
    flags = ("--do_eval", "--output_dir", tmp_path / "run", "--train_files", train, "--validation_files")
    with pytest.raises(
        InputError, match="evaluation data have the label 4 in row 2, column 'label'; accepted: 2 classes"
    ):
        run(*flags, test)
    unlabelled = write_rows(tmp_path / "hidden.parquet", pictures(2), [None, 0], datasets.ClassLabel(names=["0", "1"]))
    with pytest.raises(InputError, match="evaluation data have the label None in row 0"):
        run(*flags, unlabelled)
    with pytest.raises(InputError, match="have the classes class0, class1, class2; accepted: 0, 1"):
        run(*flags, parquet)


def test_arrows_need_whole_cells_and_known_splits(tmp_path):
    arrows = ("--output_dir", tmp_path / "run", "--dataset_name", "arrows")
    with pytest.raises(InputError, match="Arrows of 100 px cannot be drawn; accepted: multiples"):
        run(*arrows, "--image_size", 100)
    with pytest.raises(InputError, match="no split 'dev'; accepted: train, validation, test"):
        run(*arrows, "--image_size", 108, "--do_eval", "--eval_split", "dev")


@pytest.mark.parametrize("found", ["model.safetensors", "checkpoint-7", "eval_results.json"])
def test_another_run_is_not_overwritten(found, tmp_path, parquet):
    other = tmp_path / found
    other.mkdir() if found.startswith("checkpoint") else other.write_text("{}")
    with pytest.raises(InputError, match=f"contains another run \\({found}\\); accepted: another folder, --resume"):
        run("--train_files", parquet, "--output_dir", tmp_path)
    assert Path(other).exists()


def test_several_numbers_after_a_field_are_a_list():
    model, *_ = parse(
        "--physical_unit", "32", "32", "32.5", "--image_size", "96", "128", "--hidden_size", "64", "--do_eval"
    )
    assert model.architecture() == {"physical_unit": [32, 32, 32.5], "image_size": [96, 128], "hidden_size": 64}
    model, *_ = parse("--physical_unit", "[32,32,32]", "--do_eval")
    assert model.architecture() == {"physical_unit": [32, 32, 32]}


@pytest.mark.parametrize(
    "kind, name, given, value",
    [
        (ModelArguments, "spins", ["1"], [1]),
        (ModelArguments, "spins", ["1", "2"], [1, 2]),
        (ModelArguments, "position_table_size", ["8", "8"], [8, 8]),
        (ModelArguments, "image_size", ["96"], 96),
        (TokensModelArguments, "position_table_size", ["16"], [16]),
        (TokensModelArguments, "position_origin", ["-1.5", "0", "2e-3"], [-1.5, 0, 2e-3]),
        (TokensModelArguments, "position_scale", ["0.5"], 0.5),
        (VideoModelArguments, "physical_unit", ["12", "8", "8"], [12, 8, 8]),
        (VideoModelArguments, "patch_size", ["8,16"], [8, 16]),
    ],
)
def test_lists_on_the_command_line_have_the_type_of_their_field(kind, name, given, value):
    """The strict types of the configurations are huggingface_hub's."""
    model, _ = parse_arguments(
        [f"--{name}", *given, "--output_dir", "unused", "--use_cpu", "true", "--do_eval"], (kind, RunArguments)
    )
    assert model.architecture() == {name: value} and type(model.architecture()[name]) is type(value)
    type_validator(name, value, architecture_fields(kind.config_class)[name].type)


def test_values_that_a_flag_does_not_take(capsys):
    """One line, without the usage of all flags."""
    for given, message in (
        (["--seed", "x"], "argument --seed: invalid int value: 'x'"),
        (["--image_size"], "argument --image_size.*: expected one argument"),
        (["--hidden_size", "64", "wide"], "'wide' follows a flag that takes no further value"),
        (["--hidden_sise", "64"], "There is no flag '--hidden_sise'; the closest is 'hidden_size'"),
        (["--positon-encoding", "liere"], "There is no flag '--positon-encoding'; the closest is 'position_encoding'"),
        (["--folded_grids", "[[7,7]]"], "There is no flag '--folded_grids'"),
        (["--zzz"], "There is no flag '--zzz'; --help and --help_all list what is accepted"),
    ):
        with pytest.raises(InputError, match=message):
            parse(*given, "--do_eval")
    assert capsys.readouterr() == ("", "")


def test_the_closest_recipe_is_named():
    with pytest.raises(InputError, match="no recipe 'training/recipes/arrows-mni.yaml'; the closest is 'arrows_mini'"):
        parse("--recipe", "training/recipes/arrows-mni.yaml")


def test_flags_without_what_they_need(monkeypatch):
    for following in ([], ["--do_train"]):
        with pytest.raises(InputError, match="--resume_from_checkpoint needs a value; accepted: last"):
            parse_arguments(["--output_dir", "unused", "--resume_from_checkpoint", *following], CLASSES)
    monkeypatch.setattr("training.common.arguments.get_available_reporting_integrations", lambda: ["tensorboard"])
    with pytest.raises(InputError, match="--report_to wandb is not installed .*accepted here: tensorboard, none"):
        parse("--report_to", "wandb", "--do_eval")
    with pytest.raises(InputError, match="--report_to wandbb is unknown"):
        parse("--report_to", "wandbb", "--do_eval")


def test_windows_opens_no_folders(tmp_path, monkeypatch):
    """There `os.open` refuses folders, and `os.fsync` descriptors that only read."""
    (tmp_path / "file").write_bytes(b"content")
    opened = []
    monkeypatch.setattr(saving.os, "name", "nt")
    monkeypatch.setattr(saving.os, "open", lambda path, flags: opened.append((path, flags)) or 0)
    monkeypatch.setattr(saving.os, "fsync", lambda descriptor: None)
    monkeypatch.setattr(saving.os, "close", lambda descriptor: None)
    for path in (tmp_path, tmp_path / "file"):
        saving._flush(path)
    assert opened == [(tmp_path / "file", saving.os.O_RDWR)]
