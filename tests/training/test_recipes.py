"""Recipes: the full ones make the paper's model and schedule, the small ones run from command to results."""

import json
import math
from functools import partial

import pytest
import torch
import yaml
from recipe_cases import ALL_RECIPES, LINES, RECIPES, parse, run_small, script_of, write_data
from slow_cases import slow_except
from training_helpers import write_parquet
from transformers import AutoModelForImageClassification, AutoModelForVideoClassification

import hf_liere
from training.common.arguments import InputError, architecture_fields
from training.common.command_line import parse_arguments
from training.data.augmentation import IGNORED_LABEL
from training.engine.model_setup import resolve_config, resolve_image_size
from training.engine.trainer import ClassificationTrainer
from training.tasks.clip.comparison import Comparison
from training.tasks.detection import detectors


FULL = sorted(name for name in RECIPES if not name.endswith(("_mini", "_small")))
# What starts from another model's weights, and the detector, have tests of their own.
CLASSIFIERS = sorted(set(FULL) - {"clip_finetuning", "dual_encoder", "coco", "imagenet_256"})
CLASSES = {"cifar100": 100, "cifar100_small": 100, "arrows": 4, "rsna": 2, "ucf101": 101, "ucf101_comrope": 101}


def linear(inputs, outputs):
    """Parameters of a linear layer, or of a convolution with so many inputs in its window."""
    return inputs * outputs + outputs


# Patches, class token, last norm and ImageNet's classes of ViT-B/16.
VIT_BASE_ENDS = linear(16 * 16 * 3, 768) + 768 + 2 * 768 + linear(768, 1000)


def parameters(name, *flags):
    """Parameters of a recipe's model, of which only the shapes exist."""
    model_args = parse(name, *flags)[0]
    config = model_args.config_class(num_labels=CLASSES.get(name, 1000), **model_args.architecture())
    is_video = LINES[name][0] == "video_classification"
    auto_class = AutoModelForVideoClassification if is_video else AutoModelForImageClassification
    with torch.device("meta"):
        return auto_class.from_config(config).num_parameters()


def replaced(flags, name, other, value):
    """A line with another flag and value in the place of one that it has."""
    place = flags.index(name)
    return [*flags[:place], other, value, *flags[place + 2 :]]


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_recipes_hold_existing_keys_and_fitting_values(name):
    parsed = parse(name)
    model_args, training = parsed[0], parsed[-1]
    assert isinstance(training.learning_rate, float) and training.do_train and training.do_eval
    if LINES[name][0] in ("clip_finetuning", "language_modeling"):
        return
    config = model_args.config_class(**model_args.architecture())
    for key, value in yaml.safe_load(RECIPES[name].read_text()).items():
        if key in architecture_fields(model_args.config_class):
            assert getattr(config, key) == value


def test_every_recipe_has_its_line():
    assert set(LINES) == set(ALL_RECIPES)
    for name, (_, flags) in LINES.items():
        assert f"{name.removesuffix('_mini').removesuffix('_small')}_mini" in ALL_RECIPES
        assert flags[flags.index("--output_dir") + 1] == f"outputs/{name}"


@pytest.mark.parametrize(
    "name, flags, expected",
    [
        ("cifar100", ["--position_encoding", "absolute"], 85_193_572),
        ("ucf101", ["--position_encoding", "absolute"], 86_890_085),
        # The table that the official code stores without using it, 785 × 768, aside: 87,760,997.
        ("ucf101", ["--block_size", "64"], 87_760_997 - 785 * 768),
        ("ucf101", ["--block_size", "64", "--use_absolute_position_embeddings", "true"], 87_760_997),
    ],
)
def test_models_have_the_parameters_of_the_papers(name, flags, expected):
    assert parameters(name, *flags) == expected


def test_the_small_model_has_1_8_million_parameters():
    """Of LieRE8, three heads of eight blocks in each layer, with 28 free entries on two axes."""
    layer = 4 * linear(192, 192) + linear(192, 384) + linear(384, 192) + 2 * 2 * 192 + 3 * 8 * 28 * 2
    assert parameters("cifar100_small") == linear(4 * 4 * 3, 192) + 6 * layer + 2 * 192 + linear(192, 100)


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_full_recipes_make_their_models(name):
    """The layers alone are 85 million in ViT-Base, 14 million in ComRoPE's model for videos."""
    layers = 8 * 1_774_464 if name == "ucf101_comrope" else 12 * 7_085_568
    # Patches, classes, generators and norms come on top.
    assert layers < parameters(name) < 1.05 * layers


