"""
Triton's kernels of exponentials, of their gradient and of eigenbases: on a GPU where there is one, else under the
interpreter.
"""

import pytest
import reference
import torch
import triton_loading
from slow_cases import slow_except
from triton_loading import DEVICE

from hf_liere import LieREViTConfig, LieREViTForImageClassification
from hf_liere.fast import dispatch
from hf_liere.rotation.bases import eigenbasis
from hf_liere.rotation.exponential import layer_block_rotations, skew


pytest.importorskip("triton", reason="Triton is not installed (PyTorch brings it on Linux)")


@pytest.fixture(scope="module")
def kernels():
    """The module of the kernels, through which rotations of small blocks go."""
    module = triton_loading.load_kernels()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(dispatch._BACKENDS, DEVICE, module)
        patch.setenv(module.SWITCH, "all")
        patch.setattr(dispatch, "_one_by_one", dispatch._one_by_one - {"cpu"})
        # Comparisons have their own test.
        patch.setattr(module.self_check, "failure", lambda *case: None)
        patch.setattr(dispatch, "_accepted", set())
        yield module


def started(block_size, factor):
    """Positions of a 14 × 14 grid, first and last ones, and LieRE's generators as they start, times a factor."""
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 1, "num_labels": 2}
    config = LieREViTConfig(position_encoding="liere", block_size=block_size, image_size=112, patch_size=8, **sizes)
    model = LieREViTForImageClassification(config)
    positions = model.liere.grid_positions((14, 14), torch.device("cpu")).coordinates.double()[
        [0, 1, 2, 30, 99, 120, 180, 194, 195, 196]
    ]
    entries = model.liere.rotary_encoding.entries("cpu").detach().flatten(2, 3) * factor
    return positions.to(DEVICE), entries.to(DEVICE)  # (10, 2), (2, 2, K, b(b−1)/2)


def exact(positions, generators):
    """(G, P, K, b, b) in float64."""
    return reference.exponential(torch.einsum("pa,agkij->gpkij", positions, generators))


@pytest.mark.parametrize(
    "block_size, factor, tile",
    slow_except(
        [(5, 10, 8), (8, 1, 16), (16, 10, 8)], [(b, f, t) for b in (5, 8, 12, 16) for f in (1, 10) for t in (8, 16)]
    ),
)
def test_rotations_and_gradients_are_those_of_float64(kernels, monkeypatch, block_size, factor, tile):
    """At LieRE's initial norm and at ten times it, with blocks that share a tile and those that do not."""
    monkeypatch.setitem(kernels.batched_rotations.__globals__, "SMALLEST_TILE", tile)
    leaves = [leaf.requires_grad_() for leaf in started(block_size, factor)]
    # Positions that need no gradient take another kernel.
    leaves[0].requires_grad_(factor == 1)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        found = torch.stack(layer_block_rotations(leaves[0], skew(leaves[1], block_size)))
    assert not any(event.name == "aten::bmm" for event in profiler.events())
    weight, wanted = torch.randn(found.shape, device=DEVICE), leaves[factor != 1 :]
    results = [found, *torch.autograd.grad((found * weight).sum(), wanted)]
    doubles = [leaf.detach().double().requires_grad_() for leaf in leaves]
    expected = exact(doubles[0], skew(doubles[1], block_size))
    expected = [expected, *torch.autograd.grad((expected * weight).sum(), doubles[-len(wanted) :])]
    for ours, right in zip(results, expected):
        assert (ours - right).abs().max() < 1e-6 * right.abs().max()


@pytest.mark.parametrize(
    "size, tile", slow_except([(5, 8), (8, 16)], [(b, t) for b in (2, 3, 5, 8, 9, 13, 16) for t in (8, 16)])
)
def test_eigenbases_are_those_of_float64(kernels, monkeypatch, size, tile):
    """Also of frequencies that repeat, are zero or differ much, of a tiny matrix and of none at all."""
    monkeypatch.setitem(kernels.eigenbases.__globals__, "SMALLEST_TILE", tile)
    planes = size // 2
    frequencies = torch.rand(2, 4, planes).double()
    frequencies[0, :2], frequencies[0, 2, 1:] = torch.tensor([[1.0], [0.0]]), 0.0
    frequencies[1, 0], frequencies[1, 1], frequencies[1, 2] = 10.0 ** -torch.arange(planes), 1e-250, 1e200
    inside = torch.zeros(2, 4, size, size).double()
    inside[..., 1::2, ::2].diagonal(dim1=-2, dim2=-1).copy_(frequencies)
    frame = torch.linalg.qr(torch.randn(2, 4, size, size).double()).Q
    matrices = frame @ (inside - inside.mT) @ frame.mT
    scales = frequencies.amax(-1)[..., None, None].clamp(min=1e-300)
    basis = eigenbasis(matrices.to(DEVICE)).cpu()
    assert torch.equal(basis[0, 1], torch.eye(size).double())
    torch.testing.assert_close(basis.mT @ basis, torch.eye(size).double().expand_as(basis), rtol=0, atol=1e-13)
    found = (basis.mT @ matrices @ basis) / scales
    turning = found[..., 1::2, ::2].diagonal(dim1=-2, dim2=-1)
    expected = (frequencies / scales.squeeze(-1)).sort(-1).values
    torch.testing.assert_close(turning.abs().sort(-1).values, expected, rtol=0, atol=1e-12)
    found[..., 1::2, ::2].diagonal(dim1=-2, dim2=-1).zero_(), found[..., ::2, 1::2].diagonal(dim1=-2, dim2=-1).zero_()
    assert found.abs().max() < 1e-12


