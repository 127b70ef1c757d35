"""Exported models give the logits of the model they were made from, in ONNX Runtime and as loaded torch programs."""

import json

import onnx
import onnxruntime
import pytest
import torch
import transformers
from encoding_cases import IMAGE_CASES, perturb
from fresh_process import run_warm
from patching_cases import CASES, build, randomize
from rope_cases import CASES as ROPE_CASES
from rope_cases import TEXT
from rope_cases import build as build_rope
from slow_cases import slow_except

import hf_liere
from hf_liere.tools import export
from hf_liere.tools.cli import main
from hf_liere.tools.export import ExportError, export_model, run_exported


# float32 sums in another order; the bound for ONNX Runtime is 1e-4.
TOLERANCE = 1e-5
ANY_SIZE = [
    ("comrope_ld", 8, ".onnx"),
    pytest.param("comrope_ld", 8, ".pt2", marks=pytest.mark.slow),
    pytest.param("liere_product", 24, ".onnx", marks=pytest.mark.slow),
    *(
        pytest.param(encoding, block_size, suffix, marks=pytest.mark.slow)
        for encoding, block_size in (("none", None), *IMAGE_CASES)
        for suffix in (".onnx", ".pt2")
        if encoding not in ("comrope_ld", "liere")
    ),
]


def assert_same(model, path, *pixel_values):
    model.eval()
    for pixels in pixel_values:
        with torch.no_grad():
            expected = model(pixels)
        found = run_exported(path, pixels)
        assert found
        for name, tensor in found.items():
            torch.testing.assert_close(tensor, expected[name], rtol=0, atol=TOLERANCE)


def shape_of(path):
    (pixels,) = onnxruntime.InferenceSession(path).get_inputs()
    assert pixels.name == "pixel_values"
    return pixels.shape


@pytest.mark.parametrize("encoding, block_size, suffix", ANY_SIZE)
def test_images_of_any_size(tiny, tmp_path, encoding, block_size, suffix):
    fields = {"rotate_values": True} if encoding == "liere_product" else {}
    config = tiny(position_encoding=encoding, block_size=block_size, num_hidden_layers=1, **fields)
    model = perturb(hf_liere.LieREViTForImageClassification(config))
    path = export_model(model, tmp_path / "folder" / f"model{suffix}")
    pixels = [torch.randn(1, 3, 16, 16), torch.randn(3, 3, 8, 40), torch.randn(2, 3, 32, 12)]
    assert_same(model, path, *pixels)
    for size in ((19, 19), (16, 18)):
        # "Guard failed" or "cannot be reshaped".
        with pytest.raises(Exception, match=r"% 4 == 0|Input shape:.*requested shape"):
            run_exported(path, torch.randn(1, 3, *size))
    if suffix == ".onnx":
        assert shape_of(path) == ["batch", 3, "height", "width"]
        onnx.checker.check_model(path)


@pytest.mark.parametrize("suffix", [pytest.param(".onnx", marks=pytest.mark.slow), ".pt2"])
@pytest.mark.parametrize("encoding, block_size", [("liere", 5), pytest.param("absolute", None, marks=pytest.mark.slow)])
def test_images_of_one_size(tiny, tmp_path, encoding, block_size, suffix):
    config = tiny(position_encoding=encoding, block_size=block_size, num_hidden_layers=1)
    model = hf_liere.LieREViTForImageClassification(config)
    path = export_model(model, tmp_path / f"model{suffix}", image_size=(24, 8))
    assert_same(model, path, torch.randn(1, 3, 24, 8), torch.randn(3, 3, 24, 8))
    if suffix == ".onnx":
        assert shape_of(path) == ["batch", 3, 24, 8]
    with pytest.raises(Exception, match=r"(?i)dimension|guard|size"):
        run_exported(path, torch.randn(1, 3, 24, 24))


