"""Learned rotations in the transformers of diffusers."""

import re
from dataclasses import replace

import pytest
import reference
import torch
from checkout import ROOT
from library_checks import find_starts, normal, randomize
from peft import LoraConfig, get_peft_model_state_dict
from safetensors.torch import load_file
from torch.overrides import TorchFunctionMode

from hf_liere import (
    FrequencySchedule,
    complete_model,
    is_patched,
    load_rotary,
    patch,
    rotary_parameters,
    save_rotary,
    set_frequency_schedule,
    unpatch,
)
from hf_liere.patching.libraries.families import FAMILIES, geometric_planes
from hf_liere.patching.libraries.rotations import find_coordinates


diffusers = pytest.importorskip("diffusers", reason="diffusers needs Python 3.11")
from diffusers.hooks import apply_group_offloading  # noqa: E402
from diffusion_cases import (  # noqa: E402
    BLOCKS,
    BY_NAME,
    CASES,
    COMPOSED,
    OTHER_PARTS,
    PANELS,
    PLANES,
    VARIANTS,
    ZEROS,
    flux_in_panels,
    make_pipeline,
    run,
    sd3,
    vary,
)


ROW = re.compile(r"^\| `(\w+Model)` \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", re.MULTILINE)
ROWS = {name: rest for name, *rest in ROW.findall((ROOT / "docs" / "diffusion.md").read_text(encoding="utf-8"))}
ROTATING = [case for case in CASES if case.rotates]
PLAIN = [case for case in CASES if not case.rotates]
FLUX, FLUX2 = BY_NAME["FluxTransformer2DModel"], BY_NAME["Flux2Transformer2DModel"]
COGVIDEOX = BY_NAME["CogVideoXTransformer3DModel"]
CONFIGS = [(case, config) for case in CASES for config in ((PLANES, BLOCKS) if case.rotates else (ZEROS,))]
each = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
rotating = pytest.mark.parametrize("case", ROTATING, ids=lambda case: case.name)
patched = pytest.mark.parametrize(
    ("case", "config"), CONFIGS, ids=[f"{case.name}-{config.position_encoding}" for case, config in CONFIGS]
)


