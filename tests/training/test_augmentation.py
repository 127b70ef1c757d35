"""Augmentation and batches: seeded by (seed, epoch, index) alone, padded and mixed exactly."""

import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from timm.data.auto_augment import rand_augment_transform
from torch.utils.data import DataLoader
from torchvision.transforms import InterpolationMode, Resize
from training_helpers import pictures

from hf_liere.errors import InputError
from training.common.arguments import AugmentationArguments
from training.data.augmentation import (
    IGNORED_LABEL,
    PADDING,
    Augmentation,
    Collator,
    EpochSampler,
    EvaluationImages,
    EvaluationView,
    TrainingImages,
)
from training.data.rand_augment import OPERATIONS
from training.engine.trainer import summed_cross_entropy


BICUBIC = 3
EVERYTHING = {
    "random_resized_crop": True,
    "crop_padding": 2,
    "flip_probability": 0.5,
    "rand_augment_ops": 2,
    "random_erasing_probability": 0.5,
    "mixup_alpha": 0.8,
    "cutmix_alpha": 1.0,
}


class Pictures:
    def __init__(self, count=24, size=20):
        self.images = [np.asarray(picture) for picture in pictures(count, size)]

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return self.images[index], index % 5


class State:
    epoch = 0


def augment(seed=0, **augmentation):
    return Augmentation((16, 16), BICUBIC, AugmentationArguments(**augmentation), seed)


def training_images(seed=0, **augmentation):
    return TrainingImages(Pictures(), augment(seed, **augmentation))


def collator(seed=0, **augmentation):
    return Collator((16, 16), 3, [0.4, 0.5, 0.6], [0.2, 0.3, 0.4], AugmentationArguments(**augmentation), seed)


def epochs(num_workers, augmentation, count=3, persistent=False):
    """All batches of some epochs as a loader yields them."""
    state = State()
    dataset = training_images(**augmentation)
    loader = DataLoader(
        dataset,
        batch_size=8,
        sampler=EpochSampler(len(dataset), 0, 1, lambda: state),
        collate_fn=collator(**augmentation),
        num_workers=num_workers,
        persistent_workers=persistent,
    )
    for epoch in range(count):
        state.epoch = float(epoch)
        yield list(loader)


def test_an_image_depends_on_seed_epoch_and_index_only():
    images = training_images(**EVERYTHING)
    first = {key: images[key]["image"] for key in ((0, 1), (0, 2), (1, 1))}
    torch.manual_seed(123)
    np.random.seed(123)
    again = training_images(**EVERYTHING)
    for key in ((1, 1), (0, 2), (0, 1)):
        assert np.array_equal(again[key]["image"], first[key])
    assert not np.array_equal(first[0, 1], first[1, 1])
    assert not np.array_equal(training_images(seed=1, **EVERYTHING)[0, 1]["image"], first[0, 1])


@pytest.mark.parametrize("augmentation", [EVERYTHING, {"rand_augment_ops": 1}])
def test_global_generators_are_left_alone(augmentation):
    images = training_images(**augmentation)
    before, numpy_before = torch.get_rng_state(), np.random.get_state()[1].copy()
    collator(**augmentation)([images[0, index] for index in range(4)])
    assert torch.equal(torch.get_rng_state(), before)
    assert np.array_equal(np.random.get_state()[1], numpy_before)


def test_workers_change_nothing_and_hear_of_the_epoch():
    alone = list(epochs(0, EVERYTHING))
    assert not torch.equal(alone[0][0]["pixel_values"], alone[1][0]["pixel_values"])
    for persistent in (False, True):
        for expected, got in zip(alone, epochs(2, EVERYTHING, persistent=persistent), strict=True):
            for left, right in zip(expected, got, strict=True):
                assert left.keys() == right.keys() >= {"mixed_labels", "mixing_weights"}
                assert all(torch.equal(left[name], right[name]) for name in left)


def test_every_epoch_has_every_image_once_in_an_order_of_its_own():
    state = State()
    sampler = EpochSampler(10, 3, 4, lambda: state)
    assert len(sampler) == 12
    orders = []
    for state.epoch in (0, 0.5, 1.0, 1.9):
        keys = list(sampler)
        assert [index for _, index in keys[10:]] == [PADDING, PADDING]
        assert {epoch for epoch, _ in keys} == {int(state.epoch)}
        orders.append([index for _, index in keys[:10]])
        assert sorted(orders[-1]) == list(range(10))
    assert orders[0] == orders[1] != orders[2] == orders[3]