@pytest.mark.slow
@pytest.mark.parametrize(
    "suffix, coordinates",
    [(".onnx", "centred_grid"), (".pt2", "train_grid")],
)
def test_liere_of_any_size(tiny, tmp_path, suffix, coordinates):
    """The exponential itself is in the graph, in float64."""
    config = tiny(position_encoding="liere", num_hidden_layers=1, coordinates=coordinates)
    model = hf_liere.LieREViTForImageClassification(config)
    path = export_model(model, tmp_path / f"model{suffix}", dynamic_size=True)
    assert_same(model, path, torch.randn(1, 3, 16, 16), torch.randn(2, 3, 8, 24))


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["comrope_ld", "liere"])
@pytest.mark.parametrize("suffix", [".onnx", ".pt2"])
def test_videos(tiny_video, tmp_path, encoding, suffix):
    config = tiny_video(position_encoding=encoding, block_size=4, num_hidden_layers=1)
    model = hf_liere.LieREVideoForVideoClassification(config)
    path = export_model(model, tmp_path / f"model{suffix}")
    assert_same(model, path, torch.randn(1, 4, 3, 8, 8), torch.randn(2, 4, 3, 8, 8))
    if encoding == "comrope_ld":
        assert_same(model, path, torch.randn(2, 6, 3, 16, 12))
        with pytest.raises(Exception, match=r"% 2 == 0|Input shape:.*requested shape"):
            run_exported(path, torch.randn(1, 5, 3, 8, 8))
        assert suffix == ".pt2" or shape_of(path) == ["batch", "frames", 3, "height", "width"]
    else:
        longer = export_model(model, tmp_path / f"longer{suffix}", num_frames=6)
        assert_same(model, longer, torch.randn(1, 6, 3, 8, 8))


@pytest.mark.slow
def test_outputs_have_their_names(tiny, tmp_path):
    base = hf_liere.LieREViTModel(tiny(position_encoding="rope_mixed", num_hidden_layers=1))
    path = export_model(base, tmp_path / "base.pt2")
    assert set(run_exported(path, torch.randn(1, 3, 16, 16))) == {"last_hidden_state", "pooler_output"}
    assert_same(base, path, torch.randn(2, 3, 16, 24))
    backbone = hf_liere.LieREViTBackbone(tiny(position_encoding="rope_mixed", out_features=["stage1", "stage2"]))
    path = export_model(backbone, tmp_path / "backbone.pt2")
    pixels = torch.randn(2, 3, 8, 12)
    found = run_exported(path, pixels)
    for index, features in enumerate(backbone.eval()(pixels).feature_maps):
        torch.testing.assert_close(found[f"feature_maps_{index}"], features.detach(), rtol=0, atol=TOLERANCE)


def test_perturbed_model_is_exported_without_and_left_as_it_is(tiny, tmp_path):
    """A model in training, with perturbation, dropout and gradients, loses none of them."""
    config = tiny(position_encoding="comrope_ld", position_perturbation=1.0, hidden_dropout_prob=0.5)
    model = hf_liere.LieREViTForImageClassification(config).train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    path = export_model(model, tmp_path / "model.pt2")
    assert model.training and all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    model(torch.randn(2, 3, 16, 16)).logits.sum().backward()
    assert all(parameter.grad.abs().sum() > 0 for _, parameter in model.rotary_parameters())
    assert_same(model, path, torch.randn(2, 3, 16, 16))


