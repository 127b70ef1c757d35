"""
The kernels against the plain rotation in float64: those for CPUs, and Triton's on a GPU where there is one, else under
the interpreter.
"""

import inspect
from types import SimpleNamespace

import pytest
import torch
from fresh_process import run_python
from rotating import rotate, rotate_query_key
from triton_loading import DEVICE, load_kernels

from hf_liere.fast import dispatch
from hf_liere.fast.dispatch import find_backend
from hf_liere.fast.rotating import _rotate
from hf_liere.kernels import cpu as cpu_kernels
from hf_liere.kernels import cuda as triton_kernels
from hf_liere.rotation.rotation import PlaneRotation


PLANES = [(1, 2, 6, 12, 2), (1, 1, 6, 12, 2), (5, 2, 6, 10, 2)]
BLOCKS = [(1, 2, 6, 3, 8, 8), (1, 1, 6, 4, 5, 5), (5, 1, 6, 2, 12, 12), (1, 2, 6, 1, 24, 24)]
# Of a rotated unit vector, and of sums of ten of them in the gradients of rotations.
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}


@pytest.fixture(scope="module", params=["triton", "cpu"])
def kernels(request):
    """The kernels that rotations go through, with the device they are for."""
    if request.param == "cpu":
        request.getfixturevalue("compiled_kernels")
        yield SimpleNamespace(device="cpu", types=cpu_kernels.TYPES, module=None, **functions(cpu_kernels))
        return
    pytest.importorskip("triton", reason="Triton is not installed (PyTorch brings it on Linux)")
    module = load_kernels()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(dispatch._BACKENDS, DEVICE, module)
        yield SimpleNamespace(device=DEVICE, types=module.TYPES, module=module, **functions(module))


def functions(module):
    """The public functions of a module, by name."""
    return {name: value for name, value in vars(module).items() if inspect.isfunction(value) and name[0] != "_"}


def random_rotation(shape):
    if len(shape) == 5:
        angles = 10 * torch.randn(shape[:-1], dtype=torch.float64)
        return torch.stack([angles.cos(), angles.sin()], dim=-1)
    matrices = torch.randn(shape, dtype=torch.float64)
    return torch.linalg.matrix_exp(matrices - matrices.mT)


def inputs(kernels, shape, dtype):
    """Query, key and rotation as attention has them: tokens before heads in memory, rotations in float32."""
    states = [torch.randn(5, 6, 2, 24).transpose(1, 2) for _ in "qk"]
    tensors = [*(state.to(dtype) for state in states), random_rotation(shape).float()]
    return [tensor.to(kernels.device).requires_grad_() for tensor in tensors]


@pytest.mark.parametrize("shape", [PLANES[0], pytest.param(BLOCKS[0], marks=pytest.mark.slow)])
def test_opcheck(kernels, shape):
    """What PyTorch asks of an operator."""
    arguments = inputs(kernels, shape, torch.float32)
    torch.library.opcheck(_rotate.operator, (*arguments, None, None, False))


def gradients(outputs, weights, leaves):
    loss = sum((output * weight).sum() for output, weight in zip(outputs, weights))
    return torch.autograd.grad(loss, leaves)


def along_angles(gradient, rotation):
    """Only the part along the angle acts: any other leaves the circle of cos and sin."""
    cos, sin = rotation.detach().unbind(-1)
    return gradient[..., 1] * cos - gradient[..., 0] * sin


