"""Models of tokens with positions: their symmetries, padding, errors, and what they save."""

import itertools

import encoding_cases
import pytest
import reference
import torch
from encoding_cases import ENCODINGS, LEARNED, on_axes, perturb
from huggingface_hub.errors import StrictDataclassError

import hf_liere
from hf_liere.encoding.kinds import ENCODINGS as KINDS
from hf_liere.tools.cli import main
from hf_liere.transformer.position_tables import read_table
from hf_liere.upgrades import upgrade_encoding


# On every number of axes that a head of 24 channels allows.
CASES = [
    (encoding, axes)
    for axes in range(1, 7)
    for encoding in ("none", "absolute", *on_axes(axes))
    if encoding not in ENCODINGS or KINDS[encoding].block_sizes.accepted(24, axes)
]
HEADS = (hf_liere.LieRETokensForSequenceClassification, hf_liere.LieRETokensForTokenClassification)


def fields(encoding, num_axes):
    """Of an encoding, in blocks of 8 channels where it has them."""
    given = {"position_encoding": encoding, "num_axes": num_axes}
    if encoding == "absolute":
        return given | {"position_table_size": [3] * num_axes}
    return given | encoding_cases.fields(encoding, axes=num_axes, wanted=8)


def build(make, encoding="liere", num_axes=2, implementation="sdpa", **overrides):
    # Weights that are large enough for attention to tell tokens apart.
    config = {"feature_size": 5, "hidden_size": 48, "num_attention_heads": 2, "num_hidden_layers": 2}
    config |= {"intermediate_size": 64, "num_labels": 3, "initializer_range": 0.3}
    config = hf_liere.LieRETokensConfig(**config | fields(encoding, num_axes) | overrides)
    config._attn_implementation = implementation
    return make(config).eval()


def tokens(num_axes=2, count=9, batch=2):
    return torch.randn(batch, count, 5), torch.rand(batch, count, num_axes)


@pytest.mark.parametrize("encoding", ["none", "absolute", *ENCODINGS])
def test_a_sample_gives_the_same_logits_alone_and_padded(encoding):
    """Padding, features and positions, is not looked at, in gradients neither."""
    model, (features, positions) = build(HEADS[1], encoding), tokens(batch=3)
    mask = torch.arange(9) < torch.tensor([[9], [4], [1]])
    features[~mask], positions[~mask] = torch.nan, -torch.inf
    padded = model(features.requires_grad_(), positions.requires_grad_(), mask).logits
    for sample, length in enumerate((9, 4, 1)):
        alone = model(features[sample : sample + 1, :length], positions[sample, :length]).logits[0]
        torch.testing.assert_close(padded[sample, :length], alone, rtol=0, atol=1e-5)
    padded[mask].square().mean().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in (features, positions, *model.parameters()))


def test_only_tokens_that_no_sample_shows_may_be_anywhere():
    model, (features, positions) = build(HEADS[0]), tokens()
    shared, mask = positions[0].clone(), torch.ones(2, 9)
    mask[:, 6:], mask[1, 4:] = 0, 0
    shared[6:] = torch.nan
    alone = model(features[1:, :4], shared[:4]).logits
    torch.testing.assert_close(model(features, shared, mask).logits[1:], alone, rtol=0, atol=1e-5)
    shared[5] = torch.nan
    with pytest.raises(ValueError, match="2 values that are not finite"):
        model(features, shared, mask)
    # A mask of pairs hides nothing of a token but what others see.
    with pytest.raises(ValueError, match="values that are not finite"):
        model(features, shared, torch.ones(2, 1, 10, 10).bool())


@pytest.mark.parametrize(
    "encoding, num_axes, block_size, relative",
    [
        ("axial_rope", 3, None, True),
        ("rope_mixed", 3, None, True),
        ("comrope_ap", 3, 4, True),
        ("comrope_ld", 3, 8, True),
        ("liere", 3, 2, True),
        ("liere", 1, 8, True),
        ("liere", 3, 8, False),
        ("absolute", 3, None, False),
        ("golden_gate_rope", 3, None, True),
        ("cayley_string", 3, 24, True),
        ("circulant_string", 3, 8, True),
        ("spherical_rope", 2, None, False),
        ("liere_product", 3, 24, False),
        ("liere_product", 3, 2, True),
        ("liere_product", 1, 24, True),
    ],
)
def test_only_differences_of_positions_matter_where_that_is_promised(encoding, num_axes, block_size, relative):
    options = {} if block_size is None else {"block_size": block_size}
    # Bases that are not the identity, where they start.
    model = perturb(build(HEADS[0], encoding, num_axes, use_class_token=False, pooling="mean", **options)).double()
    features, positions = tokens(num_axes)
    features, positions = features.double(), positions.double()
    shift = torch.linspace(0.3, 0.7, num_axes, dtype=torch.float64)
    deviation = (model(features, positions + shift).logits - model(features, positions).logits).abs().max()
    # Without parameters that are float64, rotations are float32.
    tolerance = 1e-9 if encoding in LEARNED else 1e-5
    assert deviation < tolerance if relative else deviation > 1e-3


