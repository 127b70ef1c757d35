"""Conversion against live models, across processes, of malformed files, and of models that are patched instead."""

import json
import re

import pytest
import timm
import torch
import transformers
from checkout import ROOT
from conversion_cases import SMALL_TIMM, Code, comrope_weights, converts, images, liere_weights, rope_vit, without
from fresh_process import run_code
from hub_client import client
from safetensors.torch import save_file

import hf_liere
from hf_liere.errors import InputError
from hf_liere.storage.client import HubError
from hf_liere.storage.saved_model import SavedModel
from hf_liere.tools.cli import main
from hf_liere.tools.conversion.checkpoints import convert_state_dict, require_options
from hf_liere.tools.conversion.reading import read_checkpoint
from hf_liere.tools.convert import convert_checkpoint


# Two layers in float32, on logits of the order of one.
TOLERANCE = {"rtol": 1e-4, "atol": 2e-5}


@pytest.mark.parametrize("kind", ["rope", "rope_ape", "rope_mixed", "rope_mixed_ape"])
@torch.no_grad()
def test_rope_vit_live_at_two_resolutions(kind):
    theirs, tensors = rope_vit(kind)
    model = convert_state_dict(tensors, "naver", num_attention_heads=2, image_size=16).model()
    # timm resizes a table with antialiasing, rope-vit without.
    for size in ((16, 16), (24, 20))[: 1 if "ape" in kind else 2]:
        pixels = images(2, 3, *size)
        expected = theirs(pixels)
        assert expected.abs().max() > 0.1
        torch.testing.assert_close(model(pixels).logits, expected, **TOLERANCE)


@pytest.mark.parametrize(
    "architecture, encoding",
    [
        ("rope_axial_ape_deit_small_patch16_LS", "axial_rope"),
        ("deit_small_patch16_LS", "absolute"),
    ],
)
def test_a_configuration_tells_what_the_shapes_do_not(architecture, encoding):
    _, tensors = rope_vit("rope_ape")
    config = {"architecture": architecture, "model_args": {"num_heads": 4}}
    config["pretrained_cfg"] = {"input_size": [3, 8, 32]}
    converted = convert_state_dict(tensors, "naver", config).config
    assert (converted.position_encoding, converted.num_attention_heads, converted.image_size) == (encoding, 4, [8, 32])


VISION = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
VISION |= {"image_size": 16, "patch_size": 4}
PATCHED_MODELS = {
    "ViTForImageClassification": ("vit", {}),
    "ViTModel": ("vit", {}),
    "DeiTForImageClassificationWithTeacher": ("vit", {}),
    "Dinov2ForImageClassification": ("vit", {}),
    "CLIPVisionModel": ("clip", {}),
    "CLIPModel": ("clip", {"text_config": {"num_hidden_layers": 1}}),
    "SiglipVisionModel": ("clip", {}),
    "DINOv3ViTModel": ("dinov3", {}),
    "vit_small_patch16_224": ("timm", {}),
    "vit_small_patch16_rope_mixed_224": ("timm", {}),
}


@pytest.mark.parametrize("name", PATCHED_MODELS)
def test_models_that_are_patched_are_sent_there(name, tmp_path, monkeypatch, capsys):
    """From their files and with their kind, with a call that fits them, and the page that shows it."""
    monkeypatch.chdir(tmp_path)
    kind, parts = PATCHED_MODELS[name]
    if kind == "timm":
        model = timm.create_model(name, **SMALL_TIMM)
        (tmp_path / "theirs").mkdir()
        save_file(model.state_dict(), "theirs/model.safetensors")
    else:
        model_class = getattr(transformers, name)
        fields = {**parts, "vision_config": VISION} if parts else VISION
        model = model_class(model_class.config_class(**fields))
        model.save_pretrained("theirs")
    capsys.readouterr()
    refused = []
    for more in ([], ["--source", kind]):
        assert main(["convert", "theirs", "out", *more]) == 1
        refused.append(capsys.readouterr().err)
    assert refused[0] == refused[1] and refused[0].count("\n") == 1 and "is not converted but patched" in refused[0]
    call, page = re.search(r"call (hf_liere\.patch\(.*\)\)), see (\S+)\.$", refused[0].strip()).groups()
    assert "RotaryPatchConfig" in (ROOT / page).read_text(encoding="utf-8")
    assert not (tmp_path / "out").exists()
    if "rope_mixed" not in name:
        eval(call, {"hf_liere": hf_liere, "model": getattr(model, "vision_model", model)})
        assert any("rotary" in parameter for parameter, _ in model.named_parameters())


