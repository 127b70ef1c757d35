"""What `patch` and `unpatch` refuse of models of transformers, which stay as they were."""

import pytest
import torch
import transformers
from patching_cases import CASES as CASES_OF_TOWERS
from patching_cases import IMAGE, ROTATING, UNFIT, clip_config
from patching_cases import build as build_tower
from patching_cases import model as model_of
from patching_checks import SHARED_CONFIG, refused
from rope_cases import CASES, PLANES, build
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaModel,
    apply_rotary_pos_emb,
)

from hf_liere import RotaryPatchConfig, patch, set_absolute_weight, unpatch


def pretrained(**fields):
    return RotaryPatchConfig(**{"position_encoding": "rope_mixed", "rotary_init": "pretrained", **fields})


# By fields of a configuration for the vision tower of CLIP.
MISFITS = {
    "block_size=32 does not fit a head_dim of 16": {"block_size": 32},
    "accepted here: .2, 4, 8, 16.": {"block_size": 3},
    "layers=.0, 7. do not match.*0: encoder.layers.0.self_attn": {"layers": [0, 7]},
    "layers=.. do not match": {"layers": []},
    "target='text_model' matches no vision tower": {"target": "text_model"},
    "its only block_size is 2": {"position_encoding": "rope_mixed", "block_size": 4},
}


@pytest.mark.parametrize("message", MISFITS)
def test_configurations_that_do_not_fit(message):
    with refused(model := build_tower("clip_vision")[0], message):
        patch(model, RotaryPatchConfig(**MISFITS[message]))


# Of no model at all.
WRONG = {
    "'sinusoid'; accepted are liere": {"position_encoding": "sinusoid"},
    "keep_absolute='twice' must be 'interpolate' or 'train_size' or 'fade' or 'drop'": {"keep_absolute": "twice"},
    "absolute_weight=2.0": {"keep_absolute": "fade", "absolute_weight": 2.0},
    "belongs to keep_absolute='fade'": {"absolute_weight": 0.5},
    "never starts neutral": {"position_encoding": "axial_rope"},
    "newer hf_liere": {"format_version": 99},
    "block_size='8' must be int or None": {"block_size": "8"},
    "rotate_prefix=1 must be bool": {"rotate_prefix": 1},
    "block_size=True must be int or None": {"block_size": True},
    "absolute_weight='1' must be float": {"absolute_weight": "1"},
    "position_rescale=0.5 must be at least 1": {"position_rescale": 0.5},
    "position_rescale='2' must be": {"position_rescale": "2"},
    "coordinates='polar'; accepted are index, train_grid": {"coordinates": "polar"},
    "'pretraind'; the closest is 'pretrained'": {"rotary_init": "pretraind"},
    "layers=3 must be a list of indices": {"layers": 3},
}
WRONG_BESIDE_ROPE = {
    "axial_rope learns nothing": {"position_encoding": "axial_rope"},
    "coordinates='unit': in models with RoPE the coordinates": {"coordinates": "unit"},
    "rope_theta=10.0, position_shift=0.1: in": {"rope_theta": 10.0, "position_shift": 0.1},
    "keep_absolute='drop': in": {"keep_absolute": "drop"},
}


@pytest.mark.parametrize("message", [*WRONG, *WRONG_BESIDE_ROPE])
def test_configurations_for_no_model(message):
    make, fields = (pretrained, WRONG_BESIDE_ROPE) if message in WRONG_BESIDE_ROPE else (RotaryPatchConfig, WRONG)
    with refused(model := build_tower("clip_vision")[0], message):
        patch(model, make(**fields[message]))


def layer_of_torch():
    return torch.nn.Sequential(torch.nn.Conv2d(3, 8, 4, 4), torch.nn.TransformerEncoderLayer(8, 2))


