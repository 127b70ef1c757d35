"""The comparison of Triton's kernels before their first use: it finds kernels that are wrong, and leaves no traces."""

import contextlib
import logging

import pytest
import torch
import triton_loading
from fresh_process import run_python
from slow_cases import slow_except
from triton_loading import DEVICE

import hf_liere
from hf_liere.fast import dispatch
from hf_liere.fast.dispatch import find_backend
from hf_liere.kernels import self_check


pytest.importorskip("triton", reason="Triton is not installed (PyTorch brings it on Linux)")


def load(folder, right="", wrong=""):
    """The module of the kernels with a part of its source replaced."""
    source = triton_loading.SOURCE.read_text()
    assert right in source
    path = folder / "cuda_edited.py"
    path.write_text(source.replace(right, wrong))
    return triton_loading.load_kernels(path)


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    return load(tmp_path_factory.mktemp("kernels"))


def ask(module, block_size, head_dim=16, dtype=torch.float32):
    return module.refusal(torch.zeros(1, 1, 1, head_dim, dtype=dtype, device=DEVICE), dtype, block_size)


SHAPES = ((2, 10), (2, 64), (5, 24), (8, 128), (64, 64))
SINGLE = [(*shape, torch.float32) for shape in SHAPES]
HALF = [(*shape, torch.float16) for shape in SHAPES]


@pytest.mark.parametrize("block_size, head_dim, dtype", slow_except([*SINGLE, HALF[0], HALF[3]], SINGLE + HALF))
def test_kernels_agree(kernels, block_size, head_dim, dtype):
    assert ask(kernels, block_size, head_dim, dtype) is None
    case, outcome = list(kernels.self_check.outcomes.items())[-1]
    assert case[1:] == (dtype, block_size, self_check.padded_width(head_dim)) and case.device.type == DEVICE
    # Not even the errors of float32 are exactly zero, and bounds that are met by far would find little.
    assert 1e-3 < outcome.error < 1


WRONG = [
    ("x * cos - y * sin", "x * cos + y * sin", 2, "apply_rotation of planes differs"),
    ("            sin = -sin", "            sin = sin", 2, "apply_rotation of planes, inverse, differs"),
    ("[None, :] * 2 < width, cos, 1.0", "[None, :] * 2 < width, cos, 0.0", 2, "apply_rotation of planes differs"),
    ("tl.minimum(first + samples, batch)", "tl.minimum(first + samples, batch - 1)", 2, "apply_rotation of planes"),
    ("by_angle += dy * x - dx * y", "by_angle += dy * x + dx * y", 2, "angle_gradients differs"),
    ("(part + 1) * samples, batch)", "(part + 1) * samples, batch - 1)", 2, "angle_gradients differs"),
    ("(source, target) if INVERSE", "(target, source) if INVERSE", 8, "apply_rotation of blocks, inverse, differs"),
    ("(source >= width), 1.0", "(source >= width), 0.0", 5, "apply_rotation of blocks differs"),
    ("tl.trans(gradient), state", "tl.trans(state), gradient", 8, "outer_products differs"),
    ("(sample < batch) & (column < head_dim)", "(column < head_dim) & (sample < 1)", 8, "outer_products differs"),
    ("            outer += tl", "            outer = tl", 8, "outer_products differs"),
    ("rotated.to(loaded.dtype), mask=present", "rotated / 0.0, mask=present", 2, "differs by inf"),
    ("grid[2], grid[1], *shape[2:]", "grid[2], grid[1]", 8, "outer_products raised"),
    ("    out = tuple(map", "    raise OSError('no driver')\n    out = tuple(map", 8, "OSError: no driver"),
]
# One of each kernel, a value that is no number, and a kernel that cannot run.
FAST = [WRONG[number] for number in (0, 4, 6, 8, 11, 13)]


@pytest.mark.parametrize("right, wrong, block_size, failure", slow_except(FAST, WRONG))
def test_wrong_kernels_are_found(tmp_path, monkeypatch, caplog, right, wrong, block_size, failure):
    module = load(tmp_path, right, wrong)
    monkeypatch.setitem(dispatch._BACKENDS, DEVICE, module)
    with caplog.at_level(logging.WARNING):
        assert find_backend("apply_rotation", torch.zeros(1, 1, 1, 16, device=DEVICE), block_size) is None
        assert failure in ask(module, block_size)
    (warning,) = caplog.messages
    assert failure in warning and "Plain operations compute the same" in warning and "`hf-liere env`" in warning
    (outcome,) = module.self_check.outcomes.values()
    assert outcome.failure == ask(module, block_size) and outcome.error is None


@contextlib.contextmanager
def default(dtype, device):
    torch.set_default_dtype(dtype)
    try:
        # `set_default_device(None)` would not undo another: torch 2.9 cannot say its default device after it.
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(torch.float32)


STATES = {
    "autocast": lambda: torch.autocast(DEVICE, torch.bfloat16),
    "inference": torch.inference_mode,
    "no gradients": torch.no_grad,
    "other defaults": lambda: default(torch.float16, "meta"),
}


