"""Faults of engines are named: each test breaks a right engine, which shares nothing with the package, in one way."""

import dataclasses

import numpy as np
import pytest
import torch
from rope_engine import Engine, answer, write_vectors
from safetensors import safe_open
from safetensors.numpy import save_file

from hf_liere.tools.cli import main


BFLOAT16, FLOAT16 = torch.bfloat16, torch.float16
TEXT = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 1024}
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [6, 5, 5], "mrope_interleaved": True}
# 16 planes: in turn, while an axis has planes left; what remains is the first axis's.
INTERLEAVED = tuple([0, 1, 2] * 5 + [0])
SINGLE = {"model_type": "llama", **TEXT}
# By name: a configuration, and the right engine of its only rotation.
MODELS = {
    "llama": ({**SINGLE, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}, Engine(10000.0, 32, 32)),
    "yarn": (
        {**SINGLE, "rope_parameters": YARN},
        # 0.1 ln 4 + 1
        Engine(10000.0, 32, 32, yarn=YARN, attention_factor=1.1386294361119891),
    ),
    "glm": (
        {
            "model_type": "glm",
            **TEXT,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        },
        Engine(10000.0, 32, 16, adjacent=True),
    ),
    "qwen3_vl_text": (
        {"model_type": "qwen3_vl_text", **TEXT, "rope_parameters": MROPE},
        Engine(10000.0, 32, 32, axes=INTERLEAVED),
    ),
    "qwen3_vl_vision": (
        {"model_type": "qwen3_vl_vision", "depth": 1, "hidden_size": 64, "num_heads": 2, "intermediate_size": 64},
        Engine(10000.0, 32, 32, axes=(0,) * 8 + (1,) * 8, spectra=2),
    ),
}
# The model, what its engine does otherwise, and the name of that.
FAULTS = [
    ("llama", {"adjacent": True}, "adjacent pairs instead of halves"),
    ("glm", {"adjacent": False}, "halves instead of adjacent pairs"),
    ("yarn", {"yarn": None}, "scaling ignored (yarn)"),
    ("yarn", {"attention_factor": 1.0}, "attention factor ignored (1.139)"),
    ("llama", {"theta": 500000.0}, "rope_theta 500000 instead of 10000"),
    ("glm", {"rotated": 32}, "partial factor ignored: all 32 channels rotate instead of 16"),
    ("glm", {"counted": 32}, "frequencies counted over all 32 channels instead of the 16 that rotate"),
    ("qwen3_vl_text", {"axes": (0,) * 6 + (1,) * 5 + (2,) * 5}, "sections blocked instead of interleaved"),
    ("qwen3_vl_text", {"axes": (0,) * 16}, "sections ignored: every plane reads axis 0"),
    ("qwen3_vl_vision", {"axes": (1,) * 8 + (0,) * 8}, "axes exchanged: positions are read from other columns"),
    ("llama", {"round_frequencies": BFLOAT16}, "frequencies rounded to bfloat16"),
    ("llama", {"round_frequencies": FLOAT16}, "frequencies rounded to float16"),
    ("llama", {"round_positions": BFLOAT16}, "positions rounded to bfloat16"),
    ("llama", {"round_phase": BFLOAT16}, "phase rounded to bfloat16"),
    ("llama", {"round_phase": FLOAT16}, "phase rounded to float16"),
    (
        "qwen3_vl_vision",
        dict.fromkeys(("round_frequencies", "round_positions", "round_phase"), BFLOAT16),
        "positions, frequencies and phase rounded to bfloat16 (a product under autocast)",
    ),
    ("llama", {"offset": 1}, "positions one too large"),
    ("llama", {"sign": -1}, "opposite direction (sin has the wrong sign)"),
    ("llama", {"skip": ("key",)}, "keys are not rotated"),
]


@pytest.fixture(scope="module")
def vectors(tmp_path_factory):
    configs = {name: config for name, (config, _) in MODELS.items()}
    return write_vectors(tmp_path_factory.mktemp("models"), configs)


def rotation_of(name):
    return "rotary_pos_emb" if name == "qwen3_vl_vision" else "rotary_emb"


def check(vectors, tmp_path, capsys, name, changes, **options):
    """The exit status and the lines of a check of an engine with a fault."""
    engine = dataclasses.replace(MODELS[name][1], **changes)
    answer(vectors[name], tmp_path / "answers.safetensors", {rotation_of(name): engine}, **options)
    capsys.readouterr()
    status = main(["rope", "--check", str(tmp_path / "answers.safetensors")])
    return status, capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, BFLOAT16])
