"""Learned rotations in the vision transformers of timm, compared with timm itself."""

import copy
import math
import re
from dataclasses import replace

import pytest
import timm
import torch
from checkout import ROOT
from library_checks import check_gradients, check_start, gradients, normal, randomize
from patching_checks import SHARED_CONFIG, check_adapters, unit_grid
from peft import LoraConfig, PeftModel, get_peft_model
from reference import head_rotation
from renamed_weights import timm_weights
from timm.layers import set_fused_attn
from timm.loss import LabelSmoothingCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.utils import CheckpointSaver, ModelEmaV3
from timm_cases import BLOCKS, BY_NAME, CASES, PLANES, ZEROS, naflex, run
from torch import nn
from transformers import TimmWrapperConfig, TimmWrapperForImageClassification

from hf_liere import (
    LieREViTConfig,
    LieREViTForImageClassification,
    RotaryPatchConfig,
    complete_model,
    is_patched,
    load_rotary,
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


@patched
def test_start_gradients_and_unpatching(case, config):
    """
    Learned frequencies and rotations that start at zero leave the same bits, and blocks are within rounding; so are
    the gradients of the weights, which proves that nothing between them changed.
    """
    start = check_start(run, case, config, is_exact=config is not BLOCKS)
    model, inputs, before = start[:3]
    if case.learned:
        # Blocks take the place of the frequencies that the model learned.
        assert start.plain.pop("rope.freqs").any() and "rope.freqs" not in start.learned
    for gradient in check_gradients(start):
        assert gradient.isfinite().all() and gradient.any(-1).all()
    randomize(model)
    assert (run(model, inputs) - before).abs().max() > 1e-3
    unpatch(model)
    assert type(model) is start.kind and not is_patched(model) and torch.equal(run(model, inputs), before)
    assert list(model.state_dict()) == start.weights
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert not any("rotary" in name for name in model.no_weight_decay())


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
@torch.no_grad()
def test_table_of_the_page(case):
    """What it states of every class and rotation, computed."""
    model, inputs = case.build(), case.inputs()
    exact, blocks = ROWS[describe(model)]
    found, before = {"exact": [], "close": []}, run(model, inputs)
    for encoding in ("rope_mixed", "liere", "comrope_ld"):
        config = replace(PLANES if case.rotates else ZEROS, position_encoding=encoding)
        config = replace(config, block_size=None if encoding == "rope_mixed" else 4)
        try:
            error = (run(patch(model, config), inputs) - before).abs().max()
        except ValueError as reason:
            assert case.learned and re.search("rope.freqs|cannot start with these frequencies", str(reason))
            continue
        found["exact" if error == 0 else "close"].append(f"`{encoding}`")
        assert error < 1e-5
        unpatch(model)
    assert (exact, blocks) == tuple(", ".join(found[kind]) or "–" for kind in ("exact", "close"))


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


@pytest.mark.parametrize("rotates_prefix", [True, False])
@pytest.mark.parametrize("form", ["whole", "dropped", "several_sizes"])
@torch.no_grad()
def test_attention_weights_are_those_of_explicit_rotations(form, rotates_prefix):
    case = NAFLEX if form == "several_sizes" else VIT
    set_fused_attn(False)
    try:
        model = case.build(dynamic_img_size=True, qk_norm=True, patch_drop_rate=0.5) if case is VIT else case.build()
    finally:
        set_fused_attn(True)
    config = replace(SHARED_CONFIG, rotate_prefix=rotates_prefix)
    seen = {}
    for layer, block in enumerate(model.blocks):
        for part, norm in (("query", block.attn.q_norm), ("key", block.attn.k_norm)):
            # Hooks that come first see the states before they are rotated.
            hook = lambda module, args, output, key=(layer, part): seen.__setitem__(key, output.double())  # noqa: E731
            norm.register_forward_hook(hook)
        hook = lambda module, args, layer=layer: seen.__setitem__(layer, args[0].double())  # noqa: E731
        block.attn.attn_drop.register_forward_pre_hook(hook)
    prefix = model.num_prefix_tokens
    if case is VIT:
        model.patch_drop.register_forward_pre_hook(lambda module, args: seen.update(before=args[0][:, prefix:]))
        model.norm_pre.register_forward_pre_hook(lambda module, args: seen.update(after=args[0][:, prefix:]))
    randomize(patch(model, config))
    grids = [(2, 5)] * 2 if case is VIT else [(3, 4), (2, 5), (3, 4)]
    model.train(form == "dropped")
    run(model, {"x": normal(2, 3, 32, 80)} if case is VIT else naflex(*grids))
    if form == "several_sizes":
        kept = [list(range(12))] * 3
    else:
        kept = torch.cdist(seen["after"], seen["before"]).argmin(-1).tolist()
        assert all(len(set(indices)) == (5 if form == "dropped" else 10) for indices in kept)
    positions = positions_by_loops(grids, kept, prefix, rotates_prefix)
    parameters = {name.rpartition(".")[2]: value for name, value in rotary_parameters(model)}
    rotary_config = model.rotary_encoding.encoding.config
    for layer in range(2):
        rotations = torch.stack(
            [
                torch.stack([head_rotation(p, parameters, rotary_config, 2, layer, head) for p in sample])
                for sample in positions
                for head in range(2)
            ]
        ).unflatten(0, (-1, 2))  # (B, H, N, D, D)
        query, key = (torch.einsum("bhnij,bhnj->bhni", rotations, seen[layer, part]) for part in ("query", "key"))
        logits = query @ key.transpose(-1, -2) / 4
        if form == "several_sizes":
            # Padding attends and is attended to, as in timm, but not by the others.
            valid = torch.tensor([[index < prefix + math.prod(grid) for index in range(prefix + 12)] for grid in grids])
            logits = logits.masked_fill(~valid[:, None, None], -math.inf)
            weights = seen[layer].where(valid[:, None, :, None], logits.softmax(-1))
        else:
            weights = seen[layer]
        # Rotations and attention of the model are float32.
        torch.testing.assert_close(weights, logits.softmax(-1), rtol=0, atol=2e-6)


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
def test_compiled_model_is_one_graph(case, config):
    """Also with checkpointed blocks, which a graph recomputes without hooks."""
    model, inputs = case.build(depth=1), {"x": normal(2, 3, *case.size)}
    randomize(patch(model, config))
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(run(compiled, inputs), run(model, inputs), rtol=0, atol=1e-5)
    expected = gradients(run, model.train(), inputs)
    model.set_grad_checkpointing()
    found = gradients(run, compiled, inputs)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[f"_orig_mod.{name}"], gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_adapters_in_a_fresh_process(tmp_path):
    models = {}
    for case, config in CONFIGS:
        model, name = case.build(), f"{case.name}-{config.position_encoding}"
        randomize(patch(model, config))
        models[name] = model, case.inputs()
    check_adapters(models, tmp_path, "timm_cases")
    name = f"{VIT.name}-{ZEROS.position_encoding}"
    with pytest.raises(ValueError, match="trained on other weights"):
        load_rotary(VIT.build(seed=1), tmp_path / name)
    with pytest.raises(ValueError, match="contains rotations for another model"):
        load_rotary(DEIT.build(), tmp_path / name)


@pytest.mark.parametrize("case", [VIT, DEIT, EVA, AXIAL], ids=["vit", "distilled", "eva", "naflex"])
def test_cards_load_the_model_from_timm_and_commands_refuse_the_rotations(case, tmp_path, capsys):
    model = case.build()
    save_rotary(patch(model, case.configs[0]), tmp_path / "rotations")
    card = str(push_card(SavedModel(tmp_path / "rotations"), "tester/rotations"))
    assert "library_name: timm" in card and "AutoModel" not in card
    assert 'base = timm.create_model("BASE", pretrained=True)' in card
    assert main(["rope", str(tmp_path / "rotations")]) == 1
    error = capsys.readouterr().err
    assert "load_rotary. That model is of timm" in error and "complete_model" not in error


@pytest.mark.parametrize(
    ("case", "config"), [(VIT, ZEROS), (AXIAL, PLANES), (DINO, BLOCKS)], ids=["vit", "naflex", "dino"]
)
def test_copies_files_and_states(case, config, tmp_path):
    model, inputs = case.build(), case.inputs()
    randomize(patch(model, config))
    with torch.no_grad():
        expected = run(model, inputs)
        other = copy.deepcopy(model)
        assert torch.equal(run(other, inputs), expected)
        randomize(other)
        assert torch.equal(run(model, inputs), expected) and not torch.equal(run(other, inputs), expected)
        assert not torch.equal(run(unpatch(other), inputs), expected)
        torch.save(model, tmp_path / "whole.pt")
        assert torch.equal(run(torch.load(tmp_path / "whole.pt", weights_only=False), inputs), expected)
        fresh = patch(case.build(seed=1), config)
        assert not fresh.load_state_dict(model.state_dict()).missing_keys
        assert torch.equal(run(fresh, inputs), expected)


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


def test_half_types_and_autocast():
    for case, config in ((VIT, ZEROS), (DINO, PLANES), (AXIAL, PLANES)):
        model, inputs = case.build(), case.inputs()
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            before = run(model, inputs)
            assert torch.equal(run(patch(model, config), inputs), before)


def test_lora_beside_the_rotations(tmp_path):
    """peft trains and saves both, and restores them into the plain model in a fresh process."""
    model, inputs = patch(VIT.build(), ZEROS), VIT.inputs()
    lora = LoraConfig(r=2, target_modules=["qkv"], modules_to_save=["rotary_encoding"], init_lora_weights=False)
    adapted = get_peft_model(model, lora)
    optimizer = torch.optim.SGD((value for value in adapted.parameters() if value.requires_grad), lr=0.5)
    before = run(adapted, inputs)
    before.square().mean().backward()
    assert all(value.grad.any() for _, value in rotary_parameters(adapted))
    optimizer.step()
    with torch.no_grad():
        expected = run(adapted.eval(), inputs)
        adapted.save_pretrained(tmp_path / "adapter")
        restored = PeftModel.from_pretrained(VIT.build(), tmp_path / "adapter").eval()
        assert torch.equal(run(restored, inputs), expected) and not torch.equal(expected, before)


def test_a_vision_transformer_inside_a_model():
    trunk = VIT.build()
    model = nn.ModuleDict({"visual": trunk, "other": nn.Linear(2, 2)})
    patch(model, replace(ZEROS, target="visual"))
    assert [name for name, _ in rotary_parameters(model)] == ["visual.rotary_encoding.encoding.generators"]
    with pytest.raises(ValueError, match=r"target='other' matches no vision transformer; there are \['visual'\]"):
        patch(unpatch(model), replace(ZEROS, target="other"))


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
    model = build()
    before = set(vars(model)), is_patched(model)
    with pytest.raises(ValueError, match=reason):
        patch(model, config)
    assert (set(vars(model)), is_patched(model)) == before
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
