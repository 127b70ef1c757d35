"""Learned frequencies written back to the configuration of a plain model of transformers."""

import json

import pytest
import torch
from fresh_process import run_code
from patching_cases import SMALL
from rope_cases import PLANES, TEXT, blocks, build, build_patched, rope
from safetensors.torch import load_file
from transformers import AutoConfig, DINOv3ViTConfig, DINOv3ViTModel, LlamaConfig, LlamaForCausalLM

from hf_liere import RotaryPatchConfig, is_patched, patch, rotary_parameters, unpatch


SHARED = RotaryPatchConfig(position_encoding="rope_mixed", rotary_init="pretrained", share_layers=True)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def learn(model, config=SHARED):
    """Patch a model, with frequencies that all layers learned together."""
    patch(model, config)
    with torch.no_grad():
        for _, factors in rotary_parameters(model):
            factors.copy_(0.5 * torch.randn_like(factors[:1]))
    return model.eval()


@torch.no_grad()
def logits(model, inputs):
    return model(**inputs).logits


NAMES = ("llama", "llama_yarn", "gemma3", "glm", "gpt_neox", "smollm3")


def test_plain_transformers_compute_the_same(tmp_path):
    """In this process, and in one that has no hf_liere, from the files alone."""
    expected, rounding = {}, {}
    for name in NAMES:
        model, inputs = build(name)
        before, kind = logits(model, inputs), type(model)
        expected[name] = logits(learn(model), inputs)
        # The frequencies matter.
        assert (expected[name] - before).abs().max() > 1e-3 * before.abs().max()
        assert unpatch(model, keep_frequencies=True) is model
        assert type(model) is kind and not is_patched(model)
        # A frequency is rounded twice, and its error multiplied by positions.
        rounding[name] = {"atol": 1e-4 * expected[name].abs().max().item(), "rtol": 0}
        torch.testing.assert_close(logits(model, inputs), expected[name], **rounding[name])
        model.save_pretrained(tmp_path / name)
        assert "hf_liere" not in (tmp_path / name / "config.json").read_text()
        torch.save(inputs, tmp_path / f"{name}.pt")
    code = f"""
        import torch, transformers
        from safetensors.torch import save_file

        found = {{}}
        for name in {NAMES}:
            config = transformers.AutoConfig.from_pretrained(name)
            model = getattr(transformers, config.architectures[0]).from_pretrained(name).eval()
            with torch.no_grad():
                found[name] = model(**torch.load(f"{{name}}.pt")).logits
        save_file(found, "logits.safetensors")
        assert "hf_liere" not in sys.modules
    """
    run_code(code, tmp_path, package=False)
    for name, found in load_file(tmp_path / "logits.safetensors").items():
        torch.testing.assert_close(found, expected[name], **rounding[name])


def test_the_configuration_says_the_frequencies(tmp_path):
    """1 / (λ θ^(2i/D)) with one λ for short and for long inputs, as LongRoPE defines them."""
    model, _ = build("llama_yarn")
    learn(model)
    (_, factors), rope = next(rotary_parameters(model)), model.model.rotary_emb
    expected = rope.inv_freq.double() * factors[0].detach().double().exp()
    scaling = rope.attention_scaling
    unpatch(model, keep_frequencies=True)
    model.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())["rope_parameters"]
    assert written["rope_type"] == "longrope" and written["short_factor"] == written["long_factor"]
    assert written["attention_factor"] == scaling > 1
    assert written["original_max_position_embeddings"] == model.config.max_position_embeddings
    exponents = torch.arange(len(expected), dtype=torch.float64) / len(expected)
    found = 1 / (torch.tensor(written["short_factor"], dtype=torch.float64) * written["rope_theta"] ** exponents)
    # Three roundings to float32.
    torch.testing.assert_close(found, expected, rtol=3e-7, atol=0)
    assert AutoConfig.from_pretrained(tmp_path).model_type == "llama"


def vision(config):
    return patch(DINOv3ViTModel(DINOv3ViTConfig(**SMALL)), config)


def dynamic():
    config = LlamaConfig(**TEXT, **rope(rope_type="dynamic", factor=2.0))
    return patch(LlamaForCausalLM(config), SHARED)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: build_patched("llama", PLANES)[0], r"layers 0 and 1 differ by up to .*%.*with share_layers=True"),
        (
            lambda: build_patched("llama", blocks())[0],
            "position_encoding='liere'.*is more than one frequency for every plane; accepted: rope_mixed",
        ),
        (lambda: vision(SHARED), "configuration has no rope_parameters"),
        (lambda: build_patched("qwen2_5_vl", SHARED)[0], "one axis alone"),
        (dynamic, "depend on the length of the input"),
    ],
)
def test_other_rotations_stay(make, message):
    model = make()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match=message):
        unpatch(model, keep_frequencies=True)
    assert is_patched(model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_layers_that_did_not_learn_disagree():
    model, _ = build("llama")
    learn(model, RotaryPatchConfig(position_encoding="rope_mixed", rotary_init="pretrained", layers=[1]))
    with pytest.raises(ValueError, match="attention layers 0 and 1 differ"):
        unpatch(model, keep_frequencies=True)
