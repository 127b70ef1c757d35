"""Models in bfloat16, float16 and autocast, against the same weights in float32: outputs and all gradients."""

import contextlib

import pytest
import torch
from model_cases import MODELS, PATCHED
from patching_cases import tensors

from hf_liere import patch, rotary_parameters


PRECISIONS = {
    "bfloat16": (torch.bfloat16, contextlib.nullcontext),
    "float16": (torch.float16, contextlib.nullcontext),
    "autocast": (torch.bfloat16, lambda: torch.autocast("cpu", torch.bfloat16)),
}
# Z-Image embeds times in float32 beside weights of any type; angles of LTX are thousands of radians; rounding makes
# routers choose other experts.
ROUTED = ("deepseek", "qwen3_next", "llama4")
UNFIT = ("ZImage", "LTX", *(f"rotating {family}" for family in ROUTED))
FIT = [name for name in MODELS if not name.startswith(UNFIT)]
# They stay in float32, as users give them.
PLACES = ("positions", "poses")


def over(names):
    """Every second name with one precision in each test run; the others are slow."""
    cases = []
    for number, name in enumerate(names):
        for index, precision in enumerate(PRECISIONS):
            marks = () if 2 * index == number % (2 * len(PRECISIONS)) else pytest.mark.slow
            cases.append(pytest.param(name, precision, marks=marks))
    return pytest.mark.parametrize("name, precision", cases)


def make(name, dtype, is_exact, is_patched):
    """A model whose weights are numbers of the type, and rotations any of float32, as when it is loaded; or patched."""
    case = MODELS[name]
    torch.manual_seed(0)
    model = case.make().eval()
    with torch.no_grad():
        for key, value in model.named_parameters():
            value.add_(0.1 * torch.randn_like(value))
            if case.config or "encoding." not in key:
                value.data = value.to(dtype).to(torch.float32 if is_exact else dtype)
        if case.config and not case.is_saved and not is_exact:
            # Users of timm and diffusers cast buffers as well.
            model.to(dtype)
        if is_patched:
            patch(model, case.config)
            for key, value in rotary_parameters(model):
                assert value.dtype == torch.float32, key
                value.add_(0.1 * torch.randn_like(value))
    return model


def cast(value, dtype, key=""):
    """Numbers of inputs, but for places, in another type."""
    if isinstance(value, dict):
        return {key: cast(inner, dtype, key) for key, inner in value.items()}
    is_number = isinstance(value, torch.Tensor) and value.is_floating_point() and key not in PLACES
    return value.to(dtype) if is_number else value


def inputs_of(name, dtype):
    """Inputs whose numbers are those of the type; tokens are far apart."""
    torch.manual_seed(1)
    inputs = cast(MODELS[name].inputs(), dtype)
    return inputs | {"positions": 50 * inputs["positions"]} if "positions" in inputs else inputs


def values(name, model, inputs):
    """Outputs, and gradients of a sum of them."""
    found = [x for x in tensors(MODELS[name].outputs(model, inputs)) if x.is_floating_point()]
    torch.manual_seed(2)
    loss = sum((x.float() * torch.randn(x.shape)).sum() for x in found)
    parameters = {key: value for key, value in model.named_parameters() if value.requires_grad}
    gradients = torch.autograd.grad(loss, parameters.values(), allow_unused=True) if parameters else ()
    return found, {key: gradient for key, gradient in zip(parameters, gradients) if gradient is not None}


def errors(name, precision, is_patched):
    """
    The largest relative error of an output and of a gradient, by norms, in roundings of the type. Small gradients are
    sums of large numbers, whose rounding is compared.
    """
    dtype, context = PRECISIONS[precision]
    inputs = inputs_of(name, dtype)
    exact_inputs = cast(inputs, torch.float32)
    model = make(name, dtype, precision == "autocast", is_patched)
    with context():
        found, gradients = values(name, model, exact_inputs if precision == "autocast" else inputs)
    wanted, exact = values(name, make(name, dtype, True, is_patched), exact_inputs)
    assert gradients.keys() == exact.keys()
    smallest = 0.1 * sum(gradient.norm() ** 2 for gradient in exact.values()) ** 0.5
    of_outputs = [(x.float() - y).norm() / y.norm() for x, y in zip(found, wanted, strict=True)]
    of_gradients = [(gradients[key].float() - y).norm() / max(y.norm(), smallest) for key, y in exact.items()]
    eps = torch.finfo(dtype).eps
    return float(max(of_outputs)) / eps, float(max(of_gradients, default=0)) / eps


@over([name for name in FIT if name not in PATCHED])
def test_own_models(name, precision):
    """Layers round their results, by a quarter of eps on average; models round a few dozen times, independently."""
    of_outputs, of_gradients = errors(name, precision, is_patched=False)
    is_layer = name.startswith(("layer", "poses"))
    assert of_outputs < (0.6 if is_layer else 4) and of_gradients < (1.5 if is_layer else 6)


@over([name for name in FIT if name in PATCHED])
def test_patched_models(name, precision):
    """Rotations keep lengths, and round queries and keys once more: errors are those of the plain model, up to that."""
    plain, patched = (errors(name, precision, is_patched) for is_patched in (False, True))
    assert patched[0] < 3 * plain[0] + 1 and patched[1] < 4 * plain[1] + 5
