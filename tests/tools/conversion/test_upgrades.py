"""Upgrades of the position encoding: the same outputs before and after, or a refusal with the reason."""

import json

import pytest
import torch
import transformers
from conversion_cases import images
from published_models import vit

import hf_liere
from hf_liere import upgrade_encoding
from hf_liere.encoding.kinds import ENCODINGS, encoding_of
from hf_liere.tools.cli import main
from hf_liere.tools.inspection.encodings import generator_matrices
from hf_liere.upgrades import LEARNED_ENCODINGS, ConversionError, resize_input


# The same function in another order of float32 operations.
EXACT = {"rtol": 0, "atol": 1e-5}


def classifier(encoding, **fields):
    model = vit(position_encoding=encoding, initializer_range=0.2, **fields)
    for name, parameter in model.named_parameters():
        if "content" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return model


@torch.no_grad()
def check_same(upgraded, model, *shapes):
    """The same logits of images of these shapes."""
    for shape in shapes or ((2, 3, 16, 16),):
        pixels = images(*shape)
        torch.testing.assert_close(upgraded(pixels).logits, model(pixels).logits, **EXACT)


EXACT_UPGRADES = [
    ("none", {}, "rope_mixed", None),
    ("none", {}, "liere", 8),
    ("absolute", {}, "comrope_ap", 4),
    ("absolute", {"position_table_size": [3, 3]}, "comrope_ld", 8),
    ("axial_rope", {}, "rope_mixed", None),
    ("axial_rope", {"rotate_prefix": True}, "liere", 8),
    ("axial_rope", {}, "comrope_ap", 2),
    ("axial_rope", {"use_absolute_position_embeddings": True}, "comrope_ap", 4),
    ("axial_rope", {}, "comrope_ld", 2),
    ("rope_mixed", {}, "liere", 2),
    ("rope_mixed", {}, "liere", 8),
    ("rope_mixed", {"share_heads": True}, "liere", 6),
    ("rope_mixed", {"content_positions": "heads"}, "liere", 8),
    ("comrope_ld", {"block_size": 8, "content_positions": "shared_sum", "share_layers": True}, "rope_mixed", None),
    ("rope_mixed", {}, "comrope_ld", 2),
    ("liere", {"block_size": 4}, "liere", 8),
    ("liere", {"block_size": 5}, "liere", 20),
    ("liere", {"block_size": 3, "share_layers": True}, "liere", 24),
    ("liere", {"block_size": 2}, "rope_mixed", None),
    ("comrope_ap", {"block_size": 4, "rotate_prefix": True}, "liere", 8),
    ("comrope_ap", {"block_size": 4}, "comrope_ld", 4),
    ("comrope_ap", {"block_size": 2}, "comrope_ap", 6),
    ("comrope_ap", {"block_size": 2}, "rope_mixed", None),
    ("comrope_ld", {"block_size": 4, "rotate_prefix": True, "prefix_coordinate": 0.25}, "liere", 12),
    ("comrope_ld", {"block_size": 4}, "comrope_ld", 4),
    ("comrope_ld", {"block_size": 2}, "rope_mixed", None),
    # In another basis.
    ("comrope_ld", {"block_size": 8, "rotate_values": True}, "rope_mixed", None),
    ("comrope_ld", {"block_size": 3}, "rope_mixed", None),
    ("comrope_ld", {"block_size": 8, "share_heads": True, "share_layers": True}, "liere", 6),
    ("comrope_ld", {"block_size": 8}, "comrope_ld", 4),
    ("comrope_ap", {"block_size": 4, "rotate_prefix": True}, "rope_mixed", None),
    ("comrope_ap", {"block_size": 6}, "comrope_ap", 4),
    ("comrope_ap", {"block_size": 3}, "comrope_ap", 6),
    ("axial_rope", {}, "comrope_ld", 4),
    ("axial_rope", {}, "comrope_ap", 12),
    # The spectrum that it starts with has two directions.
    ("rope_mixed", {}, "comrope_ld", 6),
]


