"""Whatever is wrong with rotated states, in one value or all, is not called right; what is only rounded, is."""

import itertools

import pytest
import torch
from rope_engine import write_vectors
from safetensors import safe_open
from safetensors.torch import save_file
from slow_cases import slow_except

from hf_liere.tools.cli import main
from hf_liere.tools.rope_check.vectors import read_vectors


SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
}
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
YARN = {**PLAIN, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
MROPE = {**PLAIN, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
FAMILIES = {
    "llama": {"rope_parameters": PLAIN},
    "mistral": {"rope_parameters": YARN},
    "qwen2": {"rope_parameters": {**PLAIN, "rope_type": "linear", "factor": 2.0}},
    "qwen3": {"rope_parameters": {**PLAIN, "rope_theta": 1e6}},
    "phi3": {"rope_parameters": PLAIN},
    "glm": {"rope_parameters": {**PLAIN, "partial_rotary_factor": 0.5}},
    "gpt_neox": {"rope_parameters": {**PLAIN, "partial_rotary_factor": 0.5}},
    "olmo2": {"rope_parameters": PLAIN},
    "qwen3_vl_text": {"rope_parameters": MROPE},
    "qwen3_vl_vision": {"depth": 1, "num_heads": 2},
}


def rotate(part, state, change=None):
    """Rotated states in float64, after a change of positions, frequencies, axes, pairs and factor."""
    rotation = part.rotation
    given = {
        "positions": part.positions.double(),
        "frequencies": rotation.frequencies,
        "axes": torch.tensor(rotation.planes.axes),
        "pairs": torch.tensor(rotation.planes.pairs),
        "factor": rotation.planes.factor,
        "sign": 1,
    }
    given |= change(given) if change else {}
    angles = given["positions"][:, given["axes"]] * given["frequencies"]
    first, second = given["pairs"].T
    x, y, cos, sin = state[:, first], state[:, second], angles.cos(), given["sign"] * angles.sin()
    rotated = state.clone()
    rotated[:, first], rotated[:, second] = (
        given["factor"] * (x * cos - y * sin),
        given["factor"] * (x * sin + y * cos),
    )
    return rotated


def set_last(values, value):
    return torch.cat([values[:-1], torch.full_like(values[-1:], value)])


def raise_base(g, ratio):
    count = len(g["frequencies"])
    return {"frequencies": g["frequencies"] * ratio ** -((torch.arange(count) + 1.0).double() / count)}


# What an engine does otherwise.
CHANGES = {
    "positions + 1": lambda g: {"positions": g["positions"] + 1},
    "positions - 1": lambda g: {"positions": g["positions"] - 1},
    "positions + 1/2": lambda g: {"positions": g["positions"] + 0.5},
    "positions doubled": lambda g: {"positions": g["positions"] * 2},
    "positions halved": lambda g: {"positions": g["positions"] / 2},
    "positions backwards": lambda g: {"positions": g["positions"].flip(0)},
    "no position": lambda g: {"positions": g["positions"] * 0},
    "base + 1%": lambda g: raise_base(g, 1.01),
    "base doubled": lambda g: raise_base(g, 2.0),
    "frequencies reversed": lambda g: {"frequencies": g["frequencies"].flip(0) * 1.1},
    "frequencies shifted": lambda g: {"frequencies": g["frequencies"].roll(1) * 1.1},
    "frequencies + 1%": lambda g: {"frequencies": g["frequencies"] * 1.01},
    "frequencies in bfloat16": lambda g: {"frequencies": (g["frequencies"] * 1.02).bfloat16().double()},
    "last plane still": lambda g: {"frequencies": set_last(g["frequencies"], 0.0)},
    "last plane fast": lambda g: {"frequencies": set_last(g["frequencies"], 0.9)},
    "half of the planes": lambda g: {"frequencies": g["frequencies"] * (torch.arange(len(g["frequencies"])) % 2)},
    "opposite direction": lambda g: {"sign": -1},
    "planes mirrored": lambda g: {"pairs": g["pairs"].flip(1)},
    "pairs exchanged": lambda g: {"pairs": torch.stack([g["pairs"][:, 0], g["pairs"][:, 1].roll(1)], 1)},
    "factor 1.02": lambda g: {"factor": 1.02 * g["factor"]},
    "factor 0.995": lambda g: {"factor": 0.995 * g["factor"]},
    "offset and base": lambda g: raise_base(g, 1.5) | {"positions": g["positions"] + 1},
    "direction and offset": lambda g: {"sign": -1, "positions": g["positions"] + 1},
    "pairs and base": lambda g: raise_base(g, 2.0) | {"pairs": g["pairs"].flip(1)},
    "factor and frequencies": lambda g: {"factor": 1.01 * g["factor"], "frequencies": g["frequencies"] * 1.01},
}
# And what it makes of the results: (right results, states that are not rotated).
RESULTS = {
    "not rotated": lambda y, x: x,
    "channels + 0.01": lambda y, x: y + 0.01,
    "channels in float8": lambda y, x: y.to(torch.float8_e4m3fn).double() + 1e-3,
    "not a number": lambda y, x: y * torch.nan,
    "zeros": lambda y, x: y * 0,
}


@pytest.fixture(scope="module")
def vectors(tmp_path_factory):
    configs = {name: {"model_type": name, **SIZES, **fields} for name, fields in FAMILIES.items()}
    return write_vectors(tmp_path_factory.mktemp("families"), configs)


def check(file, answers, tensors):
    save_file({name: value.contiguous() for name, value in tensors.items()}, answers)
    return main(["rope", str(file), "--check", str(answers)])


FEW = ("positions doubled", "base + 1%", "pairs exchanged", "not a number")
FAST = (*itertools.product(("llama",), FEW), *itertools.product(("glm", "qwen3_vl_text"), FEW[::2]))


@pytest.mark.parametrize("name, fault", slow_except(FAST, itertools.product(FAMILIES, (*CHANGES, *RESULTS))))
def test_a_wrong_value_is_never_called_right(vectors, tmp_path, name, fault):
    """A fault of every value, of the 2% that it changes most, and of 2% of the tokens, drawn from those it changes."""
    (part,) = read_vectors(vectors[name])
    state = part.states["query"]
    right = rotate(part, state)
    wrong = RESULTS[fault](right, state) if fault in RESULTS else rotate(part, state, CHANGES[fault])
    size = (wrong - right).nan_to_num(1.0).abs()
    most = size >= size.flatten().topk(size.numel() // 50).values[-1]
    changed = (size.amax(1) >= size.max() / 2).nonzero().flatten()
    drawn = torch.randperm(len(changed), generator=torch.Generator().manual_seed(0))[: len(size) // 50 + 1]
    tokens = torch.zeros(len(size), 1, dtype=torch.bool).index_fill(0, changed[drawn], True)
    for values in (wrong, torch.where(most, wrong, right), torch.where(tokens, wrong, right)):
        assert check(vectors[name], tmp_path / "mine.safetensors", {"rotated_query": values.float()}) == 1


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_rounding_is_right(vectors, tmp_path, name, dtype):
    """Also of tables, products and sums in that type, and kept in float32 afterwards."""
    (part,) = read_vectors(vectors[name])
    tensors = {f"rotated_{name}": rotate(part, state).to(dtype) for name, state in part.states.items()}
    angles = part.positions.double()[:, list(part.rotation.planes.axes)] * part.rotation.frequencies
    cos, sin = ((part.rotation.planes.factor * turn).to(dtype) for turn in (angles.cos(), angles.sin()))
    first, second = torch.tensor(part.rotation.planes.pairs).T
    query = part.states["query"].to(dtype)
    rotated, x, y = query.clone(), query[:, first], query[:, second]
    rotated[:, first], rotated[:, second] = x * cos - y * sin, x * sin + y * cos
    for results in (tensors, {"cos": cos, "sin": sin, "rotated_query": rotated}):
        assert check(vectors[name], tmp_path / "mine.safetensors", results) == 0
        stored = {key: value.float() for key, value in results.items()}
        assert check(vectors[name], tmp_path / "mine.safetensors", stored) == 0


def test_one_value_off_the_grid_of_a_type_leaves_no_rounding(vectors, tmp_path, capsys):
    (part,) = read_vectors(vectors["llama"])
    rotated = rotate(part, part.states["query"]).bfloat16().float()
    assert check(vectors["llama"], tmp_path / "mine.safetensors", {"rotated_query": rotated}) == 0
    assert "results rounded to bfloat16" in capsys.readouterr().out
    rotated[5, 3] += 1e-4
    assert check(vectors["llama"], tmp_path / "mine.safetensors", {"rotated_query": rotated}) == 1


def test_a_fault_of_most_values_is_named_as_a_part(vectors, tmp_path, capsys):
    (part,) = read_vectors(vectors["llama"])
    rotated = rotate(part, part.states["query"], CHANGES["positions + 1"])
    rotated[5, 3] += 0.1
    assert check(vectors["llama"], tmp_path / "mine.safetensors", {"rotated_query": rotated.float()}) == 1
    printed = capsys.readouterr().out
    assert "positions one too large" in printed and "which explains only 99." in printed, printed


def test_cos_and_sin_in_two_layouts_are_wrong(vectors, tmp_path):
    with safe_open(vectors["llama"], "pt") as file:
        cos, sin = (file.get_tensor(f"rotary_emb/{name}") for name in ("cos", "sin"))
    other = cos.chunk(2, 1)[0].repeat_interleave(2, 1)
    assert check(vectors["llama"], tmp_path / "mine.safetensors", {"cos": other, "sin": sin}) == 1
