"""Patched models under offloading, two processes, checkpointing, threads, compilation and bfloat16."""

import importlib
import itertools
import threading

import patching_cases
import pytest
import rope_cases
import torch
from patching_cases import CASES, build, check_step_of_two_processes, outputs, randomize, run, same_bits, tensors
from patching_checks import (
    SHARED_CONFIG,
    build_patched,
    check_cached_steps,
    compute_checkpointed_gradients,
)
from rope_cases import PLANES, blocks
from slow_cases import slow_except

from hf_liere import FrequencySchedule, patch, rotary_parameters, set_frequency_schedule, unpatch
from hf_liere.patching import tower_patch


KINDS = {"zeros": SHARED_CONFIG, "planes": PLANES, "blocks": blocks(), "commuting": blocks("comrope_ld", layers=[0])}
STEPS = [("clip_classifier", "zeros", "ddp")]
STEPS += itertools.product(("llama", "qwen3"), ("planes", "blocks", "commuting"), ("ddp", "fsdp", "fsdp_small"))


@pytest.mark.slow
@pytest.mark.parametrize("name, config, kind", STEPS)
def test_two_processes_take_the_step_of_one(name, config, kind, tmp_path):
    model, inputs = (patching_cases if config == "zeros" else rope_cases).build(name)
    randomize(patch(model, KINDS[config]))
    if config == "zeros":
        batch = {"pixel_values": torch.randn(4, 3, 16, 16), "labels": torch.tensor([0, 1, 2, 0])}
    else:
        batch = {**inputs, "labels": inputs["input_ids"]}
    check_step_of_two_processes(model, batch, tmp_path, 1e-4 if config == "zeros" else 1e-5, kind)


def test_implementation_may_change_after_patching():
    model, inputs = build_patched("siglip2")
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


def build_interrupted(kind):
    """A patched model of each kind whose forward pass keeps something in its thread, and its inputs by name."""
    if kind == "clip":
        return build_patched("clip")
    if kind == "timm":
        pytest.importorskip("timm")
        import timm_cases

        (model, inputs), config = timm_cases.build("vit_small_patch16_dinov3"), timm_cases.BLOCKS
    elif kind.startswith("flux"):
        pytest.importorskip("diffusers")
        import diffusion_cases

        (model, inputs), config = diffusion_cases.build("FluxTransformer2DModel"), diffusion_cases.BLOCKS
        if kind == "flux_levels":
            patch(model, diffusion_cases.PLANES)
            set_frequency_schedule(model, FrequencySchedule("ntk", [None, 2, 3], dype=(2.0, 1.0)))
            return model, inputs
    else:
        (model, inputs), config = rope_cases.build(kind), rope_cases.blocks()
        inputs["use_cache"] = False
    return patch(model, config), inputs


STOPPED = [
    (kind, error)
    for kind in ("clip", "llama", "timm", "flux", "flux_levels")
    for error in (KeyboardInterrupt, SystemExit, ValueError)
]
# Every kind by one of them.
STOPPED_ONCE = [("clip", ValueError), *((kind, KeyboardInterrupt) for kind in ("llama", "timm", "flux_levels"))]


@pytest.mark.parametrize("kind, error", slow_except([*STOPPED_ONCE, ("flux", SystemExit)], STOPPED))
def test_what_stops_a_pass_anywhere_leaves_nothing_of_it(kind, error):
    """Before and after every module, the model itself included."""
    model, inputs = build_interrupted(kind)
    expected = tensors(model(**inputs))

    def stop(*_):
        raise error

    stopped = 0
    for module in model.modules():
        for register in (module.register_forward_pre_hook, module.register_forward_hook):
            with register(stop):
                try:
                    model(**inputs)
                except error:
                    stopped += 1
            assert not tower_patch._get_passes()
    assert stopped > 20
    assert same_bits(tensors(model(**inputs)), expected)
    assert "forward" not in vars(unpatch(model))


def test_layer_that_is_not_rotated_any_more_is_reported():
    model, inputs = build("vit")
    patch(model, SHARED_CONFIG)
    attention = model.vit.layers[1].attention if hasattr(model.vit, "layers") else model.vit.encoder.layer[1].attention
    attention.config = model.config
    with pytest.raises(RuntimeError, match="ran without rotations"):
        model(**inputs)
    with pytest.raises(RuntimeError, match="ran without rotations"):
        model(**inputs)