def test_a_right_engine_raises_no_alarm(vectors, tmp_path, capsys, name, dtype):
    """Nor one that rounds its results, which is noted, nor another order of the columns of cos and sin."""
    status, lines = check(vectors, tmp_path, capsys, name, {}, dtype=dtype)
    assert status == 0 and lines[0].startswith(f"{rotation_of(name)}: right"), lines
    assert any("rounded to bfloat16" in line for line in lines) == (dtype == BFLOAT16)
    assert any("laid out for adjacent pairs" in line for line in lines) == (name == "glm")


@pytest.mark.parametrize(("name", "changes", "fault"), FAULTS, ids=[f"{name}: {fault}" for name, _, fault in FAULTS])
@pytest.mark.parametrize("results", [None, ("rotated_query", "rotated_key")], ids=["all", "states"])
def test_a_fault_is_named(vectors, tmp_path, capsys, name, changes, fault, results):
    """By itself, from all results and from rotated queries and keys alone."""
    status, lines = check(vectors, tmp_path, capsys, name, changes, names=results)
    assert status == 1
    lines = [line for line in lines if "note: cos and sin are laid out" not in line]
    # One cause, and how to correct it.
    assert lines[0].startswith(f"{rotation_of(name)}: WRONG") and len(lines) == 3, lines
    assert lines[1].strip().startswith(fault) and lines[2].startswith("    "), lines


@pytest.mark.parametrize(("sign", "status"), [(1, 0), (-1, 1)])
def test_one_column_for_each_plane_suffices(vectors, tmp_path, capsys, sign, status):
    """As engines keep their tables; the file of the vectors is named, and the answers are nothing but tensors."""
    name, (_, engine) = "yarn", MODELS["yarn"]
    with safe_open(vectors[name], "np") as file:
        positions = file.get_tensor("rotary_emb/positions")
    results = dataclasses.replace(engine, sign=sign).run(positions, {})
    halves = {key: np.ascontiguousarray(value[:, :16]) for key, value in results.items()}
    save_file(halves, tmp_path / "table.safetensors")
    assert main(["rope", str(vectors[name]), "--check", str(tmp_path / "table.safetensors")]) == status
    assert ("opposite direction" in capsys.readouterr().out) == (sign == -1)


@pytest.mark.parametrize(
    ("name", "changes", "faults"),
    [
        ("yarn", {"yarn": None, "attention_factor": 1.0}, ("scaling ignored", "attention factor ignored")),
        ("llama", {"adjacent": True, "round_frequencies": BFLOAT16}, ("adjacent pairs", "frequencies rounded")),
        ("glm", {"offset": 1, "theta": 1e6}, ("positions one too large", "rope_theta 1e+06")),
    ],
)
def test_two_faults_are_named_together(vectors, tmp_path, capsys, name, changes, faults):
    status, lines = check(vectors, tmp_path, capsys, name, changes)
    assert status == 1 and all(fault in lines[1] for fault in faults), lines
    others = [line for line in lines[2:] if not line.startswith(("    ", "  note: "))]
    assert not others, lines


def test_an_unknown_fault_is_not_given_a_name(vectors, tmp_path, capsys):
    shuffled = tuple(reversed(INTERLEAVED[:8])) + INTERLEAVED[8:]
    status, lines = check(vectors, tmp_path, capsys, "qwen3_vl_text", {"axes": shuffled})
    assert status == 1 and "no fault that is known here explains it" in lines[1], lines


def test_results_that_cannot_be_compared(vectors, tmp_path, capsys):
    """What is no table of floating point numbers is refused; tables of different widths are wrong."""
    file, answers = str(vectors["llama"]), tmp_path / "answers.safetensors"
    with safe_open(file, "np") as given:
        rows = len(given.get_tensor("rotary_emb/positions"))
    tables = {name: np.ones((rows, 32), np.float32) for name in ("cos", "sin")}
    for other, message in (
        (np.ones(32, np.float32), "'rotary_emb/cos' of shape (32,) and type torch.float32"),
        (np.ones((2, 32), np.int64), "'rotary_emb/cos' of shape (2, 32) and type torch.int64"),
        (np.ones((rows, 16), np.float32), "the rotations differ from what is right"),
    ):
        save_file(tables | {"cos": other}, answers)
        assert main(["rope", file, "--check", str(answers)]) == 1
        assert message in capsys.readouterr().err
