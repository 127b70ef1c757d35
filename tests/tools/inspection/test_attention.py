"""Where models look, what the frame does to them and what they cost, against loops and formulas."""

import contextlib
import itertools
import math

import numpy as np
import patching_cases
import pytest
import torch
import transformers
from published_models import vit
from torch.utils import flop_counter

import hf_liere
from hf_liere.tools.inspection.analysis import (
    analyse,
    attention_distances,
    attention_maps,
    attention_relativity,
    output_change,
    vision_tower,
)
from hf_liere.tools.inspection.attention import equal_patches, overlay
from hf_liere.tools.inspection.costs import count_cost


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"position_encoding": "absolute"},
        {"num_register_tokens": 2},
        {"use_class_token": False, "pooling": "mean"},
        {"pooling": "mean"},
    ],
)
def test_attention_maps_against_output_attentions(fields):
    model = vit(**fields)
    images = torch.randn(3, 3, 16, 24)
    found = attention_maps(model, images, batch_size=2, per_head=True)
    model.set_attn_implementation("eager")
    attentions = torch.stack(model(images, output_attentions=True).attentions).detach()
    prefix = model.config.num_prefix_tokens
    if model.config.pooling == "mean":
        rows, query = attentions[:, :, :, prefix:].mean(3), "mean of patches"
    else:
        rows, query = attentions[:, :, :, 0], "class token"
    assert found.grid == (4, 6) and found.query == query
    # Batches of two and three sum in another order.
    assert torch.allclose(found.per_head, rows[..., prefix:].unflatten(-1, (4, 6)), atol=1e-6)
    assert torch.allclose(found.maps, found.per_head.mean(2), atol=1e-7)


def test_looking_changes_nothing():
    model = vit().train()
    model.liere.layers[0].eval()
    modes = [module.training for module in model.modules()]
    for size in (16, 18):
        # Also where it is refused: 18 is no multiple of patches.
        with pytest.raises(ValueError) if size == 18 else contextlib.nullcontext():
            analyse(model, [torch.randn(1, 3, 16, size)])
        assert [module.training for module in model.modules()] == modes
        assert model.config._attn_implementation == "sdpa"
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_attention_distance_against_a_loop():
    model, images = vit(), torch.randn(2, 3, 12, 16)
    found = attention_distances(model, images)
    model.set_attn_implementation("eager")
    attentions = model(images, output_attentions=True).attentions
    for layer, image, head in ((0, 0, 0), (1, 1, 1)):
        weights = attentions[layer][image, head].detach().double()
        total = 0.0
        for query in range(12):
            row = weights[1 + query, 1:] / weights[1 + query, 1:].sum()
            for key in range(12):
                total += row[key].item() * math.dist(divmod(query, 4), divmod(key, 4)) / 12
        # Attention weights are float32.
        assert found[layer, image, head].item() == pytest.approx(total, rel=1e-5)


def test_output_change():
    """Zero where everything moves together or nothing is rotated beside it, against positions given by hand."""
    images = torch.randn(2, 3, 16, 16)
    relative = vit(position_encoding="comrope_ld", use_class_token=False, pooling="mean")
    # Rounding of float32.
    assert output_change(relative, images).change.max() < 1e-5
    model = vit()
    found = output_change(model, images, batch_size=1, offsets=[0.0, 2.0])
    # Four patches from 0 to 1: two patches are ⅔.
    positions = model.liere.grid_positions((4, 4), torch.device("cpu")).coordinates[1:]
    with torch.no_grad():
        before = model.liere(images, positions=positions).pooler_output
        after = model.liere(images, positions=positions + 2 / 3).pooler_output
    expected = (after - before).norm(dim=1) / before.norm(dim=1)
    assert found.change[0].max() == 0 and found.change[1].min() > 1e-3
    assert torch.allclose(found.change[1], expected, rtol=1e-3)


def test_relativity_of_attention_is_that_of_the_whole_model():
    # Rounding of float32, in logits below 1.
    for encoding in ("comrope_ld", "none"):
        assert attention_relativity(vit(position_encoding=encoding)).max() < 1e-5
    for fields in ({}, {"position_encoding": "comrope_ld", "use_absolute_position_embeddings": True}):
        assert attention_relativity(vit(**fields)).max() > 1e-3


def test_rotations_of_the_model_itself_are_noticed():
    """Relative ones, below relative ones in other planes: together they are not, and the generators do not show it."""
    model, inputs = patching_cases.build("clip_vision")
    hf_liere.patch(model, hf_liere.RotaryPatchConfig(rotary_init="normal", keep_absolute="drop"))
    assert attention_relativity(model).max() < 1e-5
    rotations = torch.polar(torch.ones(17, 16), torch.arange(17.0).unsqueeze(-1) * torch.rand(16))

    def rotate(module, inputs, output):
        return torch.view_as_real(torch.view_as_complex(output.unflatten(-1, (16, 2))) * rotations).flatten(-2)

    attention = vision_tower(model).attentions[0][1]
    for projection in (attention.q_proj, attention.k_proj):
        projection.register_forward_hook(rotate)
    analysis = analyse(model, [inputs["pixel_values"]])
    assert analysis.encoding.relativity.largest.max() < 1e-10
    assert analysis.attention_relativity.max() > 0.1