# Why vision towers, and what is none, get no rotations that start at zero.
TOWERS = {
    "has no patch embedding.*its modules are embeddings": lambda: transformers.CLIPTextModel(clip_config().text_config),
    "not routed through.*MultiheadAttention": layer_of_torch,
    "not routed through": model_of("ConvNextConfig", "ConvNextModel", hidden_sizes=[8] * 4, depths=[1] * 4),
    "EomtForUniversalSegmentation learns query .5 vectors. outside the embeddings": UNFIT["eomt"],
    "YolosModel learn detection_tokens .3 vectors., which may come after the patches": UNFIT["yolos"],
    r"several stacks of attention, encoder.layers.\*.message_attn, encoder.layers.\*.self_attn": UNFIT["x_clip"],
    "SegformerLayer has no image_size": UNFIT["segformer"],
    "HunYuanVLVisionTransformer has no image_size": UNFIT["hunyuan"],
}


@pytest.mark.parametrize("message", TOWERS)
def test_models_without_a_tower_that_fits(message):
    with refused(model := TOWERS[message](), message):
        patch(model, SHARED_CONFIG)


@pytest.mark.parametrize("name", [*ROTATING, "llama", "qwen2_5_vl_tower", "gemma4_vision"])
def test_models_that_rotate_already(name):
    if name not in {**CASES, **ROTATING}:
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    model = ROTATING[name]() if name in ROTATING else build(name)[0]
    with refused(model, "already rotates .*(Accepted: models|rotary_init='pretrained')"):
        patch(model, SHARED_CONFIG)


def of(name):
    return lambda: build(name)[0]


def changed(place, forward):
    """Llama, of which the module at a place has another forward."""

    def make():
        model, _ = build("llama")
        module = model.get_submodule(place)
        module.__class__ = type("Other", (type(module),), {"forward": forward})
        return model

    return make


def rotate_and_hand_on(self, hidden_states, position_embeddings=None, **kwargs):
    cos, sin = position_embeddings
    return LlamaDecoderLayer.forward(self, hidden_states, position_embeddings=(cos, sin), **kwargs)


def compute_cos_and_sin(self, *args, **kwargs):
    angles = torch.zeros(1)
    return LlamaModel.forward(self, *args, scaling=angles.cos() + angles.sin(), **kwargs)


def fail(self, hidden_states, position_embeddings, attention_mask=None, **kwargs):
    """Parameters of a layer that does not rotate would learn nothing."""
    raise NotImplementedError


def rotate_half_of_the_planes(self, hidden_states, position_embeddings, attention_mask=None, **kwargs):
    cos, sin = (x.clone() for x in position_embeddings)
    for x, neutral in ((cos, 1), (sin, 0)):
        x.unflatten(-1, (2, 8))[..., 4:] = neutral
    return LlamaAttention.forward(self, hidden_states, (cos, sin), attention_mask, **kwargs)


def rotate_queries_alone(self, hidden_states, position_embeddings, attention_mask=None, **kwargs):
    query = self.q_proj(hidden_states).unflatten(-1, (-1, 16)).transpose(1, 2)
    rotated, _ = apply_rotary_pos_emb(query, query, *position_embeddings)
    return ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation](self, rotated, query, query, attention_mask)


def read_keys(self, hidden_states, position_embeddings, shared_kv_states):
    return shared_kv_states.of_layer(self.layer_idx)


def later_layers_of_gemma3n():
    """They read the keys of another model, as the assistants of Gemma 4 do."""
    model, _ = build("gemma3n")
    model.model.layers, model.config.layer_types = model.model.layers[2:], model.config.layer_types[2:]
    return model


def two_towers_with_common_weights():
    """As encoder and decoder of Diffusion Gemma have: the decoder reads the keys that the encoder has cached."""
    model = torch.nn.ModuleDict({"encoder": build("llama")[0].model, "decoder": build("llama")[0].model})
    for first, second in zip(model["encoder"].layers, model["decoder"].layers):
        second.self_attn.k_proj.weight = first.self_attn.k_proj.weight
    return model


def heads_of_18_channels():
    # Before it, this tower rotates on two axes.
    pytest.importorskip("transformers", "5.18")
    sizes = {"hidden_size": 36, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48}
    return model_of("MiniMaxM3VLVisionConfig", "MiniMaxM3VLVisionModel", **sizes, patch_size=4)()


