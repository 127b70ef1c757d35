"""Adapters of peft keep the rotations of their base, or refuse a base without them; each is loaded in a new process."""

import json
import textwrap

import pytest
import torch
import transformers
from fresh_process import run_warm
from patching_cases import IMAGE, randomize
from rope_cases import PLANES, build, outputs
from safetensors.torch import load_file

from hf_liere import (
    RotaryPatchConfig,
    is_patched,
    load_peft,
    load_rotary,
    patch,
    rotary_parameters,
    save_rotary,
    unpatch,
)


peft = pytest.importorskip("peft")

COPIES = ["rotary_encoding"]


def lora(**fields):
    return peft.LoraConfig(task_type="CAUSAL_LM", r=2, init_lora_weights=False, **fields)


@pytest.fixture
def base(tmp_path):
    """The plain model, saved."""
    build("llama")[0].save_pretrained(tmp_path / "base")
    return transformers.LlamaForCausalLM.from_pretrained(tmp_path / "base")


def adapted(base, **fields):
    """Rotations that are not those of the start, and LoRA that is not zero."""
    randomize(patch(base, PLANES))
    model = peft.get_peft_model(base, lora(**fields)).eval()
    if fields:
        randomize(model)
    return model


@torch.no_grad()
def logits(model):
    return model(torch.arange(3, 17).view(2, 7)).logits


def plain(tmp_path):
    return transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")


def load(tmp_path, base=None, name="adapter"):
    return peft.PeftModel.from_pretrained(base or plain(tmp_path), tmp_path / name)


LOADERS = {
    "peft": "PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained('base'), 'adapter')",
    "auto": "AutoPeftModelForCausalLM.from_pretrained('adapter')",
    "ours": "hf_liere.load_peft('adapter')",
    "transformers": "AutoModelForCausalLM.from_pretrained('adapter')",
}
PROCESS = """
    import hf_liere, os, torch
    from peft import AutoPeftModelForCausalLM, PeftModel
    from transformers import AutoModelForCausalLM
    for kind in {kinds!r}:
        os.chdir(os.path.join({folder!r}, kind))
        expected = torch.load("expected.pt")
        for load in {loaders!r}:
            model = eval(load).eval()
            with torch.no_grad():
                same = torch.equal(model(expected["input_ids"]).logits, expected["logits"])
            print(kind, hf_liere.is_patched(model), same)
"""


def transformers_loads_adapters() -> bool:
    """Whether this release of transformers takes this one of peft for adapters by itself."""
    from transformers.utils.peft_utils import check_peft_version

    minimum = getattr(transformers.integrations.peft, "MIN_PEFT_VERSION", "0.0")
    try:
        check_peft_version(minimum)
    except ValueError:
        return False
    return True


def test_rotations_are_restored_on_a_plain_base_in_a_new_process(tmp_path, monkeypatch):
    """Trained as copies, left as they are under LoRA, and with an adapter that transformers has put into the model."""
    kinds = ["copies", "frozen", "native"] if transformers_loads_adapters() else ["copies", "frozen"]
    for kind in kinds:
        (tmp_path / kind).mkdir()
        monkeypatch.chdir(tmp_path / kind)
        build("llama")[0].save_pretrained("base")
        base = transformers.LlamaForCausalLM.from_pretrained("base")
        if kind == "native":
            randomize(patch(base, PLANES))
            base.add_adapter(lora())
            model = base.eval()
        else:
            model = adapted(base, **({"modules_to_save": COPIES} if kind == "copies" else {}))
        inputs = build("llama")[1]
        torch.save({"input_ids": inputs["input_ids"], "logits": outputs(model, inputs)[0].detach()}, "expected.pt")
        model.save_pretrained("adapter")
    loaders = [code for name, code in LOADERS.items() if name != "transformers" or transformers_loads_adapters()]
    script = textwrap.dedent(PROCESS).format(kinds=kinds, folder=str(tmp_path), loaders=loaders)
    expected = [f"{kind} True True" for kind in kinds for _ in loaders]
    assert run_warm("-c", script).stdout.splitlines() == expected


@pytest.mark.parametrize("is_patched_base", [False, True])
def test_adapters_without_a_task_are_loaded_by_auto_peft_model(is_patched_base, base, tmp_path):
    randomize(patch(base, RotaryPatchConfig(position_encoding="liere", block_size=4, rotary_init="pretrained")))
    base.config._name_or_path = str(tmp_path / "base")
    if is_patched_base:
        base.save_pretrained(tmp_path / "base")
    model = peft.get_peft_model(base, peft.LoraConfig(r=2, init_lora_weights=False)).eval()
    model.save_pretrained(tmp_path / "adapter")
    loaded = peft.AutoPeftModel.from_pretrained(tmp_path / "adapter").eval()
    assert torch.equal(logits(loaded), logits(model))