def test_repeated_views_of_an_image_follow_each_other_and_differ():
    state = State()
    once, keys = (list(EpochSampler(10, 3, 1, lambda: state, repeats)) for repeats in (1, 3))
    assert len(set(keys)) == len(keys) == 10
    # As many examples, of a third of the images in the order that they would have had.
    assert [index % 10 for _, index in keys] == np.repeat([index for _, index in once], 3)[:10].tolist()
    images = training_images(crop_padding=3, repeated_augmentation=3)
    views = [images[0, 5 + repeat * len(images)] for repeat in range(3)]
    assert {view["label"] for view in views} == {5 % 5}
    assert len({view["image"].tobytes() for view in views}) == 3
    assert np.array_equal(views[0]["image"], training_images(crop_padding=3)[0, 5]["image"])


def test_erased_parts_are_rectangles_of_noise_in_training_only():
    images, erasing = training_images(), collator(random_erasing_probability=0.25)
    plain = collator()([images[0, index % 24] for index in range(24)])["pixel_values"]
    shares, erased, noise = [], 0, []
    for epoch in range(20):
        pixels = erasing([images[epoch, index] for index in range(24)])["pixel_values"]
        for before, after in zip(plain, pixels):
            changed = (before != after).any(dim=0)
            if changed.any():
                rows, columns = (torch.where(changed.any(dim=axis))[0] for axis in (1, 0))
                box = changed[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
                assert box.all()
                erased, shares = erased + 1, [*shares, box.float().mean().item() * box.numel() / changed.numel()]
                noise.append(after[:, changed].flatten())
    # 480 images at 0.25: 120 with a deviation of 9.5. Sides are rounded to pixels of 16.
    assert 80 < erased < 160 and min(shares) > 0.01 and max(shares) < 0.4
    noise = torch.cat(noise)
    assert abs(noise.mean()) < 0.05 and abs(noise.std() - 1) < 0.05
    evaluated = [{"image": images[0, 0]["image"], "label": 0}]
    assert torch.equal(erasing(evaluated)["pixel_values"][0], plain[0])


def test_all_frames_of_a_clip_are_erased_alike():
    clip = {"image": np.full((4, 16, 16, 3), 128, np.uint8), "label": 0, "key": (0, 1)}
    frames = collator(random_erasing_probability=1.0)([clip])["pixel_values"][0]
    assert all(torch.equal(frame, frames[0]) for frame in frames) and frames[0].std() > 0.1


def test_normalisation_is_that_of_the_processor():
    images = EvaluationImages(Pictures(), EvaluationView((16, 16), BICUBIC))
    batch = collator()([images[index] for index in range(3)])
    pixels = np.stack([images[index]["image"] for index in range(3)]).transpose(0, 3, 1, 2) / 255
    expected = (pixels - np.array([0.4, 0.5, 0.6])[:, None, None]) / np.array([0.2, 0.3, 0.4])[:, None, None]
    assert batch.keys() == {"pixel_values", "labels"}
    assert batch["pixel_values"].dtype == torch.float32 and batch["labels"].tolist() == [0, 1, 2]
    np.testing.assert_allclose(batch["pixel_values"].numpy(), expected, atol=1e-6)


def test_grey_images_are_repeated_for_every_channel():
    grey = [{"image": np.full((16, 16, 1), 128, np.uint8), "label": 0}]
    pixels, expected = collator()(grey)["pixel_values"], (128 / 255 - np.array([0.4, 0.5, 0.6])) / [0.2, 0.3, 0.4]
    # Numbers near 1 are rounded to float32.
    assert pixels.shape == (1, 3, 16, 16) and pixels[0, :, 0, 0].tolist() == pytest.approx(expected.tolist(), abs=1e-6)


def test_a_padded_crop_is_a_shift_with_black():
    images = TrainingImages(Pictures(40, 16), augment(crop_padding=3))
    original = np.pad(Pictures(40, 16).images[5], ((3, 3), (3, 3), (0, 0)))
    windows = {original[top : top + 16, left : left + 16].tobytes() for top in range(7) for left in range(7)}
    seen = {images[epoch, 5]["image"].tobytes() for epoch in range(200)}
    assert seen <= windows and len(seen) > 40


def test_flips_have_their_probability():
    images = TrainingImages(Pictures(40, 16), augment(flip_probability=0.25))
    flipped = Pictures(40, 16).images[0][:, ::-1]
    share = np.mean([np.array_equal(images[epoch, 0]["image"], flipped) for epoch in range(1000)])
    assert abs(share - 0.25) < 0.05


@pytest.mark.parametrize("kind", ["mixup_alpha", "cutmix_alpha"])
def test_mixing_mixes_pixels_and_targets_alike(kind):
    """Images of one colour show in what shares the batch mixed them."""
    colors = np.array([10, 60, 110, 160, 210])
    examples = [
        {"image": np.full((16, 16, 3), color, np.uint8), "label": number, "key": (4, number)}
        for number, color in enumerate(colors)
    ]
    plain, mixing = collator(), collator(**{kind: 1.0})
    pure = plain(examples)["pixel_values"]
    batch = mixing(examples)
    shares = batch["mixing_weights"]
    expected = shares * pure[:, 0].mean((1, 2)) + (1 - shares) * pure[batch["mixed_labels"], 0].mean((1, 2))
    torch.testing.assert_close(batch["pixel_values"][:, 0].mean((1, 2)), expected, atol=1e-4, rtol=0)
    assert torch.equal(batch["labels"], torch.arange(5))
    again = mixing(examples)
    assert all(torch.equal(batch[name], again[name]) for name in batch)


def test_padding_is_neither_mixed_nor_learnt():
    images = training_images(**EVERYTHING)
    real = [images[0, index] for index in range(3)]
    padded = real + [images[0, PADDING]] * 5
    whole, part = collator(**EVERYTHING)(padded), collator(**EVERYTHING)(real)
    for name in part:
        assert torch.equal(whole[name][:3], part[name])
    assert whole["labels"][3:].tolist() == [IGNORED_LABEL] * 5
    logits = torch.randn(8, 5, requires_grad=True)
    loss = summed_cross_entropy(logits, whole["labels"], whole["mixed_labels"], whole["mixing_weights"], 0.1)
    loss.backward()
    assert logits.grad[:3].abs().min() > 0 and logits.grad[3:].abs().max() == 0
    nothing = collator(**EVERYTHING)([images[0, PADDING]] * 2)
    assert nothing["pixel_values"].shape == (2, 3, 16, 16) and nothing["labels"].tolist() == [IGNORED_LABEL] * 2


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_of_mixed_targets_is_that_of_soft_targets(smoothing):
    logits = torch.randn(6, 5, dtype=torch.float64)
    labels, partners = torch.randint(5, (6,)), torch.randint(5, (6,))
    weights = torch.rand(6, dtype=torch.float64)
    hard = weights[:, None] * F.one_hot(labels, 5) + (1 - weights[:, None]) * F.one_hot(partners, 5)
    soft = ((1 - smoothing) * hard + smoothing / 5).numpy()
    scores = logits.numpy()
    log_probabilities = scores - np.log(np.exp(scores).sum(1, keepdims=True))
    expected = -(soft * log_probabilities).sum()
    got = summed_cross_entropy(logits, labels, partners, weights, smoothing)
    assert abs(got.item() - expected) < 1e-12
    single = summed_cross_entropy(logits.float(), labels, partners, weights.float(), smoothing)
    assert abs(single.item() - expected) < 1e-5


@pytest.mark.parametrize("size", [(20, 30), (31, 17), (16, 16), (9, 40)])
def test_a_random_crop_is_a_part_of_the_image_resized_as_by_torchvision(size):
    image = np.random.default_rng(0).integers(256, size=(*size, 3), dtype=np.uint8)
    whole = np.asarray(Resize(round(1.1 * 16), InterpolationMode.BICUBIC)(Image.fromarray(image)))
    starts = set()
    for index in range(200):
        part = augment(random_crop_ratio=1.1)(image, 0, index)
        places = [
            (row, column)
            for row in range(whole.shape[0] - 15)
            for column in range(whole.shape[1] - 15)
            if np.array_equal(whole[row : row + 16, column : column + 16], part)
        ]
        assert len(places) == 1
        starts.update(places)
    rows, columns = (extent - 15 for extent in whole.shape[:2])
    # Every place is equally likely: 200 draws miss some of at most 165 places, but hardly half of them.
    assert len(starts) > rows * columns / 2


def test_an_augmentation_before_the_crop_sees_the_whole_image():
    image = np.asarray(pictures(1, 40)[0])
    crop = {"random_resized_crop": True, "flip_probability": 0.5}
    lieres = {"rand_augment_ops": 2, "rand_augment_ranges": "liere", "rand_augment_magnitude": 5}
    for policy in ({"rand_augment_ops": 2}, lieres, {"auto_augment": "rand-m9-mstd0.5-inc1"}):
        first = AugmentationArguments(augment_first=True, **policy)
        for index in range(5):
            augmented = Augmentation((40, 40), BICUBIC, first, 0)(image, 0, index)
            expected = augment(**crop)(augmented, 0, index)
            assert np.array_equal(augment(augment_first=True, **policy, **crop)(image, 0, index), expected)
            assert not np.array_equal(augment(**policy, **crop)(image, 0, index), expected)


def test_lieres_rand_augment_has_the_ranges_of_its_code():
    """At magnitude 14 of 30: 46.7 px, one bit, a factor of 0.94, 18.7 px and 51 levels; each operation, then draws."""
    ranges = {name: low + (high - low) * 14 / 30 for name, (_, low, high) in OPERATIONS.items()}
    expected = {
        "TranslateX": 46.7,
        "Posterize": 1.87,
        "Color": 0.94,
        "Cutout": 18.7,
        "SolarizeAdd": 51.3,
        "ShearY": 0.14,
    }
    assert {name: ranges[name] for name in expected} == pytest.approx(expected, abs=0.05)
    image = np.random.default_rng(0).integers(1, 255, (32, 32, 3), dtype=np.uint8)
    for picture in (Image.fromarray(image), Image.fromarray(image[..., 0])):
        made = {name: np.asarray(OPERATIONS[name][0](picture, strength)) for name, strength in ranges.items()}
        given = np.asarray(picture)
        assert all(array.shape == given.shape for array in made.values())
        assert not made["TranslateX"].any() and not made["TranslateY"].any()
        assert set(np.unique(made["Posterize"])) == {0, 128} and np.array_equal(made["Invert"], 255 - given)
        brighter = np.minimum(given + ranges["SolarizeAdd"], 255).astype(np.uint8)
        np.testing.assert_array_equal(made["SolarizeAdd"], np.where(brighter < 128, brighter, 255 - brighter))
        rows, columns = np.nonzero((made["Cutout"] != given).reshape(32, 32, -1).any(axis=-1))
        assert 9 <= np.ptp(rows) + 1 <= 20 and 9 <= np.ptp(columns) + 1 <= 20
    policy = {"rand_augment_ops": 2, "rand_augment_magnitude": 14}
    counts = {}
    for ranges in ("torchvision", "liere"):
        augmented = augment(**policy, rand_augment_ranges=ranges)
        counts[ranges] = sum(np.ptp(augmented(image, 0, index)) == 0 for index in range(300))
    # A translation is among two of sixteen operations with probability 1 − (14/16)²; three standard errors of 300.
    assert counts["torchvision"] == 0 and counts["liere"] / 300 == pytest.approx(0.234, abs=0.075)


def test_policies_of_timm_are_its_own_and_seeded():
    image = np.asarray(pictures(1, 16)[0])
    state, numpy_state = random.getstate(), np.random.get_state()[1].copy()
    results = [augment(auto_augment="rand-m7-n4-mstd0.5-inc1")(image, 0, index) for index in range(8)]
    assert random.getstate() == state and np.array_equal(np.random.get_state()[1], numpy_state)
    again = [augment(auto_augment="rand-m7-n4-mstd0.5-inc1")(image, 0, index) for index in range(8)]
    assert all(np.array_equal(*pair) for pair in zip(results, again))
    assert len({result.tobytes() for result in results}) > 1
    # What timm itself makes of the image from the seeds that belong to (seed, epoch, index).
    policy = rand_augment_transform(
        "rand-m7-n4-mstd0.5-inc1", {"translate_const": 7, "interpolation": Image.Resampling.BICUBIC}
    )
    generator = np.random.default_rng((0, 0, 3))
    # The flip draws first.
    generator.random()
    seed = int(generator.integers(2**63))
    random.seed(seed)
    np.random.seed(seed % 2**32)
    assert np.array_equal(np.asarray(policy(Image.fromarray(image))), results[3])
    grey = augment(auto_augment="rand-m7-n4-mstd0.5-inc1")(image[..., :1], 0, 0)
    assert grey.shape == (16, 16, 1)
    with pytest.raises(InputError, match="'rand-x9' is not a policy of timm"):
        augment(auto_augment="rand-x9")


@pytest.mark.parametrize(
    "given, message",
    [
        ({"random_crop_ratio": 0.9}, "--random_crop_ratio 0.9; accepted: 0 for none, 1 and above"),
        ({"random_crop_ratio": 1.1, "random_resized_crop": True}, "both choose an augmentation"),
        ({"rand_augment_ranges": "timm"}, "--rand_augment_ranges 'timm'; accepted: torchvision, liere"),
        ({"auto_augment": "rand-m9", "rand_augment_ops": 2}, "--auto_augment and --rand_augment_ops both choose"),
    ],
)
def test_augmentations_that_exclude_each_other(given, message):
    with pytest.raises(InputError, match=message):
        AugmentationArguments(**given)
