"""Dropped patches are as good as hidden ones: the others keep their positions, rotations and gradients."""

import math

import pytest
import torch

import hf_liere
from hf_liere.transformer.patch_dropout import draw_kept_tokens


CASES = [
    {"position_encoding": "none"},
    {"position_encoding": "absolute"},
    {"position_encoding": "absolute", "position_table_size": [4, 4]},
    {"position_encoding": "axial_rope"},
    {"position_encoding": "rope_mixed"},
    {"position_encoding": "liere", "block_size": 4},
    {"position_encoding": "liere", "block_size": 8, "share_heads": True, "share_layers": True},
    {"position_encoding": "comrope_ap", "block_size": 3},
    {"position_encoding": "comrope_ap", "block_size": 4},
    {"position_encoding": "comrope_ld", "block_size": 8, "rotate_prefix": True},
]
POOLINGS = ["cls", "mean", "mean_all"]


def classifier(config, cls=hf_liere.LieREViTForImageClassification):
    torch.manual_seed(0)
    config.initializer_range = 0.2
    return cls(config).eval()


def outputs_of(model, seed, *args, **kwargs):
    torch.manual_seed(seed)
    return model(*args, **kwargs)


def in_training(model, *args, **kwargs):
    """What a model returns in training, and (B, prefix + N), true for the tokens that it kept."""
    model.train()
    logits = outputs_of(model, 3, *args, **kwargs).logits
    encoder = {name: value for name, value in kwargs.items() if name != "labels"}
    outputs = outputs_of(model.liere, 3, *args, **encoder)
    pixels, prefix = model.liere.pixels(args[0]), model.config.num_prefix_tokens
    num_patches = pixels[0, 0].numel() // math.prod(model.config.patch_shape)
    assert outputs.last_hidden_state.shape[1] == prefix + outputs.kept_patches.shape[1]
    kept = torch.ones(len(pixels), prefix + num_patches, dtype=torch.bool)
    kept[:, prefix:] = False
    kept.scatter_(1, outputs.kept_patches + prefix, True)
    model.eval()
    return logits, kept


@pytest.mark.parametrize("fields", CASES)
@pytest.mark.parametrize("pooling", POOLINGS)
def test_dropped_patches_are_hidden_ones(tiny, fields, pooling):
    """In logits and in gradients, by two paths: fewer tokens, and all tokens under an attention mask."""
    model = classifier(tiny(patch_dropout_prob=0.4, num_register_tokens=1, pooling=pooling, **fields))
    pixel_values, labels = torch.randn(3, 3, 16, 24), torch.tensor([0, 2, 1])
    logits, kept = in_training(model, pixel_values)
    assert kept.sum(1).tolist() == [2 + 24 - 9] * 3 and kept[:, :2].all() and (kept[0] != kept[1]).any()
    expected = model(pixel_values, attention_mask=kept).logits
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)
    assert (logits - model(pixel_values).logits).abs().max() > 1e-3
    gradients = []
    for mode in (True, False):
        model.train(mode).zero_grad()
        masks = {} if mode else {"attention_mask": kept}
        outputs_of(model, 3, pixel_values, labels=labels, **masks).loss.backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for name, gradient in gradients[1].items():
        # Sums over a batch of 3 in float32, in another order.
        torch.testing.assert_close(gradients[0][name], gradient, rtol=1e-4, atol=2e-5, msg=name)


def test_positions_and_masks_of_samples_are_selected_alike(tiny):
    model = classifier(
        tiny(patch_dropout_prob=0.5, pooling="mean", position_encoding="liere", block_size=4, position_shift=0.0)
    )
    pixel_values, positions = torch.randn(3, 3, 16, 16), torch.rand(3, 16, 2)
    hidden = torch.rand(3, 17) < 0.3
    tokens = ~hidden
    tokens[:, 0] = True
    pairs = torch.rand(3, 2, 17, 17) < 0.8
    pairs |= torch.eye(17, dtype=torch.bool)
    added = torch.zeros(1, 1, 1, 17).masked_fill(hidden[:1, None, None], torch.finfo(torch.float32).min)
    added[..., 0] = 0
    for mask in (tokens, tokens.long(), pairs, added, tokens[:, None, None]):
        given = {"positions": positions, "attention_mask": mask}
        logits, kept = in_training(model, pixel_values, **given)
        if mask.ndim == 2:
            both = mask.bool() & kept
        elif mask.dtype == torch.bool:
            both = mask & kept[:, None, None]
        else:
            both = mask.masked_fill(~kept[:, None, None], torch.finfo(torch.float32).min)
        expected = model(pixel_values, positions=positions, attention_mask=both)
        if mask is pairs:
            # Queries that are hidden, not dropped, make what they attend to visible: the class token is compared.
            states = outputs_of(model.liere.train(), 3, pixel_values, **given).last_hidden_state[:, 0]
            expected = model.eval().liere(pixel_values, positions=positions, attention_mask=both)
            torch.testing.assert_close(states, expected.last_hidden_state[:, 0], rtol=0, atol=1e-5)
            continue
        torch.testing.assert_close(logits, expected.logits, rtol=0, atol=1e-5)


