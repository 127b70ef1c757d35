"""The kernels for CPUs: when they are used and when not, and what they refuse."""

import os
import sys

import pytest
import reference
import torch
from fresh_process import run_warm
from rotating import rotate_query_key
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_liere.encoding.positions import TokenPositions
from hf_liere.fast.closed_forms import cos_sin
from hf_liere.fast.exponential_gradient import derivative_coefficients, product_indices
from hf_liere.fast.rotation_gradients import commuting_backward, rotate_backward
from hf_liere.fast.scaling_and_squaring import RayTokens, num_saved
from hf_liere.kernels import cpu as cpu_kernels
from hf_liere.kernels import cpu_library
from hf_liere.rotation.exponential import block_rotations, skew


needs_kernels = pytest.mark.usefixtures("compiled_kernels")


@needs_kernels
def test_the_number_of_threads_changes_no_bit():
    positions, results, threads = torch.rand(40, 2, dtype=torch.float64), [], torch.get_num_threads()
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            generators = skew(torch.linspace(-9, 9, 2 * 4 * 28).view(2, 4, 28), 8).requires_grad_()
            rotations = block_rotations(positions, generators)
            tangents = cpu_kernels.block_tangents(*saved(positions, generators.detach()))
            states = torch.linspace(-1, 1, 2 * 3 * 20 * 16).view(2, 20, 3, 16).transpose(1, 2)
            cos_sin = torch.linspace(-1, 1, 3 * 20 * 16).view(1, 3, 20, 8, 2)
            rotated = cpu_kernels.apply_rotation((states, states), cos_sin)
            by_angle = cpu_kernels.angle_gradients(rotated, rotated, cos_sin.shape[:4])
            frequencies, phases = states[0, :, 0, :8].reshape(3, 2, 4), cos_sin[:, :, :, :2, 0]
            commuting = cpu_kernels.commuting_backward(rotated, rotated, cos_sin, frequencies, phases)
            results.append((rotations, tangents, *rotated, by_angle, *commuting))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(one, several) for one, several in zip(*results))


def saved(positions, generators):
    """What the backward pass gets."""
    rays = RayTokens(torch.arange(len(positions)).unsqueeze(-1))
    squarings = torch.full((len(positions),), 6)
    squares = torch.empty(1, int(num_saved(squarings).sum()), *generators.shape[1:])
    rotations = cpu_kernels.block_rotations(positions, generators.unsqueeze(1), rays, squarings, squares, torch.float32)
    return rotations, tuple(rotation.flip(0) for rotation in rotations), rays, squarings, squares


@pytest.fixture(params=sorted(cpu_library.FOLDER.glob("_cpu_*.so")), ids=lambda path: path.name.partition(".")[0])
def every_library(request, monkeypatch):
    """Each library that was built and that this CPU runs, in turn."""
    capability = torch.backends.cpu.get_cpu_capability()
    if request.param.name.partition(".")[0] not in cpu_library.NAMES.get(capability, cpu_library.ON_ANY_CPU):
        pytest.skip(f"this CPU does not run it (PyTorch calls it {capability})")
    library = cpu_library._load(request.param)
    monkeypatch.setattr(cpu_kernels, "library", lambda: library)


def among_others(tensor):
    """The same values in memory in which all else is not a number."""
    wider = torch.full((*tensor.shape[:-1], tensor.shape[-1] + 3), float("nan"), dtype=tensor.dtype)
    wider[..., : tensor.shape[-1]] = tensor
    return wider[..., : tensor.shape[-1]]


def exact_rotations(positions, generators):
    return reference.exponential(torch.einsum("pa,akij->kpij", positions, generators))


def rotate_exactly(query, key, rotations):
    """(B, H, N, D) by (1, 1, N, blocks, b, b); channels beyond the blocks are passed through."""
    blocks, size = rotations.shape[3:5]
    for states in (query, key):
        parts = states[..., : blocks * size].unflatten(-1, (blocks, size))
        rotated = torch.einsum("nkij,bhnkj->bhnki", rotations[0, 0], parts).flatten(-2)
        yield torch.cat([rotated, states[..., blocks * size :]], dim=-1)


