"""Trains, fine-tunes and evaluates image classifiers with learned position encodings.

The arrows task of LieRE, generated on the fly:

    python training/image_classification.py training/recipes/arrows_mini.yaml --output_dir outputs/liere

CIFAR-10 from the Hub, or from parquet files, on all GPUs of a machine:

    python training/image_classification.py training/recipes/cifar100_mini.yaml --dataset_name uoft-cs/cifar10 \
        --output_dir outputs/cifar10
    accelerate launch --config_file training/accelerate/ddp.yaml training/image_classification.py \
        training/recipes/cifar100_mini.yaml --train_files train.parquet --validation_files test.parquet \
        --output_dir outputs/cifar10

Any flag overrides the recipe; with `--streaming` images are read while they are needed. A run that was interrupted goes
on with `--resume_from_checkpoint last`. With `--push_to_hub --hub_model_id me/name --hub_strategy checkpoint` every
save is also a commit on the Hub, and with `--resume_from_hub` beside the same flags the run goes on from there, on any
machine. An existing checkpoint is evaluated, here at another resolution, by

    python training/image_classification.py --model_name_or_path outputs/cifar10 --do_eval --image_size 48 \
        --validation_files test.parquet --output_dir outputs/cifar10_at_48
"""

import sys
from pathlib import Path


# `training` is not installed; the scripts find it, and an hf_liere that is not installed either, beside themselves.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from transformers import set_seed

from training.data.augmentation import Collator, EvaluationImages, TrainingImages
from training.data.images import Relabelled, load_images
from training.data.streaming import StreamedImages, open_stream
from training.engine.arguments import (
    AugmentationArguments,
    DataArguments,
    ModelArguments,
    RunArguments,
    parse_arguments,
)
from training.engine.conditions import Condition, ConditionArguments
from training.engine.models import (
    build_model,
    check_checkpoint_keys,
    order_labels,
    resolve_config,
    resolve_image_size,
    resolve_processor,
)
from training.engine.records import describe_examples
from training.engine.runs import claim, run, start
from training.engine.trainer import ClassificationMetrics, ClassificationTrainer, ranks_and_losses


ARGUMENT_CLASSES = (ModelArguments, DataArguments, AugmentationArguments, ConditionArguments, RunArguments)


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Runs the script with the given command line, by default the process's own; returns the last metrics."""
    model_args, data_args, augmentation_args, condition_args, args = parse_arguments(
        sys.argv[1:] if arguments is None else arguments, ARGUMENT_CLASSES
    )
    checkpoint = claim(args)
    config = resolve_config(model_args)
    image_size = resolve_image_size(model_args, config)
    processor = resolve_processor(model_args, data_args, image_size, config)
    stream = None
    if data_args.streaming:
        with args.main_process_first(desc="fetching the evaluation images"):
            images, stream = open_stream(data_args, config.num_channels, args.do_train, args.do_eval)
    else:
        images = load_images(data_args, image_size, config.num_channels, args.do_train, args.do_eval, args.seed)
    set_seed(args.seed)
    model = build_model(model_args, config, images, args.do_train)
    if checkpoint is not None:
        check_checkpoint_keys(checkpoint, model)

    numbers = order_labels(images, model.config)
    train, evaluation = (source and Relabelled(source, numbers) for source in (images.train, images.evaluation))
    seed = args.seed if args.data_seed is None else args.data_seed
    resample = int(processor.resample)
    mean, std = processor.image_mean, processor.image_std
    collator = Collator(image_size, config.num_channels, mean, std, augmentation_args, seed)
    if stream is not None:
        channels = config.num_channels
        train = StreamedImages(stream, numbers, image_size, channels, resample, augmentation_args, args)
    elif train is not None:
        train = TrainingImages(train, image_size, resample, augmentation_args, seed)
    trainer = ClassificationTrainer(
        model=model,
        args=args,
        train_dataset=train,
        eval_dataset=evaluation and EvaluationImages(evaluation, image_size, resample),
        data_collator=Condition(collator, model, condition_args),
        processing_class=processor,
        compute_metrics=ClassificationMetrics(model.config.num_labels),
        preprocess_logits_for_metrics=ranks_and_losses,
    )
    sizes = (stream.size if stream else images.train and len(images.train), evaluation and len(evaluation))
    examples = describe_examples(data_args, images.splits, *sizes)
    described = {"data": data_args, "augmentation": augmentation_args, "condition": condition_args}
    described["examples"] = examples
    return run(trainer, checkpoint, model_args.model_name_or_path, image_size, described)


if __name__ == "__main__":
    start(main)
