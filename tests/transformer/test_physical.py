"""Coordinates in physical units: the same place in the tissue has the same rotation, whatever the voxels."""

import numpy as np
import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoModelForImageClassification

import hf_liere
from hf_liere.errors import InputError
from hf_liere.tools.export import export_model
from hf_liere.tools.inspection.analysis import analyse


ENCODINGS = [
    {"position_encoding": "axial_rope"},
    {"position_encoding": "rope_mixed"},
    {"position_encoding": "liere", "block_size": 4},
    {"position_encoding": "comrope_ap", "block_size": 4},
    {"position_encoding": "comrope_ld", "block_size": 4, "rotate_prefix": True},
    {"position_encoding": "absolute", "position_table_size": [4, 4]},
]


def image_model(tiny, unit=16.0, **fields):
    torch.manual_seed(0)
    config = tiny(coordinates="physical", physical_unit=unit, initializer_range=0.2, **fields)
    return hf_liere.LieREViTForImageClassification(config).eval()


def video_model(tiny_video, unit=8.0, **fields):
    torch.manual_seed(0)
    fields = {"position_encoding": "liere", "block_size": 4, **fields}
    config = tiny_video(coordinates="physical", physical_unit=unit, initializer_range=0.2, **fields)
    return hf_liere.LieREVideoForVideoClassification(config).eval()


def coordinates_of(model, pixel_values, **given):
    """(1 or B, N, A) coordinates of the patches that reach the encoding."""
    seen = []
    encoder = model.liere
    handle = encoder.rotary_encoding.register_forward_pre_hook(lambda module, args: seen.append(args[0].coordinates))
    with torch.no_grad():
        model(pixel_values, **given)
    handle.remove()
    coordinates = seen[0][..., encoder.config.num_prefix_tokens :, :]
    return coordinates if coordinates.ndim == 3 else coordinates.unsqueeze(0)


@pytest.mark.parametrize("fields", ENCODINGS)
def test_an_input_of_one_unit_has_unit_coordinates(tiny, fields, tmp_path):
    """So its logits are those of a model with `unit` coordinates, also after a round trip through files."""
    model, pixel_values = image_model(tiny, [8.0, 36.0], **fields), torch.randn(2, 3, 8, 12)
    torch.manual_seed(0)
    unit = hf_liere.LieREViTForImageClassification(tiny(coordinates="unit", initializer_range=0.2, **fields)).eval()
    unit.load_state_dict(model.state_dict())
    expected = unit(pixel_values).logits
    model.save_pretrained(tmp_path)
    loaded = AutoModelForImageClassification.from_pretrained(tmp_path).eval()
    assert loaded.config.coordinates == "physical" and list(loaded.config.physical_unit) == [8.0, 36.0]
    for spacing in ((1.0, 3.0), torch.tensor([1.0, 3.0]), torch.tensor([[1.0, 3.0]] * 2), torch.tensor([1, 3])):
        for each in (model, loaded):
            torch.testing.assert_close(each(pixel_values, spacing=spacing).logits, expected, rtol=0, atol=1e-5)


def smooth_volume(spacing, extent=(8.0, 24.0, 24.0)):
    """(1, slices, 1, rows, columns) of a smooth function of the place in mm, at the centres of voxels."""
    places = [(np.arange(round(size / step)) + 0.5) * step for size, step in zip(extent, spacing)]
    z, y, x = np.meshgrid(*places, indexing="ij")
    return torch.from_numpy(np.sin(z / 9) + np.cos(y / 11 + x / 7)).float()[None, :, None]


