"""Patched vision towers in the plain files that travel with them, where the package is missing."""

import json

import pytest
import torch
from fresh_process import run_code
from patching_cases import CASES, randomize

import hf_liere
from hf_liere import RotaryPatchConfig, patch
from hf_liere.plain import towers, towers_code


AUTO = {
    "clip_vision": "AutoModel",
    "clip": "AutoModel",
    "clip_classifier": "AutoModelForImageClassification",
    "siglip": "AutoModel",
    "siglip_classifier": "AutoModelForImageClassification",
    "vit": "AutoModelForImageClassification",
    "deit": "AutoModelForImageClassification",
    "dinov2": "AutoModel",
    "dinov2_registers": "AutoModel",
}
PATCHES = [
    {"position_encoding": "liere", "block_size": 4, "rotary_init": "normal", "coordinates": "centred_grid"},
    {"position_encoding": "comrope_ld", "block_size": 8, "rotary_init": "normal", "rotate_prefix": True},
    {"position_encoding": "rope_mixed", "rotary_init": "frequencies", "keep_absolute": "drop", "share_layers": True},
    {"position_encoding": "axial_rope", "rotary_init": None, "layers": [1]},
    {"position_encoding": "cayley_string", "block_size": 8, "rotary_init": "normal", "keep_absolute": "train_size"},
    {"position_encoding": "liere", "block_size": 8, "rotary_init": "normal", "keep_absolute": "fade"},
]
LOAD = """
import json, torch, transformers

def outputs(model, inputs):
    with torch.no_grad():
        found = model.eval()(**inputs)
        return [value for value in found.to_tuple() if isinstance(value, torch.Tensor)]

for name, auto in json.load(open("cases.json")).items():
    inputs, expected = torch.load(name + ".pt")
    for path in (name, name + "-again"):
        options = {"trust_remote_code": True, "output_loading_info": True}
        model, info = getattr(transformers, auto).from_pretrained(path, **options)
        assert not info["missing_keys"] and not info["unexpected_keys"], info
        differences = [
            ((found - value).abs().max() / value.abs().max()).item()
            for given, values in zip(inputs, expected)
            for found, value in zip(outputs(model, given), values, strict=True)
        ]
        module, kind = type(model).__module__.split(".")[0], type(model).__name__
        print(name, module, kind, max(differences) < 5e-6, max(differences))
        model.save_pretrained(name + "-again")
"""


def values(model, inputs):
    with torch.no_grad():
        return [value for value in model(**inputs).to_tuple() if isinstance(value, torch.Tensor)]


def build(name, number):
    case = CASES[name]
    model = patch(case.build(), RotaryPatchConfig(**PATCHES[number % len(PATCHES)]))
    randomize(model.eval())
    if PATCHES[number % len(PATCHES)].get("keep_absolute") == "fade":
        hf_liere.set_absolute_weight(model, 0.3)
    return case, model


def test_towers_load_and_are_saved_again_without_the_package(tmp_path):
    for number, name in enumerate(AUTO):
        case, model = build(name, number)
        inputs = [case.inputs()]
        if case.other_size and "classifier" not in name and name not in ("vit", "deit", "clip"):
            inputs.append(case.inputs(case.other_size))
        torch.save((inputs, [values(model, given) for given in inputs]), tmp_path / f"{name}.pt")
        model.save_pretrained(tmp_path / name)
        assert (tmp_path / name / "modeling_patched.py").read_text() == towers_code()
    (tmp_path / "cases.json").write_text(json.dumps(AUTO))
    lines = [line.split() for line in run_code(LOAD, tmp_path, package=False) if line.split()[0] in AUTO]
    assert len(lines) == 2 * len(AUTO)
    for name, module, kind, is_same, difference in lines:
        assert module == "transformers_modules" and kind.startswith("Rotary") and is_same == "True", (name, difference)
    assert towers_code().count("\n") <= 253


@pytest.mark.parametrize("number", range(len(PATCHES)))
def test_training_is_that_of_the_package(number):
    """With patches that move."""
    moved = {"position_perturbation": 0.5, "position_shift": 0.2, "position_rescale": 1.5}
    case = CASES["clip_vision"]
    model = patch(case.build(), RotaryPatchConfig(**PATCHES[number], **moved))
    randomize(model)
    plain = towers.__getattr__("RotaryCLIPVisionModel")
    copy = plain(plain.config_class.from_dict(model.config.to_dict()))
    copy.load_state_dict(model.state_dict())
    inputs = case.inputs(case.other_size)
    for one in (model.train(), copy.train()):
        torch.manual_seed(0)
        one(**inputs).last_hidden_state.square().sum().backward()
    found = dict(copy.named_parameters())
    # Biases of keys have none but rounding.
    largest = max(parameter.grad.norm() for parameter in model.parameters() if parameter.grad is not None)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            assert (found[name].grad - parameter.grad).norm() <= 1e-5 * parameter.grad.norm() + 1e-7 * largest, name


def test_adapters_of_projections_are_rotated():
    """Queries are rotated after LoRA has added to them; checkpointed layers would not find their rotations."""
    peft = pytest.importorskip("peft")
    case, model = build("clip_vision", 0)
    plain = towers.__getattr__("RotaryCLIPVisionModel")
    copy = plain(plain.config_class.from_dict(model.config.to_dict())).eval()
    copy.load_state_dict(model.state_dict())
    with pytest.raises(ValueError, match="does not support"):
        copy.gradient_checkpointing_enable()
    inputs, found = case.inputs(), []
    for one in (model, copy):
        torch.manual_seed(0)
        adapted = peft.get_peft_model(one, peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
        found.append(adapted(**inputs).last_hidden_state)
    torch.testing.assert_close(*found, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "fields, named",
    [
        ({"rotary_init": "pretrained"}, "rotary_init='pretrained'"),
        ({"position_encoding": "mine"}, "position_encoding='mine'"),
        ({"folded_grids": []}, r"folded_grids=\[\]"),
    ],
)
def test_what_it_cannot_rotate_is_refused(fields, named):
    config = towers.__getattr__("RotaryCLIPVisionConfig")
    with pytest.raises(ValueError, match=f"{named} of a patched model needs the package hf_liere"):
        config(rotary_patch=RotaryPatchConfig().to_dict() | fields)
    assert towers.refusal(RotaryPatchConfig().to_dict(), "beit") is not None
