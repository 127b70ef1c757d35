"""Rotations inside pretrained models: the unpatched model and explicit float64 attention are the references."""

import copy
import inspect
import itertools
import json
import math
import os
import re
import sys
import threading
from dataclasses import replace

import pytest
import torch
import transformers
from encoding_cases import NEUTRAL, ROUNDED, on_axes
from patching_cases import (
    CASES,
    IMAGE,
    REAL_SIZES,
    ROTATING,
    UNFIT,
    build,
    check_step_of_two_processes,
    clip_config,
    randomize,
    run,
    run_process,
    same_bits,
)
from reference import head_rotation
from safetensors.torch import load_file, save_file

from hf_liere import (
    RotaryPatchConfig,
    is_patched,
    load_rotary,
    patch,
    rotary_parameters,
    save_rotary,
    set_absolute_weight,
    unpatch,
)
from hf_liere.models.encoding.encoding_traits import ENCODING_TRAITS
from hf_liere.models.encoding.positions import TokenPositions
from hf_liere.models.patched.vision_towers import find_towers, head_shape, position_table, projections


SHARED_CONFIG = RotaryPatchConfig(position_encoding="comrope_ld", block_size=4)


def configs_of(model):
    """A neutral start of every encoding that can have one in the model's vision tower."""
    (tower,) = find_towers(model)
    _, head_dim = head_shape(tower.attentions[0][1])
    for encoding in on_axes(len(tower.train_grid), NEUTRAL):
        if accepted := ENCODING_TRAITS[encoding].block_sizes.accepted(head_dim, len(tower.train_grid)):
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
        unpatch(model)
        after = model.state_dict()
        assert list(after) == list(before) and all(torch.equal(after[key], before[key]) for key in before)
        assert same_bits(run(model, inputs), expected)
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


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
        if ENCODING_TRAITS[config.position_encoding].commutes:
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


def unit_grid(*sizes):
    """(N, A) coordinates (i + ½)/n of ComRoPE, by loops."""
    rows = [[]]
    for size in sizes:
        rows = [[*row, (index + 0.5) / size] for row in rows for index in range(size)]
    return torch.tensor(rows, dtype=torch.float64)


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
    model, inputs = build(name, "eager")
    patch(model, SHARED_CONFIG)
    randomize(model)
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


# transformers' own interpolation of ViViT's table fails.
@pytest.mark.parametrize("name", [name for name in CASES if CASES[name].other_size and name != "vivit"])
def test_other_sizes_start_as_the_model_with_its_interpolated_table(name):
    model, _ = build(name)
    inputs = CASES[name].inputs(CASES[name].other_size)
    native = {} if name in ("siglip2", "dinov2", "dinov2_registers") or "beit" in name else NATIVE
    expected = run(model, inputs, **native)
    patch(model, SHARED_CONFIG)
    assert same_bits(run(model, inputs), expected)
    randomize(model)
    assert not same_bits(run(model, inputs), expected)


def test_clips_of_other_sizes_and_lengths_read_the_table_in_between():
    model, inputs = build("vivit")
    patch(model, SHARED_CONFIG)
    table = model.embeddings.position_embeddings
    with torch.no_grad():
        # A table that is linear in the frame, row and column stays so between its entries.
        frame, row, column = torch.meshgrid(*[torch.arange(2.0)] * 3, indexing="ij")
        table[0, 1:] = (frame + 10 * row + 100 * column).flatten().unsqueeze(-1)
    added = {}
    model.embeddings.register_forward_hook(lambda module, args, output: added.update(tokens=output))
    model.embeddings.patch_embeddings.register_forward_hook(lambda module, args, output: output * 0)
    model(pixel_values=torch.randn(1, 8, 3, 12, 8))
    frame, row, column = torch.meshgrid(
        # Four frames of the grid lie at −¼, ¼, ¾, 1¼ of the trained two, the outer ones at its border.
        torch.tensor([0, 0.25, 0.75, 1]),
        torch.tensor([0, 0.5, 1]),
        torch.tensor([0.0, 1]),
        indexing="ij",
    )
    expected = (frame + 10 * row + 100 * column).flatten()
    torch.testing.assert_close(added["tokens"][0, 1:, 0], expected, rtol=0, atol=1e-4)
    unpatch(model)
    assert "interpolate_pos_encoding" not in vars(model.embeddings)


