"""Learned rotations behind a model's own RoPE, at its positions or at those that a caller gives."""

import copy
import math

import pytest
import reference
import torch
from patching_cases import build as build_tower
from patching_cases import randomize, same_bits
from patching_checks import check_cached_steps, refused
from relative_positions import check_relative
from rope_cases import CASES, PLANES, build, build_patched, composed, in_panels, outputs
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_liere import RotaryPatchConfig, patch, rotary_parameters, unpatch
from hf_liere.tools.export import ExportError, export_model


PANELS = composed(num_axes=2)
seen = []


def record(module, query, key, *args, **kwargs):
    seen.append((query.double(), key.double()))
    return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, *args, **kwargs)


AttentionInterface.register("record", record)


@torch.no_grad()
def record_first(model, inputs):
    """2 × (B, H, N, D) queries and keys with which the first layer computes attention, in float64."""
    model.set_attn_implementation("record")
    seen.clear()
    model(**inputs)
    return seen[0]


def positions_of(name, inputs):
    """(1 or B, prefix + N, A) of all tokens, by the definition of each model."""
    if "rotary_positions" in inputs:
        return inputs["rotary_positions"].double()
    if name == "llama":
        return torch.arange(11.0, dtype=torch.float64).view(1, -1, 1)
    grid = [[2 * (row + 0.5) / 4 - 1, 2 * (column + 0.5) / 6 - 1] for row in range(4) for column in range(6)]
    # DINOv3 multiplies its frequencies by full turns.
    return 2 * math.pi * torch.tensor([[[0.0, 0.0]] * CASES[name].prefix + grid], dtype=torch.float64)


@pytest.mark.parametrize("name, panels", [("llama", False), ("llama", True), ("dinov3", False)])
def test_queries_and_keys_are_rotated_by_the_model_and_then_by_ours(name, panels):
    model, inputs = build(name)
    plain = record_first(model, inputs)
    inputs = in_panels() if panels else inputs
    randomize(patch(model, PANELS if panels else composed()), 0.3)
    ((_, generators),) = rotary_parameters(model)  # (A, layers, heads, blocks, 6)
    positions = positions_of(name, inputs)
    for found, start in zip(record_first(model, inputs), plain, strict=True):
        for head in range(start.shape[1]):
            own = head * generators.shape[2] // start.shape[1]
            planes = [reference.pair_halves(axis[0, own].detach(), start.shape[-1] // 2) for axis in generators]
            turned = torch.linalg.matrix_exp(sum(p[..., None, None] * a for p, a in zip(positions.unbind(-1), planes)))
            expected = (turned @ start[:, head, :, :, None]).squeeze(-1)
            torch.testing.assert_close(found[:, head], expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("name", ["llama_yarn", "llama_longrope"])
def test_attention_factors_of_a_model_leave_its_bits(name):
    model, inputs = build(name)
    before = outputs(model, inputs)
    assert same_bits(outputs(patch(model, composed()), inputs), before)


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "dinov3"])
def test_positions_of_the_model_and_of_each_sample(name):
    model, inputs = build_patched(name, composed())
    own, before = positions_of(name, inputs)[:, CASES[name].prefix :].float(), outputs(model, inputs)[0]
    torch.testing.assert_close(outputs(model, inputs | {"rotary_positions": own})[0], before, rtol=0, atol=1e-4)
    model, inputs = build_patched(name, composed(layers=[0]))
    given = {key: value[[1, 0, 1]] for key, value in inputs.items()}
    given |= {"rotary_positions": torch.rand(3, *own.shape[1:])}
    all_samples = outputs(model, given)[0]
    assert not torch.allclose(all_samples[0], all_samples[2], atol=1e-3)
    alone = {key: value[2:] for key, value in given.items()}
    torch.testing.assert_close(outputs(model, alone)[0], all_samples[2:], rtol=1e-4, atol=1e-5)


def test_planes_are_relative_and_cached_steps_continue_at_the_last_position():
    check_relative("llama", composed("rope_mixed", block_size=2))
    for cache in (None, "static"):
        check_cached_steps(build_patched("llama", PANELS)[0], in_panels(), cache)
    model, inputs = build_patched("qwen2_5_vl", composed(num_axes=2, target="model.language_model"))
    check_cached_steps(model, inputs | {"rotary_positions": torch.rand(1, 16, 2)})


def test_beams_and_positions_of_tokens_that_are_generated():
    model, inputs = build_patched("llama", PANELS)[0], in_panels()
    inputs["rotary_positions"] = torch.cat([inputs["rotary_positions"], torch.rand(2, 4, 2)], dim=1)
    options = {"min_new_tokens": 4, "do_sample": False, "output_scores": True, "return_dict_in_generate": True}
    options |= {"max_new_tokens": 4, "num_beams": 3}
    found, expected = (model.generate(**inputs, **options, use_cache=use) for use in (True, False))
    assert torch.equal(found.sequences, expected.sequences)
    torch.testing.assert_close(found.sequences_scores, expected.sequences_scores, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_exported_with_positions():
    model, inputs = build_patched("llama", PANELS)[0], in_panels() | {"use_cache": False}
    axes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("tokens")}
    shapes = {"input_ids": axes, "rotary_positions": axes, "use_cache": None}
    program = torch.export.export(model, (), inputs, dynamic_shapes=shapes)
    longer = {name: value.repeat(2, 2, *[1] * (value.ndim - 2)) for name, value in in_panels().items()}
    with torch.no_grad():
        found, expected = (run(**(inputs | longer)).logits for run in (program.module(), model))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


def test_beside_lora_and_unpatched():
    peft = pytest.importorskip("peft")
    model, inputs = build_patched("llama", PANELS)[0], in_panels()
    ids = {"input_ids": inputs["input_ids"]}
    assert same_bits(outputs(unpatch(copy.deepcopy(model)), ids), outputs(build("llama")[0], ids))
    lora = peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, modules_to_save=["rotary_encoding"])
    adapted = peft.get_peft_model(model, lora).eval()
    (found,) = outputs(adapted, inputs)
    found.sum().backward()
    assert all(value.grad.abs().max() > 0 for value in adapted.parameters() if value.requires_grad)
    torch.testing.assert_close(outputs(adapted.merge_and_unload(), inputs)[0], found, rtol=1e-4, atol=1e-4)


