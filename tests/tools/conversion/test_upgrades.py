"""Upgrades of the position encoding: the same outputs before and after, or a refusal with the reason."""

import json

import pytest
import torch
import transformers

import hf_liere
from hf_liere import upgrade_encoding
from hf_liere.encoding.kinds import ENCODINGS, encoding_of
from hf_liere.tools.cli import main
from hf_liere.tools.inspection.encodings import generator_matrices
from hf_liere.upgrades import LEARNED_ENCODINGS, ConversionError, resize_input


# The same function in another order of float32 operations.
EXACT = {"rtol": 0, "atol": 1e-5}


def classifier(config):
    config.initializer_range = 0.2
    video = isinstance(config, hf_liere.LieREVideoConfig)
    build = hf_liere.LieREVideoForVideoClassification if video else hf_liere.LieREViTForImageClassification
    torch.manual_seed(0)
    return build(config).eval()


def images(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


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
def test_outputs_are_unchanged(tiny, old, fields, new, block_size):
    model = classifier(tiny(position_encoding=old, num_register_tokens=1, **fields))
    upgraded = upgrade_encoding(model, position_encoding=new, block_size=block_size)
    assert upgraded.config.position_encoding == new and upgraded.config.block_size == (block_size or 2)
    if old not in ("none", "absolute"):
        assert upgraded.config.coordinates == model.config.coordinates
    for name in ("prefix_coordinate", "use_absolute_position_embeddings", "pooling"):
        assert getattr(upgraded.config, name) == getattr(model.config, name)
    # Where nothing was rotated, as in a new model.
    rotates = new.startswith("comrope") if old in ("none", "absolute") else model.config.rotate_prefix
    assert upgraded.config.rotate_prefix is rotates
    for size in ((16, 16), (8, 24)):
        pixels = images(2, 3, *size)
        torch.testing.assert_close(upgraded(pixels).logits, model(pixels).logits, **EXACT)


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
    model = classifier(tiny_video(position_encoding=old, **fields))
    upgraded = upgrade_encoding(model, position_encoding=new, block_size=block_size)
    pixels = images(2, 6, 3, 8, 12)
    torch.testing.assert_close(upgraded(pixels).logits, model(pixels).logits, **EXACT)


@torch.no_grad()
def test_upgrades_of_rotations_are_not_vacuous(tiny):
    """Without its rotations the model of the tests above would give other outputs."""
    model = classifier(tiny(position_encoding="rope_mixed"))
    before = model(images(2, 3, 16, 16)).logits
    model.liere.rotary_encoding.generators.zero_()
    assert (model(images(2, 3, 16, 16)).logits - before).abs().max() > 1e-2


def test_upgraded_models_train_and_survive_saving(tiny, tmp_path):
    model = classifier(tiny(position_encoding="rope_mixed"))
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


def test_the_old_model_is_left_alone(tiny):
    model = classifier(tiny(position_encoding="axial_rope"))
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
def test_shared_generators_can_be_separated_and_joined_until_they_differ(tiny):
    model = classifier(tiny(position_encoding="liere", block_size=4, share_heads=True, share_layers=True))
    upgraded = upgrade_encoding(model, position_encoding="liere", block_size=8, share_heads=False, share_layers=False)
    assert upgraded.liere.rotary_encoding.generators.shape == (2, 2, 2, 3, 28)
    pixels = images(2, 3, 16, 16)
    torch.testing.assert_close(upgraded(pixels).logits, model(pixels).logits, **EXACT)
    joined = upgrade_encoding(upgraded, position_encoding="liere", block_size=8, share_layers=True, share_heads=True)
    assert joined.liere.rotary_encoding.generators.shape == (2, 1, 1, 3, 28)
    torch.testing.assert_close(joined(pixels).logits, model(pixels).logits, **EXACT)
    upgraded.liere.rotary_encoding.generators[:, 1] *= 1.01
    with pytest.raises(ConversionError, match="share_layers=True: different generators"):
        upgrade_encoding(upgraded, position_encoding="liere", block_size=8, share_layers=True)


@torch.no_grad()
def test_equal_generators_can_be_joined(tiny):
    """Golden gate RoPE has different directions in its heads, and the same in its layers."""
    model = classifier(tiny(position_encoding="golden_gate_rope"))
    upgraded = upgrade_encoding(model, position_encoding="rope_mixed", share_layers=True)
    pixels = images(2, 3, 16, 16)
    torch.testing.assert_close(upgraded(pixels).logits, model(pixels).logits, **EXACT)
    with pytest.raises(ConversionError, match="share_heads=True: different generators"):
        upgrade_encoding(model, position_encoding="rope_mixed", share_heads=True)


def test_the_command_refuses_other_models(tmp_path, capsys):
    sizes = {"hidden_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    tokens = hf_liere.LieRETokensConfig(**sizes, feature_size=3, num_axes=2)
    vit = transformers.ViTModel(transformers.ViTConfig(**sizes, image_size=16, patch_size=4))
    hf_liere.LieRETokensForSequenceClassification(tokens).save_pretrained(tmp_path / "liere_tokens")
    vit.save_pretrained(tmp_path / "vit")
    hf_liere.patch(vit, hf_liere.RotaryPatchConfig()).save_pretrained(tmp_path / "rotary_vit")
    for kind in ("liere_tokens", "vit", "rotary_vit"):
        capsys.readouterr()
        command = ["upgrade", str(tmp_path / kind), str(tmp_path / "out"), "--position_encoding", "liere"]
        assert main(command) == 1
        error = capsys.readouterr().err
        assert f"model_type='{kind}'" in error and "accepted are LieREViT…" in error and "hf_liere.patch" in error
    assert not (tmp_path / "out").exists()


def test_folded_models_stay_as_they_are(tiny):
    folded = classifier(tiny(position_encoding="comrope_ld", block_size=8)).fold_rotations()
    with pytest.raises(ConversionError, match="a folded model cannot be changed"):
        upgrade_encoding(folded, position_encoding="liere", block_size=8)
    with pytest.raises(ConversionError, match="a folded model cannot be changed"):
        resize_input(folded, 32)


@torch.no_grad()
def test_special_values_may_be_upgraded_to_comrope_ld(tiny):
    """LieRE whose generators are multiples of one matrix is ComRoPE-LD."""
    model = classifier(tiny(position_encoding="liere", block_size=4))
    generators = model.liere.rotary_encoding.generators
    generators[1] = -0.5 * generators[0]
    upgraded = upgrade_encoding(model, position_encoding="comrope_ld", block_size=4)
    pixels = images(2, 3, 16, 16)
    torch.testing.assert_close(upgraded(pixels).logits, model(pixels).logits, **EXACT)


@torch.no_grad()
def test_generators_that_happen_to_commute_become_planes_and_blocks_again(tiny):
    """What ComRoPE-LD learned goes through LieRE, which knows nothing of it, to RoPE-Mixed and back to ComRoPE-LD."""
    model = classifier(tiny(position_encoding="comrope_ld", block_size=8))
    as_liere = upgrade_encoding(model, position_encoding="liere", block_size=24)
    planes = upgrade_encoding(as_liere, position_encoding="rope_mixed")
    back = upgrade_encoding(planes, position_encoding="comrope_ld", block_size=8)
    pixels = images(2, 3, 16, 16)
    for upgraded in (as_liere, planes, back):
        torch.testing.assert_close(upgraded(pixels).logits, model(pixels).logits, **EXACT)
    old, new = model.liere.rotary_encoding, back.liere.rotary_encoding
    torch.testing.assert_close(canonical(new), canonical(old), rtol=1e-5, atol=1e-6)


def canonical(encoding):
    """Magnitudes of the planes of every head, in order: eigenvalues of the generator of a random position."""
    matrices = torch.einsum("a,alhbij->lhbij", torch.tensor([0.3, 0.7]).double(), generator_matrices(encoding))
    return torch.linalg.eigvalsh(1j * matrices).flatten(-2).sort().values


REFUSED = [
    ("rope_mixed", {}, "comrope_ap", 2, "rotates with one axis alone, and 12 planes of a head rotate with several"),
    ("liere", {"block_size": 4}, "comrope_ap", 4, "rotates with one axis alone.*do not commute"),
    ("comrope_ld", {"block_size": 4}, "comrope_ap", 4, "rotates with one axis alone, and 12 planes"),
    ("rope_mixed", {}, "comrope_ld", 8, "6 planes.*one ratio of the axes and need 2 of the 3 blocks.*1 are left"),
    ("liere", {"block_size": 4}, "comrope_ld", 4, "multiples of one matrix.*generators of this model do not commute"),
    ("comrope_ld", {"block_size": 4}, "comrope_ld", 8, "2 planes of a head rotate with one ratio.*0 are left"),
    ("axial_rope", {}, "comrope_ld", 24, "6 planes of a head rotate with one ratio of the axes"),
    ("liere", {"block_size": 8}, "liere", 4, "8 does not divide 4.*The generators of this model do not commute"),
    ("liere", {"block_size": 4}, "liere", 6, "4 does not divide 6"),
    (
        "liere",
        {"block_size": 8},
        "rope_mixed",
        None,
        "8 does not divide 2.*The generators of this model do not commute",
    ),
    ("liere", {"block_size": 3}, "liere", 9, "last 6 of 24 channels unrotated, blocks of 3 only 0"),
    ("comrope_ld", {"block_size": 4}, "liere", 5, "12 planes of a head.*need 6.*4 are left"),
    ("rope_mixed", {}, "axial_rope", None, "learns no rotations.*liere, rope_mixed, comrope_ap, comrope_ld"),
    ("rope_mixed", {}, "none", None, "learns no rotations"),
    ("rope_mixed", {}, "liere", 25, "block_size=25"),
    ("absolute", {}, "comrope_ap", 8, "block_size=8 times 2 axes"),
]


@pytest.mark.parametrize("old, fields, new, block_size, reason", REFUSED)
def test_what_has_no_exact_upgrade_is_refused_with_the_reason(tiny, old, fields, new, block_size, reason):
    model = classifier(tiny(position_encoding=old, **fields))
    with pytest.raises(ConversionError, match=f"(?s){reason}"):
        upgrade_encoding(model, position_encoding=new, block_size=block_size)


@pytest.mark.parametrize("start", ["zeros", "ones", "drawn"])
@pytest.mark.parametrize("old", ["none", *ENCODINGS])
@torch.no_grad()
def test_every_pair_of_encodings_and_blocks_is_right_or_refused(tiny, old, start):
    """Also from generators that are zero or all equal, which no training leaves but a script does."""
    sizes = {"circulant_string": {"block_size": 8}, "comrope_ap": {"block_size": 4}}.get(old, {})
    model = classifier(tiny(position_encoding=old, num_hidden_layers=1, **sizes))
    encoding, pixels, exact = model.liere.rotary_encoding, images(1, 3, 8, 16), 0
    for parameter in encoding.parameters() if encoding is not None and start != "drawn" else ():
        parameter.fill_(start == "ones")
    expected = model(pixels).logits
    for new in LEARNED_ENCODINGS:
        for size in (None, 3, 5, 6, 8):
            try:
                upgraded = upgrade_encoding(model, position_encoding=new, block_size=size)
            except ConversionError:
                continue
            torch.testing.assert_close(upgraded(pixels).logits, expected, **EXACT, msg=f"{new} {size}")
            exact += 1
    # From zero to whatever has blocks of this size; products need not commute.
    learns = encoding is not None and next(encoding.parameters(), None) is not None
    assert exact == 21 if start == "zeros" and learns else exact or encoding_of(model.config).product


WITHOUT_CLASS_TOKEN = {"use_class_token": False, "pooling": "mean"}


@pytest.mark.parametrize("old, new", [("rope_mixed", "liere"), ("comrope_ld", "rope_mixed"), ("axial_rope", "liere")])
@pytest.mark.parametrize("coordinates", [("train_grid", "centred_grid"), ("centred_grid", "train_grid")])
@torch.no_grad()
def test_commuting_generators_may_be_centred(tiny, old, new, coordinates):
    """Attention depends on differences of positions alone, at every size."""
    model = classifier(tiny(position_encoding=old, coordinates=coordinates[0], **WITHOUT_CLASS_TOKEN))
    upgraded = upgrade_encoding(model, position_encoding=new, block_size=2, coordinates=coordinates[1])
    assert upgraded.config.coordinates == coordinates[1]
    for size in ((16, 16), (8, 24)):
        pixels = images(2, 3, *size)
        torch.testing.assert_close(upgraded(pixels).logits, model(pixels).logits, **EXACT)


@torch.no_grad()
def test_a_model_without_rotations_takes_any_coordinates(tiny):
    model = classifier(tiny(position_encoding="absolute"))
    upgraded = upgrade_encoding(model, position_encoding="liere", coordinates="centred_grid")
    assert upgraded.config.coordinates == "centred_grid"
    pixels = images(2, 3, 16, 16)
    torch.testing.assert_close(upgraded(pixels).logits, model(pixels).logits, **EXACT)


@pytest.mark.parametrize(
    "fields, coordinates, reason",
    [
        ({"position_encoding": "liere", **WITHOUT_CLASS_TOKEN}, "centred_grid", "generators of liere need not commute"),
        ({"position_encoding": "rope_mixed", "coordinates": "train_grid"}, "centred_grid", "relative to class"),
        ({"position_encoding": "rope_mixed", **WITHOUT_CLASS_TOKEN}, "centred_grid", "'index' to .*differ by a shift"),
        ({"position_encoding": "absolute", "position_table_size": [3, 3]}, "centred_grid", "table is read at"),
    ],
)
def test_coordinates_that_change_the_function_are_refused(tiny, fields, coordinates, reason):
    with pytest.raises(ConversionError, match=reason):
        upgrade_encoding(classifier(tiny(**fields)), position_encoding="liere", coordinates=coordinates)


RESIZED = [
    ("none", {}),
    ("absolute", {}),
    ("absolute", {"use_class_token": False, "pooling": "mean"}),
    ("absolute", {"position_table_size": [3, 3]}),
    ("axial_rope", {}),
    ("rope_mixed", {"coordinates": "train_index"}),
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
def test_a_resized_model_computes_the_same_of_images_of_its_size(tiny, encoding, fields):
    model = classifier(tiny(position_encoding=encoding, **fields))
    pixels = images(2, 3, 24, 40)
    resized = resize_input(model, [24, 40])
    assert resized.config.train_grid == (6, 10) and model.config.train_grid == (4, 4)
    torch.testing.assert_close(resized(pixels).logits, model(pixels).logits, **EXACT)
    if resized.config.use_absolute_position_embeddings and "position_table_size" not in fields:
        assert resized.liere.embeddings.position_embeddings.shape[1] == 60 + resized.config.use_class_token


@pytest.mark.parametrize(
    "fields, size, reason",
    [
        (
            {"position_encoding": "axial_rope", "coordinates": "train_grid"},
            32,
            "only the generators of liere",
        ),
        ({"position_encoding": "liere", "rotate_prefix": True}, 32, "its class token has coordinates too"),
        ({"position_encoding": "liere"}, 30, "not divisible into patches"),
        ({"position_encoding": "absolute", "position_table_resize": "truncate"}, 32, "cannot enlarge it"),
    ],
)
def test_sizes_that_no_model_computes_the_same_at(tiny, fields, size, reason):
    with pytest.raises(ConversionError, match=reason):
        resize_input(classifier(tiny(**fields)), size)


@pytest.mark.parametrize(
    "encoding, block_size, coordinates",
    [("rope_mixed", None, None), ("liere", 4, "centred_grid"), ("comrope_ap", 4, None)],
)
@torch.no_grad()
def test_the_command_upgrades_to_other_images(tiny, tmp_path, capsys, encoding, block_size, coordinates):
    """Against the model itself, which resizes its table when it is called."""
    plain = classifier(tiny(position_encoding="absolute", num_labels=3))
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
    pixels = images(2, 3, 32, 32)
    expected = plain(pixels).logits
    torch.testing.assert_close(upgraded(pixels).logits, expected, **EXACT)
    processor = json.loads((tmp_path / "upgraded" / "preprocessor_config.json").read_text())
    assert processor["size"] == {"height": 32, "width": 32} and processor["image_mean"] == [0.1, 0.2, 0.3]
    card = (tmp_path / "upgraded" / "README.md").read_text()
    assert f"`position_encoding='{encoding}'`" in card and "`image_size=32`" in card


@pytest.mark.parametrize(
    "options, message",
    [
        ([], "Nothing to upgrade"),
        (["--image_size", "32", "--block_size", "4"], "please give position_encoding too"),
        (["--position_encoding", "comrope_ld", "--block_size", "7"], "block_size=7 must divide"),
    ],
)
def test_upgrades_that_mean_nothing(tiny, tmp_path, capsys, options, message):
    classifier(tiny(position_encoding="absolute")).save_pretrained(tmp_path / "model")
    assert main(["upgrade", str(tmp_path / "model"), str(tmp_path / "out"), *options]) == 1
    assert message in capsys.readouterr().err and not (tmp_path / "out").exists()