NATIVE = {"interpolate_pos_encoding": True}


WITH_TABLE = [name for name in CASES if name != "beit_relative"]


def sizes_of(name):
    return [size for size in (CASES[name].size, CASES[name].other_size) if size]


@pytest.mark.parametrize("name", WITH_TABLE)
def test_absolute_table_dropped_and_faded_as_if_its_weights_were(name):
    """To the last bit: reading a table between its entries is linear, and a half is a power of two."""
    model, _ = build(name)
    table = patch_table(model)
    original = table.clone()
    for size in sizes_of(name):
        inputs = CASES[name].inputs(size)
        expected = {}
        for factor in (1.0, 0.5, 0.0):
            table.copy_(original * factor)
            patch(model, SHARED_CONFIG)
            expected[factor] = run(model, inputs)
            unpatch(model)
        table.copy_(original)
        patch(model, replace(SHARED_CONFIG, keep_absolute="fade"))
        for factor in expected:
            set_absolute_weight(model, factor)
            assert same_bits(run(model, inputs), expected[factor]), (size, factor)
        unpatch(model)
        patch(model, replace(SHARED_CONFIG, keep_absolute="drop"))
        assert same_bits(run(model, inputs), expected[0.0])
        unpatch(model)
        assert torch.equal(patch_table(model), original)
        assert not same_bits(expected[1.0], expected[0.0])


def patch_table(model):
    """View of the table's rows of patches."""
    (tower,) = find_towers(model)
    return position_table(tower.embeddings).data[-math.prod(tower.train_grid) :]


@pytest.mark.parametrize("name", [name for name in WITH_TABLE if not name.endswith("pretraining")])
def test_table_at_train_size_is_read_at_the_index_of_each_patch(name):
    """A patch beyond the trained grid reads the nearest entry; expected by loops over a table of indices."""
    model, _ = build(name)
    patch(model, replace(SHARED_CONFIG, keep_absolute="train_size"))
    tower = model.get_submodule(CASES[name].tower)
    embeddings = tower.get_submodule(tower.rotary_patch.embeddings_name)
    is_video, trained = len(tower.rotary_patch.train_grid) == 3, tower.rotary_patch.train_grid
    rows = patch_rows(tower.rotary_patch, embeddings)
    with torch.no_grad():
        rows.copy_(torch.arange(len(rows)).unsqueeze(-1).expand_as(rows))
        for module in embeddings.modules():
            if isinstance(module, torch.nn.Conv2d | torch.nn.Conv3d | torch.nn.Linear):
                for parameter in module.parameters():
                    parameter.zero_()
    seen = {}
    embeddings.register_forward_hook(lambda module, args, output: seen.update(tokens=output))
    inputs = {"pixel_values": torch.randn(2, 8, 3, 8, 8)} if is_video else CASES[name].inputs((24, 16))
    grid = (4, 2, 2) if is_video else (6, 4)
    if name.startswith("vit_mae"):
        inputs["noise"] = torch.arange(24.0).expand(2, 24)
    model(**inputs)
    tokens = seen["tokens"][0] if isinstance(seen["tokens"], tuple) else seen["tokens"]
    expected = []
    for indices in itertools.product(*map(range, grid)):
        row = 0
        for index, size in zip(indices, trained):
            row = row * size + min(index, size - 1)
        expected.append(float(row))
    found = tokens[0, CASES[name].prefix :, 0].tolist()
    assert found == expected[: len(found)] and len(found) >= 12


def patch_rows(patch, embeddings):
    table = position_table(embeddings) if patch.fixed_table is None else patch.fixed_table.squeeze(0)
    return table.data[-math.prod(patch.train_grid) :]


