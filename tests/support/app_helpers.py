"""What the tests of the app share: small classifiers of puzzles, and pictures."""

import numpy as np
import torch
import training_helpers  # noqa: F401 (makes training importable)
from PIL import Image
from transformers import ViTImageProcessor

from hf_liere import LieREViTConfig, LieREViTForImageClassification
from training.data.arrows import LABELS


ARROWS = {"image_size": 108, "patch_size": 12, "id2label": dict(enumerate(LABELS))}
PROCESSOR = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "size": {"height": 108, "width": 108}}


def save_classifier(folder, processor=True, **fields):
    """A small classifier with random weights."""
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    torch.manual_seed(len(folder.name))
    model = LieREViTForImageClassification(LieREViTConfig(**{**shape, **ARROWS, **fields})).eval()
    # A new classifier answers the same to everything.
    torch.nn.init.normal_(model.classifier.weight, std=1.0)
    model.save_pretrained(folder)
    if processor:
        ViTImageProcessor(**PROCESSOR).save_pretrained(folder)
    return folder


def save_classifiers(folder):
    """Two classifiers of puzzles side by side, as `make demo` leaves them."""
    save_classifier(folder / "liere8", position_encoding="liere", use_class_token=False, pooling="mean")
    save_classifier(folder / "comrope_ld", position_encoding="comrope_ld")
    return folder


def picture_of(size=(50, 40), mode="RGB"):
    return Image.fromarray(np.random.default_rng(0).integers(256, size=(*size[::-1], 3), dtype=np.uint8)).convert(mode)
