"""Code that is written with checkpoints: the plain model or a stub, in every way of saving and sending."""

import ast
import json

import pytest
import torch
from fresh_process import WITHOUT_PACKAGE, run_code
from hub_client import WRITE, run_as_user
from huggingface_hub import HfApi
from patching_cases import build as build_plain
from patching_cases import randomize
from rope_cases import build as build_rotating
from slow_cases import slow_except

import hf_liere
from hf_liere import RotaryPatchConfig, patch
from hf_liere.auto import load_checkpoint
from hf_liere.encoding.kinds import ENCODINGS
from hf_liere.patching.modeling_patched import rotary_config
from hf_liere.plain import model_code
from hf_liere.transformer.video_processing_liere import LieREVideoProcessor


PRETRAINED = RotaryPatchConfig(position_encoding="rope_mixed", rotary_init="pretrained")
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
# Of each kind the Auto class that restores it.
PLAIN_KINDS = {
    "image": "AutoModelForImageClassification",
    "bin": "AutoModelForImageClassification",
    "masked": "AutoModelForMaskedImageModeling",
    "backbone": "AutoBackbone",
    "video": "AutoModelForVideoClassification",
    "tokens": "AutoModelForTokenClassification",
}
# These need the package.
STUBS = {"folded": "AutoModelForImageClassification", "llama": "AutoModelForCausalLM", "dinov3": "AutoModel"}
RELOAD = """
import json, sys, torch, transformers
from transformers.dynamic_module_utils import get_class_from_dynamic_module

def outputs(model, inputs):
    with torch.no_grad():
        first = next(iter(model.eval()(**inputs).values()))
        return first if isinstance(first, torch.Tensor) else first[0]

for kind, auto in json.load(open("kinds.json")).items():
    inputs, expected = torch.load(kind + ".pt")
    found = []
    for path in (kind, kind + "-again"):
        try:
            config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=True)
        except ImportError as error:
            found = [error]
            break
        # AutoBackbone does not load remote code.
        named = get_class_from_dynamic_module(config.auto_map[auto], path)
        loader = named if auto == "AutoBackbone" else getattr(transformers, auto)
        options = {} if auto == "AutoBackbone" else {"trust_remote_code": True}
        model = loader.from_pretrained(path, **options)
        difference = (outputs(model, inputs) - expected).abs().max() / expected.abs().max()
        found += [type(model) is named, difference.item() < 2e-6]
        model.save_pretrained(kind + "-again")
    else:
        print(kind, type(model).__module__.partition(".")[0], *found)
        continue
    print(kind, *found)
"""


def make(kind, tiny, tiny_video):
    pixels = {"pixel_values": torch.randn(2, 3, 16, 16)}
    if kind in ("clip_vision", "llama", "dinov3"):
        model, inputs = build_plain(kind) if kind == "clip_vision" else build_rotating(kind)
        config = RotaryPatchConfig(position_encoding="liere", block_size=8) if kind == "clip_vision" else PRETRAINED
        return patch(model, config), inputs
    if kind == "folded":
        return hf_liere.LieREViTForImageClassification(tiny()).eval().fold_rotations(), pixels
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


def save_kinds(kinds, tiny, tiny_video, folder):
    for kind in kinds:
        model, inputs = make(kind, tiny, tiny_video)
        randomize(model.eval())
        with torch.no_grad():
            first = next(iter(model(**inputs).values()))
        torch.save((inputs, first if isinstance(first, torch.Tensor) else first[0]), folder / f"{kind}.pt")
        model.save_pretrained(folder / kind)
        if kind == "bin":
            torch.save(model.state_dict(), folder / "bin" / "pytorch_model.bin")
            (folder / "bin" / "model.safetensors").unlink()
            loaded = type(model).from_pretrained(folder / "bin")
            assert all(torch.equal(a, b) for a, b in zip(loaded.state_dict().values(), model.state_dict().values()))
    (folder / "kinds.json").write_text(json.dumps(kinds))


def test_saved_models_load_and_are_saved_again_without_the_package(tiny, tiny_video, tmp_path):
    """Or say what they need."""
    kinds = PLAIN_KINDS | STUBS
    save_kinds(kinds, tiny, tiny_video, tmp_path)
    found = dict(line.split(" ", 1) for line in run_code(RELOAD, tmp_path, package=False) if line.split()[0] in kinds)
    sentence = "This model needs the package hf_liere: run `pip install .` in a clone of it."
    plain = "transformers_modules True True True True"
    assert found == {kind: plain if kind in PLAIN_KINDS else sentence for kind in kinds}
    for kind in ("image", "video", "tokens"):
        before, after = (load_checkpoint(tmp_path / folder)[0] for folder in (kind, f"{kind}-again"))
        assert type(before) is type(after)
        assert all(torch.equal(after.state_dict()[name], value) for name, value in before.state_dict().items())


def test_stubs_import_the_package_where_it_is(tiny, tiny_video, tmp_path):
    """Even if nobody has imported it: with its kernels, and saved again as by the package."""
    save_kinds(STUBS, tiny, tiny_video, tmp_path)
    assert run_code(RELOAD, tmp_path, package=None) == [f"{kind} hf_liere True True True True" for kind in STUBS]
    for kind in STUBS:
        for file in (tmp_path / kind).glob("*.py"):
            assert file.read_text() == (tmp_path / f"{kind}-again" / file.name).read_text()
            assert len(file.read_text().splitlines()) <= 6


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