@pytest.mark.slow
def test_compiled_graphs_call_them(kernels):
    """Without a break, with the results and gradients of eager calls."""

    def rotate(positions, entries):
        return torch.stack(layer_block_rotations(positions, skew(entries, 8)))

    positions, entries = started(8, 1)
    leaf, results = entries.requires_grad_(), []
    for function in (rotate, torch.compile(rotate, backend="aot_eager", fullgraph=True)):
        found = function(positions, leaf)
        results.append([found, *torch.autograd.grad(found.square().cumsum(-1).sum(), leaf)])
    for compiled, eager in zip(*results):
        torch.testing.assert_close(compiled, eager, rtol=1e-6, atol=1e-6)


@pytest.mark.filterwarnings("ignore:invalid value")
def test_only_tokens_that_have_no_rotation_are_not_finite(kernels):
    """Position zero has exactly the identity; neighbours of NaN and of norms that are too large have rotations."""
    generators = skew(torch.randn(1, 1, 2, 28, device=DEVICE), 8)
    positions = torch.tensor([[0.0], [1.0], [torch.nan], [1e5], [torch.inf], [1e9]], device=DEVICE).double()
    (found,) = kernels.batched_rotations(positions, generators)
    assert torch.equal(found[0], torch.eye(8, device=DEVICE).expand(2, 8, 8))
    torch.testing.assert_close(
        found[[1, 3]].double(), exact(positions[[1, 3]], generators.double())[0], rtol=0, atol=1e-6
    )
    assert found[[2, 4, 5]].isnan().all()
    gradients = kernels.batched_backward(positions[:3], generators, found[None, :3], found[None, :3], True)[0]
    assert gradients[:2].isfinite().all() and gradients[2].isnan().all()


def test_they_are_off_where_no_gpu_was_measured(kernels, monkeypatch):
    generators = torch.zeros(2, 1, 2, 8, 8, device=DEVICE)
    for name in ("batched_rotations", "batched_backward", "eigenbases"):
        assert dispatch.ask_backend(name, generators, 8) == (kernels, None)
        assert "more than 16 channels" in dispatch.ask_backend(name, generators, 17)[1]
    monkeypatch.setattr(dispatch, "_accepted", set())
    monkeypatch.delenv(kernels.SWITCH)
    assert "HF_LIERE_CUDA_KERNELS=all" in dispatch.ask_backend("batched_rotations", generators, 8)[1]
    if DEVICE == "cuda":
        monkeypatch.setattr(kernels, "FASTER_ON", (torch.cuda.get_device_name(),))
        assert dispatch.ask_backend("batched_rotations", generators, 8) == (kernels, None)


@pytest.mark.parametrize(
    "right, wrong, failure",
    slow_except(
        ["", "total * position"],
        [
            ("", "", None),
            ("squarings) << 52", "squarings) << 51", "batched_rotations differs"),
            ("0.5 / norm**4", "0.01 / norm**4", "batched_rotations differs"),
            ("(token < sizes[0]))", "(token < sizes[0] - 1))", "batched_rotations differs"),
            ("total * position", "total", "batched_backward differs"),
            ("found = total *", "found = first *", "batched_backward differs"),
            ("range(2, terms + 1)", "range(2, terms - 1)", "batched_backward differs"),
            ("-(-tiles // parts)", "1", "batched_backward differs"),
            ("tangents = 0.5 * scale", "tangents = scale", "batched_backward differs"),
            ("(part * steps + step)", "step", "batched_backward differs"),
            ("range(9)", "range(2)", "eigenbases differs"),
            ("4 * unit + other", "4 * other + unit", "eigenbases differs"),
            ("real * real + j", "real + j", "eigenbases differs"),
        ],
    ),
)
def test_wrong_kernels_are_found(tmp_path, right, wrong, failure):
    source = triton_loading.EXPONENTIALS.read_text()
    assert right in source
    path = tmp_path / "edited_exponentials.py"
    path.write_text(source.replace(right, wrong))
    module = triton_loading.load_kernels(exponentials=path)
    found = module.self_check.failure(torch.device(DEVICE), torch.float32, 5)
    assert found is None if failure is None else failure in found
    (outcome,) = module.self_check.outcomes.values()
    assert outcome.failure == found and (failure or 1e-3 < outcome.error < 1)
