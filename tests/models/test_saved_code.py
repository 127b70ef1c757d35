"""Code that is written with checkpoints: all that they need, in one file, in every way of saving and sending."""

import ast
import importlib.util
import json
import sys

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
from hf_liere.bundles import make_code
from hf_liere.models.encoding.kinds import ENCODINGS
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


FROM_THE_HUB = """
import torch, transformers
model = transformers.{auto}.from_pretrained("tester/{kind}", trust_remote_code=True)
if {processor}:
    transformers.AutoVideoProcessor.from_pretrained("tester/{kind}", trust_remote_code=True)
print(type(model).__module__.partition(".")[0])
"""


@pytest.mark.parametrize("kind, warnings", slow_except(("image",), [("image", 1), ("video", 2), ("clip_vision", 1)]))
def test_one_file_is_one_warning_to_a_reader_without_the_package(kind, warnings, tiny, tiny_video, hub, tmp_path):
    """transformers asks to check each file of code that it downloads; a processor has its own."""
    model, _ = make(kind, tiny, tiny_video)
    model.push_to_hub(f"tester/{kind}", token=WRITE)
    if kind == "video":
        LieREVideoProcessor().push_to_hub(f"tester/{kind}", token=WRITE)
    code = WITHOUT_PACKAGE + FROM_THE_HUB.format(auto=KINDS[kind], kind=kind, processor=kind == "video")
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


def load_file(path, name):
    """A file of code as a module, beside the package and other such files."""
    specification = importlib.util.spec_from_file_location(name, path)
    sys.modules[name] = module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


@pytest.mark.parametrize("kind, files", [("image", 1), ("video", 2), ("clip_vision", 1), ("llama", 1)])
def test_a_checkpoint_has_one_file_of_code(kind, files, tiny, tiny_video, tmp_path):
    """Of what its configuration needs, in an order to read."""
    model, _ = make(kind, tiny, tiny_video)
    model.save_pretrained(tmp_path)
    if kind == "video":
        LieREVideoProcessor().save_pretrained(tmp_path)
    code = sorted(tmp_path.glob("*.py"))
    assert len(code) == files and all(len(path.read_text().splitlines()) <= 6000 for path in code)
    assert {place.partition(".")[0] for place in model.config.auto_map.values()} == {code[0].stem}
    text = code[0].read_text()
    assert text.startswith(f"# Code of hf_liere {hf_liere.__version__}; `pip install .`")
    for unused in ("CirculantString", "AxialRoPE", "ComRoPE"):
        assert f"class {unused}" not in text
    rooms = [line.split("/")[2] for line in text.splitlines() if line.startswith("# From hf_liere/")]
    rotations = [room for room in rooms if room in ("rotation", "encoding", "transformer")]
    last = len(rotations) - rotations[::-1].index("rotation") if "rotation" in rotations else 0
    assert kind == "llama" or "rotation" not in rotations[last:] and set(rotations[last:]) >= {"encoding"}


SIZES_OF_BLOCKS = {"comrope_ap": 4, "circulant_string": 6}
ROTARY = {name: {"position_encoding": name, "block_size": SIZES_OF_BLOCKS.get(name)} for name in ENCODINGS}
OTHERS = {
    "none": {"position_encoding": "none"},
    "absolute": {"position_encoding": "absolute"},
    "quaternions": {"position_encoding": "liere", "block_size": 4},
    "axial start": {"position_encoding": "liere", "rotary_init": "axial"},
    "golden gate start": {"position_encoding": "cayley_string", "rotary_init": "golden_gate"},
}