@needs_kernels
@pytest.mark.parametrize("size", [2, 3, 4, 5, 7, 8, 12, 16, 23, 32, 48, 64, 128])
def test_blocks_of_every_size(every_library, size):
    """Compiled sizes, and those that are padded to the next."""
    positions, blocks = torch.rand(5, 2, dtype=torch.float64), 1 + (size < 64)
    entries = torch.randn(2, blocks, size * (size - 1) // 2, dtype=torch.float64) / size**0.5
    states = [torch.randn(3, 2, 5, blocks * size + 1, dtype=torch.float64) for _ in range(4)]

    def step(rotations_of, apply, dtype):
        learned = entries.to(dtype).requires_grad_()
        rotations = rotations_of(positions, skew(learned, size)).transpose(0, 1)[
            None, None
        ]  # (1, 1, tokens, blocks, b, b)
        query, key, *weights = (among_others(x.to(dtype)).requires_grad_() for x in states)
        outputs = tuple(apply(query, key, rotations))
        loss = sum((output * weight).sum() for output, weight in zip(outputs, weights))
        return rotations, *outputs, *torch.autograd.grad(loss, (query, key, learned))

    expected = step(exact_rotations, rotate_exactly, torch.float64)
    found = step(block_rotations, rotate_query_key, torch.float32)
    for ours, exact in zip(found, expected, strict=True):
        # float32 rounding of sums of up to 128 terms, relative to the largest.
        torch.testing.assert_close(ours.double(), exact, rtol=0, atol=4e-6 * exact.abs().max().item())


@needs_kernels
@pytest.mark.parametrize("shape", [(1, 2, 5, 11, 2), (3, 2, 5, 11, 2), (1, 2, 5, 2, 8, 8), (3, 2, 5, 2, 11, 11)])
def test_bfloat16_is_rounded_once(every_library, shape):
    """What PyTorch rounds float32 results of the same numbers to; sums stay in float32."""
    rotation = torch.randn(shape)
    states = torch.randn(4, 3, 2, 5, 23).to(torch.bfloat16)
    states[0, 0, 0, 0, :4] = torch.tensor([float("nan"), float("inf"), 3e38, -1e-40])
    narrow = [among_others(x) for x in states]
    wide = [x.float() for x in states]
    for inverse in (False, True):
        found = cpu_kernels.apply_rotation(narrow[:2], rotation, inverse)
        for ours, exact in zip(found, cpu_kernels.apply_rotation(wide[:2], rotation, inverse), strict=True):
            torch.testing.assert_close(ours, exact.to(torch.bfloat16), rtol=0, atol=0, equal_nan=True)

    def sums(query, key, *gradients):
        if len(shape) == 5:
            return [cpu_kernels.angle_gradients(gradients, (query, key), shape[:4])]
        arguments = gradients, (query, key), shape[:4], shape[4]
        return [cpu_kernels.outer_products(*arguments), cpu_kernels.outer_products(*arguments, rotation)]

    for ours, exact in zip(sums(*narrow), sums(*wide), strict=True):
        torch.testing.assert_close(ours, exact, rtol=0, atol=0, equal_nan=True)


@needs_kernels
@pytest.mark.parametrize("size", [2, 3, 4, 8, 12, 23, 64])
@pytest.mark.parametrize("grid", [(4, 5), (5, 5)])
def test_mirrored_rays(every_library, grid, size):
    """Odd multiples where a size of the grid is even, all multiples where none is."""
    placed = TokenPositions.from_grid(grid, grid, "centred_grid", 1)
    positions, blocks = placed.coordinates, 1 + (size < 64)
    entries = torch.randn(2, blocks, size * (size - 1) // 2, dtype=torch.float64) * 6 / size**0.5
    weight = torch.randn(blocks, len(positions), size, size, dtype=torch.float64)

    def step(rotations_of, dtype):
        learned = entries.to(dtype).requires_grad_()
        rotations = rotations_of(positions, skew(learned, size))
        return rotations, *torch.autograd.grad((rotations * weight.to(dtype)).sum(), learned)

    found = step(lambda *given: block_rotations(*given, rays=placed.facts.rays()), torch.float32)
    for ours, exact in zip(found, step(exact_rotations, torch.float64), strict=True):
        # As in the test above.
        torch.testing.assert_close(ours.double(), exact, rtol=0, atol=4e-6 * exact.abs().max().item())


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 2, 5, 5, 4, 4), (1, 1, 5, 2, 8, 8), (5, 2, 5, 2, 8, 8), (1, 2, 5, 2, 11, 11)])
def test_gradients_of_blocks(every_library, shape, dtype):
    """Against the plain operations in float64."""
    rotation = torch.randn(shape)
    states = [torch.randn(5, 2, 5, 23).to(dtype) for _ in range(4)]
    expected = rotate_backward(*(x.double() for x in states), rotation.double(), None, None)[:3]
    found = rotate_backward(*map(among_others, states), rotation, None, None)[:3]
    # Rotated gradients are rounded to their type, and sums of at most 20 products of 8 terms to float32.
    roundings = torch.finfo(dtype).eps, torch.finfo(dtype).eps, torch.finfo(torch.float32).eps
    for ours, exact, rounding in zip(found, expected, roundings, strict=True):
        torch.testing.assert_close(ours.double(), exact, rtol=0, atol=8 * rounding * exact.abs().max().item())


