"""Trains, fine-tunes and evaluates video and volume classifiers with learned position encodings.

Moving shapes, generated and written as mp4 files, whose direction of motion is the class:

    python training/video_classification.py training/recipes/ucf101_mini.yaml --output_dir outputs/shapes

UCF101 as it is distributed, on all GPUs of a machine, and volumes in an npz file:

    accelerate launch --config_file training/accelerate/ddp.yaml training/video_classification.py \
        training/recipes/ucf101.yaml --video_folder UCF-101 --train_files ucfTrainTestlist/trainlist01.txt \
        --validation_files ucfTrainTestlist/testlist01.txt --output_dir outputs/ucf101
    python training/video_classification.py training/recipes/rsna_mini.yaml --volume_file mito_em3d.npz \
        --output_dir outputs/volumes

Files that cannot be read are reported by name and left out. Any flag overrides the recipe. A run that was interrupted
goes on with `--resume_from_checkpoint last`.
"""

import sys
from pathlib import Path


# `training` is not installed; the scripts find it, and an hf_liere that is not installed either, beside themselves.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from transformers import set_seed

from training.data.augmentation import Collator
from training.data.clips import ClipReader, EvaluationClips, TrainingClips
from training.data.images import Relabelled, fraction_of
from training.data.video_data import VideoDataArguments, load_clips
from training.engine.arguments import (
    AugmentationArguments,
    RunArguments,
    VideoModelArguments,
    parse_arguments,
)
from training.engine.conditions import Condition, ConditionArguments
from training.engine.models import (
    build_model,
    check_checkpoint_keys,
    order_labels,
    resolve_config,
    resolve_image_size,
    resolve_num_frames,
    resolve_processor,
)
from training.engine.records import describe_examples
from training.engine.runs import claim, run, start
from training.engine.trainer import ClassificationMetrics, ClassificationTrainer, ranks_and_losses


ARGUMENT_CLASSES = (
    VideoModelArguments,
    VideoDataArguments,
    AugmentationArguments,
    ConditionArguments,
    RunArguments,
)


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Runs the script with the given command line, by default the process's own; returns the last metrics."""
    model_args, data_args, augmentation_args, condition_args, args = parse_arguments(
        sys.argv[1:] if arguments is None else arguments, ARGUMENT_CLASSES
    )
    checkpoint = claim(args)
    config = resolve_config(model_args)
    image_size, num_frames = resolve_image_size(model_args, config), resolve_num_frames(model_args, config)
    processor = resolve_processor(model_args, data_args, image_size, config)
    with args.main_process_first(desc="finding the clips"):
        clips = load_clips(
            data_args,
            image_size,
            num_frames,
            config.num_channels,
            args.do_train,
            args.do_eval,
            writes=args.process_index == 0,
        )
    set_seed(args.seed)
    model = build_model(model_args, config, clips, args.do_train)
    if checkpoint is not None:
        check_checkpoint_keys(checkpoint, model)

    numbers = order_labels(clips, model.config)
    train, evaluation = (source and Relabelled(source, numbers) for source in (clips.train, clips.evaluation))
    seed = args.seed if args.data_seed is None else args.data_seed
    resample = int(processor.resample)
    mean, std = processor.image_mean, processor.image_std
    collator = Collator((num_frames, *image_size), config.num_channels, mean, std, augmentation_args, seed)
    train = train and fraction_of(train, data_args.train_fraction, seed)
    reader = ClipReader(num_frames, data_args.frame_stride)
    trainer = ClassificationTrainer(
        model=model,
        args=args,
        train_dataset=train and TrainingClips(train, reader, image_size, resample, augmentation_args, seed),
        eval_dataset=evaluation and EvaluationClips(evaluation, reader, image_size, resample, data_args.eval_clips),
        data_collator=Condition(collator, model, condition_args),
        processing_class=processor,
        compute_metrics=ClassificationMetrics(model.config.num_labels),
        preprocess_logits_for_metrics=ranks_and_losses,
    )
    examples = describe_examples(data_args, clips.splits, train and len(train), evaluation and len(evaluation))
    described = {"data": data_args, "augmentation": augmentation_args, "condition": condition_args}
    described["examples"] = examples
    return run(trainer, checkpoint, model_args.model_name_or_path, (num_frames, *image_size), described)


if __name__ == "__main__":
    start(main)
