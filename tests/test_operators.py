"""Operators in compiled graphs on CPUs: what PyTorch asks of an operator, and the numbers of the same model without."""

import copy

import pytest
import torch

import hf_liere
from hf_liere.models import exponential, operators
from hf_liere.models.exponential import Rays, layer_block_rotations
from hf_liere.models.lie_algebra import skew
from hf_liere.models.positions import of_grid


@pytest.fixture(params=["kernels", "plain"])
def implementation(request, monkeypatch):
    if request.param == "plain":
        monkeypatch.setenv("HF_LIERE_CPU_KERNELS", "0")
    else:
        request.getfixturevalue("compiled_kernels")


@pytest.fixture
def fresh_compiler():
    """Graphs of other tests' models count towards the compiler's limit of graphs for one function."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def states(*shape, transposed=True):
    """Queries or keys, by default in memory as a projection leaves them."""
    batch, heads, tokens, width = shape
    if transposed:
        return torch.randn(batch, tokens, heads, width).transpose(1, 2).detach()
    return torch.randn(shape)


def exponential_arguments(size, dtype, grid=(3, 4)):
    placed = of_grid(grid, grid, "index", 1)
    generators = skew(torch.randn(2, 3, 2, size * (size - 1) // 2), size).to(dtype)
    return placed.coordinates, generators.requires_grad_(), list(grid), 1, dtype


@pytest.mark.parametrize("size", [3, 8, 16])
@pytest.mark.parametrize("transposed", [True, False])
def test_opcheck_of_applied_blocks(implementation, size, transposed):
    query, key = (states(2, 3, 5, 2 * size, transposed=transposed).requires_grad_() for _ in range(2))
    blocks = torch.linalg.qr(torch.randn(1, 3, 5, 2, size, size))[0].contiguous()
    torch.library.opcheck(operators._rotate_shared_blocks, (query, key, blocks.clone().requires_grad_()))
    gradients = [states(2, 3, 5, 2 * size) for _ in range(2)]
    torch.library.opcheck(operators._rotate_shared_blocks_backward, (*gradients, query.detach(), key.detach(), blocks))


@pytest.mark.parametrize("size", [3, 8, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_opcheck_of_exponentials(implementation, size, dtype):
    arguments = exponential_arguments(size, dtype)
    torch.library.opcheck(exponential._block_rotations, arguments)
    gradients = [torch.randn(13, 2, size, size, dtype=dtype) for _ in range(3)]
    positions, generators, *others = arguments
    torch.library.opcheck(exponential._block_rotations_backward, (positions, generators.detach(), *others, gradients))


@pytest.mark.parametrize("rays", [None, Rays((3, 4), 1)])
@pytest.mark.parametrize("size, scale", [(3, 0.01), (8, 1.0), (16, 30.0)])
@pytest.mark.usefixtures("graph_operators")
def test_exponentials_in_a_graph_are_those_outside(implementation, fresh_compiler, rays, size, scale):
    positions, generators, *_ = exponential_arguments(size, torch.float32)
    generators = (generators.detach() * scale).requires_grad_()
    weight = torch.randn(2, 13, size, size)

    def loss(function):
        rotations = function(positions, generators, torch.float32, rays)
        value = sum((rotation * weight).sum() for rotation in rotations)
        return (*rotations, *torch.autograd.grad(value, generators))

    compiled = torch.compile(layer_block_rotations, backend="aot_eager", fullgraph=True)
    # The same code runs in both.
    for ours, expected in zip(loss(compiled), loss(layer_block_rotations), strict=True):
        assert torch.equal(ours, expected)


@pytest.mark.parametrize("head_dim, size", [(16, 8), (18, 8), (13, 3)])
@pytest.mark.parametrize("is_trained", [True, False])
def test_blocks_in_a_graph_are_those_outside(implementation, fresh_compiler, head_dim, size, is_trained):
    """Channels beyond the last block are passed through; constants get no gradient."""
    query, key = (states(2, 3, 5, head_dim).requires_grad_() for _ in range(2))
    blocks = torch.linalg.qr(torch.randn(1, 3, 5, head_dim // size, size, size))[0].contiguous()
    leaves = [query, key, *([blocks.requires_grad_()] if is_trained else [])]
    compiled = torch.compile(operators.rotate_blocks, backend="aot_eager", fullgraph=True)

    def gradients(function):
        rotated = function(query, key, blocks)
        return (*rotated, *torch.autograd.grad(sum(part.sin().sum() for part in rotated), leaves))

    for ours, expected in zip(gradients(compiled), gradients(operators.rotate_blocks), strict=True):
        # Kernels sum in another order than plain operations, which the others are.
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("fields", [{}, {"share_layers": True}, {"share_heads": True}, {"rotate_prefix": True}])
def test_a_training_step_of_a_graph_is_that_of_the_model(tiny, implementation, fresh_compiler, fields):
    model = hf_liere.LieREViTForImageClassification(tiny(block_size=8, num_labels=3, **fields))
    pixels, labels = torch.randn(2, 3, 16, 16), torch.tensor([0, 2])
    compiled = torch.compile(copy.deepcopy(model), backend="aot_eager", fullgraph=True)
    results = []
    for module in (model, compiled):
        outputs = module(pixels, labels=labels)
        outputs.loss.backward()
        results.append((outputs.logits, *(parameter.grad for parameter in module.parameters())))
    for ours, expected in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("graph_operators")
def test_the_profiler_names_operators(tiny, fresh_compiler):
    model = hf_liere.LieREViTModel(tiny(block_size=8))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    pixels = torch.randn(1, 3, 16, 16)
    compiled(pixels).last_hidden_state.sum().backward()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        compiled(pixels).last_hidden_state.sum().backward()
    names = {event.key for event in profile.key_averages()}
    assert {"hf_liere::block_rotations", "hf_liere::rotate_shared_blocks"} <= names
