"""The Triton kernels against the plain rotation in float64: on a GPU where there is one, else under the interpreter."""

import importlib.util
import inspect
import os
import subprocess
import sys

import pytest
import torch
from transformers.dynamic_module_utils import get_imports

import hf_liere
from hf_liere.rotation import EigenRotation, rotate, rotate_query_key


pytest.importorskip("triton", reason="Triton is not installed (PyTorch brings it on Linux)")

PLANES = [(1, 2, 6, 12, 2), (1, 1, 6, 12, 2), (5, 2, 6, 10, 2)]
BLOCKS = [(1, 2, 6, 3, 8, 8), (1, 1, 6, 4, 5, 5), (5, 1, 6, 2, 12, 12), (1, 2, 6, 1, 24, 24)]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Of a rotated unit vector, and of sums of ten of them in the gradients of rotations.
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}


@pytest.fixture(scope="module")
def kernels():
    """The module, loaded under the interpreter where there is no GPU: Triton decides when it sees a kernel's source."""
    if DEVICE == "cuda":
        from hf_liere import triton_kernels as kernels

        yield kernels
        return
    path = os.path.join(os.path.dirname(hf_liere.__file__), "triton_kernels.py")
    specification = importlib.util.spec_from_file_location("interpreted_kernels", path)
    module = importlib.util.module_from_spec(specification)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        specification.loader.exec_module(module)
        for name in ("is_available", "apply_rotation", "angle_gradients", "outer_products"):
            patch.setattr(f"hf_liere.rotation.{name}", getattr(module, name))
        yield module


def random_rotation(shape):
    if len(shape) == 5:
        angles = 10 * torch.randn(shape[:-1], dtype=torch.float64)
        return torch.stack([angles.cos(), angles.sin()], dim=-1)
    matrices = torch.randn(shape, dtype=torch.float64)
    return torch.linalg.matrix_exp(matrices - matrices.mT)


def inputs(shape, dtype):
    """Query, key and rotation as attention has them: tokens before heads in memory, rotations in float32."""
    states = [torch.randn(5, 6, 2, 24).transpose(1, 2) for _ in "qk"]
    tensors = [*(state.to(dtype) for state in states), random_rotation(shape).float()]
    return [tensor.to(DEVICE).requires_grad_() for tensor in tensors]


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
    + [(shape, dtype) for shape in (PLANES[0], BLOCKS[1]) for dtype in (torch.bfloat16, torch.float16)],
)
def test_kernels_are_the_plain_rotation(kernels, shape, dtype):
    if DEVICE == "cpu" and dtype == torch.bfloat16 and len(shape) == 6:
        pytest.skip("Triton's interpreter multiplies the bit patterns of bfloat16 matrices; needs a GPU")
    query, key, rotation = inputs(shape, dtype)
    assert kernels.is_available(query)
    weights = [torch.randn(5, 2, 6, 24, device=DEVICE).to(dtype) for _ in "qk"]
    found = rotate_query_key(query, key, rotation)
    assert all(states.dtype == dtype and states.stride() == query.stride() for states in found)
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
    query, key, planes = inputs(PLANES[0], torch.float32)
    matrices = torch.randn(2, 3, 8, 8, device=DEVICE)
    generators = (matrices - matrices.mT).requires_grad_()
    scalars = torch.rand(1, 2, 6, 3, device=DEVICE)
    rotation = EigenRotation(planes, None, generators, scalars)
    weights = [torch.randn(5, 2, 6, 24, device=DEVICE) for _ in "qk"]
    found = gradients(rotate_query_key(query, key, rotation), weights, [generators, query, key, planes])
    monkeypatch.setattr("hf_liere.rotation.is_available", lambda states: False)
    expected = gradients(rotate_query_key(query, key, rotation), weights, [generators, query, key, planes])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("shape", [PLANES[0], BLOCKS[0]])
def test_channels_without_a_rotation_keep_their_bits(kernels, shape):
    query, key, rotation = inputs((*shape[:3], shape[3] - 1, *shape[4:]), torch.float16)
    width = rotation.shape[3] * rotation.shape[-1]
    for states, rotated in zip((query, key), rotate_query_key(query, key, rotation)):
        assert torch.equal(rotated[..., width:], states[..., width:])
        assert not torch.equal(rotated[..., :width], states[..., :width])


@pytest.mark.parametrize("shape", [PLANES[0], BLOCKS[0]])
def test_identity_keeps_every_bit(kernels, shape):
    """So that a model that starts without rotations computes what one that has none does."""
    query, key, rotation = inputs(shape, torch.float32)
    identity = torch.eye(rotation.shape[-1], device=DEVICE) if len(shape) == 6 else torch.tensor([1.0, 0.0]).to(DEVICE)
    rotated = rotate_query_key(query, key, identity.expand(shape))
    assert torch.equal(rotated[0], query) and torch.equal(rotated[1], key)


@pytest.mark.parametrize("shape", [PLANES[0], BLOCKS[0]])
def test_inverse_and_strides(kernels, shape):
    """Back and forth is nothing, whatever the layout of the states in memory."""
    query, key, rotation = (tensor.detach() for tensor in inputs(shape, torch.float32))
    layouts = [query.contiguous(), key.transpose(2, 3).contiguous().transpose(2, 3)]
    turned = kernels.apply_rotation(*layouts, rotation)
    back = kernels.apply_rotation(*turned, rotation, inverse=True)
    for states, expected in zip(back, (query, key)):
        torch.testing.assert_close(states, expected, rtol=0, atol=5e-6)


