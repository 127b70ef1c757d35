"""Configurations, models and layers refuse fields that mean nothing, with the value and what is accepted."""

from functools import partial

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from small_makers import IMAGE, LAYER, TOKENS, VIDEO

import hf_liere
from hf_liere import LieRotaryEmbedding, PoseEmbedding


INF, NAN = float("inf"), float("nan")
CENTRED = {"coordinates": "centred_grid"}
SO3 = {"num_axes": 3, "rotary_init": "so3"}
MADE = {
    "image": [IMAGE],
    "physical": [partial(IMAGE, coordinates="physical")],
    "video": [VIDEO],
    "grid": [IMAGE, VIDEO],
    "tokens": [TOKENS],
    "patch": [hf_liere.RotaryPatchConfig],
    "layer": [LAYER],
    "so3": [partial(LieRotaryEmbedding, 2, 24, **SO3), partial(TOKENS, **SO3)],
    "so3 tokens": [partial(TOKENS, **SO3)],
    "axial start": [partial(IMAGE, rotary_init="axial", block_size=None)],
    "pose": [PoseEmbedding],
}
# By what is made: its encoding, other fields, and words of the error.
FIELDS = {
    "image": [
        ("rope", {}, "position_encoding='rope'; accepted are .*comrope_ld"),
        ("liere", {"block_size": 25}, "block_size=25 .*head_dim of 24.*2 … 24"),
        ("liere", {"block_size": 1}, "block_size=1 .*2 … 24"),
        ("rope_mixed", {"block_size": 4}, "block_size=4: rope_mixed .* 2"),
        ("comrope_ld", {"block_size": 5}, r"block_size=5 .*head_dim=24.*\[2, 3, 4, 6, 8, 12, 24\]"),
        ("comrope_ap", {"block_size": 8}, r"block_size=8 times 2 axes .*\[2, 3, 4, 6, 12\]"),
        ("axial_rope", {"hidden_size": 6}, "head_dim of 3 is too small.* 4"),
        ("axial_rope", {"rotary_init": "zeros"}, "'zeros'.*no parameters"),
        ("comrope_ld", {"rotary_init": "frequencies"}, "for liere, .*, not for comrope_ld. .* accepts normal, u"),
        ("liere", {"rotary_init": "ones"}, "ones.*uniform"),
        ("liere", {"block_size": 3, "rotary_init": "golden_gate"}, "With block_size=3, liere accepts uniform"),
        ("spherical_rope", {"rotary_init": "golden_gate"}, "not for spherical_rope"),
        ("golden_gate_rope", {"rotary_init": "zeros"}, "golden_gate_rope accepts None, having no parameters"),
        ("golden_gate_rope", {"unrotated_share": 1.0}, r"unrotated_share=1.0 must lie in \[0, 1\)"),
        ("golden_gate_rope", {"min_frequency": 0}, "min_frequency=0 must be positive"),
        ("golden_gate_rope", {"min_frequency": 2}, "min_frequency=2 must not be above max_freq"),
        ("rope_mixed", {"max_frequency": 2}, "=2 would do nothing here: accepted with golden_gate_rope or rotary_i"),
        ("none", {"axial_layout": "blocks"}, "='blocks' would do nothing here: accepted with axial_rope"),
        ("axial_rope", {"axial_layout": "columns"}, "interleaved.*got columns"),
        ("spherical_rope", {"block_size": 4}, r"its only block_size is 3; accepted here: \[3\]"),
        ("circulant_string", {}, r"block_size=16 must be above 2 and divide .*\[3, 4, 6, 8, 12, 24\]"),
        ("cayley_string", {"block_size": 3}, r"block_size=3 must be even .*\[2, 4, 6, 8, 12, 24\]"),
        ("liere_product", {"block_size": 3}, r"block_size=3 must be even .*\[2, 4, 6, 8, 12, 24\]"),
        ("cayley_string", {"head_dim": 9}, "block_size=9 must be even .*none, choose another"),
        ("none", {"content_positions": "heads"}, "content_positions='heads' would do nothing"),
        ("comrope_ld", {"content_positions": "all"}, "content_positions.*heads_sum"),
        ("comrope_ld", {"content_positions": "heads", "folded_grids": []}, "='heads': .* folded rotations not by the"),
        ([("liere", {"content_positions": "heads"})], {"block_size": None}, "shares: liere has content_positions; acc"),
        ("none", {"block_size": 8}, "=8 would do nothing here: accepted with one of the encodings liere"),
        ("absolute", {"share_heads": True}, "share_heads=True would do nothing"),
        ("none", {"rotate_values": True}, "rotate_values=True would do nothing"),
        ("absolute", {"use_absolute_position_embeddings": False}, "contradicts"),
        ("none", {"position_perturbation": 0.5}, "0.5 would do nothing here: accepted with any .* but 'none'"),
        (None, {"position_perturbation": -1.0}, "position_perturbation=-1.0"),
        (None, {"coordinates": "pixels"}, "pixels.*train_grid"),
        (None, {"num_attention_heads": 5}, "hidden_size=48 is not divisible by num_attention_heads=5"),
        (None, {"num_attention_heads": 48}, "head_dim of 1"),
        (None, {"image_size": 18}, r"\(18, 18\) is not divisible into patches of \(4, 4\)"),
        (None, {"image_size": (16, 18)}, r"\(16, 18\)"),
        (None, {"image_size": [16, 16, 16]}, r"image_size=\[16, 16, 16\] must be one integer or"),
        (None, {"patch_size": 0}, r"\(0, 0\)"),
        (None, {"pooling": "cls", "use_class_token": False}, "use_class_token=True"),
        (None, {"pooling": "max"}, "mean_all.*got max"),
        (None, {"drop_path_rate": 1.0}, "drop_path_rate=1.0"),
        (None, {"num_hidden_layers": 0}, "num_hidden_layers=0"),
        (None, {"hidden_size": "48"}, "hidden_size.*int.*48"),
        (None, {"format_version": 2}, "format_version=2 .*newer"),
        ("axial_rope", {"rope_theta": -1.0}, "rope_theta=-1.0"),
        (None, {"head_dim": 0}, "head_dim=0 must be at least 1"),
        (None, {"head_dim": 6, "block_size": 8}, "block_size=8 does not fit a head_dim of 6"),
        (None, {"classifier_hidden_size": 0}, "classifier_hidden_size=0 must be at least 1"),
        (None, {"final_norm": "patches"}, "pooled.*got patches"),
        (None, {"position_table_size": [4, 4]}, r"=\[4, 4\] would do nothing.*use_absolute_position_embeddings=T"),
        ("absolute", {"position_table_size": [4]}, r"\[4\] must be 2 numbers"),
        (
            "absolute",
            {"position_table_size": [4, 4], "position_table_resize": "truncate"},
            "'truncate' would do nothing .* position_table_size=None",
        ),
        ("absolute", {"position_table_resize": "nearest"}, "interpolate.*truncate.*got nearest"),
        (
            None,
            CENTRED | {"rotate_prefix": True, "prefix_coordinate": 0.25},
            "0.25 contradict coordinates='centred_grid'",
        ),
        (
            None,
            CENTRED | {"use_absolute_position_embeddings": True, "position_table_size": [4, 4]},
            r"=\[4, 4\] .*half of these are negative",
        ),
        (None, {"prefix_coordinate": 0.25}, "0.25 would do nothing here: accepted with rotate_prefix=True"),
        (None, {"prefix_coordinate": INF, "rotate_prefix": True}, "prefix_coordinate=inf must be finite"),
        (None, {"prefix_coordinate": 1e308, "rotate_prefix": True}, "=1e.308 must be finite in float32"),
        (None, {"hidden_act": "geluu"}, "hidden_act='geluu' must be one of .*gelu,"),
        (None, {"initializer_range": 0.0}, "initializer_range=0.0 must be positive"),
        (None, {"initializer_range": NAN}, "initializer_range=nan must be positive"),
        (None, {"layer_norm_eps": -1.0}, "layer_norm_eps=-1.0 must be at least 0"),
        (None, {"layerscale_value": INF}, "layerscale_value=inf must be finite"),
        (None, {"position_perturbation": INF}, "=inf must be at least 0 and finite"),
        (None, {"position_shift": -0.1}, "position_shift=-0.1 must be at least 0 and finite"),
        (None, {"position_jitter": 0.5}, "=0.5 must be at least 1 and finite in float32, or None"),
        (None, {"position_rescale": NAN}, "position_rescale=nan must be at least 1"),
        *(
            (encoding, {"position_rescale": 2.0}, "position_rescale=2.0 would do nothing")
            for encoding in ("none", "absolute")
        ),
        *(
            (
                None,
                {"rotary_init_scale": scale},
                f"rotary_init_scale={scale} must be at least 0 and finite".replace("+", "."),
            )
            for scale in (-1.0, NAN, INF, 1e300)
        ),
        ("axial_rope", {"rope_theta": INF}, "rope_theta=inf must be positive"),
        (None, {"token_initializer_range": 0.0}, "token_initializer_range=0.0 must"),
        (None, {"patch_dropout_prob": 1.0}, r"patch_dropout_prob=1.0 must lie in \[0, 1\)"),
        (None, {"patch_dropout_prob": -0.1}, "patch_dropout_prob=-0.1"),
        (None, {"patch_dropout_prob": 0.5, "folded_grids": [[4, 4]]}, "patch_dropout_prob=0.5 would do nothing"),
        ("comrope_ld", {"folded_grids": [[4, 4]]}, "only liere with block_size above 2"),
        ("comrope_ld", {"folded_grids": [], "position_perturbation": 0.1}, "with folded_grids=None, in training"),
        ("comrope_ld", {"folded_grids": [], "position_jitter": 2.0}, "2.0 would do nothing here: accepted with fold"),
    ],
    "video": [
        ("spherical_rope", {}, "spherical_rope is defined on 2 axes, and there are 3: no"),
        (None, {"num_frames": 5}, r"\(5, 8, 8\) is not divisible into patches of \(2, 4, 4\)"),
    ],
    "physical": [
        (None, {"physical_unit": None}, "'physical' need physical_unit, not None"),
        (None, {"physical_unit": [1.0]}, r"not \[1.0\]: .* one positive number or 2"),
        (None, {"physical_unit": 0.0}, "physical_unit, not 0.0"),
        (None, {"physical_unit": 2.0, "coordinates": "unit"}, "2.0 would do nothing here: accepted with coord"),
        (None, {"physical_unit": 2.0, "folded_grids": [[4, 4]]}, "depend on the spacing"),
    ],
    "patch": [
        (None, {"coordinates": "physical"}, "which pretrained models do not take"),
        (None, {"content_positions": "all"}, "content_positions='all' must be 'shared' or 'heads' or 'shared_sum' or"),
    ],
    "grid": [
        (None, {"rotary_init": "so3"}, "positions are orientations, not for patches on a grid"),
    ],
    "so3 tokens": [
        (None, {"position_scale": 2.0}, "position_scale=.*vectors, which cannot be moved or scaled"),
        (None, {"position_scale": [1, 1, 0.5]}, "position_scale=.*vectors, which cannot be moved or scaled"),
        (None, {"position_origin": 1.0}, "position_origin=.*vectors, which cannot be moved or scaled"),
    ],
    "tokens": [
        (None, {"num_axes": 7}, r"num_axes=7 must lie in 1 … 6"),
        (None, {"num_axes": 0}, r"num_axes=0 must lie in 1 … 6"),
        (None, {"feature_size": 0}, "feature_size=0 must be at least 1"),
        (None, {"position_scale": [1.0]}, r"position_scale=\[1.0\] must be one number above 0 .* or 2 of them"),
        (None, {"position_scale": 0}, "position_scale=0 must be one number above 0"),
        (None, {"position_origin": [0, INF]}, r"position_origin=\[0, inf\] must be one number that is finite"),
        ("absolute", {}, "absolute' implies, needs position_table_size, 2 numbers"),
        ("absolute", {"position_table_size": [4]}, r"\[4\] must be 2 numbers"),
        ("none", {"position_scale": 0.5}, "position_scale=0.5 would do nothing .*'none'"),
        (None, {"distance_axes": []}, r"distance_axes=\[\] must be different axes among 0 … 1, at least one"),
        (None, {"distance_axes": [0, 2]}, r"distance_axes=\[0, 2\] must be different axes among 0 … 1"),
        (None, {"distance_axes": [1, 1]}, r"distance_axes=\[1, 1\] must be different"),
        ("comrope_ap", {"block_size": 8}, "block_size=8 times 2 axes must divide head_dim=24"),
        (None, {"image_size": 32}, "image_size: fields of images and videos have no meaning for tokens"),
        (None, {"num_channels": 3, "patch_size": 4}, "num_channels, patch_size: fields of images"),
        (None, {"coordinates": "unit", "num_frames": 3}, "coordinates, num_frames: fields of images"),
    ],
    "so3": [
        (None, {"num_axes": 2}, "rotation vectors, which have 3 axes; there are num_axes=2"),
        (None, {"block_size": 8}, r"=8 is not the size of one spin; accepted .* 3 \(spin 1\), 5 .*together with spins"),
        (None, {"block_size": 3, "spins": [2]}, r"=\[2\] have 2l \+ 1 channels each, 5 together; block_size=3 mu"),
        (None, {"content_positions": "shared"}, "='shared': orientations cannot be moved by addition"),
        (None, {"spins": []}, r"spins=\[\] must be whole numbers of at least 0, and one of them above 0"),
        (None, {"spins": [0, 0, 0]}, r"spins=\[0, 0, 0\] must be .* one of them above 0"),
        (None, {"spins": [-1, 2]}, r"spins=\[-1, 2\] must be whole numbers of at least 0"),
        (None, {"spins": [1.5]}, r"spins.*1\.5"),
        (None, {"spins": [6, 6]}, "block_size=26 does not fit a head_dim of 24"),
        (None, {"rotary_init_scale": 0.5}, r"rotary_init_scale=0.5 must be 1: .*\[sL_x, sL_y\] = s² L_z is not sL_z"),
        (
            None,
            {"rotary_init": "uniform", "spins": [1]},
            r"=\[1\] would do nothing here: accepted with rotary_init='so3'",
        ),
        *(
            (name, {}, f"it is for liere, not for {name}. .* {name} accepts")
            for name in ("rope_mixed", "comrope_ld", "axial_rope", "cayley_string")
        ),
    ],
    "layer": [
        (None, {"num_key_value_heads": 3}, "num_heads=4 must be a multiple of num_key_value_heads=3"),
        (None, {"head_dim": 1, "block_size": 2}, "A head_dim of 1 cannot be rotated; liere needs at least 2"),
        (None, {"num_axes": 7}, "num_axes=7 must lie in 1 … 6"),
        (None, {"num_axes": 0}, "num_axes=0 must lie in 1 … 6"),
        ("absolute", {}, "'absolute'; accepted are liere"),
        (None, {"block_size": 100}, "block_size=100 does not fit a head_dim of 48"),
        ("comrope_ap", {"num_axes": 5}, "comrope_ap"),
        (None, {"rotary_init": "other"}, "rotary_init"),
        ("rope_mixed", {"frequencies": torch.ones(3, 24)}, r"frequencies of shape \(3, 24\).*\(2, 1, 4, 24\) here"),
        ("rope_mixed", {"frequencies": torch.ones(2, 3, 24)}, r"frequencies of shape \(2, 3, 24\)"),
        ("rope_mixed", {"frequencies": torch.full((2, 24), NAN)}, "must be finite"),
        ("rope_mixed", {"frequencies": torch.ones(2, 25)}, "pairing of 25 planes.*must name channels from 0 to 47"),
        ("rope_mixed", {"frequencies": torch.ones(2, 4), "pairing": [(0, 1)]}, "of 4 planes, .* the channels of 1"),
        ("rope_mixed", {"pairing": "neighbours"}, "pairing='neighbours': accepted are adjacent, halves"),
        ("rope_mixed", {"pairing": [(0, 1), (1, 2)]}, "each once at most"),
        ("comrope_ld", {"frequencies": torch.rand(2, 24)}, "cannot start with these frequencies"),
        ("circulant_string", {"frequencies": torch.ones(2, 24)}, "Fourier basis"),
        ("liere", {"round_angles": True}, "round_angles=True is for planes.*accepted: rope_mixed"),
    ],
    "axial start": [
        ("liere", {"block_size": 7}, "would cut its planes of two; accepted here: .*24"),
        ("liere", {"block_size": 16}, "leave 8 channels unrotated, axial_rope only 0"),
        ("comrope_ld", {"block_size": 8}, r"planes of several axes.*block_size in \[2, 4, 6, 12\]"),
        ("comrope_ld", {"block_size": 4, "axial_layout": "interleaved"}, r"axial_layout='int.* several .* in \[2\]"),
        ("comrope_ap", {"block_size": 6}, r"serve the axes in turn; accepted here: block_size in \[12\]"),
        ("circulant_string", {"block_size": 6}, "it is for liere, .*, not for circulant_string"),
        ("spherical_rope", {}, "it is for liere, .*, not for spherical_rope"),
        ("golden_gate_rope", {}, "no parameters to initialise"),
        ("rope_mixed", {"head_dim": 2}, "head_dim=2 is too small .* a plane for each of 2 axes"),
        ("rope_mixed", {"min_frequency": 0.1}, "min_frequency=0.1 would do nothing"),
    ],
    "pose": [
        (None, {"head_dim": 18}, "head_dim=18"),
        (None, {"head_dim": 0}, "head_dim=0"),
        (None, {"head_dim": 8, "patch_share": 0.25}, "patch_share=0.25 leaves 6 to poses"),
        (None, {"head_dim": 8, "patch_share": 1.0}, "patch_share=1.0"),
        (None, {"head_dim": 8, "translation_scale": 0.0}, "translation_scale=0.0"),
    ],
}


@pytest.mark.parametrize("kind, encoding, fields, words", [(kind, *row) for kind in FIELDS for row in FIELDS[kind]])
def test_refuses_fields(kind, encoding, fields, words):
    for make in MADE[kind]:
        with pytest.raises((ValueError, StrictDataclassError), match=f"(?s){words}"):
            make(**({"position_encoding": encoding} if encoding else {}), **fields)
