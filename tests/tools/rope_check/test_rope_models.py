"""What `hf-liere rope` says of models of transformers on this machine, right ones and broken ones."""

import json

import pytest
import torch
from rope_cases import CASES, LLAMA3, PLANES, YARN, build, rope
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.dinov3_vit.modeling_dinov3_vit import DINOv3ViTRopePositionEmbedding

from hf_liere import patch
from hf_liere.tools.cli import main
from hf_liere.tools.rope_check.measurement import find_cache_faults, measure
from hf_liere.tools.rope_check.reading import find_rotations
from hf_liere.tools.rope_check.spectrum import compute_spectrum, read_law


DIM = 64
LONG = {"short_factor": [1.0 + i / 8 for i in range(DIM // 2)], "long_factor": [2.0] * (DIM // 2)}
SCALINGS = {
    "linear": {"factor": 4.0},
    "llama3": LLAMA3["rope_parameters"],
    "yarn": YARN["rope_parameters"],
    "yarn, not truncated": {**YARN["rope_parameters"], "truncate": False, "beta_fast": 16.0},
    "yarn, two scales": {**YARN["rope_parameters"], "mscale": 0.707, "mscale_all_dim": 1.0},
    "yarn, given factor": {**YARN["rope_parameters"], "attention_factor": 1.2},
    "longrope": {**LONG, "factor": 8.0, "original_max_position_embeddings": 512},
    "proportional": {"partial_rotary_factor": 0.25},
}


@pytest.mark.parametrize("scaling", SCALINGS)
def test_frequencies_are_those_of_transformers(scaling):
    """Formulas in float64 against the functions of transformers, which compute in float32."""
    kind = scaling.partition(",")[0]
    parameters = {**SCALINGS[scaling], "rope_type": kind, "rope_theta": 50000.0}
    config = LlamaConfig(hidden_size=2 * DIM, num_attention_heads=2, max_position_embeddings=4096)
    config.rope_parameters = parameters
    wanted, wanted_factor = ROPE_INIT_FUNCTIONS[kind](config, "cpu")
    found, factor = compute_spectrum(read_law(config, None, DIM // 2))
    # A power, a quotient and a sum, each rounded to 24 bits.
    torch.testing.assert_close(found, wanted.double(), rtol=1e-6, atol=0)
    assert factor == pytest.approx(wanted_factor, rel=1e-12)


def small_llama(**fields):
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=64, max_position_embeddings=4096, **sizes, **fields)
    return LlamaForCausalLM(config).eval()


def measure_only(model):
    ((found,), _) = find_rotations(model)
    return found, measure(found)


@pytest.mark.parametrize("name", ["gemma3", "gemma4", "qwen2_5_vl", "qwen3_vl", "dinov3", "smollm3"])
def test_models_in_use_raise_no_alarm(name):
    """With layers that do not rotate, or rotate in two ways, several axes, and a module that reads pixels."""
    if name not in CASES:
        pytest.skip("this release of transformers has no such model")
    model, _ = build(name)
    found, refused = find_rotations(model)
    assert refused == []
    for part in found:
        assert measure(part).is_right and not part.differs
        assert part.rotation.planes.pairs is not None
    rotating = [rotates for part in found for rotates in part.layers.values()]
    assert rotating.count(False) == (1 if name == "smollm3" else 0) and None not in rotating
    assert find_cache_faults(model) == []


def test_frequencies_in_a_half_type_are_an_alarm():
    """As `model.to(torch.bfloat16)` leaves them, in a model that was loaded so."""
    found, measurement = measure_only(small_llama().to(torch.bfloat16))
    assert [[fault.name for fault in faults] for faults in measurement.loaded.causes] == [
        ["frequencies rounded to bfloat16"]
    ]
    # 4,095 ω 2⁻⁹ with the ω that round most
    assert measurement.loaded.error > 0.5 and found.differs


def test_converting_a_right_model_is_a_hazard():
    _, measurement = measure_only(small_llama())
    assert measurement.is_right
    wrong = {
        name: diagnosis.causes[0][0].name for name, diagnosis in measurement.conversions.items() if diagnosis.causes
    }
    assert wrong == {
        "after model.to(dtype) (bfloat16)": "frequencies rounded to bfloat16",
        "after model.half() (float16)": "frequencies rounded to float16",
    }


@pytest.mark.slow
def test_a_module_that_ignores_the_scaling_is_an_alarm():
    model = small_llama(**YARN)
    plain = 10000.0 ** (-torch.arange(16) / 16)
    model.model.rotary_emb.inv_freq.copy_(plain)
    model.model.rotary_emb.attention_scaling = 1.0
    _, measurement = measure_only(model)
    (faults,) = measurement.loaded.causes
    assert sorted(fault.kind for fault in faults) == ["attention factor", "scaling"]


class Changed(nn.Module):
    """The rotary module of Llama in plain operations, without a guard against autocast."""

    def __init__(self, rope):
        super().__init__()
        self.register_buffer("inv_freq", rope.inv_freq.clone(), persistent=False)
        self.config = rope.config

    def forward(self, x, position_ids):
        angles = (self.inv_freq[None, :, None] @ position_ids[:, None].float()).transpose(1, 2)  # (1, N, planes)
        return self.finish(x, torch.cat([angles, angles], -1))

    def finish(self, x, angles):
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


class Coinciding(Changed):
    """Positions are rounded, as by a cast of position_ids."""

    def forward(self, x, position_ids):
        return super().forward(x, position_ids.to(torch.bfloat16))


class Stretching(Changed):
    """Long sequences get other frequencies."""

    def finish(self, x, angles):
        return super().finish(x, angles / 2 if angles.max() > 64 else angles)


def measure_changed(kind):
    model = small_llama()
    model.model.rotary_emb = kind(model.model.rotary_emb)
    return measure_only(model)[1]


def test_a_product_under_autocast_is_a_hazard():
    measurement = measure_changed(Changed)
    assert measurement.is_right
    (faults,) = measurement.conversions["under autocast (bfloat16)"].causes
    # cos and sin of a phase in a half type are rounded as well.
    assert sorted(fault.kind for fault in faults) == ["output type", "phase type"]
    assert "positions, frequencies and phase rounded to bfloat16 (a product under autocast)" in faults[1].name


def test_positions_that_coincide_are_an_alarm():
    measurement = measure_changed(Coinciding)
    assert measurement.loaded.causes[0][0].name == "positions rounded to bfloat16"
    assert any("have the same rotation as another" in alarm for alarm in measurement.alarms)


def test_results_that_depend_on_other_calls_are_an_alarm():
    alarms = measure_changed(Stretching).alarms
    assert "the same positions get other rotations after a longer sequence" in alarms
    assert any("alone, as with a cache" in alarm for alarm in alarms), alarms


class Keeping(DINOv3ViTRopePositionEmbedding):
    """The rotations of the last image serve one with as many patches, whatever its shape."""

    kept = None

    def forward(self, pixel_values):
        found = super().forward(pixel_values)
        if self.kept is None or self.kept[0].shape != found[0].shape:
            self.kept = found
        return self.kept


def test_rotations_kept_for_another_image_are_an_alarm():
    model = CASES["dinov3"].build().eval()
    model.rope_embeddings.__class__ = Keeping
    _, measurement = measure_only(model)
    assert measurement.loaded.is_right
    assert measurement.alarms == ["an image of (24, 16) px gets other rotations after other images"]


def test_positions_that_start_again_with_a_cache_are_an_alarm():
    """A model that passes the position 0 for every new token."""
    model = small_llama()

    def forget(module, args, options):
        positions = options["position_ids"]
        return args, {**options, "position_ids": positions * (positions.shape[-1] > 1)}

    model.model.rotary_emb.register_forward_pre_hook(forget, with_kwargs=True)
    assert "model.rotary_emb rotates the last token otherwise" in find_cache_faults(model)[0]


def test_the_command_describes_a_configuration_alone(tmp_path, capsys, monkeypatch):
    """And, on demand, what is saved."""
    small_llama(**rope(rope_type="linear", factor=2.0)).save_pretrained(tmp_path / "saved")
    assert main(["rope", str(tmp_path / "saved")]) == 0
    printed = capsys.readouterr().out
    for line in (
        "model.rotary_emb (LlamaRotaryEmbedding)",
        "32 of 32 rotate, halves (0, 16), (1, 17)",
        "16, linear, factor 2, rope_theta 10000",
        "frequencies rounded to float16",
        "as it is, at two sizes and with a cache",
    ):
        assert line in printed
    assert "ALARM" not in printed
    assert main(["rope", str(tmp_path / "saved"), "--weights"]) == 0
    assert capsys.readouterr().out == printed
    monkeypatch.chdir(tmp_path / "saved")
    assert main(["rope", ".", "--vectors", str(tmp_path / "vectors")]) == 0
    assert [path.name for path in (tmp_path / "vectors").iterdir()] == ["saved.safetensors"]


def test_what_the_command_refuses(tmp_path, capsys):
    (tmp_path / "vit").mkdir()
    (tmp_path / "vit" / "config.json").write_text(json.dumps({"model_type": "vit"}))
    (tmp_path / "empty.safetensors").write_bytes(b"{")
    patch(small_llama(), PLANES).save_pretrained(tmp_path / "patched")
    capsys.readouterr()
    for arguments, message in (
        ([], "accepted are models, --check FILE, or --all"),
        (["--all"], "--all needs --vectors"),
        ([str(tmp_path / "patched")], "has learned rotations: accepted are models with their own RoPE"),
        ([str(tmp_path / "vit")], "has no module with frequencies (inv_freq)"),
        ([str(tmp_path / "vit"), "--vectors", str(tmp_path / "out")], "has no rotation that can be written"),
        (["--check", str(tmp_path / "empty.safetensors")], "accepted: a file of safetensors"),
        (["a", "b", "--check", "c"], "--check takes at most one model"),
    ):
        assert main(["rope", *arguments]) == 1
        captured = capsys.readouterr()
        assert captured.out == "" and captured.err.count("\n") == 1 and message in captured.err, captured.err
    assert not (tmp_path / "out").exists()
