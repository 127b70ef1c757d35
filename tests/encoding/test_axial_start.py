"""`rotary_init="axial"`: learned encodings that start at the rotations of Axial RoPE with the indices of patches."""

import pytest
import torch
from encoding_cases import perturb
from inspection_pages import describe_start

import hf_liere
from hf_liere.encoding.folding import build_encoding
from hf_liere.tools.inspection.analysis import analyse


SIZES = {"hidden_size": 48, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 32}
RECTANGLE = {**SIZES, "image_size": (32, 48), "patch_size": 8, "initializer_range": 0.2}
CLIPS = {**RECTANGLE, "num_frames": 8, "tubelet_size": 2}
# (encoding, block_size, axial_layout) that contain Axial RoPE in place, with heads of 24 channels on two axes.
PLANES = [
    ("rope_mixed", 2, "interleaved"),
    ("liere", 2, "blocks"),
    ("liere", 8, "blocks"),
    ("liere", 8, "interleaved"),
    ("comrope_ld", 2, "interleaved"),
    ("comrope_ld", 6, "blocks"),
    ("comrope_ap", 2, "interleaved"),
    ("comrope_ap", 12, "blocks"),
    ("cayley_string", 24, "interleaved"),
    ("liere_product", 24, "interleaved"),
    ("liere_product", 8, "blocks"),
]
# Upgrades to these may turn their planes.
WITH_BASES = ("cayley_string", "liere_product")
# Conventions with the first patch at 0, where prefix tokens are as well.
ON_GRIDS = ("index", "train_grid", "fixed_grid", "train_index")


def image_config(**fields):
    return hf_liere.LieREViTConfig(**{**RECTANGLE, **fields})


@pytest.fixture
def in_float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def check_logits(kind, fixed, learned, pixels):
    """Those of Axial RoPE, with its weights. ComRoPE's eigenbasis is that of a matrix perturbed by 2e-12."""
    fixed, model = kind(fixed).eval(), kind(learned).eval()
    assert not model.load_state_dict(fixed.state_dict(), strict=False).unexpected_keys
    torch.testing.assert_close(model(pixels).logits, fixed(pixels).logits, rtol=0, atol=1e-8)


@pytest.mark.parametrize("encoding, size, layout", PLANES)
@pytest.mark.parametrize("coordinates", ON_GRIDS)
def test_logits_of_images(encoding, size, layout, coordinates, in_float64):
    """With class and register tokens, an own base and a scale."""
    fields = {"axial_layout": layout, "rope_theta": 40.0, "rotary_init_scale": 1.5}
    fields |= {"num_register_tokens": 2, "rotate_prefix": False}
    own = {"position_encoding": encoding, "block_size": size, "rotary_init": "axial", "coordinates": coordinates}
    configs = image_config(position_encoding="axial_rope", **fields), image_config(**own, **fields)
    check_logits(hf_liere.LieREViTForImageClassification, *configs, torch.randn(2, 3, 32, 48))


@pytest.mark.parametrize("coordinates", [*ON_GRIDS, "unit", "unit_width", "centred_grid"])
def test_logits_of_clips(coordinates, in_float64):
    """On three axes in any convention, in heads of 20 channels, of which Axial RoPE rotates 18."""
    fields = {**CLIPS, "hidden_size": 40, "use_class_token": False, "pooling": "mean"}
    own = {"position_encoding": "liere", "block_size": 4, "rotary_init": "axial", "coordinates": coordinates}
    fixed = hf_liere.LieREVideoConfig(**fields, position_encoding="axial_rope")
    learned, kind = hf_liere.LieREVideoConfig(**fields, **own), hf_liere.LieREVideoForVideoClassification
    check_logits(kind, fixed, learned, torch.randn(2, 8, 3, 32, 48))


def test_centred_coordinates_place_prefix_tokens_in_the_middle(in_float64):
    """In `unit`, a class token at ½ is where `index` has the middle of a square grid."""
    square = {"image_size": 32, "patch_size": 8}
    fixed = image_config(**square, position_encoding="axial_rope", rotate_prefix=True, prefix_coordinate=1.5)
    learned = image_config(**square, position_encoding="comrope_ld", block_size=6, rotary_init="axial")
    assert learned.rotate_prefix and learned.coordinates == "unit"
    check_logits(hf_liere.LieREViTForImageClassification, fixed, learned, torch.randn(2, 3, 32, 32))


