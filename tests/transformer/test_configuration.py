import json
import logging
import math

import numpy as np
import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from PIL import Image

import hf_liere


def test_a_slip_in_the_name_of_a_field_is_told(tmp_path, caplog, monkeypatch):
    """As a flag and in config.json; what transformers itself and other models write there is kept in silence."""
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    hf_liere.LieREViTConfig(block_size=4, torch_dtype="float32", mlp_ratio=4.0, num_beams=2).save_pretrained(tmp_path)
    config = hf_liere.LieREViTConfig.from_pretrained(tmp_path)
    assert config.mlp_ratio == 4.0 and "has no field" not in caplog.text
    for made in (lambda: hf_liere.LieREViTConfig(blok_size=4), lambda: hf_liere.LieREVideoConfig(blok_size=4)):
        caplog.clear()
        assert made().block_size == 8
        assert "has no field 'blok_size' and ignores it; the closest is 'block_size'" in caplog.text


def test_names_of_other_libraries_are_answered_by_ours(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    given = {"num_classes": 10, "depth": 6, "embed_dim": 384, "num_heads": 6, "encoding": "comrope_ld"}
    given |= {"drop_path": 0.1, "img_size": 32, "in_chans": 1, "init_values": 1e-5, "dim_feedforward": 64}
    answers = ("num_labels", "num_hidden_layers", "hidden_size", "num_attention_heads", "position_encoding")
    answers += ("drop_path_rate", "image_size", "num_channels", "layerscale_value", "intermediate_size")
    for kind in (hf_liere.LieREViTConfig, hf_liere.LieREVideoConfig):
        for (name, value), answer in zip(given.items(), answers):
            with pytest.raises(StrictDataclassError, match=f"{name}={value!r} is {answer} here"):
                kind(**{name: value})
        with pytest.raises(
            StrictDataclassError, match="depth=6 is num_hidden_layers here, embed_dim=384 is hidden_size"
        ):
            kind(**given)
    # What nothing knows, tokens included, which have no image.
    hf_liere.LieREViTConfig(conv_bias_gamma=1)
    assert "has no field 'conv_bias_gamma' and ignores it." in caplog.text
    caplog.clear()
    hf_liere.LieRETokensConfig(in_chans=1)
    assert "LieRETokensConfig has no field 'in_chans'" in caplog.text
    caplog.clear()
    hf_liere.LieREViTConfig(mlp_ratio=2.0)
    assert "mlp_ratio=2.0 is ignored: intermediate_size=3072" in caplog.text


@pytest.mark.parametrize(
    "encoding, block_size, coordinates, rotary_init, scale, table",
    [
        ("none", None, None, None, None, False),
        ("absolute", None, None, None, None, True),
        ("axial_rope", 2, "index", None, None, False),
        ("rope_mixed", 2, "index", "frequencies", 1.0, False),
        ("liere", 8, "train_grid", "uniform", 2 * math.pi, False),
        ("comrope_ap", 8, "unit", "normal", 2**0.5, False),
        ("comrope_ld", 8, "unit", "normal", 2**0.5, False),
        ("golden_gate_rope", 2, "index", None, None, False),
        ("cayley_string", 64, "index", "frequencies", 1.0, False),
        ("circulant_string", 16, "index", "frequencies", 1.0, False),
        ("spherical_rope", 3, "index", "frequencies", 1.0, False),
        ("liere_product", 64, "index", "frequencies", 1.0, False),
    ],
)
def test_defaults_of_each_encoding(encoding, block_size, coordinates, rotary_init, scale, table):
    config = hf_liere.LieREViTConfig(position_encoding=encoding)
    assert config.block_size == block_size
    assert config.coordinates == coordinates
    assert config.rotary_init == rotary_init
    assert config.rotary_init_scale == scale
    assert config.use_absolute_position_embeddings == table


@pytest.mark.parametrize(
    "rotated, fields",
    [
        (True, {"position_encoding": "comrope_ld"}),
        (
            True,
            {
                "position_encoding": "comrope_ap",
                "coordinates": "fixed_grid",
                "use_class_token": False,
                "pooling": "mean",
                "num_register_tokens": 1,
            },
        ),
        (True, {"position_encoding": "comrope_ld", "coordinates": "unit_width"}),
        (True, {"position_encoding": "comrope_ld", "coordinates": "physical", "physical_unit": 192.0}),
        (False, {"position_encoding": "comrope_ld", "rotate_prefix": False}),
        (False, {"position_encoding": "comrope_ld", "coordinates": "train_grid"}),
        # Without such tokens, and where the centre of the image is elsewhere.
        (False, {"position_encoding": "comrope_ld", "use_class_token": False, "pooling": "mean"}),
        (False, {"position_encoding": "comrope_ap", "coordinates": "index"}),
        (False, {"position_encoding": "comrope_ld", "coordinates": "centred_grid"}),
        (False, {"position_encoding": "liere", "coordinates": "unit"}),
        (True, {"position_encoding": "liere", "rotate_prefix": True}),
        (False, {"position_encoding": "absolute"}),
    ],
)
@pytest.mark.parametrize("kind", [hf_liere.LieREViTConfig, hf_liere.LieREVideoConfig])
def test_class_tokens_are_rotated_by_default_with_comrope_only(rotated, fields, kind, tmp_path):
    kind(**({"num_attention_heads": 4} | fields)).save_pretrained(tmp_path)
    assert kind.from_pretrained(tmp_path).rotate_prefix is rotated
    assert json.loads((tmp_path / "config.json").read_text())["rotate_prefix"] is rotated


def test_tokens_have_no_common_centre():
    assert hf_liere.LieRETokensConfig(position_encoding="comrope_ld").rotate_prefix is False


def test_comrope_ap_in_three_dimensions_needs_another_head_dim():
    with pytest.raises(StrictDataclassError, match="times 3 axes must divide head_dim=64 .*none, choose another"):
        hf_liere.LieREVideoConfig(position_encoding="comrope_ap")
    config = hf_liere.LieREVideoConfig(position_encoding="comrope_ap", hidden_size=384, num_attention_heads=8)
    assert config.head_dim == 48


def test_a_changed_configuration_is_checked_before_it_is_saved(tmp_path, tiny):
    config = tiny()
    config.block_size = 100
    with pytest.raises(StrictDataclassError, match="block_size=100"):
        config.save_pretrained(tmp_path)


@pytest.mark.parametrize(
    "name, close", [("LieRE8", "'liere'"), ("rope-mixed", "'rope_mixed'"), ("comrope", "'comrope_(ld|ap)' or")]
)
def test_the_closest_encoding_is_named(name, close):
    makers = (hf_liere.LieREViTConfig, hf_liere.RotaryPatchConfig)
    for make in (*makers, lambda position_encoding: hf_liere.LieRotaryEmbedding(2, 8, 2, position_encoding)):
        with pytest.raises((StrictDataclassError, ValueError), match=f"position_encoding='{name}'.*closest is {close}"):
            make(position_encoding=name)


def test_inputs_that_are_no_tensors():
    """Images, arrays and lists: the error names the argument and what makes a tensor of it."""
    sizes = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    image = hf_liere.LieREViTForImageClassification(hf_liere.LieREViTConfig(image_size=16, patch_size=8, **sizes))
    tokens = hf_liere.LieRETokensModel(hf_liere.LieRETokensConfig(**sizes))
    for given in (np.zeros((1, 3, 16, 16), np.float32), Image.new("RGB", (16, 16)), [[0.0]]):
        kind = type(given).__name__
        with pytest.raises(ValueError, match=f"pixel_values is a {kind}; a tensor is needed.*AutoImageProcessor"):
            image(given)
        with pytest.raises(ValueError, match=f"inputs_embeds is a {kind}; a tensor is needed"):
            tokens(given, torch.zeros(1, 2, 1))
    with pytest.raises(ValueError, match="positions is a list; a tensor is needed"):
        tokens(torch.zeros(1, 2, 1), [[0.0], [1.0]])
    for grid in (14, (14.0, 14), (), (0, 2)):
        with pytest.raises(ValueError, match=r"grid=.*numbers of patches of at least 1, such as \(14, 14\)"):
            hf_liere.grid_positions(grid)


def test_a_wrong_size_of_a_layer_has_one_traceback():
    with pytest.raises(ValueError, match="^block_size=100 does not fit a head_dim of 48") as caught:
        hf_liere.LieRotaryEmbedding(2, 48, 2, "liere", 100)
    assert caught.value.__suppress_context__ and caught.value.__cause__ is None
