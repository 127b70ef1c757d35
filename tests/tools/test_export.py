"""`hf-liere export`, what it writes beside the graph, and what it leaves alone; outputs: properties/test_exports.py."""

import json

import onnx
import onnxruntime
import pytest
import torch
import transformers
from exported import TOLERANCE, check_exported, patched
from fresh_process import run_warm

import hf_liere
from hf_liere.tools import export
from hf_liere.tools.cli import main
from hf_liere.tools.export import ExportError, export_model, run_exported


def test_perturbed_model_is_exported_without_and_left_as_it_is(tiny, tmp_path):
    """A model in training, with perturbation, dropout and gradients, loses none of them."""
    config = tiny(position_encoding="comrope_ld", position_perturbation=1.0, hidden_dropout_prob=0.5)
    model = hf_liere.LieREViTForImageClassification(config).train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    path = export_model(model, tmp_path / "model.pt2")
    assert model.training and all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    model(torch.randn(2, 3, 16, 16)).logits.sum().backward()
    assert all(parameter.grad.abs().sum() > 0 for _, parameter in model.rotary_parameters())
    check_exported(path, model, (2, 3, 16, 16))


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


def test_images_have_the_size_that_the_saved_processor_makes(tmp_path):
    """It need not be that of the configuration: DINOv2 has 518 pixels there, and its processor makes 224."""
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1, "image_size": 28, "patch_size": 7}
    transformers.Dinov2Model(transformers.Dinov2Config(**sizes)).save_pretrained(tmp_path)
    transformers.BitImageProcessor(crop_size={"height": 14, "width": 21}).save_pretrained(tmp_path)
    assert main(["export", str(tmp_path), str(tmp_path / "model.pt2")]) == 0
    assert run_exported(tmp_path / "model.pt2", torch.randn(2, 3, 14, 21))["last_hidden_state"].shape[1] == 2 * 3 + 1


def test_command(tiny, tmp_path, capsys):
    model = hf_liere.LieREViTForImageClassification(tiny(position_encoding="liere", num_hidden_layers=1))
    model.save_pretrained(tmp_path / "model")
    command = ["export", str(tmp_path / "model")]
    assert main([*command, str(tmp_path / "model.onnx"), "--image_size", "8", "24", "--opset", "18"]) == 0
    assert "LieREViTForImageClassification with outputs logits, within " in capsys.readouterr().out
    check_exported(tmp_path / "model.onnx", model.eval(), (1, 3, 8, 24))
    assert onnx.load(tmp_path / "model.onnx").opset_import[0].version == 18
    assert main([*command, str(tmp_path / "model.onnx")]) == 1 and "exists" in capsys.readouterr().err


def test_an_export_that_fails_leaves_nothing(tiny, tmp_path, monkeypatch, capsys):
    model = hf_liere.LieREViTForImageClassification(tiny(position_encoding="rope_mixed", num_hidden_layers=1))
    model.save_pretrained(tmp_path / "model")
    # Whatever the outputs are, they are further from the model's than this.
    monkeypatch.setattr(export, "TOLERANCE", -1.0)
    assert main(["export", str(tmp_path / "model"), str(tmp_path / "new" / "model.pt2")]) == 1
    assert "model.pt2 was not written" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["siglip", "dinov3", "clip_vision"])
def test_no_file_is_left_that_onnx_runtime_cannot_run(name, tmp_path):
    model = patched(name, *(("rope_mixed",) if name == "dinov3" else ("comrope_ld", 8)))
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


@pytest.mark.slow
def test_command_exports_patched_checkpoints(tmp_path, capsys):
    for name, encoding, block_size in (("vit", "comrope_ld", 8), ("llama", "rope_mixed", None)):
        patched(name, encoding, block_size).save_pretrained(tmp_path / name)
        assert main(["export", str(tmp_path / name), str(tmp_path / f"{name}.onnx")]) == 0
        assert "with outputs logits, within" in capsys.readouterr().out
    assert main(["export", str(tmp_path / "llama"), str(tmp_path / "other.onnx"), "--image_size", "32"]) == 1
    assert "the inputs of RotaryLlamaForCausalLM are tokens, of any number" in capsys.readouterr().err


@pytest.mark.slow
def test_operators_that_cannot_be_written_are_refused(tiny, tmp_path):
    model = hf_liere.LieREViTForImageClassification(tiny(position_encoding="none", num_hidden_layers=1))
    newest = onnx.defs.onnx_opset_version()
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
