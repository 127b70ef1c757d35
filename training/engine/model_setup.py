"""Model and processor of a run: new from flags, or loaded from a checkpoint with every weight accounted for."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModelForImageClassification,
    AutoModelForVideoClassification,
    AutoVideoProcessor,
    PreTrainedConfig,
    PreTrainedModel,
    Siglip2ImageProcessor,
    ViTImageProcessor,
)
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, logging

from hf_liere import LieREVideoConfig, LieREViTConfig, upgrade_encoding
from hf_liere.encoding.rotary_fields import TRAINING_ONLY
from hf_liere.errors import InputError
from hf_liere.reading.volumes import ORIENTATION
from hf_liere.storage.loading import (
    CheckpointError,
    loading_options,
    require_all_keys,
    require_loaded_keys,
    translate_loading_errors,
)
from hf_liere.storage.saved_model import SavedModel
from hf_liere.transformer.configuration_liere import LieREConfig, LieREPixelConfig, pair
from hf_liere.transformer.video_processing_liere import LieREVideoProcessor
from training.common.arguments import CheckpointArguments, SampleArguments, ViewArguments
from training.data.sources import LabelledImages


logger = logging.get_logger(__name__)

# Fields that change how a checkpoint trains but not what its weights mean. The image size is the data's; a checkpoint
# keeps its training size, because its positions refer to it.
DROPOUTS = ("hidden_dropout_prob", "mlp_dropout_prob", "attention_probs_dropout_prob")
CHANGEABLE_FIELDS = (*DROPOUTS, "drop_path_rate", *TRAINING_ONLY)
SIZE_FIELDS = ("image_size", "num_frames")
# Fields that --upgrade_encoding changes.
UPGRADED_FIELDS = ("position_encoding", "block_size", "share_heads", "share_layers")
# Both give the same coordinates on the training grid, so a checkpoint with one may be evaluated with the other.
SAME_IN_TRAINING = {"train_grid", "fixed_grid"}
BICUBIC = 3
# Suffixes of classifier classes.
HEADS = ("ForImageClassification", "ForVideoClassification", "ForSequenceClassification", "ForTokenClassification")
# A classifier made from a model of images and text does not use these weights.
NOT_FOR_CLASSIFIERS = ("text_model.", "text_projection.", "visual_projection.", "logit_scale", "logit_bias")


def resolve_config(arguments: CheckpointArguments) -> PreTrainedConfig:
    """
    The configuration of the checkpoint, or a new one from the flags.

    Raises:
        InputError: if a flag contradicts the checkpoint.
    """
    config = _given_config(arguments)
    if is_physical(config) and not isinstance(config, LieREVideoConfig):
        raise InputError("--coordinates physical: images have no pixel spacing; accepted for volumes only.")
    return config


def is_physical(config: PreTrainedConfig) -> bool:
    """Whether the model needs the spacing of its inputs."""
    return getattr(config, "coordinates", None) == "physical"


def _given_config(arguments: CheckpointArguments) -> PreTrainedConfig:
    given = arguments.architecture()
    upgrades = getattr(arguments, "upgrade_encoding", False)
    if arguments.model_name_or_path is None:
        if upgrades:
            raise InputError("--upgrade_encoding upgrades a checkpoint; accepted: with --model_name_or_path.")
        try:
            return arguments.config_class(**given)
        except Exception as error:
            # Strict configurations raise several classes of errors; all name the field and what it accepts.
            raise InputError(str(error)) from error
    config = checkpoint_config("--model_name_or_path", arguments.model_name_or_path, arguments.model_revision)
    if upgrades and not isinstance(config, LieREConfig):
        raise InputError(f"--upgrade_encoding: the checkpoint is a {config.model_type}; accepted: a model of hf_liere.")
    for name in (*SIZE_FIELDS, *(UPGRADED_FIELDS if upgrades else ())):
        given.pop(name, None)
    # With a checkpoint, None keeps the checkpoint's value.
    for name, value in ((name, value) for name, value in given.items() if value is not None):
        same_in_training = name == "coordinates" and {value, getattr(config, name, None)} <= SAME_IN_TRAINING
        if name not in CHANGEABLE_FIELDS and not same_in_training and getattr(config, name, None) != value:
            raise InputError(
                f"--{name} {value} contradicts the checkpoint's {getattr(config, name, None)}; accepted beside "
                f"--model_name_or_path: {', '.join(CHANGEABLE_FIELDS)} and --{', --'.join(SIZE_FIELDS)}."
            )
        setattr(config, name, value)
    return config


def checkpoint_config(flag: str, name: str, revision: str = "main") -> PreTrainedConfig:
    """
    The configuration of a checkpoint, read before its other files.

    Raises:
        InputError: if it is missing or cannot be read.
        HubError: if the Hub refuses or does not answer.
    """
    with translate_errors(flag, name):
        return AutoConfig.from_pretrained(name, trust_remote_code=False, **loading_options(name, revision))


@contextlib.contextmanager
def translate_errors(flag: str, name: str) -> Iterator[None]:
    """
    Translates the errors of loading a checkpoint.

    Raises:
        InputError: with the reason, if files are missing or damaged, or the model is unknown.
    """
    try:
        with translate_loading_errors(name):
            yield
    except CheckpointError as error:
        raise InputError(f"{flag} {error}") from error


def resolve_image_size(arguments: CheckpointArguments, config: PreTrainedConfig) -> tuple[int, int]:
    """
    Height and width of the images of this run.

    Raises:
        InputError: if they do not consist of whole patches.
    """
    # Dual encoders have the sizes in their vision configuration.
    config = getattr(config, "vision_config", config)
    # Convolutional networks may have neither.
    size = pair("image_size", arguments.architecture().get("image_size", getattr(config, "image_size", 224)))
    patch = pair("patch_size", getattr(config, "patch_size", 1))
    if any(extent < part or extent % part for extent, part in zip(size, patch, strict=True)):
        raise InputError(
            f"--image_size {size[0]}×{size[1]} is not divisible by the patch size {patch[0]}×{patch[1]}; accepted are "
            f"multiples, such as {max(size[0] // patch[0], 1) * patch[0]}×{max(size[1] // patch[1], 1) * patch[1]}."
        )
    return size


def resolve_num_frames(arguments: CheckpointArguments, config: LieREVideoConfig) -> int:
    """
    Number of frames per clip in this run.

    Raises:
        InputError: if the clips do not consist of whole tubelets.
    """
    frames, tubelet = arguments.architecture().get("num_frames", config.num_frames), config.tubelet_size
    if frames < tubelet or frames % tubelet:
        raise InputError(
            f"--num_frames {frames} is not divisible by the tubelet size {tubelet}; accepted are multiples, such as "
            f"{max(frames // tubelet, 1) * tubelet}."
        )
    return frames


def resolve_processor(
    arguments: CheckpointArguments, data_arguments: SampleArguments, size: tuple[int, int], config: PreTrainedConfig
) -> ViTImageProcessor | Siglip2ImageProcessor | LieREVideoProcessor:
    """
    The processor that is saved with the checkpoint, so that pipelines prepare pixels as the evaluation does. It keeps
    aspect ratios if the script has the flag `max_num_patches` and the flag, or the checkpoint's processor, sets it.

    Raises:
        InputError: if the number of means or deviations is not the number of channels, or if images keep their aspect
            ratio but patches are not square.
    """
    is_video, is_ours = isinstance(config, LieREVideoConfig), isinstance(config, LieREPixelConfig)
    num_channels = getattr(config, "vision_config", config).num_channels
    mean, std, resample = [0.5] * num_channels, [0.5] * num_channels, BICUBIC
    max_num_patches = getattr(data_arguments, "max_num_patches", None)
    if arguments.model_name_or_path is not None:
        try:
            auto_class = AutoVideoProcessor if is_video else AutoImageProcessor
            saved = auto_class.from_pretrained(
                arguments.model_name_or_path, revision=arguments.model_revision, trust_remote_code=False
            )
            mean, std, resample = saved.image_mean, saved.image_std, int(saved.resample)
            if max_num_patches is None and hasattr(data_arguments, "max_num_patches"):
                max_num_patches = getattr(saved, "max_num_patches", None)
            _take_over(saved, data_arguments, is_ours)
        except OSError:
            logger.warning(f"{arguments.model_name_or_path} has no processor; mean and deviation are 0.5.")
    mean, std = data_arguments.image_mean or mean, data_arguments.image_std or std
    for name, values in (("image_mean", mean), ("image_std", std)):
        if len(values) != num_channels:
            raise InputError(f"--{name} {values} has {len(values)} values; accepted: one per channel, {num_channels}.")
    if min(std) <= 0:
        raise InputError(f"--image_std {std}; accepted: positive numbers.")
    fields = {"image_mean": list(mean), "image_std": list(std), "resample": resample}
    crops = getattr(data_arguments, "eval_crops", None) or 0
    _check_crops(data_arguments, crops, size, is_video, max_num_patches)
    if max_num_patches is not None:
        patch_size = _square_patch(config, max_num_patches)
        return Siglip2ImageProcessor(**fields, patch_size=patch_size, max_num_patches=max_num_patches)
    fields |= {"size": {"height": size[0], "width": size[1]}, "do_center_crop": crops > 0}
    if is_video:
        # How `hf-liere predict` reads volumes.
        fields |= {"volume_orientation": ORIENTATION, "intensity_range": data_arguments.intensity_range}
    if crops:
        # A processor takes only one crop, from the centre.
        fields["crop_size"] = fields["size"]
        fields["size"] = {"shortest_edge": round(data_arguments.eval_crop_ratio * size[0])}
    return LieREVideoProcessor(**fields) if is_video else ViTImageProcessor(**fields)


def _take_over(
    processor: ViTImageProcessor | Siglip2ImageProcessor | LieREVideoProcessor, arguments: ViewArguments, is_ours: bool
) -> None:
    """
    Copies the crop of the checkpoint's processor, if it `is_ours`, and its range of intensities into flags that were
    not given, so that the record states what is used.
    """
    if getattr(arguments, "intensity_range", ()) is None:
        arguments.intensity_range = getattr(processor, "intensity_range", None)
    if not is_ours or getattr(arguments, "eval_crops", 0) is not None:
        return
    if getattr(processor, "do_center_crop", False) and "shortest_edge" in processor.size:
        arguments.eval_crops = 1
        arguments.eval_crop_ratio = processor.size["shortest_edge"] / processor.crop_size["height"]


def _check_crops(
    arguments: SampleArguments, crops: int, size: tuple[int, int], is_video: bool, max_num_patches: int | None
) -> None:
    if not crops:
        if getattr(arguments, "eval_crop_ratio", 1.0) != 1:
            raise InputError(f"--eval_crop_ratio {arguments.eval_crop_ratio} needs --eval_crops; accepted: 1.")
        return
    if crops > 1 and not is_video:
        raise InputError(f"--eval_crops {crops}: several views are of videos only; accepted for images: 0, 1.")
    if size[0] != size[1] or max_num_patches is not None:
        raise InputError(
            f"--eval_crops {crops} cuts out squares; accepted with --max_num_patches or an --image_size that is not "
            "square: 0."
        )


def _square_patch(config: PreTrainedConfig, max_num_patches: int) -> int:
    """The side of a patch. Raises [`InputError`] if the model does not take images of different sizes."""
    if not isinstance(config, LieREViTConfig):
        raise InputError(
            f"--max_num_patches {max_num_patches}: {config.model_type} models take images of one size here; accepted: "
            "models of this library."
        )
    height, width = config.patch_shape
    if height != width:
        raise InputError(
            f"--max_num_patches {max_num_patches}: patches of {height}×{width} are not square, but the processor cuts "
            "squares; accepted: a patch_size of one number."
        )
    return height


def build_model(
    arguments: CheckpointArguments,
    config: PreTrainedConfig,
    images: LabelledImages,
    trains_head: bool,
    auto_class: type | None = None,
) -> PreTrainedModel:
    """
    A model for the classes of the data set.

    A checkpoint keeps its classifier if it has the same classes. Otherwise it gets a new classifier, with a warning, or
    is refused if no classifier is trained.

    Args:
        auto_class: Auto class of the classifier; `None` for that of images or videos.

    Raises:
        InputError: if the number of labels is not the data set's, or a weight is missing or left over.
    """
    names = images.label_names
    if arguments.num_labels not in (None, len(names)):
        raise InputError(
            f"--num_labels {arguments.num_labels} contradicts the data set, which has {len(names)} labels: "
            f"{', '.join(names[:10])}{' …' if len(names) > 10 else ''}. Accepted: {len(names)}, or leave it out."
        )
    if auto_class is None:
        is_video = isinstance(config, LieREVideoConfig)
        auto_class = AutoModelForVideoClassification if is_video else AutoModelForImageClassification
    labels = dict(enumerate(names)), {name: number for number, name in enumerate(names)}
    if arguments.model_name_or_path is None:
        config.id2label, config.label2id = labels
        return auto_class.from_config(config)

    is_classifier = any(name.endswith(HEADS) for name in config.architectures or HEADS)
    keeps_head = is_classifier and _has_same_classes(config, images)
    old = config.num_labels
    if not keeps_head and not trains_head:
        raise InputError(
            f"The checkpoint has {old} labels ({', '.join(list(config.id2label.values())[:5])} …), the data set has "
            f"{len(names)} ({', '.join(names[:5])} …); accepted if no classifier is trained: the same labels."
        )
    if not keeps_head:
        config.id2label, config.label2id = labels
    model = _load_classifier(arguments, config, auto_class, keeps_head)
    if not keeps_head:
        found = f"'s classifier for {old} labels was replaced by" if is_classifier else " has no classifier and gets"
        logger.warning(f"The checkpoint{found} a new one for the data set's {len(names)}.")
    return _upgrade(model, arguments) if getattr(arguments, "upgrade_encoding", False) else model


def _load_classifier(
    arguments: CheckpointArguments, config: PreTrainedConfig, auto_class: type, keeps_head: bool
) -> PreTrainedModel:
    """The model of the checkpoint, with its classifier or a new one. Raises [`InputError`] for missing weights."""
    with translate_errors("--model_name_or_path", arguments.model_name_or_path):
        model, loading = auto_class.from_pretrained(
            arguments.model_name_or_path,
            revision=arguments.model_revision,
            config=config,
            trust_remote_code=False,
            # Half-precision weights would lose small updates. With --bf16 the computation is still in bfloat16.
            dtype=torch.float32,
            ignore_mismatched_sizes=not keeps_head,
            output_loading_info=True,
        )
    # A checkpoint without a classifier may have a pooler, which those of vision models rarely use.
    besides = NOT_FOR_CLASSIFIERS if keeps_head else (*NOT_FOR_CLASSIFIERS, "classifier.", "pooler.")
    require_loaded_keys(loading, arguments.model_name_or_path, besides)
    if not keeps_head:
        # from_pretrained renews only classifiers of another size; one of the same size may be for other classes.
        for layer in (layer for layer in model.classifier.modules() if isinstance(layer, nn.Linear)):
            nn.init.normal_(layer.weight, std=getattr(config, "initializer_range", 0.02))
            nn.init.zeros_(layer.bias)
    return model


def _upgrade(model: PreTrainedModel, arguments: CheckpointArguments) -> PreTrainedModel:
    """The model with the position encoding of the flags. Raises [`InputError`] if the upgrade is not exact."""
    given = arguments.architecture()
    wanted = {name: given[name] for name in UPGRADED_FIELDS if given.get(name) is not None}
    if all(getattr(model.config, name) == value for name, value in wanted.items()):
        return model
    return upgrade_encoding(model, **{"position_encoding": model.config.position_encoding, **wanted})


def order_labels(images: LabelledImages, config: PreTrainedConfig) -> list[int]:
    """The model's number for every label of the data set: a checkpoint may order the same classes differently."""
    if not images.named or _is_anonymous(config):
        return list(range(len(images.label_names)))
    numbers = {name: int(number) for number, name in config.id2label.items()}
    return [numbers[name] for name in images.label_names]