def test_longer_clips_of_a_model_with_a_fixed_table():
    """VideoMAE's own code takes one height and width, but now any length; unpatched it takes neither."""
    model, _ = build("videomae")
    longer = {"pixel_values": torch.randn(2, 8, 3, 8, 8)}
    with pytest.raises(RuntimeError, match="size of tensor"):
        model(**longer)
    before = model.videomae.embeddings.position_embeddings
    patch(model, SHARED_CONFIG)
    seen = {}
    model.videomae.embeddings.register_forward_hook(lambda module, args, output: seen.update(tokens=output))
    model.videomae.embeddings.patch_embeddings.register_forward_hook(lambda module, args, output: output)
    assert model(**longer).logits.isfinite().all() and seen["tokens"].shape[1] == 16
    with pytest.raises(ValueError, match="doesn't match model"):
        model(pixel_values=torch.randn(2, 4, 3, 16, 16))
    unpatch(model)
    assert model.videomae.embeddings.position_embeddings is before


@pytest.mark.parametrize("name", CASES)
def test_adapter_gives_the_same_bits_on_a_fresh_base(name, tmp_path):
    model, inputs = build(name)
    patch(model, SHARED_CONFIG)
    randomize(model)
    expected = run(model, inputs)
    save_rotary(model, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rotary.safetensors", "rotary_config.json"]
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 8192
    fresh, _ = build(name)
    assert same_bits(run(load_rotary(fresh, tmp_path), inputs), expected)


FRESH_PROCESS = """
import sys, torch
from patching_cases import build, run
from hf_liere import load_rotary

for name in sys.argv[2:]:
    model, _ = build(name)
    inputs, expected = torch.load(f"{sys.argv[1]}/{name}.pt")
    load_rotary(model, f"{sys.argv[1]}/{name}")
    # A learned attention bias takes another kernel where gradients are recorded.
    with torch.no_grad():
        found = run(model, inputs)
    assert len(found) == len(expected) and all(torch.equal(a, b) for a, b in zip(found, expected)), name
"""


def test_adapters_of_every_family_in_a_fresh_process(tmp_path):
    for name in CASES:
        model, inputs = build(name)
        patch(model, SHARED_CONFIG)
        randomize(model)
        save_rotary(model, tmp_path / name)
        with torch.no_grad():
            torch.save((inputs, run(model, inputs)), tmp_path / f"{name}.pt")
    run_process([sys.executable, "-c", FRESH_PROCESS, str(tmp_path), *CASES])


def test_docstring_example_with_peft_runs_as_written(tmp_path, monkeypatch):
    pytest.importorskip("peft")
    (example,) = re.findall(r"```python\n(.*?)```", inspect.getdoc(patch), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(example, names)
    model, restored = names["model"].eval(), names["restored"].eval()
    trained, loaded = dict(rotary_parameters(model)), dict(rotary_parameters(restored))
    assert len(loaded) == 2 and loaded.keys() == trained.keys()
    # Two projections in two layers, each with two matrices of its adapter.
    assert sum(len(group["params"]) for group in names["groups"]) == 2 * 2 * 2 + len(trained)
    assert all(torch.equal(loaded[name], trained[name]) and loaded[name].any() for name in trained)
    pixels = torch.randn(1, 3, 64, 64)
    assert torch.equal(restored(pixels).pooler_output, model(pixels).pooler_output)


class TestRefusals:
    """Every refusal leaves the model as it was."""

    def refuse(self, model, message, function, *arguments):
        before = {name: value.clone() for name, value in model.state_dict().items()}
        configs = [getattr(module, "config", None) for module in model.modules()]
        with pytest.raises(ValueError, match=message):
            function(model, *arguments)
        after = model.state_dict()
        assert list(after) == list(before) and all(torch.equal(after[name], before[name]) for name in before)
        assert all(a is getattr(b, "config", None) for a, b in zip(configs, model.modules()))

    @pytest.mark.parametrize(
        "fields, message",
        [
            ({"block_size": 32}, "block_size=32 does not fit a head_dim of 16"),
            ({"block_size": 3}, "accepted here: .2, 4, 8, 16."),
            ({"layers": [0, 7]}, "layers=.0, 7. do not match.*0: encoder.layers.0.self_attn"),
            ({"layers": []}, "layers=.. do not match"),
            ({"target": "text_model"}, "target='text_model' matches no vision tower"),
            ({"coordinates": "polar"}, "polar"),
            ({"position_encoding": "rope_mixed", "block_size": 4}, "its only block_size is 2"),
        ],
    )
    def test_configuration_that_does_not_fit(self, fields, message):
        config = RotaryPatchConfig(**fields)
        self.refuse(build("clip_vision")[0], message, patch, config)

    @pytest.mark.parametrize(
        "fields, message",
        [
            ({"position_encoding": "sinusoid"}, "'sinusoid' is not a rotary encoding; accepted: axial_rope"),
            ({"keep_absolute": "twice"}, "must be one of interpolate, train_size, fade, drop"),
            ({"keep_absolute": "fade", "absolute_weight": 2.0}, "absolute_weight=2.0"),
            ({"absolute_weight": 0.5}, "belongs to keep_absolute='fade'"),
            ({"position_encoding": "axial_rope"}, "never starts neutral"),
            ({"format_version": 99}, "newer hf_liere"),
            ({"block_size": "8"}, "block_size='8' must be int or None"),
            ({"rotate_prefix": 1}, "rotate_prefix=1 must be bool"),
            ({"block_size": True}, "block_size=True must be int or None"),
            ({"absolute_weight": "1"}, "absolute_weight='1' must be float"),
            ({"layers": 3}, "layers=3 must be a list of indices"),
        ],
    )
    def test_configuration_for_no_model(self, fields, message):
        with pytest.raises(ValueError, match=message):
            RotaryPatchConfig(**fields)

    def test_models_without_anything_to_patch(self):
        text = transformers.CLIPTextModel(clip_config().text_config)
        self.refuse(text, "has no patch embedding.*its modules are embeddings", patch, SHARED_CONFIG)
        layer = torch.nn.TransformerEncoderLayer(8, 2)
        own = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 4, 4), layer)
        self.refuse(own, "not routed through.*MultiheadAttention", patch, SHARED_CONFIG)
        swin = transformers.ConvNextModel(transformers.ConvNextConfig(hidden_sizes=[8] * 4, depths=[1] * 4))
        self.refuse(swin, "not routed through", patch, SHARED_CONFIG)

    @pytest.mark.parametrize("name", ROTATING)
    def test_models_that_rotate_already(self, name):
        self.refuse(ROTATING[name](), "rotates query and key by itself .*Accepted: models", patch, SHARED_CONFIG)

    @pytest.mark.parametrize(
        "name, message",
        [
            ("eomt", "EomtForUniversalSegmentation learns query .5 vectors. outside the embeddings"),
            ("yolos", "YolosModel learn detection_tokens .3 vectors., which may come after the patches"),
            ("x_clip", r"several stacks, encoder.layers.\*.message_attn, encoder.layers.\*.self_attn"),
            ("segformer", "SegformerLayer has no image_size"),
            ("hunyuan", "HunYuanVLVisionTransformer has no image_size"),
        ],
    )
    def test_models_whose_tokens_cannot_be_placed(self, name, message):
        self.refuse(UNFIT[name](), message, patch, SHARED_CONFIG)

    def test_patched_twice_and_not_at_all(self):
        model, _ = build("clip")
        self.refuse(model, "is not patched", unpatch)
        self.refuse(model, "is not patched", set_absolute_weight, 0.5)
        self.refuse(patch(model, SHARED_CONFIG), "vision_model is patched already", patch, SHARED_CONFIG)
        self.refuse(model, "not 'fade'", set_absolute_weight, 0.5)

    def test_adapter_of_another_base(self, tmp_path):
        model, _ = build("clip_vision")
        save_rotary(patch(model, SHARED_CONFIG), tmp_path)
        wide = transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**{**IMAGE, "hidden_size": 64}))
        self.refuse(wide, "head_dim 16 there, 32 here", load_rotary, tmp_path)
        self.refuse(
            build("siglip")[0], "model_type clip_vision_model there, siglip_vision_model", load_rotary, tmp_path
        )
        same_shape = transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**IMAGE))
        self.refuse(same_shape, "trained on other weights", load_rotary, tmp_path)
        assert is_patched(load_rotary(same_shape, tmp_path, None, False))
        # Rotations of the same kind are replaced, those of another refused.
        saved = {name: value.clone() for name, value in rotary_parameters(model)}
        randomize(model)
        load_rotary(model, tmp_path)
        assert all(torch.equal(value, saved[name]) for name, value in rotary_parameters(model))
        self.refuse(
            patch(build("clip_vision")[0], RotaryPatchConfig("liere")), "'liere' here, .* there", load_rotary, tmp_path
        )
        config = json.loads((tmp_path / "rotary_config.json").read_text())
        config["rotary_patch"]["position_encoding"] = "comrope_ap"
        (tmp_path / "rotary_config.json").write_text(json.dumps(config))
        self.refuse(build("clip_vision")[0], "multipliers", load_rotary, tmp_path)
        (tmp_path / "rotary_config.json").unlink()
        self.refuse(build("clip_vision")[0], "contains no rotary_config.json", load_rotary, tmp_path)

    @pytest.mark.parametrize(
        "damage, message",
        [
            (lambda path: edit(path, lambda content: content.pop("base")), "has no list 'base'"),
            (lambda path: edit(path, lambda content: content["base"][0].pop("heads")), "base has no heads"),
            (lambda path: edit(path, lambda content: content["base"][0].update(weights=[["a"]])), "other weights"),
            (
                lambda path: edit(path, lambda content: content["rotary_patch"].update(format_version="1")),
                "='1' must be",
            ),
            (
                lambda path: edit(path, lambda content: content["rotary_patch"].update(layers="01")),
                "layers='01' must be",
            ),
            (lambda path: (path / "rotary_config.json").write_text("{"), "rotary_config.json is no json"),
            (lambda path: (path / "rotary_config.json").write_text("[]"), "has no dict 'rotary_patch'"),
            (lambda path: (path / "rotary_config.json").write_bytes(b"\xff\xfe{"), "rotary_config.json is no json"),
            (lambda path: os.truncate(path / "rotary.safetensors", 500), "rotary.safetensors cannot be read"),
            (lambda path: os.truncate(path / "rotary.safetensors", 0), "rotary.safetensors cannot be read"),
            (lambda path: edit_weights(path, float("nan")), "generators with values that are not finite"),
            (lambda path: edit_weights(path, float("inf")), "generators with values that are not finite"),
        ],
    )
    def test_damaged_adapter(self, damage, message, tmp_path):
        model, _ = build("clip_vision")
        save_rotary(patch(model, SHARED_CONFIG), tmp_path)
        damage(tmp_path)
        self.refuse(unpatch(model), message, load_rotary, tmp_path)


