import pytest
import torch
from encoding_cases import block_size, on_axes

import hf_liere


ENCODINGS = [
    ("none", None),
    ("absolute", None),
    *((encoding, block_size(encoding, axes=3, wanted=5)) for encoding in on_axes(3)),
]


@pytest.mark.parametrize("encoding, block_size", ENCODINGS)
@pytest.mark.parametrize("num_channels", [1, 3])
def test_any_clip_size(tiny_video, encoding, block_size, num_channels):
    config = tiny_video(position_encoding=encoding, block_size=block_size, num_channels=num_channels)
    model = hf_liere.LieREVideoForVideoClassification(config)
    for frames, height, width in ((4, 8, 8), (6, 4, 12)):
        outputs = model(torch.randn(2, frames, num_channels, height, width), labels=torch.tensor([0, 2]))
        assert outputs.logits.shape == (2, 3)
        outputs.loss.backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []


def test_tubelets_are_frames_rows_columns(tiny_video):
    """Token n of a clip is the projection of tubelet (t, i, j) with n in raster order, against a plain loop."""
    model = hf_liere.LieREVideoModel(tiny_video(position_encoding="none")).eval()
    clip = torch.randn(1, 4, 3, 8, 12)
    tokens = model.embeddings.patch_embeddings(model.pixels(clip))[0]
    projection = model.embeddings.patch_embeddings.projection
    index = 0
    for t in range(2):
        for i in range(2):
            for j in range(3):
                tubelet = clip[0, 2 * t : 2 * t + 2, :, 4 * i : 4 * i + 4, 4 * j : 4 * j + 4].transpose(0, 1)
                expected = (projection.weight * tubelet).sum(dim=(1, 2, 3, 4)) + projection.bias
                torch.testing.assert_close(tokens[index], expected, rtol=0, atol=1e-5)
                index += 1


@pytest.mark.parametrize("encoding, sensitive", [("none", False), ("liere", True), ("comrope_ld", True)])
def test_order_of_frames_matters_with_positions(tiny_video, encoding, sensitive):
    torch.manual_seed(0)
    model = hf_liere.LieREVideoModel(tiny_video(position_encoding=encoding, initializer_range=0.2)).eval()
    clip = torch.randn(1, 4, 3, 8, 8)
    swapped = torch.cat([clip[:, 2:], clip[:, :2]], dim=1)
    deviation = (model(clip).pooler_output - model(swapped).pooler_output).abs().max()
    assert deviation > 1e-3 if sensitive else deviation < 1e-5


def test_absolute_table_is_interpolated_trilinearly(tiny_video):
    model = hf_liere.LieREVideoModel(tiny_video(position_encoding="absolute")).eval()
    table = model.embeddings.position_embeddings[:, 1:].transpose(1, 2).unflatten(-1, (2, 2, 2))
    expected = torch.nn.functional.interpolate(table, size=(3, 2, 4), mode="trilinear", align_corners=False)
    torch.testing.assert_close(model.embeddings.patch_table((3, 2, 4), None), expected.flatten(2).transpose(1, 2))


def test_positions_have_three_axes(tiny_video):
    torch.manual_seed(0)
    model = hf_liere.LieREVideoModel(tiny_video(position_encoding="comrope_ld", initializer_range=0.2)).eval()
    clip = torch.randn(2, 4, 3, 8, 8)
    positions = torch.rand(2, 8, 3)
    assert model(clip, positions=positions).pooler_output.shape == (2, 48)
    with pytest.raises(ValueError, match=r"\(8, 2\).*\(8, 3\)"):
        model(clip, positions=positions[0, :, :2])
