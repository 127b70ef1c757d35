"""Batches of images and clips of different sizes: what a sample gives must not depend on the others in its batch."""

import encoding_cases
import numpy as np
import pytest
import torch
from transformers import Siglip2ImageProcessor

from hf_liere import (
    LieREVideoConfig,
    LieREVideoForVideoClassification,
    LieREViTBackbone,
    LieREViTConfig,
    LieREViTForImageClassification,
    LieREViTForMaskedImageModeling,
    batch_of_patches,
)
from hf_liere.encoding.rotary_encoding import RotaryEncoding


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


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def build(encoding="liere", attention="sdpa", **fields):
    head_dim = SMALL["hidden_size"] // SMALL["num_attention_heads"]
    config = LieREViTConfig(**{**SMALL, **encoding_cases.fields(encoding, head_dim), **fields})
    config._attn_implementation = attention
    return LieREViTForImageClassification(config).eval()


def images(sizes=SIZES, channels=3):
    return [torch.randn(channels, *size) for size in sizes]


def unseen(batch):
    """The same batch with padding that is not a number."""
    batch["pixel_values"][~batch["pixel_attention_mask"].bool()] = torch.nan
    return batch


def assert_as_alone(model, pixels, **arguments):
    """Logits of every sample by itself, as an ordinary image, and in a batch with padding."""
    with torch.no_grad():
        together = model(**unseen(batch_of_patches(pixels, model.config, 20)), **arguments).logits
        alone = [model(image.unsqueeze(0), **arguments).logits for image in pixels]
    # Sums of up to 22 tokens in another order.
    torch.testing.assert_close(together, torch.cat(alone), atol=1e-5, rtol=0)


@pytest.mark.parametrize("pooling", ["cls", "mean", "mean_all"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("encoding", encoding_cases.ENCODINGS)
def test_padded_as_alone(encoding, attention, pooling):
    assert_as_alone(build(encoding, attention, pooling=pooling), images())


@pytest.mark.slow
def test_padded_as_alone_with_flex_attention():
    assert_as_alone(build("liere", "flex_attention", pooling="mean"), images())


@pytest.mark.parametrize(
    "fields",
    [
        {"position_encoding": "absolute"},
        {"position_encoding": "absolute", "position_table_size": [5, 5]},
        *(
            {"position_encoding": "comrope_ld", "position_table_size": [5, 5], "use_absolute_position_embeddings": True}
            | {"rotate_prefix": rotate_prefix}
            for rotate_prefix in (False, True)
        ),
        {"position_encoding": "none"},
        {"coordinates": "unit_width"},
        {"coordinates": "train_index"},
        {"coordinates": "fixed_grid"},
        {"coordinates": "centred_grid", "rotate_prefix": True},
        {"coordinates": "index", "rotate_prefix": True},
        {"share_layers": True, "share_heads": True},
        {"position_encoding": "comrope_ld", "rotate_values": True},
        {"final_norm": "pooled", "pooling": "mean"},
    ],
)
def test_every_way_of_placing_patches(fields):
    fields = dict(fields)
    assert_as_alone(build(fields.pop("position_encoding", "liere"), **fields), images())


@pytest.mark.parametrize("encoding", ["rope_mixed", "liere", "comrope_ld"])
def test_gradients_are_those_of_the_samples(encoding):
    model = build(encoding, pooling="mean").train()
    pixels = images()
    labels = torch.tensor([0, 1, 2, 1])
    model(**unseen(batch_of_patches(pixels, model.config)), labels=labels).loss.backward()
    together = {
        name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None
    }
    model.zero_grad()
    for image, label in zip(pixels, labels):
        (model(image.unsqueeze(0), labels=label.unsqueeze(0)).loss / 4).backward()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(together[name], parameter.grad, atol=1e-5, rtol=1e-4)
    assert any("rotary" in name for name in together)


def test_checkpointed_gradients_are_those_without():
    model = build("comrope_ld", pooling="mean").train()
    batch = batch_of_patches(images(), model.config)
    gradients = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable()
        model.zero_grad()
        model(**batch, labels=torch.tensor([0, 1, 2, 1])).loss.backward()
        gradients.append(model.liere.rotary_encoding.generators.grad.clone())
    torch.testing.assert_close(*gradients)


def test_rotations_are_computed_once_for_every_distinct_grid(monkeypatch):
    counted = []
    forward = RotaryEncoding.layer_rotations
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


@pytest.mark.parametrize("encoding", ["liere", "axial_rope"])
def test_clips_of_different_lengths(encoding):
    config = LieREVideoConfig(**{**SMALL, "position_encoding": encoding, "num_frames": 4, "tubelet_size": 2})
    model = LieREVideoForVideoClassification(config).eval()
    assert_as_alone(
        model, [torch.randn(frames, 3, *size) for frames, size in ((4, (16, 16)), (2, (24, 16)), (8, (8, 16)))]
    )


@pytest.mark.parametrize("spacing", [[0.5, 2.0], [[0.5, 2.0], [1.0, 1.0], [0.5, 2.0], [2.0, 0.5]]])
def test_physical_positions(spacing):
    model = build("liere", coordinates="physical", physical_unit=32)
    spacing = torch.tensor(spacing)
    pixels = images()
    with torch.no_grad():
        together = model(**batch_of_patches(pixels, model.config), spacing=spacing).logits
        rows = spacing.expand(4, 2)
        alone = torch.cat([model(image.unsqueeze(0), spacing=row).logits for image, row in zip(pixels, rows)])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        pytest.param({"coordinates": "unit"}, marks=pytest.mark.slow),
        pytest.param({"coordinates": "centred_grid"}, marks=pytest.mark.slow),
        {"position_encoding": "comrope_ap", "rotate_prefix": True},
    ],
)
def test_one_graph_for_all_shapes(fields, fresh_compiler):
    fields = dict(fields)
    model = build(fields.pop("position_encoding", "liere"), **fields)
    batch = batch_of_patches(images(), model.config)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        for order in ([0, 1, 2, 3], [3, 2, 1, 0]):
            part = {name: values[order] for name, values in batch.items()}
            torch.testing.assert_close(compiled(**part).logits, model(**part).logits, atol=1e-5, rtol=0)


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


@pytest.mark.parametrize("augmentation", [{"position_perturbation": 0.5}, {"position_rescale": 2.0}])
def test_augmentation_of_coordinates(augmentation):
    model = build("liere", **augmentation).train()
    batch = batch_of_patches(images(), model.config)
    first, second = (model(**batch).logits for _ in range(2))
    assert (first - second).abs().max() > 1e-5
    model.eval()
    assert torch.equal(model(**batch).logits, model(**batch).logits)


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
