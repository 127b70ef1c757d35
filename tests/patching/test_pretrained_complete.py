"""Complete models with RoPE and learned rotations: restored with and without the package."""

import copy
import itertools

import pytest
import torch
import transformers
from patching_cases import check_step_of_two_processes, realign, same_bits
from patching_checks import check_auto_classes
from rope_cases import PLANES, blocks, build, build_patched, outputs

from hf_liere import is_patched, rotary_parameters, save_rotary, unpatch
from hf_liere.patching.modeling_patched import RotaryDINOv3ViTConfig, RotaryLlamaConfig


AUTO_CLASSES = {
    "llama": "AutoModelForCausalLM",
    "llama_yarn": "AutoModelForCausalLM",
    "qwen3": "AutoModelForCausalLM",
    "gemma3": "AutoModelForCausalLM",
    "gemma3n": "AutoModelForCausalLM",
    "diffllama": "AutoModelForCausalLM",
    "smollm3": "AutoModelForCausalLM",
    "glm": "AutoModelForCausalLM",
    "dinov3": "AutoModel",
    "pixtral": "AutoModel",
    "qwen2_5_vl": "AutoModelForImageTextToText",
}
CONFIGS = {"planes": PLANES, "blocks": blocks(), "commuting": blocks("comrope_ld", layers=[0])}


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("name", AUTO_CLASSES)
def test_a_patched_model_reloads_the_same_bits(name, kind, tmp_path):
    whole, inputs = build_patched(name, CONFIGS[kind])
    expected = outputs(whole, inputs)
    whole.save_pretrained(tmp_path / "whole")
    loaded, report = type(whole).from_pretrained(tmp_path / "whole", output_loading_info=True)
    assert not any(report.values()), report
    assert same_bits(outputs(realign(loaded.eval()), inputs), expected)
    # Its rotations are an adapter for the plain model, and it becomes that model again.
    save_rotary(loaded, tmp_path / "rotary")
    plain, _ = build(name)
    assert type(unpatch(loaded)) is type(plain) and not is_patched(loaded)
    assert same_bits(outputs(loaded, inputs), outputs(plain, inputs))


@pytest.mark.slow
@pytest.mark.parametrize("package", [True, False])
def test_auto_classes_restore_in_a_fresh_process(tmp_path, package, monkeypatch):
    # Code that comes with a checkpoint has no kernels for CPUs, which round otherwise.
    monkeypatch.setenv("HF_LIERE_CPU_KERNELS", str(int(package)))
    kinds = {"llama": "blocks", "qwen3": "planes", "dinov3": "planes", "qwen2_5_vl": "blocks"}
    models = {name: (AUTO_CLASSES[name], *build_patched(name, CONFIGS[kind])) for name, kind in kinds.items()}
    check_auto_classes(models, tmp_path, package)


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("name, config_class", [("llama", RotaryLlamaConfig), ("dinov3", RotaryDINOv3ViTConfig)])
def test_weights_of_a_plain_checkpoint_start_at_their_rope(name, config_class, kind, tmp_path):
    model, inputs = build(name)
    model.save_pretrained(tmp_path)
    config = config_class.from_dict(
        {**model.config.to_dict(), "model_type": config_class.model_type, "rotary_patch": CONFIGS[kind].to_dict()}
    )
    kind_of_model = getattr(transformers, AUTO_CLASSES[name]).from_config(config)
    loaded = type(kind_of_model).from_pretrained(tmp_path, config=config).eval()
    found, expected = outputs(realign(loaded), inputs), outputs(model, inputs)
    if kind == "planes":
        assert same_bits(found, expected)
    for value, start in zip(found, expected):
        # Blocks start within rounding.
        torch.testing.assert_close(value, start, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["planes", "blocks"])
@pytest.mark.parametrize("name", ["llama", "dinov3", "qwen2_5_vl"])
def test_device_maps(name, kind, tmp_path):
    """On one device, and with all that does not fit into memory on disk."""
    pytest.importorskip("accelerate")
    whole, inputs = build_patched(name, CONFIGS[kind])
    whole.save_pretrained(tmp_path)
    with torch.no_grad():
        expected = outputs(whole, inputs)
        placed = type(whole).from_pretrained(tmp_path, device_map={"": "cpu"})
        close(outputs(placed, inputs), expected)
        offload = {"device_map": "auto", "max_memory": {"cpu": 60_000}, "offload_folder": tmp_path / "offload"}
        offloaded = type(whole).from_pretrained(tmp_path, **offload)
        assert next(value for _, value in rotary_parameters(offloaded)).is_meta
        close(outputs(offloaded, inputs), expected)


def close(found, expected):
    for value, other in zip(found, expected, strict=True):
        # The same products of weights at other addresses, by which some processors round.
        torch.testing.assert_close(value, other, rtol=0, atol=1e-6)


STEPS = list(itertools.product(("ddp", "fsdp", "fsdp_small"), ("llama", "qwen3"), CONFIGS))


@pytest.mark.slow
@pytest.mark.parametrize("kind, name, config", STEPS)
def test_two_processes_take_the_step_of_one(kind, name, config, tmp_path):
    model, inputs = build_patched(name, CONFIGS[config])
    check_step_of_two_processes(model, {**inputs, "labels": inputs["input_ids"]}, tmp_path, 1e-5, kind)


def test_frequencies_stay_float32_in_a_bfloat16_model(tmp_path):
    whole, inputs = build_patched("llama", PLANES)
    whole.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert {value.dtype for _, value in rotary_parameters(loaded)} == {torch.float32}
    assert same_bits(outputs(copy.deepcopy(loaded.eval()), inputs), outputs(loaded, inputs))


def test_configuration_of_its_own_rotates_by_default():
    assert RotaryLlamaConfig().rotary_patch["rotary_init"] == "pretrained"
