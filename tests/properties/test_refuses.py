"""Bad input is refused before work is lost, with the value and what is accepted (commands: test_refuses_commands)."""

import json
import re

import numpy as np
import pytest
import torch
import transformers
import yaml
from conversion_cases import comrope_weights, liere_weights, rope_vit, without
from patching_cases import SMALL
from patching_cases import build as build_vision
from published_models import tokens, vit
from rope_cases import TEXT
from rope_cases import build as build_rope
from run_records import AGREEING, edit, edited, save_run, write_records, written
from safetensors.torch import save_file

import hf_liere
from hf_liere.errors import InputError
from hf_liere.fast.scaling_and_squaring import RayTokens
from hf_liere.kernels import cpu as cpu_kernels
from hf_liere.rotation.exponential import skew
from hf_liere.storage.loading import CheckpointError
from hf_liere.storage.saved_model import SavedModel
from hf_liere.tools.conversion.checkpoints import convert_state_dict
from hf_liere.tools.convert import convert_checkpoint
from hf_liere.tools.export import ExportError, export_model
from hf_liere.tools.hub.cards import Card, push_card
from hf_liere.tools.hub.facts import Facts, FactsError, load_facts
from hf_liere.tools.inspection.analysis import analyse, attention_maps, output_change
from hf_liere.tools.inspection.attention import overlay
from hf_liere.upgrades import ConversionError, resize_input, upgrade_encoding


TABLES = []


def refuses(error, *rows):
    """The decorated function gets an empty folder and the values of a row before its last, the words of the error."""

    def add(function):
        for *values, words in rows:
            TABLES.append(pytest.param(error, function, values, words, id=f"{function.__name__}: {words[:50]}"))
        return function

    return add


NO_CLASS = {"use_class_token": False, "pooling": "mean"}
LIERE, MIXED, ABSOLUTE = ({"position_encoding": name} for name in ("liere", "rope_mixed", "absolute"))
LIERE_4, LD_4 = {**LIERE, "block_size": 4}, {"position_encoding": "comrope_ld", "block_size": 4}
TABLE_3 = {**ABSOLUTE, "position_table_size": [3, 3]}
AXIAL = {"position_encoding": "axial_rope"}


@refuses(
    ConversionError,
    (MIXED, "comrope_ap", 2, "rotates with one axis alone, and 12 planes of a head rotate with several"),
    (LIERE_4, "comrope_ap", 4, "rotates with one axis alone.*do not commute"),
    (LD_4, "comrope_ap", 4, "rotates with one axis alone, and 12 planes"),
    (MIXED, "comrope_ld", 8, "6 planes.*one ratio of the axes and need 2 of the 3 blocks.*1 are left"),
    (LIERE_4, "comrope_ld", 4, "multiples of one matrix.*generators of this model do not commute"),
    (LD_4, "comrope_ld", 8, "2 planes of a head rotate with one ratio.*0 are left"),
    (AXIAL, "comrope_ld", 24, "6 planes of a head rotate with one ratio of the axes"),
    ({**LIERE, "block_size": 8}, "liere", 4, "8 does not divide 4.*The generators of this model do not commute"),
    (LIERE_4, "liere", 6, "4 does not divide 6"),
    ({**LIERE, "block_size": 8}, "rope_mixed", None, "8 does not divide 2.*generators of this model do not commute"),
    ({**LIERE, "block_size": 3}, "liere", 9, "last 6 of 24 channels unrotated, blocks of 3 only 0"),
    (LD_4, "liere", 5, "12 planes of a head.*need 6.*4 are left"),
    (MIXED, "axial_rope", None, "learns no rotations.*liere, rope_mixed, comrope_ap, comrope_ld"),
    (MIXED, "none", None, "learns no rotations"),
    (MIXED, "liere", 25, "block_size=25"),
    (ABSOLUTE, "comrope_ap", 8, "block_size=8 times 2 axes"),
)
def upgrade(folder, old, new, block_size):
    upgrade_encoding(vit(**old), position_encoding=new, block_size=block_size)


@refuses(
    ConversionError,
    ({**LIERE, **NO_CLASS}, "generators of liere need not commute"),
    ({**MIXED, "coordinates": "train_grid"}, "relative to class"),
    ({**MIXED, **NO_CLASS}, "'index' to .*differ by a shift"),
    (TABLE_3, "table is read at"),
)
def centre(folder, old):
    upgrade_encoding(vit(**old), position_encoding="liere", coordinates="centred_grid")


