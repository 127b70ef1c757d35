"""What `patch`, `unpatch` and `load_rotary` do not accept."""

import json
import os

import pytest
import torch
import transformers
from patching_cases import IMAGE, ROTATING, UNFIT, build, clip_config, randomize
from patching_checks import SHARED_CONFIG
from safetensors.torch import load_file, save_file

from hf_liere import (
    RotaryPatchConfig,
    is_patched,
    load_rotary,
    patch,
    rotary_parameters,
    save_rotary,
    set_absolute_weight,
    unpatch,
)


class TestRefusals:
    """Every refusal leaves the model as it was."""

    def refuse(self, model, message, function, *arguments):
        before = {name: value.clone() for name, value in model.state_dict().items()}
        configs = [getattr(module, "config", None) for module in model.modules()]
        with pytest.raises(ValueError, match=message):
            function(model, *arguments)
        after = model.state_dict()
        assert list(after) == list(before) and all(torch.equal(after[name], before[name]) for name in before)
        assert all(a is getattr(b, "config", None) for a, b in zip(configs, model.modules()))

    @pytest.mark.parametrize(
        "fields, message",
        [
            ({"block_size": 32}, "block_size=32 does not fit a head_dim of 16"),
            ({"block_size": 3}, "accepted here: .2, 4, 8, 16."),
            ({"layers": [0, 7]}, "layers=.0, 7. do not match.*0: encoder.layers.0.self_attn"),
            ({"layers": []}, "layers=.. do not match"),
            ({"target": "text_model"}, "target='text_model' matches no vision tower"),
            ({"position_encoding": "rope_mixed", "block_size": 4}, "its only block_size is 2"),
        ],
    )
    def test_configuration_that_does_not_fit(self, fields, message):
        config = RotaryPatchConfig(**fields)
        self.refuse(build("clip_vision")[0], message, patch, config)

    @pytest.mark.parametrize(
        "fields, message",
        [
            ({"position_encoding": "sinusoid"}, "'sinusoid'; accepted are liere"),
            ({"keep_absolute": "twice"}, "must be one of interpolate, train_size, fade, drop"),
            ({"keep_absolute": "fade", "absolute_weight": 2.0}, "absolute_weight=2.0"),
            ({"absolute_weight": 0.5}, "belongs to keep_absolute='fade'"),
            ({"position_encoding": "axial_rope"}, "never starts neutral"),
            ({"format_version": 99}, "newer hf_liere"),
            ({"block_size": "8"}, "block_size='8' must be int or None"),
            ({"rotate_prefix": 1}, "rotate_prefix=1 must be bool"),
            ({"block_size": True}, "block_size=True must be int or None"),
            ({"absolute_weight": "1"}, "absolute_weight='1' must be float"),
            ({"coordinates": "polar"}, "coordinates='polar'; accepted are index, train_grid"),
            ({"rotary_init": "pretraind"}, "'pretraind'; the closest is 'pretrained'"),
            ({"layers": 3}, "layers=3 must be a list of indices"),
        ],
    )
    def test_configuration_for_no_model(self, fields, message):
        with pytest.raises(ValueError, match=message):
            RotaryPatchConfig(**fields)

    def test_models_without_anything_to_patch(self):
        text = transformers.CLIPTextModel(clip_config().text_config)
        self.refuse(text, "has no patch embedding.*its modules are embeddings", patch, SHARED_CONFIG)
        layer = torch.nn.TransformerEncoderLayer(8, 2)
        own = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 4, 4), layer)
        self.refuse(own, "not routed through.*MultiheadAttention", patch, SHARED_CONFIG)
        swin = transformers.ConvNextModel(transformers.ConvNextConfig(hidden_sizes=[8] * 4, depths=[1] * 4))
        self.refuse(swin, "not routed through", patch, SHARED_CONFIG)

    @pytest.mark.parametrize("name", ROTATING)
    def test_models_that_rotate_already(self, name):
        self.refuse(ROTATING[name](), "already rotates query and key .*Accepted: models", patch, SHARED_CONFIG)

    @pytest.mark.parametrize(
        "name, message",
        [
            ("eomt", "EomtForUniversalSegmentation learns query .5 vectors. outside the embeddings"),
            ("yolos", "YolosModel learn detection_tokens .3 vectors., which may come after the patches"),
            ("x_clip", r"several stacks of attention, encoder.layers.\*.message_attn, encoder.layers.\*.self_attn"),
            ("segformer", "SegformerLayer has no image_size"),
            ("hunyuan", "HunYuanVLVisionTransformer has no image_size"),
        ],
    )
    def test_models_whose_tokens_cannot_be_placed(self, name, message):
        self.refuse(UNFIT[name](), message, patch, SHARED_CONFIG)

    def test_patched_twice_and_not_at_all(self):
        model, _ = build("clip")
        self.refuse(model, "is not patched", unpatch)
        self.refuse(model, "is not patched", set_absolute_weight, 0.5)
        self.refuse(patch(model, SHARED_CONFIG), "vision_model is patched already", patch, SHARED_CONFIG)
        self.refuse(model, "not 'fade'", set_absolute_weight, 0.5)

    def test_adapter_of_another_base(self, tmp_path):
        model, _ = build("clip_vision")
        save_rotary(patch(model, SHARED_CONFIG), tmp_path)
        wide = transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**{**IMAGE, "hidden_size": 64}))
        self.refuse(wide, "head_dim 16 there, 32 here", load_rotary, tmp_path)
        self.refuse(
            build("siglip")[0], "model_type clip_vision_model there, siglip_vision_model", load_rotary, tmp_path
        )
        same_shape = transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**IMAGE))
        self.refuse(same_shape, "trained on other weights", load_rotary, tmp_path)
        assert is_patched(load_rotary(same_shape, tmp_path, None, False))
        # Rotations of the same kind are replaced, those of another refused.
        saved = {name: value.clone() for name, value in rotary_parameters(model)}
        randomize(model)
        load_rotary(model, tmp_path)
        assert all(torch.equal(value, saved[name]) for name, value in rotary_parameters(model))
        self.refuse(
            patch(build("clip_vision")[0], RotaryPatchConfig("liere")), "'liere' here, .* there", load_rotary, tmp_path
        )
        config = json.loads((tmp_path / "rotary_config.json").read_text())
        config["rotary_patch"]["position_encoding"] = "comrope_ap"
        (tmp_path / "rotary_config.json").write_text(json.dumps(config))
        self.refuse(build("clip_vision")[0], "multipliers", load_rotary, tmp_path)
        (tmp_path / "rotary_config.json").unlink()
        self.refuse(build("clip_vision")[0], "contains no rotary_config.json", load_rotary, tmp_path)

    @pytest.mark.parametrize(
        "damage, message",
        [
            (lambda path: edit(path, lambda content: content.pop("base")), "has no list 'base'"),
            (lambda path: edit(path, lambda content: content["base"][0].pop("heads")), "base has no heads"),
            (lambda path: edit(path, lambda content: content["base"][0].update(weights=[["a"]])), "other weights"),
            (
                lambda path: edit(path, lambda content: content["rotary_patch"].update(format_version="1")),
                "='1' must be",
            ),
            (
                lambda path: edit(path, lambda content: content["rotary_patch"].update(layers="01")),
                "layers='01' must be",
            ),
            (lambda path: (path / "rotary_config.json").write_text("{"), "config.json is not a json file"),
            (lambda path: (path / "rotary_config.json").write_text("[]"), "contains a list; accepted: a json object"),
            (
                lambda path: (path / "rotary_config.json").write_bytes(b"\xff\xfe{"),
                "config.json is not a json file",
            ),
            (lambda path: os.truncate(path / "rotary.safetensors", 500), "rotary.safetensors cannot be read"),
            (lambda path: os.truncate(path / "rotary.safetensors", 0), "rotary.safetensors cannot be read"),
            (lambda path: edit_weights(path, float("nan")), "values of 0.generators that are not finite"),
            (lambda path: edit_weights(path, float("inf")), "values of 0.generators that are not finite"),
        ],
    )
    def test_damaged_adapter(self, damage, message, tmp_path):
        model, _ = build("clip_vision")
        save_rotary(patch(model, SHARED_CONFIG), tmp_path)
        damage(tmp_path)
        self.refuse(unpatch(model), message, load_rotary, tmp_path)


def edit(path, change):
    content = json.loads((path / "rotary_config.json").read_text())
    change(content)
    (path / "rotary_config.json").write_text(json.dumps(content))


def edit_weights(path, value):
    tensors = load_file(path / "rotary.safetensors")
    tensors["0.generators"][0, 0, 0, 0] = value
    save_file(tensors, path / "rotary.safetensors")