def test_relativity_of_attention_by_hand():
    """LieRE, whose generators do not commute: every pair of pairs with the same difference, in float64."""
    model = vit(num_hidden_layers=1, image_size=12)
    pixels = equal_patches(vision_tower(model))
    assert torch.equal(pixels[..., :4, :4], pixels[..., 8:, 4:8])
    model.set_attn_implementation("eager")
    weights = model(pixels, output_attentions=True).attentions[0][0, :, 1:, 1:].detach().double()
    places, expected = list(itertools.product(range(3), repeat=2)), [0.0, 0.0]
    for (a, i), (b, j), (c, k), (d, m) in itertools.product(enumerate(places), repeat=4):
        if (j[0] - i[0], j[1] - i[1]) == (m[0] - k[0], m[1] - k[1]):
            for head in range(2):
                first, second = (weights[head, p, q].log() - weights[head, p, p].log() for p, q in ((a, b), (c, d)))
                expected[head] = max(expected[head], (first - second).item())
    # Attention weights are float32.
    assert attention_relativity(model).tolist() == pytest.approx(expected, abs=2e-6)


@pytest.mark.parametrize("keep_absolute", ["interpolate", "drop"])
def test_relativity_of_a_patched_model(keep_absolute):
    model, _ = patching_cases.build("clip_vision")
    config = hf_liere.RotaryPatchConfig(rotary_init="normal", keep_absolute=keep_absolute)
    hf_liere.patch(model, config)
    analysis = analyse(model)
    assert analysis.model["absolute_table"] == (keep_absolute == "interpolate")
    assert (analysis.attention_relativity.max() > 0.1) == (keep_absolute == "interpolate")
    half = attention_relativity(model.to(torch.bfloat16))
    # The weights lose digits, measuring does not.
    assert (half.max() < 1e-5) == (keep_absolute == "drop")


def test_cost_by_counting():
    """LieRE8: 2 layers, 17 tokens, 2 heads of 24; two axes of 28 entries in 3 blocks; 8 products per channel."""
    formulas = dict(flop_counter.flop_registry)
    cost = count_cost(vit(), torch.zeros(1, 3, 16, 16))
    assert formulas == flop_counter.flop_registry, "other counters of the process count otherwise now"
    assert cost.encoding_parameters == 2 * 2 * 2 * 3 * 28
    assert cost.rotating_operations == 2 * 2 * 17 * 48 * 8
    plain = count_cost(vit(position_encoding="none"), torch.zeros(1, 3, 16, 16))
    assert cost.parameters - cost.encoding_parameters == plain.parameters
    assert cost.operations - cost.rotation_operations - cost.rotating_operations == plain.operations
    assert plain.operation_share == plain.parameter_share == 0
    absolute = count_cost(vit(position_encoding="absolute"), torch.zeros(1, 3, 16, 16))
    assert absolute.table_parameters == absolute.parameters - plain.parameters == 17 * 48
    # Two products per channel of query and key rotate a plane.
    mixed = count_cost(vit(position_encoding="rope_mixed"), torch.zeros(1, 3, 16, 16))
    assert mixed.rotating_operations == 2 * 2 * 17 * 48 * 2


@pytest.mark.parametrize("implementation", ["sdpa", "eager", "flex_attention"])
def test_attention_is_counted_however_it_is_computed(implementation):
    """24 patches and a class token in 2 layers of 2 heads of 24, written out, and a patched model."""
    model = vit(position_encoding="absolute")
    model.set_attn_implementation(implementation)
    width, tokens, inner = 48, 25, model.config.intermediate_size
    layer = 4 * tokens * width * width + 2 * tokens * tokens * width + 2 * tokens * width * inner
    norms = 5 * (2 * 2 + 1) * tokens * width
    patches = 24 * 3 * 4 * 4 * width
    head = width * model.config.num_labels
    cost = count_cost(model, torch.zeros(1, 3, 16, 24))
    assert cost.operations == patches + 2 * layer + norms + head
    assert model.config._attn_implementation == implementation
    # Attention of its pooling head is a fused kernel that no configuration chooses.
    fields = {**patching_cases.SMALL, "image_size": 16, "patch_size": 4, "use_head": True, "qkv_bias": False}
    other = transformers.Aimv2VisionModel(transformers.Aimv2VisionConfig(**fields)).eval()
    hf_liere.patch(other, hf_liere.RotaryPatchConfig(position_encoding="liere", rotary_init="normal"))
    other.set_attn_implementation(implementation)
    counted = count_cost(other, torch.zeros(1, 3, 16, 16))
    width, tokens, inner = 32, 16, 48
    layer = 4 * tokens * width * width + 2 * tokens * tokens * width + 3 * tokens * width * inner
    head = 2 * tokens * width * width + 2 * tokens * width + width * width
    patches = tokens * 48 * width
    rotating = 2 * 2 * tokens * width * 8
    assert counted.rotating_operations == rotating
    assert counted.operations - counted.rotation_operations == patches + 2 * layer + head + rotating


def test_overlay():
    image = np.full((8, 6, 3), 100, np.uint8)
    values = torch.tensor([[0.2, 0.2], [0.2, 0.6]])
    laid = overlay(image, values, opacity=0.5, colormap="gray")
    # Smallest value black, largest white, half of each.
    assert laid.shape == image.shape and laid.dtype == np.uint8
    assert (laid[:4] == 50).all() and (laid[4:, :3] == 50).all() and (laid[4:, 3:] == round((100 + 255) / 2)).all()
    assert np.array_equal(overlay(image[..., 0], values), overlay(image, values))
    assert np.array_equal(overlay(image, values * 0.1), overlay(image, values))
    assert (overlay(image, values, opacity=1, colormap="gray", limits=(0.2, 1.0))[5, 5] == 128).all()
