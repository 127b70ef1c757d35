"""Learned rotations in the vision transformers of timm, compared with timm itself."""

import math
import re
from dataclasses import replace

import pytest
import timm
import torch
from checkout import ROOT
from library_checks import find_starts, gradients, normal, randomize
from patching_checks import SHARED_CONFIG, refused, unit_grid
from reference import rotate_heads
from timm.layers import set_fused_attn
from timm_cases import BLOCKS, BY_NAME, CASES, PLANES, ZEROS, naflex, run
from torch import nn

from hf_liere import (
    RotaryPatchConfig,
    complete_model,
    patch,
    rotary_parameters,
    save_rotary,
    unpatch,
)
from hf_liere.encoding.kinds import ENCODINGS
from hf_liere.patching.libraries.timm_patch import EMBEDDINGS, SPECTRA
from hf_liere.storage.saved_model import SavedModel
from hf_liere.tools.cli import main
from hf_liere.tools.hub.cards import push_card


ROW = re.compile(r"^\| `(\w+)` \| ([^|]+) \| ([^|]+) \| ([^|]+) \| [^|]+ \|$", re.MULTILINE)
PAGE = (ROOT / "docs" / "timm.md").read_text(encoding="utf-8")
ROWS = {(kind, start): (exact, blocks) for kind, start, exact, blocks in ROW.findall(PAGE)}
CONFIGS = [(case, config) for case in CASES for config in case.configs]
VIT, DEIT = BY_NAME["vit_tiny_patch16_224"], BY_NAME["deit_tiny_distilled_patch16_224"]
DINO, MIXED = BY_NAME["vit_small_patch16_dinov3"], BY_NAME["vit_small_patch16_rope_mixed_224"]
EVA, PERCEPTION = BY_NAME["eva02_tiny_patch14_224"], BY_NAME["vit_pe_core_tiny_patch16_384"]
NAFLEX, AXIAL = BY_NAME["naflexvit_base_patch16_gap"], BY_NAME["naflexvit_base_patch16_par_gap"]
patched = pytest.mark.parametrize(
    ("case", "config"), CONFIGS, ids=[f"{case.name}-{config.position_encoding}" for case, config in CONFIGS]
)


def describe(model):
    """The class of a model and where its rotations start, as the page names them."""
    rope = getattr(model, "rope", None)
    return type(model).__name__, "zero" if rope is None else f"`{type(rope).__name__}`"


def start_error(case, config, inputs, training=False, **options):
    """How much a patch changes the output, where patches may be dropped by the same draw."""
    model, found = case.build(**options).train(training), []
    for prepare in (lambda model: model, lambda model: patch(model, config)):
        torch.manual_seed(3)
        found.append(run(prepare(model), inputs).detach())
    return (found[1] - found[0]).abs().max()


@torch.no_grad()
def test_every_encoding_starts_at_zero():
    model, inputs = VIT.build(), VIT.inputs()
    before = run(model, inputs)
    for encoding, traits in ENCODINGS.items():
        if traits.learned:
            config = RotaryPatchConfig(position_encoding=encoding)
            error = (run(patch(model, config), inputs) - before).abs().max()
            # The basis of circulant_string is never the identity.
            assert error < 1e-5 if encoding == "circulant_string" else error == 0, encoding
            unpatch(model)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_table_of_the_page(case):
    """What it states of every class and rotation, computed."""
    config = PLANES if case.rotates else ZEROS
    assert ROWS[describe(case.build())] == find_starts(run, case, config, ("rope_mixed", "liere", "comrope_ld"))


def test_table_has_every_class_and_rotation():
    assert set(ROWS) == {describe(case.build()) for case in CASES}
    assert {kind for kind, _ in ROWS} == {*EMBEDDINGS, "VisionTransformerDistilled"}
    assert {start.strip("`") for _, start in ROWS} == {*SPECTRA, "zero"}


