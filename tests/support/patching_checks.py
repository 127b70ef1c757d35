"""Checks of patched models, the configuration that tests of patches share, and coordinates by loops."""

import copy
import importlib

import pytest
import torch
from fresh_process import run_code, run_warm
from patching_cases import build, outputs, randomize, same_bits

from hf_liere import RotaryPatchConfig, is_patched, patch, rotary_parameters, save_rotary, unpatch


SHARED_CONFIG = RotaryPatchConfig(position_encoding="comrope_ld", block_size=4)


def unit_grid(*sizes):
    """(N, A) coordinates (i + ½)/n of ComRoPE, by loops."""
    rows = [[]]
    for size in sizes:
        rows = [[*row, (index + 0.5) / size] for row in rows for index in range(size)]
    return torch.tensor(rows, dtype=torch.float64)


def build_patched(name, implementation="sdpa"):
    """A case with rotations away from their neutral start, and its inputs."""
    model, inputs = build(name, implementation)
    randomize(patch(model, SHARED_CONFIG))
    return model, inputs


def check_unpatched(model, inputs, before, expected):
    """The weights and outputs of before, and no hook is left."""
    unpatch(model)
    after = model.state_dict()
    assert list(after) == list(before) and all(torch.equal(after[key], before[key]) for key in before)
    assert same_bits(outputs(model, inputs), expected)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def close_to_start(found, expected):
    """Of blocks, whose angles are float64 and whose products are others in float32."""
    for value, start in zip(found, expected, strict=True):
        scale = max(1.0, float(start.detach().abs().max()))
        torch.testing.assert_close(value, start, rtol=0, atol=1e-5 * scale)


FRESH_PROCESS = """
import importlib, sys, torch
from patching_cases import same_bits
from hf_liere import load_rotary

cases, folder, *names = sys.argv[1:]
cases = importlib.import_module(cases)
for name in names:
    model, _ = cases.build(name)
    inputs, expected = torch.load(f"{folder}/{name}.pt")
    load_rotary(model, f"{folder}/{name}")
    # A learned attention bias takes another kernel where gradients are recorded.
    with torch.no_grad():
        assert same_bits(cases.outputs(model, inputs), expected), name
    print(name)
"""


def check_adapters(models, folder, cases):
    """
    Adapters give the same bits in a fresh process.

    Args:
        models: {name of a case: (patched model, inputs)}.
        cases: Name of the module of these cases, whose `build` makes models and whose `outputs` runs them.
    """
    outputs = importlib.import_module(cases).outputs
    for name, (model, inputs) in models.items():
        save_rotary(model, folder / name)
        assert sum(path.stat().st_size for path in (folder / name).iterdir()) < 60_000
        with torch.no_grad():
            torch.save((inputs, outputs(model, inputs)), folder / f"{name}.pt")
    assert run_warm("-c", FRESH_PROCESS, cases, folder, *models).stdout.split() == list(models)


def check_cached_steps(model, inputs, cache=None):
    """The logits of each of three generated tokens, and of one forward pass over all of them."""
    length = inputs["input_ids"].shape[1]
    options = {"do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    if hasattr(model.config, "image_token_id"):
        # A token that stands for a patch needs an image.
        options["suppress_tokens"] = [model.config.image_token_id]
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


def check_copies(model, inputs):
    """A copy of a patched model has its own rotations."""
    expected = outputs(model, inputs)
    other = copy.deepcopy(model)
    assert same_bits(outputs(other, inputs), expected)
    randomize(other, std=0.2)
    assert same_bits(outputs(model, inputs), expected) and not same_bits(outputs(other, inputs), expected)
    unpatch(other)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in other.modules())
    assert is_patched(model) and not is_patched(other) and same_bits(outputs(model, inputs), expected)


def check_offloading(model, inputs, plain, config):
    """A patched model gives the same bits offloaded, and when its plain model is dispatched and then patched."""
    accelerate = pytest.importorskip("accelerate")
    with torch.no_grad():
        expected = outputs(model, inputs)
        offloaded = accelerate.cpu_offload(copy.deepcopy(model), execution_device=torch.device("cpu"))
        assert next(value for _, value in rotary_parameters(offloaded)).is_meta
        assert same_bits(outputs(offloaded, inputs), expected)
        dispatched = accelerate.dispatch_model(plain, {"": "cpu"}, force_hooks=True)
        patch(dispatched, config)
        dispatched.load_state_dict(model.state_dict())
        assert same_bits(outputs(dispatched, inputs), expected)


def check_auto_classes(models, folder, package):
    """Auto classes restore these {name: (auto class, model, inputs)} in a fresh process with the same bits."""
    for name, (_, model, inputs) in models.items():
        model.save_pretrained(folder / name)
        with torch.no_grad():
            torch.save((inputs, outputs(model, inputs)[0]), folder / f"{name}.pt")
    code = f"""
        import torch, transformers
        for name, auto_class in { ({name: auto_class for name, (auto_class, *_) in models.items()}) }.items():
            auto = getattr(transformers, auto_class)
            model, report = auto.from_pretrained(name, output_loading_info=True, trust_remote_code={not package})
            inputs, expected = torch.load(f"{{name}}.pt")
            with torch.no_grad():
                found = model(**inputs)[0]
            print(name, type(model).__module__.split(".")[0], not any(report.values()), torch.equal(found, expected))
    """
    origin = "hf_liere" if package else "transformers_modules"
    assert run_code(code, folder, package) == [f"{name} {origin} True True" for name in models]


def compute_checkpointed_gradients(prepare, forward, reentrant=False, std=0.3):
    """Gradients of the rotations of the model that `prepare` makes, without checkpointing and with it."""
    gradients = []
    for checkpointing in (False, True):
        model = prepare().train()
        torch.manual_seed(2)
        randomize(model, std)
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        torch.manual_seed(3)
        sum(tensor.square().sum() for tensor in forward(model) if tensor.requires_grad).backward()
        gradients.append([value.grad for _, value in rotary_parameters(model)])
    return gradients
