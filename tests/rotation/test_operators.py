"""Operators: what PyTorch asks of them, and the numbers of the same model in graphs, transformed and profiled."""

import copy

import pytest
import torch
from encoding_cases import IMAGE_CASES
from rotating import rotate_query_key
from slow_cases import slow_except
from torch.func import functional_call, grad, stack_module_state, vmap

import hf_liere
from hf_liere.encoding.kinds import ENCODINGS
from hf_liere.encoding.positions import TokenPositions
from hf_liere.fast import exponentials, quaternions
from hf_liere.fast.dispatch import plain_operations
from hf_liere.fast.exponential_gradient import block_rotations_backward
from hf_liere.fast.exponentials import exponentiate
from hf_liere.fast.quaternions import CLOSED_FORMS, quaternion_rotations_backward
from hf_liere.fast.rotating import _rotate
from hf_liere.fast.rotation_gradients import rotate_backward
from hf_liere.fast.scaling_and_squaring import Rays, num_saved
from hf_liere.rotation.exponential import skew
from hf_liere.rotation.rotation import BlockRotation, PlaneRotation


@pytest.fixture(params=["kernels", "plain"])
def implementation(request):
    if request.param == "kernels":
        request.getfixturevalue("compiled_kernels")
        yield
    else:
        with plain_operations():
            yield


def states(*shape, transposed=True):
    """Queries or keys, by default in memory as a projection leaves them."""
    batch, heads, tokens, width = shape
    if transposed:
        return torch.randn(batch, tokens, heads, width).transpose(1, 2).detach()
    return torch.randn(shape)


def rotations_of(shape, layout):
    """Orthogonal blocks, or cos and sin."""
    if layout == "blocks":
        return torch.linalg.qr(torch.randn(shape))[0].contiguous()
    return torch.nn.functional.normalize(torch.randn(shape), dim=-1)


