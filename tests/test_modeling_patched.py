"""Complete patched models: saved with their own model_type, restored with and without the package."""

import json

import pytest
import torch
import transformers
from patching_cases import IMAGE, build, randomize, same_bits
from patching_cases import run as outputs_of
from test_auto import run as run_process

from hf_liere import (
    RotaryPatchConfig,
    complete_model,
    is_patched,
    patch,
    rotary_parameters,
    set_absolute_weight,
    unpatch,
)
from hf_liere.models.modeling_patched import (
    RotaryCLIPVisionConfig,
    RotaryCLIPVisionModelWithProjection,
    RotaryViTConfig,
    RotaryViTForMaskedImageModeling,
)


AUTO_CLASSES = {
    "clip_vision": "AutoModel",
    "clip": "AutoModel",
    "clip_classifier": "AutoModelForImageClassification",
    "vit": "AutoModelForImageClassification",
}


def complete(name, **fields):
    model, inputs = build(name)
    patch(model, RotaryPatchConfig(**{"position_encoding": "liere", "block_size": 8, **fields}))
    randomize(model)
    return model, complete_model(model).eval(), inputs


@pytest.mark.parametrize("name", [*AUTO_CLASSES, "clip_projection"])
def test_complete_model_computes_and_reloads_the_same_bits(name, tmp_path):
    model, whole, inputs = complete(name)
    expected = outputs_of(model, inputs)
    assert same_bits(outputs_of(whole, inputs), expected)
    whole.save_pretrained(tmp_path)
    loaded, report = type(whole).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values()), report
    assert same_bits(outputs_of(loaded, inputs), expected)
    assert [key for key, _ in rotary_parameters(loaded)] == [key for key, _ in rotary_parameters(model)]
    assert all(torch.equal(a, b) for a, b in zip(loaded.state_dict().values(), model.state_dict().values()))


@pytest.mark.parametrize("package", [pytest.param(True, marks=pytest.mark.slow), False])
def test_auto_classes_restore_in_a_fresh_process(tmp_path, package, monkeypatch):
    # Code that comes with a checkpoint has no kernels for CPUs, which round otherwise.
    monkeypatch.setenv("HF_LIERE_CPU_KERNELS", str(int(package)))
    for name in AUTO_CLASSES:
        _, whole, inputs = complete(name, layers=[1], keep_absolute="drop", coordinates="index")
        whole.save_pretrained(tmp_path / name)
        with torch.no_grad():
            torch.save((inputs, outputs_of(whole, inputs)[:1]), tmp_path / f"{name}.pt")
    code = f"""
        import torch, transformers
        for name, auto_class in {AUTO_CLASSES}.items():
            auto = getattr(transformers, auto_class)
            model, report = auto.from_pretrained(name, output_loading_info=True, trust_remote_code={not package})
            inputs, (expected,) = torch.load(f"{{name}}.pt")
            with torch.no_grad():
                outputs = list(model(**inputs).values())
            complete = not any(report.values())
            print(name, type(model).__module__.split(".")[0], complete, torch.equal(outputs[0], expected))
    """
    origin = "hf_liere" if package else "transformers_modules"
    assert run_process(code, tmp_path, package) == [f"{name} {origin} True True" for name in AUTO_CLASSES]


def test_auto_models_of_other_tasks_read_a_classifier(tmp_path):
    _, whole, inputs = complete("vit")
    whole.save_pretrained(tmp_path)
    base = transformers.AutoModel.from_pretrained(tmp_path).eval()
    assert is_patched(base) and type(base).__name__ == "RotaryViTModel"
    with torch.no_grad():
        expected = whole.vit(**inputs).last_hidden_state
        assert torch.equal(base(**inputs).last_hidden_state, expected)
    masked = transformers.AutoModelForMaskedImageModeling.from_pretrained(tmp_path)
    assert isinstance(masked, RotaryViTForMaskedImageModeling)


def test_zero_shot_logits_survive(tmp_path):
    _, whole, inputs = complete("clip")
    whole.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForZeroShotImageClassification.from_pretrained(tmp_path).eval()
    assert torch.equal(loaded(**inputs).logits_per_image, whole(**inputs).logits_per_image)


def test_weights_of_a_plain_checkpoint_start_neutral(tmp_path):
    """A plain checkpoint has no generators: they are zero, not uninitialised memory."""
    model, inputs = build("vit")
    model.save_pretrained(tmp_path)
    config = RotaryViTConfig(**IMAGE, num_labels=3, rotary_patch={"position_encoding": "comrope_ld", "block_size": 4})
    loaded = transformers.AutoModelForImageClassification.from_config(config)
    loaded = type(loaded).from_pretrained(tmp_path, config=config).eval()
    assert same_bits(outputs_of(loaded, inputs), outputs_of(model, inputs))
    multipliers = dict(rotary_parameters(loaded))["vit.rotary_encoding.multipliers"]
    assert multipliers.isfinite().all() and multipliers.std() > 0.3