@refuses(
    ConversionError,
    ({**AXIAL, "coordinates": "train_grid"}, 32, "only the generators of liere"),
    ({**LIERE, "rotate_prefix": True}, 32, "its class token has coordinates too"),
    (LIERE, 30, "not divisible into patches"),
    ({**ABSOLUTE, "position_table_resize": "truncate"}, 32, "cannot enlarge it"),
)
def resize(folder, old, size):
    resize_input(vit(**old), size)


INDEX = "model.safetensors.index.json"
QKV = "transformer.layers.1.0.fn.to_qkv.weight"
FREQS = "vision_model.encoder.layers.1.self_attn.freqs"


@refuses(
    ConversionError,
    (lambda: liere_weights() | {"head.extra": torch.ones(2)}, {}, r"1 tensors unknown to this kind.*head\.extra"),
    (lambda: without(liere_weights(), QKV), {}, rf"no tensor '{QKV}'"),
    (lambda: without(liere_weights(), "mlp_head.1.bias") | {"mlp_head.1.weight": torch.ones(3, 7)}, {}, "any', 128"),
    (lambda: liere_weights() | {QKV: torch.ones(384, 64)}, {}, r"\(384, 64\).*contradicts.*\(384, 128\)"),
    (lambda: liere_weights() | {"cls_token": torch.full((1, 1, 128), float("nan"))}, {}, "finite"),
    (lambda: liere_weights() | {"cls_token": torch.ones(1, 1, 128, dtype=torch.int64)}, {}, "int64"),
    (lambda: liere_weights() | {"transformer.layers.5.0.norm.weight": torch.ones(128)}, {}, r"\[2, 3, 4\]"),
    (lambda: liere_weights(size=8, width=160), {}, "16 generators of size 8 do not fit 2 heads"),
    (liere_weights, {"image_size": 32}, "64 patches; the table has 16"),
    (liere_weights, {"patch_size": 2}, r"\(2, 2\).*12 values.*48"),
    (liere_weights, {"pooling": "max"}, "pooling='max' must be one of 'cls', 'mean'"),
    (liere_weights, {"layer_generators": "all"}, "'official', 'paper'"),
    (liere_weights, ABSOLUTE, "position_encoding='absolute'"),
    (liere_weights, {"block_size": 4}, "Unknown options block_size.*layer_generators"),
    (lambda: liere_weights(axes=3), {}, "please give patch_size"),
    (comrope_weights, {"num_axes": 3}, "num_axes=3 contradicts"),
    (comrope_weights, {"num_attention_heads": 4}, "num_attention_heads=4 contradicts the checkpoint's 2"),
    (lambda: comrope_weights() | {FREQS: torch.ones(2, 1, 8, 4, 4)}, {}, r"layers\.1\.self_attn\.freqs"),
    (lambda: {"weight": torch.ones(2)}, {}, "match none of liere"),
    (lambda: {}, {}, "contains nothing"),
    (lambda: {"state": 3}, {}, r"\{'state': 'int'\}"),
    (lambda: rope_vit()[1], {"source_config": {"model_args": "none"}}, "beside the checkpoint cannot be interpreted"),
)
def convert_weights(folder, weights, options):
    convert_state_dict(weights(), **options)


def weights_and(config):
    def write(folder):
        save_file(comrope_weights(), folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(config))

    return write


@refuses(
    InputError,
    (weights_and({"image_size": "16"}), "image_size='16': accepted is a number"),
    (weights_and({"hidden_act": "evil"}), "hidden_act='evil' must be one of .*'gelu'"),
    (weights_and({"axis_scale": 1}), "axis_scale=1: accepted is true or false"),
    (weights_and([1]), "config.json contains a list"),
    (written(INDEX, '{"metadata": {}}'), "has no weight_map"),
    (
        written(INDEX, '{"weight_map": {"a": "../a.safetensors"}}'),
        r"'\.\./a.safetensors'; accepted are files beside it",
    ),
    (written(INDEX, '{"weight_map": {"a": "absent.safetensors"}}'), "'absent.safetensors', which is not beside it"),
    (lambda folder: vit().save_pretrained(folder), "is already a model of hf_liere"),
)
def convert_folder(folder, write):
    write(folder)
    convert_checkpoint(folder, folder / "out")


def patched(name, **fields):
    start = {"rotary_init": "pretrained"} if fields.pop("rope", False) else {}
    model, _ = build_rope(name) if start else build_vision(name)
    return hf_liere.patch(model, hf_liere.RotaryPatchConfig(**fields, **start))


