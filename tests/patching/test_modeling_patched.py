"""Patched models are saved as what they are: restored with and without the package, refused by plain classes."""

import copy
import json
import pickle
from pathlib import Path

import pytest
import rope_cases
import torch
import transformers
from fresh_process import run_code
from hub_client import OTHER
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError
from patching_cases import IMAGE, build, randomize, realign, same_bits
from patching_cases import outputs as outputs_of
from patching_checks import SHARED_CONFIG, check_auto_classes

from hf_liere import (
    RotaryPatchConfig,
    complete_model,
    is_patched,
    load_rotary,
    patch,
    rotary_parameters,
    set_absolute_weight,
    unpatch,
)
from hf_liere.patching.modeling_patched import (
    RotaryCLIPVisionConfig,
    RotaryCLIPVisionModelWithProjection,
    RotaryDINOv3ViTConfig,
    RotaryLlamaConfig,
    RotaryViTConfig,
    RotaryViTForMaskedImageModeling,
    rotary_class,
    rotary_config,
)


AUTO_CLASSES = {
    "clip_vision": "AutoModel",
    "clip": "AutoModel",
    "clip_classifier": "AutoModelForImageClassification",
    "vit": "AutoModelForImageClassification",
}
ROTATING = [
    ("llama", "AutoModelForCausalLM", rope_cases.blocks()),
    ("qwen3", "AutoModelForCausalLM", rope_cases.PLANES),
    ("dinov3", "AutoModel", rope_cases.PLANES),
    ("qwen2_5_vl", "AutoModelForImageTextToText", rope_cases.blocks()),
]


class Derived(transformers.ViTForImageClassification):
    """A class of a user, which transformers does not export."""


def patched(name, **fields):
    model, inputs = build(name)
    patch(model, RotaryPatchConfig(**{"position_encoding": "liere", "block_size": 8, **fields}))
    randomize(model)
    return model.eval(), inputs


def check_restored(kind, model, inputs, folder, most=None):
    """A class restores every weight of a saved model and the bits of its outputs; or of the `most` that both have."""
    model.save_pretrained(folder)
    loaded, report = kind.from_pretrained(folder, output_loading_info=True)
    assert most or not any(report.values()), report
    loaded = realign(loaded.eval())
    assert is_patched(loaded) == is_patched(model)
    assert same_bits(outputs_of(loaded, inputs)[:most], outputs_of(model, inputs)[:most])
    return loaded


@pytest.mark.slow
def test_auto_classes_restore_where_nobody_imports_the_package(tmp_path):
    fields = {"layers": [1], "keep_absolute": "drop", "coordinates": "index"}
    models = {name: (auto_class, *patched(name, **fields)) for name, auto_class in AUTO_CLASSES.items()}
    for name, auto_class, config in ROTATING:
        models[name] = auto_class, *rope_cases.build_patched(name, config)
    check_auto_classes(models, tmp_path)


def test_auto_models_of_other_tasks_read_a_classifier(tmp_path):
    whole, inputs = patched("vit")
    assert complete_model(whole) is whole
    whole.save_pretrained(tmp_path)
    base = transformers.AutoModel.from_pretrained(tmp_path).eval()
    assert is_patched(base) and type(base).__name__ == "RotaryViTModel"
    with torch.no_grad():
        expected = whole.vit(**inputs).last_hidden_state
        assert torch.equal(base(**inputs).last_hidden_state, expected)
    masked = transformers.AutoModelForMaskedImageModeling.from_pretrained(tmp_path)
    assert isinstance(masked, RotaryViTForMaskedImageModeling)


PLAIN = [("vit", RotaryViTConfig, "AutoModelForImageClassification", SHARED_CONFIG)]
for config in (rope_cases.PLANES, rope_cases.blocks(), rope_cases.blocks("comrope_ld", layers=[0])):
    PLAIN += [("llama", RotaryLlamaConfig, "AutoModelForCausalLM", config)]
    PLAIN += [("dinov3", RotaryDINOv3ViTConfig, "AutoModel", config)]


