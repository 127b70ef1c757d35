"""
What others hang on the projections of attention acts: hooks, pruning, parametrizations, adapters, quantization and
offloading. ComRoPE, which reads plain projections' weights instead of calling them, must not differ from LieRE here.
"""

import copy

import pytest
import torch
from encoding_cases import LEARNED
from encoding_cases import fields as encoding_fields
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import parametrizations, parametrize, prune
from transformers import TorchAoConfig

import hf_liere
from hf_liere.encoding.kinds import ENCODINGS as KINDS
from hf_liere.tools.inspection.costs import count_cost


# Those whose rotations are not of neighbouring channels.
ENCODINGS = [name for name in LEARNED if not KINDS[name].planar]
# The code of an encoding of a user is tried in another process whenever a model is saved.
OF_THE_PACKAGE = [name for name in ENCODINGS if name != "two_parameters"]
# Logits and gradients of order 1 in float32, with products in another order.
ROUNDING = {"rtol": 1e-5, "atol": 1e-5}


@pytest.fixture(params=ENCODINGS)
def model(request, tiny):
    # Wide weights, so that rotations matter.
    return build(tiny, request.param)


@pytest.fixture
def batch():
    return {"pixel_values": torch.randn(2, 3, 16, 16), "labels": torch.tensor([2, 0])}


def build(tiny, encoding, **fields):
    config = tiny(**encoding_fields(encoding), initializer_range=0.2, **fields)
    return hf_liere.LieREViTForImageClassification(config).eval()


def projections(model):
    return [getattr(layer.attention, name) for layer in model.liere.layers for name in ("q_proj", "k_proj")]


def logits(model, batch):
    with torch.no_grad():
        return model(batch["pixel_values"]).logits


def step(model, batch):
    """Logits and the gradients of all parameters, by name."""
    model.zero_grad()
    outputs = model(**batch)
    outputs.loss.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    return {"logits": outputs.logits.detach(), **gradients}


def assert_close(found, expected):
    torch.testing.assert_close(found, expected, **ROUNDING)


def test_forward_hooks_see_what_the_projection_returns(model, batch):
    expected, seen = step(model, batch), []

    def look(module, args, output):
        seen.append(module)
        torch.testing.assert_close(output, nn.functional.linear(args[0], module.weight, module.bias))

    handles = [projection.register_forward_hook(look) for projection in projections(model)]
    assert_close(step(model, batch), expected)
    assert seen == projections(model)
    for handle in handles:
        handle.remove()
    assert all(torch.equal(value, expected[name]) for name, value in step(model, batch).items())
    assert len(seen) == 4


def test_forward_hooks_edit(model, batch):
    """An output twice as large is that of weights twice as large, an input twice as large that of one of the two."""
    for register, changed in (
        ("register_forward_hook", ("weight", "bias")),
        ("register_forward_pre_hook", ("weight",)),
    ):
        reference, hooked = copy.deepcopy(model), copy.deepcopy(model)
        with torch.no_grad():
            for projection in projections(reference):
                for name in changed:
                    getattr(projection, name).mul_(2)
                # Biases are initialised to zero.
                projection.bias.add_(0.1 if "bias" not in changed else 0.2)
            for projection in projections(hooked):
                projection.bias.add_(0.1)
        unedited = logits(hooked, batch)
        for projection in projections(hooked):
            edit = (
                (lambda module, args, output: 2 * output) if "bias" in changed else (lambda module, args: 2 * args[0])
            )
            getattr(projection, register)(edit)
        expected = logits(reference, batch)
        assert_close(logits(hooked, batch), expected)
        assert (unedited - expected).abs().max() > 1e-3


def test_backward_hooks_see_the_gradient_of_the_output(model, batch):
    expected, inputs, gradients = step(model, batch), {}, {}
    for projection in projections(model):
        projection.register_forward_pre_hook(lambda module, args: inputs.update({module: args[0].detach()}))
        projection.register_full_backward_hook(lambda module, _, output: gradients.update({module: output[0]}))
    assert_close(step(model, batch), expected)
    for projection in projections(model):
        gradient, states = gradients[projection].flatten(0, 1), inputs[projection].flatten(0, 1)
        torch.testing.assert_close(projection.weight.grad, gradient.T @ states, **ROUNDING)
        torch.testing.assert_close(projection.bias.grad, gradient.sum(0), **ROUNDING)


def test_backward_hooks_edit(model, batch):
    expected = step(model, batch)
    projection = projections(model)[-1]
    projection.register_full_backward_pre_hook(lambda module, output: (output[0] * 0,))
    gradients = step(model, batch)
    assert not projection.weight.grad.any() and expected["liere.layers.1.attention.k_proj.weight"].any()
    torch.testing.assert_close(gradients["classifier.weight"], expected["classifier.weight"], **ROUNDING)


