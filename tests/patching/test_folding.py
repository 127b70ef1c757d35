"""Folded models compute what the patched ones do, without exponentials and eigenbases; they are saved and reloaded."""

import itertools

import pytest
import torch
import transformers
from fresh_process import run_code
from patching_cases import IMAGE, build, randomize, widen
from rope_cases import CASES as ROPE_CASES
from rope_cases import build as build_rope
from rope_cases import outputs
from safetensors.torch import load_file
from slow_cases import slow_except

import hf_liere
from hf_liere import RotaryPatchConfig, is_patched, load_rotary, merge_and_fold, patch, save_rotary, with_rotations
from hf_liere.encoding import commuting_encodings, rotary_encoding


ENCODINGS = {
    "comrope_ld": 8,
    "comrope_ap": 4,
    "rope_mixed": None,
    "cayley_string": None,
    "circulant_string": 4,
    "liere_product": None,
    "liere": 5,
}
BLOCKS = {"comrope_ld": 4, "liere": 4, "cayley_string": None}


def patched(name, encoding, block_size=None, **fields):
    """A model with rotations that are not those of the start, and its inputs."""
    is_rope = name in ROPE_CASES
    model, inputs = (build_rope if is_rope else build)(name)
    start = {"rotary_init": "pretrained"} if is_rope else {}
    randomize(patch(model, RotaryPatchConfig(position_encoding=encoding, block_size=block_size, **start, **fields)))
    return model, inputs


def computed(model, inputs):
    with torch.no_grad():
        return outputs(model, inputs)


def assert_same(found, expected):
    """In float32, weights in another basis and sums in another order."""
    for tensor, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(tensor, wanted, rtol=0, atol=1e-5 * max(1, wanted.abs().max().item()))


@pytest.fixture
def no_exponentials(monkeypatch):
    """From its call on, whatever computes the rotations of generators fails."""

    def forbid():
        def fail(*args, **kwargs):
            raise AssertionError("a folded model computes the rotations of generators")

        monkeypatch.setattr(rotary_encoding, "layer_block_rotations", fail)
        monkeypatch.setattr(commuting_encodings, "eigenbasis", fail)
        monkeypatch.setattr(torch.linalg, "eigh", fail)

    return forbid


TOWERS = list(itertools.product(("vit", "dinov2_registers", "siglip", "clip"), ENCODINGS))
TOWERS += itertools.product(("beit", "videomae", "vit_mae", "siglip2"), ("comrope_ld", "liere"))


@pytest.mark.parametrize("name, encoding", TOWERS)
def test_vision_towers(name, encoding, tmp_path, no_exponentials):
    model, inputs = patched(name, encoding, ENCODINGS[encoding])
    expected = computed(model, inputs)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    folded = model.fold_rotations()
    assert type(folded) is type(model) and not any(value.requires_grad for value in folded.parameters())
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    folded.save_pretrained(tmp_path)
    # Images of several sizes have no constants, nor have some of the patches.
    if name not in ("siglip2", "vit_mae"):
        no_exponentials()
    assert_same(computed(folded, inputs), expected)
    reloaded = type(model).from_pretrained(tmp_path)
    assert_same(computed(reloaded.eval(), inputs), expected)


# What it is patched with besides, and sizes of images with the grids of two; the last has as many patches as another.
GRIDS = {
    "dinov2_registers": ({"rotate_prefix": True}, {(16, 16): (4, 4), (16, 24): (4, 6), (24, 16): None}),
    "dinov3": ({}, {(16, 16): (4, 4), (16, 24): (4, 6), (24, 16): None}),
}


@pytest.mark.parametrize("name", GRIDS)
def test_grids_have_constants_and_other_sizes_are_computed(name, no_exponentials):
    fields, sizes = GRIDS[name]
    model, _ = patched(name, "liere", 4, **fields)
    inputs = {size: {"pixel_values": torch.randn(2, 3, *size)} for size in sizes}
    expected = {size: computed(model, each) for size, each in inputs.items()}
    *stored, other = sizes
    folded = model.fold_rotations([sizes[size] for size in stored])
    # Of a sum that the model's exponential takes in another order.
    assert_same(computed(folded, inputs[other]), expected[other])
    no_exponentials()
    for size in stored:
        assert_same(computed(folded, inputs[size]), expected[size])
    with pytest.raises(AssertionError, match="rotations of generators"):
        computed(folded, {"pixel_values": torch.randn(2, 3, 24, 24)})