@pytest.mark.parametrize(
    "shape, dtype",
    [(shape, torch.float32) for shape in PLANES + BLOCKS]
    + [(PLANES[0], torch.bfloat16), (BLOCKS[1], torch.float16)]
    + [
        pytest.param(*case, marks=pytest.mark.slow)
        for case in ((PLANES[0], torch.float16), (BLOCKS[1], torch.bfloat16))
    ],
)
def test_kernels_are_the_plain_rotation(kernels, monkeypatch, shape, dtype):
    if kernels.module and kernels.device == "cpu" and dtype == torch.bfloat16:
        if len(shape) == 6:
            pytest.skip("Triton's interpreter multiplies the bit patterns of bfloat16 matrices; needs a GPU")
        # It computes planes well, which are refused together with blocks of 2.
        monkeypatch.setattr(kernels.module.self_check, "failure", lambda *case: None)
        monkeypatch.setattr(dispatch, "_accepted", set())
    query, key, rotation = inputs(kernels, shape, dtype)
    used = find_backend("apply_rotation", query, shape[-1])
    assert used is None if dtype not in kernels.types else used.apply_rotation is kernels.apply_rotation
    weights = [torch.randn(5, 2, 6, 24, device=kernels.device).to(dtype) for _ in "qk"]
    found = rotate_query_key(query, key, rotation)
    assert all(states.dtype == dtype and (not used or states.stride() == query.stride()) for states in found)
    exact = [tensor.detach().double().requires_grad_() for tensor in (query, key, rotation)]
    expected = [rotate(states, exact[2]) for states in exact[:2]]
    close = {"rtol": TOLERANCES[dtype], "atol": TOLERANCES[dtype]}
    for states, reference in zip(found, expected):
        torch.testing.assert_close(states.double(), reference, **close)

    pairs = list(
        zip(
            gradients(found, weights, (query, key, rotation)),
            gradients(expected, [weight.double() for weight in weights], exact),
        )
    )
    for gradient, reference in pairs[:2]:
        torch.testing.assert_close(gradient.double(), reference, **close)
    gradient, reference = pairs[2]
    if len(shape) == 5:
        gradient, reference = along_angles(gradient, rotation), along_angles(reference, exact[2])
    close["atol"] *= 10
    torch.testing.assert_close(gradient.double(), reference, **close)


def test_gradients_of_commuting_generators(kernels, monkeypatch):
    """The outer products of the kernels and of the plain path make the same gradient."""
    query, key, cos_sin = inputs(kernels, PLANES[0], torch.float32)
    matrices = torch.randn(2, 3, 8, 8, device=kernels.device)
    generators = (matrices - matrices.mT).requires_grad_()
    phases = torch.rand(1, 2, 6, 3, device=kernels.device)
    rotation = PlaneRotation(cos_sin, None, generators, phases)
    weights = [torch.randn(5, 2, 6, 24, device=kernels.device) for _ in "qk"]
    found = gradients(rotate_query_key(query, key, rotation), weights, [generators, query, key, cos_sin])
    monkeypatch.setattr(dispatch, "_BACKENDS", {})
    expected = gradients(rotate_query_key(query, key, rotation), weights, [generators, query, key, cos_sin])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("shape", [PLANES[0], BLOCKS[0]])
def test_channels_without_a_rotation_keep_their_bits(kernels, shape):
    query, key, rotation = inputs(kernels, (*shape[:3], shape[3] - 1, *shape[4:]), kernels.types[-1])
    width = rotation.shape[3] * rotation.shape[-1]
    for states, rotated in zip((query, key), rotate_query_key(query, key, rotation)):
        assert torch.equal(rotated[..., width:], states[..., width:])
        assert not torch.equal(rotated[..., :width], states[..., :width])


@pytest.mark.parametrize("shape", [PLANES[0], BLOCKS[0]])
def test_identity_keeps_every_bit(kernels, shape):
    """So that a model that starts without rotations computes what one that has none does."""
    query, key, rotation = inputs(kernels, shape, torch.float32)
    identity = (
        torch.eye(rotation.shape[-1], device=kernels.device)
        if len(shape) == 6
        else torch.tensor([1.0, 0.0]).to(kernels.device)
    )
    rotated = rotate_query_key(query, key, identity.expand(shape))
    assert torch.equal(rotated[0], query) and torch.equal(rotated[1], key)


@pytest.mark.parametrize("shape", [PLANES[0], BLOCKS[0]])
def test_inverse_and_strides(kernels, shape):
    """Back and forth is nothing, whatever the layout of the states in memory."""
    query, key, rotation = (tensor.detach() for tensor in inputs(kernels, shape, torch.float32))
    layouts = [query.contiguous(), key.transpose(2, 3).contiguous().transpose(2, 3)]
    rotated = kernels.apply_rotation(layouts, rotation)
    back = kernels.apply_rotation(rotated, rotation, inverse=True)
    for states, expected in zip(back, (query, key)):
        torch.testing.assert_close(states, expected, rtol=0, atol=5e-6)