@pytest.mark.slow
def test_configuration_is_in_the_file(tiny, tmp_path):
    labels = {0: "cat", 1: "dog", 2: "owl"}
    model = hf_liere.LieREViTForImageClassification(
        tiny(position_encoding="none", id2label=labels, num_hidden_layers=1)
    )
    path = export_model(model, tmp_path / "model.onnx")
    metadata = onnxruntime.InferenceSession(path).get_modelmeta().custom_metadata_map
    assert json.loads(metadata["config.json"])["id2label"] == {"0": "cat", "1": "dog", "2": "owl"}
    files = {"config.json": ""}
    torch.export.load(export_model(model, tmp_path / "model.pt2"), extra_files=files)
    assert json.loads(files["config.json"]) == json.loads(metadata["config.json"])


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".pt2", ".onnx"])
def test_one_patch_on_an_axis(tiny, tiny_video, tmp_path, suffix, capsys):
    """Such a model is exported for inputs of its size: sizes that vary have two patches on every axis."""
    models = {
        "image": (hf_liere.LieREViTForImageClassification, tiny(position_encoding="rope_mixed", image_size=(16, 4))),
        "clip": (hf_liere.LieREVideoForVideoClassification, tiny_video(position_encoding="comrope_ld", num_frames=2)),
    }
    for name, (kind, config) in models.items():
        assert 1 in config.train_grid
        kind(config).save_pretrained(tmp_path / name)
        assert main(["export", str(tmp_path / name), str(tmp_path / f"{name}{suffix}")]) == 0
        assert "within" in capsys.readouterr().out


@pytest.mark.parametrize(
    "fields, options, message",
    [
        ({"image_size": (16, 4)}, {"dynamic_size": True}, r"dynamic_size=True: .*two patches.*have \(4, 1\)"),
        ({}, {"image_size": 18}, r"\(18, 18\) is not divisible into patches of \(4, 4\)"),
        ({}, {"num_frames": 4}, "num_frames=4: inputs of this model are images"),
        ({"position_encoding": "absolute"}, {"dynamic_size": True}, "learned table"),
        ({"position_encoding": "none"}, {"dynamic_size": True, "image_size": 16}, "image_size=16"),
    ],
)
def test_what_cannot_be_exported(tiny, tmp_path, fields, options, message):
    model = hf_liere.LieREViTForImageClassification(tiny(**fields))
    with pytest.raises(ExportError, match=message):
        export_model(model, tmp_path / "model.onnx", **options)
    assert not list(tmp_path.iterdir())


def test_names_and_attention_that_cannot_be_exported(tiny, tmp_path):
    model = hf_liere.LieREViTForImageClassification(tiny(position_encoding="none"))
    with pytest.raises(ExportError, match="accepted are names that end in .onnx or .pt2"):
        export_model(model, tmp_path / "model.pt")
    with pytest.raises(ExportError, match="opset=20 is for ONNX files"):
        export_model(model, tmp_path / "model.pt2", opset=20)
    with pytest.raises(ExportError, match="Linear: accepted are"):
        export_model(torch.nn.Linear(2, 2), tmp_path / "model.pt2")
    model.set_attn_implementation("flex_attention")
    with pytest.raises(ExportError, match="'flex_attention' cannot be exported; accepted are sdpa"):
        export_model(model, tmp_path / "model.onnx")
    (tmp_path / "there.onnx").touch()
    with pytest.raises(FileExistsError):
        export_model(model, tmp_path / "there.onnx")


def test_command(tiny, tmp_path, capsys):
    model = hf_liere.LieREViTForImageClassification(tiny(position_encoding="liere", num_hidden_layers=1))
    model.save_pretrained(tmp_path / "model")
    command = ["export", str(tmp_path / "model")]
    assert main([*command, str(tmp_path / "model.onnx"), "--image_size", "8", "24", "--opset", "18"]) == 0
    assert "LieREViTForImageClassification with outputs logits, within " in capsys.readouterr().out
    assert_same(model, tmp_path / "model.onnx", torch.randn(1, 3, 8, 24))
    assert onnx.load(tmp_path / "model.onnx").opset_import[0].version == 18
    assert main([*command, str(tmp_path / "model.onnx")]) == 1 and "exists" in capsys.readouterr().err
    assert main([*command, str(tmp_path / "other.onnx"), "--dynamic_size", "maybe"]) == 1
    assert "maybe: accepted are true and false" in capsys.readouterr().err


