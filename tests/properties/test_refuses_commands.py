"""A command that cannot do what is asked says so in one line, with what was given, and writes nothing."""

import re
import shutil
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
import transformers
from conversion_cases import Code
from inspection_pages import picture
from patching_cases import CLIP_TEXT, IMAGE
from published_models import CARD, save_models, vit
from run_records import edited, written
from safetensors.torch import load_file, save_file

import hf_liere
from hf_liere.tools.cli import main


UPLOADS = ("push", "verify")
MODELS_OF_OURS = "accepted are LieREViT…"
# What is typed, in the folder of `write_files`, and what the line contains.
ROWS = [
    ("convert cut.safetensors out", "truncated"),
    ("convert absent out", "no such file or directory"),
    ("convert cut.safetensors empty/../image", "exists already"),
    ("convert absent file/out", "file/out cannot be written: "),
    ("card facts.yaml", "facts.yaml is not a readable yaml file: .*line 3, column"),
    ("card arrows-lire8", "the closest is 'arrows_liere8'"),
    ("rope lama", "the closest is 'llama'"),
    ("pull owner/name file/out", "file/out cannot be written: "),
    *((f"{command} absent owner/name", "absent does not exist; accepted: the folder of") for command in UPLOADS),
    *((f"{command} file owner/name", "file is a file; accepted: the folder of a saved mo") for command in UPLOADS),
    ("push . owner/name", "not a saved model"),
    # export
    ("export image file/model.pt2", "file/model.pt2 cannot be written: "),
    ("export image there.onnx --dynamic_size maybe", "maybe: accepted are true and false"),
    ("export image file.onnx --opset 3", "opset=3: accepted are 17 to"),
    ("export image learned.gguf", "learned.gguf: files that end in .gguf need --gguf"),
    ("export image learned.gguf --gguf a.gguf --opset 18", "opset: files that end in .gguf have no such option"),
    # upgrade
    ("upgrade absolute out", "Nothing to upgrade"),
    ("upgrade absolute out --image_size 32 --block_size 4", "please give position_encoding too"),
    ("upgrade absolute out --position_encoding comrope_ld --block_size 7", "block_size=7 must divide"),
    ("upgrade tokens out --position_encoding liere", f"model_type='liere_tokens'.*{MODELS_OF_OURS}.*hf_liere.patch"),
    ("upgrade vit out --position_encoding liere", f"model_type='vit'.*{MODELS_OF_OURS}.*hf_liere.patch"),
    ("upgrade rotary_vit out --position_encoding liere", f"model_type='rotary_vit'.*{MODELS_OF_OURS}.*hf_liere.patch"),
    # predict
    ("predict image a.png absent.png", "absent.png is not a file"),
    ("predict image a.png text.png", "text.png cannot be read: UnidentifiedImageError"),
    ("predict image notes.txt", "notes.txt: accepted are files in .bmp"),
    ("predict image empty", "is not a file, nor a folder of images"),
    ("predict image a.png --top_k 0", "--top_k 0: accepted are numbers from 1"),
    ("predict image a.png --attention looks.txt", "accepted are files in .png, .svg, .pdf"),
    ("predict image a.png --attention there.png", "there.png exists"),
    (f"predict image {'a.png ' * 33} --attention looks.png", "draws at most 32 files; 33 were given"),
    ("predict features a.png", "features contains LieREViTModel, which has no classifier; accepted are"),
    ("predict unlabelled a.png", "has a classifier without classes (num_labels=0)"),
    ("predict flexible a.png --attention looks.png", "Siglip2ForImageClassification takes images that each have"),
    ("predict resnet a.png", "ResNetForImageClassification"),
    ("predict adapter a.png", "contains rotations that do not name their model; accepted: the folder or"),
    ("predict typo a.png", "typo: no such file or directory"),
    # inspect
    ("inspect absent --output out", "absent: no such file or directory"),
    ("inspect empty --output out", "empty cannot be loaded"),
    ("inspect adapter --output out", "of that model as base (--base)"),
    ("inspect image --image text.png --output out", "text.png cannot be read"),
    ("inspect image --image half.png --output out", "half.png cannot be read: OSError"),
    ("inspect image --image absent.png --output out", "absent.png is not a file"),
    ("inspect image --image clip.npy --output out", "clip.npy has 6 frames"),
    ("inspect image --image a.png --image_sizes 18 --output out", "--image_sizes 18: it is not divisible"),
    ("inspect image --image_sizes 16 --output out", "--image_sizes [16]"),
    ("inspect image --dataset empty --output out", "has no images"),
    ("inspect image --dataset table.json --output out", "no column of images"),
    ("inspect image --dataset rows.parquet --output out", "rows.parquet 1 of"),
    ("inspect image --dataset . --max_samples 0 --output out", "--max_samples 0"),
    ("inspect image --image a.png --batch_size 0 --output out", "batches of 0"),
    ("inspect image --output file/out", "file/out cannot be written"),
    ("inspect image --output /proc/out", "/proc/out cannot be written"),
    ("inspect image --output image", "not an empty"),
    (
        "inspect image --compare video --output out",
        "takes images and LieREVideoForVideoClassification takes",
    ),
    ("inspect image --compare typo --output out", "typo: no such file or directory"),
    ("inspect image --compare_revision main --output out", "--compare_revision main needs --compare"),
    ("inspect tokens --image a.png --output out", "takes tokens with positions: leave out --image and --dataset"),
    # Names that are neither folders nor on the Hub, which may not be asked.
    *(
        (f"{command.format(name)}", f"{name}: no such file or directory")
        for name in ("empty/typo", "typo", "./owner/name", "owner/name/more")
        for command in (
            *("inspect {} --output out", "predict {} a.png", "export {} model.pt2", "convert {} out"),
            "upgrade {} out --image_size 32",
        )
    ),
    ("inspect owner/name --output out", "HF_HUB_OFFLINE is set, and owner/name is not"),
]


