"""Views of an image in an evaluation: where they lie, and that the saved processor cuts the same."""

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import ViTImageProcessorPil

import hf_liere
from hf_liere.errors import InputError
from training.common.arguments import AugmentationArguments, ImageDataArguments, ModelArguments
from training.data.augmentation import (
    Collator,
    EvaluationImages,
    EvaluationView,
)
from training.engine.model_setup import resolve_processor


BICUBIC = 3


@pytest.mark.parametrize("crops", [1, 2, 3])
def test_views_lie_evenly_along_the_longer_side(crops):
    """Of a picture whose pixels say where they are; the shorter side is twice the part, so nothing is resized."""
    rows, columns = np.meshgrid(np.arange(32), np.arange(60), indexing="ij")
    image = np.stack([rows, columns, rows], axis=-1).astype(np.uint8)
    for picture in (image, image.transpose(1, 0, 2)):
        parts = EvaluationView((16, 16), BICUBIC, crops, 2.0).parts(picture)
        # What the picture says of places is not turned with it.
        corners = [part[0, 0, :2] for part in parts]
        starts = {1: [22], 2: [0, 44], 3: [0, 22, 44]}[crops]
        assert [list(map(int, corner)) for corner in corners] == [[8, start] for start in starts]
        assert all(part.shape == (16, 16, 3) for part in parts)


@pytest.mark.parametrize("size", [(16, 16), (20, 33), (50, 21)])
def test_the_saved_processor_cuts_what_the_evaluation_sees(size):
    image = np.random.default_rng(1).integers(256, size=(*size, 3), dtype=np.uint8)
    arguments = ImageDataArguments(eval_crops=1, eval_crop_ratio=1.25)
    config = hf_liere.LieREViTConfig(image_size=16, patch_size=4)
    processor = resolve_processor(ModelArguments(), arguments, (16, 16), config)
    # By Pillow, as the evaluation.
    processor = ViTImageProcessorPil(**processor.to_dict())
    theirs = processor(Image.fromarray(image), return_tensors="pt").pixel_values[0]
    example = EvaluationImages([(image, 0)], EvaluationView((16, 16), BICUBIC, 1, 1.25))[0]
    ours = collator_of_halves()([example])["pixel_values"][0]
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


def collator_of_halves():
    return Collator((16, 16), 3, [0.5] * 3, [0.5] * 3, AugmentationArguments(), 0)


@pytest.mark.parametrize(
    "given, size, message",
    [
        ({"eval_crops": 3}, (16, 16), "--eval_crops 3: several views are of videos only"),
        ({"eval_crops": 1}, (16, 20), "--eval_crops 1 cuts out squares"),
        ({"eval_crop_ratio": 1.1}, (16, 16), "--eval_crop_ratio 1.1 needs --eval_crops"),
    ],
)
def test_views_that_cannot_be_cut(given, size, message):
    config = hf_liere.LieREViTConfig(image_size=16, patch_size=4)
    with pytest.raises(InputError, match=message):
        resolve_processor(ModelArguments(), ImageDataArguments(**given), size, config)