def test_rotations_without_their_patch_are_not_dropped(base, tmp_path):
    adapted(base, modules_to_save=COPIES).save_pretrained(tmp_path / "adapter")
    # As of a process in which nothing wrote it.
    (tmp_path / "adapter" / "rotary_config.json").unlink()
    with pytest.raises(ValueError, match="contains rotations, .*rotary_encoding.*LlamaForCausalLM would drop"):
        load(tmp_path)
    model = load(tmp_path, patch(plain(tmp_path), PLANES))
    assert is_patched(model)


def test_a_base_with_other_rotations_is_refused(base, tmp_path):
    adapted(base).save_pretrained(tmp_path / "adapter")
    other = RotaryPatchConfig(position_encoding="liere", block_size=4, rotary_init="pretrained")
    with pytest.raises(
        ValueError, match="patched differently .*position_encoding='liere' here, 'rope_mixed' there.*unpatch it"
    ):
        load(tmp_path, patch(plain(tmp_path), other))


def test_an_adapter_that_was_trained_without_rotations_keeps_its_base(base, tmp_path):
    model = peft.get_peft_model(plain(tmp_path), lora()).eval()
    adapted(base, modules_to_save=COPIES).save_pretrained(tmp_path / "adapter")
    with pytest.raises(ValueError, match="differ from those that this model's adapters share.*Patch the base before"):
        model.load_adapter(tmp_path / "adapter", "other")
    assert not is_patched(model)


def test_an_adapter_is_loaded_on_a_base_that_was_trained_further(base, tmp_path):
    adapted(base).save_pretrained(tmp_path / "adapter")
    further = plain(tmp_path)
    with torch.no_grad():
        further.model.layers[0].self_attn.q_proj.weight.mul_(1.1)
    with pytest.raises(ValueError, match="was trained on other weights.*check_weights=False"):
        load(tmp_path, further)
    load_rotary(further, tmp_path / "adapter", check_weights=False)
    assert is_patched(load(tmp_path, further))


def test_adapters_that_are_mixed_or_swapped_have_their_rotations(base, tmp_path):
    from peft.utils.hotswap import hotswap_adapter

    model = adapted(base)
    model.save_pretrained(tmp_path / "first")
    mixed = peft.PeftMixedModel.from_pretrained(plain(tmp_path), tmp_path / "first").eval()
    assert torch.equal(logits(mixed), logits(model))
    randomize(model)
    model.save_pretrained(tmp_path / "second")
    swapped = load(tmp_path, name="first").eval()
    hotswap_adapter(swapped, str(tmp_path / "second"), "default", torch_device="cpu")
    assert torch.equal(logits(swapped), logits(model))


def test_rotations_of_an_earlier_adapter_do_not_stay(base, tmp_path):
    adapted(base).save_pretrained(tmp_path / "adapter")
    model = peft.get_peft_model(plain(tmp_path), lora())
    model.save_pretrained(tmp_path / "adapter")
    assert not list((tmp_path / "adapter").glob("rotary*"))
    # The adapter that was loaded with them, too.
    adapted(plain(tmp_path)).save_pretrained(tmp_path / "adapter")
    loaded = load(tmp_path)
    unpatch(loaded).save_pretrained(tmp_path / "adapter")
    assert not is_patched(load(tmp_path))
    # Those of `save_rotary` may be the only ones.
    save_rotary(patch(plain(tmp_path), PLANES), tmp_path / "adapter")
    with pytest.raises(ValueError, match="contains rotations .*which has none: move them away"):
        model.save_pretrained(tmp_path / "adapter")


@pytest.mark.parametrize("has_digest", [True, False])
def test_an_adapter_of_another_folder_is_refused(has_digest, base, tmp_path):
    """Adapters that were saved before there were digests are loaded as then."""
    adapted(base).save_pretrained(tmp_path / "adapter")
    peft.get_peft_model(plain(tmp_path), lora()).save_pretrained(tmp_path / "other")
    name = "adapter_model.safetensors"
    (tmp_path / "adapter" / name).write_bytes((tmp_path / "other" / name).read_bytes())
    path = tmp_path / "adapter" / "rotary_config.json"
    if has_digest:
        with pytest.raises(ValueError, match=f"was not saved with {name} as it is now.*or delete rotary_config.json"):
            load(tmp_path)
        return
    content = json.loads(path.read_text())
    del content["beside"]
    path.write_text(json.dumps(content))
    assert is_patched(load(tmp_path))