# Images of another size, and patches that are dropped.
FORMS = {
    "other_size": {"options": {"dynamic_img_size": True}, "size": (80, 32)},
    "padded_size": {"options": {"dynamic_img_size": True, "dynamic_img_pad": True}, "size": (50, 70)},
    "dropped": {"options": {"patch_drop_rate": 0.5}, "training": True},
    "dropped_at_another_size": {
        "options": {"patch_drop_rate": 0.3, "dynamic_img_size": True}, "size": (80, 32), "training": True
    },
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", [VIT, PERCEPTION, DINO, MIXED], ids=lambda case: case.name)
@torch.no_grad()
def test_other_forms_of_images(case, form):
    given = FORMS[form]
    inputs = {"x": normal(2, 3, *given.get("size", case.size))}
    for config in case.configs:
        error = start_error(case, config, inputs, given.get("training", False), **given["options"])
        assert error < 1e-5 if config is BLOCKS else error == 0


@pytest.mark.parametrize("case", [case for case in CASES if "naflex" in case.name], ids=lambda case: case.name)
@torch.no_grad()
def test_batches_of_several_sizes(case):
    """With patches that are dropped, as one image; and every image is placed as it is alone."""
    for config in case.configs:
        for inputs, training in (({"x": normal(2, 3, 80, 32)}, False), ({"x": normal(2, 3, 48, 64)}, True)):
            error = start_error(case, config, inputs, training, patch_drop_rate=0.4)
            assert error < 1e-5 if config is BLOCKS else error == 0
        error = start_error(case, config, case.inputs(), True, patch_drop_rate=0.4)
        assert error < 1e-5 if config is BLOCKS else error == 0
        model = patch(case.build(), config)
        randomize(model)
        together = run(model, naflex((2, 3), (4, 2), (3, 3)))
        batch = naflex((2, 3), (4, 2), (3, 3))["x"]
        for sample, length in enumerate((6, 8, 9)):
            alone = {name: value[sample : sample + 1, :length] for name, value in batch.items()}
            # Sums over other numbers of patches round by up to some 1e-6 of the largest logit.
            atol = 2e-6 * together[sample].abs().max().item()
            torch.testing.assert_close(run(model, {"x": alone})[0], together[sample], rtol=0, atol=atol)


@pytest.mark.parametrize("case", [EVA, DINO, BY_NAME["vit_small_patch16_lingbot"], AXIAL], ids=lambda case: case.name)
@torch.no_grad()
def test_learned_frequencies_are_those_of_another_temperature(case):
    """The model with δ = ln(ω′/ω) computes what timm computes with θ′, whose frequencies are ω′."""
    model, other, inputs = case.build(), case.build(rope_temperature=300.0), case.inputs()
    other.load_state_dict(model.state_dict())
    before, expected = run(model, inputs), run(other, inputs)

    def frequencies(rope):
        if hasattr(rope, "inv_freq"):
            return rope.inv_freq[rope.axis > 0].double()
        return (rope.bands if hasattr(rope, "bands") else 1 / rope.periods).double().repeat(2)

    patch(model, PLANES).rotary_encoding.log_factors.copy_((frequencies(other.rope) / frequencies(model.rope)).log())
    assert (run(model, inputs) - expected).abs().max() < 1e-5 < 1e-3 < (before - expected).abs().max()


def positions_by_loops(grids, kept, prefix, rotates_prefix):
    """(B, P + N, 2) of `unit` coordinates, with prefix tokens at the centre or unrotated; padding is not rotated."""
    rows = []
    for grid, indices in zip(grids, kept):
        places = nn.functional.pad(unit_grid(*grid), (0, 0, 0, 12 - math.prod(grid)))
        rows.append(torch.cat([places.new_full((prefix, 2), 0.5 if rotates_prefix else 0.0), places[indices]]))
    return torch.stack(rows)


def observe(model):
    """What later passes fill: queries and keys before they are rotated, weights of attention, and tokens of patches."""
    seen, prefix = {}, model.num_prefix_tokens

    def keep(key, read):
        return lambda module, args, output=None: seen.__setitem__(key, read(args, output))

    for layer, block in enumerate(model.blocks):
        for part in "qk":
            # Hooks that come first see the states before they are rotated.
            getattr(block.attn, f"{part}_norm").register_forward_hook(keep((layer, part), lambda _, x: x.double()))
        block.attn.attn_drop.register_forward_pre_hook(keep(layer, lambda args, _: args[0].double()))
    for key, module in (("before", model.patch_drop or model.norm_pre), ("after", model.norm_pre)):
        module.register_forward_pre_hook(keep(key, lambda args, _: args[0][:, prefix:]))
    return seen


@pytest.mark.parametrize("rotates_prefix", [True, False])
@pytest.mark.parametrize("form", ["whole", "dropped", "several_sizes"])
@torch.no_grad()
def test_attention_weights_are_those_of_explicit_rotations(form, rotates_prefix):
    case, grids = (NAFLEX, [(3, 4), (2, 5), (3, 4)]) if form == "several_sizes" else (VIT, [(2, 5)] * 2)
    set_fused_attn(False)
    try:
        model = case.build(dynamic_img_size=True, qk_norm=True, patch_drop_rate=0.5) if case is VIT else case.build()
    finally:
        set_fused_attn(True)
    seen, prefix = observe(model), model.num_prefix_tokens
    randomize(patch(model, replace(SHARED_CONFIG, rotate_prefix=rotates_prefix)))
    run(model.train(form == "dropped"), {"x": normal(2, 3, 32, 80)} if case is VIT else naflex(*grids))
    kept = torch.cdist(seen["after"], seen["before"]).argmin(-1).tolist()
    assert all(len(set(indices)) == {"dropped": 5}.get(form, len(indices)) for indices in kept)
    positions = positions_by_loops(grids, kept, prefix, rotates_prefix)
    encoding, count = model.rotary_encoding.encoding, positions.shape[1]
    # Padding attends and is attended to, as in timm, but not by the others.
    valid = torch.tensor([[index < prefix + math.prod(grid) for index in range(count)] for grid in grids])
    for layer in range(2):
        query, key = (
            rotate_heads(seen[layer, part], positions, dict(encoding.named_parameters()), encoding.config, layer)
            for part in "qk"
        )
        logits = (query @ key.transpose(-1, -2) / 4).masked_fill(~valid[:, None, None], -math.inf)
        found, expected = (x * valid[:, None, :, None] for x in (seen[layer], logits.softmax(-1)))
        # Rotations and attention of the model are float32.
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-6)


