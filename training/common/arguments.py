"""Arguments of the training scripts for model, data, augmentation and run. Each checks its values before any work."""

import dataclasses
import json
import math
import os
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, get_args, get_origin

import torch
from transformers import PreTrainedConfig
from transformers.integrations import INTEGRATION_TO_CALLBACK, get_available_reporting_integrations
from transformers.trainer_utils import HubStrategy
from transformers.training_args import TrainingArguments

from hf_liere import LieRETokensConfig, LieREVideoConfig, LieREViTConfig
from hf_liere.errors import InputError
from training.common.help import WRITTEN


# Two batches of 512 images of 168 px in float32 take 350 MB.
BYTES_OF_WORKER = 2**29


def flag(default: Any, help: str, **metadata) -> Any:
    """A field of a dataclass that `HfArgumentParser` reads: a command-line flag, its default and its help text."""
    metadata["help"] = help
    if isinstance(default, list):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass
class CheckpointArguments:
    config_class: ClassVar[type[PreTrainedConfig]]

    model_name_or_path: str | None = flag(
        None, "Checkpoint to fine-tune or evaluate: a local folder or a name on the Hub."
    )
    model_revision: str = flag("main", "Branch, tag or commit of a checkpoint on the Hub.")
    num_labels: int | None = flag(None, "Expected number of classes; the run stops if the data set has another.")

    def architecture(self) -> dict[str, Any]:
        """The fields of the model's configuration that were given, converted from text."""
        given = {name: (getattr(self, name), entry) for name, entry in architecture_fields(self.config_class).items()}
        values = {name: (_parse_value(text), entry.type) for name, (text, entry) in given.items() if text is not None}
        # One number for a field that takes lists alone is a list of one.
        return {
            name: [value] if type(value) in (int, float) and _takes_lists_alone(kind) else value
            for name, (value, kind) in values.items()
        }


def architecture_fields(config_class: type[PreTrainedConfig]) -> dict[str, dataclasses.Field]:
    """The fields that a configuration adds to `PreTrainedConfig`, without those that the library itself writes."""
    inherited = {config_field.name for config_field in dataclasses.fields(PreTrainedConfig)} | WRITTEN
    return {
        config_field.name: config_field
        for config_field in dataclasses.fields(config_class)
        if config_field.name not in inherited and not config_field.name.startswith("_")
    }


def configuration_flags(kind: type) -> type:
    """
    Decorator of an argument class with a `config_class`: every field of that configuration becomes a flag. The
    configuration validates the values, so the flags are text; its docstring describes them, see `training.common.help`.
    """
    flags = [(name, str | None, field(default=None)) for name in architecture_fields(kind.config_class)]
    made = dataclasses.make_dataclass(kind.__name__, flags, bases=(kind,))
    made.__module__ = kind.__module__
    return made


@dataclass
class ArchitectureArguments(CheckpointArguments):
    upgrade_encoding: bool = flag(
        False,
        "Upgrade the checkpoint to --position_encoding, --block_size, --share_heads and --share_layers. The upgrade is "
        "exact: the outputs stay the same and more parameters can learn.",
    )


@configuration_flags
class ModelArguments(ArchitectureArguments):
    config_class = LieREViTConfig


@configuration_flags
class VideoModelArguments(ArchitectureArguments):
    config_class = LieREVideoConfig


@configuration_flags
class TokensModelArguments(ArchitectureArguments):
    config_class = LieRETokensConfig


@dataclass
class LimitArguments:
    """Which examples a script uses."""

    max_train_samples: int | None = flag(None, "Train on the first N examples only.")
    max_eval_samples: int | None = flag(None, "Evaluate the first N examples only.")
    train_fraction: float = flag(1.0, "Share of the training examples to train on, drawn at random with the seed.")

    @property
    def limits(self) -> dict[str, int | None]:
        """The largest number of examples of each part of the data."""
        return {"training": self.max_train_samples, "evaluation": self.max_eval_samples}

    def __post_init__(self):
        if not 0 < self.train_fraction <= 1:
            raise InputError(f"--train_fraction {self.train_fraction}; accepted: above 0, up to 1.")


