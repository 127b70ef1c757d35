"""Recipes and flags of the scripts: what overrides what, the types of values, and how mistakes are told."""

import dataclasses
import os

import pytest
import torch
from checkout import ROOT
from huggingface_hub.dataclasses import type_validator
from training_helpers import main

from training.common import arguments
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


CLASSES = (ModelArguments, DataArguments, AugmentationArguments, RunArguments)


def parse(*arguments):
    return parse_arguments([*map(str, arguments), "--output_dir", "unused", "--use_cpu", "true"], CLASSES)


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


@pytest.mark.parametrize("name, processes", [("ddp", 8), ("fsdp", 8), ("deepspeed_zero2", 8), ("multi_node", 16)])
def test_accelerate_reads_the_launch_files(name, processes):
    from accelerate.commands.config.config_args import load_config_from_file

    config = load_config_from_file(str(ROOT / "training" / "recipes" / "accelerate" / f"{name}.yaml"))
    assert config.num_processes == processes and config.mixed_precision == "bf16"


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


def test_accelerators_get_workers_as_cores_and_shared_memory_allow(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(16), raising=False)
    monkeypatch.setattr(arguments, "BYTES_OF_WORKER", 1)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert arguments.default_workers(tmp_path) == 14 and arguments.default_workers(tmp_path / "absent") == 0
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert arguments.default_workers(tmp_path) == 2
    monkeypatch.setattr(arguments, "BYTES_OF_WORKER", 2**62)
    assert arguments.default_workers(tmp_path) == 0
    for given, expected in ((None, 0), (3, 3)):
        run = RunArguments(output_dir="unused", use_cpu=True, do_eval=True, dataloader_num_workers=given)
        assert run.dataloader_num_workers == expected and not run.dataloader_persistent_workers