def test_chosen_layers_and_several_key_heads():
    case = BY_NAME["vit_base_patch16_sapiens2"]
    options = {"num_kv_heads": (4, 2)}
    model, inputs = case.build(**options), case.inputs()
    before = run(model, inputs)
    with pytest.raises(ValueError, match=r"\[\(2, 16\), \(4, 16\)\]: name equal ones in layers"):
        patch(model, BLOCKS)
    assert torch.equal(run(patch(model, PLANES), inputs), before)
    unpatch(model)
    patch(model, replace(BLOCKS, layers=[1]))
    assert (run(model, inputs) - before).abs().max() < 1e-5
    assert next(rotary_parameters(model))[1].shape[1:3] == (1, 2)


@patched
def test_checkpointed_layers_have_the_same_gradients(case, config):
    """Even if another image was seen before the backward pass."""
    options = {} if case is DEIT else {"patch_drop_rate": 0.3}
    options |= {} if "naflex" in case.name else {"dynamic_img_size": True}
    found = []
    for checkpointing in (False, True):
        model = case.build(**options).train()
        randomize(patch(model, config))
        model.set_grad_checkpointing(checkpointing)
        torch.manual_seed(4)
        loss = run(model, case.inputs()).square().mean()
        with torch.no_grad():
            run(model, {"x": normal(2, 3, *(28, 42) if "patch14" in case.name else (32, 48))})
        loss.backward()
        found.append({name: value.grad for name, value in model.named_parameters() if value.grad is not None})
    plain, checkpointed = found
    assert plain.keys() == checkpointed.keys() >= {name for name, _ in rotary_parameters(model)}
    assert all(torch.equal(plain[name], checkpointed[name]) for name in plain)


