"""Building and training a classifier: what the scripts for images and for videos share."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from torch import nn
from torch.utils.data import Dataset
from transformers import PreTrainedConfig, PreTrainedModel, Siglip2ImageProcessor, ViTImageProcessor, set_seed

from hf_liere.transformer.video_processing_liere import LieREVideoProcessor
from training.common.arguments import AugmentationArguments, CheckpointArguments, RunArguments, SampleArguments
from training.common.conditions import ConditionArguments, ConditionCollator
from training.common.records import describe_examples
from training.data.augmentation import Augmentation, Collator, ImageSize
from training.data.native_sizes import PatchCollator
from training.data.sources import LabelledImages, Relabelled, Source
from training.engine.model_setup import build_model, check_checkpoint_keys, is_physical, order_labels
from training.engine.runs import run
from training.engine.trainer import ClassificationMetrics, ClassificationTrainer, ranks_and_losses


class ClassifierArguments(NamedTuple):
    """Parsed command line of a script that trains a classifier."""

    model: CheckpointArguments
    data: SampleArguments
    augmentation: AugmentationArguments
    condition: ConditionArguments
    run: RunArguments

    def augment(self, image_size: ImageSize, resample: int) -> Augmentation:
        return Augmentation(image_size, resample, self.augmentation, self.run.order_seed)


def build_classifier(
    arguments: ClassifierArguments, config: PreTrainedConfig, images: LabelledImages, checkpoint: str | None
) -> tuple[PreTrainedModel, Source | None, Source | None]:
    """
    The model, and the training and evaluation sources with its labels. If the run resumes, the keys of `checkpoint` are
    checked.
    """
    set_seed(arguments.run.seed)
    model = build_model(arguments.model, config, images, arguments.run.do_train)
    if checkpoint is not None:
        check_checkpoint_keys(checkpoint, model)
    return model, *relabel(images, model.config)


def relabel(images: LabelledImages, config: PreTrainedConfig) -> tuple[Source | None, Source | None]:
    """The training and evaluation sources with the labels of a model."""
    numbers = order_labels(images, config)
    train, evaluation = (source and Relabelled(source, numbers) for source in (images.train, images.evaluation))
    return train, evaluation


def train_classifier(
    arguments: ClassifierArguments,
    model: nn.Module,
    processor: ViTImageProcessor | Siglip2ImageProcessor | LieREVideoProcessor,
    input_size: tuple[int, ...],
    datasets: dict[str, Dataset | None],
    splits: dict[str, str],
    checkpoint: str | None,
    make_trainer: Callable[..., ClassificationTrainer] = ClassificationTrainer,
    **described: Any,
) -> dict[str, float]:
    """
    Trains and evaluates as the command line requests; returns the last metrics.

    Args:
        processor: saved with the model; batches use its mean and deviation, and its number of patches if any.
        input_size: input size in this run, (height, width) or (frames, height, width).
        datasets: the data sets `train` and `evaluation`.
        splits: names of their splits, as in `LabelledImages`.
        checkpoint: the checkpoint to resume from, if any.
        make_trainer: the class of the trainer, or a function that makes one.
        described: further arguments for the record.
    """
    args, train, evaluation = arguments.run, datasets["train"], datasets["evaluation"]
    settings = processor.image_mean, processor.image_std, arguments.augmentation, args.order_seed
    if isinstance(processor, Siglip2ImageProcessor):
        collator = PatchCollator(model.config, processor.max_num_patches, *settings)
    else:
        collator = Collator(input_size, len(processor.image_mean), *settings, is_physical(model.config))
    trainer = make_trainer(
        model=model,
        args=args,
        train_dataset=train,
        eval_dataset=evaluation,
        data_collator=ConditionCollator(collator, model, arguments.condition),
        processing_class=processor,
        compute_metrics=ClassificationMetrics(model.config.num_labels),
        preprocess_logits_for_metrics=partial(ranks_and_losses, with_logits=arguments.condition.save_logits),
    )
    # For a stream, the number of examples that all processes read together.
    examples = train and getattr(train, "num_examples", len(train)), evaluation and len(evaluation)
    described |= {"data": arguments.data, "augmentation": arguments.augmentation, "condition": arguments.condition}
    described["examples"] = describe_examples(arguments.data, splits, *examples)
    return run(trainer, checkpoint, arguments.model.model_name_or_path, input_size, described)
