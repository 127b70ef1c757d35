"""Trains and evaluates object detectors: Deformable DETR of transformers on a backbone of this library.

Generated shapes in COCO's format, and photographs with their json:

    python training/object_detection.py training/recipes/coco_mini.yaml --output_dir outputs/shapes_liere
    accelerate launch --config_file training/accelerate/ddp.yaml training/object_detection.py \
        training/recipes/coco.yaml --train_files annotations/instances_train2017.json … --output_dir outputs/coco

`mAP` is COCO's, by pycocotools. `--backbone_name_or_path` starts from the encoder of a classifier. Any flag overrides
the recipe; a run that was interrupted goes on with `--resume_from_checkpoint last`.
"""

import contextlib
import io
import sys
from dataclasses import dataclass, field
from pathlib import Path


# `training` is not installed; the scripts find it, and an hf_liere that is not installed either, beside themselves.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from pycocotools.cocoeval import COCOeval
from transformers import (
    AutoModelForObjectDetection,
    DeformableDetrConfig,
    DeformableDetrImageProcessor,
    EvalPrediction,
    PreTrainedModel,
    set_seed,
)

from hf_liere import LieREViTBackbone
from hf_liere.loading import require_loaded_keys
from training.arguments import InputError, ModelArguments, RunArguments, parse_arguments
from training.data import fraction_of
from training.detection_data import (
    DetectionCollator,
    DetectionDataArguments,
    DetectionExamples,
    Detections,
    load_detections,
)
from training.models import (
    checkpoint_config,
    loadable,
    resolve_config,
    resolve_image_size,
    resolve_processor,
)
from training.runs import claim, run, start
from training.trainer import RotaryTrainer


# In COCOeval's order.
STATISTICS = ("map", "map_50", "map_75", "map_small", "map_medium", "map_large")


@dataclass
class DetectorArguments:
    """The detector around the backbone, with the names of DeformableDetrConfig."""

    backbone_name_or_path: str | None = field(
        default=None, metadata={"help": "Classifier or encoder of this library to take the backbone's weights from."}
    )
    d_model: int = field(default=256, metadata={"help": "Width of the detector."})
    encoder_layers: int = field(default=6, metadata={"help": "Encoder layers of the detector."})
    decoder_layers: int = field(default=6, metadata={"help": "Decoder layers of the detector."})
    detector_ffn_dim: int = field(default=1024, metadata={"help": "Width of the detector's feed-forward layers."})
    detector_heads: int = field(default=8, metadata={"help": "Attention heads of the detector."})
    num_queries: int = field(default=300, metadata={"help": "Most objects that can be found in an image."})
    num_feature_levels: int = field(
        default=4, metadata={"help": "Resolutions that the detector sees: the backbone's, and halved ones."}
    )
    top_k: int = field(default=100, metadata={"help": "Detections per image that are evaluated."})

    def __post_init__(self):
        # Deformable DETR normalises groups of channels, 32 of them.
        if self.d_model % 32 or self.d_model % self.detector_heads:
            raise InputError(
                f"--d_model {self.d_model}; accepted: multiples of 32 that {self.detector_heads} heads divide."
            )


ARGUMENT_CLASSES = (ModelArguments, DetectorArguments, DetectionDataArguments, RunArguments)


class DetectionTrainer(RotaryTrainer):
    """The detector's own loss, and evaluations that gather the detections of every image instead of logits."""

    top_k = 100

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        return (outputs.loss, outputs) if return_outputs else outputs.loss

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        """No loss; detections (B, top_k, 6) as score, label and corners in shares of the image; indices (B,)."""
        inputs = self._prepare_inputs(inputs)
        indices = torch.cat([label["index"] for label in inputs["labels"]])
        with torch.no_grad(), self.compute_loss_context_manager():
            outputs = model(pixel_values=inputs["pixel_values"], pixel_mask=inputs["pixel_mask"])
        return None, best_detections(outputs.logits.float(), outputs.pred_boxes.float(), self.top_k), indices

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
        """
        As `from_pretrained` loads, with every key accounted for: transformers saves detectors under other names than
        their weights have in memory, which Trainer would pass over.
        """
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            return super()._load_from_checkpoint(resume_from_checkpoint, model)
        detector = self.accelerator.unwrap_model(self.model if model is None else model)
        saved, loading = type(detector).from_pretrained(
            resume_from_checkpoint, config=detector.config, output_loading_info=True
        )
        require_loaded_keys(loading, str(resume_from_checkpoint))
        detector.load_state_dict(saved.state_dict())

    def learning_rate_groups(self, model):
        rotary = [parameter for name, parameter in model.named_parameters() if "rotary_encoding." in name]
        return [("rotary_learning_rate_factor", self.args.rotary_learning_rate_factor, rotary)]