COMPILED = [both for both in CONFIGS if both[0] in (VIT, DINO, MIXED, NAFLEX)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "config"), COMPILED, ids=[f"{case.name}-{config.position_encoding}" for case, config in COMPILED]
)
def test_a_graph_recomputes_checkpointed_blocks_without_hooks(case, config):
    model, inputs = case.build(depth=1).train(), {"x": normal(2, 3, *case.size)}
    randomize(patch(model, config))
    expected = gradients(run, model, inputs)
    torch._dynamo.reset()
    model.set_grad_checkpointing()
    found = gradients(run, torch.compile(model, backend="aot_eager", fullgraph=True), inputs)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[f"_orig_mod.{name}"], gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("case", [VIT, DEIT, EVA, AXIAL], ids=["vit", "distilled", "eva", "naflex"])
def test_cards_load_the_model_from_timm_and_commands_refuse_the_rotations(case, tmp_path, capsys):
    model = case.build()
    save_rotary(patch(model, case.configs[0]), tmp_path / "rotations")
    card = str(push_card(SavedModel(tmp_path / "rotations"), "tester/rotations"))
    assert "library_name: timm" in card and "AutoModel" not in card
    assert 'base = timm.create_model("BASE", pretrained=True)' in card
    assert main(["rope", str(tmp_path / "rotations")]) == 1
    error = capsys.readouterr().err
    assert "contains rotations without the configuration of a model; accepted: that of its base" in error


@pytest.mark.parametrize(("case", "config"), [(VIT, ZEROS), (DINO, PLANES)], ids=["vit", "dino"])
@torch.no_grad()
def test_methods_of_models(case, config):
    """Features, features of layers, the head and its replacement are those of the whole model."""
    model, images = case.build(), case.inputs()["x"]
    randomize(patch(model, config))
    expected = model(images)
    features = model.forward_features(images)
    assert torch.equal(model.forward_head(features), expected)
    last, layers = model.forward_intermediates(images, output_fmt="NLC", norm=True)
    assert len(layers) == 2 and torch.equal(last, features)
    assert torch.equal(layers[1], features[:, model.num_prefix_tokens :])
    options = {"intermediates_only": True, "stop_early": True, "output_fmt": "NLC", "norm": True}
    assert torch.equal(model.forward_intermediates(images, [0], **options)[0], layers[0])
    model.reset_classifier(3)
    assert run(model, {"x": images}).shape == (2, 3) and model.get_classifier().out_features == 3
    assert torch.equal(model.forward_features(images), features)
    mask = torch.ones(features.shape[1], features.shape[1], dtype=torch.bool).tril()
    assert not torch.equal(model.forward_features(images, attn_mask=mask), features)
    model.set_input_size((64, 80))
    assert model(normal(1, 3, 64, 80)).shape == (1, 3)


def test_a_vision_transformer_inside_a_model():
    trunk = VIT.build()
    model = nn.ModuleDict({"visual": trunk, "other": nn.Linear(2, 2)})
    patch(model, replace(ZEROS, target="visual"))
    assert [name for name, _ in rotary_parameters(model)] == ["visual.rotary_encoding.encoding.generators"]
    with pytest.raises(ValueError, match=r"target='other' matches no vision transformer; there are \['visual'\]"):
        patch(unpatch(model), replace(ZEROS, target="other"))


