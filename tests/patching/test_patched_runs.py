"""Patched models under offloading, two processes, checkpointing, threads, compilation and bfloat16."""

import threading

import pytest
import rope_cases
import torch
from patching_cases import CASES, build, check_step_of_two_processes, randomize, run, same_bits, tensors
from patching_checks import SHARED_CONFIG, build_patched, check_copies, check_offloading, compute_checkpointed_gradients
from slow_cases import slow_except

from hf_liere import FrequencySchedule, patch, rotary_parameters, set_frequency_schedule, unpatch
from hf_liere.patching import tower_patch


def test_offloaded_and_dispatched_models():
    check_offloading(*build_patched("clip_vision"), build("clip_vision")[0], SHARED_CONFIG)


@pytest.mark.slow
def test_two_processes_take_the_step_of_one(tmp_path):
    model, _ = build_patched("clip_classifier")
    batch = {"pixel_values": torch.randn(4, 3, 16, 16), "labels": torch.tensor([0, 1, 2, 0])}
    check_step_of_two_processes(model, batch, tmp_path, 1e-4)


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


@pytest.mark.parametrize("kind", ["clip", "llama", "timm", "flux", "flux_levels"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, ValueError])
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
    assert type(unpatch(model)).__name__ == type(model).__name__ and "forward" not in vars(model)


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
    def forward(model):
        # Both forwards before the backward, with as many tokens on different grids.
        samples = (torch.randn(2, 3, *size).requires_grad_() for size in ((16, 16), (32, 8)))
        return [model(pixel_values=sample).last_hidden_state for sample in samples]

    gradients = compute_checkpointed_gradients(
        lambda: patch(build("clip_vision")[0], SHARED_CONFIG), forward, reentrant
    )
    # Reentrant checkpointing adds up the layers in another order.
    for plain, checkpointed in zip(*gradients):
        torch.testing.assert_close(checkpointed, plain, rtol=1e-5, atol=1e-5)


def test_copies_and_other_models_keep_their_own_grids():
    check_copies(*build_patched("clip_vision"))


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


@pytest.mark.parametrize("name", CASES)
def test_checkpointed_gradients_of_every_family_are_those_without(name):
    model, inputs = build(name)
    assert model.supports_gradient_checkpointing
    gradients = compute_checkpointed_gradients(
        lambda: patch(build(name)[0], SHARED_CONFIG), lambda model: run(model, inputs)
    )
    assert same_bits(*gradients) and all(gradient.abs().max() > 0 for gradient in gradients[0])


# One of each way to embed patches and to pass attention on; compiling takes seconds each.
@pytest.mark.parametrize("name", slow_except(("siglip2",), CASES))
def test_compiled_whole_graph_gives_the_same(name):
    if name == "videomae_pretraining":
        pytest.skip("transformers' own VideoMAEForPreTraining is no whole graph: its masks decide the number of tokens")
    model, inputs = build_patched(name)
    expected = run(model, inputs)
    torch.compiler.reset()
    found = run(torch.compile(model, backend="eager", fullgraph=True), inputs)
    for compiled, eager in zip(found, expected, strict=True):
        # The compiled graph fixes the number of squarings of the exponential instead of measuring it.
        torch.testing.assert_close(compiled, eager, rtol=1e-4, atol=1e-4)


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