@pytest.mark.parametrize("config", [PLANES, BLOCKS], ids=lambda config: config.position_encoding)
def test_text_of_z_image_learns_on_the_first_axis(config):
    """The second attention module sees the text alone, whose positions are on that axis."""
    case = BY_NAME["ZImageTransformer2DModel"]
    model = patch(case.build(), config)
    run(model, case.inputs()).square().mean().backward()
    ((_, value),) = rotary_parameters(model)
    text, first = (value.grad[1], case.axes[0] // 2) if config is PLANES else (value.grad[:, 1].movedim(0, -1), 1)
    assert text[..., :first].any() and not text[..., first:].any()


@pytest.mark.parametrize("config", [PLANES, BLOCKS], ids=lambda config: config.position_encoding)
@torch.no_grad()
def test_tokens_at_zero_stay_as_they_are(config):
    """FLUX.1's text is at 0 on all axes; here the image is as well, so that nothing may change."""
    model, inputs = FLUX.build(), FLUX.inputs()
    inputs["img_ids"] = torch.zeros_like(inputs["img_ids"])
    before = run(model, inputs)
    randomize(patch(model, config), 0.5)
    assert (run(model, inputs) - before).abs().max() < 1e-6


@torch.no_grad()
def test_products_are_relative_along_the_first_axis():
    model, inputs = FLUX.build(), FLUX.inputs()
    config = replace(BLOCKS, position_encoding="liere_product")
    randomize(patch(model, config), 0.5)
    before, changes = run(model, inputs), []
    for axis in (0, 1):
        shift = 5.0 * torch.eye(3)[axis]
        moved = {name: inputs[name] + shift for name in ("img_ids", "txt_ids")}
        changes.append((run(model, {**inputs, **moved}) - before).abs().max())
    assert changes[0] < 1e-5 < 1e-3 < changes[1]


class Recorder(TorchFunctionMode):
    """The first queries and keys, (B, H, N, D) in float64, with which attention is computed."""

    first = None

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.nn.functional.scaled_dot_product_attention and self.first is None:
            given = {**dict(zip(("query", "key"), args)), **(kwargs or {})}
            self.first = given["query"].double(), given["key"].double()
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("name, config", [(FLUX.name, COMPOSED), (FLUX.name, PANELS), (FLUX2.name, COMPOSED)])
@torch.no_grad()
def test_queries_and_keys_are_rotated_by_the_model_and_then_by_ours(name, config):
    model, inputs = BY_NAME[name].build(), BY_NAME[name].inputs()
    with Recorder() as plain:
        before = run(model, inputs)
    if config is PANELS:
        inputs |= flux_in_panels()["joint_attention_kwargs"]
        positions = torch.nn.functional.pad(inputs["rotary_positions"], (0, 0, 5, 0)).double()  # text is at 0
    else:
        positions = torch.cat([inputs["txt_ids"], inputs["img_ids"]]).double()[None]
    assert torch.equal(run(patch(model, config), inputs), before)
    randomize(model, 0.5)
    with Recorder() as composed:
        run(model, inputs)
    encoding = model.rotary_encoding.encoding
    for head in range(2):
        parameters = dict(encoding.named_parameters())
        matrices = reference.generators(parameters, encoding.config, positions.shape[-1], 0, head)
        turned = torch.linalg.matrix_exp(torch.einsum("bna,aij->bnij", positions, matrices))
        for start, found in zip(plain.first, composed.first):
            expected = (turned @ start[:, head, :, :, None]).squeeze(-1)
            torch.testing.assert_close(found[:, head], expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


def test_pipelines_pass_positions_and_files_keep_rotations_behind_the_model(tmp_path):
    pipeline = make_pipeline(model := FLUX.build())
    before = sample(pipeline)
    randomize(patch(model, PANELS), 0.5)
    panels = torch.eye(3)[torch.arange(24) // 8, 1:][None]
    start, found = (sample(pipeline, joint_attention_kwargs={"rotary_positions": p}) for p in (0 * panels, panels))
    assert torch.equal(start, before) and not torch.allclose(found, before, atol=1e-3)
    model.save_pretrained(tmp_path)
    loaded, given = type(model).from_pretrained(tmp_path), flux_in_panels()
    assert torch.equal(run(loaded, given), run(model, given))
    with pytest.raises(ValueError, match=r"shape \(1, 16, 2\) or \(2, 16, 2\), .*, and got None"):
        run(model, FLUX.inputs())
    with pytest.raises(ValueError, match="CogVideoXTransformer3DModel takes neither; accepted: models of transformers"):
        patch(COGVIDEOX.build(), COMPOSED)


@each
def test_table_of_the_page(case):
    """What it states of every class, computed."""
    start, *cells = ROWS[case.name]
    encodings = ("rope_mixed", "liere", "comrope_ld") if case.rotates else ("liere", "comrope_ld")
    assert tuple(cells) == find_starts(run, case, PLANES if case.rotates else ZEROS, encodings)
    axes = patch(case.build(), PLANES).rotary_patch.planes.num_axes if case.rotates else 0
    assert start == (f"its RoPE, {axes} axes" if axes else "zero")


def test_table_has_every_class():
    assert set(ROWS) == set(BY_NAME) == set(FAMILIES)


@pytest.mark.parametrize("case", VARIANTS.values(), ids=VARIANTS)
@torch.no_grad()
def test_other_forms_of_inputs(case):
    model, inputs = case.build(), case.inputs()
    before = run(model, inputs)
    for config in (PLANES, BLOCKS) if case.rotates else (ZEROS,):
        error = (run(patch(model, config), inputs) - before).abs().max()
        # Angles of LTX are rounded to float32 by diffusers, see above.
        tolerance = 1e-4 if case.name.startswith("LTX") else 1e-5
        assert error < tolerance if config is BLOCKS else error == 0
        randomize(model, 0.05)
        assert (run(model, inputs) - before).abs().max() > 1e-4
        unpatch(model)


# By family, the channels of a head in released models; the most tokens along an axis that these allow, or their tables.
RELEASED = {
    "QwenImageTransformer2DModel": ((16, 56, 56), 10000.0, (4096, 8192, 8192)),
    "WanTransformer3DModel": ((44, 42, 42), 10000.0, (1024, 1024, 1024)),
    "HunyuanVideoTransformer3DModel": ((16, 56, 56), 256.0, (402, 659, 659)),
    "CosmosTransformer3DModel": ((44, 42, 42), 10000.0, (1024, 1024, 1024)),
    "CogVideoXTransformer3DModel": ((16, 24, 24), 10000.0, (4096, 4096, 4096)),
}


@pytest.mark.parametrize(("channels", "theta", "sizes"), RELEASED.values(), ids=RELEASED)
@pytest.mark.parametrize("form", ["adjacent", "halves", "complex"])
def test_coordinates_from_cos_and_sin(form, channels, theta, sizes):
    """Of the largest grids of released models, from cos and sin in float32: their rounding, and one in the result."""
    assert set(RELEASED) == {name for name, one in FAMILIES.items() if one.rotates and one.coordinates is None}
    planes = geometric_planes(channels, theta, pairing="adjacent" if form == "complex" else form)
    for axis, size in enumerate(sizes):
        places = torch.zeros(size, 3, dtype=torch.float64)
        places[:, axis] = torch.arange(size) - (size // 2 if size == 8192 else 0)
        angles = torch.cat(
            [places[:, [a]] * theta ** (-torch.arange(0, d, 2).double() / d) for a, d in enumerate(channels)], dim=-1
        )
        repeat = {"adjacent": lambda x: x.repeat_interleave(2, -1), "halves": lambda x: torch.cat([x, x], -1)}
        cos, sin = (repeat.get(form, lambda x: x)(x) for x in (angles.cos().float(), angles.sin().float()))
        found = find_coordinates(torch.complex(cos, sin) if form == "complex" else (cos, sin), planes)
        assert found.dtype == torch.float32 and (found - places).abs().max() < 1e-7
    # Wan keeps tables, which are rounded with a model that is cast.
    if channels == (44, 42, 42) and form == "adjacent":
        assert torch.equal(find_coordinates((cos.bfloat16(), sin.bfloat16()), planes), places.float())


@rotating
def test_learned_frequencies_are_those_of_another_base(case):
    """The model with δ = ln(ω′/ω) computes what diffusers computes with θ′, whose frequencies are ω′."""
    model, other, inputs, start = case.build(), case.build(), case.inputs(), case.frequencies()
    patch(model, PLANES)
    planes = model.rotary_patch.planes
    own = torch.tensor(planes.speeds, dtype=torch.float64)[planes.turning]
    assert torch.allclose(own, start, rtol=1e-6, atol=0)
    with torch.no_grad():
        before, expected = run(model, inputs), run(other, case.set_base(other, inputs, 500.0))
        model.rotary_encoding.log_factors.copy_((case.frequencies(500.0) / start).log())
        # Angles of LTX are rounded to float32 by diffusers, see above.
        tolerance = 1e-4 if case.name.startswith("LTX") else 1e-5
        assert (run(model, inputs) - expected).abs().max() < tolerance < 1e-3 < (before - expected).abs().max()


@pytest.mark.parametrize("config", [PLANES, BLOCKS], ids=lambda config: config.position_encoding)
@torch.no_grad()
def test_offloaded_groups_give_the_same_bits(config):
    model, inputs, cpu = patch(FLUX.build(), config), FLUX.inputs(), torch.device("cpu")
    randomize(model, 0.05)
    before = run(model, inputs)
    apply_group_offloading(model, onload_device=cpu, offload_device=cpu, offload_type="leaf_level")
    assert torch.equal(run(model, inputs), before)


@torch.no_grad()
def test_a_scheduled_model_is_one_graph():
    case = vary(FLUX.name, FLUX.inputs, num_layers=1, num_single_layers=1)
    model, inputs = patch(case.build(), PLANES), case.inputs()
    randomize(model, 0.05)
    set_frequency_schedule(model, FrequencySchedule("ntk", (None, 2, 2), dype=(2.0, 2.0)))
    torch._dynamo.reset()
    assert torch.equal(run(torch.compile(model, backend="eager", fullgraph=True), inputs), run(model, inputs))


@pytest.mark.slow
@torch.no_grad()
def test_a_graph_sees_rotations_that_are_not_those_of_coordinates():
    case = vary(COGVIDEOX.name, COGVIDEOX.inputs, num_layers=1)
    model, inputs = patch(case.build(), PLANES), case.inputs()
    cos, sin = inputs["image_rotary_emb"]
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    run(compiled, inputs)
    with pytest.raises(RuntimeError, match="The given rotations are not those of one coordinate"):
        run(compiled, inputs | {"image_rotary_emb": (cos * 1.01, sin)})


def sample(pipeline, **given):
    """Latents of 6 × 4 tokens."""
    options = {"height": 96, "width": 64, "num_inference_steps": 3, "output_type": "latent"}
    prompt = {"prompt_embeds": normal(1, 5, 16), "pooled_prompt_embeds": normal(1, 8)}
    return pipeline(**prompt, **options, **given, generator=torch.Generator().manual_seed(0)).images


def test_pipeline_saves_and_loads_rotations_beside_the_plain_model_and_a_lora(tmp_path):
    model = FLUX.build()
    pipeline = make_pipeline(model)
    before = sample(pipeline)
    patch(model, PLANES)
    assert torch.equal(sample(pipeline), before)
    randomize(model, 0.05)
    learned = sample(pipeline)
    assert not torch.equal(learned, before)
    with pytest.raises(ValueError, match="save_rotary"):
        complete_model(model)
    pipeline.save_pretrained(tmp_path / "pipeline")
    restored = diffusers.FluxPipeline.from_pretrained(tmp_path / "pipeline", **OTHER_PARTS)
    assert is_patched(restored.transformer) and torch.equal(sample(restored), learned)
    assert torch.equal(sample(make_pipeline(unpatch(restored.transformer))), before)

    model.add_adapter(LoraConfig(r=2, lora_alpha=2, target_modules=["to_q", "to_k"], init_lora_weights=False))
    adapted = sample(pipeline)
    assert not torch.equal(adapted, learned)
    pipeline.save_lora_weights(tmp_path / "lora", transformer_lora_layers=get_peft_model_state_dict(model))
    save_rotary(model, tmp_path / "rotations")
    other = make_pipeline(FLUX.build())
    load_rotary(other.transformer, tmp_path / "rotations")
    other.load_lora_weights(tmp_path / "lora")
    assert torch.equal(sample(other), adapted)


def test_rotations_of_an_earlier_model_do_not_stay(tmp_path):
    patch(model := FLUX.build(), PLANES).save_pretrained(tmp_path)
    unpatch(loaded := type(model).from_pretrained(tmp_path)).save_pretrained(tmp_path)
    assert not list(tmp_path.glob("rotary*")) and not is_patched(type(model).from_pretrained(tmp_path))
    assert "_rotary_patch" not in loaded.config
    # Those of `save_rotary` may be the only ones.
    save_rotary(model, tmp_path)
    with pytest.raises(ValueError, match="contains rotations .*which has none: move them away"):
        loaded.save_pretrained(tmp_path)
    assert is_patched(type(model).from_pretrained(tmp_path))
    # Files of others.
    (tmp_path / "rotary.safetensors").unlink()
    (tmp_path / "rotary_config.json").write_text('{"speed": 3}')
    loaded.save_pretrained(tmp_path)
    assert (tmp_path / "rotary_config.json").is_file()


def test_files_of_two_models_are_refused(tmp_path):
    patch(model := FLUX.build(), PLANES).save_pretrained(tmp_path / "patched")
    randomize(model)
    model.save_pretrained(tmp_path / "other")
    unpatch(model).save_pretrained(tmp_path / "plain")
    load = type(model).from_pretrained
    for source, target, name, match in (
        ("plain", "patched", "config.json", "rotations of another model: its config.json names none"),
        ("patched", "other", "rotary.safetensors", "was not saved with rotary.safetensors as it is now"),
    ):
        (tmp_path / target / name).write_bytes((tmp_path / source / name).read_bytes())
        with pytest.raises(ValueError, match=match):
            load(tmp_path / target)
    for name in ("rotary.safetensors", "rotary_config.json"):
        (tmp_path / "other" / name).unlink()
    with pytest.raises(ValueError, match="lacks the rotations that its config.json names"):
        load(tmp_path / "other")


@pytest.mark.parametrize("config", [PLANES, BLOCKS], ids=["planes", "blocks"])
def test_averages_of_training_scripts_keep_rotations(config, tmp_path):
    from diffusers.training_utils import EMAModel

    model = patch(FLUX.build(), config)
    averages = EMAModel(model.parameters(), decay=0.9, model_cls=type(model), model_config=model.config)
    randomize(model)
    averages.step(model.parameters())
    averages.save_pretrained(tmp_path)
    loaded = EMAModel.from_pretrained(tmp_path, model_cls=type(model))
    assert loaded.optimization_step == 1 and len(loaded.shadow_params) == len(averages.shadow_params)
    fresh = patch(FLUX.build(seed=1), config)
    loaded.copy_to(fresh.parameters())
    for parameter, expected in zip(fresh.parameters(), averages.shadow_params, strict=True):
        assert torch.equal(parameter, expected)
    assert is_patched(type(model).from_config(model.config))
    # Averages of the plain model are one short.
    plain = FLUX.build()
    for wrong in (EMAModel(plain.parameters(), model_cls=type(plain), model_config=plain.config), averages):
        with pytest.raises(ValueError, match="make it from the parameters and the config of the model after patch"):
            wrong.step((plain if wrong is averages else model).parameters())
    stale = EMAModel(model.parameters(), model_cls=type(plain), model_config=plain.config)
    with pytest.raises(ValueError, match="model after patch"):
        stale.save_pretrained(tmp_path / "stale")


def test_lora_on_projections_that_blocks_rotate():
    """Without a norm blocks rotate the projections, inside of which LoRA puts its own."""
    case = vary("SD3Transformer2DModel", sd3, qk_norm=None)
    plain, model, inputs = case.build(), case.build(), case.inputs()
    lora = LoraConfig(r=2, target_modules=["to_q", "to_k"], init_lora_weights=False)
    patch(model, ZEROS)
    for each_model in (plain, model):
        torch.manual_seed(3)
        each_model.add_adapter(lora)
    with torch.no_grad():
        assert torch.equal(run(model, inputs), run(plain, inputs))
        randomize(model, 0.5)
        adapted = run(model, inputs)
        plain.fuse_lora()
        plain.unload_lora()
        merged = patch(plain, ZEROS)
        randomize(merged, 0.5)
        assert (run(merged, inputs) - adapted).abs().max() < 1e-5 < (run(unpatch(merged), inputs) - adapted).abs().max()


@pytest.mark.parametrize("copies", [None, ["rotary_encoding"]])
def test_lora_of_diffusers(copies, tmp_path, recwarn):
    """`save_lora_adapter` and pipelines name the rotations that they lose, and `load_lora_adapter` refuses to."""
    model = patch(FLUX.build(), PLANES)
    model.add_adapter(LoraConfig(r=2, target_modules=["to_q"], init_lora_weights=False, modules_to_save=copies))
    randomize(model)
    recwarn.clear()
    model.save_lora_adapter(tmp_path)
    assert any("leaves out the learned rotations" in str(one.message) for one in recwarn) == (copies is None)
    state = get_peft_model_state_dict(model)
    diffusers.FluxPipeline.save_lora_weights(tmp_path / "pipeline", transformer_lora_layers=state)
    if copies is None:
        return
    state = load_file(tmp_path / "pytorch_lora_weights.safetensors")
    with pytest.raises(ValueError, match="has no place for the rotations"):
        FLUX.build().load_lora_adapter(state, prefix=None)
