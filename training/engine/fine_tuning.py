"""Pretrained vision models of transformers as image classifiers: patched with rotations, with LoRA, or as they are."""

import dataclasses
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForImageClassification, PreTrainedConfig, PreTrainedModel, set_seed

from hf_liere import RotaryPatchConfig, is_patched, patch
from hf_liere.errors import InputError
from hf_liere.patching.vision_towers import Tower, find_towers
from hf_liere.transformer.configuration_liere import LieREConfig, pair
from training.common.arguments import ModelArguments, RunArguments, flag, require_numbers
from training.data.sources import LabelledImages
from training.engine.model_setup import build_model, check_checkpoint_keys, checkpoint_config, resolve_image_size
from training.engine.patching import (
    UNPATCHED,
    LoraArguments,
    PatchArguments,
    apply_lora,
    check_patch,
    find_adapters,
    patch_config,
    refuse_other_patch,
    save_patched,
)
from training.engine.trainer import ClassificationTrainer
from training.engine.wrapped_models import WrappedModel


TRAINABLE = ("rotary", "rotary+head", "lora+rotary", "all")
HEAD = "classifier."
PATCH_FIELDS = {field.name for field in dataclasses.fields(RotaryPatchConfig)}


@dataclasses.dataclass
class TuningArguments(LoraArguments):
    """What is trained of a pretrained model."""

    trainable: str = flag(
        "all",
        "What is trained: the rotations, also the classifier, also LoRA in attention, or the whole tower.",
        choices=list(TRAINABLE),
    )
    head_learning_rate_factor: float = flag(1.0, "Learning rate of the classifier, as a multiple of the others'.")

    def __post_init__(self):
        super().__post_init__()
        require_numbers(self, "head_learning_rate_factor")


class Classifier(WrappedModel):
    """Logits of a pretrained model for images of any size."""

    def __init__(self, model: PreTrainedModel):
        super().__init__(model)
        takes_size = any("interpolate_pos_encoding" in _arguments(tower.embeddings) for tower in _towers(model))
        self.any_size = {"interpolate_pos_encoding": True} if takes_size and not is_patched(model) else {}

    def forward(self, pixel_values: torch.Tensor) -> dict[str, torch.Tensor]:
        """(B, C, height, width) → logits (B, classes)."""
        return {"logits": self.model(pixel_values=pixel_values, **self.any_size).logits}

    def own_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(name, parameter) of all but the modules that peft keeps beside the copies that it trains."""
        return ((name, value) for name, value in self.named_parameters() if "original_module." not in name)

    def head_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(name, parameter) of the linear classifier, or of the copy that peft trains."""
        for name, parameter in self.own_parameters():
            if HEAD in name:
                yield name, parameter


def _towers(model: PreTrainedModel) -> list[Tower]:
    """The towers of patches with attention; none in convolutional networks."""
    try:
        return find_towers(model)
    except ValueError:
        return []


def _arguments(module: nn.Module) -> set[str]:
    return set(inspect.signature(type(module).forward).parameters)


def add_lora(classifier: Classifier, arguments: LoraArguments) -> None:
    """
    Adds LoRA to linear layers of the tower's attention, and trains a copy of the classifier. Raises [`InputError`] if
    the model has no such tower.
    """
    towers = _towers(classifier.model)
    if len(towers) != 1:
        raise InputError(
            f"--trainable lora+rotary: {type(classifier.model).__name__} has {len(towers)} towers of patches with "
            "attention; accepted: one."
        )
    copied = [HEAD.rstrip(".")] if any(True for _ in classifier.head_parameters()) else None
    classifier.model = apply_lora(classifier.model, towers[0].attentions, arguments, copied)


