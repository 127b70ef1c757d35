"""Data sets of images: what is inferred, what is read, and how mistakes are told before training."""

import gc
import json
import pickle
import re
import warnings
from pathlib import Path

import datasets
import huggingface_hub
import numpy as np
import pytest
from PIL import Image
from training_helpers import TINY_MODEL, TINY_RUN, main, pictures, write_images_folder, write_parquet

from hf_liere.storage.client import HubError
from training.common.arguments import (
    DataArguments,
    InputError,
    ModelArguments,
)
from training.data import images
from training.data.images import load_images
from training.data.sources import PARTS, DataRequest
from training.data.tables import infer_columns
from training.engine import saving


def load(*, size=(16, 16), channels=3, evaluate=True, **arguments):
    return load_images(DataArguments(**arguments), DataRequest(size, channels, PARTS[: 1 + evaluate]))


@pytest.fixture(scope="module")
def parquet(tmp_path_factory):
    return write_parquet(tmp_path_factory.mktemp("data") / "train.parquet", 12)


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


NUMBER, TWO = datasets.Value("int64"), datasets.ClassLabel(names=["0", "1"])


def rows(images, labels, kind, name="--train_files"):
    """Flags of a file with these rows, which is written into a folder; images are pictures, or encoded."""

    def write(folder):
        features = datasets.Features({"image": datasets.Image(), "label": kind})
        file = folder / f"{name[2:]}.parquet"
        datasets.Dataset.from_dict({"image": images, "label": labels}, features=features).to_parquet(file)
        return [name, file]

    return write


def written(name, text, *flags):
    return lambda folder: [(folder / name).write_text(text) and "--train_files", folder / name, *flags]


def beside(labels, kind):
    """Rows to evaluate beside three to train on."""
    first, other = rows(pictures(3), [0, 1, 1], NUMBER), rows(pictures(len(labels)), labels, kind, "--validation_files")
    return lambda folder: [*first(folder), *other(folder), "--do_eval"]


def cut_image(folder):
    images, broken = write_images_folder(folder / "images", {"train": 6}), folder / "images/train/dog/3.png"
    broken.write_bytes(broken.read_bytes()[:60])
    return ["--image_folder", images]


def bare(folder):
    fields = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    ModelArguments.config_class(**fields, image_size=16, patch_size=4).save_pretrained(folder / "bare")
    return [*rows(pictures(2), [0, 1], TWO)(folder), "--model_name_or_path", folder / "bare"]


ARROWS = ["--dataset_name", "arrows"]
DEEP = Image.fromarray(np.zeros((16, 16), np.uint16))
ENCODED = [{"bytes": datasets.Image().encode_example(pictures(1)[0])["bytes"], "path": None}] * 3
NO_PARQUET = "text.parquet cannot be read .ArrowInvalid: Parquet magic bytes not found"
TEXT = "no image column; name one by.*columns are text .string., label .int64."


@pytest.mark.parametrize(
    "write, message",
    [
        (lambda folder: [], "There are no data; accepted: one of --dataset_name"),
        (lambda folder: ["--train_files", "nothing.parquet"], "There is no file 'nothing.parquet'"),
        (written("text.json", '{"text": "a", "label": 0}'), TEXT),
        (written("text.parquet", "no parquet at all"), NO_PARQUET),
        (written("text.parquet", "no parquet at all", "--streaming", "true"), NO_PARQUET),
        (written("bad.json", '{"image": '), "bad.json cannot be read .*JSON"),
        (rows([], [], TWO), "train_files.parquet cannot be read .it has no rows"),
        (rows([*ENCODED, {"bytes": b"\x89PNG no image", "path": None}], [0, 1, 0, 1], TWO), "image in row 3.*decoded"),
        (rows([*pictures(1), DEEP], [0, 1], TWO), "image in row 1, column 'image', has mode I;16; accepted are 8-bit"),
        (cut_image, "The image .*/images/train/dog/3.png cannot be decoded"),
        (rows(pictures(3), [0, 1, -1], NUMBER), "contains the label -1; accepted: 0 and above"),
        (
            rows(pictures(2), [0.5, 1.5], datasets.Value("float32")),
            "contains .0.5, 1.5.*accepted: class numbers or names",
        ),
        (beside([0, 1, 4], NUMBER), "evaluation data have the label 4 in row 2, column 'label'; accepted: 2 classes"),
        (beside([None, 0], TWO), "evaluation data have the label None in row 0"),
        (beside([0, 1, 2], datasets.ClassLabel(3)), "have the classes 0, 1, 2; accepted: 0, 1"),
        (lambda folder: [*ARROWS, "--image_size", 100], "Arrows of 100 px cannot be drawn; accepted: multiples"),
        (
            lambda folder: [*ARROWS, "--image_size", 108, "--do_eval", "--eval_split", "dev"],
            "no split 'dev'; accepted: train, validation, test",
        ),
        (bare, "bare cannot be loaded: .*model.safetensors"),
    ],
)
def test_data_that_cannot_be_used(write, message, tmp_path):
    with pytest.raises(InputError, match=message):
        run("--output_dir", tmp_path / "run", *write(tmp_path))
    assert not list(tmp_path.rglob("run/*.safetensors"))


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


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_animations_leave_no_file_open(tmp_path):
    # Not those of earlier tests.
    gc.collect()
    folder = write_images_folder(tmp_path, {"train": 2})
    for name in ("cat", "dog"):
        frames = pictures(3)
        frames[0].save(tmp_path / "train" / name / "moving.gif", save_all=True, append_images=frames[1:])
    with warnings.catch_warnings():
        warnings.simplefilter("error", ResourceWarning)
        assert len(load(image_folder=folder, evaluate=False).train) == 4
        gc.collect()


@pytest.mark.parametrize("found", ["model.safetensors", "checkpoint-7", "eval_results.json"])
def test_another_run_is_not_overwritten(found, tmp_path, parquet):
    other = tmp_path / found
    other.mkdir() if found.startswith("checkpoint") else other.write_text("{}")
    with pytest.raises(InputError, match=f"contains another run \\({found}\\); accepted: another folder, --resume"):
        run("--train_files", parquet, "--output_dir", tmp_path)
    assert Path(other).exists()


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


def test_images_are_decoded_once_on_a_machine(tmp_path, monkeypatch):
    """Later runs and other processes map the same file; changed pictures are decoded again."""
    folder = write_images_folder(tmp_path / "folder", {"train": 70})
    path = next(Path(folder).rglob("*.png"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")

    def decoded() -> tuple[list[bytes], int]:
        """The pictures, those of a copy in another process, and how many were decoded after the first 64."""
        count = []
        decode = images.DecodedImages.decode
        with monkeypatch.context() as patch:
            patch.setattr(images.DecodedImages, "decode", lambda *given: count.append(0) or decode(*given))
            source = load(image_folder=folder, evaluate=False).train
        sent = pickle.dumps(source.cache)
        found, copied = ([one.get(row).tobytes() for row in range(70)] for one in (source.cache, pickle.loads(sent)))
        assert found == copied and len(sent) < 1000
        return found, len(count) - 64

    first, count = decoded()
    assert count == 70 and len(set(first)) > 60
    assert decoded() == (first, 0)
    pictures(1, seed=9)[0].save(path)
    second, count = decoded()
    assert count == 70 and sum(a != b for a, b in zip(first, second)) == 1
    # Where nothing can be written, they are in memory, as before.
    monkeypatch.setattr(images, "place_of", lambda *_: path / "cache")
    source = load(image_folder=folder, evaluate=False).train
    assert [source[row][0].tobytes() for row in range(70)] == second and isinstance(source.cache, dict)
