"""Rotations inside pretrained models: the unpatched model and explicit float64 attention are the references."""

from dataclasses import replace

import patching_cases
import pytest
import rope_cases
import torch
from encoding_cases import NEUTRAL, on_axes
from patching_cases import CASES, REAL_SIZES, build, randomize, run, same_bits
from patching_checks import SHARED_CONFIG, unit_grid
from reference import rotate_heads

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
def test_tower_and_heads_are_found(name):
    model, _ = build(name)
    (tower,) = find_towers(model)
    assert tower.name == CASES[name].tower
    assert len(tower.attentions) == 2


def expected_positions(inputs, outputs, prefix):
    """(B, prefix + tokens, A): where each token sits, prefix tokens at the centre, read off inputs and outputs."""
    pixels = inputs["pixel_values"]
    frames, (rows, columns) = pixels.shape[1:-3], pixels.shape[-2:]
    grid = unit_grid(*(count // 2 for count in frames), rows // 4, columns // 4)
    if "spatial_shapes" in inputs:
        samples = [unit_grid(*shape) for shape in inputs["spatial_shapes"].tolist()]
        samples = [torch.cat([sample, torch.zeros(pixels.shape[1] - len(sample), 2)]) for sample in samples]
    elif "ids_restore" in outputs:
        kept = int((outputs["mask"][0] == 0).sum())
        samples = [grid[sample[:kept]] for sample in outputs["ids_restore"].argsort(dim=1)]
    elif "bool_masked_pos" in inputs:
        samples = [grid[~mask] for mask in inputs["bool_masked_pos"]]
    else:
        samples = [grid] * len(pixels)
    return torch.stack([torch.cat([torch.full((prefix, sample.shape[-1]), 0.5), sample]) for sample in samples])


@pytest.mark.parametrize("name", CASES)
def test_attention_weights_are_those_of_explicit_rotations(name):
    """Of images whose rows and columns differ, where the family takes some."""
    case, (model, _) = CASES[name], build(name, "eager")
    inputs, (tower,) = case.inputs(case.other_size or case.size), find_towers(model)
    randomize(patch(model, SHARED_CONFIG))
    seen = {}
    for layer, (_, attention) in enumerate(tower.attentions):
        for kind, projection in zip("qk", projections(attention)):
            projection.register_forward_hook(
                lambda module, args, output, key=(layer, kind): seen.__setitem__(key, output.double())
            )

        def see_weights(module, args, kwargs, output, layer=layer):
            seen[layer, "weights"] = output[1]
            seen[layer, "mask"] = kwargs["attention_mask"] if "attention_mask" in kwargs else (*args, None, None)[1]

        attention.register_forward_hook(see_weights, with_kwargs=True)
    torch.manual_seed(1)
    positions = expected_positions(inputs, model(**inputs), case.prefix)
    encoding = model.get_submodule(tower.name).rotary_encoding
    for layer, (_, attention) in enumerate(tower.attentions):
        heads, head_dim = head_shape(attention)
        query, key = (
            rotate_heads(
                seen[layer, kind].unflatten(-1, (heads, head_dim)).transpose(1, 2),
                positions,
                dict(encoding.named_parameters()),
                encoding.config,
                layer,
            )
            for kind in "qk"
        )
        logits = query @ key.transpose(-1, -2) / head_dim**0.5
        if seen[layer, "mask"] is not None:
            logits = logits + seen[layer, "mask"].double()
        # Rotations and attention of the model are float32.
        torch.testing.assert_close(seen[layer, "weights"].double(), logits.softmax(-1), rtol=0, atol=2e-6)


@pytest.mark.parametrize(
    "cases, name, config",
    [
        (patching_cases, "clip_vision", SHARED_CONFIG),
        (rope_cases, "llama", rope_cases.PLANES),
        (rope_cases, "llama", rope_cases.blocks("comrope_ld")),
    ],
)
def test_chosen_layers_share_nothing_with_the_others(cases, name, config):
    model, inputs = cases.build(name, "eager")
    expected = model(**inputs, output_attentions=True).attentions
    randomize(patch(model, replace(config, layers=[1])), std=0.1)
    found = model(**inputs, output_attentions=True).attentions
    assert torch.equal(found[0], expected[0]) and not torch.equal(found[1], expected[1])


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


def rotation_of_a_pass(model, inputs):
    """That of the first layer."""
    (tower,) = (module for module in model.modules() if hasattr(module, "rotary_encoding"))
    seen = {}
    with tower.rotary_encoding.register_forward_pre_hook(lambda module, args: seen.update(positions=args[0])):
        model(**inputs)
    return next(iter(tower.rotary_encoding(seen["positions"])))


# The centre of a centred grid is the origin.
@pytest.mark.parametrize("fields", [{"rotate_prefix": False}, {"rotate_prefix": True, "coordinates": "centred_grid"}])
@pytest.mark.parametrize("name", ["clip_vision", "deit", "dinov2_registers"])
def test_prefix_that_is_not_rotated(name, fields):
    model, inputs = build(name)
    randomize(patch(model, replace(SHARED_CONFIG, **fields)))
    turned = rotation_of_a_pass(model, inputs).cos_sin[0, 0]  # (tokens, planes, 2)
    still = (turned == torch.tensor([1.0, 0.0])).flatten(1).all(1).tolist()
    assert still == [True] * CASES[name].prefix + [False] * 16


@pytest.fixture
def measured():
    """
    Makes a model whose first planes rotate by the coordinates themselves, in patch extents, and a function that reads
    those of the patches of a pass.
    """

    def make(name, **fields):
        model, inputs = build(name)
        if name == "vit_mae":
            inputs["noise"] = torch.rand(2, 16)
        patch(model, RotaryPatchConfig("liere", block_size=2, coordinates="index", **fields))
        with torch.no_grad():
            ((_, generators),) = rotary_parameters(model)
            generators.zero_()
            for axis in range(len(generators)):
                # A small angle, so that a full rotation is not lost.
                generators[axis, :, :, axis] = 0.1

        def measure():
            turned = rotation_of_a_pass(model, inputs).cos_sin[0, 0, :, : len(generators)].detach().double()
            found = torch.atan2(turned[..., 1], turned[..., 0]) / 0.1  # (tokens, A)
            # Angles are read off float32 rotations.
            assert torch.all(found[: CASES[name].prefix].abs() < 1e-5)
            return found[CASES[name].prefix :]

        return model, measure

    return make


@pytest.mark.parametrize("name", ["clip_vision", "siglip2", "vit_mae", "vivit"])
def test_positions_are_perturbed_in_training_only_and_within_their_patch(name, measured):
    model, measure = measured(name, position_perturbation=1.0)
    still = measure()
    assert torch.equal(measure(), still)
    model.train()
    first, second = measure(), measure()
    offsets = (first - still).abs()
    assert offsets.mean() > 0.1 and offsets.max() <= 0.5 + 1e-5
    assert (first - second).abs().max() > 0.01


@pytest.mark.parametrize("name", ["clip_vision", "vivit"])
def test_coordinates_are_augmented_in_training_only(name, measured):
    """Distances between patches are multiplied by one factor for all axes, about the centre."""
    model, measure = measured(name, position_rescale=3.0)
    still = measure()
    model.train()
    still, moved = (each - each.mean(dim=0) for each in (still, measure()))
    factor = moved[-1, 0] / still[-1, 0]
    assert 1 / 3 <= factor <= 3 and abs(factor - 1) > 0.01
    # Angles are read off float32 rotations.
    torch.testing.assert_close(moved, still * factor, rtol=0, atol=1e-4)
