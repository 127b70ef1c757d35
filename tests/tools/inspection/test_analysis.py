"""What `hf_liere.tools.inspection.analysis` measures, against numbers made by hand."""

import json
import math

import numpy as np
import patching_cases
import pytest
import reference
import torch
from encoding_cases import COMMUTING, ENCODINGS, perturb
from encoding_cases import fields as encoding_fields
from published_models import vit

import hf_liere
from hf_liere.encoding.positions import TokenPositions
from hf_liere.plain.encodings import rotations
from hf_liere.tools.inspection import encodings
from hf_liere.tools.inspection.analysis import analyse, attention_maps, vision_tower
from hf_liere.tools.inspection.encodings import (
    angle_statistics,
    commutators,
    generator_matrices,
    initialization,
    learned_frequencies,
    relativity_error,
    rotary_encoding,
)


def encoding_of(model):
    return rotary_encoding(vision_tower(model).module)


def test_commutator_of_two_known_matrices():
    """Rotations about x and y in three dimensions: [Lx, Ly] = Lz, all of Frobenius norm √2."""
    x, y, z = torch.zeros(3, 3, 3, dtype=torch.float64).unbind(0)
    x[2, 1], x[1, 2] = 1, -1
    y[0, 2], y[2, 0] = 1, -1
    z[1, 0], z[0, 1] = 1, -1
    assert torch.equal(x @ y - y @ x, z)
    # One head of two blocks: the second block's generators commute, being multiples of each other.
    first, second = torch.stack([2 * x, x]), torch.stack([3 * y, 5 * x])
    found = commutators(torch.stack([first, second]).view(2, 1, 1, 2, 3, 3))
    assert found.axes == ((0, 1),)
    assert found.norm.item() == pytest.approx(6 * math.sqrt(2), rel=1e-12)
    norms = math.sqrt(2 * (4 + 1)) * math.sqrt(2 * (9 + 25))
    assert found.relative.item() == pytest.approx(6 * math.sqrt(2) / norms, rel=1e-12)


def test_commutators_of_three_axes_and_of_zero():
    matrices = torch.randn(3, 2, 2, 1, 4, 4, dtype=torch.float64)
    matrices = matrices - matrices.transpose(-1, -2)
    matrices[2] = 0
    found = commutators(matrices)
    assert found.axes == ((0, 1), (0, 2), (1, 2))
    a, b = matrices[0, 1, 0, 0], matrices[1, 1, 0, 0]
    assert found.norm[0, 1, 0].item() == pytest.approx((a @ b - b @ a).norm().item(), rel=1e-12)
    assert not found.norm[1:].any() and not found.relative[1:].any()