@needs_kernels
@pytest.mark.parametrize("size, scale", [(2, 1.0), (4, 1.0), (6, 1e3), (8, 1.0), (8, 0.0), (16, 30.0), (24, 1.0)])
@pytest.mark.parametrize("shared", [False, True])
def test_gradients_of_commuting_generators(every_library, size, scale, shared):
    """Against the plain operations in float64; also of equal frequencies, and of more tokens than are added at once."""
    heads, tokens, blocks = 3, 19, 2
    planes, width = size // 2, blocks * size
    shape = 1, 1 if shared else heads, tokens
    frequencies = scale * torch.randn(shape[1], blocks, planes).double()
    frequencies[0, 0] = frequencies[0, 0, 0]
    generators = torch.zeros(shape[1], blocks, size, size, dtype=torch.float64)
    even = torch.arange(0, size, 2)
    generators[..., even + 1, even], generators[..., even, even + 1] = frequencies, -frequencies
    # Numbers with few digits, so that their float32 products with the phases are exact.
    generators, phases = (x.bfloat16().double() for x in (generators, torch.randn(*shape, blocks)))
    angles = (phases.unsqueeze(-1) * generators[..., even + 1, even].unsqueeze(1)).flatten(-2)
    cos_sin = torch.stack([angles.cos(), angles.sin()], dim=-1)
    pairs = [[torch.randn(4, heads, tokens, width + 1).float() for _ in "qk"] for _ in range(2)]
    expected = commuting_backward(*([x.double() for x in pair] for pair in pairs), cos_sin, generators, phases)
    pairs = [[among_others(x) for x in pair] for pair in pairs]
    found = commuting_backward(*pairs, cos_sin.float(), generators.float(), phases.float())
    for ours, exact in zip(found, expected, strict=True):
        # float32 rounding of sums of 8 samples and 57 tokens and heads, relative to the largest.
        torch.testing.assert_close(ours.double(), exact, rtol=0, atol=2e-6 * exact.abs().max().item())


@pytest.mark.parametrize("scale", [1.0, 1e6])
def test_cos_and_sin_of_many_revolutions(scale):
    angles = scale * torch.randn(5, 3, 400, dtype=torch.float64).transpose(0, 1)
    exact = torch.stack([angles.cos(), angles.sin()], dim=-1)
    # float32 rounding; whole revolutions of 1e6 are off by 1e-10.
    torch.testing.assert_close(cos_sin(angles).double(), exact, rtol=0, atol=4e-7)