def test_hooks_on_all_modules(model, batch):
    expected, seen = logits(model, batch), []
    handle = register_module_forward_hook(lambda module, args, output: seen.append(module))
    try:
        assert_close(logits(model, batch), expected)
    finally:
        handle.remove()
    assert {module for module in model.modules() if module in projections(model)} <= set(seen)
    assert torch.equal(logits(model, batch), expected)


def test_models_without_rotations_yet_compute_the_same_bits(tiny, batch):
    model = build(tiny, "comrope_ld", rotary_init="zeros")
    expected = logits(model, batch)
    for projection in projections(model):
        projection.register_forward_hook(lambda *args: None)
    assert torch.equal(logits(model, batch), expected)


def test_checkpointed_and_mixed_precision(model, batch):
    expected = step(model, batch)
    with torch.autocast("cpu", torch.bfloat16):
        half = logits(model, batch)
    for projection in projections(model):
        projection.register_forward_hook(lambda *args: None)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert_close(step(model.train(), batch), expected)
    model.gradient_checkpointing_disable()
    with torch.autocast("cpu", torch.bfloat16):
        # Weights are rounded to bfloat16 before the change of basis in one case, after it in the other.
        torch.testing.assert_close(logits(model.eval(), batch), half, rtol=0.05, atol=0.05)


@pytest.mark.slow
def test_hooks_in_compiled_models(tiny, batch):
    model, seen = build(tiny, "comrope_ld", num_hidden_layers=1), []
    expected = step(model, batch)
    for projection in projections(model):
        projection.register_forward_hook(lambda module, args, output: seen.append(module))
    outputs = torch.compile(model, fullgraph=True, backend="aot_eager")(**batch)
    model.zero_grad()
    outputs.loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert_close({"logits": outputs.logits.detach(), **gradients}, expected)
    assert seen == projections(model)


def test_pruned_weights_follow_the_original(model, batch):
    for projection in projections(model):
        prune.l1_unstructured(projection, "weight", amount=0.5)
        with torch.no_grad():
            projection.weight_orig.mul_(2)
    found = step(model, batch)
    masks = [projection.weight_mask for projection in projections(model)]
    originals = [projection.weight_orig.grad.clone() for projection in projections(model)]
    for projection in projections(model):
        prune.remove(projection, "weight")
    expected = step(model, batch)
    torch.testing.assert_close(found["logits"], expected["logits"], **ROUNDING)
    for projection, mask, original in zip(projections(model), masks, originals):
        torch.testing.assert_close(original, projection.weight.grad * mask, **ROUNDING)


@pytest.mark.parametrize("wrap", [parametrizations.weight_norm, parametrizations.spectral_norm])
def test_parametrized_weights(model, batch, wrap):
    # In float64: weights three times as wide make attention so sharp that rounding in float32 shows in the logits.
    model.double()
    batch["pixel_values"] = batch["pixel_values"].double()
    for projection in projections(model):
        wrap(projection)
        with torch.no_grad():
            projection.parametrizations.weight[0].eval()
            next(projection.parametrizations.weight.parameters()).mul_(3)
    found = step(model, batch)
    assert all(p.grad.any() for p in projections(model)[0].parametrizations.parameters())
    for projection in projections(model):
        parametrize.remove_parametrizations(projection, "weight")
    # Rounding of float64, products in another order.
    torch.testing.assert_close(found["logits"], logits(model, batch), rtol=0, atol=1e-10)


def test_spectral_norm_by_hooks(model, batch):
    for projection in projections(model):
        nn.utils.spectral_norm(projection)
        with torch.no_grad():
            projection.weight_orig.mul_(3)
            projection.weight_u.copy_(nn.functional.normalize(torch.rand_like(projection.weight_u), dim=0))
    found = logits(model, batch)
    for projection in projections(model):
        nn.utils.remove_spectral_norm(projection)
    assert_close(found, logits(model, batch))


def test_offloaded_to_the_cpu(model, batch):
    accelerate = pytest.importorskip("accelerate")
    expected = logits(model, batch)
    offloaded = accelerate.cpu_offload(copy.deepcopy(model), execution_device=torch.device("cpu"))
    assert all(parameter.is_meta for parameter in offloaded.parameters())
    assert_close(logits(offloaded, batch), expected)


@pytest.mark.parametrize("model", OF_THE_PACKAGE, indirect=True)
def test_offloaded_to_disk(model, batch, tmp_path):
    accelerate = pytest.importorskip("accelerate")
    expected = logits(model, batch)
    offloaded = accelerate.disk_offload(copy.deepcopy(model), tmp_path / "all", execution_device=torch.device("cpu"))
    assert all(parameter.is_meta for parameter in offloaded.parameters())
    assert_close(logits(offloaded, batch), expected)

    places = {"liere": "cpu", "classifier": "cpu", "liere.layers.1": "disk", "liere.rotary_encoding": "disk"}
    dispatched = accelerate.dispatch_model(
        copy.deepcopy(model), places, main_device="cpu", offload_dir=tmp_path / "some", force_hooks=True
    )
    assert_close(logits(dispatched, batch), expected)

    model.save_pretrained(tmp_path / "model")
    places = {name: "cpu" for name, _ in model.liere.named_children()}
    places = {f"liere.{name}": "cpu" for name in places if name != "layers"}
    places |= {"liere.layers.0": "cpu", "liere.layers.1": "disk", "classifier": "cpu"}
    loaded = type(model).from_pretrained(tmp_path / "model", device_map=places, offload_folder=tmp_path / "folder")
    assert loaded.liere.layers[1].attention.q_proj.weight.is_meta
    assert_close(logits(loaded, batch), expected)