def test_generators_stay_float32_in_a_bfloat16_model(tmp_path):
    _, whole, inputs = complete("clip_vision")
    whole.save_pretrained(tmp_path)
    loaded = transformers.AutoModel.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert {value.dtype for _, value in rotary_parameters(loaded)} == {torch.float32}
    assert loaded.encoder.layers[0].self_attn.q_proj.weight.dtype == torch.bfloat16
    assert loaded(**inputs).last_hidden_state.dtype == torch.bfloat16


def test_generators_stay_float32_when_a_bfloat16_model_is_completed():
    model, inputs = build("clip_vision")
    patch(model.to(torch.bfloat16), RotaryPatchConfig(block_size=4))
    randomize(model)
    whole = complete_model(model)
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(whole.parameters(), model.parameters()))
    assert same_bits(outputs_of(whole, inputs), outputs_of(model, inputs))


def test_weight_of_the_table_is_saved(tmp_path):
    _, whole, inputs = complete("vit", keep_absolute="fade")
    set_absolute_weight(whole, 0.25)
    whole.save_pretrained(tmp_path)
    loaded = type(whole).from_pretrained(tmp_path).eval()
    assert loaded.config.rotary_patch["absolute_weight"] == 0.25
    assert same_bits(outputs_of(loaded, inputs), outputs_of(whole, inputs))


def test_configuration_holds_all_of_the_patch(tmp_path):
    config = RotaryCLIPVisionConfig(**IMAGE, rotary_patch={"position_encoding": "liere"})
    assert config.rotary_patch["rotary_init"] == "zeros"
    RotaryCLIPVisionModelWithProjection(config).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["model_type"] == "rotary_clip_vision_model" and saved["rotary_patch"] == config.rotary_patch
    with pytest.raises(Exception, match="block_sizes"):
        RotaryViTConfig(rotary_patch={"block_sizes": 4})
    with pytest.raises(Exception, match="not a rotary encoding"):
        RotaryViTConfig(rotary_patch={"position_encoding": "sinusoid"})


def test_classes_that_transformers_does_not_export_are_refused():
    class Derived(transformers.Dinov2Model):
        pass

    model = Derived(transformers.Dinov2Config(**IMAGE))
    with pytest.raises(ValueError, match="is not patched"):
        complete_model(model)
    with pytest.raises(ValueError, match="Derived has no class that reloads with rotations.*save_rotary"):
        complete_model(patch(model, RotaryPatchConfig(block_size=4)))


@pytest.mark.parametrize("name", [*AUTO_CLASSES, "clip_projection"])
def test_unpatched_complete_model_is_the_plain_model_again(name, tmp_path):
    """In memory and after saving: class, configuration and bits."""
    _, whole, inputs = complete(name)
    rotated = outputs_of(whole, inputs)
    plain, _ = build(name)
    unpatched = unpatch(whole)
    unpatched.save_pretrained(tmp_path)
    plain.save_pretrained(tmp_path / "plain")
    configs = [json.loads((folder / "config.json").read_text()) for folder in (tmp_path, tmp_path / "plain")]
    assert configs[0] == configs[1] and not (tmp_path / "modeling_patched.py").exists()
    loaded, report = type(plain).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values()), report
    for model in (unpatched, loaded):
        assert type(model) is type(plain) and not is_patched(model)
        assert same_bits(outputs_of(model, inputs), outputs_of(plain, inputs))
    assert same_bits(outputs_of(whole, inputs), rotated)


def test_complete_model_inside_another_module_is_not_taken_apart():
    """It would save as a patched model with new generators."""
    _, whole, inputs = complete("vit")
    rotated = outputs_of(whole, inputs)
    with pytest.raises(ValueError, match="0 .RotaryViTForImageClassification. is a complete model.*what it returns"):
        unpatch(torch.nn.Sequential(whole))
    with pytest.raises(ValueError, match="This .ViTModel. is a complete model or a part of one"):
        unpatch(whole.vit)
    assert same_bits(outputs_of(whole, inputs), rotated)


def test_adapters_are_to_be_merged_before_the_class_changes():
    peft = pytest.importorskip("peft")
    model, _ = build("clip_vision")
    lora = peft.LoraConfig(target_modules=["q_proj"], r=2)
    injected = peft.inject_adapter_in_model(lora, patch(model, RotaryPatchConfig(block_size=4)))
    with pytest.raises(ValueError, match="has not the parameters of RotaryCLIPVisionModel: .*Merge or unload"):
        complete_model(injected)
