"""Learned rotations in models with RoPE: the unpatched model and rotations of the plain reference are compared with."""

import copy

import pytest
import torch
import transformers
from patching_cases import randomize, same_bits
from patching_checks import check_cached_steps, check_unpatched
from rope_cases import CASES, PLANES, build, build_patched, check_relative, outputs

from hf_liere import RotaryPatchConfig, patch, rotary_parameters


GENERATING = [name for name, case in CASES.items() if case.generates]


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("name", CASES)
def test_planes_start_as_the_same_bits_and_unpatch_is_exact(name, implementation):
    model, inputs = build(name, implementation)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    expected = outputs(model, inputs)
    patch(model, PLANES)
    assert tuple(
        key.removesuffix("rotary_encoding.log_factors").rstrip(".") for key, _ in rotary_parameters(model)
    ) == (CASES[name].towers)
    assert same_bits(outputs(model, inputs), expected)
    randomize(model)
    assert not same_bits(outputs(model, inputs), expected)
    check_unpatched(model, inputs, before, expected)


@pytest.mark.parametrize("name", CASES)
def test_outputs_depend_on_differences_of_positions(name):
    check_relative(name, PLANES)


@pytest.mark.parametrize("name", CASES)
def test_gradients_reach_every_frequency(name):
    model, inputs = build(name)
    patch(model, PLANES)
    sum(tensor.square().sum() for tensor in outputs(model.train(), inputs) if tensor.requires_grad).backward()
    for key, value in rotary_parameters(model):
        # Where a layer does not rotate, the other one alone learns.
        assert value.shape[0] == CASES[name].rotating_layers and value.grad.abs().min() > 0, key


@pytest.mark.parametrize("name", GENERATING)
def test_cached_steps_are_the_computation_without_a_cache(name):
    model, inputs = build_patched(name, PLANES)
    check_cached_steps(model, inputs)


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


def test_chosen_layers_learn_and_the_others_stay():
    model, inputs = build("llama", "eager")
    expected = model(**inputs, output_attentions=True).attentions
    patch(model, RotaryPatchConfig(position_encoding="rope_mixed", rotary_init="pretrained", layers=[1]))
    randomize(model)
    found = model(**inputs, output_attentions=True).attentions
    assert torch.equal(found[0], expected[0]) and not torch.equal(found[1], expected[1])


@pytest.mark.parametrize("fields", [{"layers": [0]}, {"share_layers": True}])
def test_layers_that_read_keys_follow_the_layer_that_makes_them(fields):
    """The third of Gemma 3n's layers reads the keys of the first one, the fourth those of the second."""
    config = RotaryPatchConfig(position_encoding="rope_mixed", rotary_init="pretrained", **fields)
    check_relative("gemma3n", config)
    model, inputs = build("gemma3n", "eager")
    seen = []
    for layer in patch(model, config).model.layers:
        layer.self_attn.register_forward_pre_hook(
            lambda module, args, kwargs: seen.append(kwargs.get("position_embeddings", args[:1])), with_kwargs=True
        )
    randomize(model)
    ((_, value),) = rotary_parameters(model)
    outputs(model, inputs)
    first, second, third, fourth = seen
    assert value.shape[0] == 1 and same_bits(first, third) and same_bits(second, fourth)


def test_layers_may_share_frequencies_and_a_target_may_be_named():
    config = {"position_encoding": "rope_mixed", "rotary_init": "pretrained"}
    model, _ = build("qwen2_5_vl")
    patch(model, RotaryPatchConfig(**config, share_layers=True, target="model.visual"))
    ((name, value),) = rotary_parameters(model)
    assert name == "model.visual.rotary_encoding.log_factors" and value.shape == (1, 8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama", "dinov3", "qwen2_5_vl_tower"])
def test_half_types_start_as_the_same_bits(name, dtype):
    model, inputs = build(name)
    model = model.to(dtype)
    inputs = {key: value.to(dtype) if value.is_floating_point() else value for key, value in inputs.items()}
    expected = outputs(model, inputs)
    patch(model, PLANES)
    assert all(value.dtype == torch.float32 for _, value in rotary_parameters(model))
    assert same_bits(outputs(model, inputs), expected)
    sum(tensor.float().square().mean() for tensor in outputs(model, inputs)).backward()
    assert all(value.grad.isfinite().all() and value.grad.any() for _, value in rotary_parameters(model))
    # A patched model may be cast as well; what it learned is rounded, where it starts is not.
    again, _ = build(name)
    assert same_bits(outputs(patch(again, PLANES).to(dtype), inputs), expected)


def test_dinov3_augments_the_coordinates_of_all_layers_alike():
    """In training, DINOv3 draws a scale of the coordinates: once for all layers, however often these read it."""
    model, inputs = build("dinov3")
    patch(model, PLANES)
    model.train()
    seen = []
    for layer in model.model.layer:
        layer.attention.register_forward_pre_hook(
            lambda module, args, kwargs: seen.append(kwargs["position_embeddings"]), with_kwargs=True
        )
    for _ in range(2):
        model(**inputs)
    first, second, third, fourth = seen
    assert same_bits(first, second) and same_bits(third, fourth) and not same_bits(first, third)


def test_lora_beside_learned_frequencies(tmp_path):
    peft = pytest.importorskip("peft")
    lora = {"target_modules": ["q_proj", "k_proj"], "r": 2, "init_lora_weights": False}
    model, inputs = build("llama")
    tuned = peft.get_peft_model(
        patch(model, PLANES), peft.LoraConfig(**lora, modules_to_save=["rotary_encoding"])
    ).eval()
    randomize(tuned)
    expected = outputs(tuned, inputs)
    assert all(value.requires_grad for _, value in rotary_parameters(tuned))
    tuned.save_pretrained(tmp_path)
    base, _ = build("llama")
    restored = peft.PeftModel.from_pretrained(patch(base, PLANES), tmp_path).eval()
    assert same_bits(outputs(restored, inputs), expected)


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
    seen = []
    for layer in model.layers:
        layer.self_attn.register_forward_pre_hook(
            lambda module, args, kwargs: seen.append(kwargs["position_embeddings"]), with_kwargs=True
        )
    positions = torch.cat([torch.arange(300), torch.arange(130_700, 131_001)]).unsqueeze(0)
    inputs = {"input_ids": torch.ones_like(positions), "position_ids": positions, "use_cache": False}
    with torch.no_grad():
        model(**inputs)
        expected = list(seen)
        seen.clear()
        for module in model.modules():
            module._forward_pre_hooks.clear()
        patch(model, PLANES)
        for layer in model.layers:
            layer.self_attn.register_forward_pre_hook(
                lambda module, args, kwargs: seen.append(kwargs["position_embeddings"]), with_kwargs=True
            )
        model(**inputs)
    assert len(expected) == 2 and all(same_bits(*pair) for pair in zip(seen, expected, strict=True))