def test_wrappers_of_training_programs(tmp_path):
    weights = liere_weights()
    expected = convert_state_dict(weights).model()(images(2, 3, 16, 16)).logits
    lightning = {"state_dict": {f"model.{name}": value for name, value in weights.items()}, "epoch": 3}
    torch.save(lightning, tmp_path / "last.ckpt")
    compiled = {f"module._orig_mod.{name}": value for name, value in weights.items()}
    torch.save({"model": compiled}, tmp_path / "compiled.pth")
    for name in ("last.ckpt", "compiled.pth"):
        tensors, source_config = read_checkpoint(tmp_path / name)
        assert source_config is None
        assert torch.equal(convert_state_dict(tensors).model()(images(2, 3, 16, 16)).logits, expected)


def test_only_one_set_of_generators_is_executed_officially():
    weights = liere_weights()
    pixels = images(2, 3, 16, 16)
    official = convert_state_dict(weights)
    paper = convert_state_dict(weights, layer_generators="paper")
    assert official.config.share_layers and not paper.config.share_layers
    assert not torch.allclose(official.model()(pixels).logits, paper.model()(pixels).logits, atol=1e-3)
    key = "position_encoder.generator_raw_params"
    weights[key] = weights[key][:, :1].repeat(1, 2, 1, 1, 1)
    repeated = convert_state_dict(weights, layer_generators="paper")
    torch.testing.assert_close(repeated.model()(pixels).logits, official.model()(pixels).logits, **TOLERANCE)


def test_heads_narrower_than_the_encoder_of_positions():
    """hidden_size / heads = 32 rotates half of each 64-channel head, as officially."""
    narrow = liere_weights(width=64)
    key = "position_encoder.generator_raw_params"
    narrow[key] = narrow[key][:, :, :8]
    generators = convert_state_dict(narrow).state_dict["liere.rotary_encoding.generators"]
    assert generators.shape == (2, 1, 2, 8, 28) and generators[:, :, :, 4:].count_nonzero() == 0


LOAD = """
import json, sys, torch
from transformers import AutoModelForImageClassification, AutoModelForVideoClassification
for name in {names}:
    auto = AutoModelForVideoClassification if name == "volume" else AutoModelForImageClassification
    model = auto.from_pretrained(name, **{remote})
    with torch.no_grad():
        torch.save(model(torch.load(name + ".pixels.pt")).logits, name + ".logits.pt")
"""


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """Directories of converted checkpoints, with pixels and the logits of the conversion itself."""
    directory = tmp_path_factory.mktemp("converted")
    sources = {
        "image": (liere_weights(), {}),
        "volume": (
            liere_weights(axes=3, size=24, patches=2 * 2 * 3, patch=2 * 4 * 4 * 3),
            {"patch_size": [2, 4, 4], "image_size": [4, 8, 12]},
        ),
        "table": (comrope_weights(), {"cls_position": 0.25}),
        "naver": (rope_vit("rope_mixed_ape")[1], {"num_attention_heads": 2}),
    }
    for name, (weights, options) in sources.items():
        save_file({key: value.contiguous() for key, value in weights.items()}, directory / f"{name}.safetensors")
        conversion = convert_checkpoint(directory / f"{name}.safetensors", directory / name, **options)
        pixels = images(2, 4, 3, 8, 12) if name == "volume" else images(2, 3, 24, 16)
        torch.save(pixels, directory / f"{name}.pixels.pt")
        with torch.no_grad():
            torch.save(conversion.model()(pixels).logits, directory / f"{name}.expected.pt")
    return directory, list(sources)


@pytest.mark.slow
@pytest.mark.parametrize("package", [True, False])
def test_logits_survive_a_fresh_process(converted, package):
    directory, names = converted
    run_code(LOAD.format(names=names, remote={} if package else {"trust_remote_code": True}), directory, package)
    # Code that comes with a checkpoint has no kernels for CPUs: float32 sums in another order.
    tolerance = 0 if package else 1e-5
    for name in names:
        logits, expected = (torch.load(directory / f"{name}.{kind}.pt") for kind in ("logits", "expected"))
        torch.testing.assert_close(logits, expected, rtol=tolerance, atol=tolerance)