def test_the_same_volume_at_another_voxel_size_has_the_same_coordinates(tiny_video):
    """One sampled with voxels of 1 mm and patches of (2, 4, 4), one with twice the voxels and half the patches."""
    kept = {"num_channels": 1, "unit": [8.0, 24.0, 24.0]}
    fine = video_model(tiny_video, num_frames=8, image_size=24, tubelet_size=4, patch_size=8, **kept)
    coarse = video_model(tiny_video, num_frames=4, image_size=12, tubelet_size=2, patch_size=4, **kept)
    one, two = smooth_volume((1, 1, 1)), smooth_volume((2, 2, 2))
    places = coordinates_of(fine, one, spacing=(1, 1, 1)), coordinates_of(coarse, two, spacing=(2, 2, 2))
    assert torch.equal(*places)
    # By hand: the centre of a patch in mm from the corner of the volume, over the unit.
    grid = torch.cartesian_prod(torch.tensor([2.0, 6.0]), *[torch.tensor([4.0, 12.0, 20.0])] * 2).double()
    torch.testing.assert_close(places[0][0], grid / torch.tensor([8.0, 24.0, 24.0]).double())
    # With smaller patches on the fine grid, places coincide where the centres of patches do.
    nested = video_model(tiny_video, num_frames=8, image_size=24, tubelet_size=4, patch_size=4, **kept)
    finer = coordinates_of(nested, one, spacing=(1, 1, 1)).view(2, 6, 6, 3)
    torch.testing.assert_close((finer[:, ::2, ::2] + finer[:, 1::2, 1::2]) / 2, places[0].view(2, 3, 3, 3))


def test_a_tubelet_sits_at_the_mean_of_its_times(tiny_video):
    model, clip = video_model(tiny_video, [2.0, 8.0, 8.0]), torch.randn(1, 6, 3, 8, 8)
    times = torch.tensor([0.0, 0.1, 0.1, 0.5, 1.0, 1.6])
    frames = coordinates_of(model, clip, spacing=(1, 1), frame_times=times).view(3, 2, 2, 3)
    expected = 0.5 + (torch.tensor([0.05, 0.3, 1.3]).double() - 0.8) / 2
    torch.testing.assert_close(frames[..., 0], expected.view(3, 1, 1).expand(3, 2, 2), rtol=0, atol=1e-7)
    # The rows and columns are those of a clip at regular times.
    regular = coordinates_of(model, clip, spacing=(0.1, 1, 1)).view(3, 2, 2, 3)
    torch.testing.assert_close(frames[..., 1:], regular[..., 1:], rtol=0, atol=1e-7)
    still = coordinates_of(model, clip, spacing=(1, 1), frame_times=torch.full((6,), 2.0)).view(3, 2, 2, 3)
    torch.testing.assert_close(still[..., 0], torch.full((3, 2, 2), 0.5).double())


def test_rotations_that_are_in_the_weights_can_be_folded(tiny):
    model = image_model(tiny, position_encoding="comrope_ld", block_size=4)
    pixel_values, spacing = torch.randn(2, 3, 16, 16), torch.tensor([[1.0, 2.0], [0.5, 0.5]])
    folded = model.fold_rotations()
    expected = model(pixel_values, spacing=spacing).logits
    torch.testing.assert_close(folded(pixel_values, spacing=spacing).logits, expected, rtol=0, atol=1e-5)
    with pytest.raises(StrictDataclassError, match="depend on the spacing"):
        image_model(tiny, position_encoding="liere", block_size=4).fold_rotations()


def test_models_are_inspected_on_inputs_of_one_unit(tiny):
    """What is measured is then what is measured of the same weights with `unit` coordinates."""
    model = image_model(tiny, position_encoding="comrope_ld", block_size=4)
    torch.manual_seed(0)
    unit = hf_liere.LieREViTForImageClassification(
        tiny(coordinates="unit", position_encoding="comrope_ld", block_size=4, initializer_range=0.2)
    )
    unit.load_state_dict(model.state_dict())
    pixel_values = [torch.randn(2, 3, 16, 16), torch.randn(2, 3, 8, 16)]
    one, other = (analyse(each, pixel_values) for each in (model, unit.eval()))
    torch.testing.assert_close(one.attention_relativity, other.attention_relativity)
    for first, second in zip(one.inputs, other.inputs, strict=True):
        assert first.cost == second.cost
        torch.testing.assert_close(torch.as_tensor(first.attention.maps), torch.as_tensor(second.attention.maps))


def test_files_that_take_pixels_alone_are_refused(tiny, tmp_path):
    with pytest.raises(InputError, match="'physical' need the spacing of every input"):
        export_model(image_model(tiny), tmp_path / "model.pt2")
    assert list(tmp_path.iterdir()) == []