def test_gradients_are_summed_over_many_samples(kernels, monkeypatch):
    """Samples divided among several programs, the last of them with fewer."""
    monkeypatch.setattr(kernels, "PROGRAMS", 40)
    for shape in (PLANES[1], BLOCKS[1]):
        query, key, rotation = inputs(shape, torch.float32)
        weights = [torch.randn(5, 2, 6, 24, device=DEVICE) for _ in "qk"]
        found = gradients(rotate_query_key(query, key, rotation), weights, [rotation])[0]
        exact = rotation.detach().double().requires_grad_()
        outputs = [rotate(states.detach().double(), exact) for states in (query, key)]
        expected = gradients(outputs, [weight.double() for weight in weights], [exact])[0]
        if len(shape) == 5:
            found, expected = along_angles(found, rotation), along_angles(expected, exact)
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=2e-5)


def test_types_and_devices_that_the_kernels_leave_to_plain_operations(kernels):
    from hf_liere import triton_kernels as compiled

    assert not kernels.is_available(torch.zeros(1, 1, 1, 8, dtype=torch.float64, device=DEVICE))
    assert not kernels.is_available(torch.zeros(1, 1, 1, 512, device=DEVICE))
    assert not compiled.is_available(torch.zeros(1, 1, 1, 8))


def test_remote_code_does_not_ask_for_triton():
    """A checkpoint's code is refused where a library is missing that it imports outside of `try`."""
    from hf_liere import triton_kernels as kernels

    assert get_imports(kernels.__file__) == ["torch"]


def test_module_loads_without_triton():
    code = (
        "import sys, torch; sys.modules['triton'] = None; sys.path.insert(0, sys.argv[1]); import triton_kernels as kernels; "
        "print(kernels.is_available(torch.zeros(1, 1, 1, 8)))"
    )
    folder = os.path.dirname(hf_liere.__file__)
    output = subprocess.run([sys.executable, "-c", code, folder], capture_output=True, text=True)
    assert output.returncode == 0, output.stderr
    assert output.stdout.strip() == "False"


POINTERS = ("query", "key", "query_out", "key_out", "query_gradient", "key_gradient")


@pytest.mark.parametrize("capability", [pytest.param(80, marks=pytest.mark.slow), 90])
@pytest.mark.parametrize("pointer", ["*bf16", "*fp32"])
def test_kernels_compile_for_cuda(capability, pointer):
    """Down to machine code, which needs no GPU, and within the shared memory that a block has there."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from hf_liere import triton_kernels as kernels

    tiles = {"BLOCK_DIM": 64, "INVERSE": True, "BLOCK_TOKENS": 16, "BLOCK_SIZE": 8}
    tiles["BLOCK_BATCH"] = kernels._block_batch(256, torch.bfloat16 if pointer == "*bf16" else torch.float32)
    for name in ("_turn_kernel", "_angle_gradient_kernel", "_multiply_kernel", "_outer_kernel"):
        kernel = getattr(kernels, name)
        signature, constants = {}, {}
        for argument in inspect.signature(kernel.fn).parameters:
            if argument.isupper():
                signature[argument], constants[argument] = "constexpr", tiles[argument]
            elif argument in POINTERS:
                signature[argument] = pointer
            elif argument in ("rotation", "out") or (argument == "planes" and name == "_turn_kernel"):
                signature[argument] = "*fp32"
            else:
                signature[argument] = "i32"
        source = ASTSource(kernel, signature, constexprs=constants)
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 4})
        assert compiled.asm["cubin"] and compiled.metadata.shared <= 99 * 1024


STEP = """
import sys, torch, hf_liere
from hf_liere.triton_kernels import is_available
torch.manual_seed(0)
results = []
for encoding, size in (("rope_mixed", 2), ("comrope_ld", 4), ("liere", 8), ("liere", 5)):
    config = hf_liere.LieREViTConfig(hidden_size=48, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64,
        image_size=8, patch_size=4, num_labels=3, position_encoding=encoding, block_size=size)
    model = hf_liere.LieREViTForImageClassification(config).to(sys.argv[2])
    logits = model(torch.randn(3, 3, 8, 8, device=sys.argv[2])).logits
    logits.square().sum().backward()
    results += [logits.detach().cpu(), *(parameter.grad.cpu() for parameter in model.parameters())]
torch.save((is_available(logits), results), sys.argv[1])
"""


def test_training_step_is_that_of_plain_operations(tmp_path):
    """Whole models, each in a process of its own, with kernels and (in float32, on the CPU) without."""
    found = {}
    for kernel, device in ((False, "cpu"), (True, DEVICE)):
        environment = {**os.environ, "TRITON_INTERPRET": str(int(kernel and device == "cpu"))}
        path = str(tmp_path / "step.pt")
        process = subprocess.run(
            [sys.executable, "-c", STEP, path, device], env=environment, capture_output=True, text=True
        )
        assert process.returncode == 0, process.stderr
        available, found[kernel] = torch.load(path)
        assert available == kernel
    for plain, fast in zip(found[False], found[True]):
        # Float32 sums in another order, relative to the largest entry of each tensor.
        torch.testing.assert_close(fast, plain, rtol=0, atol=1e-5 * max(plain.abs().max().item(), 1e-3))