class OtherBlock(nn.Module):
    """Attends in its own way."""

    num_heads = 2


def replace_block(model):
    model.blocks[1] = OtherBlock()
    return model


def replace_rope(model):
    model.rope.forward = None
    model.rope.__class__ = type("RotaryEmbeddingOther", (type(model.rope),), {})
    return model


def change_frequencies(model):
    """A release of timm that computes other angles."""
    model.rope.periods *= 1.5
    model.rope._get_pos_embed_from_coords = lambda coords: (torch.zeros(len(coords), 16), torch.ones(len(coords), 16))
    return model


REFUSED = {
    "resnet": (lambda: timm.create_model("resnet10t"), ZEROS, "not a vision transformer of timm .* accepted: VisionT"),
    "swin": (lambda: timm.create_model("swin_tiny_patch4_window7_224"), ZEROS, "SwinTransformer is not"),
    "beit": (lambda: timm.create_model("beit_base_patch16_224", depth=1), ZEROS, "Beit is not"),
    "patched": (lambda: patch(VIT.build(), ZEROS), ZEROS, "VisionTransformer is patched already"),
    "pretrained": (VIT.build, PLANES, "VisionTransformer does not rotate, .* accepted: zeros"),
    "zeros": (DINO.build, ZEROS, "Eva already rotates query and key; accepted: pretrained"),
    "mixed": (MIXED.build, PLANES, "learns the frequencies of every layer and head already: train rope.freqs"),
    "shared": (MIXED.build, replace(BLOCKS, share_layers=True), "share_layers=True: the layers of the start rotate"),
    "block_size": (DINO.build, replace(BLOCKS, block_size=6), "block_size=6"),
    "layers": (VIT.build, replace(ZEROS, layers=[2]), r"layers=\[2\] do not match"),
    "table": (VIT.build, replace(ZEROS, keep_absolute="drop"), "accepts interpolate"),
    "meta": (lambda: VIT.build().to("meta"), ZEROS, "parameters without values"),
    "parallel": (
        lambda: timm.create_model("vit_tiny_patch16_224", block_fn=timm.models.vision_transformer.ParallelScalingBlock),
        ZEROS,
        "blocks.0 of VisionTransformer attends by ParallelScalingBlock, .* accepted: Attention, AttentionRope",
    ),
    "differential": (lambda: VIT.build(attn_layer="diff"), ZEROS, "attends by DiffAttention"),
    "block": (lambda: replace_block(VIT.build()), ZEROS, "blocks.1 of VisionTransformer attends by OtherBlock"),
    "rope": (lambda: replace_rope(DINO.build()), PLANES, "rotates by a RotaryEmbeddingOther; accepted: Rot"),
    "release": (lambda: change_frequencies(DINO.build()), PLANES, "computes other rotations than the releases of timm"),
    "augmented": (
        lambda: DINO.build(rope_rescale_coords=2.0),
        BLOCKS,
        "random coordinates in training, .*rescale_coords=2.0; accepted: rope_shift_coords=0, rope_jitter_coords=1",
    ),
    "distilled": (
        lambda: DEIT.build(patch_drop_rate=0.5),
        ZEROS,
        "has 2 tokens before the patches and drops all but 1",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name):
    build, config, reason = REFUSED[name]
    with refused(model := build(), reason):
        patch(model, config)
    with pytest.raises(ValueError, match="is not a class that transformers exports|is not patched"):
        complete_model(model)


def test_parts_that_run_outside_of_the_model():
    model = patch(VIT.build(), ZEROS)
    with pytest.raises(RuntimeError, match="VisionTransformer ran outside of it"):
        model.blocks[0](normal(1, 5, 32))
    run(model, VIT.inputs())
    model.blocks[0].attn.q_norm = nn.Identity()
    with pytest.raises(RuntimeError, match="q_norm or k_norm of Attention was replaced"):
        run(model, VIT.inputs())