def test_directory_is_complete(converted):
    directory, _ = converted
    image = directory / "image"
    processor = json.loads((image / "preprocessor_config.json").read_text())
    assert processor["image_processor_type"] == "ViTImageProcessor" and processor["size"] == {"height": 16, "width": 16}
    assert json.loads((directory / "volume" / "video_preprocessor_config.json").read_text())["size"]["width"] == 12
    card = (image / "README.md").read_text()
    assert "library_name: transformers" in card and "image.safetensors" in card and "SHA-256" in card
    assert "first layer in every layer" in card and str(directory) not in card
    # That of the template: nothing is claimed of weights that nobody has evaluated, and nothing of where they lie.
    assert "**Not evaluated.**" in card and "Not measured." in card and "pipeline_tag: image-classification" in card
    assert "license:" not in card and "Licence and terms are those of the source" in card
    assert SavedModel(image).digest in card and "ViTForImageClassification" in card
    assert [path for path in directory.iterdir() if path.name.startswith(".")] == []


def test_pipeline_of_a_converted_checkpoint(converted):
    from PIL import Image

    classify = transformers.pipeline("image-classification", model=str(converted[0] / "image"))
    assert len(classify(Image.new("RGB", (20, 20)))) == 3


def test_trainer_fine_tunes_a_converted_checkpoint(converted, tmp_path):
    model = transformers.AutoModelForImageClassification.from_pretrained(converted[0] / "table")
    before = model.liere.rotary_encoding.generators.detach().clone()
    dataset = [{"pixel_values": images(3, 16, 16), "labels": index % 3} for index in range(8)]
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), max_steps=2, report_to=[], use_cpu=True, save_strategy="no", learning_rate=1e-3
    )
    result = transformers.Trainer(model=model, args=arguments, train_dataset=dataset).train()
    assert result.training_loss > 0 and not torch.equal(before, model.liere.rotary_encoding.generators)


def test_processor_keeps_the_statistics_of_the_source(tmp_path):
    (tmp_path / "source").mkdir()
    save_file(liere_weights(), tmp_path / "source" / "model.safetensors")
    transformers.ViTImageProcessor(image_mean=[0.1, 0.2, 0.3]).save_pretrained(tmp_path / "source")
    convert_checkpoint(tmp_path / "source", tmp_path / "kept")
    convert_checkpoint(tmp_path / "source", tmp_path / "given", image_mean=[0.4, 0.4, 0.4])
    for name, mean in (("kept", [0.1, 0.2, 0.3]), ("given", [0.4] * 3)):
        assert json.loads((tmp_path / name / "preprocessor_config.json").read_text())["image_mean"] == mean


def complete_checkpoints():
    """Checkpoints of every kind, their options, and the tensors without which they are those of another model."""
    return {
        "liere": (liere_weights(), {}, {"position_encoder.generator_raw_params"}),
        "comrope": (comrope_weights(), {}, {"vision_model.embeddings.position_embedding"}),
        "naver": (rope_vit("rope_mixed_ape")[1], {"num_attention_heads": 2}, {"freqs", "pos_embed"}),
    }


@pytest.mark.parametrize("kind", ["liere", "comrope", "naver"])
def test_no_tensor_may_be_missing_or_of_another_shape(kind):
    weights, options, optional = complete_checkpoints()[kind]
    ignored = convert_state_dict(weights, **options).ignored
    needed = [name for name in weights if name not in optional and (name not in ignored or name == "pos_embedding")]
    assert [name for name in needed if converts(without(weights, name), options)] == []
    accepted = []
    for name in needed:
        for axis in range(weights[name].ndim):
            # Channels and extents of a patch are what the kernel says.
            if weights[name].ndim == 4 and axis > 0 and "patch" in name:
                continue
            longer = torch.cat([weights[name], weights[name].narrow(axis, 0, 1)], dim=axis)
            if converts(weights | {name: longer}, options):
                accepted.append((name, tuple(longer.shape)))
    assert accepted == []


