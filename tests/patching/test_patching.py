"""Rotations inside pretrained models: the unpatched model and explicit float64 attention are the references."""

import copy
import itertools
from dataclasses import replace

import pytest
import torch
from encoding_cases import NEUTRAL, ROUNDED, on_axes
from patching_cases import CASES, REAL_SIZES, build, randomize, run, same_bits
from patching_checks import SHARED_CONFIG, build_patched, check_unpatched, unit_grid
from reference import head_rotation

from hf_liere import RotaryPatchConfig, patch, rotary_parameters, unpatch
from hf_liere.encoding.kinds import ENCODINGS
from hf_liere.encoding.positions import TokenPositions
from hf_liere.patching.vision_towers import find_towers
from hf_liere.probing.module_inspection import head_shape, projections


def configs_of(model):
    """A neutral start of every encoding that can have one in the model's vision tower."""
    (tower,) = find_towers(model)
    _, head_dim = head_shape(tower.attentions[0][1])
    for encoding in on_axes(len(tower.train_grid), NEUTRAL):
        if accepted := ENCODINGS[encoding].block_sizes.accepted(head_dim, len(tower.train_grid)):
            yield RotaryPatchConfig(position_encoding=encoding, block_size=min(accepted, key=lambda b: abs(b - 4)))


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("name", CASES)
def test_zero_start_is_the_same_bits_and_unpatch_is_exact(name, implementation):
    model, inputs = build(name, implementation)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    expected = run(model, inputs)
    for config in configs_of(model):
        encoding = config.position_encoding
        patch(model, config)
        if encoding in ROUNDED:
            # Two layers in float32.
            close = zip(run(model, inputs), expected, strict=True)
            assert all(torch.allclose(found, start, rtol=1e-5, atol=2e-5) for found, start in close), encoding
        else:
            assert same_bits(run(model, inputs), expected), encoding
        randomize(model)
        assert not same_bits(run(model, inputs), expected), encoding
        check_unpatched(model, inputs, before, expected)


@pytest.mark.parametrize("name", CASES)
def test_outputs_depend_on_differences_of_positions(name):
    """Where generators commute; class and register tokens have a position as well."""
    model, inputs = build(name)
    tower = model.get_submodule(CASES[name].tower)

    def of_positions(change):
        def changed(encoding, args):
            return TokenPositions(change(args[0].coordinates)), *args[1:]

        handle = tower.rotary_encoding.register_forward_pre_hook(changed)
        with torch.no_grad():
            found = run(model, inputs)
        handle.remove()
        return found

    for config in configs_of(model):
        if ENCODINGS[config.position_encoding].commutes:
            randomize(patch(model, config))
            differences, expected = [], of_positions(lambda positions: positions)
            moved = of_positions(lambda positions: positions + 8)
            stretched = of_positions(lambda positions: 2 * positions)
            for value, other, far in zip(expected, moved, stretched, strict=True):
                scale = float(value.abs().max())
                # Angles near 8 and two layers in float32.
                torch.testing.assert_close(other, value, rtol=0, atol=1e-5 * scale, msg=config.position_encoding)
                differences.append(float((far - value).abs().max()) / scale)
            assert max(differences) > 5e-3, config.position_encoding
            unpatch(model)


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("name", REAL_SIZES)
def test_zero_start_is_the_same_bits_at_the_size_of_published_models(name, implementation):
    model = REAL_SIZES[name]().eval()
    model.set_attn_implementation(implementation)
    frames = (8,) if name in ("videomae", "vivit") else ()
    inputs = {"pixel_values": torch.randn(1, *frames, 3, 224, 224)}
    with torch.no_grad():
        expected = run(model, inputs)
        for encoding, block_size in (("comrope_ld", 8), ("liere", 8), ("rope_mixed", 2)):
            patch(model, RotaryPatchConfig(position_encoding=encoding, block_size=block_size))
            assert same_bits(run(model, inputs), expected), encoding
            unpatch(model)
        assert same_bits(run(model, inputs), expected)


