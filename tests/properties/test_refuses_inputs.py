"""Models and layers refuse inputs that mean nothing, with the value and what is accepted."""

import functools

import numpy as np
import pytest
import torch
from small_makers import IMAGE, LAYER, TOKENS, VIDEO

import hf_liere
from hf_liere import PoseEmbedding
from hf_liere.encoding.positions import TokenPositions


INF, NAN = float("inf"), float("nan")


def grid(*sizes):
    return TokenPositions.from_grid(sizes, sizes, "train_grid")


VISIBLE = torch.arange(17) < 9
SECONDS = torch.arange(4.0)
# By what is called: inputs, and words of the error.
INPUTS = {
    "absolute": [({"positions": torch.zeros(16, 2)}, "'absolute' has no rotations")],
    "none": [({"spacing": (1.0, 1.0)}, "spacing was given, but coordinates=.* do not depend on it")],
    "index": [({"spacing": (1.0, 1.0)}, "spacing was given, but coordinates=.* do not depend on it")],
    "image": [
        ({"pixel_values": torch.zeros(1, 1, 16, 16)}, "1 channels.*num_channels=3"),
        ({"pixel_values": torch.zeros(1, 3, 18, 16)}, r"\(18, 16\) is not divisible .*\(4, 4\)"),
        ({"pixel_values": torch.zeros(3, 16, 16)}, "3 dimensions; accepted: 4"),
        ({"positions": torch.zeros(15, 2)}, r"\(15, 2\).*\(16, 2\)"),
        ({"positions": torch.zeros(17, 2)}, "patch tokens only"),
        ({"positions": torch.full((16, 2), NAN)}, "32 values that are not finite"),
        ({"bool_masked_pos": torch.zeros(1, 16)}, "use_mask_token=True"),
    ],
    "masked": [({"bool_masked_pos": torch.zeros(1, 15).bool()}, r"\(1, 15\) must be .*\(1, 16\)")],
    "mean": [
        ({"attention_mask": torch.ones(2, 16).bool()}, r"\(2, 16\) in torch.bool must be \(2, 17\)"),
        ({"attention_mask": torch.ones(3, 17).bool()}, r"\(3, 17\) in torch.bool must be \(2, 17\)"),
        ({"attention_mask": torch.ones(1, 17).bool()}, r"\(1, 17\) in torch.bool must be \(2, 17\)"),
        ({"attention_mask": torch.ones(17)}, r"\(17,\) in torch.float32 must be \(2, 17\)"),
        ({"attention_mask": torch.ones(2, 1, 4, 4)}, r"\(2, 1, 4, 4\)"),
        ({"attention_mask": torch.ones(2, 1, 17, 17).long()}, "torch.int64 must be .* Boolean or floating point"),
        ({"attention_mask": torch.zeros(2, 17).masked_fill(~VISIBLE, -INF)}, "contains -inf: a mask of tokens is"),
        ({"attention_mask": torch.tensor([[1] * 17, [1] + [0] * 16])}, r"hides all 16 .* of samples \[1\]"),
        ({"attention_mask": object()}, "cannot tell which tokens a object hides"),
    ],
    "video": [
        ({"pixel_values": torch.zeros(2, 3, 8, 8)}, r"\(2, 3, 8, 8\) must be \(batch, frames, channels, height"),
        ({"pixel_values": torch.zeros(2, 5, 3, 8, 8)}, r"\(5, 8, 8\) is not divisible .*\(2, 4, 4\)"),
        ({"pixel_values": torch.zeros(2, 4, 1, 8, 8)}, "1 channels.*num_channels=3"),
    ],
    "physical image": [
        ({"spacing": (1.0,), "frame_times": SECONDS}, "model of images, which have no frames"),
    ],
    "physical": [
        ({}, r"'physical' needs spacing of shape \(3,\) or \(2, 3\)"),
        ({"spacing": (1.0, 1.0)}, r"spacing of shape \(2,\) must be \(3,\) or \(2, 3\)"),
        ({"spacing": torch.ones(3, 3)}, r"spacing of shape \(3, 3\) must be"),
        ({"spacing": (1.0, 0.0, 1.0)}, "spacing contains 0.0; positive and finite"),
        ({"spacing": (1.0, -2.0, 1.0)}, "spacing contains -2.0"),
        ({"spacing": (1.0, NAN, 1.0)}, "spacing contains nan"),
        ({"frame_times": SECONDS}, r"needs spacing of shape \(2,\) or \(2, 2\): rows and columns only"),
        ({"spacing": (1.0,) * 3, "frame_times": SECONDS}, r"spacing of shape \(3,\) must be \(2,\) or \(2, 2\)"),
        ({"spacing": (1.0, 1.0), "frame_times": torch.arange(5.0)}, r"frame_times of shape \(5,\) must be \(4,\)"),
        ({"spacing": (1.0, 1.0), "frame_times": SECONDS[[0, 2, 1, 3]]}, "decrease at frame 2"),
        ({"spacing": (1.0, 1.0), "frame_times": SECONDS.masked_fill(SECONDS > 2, INF)}, "1 values that are not"),
        ({"spacing": (1.0,) * 3, "positions": torch.rand(8, 3)}, "spacing and positions were both given"),
    ],
    "tokens": [
        ({"positions": None}, r"'liere' needs positions, of shape \(9, 2\) or \(2, 9, 2\); none were given"),
        ({"positions": torch.rand(2, 9, 3)}, r"\(2, 9, 3\) do not match the input: accepted are \(9, 2\)"),
        ({"positions": torch.rand(2, 8, 2)}, r"\(2, 8, 2\) do not match .*\(2, 9, 2\)"),
        ({"positions": torch.rand(3, 9, 2)}, r"\(3, 9, 2\) do not match"),
        ({"positions": torch.rand(9)}, r"\(9,\) do not match"),
        ({"positions": torch.arange(18).view(9, 2)}, "torch.int64; a floating point type"),
        ({"positions": torch.full((9, 2), torch.nan)}, "18 values that are not finite"),
        ({"inputs_embeds": torch.rand(2, 9, 4)}, r"\(2, 9, 4\) must be .*feature_size=5"),
        ({"inputs_embeds": torch.rand(9, 5)}, r"\(9, 5\) must be \(batch, tokens, feature_size\)"),
        ({"inputs_embeds": torch.rand(2, 0, 5)}, "at least one token"),
        ({"inputs_embeds": torch.ones(2, 9, 5, dtype=torch.long)}, "torch.int64; a floating point type"),
        ({"attention_mask": torch.ones(2, 10)}, r"\(2, 10\) must be \(2, 9\) \(batch, tokens\), without class"),
        ({"attention_mask": torch.ones(9)}, r"\(9,\) must be \(2, 9\)"),
        ({"attention_mask": torch.tensor([[1] * 9, [0] * 9])}, r"hides all 9 tokens of samples \[1\]"),
        ({"attention_mask": torch.full((2, 9), -1.0)}, "contains -1.0"),
    ],
    "layer": [
        ({"positions": torch.zeros(5, 3)}, r"positions of shape \(5, 3\) must be \(tokens, 2\)"),
        ({"positions": torch.zeros(5)}, r"positions of shape \(5,\)"),
        ({"positions": torch.zeros(6, 2)}, "positions of 6 tokens in 1 samples"),
        ({"positions": torch.zeros(3, 5, 2)}, "positions of 5 tokens in 3 samples"),
        ({"positions": torch.zeros(5, 2).long()}, "torch.int64; a floating point type is needed"),
        ({"positions": torch.full((5, 2), NAN)}, "10 values that are not finite"),
        ({"key": torch.zeros(2, 2, 6, 48)}, "5 queries and 6 keys: pass the keys' own key_positions"),
        ({"key": torch.zeros(2, 3, 5, 48)}, r"key of shape \(2, 3, 5, 48\) must be \(batch, 2 heads"),
        ({"query": torch.zeros(2, 4, 5, 64)}, "head_dim=48"),
        ({"query": torch.zeros(2, 4, 5, 48).int()}, "query are torch.int32"),
        (
            {"states": torch.zeros(2, 5, 192)},
            r"\(2, 5, 192\) cannot move .* hidden_size=None\), with content_positions",
        ),
        ({"layer": 1}, "layer=1: this module has rotations of 1 layers; accepted: 0 … 0"),
        ({"positions": [[0.0, 0.0]] * 5}, "positions are a list; accepted are a floating point tensor of"),
        ({"positions": torch.zeros(5, 2).numpy()}, "positions are a ndarray; accepted are"),
        ({"positions": grid(1, 5, 1)}, r"positions of shape \(5, 3\) must be \(tokens, 2\)"),
        ({"positions": grid(2, 3)}, "positions of 6 tokens in 1 samples"),
        ({"positions": grid(1, 5)._replace(torch.full((5, 2), INF))}, "10 values that are not finite"),
    ],
    "content": [
        ({}, "content_positions need states: pass states="),
        (
            {"states": torch.zeros(2, 6, 192)},
            r"\(2, 6, 192\) cannot move 5 tokens; accepted: \(batch, tokens, hidden_siz",
        ),
        (
            {"states": torch.zeros(2, 5, 48)},
            r"\(2, 5, 48\) cannot move 5 tokens; .* hidden_size=192\), with content_pos",
        ),
    ],
    "rotate": [({"states": torch.zeros(2, 3, 5, 48)}, r"\(2, 3, 5, 48\) must be \(batch, 2 or 4 heads")],
    "from_grid": [
        ({"coordinates": "pixels"}, "'pixels'; accepted are index, train_grid, centred_grid, .* unit, unit_width"),
        ({"coordinates": "physical"}, "follow from the spacing of an input"),
    ],
    "frames": [
        ({"poses": torch.eye(3).expand(2, 4, 3, 3)}, r"poses of shape \(2, 4, 3, 3\)"),
        ({"poses": torch.empty(2, 0, 4, 4)}, r"poses of shape \(2, 0, 4, 4\).*at least one token"),
        ({"poses": [[1.0]]}, "poses is a list; a tensor is needed"),
        ({"known": [True] * 4}, "known is a list; a tensor is needed"),
        ({"reference": np.eye(4)}, "reference is a ndarray; a tensor is needed"),
        ({"intrinsics": torch.eye(3).expand(2, 4, 3, 3), "image_size": (NAN, 2)}, r"image_size=\(nan, 2\)"),
        ({"intrinsics": torch.eye(3).expand(2, 4, 3, 3), "image_size": 224}, "image_size=224 must be"),
        ({"poses": torch.eye(4).half().expand(2, 4, 4, 4)}, "torch.float16: float32 or float64"),
        ({"intrinsics": torch.eye(3).expand(2, 4, 3, 3)}, "image_size=None"),
        ({"image_size": (4, 4)}, "without intrinsics"),
        ({"intrinsics": torch.zeros(2, 4, 3, 3), "image_size": (4, 4)}, r"intrinsics\[0, 0\]"),
        ({"intrinsics": torch.eye(3).expand(2, 5, 3, 3), "image_size": (4, 4)}, "5 tokens in 2 samples"),
        ({"known": torch.ones(2, 4)}, "bool is needed"),
        ({"known": torch.ones(3, 4, dtype=torch.bool)}, "3 samples"),
        ({"reference": torch.eye(4).expand(3, 4, 4)}, "reference of shape"),
        ({"patches": torch.rand(4, 2)}, "patch_share=0.0 and patches were given"),
    ],
}
PICTURE, CLIP = {"pixel_values": torch.zeros(1, 3, 16, 16)}, {"pixel_values": torch.zeros(2, 4, 3, 8, 8)}
TWO, UNIT = {"pixel_values": torch.zeros(2, 3, 16, 16)}, {"coordinates": "physical", "physical_unit": 8.0}
FEATURES = {"inputs_embeds": torch.randn(2, 9, 5), "positions": torch.rand(2, 9, 2)}
STATES = {"query": torch.randn(2, 4, 5, 48), "key": torch.randn(2, 2, 5, 48), "positions": torch.zeros(5, 2)}
# What is called, and inputs that it takes.
CALLED = {
    "image": (lambda: hf_liere.LieREViTForImageClassification(IMAGE(position_encoding="rope_mixed")), PICTURE),
    "absolute": (lambda: hf_liere.LieREViTModel(IMAGE(position_encoding="absolute")), PICTURE),
    "none": (lambda: hf_liere.LieREViTModel(IMAGE(position_encoding="none")), PICTURE),
    "index": (lambda: hf_liere.LieREViTModel(IMAGE()), PICTURE),
    "masked": (lambda: hf_liere.LieREViTForMaskedImageModeling(IMAGE()), PICTURE),
    "mean": (lambda: hf_liere.LieREViTModel(IMAGE(pooling="mean")), TWO),
    "video": (lambda: hf_liere.LieREVideoModel(VIDEO()), CLIP),
    "physical image": (lambda: hf_liere.LieREViTModel(IMAGE(**UNIT)), PICTURE),
    "physical": (lambda: hf_liere.LieREVideoModel(VIDEO(**UNIT)), CLIP),
    "tokens": (lambda: hf_liere.LieRETokensForTokenClassification(TOKENS(feature_size=5)), FEATURES),
    "series": (lambda: hf_liere.LieRETokensForSequenceClassification(TOKENS(feature_size=5, pooling="mean")), FEATURES),
    "layer": (lambda: LAYER(num_key_value_heads=2, block_size=4), STATES),
    "content": (lambda: LAYER(num_key_value_heads=2, content_positions="heads"), STATES),
    "rotate": (lambda: LAYER(num_key_value_heads=2, block_size=4).rotate, {"positions": torch.zeros(5, 2)}),
    "from_grid": (lambda: TokenPositions.from_grid, {"grid": (2, 2), "train_grid": (2, 2)}),
    "frames": (lambda: PoseEmbedding(16).frames, {"poses": torch.eye(4).expand(2, 4, 4, 4)}),
}
CALLED = {kind: (functools.cache(make), inputs) for kind, (make, inputs) in CALLED.items()}
INPUTS["series"] = INPUTS["tokens"]


@pytest.mark.parametrize("kind, inputs, words", [(kind, *row) for kind in INPUTS for row in INPUTS[kind]])
def test_refuses_inputs(kind, inputs, words):
    make, accepted = CALLED[kind]
    with pytest.raises(ValueError, match=f"(?s){words}"):
        make()(**accepted | inputs)
