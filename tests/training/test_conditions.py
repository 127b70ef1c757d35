"""Evaluations under changed conditions: what shuffles, offsets, coordinates and crops do to a model."""

import json

import numpy as np
import pytest
import torch
from encoding_cases import COMMUTING, ENCODINGS, perturb
from encoding_cases import fields as encoding_fields
from training_helpers import TINY_RUN, main, train, weights, write_images

import hf_liere
from training.common.arguments import InputError
from training.common.conditions import ConditionArguments, ConditionCollator, shifted_positions, shuffle_patches


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return write_images(tmp_path_factory.mktemp("data"), 24)


@pytest.mark.parametrize("sizes, patch", [((8, 12), (4, 4)), ((4, 8, 4), (2, 4, 2))])
def test_shuffling_permutes_whole_patches_against_a_loop(sizes, patch):
    pixels = torch.randn(2, 3, *sizes)
    result = shuffle_patches(pixels, patch, [np.random.default_rng(seed) for seed in (1, 2)])

    def patches(image):
        pieces = [image]
        for axis, extent in enumerate(patch, 2):
            pieces = [part for piece in pieces for part in piece.split(extent, dim=axis)]
        return pieces

    orders = []
    for image, seed in enumerate((1, 2)):
        before, after = patches(pixels[image : image + 1]), patches(result[image : image + 1])
        orders.append(np.random.default_rng(seed).permutation(len(before)).tolist())
        assert orders[-1] != sorted(orders[-1])
        assert all(torch.equal(after[place], before[source]) for place, source in enumerate(orders[-1]))
    assert orders[0] != orders[1]


def test_a_model_without_positions_sees_no_shuffle(tiny):
    pixels = torch.randn(2, 3, 16, 16)
    for encoding, blind in (("none", True), ("liere", False)):
        torch.manual_seed(0)
        config = tiny(position_encoding=encoding, use_class_token=False, pooling="mean", initializer_range=0.2)
        model = hf_liere.LieREViTForImageClassification(config).eval()
        orders = [np.random.default_rng(seed) for seed in range(2)]
        difference = (model(pixels).logits - model(shuffle_patches(pixels, (4, 4), orders)).logits).abs().max()
        # The tokens are added up in another order.
        assert difference < 1e-5 if blind else difference > 1e-3


@pytest.mark.parametrize("rotate_prefix", [False, True])
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_commuting_encodings_see_no_common_offset(encoding, rotate_prefix, tiny):
    """Exactly so, in float64, without class token or with one that has a place; LieRE and products see it."""
    torch.manual_seed(0)
    fields = {"use_class_token": True, "rotate_prefix": True} if rotate_prefix else {"use_class_token": False}
    fields |= encoding_fields(encoding, head_dim=32, wanted=8)
    config = tiny(**fields, pooling="mean", initializer_range=0.2, hidden_size=64, image_size=16)
    # A LieRE product starts at RoPE-Mixed.
    model = perturb(hf_liere.LieREViTForImageClassification(config)).double().eval()
    pixels = torch.randn(2, 3, 24, 16, dtype=torch.float64)
    positions = shifted_positions(model.base_model, (6, 4), 2.0, seed=0)
    assert positions.shape == (24 + rotate_prefix, 2)
    difference = (model(pixels).logits - model(pixels, positions=positions).logits).abs().max()
    # Generators are stored in float32 and commute up to its rounding.
    assert difference < 1e-5 if encoding in COMMUTING else difference > 1e-3


def test_the_offset_is_in_extents_of_a_training_image(tiny):
    shifts = {}
    for encoding, extent in (("comrope_ld", 1), ("liere", 1), ("rope_mixed", 4)):
        encoder = hf_liere.LieREViTModel(tiny(position_encoding=encoding))
        without = encoder.grid_positions((4, 4), torch.device("cpu")).coordinates[1:]
        moved = shifted_positions(encoder, (4, 4), 0.5, seed=3)[-16:] - without
        assert (moved - moved[0]).abs().max() < 1e-12
        shifts[encoding] = moved[0] / extent
    torch.testing.assert_close(shifts["comrope_ld"], shifts["liere"])
    torch.testing.assert_close(shifts["comrope_ld"], shifts["rope_mixed"])
    draws = torch.stack([shifted_positions(encoder, (1, 1), 0.5, seed)[0] for seed in range(2000)]) / 4
    assert draws.std(dim=0).tolist() == pytest.approx([0.5, 0.5], rel=0.1)


@pytest.mark.parametrize(
    "fields, arguments, message",
    [
        ({"position_encoding": "absolute"}, {"evaluation_offset": 1.0}, "'absolute' has no coordinates to shift"),
        ({}, {"evaluation_shuffle": "frames"}, "images have none; accepted: none, patches"),
        ({}, {"evaluation_shuffle": "rows"}, "'rows'; accepted: none, patches, frames"),
        ({}, {"evaluation_offset": -1.0}, "-1.0; accepted: 0 and above"),
    ],
)
def test_conditions_that_mean_nothing_are_refused(fields, arguments, message, tiny):
    with pytest.raises(InputError, match=message):
        ConditionCollator(
            None, hf_liere.LieREViTForImageClassification(tiny(**fields)), ConditionArguments(**arguments)
        )