LAYOUTS = {
    "sliding windows": lambda: torch.randn(3, 2, 29).unfold(-1, 24, 1),
    "windows two apart": lambda: torch.randn(3, 2, 34).unfold(-1, 24, 2),
    "windows over heads": lambda: torch.randn(3, 30).unfold(-1, 29, 1).unfold(-1, 24, 1),
    "one sample for all": lambda: torch.randn(1, 2, 6, 24).expand(3, -1, -1, -1),
    "one head for all": lambda: torch.randn(3, 1, 6, 24).expand(-1, 2, -1, -1),
    "one token for all": lambda: torch.randn(3, 2, 1, 24).expand(-1, -1, 6, -1),
    "one number for all": lambda: torch.randn(1, 1, 1, 1).expand(3, 2, 6, 24),
    "a part, off by one": lambda: torch.randn(3, 6, 99)[..., 1:97].unflatten(-1, (2, 48)).transpose(1, 2)[..., 7:31],
    "every other channel": lambda: torch.randn(3, 2, 6, 48)[..., ::2],
    "a conjugate": lambda: torch.randn(3, 2, 6, 24, dtype=torch.complex64).conj().imag,
    "a negative view": lambda: torch._neg_view(torch.randn(3, 2, 6, 24)),
    **{
        f"in the order {order}": lambda order=order: torch.randn([(3, 2, 6, 24)[i] for i in order]).permute(
            [order.index(i) for i in range(4)]
        )
        for order in [(0, 2, 1, 3), (2, 1, 0, 3), (1, 0, 2, 3), (0, 1, 3, 2), (3, 2, 1, 0)]
    },
}


