"""Checks of learned rotations in models with RoPE, whatever the rotations are."""

import copy

import pytest
import torch
import transformers
from fresh_process import run_python
from patching_cases import randomize, same_bits
from rope_cases import build, build_patched, outputs

from hf_liere import RotaryPatchConfig, is_patched, patch, rotary_parameters, save_rotary, unpatch


PLANES = RotaryPatchConfig(position_encoding="rope_mixed", rotary_init="pretrained")
# transformers 5.17 loses shared keys under the hooks of accelerate.
SHARES_KEYS = pytest.mark.skipif(not hasattr(transformers.cache_utils, "KVSharingDict"), reason="of newer releases")
DISPATCHED = ["llama", "gemma3", pytest.param("gemma3n", marks=SHARES_KEYS), "qwen2_5_vl"]


def check_unpatched(model, inputs, before, expected):
    """The weights and outputs of before, and no hook is left."""
    unpatch(model)
    after = model.state_dict()
    assert list(after) == list(before) and all(torch.equal(after[key], before[key]) for key in before)
    assert same_bits(outputs(model, inputs), expected)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


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


def check_static_cache(name, config):
    model, inputs = build_patched(name, config, std=0.1)
    check_cached_steps(model, inputs, "static")
    mask = torch.ones_like(inputs["input_ids"])
    mask[0, :4] = 0
    check_cached_steps(model, {**inputs, "attention_mask": mask})


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
        model, inputs = build_patched(name, config)
        save_rotary(model, folder / name)
        assert sum(path.stat().st_size for path in (folder / name).iterdir()) < 60_000
        with torch.no_grad():
            torch.save((inputs, outputs(model, inputs)), folder / f"{name}.pt")
    run_python("-c", FRESH_PROCESS, folder, *names)


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


def check_compiled(name, config):
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


def check_flex_attention(name, config):
    model, inputs = build_patched(name, config, std=0.1)
    with torch.no_grad():
        expected = outputs(model, inputs)
        model.set_attn_implementation("flex_attention")
        # Compiled kernels of float32 add up in another order.
        torch.testing.assert_close(outputs(model, inputs)[0], expected[0], rtol=1e-4, atol=1e-4)


def check_copies(config):
    model, inputs = build_patched("llama", config)
    expected = outputs(model, inputs)
    other = copy.deepcopy(model)
    assert same_bits(outputs(other, inputs), expected)
    randomize(other, std=0.2)
    assert same_bits(outputs(model, inputs), expected) and not same_bits(outputs(other, inputs), expected)
    unpatch(other)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in other.modules())
    assert is_patched(model) and not is_patched(other) and same_bits(outputs(model, inputs), expected)


def check_offloading(name, config):
    accelerate = pytest.importorskip("accelerate")
    model, inputs = build_patched(name, config, std=0.1)
    with torch.no_grad():
        expected = outputs(model, inputs)
        offloaded = accelerate.cpu_offload(copy.deepcopy(model), execution_device=torch.device("cpu"))
        assert next(value for _, value in rotary_parameters(offloaded)).is_meta
        assert same_bits(outputs(offloaded, inputs), expected)
        dispatched = accelerate.dispatch_model(build(name)[0], {"": "cpu"}, force_hooks=True)
        patch(dispatched, config)
        dispatched.load_state_dict(model.state_dict())
        assert same_bits(outputs(dispatched, inputs), expected)
