"""
The recorded numbers of the official implementations, through the public conversion.

The cases in tests/goldens are run, and those others that lie in the directory `HF_LIERE_GOLDENS` (default
../shared/goldens). What a case holds is taken from its json and its tensors' names alone. Gradients are compared for
the official parameters, because the conversion is differentiable.

The numbers were made with StanfordMIMI/LieRE at b27b41b, Longin-Yu/ComRoPE at 7aeef08 and naver-ai/rope-vit at ce85c2e,
on random weights of small models. Cases named `…_rotations` hold none of the weights that rotations do not
depend on; these are zero here.
"""

import json
import math
import os
from pathlib import Path

import pytest
import torch
from checkout import ROOT, TESTS
from rotating import rotation_of
from safetensors.torch import load_file
from transformers import CLIPVisionConfig, CLIPVisionModel

from hf_liere import RotaryPatchConfig, patch, unpatch
from hf_liere.encoding.positions import TokenPositions
from hf_liere.tools.conversion.checkpoints import convert_state_dict


SHIPPED = TESTS / "goldens"
OTHERS = Path(os.environ.get("HF_LIERE_GOLDENS", ROOT.parent / "shared" / "goldens"))
SOURCES = {"liere-official": "liere", "comrope-official": "comrope", "naver-rope-vit-official": "naver"}


def family(file):
    return json.loads(file.with_suffix(".json").read_text())["family"]


# By name, so that a case in both directories is run once, as it is shipped.
CASES = {
    file.stem: file
    for folder in (OTHERS, SHIPPED)
    for file in sorted(folder.glob("*.safetensors"))
    if family(file) in SOURCES
}
# Where a case suggests none: float32 rounding of two layers, as in the cases that do.
TOLERANCE = {"rtol": 1e-4, "atol": 2e-5}
# The rotations of a case are recorded in float32, with angles of some tens of radians.
ROTATION_ATOL = 2e-5


def facts(case):
    return json.loads(CASES[case].with_suffix(".json").read_text())


class Golden:
    def __init__(self, case):
        self.facts = facts(case)
        self.tensors = load_file(CASES[case])
        for name, shape in self.facts["tensors"].items():
            if name not in self.tensors:
                assert case.endswith("_rotations") and name.startswith("weights/"), f"{case} lacks {name}"
                self.tensors[name] = torch.zeros(shape)
        self.source = SOURCES[self.facts["family"]]
        self.tolerance = self.facts.get("suggested_tolerance", TOLERANCE)
        self.compared = set()

    def group(self, name):
        return {
            key.removeprefix(f"{name}/"): value for key, value in self.tensors.items() if key.startswith(f"{name}/")
        }

    def options(self):
        facts = self.facts
        options = {"image_size": facts["image_size"]}
        if self.source == "liere":
            options |= {"patch_size": facts["patch_size"], "num_channels": facts["channels"], "pooling": facts["pool"]}
            options |= {"num_axes": facts["input_dimensionality"]}
            options["position_encoding"] = facts["architecture_name_in_official_code"]
        elif self.source == "comrope":
            options |= {"hidden_act": facts["activation"], "layer_norm_eps": facts["layer_norm_eps"]}
        else:
            rotation = facts["encoding"].removesuffix("+absolute")
            options["position_encoding"] = {"rope-mixed": "mixed", "axial-rope": "axial"}[rotation]
            options["num_attention_heads"] = facts["heads"]
        return options

    def convert(self, weights=None, **options):
        return convert_state_dict(
            self.group("weights") if weights is None else weights,
            self.source,
            self.facts.get("official_config"),
            **self.options(),
            **options,
        )

    def pixels(self, tag):
        pixels = self.tensors[tag]
        # Official LieRE takes volumes channels first.
        return pixels.transpose(1, 2) if self.source == "liere" and pixels.ndim == 5 else pixels

    def close(self, actual, name):
        self.compared.add(name)
        torch.testing.assert_close(actual, self.tensors[name], **self.tolerance, msg=lambda text: f"{name}: {text}")


def has(*prefixes):
    """Every case that has tensors of each of these groups."""
    groups = {case: {key.partition("/")[0] for key in facts(case)["tensors"]} for case in CASES}
    return pytest.mark.parametrize("case", [case for case in CASES if groups[case].issuperset(prefixes)])


def test_every_case_is_exercised():
    for case in CASES:
        groups = {key.partition("/")[0] for key in facts(case)["tensors"]}
        compared = [{"weights", "output"}, {"weights", "rotation"}, {"clip_weights"}]
        assert any(groups >= needed for needed in compared), case


