import copy
import sys

import pytest
import torch
from encoding_cases import ENCODINGS, NEUTRAL, ROUNDED
from encoding_cases import fields as fields_of
from model_cases import of_sizes, own, padded, timed
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import ViTConfig, ViTForImageClassification

import hf_liere
from hf_liere.fast.dispatch import as_on_accelerators


def classifier(config, implementation="sdpa"):
    config = copy.deepcopy(config)
    config._attn_implementation = implementation
    torch.manual_seed(0)
    # Wide initial weights, so that attention is far from uniform and a wrong rotation is seen.
    config.initializer_range = 0.2
    return hf_liere.LieREViTForImageClassification(config).eval()


def images(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def test_eager_attention_returns_its_weights(tiny):
    outputs = classifier(tiny(), "eager")(images(2, 3, 16, 16), output_attentions=True, output_hidden_states=True)
    assert [tuple(h.shape) for h in outputs.hidden_states] == [(2, 17, 48)] * 3
    assert [tuple(weights.shape) for weights in outputs.attentions] == [(2, 2, 17, 17)] * 2
    for weights in outputs.attentions:
        torch.testing.assert_close(weights.sum(-1), torch.ones(2, 2, 17))


@pytest.mark.slow
@pytest.mark.parametrize("kind, given", [("image", None), ("points", padded), ("image", of_sizes)])
def test_flex_attention_agrees(kind, given):
    # Its kernels take heads of powers of two.
    case = own(kind, "liere", given, hidden_size=32, pooling="mean", initializer_range=0.2)
    model, inputs = case.make().eval(), case.inputs()
    with torch.no_grad():
        expected = model(**inputs).logits
        model.set_attn_implementation("flex_attention")
        torch.testing.assert_close(model(**inputs).logits, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("encoding", NEUTRAL)
def test_zero_generators_reproduce_vit(tiny, encoding):
    """transformers' own ViT with the same weights and an empty position table."""
    config = tiny(rotary_init="zeros", **fields_of(encoding))
    vit_config = ViTConfig(
        **{
            name: getattr(config, name)
            for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "image_size")
        },
        patch_size=config.patch_size,
        layer_norm_eps=config.layer_norm_eps,
        num_labels=config.num_labels,
        initializer_range=0.2,
    )
    vit, model = ViTForImageClassification(vit_config).eval(), classifier(config)
    vit.vit.embeddings.position_embeddings.data.zero_()
    weights = {
        name.replace("vit.", "liere.", 1): value
        for name, value in vit.state_dict().items()
        if "position_embeddings" not in name
    }
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert unexpected == [] and all("rotary_encoding" in name for name in missing)
    pixel_values = images(2, 3, 16, 16)
    tolerance = 1e-5 if encoding in ROUNDED else 0
    torch.testing.assert_close(model(pixel_values).logits, vit(pixel_values).logits, rtol=0, atol=tolerance)
    # And with the table, of which ViT's is the special case.
    vit.vit.embeddings.position_embeddings.data.normal_()
    model = classifier(tiny(rotary_init="zeros", use_absolute_position_embeddings=True, **fields_of(encoding)))
    weights["liere.embeddings.position_embeddings"] = vit.vit.embeddings.position_embeddings.data
    model.load_state_dict(weights, strict=False)
    torch.testing.assert_close(model(pixel_values).logits, vit(pixel_values).logits, rtol=0, atol=1e-5)
    larger = images(2, 3, 24, 24)
    expected = vit(larger, interpolate_pos_encoding=True).logits
    torch.testing.assert_close(model(larger).logits, expected, rtol=0, atol=1e-5)


DROPOUTS = {"drop_path_rate": 0.5, "hidden_dropout_prob": 0.1, "mlp_dropout_prob": 0.1}
CHECKPOINTED = {
    **{name: own("image", name, **DROPOUTS, patch_dropout_prob=0.5) for name in ("none", "absolute", *ENCODINGS)},
    "sizes": own("image", "comrope_ld", of_sizes, **DROPOUTS, position_perturbation=0.3),
    "video": own("video", "liere", timed, coordinates="physical", physical_unit=8.0, **DROPOUTS),
    "points": own("points", "comrope_ld", padded, **DROPOUTS),
}


@pytest.mark.parametrize("name", CHECKPOINTED)
def test_gradient_checkpointing_gives_the_same_gradients(name):
    """With the same numbers drawn."""
    case, gradients = CHECKPOINTED[name], []
    model, inputs = case.make().train(), case.inputs()
    for enable in (lambda: None, model.gradient_checkpointing_enable):
        enable()
        torch.manual_seed(3)
        model.zero_grad()
        model(**inputs).logits.square().sum().backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-6)


def test_reentrant_checkpointing_is_refused(tiny):
    """It would differentiate with respect to the states alone."""
    model = classifier(tiny(**fields_of("liere"))).train()
    with pytest.raises(ValueError, match="use_reentrant=True was given"):
        model.gradient_checkpointing_enable({"use_reentrant": True})
    assert not model.liere.layers[0].gradient_checkpointing