def flexible_attention():
    model = vit(position_encoding="none")
    model.set_attn_implementation("flex_attention")
    return model


def bert():
    return transformers.BertModel(transformers.BertConfig(**SMALL, vocab_size=8))


def dynamic_llama():
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**TEXT, "rope_parameters": rope}))


@refuses(
    ExportError,
    (lambda: vit(image_size=(16, 4)), {"dynamic_size": True}, r"dynamic_size=True: .*two patches.*have \(4, 1\)"),
    (vit, {"image_size": 18}, r"\(18, 18\) is not divisible into patches of \(4, 4\)"),
    (vit, {"num_frames": 4}, "num_frames=4: inputs of this model are images"),
    (vit, {"output": "model.pt"}, "accepted are names that end in .onnx or .pt2"),
    (vit, {"output": "model.pt2", "opset": 20}, "opset=20 is for ONNX files"),
    (vit, {"opset": 3}, "opset=3: accepted are 17 to"),
    (vit, {"opset": 999}, "opset=999: accepted are 17 to"),
    (lambda: vit(**ABSOLUTE), {"dynamic_size": True}, "learned table"),
    (lambda: vit(position_encoding="none"), {"dynamic_size": True, "image_size": 16}, "image_size=16"),
    (flexible_attention, {}, "'flex_attention' cannot be exported; accepted are sdpa"),
    (lambda: torch.nn.Linear(2, 2), {}, "Linear: accepted are"),
    (bert, {}, "BertModel: accepted are"),
    (lambda: patched("clip", **LD_4), {}, "CLIPModel: accepted are .* its part, such as model.vision_model"),
    (lambda: patched("dinov3", rope=True, **LIERE_4), {"dynamic_size": True}, "rotations of liere .* are constants"),
    (lambda: build_rope("mistral")[0], {}, "MistralForCausalLM keeps DynamicSlidingWindowLayer in its cache"),
    (dynamic_llama, {}, "depend on values that a graph does not know, as frequencies of rope_type"),
)
def export(folder, build, options):
    export_model(build(), folder / options.pop("output", "model.onnx"), **options)


def write_facts(folder, **content):
    path = folder / "facts.yaml"
    path.write_text(yaml.safe_dump({name: value for name, value in content.items() if value is not None}))
    return path


@refuses(
    FactsError,
    ({"accuraccy": 1}, r"facts.yaml: unknown key \['accuraccy'\]; accepted: title, encoding"),
    ({"encoding": "sine"}, "encoding 'sine': accepted are liere, rope_mixed"),
    ({"dataset": "mnist"}, "dataset 'mnist': accepted are imagenet"),
    ({"paper_figures": [{"image_size": 224, "accuracy": 69.6, "where": "Table 2"}]}, "69.6% is 0.696"),
    ({"title": None}, "facts.yaml: title None: accepted is a heading"),
    ({"model": 3}, "facts.yaml: model 3: accepted is configuration fields"),
    (
        {"results": [{"image_size": 224, "accuracy": 0.5, "low": 0.4}]},
        r"results: unknown key \['low'\]; accepted: ima",
    ),
    ({"results": [{"accuracy": 0.5}]}, "facts.yaml: results: image_size None: accepted is a number of pixels"),
    ({"dataset": {"name": "x", "files": "a.parquet"}}, "dataset: files 'a.parquet': accepted is a list of"),
    ({"dataset": {"name": "x", "sise": 3}}, r"facts.yaml: dataset: unknown key \['sise'\]; accepted: name, type"),
)
def read_facts(folder, change):
    load_facts(write_facts(folder, **({"title": "T", "encoding": "liere", "dataset": "cifar10"} | change)))