@needs_kernels
@pytest.mark.parametrize("size", [8, 12, 64, 128])
def test_exponentials_in_float32(every_library, size):
    positions, squarings = torch.rand(7, 2), 4
    generators = skew(torch.randn(2, 1, 2, size * (size - 1) // 2) / size**0.5, size)
    rays = RayTokens(torch.arange(7).unsqueeze(-1))
    counts = torch.full((7,), squarings)
    (found,) = cpu_kernels.block_rotations(positions, generators, rays, counts, None, torch.float32)
    exact = exact_rotations(positions.double(), generators[:, 0].double()).transpose(0, 1)
    # The polynomial's terms of up to 7.4 cancel, products add `size` terms, and every squaring doubles the error.
    tolerance = (16 + 2 * size) * 2**squarings * torch.finfo(torch.float32).eps
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=tolerance)


@needs_kernels
def test_generators_of_lower_precision():
    """As in a model of bfloat16, of whose gradients the kernels take this part."""
    generators = skew(torch.randn(2, 1, 3, 28), 8)
    coefficients = derivative_coefficients(1.6, torch.float32)
    degrees = range(1, len(coefficients) + 1)
    indices = [product_indices(2, degree) for degree in degrees[:-1]]
    # Of two axes, there are n + 1 monomials of degree n.
    moments = torch.randn(1, sum(degree + 1 for degree in degrees), 3 * 28)
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        tensors = generators.to(torch.bfloat16).to(dtype), moments.to(torch.bfloat16).to(dtype)
        found[dtype] = cpu_kernels.moments_gradient(*tensors, coefficients, indices)
    assert torch.equal(found[torch.bfloat16], found[torch.float32].to(torch.bfloat16))


@needs_kernels
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_reaches_the_loss(value):
    states = torch.zeros(1, 1, 2, 8)
    states[0, 0, 1, 3] = value
    for rotation in (torch.eye(8).expand(1, 1, 2, 1, 8, 8), torch.tensor([1.0, 0.0]).expand(1, 1, 2, 4, 2)):
        query, key = cpu_kernels.apply_rotation((states, states), rotation)
        assert query[0, 0, 0].isfinite().all() and not query[0, 0, 1].isfinite().all()


def test_tensors_without_numbers_reach_no_kernel():
    """Those of tools that estimate memory."""
    with FakeTensorMode():
        query, rotation = torch.zeros(1, 1, 4, 8), torch.zeros(1, 1, 4, 1, 8, 8)
        assert rotate_query_key(query, query, rotation)[0].shape == query.shape


@needs_kernels
@pytest.mark.parametrize("shape", [(1, 1, 2, 4, 2), (1, 1, 2, 1, 8, 8)])
def test_traced_graphs_hold_plain_operations(shape):
    """They run where there are no kernels."""
    rotation, (first, second) = torch.randn(shape), torch.randn(2, 1, 1, 2, 8)
    traced = torch.jit.trace(lambda states: rotate_query_key(states, states, rotation), first)
    # float32 sums in another order.
    torch.testing.assert_close(traced(second), rotate_query_key(second, second, rotation), rtol=1e-4, atol=1e-5)
    assert "hf_liere::" not in str(traced.inlined_graph)


@needs_kernels
@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16])
def test_defaults_of_the_process_do_not_matter(default):
    """Memory that is shorter than the kernels take it to be would be overwritten beyond its end."""
    positions, generators = torch.rand(9, 2, dtype=torch.float64), skew(torch.rand(2, 3, 28), 8).requires_grad_()
    query, key, weight = torch.randn(3, 2, 3, 9, 8).unbind(0)

    def step():
        rotations = block_rotations(positions, generators)[:, :, None].unsqueeze(0)
        outputs = rotate_query_key(query, key, rotations)
        return *outputs, *torch.autograd.grad(((outputs[0] + outputs[1]) * weight).sum(), generators)

    expected = step()
    try:
        torch.set_default_dtype(default)
        with torch.device("meta"):
            found = step()
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(one.dtype == torch.float32 and torch.equal(one, other) for one, other in zip(found, expected))