FROM_THE_HUB = """
import torch, transformers
model = transformers.{auto}.from_pretrained("tester/{kind}", trust_remote_code=True)
if {processor}:
    transformers.AutoVideoProcessor.from_pretrained("tester/{kind}", trust_remote_code=True)
print(type(model).__module__.partition(".")[0])
"""


@pytest.mark.parametrize("kind, warnings", slow_except(("image",), [("image", 1), ("video", 2)]))
def test_one_file_is_one_warning_to_a_reader_without_the_package(kind, warnings, tiny, tiny_video, hub, tmp_path):
    """transformers asks to check each file of code that it downloads; a processor has its own."""
    model, _ = make(kind, tiny, tiny_video)
    model.push_to_hub(f"tester/{kind}", token=WRITE)
    if kind == "video":
        LieREVideoProcessor().push_to_hub(f"tester/{kind}", token=WRITE)
    code = WITHOUT_PACKAGE + FROM_THE_HUB.format(auto=PLAIN_KINDS[kind], kind=kind, processor=kind == "video")
    printed, logged = run_as_user(["-c", code], hub, tmp_path, token=None)
    assert printed.split() == ["transformers_modules"]
    assert logged.count("do not contain any added malicious code") == warnings


def test_references_to_a_repository_are_not_saved(tiny, tmp_path):
    """A downloaded configuration names its repository before its modules; foreign code stays where it is."""
    foreign = "me/mine--words.Words"
    config = tiny(auto_map={"AutoModel": "me/mine--modeling_liere.LieREViTModel", "AutoTokenizer": foreign})
    config.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())["auto_map"]
    assert saved["AutoModel"] == "modeling_liere.LieREViTModel" and saved["AutoTokenizer"] == foreign
    assert (tmp_path / "modeling_liere.py").is_file() and not (tmp_path / "words.py").exists()


@pytest.mark.parametrize("encoding", [*ENCODINGS, "none", "absolute"])
def test_all_checkpoints_have_the_same_code(encoding, tiny, tiny_video, tmp_path):
    """Byte for byte; models of what a user registered have theirs."""
    size = SIZES_OF_BLOCKS.get(encoding)
    tiny(position_encoding=encoding, block_size=size).save_pretrained(tmp_path)
    if not ENCODINGS.files(encoding):
        assert (tmp_path / "modeling_liere.py").read_text() == model_code()
        assert model_code().count("\n") <= 1240


SIZES_OF_BLOCKS = {"comrope_ap": 4, "circulant_string": 6}


@pytest.mark.parametrize("kind", ["of the user", "a link"])
def test_a_save_replaces_no_file_that_is_not_its_own(kind, tiny, tmp_path):
    """Before it writes anything."""
    elsewhere, folder = tmp_path / "elsewhere.py", tmp_path / "project"
    folder.mkdir()
    elsewhere.write_text("mine")
    own = folder / "modeling_liere.py"
    own.write_text("mine") if kind == "of the user" else own.symlink_to(elsewhere)
    model = hf_liere.LieREViTModel(tiny())
    for saved in (model, model.config):
        with pytest.raises(FileExistsError, match=f"{own} is .*, so nothing was saved"):
            saved.save_pretrained(folder)
    assert own.read_text() == elsewhere.read_text() == "mine" and list(folder.iterdir()) == [own]


def test_a_save_removes_the_files_of_the_save_that_it_replaces(tiny, tmp_path):
    """Those of checkpoints with many files of code as well, and no others."""
    written = {
        "configuration_liere.py": "from .layers import L\n",
        "modeling_liere.py": "def f():\n    from .layers import L\n    from .words import W\n",
        "layers.py": "L = 1",
        "words.py": "W = 1",
        "positions.py": "mine",
        "config.json": '{"auto_map": {"AutoConfig": "configuration_liere.C", "AutoModel": "me/x--modeling_liere.M"}}',
        "tokenizer_config.json": '{"auto_map": {"AutoTokenizer": ["words.Words", null]}}',
    }
    for name, text in written.items():
        (tmp_path / name).write_text(text.replace("me/x--", ""))
    hf_liere.LieREViTModel(tiny()).save_pretrained(tmp_path)
    assert {path.name for path in tmp_path.glob("*.py")} == {"modeling_liere.py", "words.py", "positions.py"}
    assert "class LieREViTModel" in (tmp_path / "modeling_liere.py").read_text()
    patch(build_plain("clip_vision")[0], RotaryPatchConfig()).save_pretrained(tmp_path)
    names = {"modeling_liere.py", "modeling_patched.py", "words.py", "positions.py"}
    assert {path.name for path in tmp_path.glob("*.py")} == names
    # A model with RoPE has a stub, and no plain model beside it.
    patch(build_rotating("llama")[0], PRETRAINED).save_pretrained(tmp_path)
    assert {path.name for path in tmp_path.glob("*.py")} == names - {"modeling_liere.py"}


def test_references_to_many_files_become_one(tiny, tmp_path):
    """A checkpoint that an earlier release has saved names its modules."""
    earlier = {"AutoConfig": "configuration_liere.LieREViTConfig", "AutoModel": "modeling_liere.LieREViTModel"}
    tiny(auto_map=earlier).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())["auto_map"]
    assert {place.partition(".")[0] for place in saved.values()} == {"modeling_liere"}
    assert saved["AutoConfig"] == "modeling_liere.LieREViTConfig"
