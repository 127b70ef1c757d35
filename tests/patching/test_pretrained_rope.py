"""Learned rotations in models with RoPE: the unpatched model and rotations of the plain reference are compared with."""

import contextlib
import copy

import pytest
import torch
import transformers
from patching_cases import randomize, same_bits
from patching_checks import check_cached_steps
from relative_positions import check_relative
from rope_cases import CASES, FAMILIES, PLANES, build, build_patched, outputs

from hf_liere import RotaryPatchConfig, patch, rotary_parameters


BOTH = {**CASES, **FAMILIES}
# Dynamic frequencies change with every token; transformers' own caches contain keys of earlier ones.
GENERATING = [name for name, case in BOTH.items() if case.generates and name != "llama_dynamic"]
# Memories have tokens without a position, and dynamic frequencies follow from the largest one.
RELATIVE = [name for name in BOTH if name not in ("sam2_video", "edgetam_video", "llama_dynamic")]


@pytest.mark.parametrize("name", BOTH)
def test_every_layer_that_rotates_learns(name):
    case, found = BOTH[name], dict(rotary_parameters(patch(build(name)[0], PLANES)))
    if name in CASES:
        assert [*found] == [f"{tower}.rotary_encoding.log_factors".lstrip(".") for tower in case.towers]
    assert sum(len(value) for value in found.values()) == case.rotating_layers * len(case.towers)


@pytest.mark.parametrize("name", RELATIVE)
def test_outputs_depend_on_differences_of_positions(name):
    check_relative(name, PLANES)


@pytest.mark.parametrize("name", GENERATING)
def test_cached_steps_are_the_computation_without_a_cache(name):
    check_cached_steps(*build_patched(name, PLANES))


@contextlib.contextmanager
def rotations_of(attentions):
    """The cos and sin that attention modules get, call by call."""
    seen = []

    def see(module, args, kwargs):
        seen.append(kwargs.get("position_embeddings", args[:1]))

    handles = [module.register_forward_pre_hook(see, with_kwargs=True) for module in attentions]
    yield seen
    for handle in handles:
        handle.remove()


def test_positions_of_the_user():
    """Attention depends on differences of positions alone, and on nothing but the positions that are given."""
    model, inputs = build_patched("llama", PLANES)
    positions = torch.tensor([[0, 1, 2, 5, 6, 9, 10, 11, 12, 20, 21]]).expand(2, -1)
    found = model(**inputs, position_ids=positions).logits
    # Angles of float32 positions that are larger by 30.
    torch.testing.assert_close(model(**inputs, position_ids=positions + 30).logits, found, rtol=1e-3, atol=1e-4)
    assert (model(**inputs).logits - found).abs().max() > 1e-2


def test_attention_that_is_called_without_rotations():
    """Moonshine's decoder attends to the audio with modules that could rotate, and are not given cos and sin."""
    sizes = {"hidden_size": 48, "intermediate_size": 48, "vocab_size": 64}
    layers = {f"{part}_num_hidden_layers": 1 for part in ("encoder", "decoder")}
    config = transformers.MoonshineConfig(**sizes, **layers, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    model = transformers.MoonshineForConditionalGeneration(config).eval()
    inputs = {"input_values": torch.randn(1, 4000), "decoder_input_ids": torch.tensor([[1, 5, 6, 7]])}
    expected = outputs(model, inputs)
    patch(model, PLANES)
    assert [value.shape[0] for _, value in rotary_parameters(model)] == [1, 1]
    assert same_bits(outputs(model, inputs), expected)
    randomize(model)
    assert not same_bits(outputs(model, inputs), expected)


@pytest.mark.parametrize("fields", [{"layers": [0]}, {"share_layers": True}])
def test_layers_that_read_keys_follow_the_layer_that_makes_them(fields):
    """The third of Gemma 3n's layers reads the keys of the first one, the fourth those of the second."""
    config = RotaryPatchConfig(position_encoding="rope_mixed", rotary_init="pretrained", **fields)
    check_relative("gemma3n", config)
    model, inputs = build("gemma3n", "eager")
    patch(model, config)
    randomize(model)
    ((_, value),) = rotary_parameters(model)
    with rotations_of(layer.self_attn for layer in model.model.layers) as seen:
        outputs(model, inputs)
    first, second, third, fourth = seen
    assert value.shape[0] == 1 and same_bits(first, third) and same_bits(second, fourth)


def test_layers_may_share_frequencies_and_a_target_may_be_named():
    config = {"position_encoding": "rope_mixed", "rotary_init": "pretrained"}
    model, _ = build("qwen2_5_vl")
    patch(model, RotaryPatchConfig(**config, share_layers=True, target="model.visual"))
    ((name, value),) = rotary_parameters(model)
    assert name == "model.visual.rotary_encoding.log_factors" and value.shape == (1, 8)


def test_what_was_learned_is_rounded_and_not_where_it_starts():
    """In a patched model that is cast."""
    plain, inputs = build("llama")
    expected = outputs(plain.to(torch.bfloat16), inputs)
    assert same_bits(outputs(patch(build("llama")[0], PLANES).to(torch.bfloat16), inputs), expected)


def test_dinov3_augments_the_coordinates_of_all_layers_alike():
    """In training, DINOv3 draws a scale of the coordinates: once for all layers, however often these read it."""
    model, inputs = build("dinov3")
    patch(model, PLANES)
    model.train()
    with rotations_of(layer.attention for layer in model.model.layer) as seen:
        model(**inputs)
        model(**inputs)
    first, second, third, fourth = seen
    assert same_bits(first, second) and same_bits(third, fourth) and not same_bits(first, third)


@pytest.mark.parametrize("name", ["llama", "llama_yarn", "gemma3", "qwen3_vl"])
def test_angles_of_published_sizes_are_the_same_bits(name):
    """cos and sin of 128 channels and positions up to 131,000, as attention gets them."""
    config = copy.deepcopy(build(name)[0].config.get_text_config())
    config.update(
        {"head_dim": 128, "num_attention_heads": 1, "num_key_value_heads": 1, "max_position_embeddings": 131072}
    )
    if "mrope_section" in config.rope_parameters:
        config.rope_parameters["mrope_section"] = [24, 20, 20]
    model = transformers.AutoModel.from_config(config).eval()
    positions = torch.cat([torch.arange(300), torch.arange(130_700, 131_001)]).unsqueeze(0)
    inputs = {"input_ids": torch.ones_like(positions), "position_ids": positions, "use_cache": False}
    found = []
    for prepare in (lambda: model, lambda: patch(model, PLANES)):
        prepare()
        with torch.no_grad(), rotations_of(layer.self_attn for layer in model.layers) as seen:
            model(**inputs)
        found.append(seen)
    assert len(found[0]) == 2 and all(same_bits(*pair) for pair in zip(*found, strict=True))