def edit(path, change):
    content = json.loads((path / "rotary_config.json").read_text())
    change(content)
    (path / "rotary_config.json").write_text(json.dumps(content))


def edit_patch(path, **fields):
    edit(path, lambda content: content["rotary_patch"].update(fields))


def edit_weights(path, value):
    tensors = load_file(path / "rotary.safetensors")
    tensors["0.generators"][0, 0, 0, 0] = value
    save_file(tensors, path / "rotary.safetensors")


def test_adapter_knows_its_base_in_another_precision_and_not_one_that_was_trained(tmp_path):
    model, _ = build("clip_vision")
    save_rotary(patch(model, SHARED_CONFIG), tmp_path)
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        base, _ = build("clip_vision")
        assert is_patched(load_rotary(base.to(dtype), tmp_path))
    # A copy in half precision, as published, then loaded in another.
    base, _ = build("clip_vision")
    assert is_patched(load_rotary(base.to(torch.float16).to(torch.bfloat16), tmp_path))
    trained, _ = build("clip_vision")
    with torch.no_grad():
        weight = trained.encoder.layers[1].self_attn.k_proj.weight
        weight += 0.03 * weight.std() * torch.randn_like(weight)
    with pytest.raises(ValueError, match=r"differ by about [234]\.\d%"):
        load_rotary(trained, tmp_path)


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