def test_lora_trains_merges_and_reloads(model, batch, tmp_path):
    peft = pytest.importorskip("peft")
    base, expected = copy.deepcopy(model), logits(model, batch)
    tuned = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "k_proj"], r=2))
    # LoRA starts with nothing added.
    assert_close(logits(tuned, batch), expected)
    optimizer = torch.optim.SGD([p for p in tuned.parameters() if p.requires_grad], lr=1.0)
    for _ in range(2):
        tuned(**batch).loss.backward()
        optimizer.step()
    trained = logits(tuned, batch)
    assert (trained - expected).abs().max() > 1e-3
    tuned.save_pretrained(tmp_path)
    assert_close(logits(peft.PeftModel.from_pretrained(base, tmp_path).eval(), batch), trained)
    merged = tuned.merge_and_unload()
    assert {type(projection) for projection in projections(merged)} == {nn.Linear}
    assert_close(logits(merged, batch), trained)


def test_torchao_int8_weights(model, batch, tmp_path):
    quantization = pytest.importorskip("torchao.quantization", reason="install hf-liere[quantization]")
    expected = logits(model, batch)
    reference = copy.deepcopy(model)
    model.save_pretrained(tmp_path)
    config = quantization.Int8WeightOnlyConfig()
    quantization.quantize_(model, config)
    with torch.no_grad():
        for module, plain in zip(model.modules(), reference.modules()):
            if isinstance(module, nn.Linear):
                plain.weight.copy_(module.weight.dequantize())
    assert_close(logits(model, batch), logits(reference, batch))
    assert (logits(model, batch) - expected).abs().max() < 0.1
    loaded = type(model).from_pretrained(tmp_path, quantization_config=TorchAoConfig(config), device_map="cpu")
    assert type(projections(loaded)[0].weight) is not nn.Parameter
    assert_close(logits(loaded, batch), logits(model, batch))
    if model.config.position_encoding != "liere":
        with pytest.raises(ValueError, match="not into a Linear with a .* for its weight or bias: merge"):
            model.fold_rotations()


def test_bitsandbytes_8_bits(model, batch):
    bitsandbytes = pytest.importorskip("bitsandbytes", reason="install hf-liere[quantization]")
    expected = logits(model, batch)
    for layer in model.liere.layers:
        for name in ("q_proj", "k_proj"):
            plain = getattr(layer.attention, name)
            quantized = bitsandbytes.nn.Linear8bitLt(*plain.weight.shape[::-1], has_fp16_weights=False)
            quantized.load_state_dict(plain.state_dict())
            setattr(layer.attention, name, quantized.to("cpu"))
    # 8 bits in weights of order 0.2 and states of order 1.
    torch.testing.assert_close(logits(model, batch), expected, rtol=0, atol=0.1)


def test_folding_refuses_what_would_be_lost(tiny, batch):
    model = build(tiny, "comrope_ld")
    expected = logits(model, batch)

    def hooked(projection):
        projection.register_forward_hook(lambda *args: None)

    def pruned(projection):
        prune.l1_unstructured(projection, "weight", amount=0.5)
        # The gradient of the weight that is made from the original cannot be copied.
        projection.weight = projection.weight.detach()

    def moved(projection):
        weight = projection.weight.detach()
        del projection.weight
        projection.weight = weight

    def replaced(projection):
        forward = projection.forward
        projection.forward = lambda states: forward(states)

    refusals = {
        "a Linear with hooks": (hooked, pruned),
        "ParametrizedLinear": (parametrizations.weight_norm,),
        r"a Linear with the parameters \['bias'\]": (moved,),
        "a Linear whose forward was replaced": (replaced,),
    }
    for name, changes in refusals.items():
        for change in changes:
            other = copy.deepcopy(model)
            change(projections(other)[-1])
            with pytest.raises(ValueError, match=f"not into {name}: merge adapters, make pruning"):
                other.fold_rotations()
    projection = projections(model)[0]
    handle = projection.register_forward_hook(lambda *args: None)
    handle.remove()
    assert_close(logits(model.fold_rotations(), batch), expected)


def test_costs_count_what_runs(tiny):
    """The basis of the weights of query and key is changed, not that of the states, also under an operation counter."""
    cost = count_cost(build(tiny, "comrope_ld"), torch.zeros(1, 3, 16, 16))
    layers, width, tokens, size = 2, 48, 17, 4
    assert cost.rotating_operations == layers * 2 * (width * (width + 1) * size + tokens * width // 2 * 4)
