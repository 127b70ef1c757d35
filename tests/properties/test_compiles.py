"""Models compile to one graph, which other batches reuse, and export to a program, with the numbers of eager runs."""

import copy

import pytest
import torch
from model_cases import MODELS, SLOW, build, make, run
from patching_cases import tensors
from slow_cases import slow_except
from torch._dynamo.testing import CompileCounterWithBackend


pytestmark = pytest.mark.usefixtures("fresh_compiler")
# Masks of transformers' own class decide the number of tokens.
NOT_ONE_GRAPH = {"patched videomae_pretraining"}
# Those of diffusers have a test of their own, which is in inference.
KINDS = ("image", "video", "points", "layer", "hidden", "padded", "sizes", "physical", "poses", "patched", "vit", "eva")
NAMES = [name for name in MODELS if name.startswith(KINDS) and name not in {*NOT_ONE_GRAPH, *SLOW}]
NAMES += ["rotating llama, planes", "composed llama, panels"]
# Compiling takes seconds: one of each kind stands for the others.
FAST = ("image liere", "points rope_mixed", "layer spherical_rope", "sizes", "patched siglip2")
# float32 sums in another order, through all layers; a graph fixes how often exponentials are squared.
ROUNDING = {"rtol": 1e-4, "atol": 1e-4}


def outputs_and_gradients(name, model, inputs):
    model.zero_grad()
    found = tensors(MODELS[name].outputs(model, inputs))
    if learned := [value.square().mean() for value in found if value.requires_grad]:
        sum(learned).backward()
    return found, [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("name", slow_except(FAST, NAMES))
def test_every_batch_has_one_graph(name):
    """Outputs, all gradients, and no graph for other values or after a step."""
    model, row = make(name), MODELS[name]
    counter = CompileCounterWithBackend("aot_eager" if row.config is None else "eager")
    compiled = torch.compile(copy.deepcopy(model), backend=counter, fullgraph=True)
    for _ in range(2):
        inputs = row.inputs()
        found, expected = (outputs_and_gradients(name, each, inputs) for each in (compiled, model))
        torch.testing.assert_close(found, expected, **ROUNDING)
        with torch.no_grad():
            for parameter in (*model.parameters(), *compiled.parameters()):
                parameter.mul_(0.9)
    assert counter.frame_count == 1


# Number of samples, and of pixels or tokens.
OTHER_SIZES = {
    "image liere": [(2, (16, 12)), (3, (8, 24)), (5, (20, 12)), (4, (24, 8))],
    "image rope_mixed": [(2, (16, 12)), (3, (8, 24)), (5, (20, 12)), (4, (24, 8))],
    # An axis of one patch is a size of its own to torch.
    "video liere": [(2, (8, 12)), (3, (12, 8)), (4, (8, 16))],
    "points liere": [(2, 5), (3, 6), (4, 9)],
}


@pytest.mark.parametrize("name", slow_except(("image liere",), OTHER_SIZES))
@torch.no_grad()
def test_other_sizes_share_a_second_graph(name):
    model, counter = make(name), CompileCounterWithBackend("eager")
    compiled = torch.compile(copy.deepcopy(model), backend=counter, fullgraph=True)
    for size in OTHER_SIZES[name]:
        inputs = MODELS[name].inputs(*size)
        torch.testing.assert_close(run(name, compiled, inputs), run(name, model, inputs), **ROUNDING)
    assert counter.frame_count <= 2


def one_size(name):
    return MODELS[name].config is None and not name.startswith(("sizes", "poses"))


EXPORTED = [name for name in NAMES if one_size(name)]


@pytest.mark.parametrize("name", slow_except(("points liere", "physical"), EXPORTED))
@torch.no_grad()
def test_programs_compute_the_same(name):
    model, inputs, expected = build(name)
    program = torch.export.export(model, (), inputs, strict=False).module()
    for given, wanted in ((inputs, expected), (other := MODELS[name].inputs(), run(name, model, other))):
        torch.testing.assert_close(tensors(program(**given)), wanted, **ROUNDING)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["image rope_mixed", "image liere", "image comrope_ld", "rotating llama, planes"])
@torch.no_grad()
def test_inductor(name):
    model, inputs, expected = build(name)
    torch.testing.assert_close(run(name, torch.compile(model, fullgraph=True), inputs), expected, **ROUNDING)