@pytest.mark.parametrize("encoding", BLOCKS)
@pytest.mark.parametrize("name", ["llama", "glm", "gpt_neox", "phi3", "dinov3"])
def test_models_with_rope(name, encoding, tmp_path, no_exponentials):
    """The basis goes into separate and common projections, of queries and of fewer keys; tokens are generated alike."""
    model, inputs = patched(name, encoding, BLOCKS[encoding])
    expected = computed(model, inputs)
    options = {"max_new_tokens": 6, "do_sample": False}
    tokens = model.generate(**inputs, **options) if ROPE_CASES[name].generates else None
    folded = model.fold_rotations([(4, 6)])
    folded.save_pretrained(tmp_path)
    reloaded = type(folded).from_pretrained(tmp_path).eval()
    no_exponentials()
    for each in (folded, reloaded):
        assert_same(computed(each, inputs), expected)
    assert tokens is None or torch.equal(reloaded.generate(**inputs, **options), tokens)


@pytest.mark.parametrize("graph", slow_except([], ["compiled", "dynamic", "exported"]))
@torch.no_grad()
def test_graphs_choose_constants_by_the_shape_of_an_image(graph, no_exponentials):
    """Two grids of equally many patches, and a third one whose rotations are computed."""
    model, _ = patched("dinov3", "liere", 4)
    inputs = [{"pixel_values": torch.randn(2, 3, *size)} for size in ((8, 48), (16, 24), (24, 16))]
    expected = [model(**each).last_hidden_state for each in inputs]
    folded = model.fold_rotations([(4, 6), (6, 4)])

    def exported(**inputs):
        return torch.export.export(folded, (), inputs).module()(**inputs)

    dynamic = True if graph == "dynamic" else None
    run = exported if graph == "exported" else torch.compile(folded, backend="eager", dynamic=dynamic)
    assert_same([run(**inputs[0]).last_hidden_state], expected[:1])
    no_exponentials()
    torch.compiler.reset()
    assert_same([run(**each).last_hidden_state for each in inputs[1:]], expected[1:])


def compute_alone(folder, kinds, package=False):
    """By name of a folder in this one, the first output of its model in a process that does not import the package."""
    code = f"""
        import sys, torch, transformers
        from safetensors.torch import save_file

        found = {{}}
        for name, kind in {kinds}.items():
            model = getattr(transformers, kind).from_pretrained(name, trust_remote_code=True).eval()
            with torch.no_grad():
                found[name] = model(**torch.load(f"{{name}}/inputs.pt"))[0]
        save_file(found, "outputs.safetensors")
        assert {package} is None or "hf_liere" not in sys.modules
    """
    run_code(code, folder, package)
    return load_file(folder / "outputs.safetensors")


def test_one_set_of_frequencies_becomes_a_plain_model(tmp_path):
    model, inputs = patched("llama", "rope_mixed", share_layers=True)
    expected = computed(model, inputs)
    folded = model.fold_rotations()
    assert type(folded) is transformers.LlamaForCausalLM and not is_patched(folded) and is_patched(model)
    assert_same(computed(folded, inputs), expected)
    folded.save_pretrained(tmp_path / "plain")
    torch.save(inputs | {"use_cache": False}, tmp_path / "plain" / "inputs.pt")
    assert_same([compute_alone(tmp_path, {"plain": "AutoModelForCausalLM"})["plain"]], expected)


@pytest.mark.slow
def test_checkpoints_of_folded_models_load_by_their_file(tmp_path):
    """Nobody imports the package, which their code does."""
    expected, kinds = {}, {"vit": "AutoModelForImageClassification", "dinov3": "AutoModel"}
    for name, encoding, size in (("vit", "comrope_ld", 8), ("vit", "liere", 4), ("dinov3", "liere", 4)):
        model, inputs = patched(name, encoding, size)
        folder = tmp_path / f"{name}_{encoding}"
        model.fold_rotations().save_pretrained(folder)
        torch.save(inputs, folder / "inputs.pt")
        expected[folder.name] = computed(model, inputs)[0]
    found = compute_alone(tmp_path, {name: kinds[name.partition("_")[0]] for name in expected}, None)
    assert_same([found[name] for name in expected], expected.values())


def test_half_types_round_weights_and_not_rotations():
    model, inputs = patched("vit", "comrope_ld", 8)
    expected = computed(model, inputs)[0]
    half = computed(model.to(torch.bfloat16).fold_rotations(), {"pixel_values": inputs["pixel_values"].bfloat16()})[0]
    # Two layers of bfloat16, whose numbers have eight bits.
    assert (half.float() - expected).abs().max() < 0.05 * expected.abs().max()