def plain_vit(**fields):
    return transformers.ViTForImageClassification(transformers.ViTConfig(**IMAGE, **fields))


def flexible():
    """It takes images that each have as many patches as they need."""
    vision = {name: value for name, value in IMAGE.items() if name != "image_size"} | {"num_patches": 16}
    config = transformers.Siglip2Config(vision_config=vision, text_config=CLIP_TEXT, num_labels=3)
    return transformers.Siglip2ForImageClassification(config)


def convolutions():
    config = transformers.ResNetConfig(embedding_size=4, hidden_sizes=[4], depths=[1], num_labels=3)
    return transformers.ResNetForImageClassification(config)


def write_files(folder):
    """Saved models, those of `published_models` among them, and files that are not what they seem."""
    save_models(folder)
    for name, model in {
        "absolute": vit(position_encoding="absolute"),
        "features": hf_liere.LieREViTModel(vit().config),
        "vit": plain_vit(),
        "rotary_vit": hf_liere.patch(plain_vit(), hf_liere.RotaryPatchConfig()),
        "unlabelled": plain_vit(num_labels=0),
        "flexible": flexible(),
        "resnet": convolutions(),
    }.items():
        model.save_pretrained(folder / name)
    vit().save_pretrained(folder / "shards", max_shard_size="80KB")
    (folder / "shards" / "README.md").write_text(CARD)
    transformers.Siglip2ImageProcessor(patch_size=4, max_num_patches=20).save_pretrained(folder / "flexible")
    (folder / "empty").mkdir()
    whole = Path(picture(folder / "a.png")).read_bytes()
    half = whole[: len(whole) // 2]
    for name, content in {
        "half.png": half,
        "text.png": b"no image",
        "notes.txt": b"no image",
        "there.png": b"mine",
        "table.json": b'{"a": 1}\n',
        "facts.yaml": b"title: [\nencoding: liere\n",
        "cut.safetensors": b"{",
        "file": b"",
    }.items():
        (folder / name).write_bytes(content)
    np.save(folder / "clip.npy", np.zeros((6, 10, 10), np.uint8))
    rows = {"image": [{"bytes": content, "path": None} for content in (whole, half)]}
    table = datasets.Dataset.from_dict(rows, features=datasets.Features({"image": datasets.Image()}))
    table.to_parquet(folder / "rows.parquet")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("refused")
    write_files(folder)
    return folder


def paths(folder):
    return {path: path.lstat().st_mtime_ns for path in folder.rglob("*")}


def check_refused(typed, words, folder, monkeypatch, capsys):
    """The command that is typed in a folder leaves one line with these words, besides the bars of progress."""
    monkeypatch.chdir(folder)
    command, before = typed.split(), paths(folder)
    capsys.readouterr()
    assert main(command) == 1
    captured = capsys.readouterr()
    lines = [line for line in captured.err.splitlines() if line and "%|" not in line]
    assert captured.out == "" and len(lines) == 1 and lines[0].startswith(f"hf-liere {command[0]}: "), captured.err
    assert words in lines[0] or re.search(words, lines[0]), lines[0]
    assert "weights_only" not in lines[0] and paths(folder) == before


@pytest.mark.parametrize("typed, words", ROWS, ids=[f"{typed[:40]}-{words[:30]}" for typed, words in ROWS])
def test_refuses_what_is_typed(typed, words, folder, monkeypatch, capsys):
    check_refused(typed, words, folder, monkeypatch, capsys)


def weights(change, name="model.safetensors"):
    """A function that changes the tensors of a checkpoint in a folder; `change` gets them and returns others."""

    def damage(folder):
        save_file(change(load_file(folder / name)), folder / name, metadata={"format": "pt"})

    return damage


def cut(name):
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:-100])


