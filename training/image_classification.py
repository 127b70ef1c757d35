"""Trains, fine-tunes and evaluates image classifiers with learned position encodings.

The arrows task of LieRE, generated on the fly:

    python training/image_classification.py training/recipes/arrows_mini.yaml --output_dir outputs/liere

CIFAR-10 from the Hub, or from parquet files, on all GPUs of a machine:

    python training/image_classification.py training/recipes/cifar100_mini.yaml --dataset_name uoft-cs/cifar10 \
        --output_dir outputs/cifar10
    accelerate launch --config_file training/recipes/accelerate/ddp.yaml training/image_classification.py \
        training/recipes/cifar100_mini.yaml --train_files train.parquet --validation_files test.parquet \
        --output_dir outputs/cifar10

Any flag overrides the recipe. `--streaming` reads images on demand. `--resume_from_checkpoint last` resumes an
interrupted run. With `--push_to_hub --hub_model_id me/name --hub_strategy checkpoint` every save is also a commit on
the Hub, and `--resume_from_hub` with the same flags resumes from it on any machine. To evaluate an existing checkpoint,
here at another resolution:

    python training/image_classification.py --model_name_or_path outputs/cifar10 --do_eval --image_size 48 \
        --validation_files test.parquet --output_dir outputs/cifar10_at_48

A pretrained model of transformers is fine-tuned as a whole, or with `--trainable lora+rotary` by LoRA in its attention.
`--position_encoding` adds rotations that learn, beside its own positions:

    python training/image_classification.py training/recipes/pretrained_mini.yaml --image_folder IMAGES \
        --model_name_or_path facebook/dinov2-small --output_dir outputs/tuned

With `--max_num_patches 64` images are not squeezed into one size: each keeps its aspect ratio, has at most 64 patches
and is padded to 64 in its batch. The saved processor does the same.
"""

import sys
from functools import partial
from pathlib import Path
from typing import Any


# `training` is not installed; the scripts find it, and an hf_liere that is not installed either, beside themselves.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from training.common.early import answer_early


if __name__ == "__main__":
    # Before the imports that take seconds.
    answer_early(__file__)

from transformers import Siglip2ImageProcessor

from training.common.arguments import AugmentationArguments, ImageDataArguments, ModelArguments, RunArguments
from training.common.command_line import parse_arguments
from training.common.conditions import ConditionArguments
from training.data.augmentation import EvaluationImages, EvaluationView, ImageSize, TrainingImages
from training.data.images import load_images
from training.data.native_sizes import NativeSize, check_native_sizes, default_to_square
from training.data.sources import DataRequest
from training.data.streaming import StreamedImages, open_stream
from training.engine.claims import giving_back
from training.engine.classification import ClassifierArguments, build_classifier, relabel, train_classifier
from training.engine.fine_tuning import (
    FineTuningTrainer,
    TuningArguments,
    build_tuned,
    foreign_config,
    refuse_tuning,
    resolve_rotations,
)
from training.engine.model_setup import order_labels, resolve_config, resolve_image_size, resolve_processor
from training.engine.runs import prepare_output_dir, start


ARGUMENT_CLASSES = (
    ModelArguments,
    ImageDataArguments,
    AugmentationArguments,
    ConditionArguments,
    TuningArguments,
    RunArguments,
)


@giving_back()
def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Runs the script with the given command line, by default the process's own; returns the last metrics."""
    *parsed, tuning, args = parse_arguments(arguments, ARGUMENT_CLASSES)
    given = ClassifierArguments(*parsed, args)
    model_args, data_args = given.model, given.data
    checkpoint = prepare_output_dir(args)
    default_to_square(model_args, data_args)
    tuned = foreign_config(model_args)
    wanted = resolve_rotations(model_args, tuned, args) if tuned is not None else refuse_tuning(tuning)
    config = resolve_config(model_args) if tuned is None else tuned
    image_size = resolve_image_size(model_args, config)
    processor = resolve_processor(model_args, data_args, image_size, config)
    input_size: ImageSize = image_size
    if isinstance(processor, Siglip2ImageProcessor):
        # The record states the number that is used, even if it is the checkpoint's.
        data_args.max_num_patches = processor.max_num_patches
        input_size = NativeSize(processor.patch_size, processor.max_num_patches)
        check_native_sizes(input_size, image_size, config, given.augmentation, given.condition)
    num_channels = len(processor.image_mean)
    request, stream = DataRequest(image_size, num_channels, args.parts, seed=args.seed), None
    if data_args.streaming:
        with args.main_process_first(desc="fetching the evaluation images"):
            images, stream = open_stream(data_args, request)
    else:
        images = load_images(data_args, request)
    if tuned is None:
        model, train, evaluation = build_classifier(given, config, images, checkpoint)
        options: dict[str, Any] = {}
    else:
        model = build_tuned(model_args, tuning, tuned, wanted, images, args, checkpoint)
        train, evaluation = relabel(images, model.config)
        make = partial(FineTuningTrainer, head_learning_rate_factor=tuning.head_learning_rate_factor)
        options = {"make_trainer": make, "tuning": tuning}
    resample = int(processor.resample)
    augment = given.augment(input_size, resample)
    if stream is not None:
        train = StreamedImages(stream, order_labels(images, model.config), num_channels, augment, args)
    elif train is not None:
        train = TrainingImages(train, augment)
    view = EvaluationView(input_size, resample, data_args.eval_crops or 0, data_args.eval_crop_ratio)
    datasets = {"train": train, "evaluation": evaluation and EvaluationImages(evaluation, view)}
    return train_classifier(given, model, processor, image_size, datasets, images.splits, checkpoint, **options)


if __name__ == "__main__":
    start(main)