def test_int8_projections_are_left_alone(tmp_path):
    model, inputs = build("clip_vision")
    torch.backends.quantized.engine = torch.backends.quantized.supported_engines[-1]
    quantized = torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8)
    assert list(quantized.encoder.layers[0].self_attn.q_proj.parameters()) == []
    expected = run(quantized, inputs)
    patch(quantized, SHARED_CONFIG)
    assert same_bits(run(quantized, inputs), expected)
    randomize(quantized)
    rotated = run(quantized, inputs)
    save_rotary(quantized, tmp_path)
    unpatch(quantized)
    with pytest.warns(UserWarning, match="was not checked: its weights are quantized"):
        load_rotary(quantized, tmp_path)
    assert same_bits(run(quantized, inputs), rotated)


def test_offloaded_and_dispatched_models():
    accelerate = pytest.importorskip("accelerate")
    model, inputs = build("clip_vision")
    patch(model, SHARED_CONFIG)
    randomize(model)
    expected = run(model, inputs)
    offloaded = accelerate.cpu_offload(copy.deepcopy(model), execution_device=torch.device("cpu"))
    assert next(value for _, value in rotary_parameters(offloaded)).is_meta
    assert same_bits(run(offloaded, inputs), expected)
    other, _ = build("clip_vision")
    dispatched = accelerate.dispatch_model(other, {"": "cpu"}, force_hooks=True)
    patch(dispatched, SHARED_CONFIG)
    dispatched.load_state_dict(model.state_dict())
    assert same_bits(run(dispatched, inputs), expected)


