"""Checks of patched models, the configuration that tests of patches share, and coordinates by loops."""

import contextlib

import pytest
import torch
from fresh_process import run_code
from patching_cases import build, outputs, randomize

from hf_liere import RotaryPatchConfig, patch, rotary_parameters


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


@contextlib.contextmanager
def refused(model, message):
    """A `ValueError` with this message; weights, classes, configurations and hooks of the model are as before."""

    weights, parts = {name: value.clone() for name, value in model.state_dict().items()}, describe(model)
    with pytest.raises(ValueError, match=message):
        yield
    after = model.state_dict()
    assert list(after) == list(weights) and describe(model) == parts
    assert all(after[name].is_meta or torch.equal(after[name], weights[name]) for name in after)


def describe(model):
    """By name of a module, its class, configuration, names of attributes, and hooks."""
    return {name: (id(getattr(module, "config", None)), traces(module)) for name, module in model.named_modules()}


def traces(module):
    """What a patch may leave in a module: its class, the class of its configuration, names of attributes, and hooks."""
    hooks = [{**value} for name, value in vars(module).items() if name.endswith("_hooks")]
    return type(module), type(getattr(module, "config", None)), {*vars(module)}, hooks


def close_to_start(found, expected):
    """Of blocks, whose angles are float64 and whose products are others in float32."""
    for value, start in zip(found, expected, strict=True):
        scale = max(1.0, float(start.detach().abs().max()))
        torch.testing.assert_close(value, start, rtol=0, atol=1e-5 * scale)


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


def check_auto_classes(models, folder):
    """Auto classes restore {name: (auto class, model, inputs)} with the same bits where nobody imports the package."""
    with pytest.MonkeyPatch.context() as context:
        # Code that comes with a checkpoint has no kernels for CPUs, which round otherwise.
        context.setenv("HF_LIERE_CPU_KERNELS", "0")
        for name, (_, model, inputs) in models.items():
            model.save_pretrained(folder / name)
            with torch.no_grad():
                torch.save((inputs, outputs(model, inputs)[0]), folder / f"{name}.pt")
        code = f"""
            import torch, transformers
            for name, auto_class in { ({name: auto_class for name, (auto_class, *_) in models.items()}) }.items():
                auto = getattr(transformers, auto_class)
                model, report = auto.from_pretrained(name, output_loading_info=True, trust_remote_code=True)
                inputs, expected = torch.load(f"{{name}}.pt")
                with torch.no_grad():
                    found = model(**inputs)[0]
                print(name, type(model).__name__, not any(report.values()), torch.equal(found, expected))
        """
        restored = [f"{name} {type(model).__name__} True True" for name, (_, model, _) in models.items()]
        assert run_code(code, folder, package=None) == restored


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