@pytest.mark.parametrize("name, kind, auto_class, config", PLAIN)
def test_weights_of_a_plain_checkpoint_start_at_its_outputs(name, kind, auto_class, config, tmp_path):
    """A plain checkpoint has no generators: they are what a start gives, not uninitialised memory."""
    model, inputs = (build if name == "vit" else rope_cases.build)(name)
    model.save_pretrained(tmp_path)
    fields = {"model_type": kind.model_type, "rotary_patch": config.to_dict()}
    rotary = kind.from_dict({**model.config.to_dict(), **fields})
    loaded = type(getattr(transformers, auto_class).from_config(rotary)).from_pretrained(tmp_path, config=rotary)
    found, expected = outputs_of(realign(loaded.eval()), inputs), outputs_of(model, inputs)
    # Blocks start within rounding.
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert same_bits(found, expected) or config.rotary_init == "pretrained" and config is not rope_cases.PLANES
    if name == "vit":
        multipliers = dict(rotary_parameters(loaded))["vit.rotary_encoding.multipliers"]
        assert multipliers.isfinite().all() and multipliers.std() > 0.3


def test_weight_of_the_table_is_saved(tmp_path):
    whole, inputs = patched("vit", keep_absolute="fade")
    set_absolute_weight(whole, 0.25)
    loaded = check_restored(type(whole), whole, inputs, tmp_path)
    assert loaded.config.rotary_patch["absolute_weight"] == 0.25


def test_configuration_holds_all_of_the_patch(tmp_path):
    config = RotaryCLIPVisionConfig(**IMAGE, rotary_patch={"position_encoding": "liere"})
    assert config.rotary_patch["rotary_init"] == "zeros"
    assert RotaryLlamaConfig().rotary_patch["rotary_init"] == "pretrained"
    RotaryCLIPVisionModelWithProjection(config).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["model_type"] == "rotary_clip_vision_model" and saved["rotary_patch"] == config.rotary_patch
    with pytest.raises(Exception, match="block_sizes"):
        RotaryViTConfig(rotary_patch={"block_sizes": 4})
    with pytest.raises(Exception, match="position_encoding='sinusoid'; accepted are liere"):
        RotaryViTConfig(rotary_patch={"position_encoding": "sinusoid"})


def refusal(kind: str, folder) -> str:
    """What a class of transformers says of a folder in a process without the package."""
    code = f"""
        import transformers
        try:
            transformers.{kind}.from_pretrained({str(folder)!r})
        except Exception as error:
            print(" ".join(str(error).split()))
    """
    return " ".join(run_code(code, folder, False))


@pytest.mark.parametrize("name", [*AUTO_CLASSES, "clip_projection"])
def test_unpatch_restores_class_and_configuration_in_place(name, tmp_path):
    plain, inputs = build(name)
    model, _ = build(name)
    before, kinds = model.config.to_dict(), [type(module) for module in model.modules()]
    patch(model, RotaryPatchConfig(position_encoding="liere", block_size=8))
    randomize(model)
    model.save_pretrained(tmp_path / "patched")
    assert unpatch(model) is model and not is_patched(model)
    assert [type(module) for module in model.modules()] == kinds
    assert {**model.config.to_dict(), "architectures": before["architectures"], "dtype": before["dtype"]} == before
    assert same_bits(outputs_of(model, inputs), outputs_of(plain, inputs))
    model.save_pretrained(tmp_path / "unpatched")
    plain.save_pretrained(tmp_path / "plain")
    configs = [json.loads((tmp_path / folder / "config.json").read_text()) for folder in ("unpatched", "plain")]
    assert configs[0] == configs[1] and not (tmp_path / "unpatched" / "modeling_patched.py").exists()