@dataclass
class SampleArguments(LimitArguments):
    """Arguments that all scripts for images and videos share."""

    image_mean: list[float] | None = flag(None, "Mean per channel; by default the checkpoint's, else 0.5.")
    image_std: list[float] | None = flag(None, "Standard deviation per channel; by default the checkpoint's, else 0.5.")


@dataclass
class ViewArguments(SampleArguments):
    """Which part of an image or clip an evaluation sees."""

    eval_crops: int | None = flag(
        None,
        "0: evaluate whole images, squeezed into --image_size. N: resize the shorter side and cut N evenly spaced "
        "squares along the longer side; one square is cut from the centre, several are for videos only. By default the "
        "checkpoint's processor decides, else 0.",
    )
    eval_crop_ratio: float = flag(1.0, "Length of the shorter side before --eval_crops, relative to --image_size.")

    def __post_init__(self):
        super().__post_init__()
        if self.eval_crops is not None and self.eval_crops < 0:
            raise InputError(f"--eval_crops {self.eval_crops}; accepted: 0 and above.")
        require_numbers(self, "eval_crop_ratio", lowest=1)


@dataclass
class DataArguments(ViewArguments):
    inputs: ClassVar[str] = "images"

    dataset_name: str | None = flag(
        None, "A data set on the Hub, `arrows` for the generated task of LieRE 5.2, or a task of --register."
    )
    dataset_config_name: str | None = flag(
        None, "Configuration of the data set; for the arrows `squares` (the default) or `rectangles`."
    )
    image_folder: str | None = flag(
        None, "Folder with one folder of images per class, or with train/ and validation/ that each contain these."
    )
    train_files: list[str] | None = flag(None, "Parquet, json or csv files to train on.")
    validation_files: list[str] | None = flag(None, "Parquet, json or csv files to evaluate.")
    train_split: str = flag("train", "Split to train on.")
    eval_split: str | None = flag(None, "Split to evaluate; by default the first of validation, valid, dev and test.")
    validation_fraction: float | None = flag(
        None, "Share of the training split to hold out if the data set has no other split."
    )
    image_column_name: str | None = flag(None, "Column of images; by default the only one.")
    label_column_name: str | None = flag(None, "Column of classes; by default the only one.")
    streaming: bool = flag(False, "Read training images on demand instead of downloading all of them first.")
    image_cache_gigabytes: float = flag(
        2.0, "Memory for decoded images, which the processes of a machine and later runs share through a file."
    )

    def __post_init__(self):
        super().__post_init__()
        if self.streaming and (self.train_fraction < 1 or self.validation_fraction is not None):
            raise InputError("--streaming cannot be combined with --train_fraction or --validation_fraction.")


@dataclass
class ImageDataArguments(DataArguments):
    """Images that may keep their aspect ratios."""

    max_num_patches: int | None = flag(
        None,
        "Keep the aspect ratio of every image and resize it to at most N patches, instead of to --image_size; by "
        "default the checkpoint's processor decides. Training-grid coordinates and position tables still refer to "
        "--image_size, by default the largest square of at most N patches.",
    )

    def __post_init__(self):
        super().__post_init__()
        if self.max_num_patches is not None and self.max_num_patches < 1:
            raise InputError(f"--max_num_patches {self.max_num_patches}; accepted: 1 and above.")


