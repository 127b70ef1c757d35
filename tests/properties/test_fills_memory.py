"""Modules that are made without memory, as by accelerate or `torch.device("meta")`, are filled by their files."""

import copy

import pytest
import torch
import transformers
from accelerate import init_empty_weights, load_checkpoint_and_dispatch
from model_cases import MODELS, PATCHED, build, run
from patching_cases import same_bits
from safetensors.torch import save_file

from hf_liere import LieRotaryEmbedding


OWN = [name for name in MODELS if name.startswith(("image ", "layer ", "poses"))]
OF_TRANSFORMERS = (
    *("rotating llama, planes", "rotating llama, blocks", "rotating qwen3, planes", "rotating gpt_neox, blocks"),
    *("rotating dinov3, planes", "rotating dinov3, blocks", "rotating qwen2_vl_tower, planes"),
    *("rotating qwen3_vl, planes", "patched clip_vision", "patched dinov2", "patched vit"),
)
OTHERS = [name for name in PATCHED if name.startswith(("eva02_tiny", "FluxTransformer2D"))]


def spoil_memory():
    """Memory that is found again contains no numbers."""
    for size in (4, 8, 16, 24, 32, 48, 64, 128):
        [torch.full((size,), float("nan")) for _ in range(200)]


def refill(empty, model):
    """`to_empty` and `load_state_dict`."""
    spoil_memory()
    empty = empty.to_empty(device="cpu")
    for name, buffer in empty.named_buffers():
        # Integers that are no index of anything.
        if name in model.state_dict() and not buffer.is_floating_point():
            buffer.fill_(10**6)
    empty.load_state_dict(model.state_dict())
    return empty.eval()


@pytest.mark.parametrize("name", OWN)
def test_own_models_and_layers(name):
    model, inputs, expected = build(name)
    empty = [copy.deepcopy(model).to("meta")]
    if name != "poses":
        with torch.device("meta"):
            empty.append(MODELS[name].make())
    for each in empty:
        assert same_bits(run(name, refill(each, model), inputs), expected)


@pytest.mark.parametrize("name", OF_TRANSFORMERS)
def test_patched_models(name, tmp_path):
    model, inputs, expected = build(name)
    with torch.device("meta"):
        built = type(model)(model.config)
    for empty in (built, copy.deepcopy(model).to("meta")):
        tables = [name for name, buffer in empty.named_buffers() if "rotary_encoding" in name and buffer.is_meta]
        assert not tables
        assert same_bits(run(name, refill(empty, model), inputs), expected)
    # transformers may give other names to what it saves.
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    with init_empty_weights():
        built = type(model)(model.config)
    built = load_checkpoint_and_dispatch(built, str(tmp_path), device_map={"": "cpu"})
    assert same_bits(run(name, built.eval(), inputs), expected)


@pytest.mark.parametrize("name", OTHERS)
def test_patched_models_of_other_libraries(name):
    model, inputs, expected = build(name)
    empty = copy.deepcopy(model).to("meta").to_empty(device="cpu")
    empty.load_state_dict(model.state_dict())
    for module_name, module in model.named_modules():
        # Their own buffers are theirs.
        if "rotary_encoding" not in module_name:
            for key in module._non_persistent_buffers_set:
                empty.get_submodule(module_name)._buffers[key] = module._buffers[key]
    assert same_bits(run(name, empty, inputs), expected)


class UserConfig(transformers.PreTrainedConfig):
    model_type = "model_with_the_layer"


class UserModel(transformers.PreTrainedModel):
    """The layer in a model of transformers, which empties buffers that no file contains."""

    config_class = UserConfig

    def __init__(self, config):
        super().__init__(config)
        self.rotary = LieRotaryEmbedding(2, 16, 2, "liere", 4, pairing="halves")
        self.post_init()

    def forward(self, query, key, positions):
        return self.rotary(query, key, positions)


def test_the_layer_in_a_model_of_transformers(tmp_path):
    model, inputs = UserModel(UserConfig()), (*torch.randn(2, 1, 2, 5, 16), torch.rand(5, 2))
    expected = model(*inputs)
    model.save_pretrained(tmp_path)
    spoil_memory()
    assert same_bits(UserModel.from_pretrained(tmp_path).eval()(*inputs), expected)


def test_tables_follow_their_module():
    rotary = LieRotaryEmbedding(2, 16, 2, "liere", 4, pairing="halves")
    order = rotary.order.clone()
    rotary.to("meta").half()
    assert rotary.order.device.type == "cpu" and torch.equal(rotary.order, order) and order.dtype == torch.int64
