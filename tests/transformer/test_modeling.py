import copy
import sys

import pytest
import torch
from encoding_cases import COMMUTING, ENCODINGS, NEUTRAL, ROUNDED
from encoding_cases import fields as fields_of
from slow_cases import slow_except
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import ViTConfig, ViTForImageClassification

import hf_liere
from hf_liere.encoding.placement import draw_displacements, draw_perturbation
from hf_liere.encoding.positions import TokenPositions


def classifier(config, implementation="sdpa"):
    config = copy.deepcopy(config)
    config._attn_implementation = implementation
    torch.manual_seed(0)
    # Wide initial weights, so that attention is far from uniform and a wrong rotation is seen.
    config.initializer_range = 0.2
    return hf_liere.LieREViTForImageClassification(config).eval()


def images(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("encoding", ["none", "absolute", *ENCODINGS])
def test_any_image_size_and_every_parameter_gets_a_gradient(tiny, encoding):
    model = classifier(tiny(num_register_tokens=1, layerscale_value=0.5, **fields_of(encoding))).train()
    for size in ((16, 16), (8, 24), (4, 4)):
        model.zero_grad()
        outputs = model(images(3, 3, *size), labels=torch.tensor([0, 2, 1]))
        assert outputs.logits.shape == (3, 3) and torch.isfinite(outputs.logits).all()
        outputs.loss.backward()
        # A single patch has one position, at which train_grid and index coordinates are zero and rotate nothing.
        exempt = "rotary_encoding" if size == (4, 4) else None
        silent = [name for name, p in model.named_parameters() if p.grad is None or not (p.grad != 0).any()]
        assert [name for name in silent if not exempt or exempt not in name] == []


@pytest.mark.parametrize("encoding", ["none", "absolute", *ENCODINGS])
def test_sdpa_and_eager_agree_and_eager_returns_attentions(tiny, encoding):
    pixel_values = images(2, 3, 16, 16)
    config = tiny(**fields_of(encoding))
    expected = classifier(config, "eager")(pixel_values, output_attentions=True, output_hidden_states=True)
    outputs = classifier(config, "sdpa")(pixel_values)
    torch.testing.assert_close(outputs.logits, expected.logits, rtol=0, atol=1e-5)
    assert [tuple(a.shape) for a in expected.attentions] == [(2, 2, 17, 17)] * 2
    assert [tuple(h.shape) for h in expected.hidden_states] == [(2, 17, 48)] * 3
    for weights in expected.attentions:
        torch.testing.assert_close(weights.sum(-1), torch.ones(2, 2, 17))


@pytest.mark.slow
def test_flex_attention_agrees(tiny):
    config = tiny(hidden_size=32, **fields_of("liere"))
    with torch.no_grad():
        expected = classifier(config)(images(2, 3, 16, 16)).logits
        outputs = classifier(config, "flex_attention")(images(2, 3, 16, 16)).logits
    torch.testing.assert_close(outputs, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("encoding", NEUTRAL)
def test_zero_generators_reproduce_vit(tiny, encoding):
    """transformers' own ViT with the same weights and an empty position table."""
    config = tiny(rotary_init="zeros", **fields_of(encoding))
    vit_config = ViTConfig(
        **{
            name: getattr(config, name)
            for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "image_size")
        },
        patch_size=config.patch_size,
        layer_norm_eps=config.layer_norm_eps,
        num_labels=config.num_labels,
        initializer_range=0.2,
    )
    vit, model = ViTForImageClassification(vit_config).eval(), classifier(config)
    vit.vit.embeddings.position_embeddings.data.zero_()
    weights = {
        name.replace("vit.", "liere.", 1): value
        for name, value in vit.state_dict().items()
        if "position_embeddings" not in name
    }
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert unexpected == [] and all("rotary_encoding" in name for name in missing)
    pixel_values = images(2, 3, 16, 16)
    tolerance = 1e-5 if encoding in ROUNDED else 0
    torch.testing.assert_close(model(pixel_values).logits, vit(pixel_values).logits, rtol=0, atol=tolerance)
    # And with the table, of which ViT's is the special case.
    vit.vit.embeddings.position_embeddings.data.normal_()
    model = classifier(tiny(rotary_init="zeros", use_absolute_position_embeddings=True, **fields_of(encoding)))
    weights["liere.embeddings.position_embeddings"] = vit.vit.embeddings.position_embeddings.data
    model.load_state_dict(weights, strict=False)
    torch.testing.assert_close(model(pixel_values).logits, vit(pixel_values).logits, rtol=0, atol=1e-5)
    larger = images(2, 3, 24, 24)
    expected = vit(larger, interpolate_pos_encoding=True).logits
    torch.testing.assert_close(model(larger).logits, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_explicit_positions(tiny, encoding):
    config = tiny(**fields_of(encoding))
    model, pixel_values = classifier(config), images(2, 3, 8, 12)
    grid = TokenPositions.from_grid((2, 3), (4, 4), config.coordinates).coordinates
    expected = model(pixel_values).logits
    assert torch.equal(model(pixel_values, positions=grid).logits, expected)
    each = grid.expand(2, 6, 2)
    torch.testing.assert_close(model(pixel_values, positions=each).logits, expected, rtol=0, atol=1e-5)
    mixed = torch.stack([grid, grid.flip(0)])
    outputs = model(pixel_values, positions=mixed).logits
    torch.testing.assert_close(outputs[:1], expected[:1], rtol=0, atol=1e-5)
    assert (outputs[1] - expected[1]).abs().max() > 1e-4


@pytest.mark.parametrize("encoding", COMMUTING)
def test_a_common_shift_changes_nothing_without_a_prefix(tiny, encoding):
    model = classifier(tiny(use_class_token=False, pooling="mean", **fields_of(encoding)))
    pixel_values, grid = (
        images(2, 3, 16, 16),
        TokenPositions.from_grid((4, 4), (4, 4), model.config.coordinates).coordinates,
    )
    expected = model(pixel_values, positions=grid).logits
    shifted = model(pixel_values, positions=grid + torch.tensor([3.0, -1.5])).logits
    torch.testing.assert_close(shifted, expected, rtol=0, atol=2e-5)


def test_a_common_shift_changes_liere(tiny):
    model = classifier(tiny(use_class_token=False, pooling="mean", **fields_of("liere")))
    pixel_values, grid = images(2, 3, 16, 16), TokenPositions.from_grid((4, 4), (4, 4), "train_grid").coordinates
    shifted = model(pixel_values, positions=grid + torch.tensor([3.0, -1.5])).logits
    assert (shifted - model(pixel_values, positions=grid).logits).abs().max() > 1e-2


@pytest.mark.parametrize("encoding", ["none", "comrope_ld"])
def test_patch_order_matters_only_with_positions(tiny, encoding):
    model = classifier(tiny(**fields_of(encoding)))
    pixel_values = images(2, 3, 16, 16)
    shuffled = pixel_values.unflatten(2, (4, 4)).flip(2).flatten(2, 3)
    deviation = (model(shuffled).logits - model(pixel_values).logits).abs().max()
    assert deviation < 1e-5 if encoding == "none" else deviation > 1e-2


@pytest.mark.parametrize("size", [(16, 16), (12, 20), (12, 16), (4, 24), (4, 4)])
def test_a_centred_grid_is_that_of_its_positions(tiny, size):
    """Half of the rotations are transposes of others; given positions get exponentials, every one."""
    model = classifier(tiny(coordinates="centred_grid", **fields_of("liere"))).train()
    grid, pixel_values, results = tuple(side // 4 for side in size), images(2, 3, *size), []
    for positions in (None, TokenPositions.from_grid(grid, (4, 4), "centred_grid").coordinates):
        model.zero_grad()
        outputs = model(pixel_values, positions=positions, labels=torch.tensor([0, 2]))
        outputs.loss.backward()
        results.append((outputs.logits, model.liere.rotary_encoding.generators.grad))
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-5)


def test_patches_of_a_centred_grid_are_perturbed_in_training(tiny):
    model = classifier(tiny(coordinates="centred_grid", position_perturbation=0.5, **fields_of("liere")))
    pixel_values = images(2, 3, 16, 12)
    torch.manual_seed(7)
    perturbed = model.train()(pixel_values).logits
    torch.manual_seed(7)
    offsets = draw_perturbation((4, 3), 0.5, torch.device("cpu"))
    positions = TokenPositions.from_grid((4, 3), (4, 4), "centred_grid", offsets=offsets).coordinates
    torch.testing.assert_close(perturbed, model.eval()(pixel_values, positions=positions).logits)


@pytest.mark.parametrize("encoding", ["liere", "comrope_ld"])
def test_the_centre_of_a_centred_grid_rotates_no_class_token(tiny, encoding):
    models = [
        classifier(tiny(coordinates="centred_grid", rotate_prefix=rotated, **fields_of(encoding)))
        for rotated in (False, True)
    ]
    pixel_values = images(2, 3, 16, 12)
    unrotated, rotated = (model(pixel_values).logits for model in models)
    assert torch.equal(unrotated, rotated)


def test_rotate_prefix_puts_the_class_token_at_the_centre(tiny):
    outputs = {}
    for rotate_prefix in (False, True):
        model = classifier(tiny(rotate_prefix=rotate_prefix, num_register_tokens=1, **fields_of("comrope_ld")))
        positions = model.liere.grid_positions((4, 4), torch.device("cpu"))
        rotation = model.liere.rotations(positions)[0].cos_sin
        centre = model.liere.rotary_encoding(TokenPositions.from_coordinates(torch.tensor([[0.5, 0.5]])))[0].cos_sin
        expected = centre if rotate_prefix else torch.tensor([1.0, 0.0]).expand_as(centre)
        assert torch.equal(rotation[:, :, :2], expected.expand(-1, -1, 2, -1, -1))
        outputs[rotate_prefix] = model(images(2, 3, 16, 16)).logits
    assert (outputs[False] - outputs[True]).abs().max() > 1e-3


@pytest.mark.parametrize("encoding", ["absolute", "rope_mixed", "liere", "comrope_ld"])
def test_perturbation_acts_in_training_only(tiny, encoding):
    model = classifier(tiny(position_perturbation=1.0, **fields_of(encoding)))
    plain = classifier(tiny(**fields_of(encoding)))
    pixel_values = images(2, 3, 16, 16)
    assert torch.equal(model(pixel_values).logits, plain(pixel_values).logits)
    model.train()
    first, second = model(pixel_values).logits, model(pixel_values).logits
    assert (first - second).abs().max() > 1e-4
    if model.liere.rotary_encoding is not None:
        positions = TokenPositions.from_grid((4, 4), (4, 4), model.config.coordinates).coordinates
        given = model(pixel_values, positions=positions).logits
        torch.testing.assert_close(given, plain(pixel_values).logits, rtol=0, atol=1e-5)


AUGMENTED = {"position_shift": 0.5, "position_jitter": 1.5, "position_rescale": 2.0}


def augmented_cases():
    table = {"position_encoding": "absolute", "position_table_size": [4, 4]}
    return [*((encoding, fields_of(encoding)) for encoding in ENCODINGS[2:]), ("table", table)]


@pytest.mark.parametrize("name, fields", augmented_cases())
def test_augmentation_of_coordinates_acts_in_training_only(tiny, name, fields):
    """In training the logits are those at the displaced coordinates, with class and register tokens where they were."""
    fields = {**fields, "num_register_tokens": 1}
    model, plain = classifier(tiny(**AUGMENTED, **fields)), classifier(tiny(**fields))
    pixel_values = images(2, 3, 8, 16)
    assert torch.equal(model(pixel_values).logits, plain(pixel_values).logits)
    torch.manual_seed(5)
    _, offsets = draw_displacements(model.config, (2, 4), None, torch.device("cpu"))
    coordinates = TokenPositions.from_grid((2, 4), (4, 4), model.config.coordinates, offsets=offsets).coordinates
    expected = plain(pixel_values, positions=coordinates).logits
    torch.manual_seed(5)
    torch.testing.assert_close(model.train()(pixel_values).logits, expected, rtol=0, atol=1e-5)
    assert (expected - plain(pixel_values).logits).abs().max() > 1e-3
    assert (model(pixel_values).logits - expected).abs().max() > 1e-3
    given = model(pixel_values, positions=coordinates).logits
    torch.testing.assert_close(given, expected, rtol=0, atol=1e-5)


def test_augmentation_leaves_a_table_of_training_patches_in_place(tiny):
    model = classifier(tiny(rotary_init="zeros", use_absolute_position_embeddings=True, **AUGMENTED))
    pixel_values = images(2, 3, 16, 16)
    torch.testing.assert_close(model.train()(pixel_values).logits, model.eval()(pixel_values).logits, rtol=0, atol=1e-5)


def test_augmentation_in_a_compiled_graph_and_in_half_precision(tiny):
    model = classifier(tiny(**AUGMENTED, **fields_of("liere"))).train()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    pixel_values = images(2, 3, 16, 16)
    first, second = compiled(pixel_values).logits, compiled(pixel_values).logits
    assert torch.isfinite(first).all() and (first - second).abs().max() > 1e-3
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.isfinite(model(pixel_values).logits).all()


def test_perturbed_table_is_read_between_its_entries(tiny):
    """Half a patch to the right is the mean of an entry and its right neighbour, the last one stays at the border."""
    embeddings = classifier(tiny(**fields_of("absolute"))).liere.embeddings
    table = embeddings.position_embeddings[0, 1:].view(4, 4, 48)
    offsets = torch.tensor([0.0, 0.5]).expand(16, 2)
    moved = embeddings.patch_table((4, 4), offsets).view(4, 4, 48)
    torch.testing.assert_close(moved[:, :3], (table[:, :3] + table[:, 1:]) / 2, rtol=0, atol=1e-6)
    torch.testing.assert_close(moved[:, 3], table[:, 3], rtol=0, atol=1e-6)
    torch.testing.assert_close(embeddings.patch_table((4, 4), offsets * 0).view(4, 4, 48), table, rtol=0, atol=1e-6)


@pytest.mark.parametrize("encoding", ["none", "absolute", *ENCODINGS])
def test_gradient_checkpointing_gives_the_same_gradients(tiny, encoding):
    dropouts = {"drop_path_rate": 0.5, "hidden_dropout_prob": 0.1, "mlp_dropout_prob": 0.1}
    config = tiny(**dropouts, position_perturbation=0.0, **fields_of(encoding))
    gradients = []
    for checkpointing in (False, True):
        model = classifier(config).train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        torch.manual_seed(3)
        model(images(4, 3, 16, 16), labels=torch.tensor([0, 1, 2, 0])).loss.backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=0, atol=1e-6, msg=name)


def test_reentrant_checkpointing_is_refused(tiny):
    """It would differentiate with respect to the states alone."""
    model = classifier(tiny(**fields_of("liere"))).train()
    with pytest.raises(ValueError, match="use_reentrant=True was given"):
        model.gradient_checkpointing_enable({"use_reentrant": True})
    assert not model.liere.layers[0].gradient_checkpointing


def test_the_start_of_tokens_and_table_has_its_range(tiny):
    """As in the codes of LieRE and ComRoPE, where it is 1; all else keeps its start."""
    fields = {"position_encoding": "absolute", "num_register_tokens": 50, "hidden_size": 64, "image_size": 32}
    deviations = []
    for field in (None, 1.0):
        torch.manual_seed(0)
        model = hf_liere.LieREViTModel(tiny(**fields, token_initializer_range=field))
        parameters = dict(model.named_parameters())
        tokens = {name: parameters.pop(f"embeddings.{name}") for name in ("cls_token", "register_tokens")}
        tokens["table"] = parameters.pop("embeddings.position_embeddings")
        deviations.append({name: value.std().item() for name, value in tokens.items()})
        assert all(value.std() < 0.03 for value in parameters.values() if value.ndim > 1)
    # 64 numbers of the class token, 3,200 and 4,160 of the others: four standard errors.
    for name, tolerance in (("cls_token", 0.36), ("register_tokens", 0.05), ("table", 0.045)):
        assert [values[name] for values in deviations] == pytest.approx([0.02, 1.0], rel=tolerance)


def test_dropout_inside_the_mlp_is_after_the_activation(tiny):
    """The order of LieRE's code: linear, GELU, dropout, linear. Nothing is dropped at inference."""
    mlp = classifier(tiny(mlp_dropout_prob=0.5)).liere.layers[0].mlp
    official = torch.nn.Sequential(mlp.fc1, torch.nn.GELU(), torch.nn.Dropout(0.5), mlp.fc2)
    states = images(2, 5, 48)
    for training in (True, False):
        results = []
        for module in (mlp.train(training), official.train(training)):
            torch.manual_seed(0)
            results.append(module(states))
        assert torch.equal(*results)
    assert not torch.equal(mlp.train()(states), mlp.eval()(states))


@pytest.mark.parametrize("encoding", ["none", "absolute", *ENCODINGS])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_close(tiny, encoding, dtype):
    model, pixel_values = classifier(tiny(**fields_of(encoding))), images(4, 3, 16, 16)
    with torch.no_grad():
        expected = model(pixel_values).logits
        with torch.autocast("cpu", dtype=dtype):
            autocast = model(pixel_values).logits
        converted = copy.deepcopy(model).to(dtype)(pixel_values.to(dtype)).logits
    assert converted.dtype == dtype
    # Eight (eleven) bits of mantissa through two layers, relative to the largest logit.
    tolerance = {torch.bfloat16: 0.06, torch.float16: 0.01}[dtype] * expected.abs().max().item()
    torch.testing.assert_close(autocast.float(), expected, rtol=0, atol=tolerance)
    if model.liere.rotary_encoding is None or dtype == torch.float16:
        torch.testing.assert_close(converted.float(), expected, rtol=0, atol=tolerance)


def test_generators_stay_in_float32_when_loaded_in_bfloat16(tiny, tmp_path):
    model = classifier(tiny(**fields_of("liere")))
    model.save_pretrained(tmp_path)
    loaded = hf_liere.LieREViTForImageClassification.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert loaded.classifier.weight.dtype == torch.bfloat16
    generators = loaded.liere.rotary_encoding.generators
    assert generators.dtype == torch.float32 and torch.equal(generators, model.liere.rotary_encoding.generators)
    pixel_values = images(4, 3, 16, 16)
    expected = model(pixel_values).logits
    torch.testing.assert_close(
        loaded(pixel_values).logits.float(), expected, rtol=0, atol=0.06 * expected.abs().max().item()
    )


@pytest.mark.parametrize("encoding", ["liere", pytest.param("rope_mixed", marks=pytest.mark.slow)])
def test_sizes_share_two_graphs(tiny, encoding, fresh_compiler):
    """One for the first size, one for all others."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    model = classifier(tiny(**fields_of(encoding)))
    compiled = torch.compile(copy.deepcopy(model), backend=backend, fullgraph=True)
    for size in ((16, 16), (8, 24), (20, 12), (24, 8), (28, 16)):
        pixel_values = images(2, 3, *size)
        torch.testing.assert_close(compiled(pixel_values).logits, model(pixel_values).logits, rtol=0, atol=1e-5)
    assert len(graphs) <= 2


# The steps of test_operators.py are those of compiled models of every encoding.
@pytest.mark.parametrize("encoding", slow_except(("liere",), ("none", "absolute", *ENCODINGS)))
def test_compiles_to_one_graph(tiny, encoding, fresh_compiler):
    """Gradients included; inductor itself is left to the slow tests."""
    model = classifier(tiny(**fields_of(encoding)))
    compiled = torch.compile(copy.deepcopy(model), backend="aot_eager", fullgraph=True)
    for size in ((16, 16), (8, 24)):
        outputs, expected = compiled(images(2, 3, *size)), model(images(2, 3, *size))
        torch.testing.assert_close(outputs.logits, expected.logits, rtol=0, atol=1e-5)
        outputs.logits.sum().backward()
        expected.logits.sum().backward()
    for (name, parameter), ours in zip(model.named_parameters(), compiled.parameters()):
        torch.testing.assert_close(ours.grad, parameter.grad, rtol=1e-4, atol=1e-4, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["rope_mixed", "liere", "comrope_ld"])
def test_inductor(tiny, encoding, fresh_compiler):
    model = classifier(tiny(**fields_of(encoding)))
    compiled = torch.compile(model, fullgraph=True)
    torch.testing.assert_close(
        compiled(images(2, 3, 16, 16)).logits, model(images(2, 3, 16, 16)).logits, rtol=0, atol=1e-4
    )


class WithoutFloat64(TorchDispatchMode):
    """Fails as a device without float64 does."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        outputs = function(*args, **(kwargs or {}))
        for output in tree_leaves(outputs):
            if isinstance(output, torch.Tensor) and output.dtype == torch.float64:
                raise TypeError(f"{function} makes a float64 tensor")
        return outputs


@pytest.mark.parametrize("encoding", ["none", "absolute", *ENCODINGS])
def test_devices_without_float64(tiny, encoding, monkeypatch):
    """MPS has none: training with perturbed positions must get by without, and stay close."""
    model = classifier(tiny(position_perturbation=0.0 if encoding == "none" else 0.5, **fields_of(encoding)))
    pixel_values = images(2, 3, 8, 12)
    expected = model(pixel_values).logits
    for name, module in list(sys.modules.items()):
        if name.startswith("hf_liere.") and hasattr(module, "working_dtype"):
            monkeypatch.setattr(module, "working_dtype", lambda device: torch.float32)
    with WithoutFloat64():
        # Six squarings in float32, and two layers.
        torch.testing.assert_close(model(pixel_values).logits, expected, rtol=0, atol=1e-3)
        model.train()(pixel_values, labels=torch.tensor([0, 1])).loss.backward()


def test_rotations_do_not_depend_on_the_batch(tiny):
    model = classifier(tiny(**fields_of("liere")))
    shapes = []
    for layer in model.liere.layers:
        layer.attention.register_forward_pre_hook(lambda module, args: shapes.append(tuple(args[1].blocks.shape)))
    model(images(5, 3, 16, 16))
    assert shapes == [(1, 2, 17, 6, 4, 4)] * 2


def test_stochastic_depth(tiny):
    model = classifier(tiny(drop_path_rate=0.4, num_hidden_layers=3, **fields_of("none"))).train()
    assert [layer.drop_path.rate for layer in model.liere.layers] == [0.0, 0.2, 0.4]
    drop_path = model.liere.layers[2].drop_path
    branch = drop_path(torch.ones(4000, 2, 3))
    values = branch[:, 0, 0]
    assert set(values.unique().tolist()) == {0.0, torch.tensor(1 / 0.6).item()}
    assert (branch == values[:, None, None]).all()
    # Four standard deviations of a mean of 4000 draws.
    assert abs((values == 0).float().mean() - 0.4) < 4 * (0.24 / 4000) ** 0.5
    assert torch.equal(drop_path.eval()(torch.ones(4, 2, 3)), torch.ones(4, 2, 3))


@pytest.mark.parametrize("pooling", ["cls", "mean", "mean_all"])
def test_pooling(tiny, pooling):
    model = classifier(tiny(pooling=pooling, num_register_tokens=2, **fields_of("liere"))).liere
    outputs = model(images(2, 3, 16, 16))
    states = outputs.last_hidden_state
    expected = {"cls": states[:, 0], "mean": states[:, 3:].mean(1), "mean_all": states.mean(1)}[pooling]
    torch.testing.assert_close(outputs.pooler_output, expected)


def test_attention_mask_hides_tokens(tiny):
    model = classifier(tiny(**fields_of("comrope_ld"))).liere
    pixel_values = images(2, 3, 16, 16)
    mask = torch.ones(2, 17, dtype=torch.bool)
    mask[:, 9:] = False
    changed = pixel_values.clone()
    changed[:, :, 8:] += 1
    kept = slice(0, 9)
    outputs = [model(p, attention_mask=mask).last_hidden_state[:, kept] for p in (pixel_values, changed)]
    torch.testing.assert_close(*outputs, rtol=0, atol=1e-5)


def test_masked_image_modeling(tiny):
    torch.manual_seed(0)
    model = hf_liere.LieREViTForMaskedImageModeling(tiny(patch_size=(4, 2), **fields_of("liere")))
    pixel_values, mask = images(2, 3, 16, 12), torch.rand(2, 24) < 0.5
    outputs = model(pixel_values, bool_masked_pos=mask)
    assert outputs.reconstruction.shape == pixel_values.shape
    error, count = 0.0, 0
    for sample in range(2):
        for patch in range(24):
            if mask[sample, patch]:
                rows = slice(patch // 6 * 4, patch // 6 * 4 + 4)
                columns = slice(patch % 6 * 2, patch % 6 * 2 + 2)
                difference = (outputs.reconstruction - pixel_values)[sample, :, rows, columns]
                error, count = error + difference.abs().sum(), count + difference.numel()
    torch.testing.assert_close(outputs.loss, error / count)
    outputs.loss.backward()
    silent = [name for name, p in model.named_parameters() if p.grad is None]
    assert silent == []
    # What a masked patch shows cannot reach the reconstruction.
    pixels_of_mask = mask.view(2, 1, 4, 6).repeat_interleave(4, 2).repeat_interleave(2, 3)
    hidden = torch.where(pixels_of_mask, torch.full_like(pixel_values, 9.0), pixel_values)
    torch.testing.assert_close(model(hidden, bool_masked_pos=mask).reconstruction, outputs.reconstruction)


def test_reconstruction_puts_patches_where_they_came_from(tiny):
    """A decoder that returns a patch's own index paints every patch with its raster index."""
    model = hf_liere.LieREViTForMaskedImageModeling(tiny(use_class_token=False, pooling="mean", **fields_of("none")))
    model.liere.register_forward_hook(
        lambda module, args, outputs: outputs.__setitem__(
            "last_hidden_state", torch.arange(16.0).view(1, 16, 1).expand(1, 16, 48)
        )
    )
    model.decoder.weight.data.fill_(1 / 48)
    model.decoder.bias.data.zero_()
    painted = model(images(1, 3, 16, 16)).reconstruction
    expected = torch.arange(16.0).view(4, 4).repeat_interleave(4, 0).repeat_interleave(4, 1)
    torch.testing.assert_close(painted, expected.expand(1, 3, 16, 16))


def test_backbone(tiny):
    torch.manual_seed(0)
    config = tiny(num_register_tokens=1, out_features=["stem", "stage2"], **fields_of("liere"))
    backbone = hf_liere.LieREViTBackbone(config).eval()
    pixel_values = images(2, 3, 8, 24)
    outputs = backbone(pixel_values)
    assert backbone.channels == [48, 48] and outputs.hidden_states is None
    assert [tuple(f.shape) for f in outputs.feature_maps] == [(2, 48, 2, 6)] * 2
    model = hf_liere.LieREViTModel(config).eval()
    model.load_state_dict(backbone.state_dict())
    expected = model(pixel_values).last_hidden_state[:, 2:].transpose(1, 2).unflatten(-1, (2, 6))
    assert torch.equal(outputs.feature_maps[1], expected)
    assert len(backbone(pixel_values, output_hidden_states=True).hidden_states) == 3
    config.reshape_hidden_states = False
    assert backbone(pixel_values).feature_maps[0].shape == (2, 14, 48)


@torch.no_grad()
def test_positions_of_prefix_tokens_may_be_given(tiny):
    """Where they are rotated; a common shift of all tokens then changes nothing (ComRoPE §3.2)."""
    config = tiny(rotate_prefix=True, prefix_coordinate=0.25, num_register_tokens=1, **fields_of("comrope_ld"))
    model, pixel_values = classifier(config), images(2, 3, 16, 16)
    patches = TokenPositions.from_grid((4, 4), (4, 4), "unit").coordinates
    everything = torch.cat([torch.full((2, 2), 0.25, dtype=torch.float64), patches])
    expected = model(pixel_values).logits
    assert torch.equal(model(pixel_values, positions=everything).logits, expected)
    shift = torch.tensor([3.0, -1.5])
    torch.testing.assert_close(model(pixel_values, positions=everything + shift).logits, expected, rtol=0, atol=1e-5)
    assert (model(pixel_values, positions=patches + shift).logits - expected).abs().max() > 1e-2


@torch.no_grad()
def test_table_read_at_coordinates(tiny):
    """Against linear interpolation between four entries, written out; outside, the border counts."""
    size = (3, 2)
    config = tiny(position_encoding="absolute", position_table_size=list(size), prefix_coordinate=0.75)
    model, pixel_values = classifier(config).liere, images(2, 3, 16, 16)
    positions = torch.rand(2, 17, 2, generator=torch.Generator().manual_seed(2)) * 1.6 - 0.3
    embedded = model(pixel_values, positions=positions, output_hidden_states=True).hidden_states[0]
    default = model(pixel_values, output_hidden_states=True).hidden_states[0]
    table = model.embeddings.position_embeddings.clone().view(*size, -1)
    model.embeddings.position_embeddings.zero_()
    plain = model(pixel_values, output_hidden_states=True).hidden_states[0]

    def entry(position):
        low, weight = [], []
        for coordinate, entries in zip(position.tolist(), size):
            place = min(max(coordinate * (entries - 1), 0.0), entries - 1.0)
            low.append(min(int(place), entries - 2))
            weight.append(place - low[-1])
        (i, j), (u, v) = low, weight
        upper = (1 - v) * table[i, j] + v * table[i, j + 1]
        return (1 - u) * upper + u * ((1 - v) * table[i + 1, j] + v * table[i + 1, j + 1])

    expected = torch.stack([torch.stack([entry(position) for position in sample]) for sample in positions])
    torch.testing.assert_close(embedded - plain, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(default[0, 0] - plain[0, 0], entry(torch.tensor([0.75, 0.75])), rtol=0, atol=1e-5)


@torch.no_grad()
def test_truncated_table(tiny):
    model = classifier(tiny(position_encoding="absolute", position_table_resize="truncate")).liere
    table, patches = model.embeddings.position_embeddings, model.embeddings.patch_embeddings
    embedded = model(images(1, 3, 8, 12), output_hidden_states=True).hidden_states[0]
    expected = patches(images(1, 3, 8, 12)) + table[:, 1:7]
    torch.testing.assert_close(embedded[:, 1:], expected, rtol=0, atol=1e-6)
    with pytest.raises(ValueError, match="20 patches, the learned table 16.*'interpolate' can"):
        model(images(1, 3, 16, 20))


@torch.no_grad()
@pytest.mark.parametrize("final_norm", ["tokens", "pooled", "none"])
@pytest.mark.parametrize("pooling", ["cls", "mean", "mean_all"])
def test_where_the_last_norm_acts(tiny, final_norm, pooling):
    config = tiny(final_norm=final_norm, pooling=pooling, num_register_tokens=1, initializer_range=0.2)
    model = hf_liere.LieREViTModel(config).eval()
    outputs = model(images(2, 3, 16, 16), output_hidden_states=True)
    states = outputs.hidden_states[-1]
    if final_norm == "tokens":
        states = model.layernorm(states)
    pooled = {"cls": states[:, 0], "mean": states[:, 2:].mean(1), "mean_all": states.mean(1)}[pooling]
    if final_norm == "pooled":
        pooled = model.layernorm(pooled)
    torch.testing.assert_close(outputs.last_hidden_state, states)
    torch.testing.assert_close(outputs.pooler_output, pooled)


@torch.no_grad()
def test_head_width_hidden_classifier_and_norm_of_embeddings(tiny):
    config = tiny(hidden_size=50, head_dim=16, classifier_hidden_size=7, use_pre_layernorm=True, **fields_of("liere"))
    model = classifier(config)
    attention = model.liere.layers[0].attention
    assert attention.q_proj.weight.shape == (32, 50) and attention.o_proj.weight.shape == (50, 32)
    assert attention.scaling == 16**-0.5
    outputs = model(images(2, 3, 16, 16), output_hidden_states=True)
    first = outputs.hidden_states[0]
    torch.testing.assert_close(first.mean(-1), torch.zeros(2, 17), rtol=0, atol=1e-5)
    pooled = model.liere(images(2, 3, 16, 16)).pooler_output
    hidden = torch.relu(model.classifier[0](pooled))
    torch.testing.assert_close(outputs.logits, model.classifier[2](hidden))


def test_rotary_parameters(tiny):
    model = classifier(tiny(**fields_of("comrope_ld")))
    names = ["liere.rotary_encoding.generators", "liere.rotary_encoding.multipliers"]
    assert [name for name, _ in model.rotary_parameters()] == names