def check_checkpoint_keys(checkpoint: str | Path, model: PreTrainedModel) -> None:
    """
    Compares the weights in a Trainer checkpoint with the model's. Trainer would load what fits and ignore the rest.

    Raises:
        InputError: naming the keys that are missing, unexpected or of another shape.
    """
    folder = Path(checkpoint)
    if not any((folder / name).is_file() for name in (SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME)):
        # An FSDP checkpoint in shards; its loader checks them.
        return
    saved = {key: list(shape) for key, shape in SavedModel(folder).shapes.items()}
    expected = {key: list(value.shape) for key, value in model.state_dict().items()}
    require_all_keys(set(expected) - set(saved), set(saved) - set(expected), str(checkpoint))
    for key, shape in expected.items():
        if saved[key] != shape:
            raise InputError(f"{key} has shape {saved[key]} in the checkpoint {folder.name} and {shape} in the model.")


def _has_same_classes(config: PreTrainedConfig, images: LabelledImages) -> bool:
    """Compares names of classes, or their number if the data set or the checkpoint (LABEL_0 …) has no names."""
    if not images.named:
        return len(images.label_names) <= config.num_labels
    if _is_anonymous(config):
        return len(images.label_names) == config.num_labels
    return sorted(config.id2label.values()) == sorted(images.label_names)


def _is_anonymous(config: PreTrainedConfig) -> bool:
    return list(config.id2label.values()) == [f"LABEL_{number}" for number in range(config.num_labels)]