@pytest.mark.parametrize("keep_absolute, size", [("train_size", (24, 16)), ("drop", (24, 16)), ("fade", (16, 16))])
def test_offloaded_tables_are_read(keep_absolute, size):
    accelerate = pytest.importorskip("accelerate")
    model, _ = build("clip_vision")
    patch(model, replace(SHARED_CONFIG, keep_absolute=keep_absolute))
    inputs = CASES["clip_vision"].inputs(size)
    expected = run(model, inputs)
    offloaded = accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    assert same_bits(run(offloaded, inputs), expected)


def test_two_processes_take_the_step_of_one(tmp_path):
    model, _ = build("clip_classifier")
    patch(model, SHARED_CONFIG)
    randomize(model)
    batch = {"pixel_values": torch.randn(4, 3, 16, 16), "labels": torch.tensor([0, 1, 2, 0])}
    check_step_of_two_processes(model, batch, tmp_path, 1e-4)


def test_implementation_may_change_after_patching():
    model, inputs = build("siglip2")
    patch(model, SHARED_CONFIG)
    randomize(model)
    sdpa = run(model, inputs)
    model.set_attn_implementation("eager")
    # Two implementations of float32 attention, at values of order ten.
    for found, expected in zip(run(model, inputs), sdpa):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_text_tower_is_untouched_and_attention_outside_the_tower_says_so():
    model, inputs = build("clip")
    text = model.get_text_features(input_ids=inputs["input_ids"]).pooler_output
    patch(model, SHARED_CONFIG)
    randomize(model)
    assert torch.equal(model.get_text_features(input_ids=inputs["input_ids"]).pooler_output, text)
    assert [name for name, _ in rotary_parameters(model)] == [
        "vision_model.rotary_encoding.generators",
        "vision_model.rotary_encoding.multipliers",
    ]
    with pytest.raises(RuntimeError, match="outside the forward pass"):
        model.vision_model.encoder(torch.zeros(1, 17, 32))