@pytest.mark.parametrize("shape", [(1, 2, 6, 12, 2), pytest.param((1, 1, 6, 3, 8, 8), marks=pytest.mark.slow)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_in_memory(kernels, layout, shape):
    """Of queries, keys and the gradients of rotated ones: results are dense, and those of float64."""
    query, key, *weights = (LAYOUTS[layout]().to(kernels.device) for _ in range(4))
    rotation = random_rotation(shape).float().to(kernels.device).requires_grad_()
    for states in kernels.apply_rotation((query, key), rotation.detach()):
        assert sorted(states.stride())[0] == states.stride(-1) == 1 and len(set(states.stride())) == 4
    leaves = [query.detach().requires_grad_(), key.detach().requires_grad_(), rotation]
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    found = rotate_query_key(*leaves)
    expected = [rotate(states, exact[2]) for states in exact[:2]]
    found = [*found, *torch.autograd.grad(found, leaves, weights)]
    expected = [*expected, *torch.autograd.grad(expected, exact, [weight.double() for weight in weights])]
    if len(shape) == 5:
        found[4], expected[4] = along_angles(found[4], rotation), along_angles(expected[4], exact[2])
    for result, reference in zip(found, expected):
        # float32 sums of up to 24 products of numbers up to four or so.
        torch.testing.assert_close(result.double(), reference, rtol=1e-5, atol=5e-5)


def test_gradients_are_summed_over_many_samples(kernels, monkeypatch):
    """With Triton, divided among several programs, the last of them with fewer."""
    if kernels.module:
        monkeypatch.setattr(kernels.module, "PROGRAMS", 40)
    for shape in (PLANES[1], BLOCKS[1]):
        query, key, rotation = inputs(kernels, shape, torch.float32)
        weights = [torch.randn(5, 2, 6, 24, device=kernels.device) for _ in "qk"]
        found = gradients(rotate_query_key(query, key, rotation), weights, [rotation])[0]
        exact = rotation.detach().double().requires_grad_()
        outputs = [rotate(states.detach().double(), exact) for states in (query, key)]
        expected = gradients(outputs, [weight.double() for weight in weights], [exact])[0]
        if len(shape) == 5:
            found, expected = along_angles(found, rotation), along_angles(expected, exact)
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=2e-5)


def test_types_and_devices_that_the_kernels_leave_to_plain_operations(kernels):
    others = {torch.float64, torch.bfloat16, torch.float16} - set(kernels.types)
    for states in (torch.zeros(1, 1, 1, 8, dtype=dtype, device=kernels.device) for dtype in others):
        assert find_backend("apply_rotation", states, 8) is None
    assert find_backend("apply_rotation", torch.zeros(1, 1, 1, 8, dtype=torch.float64, device="meta"), 8) is None
    assert triton_kernels.refusal(torch.zeros(1, 1, 1, 512, device=kernels.device), torch.float32, 8)
    assert triton_kernels.refusal(torch.zeros(1, 1, 1, 8), torch.float32, 8)


@pytest.mark.slow
def test_module_loads_without_triton():
    code = (
        "import sys, torch; sys.modules['triton'] = None; from hf_liere.kernels import cuda; "
        "print(cuda.refusal(torch.zeros(1, 1, 1, 8), torch.float32, 8))"
    )
    assert run_python("-c", code).stdout.startswith("Triton cannot be imported (ModuleNotFoundError: ")


WIDEST = triton_kernels.MAX_HEAD_DIM
STATES = (("*bf16", WIDEST, 2), ("*fp32", 64, 1), ("*bf16", 64, 1), ("*fp32", WIDEST, 2))
COMPILED = [f"compile_for_cuda{(capability, *states)}" for capability in (90, 80) for states in STATES]
COMPILED += [f"compile_exponentials{row}" for row in ((90, 8, 8), (80, 5, 16), (89, 16, 16), (90, 5, 16))]
# In one process, whose start takes seconds.
FAST_COMPILED = (COMPILED[0], COMPILED[8])


@pytest.mark.parametrize(
    "calls",
    [FAST_COMPILED, *(pytest.param([row], marks=pytest.mark.slow) for row in COMPILED if row not in FAST_COMPILED)],
    ids=" ".join,
)
def test_kernels_compile_for_cuda(calls):
    """For one state and for two, down to machine code and within the shared memory of a block; this needs no GPU."""
    pytest.importorskip("triton", reason="Triton is not installed (PyTorch brings it on Linux)")
    # Where a kernel was interpreted, older releases of Triton leave the interpreter's functions to the compiler.
    run_python("-c", "\n".join(["import cuda_compilation", *(f"cuda_compilation.{call}" for call in calls)]))


STEP = """
import sys, torch, hf_liere
from hf_liere.fast.dispatch import (find_backend)
torch.manual_seed(0)
results = []
for encoding, size in (("rope_mixed", 2), ("comrope_ld", 4), ("liere", 8), ("liere", 5)):
    config = hf_liere.LieREViTConfig(hidden_size=48, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64,
        image_size=8, patch_size=4, num_labels=3, position_encoding=encoding, block_size=size)
    model = hf_liere.LieREViTForImageClassification(config).to(sys.argv[2])
    logits = model(torch.randn(3, 3, 8, 8, device=sys.argv[2])).logits
    logits.square().sum().backward()
    results += [logits.detach().cpu(), *(parameter.grad.cpu() for parameter in model.parameters())]
backend = find_backend("apply_rotation", logits[None, None], 8)
torch.save((backend and backend.__name__, results), sys.argv[1])
"""


@pytest.mark.slow
def test_training_step_is_that_of_plain_operations(tmp_path):
    """Whole models in float32, each in a process of its own, with kernels and (on the CPU) without."""
    modules = {None: "cpu"}
    if cpu_kernels.refusal(torch.zeros(1), torch.float32, 2) is None:
        modules["hf_liere.kernels.cpu"] = "cpu"
    if triton_kernels.triton is not None:
        modules["hf_liere.kernels.cuda"] = DEVICE
    found = {}
    for module, device in modules.items():
        variables = {
            "HF_LIERE_CPU_KERNELS": str(int(module == "hf_liere.kernels.cpu")),
            "TRITON_INTERPRET": str(int(module == "hf_liere.kernels.cuda" and device == "cpu")),
        }
        path = tmp_path / "step.pt"
        run_python("-c", STEP, path, device, variables=variables)
        used, found[module] = torch.load(path)
        assert used == module
    for module in modules:
        for fast, plain in zip(found[module], found[None]):
            # Float32 sums in another order, relative to the largest entry of each tensor.
            torch.testing.assert_close(fast, plain, rtol=0, atol=1e-5 * max(plain.abs().max().item(), 1e-3))
