"""Detectors: transformers' Deformable DETR on a backbone of this library, new or from a checkpoint."""

from dataclasses import dataclass

from transformers import AutoModelForObjectDetection, DeformableDetrConfig, PreTrainedModel

from hf_liere import LieREViTConfig
from hf_liere.auto import load_checkpoint
from hf_liere.errors import InputError
from hf_liere.storage.loading import require_loaded_keys
from hf_liere.transformer.modeling_liere import LieREViTModel
from hf_liere.upgrades import LEARNED_ENCODINGS, ConversionError, resize_input, upgrade_encoding
from training.common.arguments import ModelArguments, flag
from training.engine.model_setup import CHANGEABLE_FIELDS, resolve_config, translate_errors


@dataclass
class DetectorArguments:
    """The detector around the backbone, with the names of DeformableDetrConfig."""

    backbone_name_or_path: str | None = flag(
        None,
        "Checkpoint for the backbone's weights: a classifier or encoder of this library, such as hf-liere convert "
        "writes. The other flags upgrade its encoding and resize its table.",
    )
    d_model: int = flag(256, "Width of the detector.")
    encoder_layers: int = flag(6, "Encoder layers of the detector.")
    decoder_layers: int = flag(6, "Decoder layers of the detector.")
    detector_ffn_dim: int = flag(1024, "Width of the detector's feed-forward layers.")
    detector_heads: int = flag(8, "Attention heads of the detector.")
    num_queries: int = flag(300, "Largest number of objects per image.")
    num_feature_levels: int = flag(4, "Number of feature resolutions: the backbone's and halved ones.")
    top_k: int = flag(100, "Number of detections per image to evaluate.")

    def __post_init__(self):
        # Deformable DETR uses GroupNorm with 32 groups of channels.
        if self.d_model % 32 or self.d_model % self.detector_heads:
            raise InputError(
                f"--d_model {self.d_model}; accepted: multiples of 32 that {self.detector_heads} heads divide."
            )


# Fields that the upgrade of a backbone sets. Rotations that it adds start at zero.
UPGRADE_FIELDS = ("position_encoding", "block_size", "share_heads", "share_layers", "image_size", "rotary_init")


def load_backbone(arguments: ModelArguments, detector: DetectorArguments) -> LieREViTModel | None:
    """
    The encoder of `backbone_name_or_path`, upgraded to the encoding and image size of the flags with the same outputs.

    Raises:
        InputError: if a flag contradicts the checkpoint, or no exact upgrade exists.
    """
    name = detector.backbone_name_or_path
    if name is None or arguments.model_name_or_path is not None:
        return None
    given = {field: value for field, value in arguments.architecture().items() if value is not None}
    try:
        with translate_errors("--backbone_name_or_path", name):
            model, _ = load_checkpoint(name)
        if not isinstance(model.config, LieREViTConfig):
            raise InputError(
                f"--backbone_name_or_path {name!r} is a {model.config.model_type}; accepted: image models of hf_liere."
            )
        model = _upgrade(getattr(model, model.base_model_prefix, model), given)
    except ConversionError as error:
        raise InputError(f"--backbone_name_or_path {name}: {error}") from error
    for field, value in given.items():
        if field in CHANGEABLE_FIELDS:
            setattr(model.config, field, value)
        elif field not in UPGRADE_FIELDS and getattr(model.config, field, None) != value:
            raise InputError(
                f"--{field} {value} contradicts the backbone's {getattr(model.config, field, None)}; accepted beside "
                f"--backbone_name_or_path: {', '.join((*CHANGEABLE_FIELDS, *UPGRADE_FIELDS))}."
            )
    return model


def _upgrade(model: LieREViTModel, given: dict) -> LieREViTModel:
    options = {name: given[name] for name in ("block_size", "share_heads", "share_layers") if name in given}
    wanted = {"position_encoding": given.get("position_encoding", model.config.position_encoding), **options}
    if any(getattr(model.config, name) != value for name, value in wanted.items()):
        if wanted["position_encoding"] not in LEARNED_ENCODINGS:
            raise InputError(
                f"--position_encoding {wanted['position_encoding']}: the backbone has "
                f"{model.config.position_encoding}; accepted: the same, or {', '.join(LEARNED_ENCODINGS)}."
            )
        model = upgrade_encoding(model, **wanted)
    size = given.get("image_size", model.config.image_size)
    return model if size == model.config.image_size else resize_input(model, size)


def build_config(
    arguments: ModelArguments, detector: DetectorArguments, backbone: LieREViTModel | None = None
) -> DeformableDetrConfig:
    """
    The checkpoint's configuration, or that of a new detector on the given backbone or a new one from the flags.

    Raises:
        InputError: if the checkpoint is not a Deformable DETR.
    """
    config = resolve_config(arguments) if backbone is None else backbone.config
    if isinstance(config, DeformableDetrConfig):
        return config
    if arguments.model_name_or_path is not None:
        raise InputError(
            f"--model_name_or_path {arguments.model_name_or_path!r} is a {config.model_type}; accepted: a Deformable "
            "DETR, or --backbone_name_or_path."
        )
    # The detector takes the feature map of the last layer, before the norm of the backbone.
    config.set_output_features_output_indices(out_features=[config.stage_names[-1]], out_indices=None)
    return DeformableDetrConfig(
        backbone_config=config,
        d_model=detector.d_model,
        encoder_layers=detector.encoder_layers,
        decoder_layers=detector.decoder_layers,
        encoder_ffn_dim=detector.detector_ffn_dim,
        decoder_ffn_dim=detector.detector_ffn_dim,
        encoder_attention_heads=detector.detector_heads,
        decoder_attention_heads=detector.detector_heads,
        num_queries=detector.num_queries,
        num_feature_levels=detector.num_feature_levels,
        auxiliary_loss=True,
        with_box_refine=True,
    )


def build_detector(
    arguments: ModelArguments, config: DeformableDetrConfig, names: list[str], backbone: LieREViTModel | None = None
) -> PreTrainedModel:
    """
    A detector of the named categories, with the weights of `backbone` if given.

    Raises:
        InputError: if the checkpoint has other categories, or a weight is missing or unexpected.
    """
    if arguments.model_name_or_path is not None:
        if list(config.id2label.values()) != names:
            raise InputError(f"The checkpoint detects {list(config.id2label.values())}, the data have {names}.")
        with translate_errors("--model_name_or_path", arguments.model_name_or_path):
            model, loading = AutoModelForObjectDetection.from_pretrained(
                arguments.model_name_or_path,
                revision=arguments.model_revision,
                config=config,
                trust_remote_code=False,
                output_loading_info=True,
            )
        require_loaded_keys(loading, arguments.model_name_or_path)
        return model
    config.id2label, config.label2id = dict(enumerate(names)), {name: number for number, name in enumerate(names)}
    model = AutoModelForObjectDetection.from_config(config)
    if backbone is not None:
        model.model.backbone.model.load_state_dict(backbone.state_dict())
    return model
