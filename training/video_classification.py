"""Trains, fine-tunes and evaluates video and volume classifiers with learned position encodings.

Moving shapes, generated as mp4 files and classified by their direction of motion:

    python training/video_classification.py training/recipes/ucf101_mini.yaml --output_dir outputs/shapes

Arrow puzzles that span the frames of a clip, drawn on demand:

    python training/video_classification.py training/recipes/arrows_clips_mini.yaml --output_dir outputs/arrows_clips

UCF101 as it is distributed, on all GPUs of a machine, and volumes in an npz file:

    accelerate launch --config_file training/recipes/accelerate/ddp.yaml training/video_classification.py \
        training/recipes/ucf101.yaml --video_folder UCF-101 --train_files ucfTrainTestlist/trainlist01.txt \
        --validation_files ucfTrainTestlist/testlist01.txt --output_dir outputs/ucf101
    python training/video_classification.py training/recipes/rsna_mini.yaml --volume_file mito_em3d.npz \
        --output_dir outputs/volumes

Files that cannot be read are reported by name and skipped. Any flag overrides the recipe. `--resume_from_checkpoint
last` resumes an interrupted run.
"""

import sys
from pathlib import Path


# `training` is not installed; the scripts find it, and an hf_liere that is not installed either, beside themselves.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from training.common.early import answer_early


if __name__ == "__main__":
    # Before the imports that take seconds.
    answer_early(__file__)

from hf_liere.errors import InputError
from training.common.arguments import AugmentationArguments, RunArguments, VideoModelArguments
from training.common.command_line import parse_arguments
from training.common.conditions import ConditionArguments
from training.data.augmentation import EvaluationView
from training.data.clips import ClipReader, EvaluationClips, TrainingClips
from training.data.sources import DataRequest, take_fraction
from training.data.video_data import VideoDataArguments, load_clips
from training.engine.claims import giving_back
from training.engine.classification import ClassifierArguments, build_classifier, train_classifier
from training.engine.model_setup import (
    is_physical,
    resolve_config,
    resolve_image_size,
    resolve_num_frames,
    resolve_processor,
)
from training.engine.runs import prepare_output_dir, start


ARGUMENT_CLASSES = (VideoModelArguments, VideoDataArguments, AugmentationArguments, ConditionArguments, RunArguments)


@giving_back()
def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Runs the script with the given command line, by default the process's own; returns the last metrics."""
    given = ClassifierArguments(*parse_arguments(arguments, ARGUMENT_CLASSES))
    model_args, data_args, args = given.model, given.data, given.run
    checkpoint = prepare_output_dir(args)
    config = resolve_config(model_args)
    if is_physical(config) and (given.augmentation.mixup_alpha or given.augmentation.cutmix_alpha):
        raise InputError("--mixup_alpha and --cutmix_alpha mix volumes of different spacing; accepted here: 0.")
    image_size, num_frames = resolve_image_size(model_args, config), resolve_num_frames(model_args, config)
    processor = resolve_processor(model_args, data_args, image_size, config)
    with args.main_process_first(desc="finding the clips"):
        request = DataRequest(
            image_size,
            config.num_channels,
            args.parts,
            num_frames=num_frames,
            writes=args.process_index == 0,
            seed=args.seed,
            spacing=is_physical(config),
        )
        clips = load_clips(data_args, request)
    model, train, evaluation = build_classifier(given, config, clips, checkpoint)
    train = train and take_fraction(train, data_args.train_fraction, args.order_seed)
    reader, resample = ClipReader(num_frames, data_args.frame_stride), int(processor.resample)
    view = EvaluationView(image_size, resample, data_args.eval_crops or 0, data_args.eval_crop_ratio)
    shown = reader, data_args.eval_clips, data_args.eval_average_views
    datasets = {
        "train": train and TrainingClips(train, given.augment(image_size, resample), reader),
        "evaluation": evaluation and EvaluationClips(evaluation, view, *shown),
    }
    return train_classifier(given, model, processor, (num_frames, *image_size), datasets, clips.splits, checkpoint)


if __name__ == "__main__":
    start(main)