@pytest.mark.parametrize("coordinates, patch", [("index", 1.0), (None, 0.5)])
def test_relativity_error_of_liere_by_a_loop(coordinates, patch, monkeypatch):
    """The maximum and mean over pairs and blocks; coordinates are 0, 1, 2, by default 0, ½, 1."""
    encoding = encoding_of(vit(num_hidden_layers=1, image_size=12, coordinates=coordinates))
    monkeypatch.setattr(encodings, "PAIRS", 6)
    monkeypatch.setattr(encodings, "OFFSETS", 2)
    found = relativity_error(encoding)
    assert found.offsets.tolist() == [0, 1.5, 3]
    drawn = torch.randint(9, (2, 6), generator=torch.Generator().manual_seed(0))
    drawn[:, 0] = torch.tensor([0, 8])
    matrices = generator_matrices(encoding)[:, 0]
    for head in range(2):
        errors = []
        for p, q in drawn.T.tolist():
            for block in range(3):
                rotations = []
                for shift in (0.0, 1.5):
                    ends = [[(i // 3 + shift) * patch, (i % 3 + shift) * patch] for i in (p, q)]
                    r, s = (
                        reference.exponential(sum(c * m[head, block] for c, m in zip(end, matrices))) for end in ends
                    )
                    rotations.append(r.T @ s)
                errors.append(torch.linalg.svdvals(rotations[1] - rotations[0]).max().item())
        assert found.largest[1, 0, head].item() == pytest.approx(max(errors), rel=1e-9)
        assert found.mean[1, 0, head].item() == pytest.approx(sum(errors) / len(errors), rel=1e-9)
        assert found.mean[1, 0, head] > 0.01


@pytest.mark.parametrize("position_encoding", COMMUTING)
@pytest.mark.parametrize("fold", [False, True])
def test_commuting_encodings_are_relative(position_encoding, fold):
    """Far below the 1e-5 that is asked for: it is computed in float64, so that an error would be the encoding's."""
    model = perturb(vit(**encoding_fields(position_encoding)))
    encoding = encoding_of(model.fold_rotations() if fold else model)
    assert relativity_error(encoding).largest.max() < 1e-10
    assert commutators(generator_matrices(encoding)).norm.max() < 1e-10


def test_rotations_are_those_of_attention():
    """Against the rotations that the model hands to its layers, for patches of its own grid."""
    for fields in map(encoding_fields, ENCODINGS):
        model = perturb(vit(**fields)).liere
        positions = model.grid_positions((4, 4), torch.device("cpu")).coordinates[1:]
        generators = generator_matrices(model.rotary_encoding)
        ours = rotations(generators, positions.double(), model.rotary_encoding.product).movedim(0, -3)
        for layer, rotation in enumerate(model.rotary_encoding(TokenPositions.from_coordinates(positions))):
            rotation = rotation.matrices()[0].transpose(1, 2).double()
            # The model rounds to float32.
            assert torch.allclose(ours[layer % len(ours)], rotation, atol=1e-6)


def test_frequencies_of_rope():
    """axial_rope with 16 channels and 2 axes: four planes per axis at 100^(−i/4), rows first; one patch is one unit."""
    model = vit(position_encoding="axial_rope", hidden_size=16, num_attention_heads=1)
    found = learned_frequencies(encoding_of(model))
    # The largest first, and rows before columns.
    expected = torch.zeros(2, 8, dtype=torch.float64)
    expected[0, 0::2] = expected[1, 1::2] = torch.tensor([100 ** (-i / 4) for i in range(4)])
    assert torch.allclose(found.per_coordinate[:, 0, 0], expected, rtol=1e-7)
    assert torch.equal(found.per_patch, found.per_coordinate)


def test_frequencies_of_comrope_are_those_of_its_rotations():
    """Folded or not; R(p) has the eigenvalues e^(±i p·f), and the frequencies of a known S are known."""
    model = vit(position_encoding="comrope_ld", block_size=4, hidden_size=8, num_hidden_layers=1, image_size=12)
    encoding = model.liere.rotary_encoding
    with torch.no_grad():
        # S = blockdiag(3J, 0.5J) in a basis where planes are the channels (0, 1) and (2, 3).
        encoding.generators.copy_(torch.tensor([3.0, 0, 0, 0, 0, 0.5]))
        encoding.multipliers.copy_(torch.tensor([2.0, -1.0]).view(2, 1, 1, 1).expand_as(encoding.multipliers))
    found = learned_frequencies(encoding)
    frequencies = found.per_coordinate[:, 0, 0].T.tolist()
    assert sorted(abs(row) for row, _ in frequencies) == pytest.approx([1.0, 6.0], rel=1e-12)
    assert all(column == pytest.approx(-row / 2, rel=1e-12) for row, column in frequencies)
    # Coordinates go from 1/6 to 5/6 over three patches.
    assert torch.allclose(found.per_patch, found.per_coordinate / 3, rtol=1e-12)
    folded = learned_frequencies(encoding_of(model.fold_rotations()))
    # A folded model stores float32.
    assert torch.allclose(folded.per_patch, found.per_patch, rtol=1e-6)
    assert learned_frequencies(encoding_of(vit())) is None


@pytest.mark.parametrize("encoding, size", [("comrope_ld", 8), ("comrope_ap", 4), ("axial_rope", None)])
def test_encodings_in_different_bases_have_the_same_canonical_form(encoding, size):
    """A model and its upgrades, whose generators are other matrices in another basis, plane by plane."""
    model = vit(position_encoding=encoding, block_size=size)
    found = learned_frequencies(encoding_of(model)).per_patch
    for other, block_size in (("rope_mixed", None), ("liere", 24)):
        upgraded = hf_liere.upgrade_encoding(model, position_encoding=other, block_size=block_size)
        compared = learned_frequencies(encoding_of(upgraded)).per_patch
        # Their parameters are float32.
        assert torch.allclose(compared, found.expand_as(compared), rtol=1e-5, atol=1e-6)


def test_angle_statistics():
    """ComRoPE-LD's elements are θ_a S; AP's zero blocks are no elements."""
    encoding = encoding_of(vit(position_encoding="comrope_ld", num_hidden_layers=3))
    elements = encoding.multipliers.detach().double().unsqueeze(-1) * encoding.generators.detach().double()
    found = angle_statistics(encoding)
    assert found.std == pytest.approx(np.std(elements.numpy()), rel=1e-12)
    assert found.layer_std[1].item() == pytest.approx(np.std(elements[:, 1].numpy()), rel=1e-12)
    assert (found.density * found.edges.diff()).sum().item() == pytest.approx(1, rel=1e-12)
    partition = encoding_of(vit(position_encoding="comrope_ap", block_size=4))
    assert angle_statistics(partition).std == pytest.approx(
        np.std(partition.generators.detach().double().numpy()), rel=1e-12
    )


@pytest.mark.parametrize("encoding", ["liere", "rope_mixed", "comrope_ld", "circulant_string"])
@pytest.mark.parametrize("fold", [False, True])
def test_untrained_generators_are_told_from_trained_ones(encoding, fold):
    model = vit(**encoding_fields(encoding, wanted=8), num_hidden_layers=4)
    parameters = [parameter for _, parameter in model.rotary_parameters()]
    # From the distribution itself; of ten draws that are like these, one is farther off in all but a tenth of cases.
    fresh = initialization(encoding_of(model.fold_rotations() if fold else model))
    assert fresh.name == model.config.rotary_init and fresh.distance < 2 * fresh.chance
    with torch.no_grad():
        for parameter in parameters:
            parameter.mul_(0.3)
    trained = initialization(encoding_of(model.fold_rotations() if fold else model))
    assert trained.distance > 0.2 and trained.distance > trained.chance
    assert trained.std == pytest.approx(fresh.std, rel=1e-6) and trained.chance == fresh.chance
    assert (trained.density * trained.edges.diff()).sum().item() == pytest.approx(1, rel=1e-12)


def test_what_training_started_from():
    """The uniform distribution of LieRE from 0 to 2π, whose spread is known; zeros; nothing that is learned."""
    start = initialization(encoding_of(vit(num_hidden_layers=8)))
    # Of some ten thousand elements.
    assert start.std == pytest.approx(2 * math.pi / math.sqrt(12), rel=0.02) and start.scale == 2 * math.pi
    assert initialization(encoding_of(vit(position_encoding="axial_rope"))) is None
    model, _ = patching_cases.build("clip_vision")
    hf_liere.patch(model, hf_liere.RotaryPatchConfig())
    assert initialization(encoding_of(model))[:3] == ("zeros", initialization(encoding_of(model)).scale, 0.0)
    state = torch.get_rng_state()
    analyse(model)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("name", ["vit", "clip_classifier"])
def test_probabilities_are_those_of_the_model(name):
    model, _ = patching_cases.build(name)
    images = torch.randn(3, 3, 24, 16)
    found = analyse(model.train(), [images], batch_size=2)
    logits = model.eval()(pixel_values=images, interpolate_pos_encoding=True).logits.detach()
    # Batches of two and three sum in another order.
    assert torch.allclose(found.inputs[0].probabilities, logits.softmax(-1), atol=1e-6)
    assert found.model["classes"] == ["LABEL_0", "LABEL_1", "LABEL_2"]
    model.config.problem_type = "multi_label_classification"
    assert torch.allclose(analyse(model, [images]).inputs[0].probabilities, logits.sigmoid(), atol=1e-6)


PATCHED = ["clip", "vit", "siglip", "dinov2_registers", "videomae", "vivit"]


@pytest.mark.parametrize("name", PATCHED)
def test_patched_models_and_pretrained_ones(name):
    """The map comes from the weights that transformers returns; patching adds what it adds and no more."""
    model, inputs = patching_cases.build(name)
    pixels = inputs["pixel_values"]
    before = analyse(model, [pixels])
    assert before.encoding is None and "no rotations" in before.remarks[0]
    hf_liere.patch(model, hf_liere.RotaryPatchConfig(position_encoding="liere", rotary_init=None))
    patched = analyse(model, [pixels])
    tower = vision_tower(model)
    model.set_attn_implementation("eager")
    attentions = torch.stack(tower.module(pixels, output_attentions=True).attentions).detach()
    prefix = patching_cases.CASES[name].prefix
    rows = attentions[:, :, :, 0] if prefix else attentions.mean(3)
    maps = patched.inputs[0].attention.maps
    assert torch.allclose(maps, rows[..., prefix:].mean(2).unflatten(-1, patched.inputs[0].attention.grid), atol=1e-6)
    assert not torch.allclose(maps, before.inputs[0].attention.maps, atol=1e-3)
    added = sum(parameter.numel() for _, parameter in hf_liere.rotary_parameters(model))
    assert patched.inputs[0].cost.encoding_parameters == added
    assert patched.inputs[0].cost.parameters == before.inputs[0].cost.parameters + added
    assert patched.encoding.relativity.largest.max() > 0.1
    hf_liere.unpatch(model)
    assert torch.equal(attention_maps(model, pixels).maps, before.inputs[0].attention.maps)


def test_unpatched_models_at_other_sizes():
    model, _ = patching_cases.build("vit")
    images = torch.randn(2, 3, 24, 16)
    analysis = analyse(model, [images])
    assert analysis.inputs[0].attention.maps.shape == (2, 2, 6, 4)
    assert analysis.inputs[0].size == (24, 16) and analysis.inputs[0].cost.table_parameters == 17 * 32


def test_what_cannot_be_measured_is_said():
    model, _ = patching_cases.build("siglip2")
    hf_liere.patch(model, hf_liere.RotaryPatchConfig(rotary_init="normal"))
    analysis = analyse(model)
    assert analysis.inputs == [] and "spatial_shapes" in analysis.remarks[0]
    assert analysis.encoding.relativity.largest.max() < 1e-10


@pytest.mark.parametrize("reload", [False, True])
@pytest.mark.parametrize("encoding", ["liere", "comrope_ap", "rope_mixed", "liere_product"])
def test_folded_models(encoding, reload, tmp_path):
    model = perturb(vit(position_encoding=encoding, block_size=2 if encoding == "rope_mixed" else 4))
    images = torch.randn(2, 3, 16, 16)
    whole, folded = analyse(model, [images]), model.fold_rotations()
    if reload:
        folded.save_pretrained(tmp_path)
        folded = type(folded).from_pretrained(tmp_path)
    trainable = [parameter.requires_grad for parameter in folded.parameters()]
    folded, model = analyse(folded, [images]), folded
    assert [parameter.requires_grad for parameter in model.parameters()] == trainable
    assert folded.model["folded"] and not whole.model["folded"]
    # The same logits, up to float32.
    assert torch.allclose(folded.inputs[0].attention.maps, whole.inputs[0].attention.maps, atol=1e-5)
    assert folded.inputs[0].cost.operations < whole.inputs[0].cost.operations or encoding == "rope_mixed"
    # What a rotation does to products of queries and keys does not depend on the basis; float32 is stored.
    assert torch.allclose(folded.encoding.relativity.mean, whole.encoding.relativity.mean, atol=1e-5)
    assert any("folded" in remark for remark in folded.remarks) == (encoding != "rope_mixed")


def test_video_and_what_is_saved(tiny_video, tmp_path):
    model = hf_liere.LieREVideoForVideoClassification(tiny_video())
    analysis = analyse(model, [torch.randn(2, 4, 3, 8, 8), torch.randn(2, 8, 3, 8, 12)])
    assert [entry.attention.grid for entry in analysis.inputs] == [(2, 2, 2), (4, 2, 3)]
    assert analysis.inputs[1].size == (8, 8, 12) and len(analysis.encoding.commutators.axes) == 3
    analysis.save(tmp_path)
    facts = json.loads((tmp_path / "analysis.json").read_text())
    assert facts["model"]["position_encoding"] == "liere" and facts["inputs"][0]["cost"]["operations"] > 0
    with np.load(tmp_path / "analysis.npz", allow_pickle=False) as arrays:
        assert np.array_equal(arrays["inputs.1.attention.maps"], analysis.inputs[1].attention.maps.numpy())
        assert arrays["encoding.relativity.largest"].shape == tuple(facts["encoding"]["relativity"]["largest"]["shape"])
    alone = analyse(model)
    assert "without images" in alone.remarks[0] and alone.inputs[0].attention is None
    assert alone.inputs[0].cost == analysis.inputs[0].cost