SECOND = "model.layers.1.self_attn"
KEYS_OF_ANOTHER = "layers.2.self_attn reads the keys of model.layers.0.self_attn and .*; name layer 0, and leave"
LIERE = {"position_encoding": "liere"}
# Why rotations that learn do not start at those of a model; fields of the configuration.
ROPES = {
    "CLIPVisionModel has no module with frequencies .*pass rotary_init='zeros'": (
        CASES_OF_TOWERS["clip_vision"].build,
        {},
    ),
    "Llama4VisionModel has no module with frequencies": (
        model_of("Llama4VisionConfig", "Llama4VisionModel", **IMAGE),
        {},
    ),
    "VJEPA2Model has no module with frequencies": (ROTATING["vjepa2"], {}),
    "takes positions on two axes and on three, and heads have 18 channels": (heads_of_18_channels, {}),
    "layers.0 .Other. rotates with cos and sin and passes them": (changed("model.layers.0", rotate_and_hand_on), {}),
    "Other. computes cos and sin in its forward pass, beside those of": (changed("model", compute_cos_and_sin), {}),
    f"{KEYS_OF_ANOTHER} out": (of("gemma3n"), {"layers": [2]}),
    f"{KEYS_OF_ANOTHER} out .2.": (of("gemma3n"), {"layers": [0, 2]}),
    "Other. could not be called with a few tokens to see whether it rotates": (changed(SECOND, fail), {}),
    "rotates 8 channels of each head, and rotary_emb has 8 planes": (changed(SECOND, rotate_half_of_the_planes), {}),
    "Gemma3nTextAttention. reads keys that no layer before it makes": (later_layers_of_gemma3n, {}),
    "Other. rotates its queries and not its keys": (changed(SECOND, rotate_queries_alone), {}),
    "Other. may read the keys of another layer": (changed(SECOND, read_keys), {}),
    "encoder.layers.0.self_attn and decoder.layers.0.self_attn have": (two_towers_with_common_weights, {}),
    "decoder.layers.0.self_attn have weights in common": (two_towers_with_common_weights, {"target": "encoder"}),
    "layers=.5. do not match: model .LlamaModel. has attention .*'0: model.layers.0": (of("llama"), {"layers": [5]}),
    "layers=.1.: the model does not rotate in model.layers.1.self_attn": (of("smollm3"), {"layers": [0, 1]}),
    "target='visual' computes no rotations; modules that do: .'model'": (of("llama"), {"target": "visual"}),
    "rope_mixed rotates planes, its only block_size is 2": (of("dinov3"), {"block_size": 4}),
    "block_size=3": (of("dinov3"), {"block_size": 3, **LIERE}),
    "block_size=32 does not fit a head_dim of 16": (of("dinov3"), {"block_size": 32, **LIERE}),
    "block_size=16: DINOv3ViTModel rotates .4, 4. planes": (
        of("dinov3"),
        {"block_size": 16, "position_encoding": "comrope_ld"},
    ),
    "share_layers=True: the layers of model .* different frequencies": (
        of("gemma3"),
        {"block_size": 4, "share_layers": True, **LIERE},
    ),
}


@pytest.mark.parametrize("message", ROPES)
def test_models_whose_rotation_is_no_start(message):
    make, fields = ROPES[message]
    with refused(model := make(), message):
        patch(model, pretrained(**fields))


def test_patched_twice_and_not_at_all():
    model, _ = build_tower("clip")
    for change, message in (
        (lambda: unpatch(model), "is not patched"),
        (lambda: set_absolute_weight(model, 0.5), "is not patched"),
        (lambda: patch(patch(model, SHARED_CONFIG), SHARED_CONFIG), "vision_model is patched already"),
    ):
        with pytest.raises(ValueError, match=message):
            change()
    with refused(model, "not 'fade'"):
        set_absolute_weight(model, 0.5)
    llama = patch(build("llama")[0], PLANES)
    with refused(llama, "model is patched already"):
        patch(llama, PLANES)


def test_cos_and_sin_that_the_model_did_not_compute():
    layer = patch(build("llama")[0], PLANES).model.layers[0].self_attn
    with pytest.raises(RuntimeError, match="layer 0 got rotations of 16 channels in torch.float32, which do"):
        layer(torch.zeros(1, 3, 48), position_embeddings=(torch.ones(1, 3, 16), torch.zeros(1, 3, 16)))