def best_detections(logits: torch.Tensor, boxes: torch.Tensor, top_k: int) -> torch.Tensor:
    """
    The detections with the highest scores, (B, top_k, 6): score, label, left, top, right, bottom.

    Args:
        logits: (B, queries, classes).
        boxes: (B, queries, 4), centre and size in shares of the image.
    """
    scores, places = logits.sigmoid().flatten(1).topk(min(top_k, logits[0].numel()), dim=1)
    queries, labels = places // logits.shape[2], places % logits.shape[2]
    chosen = boxes.gather(1, queries[..., None].expand(-1, -1, 4))
    corners = torch.cat([chosen[..., :2] - chosen[..., 2:] / 2, chosen[..., :2] + chosen[..., 2:] / 2], dim=-1)
    return torch.cat([scores[..., None], labels[..., None].to(scores.dtype), corners], dim=-1)


class CocoMetrics:
    """Trainer's `compute_metrics`: COCO's average precisions, those without any object of their size left out."""

    def __init__(self, source: Detections):
        self.source = source

    def __call__(self, results: EvalPrediction) -> dict[str, float]:
        coco, found = self.source.coco, []
        for detections, index in zip(results.predictions, results.label_ids):
            image_id = self.source.image_ids[int(index)]
            image = coco.imgs[image_id]
            extent = np.array([image["width"], image["height"]] * 2)
            for score, label, *corners in detections:
                left, top, right, bottom = (np.clip(corners, 0, 1) * extent).tolist()
                found.append(
                    {
                        "image_id": image_id,
                        "category_id": self.source.category_ids[int(label)],
                        "bbox": [left, top, right - left, bottom - top],
                        "score": float(score),
                    }
                )
        with contextlib.redirect_stdout(io.StringIO()):
            evaluation = COCOeval(coco, coco.loadRes(found), "bbox")
            evaluation.params.imgIds = self.source.image_ids
            evaluation.evaluate()
            evaluation.accumulate()
            evaluation.summarize()
        return {name: float(value) for name, value in zip(STATISTICS, evaluation.stats) if value >= 0}


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Runs the script with the given command line, by default the process's own; returns the last metrics."""
    model_args, detector_args, data_args, args = parse_arguments(
        sys.argv[1:] if arguments is None else arguments, ARGUMENT_CLASSES
    )
    if args.push_to_hub:
        raise InputError("--push_to_hub: detectors are not published by this script; accepted: without it.")
    checkpoint = claim(args)
    detector = build_config(model_args, detector_args)
    image_size = resolve_image_size(model_args, detector.backbone_config)
    processor = DeformableDetrImageProcessor(
        do_pad=False, **_normalisation(model_args, data_args, image_size, detector)
    )
    with args.main_process_first(desc="finding the pictures"):
        # The first process writes what is generated, the others find it.
        train, evaluation, names = load_detections(data_args, image_size, args.do_train, args.do_eval)
    set_seed(args.seed)
    model = build_detector(model_args, detector_args, detector, names)

    seed = args.seed if args.data_seed is None else args.data_seed
    some = train and fraction_of(train, data_args.train_fraction, seed)
    details = (image_size, int(processor.resample), data_args.flip_probability, seed)
    trainer = DetectionTrainer(
        model=model,
        args=args,
        train_dataset=some and DetectionExamples(some, *details),
        eval_dataset=evaluation and DetectionExamples(evaluation, *details),
        data_collator=DetectionCollator(processor.image_mean, processor.image_std),
        processing_class=processor,
        compute_metrics=evaluation and CocoMetrics(evaluation),
    )
    trainer.top_k = detector_args.top_k
    return run(
        trainer,
        checkpoint,
        model_args.model_name_or_path,
        image_size,
        {"data": data_args, "detector": detector_args},
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
    # The last layer's map, before the norm of the backbone.
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
                arguments.model_name_or_path,
                revision=arguments.model_revision,
                config=config,
                output_loading_info=True,
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


def _normalisation(arguments, data_arguments, image_size, config) -> dict:
    processor = resolve_processor(arguments, data_arguments, image_size, config.backbone_config)
    return {name: getattr(processor, name) for name in ("size", "image_mean", "image_std", "resample")}


if __name__ == "__main__":
    start(main)