def nan(tensors, only=""):
    return {name: x * float("nan") if only in name and x.is_floating_point() else x for name, x in tensors.items()}


def with_code(folder):
    (folder / "model.safetensors").unlink()
    torch.save({"weight": Code()}, folder / "pytorch_model.bin")


def leak(name, moved=False):
    """The file becomes a link to a secret outside of the folder, or to itself there."""

    def damage(folder):
        outside = folder.parent / "outside"
        if moved:
            shutil.copy(folder / name, outside)
        else:
            outside.write_text("-----BEGIN OPENSSH PRIVATE KEY-----")
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(outside)

    return damage


def removed(name):
    return lambda folder: (folder / name).unlink()


def folder_instead(folder):
    removed("model.safetensors")(folder)
    (folder / "model.safetensors").mkdir()


COMMANDS = {
    "export": "export damaged out.pt2",
    "inspect": "inspect damaged --output out",
    "push": "push damaged owner/name",
    "verify": "verify damaged owner/name",
}
TRUNCATED = "truncated or no checkpoint"
MEMORY = "not enough memory for what the sizes in config.json (image_size"
INDEX = "model.safetensors.index.json"
WEIGHT, CONFIG, ROTARY = "model.safetensors", "config.json", "rotary_config.json"
NO_LAYER = weights(lambda tensors: {name: x for name, x in tensors.items() if "layers.0" not in name})
EXTRA = weights(lambda tensors: tensors | {"classifier.other": tensors["classifier.bias"].clone()})
NO_CLASSIFIER = weights(lambda tensors: {name: x for name, x in tensors.items() if name != "classifier.weight"})
RESHAPED = weights(lambda tensors: tensors | {"classifier.bias": torch.zeros(4)})
# Commands, the saved model of which they get a damaged copy, the damage, and words.
DAMAGED = [
    ("export inspect", "image", NO_LAYER, "Missing: liere.layers.0.attention.k_proj.bias, .* and 6 more"),
    ("push", "image", NO_CLASSIFIER, "classifier.weight"),
    ("export inspect", "image", EXTRA, "Unexpected: classifier.other"),
    ("push", "image", EXTRA, "classifier.other"),
    ("export inspect", "image", RESHAPED, "Missing: classifier.bias"),
    (
        "export inspect",
        "image",
        weights(lambda x: nan(x, "classifier.b")),
        "contains NaN or infinity in classifier.bias",
    ),
    ("inspect", "image", weights(lambda x: nan(x, "generators")), "rotary_encoding.generators"),
    ("push", "image", weights(nan), "contain values that are infinite or NaN: "),
    ("export push verify", "image", cut(WEIGHT), TRUNCATED),
    ("push verify", "image", lambda folder: (folder / WEIGHT).write_bytes(b""), f"cannot be read: it is {TRUNCATED}"),
    ("push verify", "image", folder_instead, "contains no model.safetensors"),
    ("push", "image", lambda folder: (folder / WEIGHT).rename(folder / "pytorch_model.bin"), "no model.safetensors"),
    ("export", "image", with_code, "code in a checkpoint is never executed"),
    ("export", "image", edited(CONFIG, position_encoding="evil"), "position_encoding"),
    ("export", "image", edited(CONFIG, format_version=99), "99"),
    ("export", "image", edited(CONFIG, hidden_size=96), "Missing: classifier.weight"),
    ("push verify", "image", edited(CONFIG, hidden_size=96), "does not fit the model. Missing: classifier.weight"),
    ("export", "image", edited(CONFIG, image_size=10**7), MEMORY),
    ("export", "image", edited(CONFIG, image_size=10**12), MEMORY),
    ("export", "image", written(CONFIG, "{"), "cannot be loaded"),
    ("push verify", "image", removed(CONFIG), "contains neither config.json nor"),
    ("push verify", "image", cut(CONFIG), "config.json is not a json file"),
    ("push verify", "image", written(CONFIG, "[]"), "config.json contains a list"),
    ("push verify", "image", written(CONFIG, "{}"), "none of our models"),
    ("push verify", "base", written("README.md", CARD), "'CLIPModel' is none of our models"),
    ("push", "image", written("preprocessor_config.json", "?"), "is not a json file"),
    ("push", "image", lambda folder: (folder / "README.md").write_bytes(b"\xff\xfe\0"), "README.md is not UTF-8 text"),
    ("push", "image", written("README.md", "![a](b.png)"), "b.png cannot be read"),
    ("push verify", "shards", written(INDEX, "{}"), "names no files of"),
    ("push verify", "shards", edited(INDEX, weight_map={"a": "../image/model.safetensors"}), "names no files of"),
    ("push verify", "shards", removed("model-00001-of-00002.safetensors"), "no model-00001"),
    ("push verify", "image", leak("merges.txt"), "merges.txt is a link out of its folder, to "),
    ("push verify", "image", leak(WEIGHT, moved=True), "is a link out of its folder"),
    ("push", "image", leak("README.md"), "README.md is a link out of its folder, to "),
    ("push verify", "image", written(ROTARY, "{}"), "(rotary_config.json): move the"),
    ("push verify", "adapter", written("adapter_config.json", "{}"), "contains no adapter_model.safetensors"),
    ("push verify", "adapter", cut("rotary.safetensors"), f"cannot be read: it is {TRUNCATED}"),
    ("push", "adapter", weights(nan, "rotary.safetensors"), "infinite or NaN: 0.generators"),
    ("push verify", "adapter", written(ROTARY, "{}"), "written by save_rotary"),
    ("push verify", "adapter", edited(ROTARY, base=lambda content: content["base"] * 2), "describes 2 vision towers"),
]


@pytest.mark.parametrize(
    "command, name, damage, words", [(command, *row) for commands, *row in DAMAGED for command in commands.split()]
)
def test_refuses_damaged_models(command, name, damage, words, folder, tmp_path, monkeypatch, capsys):
    shutil.copytree(folder / name, tmp_path / "damaged")
    damage(tmp_path / "damaged")
    check_refused(COMMANDS[command], words, tmp_path, monkeypatch, capsys)


@pytest.mark.parametrize(
    "typed, close",
    [
        ("prdict", "predict"),
        ("upgrade a b --position_encoding lier", "liere"),
        ("inspect model --output page --imagesize 224", "image_sizes"),
    ],
)
def test_the_closest_command_value_or_option_is_named(typed, close, capsys):
    with pytest.raises(SystemExit):
        main(typed.split())
    assert f"the closest is '{close}'" in capsys.readouterr().err
