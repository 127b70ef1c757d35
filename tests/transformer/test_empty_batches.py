"""Models take batches without samples, in training too: what remains of a data set on a process may be nothing."""

import pytest
import torch
from encoding_cases import ENCODINGS, block_size, on_axes
from encoding_cases import fields as fields_of

import hf_liere


MOVING = {"position_shift": 0.5, "position_jitter": 1.2, "position_rescale": 1.3, "position_perturbation": 0.3}


def assert_empty(model, **inputs):
    """Outputs have no samples in the shapes of others, in inference and in a step of training."""
    with torch.no_grad():
        (expected,) = {tensor.shape[1:] for tensor in model.eval()(**inputs).values() if tensor.shape[:1] == (0,)}
    outputs = model.train()(**inputs)
    assert outputs.logits.shape == (0, *expected)
    outputs.logits.sum().backward()
    # Nothing is learned from nothing.
    assert not any(parameter.grad is not None and parameter.grad.any() for parameter in model.parameters())


@pytest.mark.parametrize("attention", ["sdpa", "flex_attention"])
@pytest.mark.parametrize("encoding", ["none", "absolute", *ENCODINGS])
def test_images_and_tokens(tiny, encoding, attention):
    fields = {"attn_implementation": attention, "num_hidden_layers": 1, **fields_of(encoding)}
    for options in ({"pooling": "mean", "patch_dropout_prob": 0.5}, MOVING if encoding in ENCODINGS else {}):
        model = hf_liere.LieREViTForImageClassification(tiny(**fields, **options))
        pixels = {"pixel_values": torch.zeros(0, 3, 16, 12)}
        patches = {"pixel_values": torch.zeros(0, 9, 48), "spatial_shapes": torch.zeros(0, 2, dtype=torch.long)}
        mask = {"attention_mask": torch.zeros(0, 13)}
        given = {"positions": torch.zeros(0, 12, 2)} if encoding in ENCODINGS else {}
        for inputs in (pixels, pixels | mask, patches, pixels | given):
            assert_empty(model, **inputs)
    table = {"position_table_size": [3, 3]} if encoding == "absolute" else {}
    sizes = {"hidden_size": 48, "num_attention_heads": 2, "intermediate_size": 64}
    config = hf_liere.LieRETokensConfig(feature_size=5, num_axes=2, num_labels=3, **sizes, **fields, **table)
    tokens = {"inputs_embeds": torch.zeros(0, 7, 5), "positions": torch.zeros(0, 7, 2)}
    for make in (hf_liere.LieRETokensForSequenceClassification, hf_liere.LieRETokensForTokenClassification):
        for mask in ({}, {"attention_mask": torch.zeros(0, 7)}):
            assert_empty(make(config), **tokens, **mask)


@pytest.mark.parametrize("encoding", ["none", "absolute", *on_axes(3)])
def test_clips(tiny_video, encoding):
    fields = {"block_size": block_size(encoding, axes=3, wanted=5)} if encoding in ENCODINGS else {}
    model = hf_liere.LieREVideoForVideoClassification(tiny_video(position_encoding=encoding, **fields))
    assert_empty(model, pixel_values=torch.zeros(0, 4, 3, 8, 8))


def test_physical_coordinates_and_other_heads(tiny):
    physical = {"coordinates": "physical", "physical_unit": [1.0, 1.0]}
    model = hf_liere.LieREViTForImageClassification(tiny(**physical))
    assert_empty(model, pixel_values=torch.zeros(0, 3, 16, 16), spacing=torch.ones(0, 2))
    patches = {"pixel_values": torch.zeros(0, 9, 48), "spatial_shapes": torch.zeros(0, 2, dtype=torch.long)}
    assert_empty(model, **patches, spacing=torch.ones(0, 2))
    pixels = torch.zeros(0, 3, 16, 16)
    assert hf_liere.LieREViTBackbone(tiny())(pixels).feature_maps[-1].shape == (0, 48, 4, 4)
    masked = torch.zeros(0, 16, dtype=torch.bool)
    outputs = hf_liere.LieREViTForMaskedImageModeling(tiny())(pixels, bool_masked_pos=masked)
    assert outputs.reconstruction.shape == pixels.shape and outputs.loss == 0
