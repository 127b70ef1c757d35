"""
Every script trains: a run that is killed resumes to the weights and results of one that is not, two processes train the
model of one, and what a finished run leaves loads by its Auto class and has its records.
"""

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import datasets
import numpy as np
import pytest
import torch
import transformers
from checkout import ROOT
from clip_files import cut_frames
from patching_cases import CASES
from slow_cases import slow_except
from training_helpers import (
    TINY_MODEL,
    assert_same_weights,
    pictures,
    run_script_twice,
    small_clip,
    weights,
    write_dual_encoder,
    write_images,
    write_parquet,
    write_points,
)

from training import (
    clip_finetuning,
    image_classification,
    language_modeling,
    object_detection,
    token_classification,
    video_classification,
)
from training.data.detection_data import write_shapes
from training.data.moving_shapes import write_moving_shapes
from training.data.texts import byte_tokenizer


def of_files(train: str, test: str) -> list[str]:
    return ["--train_files", train, "--validation_files", test]


def write_shards(folder: Path) -> list[str]:
    shards = [write_parquet(folder / f"{part}.parquet", 10 + 2 * part, seed=part) for part in range(2)]
    test = write_parquet(folder / "test.parquet", 13, seed=9)
    return ["--streaming", "--train_files", *shards, "--validation_files", test, "--max_train_samples", "22"]


def write_sizes(folder: Path) -> list[str]:
    """Wide and tall pictures, and one so wide that a row of patches is left."""
    sizes = ((16, 16), (40, 10), (12, 30), (90, 4), (17, 23))
    images = [image.resize(size) for image, size in zip(pictures(20), sizes * 4)]
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b"])})
    table = datasets.Dataset.from_dict({"image": images, "label": [n % 2 for n in range(20)]}, features=features)
    table.to_parquet(folder / "train.parquet")
    return of_files(str(folder / "train.parquet"), str(folder / "train.parquet"))


def write_videos(folder: Path) -> list[str]:
    """One is cut, which its header does not tell: no step and no evaluation counts it."""
    write_moving_shapes(folder, {"train": 19, "validation": 13}, 16)
    for split in ("train", "validation"):
        cut_frames(min((folder / split).glob("*/0*.mp4")), folder / split / "down" / "cut.mp4")
    return ["--video_folder", str(folder)]


def write_tokens(folder: Path) -> list[str]:
    """Nine samples in batches of four leave places without an example."""
    files = [write_points(folder / f"{seed}.parquet", count, seed) for seed, count in enumerate((9, 5))]
    return [*of_files(*files), *"--feature_columns height --position_columns x --label_column part".split()]


def write_objects(folder: Path) -> list[str]:
    for split, size in (("train", 16), ("validation", 13)):
        write_shapes(folder, split, size, (32, 32))
    return ["--shapes_folder", str(folder), "--max_train_samples", "16", "--max_eval_samples", "13"]


def write_texts(folder: Path) -> list[str]:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlamaConfig(**sizes, vocab_size=257, initializer_range=0.2)
    transformers.LlamaForCausalLM(config).save_pretrained(folder / "llama")
    byte_tokenizer().save_pretrained(folder / "llama")
    for number in range(12):
        file = folder / "texts" / ("validation" if number < 4 else "train") / f"{number}.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("def f(x): return x\n" * (3 + number))
    return ["--text_folder", str(folder / "texts"), "--model_name_or_path", str(folder / "llama")]


def write_clip(folder: Path) -> list[str]:
    for part in small_clip():
        part.save_pretrained(folder / "clip")
    return [*write_images(folder), "--model_name_or_path", str(folder / "clip")]


def write_vit(folder: Path) -> list[str]:
    """transformers saves ViT under older names, which Trainer by itself does not find again."""
    CASES["vit"].build().save_pretrained(folder / "vit")
    return [*write_images(folder), "--model_name_or_path", str(folder / "vit")]


def write_towers(folder: Path) -> list[str]:
    return [*write_images(folder), "--model_name_or_path", write_dual_encoder(folder / "towers")]


