"""Models with RoPE and learned rotations: caches, adapters, checkpointing, compilation, copies and offloading."""

import pytest
import torch
import transformers
from patching_cases import same_bits
from patching_checks import (
    check_adapters,
    check_cached_steps,
    check_copies,
    check_offloading,
    compute_checkpointed_gradients,
)
from rope_cases import CASES, PLANES, blocks, build, build_patched, outputs

from hf_liere import patch, rotary_parameters


CONFIGS = pytest.mark.parametrize("config", [pytest.param(PLANES, id="planes"), pytest.param(blocks(), id="blocks")])
# transformers 5.17 loses shared keys under the hooks of accelerate.
SHARES_KEYS = pytest.mark.skipif(not hasattr(transformers.cache_utils, "KVSharingDict"), reason="of newer releases")


@CONFIGS
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3"])
def test_static_cache_and_padding_on_the_left(name, config):
    """Mistral's cache slides, Gemma 3 has layers of both kinds."""
    model, inputs = build_patched(name, config, std=0.1)
    check_cached_steps(model, inputs, "static")
    mask = torch.ones_like(inputs["input_ids"])
    mask[0, :4] = 0
    check_cached_steps(model, {**inputs, "attention_mask": mask})


@pytest.mark.slow
@pytest.mark.parametrize("config", [PLANES, blocks()], ids=["planes", "blocks"])
def test_adapters_of_every_family_in_a_fresh_process(config, tmp_path):
    check_adapters({name: build_patched(name, config) for name in CASES}, tmp_path, "rope_cases")


@CONFIGS
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["llama", "dinov3", "qwen2_5_vl_tower"])
def test_checkpointed_gradients_are_those_without(name, reentrant, config):
    inputs = build(name)[1]
    gradients = compute_checkpointed_gradients(
        lambda: patch(build(name)[0], config), lambda model: outputs(model, inputs), reentrant, std=0.1
    )
    for plain, checkpointed in zip(*gradients, strict=True):
        # Reentrant checkpointing adds up in another order.
        torch.testing.assert_close(checkpointed, plain, rtol=1e-5, atol=1e-5 * plain.abs().max())


COMPILED = [
    ("llama", PLANES),
    ("gemma3", PLANES),
    ("dinov3", PLANES),
    ("dinov3", blocks()),
    ("llama", blocks("comrope_ld")),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, config",
    [("llama", blocks()), *COMPILED],
)
def test_compiled_whole_graph_gives_the_same(name, config):
    model, inputs = build_patched(name, config, std=0.1)
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
@CONFIGS
@pytest.mark.parametrize("name", ["llama", "mistral", "dinov3"])
def test_flex_attention_gives_the_same(name, config):
    model, inputs = build_patched(name, config, std=0.1)
    with torch.no_grad():
        expected = outputs(model, inputs)
        model.set_attn_implementation("flex_attention")
        # Compiled kernels of float32 add up in another order.
        torch.testing.assert_close(outputs(model, inputs)[0], expected[0], rtol=1e-4, atol=1e-4)


@CONFIGS
def test_copies_have_their_own_rotations(config):
    check_copies(*build_patched("llama", config))


@torch.no_grad()
def test_a_failed_pass_leaves_no_rotation_behind():
    model, inputs = build_patched("llama", blocks())
    expected, attention = outputs(model, inputs), model.model.layers[0].self_attn
    # As memory that does not suffice.
    with attention.o_proj.register_forward_pre_hook(lambda module, args: 1 / 0), pytest.raises(ZeroDivisionError):
        model(**inputs)
    with pytest.raises(RuntimeError, match="ran outside its attention module"):
        attention.q_proj(torch.zeros(*inputs["input_ids"].shape, attention.q_proj.in_features))
    assert same_bits(outputs(model, inputs), expected)


@CONFIGS
@pytest.mark.parametrize("name", ["llama", "gemma3", pytest.param("gemma3n", marks=SHARES_KEYS), "qwen2_5_vl"])
def test_offloaded_and_dispatched_models(name, config):
    check_offloading(*build_patched(name, config, std=0.1), build(name)[0], config)