def test_what_cannot_be_folded():
    model, _ = build("vit")
    config = RotaryPatchConfig(position_encoding="liere", block_size=4)
    with pytest.raises(ValueError, match="ViTForImageClassification is not patched; call patch"):
        hf_liere.patching.folding.fold_rotations(model)
    patch(model, config)
    with pytest.raises(ValueError, match=r"\[4, 4, 4\] must be 2 numbers of patches"):
        model.fold_rotations([(4, 4, 4)])
    folded = model.train().fold_rotations()
    assert model.training and not folded.training
    with pytest.raises(ValueError, match="are folded, which is for inference: train the original"):
        folded.train()
    with pytest.raises(
        ValueError, match=r"vit \(RotaryViTModel\) cannot be folded: .* already \(folded_grids=\[\[4, 4\]\]\)"
    ):
        folded.fold_rotations()
    with pytest.raises(ValueError, match="Folded rotations are a part of the weights"):
        save_rotary(folded, "nowhere")
    with pytest.raises(ValueError, match=r"folded_grids=\[\] is what fold_rotations sets"):
        patch(build("vit")[0], RotaryPatchConfig(folded_grids=[]))


def test_norms_and_biases_of_attention_take_no_other_basis():
    model, _ = patched("qwen3", "comrope_ld", 4)
    with pytest.raises(ValueError, match=r"q_norm \(Qwen3RMSNorm\) of attention layer 0 stands between"):
        model.fold_rotations()
    model, inputs = patched("qwen3", "rope_mixed")
    assert_same(computed(model.fold_rotations(), inputs), computed(model, inputs))

    fields = {**IMAGE, "image_size": [16, 16], "patch_size": [4, 4], "use_qk_norm": True}
    vision = widen(transformers.InternVLVisionModel(transformers.InternVLVisionConfig(**fields)).eval())
    for layer in vision.encoder.layer:
        torch.nn.init.uniform_(layer.attention.q_norm.weight, 0.5, 2)
    randomize(patch(vision, RotaryPatchConfig(position_encoding="comrope_ld", block_size=8)))
    with pytest.raises(
        ValueError, match=r"InternVLVisionAttention\) changes queries or keys between their projections"
    ):
        vision.fold_rotations()


def test_rotations_of_a_folded_model_fit_no_other(tmp_path):
    model, _ = patched("vit", "comrope_ld", 8)
    save_rotary(model, tmp_path)
    with pytest.raises(ValueError, match="folded_grids="):
        load_rotary(model.fold_rotations(), tmp_path)


@pytest.mark.parametrize("name, encoding", [("llama", "rope_mixed"), ("llama", "liere"), ("vit", "comrope_ld")])
def test_lora_and_rotations_in_one_model(name, encoding, tmp_path):
    """Merged and folded, in a plain model where it is complete: neither peft nor this package is needed there."""
    peft = pytest.importorskip("peft")
    is_plain = encoding == "rope_mixed"
    fields = {"share_layers": True} if encoding == "rope_mixed" else {}
    model, inputs = patched(name, encoding, {"liere": 4, "comrope_ld": 8}.get(encoding), **fields)
    config = peft.LoraConfig(r=2, init_lora_weights=False, target_modules=["q_proj", "v_proj"])
    adapted = peft.get_peft_model(model, with_rotations(config)).eval()
    assert config.modules_to_save is None
    assert adapted.peft_config["default"].modules_to_save == ["rotary_encoding"]
    randomize(adapted)
    expected = computed(adapted.get_base_model(), inputs)
    with pytest.raises(ValueError, match=r"contains adapters \(.* merge_and_fold"):
        adapted.get_base_model().fold_rotations()
    folded = merge_and_fold(adapted)
    assert_same(computed(folded, inputs), expected)
    assert not any("lora" in key or "modules_to_save" in key for key in folded.state_dict())
    folded.save_pretrained(tmp_path)
    assert is_patched(folded) is not is_plain
    if is_plain:
        assert type(folded) is transformers.LlamaForCausalLM
        assert_same(computed(transformers.LlamaForCausalLM.from_pretrained(tmp_path).eval(), inputs), expected)


def test_merge_and_fold_is_for_models_of_peft():
    peft = pytest.importorskip("peft")
    model, _ = patched("vit", "comrope_ld", 8)
    with pytest.raises(ValueError, match="RotaryViTForImageClassification is no model of peft"):
        merge_and_fold(model)
    with pytest.raises(ValueError, match="is not patched"):
        merge_and_fold(peft.get_peft_model(build("vit")[0], peft.LoraConfig(r=2, target_modules=["q_proj"])))
