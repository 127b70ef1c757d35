"""Trains, fine-tunes and evaluates image classifiers with learned position encodings.

The arrows task of LieRE, generated on the fly:

    python training/image_classification.py training/recipes/arrows.yaml --output_dir outputs/liere

CIFAR-10 from the Hub, or from parquet files, on all GPUs of a machine:

    python training/image_classification.py training/recipes/cifar10.yaml --dataset_name uoft-cs/cifar10 \
        --output_dir outputs/cifar10
    accelerate launch --config_file training/accelerate/ddp.yaml training/image_classification.py \
        training/recipes/cifar10.yaml --train_files train.parquet --validation_files test.parquet \
        --output_dir outputs/cifar10

Any flag overrides the recipe. A run that was interrupted goes on with `--resume_from_checkpoint last`. With
`--push_to_hub --hub_model_id me/name --hub_strategy checkpoint` every save is also a commit on the Hub, and with
`--resume_from_hub` beside the same flags the run goes on from there, on any machine. An existing checkpoint is
evaluated, here at another resolution, by

    python training/image_classification.py --model_name_or_path outputs/cifar10 --do_eval --image_size 48 \
        --validation_files test.parquet --output_dir outputs/cifar10_at_48
"""

import sys
from pathlib import Path


# `training` is not installed; the scripts find it, and an hf_liere that is not installed either, beside themselves.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from transformers import set_seed
from transformers.trainer_utils import get_last_checkpoint
from transformers.utils import logging

from hf_liere.hub import HubError
from hf_liere.publishing import saved_weights_digest, weights_digest
from training.arguments import (
    AugmentationArguments,
    DataArguments,
    ImageTrainingArguments,
    InputError,
    ModelArguments,
    parse_arguments,
)
from training.augmentation import Collator, EvaluationImages, TrainingImages
from training.data import LabelledImages, Relabelled, load_images
from training.hub import fetch_checkpoint, warn_of_other_settings
from training.models import (
    build_model,
    check_checkpoint_keys,
    order_labels,
    resolve_config,
    resolve_image_processor,
    resolve_image_size,
)
from training.records import (
    CONFIG_FILE,
    ENVIRONMENT_FILE,
    WEIGHTS_FILE,
    claim_output_dir,
    environment,
    portable,
    write_record,
)
from training.trainer import ImageClassificationTrainer, classification_metrics, ranks_and_losses


logger = logging.get_logger(__name__)


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Runs the script with the given command line, by default the process's own; returns the last metrics."""
    model_args, data_args, augmentation_args, args = parse_arguments(
        sys.argv[1:] if arguments is None else arguments,
        (ModelArguments, DataArguments, AugmentationArguments, ImageTrainingArguments),
    )
    if args.n_gpu > 1:
        raise InputError(f"{args.n_gpu} GPUs in one process; accepted: torchrun, accelerate launch or one visible GPU.")
    checkpoint = _resumed_checkpoint(args)
    if args.process_index == 0:
        claim_output_dir(args)
    if args.resume_from_hub:
        with args.main_process_first(local=False, desc="fetching the checkpoint"):
            if args.process_index == 0:
                fetch_checkpoint(args)
        checkpoint = get_last_checkpoint(args.output_dir)
        if checkpoint is None:
            raise InputError("--resume_from_hub: the first process fetched no checkpoint, and says why.")
    config = resolve_config(model_args)
    image_size = resolve_image_size(model_args, config)
    processor = resolve_image_processor(model_args, data_args, image_size, config.num_channels)
    images = load_images(data_args, image_size, config.num_channels, args.do_train, args.do_eval, args.seed)
    set_seed(args.seed)
    model = build_model(model_args, config, images, args.do_train)
    if checkpoint is not None:
        check_checkpoint_keys(checkpoint, model)

    trainer = _build_trainer(model, images, processor, image_size, augmentation_args, args)
    if trainer.is_world_process_zero():
        resolved = {"data": vars(data_args), "augmentation": vars(augmentation_args), "training": args.to_dict()}
        resolved |= {"model": model.config.to_diff_dict(), "model_name_or_path": model_args.model_name_or_path}
        resolved = portable({**resolved, "image_size": image_size})
        write_record(args.output_dir, CONFIG_FILE, resolved)
        if args.resume_from_hub:
            warn_of_other_settings(checkpoint, resolved)
        write_record(args.output_dir, ENVIRONMENT_FILE, environment())
        if not args.do_train:
            write_record(args.output_dir, WEIGHTS_FILE, {"sha256": weights_digest(model.state_dict())})
    metrics = {}
    if args.do_train:
        metrics = trainer.train(resume_from_checkpoint=checkpoint).metrics
        # Trainer's own rate counts the evaluations in between as training.
        training_seconds = max(metrics["train_runtime"] - trainer.evaluation_seconds, 1e-3)
        trained_images = metrics["train_samples_per_second"] * metrics["train_runtime"]
        metrics["train_images_per_second"] = round(trained_images / training_seconds, 1)
        metrics["parameters"] = sum(parameter.numel() for parameter in model.parameters())
        trainer.save_model()
        trainer.log_metrics("train", metrics)
        trainer.save_metrics("train", metrics)
        trainer.save_state()
        if trainer.is_world_process_zero():
            digest = saved_weights_digest(args.output_dir)
            write_record(args.output_dir, WEIGHTS_FILE, {"sha256": digest, "step": trainer.state.global_step})
    if args.do_eval:
        metrics = trainer.evaluate()
        metrics["eval_samples"] = len(images.evaluation)
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)
    if args.push_to_hub:
        published = trainer.push_to_hub()
        if published is not None:
            print(f"Published: {published}")
    return metrics


def _build_trainer(model, images: LabelledImages, processor, image_size, augmentation_args, args):
    numbers = order_labels(images, model.config)
    train, evaluation = (source and Relabelled(source, numbers) for source in (images.train, images.evaluation))
    resample = int(processor.resample)
    seed = args.seed if args.data_seed is None else args.data_seed
    channels = model.config.num_channels
    return ImageClassificationTrainer(
        model=model,
        args=args,
        train_dataset=train and TrainingImages(train, image_size, resample, augmentation_args, seed),
        eval_dataset=evaluation and EvaluationImages(evaluation, image_size, resample),
        data_collator=Collator(
            image_size, channels, processor.image_mean, processor.image_std, augmentation_args, seed
        ),
        processing_class=processor,
        compute_metrics=classification_metrics(),
        preprocess_logits_for_metrics=ranks_and_losses,
    )


def _resumed_checkpoint(args: ImageTrainingArguments) -> str | None:
    """The checkpoint to go on from; `last` and `true` mean the newest in the output directory."""
    given = args.resume_from_checkpoint
    if given is None or given in ("False", "false"):
        return None
    if given not in ("last", "True", "true", True):
        if not (Path(given) / "trainer_state.json").is_file():
            raise InputError(
                f"--resume_from_checkpoint {given!r} is no checkpoint of a run; accepted: `last` or its folder."
            )
        return given
    last = get_last_checkpoint(args.output_dir) if Path(args.output_dir).is_dir() else None
    if last is None:
        raise InputError(f"--resume_from_checkpoint {given}: {args.output_dir!r} holds no checkpoint.")
    return last


if __name__ == "__main__":
    try:
        main()
    except (InputError, HubError) as error:
        sys.exit(f"error: {error}")