class FineTuningTrainer(ClassificationTrainer):
    """
    A trainer with a separate learning rate for the classifier. The unpatched model has no rotations.

    Args:
        head_learning_rate_factor: that of the classifier, as a multiple of the others'.
    """

    def __init__(self, *args: Any, head_learning_rate_factor: float = 1.0, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.head_learning_rate_factor = head_learning_rate_factor
        if self.is_fsdp_enabled:
            raise InputError("FSDP shards the model, which is saved whole here; accepted: one process, or DDP.")

    @property
    def leaves_whole_model(self) -> bool:
        return any(Path(self.args.output_dir).glob("model*.safetensors"))

    def learning_rate_groups(self, model: nn.Module) -> list[tuple[str, float, list[nn.Parameter]]]:
        head = [parameter for _, parameter in self.accelerator.unwrap_model(model).head_parameters()]
        rotary = super().learning_rate_groups(model) if is_patched(model) else []
        return [*rotary, ("head_learning_rate_factor", self.head_learning_rate_factor, head)]

    def save_finished(self, folder: str) -> None:
        if self.args.should_save:
            save_patched(self.accelerator.unwrap_model(self.model).model, Path(folder), self.processing_class)


def foreign_config(arguments: ModelArguments) -> PreTrainedConfig | None:
    """The configuration of the checkpoint that a run starts from, if its model is none of this library."""
    name = arguments.model_name_or_path
    if name is None:
        return None
    if (adapters := find_adapters(name)) is not None:
        raise InputError(f"--model_name_or_path {name}: adapters for {adapters.base} only; accepted: whole models.")
    config = checkpoint_config("--model_name_or_path", name, arguments.model_revision)
    return None if isinstance(config, LieREConfig) else config


def refuse_tuning(tuning: TuningArguments) -> None:
    """Raises [`InputError`] for parts of a model of this library, which learns as a whole."""
    if tuning.trainable != "all":
        raise InputError(
            f"--trainable {tuning.trainable}: accepted with a pretrained model of another library; a model of this one "
            "learns as a whole."
        )


def resolve_rotations(
    arguments: ModelArguments, config: PreTrainedConfig, args: RunArguments
) -> RotaryPatchConfig | None:
    """
    The rotations that a run adds to a pretrained model.

    Raises:
        InputError: for flags, fields or rotations that the model does not take.
    """
    instead = {
        "push_to_hub": "`hf-liere push` publishes the folder of a finished run",
        "upgrade_encoding": "leave it out",
    }
    for name, advice in instead.items():
        if getattr(args, name, False) or getattr(arguments, name, False):
            raise InputError(f"--{name}: the checkpoint is a {config.model_type}, not a model of hf_liere; {advice}.")
    given = {field: value for field, value in arguments.architecture().items() if field != "image_size"}
    own, encoding = getattr(config, "rotary_patch", None), given.get("position_encoding")
    adds = own is None and encoding not in (None, UNPATCHED)
    for field, value in given.items():
        if field not in PATCH_FIELDS or not (adds or own or field == "position_encoding"):
            raise InputError(
                f"--{field} {value}: a pretrained {config.model_type} keeps its architecture; accepted: --image_size, "
                "and --position_encoding with its fields, which adds rotations."
            )
    patch_args = PatchArguments(**given)
    refuse_other_patch(patch_args, own, args.do_train)
    if not adds:
        return None
    wanted = patch_config(patch_args)
    check_patch(AutoModelForImageClassification, config, wanted)
    return wanted


def build_tuned(
    arguments: ModelArguments,
    tuning: TuningArguments,
    config: PreTrainedConfig,
    wanted: RotaryPatchConfig | None,
    images: LabelledImages,
    args: RunArguments,
    checkpoint: str | None,
) -> Classifier:
    """
    The pretrained model with rotations, LoRA and a classifier for the data set, and what is not trained frozen.

    Args:
        checkpoint: the checkpoint of this run to resume from, if any.

    Raises:
        InputError: if a weight is missing, nothing is trained, or the trained model could not be loaded for its images.
    """
    set_seed(args.seed)
    model = build_model(arguments, config, images, args.do_train and tuning.trainable != "rotary")
    try:
        if wanted is not None:
            patch(model, wanted)
    except ValueError as error:
        raise InputError(str(error)) from error
    classifier = Classifier(model)
    if args.do_train:
        _require_own_size(classifier, arguments)
        if tuning.trainable == "lora+rotary":
            # Patching draws random numbers: LoRA starts equally with and without rotations.
            set_seed(args.seed)
            add_lora(classifier, tuning)
        if not classifier.freeze(tuning.trainable):
            raise InputError(
                f"--trainable {tuning.trainable} trains no parameter without --position_encoding; accepted: "
                f"{', '.join(TRAINABLE[1:])}."
            )
    if checkpoint is not None:
        check_checkpoint_keys(checkpoint, classifier)
    return classifier


def _require_own_size(classifier: Classifier, arguments: ModelArguments) -> None:
    """Refuses images of another size for models that whoever loads them must tell of it."""
    config = classifier.config
    size, own = resolve_image_size(arguments, config), pair("image_size", getattr(config, "image_size", 0))
    if classifier.any_size and size != own:
        raise InputError(
            f"--image_size {size[0]}×{size[1]}: a {config.model_type} without rotations takes its own size where it is "
            f"loaded; accepted: {own[0]}, or --position_encoding, with which it takes any."
        )
