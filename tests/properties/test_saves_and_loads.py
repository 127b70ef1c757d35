"""Models are restored as they were, to the bit: from state dicts, shards, Auto classes, half types and adapters."""

import io

import pytest
import torch
from fresh_process import run_warm
from model_cases import MODELS, PATCHED, SAVED, SLOW, build, make, run
from patching_cases import realign, same_bits
from slow_cases import slow_except
from transformers.models.auto import modeling_auto

from hf_liere import load_rotary, save_rotary, unpatch


def over(names, every=1):
    """Names that take seconds are slow; where `every` is more than one, so are the others but for every such."""
    fast = [name for name in names if name not in SLOW][::every]
    return pytest.mark.parametrize("name", slow_except(fast, names))


@over(MODELS)
def test_state_dicts_restore_another_start(name):
    """Strictly, from a file of tensors alone, also after the other model has computed its own rotations."""
    model, inputs, expected = build(name)
    other = make(name, seed=1)
    assert not same_bits(run(name, other, inputs), expected) or not list(model.parameters())
    torch.save(model.state_dict(), file := io.BytesIO())
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert same_bits(run(name, other, inputs), expected)


def restore(kind, folder, **options):
    """A model of which no weight is missing, unexpected or of another shape."""
    model, report = kind.from_pretrained(folder, output_loading_info=True, **options)
    assert not any(report.values()), report
    return realign(model.eval())


def auto_classes(model):
    """Those that know the class of a model by its configuration."""
    autos = [auto for auto in vars(modeling_auto).values() if isinstance(auto, type) and hasattr(auto, "from_config")]
    # `AutoBackbone` reads no folders.
    autos.remove(modeling_auto.AutoBackbone)
    return [
        auto
        for auto in autos
        if auto._model_mapping and auto._model_mapping.get(type(model.config), None) is type(model)
    ]


def fields(folder):
    """Lines of the configuration, but for the type, which transformers writes to parts of a loaded one."""
    return [line for line in (folder / "config.json").read_text().splitlines() if '"dtype"' not in line]


@over(SAVED)
def test_folders_restore_models(name, tmp_path):
    """In shards by the model's class, and saved again as one file by every Auto class that knows it."""
    model, inputs, expected = build(name)
    model.save_pretrained(tmp_path / "shards", max_shard_size="10KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    loaded = restore(type(model), tmp_path / "shards")
    assert same_bits(run(name, loaded, inputs), expected)
    loaded.save_pretrained(tmp_path / "whole")
    # Moshi fills in its parts when it is loaded.
    assert "moshi" in name or fields(tmp_path / "shards") == fields(tmp_path / "whole")
    found = auto_classes(model)
    assert found or MODELS[name].config or name.startswith("backbone")
    for auto in found:
        again = restore(auto, tmp_path / "whole")
        assert type(again) is type(model) and same_bits(run(name, again, inputs), expected)


def rounded(inputs):
    """Pixels and features in bfloat16."""
    is_rounded = {key: isinstance(x, torch.Tensor) and x.is_floating_point() for key, x in inputs.items()}
    return {key: x.bfloat16() if is_rounded[key] and key != "positions" else x for key, x in inputs.items()}


@over(SAVED, 2)
def test_half_types_round_all_but_rotations(name, tmp_path):
    """As asked for, and again as the folder of the rounded model says."""
    if "deepseek_v2," in name:
        pytest.skip("the complex rotations of DeepSeek-V2 are not there in bfloat16")
    model, inputs, _ = build(name)
    model.save_pretrained(tmp_path / "float32")
    half = restore(type(model), tmp_path / "float32", dtype=torch.bfloat16)
    # DeepSeek's routers stay as well, and OLMo makes its decays in float32.
    kept = {
        "rotary_encoding",
        *(model._keep_in_fp32_modules_strict or ()),
        *(["A_log"] if "olmo_hybrid" in name else []),
    }
    for key, value in model.named_parameters():
        wanted, found = value if any(part in key for part in kept) else value.bfloat16(), half.get_parameter(key)
        assert found.dtype == wanted.dtype and torch.equal(found, wanted), key
    half.save_pretrained(tmp_path / "bfloat16")
    again = restore(type(model), tmp_path / "bfloat16", dtype="auto")
    inputs = rounded(inputs)
    assert same_bits(run(name, again, inputs), run(name, half, inputs))


@over(PATCHED)
def test_adapters_restore_rotations(name, tmp_path):
    """On a base of the same weights."""
    model, inputs, expected = build(name)
    save_rotary(model, tmp_path)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 60_000
    assert same_bits(run(name, load_rotary(unpatch(make(name)), tmp_path), inputs), expected)


SECOND = """
import sys
import torch, transformers
from hf_liere import load_rotary, unpatch
from model_cases import make, run
from patching_cases import realign, same_bits

for folder, auto, name in zip(*[iter(sys.argv[1:])] * 3):
    inputs, expected = torch.load(f"{folder}/run.pt")
    auto = getattr(transformers, auto, None)
    model = realign(auto.from_pretrained(folder).eval()) if auto else load_rotary(unpatch(make(name)), folder)
    print(name, same_bits(run(name, model, inputs), expected))
"""
KINDS = ["image liere", "video liere", "points comrope_ld", "patched vit", "rotating llama, planes"]


def restore_in_second_process(names, folder):
    """Whole models by the first Auto class that knows them, and adapters where there is none."""
    arguments = []
    for index, name in enumerate(names):
        place, (model, inputs, expected) = folder / str(index), build(name)
        auto = auto_classes(model) if MODELS[name].is_saved else []
        model.save_pretrained(place) if auto else save_rotary(model, place)
        torch.save((inputs, expected), place / "run.pt")
        arguments += [place, auto[0].__name__ if auto else "", name]
    assert run_warm("-c", SECOND, *arguments).stdout.splitlines() == [f"{name} True" for name in names]


def test_a_second_process_restores_the_same(tmp_path):
    restore_in_second_process(KINDS, tmp_path)


@pytest.mark.slow
def test_a_second_process_restores_everything(tmp_path):
    known = [name for name in SAVED if name in PATCHED or auto_classes(make(name))]
    restore_in_second_process([*known, *(name for name in PATCHED if name not in known)], tmp_path)
