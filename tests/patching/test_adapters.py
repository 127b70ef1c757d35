"""Adapters: saved rotations give the same bits on a fresh base, also beside adapters of peft."""

import importlib
import json
import os

import pytest
import rope_cases
import torch
import transformers
from patching_cases import IMAGE, build, randomize, run, same_bits
from patching_checks import SHARED_CONFIG, build_patched, refused
from safetensors.torch import load_file, save_file

from hf_liere import RotaryPatchConfig, is_patched, load_rotary, patch, rotary_parameters, save_rotary, unpatch


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


# Cases, what they are patched with, and the projections that get LoRA.
LIBRARIES = {
    "clip_vision": ("patching_cases", SHARED_CONFIG, ["q_proj", "v_proj"]),
    "llama": ("rope_cases", rope_cases.PLANES, ["q_proj", "k_proj"]),
    "vit_tiny_patch16_224": ("timm_cases", SHARED_CONFIG, ["qkv"]),
}


@pytest.mark.parametrize("copies", [None, ["rotary_encoding"]], ids=["shared", "copies"])
@pytest.mark.parametrize("name", LIBRARIES)
def test_lora_and_rotations_are_trained_and_restored_together(name, copies, tmp_path):
    """On a plain base, and in two files, whichever is read first."""
    cases, config, targets = LIBRARIES[name]
    peft, cases = pytest.importorskip("peft"), importlib.import_module(cases)
    model, inputs = cases.build(name)
    options = {"target_modules": targets, "init_lora_weights": False}
    model = peft.get_peft_model(patch(model, config), peft.LoraConfig(r=2, modules_to_save=copies, **options)).eval()
    for _, parameter in rotary_parameters(model):
        assert parameter.requires_grad == bool(copies)
        parameter.requires_grad_(True)
    randomize(model)
    sum(value.square().sum() for value in cases.outputs(model, inputs)).backward()
    assert all(value.grad.any() for _, value in rotary_parameters(model))
    model.save_pretrained(tmp_path / "lora")
    save_rotary(model, tmp_path / "rotations")
    loaded = rotary_parameters(load_rotary(cases.build(name)[0], tmp_path / "rotations"))
    assert same_bits(*([value for _, value in found] for found in (loaded, rotary_parameters(model))))

    def adapt(base):
        return peft.PeftModel.from_pretrained(base, tmp_path / "lora").eval()

    ways = [adapt, lambda base: adapt(load_rotary(base, tmp_path / "rotations"))]
    ways += [] if copies else [lambda base: load_rotary(adapt(base), tmp_path / "rotations")]
    for restore in ways:
        assert same_bits(cases.outputs(restore(cases.build(name)[0]), inputs), cases.outputs(model, inputs))


def clip_vision(**fields):
    return transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**{**IMAGE, **fields}))


def llama(theta):
    parameters = rope_cases.rope(rope_theta=theta)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**rope_cases.TEXT, **rope_cases.HEADS, **parameters))


CONFIGS = {"patching_cases": SHARED_CONFIG, "timm_cases": SHARED_CONFIG}
VIT, FLUX = "vit_tiny_patch16_224", "FluxTransformer2DModel"
# Why a base does not fit the adapter of a case.
OTHERS = [
    ("patching_cases", "clip_vision", lambda _: clip_vision(hidden_size=64), "head_dim 16 there, 32 here"),
    ("patching_cases", "clip_vision", lambda cases: cases.build("siglip")[0], "model_type .* there, siglip_vision_mod"),
    ("patching_cases", "clip_vision", lambda _: clip_vision(), "trained on other weights"),
    (
        "patching_cases",
        "clip_vision",
        lambda _: patch(clip_vision(), RotaryPatchConfig("liere")),
        "'liere' here, .* the",
    ),
    ("rope_cases", "llama", lambda _: llama(500.0), "frequencies .* there, .* here"),
    ("rope_cases", "llama", lambda cases: cases.build("mistral")[0], "model_type llama there, mistral here"),
    ("timm_cases", VIT, lambda cases: cases.BY_NAME[VIT].build(seed=1), "trained on other weights"),
    ("timm_cases", VIT, lambda cases: cases.build("deit_tiny_distilled_patch16_224")[0], "rotations for another model"),
    ("diffusion_cases", FLUX, lambda cases: cases.BY_NAME[FLUX].build(seed=1), "trained on other weights"),
]


@pytest.mark.parametrize("cases, name, make, message", OTHERS)
def test_adapter_of_another_base(cases, name, make, message, tmp_path):
    pytest.importorskip({"diffusion_cases": "diffusers"}.get(cases, "torch"), reason="diffusers needs Python 3.11")
    config, cases = CONFIGS.get(cases, rope_cases.PLANES), importlib.import_module(cases)
    save_rotary(patch(cases.build(name)[0], config), tmp_path)
    with refused(other := make(cases), message):
        load_rotary(other, tmp_path)
    if "weights" in message:
        assert is_patched(load_rotary(other, tmp_path, check_weights=False))


def test_rotations_of_the_same_kind_are_replaced(tmp_path):
    model, _ = build_patched("clip_vision")
    saved = {name: value.clone() for name, value in rotary_parameters(model)}
    save_rotary(model, tmp_path)
    randomize(model)
    load_rotary(model, tmp_path)
    assert all(torch.equal(value, saved[name]) for name, value in rotary_parameters(model))


def edit(change):
    """Damages the configuration of an adapter."""

    def damage(folder):
        content = json.loads((folder / "rotary_config.json").read_text())
        change(content)
        (folder / "rotary_config.json").write_text(json.dumps(content))

    return damage


def write(content):
    return lambda folder: (folder / "rotary_config.json").write_bytes(content)


def cut(length):
    return lambda folder: os.truncate(folder / "rotary.safetensors", length)


def set_weight(value):
    def damage(folder):
        tensors = load_file(folder / "rotary.safetensors")
        tensors["0.generators"][0, 0, 0, 0] = value
        save_file(tensors, folder / "rotary.safetensors")

    return damage


@pytest.mark.parametrize(
    "damage, message",
    [
        (lambda folder: (folder / "rotary_config.json").unlink(), "contains no rotary_config.json"),
        (edit(lambda content: content.pop("base")), "has no list 'base'"),
        (edit(lambda content: content["base"][0].pop("heads")), "base has no heads"),
        (edit(lambda content: content["base"][0].update(weights=[["a"]])), "other weights"),
        (edit(lambda content: content["rotary_patch"].update(format_version="1")), "='1' must be"),
        (edit(lambda content: content["rotary_patch"].update(layers="01")), "layers='01' must be"),
        (edit(lambda content: content["rotary_patch"].update(position_encoding="comrope_ap")), "multipliers"),
        (write(b"{"), "config.json is not a json file"),
        (write(b"[]"), "contains a list; accepted: a json object"),
        (write(b"\xff\xfe{"), "config.json is not a json file"),
        (cut(500), "rotary.safetensors cannot be read"),
        (cut(0), "rotary.safetensors cannot be read"),
        (set_weight(float("nan")), "values of 0.generators that are not finite"),
        (set_weight(float("inf")), "values of 0.generators that are not finite"),
    ],
)
def test_damaged_adapter(damage, message, tmp_path):
    model, _ = build("clip_vision")
    save_rotary(patch(model, SHARED_CONFIG), tmp_path)
    damage(tmp_path)
    with refused(unpatch(model), message):
        load_rotary(model, tmp_path)