def test_a_configuration_that_another_model_shares_is_not_changed():
    plain, inputs = build("vit")
    shared = plain.config
    before = shared.to_dict()
    model = type(plain)(shared)
    patch(model, RotaryPatchConfig(position_encoding="comrope_ld", block_size=4))
    assert shared.to_dict() == before and plain.config is shared and type(shared) is transformers.ViTConfig
    # All modules of the patched model read one configuration, so that it can still be changed.
    assert model.vit.config is model.config and isinstance(model.config, RotaryViTConfig)
    model.set_attn_implementation("eager")
    assert plain.config._attn_implementation == "sdpa"
    assert outputs_of(model, {**inputs, "output_attentions": True})[-1][0].shape[-1] == 17


def test_other_libraries_look_up_the_plain_type():
    model, _ = patched("vit")
    assert model.config.model_type == "vit" and type(model.config).model_type == "rotary_vit"
    assert isinstance(model, transformers.ViTForImageClassification)


@pytest.mark.parametrize("name", [pytest.param("vit", marks=pytest.mark.slow), "clip"])
def test_copies_pickles_and_compiled_models_are_saved_with_their_rotations(name, tmp_path):
    model, inputs = patched(name)
    compiled = torch.compile(model, backend="eager")
    compiled(**inputs)
    copies = {"copy": copy.deepcopy(model), "pickle": pickle.loads(pickle.dumps(model)), "compiled": compiled}
    for kind, other in copies.items():
        loaded = check_restored(type(model), other, inputs, tmp_path / kind)
        assert same_bits(outputs_of(loaded, inputs), outputs_of(model, inputs)), kind
    wrapped = torch.nn.Sequential(build(name)[0])
    patch(wrapped, RotaryPatchConfig(block_size=4))
    assert isinstance(wrapped[0], type(model)) and unpatch(wrapped) is wrapped and not is_patched(wrapped)


@pytest.mark.slow
def test_a_plain_class_refuses_rotations_in_a_process_without_the_package(tmp_path):
    patched("vit")[0].save_pretrained(tmp_path)
    # Whatever it is called, no class loads the model without its rotations.
    for kind in ("ViTForImageClassification", "ViTModel", "AutoModel"):
        assert "trust_remote_code" in refusal(kind, tmp_path)
    with pytest.raises(Exception, match="import hf_liere and load them with an Auto class"):
        transformers.ViTForImageClassification.from_pretrained(tmp_path)
    # Nor a part that contains them; other parts are as they were.
    patched("clip")[0].save_pretrained(tmp_path / "clip")
    with pytest.raises(Exception, match="import hf_liere and load them with an Auto class"):
        transformers.CLIPVisionModel.from_pretrained(tmp_path / "clip")
    transformers.CLIPTextModel.from_pretrained(tmp_path / "clip")


@pytest.mark.parametrize(
    "family", ["vit", "clip", "clip_vision_model", "siglip2", "llama", "gemma3", "qwen2_5_vl", "dinov3_vit"]
)
def test_plain_configurations_refuse_what_is_written_of_rotary_ones(family, tmp_path):
    plain = transformers.CONFIG_MAPPING[family]
    rotary = rotary_config(plain)
    rotary().save_pretrained(tmp_path)
    with pytest.raises(Exception, match="These weights have learned rotations"):
        plain.from_pretrained(tmp_path)
    for config in (rotary.from_pretrained(tmp_path), rotary.from_json_file(tmp_path / "config.json")):
        assert config.to_dict() == rotary().to_dict()
    # A user's own words are no note.
    for words in ({"note": 0, "value": 1}, {"note": 0, "song": 1}):
        rotary(words=words).save_pretrained(tmp_path / "words")
        assert rotary.from_pretrained(tmp_path / "words").words == words
    # Trainer reads the version of transformers when it resumes.
    assert transformers.PreTrainedConfig.from_json_file(tmp_path / "config.json").transformers_version


@pytest.mark.parametrize("name, part, auto_class", [("vit", "vit", "AutoModel"), ("clip", "vision_model", "AutoModel")])
def test_a_part_of_a_patched_model_is_saved_with_its_rotations(name, part, auto_class, tmp_path):
    model, inputs = patched(name)
    inner = model.get_submodule(part)
    # A classifier has no pooler.
    check_restored(getattr(transformers, auto_class), inner, {"pixel_values": inputs["pixel_values"]}, tmp_path, 1)
    # The part still belongs to the whole.
    assert type(model.config).__name__.startswith("Rotary") and "rotary_patch" in model.config.to_dict()
    check_restored(type(model), model, inputs, tmp_path / "whole")


