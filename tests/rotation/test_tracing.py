"""Tools that see shapes only, compile, trace or differentiate twice get right numbers, or are told why not."""

import pytest
import torch
from encoding_cases import IMAGE_CASES
from patching_cases import build, randomize
from torch._subclasses.fake_tensor import FakeTensorMode

import hf_liere
from hf_liere.fast import quaternions
from hf_liere.fast.dispatch import plain_operations
from hf_liere.rotation.exponential import block_rotations, skew
from hf_liere.tools.export import export_model


class Logits(torch.nn.Module):
    """A tensor instead of an output object, as `torch.jit.trace` asks for."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, pixels):
        return self.model(pixels).logits


def classifier(tiny, encoding, block_size, **fields):
    config = tiny(position_encoding=encoding, block_size=block_size, initializer_range=0.2, **fields)
    return hf_liere.LieREViTForImageClassification(config).eval()


@pytest.mark.parametrize("encoding, block_size", IMAGE_CASES)
def test_shapes_alone(tiny, encoding, block_size):
    with torch.device("meta"):
        model = classifier(tiny, encoding, block_size)
        assert model(torch.empty(2, 3, 16, 16)).logits.shape == (2, 3)
    model = classifier(tiny, encoding, block_size)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert model(mode.from_tensor(torch.randn(2, 3, 8, 16))).logits.shape == (2, 3)


def test_an_exported_program_runs_where_gradients_are_recorded(tiny, tmp_path):
    model = classifier(tiny, "liere", 8)
    export_model(model, tmp_path / "model.pt2", dynamic_size=True)
    pixels = torch.randn(2, 3, 24, 16)
    program = torch.export.load(tmp_path / "model.pt2").module()
    torch.testing.assert_close(program(pixels)["logits"], model(pixels).logits, rtol=0, atol=1e-5)


class Rotations(torch.nn.Module):
    def forward(self, positions, generators):
        return block_rotations(positions, generators)


def compiled(*inputs):
    return torch.compile(Rotations(), backend="eager", fullgraph=True)(*inputs)


def exported(*inputs):
    return torch.export.export(Rotations(), inputs).module()(*inputs)


@pytest.mark.parametrize("norm", [3e3, 2e5])
@pytest.mark.parametrize("traced", [compiled, exported])
def test_a_graph_is_exact_for_large_exponents(norm, traced):
    positions = torch.rand(7, 2, dtype=torch.float64)
    generators = skew(torch.randn(2, 2, 28), 8)
    generators *= norm / torch.linalg.matrix_norm(generators, 2).max() / 2
    # Sixteen squarings double the rounding of float64 as often, 7e-12; float32 rounds the results.
    torch.testing.assert_close(traced(positions, generators), block_rotations(positions, generators), rtol=0, atol=3e-7)


@pytest.mark.parametrize("traced", [compiled, exported])
def test_a_graph_says_nan_rather_than_a_wrong_rotation(traced):
    """An exported one, which squares a fixed number of times; a compiled one squares as often as exponents need."""
    positions = torch.tensor([[1.0, 0.0], [1e6, 0.0]], dtype=torch.float64)
    generators = skew(torch.randn(2, 2, 28), 8)
    rotations, wanted = traced(positions, generators), block_rotations(positions, generators)
    if traced is compiled:
        assert torch.equal(rotations, wanted)
    else:
        assert torch.isfinite(rotations[:, 0]).all() and rotations[:, 1].isnan().all()


TABLE = {"use_absolute_position_embeddings": True}


@pytest.mark.parametrize(
    "encoding, block_size, fields, folds",
    [
        *((*case, {}, False) for case in IMAGE_CASES),
        ("liere", 4, {}, True),
        ("liere", 4, TABLE, False),
        ("absolute", None, {}, False),
    ],
)
@pytest.mark.filterwarnings("ignore")
@torch.no_grad()
def test_torch_jit_trace_keeps_nothing_of_its_example(tiny, encoding, block_size, fields, folds):
    """It records one size and asks nothing of others, also of equally many patches."""
    model = classifier(tiny, encoding, block_size, **fields)
    model = model.fold_rotations([(4, 4), (2, 8)]) if folds else model
    traced = torch.jit.trace(Logits(model), torch.randn(2, 3, 16, 16), check_trace=False)
    for size in ((16, 16), (8, 32), (32, 8), (16, 24)):
        pixels = torch.randn(2, 3, *size)
        torch.testing.assert_close(traced(pixels), model(pixels).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("keep_absolute", ["interpolate", "train_size", "fade"])
@torch.no_grad()
def test_torch_jit_trace_keeps_no_table_of_its_example(keep_absolute):
    model, _ = build("vit")
    config = hf_liere.RotaryPatchConfig(position_encoding="rope_mixed", keep_absolute=keep_absolute)
    randomize(hf_liere.patch(model, config))
    traced = torch.jit.trace(Logits(model), torch.randn(2, 3, 16, 16), check_trace=False)
    for size in ((8, 32), (16, 24)):
        pixels = torch.randn(2, 3, *size)
        torch.testing.assert_close(traced(pixels), model(pixels).logits, rtol=0, atol=1e-5)


def test_exported_graphs_keep_no_sizes_of_samples(tiny):
    """Where positions need them as numbers."""
    model = classifier(tiny, "liere", 4, **TABLE)
    shapes = torch.tensor([[2, 4], [4, 2]])
    with pytest.raises(ValueError, match="keep the spatial_shapes of its example; accepted there: inputs of one size"):
        torch.export.export(model, (torch.randn(2, 8, 48),), {"spatial_shapes": shapes})


def test_second_derivatives_are_refused(tiny):
    positions, weight = torch.rand(4, 2, dtype=torch.float64), torch.randn(1, 4, 4, 4)

    def loss(entries):
        return (block_rotations(positions, skew(entries, 4)).float() * weight).sum()

    entries = torch.randn(2, 1, 6)
    torch.testing.assert_close(torch.autograd.functional.jacobian(loss, entries).shape, entries.shape)
    with pytest.raises(RuntimeError, match="cannot be differentiated a second time"):
        torch.autograd.functional.hessian(loss, entries)
    for encoding in ("liere", "comrope_ld"):
        model = classifier(tiny, encoding, 8)
        model.set_attn_implementation("eager")
        generators = next(parameter for _, parameter in model.rotary_parameters())
        loss_of_model = model(torch.randn(2, 3, 16, 16)).logits.square().sum()
        (gradient,) = torch.autograd.grad(loss_of_model, generators, create_graph=True)
        with pytest.raises(RuntimeError, match="cannot be differentiated a second time"):
            gradient.square().sum().backward()


@pytest.mark.parametrize("size", [3, 4])
def test_what_a_graph_computes_first_leaves_no_fake_tensor(size):
    quaternions._product_table.cache_clear()
    positions, entries = torch.rand(5, 1, dtype=torch.float64), torch.randn(1, 1, 2, size * (size - 1) // 2)
    generators = skew(entries, size)
    with plain_operations():
        with FakeTensorMode() as mode:
            quaternions.quaternion_rotations(*map(mode.from_tensor, (positions, generators)), torch.float32)
        found = quaternions.quaternion_rotations(positions, generators, torch.float32)
    expected = torch.matrix_exp(torch.einsum("pa,agkij->gpkij", positions, generators.double()))
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-6)