def test_layer_that_is_not_rotated_any_more_is_reported():
    model, inputs = build("vit")
    patch(model, SHARED_CONFIG)
    attention = model.vit.layers[1].attention if hasattr(model.vit, "layers") else model.vit.encoder.layer[1].attention
    attention.config = model.config
    with pytest.raises(RuntimeError, match="ran without rotations"):
        model(**inputs)
    with pytest.raises(RuntimeError, match="ran without rotations"):
        model(**inputs)


def test_failed_forward_leaves_nothing_behind():
    model, inputs = build("clip_vision")
    patch(model, SHARED_CONFIG)
    expected = run(model, inputs)
    with pytest.raises((RuntimeError, ValueError)):
        model(pixel_values=torch.randn(1, 5, 16, 16))
    assert same_bits(run(model, inputs), expected)
    with pytest.raises(RuntimeError, match="outside the forward pass"):
        model.encoder(torch.zeros(1, 17, 32))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_gradients_of_two_grids_are_those_without(reentrant):
    gradients = []
    for checkpointing in (False, True):
        model, _ = build("clip_vision")
        patch(model, SHARED_CONFIG)
        torch.manual_seed(2)
        randomize(model)
        model.train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        torch.manual_seed(3)
        # Both forwards before the backward, with as many tokens on different grids.
        first = model(pixel_values=torch.randn(2, 3, 16, 16).requires_grad_()).last_hidden_state
        second = model(pixel_values=torch.randn(2, 3, 32, 8).requires_grad_()).last_hidden_state
        (first.square().sum() + second.square().sum()).backward()
        gradients.append([value.grad for _, value in rotary_parameters(model)])
    # Reentrant checkpointing adds up the layers in another order.
    for plain, checkpointed in zip(*gradients):
        torch.testing.assert_close(checkpointed, plain, rtol=1e-5, atol=1e-5)


def test_copies_and_other_models_keep_their_own_grids():
    first, inputs = build("clip_vision")
    patch(first, SHARED_CONFIG)
    randomize(first)
    expected = run(first, inputs)
    second = copy.deepcopy(first)
    assert same_bits(run(second, inputs), expected)
    randomize(second)
    assert same_bits(run(first, inputs), expected) and not same_bits(run(second, inputs), expected)
    unpatch(second)
    assert is_patched(first) and not is_patched(second)
    assert same_bits(run(first, inputs), expected)


def test_threads_do_not_see_each_others_grids():
    model, _ = build("clip_vision")
    patch(model, SHARED_CONFIG)
    randomize(model)
    sizes = [(16, 16), (32, 8), (8, 32), (24, 16)]
    inputs = [CASES["clip_vision"].inputs(size) for size in sizes]
    with torch.no_grad():
        expected = [model(**sample).last_hidden_state for sample in inputs]
    wrong = []

    def work(index):
        for _ in range(20):
            with torch.no_grad():
                if not torch.equal(model(**inputs[index]).last_hidden_state, expected[index]):
                    wrong.append(sizes[index])

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize("name", CASES)
def test_checkpointed_gradients_of_every_family_are_those_without(name):
    gradients = []
    for checkpointing in (False, True):
        model, inputs = build(name)
        assert model.supports_gradient_checkpointing
        patch(model, SHARED_CONFIG)
        torch.manual_seed(2)
        randomize(model)
        model.train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        sum(tensor.square().sum() for tensor in run(model, inputs) if tensor.requires_grad).backward()
        gradients.append([value.grad for _, value in rotary_parameters(model)])
    assert same_bits(*gradients) and all(gradient.abs().max() > 0 for gradient in gradients[0])


# One of each way to embed patches and to pass attention on; compiling takes seconds each.
COMPILED_FAST = ("clip_vision", "vit", "siglip2", "dinov2_registers", "vivit")


