"""
Facts in a saved folder: the model's configuration, and the training scripts' records of its training and evaluation.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..auto import model_class
from ..patching.adapters import parse_adapter
from ..storage.saved_model import ADAPTER_CONFIG, CONFIG, SavedModel, first_line
from .facts import NUMBERS, FactsError, common_facts


RUN_FILE = "run_config.json"
RESULTS_FILE = "eval_results.json"
RECIPE_FIELDS = (
    "num_train_epochs",
    "max_steps",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "learning_rate",
    "rotary_learning_rate_factor",
    "lr_scheduler_type",
    "warmup_steps",
    "weight_decay",
    "adam_beta1",
    "adam_beta2",
    "max_grad_norm",
    "label_smoothing_factor",
    "bf16",
    "fp16",
)
UNUSED = (None, False, 0, 0.0, -1)
NOT_RECORDED = "not recorded"


def is_describable(saved: SavedModel) -> bool:
    """Whether a saved model can have a card: image and video models can, unless they generate text."""
    try:
        cls = model_class(saved.architecture)
    except ValueError:
        # `describe_checkpoint` reports models that are not ours.
        return True
    return any(kind in cls.input_modalities for kind in ("image", "video")) and not cls.can_generate()


def describe_checkpoint(saved: SavedModel) -> dict[str, Any]:
    """
    Facts of a saved model or adapter, by the names of [`Facts`], with every configuration field in `model`.

    Raises:
        FactsError: if the configuration is unreadable, not one of ours, or that of a model without cards.
    """
    if saved.is_adapter:
        try:
            patch, (base, *_) = parse_adapter(saved.configuration, saved.folder / ADAPTER_CONFIG)
        except ValueError as error:
            raise FactsError(str(error)) from None
        shapes = {"num_hidden_layers": base["layers"], "num_attention_heads": base["heads"]}
        model = {**patch.to_dict(), **shapes, "base_model_type": base["model_type"]}
        if patch.rotary_init == "pretrained":
            # Models with RoPE have no position table to keep.
            del model["keep_absolute"]
        return {"architecture": "adapter", "encoding": patch.position_encoding, "model": model}
    try:
        cls = model_class(saved.architecture)
        config = cls.config_class.from_dict(saved.configuration)
    except Exception as error:
        # Errors of strict configurations name the field and what it accepts.
        raise FactsError(f"{saved.folder / CONFIG} is not a configuration of hf_liere: {first_line(error)}") from None
    if not is_describable(saved):
        raise FactsError(
            f"{saved} contains a {cls.__name__}; cards are rendered for image and video models only. Write a "
            "README.md there; it is published as it is, without facts and evaluations."
        )
    values = config.to_dict()
    model = {**(values.get("vision_config") or {}), **values, **(values.get("rotary_patch") or {})}
    found = {"architecture": cls.__name__, "encoding": model.get("position_encoding"), "model": model}
    if cls.__name__.endswith("Classification"):
        names = [str(config.id2label[number]) for number in range(config.num_labels)]
        model["num_labels"] = config.num_labels
        found["class_names"] = [] if names == [f"LABEL_{number}" for number in range(len(names))] else names
    return found


def result_of_run(saved: SavedModel, metrics: Mapping[str, Any] | None = None) -> dict | None:
    """
    The evaluation in the output folder of a training script, or `metrics` of that run; `None` without one.

    Returns:
        `image_size`, `samples`, `weights` (digest of the evaluated weights), `data` (see [`data_of_run`]), and for
        every metric its value and the bounds `<metric>_low` and `<metric>_high` of its 95% interval. Also
        `max_num_patches` for images that kept their aspect ratio; coordinates then refer to `image_size`.

    Raises:
        FactsError: if the record cannot be read, or the evaluation shuffled its patches or shifted their positions.
    """
    metrics = read_record(saved, RESULTS_FILE) if metrics is None else metrics
    if not metrics:
        return None
    run = read_record(saved, RUN_FILE)
    condition, unchanged = record_group(run, "condition"), (None, "none", 0)
    names = [name for name in ("evaluation_shuffle", "evaluation_offset") if condition.get(name) not in unchanged]
    if names:
        shown = ", ".join(f"{name} {condition[name]}" for name in names)
        raise FactsError(f"{saved} contains an evaluation with {shown}; accepted: evaluations of unchanged images.")
    data, samples = data_of_run(run, "evaluation"), metrics.get("eval_samples")
    samples = (data or {}).get("samples") if samples is None else samples
    result = {
        "image_size": run.get("image_size"),
        # Unreadable examples are counted separately and do not enter any metric.
        "samples": samples and samples - metrics.get("eval_unreadable", 0),
        "weights": read_record(saved, "weights.json").get("sha256"),
        "data": data,
    }
    if (patches := record_group(run, "data").get("max_num_patches")) is not None:
        result["max_num_patches"] = patches
    return result | {name: metrics[f"eval_{name}"] for name in NUMBERS if f"eval_{name}" in metrics}


def data_of_run(run: Mapping[str, Any], side: str) -> dict[str, Any] | None:
    """
    The training data (`side="train"`) or evaluation data (`side="evaluation"`) in the record of a run.

    Returns:
        A mapping with the names of `facts.DATA_FIELDS`, completed from common.yaml; `None` if the run did not train.
    """
    if (used := record_group(run, "examples").get(side)) is None:
        return None if side == "train" else {"name": NOT_RECORDED, "type": "custom"}
    name, files = used.get("name"), [Path(file).name for file in used.get("files") or []]
    data = _known_data(name, files)
    if data is None and name:
        data = {"name": name, "type": name, "hub_id": name if "/" in name else None}
    elif data is None:
        shown = ", ".join(files[:3]) + (f" and {len(files) - 3} more files" if len(files) > 3 else "")
        data = {"name": shown or used.get("folder") or NOT_RECORDED, "type": "custom"}
    details = {"files": files, **{key: used.get(key) for key in ("config", "split", "samples")}}
    return {key: value for key, value in (data | details).items() if value}


def _known_data(name: str | None, files: list[str]) -> dict[str, Any] | None:
    for known in common_facts()["datasets"].values():
        named = name is not None and name in (known.get("hub_id"), known["type"])
        if named or (name is None and files and set(files) <= set(known.get("files", ()))):
            return {key: value for key, value in known.items() if key not in ("split", "files")}
    return None


def recipe_of_run(run: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of training and augmentation in use, by flag."""
    training, augmentation, data = (record_group(run, name) for name in ("training", "augmentation", "data"))
    settings = {name: training.get(name) for name in RECIPE_FIELDS}
    settings |= {name: data.get(name) for name in ("max_num_patches", "max_train_samples", "train_fraction")}
    settings |= {"model_name_or_path": run.get("model_name_or_path"), **augmentation}
    without_effect = {
        "gradient_accumulation_steps": training.get("gradient_accumulation_steps") == 1,
        # Trainer stops at max_steps, whatever the number of epochs.
        "num_train_epochs": training.get("max_steps") not in UNUSED,
        "train_fraction": data.get("train_fraction") == 1,
        "random_resized_crop_scale": not augmentation.get("random_resized_crop"),
        "rand_augment_magnitude": not augmentation.get("rand_augment_ops"),
        "mixing_probability": not (augmentation.get("mixup_alpha") or augmentation.get("cutmix_alpha")),
        "repeated_augmentation": augmentation.get("repeated_augmentation") == 1,
    }
    return {name: value for name, value in settings.items() if value not in UNUSED and not without_effect.get(name)}


def read_record(saved: SavedModel, name: str) -> dict[str, Any]:
    """Read a record beside a model; empty if missing. Raises [`FactsError`] if it cannot be read."""
    try:
        return saved.read_json(name) if saved.has(name) else {}
    except ValueError as error:
        raise FactsError(str(error)) from None


def record_group(content: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A group of a record; empty if missing."""
    value = content.get(name)
    if not isinstance(value, dict | None):
        raise FactsError(f"{name} in {RUN_FILE} is {value!r}; accepted: a json object.")
    return value or {}