@dataclass
class AugmentationArguments:
    random_resized_crop: bool = flag(
        False,
        "Crop a random part of the image and resize it, as for ImageNet; with --max_num_patches the crop keeps the "
        "image's aspect ratio.",
    )
    random_resized_crop_scale: list[float] = flag([0.08, 1.0], "Smallest and largest area of that crop, as a share.")
    random_crop_ratio: float = flag(
        0.0,
        "Resize the shorter side to N times the size, keep the aspect ratio, and crop at random (ComRoPE's code: 1.1); "
        "0 for none.",
    )
    crop_padding: int = flag(0, "Pad by N black pixels and crop back at random, as for CIFAR.")
    flip_probability: float = flag(0.0, "Probability of a horizontal flip.")
    rand_augment_ops: int = flag(0, "Operations of RandAugment per image; 0 for none.")
    rand_augment_magnitude: int = flag(9, "Magnitude of RandAugment, 0 … 30.")
    rand_augment_ranges: str = flag(
        "torchvision",
        "Its operations and their ranges: `torchvision`, or those of LieRE's code, `liere`, which has Invert, "
        "SolarizeAdd and Cutout too and turns more than one in five of CIFAR's images constant at magnitude 14.",
    )
    auto_augment: str | None = flag(
        None, "timm's RandAugment instead, such as DeiT's rand-m9-mstd0.5-inc1, with magnitudes 0 … 10."
    )
    augment_first: bool = flag(False, "Apply RandAugment or the policy before the crop, as LieRE's code does.")
    random_erasing_probability: float = flag(
        0.0, "Probability of replacing a rectangle of 2 … 33% of the normalised image by noise."
    )
    repeated_augmentation: int = flag(
        1, "Views of each image in a batch. An epoch keeps its number of examples and uses 1/N of the images."
    )
    mixup_alpha: float = flag(0.0, "α of Mixup's Beta(α, α); 0 for no Mixup.")
    cutmix_alpha: float = flag(0.0, "α of CutMix's Beta(α, α); 0 for no CutMix.")
    mixing_probability: float = flag(
        1.0, "Share of batches to mix. If both Mixup and CutMix are on, each mixes half of these."
    )

    def __post_init__(self):
        for name in ("flip_probability", "random_erasing_probability", "mixing_probability"):
            if not 0 <= getattr(self, name) <= 1:
                raise InputError(f"--{name} {getattr(self, name)} is not a probability; accepted: 0 … 1.")
        least = dict.fromkeys(("crop_padding", "rand_augment_ops", "mixup_alpha", "cutmix_alpha"), 0)
        for name, bound in {**least, "repeated_augmentation": 1}.items():
            if getattr(self, name) < bound:
                raise InputError(f"--{name} {getattr(self, name)}; accepted: {bound} and above.")
        if self.random_crop_ratio and not 1 <= self.random_crop_ratio < math.inf:
            raise InputError(f"--random_crop_ratio {self.random_crop_ratio}; accepted: 0 for none, 1 and above.")
        for one, other in (("random_crop_ratio", "random_resized_crop"), ("auto_augment", "rand_augment_ops")):
            if getattr(self, one) and getattr(self, other):
                raise InputError(f"--{one} and --{other} both choose an augmentation; accepted: one of them.")
        if self.rand_augment_ranges not in ("torchvision", "liere"):
            raise InputError(f"--rand_augment_ranges {self.rand_augment_ranges!r}; accepted: torchvision, liere.")
        require_numbers(self, "rand_augment_magnitude", highest=30)
        scale = self.random_resized_crop_scale
        if len(scale) != 2 or not 0 < scale[0] <= scale[1] <= 1:
            raise InputError(f"--random_resized_crop_scale {scale}; accepted: two numbers with 0 < low <= high <= 1.")