def test_the_imagenet_model_has_the_parameters_of_the_paper():
    assert parameters("imagenet", "--position_encoding", "absolute") / 1e6 == pytest.approx(86.54, abs=0.005)


@pytest.mark.parametrize("encoding, positions", [("absolute", 197 * 768), ("liere", 12 * 12 * 8 * 28 * 2)])
def test_the_model_of_imagenet_is_the_same_at_256_pixels(encoding, positions, tmp_path):
    """A table keeps its 14 × 14 positions and is interpolated, LieRE8 has blocks of 28 free entries on two axes."""
    trained = parse("imagenet", "--position_encoding", encoding)[0]
    trained.config_class(num_labels=1000, **trained.architecture()).save_pretrained(tmp_path)
    model_args = parse("imagenet_256", "--model_name_or_path", str(tmp_path))[0]
    config = resolve_config(model_args)
    assert config.position_encoding == encoding and resolve_image_size(model_args, config) == (256, 256)
    with torch.device("meta"):
        model = AutoModelForImageClassification.from_config(config)
    assert model.num_parameters() == 12 * 7_085_568 + VIT_BASE_ENDS + positions


def test_the_detector_is_deformable_detr_on_a_small_vit():
    """Layers, heads and queries as Zhu et al. (2021) have them, each layer refining the boxes of the one before."""
    model_args, detector_args, _, _ = parse("coco")
    detector_args.backbone_name_or_path = None
    config = detectors.build_config(model_args, detector_args)
    with torch.device("meta"):
        detector = detectors.build_detector(model_args, config, [str(number) for number in range(80)])
    # timm's vit_small_patch16_224 with a table of 1 + 40 · 40 positions; ComRoPE-LD's blocks have 28 entries and 2
    # factors.
    backbone = 1601 * 384 + 12 * 1_774_464 + linear(16 * 16 * 3, 384) + 384 + 2 * 384 + 12 * 6 * 8 * (28 + 2)
    norm, levels, points = 2 * 256, 4, 4
    projections = linear(384, 256) + linear(9 * 384, 256) + 2 * linear(9 * 256, 256) + 4 * norm
    deformable = linear(256, 8 * levels * points * 2) + linear(256, 8 * levels * points) + 2 * linear(256, 256)
    feed_forward = linear(256, 1024) + linear(1024, 256) + norm
    encoder = deformable + norm + feed_forward
    decoder = 4 * linear(256, 256) + norm + encoder
    boxes = 2 * linear(256, 256) + linear(256, 4)
    queries = 300 * 2 * 256 + linear(256, 2)
    # The authors' code has a classifier per layer, transformers one for all.
    expected = backbone + projections + levels * 256 + 6 * (encoder + decoder + boxes) + linear(256, 80) + queries
    assert detector.num_parameters() == expected


def test_clip_is_fine_tuned_whole_with_and_without_rotations(tmp_path):
    """OpenAI's CLIP ViT-B/16 by its size, with ImageNet's thousand classes."""
    script, line = script_of("clip_finetuning"), LINES["clip_finetuning"][1]
    size = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072}
    size |= {"image_size": 224, "patch_size": 16}
    images = write_parquet(tmp_path / "images.parquet", 1000, num_labels=1000)
    flags = replaced(line, "--model_name_or_path", "--vision_config", json.dumps(size))
    flags = replaced(flags, "--dataset_name", "--train_files", images)
    flags = replaced(flags, "--output_dir", "--output_dir", str(tmp_path / "run"))
    flags += ["--validation_files", images, "--use_cpu", "true", "--bf16", "false"]
    run = Comparison(*parse_arguments([str(RECIPES["clip_finetuning"]), *flags], script.ARGUMENT_CLASSES))
    assert list(run.patches) == ["patched", "unpatched"]
    with torch.device("meta"):
        classifiers = [run.build_classifier(config) for config in run.patches.values()]
    patched, unpatched = (sum(parameter.numel() for parameter in model.parameters()) for model in classifiers)
    # Biases of query, key and value; patches without a bias; a norm more, in front.
    tower = 12 * (7_085_568 + 3 * 768) + 16 * 16 * 3 * 768 + 768 + 197 * 768 + 2 * 2 * 768
    assert unpatched == tower + linear(768, 1000)
    assert patched == tower + linear(768, 1000) + 12 * 12 * 8 * (28 + 2)