def test_an_export_that_fails_leaves_nothing(tiny, tmp_path, monkeypatch, capsys):
    model = hf_liere.LieREViTForImageClassification(tiny(position_encoding="rope_mixed", num_hidden_layers=1))
    model.save_pretrained(tmp_path / "model")
    # Whatever the outputs are, they are further from the model's than this.
    monkeypatch.setattr(export, "TOLERANCE", -1.0)
    assert main(["export", str(tmp_path / "model"), str(tmp_path / "new" / "model.pt2")]) == 1
    assert "model.pt2 was not written" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize(
    "encoding, dtype, suffix",
    slow_except(
        {("rope_mixed", torch.float16, ".pt2")},
        [
            ("rope_mixed", torch.float16, ".pt2"),
            ("liere", torch.float16, ".onnx"),
            ("comrope_ld", torch.bfloat16, ".pt2"),
            ("rope_mixed", torch.bfloat16, ".onnx"),
        ],
    ),
)
def test_half_types(tiny, tmp_path, encoding, dtype, suffix):
    """The file is as far from the model in float64 as a few roundings of its type; of bfloat16, ONNX has float32."""
    model = perturb(hf_liere.LieREViTForImageClassification(tiny(position_encoding=encoding, num_hidden_layers=1)))
    model.save_pretrained(tmp_path / "model")
    half = hf_liere.LieREViTForImageClassification.from_pretrained(tmp_path / "model", dtype=dtype)
    path = export_model(half, tmp_path / f"model{suffix}")
    pixels = torch.randn(3, 3, 16, 16).to(dtype)
    found = run_exported(path, pixels)["logits"]
    with torch.no_grad():
        expected = half.double()(pixels.double()).logits
    assert found.dtype == (torch.float32 if (dtype, suffix) == (torch.bfloat16, ".onnx") else dtype)
    tolerance = 1e-5 if found.dtype == torch.float32 else 8 * torch.finfo(dtype).eps * expected.abs().max().item()
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["siglip", "dinov3", "clip_vision"])
def test_no_file_is_left_that_onnx_runtime_cannot_run(name, tmp_path):
    model = patched(name, "rope_mixed" if name == "dinov3" else "comrope_ld", None if name == "dinov3" else 8)
    path = export_model(model.bfloat16(), tmp_path / "half.onnx")
    onnx.checker.check_model(path, full_check=True)
    with pytest.raises(ExportError, match=r"double.onnx was not written: it does not run for .*NOT_IMPLEMENTED"):
        export_model(model.double(), tmp_path / "double.onnx")
    assert [file.name for file in tmp_path.iterdir()] == ["half.onnx"]


def test_graphs_that_hold_for_their_example_alone(tmp_path):
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 32, "patch_size": 8}
    config = transformers.Dinov2WithRegistersConfig(**sizes, num_register_tokens=3, mlp_ratio=1)
    model = hf_liere.patch(
        transformers.Dinov2WithRegistersModel(config).eval(),
        hf_liere.RotaryPatchConfig(position_encoding="comrope_ld", rotary_init="normal"),
    )
    # A later release may resize its table by sizes that a graph follows: then it is right at every size.
    try:
        program = export.export_program(model, dynamic_size=True).module()
    except ExportError as error:
        assert "does not run for inputs of (1, 3, 32, 32)" in str(error)
    else:
        pixels = torch.randn(2, 3, 64, 16)
        with torch.no_grad():
            torch.testing.assert_close(program(pixels)["last_hidden_state"], model(pixels).last_hidden_state)
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**TEXT, "rope_parameters": rope}))
    with pytest.raises(ExportError, match="depend on values that a graph does not know, as frequencies of rope_type"):
        export_model(llama, tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())