@pytest.mark.parametrize("old, fields, new, block_size", EXACT_UPGRADES)
@torch.no_grad()
def test_outputs_are_unchanged(old, fields, new, block_size):
    model = classifier(old, num_register_tokens=1, **fields)
    upgraded = upgrade_encoding(model, position_encoding=new, block_size=block_size)
    assert upgraded.config.position_encoding == new and upgraded.config.block_size == (block_size or 2)
    if old not in ("none", "absolute"):
        assert upgraded.config.coordinates == model.config.coordinates
    for name in ("prefix_coordinate", "use_absolute_position_embeddings", "pooling"):
        assert getattr(upgraded.config, name) == getattr(model.config, name)
    # Where nothing was rotated, as in a new model.
    rotates = new.startswith("comrope") if old in ("none", "absolute") else model.config.rotate_prefix
    assert upgraded.config.rotate_prefix is rotates
    check_same(upgraded, model, (2, 3, 16, 16), (2, 3, 8, 24))


@pytest.mark.parametrize(
    "old, fields, new, block_size",
    [
        ("axial_rope", {}, "liere", 24),
        ("axial_rope", {"hidden_size": 40}, "rope_mixed", None),
        ("rope_mixed", {}, "liere", 12),
        ("comrope_ap", {"block_size": 4}, "liere", 8),
        ("comrope_ap", {"block_size": 2}, "comrope_ap", 4),
        ("comrope_ld", {"block_size": 4, "coordinates": "unit_width"}, "liere", 24),
    ],
)
@torch.no_grad()
def test_outputs_are_unchanged_on_three_axes(tiny_video, old, fields, new, block_size):
    config = tiny_video(position_encoding=old, initializer_range=0.2, **fields)
    model = hf_liere.LieREVideoForVideoClassification(config).eval()
    check_same(upgrade_encoding(model, position_encoding=new, block_size=block_size), model, (2, 6, 3, 8, 12))


@torch.no_grad()
def test_upgrades_of_rotations_are_not_vacuous():
    """Without its rotations the model of the tests above would give other outputs."""
    model = classifier("rope_mixed")
    before = model(images(2, 3, 16, 16)).logits
    model.liere.rotary_encoding.generators.zero_()
    assert (model(images(2, 3, 16, 16)).logits - before).abs().max() > 1e-2


def test_upgraded_models_train_and_survive_saving(tmp_path):
    model = classifier("rope_mixed")
    upgraded = upgrade_encoding(model, position_encoding="liere", block_size=8).train()
    labels = torch.tensor([0, 1])
    upgraded(images(2, 3, 16, 16), labels=labels).loss.backward()
    # Also the entries that were zero, between the planes, are free to move.
    generators = upgraded.liere.rotary_encoding.generators
    assert ((generators == 0) & (generators.grad != 0)).any()
    upgraded.save_pretrained(tmp_path)
    reloaded = hf_liere.LieREViTForImageClassification.from_pretrained(tmp_path)
    assert reloaded.config.to_diff_dict() == upgraded.config.to_diff_dict()
    assert torch.equal(reloaded(images(2, 3, 16, 16)).logits, upgraded.eval()(images(2, 3, 16, 16)).logits)


def test_the_old_model_is_left_alone():
    model = classifier("axial_rope")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    upgraded = upgrade_encoding(model, position_encoding="comrope_ap", block_size=4)
    with torch.no_grad():
        for parameter in upgraded.parameters():
            parameter.add_(1.0)
    assert model.config.position_encoding == "axial_rope"
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


@torch.no_grad()
def test_every_class_type_and_mode_is_kept(tiny):
    config = tiny(position_encoding="rope_mixed")
    config._attn_implementation = "eager"
    for build in (
        hf_liere.LieREViTModel,
        hf_liere.LieREViTBackbone,
        hf_liere.LieREViTForMaskedImageModeling,
        lambda config: hf_liere.LieREViTModel(config, use_mask_token=True),
    ):
        model = build(config).train().to(torch.bfloat16)
        upgraded = upgrade_encoding(model, position_encoding="liere", block_size=4)
        assert type(upgraded) is type(model) and upgraded.training and upgraded.dtype == torch.bfloat16
        assert upgraded.config._attn_implementation == "eager"
        inputs = {"pixel_values": images(1, 3, 16, 16)}
        assert upgraded(**inputs) is not None
        assert set(upgraded.state_dict()) == set(model.state_dict())


@torch.no_grad()
def test_shared_generators_can_be_separated_and_joined_until_they_differ():
    model = classifier("liere", block_size=4, share_heads=True, share_layers=True)
    upgraded = upgrade_encoding(model, position_encoding="liere", block_size=8, share_heads=False, share_layers=False)
    assert upgraded.liere.rotary_encoding.generators.shape == (2, 2, 2, 3, 28)
    check_same(upgraded, model)
    joined = upgrade_encoding(upgraded, position_encoding="liere", block_size=8, share_layers=True, share_heads=True)
    assert joined.liere.rotary_encoding.generators.shape == (2, 1, 1, 3, 28)
    check_same(joined, model)
    upgraded.liere.rotary_encoding.generators[:, 1] *= 1.01
    with pytest.raises(ConversionError, match="share_layers=True: different generators"):
        upgrade_encoding(upgraded, position_encoding="liere", block_size=8, share_layers=True)


