"""Hidden tokens take part in nothing: neither in attention nor in what is pooled."""

import pytest
import torch

import hf_liere
from hf_liere.encoding.positions import TokenPositions


POOLINGS = ["cls", "mean", "mean_all"]
# The lower half of an image of 4 × 4 patches, after a class token.
VISIBLE = torch.arange(17) < 9


def encoder(tiny, pooling, implementation="sdpa"):
    config = tiny(pooling=pooling, position_encoding="liere", block_size=4, initializer_range=0.2)
    config._attn_implementation = implementation
    return hf_liere.LieREViTModel(config).eval()


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("kind", ["tokens", "integers", "pairs", "added"])
def test_a_padded_image_gives_the_output_of_the_image_alone(tiny, pooling, implementation, kind):
    model = encoder(tiny, pooling, implementation)
    pixels = torch.randn(2, 3, 16, 16)
    positions = TokenPositions.from_grid((4, 4), (4, 4), "train_grid").coordinates
    mask = VISIBLE.repeat(2, 1)
    if kind == "integers":
        mask = mask.long()
    elif kind == "pairs":
        mask = mask[:, None, None].expand(2, 1, 17, 17)
    elif kind == "added":
        mask = torch.zeros(2, 1, 1, 17).masked_fill(~mask[:, None, None], torch.finfo(torch.float32).min)
    alone = model(pixels[:, :, :8], positions=positions[:8]).pooler_output
    for padding in (0.0, 9.0):
        padded = torch.cat([pixels[:, :, :8], torch.full((2, 3, 8, 16), padding)], dim=2)
        output = model(padded, positions=positions, attention_mask=mask).pooler_output
        torch.testing.assert_close(output, alone, rtol=0, atol=1e-5)


def test_samples_hide_tokens_of_their_own(tiny):
    model = encoder(tiny, "mean")
    pixels, mask = torch.randn(2, 3, 16, 16), torch.stack([VISIBLE, torch.ones(17, dtype=torch.bool)])
    outputs = model(pixels, attention_mask=mask)
    states = outputs.last_hidden_state
    expected = torch.stack([states[0, 1:9].mean(0), states[1, 1:].mean(0)])
    torch.testing.assert_close(outputs.pooler_output, expected)
    assert torch.equal(
        model(pixels[1:]).last_hidden_state, model(pixels[1:], attention_mask=mask[1:]).last_hidden_state
    )


@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_masks_in_a_compiled_graph(tiny, pooling):
    model = encoder(tiny, pooling)
    pixels, mask = torch.randn(2, 3, 16, 16), VISIBLE.repeat(2, 1)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        expected = model(pixels, attention_mask=mask).pooler_output
        torch.testing.assert_close(compiled(pixels, attention_mask=mask).pooler_output, expected, rtol=0, atol=1e-5)