def test_damaged_and_dangerous_files_leave_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_file(liere_weights(), "whole.safetensors")
    torch.save(liere_weights(), "whole.pt")
    for suffix in ("safetensors", "pt"):
        whole = (tmp_path / f"whole.{suffix}").read_bytes()
        (tmp_path / f"cut.{suffix}").write_bytes(whole[: len(whole) // 2])
        (tmp_path / f"empty.{suffix}").write_bytes(b"")
        (tmp_path / f"text.{suffix}").write_bytes(b"no checkpoint at all, just a page of text\n" * 40)
    torch.save({"state_dict": liere_weights(), "code": Code()}, "code.ckpt")
    torch.save([1, 2], "list.pt")
    (tmp_path / "two").mkdir()
    for name in ("a.pt", "b.pt"):
        (tmp_path / "two" / name).write_bytes(b"")
    before = sorted(path.name for path in tmp_path.iterdir())
    cases = {
        **{
            f"{kind}.{suffix}": "truncated or no"
            for kind in ("cut", "empty", "text")
            for suffix in ("safetensors", "pt")
        },
        "code.ckpt": "never executed",
        "list.pt": "contains a list",
        "two": "'a.pt', 'b.pt'.*name one",
        "absent.pt": "no such file or directory",
        "some/repository": "HF_HUB_OFFLINE is set, and some/repository is not",
    }
    for name, message in cases.items():
        with pytest.raises((InputError, HubError), match=f"(?s){message}") as refused:
            convert_checkpoint(name, tmp_path / "out")
        assert "weights_only" not in str(refused.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_a_failure_while_writing_leaves_nothing_behind(tmp_path, monkeypatch):
    save_file(liere_weights(), tmp_path / "whole.safetensors")

    def full_disk(self, *args, **kwargs):
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr("pathlib.Path.write_text", full_disk)
        with pytest.raises(OSError, match="no space"):
            convert_checkpoint(tmp_path / "whole.safetensors", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["whole.safetensors"]
    (tmp_path / "out").mkdir()
    convert_checkpoint(tmp_path / "whole.safetensors", tmp_path / "out")
    with pytest.raises(FileExistsError, match="not an empty directory"):
        convert_checkpoint(tmp_path / "whole.safetensors", tmp_path / "out")


def official_repository(kind, folder):
    """Files as the authors publish them, of a small model; logits of its own code for images of 16 px, if any."""
    folder.mkdir()
    pixels = images(2, 3, 16, 16)
    if kind == "liere":
        # A checkpoint of Lightning, as LieRE's training leaves it.
        wrapped = {f"model.{name}": value for name, value in liere_weights().items()}
        torch.save({"epoch": 199, "state_dict": wrapped}, folder / "last.ckpt")
        return convert_state_dict(liere_weights()).model()(pixels).logits
    theirs, tensors = rope_vit(width=128)
    save_file(tensors, folder / "model.safetensors")
    trained = {"mean": [0.4, 0.5, 0.6], "std": [0.2, 0.3, 0.4]}
    config = {"architecture": "rope_mixed_deit_small_patch16_LS", "pretrained_cfg": trained}
    (folder / "config.json").write_text(json.dumps(config))
    return theirs(pixels)


@pytest.mark.parametrize("kind", ["liere", "naver"])
@torch.no_grad()
def test_a_repository_is_converted_as_its_authors_publish_it(hub, storage, kind, tmp_path, capsys):
    """From the local Hub by LFS and by Xet, with the command; the card says what was converted."""
    expected = official_repository(kind, tmp_path / "official")
    api = client(hub)
    api.create_repo("tester/official")
    revision = api.upload_folder(repo_id="tester/official", folder_path=tmp_path / "official").oid
    arguments = ["convert", "tester/official", str(tmp_path / "ours"), "--revision", revision]
    assert main([*arguments, "--image_size", "16"]) == 0, capsys.readouterr().err
    model = transformers.AutoModelForImageClassification.from_pretrained(tmp_path / "ours")
    torch.testing.assert_close(model(images(2, 3, 16, 16)).logits, expected, **TOLERANCE)
    card = (tmp_path / "ours" / "README.md").read_text()
    assert f"[tester/official](https://huggingface.co/tester/official) at `{revision}`" in card
    assert f"a checkpoint of kind `{kind}`" in card and "`image_size=16`" in card
    if kind == "naver":
        processor = json.loads((tmp_path / "ours" / "preprocessor_config.json").read_text())
        assert processor["image_mean"] == [0.4, 0.5, 0.6]


def test_the_page_names_repositories_with_options_that_are_taken():
    page = (ROOT / "docs" / "deploy.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(naver-ai/\S+SIZE\S+)` \| (?:`(.*)`)? ?\|", page, re.MULTILINE)
    assert len(rows) == 5
    for name, given in rows:
        options = dict(re.findall(r"--(\w+) (\w+)", given))
        # Tensor names determine the kind where there are frequencies.
        assert ("mixed" in name) == ("source" not in options) and options.pop("source", "naver") == "naver"
        require_options("naver", options)