def test_shipped_cases_are_the_recorded_ones():
    """Every tensor of tests/goldens, where the directory with all of them is there."""
    recorded = {file.stem: file for file in OTHERS.glob("*.safetensors")}
    if not recorded:
        pytest.skip(f"{OTHERS} is absent")
    for file in SHIPPED.glob("*.safetensors"):
        whole = load_file(recorded[file.stem.removesuffix("_rotations")])
        for name, tensor in load_file(file).items():
            assert torch.equal(tensor, whole[name]), f"{file.stem}: {name}"


def run_case(golden, run, model, **kwargs):
    """A recorded run: its input, at its positions where it states them."""
    positions = golden.tensors.get(run.get("positions"))
    pixels = golden.pixels(run["input"])
    if "whenever the token count matches" in golden.facts.get("position_convention", ""):
        # Official code that does not look at the shape of an input with as many patches as in training.
        grid = model.liere.embeddings.patch_embeddings.grid(pixels)
        if math.prod(grid) == math.prod(model.config.train_grid):
            positions = TokenPositions.from_grid(model.config.train_grid, model.config.train_grid, "index").coordinates
    if positions is not None and model.config.coordinates is not None:
        kwargs["positions"] = positions
    outputs = model(pixels, output_hidden_states=True, **kwargs)
    return outputs, model.liere(pixels, **{k: v for k, v in kwargs.items() if k == "positions"})


@has("weights", "output")
@torch.no_grad()
def test_outputs(case):
    case = Golden(case)
    model = case.convert().model()
    for run in case.facts["runs"]:
        outputs, encoded = run_case(case, run, model)
        case.close(outputs.logits, run["output"])
        folder = run["output"].rpartition("/")[0]
        for name, value in (("last_hidden_state", encoded.last_hidden_state), ("pooled", encoded.pooler_output)):
            if f"{folder}/{name}" in case.tensors:
                case.close(value, f"{folder}/{name}")
    # The first run is at the training resolution, where the model's own positions are the recorded ones.
    first = case.facts["runs"][0]
    outputs = model(case.pixels(first["input"]), labels=case.tensors.get("labels"))
    case.close(outputs.logits, first["output"])
    loss = first["output"].replace("logits", "loss")
    if loss in case.tensors and loss != first["output"]:
        case.close(outputs.loss.view(1), loss)
    assert case.compared == {name for name in case.tensors if name.startswith("output/")}


@has("hidden")
@torch.no_grad()
def test_hidden_states(case):
    case = Golden(case)
    model = case.convert().model()
    outputs, encoded = run_case(case, case.facts["runs"][0], model)
    for name in case.group("hidden"):
        if name == "features_after_final_norm":
            value = encoded.last_hidden_state
        elif name == "after_last_layer":
            value = outputs.hidden_states[-1]
        else:
            value = outputs.hidden_states[int(name.removeprefix("layer").removesuffix("_input"))]
        case.close(value, f"hidden/{name}")


@has("grad")
def test_gradients_of_official_parameters(case):
    case = Golden(case)
    weights = {name: value.requires_grad_() for name, value in case.group("weights").items()}
    conversion = case.convert(weights)
    run = case.facts["runs"][0]
    pixels = case.pixels(run["input"]).requires_grad_()
    model = conversion.model()
    positions = case.tensors.get(run.get("positions"))
    keywords = {} if positions is None else {"positions": positions}
    logits = torch.func.functional_call(model, conversion.state_dict, (pixels,), keywords).logits
    (logits * case.tensors["grad/loss_weights"]).sum().backward()
    for name in case.group("grad"):
        if name == "input":
            gradient = pixels.grad.transpose(1, 2) if pixels.ndim == 5 and case.source == "liere" else pixels.grad
            case.close(gradient, f"grad/{name}")
        elif name != "loss_weights":
            case.close(weights[name].grad, f"grad/{name}")


@has("alternative")
def test_the_papers_reading_of_the_layers(case):
    case = Golden(case)
    weights = {name: value.requires_grad_() for name, value in case.group("weights").items()}
    conversion = case.convert(weights, layer_generators="paper")
    model = conversion.model()
    alternatives = case.group("alternative/each_layer_own_generators")
    for run in case.facts["runs"]:
        name = run["output"].removeprefix("output/")
        logits = torch.func.functional_call(model, conversion.state_dict, (case.pixels(run["input"]),)).logits
        case.close(logits, f"alternative/each_layer_own_generators/{name}")
        if run is case.facts["runs"][0] and "grad_generator_raw_params" in alternatives:
            (logits * case.tensors["grad/loss_weights"]).sum().backward()
            gradient = weights["position_encoder.generator_raw_params"].grad
            case.close(gradient, "alternative/each_layer_own_generators/grad_generator_raw_params")