def patched(name, encoding, block_size, **fields):
    model, _ = (build if name in CASES else build_rope)(name)
    if encoding != "plain":
        start = {} if name in CASES else {"rotary_init": "pretrained"}
        config = hf_liere.RotaryPatchConfig(position_encoding=encoding, block_size=block_size, **start, **fields)
        randomize(hf_liere.patch(model, config))
    return model


# The rows of the table in docs/deploy.md, (model, encoding, block size): with another engine for each way out.
IMAGES = [
    *(
        (name, *kind)
        for name in ("vit", "dinov2", "clip_vision", "siglip")
        for kind in (("comrope_ld", 8), ("liere", 4))
    ),
    ("vit", "rope_mixed", None),
    ("vit", "cayley_string", None),
    ("vit", "liere_product", None),
    ("dinov3", "rope_mixed", None),
    ("dinov3", "comrope_ld", 4),
    ("dinov3", "liere", 4),
    ("dinov3", "plain", None),
]
# One row for each kind of file; the others are slow tests.
FAST = {
    ("vit", "comrope_ld", 8, ".pt2", False),
    ("vit", "liere", 4, ".onnx", False),
}


@pytest.mark.parametrize(
    "name, encoding, block_size, suffix, any_size",
    slow_except(
        FAST,
        [
            (*row, suffix, any_size)
            for row in IMAGES
            for suffix in (".onnx", ".pt2")
            for any_size in (False, True)
            if not (any_size and row[1] == "liere")
        ],
    ),
)
def test_patched_models_of_images(name, encoding, block_size, suffix, any_size, tmp_path):
    model = patched(name, encoding, block_size)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    path = export_model(model, tmp_path / f"model{suffix}", dynamic_size=any_size or None)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    # Models of transformers resize their tables for other sizes than the trained one.
    sizes = [(24, 12), (16, 32), (16, 16)] if any_size else [(16, 16)]
    for batch, size in enumerate(sizes, start=2):
        pixels = torch.randn(batch, 3, *size)
        with torch.no_grad():
            expected = model(pixel_values=pixels)
        for output, tensor in run_exported(path, pixels).items():
            torch.testing.assert_close(tensor, expected[output], rtol=0, atol=TOLERANCE)
    if suffix == ".onnx":
        onnx.checker.check_model(path)
        assert shape_of(path) == ["batch", 3, *(["height", "width"] if any_size else [16, 16])]
        assert not {"If", "Loop", "Einsum"} & {node.op_type for node in onnx.load(path).graph.node}


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".onnx", ".pt2"])
@pytest.mark.parametrize("encoding", ["liere", "rope_mixed", "comrope_ld", "plain"])
def test_patched_language_model_with_its_cache(encoding, suffix, tmp_path):
    """Tokens are generated by the exported file alone, prompt and cache of any length."""
    model = patched("llama", encoding, None if encoding in ("rope_mixed", "plain") else 4)
    path = export_model(model, tmp_path / f"model{suffix}")
    prompt = torch.randint(3, 60, (2, 7))
    expected = model.generate(prompt, max_new_tokens=5, do_sample=False, pad_token_id=0, eos_token_id=None)
    states = {f"past.{layer}.{kind}": torch.zeros(2, 2, 0, 16) for layer in range(2) for kind in ("key", "value")}
    tokens, given = prompt, prompt
    for _ in range(5):
        found = run_exported(path, given, states)
        with torch.no_grad():
            torch.testing.assert_close(found["logits"][:, -1], model(tokens).logits[:, -1], rtol=0, atol=TOLERANCE)
        given = found["logits"][:, -1:].argmax(-1)
        tokens = torch.cat([tokens, given], dim=1)
        states = {name: found[name.replace("past", "present")] for name in states}
    assert torch.equal(tokens, expected)
    if suffix == ".onnx":
        assert not {"If", "Loop", "Einsum"} & {node.op_type for node in onnx.load(path).graph.node}