@pytest.mark.parametrize("case", [*ROTARY, *OTHERS])
def test_the_file_computes_what_the_package_computes(case, tiny, tmp_path, monkeypatch):
    """Logits and gradients, bit for bit, where the package and the files of other encodings are imported as well."""
    monkeypatch.setenv("HF_LIERE_CPU_KERNELS", "0")
    fields = {**ROTARY, **OTHERS}[case]
    model = hf_liere.LieREViTForImageClassification(tiny(**fields))
    randomize(model)
    model.save_pretrained(tmp_path)
    module = load_file(tmp_path / "modeling_liere.py", f"of_{case.replace(' ', '_')}")
    copy = module.LieREViTForImageClassification.from_pretrained(tmp_path)
    assert type(copy) is module.LieREViTForImageClassification
    inputs = {"pixel_values": torch.randn(2, 3, 16, 16), "labels": torch.tensor([0, 1])}
    for one in (model.train(), copy.train()):
        torch.manual_seed(0)
        one(**inputs).loss.backward()
    found, expected = (
        [parameter.grad for _, parameter in sorted(one.named_parameters()) if parameter.requires_grad]
        for one in (copy, model)
    )
    assert len(found) == len(expected) and all(map(torch.equal, found, expected))
    with torch.no_grad():
        assert torch.equal(copy.eval()(**inputs).logits, model.eval()(**inputs).logits)


@pytest.mark.parametrize("family", ["clip_vision", "llama"])
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_every_patch_has_code(family, encoding):
    """In which no name means two things, and nothing is missing that a module imports."""
    plain = type((build_plain if family == "clip_vision" else build_rotating)(family)[0].config)
    patch = {"position_encoding": encoding, "rotary_init": "zeros" if ENCODINGS[encoding].learned else None}
    if family == "llama":
        if ENCODINGS[encoding].pretrained not in ("planes", "blocks"):
            pytest.skip("Cannot start at RoPE.")
        patch["rotary_init"] = "pretrained"
    config = rotary_config(plain)(rotary_patch=patch)
    code = make_code("modeling_patched", [kind.__name__ for kind in type(config).__mro__], config.parts())
    assert "\nfrom ." not in code
    compile(code, "modeling_patched.py", "exec")


def test_the_file_names_what_it_lacks(tiny, tmp_path):
    tiny(position_encoding="liere").save_pretrained(tmp_path)
    module = load_file(tmp_path / "modeling_liere.py", "of_liere_alone")
    with pytest.raises(
        Exception, match="'comrope_ld'; .*accepted are none, absolute, liere, rope_mixed in the code of .*hf_liere"
    ):
        module.LieREViTConfig(position_encoding="comrope_ld")
    with pytest.raises(Exception, match="'golden_gate'; accepted are uniform, .* in the code .*hf_liere"):
        module.LieREViTConfig(position_encoding="liere", rotary_init="golden_gate")
    patched = rotary_config(type(build_rotating("llama")[0].config))(rotary_patch=PRETRAINED.to_dict())
    patched.save_pretrained(tmp_path)
    module = load_file(tmp_path / "modeling_patched.py", "of_planes_alone")
    with pytest.raises(ValueError, match="'liere'; accepted are rope_mixed in the code .*hf_liere"):
        module.RotaryPatchConfig(position_encoding="liere", rotary_init="pretrained")


def test_a_name_for_two_things_is_refused(tmp_path, monkeypatch):
    from hf_liere import bundles

    (tmp_path / "a.py").write_text('"""A."""\nimport math\nX = math.pi\n')
    (tmp_path / "b.py").write_text('"""B."""\nfrom .a import X\nY = X\n')
    (tmp_path / "c.py").write_text('"""C."""\nfrom .b import Y\nX = 2 * Y\n')
    monkeypatch.setattr(
        bundles, "read_modules", lambda: {name: bundles._read(tmp_path / f"{name}.py") for name in "abc"}
    )
    monkeypatch.setattr(bundles, "PACKAGE", tmp_path)
    assert make_code("b", []).endswith("# From hf_liere/b.py:\n# B.\n\nY = X\n")
    with pytest.raises(ValueError, match="a.py and c.py go to one file, and X is a name of something in both"):
        make_code("c", [])


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
    assert {path.name for path in tmp_path.glob("*.py")} == {"modeling_patched.py", "words.py", "positions.py"}


def test_references_to_many_files_become_one(tiny, tmp_path):
    """A checkpoint that an earlier release has saved names its modules."""
    earlier = {"AutoConfig": "configuration_liere.LieREViTConfig", "AutoModel": "modeling_liere.LieREViTModel"}
    tiny(auto_map=earlier).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())["auto_map"]
    assert {place.partition(".")[0] for place in saved.values()} == {"modeling_liere"}
    assert saved["AutoConfig"] == "modeling_liere.LieREViTConfig"
