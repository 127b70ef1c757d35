"""Dropped patches are as good as hidden ones: the others keep their positions, rotations and gradients."""

import pytest
import torch

import hf_liere
from hf_liere.transformer.patch_dropout import draw_kept_tokens


CASES = [
    {"position_encoding": "none"},
    {"position_encoding": "absolute", "position_table_size": [4, 4]},
    {"position_encoding": "rope_mixed"},
    {"position_encoding": "liere", "block_size": 4},
    {"position_encoding": "comrope_ap", "block_size": 4},
    {"position_encoding": "comrope_ld", "block_size": 8, "rotate_prefix": True},
]


def classifier(config, cls=hf_liere.LieREViTForImageClassification):
    torch.manual_seed(0)
    config.initializer_range = 0.2
    return cls(config).eval()


def outputs_of(model, seed, *args, **kwargs):
    torch.manual_seed(seed)
    return model(*args, **kwargs)


# A table is read on grids, whose number a graph cannot know.
@pytest.mark.parametrize(
    "fields, compiled",
    [
        *((fields, False) for fields in CASES),
        *(pytest.param(fields, True, marks=pytest.mark.slow) for fields in CASES[2:5]),
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


@pytest.mark.slow
@pytest.mark.parametrize("fields", [CASES[1], CASES[3], CASES[4]])
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