@dataclass
class RunArguments(TrainingArguments):
    """Trainer's arguments, those that this project adds, and other defaults for some."""

    do_train: bool = flag(False, "Train the model.")
    do_eval: bool = flag(False, "Evaluate the model, after training if there is one.")
    resume_from_checkpoint: str | None = flag(
        None, "Continue an interrupted run: `last` from the newest checkpoint in output_dir, or the folder of another."
    )
    recipe: str | None = flag(None, "yaml file of flags, which the command line overrides.")
    register: list[str] = flag([], "Python files that register encodings, starts, coordinates or tasks of yours.")
    overwrite_output_dir: bool = flag(False, "Delete the run in output_dir instead of refusing to start.")
    resume_from_hub: bool = flag(
        False, "Resume from the last checkpoint in hub_model_id, pushed with hub_strategy checkpoint."
    )
    hub_license: str | None = flag(None, "Licence of the weights, by its name on the Hub, such as apache-2.0.")
    total_train_batch_size: int | None = flag(
        None,
        "Examples per optimizer step, over all processes and accumulated batches. Replaces per_device_train_batch_size "
        "and gives the same run on any number of processes.",
    )
    rotary_learning_rate_factor: float = flag(
        1.0, "Learning rate of the rotations' parameters, as a multiple of the others'."
    )
    attn_implementation: str | None = flag(
        None,
        "Implementation of attention, by its name in transformers, such as `eager`; by default the model's. It changes "
        "no result beyond rounding.",
    )
    verbose: bool = flag(
        False, "Print all that is logged, instead of the loss and the accuracy of each evaluation in training."
    )
    per_device_eval_batch_size: int = flag(64, "Examples per process in an evaluation.")
    dataloader_num_workers: int | None = flag(
        None,
        "Processes that read and augment batches, for each process of the run. By default none on a CPU. Beside an "
        "accelerator two fewer than the cores for each process, as far as shared memory allows, and they persist.",
    )
    remove_unused_columns: bool = flag(
        False, "Must stay off: the data loader yields examples, not columns of the model."
    )
    logging_nan_inf_filter: bool = flag(False, "Must stay off: a loss that is not finite stops the training.")

    def __post_init__(self):
        self._check_numbers()
        # Without this, each of several processes would train a separate copy of the model, and bf16 would be refused.
        self.use_cpu = self.use_cpu or not torch.accelerator.is_available()
        self.chooses_workers = self.dataloader_num_workers is None
        if self.chooses_workers:
            self.dataloader_num_workers = 0 if self.use_cpu else default_workers()
            self.dataloader_persistent_workers |= self.dataloader_num_workers > 0
        try:
            super().__post_init__()
        except ValueError as error:
            raise InputError(str(error)) from error
        self._check_reports()
        if launched_processes() > 1 and self.world_size == 1:
            raise InputError(
                f"{launched_processes()} processes were launched; they cannot share a model on {self.device.type}; "
                "accepted: one process, or --use_cpu true."
            )
        if self.device.type == "cpu":
            self.dataloader_pin_memory = False
        if self.remove_unused_columns or self.logging_nan_inf_filter:
            raise InputError("--remove_unused_columns and --logging_nan_inf_filter must stay off, see --help.")
        if self.dataloader_drop_last:
            raise InputError(
                "--dataloader_drop_last would also drop images from the evaluation; accepted: leave it off, incomplete "
                "batches are weighted exactly."
            )
        if not self.average_tokens_across_devices:
            raise InputError("--average_tokens_across_devices must stay on: the loss is a mean over all processes.")
        if self.total_train_batch_size is not None:
            self.per_device_train_batch_size = self._share_of_batch()
        self._check_hub()
        if not self.do_train and not self.do_eval:
            raise InputError("Nothing to do: give --do_train, --do_eval or both.")

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts of the data that the run needs."""
        return ("training",) * self.do_train + ("evaluation",) * self.do_eval

    @property
    def resumes(self) -> bool:
        return self.resume_from_checkpoint not in (None, "False", "false")

    @property
    def resumes_last(self) -> bool:
        """Whether the run resumes from the newest checkpoint in its output directory."""
        return self.resume_from_checkpoint in ("last", "True", "true", True)

    @property
    def order_seed(self) -> int:
        """Seed for the order and augmentation of the examples."""
        return self.seed if self.data_seed is None else self.data_seed

    def _check_numbers(self):
        require_numbers(self, "learning_rate", "weight_decay", "max_grad_norm", "rotary_learning_rate_factor")
        require_numbers(self, "label_smoothing_factor", highest=1)
        require_numbers(self, "per_device_train_batch_size", "per_device_eval_batch_size", lowest=1)
        require_numbers(self, "gradient_accumulation_steps", lowest=1)
        # max_steps is -1 by default: Trainer then trains for num_train_epochs.
        if self.max_steps <= 0 and not 0 < self.num_train_epochs < math.inf:
            raise InputError(f"--num_train_epochs {self.num_train_epochs}; accepted: numbers above 0.")

    def _check_reports(self):
        available = get_available_reporting_integrations()
        missing = [name for name in self.report_to if name not in available]
        if missing:
            known = missing[0] in INTEGRATION_TO_CALLBACK
            reason = f"is not installed (pip install {missing[0]})" if known else "is unknown to transformers"
            raise InputError(f"--report_to {missing[0]} {reason}; accepted here: {', '.join([*available, 'none'])}.")

    def _check_hub(self):
        if self.push_to_hub and not (self.do_train and self.do_eval):
            raise InputError("--push_to_hub needs --do_train and --do_eval: a card must contain figures.")
        if self.hub_strategy == HubStrategy.ALL_CHECKPOINTS:
            raise InputError(
                "--hub_strategy all_checkpoints is not supported; accepted: end, every_save (one commit per save, to "
                "be loaded by its revision) and checkpoint (also saves what --resume_from_hub needs)."
            )
        if self.resume_from_hub and (self.resumes or self.load_best_model_at_end):
            raise InputError(
                "--resume_from_hub cannot be combined with --resume_from_checkpoint or --load_best_model_at_end: the "
                "Hub has only the last checkpoint."
            )

    def _share_of_batch(self) -> int:
        parts = self.world_size * self.gradient_accumulation_steps
        if self.total_train_batch_size < parts or self.total_train_batch_size % parts:
            raise InputError(
                f"--total_train_batch_size {self.total_train_batch_size} cannot be shared by {self.world_size} "
                f"processes × {self.gradient_accumulation_steps} accumulated batches; accepted: multiples of {parts}."
            )
        share = self.total_train_batch_size // parts
        if self.per_device_train_batch_size not in (share, RunArguments.per_device_train_batch_size):
            raise InputError(
                f"--per_device_train_batch_size {self.per_device_train_batch_size} contradicts "
                f"--total_train_batch_size {self.total_train_batch_size}, which is {share} per process; accepted: "
                "--total_train_batch_size alone. It also overrides the recipe's."
            )
        return share


def default_workers(shared_memory: Path = Path("/dev/shm")) -> int:
    """
    Data loader workers of one of the processes of this machine: its share of the cores but two, one for itself and one
    for what the system does.

    Batches go through shared memory, of which containers may have little (Docker: 64 MB). None where there is no such
    folder: these systems start workers as new processes, each of which imports everything again.
    """
    if not shared_memory.is_dir():
        return 0
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    cores = len(os.sched_getaffinity(0)) // processes - 2
    room = shutil.disk_usage(shared_memory).free // (processes * BYTES_OF_WORKER)
    return max(min(cores, room), 0)


def launched_processes() -> int:
    """Number of processes that torchrun or accelerate started."""
    return int(os.environ.get("WORLD_SIZE", 1))


def launched_on_cpus() -> bool:
    """Whether several processes were started on a machine without an accelerator."""
    return launched_processes() > 1 and not torch.accelerator.is_available()


def require_numbers(arguments: Any, *names: str, lowest: float = 0, highest: float = math.inf) -> None:
    """Raises [`InputError`] unless these fields are finite numbers between `lowest` and `highest`."""
    for name in names:
        value = getattr(arguments, name)
        if value is not None and not (lowest <= value <= highest and math.isfinite(value)):
            accepted = f"{lowest} and above" if highest == math.inf else f"{lowest} … {highest}"
            raise InputError(f"--{name} {value}; accepted: {accepted}.")


def _takes_lists_alone(kind: Any) -> bool:
    """Whether a type is a union of lists, and perhaps `None`."""
    origins = {get_origin(part) for part in get_args(kind) if part is not type(None)}
    return bool(origins) and origins <= {list, tuple}


def _parse_value(text: str) -> Any:
    if text in ("True", "False", "None"):
        return {"True": True, "False": False, "None": None}[text]
    if re.fullmatch(r"\d+(,\d+)+", text):
        # Accept 96,128 for [96,128].
        text = f"[{text}]"
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text
