"""Batches of images and clips of different sizes: what a sample gives must not depend on the others in its batch."""

import encoding_cases
import numpy as np
import pytest
import torch
from transformers import Siglip2ImageProcessor

from hf_liere import (
    LieREViTBackbone,
    LieREViTConfig,
    LieREViTForImageClassification,
    LieREViTForMaskedImageModeling,
    batch_of_patches,
)


SIZES = ((32, 32), (16, 48), (40, 24), (32, 32))
SMALL = {
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "image_size": 32,
    "patch_size": 8,
    "num_labels": 3,
    "num_register_tokens": 1,
    # So that outputs depend on positions.
    "initializer_range": 0.2,
}


def build(encoding="liere", **fields):
    head_dim = SMALL["hidden_size"] // SMALL["num_attention_heads"]
    config = LieREViTConfig(**{**SMALL, **encoding_cases.fields(encoding, head_dim), **fields})
    return LieREViTForImageClassification(config).eval()


def images():
    return [torch.randn(3, *size) for size in SIZES]


@pytest.mark.parametrize("encoding", encoding_cases.ENCODINGS)
@torch.no_grad()
def test_padded_as_alone(encoding):
    """Logits of every sample by itself, as an ordinary image, and in a batch with padding that is not a number."""
    model, pixels = build(encoding), images()
    batch = batch_of_patches(pixels, model.config, 20)
    batch["pixel_values"][~batch["pixel_attention_mask"].bool()] = torch.nan
    alone = torch.cat([model(image.unsqueeze(0)).logits for image in pixels])
    # Sums of up to 22 tokens in another order.
    torch.testing.assert_close(model(**batch).logits, alone, atol=1e-5, rtol=0)


def test_rotations_are_computed_once_for_every_distinct_grid(monkeypatch):
    counted = []
    model = build("liere").train()
    encoding = type(model.liere.rotary_encoding)
    forward = encoding.layer_rotations
    monkeypatch.setattr(
        encoding,
        "layer_rotations",
        lambda self, positions, *rest: counted.append(positions.facts.grid) or forward(self, positions, *rest),
    )
    model(**batch_of_patches(images(), model.config))
    assert sorted(counted) == [(2, 6), (4, 4), (5, 3)]


@pytest.mark.parametrize("size", [8, 16])
def test_the_processor_of_transformers(size):
    model = build("liere", patch_size=size)
    processor = Siglip2ImageProcessor(patch_size=size, max_num_patches=20)
    pictures = [
        np.random.default_rng(0).integers(0, 255, (*shape, 3), dtype=np.uint8) for shape in ((50, 90), (70, 33))
    ]
    batch = processor(pictures, return_tensors="pt")
    assert batch["pixel_attention_mask"].sum() < batch["pixel_attention_mask"].numel()
    with torch.no_grad():
        together = model(**batch).logits
        for sample, (patches, shape) in enumerate(zip(batch["pixel_values"], batch["spatial_shapes"].tolist())):
            rows, columns = shape
            image = patches[: rows * columns].view(rows, columns, size, size, 3).permute(4, 0, 2, 1, 3)
            alone = model(image.reshape(1, 3, rows * size, columns * size)).logits
            torch.testing.assert_close(together[sample], alone[0], atol=1e-5, rtol=0)


def test_positions_of_the_user():
    model = build("comrope_ld", pooling="mean")
    batch = batch_of_patches(images(), model.config)
    positions = torch.rand(4, batch["pixel_values"].shape[1], 2)
    with torch.no_grad():
        given = model(**batch, positions=positions).logits
        # Where padding sits does not matter.
        moved = torch.where(batch["pixel_attention_mask"].bool().unsqueeze(-1), positions, 7.0)
        torch.testing.assert_close(model(**batch, positions=moved).logits, given, atol=1e-5, rtol=0)
        assert (given - model(**batch).logits).abs().max() > 1e-2


def test_positions_of_the_user_beside_a_table_need_no_spacing():
    model = build("liere", coordinates="physical", physical_unit=32, use_absolute_position_embeddings=True)
    pixels = images()
    batch = batch_of_patches(pixels, model.config)
    positions = torch.rand(4, batch["pixel_values"].shape[1], 2)
    with torch.no_grad():
        together = model(**batch, positions=positions).logits
        counts = batch["pixel_attention_mask"].sum(1)
        alone = [
            model(image.unsqueeze(0), positions=places[:count]).logits
            for image, places, count in zip(pixels, positions, counts)
        ]
    torch.testing.assert_close(together, torch.cat(alone), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "change, message",
    [
        (
            {"pixel_values": torch.zeros(4, 16, 100)},
            r"\(4, 16, 100\) beside spatial_shapes must be \(batch, patches, 192\)",
        ),
        ({"spatial_shapes": None}, "pixel_attention_mask was given without spatial_shapes"),
        ({"spatial_shapes": torch.full((4, 3), 2)}, r"spatial_shapes of shape \(4, 3\)"),
        ({"spatial_shapes": torch.full((4, 2), 2.0)}, "torch.float32 must be"),
        ({"spatial_shapes": torch.full((4, 2), 5)}, r"spatial_shapes contain \[\[5, 5\]"),
        ({"spatial_shapes": torch.tensor([[0, 4], [2, 6], [5, 3], [4, 4]])}, r"spatial_shapes contain \[\[0, 4\]\]"),
        ({"pixel_attention_mask": torch.ones(4, 16)}, r"pixel_attention_mask of samples \[1, 2\]"),
        ({"pixel_attention_mask": torch.ones(4, 15)}, r"pixel_attention_mask of shape \(4, 15\) must be \(4, 16\)"),
        ({"attention_mask": torch.ones(4, 18)}, "take pixel_attention_mask"),
    ],
)
def test_batches_that_do_not_fit(change, message):
    model = build("liere")
    with pytest.raises(ValueError, match=message):
        model(**{**batch_of_patches(images(), model.config), **change})


def test_inputs_that_do_not_divide():
    config = build("liere").config
    with pytest.raises(ValueError, match="at least one input"):
        batch_of_patches([], config)
    with pytest.raises(ValueError, match=r"Input 1 with 3 channels and of size \(9, 8\)"):
        batch_of_patches([torch.zeros(3, 8, 8), torch.zeros(3, 9, 8)], config)
    with pytest.raises(ValueError, match=r"Input 1 has 16 patches, \(4, 4\); max_num_patches=12"):
        batch_of_patches([torch.zeros(3, 8, 8), torch.zeros(3, 32, 32)], config, 12)


def test_models_of_one_size():
    batch = batch_of_patches(images(), build().config)
    config = LieREViTConfig(**SMALL)
    for model_class in (LieREViTForMaskedImageModeling, LieREViTBackbone):
        with pytest.raises(ValueError, match="takes inputs of one size"):
            model_class(config)(**batch)
