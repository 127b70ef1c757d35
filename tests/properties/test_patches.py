"""Patches of every model of the tables: gradients, unpatching, checkpointed layers, copies and offloaded weights."""

import copy
import io

import pytest
import torch
import transformers
from model_cases import MODELS, PATCHED, SLOW, build, make, run
from patching_cases import randomize, same_bits, tensors
from patching_checks import traces

from hf_liere import is_patched, patch, rotary_parameters, unpatch


# One of its attention modules sees the text alone, which is at 0 on two axes.
STILL_AXES = {"ZImageTransformer2DModel, liere"}
# transformers 5.17 loses the keys that layers share under the hooks of accelerate.
SHARES_KEYS = hasattr(transformers.cache_utils, "KVSharingDict")


# These stand for the others, which are slow.
FEW = {"patched clip_vision", "rotating llama, planes", "rotating gpt_neox, blocks", "vit_tiny_patch16_224, liere"}
FEW |= {"vit_small_patch16_dinov3, rope_mixed", "FluxTransformer2DModel, rope_mixed", "FluxTransformer2DModel, liere"}


def over(names, slow):
    marked = (pytest.param(name, marks=pytest.mark.slow if name in slow else ()) for name in names)
    return pytest.mark.parametrize("name", list(marked))


def gradients(name, model, inputs):
    """By name of a parameter, those of a sum of all outputs with random weights."""
    model.zero_grad()
    outputs = [value for value in tensors(MODELS[name].outputs(model, inputs)) if value.requires_grad]
    torch.manual_seed(3)
    sum((value * torch.randn_like(value)).sum() for value in outputs).backward()
    return {key: value.grad.clone() for key, value in model.named_parameters() if value.grad is not None}


@pytest.mark.parametrize("name", PATCHED)
def test_gradients_arrive_and_unpatching_leaves_nothing(name):
    """No hook, attribute, class, configuration or weight of a patch stays; gradients reach every layer and plane."""
    model, inputs = MODELS[name].make().eval(), MODELS[name].inputs()
    kind, weights = type(model), {key: value.clone() for key, value in model.state_dict().items()}
    expected, before = run(name, model, inputs), list(map(traces, model.modules()))
    found, rotations = gradients(name, patch(model, MODELS[name].config), inputs), dict(rotary_parameters(model))
    assert rotations.keys() <= found.keys()
    for key in rotations:
        gradient = found[key]
        assert gradient.isfinite().all(), key
        # Multipliers of zeros learn later, and what moves tokens that nothing rotates.
        learns_later = key.endswith("multipliers") or ".content." in key and MODELS[name].config.rotary_init == "zeros"
        assert gradient.any(-1).all() or learns_later or name in STILL_AXES, key
    randomize(model)
    assert not same_bits(run(name, model, inputs), expected)
    unpatch(model)
    assert type(model) is kind and not is_patched(model) and list(map(traces, model.modules())) == before
    after = model.state_dict()
    assert list(after) == list(weights) and all(torch.equal(after[key], weights[key]) for key in after)
    assert same_bits(run(name, model, inputs), expected)


def checkpoint(model):
    """As each library calls it."""
    for switch in ("gradient_checkpointing_enable", "set_grad_checkpointing", "enable_gradient_checkpointing"):
        if hasattr(model, switch) and getattr(model, "supports_gradient_checkpointing", True):
            return getattr(model, switch)()
    pytest.skip(f"{type(model).__name__} has no checkpointed layers")


@over(PATCHED, SLOW)
def test_checkpointed_layers_have_the_same_gradients(name):
    model, inputs = make(name), MODELS[name].inputs()
    model.train()
    expected = gradients(name, model, inputs)
    checkpoint(model)
    found = gradients(name, model, inputs)
    assert found.keys() == expected.keys() and all(torch.equal(found[key], expected[key]) for key in found)


@over(PATCHED, {*PATCHED} - FEW)
def test_copies_and_files_have_rotations_of_their_own(name):
    model, inputs, expected = build(name)
    torch.save(model, file := io.BytesIO())
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert same_bits(run(name, other, inputs), expected)
        randomize(other)
        assert same_bits(run(name, model, inputs), expected) and not same_bits(run(name, other, inputs), expected)
        assert not is_patched(unpatch(other)) and is_patched(model)


def offload(model):
    """A model whose weights accelerate loads where modules are called."""
    return pytest.importorskip("accelerate").cpu_offload(model, execution_device=torch.device("cpu"))


def offloads(name, plain, inputs):
    """Whether a model gives the same bits when it is offloaded."""
    expected = run(name, plain, inputs)
    try:
        return same_bits(run(name, offload(plain), inputs), expected)
    except (NotImplementedError, RuntimeError):
        return False


@over([name for name in PATCHED if SHARES_KEYS or "gemma" not in name], {*PATCHED} - FEW)
def test_offloaded_weights_give_the_same_bits(name):
    """Those of the patched model, and of one that was dispatched before it was patched."""
    accelerate = pytest.importorskip("accelerate")
    model, inputs, expected = build(name)
    if not offloads(name, MODELS[name].make().eval(), inputs):
        pytest.skip("the model itself reads weights that are not loaded")
    offloaded = offload(copy.deepcopy(model))
    assert next(value for _, value in rotary_parameters(offloaded)).is_meta
    assert same_bits(run(name, offloaded, inputs), expected)
    dispatched = accelerate.dispatch_model(MODELS[name].make().eval(), {"": "cpu"}, force_hooks=True)
    patch(dispatched, MODELS[name].config).load_state_dict(model.state_dict())
    assert same_bits(run(name, dispatched, inputs), expected)
