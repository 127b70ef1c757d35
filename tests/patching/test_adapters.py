"""Adapters: saved rotations give the same bits on a fresh base, also beside adapters of peft."""

import pytest
import torch
from patching_cases import CASES, build, randomize, run, same_bits
from patching_checks import SHARED_CONFIG, build_patched, check_adapters

from hf_liere import is_patched, load_rotary, patch, rotary_parameters, save_rotary, unpatch


@pytest.mark.parametrize("name", CASES)
def test_adapter_gives_the_same_bits_on_a_fresh_base(name, tmp_path):
    model, inputs = build_patched(name)
    expected = run(model, inputs)
    save_rotary(model, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rotary.safetensors", "rotary_config.json"]
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 8192
    fresh, _ = build(name)
    assert same_bits(run(load_rotary(fresh, tmp_path), inputs), expected)


# Every family restores its adapter in the process of the test above.
@pytest.mark.slow
def test_adapters_in_a_fresh_process(tmp_path):
    check_adapters({name: build_patched(name) for name in CASES}, tmp_path, "patching_cases")


def test_adapter_knows_its_base_in_another_precision_and_not_one_that_was_trained(tmp_path):
    model, _ = build("clip_vision")
    save_rotary(patch(model, SHARED_CONFIG), tmp_path)
    with pytest.raises(ValueError, match="already contains rotary_config.json and rotary.safetensors; accepted"):
        save_rotary(model, tmp_path)
    save_rotary(model, tmp_path, overwrite=True)
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
    with pytest.warns(UserWarning, match="its weights are quantized"):
        load_rotary(quantized, tmp_path)
    assert same_bits(run(quantized, inputs), rotated)


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
