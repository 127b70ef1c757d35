"""Processor time that an image takes from the decoded file to the batch, by recipe.

    python training/evidence/input_cost.py --cifar100 TRAIN.parquet TEST.parquet

A GPU waits for its input where the processor time for an image is longer than the GPU's, times the number of workers.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path


sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch.utils.data import Dataset

from training.common.arguments import AugmentationArguments, ImageDataArguments, ModelArguments, RunArguments
from training.common.command_line import parse_arguments
from training.data.augmentation import Augmentation, Collator, TrainingImages
from training.data.images import load_images
from training.data.sources import DataRequest
from training.engine.model_setup import resolve_config, resolve_image_size, resolve_processor
from training.evidence.reporting.markdown import markdown
from training.evidence.reporting.sweeps import TRAINING


ARGUMENT_CLASSES = (ModelArguments, ImageDataArguments, AugmentationArguments, RunArguments)
BATCH, BATCHES = 512, 5


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cifar100", nargs=2, metavar=("TRAIN", "TEST"), help="parquet files")
    given = parser.parse_args(arguments)
    cases = {f"arrows of {size} px": ["arrows.yaml", "--image_size", str(size)] for size in (108, 168, 276)}
    if given.cifar100:
        data = ["--train_files", given.cifar100[0], "--validation_files", given.cifar100[1]]
        cases["CIFAR-100, LieRE's augmentation"] = ["cifar100.yaml", *data]
        cases["CIFAR-100, torchvision's ranges"] = ["cifar100.yaml", *data, "--rand_augment_ranges", "torchvision"]
    torch.set_num_threads(1)
    rows = [[name, *cost(flags)] for name, flags in cases.items()]
    print(markdown(["images", "one after another", "a batch of them", "together"], rows))


def cost(flags: list[str]) -> list[str]:
    """Milliseconds of reading and augmenting an image, of its share of a batch, and of both; medians."""
    images, collate = input_of(flags)
    spent = []
    for batch in range(BATCHES):
        start = time.process_time()
        examples = [images[0, batch * BATCH + index] for index in range(BATCH)]
        read = time.process_time()
        collate(examples)
        spent.append((read - start, time.process_time() - read, time.process_time() - start))
    return [f"{1000 * statistics.median(column) / BATCH:.2f}" for column in zip(*spent)]


def input_of(flags: list[str]) -> tuple[Dataset, Callable]:
    """The training images of a recipe, and its collator."""
    recipe, *rest = flags
    words = [str(TRAINING / "recipes" / recipe), *rest, *"--output_dir unused --bf16 false --use_cpu true".split()]
    model, data, augmentation, run = parse_arguments(words, ARGUMENT_CLASSES)
    config = resolve_config(model)
    size = resolve_image_size(model, config)
    processor = resolve_processor(model, data, size, config)
    source = load_images(data, DataRequest(size, len(processor.image_mean), ("training",))).train
    images = TrainingImages(source, Augmentation(size, int(processor.resample), augmentation, run.order_seed))
    return images, Collator(size, 3, processor.image_mean, processor.image_std, augmentation, run.order_seed)


if __name__ == "__main__":
    main()
