"""Building and training a classifier: what the scripts for images and for videos share."""

from typing import NamedTuple

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
    numbers = order_labels(images, model.config)
    train, evaluation = (source and Relabelled(source, numbers) for source in (images.train, images.evaluation))
    return model, train, evaluation


def train_classifier(
    arguments: ClassifierArguments,
    model: PreTrainedModel,
    processor: ViTImageProcessor | Siglip2ImageProcessor | LieREVideoProcessor,
    input_size: tuple[int, ...],
    datasets: dict[str, Dataset | None],
    splits: dict[str, str],
    checkpoint: str | None,
) -> dict[str, float]:
    """
    Trains and evaluates as the command line requests; returns the last metrics.

    Args:
        processor: saved with the model; batches use its mean and deviation, and its number of patches if any.
        input_size: input size in this run, (height, width) or (frames, height, width).
        datasets: the data sets `train` and `evaluation`.
        splits: names of their splits, as in `LabelledImages`.
        checkpoint: the checkpoint to resume from, if any.
    """
    args, train, evaluation = arguments.run, datasets["train"], datasets["evaluation"]
    settings = processor.image_mean, processor.image_std, arguments.augmentation, args.order_seed
    if isinstance(processor, Siglip2ImageProcessor):
        collator = PatchCollator(model.config, processor.max_num_patches, *settings)
    else:
        collator = Collator(input_size, model.config.num_channels, *settings, is_physical(model.config))
    trainer = ClassificationTrainer(
        model=model,
        args=args,
        train_dataset=train,
        eval_dataset=evaluation,
        data_collator=ConditionCollator(collator, model, arguments.condition),
        processing_class=processor,
        compute_metrics=ClassificationMetrics(model.config.num_labels),
        preprocess_logits_for_metrics=ranks_and_losses,
    )
    # For a stream, the number of examples that all processes read together.
    examples = train and getattr(train, "num_examples", len(train)), evaluation and len(evaluation)
    described = {"data": arguments.data, "augmentation": arguments.augmentation, "condition": arguments.condition}
    described["examples"] = describe_examples(arguments.data, splits, *examples)
    return run(trainer, checkpoint, arguments.model.model_name_or_path, input_size, described)
