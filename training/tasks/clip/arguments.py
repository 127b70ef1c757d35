"""Command line of training/clip_finetuning.py: how the vision tower is changed and which part is trained."""

import json
from dataclasses import dataclass
from typing import Any

from transformers import CLIPConfig, PreTrainedConfig

from hf_liere.errors import InputError
from training.common.arguments import CheckpointArguments, RunArguments, flag
from training.engine.fine_tuning import TuningArguments
from training.engine.model_setup import checkpoint_config
from training.engine.patching import find_adapters


HEADS = ("classifier", "zero_shot")


@dataclass
class FineTuningArguments(CheckpointArguments, TuningArguments):
    vision_config: str | None = flag(
        None, "Fields of CLIPVisionConfig, as json: train a new CLIP vision tower instead of a checkpoint."
    )
    image_size: int | None = flag(None, "Height and width to train at; by default the checkpoint's.")
    eval_image_sizes: list[int] | None = flag(
        None, "Heights (and widths) for the final evaluation; by default image_size."
    )
    head: str = flag(
        "classifier", "How classes are predicted: by a linear layer or the text tower.", choices=list(HEADS)
    )
    prompts: list[str] = flag(
        ["a photo of a {}."], "Templates for --head zero_shot; {} is replaced by the name of a class."
    )
    baseline: bool = flag(True, "Also train the unpatched model, from the same seed for as many steps.")

    def architecture(self) -> dict[str, Any]:
        return {} if self.image_size is None else {"image_size": self.image_size}


@dataclass
class FineTuningTrainingArguments(RunArguments):
    def __post_init__(self):
        super().__post_init__()
        if self.push_to_hub:
            raise InputError("--push_to_hub: a run trains several models; accepted: publish one of its folders.")


def resolve_config(arguments: FineTuningArguments) -> PreTrainedConfig:
    if (arguments.model_name_or_path is None) == (arguments.vision_config is None):
        raise InputError(
            f"--model_name_or_path {arguments.model_name_or_path} and --vision_config {arguments.vision_config}; "
            "accepted: one of them."
        )
    if "rotary" in arguments.trainable and arguments.vision_config is not None:
        raise InputError(f"--trainable {arguments.trainable}: a new model has nothing pretrained; accepted: all.")
    if arguments.head == "zero_shot":
        if arguments.vision_config is not None:
            raise InputError("--head zero_shot: a new vision tower has no text tower; accepted: a checkpoint.")
        if arguments.trainable == "rotary+head":
            raise InputError("--trainable rotary+head: --head zero_shot has no classifier; accepted: rotary.")
        if not arguments.prompts or any("{}" not in prompt for prompt in arguments.prompts):
            raise InputError(f"--prompts {arguments.prompts}; accepted: texts with {{}} for the name of a class.")
    if (adapters := find_adapters(arguments.model_name_or_path)) is not None:
        raise InputError(
            f"--model_name_or_path {arguments.model_name_or_path}: adapters for {adapters.base} only; accepted: "
            "whole models."
        )
    if arguments.vision_config is None:
        return checkpoint_config("--model_name_or_path", arguments.model_name_or_path, arguments.model_revision)
    try:
        return CLIPConfig(vision_config=json.loads(arguments.vision_config))
    except Exception as error:
        # Strict configurations raise several classes of errors; all name the field and what it accepts.
        raise InputError(f"--vision_config {arguments.vision_config}: {error}") from error