CLASSIFIERS = {
    "dinov2": ("Dinov2Model", None, 3),
    "vit": ("ViTModel", None, 2),
    "llama": ("LlamaForCausalLM", "SEQ_CLS", 3),
    "tokens": ("LlamaForCausalLM", "TOKEN_CLS", 2),
}


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_load_peft_builds_the_class_that_was_adapted(name, tmp_path):
    """On a base without its head, with the trained classifier."""
    base, task, labels = CLASSIFIERS[name]
    if task is None:
        config = getattr(transformers, base).config_class(**IMAGE)
        auto, patched = transformers.AutoModelForImageClassification, RotaryPatchConfig(position_encoding="liere")
    else:
        config, patched = build("llama")[0].config, PLANES
        sequences, tokens = (
            transformers.AutoModelForSequenceClassification,
            transformers.AutoModelForTokenClassification,
        )
        auto = sequences if task == "SEQ_CLS" else tokens
    getattr(transformers, base)(config).save_pretrained(tmp_path / "base")
    model = patch(auto.from_pretrained(tmp_path / "base", num_labels=labels), patched)
    copies = [*COPIES, *(["classifier"] if task is None else [])]
    targets = [key for key in ("query", "q_proj") if any(key in name for name, _ in model.named_modules())]
    options = {"task_type": task, "target_modules": targets, "modules_to_save": copies, "init_lora_weights": False}
    model = peft.get_peft_model(model, peft.LoraConfig(**options)).eval()
    randomize(model)
    model.save_pretrained(tmp_path / "adapter")
    inputs = {"pixel_values": torch.randn(2, 3, 16, 16)} if task is None else build("llama")[1]
    loaded = load_peft(tmp_path / "adapter").eval()
    assert torch.equal(loaded(**inputs).logits, model(**inputs).logits)


def test_two_adapters_have_rotations_of_their_own_only_as_copies(base, tmp_path):
    model = adapted(base, modules_to_save=COPIES)
    first = logits(model)
    model.save_pretrained(tmp_path / "first")
    randomize(model)
    second = logits(model)
    model.save_pretrained(tmp_path / "second")
    both = peft.PeftModel.from_pretrained(plain(tmp_path), tmp_path / "first", adapter_name="first")
    both.load_adapter(tmp_path / "second", adapter_name="second")
    for name, expected in (("first", first), ("second", second)):
        both.set_adapter(name)
        assert torch.equal(logits(both.eval()), expected), name
    # Each is saved with its own, which `load_rotary` reads.
    both.save_pretrained(tmp_path / "both")
    for name in ("first", "second"):
        stored = load_file(tmp_path / name / "rotary.safetensors")
        again = load_file(tmp_path / "both" / name / "rotary.safetensors")
        assert all(torch.equal(again[key], stored[key]) for key in stored)
    # Without copies, both would rotate with the values that were read last.
    adapted(plain(tmp_path)).save_pretrained(tmp_path / "third")
    shared = load(tmp_path, name="third")
    with torch.no_grad():
        for _, value in rotary_parameters(shared):
            value.add_(0.1)
    shared.save_pretrained(tmp_path / "fourth")
    with pytest.raises(ValueError, match="differ from those that this model's adapters share.*modules_to_save"):
        load(tmp_path, name="third").load_adapter(tmp_path / "fourth", "other")


def test_patched_inside_of_peft_is_patched_in_the_model(base, tmp_path):
    model = peft.get_peft_model(base, lora())
    patch(model, PLANES)
    assert type(base).__name__ == "RotaryLlamaForCausalLM" and base.config.rotary_patch["target"] is None
    randomize(model)
    expected = logits(model.eval())
    model.save_pretrained(tmp_path / "adapter")
    loaded = load_peft(tmp_path / "adapter", plain(tmp_path)).eval()
    assert torch.equal(logits(loaded), expected)


def test_other_adapters_are_loaded_as_before(base, tmp_path):
    """Without rotations, and with the target modules that peft knows for the type of the model."""
    peft.get_peft_model(base, lora()).save_pretrained(tmp_path / "adapter")
    assert not (tmp_path / "adapter" / "rotary_config.json").exists()
    assert not is_patched(load(tmp_path))
    known = peft.get_peft_model(plain(tmp_path), lora()).targeted_module_names
    assert peft.get_peft_model(patch(plain(tmp_path), PLANES), lora()).targeted_module_names == known != []


