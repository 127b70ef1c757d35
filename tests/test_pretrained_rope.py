"""Learned rotations in models with RoPE: the unpatched model and rotations of the plain reference are compared with."""

import copy
import sys

import pytest
import torch
import transformers
from patching_cases import randomize, run_process, same_bits
from rope_cases import CASES, build, check_relative, outputs

from hf_liere import RotaryPatchConfig, is_patched, patch, rotary_parameters, save_rotary, unpatch


PLANES = RotaryPatchConfig(position_encoding="rope_mixed", rotary_init="pretrained")
# transformers 5.17 loses shared keys under the hooks of accelerate.
SHARES_KEYS = pytest.mark.skipif(not hasattr(transformers.cache_utils, "KVSharingDict"), reason="of newer releases")
DISPATCHED = ["llama", "gemma3", pytest.param("gemma3n", marks=SHARES_KEYS), "qwen2_5_vl"]
GENERATING = [name for name, case in CASES.items() if case.generates]


def check_unpatched(model, inputs, before, expected):
    """The weights and outputs of before, and no hook is left."""
    unpatch(model)
    after = model.state_dict()
    assert list(after) == list(before) and all(torch.equal(after[key], before[key]) for key in before)
    assert same_bits(outputs(model, inputs), expected)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


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
    model, inputs = build(name)
    patch(model, PLANES)
    randomize(model)
    check_cached_steps(model, inputs)


def check_cached_steps(model, inputs, cache=None):
    """The logits of each of three generated tokens, and of one forward pass over all of them."""
    length = inputs["input_ids"].shape[1]
    options = {"do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    generated = model.generate(
        **inputs, max_new_tokens=3, min_new_tokens=3, **options, **({"cache_implementation": cache} if cache else {})
    )
    longer = {**inputs, "input_ids": generated.sequences}
    if "mm_token_type_ids" in inputs:
        longer["mm_token_type_ids"] = torch.nn.functional.pad(inputs["mm_token_type_ids"], (0, 3))
    if "attention_mask" in inputs:
        longer["attention_mask"] = torch.nn.functional.pad(inputs["attention_mask"], (0, 3), value=1)
        # As `generate` counts: padding has no position.
        longer["position_ids"] = (longer["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        whole = model(**longer, use_cache=False).logits[:, length - 1 : -1]
    # float32 attention over one query and over all of them.
    torch.testing.assert_close(torch.stack(generated.logits, 1), whole, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3"])
def test_static_cache_and_padding_on_the_left(name):
    """Mistral's cache slides, Gemma 3 has layers of both kinds."""
    check_static_cache(name, PLANES)


def check_static_cache(name, config):
    model, inputs = build(name)
    patch(model, config)
    randomize(model, std=0.1)
    check_cached_steps(model, inputs, "static")
    mask = torch.ones_like(inputs["input_ids"])
    mask[0, :4] = 0
    check_cached_steps(model, {**inputs, "attention_mask": mask})


def test_positions_of_the_user():
    """Attention depends on differences of positions alone, and on nothing but the positions that are given."""
    model, inputs = build("llama")
    patch(model, PLANES)
    randomize(model)
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
    assert same_bits(outputs(model, inputs), expected)
    randomize(model)
    assert not same_bits(outputs(model, inputs), expected)


FRESH_PROCESS = """
import sys, torch
from rope_cases import build, outputs
from hf_liere import load_rotary

folder = sys.argv[1]
for name in sys.argv[2:]:
    model, _ = build(name)
    inputs, expected = torch.load(f"{folder}/{name}.pt")
    load_rotary(model, f"{folder}/{name}")
    with torch.no_grad():
        found = outputs(model, inputs)
    assert len(found) == len(expected) and all(torch.equal(a, b) for a, b in zip(found, expected)), name
"""


def check_fresh_process(folder, names, config):
    for name in names:
        model, inputs = build(name)
        patch(model, config)
        randomize(model)
        save_rotary(model, folder / name)
        assert sum(path.stat().st_size for path in (folder / name).iterdir()) < 60_000
        with torch.no_grad():
            torch.save((inputs, outputs(model, inputs)), folder / f"{name}.pt")
    run_process([sys.executable, "-c", FRESH_PROCESS, str(folder), *names])


def test_adapters_of_every_family_in_a_fresh_process(tmp_path):
    check_fresh_process(tmp_path, list(CASES), PLANES)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["llama", "dinov3", "qwen2_5_vl_tower"])
def test_checkpointed_gradients_are_those_without(name, reentrant):
    check_checkpointing(name, reentrant, PLANES)


def check_checkpointing(name, reentrant, config):
    gradients = []
    for checkpointing in (False, True):
        model, inputs = build(name)
        patch(model, config)
        torch.manual_seed(2)
        randomize(model, std=0.1)
        model.train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        torch.manual_seed(3)
        found = outputs(model, inputs)
        sum(tensor.square().sum() for tensor in found if tensor.requires_grad).backward()
        gradients.append([value.grad for _, value in rotary_parameters(model)])
    for plain, checkpointed in zip(*gradients, strict=True):
        # Reentrant checkpointing adds up in another order.
        torch.testing.assert_close(checkpointed, plain, rtol=1e-5, atol=1e-5 * plain.abs().max())


@pytest.mark.parametrize(
    "name", ["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gemma3", "dinov3"))]
)
def test_compiled_whole_graph_gives_the_same(name):
    check_compiled(name, PLANES)