@torch.no_grad()
def test_equal_generators_can_be_joined():
    """Golden gate RoPE has different directions in its heads, and the same in its layers."""
    model = classifier("golden_gate_rope")
    upgraded = upgrade_encoding(model, position_encoding="rope_mixed", share_layers=True)
    check_same(upgraded, model)
    with pytest.raises(ConversionError, match="share_heads=True: different generators"):
        upgrade_encoding(model, position_encoding="rope_mixed", share_heads=True)


@torch.no_grad()
def test_special_values_may_be_upgraded_to_comrope_ld():
    """LieRE whose generators are multiples of one matrix is ComRoPE-LD."""
    model = classifier("liere", block_size=4)
    generators = model.liere.rotary_encoding.generators
    generators[1] = -0.5 * generators[0]
    upgraded = upgrade_encoding(model, position_encoding="comrope_ld", block_size=4)
    check_same(upgraded, model)


@torch.no_grad()
def test_generators_that_happen_to_commute_become_planes_and_blocks_again():
    """What ComRoPE-LD learned goes through LieRE, which knows nothing of it, to RoPE-Mixed and back to ComRoPE-LD."""
    model = classifier("comrope_ld", block_size=8)
    as_liere = upgrade_encoding(model, position_encoding="liere", block_size=24)
    planes = upgrade_encoding(as_liere, position_encoding="rope_mixed")
    back = upgrade_encoding(planes, position_encoding="comrope_ld", block_size=8)
    for upgraded in (as_liere, planes, back):
        check_same(upgraded, model)
    old, new = model.liere.rotary_encoding, back.liere.rotary_encoding
    torch.testing.assert_close(canonical(new), canonical(old), rtol=1e-5, atol=1e-6)


def canonical(encoding):
    """Magnitudes of the planes of every head, in order: eigenvalues of the generator of a random position."""
    matrices = torch.einsum("a,alhbij->lhbij", torch.tensor([0.3, 0.7]).double(), generator_matrices(encoding))
    return torch.linalg.eigvalsh(1j * matrices).flatten(-2).sort().values


@pytest.mark.parametrize("start", ["zeros", "ones", "drawn"])
@pytest.mark.parametrize("old", ["none", *ENCODINGS])
@torch.no_grad()
def test_every_pair_of_encodings_and_blocks_is_right_or_refused(old, start):
    """Also from generators that are zero or all equal, which no training leaves but a script does."""
    sizes = {"circulant_string": {"block_size": 8}, "comrope_ap": {"block_size": 4}}.get(old, {})
    model = classifier(old, num_hidden_layers=1, **sizes)
    encoding, pixels, exact = model.liere.rotary_encoding, images(1, 3, 8, 16), 0
    for parameter in encoding.parameters() if encoding is not None and start != "drawn" else ():
        parameter.fill_(start == "ones")
    expected = model(pixels).logits
    for new in LEARNED_ENCODINGS:
        # Blocks of whole heads contain shares of them.
        for size in (24,) if old == "shares" else (None, 3, 5, 6, 8):
            try:
                upgraded = upgrade_encoding(model, position_encoding=new, block_size=size)
            except ConversionError:
                continue
            torch.testing.assert_close(upgraded(pixels).logits, expected, **EXACT, msg=f"{new} {size}")
            exact += 1
    # From zero to whatever has blocks of this size; products need not commute.
    learns = encoding is not None and next(encoding.parameters(), None) is not None
    is_zero = start == "zeros" and learns and old != "shares"
    assert exact == 21 if is_zero else exact or encoding_of(model.config).product


WITHOUT_CLASS_TOKEN = {"use_class_token": False, "pooling": "mean"}


