"""For how many values the host waits in a step with its loss, on accelerators: as many as without rotations."""

import contextlib
import copy
from functools import partial
from types import ModuleType

import patching_cases
import pytest
import rope_cases
import torch
import triton_loading
from encoding_cases import ENCODINGS, block_size
from host_waits import count_waits
from slow_cases import slow_except
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

import hf_liere
from hf_liere import LieRotaryEmbedding, RotaryPatchConfig
from hf_liere.encoding.kinds import ENCODINGS as KINDS
from hf_liere.fast import dispatch
from hf_liere.fast.dispatch import as_on_accelerators, plain_operations


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = {
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "image_size": 16,
    "patch_size": 4,
    "num_labels": 2,
}


@pytest.fixture(autouse=True)
def on_accelerators():
    with as_on_accelerators() if DEVICE == "cpu" else contextlib.nullcontext():
        yield


def sum_of_squares(tensors):
    return sum(tensor.square().sum() for tensor in tensors if tensor.is_floating_point())


# Each returns a model, its inputs, and a function of both that returns the loss.
def layer(encoding):
    """Two layers that rotate by positions of every sample."""
    states = {name: torch.randn(2, 2, 16, 24, requires_grad=True) for name in ("query", "key")}
    inputs = {**states, "positions": torch.rand(2, 16, 2)}
    if encoding == "absolute":
        return torch.nn.Identity(), inputs, lambda model, inputs: sum_of_squares([model(inputs["query"])])
    model = LieRotaryEmbedding(2, 24, 2, encoding, block_size(encoding), num_layers=2)

    def run(model, inputs):
        query, key, positions = inputs.values()
        rotations = model.rotations(positions)
        return sum_of_squares(x for index in range(2) for x in model(query, key, rotations, layer=index))

    return model, inputs, run


def classify(model, inputs):
    return model(**inputs).loss


def vit(encoding, wanted=4):
    size = block_size(encoding, wanted=wanted) if encoding in ENCODINGS else None
    config = hf_liere.LieREViTConfig(position_encoding=encoding, block_size=size, **SIZES)
    inputs = {"pixel_values": torch.randn(2, 3, 16, 16), "labels": torch.tensor([0, 1])}
    return hf_liere.LieREViTForImageClassification(config), inputs, classify


def vit_with_positions(encoding):
    model, inputs, run = vit(encoding)
    return model, inputs if encoding == "absolute" else inputs | {"positions": torch.rand(2, 16, 2)}, run


def video(encoding):
    size = block_size(encoding, axes=3) if encoding in ENCODINGS else None
    config = hf_liere.LieREVideoConfig(position_encoding=encoding, block_size=size, num_frames=4, **SIZES)
    inputs = {"pixel_values": torch.randn(2, 4, 3, 16, 16), "labels": torch.tensor([0, 1])}
    return hf_liere.LieREVideoForVideoClassification(config), inputs, classify


def patched(cases, name, start):
    def build(encoding):
        model, inputs = cases.build(name)
        if encoding != "absolute":
            size = None if encoding == "rope_mixed" else 4
            hf_liere.patch(model, RotaryPatchConfig(encoding, block_size=size, rotary_init=start))
        return model, inputs, lambda model, inputs: sum_of_squares(cases.outputs(model, inputs))

    return build


def flux(encoding):
    pytest.importorskip("diffusers", reason="diffusers needs Python 3.11")
    import diffusion_cases

    case = diffusion_cases.BY_NAME["FluxTransformer2DModel"]
    model = case.build()
    if encoding != "absolute":
        size = None if encoding == "rope_mixed" else 4
        hf_liere.patch(model, RotaryPatchConfig(encoding, block_size=size, rotary_init="pretrained"))
    return model, case.inputs(), lambda model, inputs: sum_of_squares(diffusion_cases.outputs(model, inputs))


MODELS = {
    "layer": layer,
    "vit": vit,
    "vit with positions": vit_with_positions,
    "video": video,
    "clip": patched(patching_cases, "clip", "zeros"),
    "dinov2": patched(patching_cases, "dinov2", "zeros"),
    "dinov3": patched(rope_cases, "dinov3", "pretrained"),
    "llama": patched(rope_cases, "llama", "pretrained"),
    "flux": flux,
    **{f"blocks of {size}": partial(vit, wanted=size) for size in (2, 8, 24)},
}
BLOCKS = [name for name in MODELS if name.startswith("blocks")]
LEARNED = ("rope_mixed", "liere", "comrope_ld", "cayley_string")
CASES = [
    *((model, encoding) for model in MODELS if model not in BLOCKS for encoding in LEARNED),
    *((model, encoding) for model in BLOCKS for encoding in ("liere", "comrope_ld")),
    *(("vit", encoding) for encoding in ENCODINGS if encoding not in LEARNED),
]


def move(values):
    return values.detach().to(DEVICE).requires_grad_(values.requires_grad)