def check_compiled(name, config):
    model, inputs = build(name)
    patch(model, config)
    randomize(model, std=0.1)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    gradients = []
    for runs in (model, compiled):
        model.zero_grad()
        found = outputs(runs, inputs)
        found[0].square().sum().backward()
        gradients.append([found[0].detach(), *(value.grad for _, value in rotary_parameters(model))])
    for expected, value in zip(*gradients):
        # Compiled graphs of float32 add up in another order.
        torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-4 * max(1.0, float(expected.abs().max())))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "mistral", "dinov3"])
def test_flex_attention_gives_the_same(name):
    check_flex_attention(name, PLANES)


def check_flex_attention(name, config):
    model, inputs = build(name)
    patch(model, config)
    randomize(model, std=0.1)
    with torch.no_grad():
        expected = outputs(model, inputs)
        model.set_attn_implementation("flex_attention")
        # Compiled kernels of float32 add up in another order.
        torch.testing.assert_close(outputs(model, inputs)[0], expected[0], rtol=1e-4, atol=1e-4)


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


def test_copies_have_rotations_of_their_own():
    check_copies(PLANES)


def check_copies(config):
    model, inputs = build("llama")
    patch(model, config)
    randomize(model)
    expected = outputs(model, inputs)
    other = copy.deepcopy(model)
    assert same_bits(outputs(other, inputs), expected)
    randomize(other, std=0.2)
    assert same_bits(outputs(model, inputs), expected) and not same_bits(outputs(other, inputs), expected)
    unpatch(other)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in other.modules())
    assert is_patched(model) and not is_patched(other) and same_bits(outputs(model, inputs), expected)


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


@pytest.mark.parametrize("name", DISPATCHED)
def test_offloaded_and_dispatched_models(name):
    check_offloading(name, PLANES)


def check_offloading(name, config):
    accelerate = pytest.importorskip("accelerate")
    model, inputs = build(name)
    patch(model, config)
    randomize(model, std=0.1)
    with torch.no_grad():
        expected = outputs(model, inputs)
        offloaded = accelerate.cpu_offload(copy.deepcopy(model), execution_device=torch.device("cpu"))
        assert next(value for _, value in rotary_parameters(offloaded)).is_meta
        assert same_bits(outputs(offloaded, inputs), expected)
        dispatched = accelerate.dispatch_model(build(name)[0], {"": "cpu"}, force_hooks=True)
        patch(dispatched, config)
        dispatched.load_state_dict(model.state_dict())
        assert same_bits(outputs(dispatched, inputs), expected)


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