class Row(NamedTuple):
    """
    Attributes:
        script: Of `training`.
        write: Writes the data into a folder; their flags.
        flags: Words of the run, whose examples may be augmented.
        random: What draws from global generators, or from those of a batch: processes draw otherwise.
        killed: The training step in which a run is killed, after `saved` steps of its own.
        auto: The class that loads a finished run; none for adapters.
        model: Where a run has its model.
        resumed: Further flags of the runs that are killed and resumed.
    """

    script: object
    write: Callable[[Path], list[str]]
    flags: str
    random: str
    killed: int
    auto: str = ""
    model: str = ""
    resumed: str = ""


RUN = "--do_train --do_eval --use_cpu true --disable_tqdm true --learning_rate 1e-3 --seed 3 --total_train_batch_size 4"
IMAGES = " ".join(TINY_MODEL)
AUGMENTED = "--crop_padding 2 --flip_probability 0.5 --rand_augment_ops 1 --repeated_augmentation 2"
DROPPED = "--drop_path_rate 0.2 --hidden_dropout_prob 0.1 --position_perturbation 0.5 --position_rescale 2"
DROPPED += " --position_shift 0.1 --patch_dropout_prob 0.25 --mixup_alpha 0.8 --cutmix_alpha 1.0"
# Five steps in an epoch: runs resume in the second half of the second one, or right after the first.
EPOCHS = "--num_train_epochs 2 --save_steps 8"
CLASSIFIED = f"{IMAGES} {AUGMENTED} --label_smoothing_factor 0.1 --random_erasing_probability 0.5"
LLAMA = "--max_length 16 --evaluation_lengths 32 --max_steps 4 --save_steps 2"
BLOCKS = "--position_encoding liere --block_size 4 --trainable all"
ADAPTERS = "--position_encoding rope_mixed --trainable lora+rotary"
# Adam divides by gradients that are zero but for rounding, such as those of the keys' biases.
TOWER = (
    "--position_encoding comrope_ld --block_size 4 --max_steps 4 --save_steps 2 --optim sgd --eval_image_sizes 16 24"
)
ROTATING = "--head zero_shot --rotary_init pretrained --position_encoding liere --baseline false --max_steps 4"
DETECTOR = "--d_model 32 --encoder_layers 1 --decoder_layers 2 --detector_ffn_dim 16 --detector_heads 2"
DETECTOR += " --num_queries 5 --num_feature_levels 2 --num_train_epochs 2 --save_steps 3"
WORKERS = "--dataloader_num_workers 2 --dataloader_persistent_workers true"
image_row = (image_classification, write_images)
clip_row = (clip_finetuning, write_clip)
CLASSIFIER = "AutoModelForImageClassification"
ROWS = {
    "images": Row(*image_row, f"{CLASSIFIED} {EPOCHS}", DROPPED, 9, CLASSIFIER),
    "epochs": Row(*image_row, f"{CLASSIFIED} --num_train_epochs 2 --save_steps 5", DROPPED, 6, CLASSIFIER),
    "workers": Row(*image_row, f"{CLASSIFIED} {EPOCHS}", DROPPED, 9, resumed=WORKERS),
    "native": Row(
        *(image_classification, write_sizes, f"{IMAGES} --max_num_patches 20 --random_resized_crop {EPOCHS}"),
        *("--patch_dropout_prob 0.25", 9, CLASSIFIER),
    ),
    "streamed": Row(
        *(image_classification, write_shards, f"{IMAGES} --crop_padding 2 --num_train_epochs 2 --save_steps 4"),
        *("--drop_path_rate 0.2", 6, CLASSIFIER),
    ),
    "videos": Row(
        *(video_classification, write_videos),
        f"{IMAGES} --num_frames 4 --patch_size 8 --frame_stride 2 --random_resized_crop --rand_augment_ops 1 {EPOCHS}",
        *("--mixup_alpha 0.8", 9, "AutoModelForVideoClassification"),
    ),
    "tokens": Row(
        *(token_classification, write_tokens),
        " ".join(TINY_MODEL[:8]) + " --num_train_epochs 2 --save_steps 5",
        *("--hidden_dropout_prob 0.1", 6, "AutoModelForTokenClassification"),
    ),
    "detection": Row(
        *(object_detection, write_objects, f"{IMAGES} --image_size 32 {DETECTOR}"),
        *("--drop_path_rate 0.2", 5, "AutoModelForObjectDetection"),
    ),
    "language": Row(language_modeling, write_texts, f"{LLAMA} {BLOCKS}", "", 4, "AutoModelForCausalLM"),
    "language, adapters": Row(language_modeling, write_texts, f"{LLAMA} {ADAPTERS}", "", 4),
    "clip": Row(*clip_row, f"{TOWER} --flip_probability 0.5", "", 4, CLASSIFIER, "patched"),
    "clip, second model": Row(*clip_row, f"{TOWER} --flip_probability 0.5", "", 8, CLASSIFIER, "unpatched"),
    "clip, adapters": Row(*clip_row, f"{TOWER} --trainable lora+rotary", "", 4, model="patched"),
    "vit": Row(clip_finetuning, write_vit, TOWER, "", 4, CLASSIFIER, "patched"),
    "towers": Row(clip_finetuning, write_towers, f"{ROTATING} --save_steps 2", "", 4, "AutoModel", "patched"),
}
FAST = ("images", "videos", "tokens", "language, adapters", "clip, adapters")
RECORDS = {"run_config.json", "environment.json", "trainer_state.json"}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Flags of the data of a row, which are written once."""
    written = {}

    def flags_of(row: Row) -> list[str]:
        if row.write not in written:
            written[row.write] = row.write(tmp_path_factory.mktemp("data"))
        return [*row.flags.split(), *RUN.split(), *written[row.write]]

    return flags_of


@contextlib.contextmanager
def killed_in(step: int):
    """A training step, counted over all models of a script, does not come back."""
    genuine, steps = transformers.Trainer.training_step, []

    def counted(trainer, *args, **kwargs):
        steps.append(trainer)
        if len(steps) == step:
            raise KeyboardInterrupt
        return genuine(trainer, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(transformers.Trainer, "training_step", counted)
        yield


def last_checkpoint(folder: Path) -> Path:
    return max(folder.glob("checkpoint-*"), key=lambda path: int(path.name.partition("-")[2]))


@pytest.mark.parametrize("name", slow_except(FAST, ROWS))
def test_a_killed_run_resumes_to_the_weights_of_one_that_is_not(name, data, tmp_path):
    """Bit-equal, with the optimizer; results too. The finished run loads by its Auto class, and has its records."""
    row = ROWS[name]
    flags = [*data(row), *row.random.split()]
    expected = row.script.main(["--output_dir", str(tmp_path / "whole"), *flags])
    flags += ["--output_dir", str(tmp_path / "killed"), *row.resumed.split()]
    with killed_in(row.killed):
        row.script.main(flags)
    whole, killed = (tmp_path / run / row.model for run in ("whole", "killed"))
    assert last_checkpoint(killed).name != last_checkpoint(whole).name and not list(killed.glob("*.safetensors"))
    found = row.script.main([*flags, "--resume_from_checkpoint", "last"])
    assert results_of(found) == results_of(expected)
    assert_same_weights(last_checkpoint(whole), last_checkpoint(killed))
    states = [torch.load(last_checkpoint(run) / "optimizer.pt")["state"] for run in (whole, killed)]
    for left, right in zip(states[0].values(), states[1].values(), strict=True):
        assert all(torch.equal(left[key], right[key]) for key in left if isinstance(left[key], torch.Tensor))
    assert {path.name for path in whole.glob("*.json")} == {path.name for path in killed.glob("*.json")} >= RECORDS
    if row.auto:
        model, loading = getattr(transformers, row.auto).from_pretrained(killed, output_loading_info=True)
        assert not any(loading[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        trained = weights(last_checkpoint(killed))
        # By other names, in a wrapper or of older models.
        for key, value in weights(killed).items():
            assert any(torch.equal(value, other) for other in trained.values()), key


def results_of(found):
    """Metrics without times; a script that evaluates at several sizes returns a list of them."""
    if isinstance(found, list):
        return [results_of(each) for each in found]
    return {key: value for key, value in found.items() if not key.endswith(("_runtime", "_second"))}


TWO = {
    "images": 1e-6,
    "native": 1e-6,
    "videos": 1e-6,
    "tokens": 1e-5,
    "language": 1e-6,
    "language, adapters": 1e-6,
    "clip": 1e-6,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TWO)
def test_two_processes_train_the_model_of_one(name, data, tmp_path):
    """Sums in another order. Incomplete batches are shared unevenly: only exact weighting gives equal weights."""
    row = ROWS[name]
    flags = [*data(row), *"--optim sgd --learning_rate 0.1 --per_device_eval_batch_size 4 --logging_steps 1".split()]
    row.script.main(["--output_dir", str(tmp_path / "one"), *flags])
    script = ROOT / "training" / f"{row.script.__name__.rpartition('.')[2]}.py"
    run_script_twice(script, "--output_dir", tmp_path / "two", *flags, "--use_cpu", "false")
    one, two = (tmp_path / run / row.model for run in ("one", "two"))
    assert json.loads((two / "environment.json").read_text())["world_size"] == 2
    assert_same_weights(last_checkpoint(one), last_checkpoint(two), TWO[name])
    first, second = (json.loads((run / "trainer_state.json").read_text())["log_history"] for run in (one, two))
    np.testing.assert_allclose(*([e["loss"] for e in log if "loss" in e] for log in (first, second)), atol=2e-6)
    if (one / "eval_results.json").is_file():
        first, second = (results_of(json.loads((run / "eval_results.json").read_text())) for run in (one, two))
        assert first == pytest.approx(second, rel=1e-5, abs=1e-5)


CHECKPOINTING, COMPILED = "--gradient_checkpointing true", "--torch_compile true --torch_compile_backend eager"
ACCUMULATED, ROUNDED = "--gradient_accumulation_steps 2", "--bf16 true"
# Rows, flags that save memory or time, and the largest difference of weights; sums are in another order.
SWITCHES = [
    *(
        ("images", CHECKPOINTING, 1e-6),
        ("images", ROUNDED, 5e-3),
        ("images", COMPILED, 1e-6),
        ("native", COMPILED, 1e-6),
    ),
    *(("images", ACCUMULATED, 1e-6), ("videos", CHECKPOINTING, 1e-6), ("tokens", CHECKPOINTING, 1e-6)),
    *((name, CHECKPOINTING, 1e-6) for name in ("native", "language", "language, adapters")),
    *((name, ROUNDED, 5e-2) for name in ("language", "language, adapters")),
]
FAST_SWITCHES = [("images", ROUNDED, 5e-3), ("tokens", CHECKPOINTING, 1e-6)]


@pytest.mark.parametrize("name, switch, largest", slow_except(FAST_SWITCHES, SWITCHES))
def test_switches_that_save_memory_or_time(name, switch, largest, data, tmp_path):
    """Weights stay in float32."""
    row = ROWS[name]
    flags = [*data(row), *"--optim sgd --learning_rate 0.1".split()]
    row.script.main(["--output_dir", str(tmp_path / "plain"), *flags])
    row.script.main(["--output_dir", str(tmp_path / "other"), *flags, *switch.split()])
    plain, other = (last_checkpoint(tmp_path / run / row.model) for run in ("plain", "other"))
    assert_same_weights(plain, other, largest)
    changed = [not torch.equal(value, weights(plain)[key]) for key, value in weights(other).items()]
    assert any(changed) or switch != ROUNDED
    assert {value.dtype for value in weights(other).values()} == {torch.float32}
