"""Models of tokens with positions: their symmetries, padding, errors, and what they save."""

import itertools
import json

import encoding_cases
import pytest
import reference
import torch
from encoding_cases import COMMUTING, ENCODINGS, LEARNED, on_axes, perturb
from fresh_process import run_code
from huggingface_hub.errors import StrictDataclassError
from slow_cases import slow_except
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification, AutoModelForTokenClassification

import hf_liere
from hf_liere.auto import load_checkpoint, model_class
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


@pytest.mark.parametrize("encoding, num_axes", CASES)
def test_permuted_tokens_permute_outputs(encoding, num_axes):
    features, positions = tokens(num_axes)
    order = torch.randperm(9)
    model = build(HEADS[1], encoding, num_axes)
    logits = model(features, positions).logits
    permuted = model(features[:, order], positions[:, order]).logits
    # Sums of float32 over tokens in another order.
    torch.testing.assert_close(permuted, logits[:, order], rtol=0, atol=2e-5)
    moved = model(features, positions[:, order]).logits
    deviation = (moved - logits).abs().max()
    assert deviation == 0 if encoding == "none" else deviation > 1e-3
    model = build(HEADS[0], encoding, num_axes)
    expected = model(features, positions).logits
    torch.testing.assert_close(model(features[:, order], positions[:, order]).logits, expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("pooling", ["cls", "mean", "mean_all"])
@pytest.mark.parametrize("encoding", ["none", "absolute", *ENCODINGS])
def test_a_sample_gives_the_same_logits_alone_and_padded(encoding, pooling, implementation):
    lengths, features, positions = (9, 4, 1), *tokens(count=9, batch=3)
    mask = torch.arange(9) < torch.tensor(lengths).unsqueeze(1)
    # Padding is not looked at.
    features[~mask], positions[~mask] = torch.nan, -torch.inf
    options = {"pooling": pooling, "num_register_tokens": 1, "implementation": implementation}
    for make in HEADS:
        model = build(make, encoding, **options)
        for given in (mask, mask.long()):
            padded = model(features, positions, given).logits
            for index, length in enumerate(lengths):
                alone = model(features[index : index + 1, :length], positions[index, :length]).logits[0]
                together = padded[index] if make is HEADS[0] else padded[index, :length]
                torch.testing.assert_close(together, alone, rtol=0, atol=1e-5)
        features.grad = positions.grad = None
        model(features.requires_grad_(), positions.requires_grad_(), mask).logits.square().mean().backward()
        assert all(p.grad is None or p.grad.isfinite().all() for p in (features, positions, *model.parameters()))
        features.requires_grad_(False), positions.requires_grad_(False)


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


@pytest.mark.slow
def test_padding_with_flex_attention():
    features, positions = tokens()
    mask = torch.arange(9) < torch.tensor([[9], [4]])
    # Its kernels take heads of powers of two.
    model = build(HEADS[0], hidden_size=32, implementation="flex_attention")
    with torch.no_grad():
        padded = model(features, positions, mask).logits
        alone = model(features[1:, :4], positions[1:, :4]).logits
    torch.testing.assert_close(padded[1:], alone, rtol=0, atol=1e-5)


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


def test_a_table_of_indices_has_one_entry_per_index():
    options = {"position_table_size": [6], "position_scale": 1 / 5, "use_class_token": False, "pooling": "mean"}
    model = build(hf_liere.LieRETokensModel, "absolute", 1, **options)
    positions = torch.arange(6.0).unsqueeze(1)
    features = torch.randn(1, 6, 5)
    embedded = model.embeddings(features, model.place_tokens(positions, 1, 6))
    expected = model.embeddings.feature_embeddings(features) + model.embeddings.position_embeddings
    torch.testing.assert_close(embedded, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("size", [(4, 3), (1, 3), (3, 1, 2)])
def test_tables_are_read_as_grid_sample_reads_them(size):
    axes = len(size)
    model = build(hf_liere.LieRETokensModel, "absolute", axes, position_table_size=list(size))
    positions = torch.rand(2, 50, axes) * 1.4 - 0.2
    values = read_table(model.embeddings.position_embeddings, size, positions)
    table = model.embeddings.position_embeddings.transpose(1, 2).unflatten(-1, size).expand(2, -1, *size)
    points = (2 * positions - 1).flip(-1).view(2, *[1] * (axes - 1), 50, axes)
    expected = torch.nn.functional.grid_sample(table, points, padding_mode="border", align_corners=True)
    torch.testing.assert_close(values, expected.flatten(2).transpose(1, 2), rtol=0, atol=1e-5)


def test_a_table_of_a_multilinear_function_is_that_function():
    """On five axes, for which torch has no interpolation."""
    size = (2, 3, 2, 4, 3)
    model = build(hf_liere.LieRETokensModel, "absolute", 5, position_table_size=list(size))
    weights = torch.randn(5)

    def function(positions):
        return (1 + positions * weights).prod(dim=-1)

    corners = torch.cartesian_prod(*(torch.linspace(0, 1, entries) for entries in size))
    with torch.no_grad():
        model.embeddings.position_embeddings[0] = function(corners).unsqueeze(1)
    positions = torch.rand(50, 5)
    values = read_table(model.embeddings.position_embeddings, size, positions)[0, :, 0]
    torch.testing.assert_close(values, function(positions), rtol=0, atol=1e-5)


@pytest.mark.parametrize("encoding", COMMUTING)
def test_commuting_rotations_fold(encoding, tmp_path):
    model = perturb(build(HEADS[0], encoding, 3))
    features, positions = tokens(3)
    expected = model(features, positions).logits
    model.fold_rotations().save_pretrained(tmp_path)
    folded = HEADS[0].from_pretrained(tmp_path)
    torch.testing.assert_close(folded(features, positions).logits, expected, rtol=0, atol=1e-5)


def test_dense_rotations_do_not_fold():
    model = build(HEADS[0])
    for grids in (None, [(3, 3)]):
        with pytest.raises(ValueError, match="block_size=8 folds into .* a grid, and this model takes positions"):
            model.fold_rotations(grids)
    with pytest.raises(StrictDataclassError, match="liere with block_size=8 has constant rotations for grids only"):
        build(HEADS[0], folded_grids=[])


def test_hidden_tokens_have_no_part_in_the_loss():
    model = build(HEADS[1])
    features, positions = tokens()
    mask = torch.arange(9) < torch.tensor([[9], [4]])
    labels = torch.randint(3, (2, 9))
    logits = model(features, positions, mask).logits
    expected = torch.nn.functional.cross_entropy(logits[mask], labels[mask])
    torch.testing.assert_close(model(features, positions, mask, labels=labels).loss, expected)
    ignored = labels.masked_fill(~mask, -100)
    torch.testing.assert_close(model(features, positions, mask, labels=ignored).loss, expected)


@pytest.mark.parametrize("encoding, num_axes", [case for case in CASES if case[1] in (2, 4)])
def test_every_parameter_learns(encoding, num_axes):
    features, positions = tokens(num_axes)
    for make, labels in zip(HEADS, (torch.tensor([0, 2]), torch.randint(3, (2, 9)))):
        model = build(make, encoding, num_axes, num_register_tokens=1, pooling="mean_all").train()
        model(features, positions, labels=labels).loss.backward()
        assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []


@pytest.mark.parametrize("encoding", slow_except(("liere",), ("absolute", *on_axes(3))))
def test_in_a_compiled_graph_and_exported(encoding, fresh_compiler):
    model = build(HEADS[0], encoding, 3, pooling="mean")
    features, positions = tokens(3)
    mask = torch.arange(9) < torch.tensor([[9], [4]])
    with torch.no_grad():
        expected = model(features, positions, mask).logits
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(features, positions, mask).logits, expected, rtol=0, atol=1e-5)
        named = {"inputs_embeds": features, "positions": positions, "attention_mask": mask}
        program = torch.export.export(model, (), named, strict=False)
        torch.testing.assert_close(program.module()(**named).logits, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("encoding", ["absolute", "liere", "comrope_ld"])
def test_gradient_checkpointing_and_half_precision(encoding):
    features, positions = tokens(3)
    gradients = []
    for checkpointed in (False, True):
        torch.manual_seed(0)
        model = build(HEADS[0], encoding, 3).train()
        if checkpointed:
            model.gradient_checkpointing_enable()
        model(features, positions, labels=torch.tensor([0, 1])).loss.backward()
        gradients.append(model.classifier.weight.grad)
    torch.testing.assert_close(*gradients)
    with torch.no_grad():
        expected = model.eval()(features, positions).logits
        half = model.to(torch.bfloat16)(features, positions).logits
    # Eight bits of mantissa through two layers, relative to the largest logit.
    torch.testing.assert_close(half.float(), expected, rtol=0, atol=0.06 * expected.abs().max().item())


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


def test_configurations_have_no_fields_of_images(tmp_path):
    config = hf_liere.LieRETokensConfig(num_axes=3, position_scale=[1, 2.0, 0.5], position_encoding="comrope_ld")
    config.save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert type(loaded) is hf_liere.LieRETokensConfig and loaded.to_diff_dict() == config.to_diff_dict()
    assert not {"image_size", "patch_size", "num_channels", "coordinates"} & loaded.to_dict().keys()


def test_auto_classes(tmp_path):
    config = build(HEADS[0]).config
    assert type(AutoModel.from_config(config)) is hf_liere.LieRETokensModel
    for auto, expected in zip((AutoModelForSequenceClassification, AutoModelForTokenClassification), HEADS):
        assert type(auto.from_config(config)) is expected and model_class(expected.__name__) is expected
    model = build(HEADS[1], num_labels=4)
    model.save_pretrained(tmp_path)
    loaded, processor = load_checkpoint(tmp_path)
    assert type(loaded) is HEADS[1] and processor is None
    features, positions = tokens()
    assert torch.equal(loaded(features, positions).logits, model(features, positions).logits)


REMOTE = """
import json, torch
from transformers import AutoConfig, AutoModel, {auto}

features, positions = torch.load("input.pt")
remote = {{"trust_remote_code": True}}
model = {auto}.from_pretrained("{path}", **remote).eval()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loaded = model(features, positions).logits.tolist()
model(features, positions, labels=torch.tensor({labels})).loss.backward()
optimizer.step()
model.save_pretrained("tuned")
tuned = model(features, positions).logits.tolist()
encoder = AutoModel.from_pretrained("tuned", **remote).eval()
same = torch.equal(encoder(features, positions).last_hidden_state, model.liere(features, positions).last_hidden_state)
print(json.dumps([loaded, tuned, same, type(model).__module__]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", [0, 1])
def test_without_the_package(kind, tmp_path):
    """In a process that cannot import the package, from the code that the checkpoint brings."""
    make, auto = HEADS[kind], ("AutoModelForSequenceClassification", "AutoModelForTokenClassification")[kind]
    model = build(make, "comrope_ld", 3)
    model.save_pretrained(tmp_path / "saved")
    features, positions = tokens(3, count=4)
    torch.save((features, positions), tmp_path / "input.pt")
    labels = [0, 1] if kind == 0 else [[0, 1, 2, 0], [1, 1, -100, 2]]
    code = REMOTE.format(auto=auto, path=tmp_path / "saved", labels=labels)
    loaded, tuned, same, module = json.loads(run_code(code, tmp_path, package=False)[-1])
    assert module.startswith("transformers_modules.") and same
    # Without kernels for CPUs sums are rounded in another order.
    tolerance = {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(torch.tensor(loaded), model(features, positions).logits, **tolerance)
    back = make.from_pretrained(tmp_path / "tuned").eval()
    torch.testing.assert_close(torch.tensor(tuned), back(features, positions).logits, **tolerance)
    assert (torch.tensor(tuned) - torch.tensor(loaded)).abs().max() > 1e-3


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