@pytest.mark.parametrize("encoding, size, layout", [case for case in PLANES if case[0] not in WITH_BASES])
def test_an_upgrade_has_the_parameters_of_the_start(encoding, size, layout):
    model = hf_liere.LieREViTModel(image_config(position_encoding="axial_rope", axial_layout=layout))
    upgraded = hf_liere.upgrade_encoding(model, position_encoding=encoding, block_size=size)
    assert (upgraded.config.rotary_init, upgraded.config.axial_layout) == ("axial", layout)
    own = {"position_encoding": encoding, "block_size": size, "rotary_init": "axial", "axial_layout": layout}
    started = build_encoding(image_config(**own, coordinates="index"), 2)
    for name, parameter in started.named_parameters():
        assert torch.equal(upgraded.rotary_encoding.get_parameter(name), parameter)


@pytest.mark.parametrize("encoding, size", [("liere", 4), ("comrope_ld", 4)])
def test_models_of_tokens_take_positions_as_given(encoding, size):
    fields = {**SIZES, "num_axes": 3, "feature_size": 4, "position_scale": 0.5, "rope_theta": 1000}
    own = {"position_encoding": encoding, "block_size": size, "rotary_init": "axial"}
    fixed = hf_liere.LieRETokensModel(hf_liere.LieRETokensConfig(**fields, position_encoding="axial_rope")).eval()
    model = hf_liere.LieRETokensModel(hf_liere.LieRETokensConfig(**fields, **own)).eval()
    model.load_state_dict(fixed.state_dict(), strict=False)
    features, positions = torch.randn(2, 7, 4), 5 * torch.randn(7, 3)
    # Generators are rounded to float32, at angles up to twenty.
    torch.testing.assert_close(model(features, positions)[0], fixed(features, positions)[0], rtol=0, atol=2e-5)


@pytest.mark.parametrize("encoding, size", [("liere", 8), ("comrope_ld", 6)])
def test_training_moves_generators_and_inspection_shows_how_far(encoding, size, tmp_path):
    config = image_config(position_encoding=encoding, block_size=size, rotary_init="axial", num_labels=3)
    model = hf_liere.LieREViTForImageClassification(config)
    started = analyse(model).encoding
    assert "as initialised by rotary_init='axial': nothing has been learned" in describe_start(started)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randn(4, 3, 32, 48), labels=torch.tensor([0, 1, 2, 0])).loss.backward()
    assert all(parameter.grad.any() for _, parameter in model.rotary_parameters())
    optimizer.step()
    perturb(model, 0.01)
    model.save_pretrained(tmp_path)
    loaded = hf_liere.LieREViTForImageClassification.from_pretrained(tmp_path)
    for name, parameter in model.rotary_parameters():
        assert torch.equal(loaded.get_parameter(name), parameter)
    analysis = analyse(loaded).encoding
    step = torch.tensor([1 / 3, 1 / 5] if encoding == "liere" else [1 / 4, 1 / 6], dtype=torch.float64)
    moved = (analysis.generators - started.generators).double().flatten(3).norm(dim=-1) * step.view(2, 1, 1)
    found = analysis.initialization.movement
    # The generators of the analysis are rounded to float32.
    torch.testing.assert_close(found.distance, moved, rtol=1e-4, atol=0)
    share = (moved.norm() / found.start.norm()).item()
    assert f"rotary_init='axial', by {share:.1%} of its Frobenius norm" in describe_start(analysis)
    # Axial RoPE turns every plane of a head by θ^(−i/q) from patch to patch, in two entries.
    expected = 2 * (100.0 ** -(2 * torch.arange(6, dtype=torch.float64) / 6)).sum()
    torch.testing.assert_close(found.start.square(), expected.expand(2, 2, 2), rtol=1e-5, atol=0)


def test_a_random_start_has_no_distance():
    model = hf_liere.LieREViTModel(image_config(position_encoding="rope_mixed"))
    assert analyse(model).encoding.initialization.movement is None


@pytest.mark.parametrize("folded", [False, True])
def test_a_start_at_zero(folded):
    model = perturb(
        hf_liere.LieREViTModel(image_config(position_encoding="comrope_ld", block_size=6, rotary_init="zeros"))
    )
    analysis = analyse(model.fold_rotations() if folded else model).encoding
    text = describe_start(analysis)
    assert "initialised to zero (rotary_init='zeros'): all of this was learned" in text and "radians per patch" in text