class Step:
    """A step that has run `before`, called without arguments: returns the loss, and in training leaves gradients."""

    def __init__(self, model, encoding, training=True, compile=copy.copy, before=1):
        torch.manual_seed(0)
        module, inputs, self.run = MODELS[model](encoding)
        self.module, self.training = module.to(DEVICE).train(training), training
        self.inputs = tree_map_only(torch.Tensor, move, inputs)
        self.called = compile(self.module)
        for _ in range(before):
            self()

    def __call__(self):
        self.module.zero_grad()
        with torch.set_grad_enabled(self.training):
            loss = self.run(self.called, self.inputs)
        if self.training:
            loss.backward()
        return loss.detach()

    def check_same(self, *steps):
        """Two ways to run the step have the same results for inputs that neither has seen."""
        with torch.no_grad():
            for values in tree_leaves(self.inputs):
                if isinstance(values, torch.Tensor) and values.is_floating_point():
                    values.mul_(0.5)
        results = []
        for step in steps:
            loss, parameters = step().clone(), self.module.parameters()
            results.append([loss, *(values.grad.clone() for values in parameters if values.grad is not None)])
        torch.testing.assert_close(*results, rtol=1e-3, atol=1e-4)


def check_waits(step, plain, compiled=False):
    """Eigenvalues of all layers are computed at once, and read."""
    with count_waits() as expected:
        plain()
    with count_waits(compiled) as found:
        step()
    found.subtract(expected)
    assert found.pop("_linalg_eigh", 0) <= 1 and not +found


@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("model, encoding", CASES)
def test_steps_wait_as_those_without_rotations(model, encoding, training):
    check_waits(Step(model, encoding, training), Step(model, "absolute", training))


# A compilation takes seconds.
@pytest.mark.parametrize("model, encoding", slow_except([("layer", "liere")], CASES))
def test_training_steps_are_one_graph(model, encoding, fresh_compiler):
    """No operation in it has a shape that values decide."""
    compiled = Step(model, encoding, compile=partial(torch.compile, backend="aot_eager", fullgraph=True))
    check_waits(compiled, Step(model, "absolute"), compiled=True)
    torch.testing.assert_close(compiled(), Step(model, encoding)(), rtol=1e-4, atol=1e-4)


@pytest.fixture
def kernel(monkeypatch):
    """Eigenbases by Triton's kernel; where there is no GPU its interpreter runs it, and nothing else."""
    pytest.importorskip("triton", reason="Triton is not installed (PyTorch brings it on Linux)")
    module = triton_loading.load_kernels()
    monkeypatch.setenv(module.SWITCH, "all")
    monkeypatch.setattr(dispatch, "_accepted", set())
    if DEVICE == "cpu":
        names = module.eigenbases.__globals__
        launch = names["_eigenbases_kernel"]

        class Launch:
            def __getitem__(self, grid):
                def run(*arguments, **constants):
                    # What the interpreter reads, no GPU does.
                    with _disable_current_modes(), torch._C.DisableTorchFunction():
                        launch[grid](*arguments, **constants)

                return run

        monkeypatch.setitem(names, "_eigenbases_kernel", Launch())
        monkeypatch.setattr(module.self_check, "failure", lambda *case: None)
        backend = ModuleType("eigenbases_alone")
        vars(backend).update({name: getattr(module, name) for name in ("NAME", "SWITCH", "refusal", "eigenbases")})
        monkeypatch.setitem(dispatch._BACKENDS, DEVICE, backend)
    token = dispatch._backends_are_off.set(False)
    yield
    dispatch._backends_are_off.reset(token)


KERNEL_CASES = [(model, compiled) for model in ("layer", "blocks of 8", "clip") for compiled in (False, True)]


@pytest.mark.parametrize("model, compiled", slow_except([("blocks of 8", False)], KERNEL_CASES))
def test_the_kernel_of_eigenbases_waits_for_nothing(kernel, model, compiled, fresh_compiler):
    """ComRoPE's steps then wait as those without rotations, with the results of eigenvalues."""
    compile = partial(torch.compile, backend="aot_eager", fullgraph=True) if compiled else copy.copy
    step, plain = Step(model, "comrope_ld", compile=compile), Step(model, "absolute")
    with count_waits() as expected:
        plain()
    with count_waits(compiled) as found:
        step()
    assert not found - expected

    eager = copy.copy(step)
    eager.called = step.module

    def by_eigenvalues():
        with plain_operations():
            return eager()

    step.check_same(step, by_eigenvalues)


NEEDS_GPU = pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
# Transformers reads the masks of language models, and eigenvalues of blocks without a kernel are read.
CAPTURED = [
    (model, name)
    for model, name in CASES
    if model != "llama" and not (KINDS[name].proportional and model == "blocks of 24")
]


def use_kernel(request, encoding):
    if KINDS[encoding].proportional:
        request.getfixturevalue("kernel")


@NEEDS_GPU
@pytest.mark.parametrize("model, encoding", CAPTURED)
def test_training_steps_are_captured(model, encoding, request):
    use_kernel(request, encoding)
    step, stream, graph = Step(model, encoding), torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph):
        loss = step()

    def replay():
        graph.replay()
        return loss

    step.check_same(replay, step)


@NEEDS_GPU
@pytest.mark.slow
@pytest.mark.parametrize("model, encoding", CAPTURED)
def test_training_steps_compile_to_captured_graphs(model, encoding, fresh_compiler, request):
    use_kernel(request, encoding)
    counters.clear()
    compile = partial(torch.compile, mode="reduce-overhead", fullgraph=True)
    step = Step(model, encoding, compile=compile, before=4)
    assert not counters["inductor"]["cudagraph_skips"]
    eager = copy.copy(step)
    eager.called = step.module
    step.check_same(step, eager)