def exponential_arguments(size, dtype, centred=False, grid=(3, 4)):
    placed = TokenPositions.from_grid(grid, grid, "centred_grid" if centred else "index", 1)
    generators = skew(torch.randn(2, 3, 2, size * (size - 1) // 2), size).to(dtype)
    return placed.coordinates, generators.requires_grad_(), list(grid), 1, centred, dtype


@pytest.mark.parametrize("size, batch, transposed", [(3, 1, True), (8, 2, True), (8, 1, False)])
def test_opcheck_of_applied_blocks(implementation, size, batch, transposed):
    query, key = (states(2, 3, 5, 2 * size + 1, transposed=transposed).requires_grad_() for _ in range(2))
    blocks = rotations_of((batch, 3, 5, 2, size, size), "blocks")
    for constant in (blocks, blocks.clone().requires_grad_()):
        torch.library.opcheck(_rotate.operator, (query, key, constant, None, None, False))
    gradients = [states(2, 3, 5, 2 * size + 1) for _ in range(2)]
    torch.library.opcheck(rotate_backward.operator, (*gradients, query.detach(), key.detach(), blocks, None, None))


@pytest.mark.parametrize("dtype, size", [(torch.float32, None), (torch.bfloat16, 4), (torch.float64, 8)])
def test_opcheck_of_applied_planes(implementation, dtype, size):
    """In the basis of the model, and in that of commuting generators of this size."""
    query, key = (states(2, 3, 5, 16).to(dtype).requires_grad_() for _ in range(2))
    cos_sin, others = rotations_of((1, 3, 5, 8, 2), "planes"), (None, None)
    if size is not None:
        generators = skew(torch.randn(3, 16 // size, size * (size - 1) // 2), size)
        others = generators.requires_grad_(), torch.randn(1, 3, 5, 16 // size)
    torch.library.opcheck(_rotate.operator, (query, key, cos_sin.requires_grad_(), *others, False))
    gradients = [states(2, 3, 5, 16).to(dtype) for _ in range(2)]
    arguments = (*gradients, query.detach(), key.detach(), cos_sin.detach(), *others)
    torch.library.opcheck(rotate_backward.operator, [x if x is None else x.detach() for x in arguments])


@pytest.mark.parametrize("size", [None, 3, 8])
@pytest.mark.parametrize("eigen", [False, True])
@pytest.mark.parametrize("batch", [1, 2])
def test_a_query_by_itself(implementation, size, eigen, batch):
    """As beside a key, forward and backward; a key without samples stands for none."""
    if eigen and size != 8:
        pytest.skip("commuting generators of one block size")
    if eigen or size is None:
        rotation = PlaneRotation(rotations_of((batch, 3, 5, 8, 2), "planes").requires_grad_())
        if eigen:
            generators = skew(torch.randn(3, 2, 28), 8).requires_grad_()
            rotation = rotation._replace(generators=generators, phases=torch.randn(batch, 3, 5, 2))
    else:
        rotation = BlockRotation(rotations_of((batch, 3, 5, 17 // size, size, size), "blocks").requires_grad_())
    query = states(2, 3, 5, 17, transposed=True).requires_grad_()
    # The operator takes no basis.
    tensors = rotation[0], *(rotation[2:4] or (None, None))
    learned = [x for x in (query, *tensors) if x is not None and x.requires_grad]
    constant = [x if x is None else x.detach() for x in (query, query[:0], *tensors)]
    for arguments in ((query, query[:0], *tensors), constant):
        torch.library.opcheck(_rotate.operator, (*arguments, False))
    alone, none = rotation.rotate(query, query[:0])
    both, _ = rotation.rotate(query, torch.zeros_like(query))
    weights = torch.randn_like(alone)
    assert none.shape == (0, 3, 5, 17)
    torch.testing.assert_close(alone, both)
    found, expected = (torch.autograd.grad((x * weights).sum(), learned) for x in (alone, both))
    for ours, other in zip(found, expected):
        # Sums of two products each in another order.
        torch.testing.assert_close(ours, other, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("halves, dtype", [(1, torch.float32), (2, torch.float32), (2, torch.float64)])
def test_opcheck_of_closed_forms(implementation, halves, dtype):
    positions, generators = torch.randn(5, 2, dtype=torch.float64), torch.randn(2, 3, 4, halves, 3).double()
    leaves = positions.requires_grad_(), generators.requires_grad_()
    torch.library.opcheck(quaternions._quaternion_rotations.operator, (*leaves, dtype))
    gradient = torch.randn(3, 5, 4, 2 + halves, 2 + halves, dtype=dtype)
    constant = [leaf.detach() for leaf in leaves]
    torch.library.opcheck(quaternion_rotations_backward.operator, (*constant, gradient, True))


@pytest.mark.parametrize(
    "size, dtype, is_trained, centred",
    [
        (3, torch.float32, True, False),
        (8, torch.float32, False, False),
        (8, torch.float32, True, True),
        (16, torch.float64, True, True),
    ],
)
def test_opcheck_of_exponentials(implementation, size, dtype, is_trained, centred):
    positions, generators, *place, dtype = exponential_arguments(size, dtype, centred)
    torch.library.opcheck(exponentials._squarings.operator, (positions, generators.detach()))
    squarings = exponentials._squarings(positions, generators.detach())
    of_rays = squarings[Rays((3, 4), 1, centred).tokens().indices[:, 0]]
    saved = int(num_saved(of_rays).sum()) if is_trained else 0
    arguments = positions, generators.requires_grad_(is_trained), squarings, *place, saved, dtype, dtype
    torch.library.opcheck(exponentials._block_rotations.operator, arguments)
    results = [result.detach() for result in exponentials._block_rotations(*arguments)]
    gradients = [torch.randn(13, 2, size, size, dtype=dtype) for _ in range(3)]
    arguments = positions, generators.detach(), squarings, *place, results, gradients, False
    torch.library.opcheck(block_rotations_backward.operator, arguments)


@pytest.mark.parametrize("rays", [None, Rays((3, 4), 1), Rays((3, 4), 1, centred=True)])
@pytest.mark.parametrize("size, scale", [(3, 0.01), (8, 1.0), (16, 30.0)])
def test_exponentials_in_a_graph_are_those_outside(implementation, fresh_compiler, rays, size, scale):
    positions, generators, *_ = exponential_arguments(size, torch.float32, rays is not None and rays.centred)
    generators = (generators.detach() * scale).requires_grad_()
    weight = torch.randn(13, 2, size, size)

    def loss(function):
        rotations = function(positions, generators, torch.float32, rays)
        value = sum((rotation * weight).sum() for rotation in rotations)
        return (*rotations, *torch.autograd.grad(value, generators))

    compiled = torch.compile(exponentiate, backend="aot_eager", fullgraph=True)
    # The same code runs in both, but for the squares, which a graph computes again where there are many.
    for ours, expected in zip(loss(compiled), loss(exponentiate), strict=True):
        assert torch.equal(ours, expected)


@pytest.mark.parametrize("head_dim, size", [(16, 8), (18, 8), (13, 3)])
@pytest.mark.parametrize("is_trained", [True, False])
def test_blocks_in_a_graph_are_those_outside(implementation, fresh_compiler, head_dim, size, is_trained):
    """Channels beyond the last block are passed through; constants get no gradient."""
    query, key = (states(2, 3, 5, head_dim).requires_grad_() for _ in range(2))
    blocks = torch.linalg.qr(torch.randn(1, 3, 5, head_dim // size, size, size))[0].contiguous()
    leaves = [query, key, *([blocks.requires_grad_()] if is_trained else [])]
    compiled = torch.compile(rotate_query_key, backend="aot_eager", fullgraph=True)

    def gradients(function):
        rotated = function(query, key, blocks)
        return (*rotated, *torch.autograd.grad(sum(part.sin().sum() for part in rotated), leaves))

    for ours, expected in zip(gradients(compiled), gradients(rotate_query_key), strict=True):
        assert torch.equal(ours, expected)


# A compilation takes seconds.
FAST = [("liere", 8, {})]
SHARED = {"share_layers": True, "share_heads": True, "rotate_prefix": True}


@pytest.mark.parametrize(
    "encoding, block_size, fields",
    [
        *slow_except(FAST, [(*case, {}) for case in IMAGE_CASES]),
        pytest.param("liere", 8, SHARED, marks=pytest.mark.slow),
    ],
)
def test_a_training_step_of_a_graph_is_that_of_the_model(
    tiny, implementation, fresh_compiler, encoding, block_size, fields
):
    model = classifier(tiny, encoding, block_size, **fields)
    pixels, labels = torch.randn(2, 3, 16, 16), torch.tensor([0, 2])
    compiled = torch.compile(copy.deepcopy(model), backend="aot_eager", fullgraph=True)
    results = []
    for module in (model, compiled):
        outputs = module(pixels, labels=labels)
        outputs.loss.backward()
        results.append((outputs.logits, *(parameter.grad for parameter in module.parameters())))
    for ours, expected in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)


def classifier(tiny, encoding, block_size, **fields):
    config = tiny(position_encoding=encoding, block_size=block_size, initializer_range=0.2, **fields)
    return hf_liere.LieREViTForImageClassification(config)


def loss(model, parameters, pixels, label):
    logits = functional_call(model, parameters, (pixels.unsqueeze(0),)).logits
    return torch.nn.functional.cross_entropy(logits, label.unsqueeze(0))


@pytest.mark.parametrize("encoding, block_size", IMAGE_CASES)
def test_training_goes_on_after_inference_mode(tiny, implementation, encoding, block_size):
    """Nothing that inference mode made is kept for it."""
    model = classifier(tiny, encoding, block_size)
    pixels = torch.randn(2, 3, 12, 20)
    with torch.inference_mode():
        expected = model(pixels).logits
    logits = model(pixels).logits
    logits.square().sum().backward()
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)


# Warnings of torch: its attention has no rule for vmap.
@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("encoding, block_size", IMAGE_CASES)
def test_functions_transform_the_model(tiny, implementation, encoding, block_size):
    """Gradients of every sample, predictions of samples and of models of an ensemble, against one after the other."""
    model = classifier(tiny, encoding, block_size)
    pixels, labels = torch.randn(3, 3, 16, 16), torch.tensor([0, 2, 1])
    parameters = dict(model.named_parameters())
    found = vmap(grad(loss, argnums=1), in_dims=(None, None, 0, 0))(model, parameters, pixels, labels)
    for index in range(3):
        expected = torch.autograd.grad(loss(model, parameters, pixels[index], labels[index]), parameters.values())
        for name, gradient in zip(parameters, expected):
            # float32 sums of 17 tokens in another order; gradients are of the order of 0.1.
            torch.testing.assert_close(found[name][index], gradient, rtol=1e-4, atol=2e-5)
    with torch.no_grad():
        logits = vmap(lambda image: model.eval()(image.unsqueeze(0)).logits[0])(pixels)
        torch.testing.assert_close(logits, model(pixels).logits, rtol=0, atol=1e-5)
    ensemble = [model, classifier(tiny, encoding, block_size).eval()]
    stacked = stack_module_state(ensemble)
    logits = vmap(lambda *state: functional_call(model, state, (pixels,)).logits)(*stacked)
    torch.testing.assert_close(logits, torch.stack([one(pixels).logits for one in ensemble]), rtol=0, atol=1e-5)


@pytest.mark.parametrize("encoding, block_size", IMAGE_CASES)
def test_the_profiler_names_operators(tiny, implementation, encoding, block_size):
    model = classifier(tiny, encoding, block_size)
    pixels = torch.randn(1, 3, 16, 16)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        model(pixels).logits.sum().backward()
    names = {event.key for event in profile.key_averages()}
    expected = {"hf_liere::rotate"}
    if ENCODINGS[encoding].learned:
        expected |= {"hf_liere::rotate_backward"}
    if encoding == "liere":
        computed = "quaternion" if block_size in CLOSED_FORMS else "block"
        expected |= {f"hf_liere::{computed}_rotations", f"hf_liere::{computed}_rotations_backward"}
    assert expected <= names