@pytest.mark.parametrize(
    "state", slow_except(("other defaults",), ["autocast", "inference", "no gradients", "other defaults"])
)
def test_comparison_neither_reads_nor_changes_the_state_of_the_process(kernels, state):
    states = torch.zeros(1, 1, 1, 16, device=DEVICE)
    assert kernels.refusal(states, torch.float32, 2) is None
    (case,) = (case for case in kernels.self_check.outcomes if case[1:] == (torch.float32, 2, 16))
    expected = kernels.self_check.outcomes.pop(case).error
    random = torch.get_rng_state()
    with STATES[state]():
        before = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled(DEVICE)
        before += torch.get_default_dtype(), torch.get_default_device()
        assert kernels.refusal(states, torch.float32, 2) is None
        after = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled(DEVICE)
        assert before == (*after, torch.get_default_dtype(), torch.get_default_device())
    assert kernels.self_check.outcomes[case].error == expected
    assert torch.equal(random, torch.get_rng_state())


def test_sums_are_multiplied_in_their_own_type_under_autocast(kernels):
    gradients, states = torch.randn(2, 2, 3, 2, 4, 16, device=DEVICE)
    rotation = torch.randn(1, 2, 4, 2, 8, 8, device=DEVICE)
    arguments = gradients.unbind(), states.unbind(), rotation.shape[:4], 8, rotation
    expected = kernels.outer_products(*arguments)
    with torch.autocast(DEVICE, torch.bfloat16):
        assert torch.equal(kernels.outer_products(*arguments), expected)


def test_kernels_can_be_turned_off(kernels, monkeypatch):
    monkeypatch.setenv("HF_LIERE_CUDA_KERNELS", "0")
    monkeypatch.setitem(dispatch._BACKENDS, DEVICE, kernels)
    states = torch.zeros(1, 1, 1, 16, device=DEVICE)
    assert dispatch.ask_backend("apply_rotation", states, 2)[1] == "HF_LIERE_CUDA_KERNELS=0 turns them off"


def test_nothing_is_compared_while_a_graph_is_captured(monkeypatch):
    """A capture needs a GPU; this stands in for the driver's answer."""

    def kernel(*arguments, **options):
        raise AssertionError("A kernel was called.")

    check = self_check.SelfCheck("kernels", kernel, kernel, kernel)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert check.failure(torch.device("cuda:0"), torch.float32, 2, 64) == self_check.CAPTURING
    assert not check.outcomes


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
def test_graphs_are_captured_after_a_pass(kernels, monkeypatch):
    monkeypatch.setitem(dispatch._BACKENDS, DEVICE, kernels)
    query, key = torch.randn(2, 3, 2, 6, 48, device=DEVICE).unbind()
    rotation = hf_liere.rotation.rotation.PlaneRotation(torch.randn(1, 2, 6, 24, 2, device=DEVICE))
    graph = torch.cuda.CUDAGraph()
    before = set(kernels.self_check.outcomes)
    with torch.cuda.graph(graph):
        plain = rotation.rotate(query, key)
    assert set(kernels.self_check.outcomes) == before
    expected = rotation.rotate(query, key)
    assert set(kernels.self_check.outcomes) != before
    again = torch.cuda.CUDAGraph()
    with torch.cuda.graph(again):
        fast = rotation.rotate(query, key)
    graph.replay(), again.replay()
    for found in (plain, fast):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


TRAINING = """
import sys, threading, importlib.util, torch, hf_liere
from hf_liere.fast import dispatch
specification = importlib.util.spec_from_file_location("hf_liere.kernels.cuda_edited", sys.argv[1])
kernels = importlib.util.module_from_spec(specification)
specification.loader.exec_module(kernels)
dispatch._BACKENDS[sys.argv[3]] = kernels
compare, times = kernels.self_check._compare, []
kernels.self_check._compare = lambda case: (times.append(case), compare(case))[1]
config = hf_liere.LieREViTConfig(hidden_size=48, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
    image_size=8, patch_size=4, num_labels=3, position_encoding="rope_mixed")
torch.manual_seed(0)
model, losses = hf_liere.LieREViTForImageClassification(config).to(sys.argv[3]), []
pixels = torch.randn(2, 3, 8, 8).to(sys.argv[3])

def train():
    with torch.random.fork_rng():
        losses.append(model(pixels, labels=torch.tensor([0, 1]).to(sys.argv[3])).loss.detach().cpu())

threads = [threading.Thread(target=train) for _ in range(6)]
[thread.start() for thread in threads], [thread.join() for thread in threads]
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    optimizer.zero_grad()
    losses.append(model(pixels, labels=torch.tensor([0, 1]).to(sys.argv[3])).loss)
    losses[-1].backward()
    optimizer.step()
torch.save((len(times), len(kernels.self_check.outcomes), [loss.detach().cpu() for loss in losses]), sys.argv[2])
"""


@pytest.mark.slow
def test_one_comparison_and_one_warning_in_a_process_of_several_threads(tmp_path):
    """With a kernel that is wrong on purpose, training goes on as it does without kernels."""
    module = load(tmp_path, "x * cos - y * sin", "x * cos + y * sin")
    found = []
    for switch in ("1", "0"):
        variables = {"HF_LIERE_CUDA_KERNELS": switch, "TRITON_INTERPRET": str(int(DEVICE == "cpu"))}
        output = tmp_path / f"{switch}.pt"
        process = run_python("-c", TRAINING, module.__file__, output, DEVICE, variables=variables)
        assert process.stderr.count("Triton kernels are not used") == int(switch), process.stderr
        found.append(torch.load(output))
    assert [made[:2] for made in found] == [(1, 1), (0, 0)]
    for with_kernels, without in zip(found[0][2], found[1][2]):
        assert torch.equal(with_kernels, without) and with_kernels.isfinite()