def test_spacings_of_clips_with_dropped_patches(tiny_video):
    fields = {"coordinates": "physical", "physical_unit": 8.0, "position_encoding": "comrope_ld", "block_size": 4}
    config = tiny_video(patch_dropout_prob=0.5, pooling="mean", **fields)
    model = classifier(config, hf_liere.LieREVideoForVideoClassification)
    clip, spacing = torch.randn(2, 4, 3, 8, 12), torch.tensor([[1.0, 2.0, 1.0], [3.0, 0.5, 0.5]])
    logits, kept = in_training(model, clip, spacing=spacing)
    expected = model(clip, spacing=spacing, attention_mask=kept).logits
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)


# A table is read on grids, whose number a graph cannot know.
@pytest.mark.parametrize(
    "fields, compiled",
    [
        *((CASES[index], False) for index in (0, 2, 4, 5, 8, 9)),
        *(pytest.param(CASES[index], True, marks=pytest.mark.slow) for index in (8, 4, 5)),
    ],
)
def test_inputs_of_different_sizes_drop_patches(tiny, fields, compiled):
    """Each gives the logits of an ordinary image whose dropped patches are hidden."""
    model = classifier(tiny(patch_dropout_prob=0.5, pooling="mean", num_register_tokens=1, **fields))
    images = [torch.randn(3, *size) for size in ((16, 16), (8, 24), (24, 16), (16, 16))]
    batch = hf_liere.batch_of_patches(images, model.config, 26)
    encoder = model.liere.train()
    if compiled:
        torch.compiler.reset()
        encoder = torch.compile(encoder, backend="aot_eager", fullgraph=True)
    outputs = encoder(**batch)
    assert outputs.kept_patches.shape == (4, 13)
    for index, image in enumerate(images):
        patches = image[0].numel() // 16
        kept = [patch for patch in outputs.kept_patches[index].tolist() if patch < patches]
        # Padding is kept only where there are not enough patches.
        assert len(kept) == min(patches, 13)
        visible = torch.zeros(1, patches + 2, dtype=torch.bool)
        visible[:, [0, 1, *(patch + 2 for patch in kept)]] = True
        expected = model.eval().liere(image[None], attention_mask=visible).pooler_output
        torch.testing.assert_close(outputs.pooler_output[index : index + 1], expected, rtol=0, atol=1e-5)


