"""Detectors: Deformable DETR of transformers on a backbone of this library, new or from a checkpoint."""

from dataclasses import dataclass

from transformers import AutoModelForObjectDetection, DeformableDetrConfig, PreTrainedModel

from hf_liere import LieREViTBackbone
from hf_liere.errors import InputError
from hf_liere.storage.loading import require_loaded_keys
from training.engine.arguments import ModelArguments, flag
from training.engine.model_setup import checkpoint_config, loadable, resolve_config


@dataclass
class DetectorArguments:
    """The detector around the backbone, with the names of DeformableDetrConfig."""

    backbone_name_or_path: str | None = flag(
        None, "Classifier or encoder of this library to take the backbone's weights from."
    )
    d_model: int = flag(256, "Width of the detector.")
    encoder_layers: int = flag(6, "Encoder layers of the detector.")
    decoder_layers: int = flag(6, "Decoder layers of the detector.")
    detector_ffn_dim: int = flag(1024, "Width of the detector's feed-forward layers.")
    detector_heads: int = flag(8, "Attention heads of the detector.")
    num_queries: int = flag(300, "Most objects that can be found in an image.")
    num_feature_levels: int = flag(4, "Resolutions that the detector sees: the backbone's, and halved ones.")
    top_k: int = flag(100, "Detections per image that are evaluated.")

    def __post_init__(self):
        # Deformable DETR uses GroupNorm with 32 groups of channels.
        if self.d_model % 32 or self.d_model % self.detector_heads:
            raise InputError(
                f"--d_model {self.d_model}; accepted: multiples of 32 that {self.detector_heads} heads divide."
            )


def build_config(arguments: ModelArguments, detector: DetectorArguments) -> DeformableDetrConfig:
    """
    The configuration of the checkpoint, or of a new detector on a backbone of the flags.

    Raises:
        InputError: if the checkpoint is no detector of this kind.
    """
    config = resolve_config(arguments)
    if isinstance(config, DeformableDetrConfig):
        return config
    if arguments.model_name_or_path is not None:
        raise InputError(
            f"--model_name_or_path {arguments.model_name_or_path!r} is a {config.model_type}, no Deformable DETR; "
            "accepted: a detector, or --backbone_name_or_path."
        )
    if detector.backbone_name_or_path is not None:
        checkpoint_config("--backbone_name_or_path", detector.backbone_name_or_path)
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
    arguments: ModelArguments, detector: DetectorArguments, config: DeformableDetrConfig, names: list[str]
) -> PreTrainedModel:
    """
    A detector of the named categories.

    Raises:
        InputError: if a checkpoint knows other categories, or a weight is missing or left over.
    """
    if arguments.model_name_or_path is not None:
        if list(config.id2label.values()) != names:
            raise InputError(f"The checkpoint finds {list(config.id2label.values())}, the data hold {names}.")
        with loadable("--model_name_or_path", arguments.model_name_or_path):
            model, loading = AutoModelForObjectDetection.from_pretrained(
                arguments.model_name_or_path, revision=arguments.model_revision, config=config, output_loading_info=True
            )
        require_loaded_keys(loading, arguments.model_name_or_path)
        return model
    config.id2label, config.label2id = dict(enumerate(names)), {name: number for number, name in enumerate(names)}
    model = AutoModelForObjectDetection.from_config(config)
    if detector.backbone_name_or_path is not None:
        with loadable("--backbone_name_or_path", detector.backbone_name_or_path):
            backbone, loading = LieREViTBackbone.from_pretrained(
                detector.backbone_name_or_path, config=config.backbone_config, output_loading_info=True
            )
        require_loaded_keys(loading, detector.backbone_name_or_path, besides=("classifier.",))
        model.model.backbone.model.load_state_dict(backbone.state_dict())
    return model