@pytest.mark.parametrize("encoding, num_axes", [case for case in CASES if case[0] in LEARNED])
def test_rotations_are_those_of_the_reference_at_scaled_positions(encoding, num_axes):
    scale = [0.5 + axis for axis in range(num_axes)]
    model = perturb(build(hf_liere.LieRETokensModel, encoding, num_axes, position_scale=scale, position_origin=-0.5))
    positions = torch.rand(4, num_axes)
    placed = model.place_tokens(positions, 2, 4)
    parameters = dict(model.rotary_encoding.named_parameters())
    for layer, rotation in enumerate(model.rotations(placed)):
        matrices = rotation.matrices().detach().double()[0]  # (heads, tokens, blocks, b, b)
        for head, token in itertools.product(range(2), range(4)):
            generators = reference.generators(parameters, model.config, num_axes, layer, head)
            at = (positions[token].double() + 0.5) * torch.tensor(scale, dtype=torch.float64)
            expected = reference.rotations(generators, at.view(1, -1), encoding)[0]
            # The class token comes first; float32.
            dense = torch.block_diag(*matrices[head, 1 + token])
            torch.testing.assert_close(dense, expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("size", [(1, 3), (2, 3, 2, 4, 3)])
def test_a_table_of_a_multilinear_function_is_that_function(size):
    """Between its corners, and that of the nearest place outside."""
    axes = len(size)
    model = build(hf_liere.LieRETokensModel, "absolute", axes, position_table_size=list(size))
    weights = torch.randn(axes) * (torch.tensor(size) > 1)

    def function(positions):
        return (1 + positions * weights).prod(dim=-1)

    corners = torch.cartesian_prod(*(torch.linspace(0, 1, entries) for entries in size))
    with torch.no_grad():
        model.embeddings.position_embeddings[0] = function(corners).unsqueeze(1)
    positions = torch.rand(50, axes) * 1.4 - 0.2
    values = read_table(model.embeddings.position_embeddings, size, positions)[0, :, 0]
    torch.testing.assert_close(values, function(positions.clamp(0, 1)), rtol=0, atol=1e-5)


def test_dense_rotations_do_not_fold():
    model = build(HEADS[0])
    for grids in (None, [(3, 3)]):
        with pytest.raises(ValueError, match="block_size=8 folds into .* a grid, and this model takes positions"):
            model.fold_rotations(grids)
    with pytest.raises(StrictDataclassError, match="liere with block_size=8 has constant rotations for grids only"):
        build(HEADS[0], folded_grids=[])


def test_bad_labels_and_positions_without_an_encoding():
    features, positions = tokens()
    with pytest.raises(ValueError, match=r"labels of shape \(2,\) must be \(2, 9\)"):
        build(HEADS[1])(features, positions, labels=torch.tensor([0, 1]))
    model = build(HEADS[0], "none")
    assert torch.equal(model(features, positions).logits, model(features).logits)
    with pytest.raises(ValueError, match="do not match the input"):
        model(features, positions[..., :1])


def test_a_classifier_of_tokens_needs_their_norm():
    with pytest.raises(ValueError, match="final_norm='pooled' .* accepted here: 'tokens', 'none'"):
        build(HEADS[1], final_norm="pooled")


def test_configurations_have_no_fields_of_images():
    fields_of_images = {"image_size", "patch_size", "num_channels", "coordinates"}
    assert not fields_of_images & hf_liere.LieRETokensConfig().to_dict().keys()


def test_export_is_for_images(tmp_path, capsys):
    build(HEADS[0]).save_pretrained(tmp_path / "saved")
    written = tmp_path / "written.pt2"
    assert main(["export", str(tmp_path / "saved"), str(written)]) == 1
    message = "LieRETokensForSequenceClassification: accepted are the image and video models"
    assert message in capsys.readouterr().err and not written.exists()


def test_encodings_are_upgraded():
    model = build(HEADS[1], "comrope_ld", 3, position_scale=0.5)
    features, positions = tokens(3)
    upgraded = upgrade_encoding(model, position_encoding="liere", block_size=24)
    expected = model(features, positions).logits
    # The rotations of one are planes in an eigenbasis, those of the other exponentials of float32 matrices.
    torch.testing.assert_close(upgraded(features, positions).logits, expected, rtol=0, atol=2e-5)
