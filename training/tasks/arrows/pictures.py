"""What `demo.py` shows of its trained models: the accuracies over training, and answers to new images."""

from pathlib import Path
from typing import Any

import matplotlib
import torch
from matplotlib import pyplot
from PIL import Image
from transformers import AutoImageProcessor, AutoModelForImageClassification
from transformers.utils.logging import disable_progress_bar

import hf_liere  # noqa: F401 (registers liere_vit with the Auto classes)
from training.common.records import save_figure
from training.data.arrows import BAG_OF_ARROWS_ACCURACY, LABELS, Arrows


matplotlib.use("Agg")


def plot_accuracy(histories: dict[str, dict[str, Any]], path: Path) -> None:
    """
    Args:
        histories: for each model, by its name, `color`, `style` and `history`: pairs of images seen and accuracy.
    """
    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    for name, model in histories.items():
        images, accuracies = zip(*model["history"])
        values = [100 * accuracy for accuracy in accuracies]
        axes.plot(images, values, model["style"], color=model["color"], label=name, linewidth=2)
    axes.axhline(100 * BAG_OF_ARROWS_ACCURACY, color="#777777", linewidth=1, label="counting arrows")
    axes.axhline(100 / len(LABELS), color="#BBBBBB", linewidth=1, linestyle="--", label="chance")
    axes.set(xlabel="training images seen", ylabel="accuracy on new images (%)", ylim=(0, 102))
    axes.set_title("Which way does the arrow point that the Y points at?")
    axes.xaxis.set_major_formatter(matplotlib.ticker.StrMethodFormatter("{x:,.0f}"))
    axes.legend(loc="lower right", ncols=2, frameon=False)
    save_figure(figure, path, dpi=150)
    pyplot.close(figure)


def draw_example(answer: str, path: Path) -> None:
    """Draws the first new image with an answer to it."""
    image, label = Arrows("test", 1)[0]
    figure, axes = pyplot.subplots(figsize=(4, 4.4), layout="constrained")
    axes.imshow(image.squeeze(-1), cmap="gray", interpolation="nearest")
    axes.set(xticks=[], yticks=[])
    axes.set_title(f"The Y points at an arrow that points {LABELS[label]}.\nLieRE8 says: {answer}.")
    save_figure(figure, path, dpi=150)
    pyplot.close(figure)


def classify_new_images(checkpoint: Path) -> list[str]:
    """Prints what a saved classifier, loaded like any checkpoint of the Hub, says about new images; returns it."""
    disable_progress_bar()
    model = AutoModelForImageClassification.from_pretrained(checkpoint).eval()
    processor = AutoImageProcessor.from_pretrained(checkpoint)
    images = Arrows("test", 200)
    pictures = [Image.fromarray(images[index][0].squeeze(-1)).convert("RGB") for index in range(len(images))]
    with torch.no_grad():
        logits = model(**processor(pictures, return_tensors="pt")).logits  # (200, 4)
    said = [model.config.id2label[number] for number in logits.argmax(dim=-1).tolist()]
    truth = [LABELS[images[index][1]] for index in range(len(images))]
    for index in range(5):
        verdict = "right" if said[index] == truth[index] else f"wrong, it is {truth[index]}"
        print(f"New image {index}: the model says {said[index]}, which is {verdict}.")
    right = sum(answer == correct for answer, correct in zip(said, truth))
    print(f"A fresh process with {checkpoint.name} got {right} of {len(truth)} new images right.")
    return said
