"""Classes of a classifier and their probabilities."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...errors import printable
from .attention import input_batches, vision_tower


@dataclass(frozen=True)
class Answer:
    """A class (name and number) and its probability."""

    label: str
    index: int
    score: float

    def __str__(self) -> str:
        return f"{printable(self.label, keep='')} {self.score:.1%}"


def likeliest(probabilities: torch.Tensor, names: Sequence[str], most: int) -> list[Answer]:
    """The most probable of the named classes, by decreasing probability."""
    scores, indices = (part.tolist() for part in probabilities.topk(min(most, len(names))))
    return [Answer(names[index], index, score) for score, index in zip(scores, indices)]


def is_classifier(model: nn.Module) -> bool:
    """Whether a model gives an image or video one score per class."""
    return type(model).__name__.endswith(("ForImageClassification", "ForVideoClassification"))


def class_names(model: nn.Module) -> list[str]:
    """Names of the classes in the order of the outputs; empty without classes."""
    labels = getattr(getattr(model, "config", None), "id2label", None) or {}
    return [str(labels[index]) for index in sorted(labels)]


def probabilities(model: nn.Module, logits: torch.Tensor) -> torch.Tensor:
    """(images, labels) from logits of the same shape: sigmoids for multi-label classifiers, else a softmax."""
    logits = logits.float().cpu()
    if getattr(model.config, "problem_type", None) == "multi_label_classification":
        return logits.sigmoid()
    return logits.softmax(-1)


@torch.no_grad()
def class_probabilities(
    model: nn.Module, pixel_values: torch.Tensor, batch_size: int = 8, *, progress: bool = False, **inputs: Any
) -> torch.Tensor | None:
    """
    (images, labels) [`probabilities`] of a classifier in evaluation mode; `None` for other models. Arguments as in
    [`attention_maps`], and what else the model takes with a batch that contains all images.
    """
    if not is_classifier(model):
        return None
    batches = input_batches(vision_tower(model), pixel_values, batch_size, "predictions", progress)
    logits = [model(pixel_values=batch, **options | inputs).logits for batch, options in batches]
    return probabilities(model, torch.cat(logits))