CONFIGS = pytest.mark.parametrize("config", [pytest.param(PLANES, id="planes"), pytest.param(blocks(), id="blocks")])
# One after the other, with as many tokens on different grids.
TWO_GRIDS = [CASES["clip_vision"].inputs(size) for size in ((16, 16), (32, 8))]


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("config", [SHARED_CONFIG, PLANES, blocks()], ids=["zeros", "planes", "blocks"])
@pytest.mark.parametrize("name", ["clip_vision", "llama", "dinov3", "qwen2_5_vl_tower"])
def test_checkpointed_layers_have_the_same_gradients(name, config, reentrant):
    """Of two passes before the backward one."""
    if (name == "clip_vision") != (config is SHARED_CONFIG):
        return
    inputs = TWO_GRIDS if name == "clip_vision" else [rope_cases.build(name)[1]] * 2
    make = build if name == "clip_vision" else rope_cases.build
    plain, checkpointed = compute_checkpointed_gradients(
        lambda: patch(make(name)[0], config),
        lambda model: [value for each in inputs for value in outputs(model, each)],
        reentrant,
        std=0.1,
    )
    for value, expected in zip(checkpointed, plain, strict=True):
        # Reentrant checkpointing adds up in another order.
        torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-5 * expected.abs().max())


def test_threads_do_not_see_each_others_grids():
    model, _ = build_patched("clip_vision")
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


HALF = [("patching_cases", "clip_vision", SHARED_CONFIG, precision) for precision in ("bfloat16", "autocast")]
HALF += itertools.product(
    ("rope_cases",), ("llama", "dinov3", "qwen2_5_vl_tower"), (PLANES,), ("bfloat16", "float16", "autocast")
)
HALF += [("timm_cases", "vit_tiny_patch16_224", SHARED_CONFIG, "autocast")]
HALF += [("timm_cases", "vit_small_patch16_dinov3", PLANES, "autocast")]


@pytest.mark.parametrize("cases, name, config, precision", HALF)
def test_half_types_start_with_the_same_bits(cases, name, config, precision):
    cases = importlib.import_module(cases)
    model, inputs = cases.build(name)
    if precision != "autocast":
        model = model.to(getattr(torch, precision))
        inputs = {key: x.to(model.dtype) if x.is_floating_point() else x for key, x in inputs.items()}
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
        expected = cases.outputs(model, inputs)
        found = cases.outputs(patch(model, config), inputs)
        assert same_bits(found, expected)
        sum(value.float().square().mean() for value in found).backward()
    for _, value in rotary_parameters(model):
        assert value.dtype == torch.float32 and value.grad.isfinite().all()


@CONFIGS
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3"])
def test_static_cache_and_padding_on_the_left(name, config):
    """Mistral's cache slides, Gemma 3 has layers of both kinds."""
    model, inputs = rope_cases.build_patched(name, config, std=0.1)
    check_cached_steps(model, inputs, "static")
    mask = torch.ones_like(inputs["input_ids"])
    mask[0, :4] = 0
    check_cached_steps(model, {**inputs, "attention_mask": mask})


@pytest.mark.slow
@CONFIGS
@pytest.mark.parametrize("name", ["llama", "mistral", "dinov3"])
def test_flex_attention_gives_the_same(name, config):
    model, inputs = rope_cases.build_patched(name, config, std=0.1)
    with torch.no_grad():
        expected = outputs(model, inputs)
        model.set_attn_implementation("flex_attention")
        # Compiled kernels of float32 add up in another order.
        torch.testing.assert_close(outputs(model, inputs)[0], expected[0], rtol=1e-4, atol=1e-4)


@CONFIGS
@pytest.mark.parametrize("name", ["llama", "dinov3", "qwen2_5_vl"])
@torch.no_grad()
def test_device_maps(name, config, tmp_path):
    """On one device, and with all that does not fit into memory on disk."""
    pytest.importorskip("accelerate")
    whole, inputs = rope_cases.build_patched(name, config)
    whole.save_pretrained(tmp_path)
    expected, load = outputs(whole, inputs), type(whole).from_pretrained
    placed = load(tmp_path, device_map={"": "cpu"})
    offloaded = load(tmp_path, device_map="auto", max_memory={"cpu": 60_000}, offload_folder=tmp_path / "offload")
    assert next(value for _, value in rotary_parameters(offloaded)).is_meta
    for loaded in (placed, offloaded):
        # The same products of weights at other addresses, by which some processors round.
        torch.testing.assert_close(outputs(loaded, inputs), expected, rtol=0, atol=1e-6)