class WithoutFloat64(TorchDispatchMode):
    """Fails as a device without float64 does."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        outputs = function(*args, **(kwargs or {}))
        for output in tree_leaves(outputs):
            if isinstance(output, torch.Tensor) and output.dtype == torch.float64:
                raise TypeError(f"{function} makes a float64 tensor")
        return outputs


@pytest.mark.parametrize("encoding", ["none", "absolute", *ENCODINGS])
def test_devices_without_float64(tiny, encoding, monkeypatch):
    """MPS has none: training with perturbed positions must get by without, and stay close."""
    model = classifier(tiny(position_perturbation=0.0 if encoding == "none" else 0.5, **fields_of(encoding)))
    pixel_values = images(2, 3, 8, 12)
    expected = model(pixel_values).logits
    for name, module in list(sys.modules.items()):
        if name.startswith("hf_liere.") and hasattr(module, "working_dtype"):
            monkeypatch.setattr(module, "working_dtype", lambda device: torch.float32)
    with WithoutFloat64():
        # Six squarings in float32, and two layers.
        torch.testing.assert_close(model(pixel_values).logits, expected, rtol=0, atol=1e-3)
        model.train()(pixel_values, labels=torch.tensor([0, 1])).loss.backward()


def test_rotations_do_not_depend_on_the_batch(tiny):
    model = classifier(tiny(**fields_of("liere")))
    shapes = []
    for layer in model.liere.layers:
        layer.attention.register_forward_pre_hook(lambda module, args: shapes.append(tuple(args[1].blocks.shape)))
    model(images(5, 3, 16, 16))
    assert shapes == [(1, 2, 17, 6, 4, 4)] * 2


def test_stochastic_depth(tiny):
    model = classifier(tiny(drop_path_rate=0.4, num_hidden_layers=3, **fields_of("none"))).train()
    assert [layer.drop_path.rate for layer in model.liere.layers] == [0.0, 0.2, 0.4]
    drop_path = model.liere.layers[2].drop_path
    branch = drop_path(torch.ones(4000, 2, 3))
    values = branch[:, 0, 0]
    assert set(values.unique().tolist()) == {0.0, torch.tensor(1 / 0.6).item()}
    assert (branch == values[:, None, None]).all()
    # Four standard deviations of a mean of 4000 draws.
    assert abs((values == 0).float().mean() - 0.4) < 4 * (0.24 / 4000) ** 0.5
    assert torch.equal(drop_path.eval()(torch.ones(4, 2, 3)), torch.ones(4, 2, 3))


def test_backbone(tiny):
    torch.manual_seed(0)
    config = tiny(num_register_tokens=1, out_features=["stem", "stage2"], **fields_of("liere"))
    backbone = hf_liere.LieREViTBackbone(config).eval()
    pixel_values = images(2, 3, 8, 24)
    outputs = backbone(pixel_values)
    assert backbone.channels == [48, 48] and outputs.hidden_states is None
    assert [tuple(f.shape) for f in outputs.feature_maps] == [(2, 48, 2, 6)] * 2
    model = hf_liere.LieREViTModel(config).eval()
    model.load_state_dict(backbone.state_dict())
    expected = model(pixel_values).last_hidden_state[:, 2:].transpose(1, 2).unflatten(-1, (2, 6))
    assert torch.equal(outputs.feature_maps[1], expected)
    assert len(backbone(pixel_values, output_hidden_states=True).hidden_states) == 3
    config.reshape_hidden_states = False
    assert backbone(pixel_values).feature_maps[0].shape == (2, 14, 48)


@torch.no_grad()
def test_head_width_hidden_classifier_and_norm_of_embeddings(tiny):
    config = tiny(hidden_size=50, head_dim=16, classifier_hidden_size=7, use_pre_layernorm=True, **fields_of("liere"))
    model = classifier(config)
    attention = model.liere.layers[0].attention
    assert attention.q_proj.weight.shape == (32, 50) and attention.o_proj.weight.shape == (50, 32)
    assert attention.scaling == 16**-0.5
    outputs = model(images(2, 3, 16, 16), output_hidden_states=True)
    first = outputs.hidden_states[0]
    torch.testing.assert_close(first.mean(-1), torch.zeros(2, 17), rtol=0, atol=1e-5)
    pooled = model.liere(images(2, 3, 16, 16)).pooler_output
    hidden = torch.relu(model.classifier[0](pooled))
    torch.testing.assert_close(outputs.logits, model.classifier[2](hidden))


def test_rotary_parameters(tiny):
    model = classifier(tiny(**fields_of("comrope_ld")))
    names = ["liere.rotary_encoding.generators", "liere.rotary_encoding.multipliers"]
    assert [name for name, _ in model.rotary_parameters()] == names


def test_norms_that_are_too_large_give_nan(tiny):
    """The number of squarings suffices up to 3.2 · 2¹⁶, whatever the host of an accelerator does not read."""
    model = classifier(tiny(position_encoding="liere", block_size=8))
    with torch.no_grad(), as_on_accelerators():
        for factor, is_finite in ((1e3, True), (1e5, False)):
            for _, parameter in model.rotary_parameters():
                parameter.mul_(factor)
            assert model(images(1, 3, 16, 16)).logits.isfinite().all() == is_finite