@pytest.mark.parametrize("target", [None, "model"])
def test_heads_on_a_base_of_an_auto_class_are_restored(target, tmp_path):
    """`LlamaForSequenceClassification` makes its base by `AutoModel.from_config`, unlike `LlamaForCausalLM`."""
    config = transformers.LlamaConfig(vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=1)
    config.num_attention_heads = config.num_key_value_heads = 2
    config.head_dim, config.pad_token_id, inputs = 16, 0, {"input_ids": torch.arange(1, 17).view(2, 8)}
    whole = transformers.LlamaForSequenceClassification(config).eval()
    randomize(patch(whole, RotaryPatchConfig("rope_mixed", rotary_init="pretrained", target=target)))
    whole.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    assert torch.equal(loaded(**inputs).logits, whole(**inputs).logits)
    # Without the head, the target has another name.
    for auto_class in (transformers.AutoModel, transformers.AutoModelForCausalLM):
        loaded = auto_class.from_pretrained(tmp_path).eval()
        base = getattr(loaded, "model", loaded)
        assert torch.equal(base(**inputs).last_hidden_state, whole.model(**inputs).last_hidden_state)


@pytest.mark.parametrize("layers", [None, [1]])
def test_the_target_of_a_wrapped_model_is_saved_as_its_own(layers, tmp_path):
    model, inputs = build("clip")
    wrapped = torch.nn.Sequential(model)
    patch(wrapped, RotaryPatchConfig(block_size=4, target="0.vision_model", layers=layers))
    randomize(wrapped)
    assert model.config.rotary_patch["target"] == "vision_model"
    check_restored(transformers.AutoModel, model.eval(), inputs, tmp_path)
    # Of the part, it is the whole.
    pixels = {"pixel_values": inputs["pixel_values"]}
    part = check_restored(transformers.AutoModel, model.vision_model, pixels, tmp_path / "part")
    assert part.config.rotary_patch["target"] is None


def test_a_patched_model_is_pushed_with_its_rotations(hub, tmp_path):
    model, inputs = patched("vit")
    expected = outputs_of(model, inputs)
    model.push_to_hub("tester/pushed")
    model.save_pretrained(tmp_path / "saved", push_to_hub=True, repo_id="tester/saved")
    own = Derived(build("vit")[0].config).eval()
    with pytest.warns(UserWarning, match="does not export Derived"):
        patch(own, RotaryPatchConfig(block_size=4))
    own.save_pretrained(tmp_path / "own", push_to_hub=True, repo_id="tester/own")
    with pytest.raises(HfHubHTTPError, match="403"):
        own.save_pretrained(tmp_path / "own", push_to_hub=True, repo_id="tester/own", token=OTHER)
    for name in ("tester/pushed", "tester/saved"):
        loaded = transformers.AutoModelForImageClassification.from_pretrained(name).eval()
        assert same_bits(outputs_of(loaded, inputs), expected), name
    files = {path.name for path in Path(snapshot_download("tester/own")).iterdir()}
    assert {"rotary.safetensors", "rotary_config.json", "model.safetensors"} <= files


def test_trainer_shifts_smoothed_labels_as_of_the_plain_class(tmp_path):
    """Trainer finds language models by the names of their classes."""
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, pad_token_id=0
    )
    model = transformers.LlamaForCausalLM(config)
    tokens = torch.arange(1, 17).view(2, 8)
    arguments = transformers.TrainingArguments(tmp_path, label_smoothing_factor=0.2, use_cpu=True, report_to="none")
    losses = []
    for each in (model, patch(copy.deepcopy(model), RotaryPatchConfig("rope_mixed", rotary_init="pretrained"))):
        trainer = transformers.Trainer(each, arguments)
        losses.append(trainer.compute_loss(each, {"input_ids": tokens, "labels": tokens}))
    assert torch.equal(*losses)