@needs_kernels
@pytest.mark.parametrize(
    "rays, mirror, squarings, message",
    [
        ([[0, 4]], -1, [6], r"from 0 to 3, .* they contain \[0, 4\]"),
        ([[0, -2]], -1, [6], r"they contain \[-2, 0\]"),
        ([[-1, 1]], -1, [6], r"they contain \[-1, 1\]"),
        ([[]], -1, [6], r"shape \(1, 0\)"),
        ([0, 1], -1, [6, 6], r"they are \(2,\) and \(2,\)"),
        ([[0], [1]], -1, [6], r"they are \(2, 1\) and \(1,\)"),
        ([[0], [1]], -1, [6, -1], r"negative; they are \[6, -1\]"),
        ([[2, 0]], 4, [6], r"mirror=4 must lead to tokens from 0 to 3; it leads to \[2, 4\]"),
        ([[2, 3]], 2, [6], r"mirror=2 .* it leads to \[0, -1\]"),
    ],
)
def test_rays_that_lead_elsewhere_are_refused(rays, mirror, squarings, message):
    """Kernels would read and write beyond the rotations."""
    generators = skew(torch.randn(2, 1, 3, 28), 8)
    rays, squarings = RayTokens(torch.tensor(rays, dtype=torch.long), mirror=mirror), torch.tensor(squarings)
    with pytest.raises(ValueError, match=message):
        cpu_kernels.block_rotations(torch.rand(4, 2).double(), generators, rays, squarings, None, torch.float32)
    rotations, gradients, _, _, squares = saved(torch.rand(4, 2).double(), generators[:, 0])
    with pytest.raises(ValueError, match=message):
        cpu_kernels.block_tangents(rotations, gradients, rays, squarings, squares)


TOO_LITTLE_MEMORY = """
import resource, torch
from hf_liere.kernels import cpu as cpu_kernels
from hf_liere.kernels import cpu_library
states = torch.ones(1, 1, 1, 8).expand(1 << 27, -1, -1, -1)
cpu_kernels.refusal(states, torch.float32, 8)
with open("/proc/self/statm") as file:
    used = int(file.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 28), -1))
for threads in (1, 2):
    torch.set_num_threads(threads)
    try:
        cpu_kernels.outer_products((states, states), (states, states), torch.Size((1, 1, 1, 1)), 8)
    except MemoryError as error:
        print(error)
"""


@needs_kernels
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits memory as Linux does")
def test_too_little_memory_does_not_end_the_process():
    lines = run_warm("-c", TOO_LITTLE_MEMORY).stdout.splitlines()
    assert len(lines) == 2 and all("Too little memory for hf_liere_outer_products" in line for line in lines)


FORKED = """
import os
import signal
import torch
from hf_liere import LieRotaryEmbedding

query, key, positions = torch.randn(3, 2, 2, 16, 8), torch.randn(3, 2, 2, 16, 8), torch.randn(16, 2)
layers = [LieRotaryEmbedding(2, 8, 2, "liere", 4), LieRotaryEmbedding(2, 8, 2, "rope_mixed")]


class Rotated(torch.utils.data.Dataset):
    def __len__(self):
        return len(query)

    @torch.no_grad()
    def __getitem__(self, index):
        return torch.stack([x for layer in layers for x in layer(query[index], key[index], positions)])


torch.set_num_threads(2)
expected = torch.stack(list(Rotated()))
loader = torch.utils.data.DataLoader(Rotated(), num_workers=1, multiprocessing_context="fork", timeout=20)
print(torch.equal(torch.cat(list(loader)), expected))
child = os.fork()
if not child:
    # A process that waits for threads that do not exist ends here.
    signal.alarm(20)
    torch.set_num_threads(1)
    os._exit(0 if torch.equal(torch.stack(list(Rotated())), expected) else 1)
print(os.waitpid(child, 0)[1])
"""


@needs_kernels
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_forked_processes_with_one_thread_rotate_as_their_parent_did():
    """With more threads they would wait for those of the parent, which a fork does not copy: torch's sin, too."""
    assert run_warm("-c", FORKED).stdout.split() == ["True", "0"]