@pytest.mark.parametrize(
    "name", [name if name in COMPILED_FAST else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_compiled_whole_graph_gives_the_same(name):
    if name == "videomae_pretraining":
        pytest.skip("transformers' own VideoMAEForPreTraining is no whole graph: its masks decide the number of tokens")
    model, inputs = build(name)
    patch(model, SHARED_CONFIG)
    randomize(model)
    expected = run(model, inputs)
    torch.compiler.reset()
    found = run(torch.compile(model, backend="eager", fullgraph=True), inputs)
    for compiled, eager in zip(found, expected, strict=True):
        # The compiled graph fixes the number of squarings of the exponential instead of measuring it.
        torch.testing.assert_close(compiled, eager, rtol=1e-4, atol=1e-4)


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
    model, inputs = build(name)
    patch(model, SHARED_CONFIG)
    randomize(model)
    found = rotations_of_a_pass(model, inputs)
    (encoding,) = (module.rotary_encoding for module in model.modules() if hasattr(module, "rotary_encoding"))
    parameters, prefix = dict(encoding.named_parameters()), CASES[name].prefix
    positions = [torch.full((2,), 0.5, dtype=torch.float64)] * prefix + list(unit_grid(4, 4))
    for layer, head in itertools.product(range(2), range(2)):
        expected = torch.stack([head_rotation(p, parameters, encoding.config, 2, layer, head) for p in positions])
        # Rotations are float32.
        torch.testing.assert_close(found[layer, head], expected, rtol=0, atol=1e-6)
    assert (found[:, :, 0] - torch.eye(16)).abs().amax() > 1e-2
    unpatch(model)
    patch(model, replace(SHARED_CONFIG, rotate_prefix=False))
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
    assert 0.1 < offsets.abs().mean() and offsets.abs().max() <= 0.5 + 1e-5
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


@pytest.mark.parametrize("autocast", [True, False])
def test_bfloat16_starts_as_the_unpatched_model(autocast):
    model, inputs = build("clip_vision")
    if not autocast:
        model.to(torch.bfloat16)
        inputs = {name: value.to(torch.bfloat16) for name, value in inputs.items()}
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        expected = run(model, inputs)
        patch(model, SHARED_CONFIG)
        assert same_bits(run(model, inputs), expected)
        randomize(model)
        sum(tensor.float().square().sum() for tensor in run(model, inputs)).backward()
    assert all(value.dtype == torch.float32 and value.grad.isfinite().all() for _, value in rotary_parameters(model))


def test_lora_and_rotations_round_trip_together(tmp_path):
    peft = pytest.importorskip("peft")
    model, inputs = build("clip_vision")
    save = [tmp_path / "lora", tmp_path / "rotary"]
    patch(model, SHARED_CONFIG)
    lora = peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=2, init_lora_weights=False)
    tuned = peft.get_peft_model(model, lora)
    for _, parameter in rotary_parameters(tuned):
        parameter.requires_grad_(True)
    randomize(tuned)
    expected = run(tuned, inputs)
    sum(tensor.square().sum() for tensor in expected).backward()
    assert all(value.grad.abs().max() > 0 for _, value in rotary_parameters(tuned))
    tuned.save_pretrained(save[0])
    save_rotary(tuned, save[1])

    base, _ = build("clip_vision")
    restored = peft.PeftModel.from_pretrained(load_rotary(base, save[1]), save[0]).eval()
    assert same_bits(run(restored, inputs), expected)
    other, _ = build("clip_vision")
    restored = load_rotary(peft.PeftModel.from_pretrained(other, save[0]), save[1]).eval()
    assert same_bits(run(restored, inputs), expected)


def test_peft_may_train_and_save_the_rotations(tmp_path):
    peft = pytest.importorskip("peft")
    model, inputs = build("clip_vision")
    lora = peft.LoraConfig(target_modules=["q_proj"], r=2, init_lora_weights=False, modules_to_save=["rotary_encoding"])
    tuned = peft.get_peft_model(patch(model, SHARED_CONFIG), lora).eval()
    randomize(tuned)
    assert all(value.requires_grad for _, value in rotary_parameters(tuned))
    expected = run(tuned, inputs)
    tuned.save_pretrained(tmp_path)
    base, _ = build("clip_vision")
    restored = peft.PeftModel.from_pretrained(patch(base, SHARED_CONFIG), tmp_path).eval()
    assert same_bits(run(restored, inputs), expected)