@pytest.mark.parametrize("name", CASES)
def test_gradients_reach_every_layer_of_the_generators(name):
    model, inputs = build(name)
    patch(model, SHARED_CONFIG)
    sum(tensor.square().sum() for tensor in run(model.train(), inputs) if tensor.requires_grad).backward()
    parameters = {key.rpartition(".")[2]: value for key, value in rotary_parameters(model)}
    assert set(parameters) == {"generators", "multipliers"}
    assert (parameters["generators"].grad.flatten(1).abs().amax(dim=1) > 0).all()


@pytest.mark.parametrize("name", CASES)
def test_tower_and_heads_are_found(name):
    model, _ = build(name)
    (tower,) = find_towers(model)
    assert tower.name == CASES[name].tower
    assert len(tower.attentions) == 2


def expected_positions(name, inputs, outputs, prefix):
    """(B, prefix + tokens, A): where each token sits, prefix tokens at the centre, read off inputs and outputs."""
    if "spatial_shapes" in inputs:
        length = inputs["pixel_values"].shape[1]
        samples = [unit_grid(*shape) for shape in inputs["spatial_shapes"].tolist()]
        samples = [torch.cat([sample, torch.zeros(length - len(sample), 2)]) for sample in samples]
    elif name.startswith("vit_mae"):
        ids = outputs["ids_restore"].argsort(dim=1)
        kept = int((outputs["mask"][0] == 0).sum())
        samples = [unit_grid(4, 4)[sample[:kept]] for sample in ids]
    elif "bool_masked_pos" in inputs:
        samples = [unit_grid(2, 2, 2)[~mask] for mask in inputs["bool_masked_pos"]]
    else:
        grid = unit_grid(2, 2, 2) if inputs["pixel_values"].ndim == 5 else unit_grid(4, 4)
        samples = [grid] * len(inputs["pixel_values"])
    return torch.stack([torch.cat([torch.full((prefix, sample.shape[-1]), 0.5), sample]) for sample in samples])


@pytest.mark.parametrize("name", CASES)
def test_attention_weights_are_those_of_explicit_rotations(name):
    model, inputs = build_patched(name, "eager")
    (tower,) = find_towers(unpatched_copy(model))
    seen = {}
    patched_tower = model.get_submodule(tower.name)
    for layer, (attention_name, _) in enumerate(tower.attentions):
        attention = model.get_submodule(attention_name)
        for kind, projection in zip("qk", projections(attention)):
            projection.register_forward_hook(
                lambda module, args, output, key=(layer, kind): seen.__setitem__(key, output.double())
            )

        def see_weights(module, args, kwargs, output, layer=layer):
            seen[layer, "weights"] = output[1]
            seen[layer, "mask"] = kwargs["attention_mask"] if "attention_mask" in kwargs else (*args, None, None)[1]

        attention.register_forward_hook(see_weights, with_kwargs=True)
    torch.manual_seed(1)
    outputs = model(**inputs)
    positions = expected_positions(name, inputs, outputs, CASES[name].prefix)
    parameters = dict(patched_tower.rotary_encoding.named_parameters())
    config = patched_tower.rotary_encoding.config
    for layer, (attention_name, _) in enumerate(tower.attentions):
        heads, head_dim = head_shape(model.get_submodule(attention_name))
        query, key = (seen[layer, kind].unflatten(-1, (heads, head_dim)).transpose(1, 2) for kind in "qk")
        rotations = torch.stack(
            [
                torch.stack(
                    [
                        torch.stack(
                            [head_rotation(p, parameters, config, positions.shape[-1], layer, head) for p in sample]
                        )
                        for head in range(heads)
                    ]
                )
                for sample in positions
            ]
        )
        query, key = (torch.einsum("bhnij,bhnj->bhni", rotations, states) for states in (query, key))
        logits = query @ key.transpose(-1, -2) / head_dim**0.5
        if seen[layer, "mask"] is not None:
            logits = logits + seen[layer, "mask"].double()
        # Rotations and attention of the model are float32.
        torch.testing.assert_close(seen[layer, "weights"].double(), logits.softmax(-1), rtol=0, atol=2e-6)


def unpatched_copy(model):
    return unpatch(copy.deepcopy(model))