REFUSED = {
    "num_axes=2 with it alone": ("llama", lambda: RotaryPatchConfig(num_axes=2)),
    "rotary_init='zeros', not 'pretrained'": ("llama", lambda: composed(rotary_init="pretrained")),
    "one encoding for all channels": ("llama", lambda: composed(["liere", "rope_mixed"])),
    "coordinates='unit': in models with RoPE": ("dinov3", lambda: composed(coordinates="unit")),
    "several rotary modules, or one inside attention": ("recurrent_gemma", composed),
    "has no module with frequencies .* compose=True have nothing": ("clip_vision", composed),
}


@pytest.mark.parametrize("message", REFUSED)
def test_refused_before_a_model_is_changed(message):
    name, config = REFUSED[message]
    with refused(model := (build_tower if name == "clip_vision" else build)(name)[0], message):
        patch(model, config())


WRONG = {
    r"shape \(1, 11, 2\) or \(2, 11, 2\), .*, and got \(2, 11, 3\)": torch.rand(2, 11, 3),
    r"got \(11, 2\)": torch.rand(11, 2),
    r"got \(3, 11, 2\)": torch.rand(3, 11, 2),
    "got None": None,
    "floating point": torch.ones(2, 11, 2).long(),
}


def test_refused_positions_folding_and_files(tmp_path):
    model, inputs = build_patched("llama", PANELS)
    for words, positions in WRONG.items():
        with pytest.raises(ValueError, match=words):
            model(**inputs, rotary_positions=positions)
    with pytest.raises(ValueError, match="are not behind the model's own .compose=True"):
        model.fold_rotations()
    with pytest.raises(ExportError, match="rotary_positions, which are no input of exported files"):
        export_model(model, tmp_path / "model.pt2")
    with pytest.raises(ValueError, match="Nothing in this model takes rotary_positions; .* compose=True"):
        build_patched("llama", PLANES)[0](**in_panels())
