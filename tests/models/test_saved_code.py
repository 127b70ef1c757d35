"""Code that is written with checkpoints: all that they need, side by side, in every way of saving and sending."""

import ast
import json

import pytest
import torch
from fresh_process import run_code
from hub_client import WRITE
from huggingface_hub import HfApi
from patching_cases import build as build_plain
from patching_cases import randomize
from rope_cases import build as build_rotating

import hf_liere
from hf_liere import RotaryPatchConfig, patch
from hf_liere.models.patched.modeling_patched import rotary_config
from hf_liere.models.transformer.video_processing_liere import LieREVideoProcessor


PRETRAINED = RotaryPatchConfig(position_encoding="rope_mixed", rotary_init="pretrained")
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
# Of each kind the Auto class that restores it.
KINDS = {
    "image": "AutoModelForImageClassification",
    "bin": "AutoModelForImageClassification",
    "masked": "AutoModelForMaskedImageModeling",
    "backbone": "AutoBackbone",
    "video": "AutoModelForVideoClassification",
    "tokens": "AutoModelForTokenClassification",
    "clip_vision": "AutoModel",
    "llama": "AutoModelForCausalLM",
    "dinov3": "AutoModel",
}
RELOAD = """
import json, sys, torch, transformers
from transformers.dynamic_module_utils import get_class_from_dynamic_module

def outputs(model, inputs):
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.clone()
    with torch.no_grad():
        first = next(iter(model.eval()(**inputs).values()))
        return first if isinstance(first, torch.Tensor) else first[0]

for kind, auto in json.load(open("kinds.json")).items():
    inputs, expected = torch.load(kind + ".pt")
    found = []
    for path in (kind, kind + "-again"):
        config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=True)
        # AutoBackbone does not load remote code.
        named = get_class_from_dynamic_module(config.auto_map[auto], path)
        loader = named if auto == "AutoBackbone" else getattr(transformers, auto)
        options = {} if auto == "AutoBackbone" else {"trust_remote_code": True}
        model = loader.from_pretrained(path, **options)
        found += [type(model) is named, torch.equal(outputs(model, inputs), expected)]
        model.save_pretrained(kind + "-again")
    print(kind, type(model).__module__.partition(".")[0], *found)
"""


def make(kind, tiny, tiny_video):
    pixels = {"pixel_values": torch.randn(2, 3, 16, 16)}
    if kind in ("clip_vision", "llama", "dinov3"):
        model, inputs = build_plain(kind) if kind == "clip_vision" else build_rotating(kind)
        config = RotaryPatchConfig(position_encoding="liere", block_size=8) if kind == "clip_vision" else PRETRAINED
        return patch(model, config), inputs
    if kind == "video":
        model = hf_liere.LieREVideoForVideoClassification(tiny_video())
        return model, {"pixel_values": torch.randn(2, 4, 3, 8, 8)}
    if kind == "tokens":
        model = hf_liere.LieRETokensForTokenClassification(
            hf_liere.LieRETokensConfig(**SIZES, feature_size=2, num_axes=3)
        )
        return model, {"inputs_embeds": torch.randn(2, 5, 2), "positions": torch.rand(5, 3)}
    if kind == "masked":
        masks = torch.arange(16).expand(2, 16) % 3 == 0
        return hf_liere.LieREViTForMaskedImageModeling(tiny()), pixels | {"bool_masked_pos": masks}
    model = hf_liere.LieREViTBackbone if kind == "backbone" else hf_liere.LieREViTForImageClassification
    return model(tiny()), pixels


def test_saved_models_load_and_are_saved_again_without_the_package(tiny, tiny_video, tmp_path, monkeypatch):
    """The same bits, of every kind of model."""
    # Code that comes with a checkpoint has no kernels for CPUs, which round otherwise.
    monkeypatch.setenv("HF_LIERE_CPU_KERNELS", "0")
    for kind in KINDS:
        model, inputs = make(kind, tiny, tiny_video)
        randomize(model.eval())
        with torch.no_grad():
            first = next(iter(model(**inputs).values()))
        torch.save((inputs, first if isinstance(first, torch.Tensor) else first[0]), tmp_path / f"{kind}.pt")
        model.save_pretrained(tmp_path / kind)
        if kind == "bin":
            torch.save(model.state_dict(), tmp_path / "bin" / "pytorch_model.bin")
            (tmp_path / "bin" / "model.safetensors").unlink()
            loaded = type(model).from_pretrained(tmp_path / "bin")
            assert all(torch.equal(a, b) for a, b in zip(loaded.state_dict().values(), model.state_dict().values()))
    (tmp_path / "kinds.json").write_text(json.dumps(KINDS))
    assert run_code(RELOAD, tmp_path, package=False) == [
        f"{kind} transformers_modules True True True True" for kind in KINDS
    ]


def assert_code_is_complete(folder):
    """Every import of a sibling leads to a file, and every module of `auto_map` is one."""
    files = {path.stem: path for path in folder.glob("*.py")}
    configs = [json.loads(path.read_text()) for path in folder.glob("*config.json")]
    references = {place for config in configs for place in config.get("auto_map", {}).values()}
    assert references and {place.partition(".")[0] for place in references} <= files.keys()
    for path in files.values():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level:
                assert node.level == 1 and node.module in files, f"{path.name}: from {'.' * node.level}{node.module}"


@pytest.mark.parametrize("kind", ["image", "tokens", "patched", "video_processor"])
def test_configurations_and_processors_are_sent_with_their_code(kind, tiny, hub, tmp_path):
    clip = rotary_config(type(build_plain("clip_vision")[0].config))
    saved = {
        "image": tiny,
        "tokens": hf_liere.LieRETokensConfig,
        "patched": clip,
        "video_processor": LieREVideoProcessor,
    }[kind]()
    saved.save_pretrained(tmp_path / "saved")
    assert_code_is_complete(tmp_path / "saved")
    saved.push_to_hub("tester/pushed", token=WRITE)
    saved.save_pretrained(tmp_path / "sent", push_to_hub=True, repo_id="tester/sent", token=WRITE)
    names = {path.name for path in (tmp_path / "saved").iterdir()}
    for name in ("pushed", "sent"):
        api = HfApi(endpoint=hub.url, token=WRITE)
        api.snapshot_download(f"tester/{name}", local_dir=tmp_path / name / "downloaded")
        assert_code_is_complete(tmp_path / name / "downloaded")
        assert names <= {path.name for path in (tmp_path / name / "downloaded").iterdir()}


def test_references_to_a_repository_are_not_saved(tiny, tmp_path):
    """A downloaded configuration names its repository before its modules; foreign code stays where it is."""
    foreign = "me/mine--words.Words"
    config = tiny(auto_map={"AutoModel": "me/mine--modeling_liere.LieREViTModel", "AutoTokenizer": foreign})
    config.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())["auto_map"]
    assert saved["AutoModel"] == "modeling_liere.LieREViTModel" and saved["AutoTokenizer"] == foreign
    assert (tmp_path / "modeling_liere.py").is_file() and not (tmp_path / "words.py").exists()