def test_chosen_layers_share_nothing_with_the_others():
    model, inputs = build("clip_vision", "eager")
    expected = model(**inputs, output_attentions=True).attentions
    patch(model, RotaryPatchConfig(block_size=4, layers=[1]))
    randomize(model)
    found = model(**inputs, output_attentions=True).attentions
    assert torch.equal(found[0], expected[0]) and not torch.equal(found[1], expected[1])
    assert [tuple(value.shape) for _, value in rotary_parameters(model)] == [(1, 2, 4, 6), (2, 1, 2, 4)]


def test_class_tokens_are_rotated_by_default_with_comrope_only():
    """The stored configuration says so, that of older releases too."""
    for rotated, fields in (
        (True, {}),
        (True, {"coordinates": "fixed_grid"}),
        (False, {"coordinates": "index"}),
        (False, {"coordinates": "centred_grid"}),
        (False, {"position_encoding": "liere"}),
        (False, {"rotary_init": "pretrained"}),
    ):
        stored = RotaryPatchConfig(**fields).to_dict()
        assert stored["rotate_prefix"] is rotated
        for older in (stored, stored | {"rotate_prefix": False}):
            assert RotaryPatchConfig.from_dict(older).to_dict() == older


def test_rope_like_starts_are_not_neutral():
    for fields in ({"position_encoding": "rope_mixed", "rotary_init": "frequencies"}, {"rotary_init": "normal"}):
        model, inputs = build("vit")
        expected = run(model, inputs)
        assert not same_bits(run(patch(model, RotaryPatchConfig(**fields)), inputs), expected)
    model, inputs = build("vit")
    expected = run(model, inputs)
    patch(model, RotaryPatchConfig(position_encoding="axial_rope", rotary_init=None))
    assert not same_bits(run(model, inputs), expected) and list(rotary_parameters(model)) == []


@pytest.mark.parametrize("name", CASES)
def test_attentions_and_hidden_states_are_given_as_before(name):
    model, inputs = build(name, "eager")
    options = {"output_attentions": True, "output_hidden_states": True}
    expected = run(model, inputs, **options)
    assert len(expected) > len(run(model, inputs)) + 3
    assert same_bits(run(patch(model, SHARED_CONFIG), inputs, **options), expected)


def explicit_rotations(tower, model, inputs):
    """The matrices, or cos and sin, that belong to the positions of a forward pass."""
    seen = {}
    handle = tower.rotary_encoding.register_forward_pre_hook(lambda module, args: seen.update(positions=args[0]))
    model(**inputs)
    handle.remove()
    return tower.rotary_encoding(seen["positions"])


def rotations_of_a_pass(model, inputs):
    """(layers, heads, tokens, head_dim, head_dim) of the last pass, dense, in float64."""
    (tower,) = (module for module in model.modules() if hasattr(module, "rotary_encoding"))
    layers = explicit_rotations(tower, model, inputs)
    return torch.stack([block_diagonal(layer.matrices()[0].double()) for layer in layers])


def block_diagonal(blocks):
    *shape, count, size, _ = blocks.shape
    dense = blocks.new_zeros(*shape, count * size, count * size)
    for index in range(count):
        part = slice(index * size, (index + 1) * size)
        dense[..., part, part] = blocks[..., index, :, :]
    return dense


@pytest.mark.parametrize("name", ["clip_vision", "deit", "dinov2_registers"])
def test_rotated_prefix_sits_at_the_centre(name):
    model, inputs = build_patched(name)
    found = rotations_of_a_pass(model, inputs)
    (encoding,) = (module.rotary_encoding for module in model.modules() if hasattr(module, "rotary_encoding"))
    parameters, prefix = dict(encoding.named_parameters()), CASES[name].prefix
    positions = [torch.full((2,), 0.5, dtype=torch.float64)] * prefix + list(unit_grid(4, 4))
    for layer, head in itertools.product(range(2), range(2)):
        expected = torch.stack([head_rotation(p, parameters, encoding.config, 2, layer, head) for p in positions])
        # Rotations are float32.
        torch.testing.assert_close(found[layer, head], expected, rtol=0, atol=1e-6)
    assert (found[:, :, 0] - torch.eye(16)).abs().amax() > 1e-2
    # The centre of a centred grid is the origin.
    for unrotated in ({"rotate_prefix": False}, {"rotate_prefix": True, "coordinates": "centred_grid"}):
        unpatch(model)
        patch(model, replace(SHARED_CONFIG, **unrotated))
        randomize(model)
        (tower,) = (module for module in model.modules() if hasattr(module, "rotary_encoding"))
        for rotation in explicit_rotations(tower, model, inputs):
            still = rotation.cos_sin[:, :, :prefix]
            assert torch.equal(still, torch.tensor([1.0, 0.0]).expand_as(still))