def test_frames_are_shuffled_as_wholes(tiny_video):
    model = hf_liere.LieREVideoForVideoClassification(tiny_video())
    clips = torch.randn(2, 4, 3, 8, 8)
    condition = ConditionCollator(lambda examples: {"pixel_values": clips}, model, ConditionArguments("frames"))
    examples = [{"image": None, "index": index} for index in (5, 9)]
    orders = [np.random.default_rng((0, index)).permutation(4) for index in (5, 9)]
    assert len({(0, 1, 2, 3), *map(tuple, orders)}) == 3
    expected = torch.stack([clip[order] for clip, order in zip(clips, orders)])
    assert torch.equal(condition(examples)["pixel_values"], expected)
    # Training batches, which carry keys, are never changed.
    assert torch.equal(condition([{"key": (0, 0)}])["pixel_values"], clips)


def test_the_order_of_an_image_does_not_depend_on_its_batch(tiny):
    """Neither on what is beside it, nor on its place; an example that could not be read comes last."""
    model = hf_liere.LieREViTForImageClassification(tiny())
    images = {index: torch.randn(3, 16, 16) for index in range(4)}

    def collate(examples):
        rows = [images[example["index"]] for example in examples if "image" in example]
        return {"pixel_values": torch.stack([*rows, *[torch.zeros(3, 16, 16)] * (len(examples) - len(rows))])}

    condition = ConditionCollator(collate, model, ConditionArguments("patches"))
    alone = {index: condition([{"image": 0, "index": index}])["pixel_values"][0] for index in images}
    together = condition([{"label": -100}, *({"image": 0, "index": index} for index in (3, 1, 0))])["pixel_values"]
    assert all(torch.equal(row, alone[index]) for row, index in zip(together, (3, 1, 0)))
    assert not torch.equal(alone[1], images[1])


def test_conditions_change_evaluations_but_no_training(files, tmp_path):
    flags = [*files, "--do_eval", "--initializer_range", 0.3, "--evaluation_offset", 1.0]
    losses = [
        train(tmp_path / order, *flags, "--evaluation_shuffle", order)["eval_loss"] for order in ("none", "patches")
    ]
    assert losses[0] != losses[1]
    left, right = weights(tmp_path / "none"), weights(tmp_path / "patches")
    assert all(torch.equal(value, right[name]) for name, value in left.items())


@pytest.mark.slow
def test_a_checkpoint_is_evaluated_with_coordinates_of_a_fixed_range(files, tmp_path):
    """They are equal where it was trained and differ at another size; no others may be given."""
    train(tmp_path / "run", *files, "--initializer_range", 0.3)
    flags = ["--model_name_or_path", str(tmp_path / "run"), *files, "--do_eval", *TINY_RUN]
    losses = {}
    for size in (16, 32):
        for coordinates in ("train_grid", "fixed_grid"):
            extra = ["--coordinates", coordinates, "--image_size", str(size)]
            folder = str(tmp_path / f"{coordinates}_{size}")
            losses[coordinates, size] = main([*flags, *extra, "--output_dir", folder])["eval_loss"]
    assert losses["train_grid", 16] == losses["fixed_grid", 16]
    assert losses["train_grid", 32] != losses["fixed_grid", 32]
    with pytest.raises(InputError, match="--coordinates unit contradicts the checkpoint's train_grid"):
        main([*flags, "--coordinates", "unit", "--output_dir", str(tmp_path / "unit")])


def test_a_checkpoint_is_evaluated_on_the_part_that_its_processor_cuts(files, tmp_path):
    crop = ["--eval_crops", 1, "--eval_crop_ratio", 1.25]
    train(tmp_path / "run", *files, *crop, "--do_eval", "--initializer_range", 0.3)
    flags = ["--model_name_or_path", str(tmp_path / "run"), *files, "--do_eval", *TINY_RUN]
    taken_over = main([*flags, "--output_dir", str(tmp_path / "same")])["eval_loss"]
    whole = main([*flags, "--eval_crops", "0", "--output_dir", str(tmp_path / "whole")])["eval_loss"]
    trained = json.loads((tmp_path / "run" / "eval_results.json").read_text())["eval_loss"]
    # Products of weights that lie elsewhere in memory, as those of a file do, may be rounded otherwise.
    assert taken_over == pytest.approx(trained, abs=1e-6) and whole != pytest.approx(trained, abs=1e-5)
    record = json.loads((tmp_path / "same" / "run_config.json").read_text())["data"]
    assert (record["eval_crops"], record["eval_crop_ratio"]) == (1, 1.25)
