"""Models that timm creates by the names `liere_vit_…`, training by the parts of timm, and models of it in others."""

import pytest
import timm
import torch
from library_checks import normal, randomize
from renamed_weights import timm_weights
from timm.loss import LabelSmoothingCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.utils import CheckpointSaver, ModelEmaV3
from timm_cases import BY_NAME, ZEROS
from transformers import TimmWrapperConfig, TimmWrapperForImageClassification

from hf_liere import (
    LieREViTConfig,
    LieREViTForImageClassification,
    RotaryPatchConfig,
    is_patched,
    load_rotary,
    patch,
    rotary_parameters,
    save_rotary,
    unpatch,
)


VIT = BY_NAME["vit_tiny_patch16_224"]


def create(name="liere_vit_tiny_patch16_224", **options):
    import hf_liere.timm_models  # noqa: F401

    return timm.create_model(name, **{"num_classes": 3, "img_size": 32, "in_chans": 1, "depth": 2, **options})


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["comrope_ld", "rope_mixed"])
def test_muon_leaves_rotations_that_are_named_to_adamw(encoding):
    """As on the page, with the shapes of ViT-S, of which Muon would take some."""
    taken = {}
    for fallback in ((), ("*rotary_encoding*",)):
        shape = {"embed_dim": 384, "depth": 12, "num_heads": 6, "mlp_ratio": 0.25, "num_classes": 5}
        model = timm.models.VisionTransformer(img_size=32, patch_size=8, **shape)
        patch(model, RotaryPatchConfig(position_encoding=encoding))
        # Orthogonalising all weights takes a minute.
        model.blocks[1:].requires_grad_(False)
        optimizer = create_optimizer_v2(model, opt="muon", lr=1e-3, weight_decay=0.05, fallback_list=fallback)
        model(torch.randn(2, 3, 32, 32)).square().mean().backward()
        optimizer.step()
        taken[fallback] = [name for name, value in rotary_parameters(model) if optimizer.state[value].get("use_muon")]
        assert optimizer.state[model.blocks[0].attn.qkv.weight]["use_muon"]
    assert taken[("*rotary_encoding*",)] == []
    assert taken[()] or encoding != "comrope_ld"


def test_training_by_the_parts_of_timms_script(tmp_path):
    """A model by its registered name: optimizer, schedule, average of weights and checkpoint of timm."""
    torch.manual_seed(0)
    model = create(drop_path_rate=0.1, patch_drop_rate=0.25, position_encoding="comrope_ld", block_size=8)
    optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.05, layer_decay=0.75)
    decays = {id(value): group["weight_decay"] for group in optimizer.param_groups for value in group["params"]}
    assert {decays[id(value)] for _, value in rotary_parameters(model)} == {0.0} < set(decays.values())
    scheduler, epochs = create_scheduler_v2(optimizer, sched="cosine", num_epochs=4, warmup_epochs=1)
    average, criterion = ModelEmaV3(model, decay=0.5), LabelSmoothingCrossEntropy(0.1)
    before, losses = {name: value.clone() for name, value in rotary_parameters(model)}, []
    labels = torch.tensor([0, 1, 2]).repeat(4)
    images = normal(12, 1, 32, 32) + labels.view(-1, 1, 1, 1) - 1
    for epoch in range(epochs):
        scheduler.step(epoch)
        loss = criterion(model.train()(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        average.update(model, step=epoch)
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert all(not torch.equal(value, before[name]) for name, value in rotary_parameters(model))
    folders = {"checkpoint_dir": str(tmp_path), "recovery_dir": str(tmp_path)}
    CheckpointSaver(model, optimizer, model_ema=average, **folders).save_checkpoint(0, metric=1.0)
    options = {"position_encoding": "comrope_ld", "block_size": 8, "checkpoint_path": str(tmp_path / "last.pth.tar")}
    with torch.no_grad():
        # timm prefers the average.
        expected = average.module.eval()(images)
        assert torch.equal(create(**options).eval()(images), expected)
        assert not torch.equal(expected, model.eval()(images))


@pytest.mark.parametrize("encoding", ["liere", "comrope_ld", "rope_mixed"])
@torch.no_grad()
def test_registered_models_are_ours(encoding):
    """The same weights in `LieREViTForImageClassification` give the same logits."""
    torch.manual_seed(0)
    model = create(dynamic_img_size=True, position_encoding=encoding).eval()
    fields = {"hidden_size": 192, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 768}
    fields |= {"num_channels": 1, "image_size": 32, "num_labels": 3, "layer_norm_eps": 1e-6}
    ours = LieREViTForImageClassification(LieREViTConfig(**fields, position_encoding=encoding)).eval()
    rotations = model.rotary_encoding.encoding.named_parameters()
    rotations = {f"liere.rotary_encoding.{name}": value for name, value in rotations}
    ours.load_state_dict(timm_weights(model) | rotations)
    for size in ((32, 32), (48, 16)):
        images = normal(2, 1, *size)
        # Queries and keys are one product in timm and two here.
        torch.testing.assert_close(ours(images).logits, model(images), rtol=0, atol=1e-5)


def test_registered_models_take_timms_arguments():
    sizes = ("tiny", "small", "base", "large")
    model = create()
    assert set(timm.list_models("liere_vit_*")) == {f"liere_vit_{size}_patch16_224" for size in sizes}
    assert model.default_cfg["architecture"] == "liere_vit_tiny_patch16_224"
    assert model.pos_embed is None and model.get_classifier().out_features == 3
    model.reset_classifier(0)
    assert model(normal(1, 1, 32, 32)).shape == (1, 192)
    features = create(features_only=True, out_indices=[1], position_encoding="rope_mixed")
    assert is_patched(features) and features(normal(1, 1, 32, 32))[0].shape == (1, 192, 2, 2)
    refused = {
        "accepted are liere": {"position_encoding": "other"},
        "nothing to start": {"rotary_init": "pretrained"},
    }
    for reason, options in refused.items():
        with pytest.raises(ValueError, match=reason):
            create(**options)
    with pytest.raises(RuntimeError, match="No pretrained weights exist"):
        create(pretrained=True)


@torch.no_grad()
def test_a_model_of_transformers_around_one_of_timm(tmp_path):
    """Its part can be patched and stored; what from_pretrained could not restore is refused."""
    sizes = {"embed_dim": 32, "depth": 2, "num_heads": 2, "img_size": (48, 64)}
    config = TimmWrapperConfig(architecture=VIT.name, model_args=sizes)
    model, inputs = TimmWrapperForImageClassification(config).eval(), VIT.inputs()
    with pytest.raises(ValueError, match="not routed through transformers' attention interface"):
        patch(model, ZEROS)
    before = model(inputs["x"]).logits
    patch(model.timm_model, ZEROS)
    assert torch.equal(model(inputs["x"]).logits, before)
    randomize(model)
    expected = model(inputs["x"]).logits
    with pytest.raises(ValueError, match=r"rotations of timm_model \(VisionTransformer\), which from_p"):
        model.save_pretrained(tmp_path / "whole")
    save_rotary(model.timm_model, tmp_path / "rotations")
    unpatch(model).save_pretrained(tmp_path / "whole")
    loaded = TimmWrapperForImageClassification.from_pretrained(tmp_path / "whole").eval()
    load_rotary(loaded.timm_model, tmp_path / "rotations")
    assert torch.equal(loaded(inputs["x"]).logits, expected) and not torch.equal(expected, before)