@pytest.mark.parametrize("name", ["clip_vision", "siglip2", "vit_mae", "vivit"])
def test_positions_are_perturbed_in_training_only_and_within_their_patch(name):
    """Measured by an encoding whose first two planes rotate by the coordinates themselves, in patch extents."""
    model, inputs = build(name)
    if name == "vit_mae":
        inputs["noise"] = torch.rand(2, 16)
    config = RotaryPatchConfig(position_encoding="liere", block_size=2, coordinates="index", position_perturbation=1.0)
    patch(model, config)
    axes = 3 if name == "vivit" else 2
    with torch.no_grad():
        ((_, generators),) = rotary_parameters(model)
        generators.zero_()
        for axis in range(axes):
            # A small angle, so that a full rotation is not lost.
            generators[axis, :, :, axis] = 0.1
    still = coordinates_of_a_pass(model, inputs, axes)
    assert torch.equal(coordinates_of_a_pass(model, inputs, axes), still)
    model.train()
    first, second = (coordinates_of_a_pass(model, inputs, axes) for _ in range(2))
    prefix = CASES[name].prefix
    # Angles are read off float32 rotations.
    assert torch.all(first[:prefix].abs() < 1e-5)
    offsets = first[prefix:] - still[prefix:]
    assert offsets.abs().mean() > 0.1 and offsets.abs().max() <= 0.5 + 1e-5
    assert (first - second).abs().max() > 0.01


@pytest.mark.parametrize("name", ["clip_vision", "vivit"])
def test_coordinates_are_augmented_in_training_only(name):
    """Measured as above: distances between patches are multiplied by one factor for all axes, about the centre."""
    model, inputs = build(name)
    config = {"position_encoding": "liere", "block_size": 2, "coordinates": "index", "position_rescale": 3.0}
    patch(model, RotaryPatchConfig(**config))
    axes = 3 if name == "vivit" else 2
    with torch.no_grad():
        ((_, generators),) = rotary_parameters(model)
        generators.zero_()
        for axis in range(axes):
            generators[axis, :, :, axis] = 0.1
    prefix = CASES[name].prefix
    still = coordinates_of_a_pass(model, inputs, axes)
    moved = coordinates_of_a_pass(model.train(), inputs, axes)
    assert torch.all(moved[:prefix].abs() < 1e-5)
    still, moved = (each[prefix:] - each[prefix:].mean(dim=0) for each in (still, moved))
    factor = moved[-1, 0] / still[-1, 0]
    assert 1 / 3 <= factor <= 3 and abs(factor - 1) > 0.01
    # Angles are read off float32 rotations.
    torch.testing.assert_close(moved, still * factor, rtol=0, atol=1e-4)
    for value, message in ((0.5, "position_rescale=0.5 must be at least 1"), ("2", "position_rescale='2' must be")):
        with pytest.raises(ValueError, match=message):
            patch(build(name)[0], RotaryPatchConfig(**{**config, "position_rescale": value}))


def coordinates_of_a_pass(model, inputs, axes):
    """(tokens, axes) of the first sample, from the angles of the first planes."""
    (tower,) = (module for module in model.modules() if hasattr(module, "rotary_encoding"))
    layers = explicit_rotations(tower, model, inputs)
    cos, sin = layers[0].cos_sin[0, 0, :, :axes].detach().double().unbind(-1)
    return torch.atan2(sin, cos) / 0.1