@pytest.mark.parametrize("name, part", [("vit", "vit"), ("clip", "vision_model")])
def test_the_whole_of_a_patched_part_is_saved_with_its_rotations(name, part, tmp_path):
    """Also where the part was patched before it became one; and without rotations that were taken away again."""
    model, inputs = build(name)
    other, _ = build(name)
    patch(model.get_submodule(part), RotaryPatchConfig(block_size=4))
    randomize(model)
    other.set_submodule(part, model.get_submodule(part))
    for whole in (model, other):
        # It becomes another class when it is saved.
        whole.eval().save_pretrained(tmp_path)
        check_restored(type(whole), whole, inputs, tmp_path)
        assert type(whole).__name__.startswith("Rotary") and whole.config.rotary_patch["target"] == part
    unpatch(model.get_submodule(part))
    plain = type(build(name)[0])
    check_restored(plain, model, inputs, tmp_path / "plain")
    assert type(model) is plain and type(model.config) is plain.config_class


def test_parts_that_are_patched_differently_are_saved_but_do_not_load_as_one(tmp_path):
    models = [build("vit")[0].vit for _ in range(2)]
    for model, block_size in zip(models, (4, 8)):
        patch(model, RotaryPatchConfig(position_encoding="liere", block_size=block_size))
    whole, _ = build("vit")
    whole.vit, whole.other = models
    with pytest.warns(UserWarning, match="has parts that are patched differently"):
        whole.save_pretrained(tmp_path)
    with pytest.raises(Exception, match="different_patches_of_parts"):
        transformers.AutoModelForImageClassification.from_pretrained(tmp_path)
    # What is described is what there is when it is saved.
    unpatch(whole.other)
    whole.save_pretrained(tmp_path)
    assert whole.config.rotary_patch == models[0].rotary_patch.config.to_dict() | {"target": None}
    # A target that names one of two is not dropped without a word either.
    unpatch(whole)
    patch(whole, RotaryPatchConfig(block_size=4, target="vit"))
    patch(whole.other, RotaryPatchConfig(block_size=4))
    with pytest.warns(UserWarning, match="has parts that are patched differently"):
        whole.save_pretrained(tmp_path)


def test_classes_that_transformers_does_not_export_say_so_and_are_saved_nevertheless(tmp_path):
    plain, inputs = build("vit")
    model = Derived(plain.config).eval()
    model.load_state_dict(plain.state_dict())
    model.save_pretrained(tmp_path / "base")
    with pytest.raises(ValueError, match="is not patched"):
        complete_model(model)
    with pytest.warns(UserWarning, match="does not export Derived.*rotary_class"):
        patch(model, RotaryPatchConfig(block_size=4))
    randomize(model)
    expected = outputs_of(model, inputs)
    assert isinstance(model, Derived) and same_bits(outputs_of(pickle.loads(pickle.dumps(model)), inputs), expected)
    with pytest.raises(ValueError, match="Derived is not a class that transformers exports.*save_rotary"):
        complete_model(model)
    # As its own class, in a process that makes it again, and as rotations for its base.
    check_restored(rotary_class(Derived), model, inputs, tmp_path / "model")
    base = Derived.from_pretrained(tmp_path / "base").eval()
    with pytest.warns(UserWarning, match="does not export"):
        load_rotary(base, tmp_path / "model")
    assert same_bits(outputs_of(base, inputs), expected)
    assert "trust_remote_code" in refusal("AutoModel", tmp_path / "model")


def test_adapters_are_saved_by_themselves():
    peft = pytest.importorskip("peft")
    model, _ = build("clip_vision")
    lora = peft.LoraConfig(target_modules=["q_proj"], r=2)
    injected = peft.inject_adapter_in_model(lora, patch(model, RotaryPatchConfig(block_size=4)))
    with pytest.raises(ValueError, match="CLIPVisionModel contains adapters .*Merge or unload"):
        complete_model(injected)