@pytest.mark.parametrize("old, new", [("rope_mixed", "liere"), ("comrope_ld", "rope_mixed"), ("axial_rope", "liere")])
@pytest.mark.parametrize("coordinates", [("train_grid", "centred_grid"), ("centred_grid", "train_grid")])
@torch.no_grad()
def test_commuting_generators_may_be_centred(old, new, coordinates):
    """Attention depends on differences of positions alone, at every size."""
    model = classifier(old, coordinates=coordinates[0], **WITHOUT_CLASS_TOKEN)
    upgraded = upgrade_encoding(model, position_encoding=new, block_size=2, coordinates=coordinates[1])
    assert upgraded.config.coordinates == coordinates[1]
    check_same(upgraded, model, (2, 3, 16, 16), (2, 3, 8, 24))


@torch.no_grad()
def test_a_model_without_rotations_takes_any_coordinates():
    model = classifier("absolute")
    upgraded = upgrade_encoding(model, position_encoding="liere", coordinates="centred_grid")
    assert upgraded.config.coordinates == "centred_grid"
    check_same(upgraded, model)


RESIZED = [
    ("none", {}),
    ("absolute", {}),
    ("absolute", {"use_class_token": False, "pooling": "mean"}),
    ("absolute", {"position_table_size": [3, 3]}),
    ("axial_rope", {}),
    ("rope_mixed", {"coordinates": "train_index"}),
    ("rope_mixed", {"coordinates": "train_index", "content_positions": "heads_sum"}),
    ("rope_mixed", {"use_absolute_position_embeddings": True}),
    ("liere", {"block_size": 4}),
    ("liere", {"share_layers": True}),
    ("liere", {"coordinates": "unit", "rotate_prefix": True}),
    ("liere", {"coordinates": "centred_grid", "rotate_prefix": True}),
    ("comrope_ap", {"block_size": 4, "coordinates": "train_grid"}),
    ("comrope_ld", {"coordinates": "train_grid"}),
    ("comrope_ld", {"coordinates": "centred_grid"}),
    ("comrope_ld", {"use_absolute_position_embeddings": True}),
    ("cayley_string", {"coordinates": "train_grid"}),
    ("liere_product", {"coordinates": "train_grid"}),
    ("circulant_string", {"block_size": 8, "coordinates": "train_grid"}),
]


@pytest.mark.parametrize("encoding, fields", RESIZED)
@torch.no_grad()
def test_a_resized_model_computes_the_same_of_images_of_its_size(encoding, fields):
    model = classifier(encoding, **fields)
    resized = resize_input(model, [24, 40])
    assert resized.config.train_grid == (6, 10) and model.config.train_grid == (4, 4)
    check_same(resized, model, (2, 3, 24, 40))
    if resized.config.use_absolute_position_embeddings and "position_table_size" not in fields:
        assert resized.liere.embeddings.position_embeddings.shape[1] == 60 + resized.config.use_class_token


@pytest.mark.parametrize(
    "encoding, block_size, coordinates",
    [("rope_mixed", None, None), ("liere", 4, "centred_grid"), ("comrope_ap", 4, None)],
)
@torch.no_grad()
def test_the_command_upgrades_to_other_images(tmp_path, capsys, encoding, block_size, coordinates):
    """Against the model itself, which resizes its table when it is called."""
    plain = classifier("absolute", num_labels=3)
    plain.save_pretrained(tmp_path / "plain")
    transformers.ViTImageProcessor(image_mean=[0.1, 0.2, 0.3]).save_pretrained(tmp_path / "plain")
    blocks = [] if block_size is None else ["--block_size", str(block_size)]
    places = [] if coordinates is None else ["--coordinates", coordinates]
    command = [str(tmp_path / "plain"), str(tmp_path / "upgraded"), "--position_encoding", encoding, *blocks, *places]
    assert main(["upgrade", *command, "--image_size", "32"]) == 0
    assert f"LieREViTForImageClassification with position_encoding='{encoding}'" in capsys.readouterr().out
    upgraded = transformers.AutoModelForImageClassification.from_pretrained(tmp_path / "upgraded")
    assert upgraded.config.image_size == 32 and upgraded.config.position_encoding == encoding
    assert coordinates is None or upgraded.config.coordinates == coordinates
    assert sum(parameter.numel() for _, parameter in upgraded.liere.rotary_parameters()) > 0
    check_same(upgraded, plain, (2, 3, 32, 32))
    processor = json.loads((tmp_path / "upgraded" / "preprocessor_config.json").read_text())
    assert processor["size"] == {"height": 32, "width": 32} and processor["image_mean"] == [0.1, 0.2, 0.3]
    card = (tmp_path / "upgraded" / "README.md").read_text()
    assert f"`position_encoding='{encoding}'`" in card and "`image_size=32`" in card