@refuses(
    FactsError,
    (MIXED, "encoding is 'rope_mixed' in the facts and 'liere' in the folder"),
    ({"architecture": "LieREViTModel"}, "architecture is 'LieREViTModel' in the facts"),
    ({"model": {"num_labels": 3}}, "num_labels is 3 in the facts and 10 in the folder"),
    ({"model": {"depth": 3}}, "depth is 3 in the facts, and the checkpoint has no such field"),
    ({"cost": {"parameters": 139_594}}, r"parameters is 139594 in the facts and \d+ in the folder"),
    ({"cost": {"train_runtime": 3.0}}, "train_runtime is 3.0 in the facts and 1039.2 in the folder"),
    ({"dataset": {"name": "flowers"}}, "evaluation data is 'flowers' in the facts and 'uoft-cs/cifar10' in the"),
    ({"training_data": {"samples": 50_000}}, "training data: samples is 50000 in the facts and 49000 in the folder"),
    ({"evaluation_data": {"split": "train"}}, "evaluation data: split is 'train' in the facts and 'test' in the"),
    ({"recipe": {"crop_padding": 0}}, "crop_padding is 0 in the facts and 4 in the folder"),
    ({"seeds": [0]}, r"seeds is \[0\] in the facts and \[7\] in the folder"),
    ({"environment": {"libraries": {"torch": "2.9.0"}}}, "torch is '2.9.0' in the facts and '2.15.0' in the folder"),
    ({"weights": "0" * 64}, "weights is '0000000"),
    ({"base_model": "google/vit"}, "base_model is 'google/vit' in the facts and None in the folder"),
    ({"results": [{"image_size": 16, "accuracy": 0.99}]}, "accuracy at 16 × 16 px is 0.99 in the facts and 0.625"),
)
def contradict_records(folder, change):
    save_run(folder / "run")
    change = {"encoding": "rope_mixed"} if change is MIXED else change
    try:
        push_card(SavedModel(folder / "run"), "me/x", load_facts(write_facts(folder, **(AGREEING | change))))
    except FactsError as error:
        assert str(error).startswith("The facts of 'Small' contradict ")
        raise


SHARE = "accepted is finite numbers, accuracy as a share of 1"


@refuses(
    CheckpointError,
    (written("eval_results.json", "{"), "eval_results.json is not a json file"),
    (written("eval_results.json", "[1]"), "eval_results.json contains a list; accepted: a json object"),
    (written("weights.json", "not json"), "weights.json is not a json file"),
)
@refuses(
    FactsError,
    (written("eval_results.json", '{"eval_accuracy": NaN}'), f"{{'accuracy': nan}}: {SHARE}"),
    (written("eval_results.json", '{"eval_accuracy": "high"}'), f"{{'accuracy': 'high'}}: {SHARE}"),
    (written("eval_results.json", '{"eval_map": 0.5}'), f"numbers {{}}: {SHARE}"),
    (written("eval_results.json", '{"eval_accuracy": 0.5, "eval_loss": Infinity}'), "'loss': inf}: accepted is finite"),
    (written("run_config.json", '{"training": 3}'), "run_config.json: training 3: accepted is a json object"),
    (written("run_config.json", '{"model_name_or_path": 3}'), "model_name_or_path 3: accepted is a name"),
    (written("weights.json", '{"sha256": 3}'), "weights 3: accepted is the digest of the evaluated weights"),
    (lambda run: (run / "weights.json").unlink(), "was measured with unknown weights"),
    (written("config.json", "{}"), "config.json is not a configuration of hf_liere: None is none of our models"),
    (edited("config.json", architectures=["LieREViTModel"], hidden_size="wide"), "is not a configuration"),
)
def describe_run(folder, damage):
    save_run(folder)
    damage(folder)
    push_card(SavedModel(folder), "me/x")


MNIST = {"examples": {"train": None, "evaluation": {"name": "mnist", "split": "test", "samples": 10_000}}}


@refuses(
    FactsError,
    (MNIST, "data is 'uoft-cs/cifar10' in .* and 'mnist' in "),
    ({"condition": {"evaluation_shuffle": "patches"}}, "with evaluation_shuffle patches; accepted: eval"),
    ({"model": {"coordinates": "index"}}, "coordinates is 'index' in .* and 'train_grid' in config.json"),
    ({"weights": "0" * 64}, "32 × 32 px was measured with weights 000000000000…, the card is for"),
    (None, "is not the output of an evaluation"),
)
def add_evaluation(folder, change):
    digest, other = save_run(folder / "run"), folder / "other"
    if change is None:
        other.mkdir()
    else:
        write_records(other, change.get("weights", digest), accuracy=0.5, size=32)
        edit(other / "run_config.json", **change)
    push_card(SavedModel(folder / "run"), "me/x", evaluations=[other])


APACHE = Facts("T", "liere", license="apache-2.0")


@refuses(
    FactsError,
    (
        lambda run: push_card(run, "me/x", APACHE, license="mit"),
        "names the licence 'apache-2.0', not 'mit'; change",
    ),
    (lambda run: Card("").with_license("mit").with_license("gpl-3.0"), "names the licence 'mit', not 'gpl-3.0'"),
)
def license_twice(folder, choose):
    save_run(folder)
    choose(SavedModel(folder))