@pytest.mark.slow
def test_command_exports_patched_checkpoints(tmp_path, capsys):
    for name, encoding, block_size in (("vit", "comrope_ld", 8), ("llama", "rope_mixed", None)):
        patched(name, encoding, block_size).save_pretrained(tmp_path / name)
        assert main(["export", str(tmp_path / name), str(tmp_path / f"{name}.onnx")]) == 0
        assert "with outputs logits, within" in capsys.readouterr().out
    assert main(["export", str(tmp_path / "llama"), str(tmp_path / "other.onnx"), "--image_size", "32"]) == 1
    assert "the inputs of RotaryLlamaForCausalLM are tokens, of any number" in capsys.readouterr().err


def test_models_of_transformers_that_cannot_be_exported(tmp_path):
    with pytest.raises(ExportError, match="CLIPModel: accepted are .* its part, such as model.vision_model"):
        export_model(patched("clip", "comrope_ld", 8), tmp_path / "model.onnx")
    with pytest.raises(
        ExportError, match="dynamic_size=True: the rotations of liere in a model with RoPE are constants"
    ):
        export_model(patched("dinov3", "liere", 4), tmp_path / "model.onnx", dynamic_size=True)
    with pytest.raises(ExportError, match="MistralForCausalLM keeps DynamicSlidingWindowLayer in its cache"):
        export_model(build_rope("mistral")[0], tmp_path / "model.onnx")
    with pytest.raises(ExportError, match="BertModel: accepted are"):
        export_model(
            transformers.BertModel(transformers.BertConfig(hidden_size=16, num_attention_heads=2, num_hidden_layers=1)),
            tmp_path / "model.onnx",
        )
    with pytest.raises(ValueError, match="stands between a projection and the"):
        export_model(patched("qwen3", "comrope_ld", 4), tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir()) and "mistral" in ROPE_CASES


@pytest.mark.slow
def test_operators_that_cannot_be_written_are_refused(tiny, tmp_path):
    model = hf_liere.LieREViTForImageClassification(tiny(position_encoding="none", num_hidden_layers=1))
    newest = onnx.defs.onnx_opset_version()
    for opset in (3, newest + 1):
        with pytest.raises(ExportError, match=f"opset={opset}: accepted are 17 to {newest}"):
            export_model(model, tmp_path / "model.onnx", opset=opset)
    try:
        export_model(model, tmp_path / "model.onnx", opset=newest)
    except ExportError as error:
        assert f"opset={newest}: PyTorch's exporter writes" in str(error) and not list(tmp_path.iterdir())
    else:
        assert onnx.load(tmp_path / "model.onnx").opset_import[0].version == newest


@pytest.mark.slow
def test_file_needs_neither_package_nor_transformers(tiny, tmp_path):
    """A process that has only PyTorch, or only ONNX Runtime, runs what was written."""
    model = hf_liere.LieREViTForImageClassification(tiny(position_encoding="rope_mixed", num_hidden_layers=1)).eval()
    pixels = torch.ones(2, 3, 8, 12)
    expected = model(pixels).logits.tolist()
    runs = {
        ".pt2": "import torch; y = torch.export.load(path).module()(torch.ones(2, 3, 8, 12))['logits'].tolist()",
        ".onnx": "import numpy, onnxruntime; x = numpy.ones((2, 3, 8, 12), 'float32'); "
        "y = onnxruntime.InferenceSession(path).run(['logits'], {'pixel_values': x})[0].tolist()",
    }
    for suffix, run in runs.items():
        path = export_model(model, tmp_path / f"model{suffix}")
        code = f"path = {str(path)!r}; {run}; import sys; "
        code += "assert not {'hf_liere', 'transformers'} & set(sys.modules); print(y)"
        output = run_warm("-c", code, cwd="/")
        torch.testing.assert_close(
            torch.tensor(json.loads(output.stdout)), torch.tensor(expected), rtol=0, atol=TOLERANCE
        )
