"""Trains and evaluates object detectors: transformers' Deformable DETR on a backbone of this library.

Generated shapes in COCO's format, and photographs with their json:

    python training/object_detection.py training/recipes/coco_mini.yaml --output_dir outputs/shapes_liere
    accelerate launch --config_file training/recipes/accelerate/ddp.yaml training/object_detection.py \
        training/recipes/coco.yaml --train_files annotations/instances_train2017.json … --output_dir outputs/coco

`mAP` is computed by pycocotools. `--backbone_name_or_path` starts from the encoder of a classifier of this library, or
of a ViT or DeiT, with any encoding and image size. Any flag overrides the recipe. `--resume_from_checkpoint last`
resumes an interrupted run.
"""

import sys
from pathlib import Path


# `training` is not installed; the scripts find it, and an hf_liere that is not installed either, beside themselves.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from training.common.early import answer_early


if __name__ == "__main__":
    # Before the imports that take seconds.
    answer_early(__file__)

from transformers import DeformableDetrImageProcessor, set_seed

from hf_liere.errors import InputError
from training.common.arguments import ModelArguments, RunArguments
from training.common.command_line import parse_arguments
from training.data.detection_data import DetectionCollator, DetectionDataArguments, DetectionExamples, load_detections
from training.data.sources import DataRequest, take_fraction
from training.engine.claims import giving_back
from training.engine.model_setup import resolve_image_size, resolve_processor
from training.engine.runs import prepare_output_dir, run, start
from training.tasks.detection.detection_trainer import CocoMetrics, DetectionTrainer
from training.tasks.detection.detectors import DetectorArguments, build_config, build_detector, load_backbone


ARGUMENT_CLASSES = (ModelArguments, DetectorArguments, DetectionDataArguments, RunArguments)


@giving_back()
def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Runs the script with the given command line, by default the process's own; returns the last metrics."""
    model_args, detector_args, data_args, args = parse_arguments(arguments, ARGUMENT_CLASSES)
    if args.push_to_hub:
        raise InputError("--push_to_hub: detectors are not published by this script; accepted: without it.")
    checkpoint = prepare_output_dir(args)
    backbone = load_backbone(model_args, detector_args)
    config = build_config(model_args, detector_args, backbone)
    image_size = resolve_image_size(model_args, config.backbone_config)
    plain = resolve_processor(model_args, data_args, image_size, config.backbone_config)
    fields = {name: getattr(plain, name) for name in ("size", "image_mean", "image_std", "resample")}
    processor = DeformableDetrImageProcessor(do_pad=False, **fields)
    with args.main_process_first(desc="finding the pictures"):
        # The first process writes generated pictures, and the others find them.
        train, evaluation, names = load_detections(data_args, DataRequest(image_size, parts=args.parts))
    set_seed(args.seed)
    model = build_detector(model_args, config, names, backbone)

    train = train and take_fraction(train, data_args.train_fraction, args.order_seed)
    details = (image_size, int(processor.resample), data_args.flip_probability, args.order_seed)
    trainer = DetectionTrainer(
        model=model,
        args=args,
        train_dataset=train and DetectionExamples(train, *details),
        eval_dataset=evaluation and DetectionExamples(evaluation, *details),
        data_collator=DetectionCollator(processor.image_mean, processor.image_std),
        processing_class=processor,
        compute_metrics=evaluation and CocoMetrics(evaluation),
    )
    trainer.top_k = detector_args.top_k
    described = {"data": data_args, "detector": detector_args}
    return run(trainer, checkpoint, model_args.model_name_or_path, image_size, described)


if __name__ == "__main__":
    start(main)