def test_masked_patches_are_dropped_like_others(tiny):
    torch.manual_seed(0)
    model = hf_liere.LieREViTModel(tiny(patch_dropout_prob=0.5, initializer_range=0.2), use_mask_token=True)
    torch.nn.init.normal_(model.embeddings.mask_token)
    pixel_values, masked = torch.randn(2, 3, 16, 16), torch.rand(2, 16) < 0.5
    outputs = outputs_of(model.train(), 1, pixel_values, bool_masked_pos=masked)
    kept = torch.zeros(2, 16, dtype=torch.bool).scatter(1, outputs.kept_patches, True)
    visible = torch.cat([torch.ones(2, 1, dtype=torch.bool), kept], dim=1)
    expected = model.eval()(pixel_values, bool_masked_pos=masked, attention_mask=visible).last_hidden_state
    expected = expected[visible].view(2, 9, 48)
    torch.testing.assert_close(outputs.last_hidden_state, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("prob, kept", [(0.5, 5), (0.8, 2), (0.3, 7), (0.05, 10), (0.99, 1)])
def test_patches_are_drawn_uniformly_and_without_replacement(prob, kept):
    count = 4000
    tokens = draw_kept_tokens(torch.zeros(count, 13, 1), 3, prob, None)
    assert tokens.shape == (count, 3 + kept) and tokens[:, :3].tolist() == [[0, 1, 2]] * count
    assert (tokens.diff(dim=1) > 0).all() and tokens.max() < 13
    shares = torch.bincount(tokens[:, 3:].flatten() - 3, minlength=10) / count
    # Five standard deviations of a share of 4,000 draws.
    assert (shares - kept / 10).abs().max() <= 5 * 0.5 / count**0.5


def test_visible_patches_are_kept_before_hidden_ones(tiny):
    """Else a padded sample could be left with nothing to pool."""
    visible = torch.tensor([[True] + [False] * 8 + [True] * 2, [True] * 11, [True] + [True] * 6 + [False] * 4])
    for _ in range(20):
        tokens = draw_kept_tokens(torch.zeros(3, 11, 1), 1, 0.5, visible)
        assert visible.gather(1, tokens).sum(1).tolist() == [3, 6, 6]
    model = classifier(tiny(patch_dropout_prob=0.9, pooling="mean")).train()
    mask = torch.zeros(4, 17, dtype=torch.bool)
    mask[:, [0, 7]] = True
    assert torch.isfinite(model(torch.randn(4, 3, 16, 16), attention_mask=mask).logits).all()


def test_evaluation_keeps_all_patches(tiny, tmp_path):
    model, plain = classifier(tiny(patch_dropout_prob=0.5)), classifier(tiny())
    pixel_values = torch.randn(2, 3, 16, 16)
    assert torch.equal(model(pixel_values).logits, plain(pixel_values).logits)
    outputs = model.liere(pixel_values)
    assert outputs.kept_patches is None and list(outputs) == ["last_hidden_state", "pooler_output"]
    model.save_pretrained(tmp_path)
    loaded = hf_liere.LieREViTForImageClassification.from_pretrained(tmp_path)
    assert loaded.config.patch_dropout_prob == 0.5
    assert torch.equal(loaded(pixel_values).logits, plain(pixel_values).logits)
    folded = model.fold_rotations()
    assert folded.config.patch_dropout_prob == 0.0
    torch.testing.assert_close(folded(pixel_values).logits, plain(pixel_values).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("fields", CASES)
def test_gradient_checkpointing_keeps_the_same_patches(tiny, fields):
    gradients = []
    for checkpointing in (False, True):
        model = classifier(tiny(patch_dropout_prob=0.5, drop_path_rate=0.3, **fields)).train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        torch.manual_seed(3)
        model(torch.ones(2, 3, 16, 16), labels=torch.tensor([0, 1])).loss.backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=0, atol=1e-6, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("fields", [CASES[index] for index in (2, 5, 8)])
def test_dropped_patches_in_a_compiled_graph(tiny, fields):
    """Random numbers differ between graphs, so the kept patches are read from the result."""
    model = classifier(tiny(patch_dropout_prob=0.5, pooling="mean", **fields)).liere.train()
    torch.compiler.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for size in (16, 24):
        pixel_values = torch.randn(2, 3, size, size)
        outputs = compiled(pixel_values)
        patches = size * size // 16
        assert outputs.kept_patches.shape == (2, patches - patches // 2)
        visible = torch.zeros(2, patches + 1, dtype=torch.bool).scatter(1, outputs.kept_patches + 1, True)
        visible[:, 0] = True
        expected = model.eval()(pixel_values, attention_mask=visible).pooler_output
        torch.testing.assert_close(outputs.pooler_output, expected, rtol=0, atol=1e-5)
        model.train()


def test_half_precision(tiny):
    model = classifier(tiny(patch_dropout_prob=0.5)).train()
    with torch.autocast("cpu", torch.bfloat16):
        model(torch.randn(2, 3, 16, 16), labels=torch.tensor([0, 1])).loss.backward()
    assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters())


def test_what_cannot_be_dropped_is_refused(tiny):
    dropping = tiny(patch_dropout_prob=0.5)
    for cls, reason in (
        (hf_liere.LieREViTForMaskedImageModeling, "pixels of all patches"),
        (hf_liere.LieREViTBackbone, "feature maps contain all patches"),
    ):
        with pytest.raises(ValueError, match=f"patch_dropout_prob=0.5 is not available where .*{reason}"):
            cls(dropping)
    with pytest.raises(ValueError, match="cannot select tokens of a object"):
        classifier(dropping).train()(torch.randn(1, 3, 16, 16), attention_mask=object())