def broken():
    model = vit()
    model.liere.rotary_encoding.generators.data[0, 0, 0, 0, 0] = torch.nan
    return model


IMAGES, GREY = torch.zeros(1, 3, 16, 16), np.full((8, 6, 3), 100, np.uint8)


@refuses(
    ValueError,
    (lambda: upgrade_encoding(vit(**LD_4).fold_rotations(), position_encoding="liere"), "a folded model cannot be"),
    (lambda: resize_input(vit(**LD_4).fold_rotations(), 32), "a folded model cannot be changed"),
    (
        lambda: convert_checkpoint("absent", "out", "vit"),
        "'vit', a ViT, DeiT or DINOv2 of transformers, is not convert",
    ),
    (lambda: convert_checkpoint("absent", "out", "bert"), "source='bert' must be one of 'liere', 'comrope', 'naver'"),
    (lambda: export_model(patched("qwen3", rope=True, **LD_4), "model.onnx"), "stands between a projection and the"),
    (lambda: load_facts("liere9"), "No facts 'liere9'; accepted: a yaml file or one of arrows_absolute"),
    (lambda: attention_maps(vit(), torch.zeros(1, 3, 16, 18)), "not divisible"),
    (lambda: output_change(vit(**ABSOLUTE), IMAGES), "no rotations"),
    (lambda: analyse(broken()), "LieREViTModel contains NaN or infinity in rotary_encoding.generators"),
    (lambda: attention_maps(build_vision("vit_mae")[0], IMAGES), "every patch among the tokens"),
    (lambda: analyse(bert()), "no patch embedding"),
    (lambda: analyse(tokens(), [IMAGES]), "takes tokens with positions; no images"),
    (lambda: overlay(GREY, torch.zeros(2, 2, 2)), r"\(2, 2, 2\)"),
    (lambda: overlay(GREY / 255, torch.zeros(2, 2)), "float64"),
    (lambda: overlay(GREY, torch.zeros(2, 2), opacity=2), "opacity=2"),
)
def call(folder, function):
    function()


STATES, PLANES = torch.randn(2, 3, 5, 8), torch.randn(1, 3, 5, 4, 2)


def rotate(query, key, rotation):
    return lambda: cpu_kernels.apply_rotation((query, key), rotation)


def rotations_of(positions, rays=((0,),), squarings=(1,), mirror=-1):
    rays = RayTokens(torch.tensor(rays, dtype=torch.long), mirror=mirror)
    generators = skew(torch.randn(2, 1, 3, 28), 8)
    return cpu_kernels.block_rotations(positions, generators, rays, torch.tensor(squarings), None, torch.float32)


# Kernels would read what is beside the numbers.
@refuses(
    ValueError,
    (rotate(STATES.half(), STATES.half(), PLANES), "float32 or torch.bfloat16; they are in torch.float16"),
    (rotate(STATES.double(), STATES.double(), PLANES), "float32 or torch.bfloat16; they are in torch.float64"),
    (rotate(STATES, STATES, PLANES[:, :, :4]), r"\(1, 3, 4, 4, 2\) do not fit .* \(2, 3, 5, 8\)"),
    (rotate(STATES, STATES[:, :, :4], PLANES), r"\(2, 3, 5, 8\) .* \(2, 3, 4, 8\)"),
    (rotate(STATES, STATES, torch.randn(1, 3, 5, 5, 2)), "5 blocks of 2 channels do not fit into the 8 channels"),
    (
        lambda: cpu_kernels.angle_gradients((STATES.bfloat16(),) * 2, (STATES, STATES), PLANES.shape[:4]),
        "Gradients in torch.bfloat16 do not match .* torch.float32",
    ),
    (lambda: rotations_of(torch.rand(4, 2).half()), "Positions in torch.float16"),
)
def call_kernels(folder, function):
    function()


@pytest.mark.parametrize("error, function, values, words", TABLES)
def test_refuses(error, function, values, words, tmp_path, request):
    if "kernels" in function.__name__:
        request.getfixturevalue("compiled_kernels")
    with pytest.raises(error, match=f"(?s){words}"):
        function(tmp_path, *values)
    assert not [path for path in tmp_path.rglob("*") if re.search(r"^out$|^model\.(onnx|pt2?)$|^\.", path.name)]