def dense(rotation, head_dim):
    """(heads or 1, tokens, head_dim, head_dim) matrices of a layer's (1, heads or 1, tokens, blocks, …) rotation."""
    rotation = rotation_of(rotation).matrices()
    rows = [[torch.block_diag(*token) for token in head] for head in rotation[0].double()]
    matrices = torch.stack([torch.stack(head) for head in rows])
    unrotated = head_dim - matrices.shape[-1]
    return torch.stack(
        [torch.stack([torch.block_diag(token, torch.eye(unrotated).double()) for token in head]) for head in matrices]
    )


@has("rotation")
@torch.no_grad()
def test_rotations(case):
    case = Golden(case)
    for tag, expected in case.group("rotation").items():
        expected = expected.double()
        model = case.convert(**({"layer_generators": "paper"} if case.source == "liere" else {})).model()
        run = next((run for run in case.facts["runs"] if run["input"].endswith(f"/{tag}")), case.facts["runs"][0])
        pixels = model.liere.pixels(case.pixels(run["input"]))
        grid = model.liere.embeddings.patch_embeddings.grid(pixels)
        positions = model.liere.grid_positions(grid, pixels.device)
        rotations, head_dim = model.liere.rotations(positions), model.config.head_dim
        if case.source == "liere":
            if f"position/{tag}" in case.tensors:
                torch.testing.assert_close(positions.coordinates[1:].float(), case.tensors[f"position/{tag}"][0])
            if expected.ndim == 5:
                expected = expected.unsqueeze(2)
            for layer in range(expected.shape[2]):
                # (tokens, heads · blocks, b, b) -> heads apart, as block-diagonal matrices
                heads = rotations[layer].matrices().shape[1]
                recorded = expected[0, :, layer].unflatten(1, (heads, -1)).transpose(0, 1).unsqueeze(0)
                actual, recorded = dense(rotations[layer], head_dim), dense(recorded, head_dim)
                torch.testing.assert_close(actual, recorded, rtol=0, atol=ROTATION_ATOL)
        else:
            actual = dense(rotations[int(tag.removeprefix("layer"))], head_dim)
            torch.testing.assert_close(actual, expected.transpose(0, 1), rtol=0, atol=ROTATION_ATOL)


@has("clip_weights")
@torch.no_grad()
def test_fine_tuning_start(case):
    """CLIP itself, CLIP patched with ComRoPE, and ComRoPE's class with CLIP's weights."""
    case = Golden(case)
    facts, pixels, positions = case.facts, case.tensors["input/base"], case.tensors["position/base"]
    clip_weights, custom = case.group("clip_weights"), case.group("custom_only_weights")
    table = "vision_model.embeddings.position_embedding.weight"
    facts_of_both = {"hidden_act": facts["activation"], "layer_norm_eps": facts["layer_norm_eps"]}

    layers = {name for name in clip_weights if name.endswith("mlp.fc1.bias")}
    (width,) = clip_weights["vision_model.embeddings.class_embedding"].shape
    sizes = {"hidden_size": width, "num_attention_heads": facts["heads"], "num_hidden_layers": len(layers)}
    sizes |= {"intermediate_size": len(clip_weights[min(layers)])}
    sizes |= {"image_size": facts["image_size"], "patch_size": facts["patch_size"]}
    clip = CLIPVisionModel(CLIPVisionConfig(**sizes, **facts_of_both)).eval()
    # Releases of transformers differ in the prefix.
    names = {name.removeprefix("vision_model."): name for name in clip.state_dict()}
    clip.load_state_dict({names[name.removeprefix("vision_model.")]: value for name, value in clip_weights.items()})
    outputs = clip(pixels)
    case.close(outputs.last_hidden_state, "output/plain_clip/last_hidden_state")
    case.close(outputs.pooler_output, "output/plain_clip/pooled")
    encoding = facts["encoding"].replace("-", "_")
    patch(clip, RotaryPatchConfig(position_encoding=encoding, block_size=facts["block_size"]))
    case.close(clip(pixels).pooler_output, "output/custom_zero_angles_with_clip_embedding/pooled")
    unpatch(clip)
    clip.get_parameter(names[table.removeprefix("vision_model.")]).zero_()
    case.close(clip(pixels).pooler_output, "output/plain_clip_zero_position_table/pooled")

    without_table = {name: value for name, value in clip_weights.items() if name != table}
    trained = convert_state_dict({**without_table, **custom}, "comrope", **facts_of_both).model()
    outputs = trained(pixels, positions=positions)
    case.close(outputs.pooler_output, "output/custom_trained_angles_no_table/pooled")
    zero = {name: torch.zeros_like(value) if name.endswith("freqs") else value for name, value in custom.items()}
    zero = convert_state_dict({**without_table, **zero}, "comrope", **facts_of_both).model()
    case.close(zero(pixels, positions=positions).pooler_output, "output/custom_zero_angles_no_table/pooled")
    assert case.compared == {name for name in case.tensors if name.startswith("output/")}