@pytest.mark.parametrize("name", ["ucf101", "rsna", "ucf101_comrope"])
def test_generators_of_video_models_have_three_axes(name):
    """ComRoPE-AP exists where blocks of three axes divide a head: in ComRoPE's model, not in ViT-Base."""
    if name == "ucf101_comrope":
        assert parameters(name, "--position_encoding", "comrope_ap") > 0
    else:
        with pytest.raises(Exception, match="must divide head_dim=64 for comrope_ap"):
            parameters(name, "--position_encoding", "comrope_ap", "--block_size", "8")


@pytest.mark.parametrize("name", sorted(set(FULL) - {"dual_encoder"}))
def test_schedules_are_those_that_are_stated(name, tiny, tmp_path):
    """Trainer's own loader, optimizer and scheduler, for a data set of which only the length exists."""
    training, stated = parse(name)[-1], yaml.safe_load(RECIPES[name].read_text())
    training.output_dir, size, epochs = str(tmp_path), 99_999, stated["num_train_epochs"]
    model = hf_liere.LieREViTForImageClassification(tiny())
    trainer = ClassificationTrainer(model, training, None, Counted(size), Counted(size))
    steps_per_epoch = math.ceil(len(trainer.get_train_dataloader()) / training.gradient_accumulation_steps)
    assert steps_per_epoch == math.ceil(size / stated["total_train_batch_size"])
    assert training.num_train_epochs == epochs
    steps, warmup = epochs * steps_per_epoch, stated["warmup_steps"]
    trainer.create_optimizer_and_scheduler(steps)
    factor = trainer.lr_scheduler.lr_lambdas[0]
    warm = math.ceil(warmup * steps) if warmup < 1 else warmup
    assert trainer.optimizer.defaults["lr"] == stated["learning_rate"] and factor(warm) == 1.0
    if warm:
        assert factor(warm // 2) == pytest.approx(warm // 2 / warm)
    lowest = 0.01 if name == "imagenet_deit" else 0.0
    middle = factor(warm + (steps - warm) // 2)
    assert middle == pytest.approx((1 + lowest) / 2, abs=0.01) and factor(steps) == pytest.approx(lowest, abs=1e-9)


class Counted(torch.utils.data.Dataset):
    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, key):
        return {"label": IGNORED_LABEL, "key": key}


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_say_the_batch_of_all_processes(name):
    text = RECIPES[name].read_text()
    assert "per_device_train_batch_size" not in text and "total_train_batch_size" in yaml.safe_load(text)


def test_the_batch_of_a_process_does_not_contradict_that_of_all():
    with pytest.raises(InputError, match="--per_device_train_batch_size 32 contradicts --total_train_batch_size 512"):
        parse("cifar100", "--per_device_train_batch_size", "32")


def test_the_batch_does_not_depend_on_how_it_is_shared():
    for accumulated, share in ((1, 512), (4, 128)):
        training = parse("cifar100", "--gradient_accumulation_steps", str(accumulated))[-1]
        assert training.per_device_train_batch_size == share
    with pytest.raises(
        InputError, match="--total_train_batch_size 512 cannot be shared by 1 processes × 3 accumulated"
    ):
        parse("cifar100", "--gradient_accumulation_steps", "3")


@pytest.fixture(scope="module")
def run_mini(tmp_path_factory):
    data = write_data(tmp_path_factory.mktemp("data"))
    return partial(run_small, folder=tmp_path_factory.mktemp("minis"), data=data)


MINI = sorted(set(RECIPES) - set(FULL))
# The other scripts train in the properties, from flags.
RUN_FAST = ("cifar100_small", "points_mini")


@pytest.mark.parametrize("name", slow_except(RUN_FAST, MINI))
def test_small_recipes_run_to_their_results(name, run_mini):
    folder = run_mini(name)
    if LINES[name][0] == "clip_finetuning":
        model = folder / ("unpatched" if name == "clip_pretraining_mini" else "patched")
        results = json.loads((model / "resolutions.json").read_text())["resolutions"]
        sizes = yaml.safe_load(RECIPES[name].read_text()).get("eval_image_sizes", [98])
        assert [(result["image_size"], result["samples"]) for result in results] == [(size, 6) for size in sizes]
        assert all(math.isfinite(result["loss"]) for result in results)
    else:
        results = json.loads((folder / "all_results.json").read_text())
        assert results["eval_samples"] == 6 and results["parameters"] > 1000
        assert math.isfinite(results["eval_map" if name == "coco_mini" else "eval_loss"])
        if LINES[name][0] == "language_modeling":
            assert results["eval_perplexity"] > 1 and results["eval_512_perplexity"] > 1