@pytest.mark.parametrize("copies", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_trainer_resumes_rotations_and_lora(copies, base, tmp_path):
    """Rotations that peft knows nothing of, too."""
    tokens = torch.arange(3, 131).remainder(60).add(3).view(16, 8)
    data = [{"input_ids": row, "labels": row} for row in tokens]

    def trained(steps, resume=None):
        torch.manual_seed(0)
        model = adapted(plain(tmp_path), **({"modules_to_save": COPIES} if copies else {}))
        for _, parameter in rotary_parameters(model):
            parameter.requires_grad_(True)
        options = {"save_steps": 2, "learning_rate": 1e-2, "use_cpu": True, "report_to": "none", "weight_decay": 0.0}
        arguments = transformers.TrainingArguments(
            tmp_path / "run", max_steps=steps, lr_scheduler_type="constant", **options
        )
        trainer = transformers.Trainer(model, arguments, train_dataset=data)
        trainer.train(resume_from_checkpoint=resume)
        return {name: value.detach() for name, value in model.named_parameters() if value.requires_grad}

    whole = trained(4)
    again = trained(4, str(tmp_path / "run" / "checkpoint-2"))
    assert whole.keys() == again.keys() and any("rotary_encoding" in name for name in whole)
    for name, value in whole.items():
        # The same steps on the same shapes.
        torch.testing.assert_close(again[name], value, rtol=0, atol=0)


def test_a_merged_model_is_a_patched_one(base, tmp_path):
    model = adapted(base, modules_to_save=COPIES)
    expected = logits(model)
    model.merge_and_unload().save_pretrained(tmp_path / "merged")
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    # Merged matrices round once more.
    torch.testing.assert_close(logits(merged), expected, rtol=0, atol=1e-5)


def test_states_of_peft_name_the_rotations_that_they_leave_out(base, tmp_path, recwarn):
    model = adapted(base)
    with pytest.warns(UserWarning, match="leaves out the learned rotations of .*: call save_rotary too"):
        state = peft.get_peft_model_state_dict(model)
    assert not any("rotary" in name for name in state)
    recwarn.clear()
    # This one writes them.
    model.save_pretrained(tmp_path / "adapter")
    assert not [one for one in recwarn if "rotations" in str(one.message)]
    save_rotary(model, tmp_path / "rotations")
    other = plain(tmp_path)
    load_rotary(other, tmp_path / "rotations")
    other = peft.get_peft_model(other, lora()).eval()
    peft.set_peft_model_state_dict(other, state)
    assert torch.equal(logits(other), logits(model))


def test_states_of_peft_with_rotations(base, tmp_path, recwarn):
    """They go along into a patched base, and are not dropped by another one."""
    model = adapted(base, modules_to_save=COPIES)
    state = peft.get_peft_model_state_dict(model)
    assert not [one for one in recwarn if "rotations" in str(one.message)]
    with pytest.raises(ValueError, match="has no place for the rotations .*rotary_encoding.*: first patch it"):
        peft.set_peft_model_state_dict(peft.get_peft_model(plain(tmp_path), lora()), state)
    other = plain(tmp_path)
    patch(other, PLANES)
    other = peft.get_peft_model(other, lora(modules_to_save=COPIES)).eval()
    peft.set_peft_model_state_dict(other, state)
    assert torch.equal(logits(other), logits(model))


@pytest.mark.parametrize("call", ["forward", "generate"])
def test_mixed_batches(call, base, tmp_path):
    """Refused where adapters have rotations of their own, before peft adds hooks; else those of each sample."""
    tokens = torch.arange(3, 17).view(2, 7)

    def mix(model):
        options = {"max_new_tokens": 2, "do_sample": False} if call == "generate" else {}
        return getattr(model, call)(input_ids=tokens, adapter_names=["default", "other"], **options)

    model = adapted(base, modules_to_save=COPIES)
    model.add_adapter("other", lora(modules_to_save=COPIES))
    before = logits(model)
    with pytest.raises(ValueError, match="'other'.*have rotations of their own .*accepted: one batch for each"):
        mix(model)
    assert torch.equal(logits(model), before)
    model = adapted(plain(tmp_path))
    model.add_adapter("other", lora())
    mixed = mix(model.eval())
    if call == "forward":
        for sample, name in enumerate(("default", "other")):
            model.set_adapter(name)
            torch.testing.assert_close(mixed.logits[sample], logits(model)[sample], rtol=0, atol=1e-6)
