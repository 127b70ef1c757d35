"""Training at native aspect ratios: every image alone gives what its batch gives, and pipelines what evaluations do."""

import json
import re

import datasets
import numpy as np
import pytest
import torch
from checkout import ROOT
from pages import TRAINING, commands
from PIL import Image
from safetensors.numpy import load_file
from training_helpers import TINY_RUN, main, train
from transformers import AutoImageProcessor, AutoModelForImageClassification, Siglip2ImageProcessor, pipeline

import hf_liere
from hf_liere.storage.saved_model import SavedModel
from hf_liere.tools.hub.cards import push_card
from training.common.arguments import AugmentationArguments, InputError
from training.data.augmentation import Augmentation
from training.data.native_sizes import NativeSize, PatchCollator


BICUBIC = 3
# Height and width: twice a square, wide, tall, and so wide that one row of patches is left.
SHAPES = ((16, 16), (10, 40), (30, 12), (4, 90), (23, 17), (16, 16))
NATIVE = ("--max_num_patches", 20)
SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}


def pictures(seed):
    generator = np.random.default_rng(seed)
    # Large spots, so that images which are resized still differ.
    coarse = [generator.integers(256, size=(3, 3, 3), dtype=np.uint8) for _ in SHAPES * 2]
    return [Image.fromarray(spots).resize(shape[::-1]) for spots, shape in zip(coarse, SHAPES * 2)]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b", "c"])})
    for name, seed in (("train", 0), ("test", 1)):
        table = {"image": pictures(seed), "label": [number % 3 for number in range(2 * len(SHAPES))]}
        datasets.Dataset.from_dict(table, features=features).to_parquet(folder / f"{name}.parquet")
    return ["--train_files", str(folder / "train.parquet"), "--validation_files", str(folder / "test.parquet")]


@pytest.fixture(scope="module")
def run(files, tmp_path_factory):
    """Two steps with all that may happen to an image, and its folder."""
    folder = tmp_path_factory.mktemp("run")
    flags = ["--flip_probability", 0.5, "--rand_augment_ops", 1, "--random_resized_crop", "--crop_padding", 2]
    flags += ["--random_erasing_probability", 0.5, "--per_device_train_batch_size", 6, "--num_train_epochs", 1]
    flags += ["--do_eval", "--per_device_eval_batch_size", 5, "--learning_rate", 1e-2]
    train(folder, *files, *NATIVE, *flags)
    assert json.loads((folder / "trainer_state.json").read_text())["global_step"] == 2
    return folder


def evaluate(run, files, output_dir, *flags):
    command = ["--model_name_or_path", str(run), "--do_eval", *TINY_RUN, *files[2:], "--output_dir", str(output_dir)]
    return main([*command, *map(str, flags)])


def test_an_evaluation_is_that_of_each_image_alone(run):
    """Cut and resized here by PIL alone, at the size that transformers' processor says."""
    model = AutoModelForImageClassification.from_pretrained(run).eval()
    processor = AutoImageProcessor.from_pretrained(run)
    losses, shapes = [], set()
    for number, picture in enumerate(pictures(1)):
        rows, columns = processor(picture, return_tensors="pt")["spatial_shapes"][0].tolist()
        assert rows * columns <= 20
        shapes.add((rows, columns))
        resized = np.asarray(picture.resize((4 * columns, 4 * rows), BICUBIC))
        pixels = torch.from_numpy(resized / 127.5 - 1).float().permute(2, 0, 1)
        with torch.no_grad():
            losses.append(model(pixels.unsqueeze(0), labels=torch.tensor([number % 3])).loss.item())
    # One row of patches is in there, and one column is more than half of them.
    assert len(shapes) == 5 and (1, 20) in shapes
    kept = load_file(run / "eval_examples.safetensors")["losses"]
    # Sums of up to 21 tokens in another order.
    np.testing.assert_allclose(kept, losses, atol=1e-5)


def test_the_saved_processor_prepares_what_the_evaluation_sees(run):
    processor = AutoImageProcessor.from_pretrained(run)
    assert isinstance(processor, Siglip2ImageProcessor)
    assert (processor.patch_size, processor.max_num_patches, int(processor.resample)) == (4, 20, BICUBIC)
    config = hf_liere.LieREViTConfig.from_pretrained(run)
    collator = PatchCollator(config, 20, [0.5] * 3, [0.5] * 3, AugmentationArguments(), 0)
    augment = Augmentation(NativeSize(4, 20), BICUBIC, AugmentationArguments(), 0)
    images = [augment(np.asarray(picture), 0, 0) for picture in pictures(1)]
    ours = collator([{"image": image, "label": 0} for image in images])
    theirs = processor(pictures(1), return_tensors="pt")
    assert torch.equal(ours["spatial_shapes"], theirs["spatial_shapes"])
    assert torch.equal(ours["pixel_attention_mask"], theirs["pixel_attention_mask"])
    # torchvision rounds some pixels of a resized image to a neighbour of PIL's value, one of 255 in a range of 2; the
    # padding is zero in both.
    torch.testing.assert_close(ours["pixel_values"], theirs["pixel_values"], atol=2 / 255 + 1e-6, rtol=0)


def test_a_pipeline_gives_the_logits_of_the_evaluation(run):
    """By PIL, which resizes as the evaluation does, and by torchvision, which rounds some pixels otherwise."""
    losses = load_file(run / "eval_examples.safetensors")["losses"]
    for backend, tolerance in (("pil", 1e-5), ("torchvision", 2e-2)):
        processor = AutoImageProcessor.from_pretrained(run, backend=backend)
        classify = pipeline("image-classification", str(run), image_processor=processor, device="cpu")
        for number, answers in enumerate(classify(pictures(1), function_to_apply="none", batch_size=1)):
            logits = {answer["label"]: answer["score"] for answer in answers}
            values = torch.tensor([logits[name] for name in "abc"])
            loss = values.logsumexp(dim=0) - values[number % 3]
            assert loss.item() == pytest.approx(losses[number], abs=tolerance)


def test_a_checkpoint_is_evaluated_at_another_number_of_patches(run, files, tmp_path):
    as_trained = evaluate(run, files, tmp_path / "as_trained")
    # Batches of another size.
    expected = json.loads((run / "eval_results.json").read_text())["eval_loss"]
    assert as_trained["eval_loss"] == pytest.approx(expected, abs=1e-6)
    assert recorded(tmp_path / "as_trained") == ([16, 16], 20)
    more = evaluate(run, files, tmp_path / "more", "--max_num_patches", 40)
    assert abs(more["eval_loss"] - expected) > 1e-4 and recorded(tmp_path / "more") == ([16, 16], 40)
    with pytest.raises(InputError, match="--image_size 24×24 has no effect with --max_num_patches 20: coordinates"):
        evaluate(run, files, tmp_path / "size", "--image_size", 24)


def recorded(folder):
    record = json.loads((folder / "run_config.json").read_text())
    return record["image_size"], record["data"]["max_num_patches"]


def test_the_card_tells_the_number_of_patches(run, files, tmp_path):
    evaluate(run, files, tmp_path / "more", "--max_num_patches", 40)
    text = push_card(SavedModel(run), "me/native", evaluations=[tmp_path / "more"]).text
    assert "| up to 20 patches (as trained) | 12 |" in text and "| up to 40 patches | 12 |" in text
    assert "top-1 accuracy at up to 20 patches" in text and "max_num_patches: 40" in text
    assert "| `max_num_patches` | 20 |" in text and "| `image_size` | 16 |" in text
    assert not re.search(r"16 × 16 px", text) and "keep their aspect ratio" in text


def test_folded_rotations_of_one_grid_are_computed_for_the_others(run, files, tmp_path):
    folded = AutoModelForImageClassification.from_pretrained(run).fold_rotations([(4, 4), (1, 20)])
    folded.save_pretrained(tmp_path / "folded")
    AutoImageProcessor.from_pretrained(run).save_pretrained(tmp_path / "folded")
    metrics = evaluate(tmp_path / "folded", files, tmp_path / "evaluated")
    # Folding keeps rotations in float32, and products of them in another order.
    expected = json.loads((run / "eval_results.json").read_text())["eval_loss"]
    assert metrics["eval_loss"] == pytest.approx(expected, abs=1e-5)


def test_patches_are_dropped_in_training_only(files, tmp_path):
    """With a learning rate of zero both models are the same, and only the losses of their training differ."""
    flags = [*files, *NATIVE, "--max_steps", 1, "--do_eval", "--learning_rate", 0]
    for probability in (0.0, 0.5):
        train(tmp_path / f"{probability}", *flags, "--patch_dropout_prob", probability)
    first, second = (json.loads((tmp_path / name / "all_results.json").read_text()) for name in ("0.0", "0.5"))
    assert first["eval_loss"] == pytest.approx(second["eval_loss"], abs=1e-6)
    assert abs(first["train_loss"] - second["train_loss"]) > 1e-5


def test_what_holds_no_image_is_one_patch_that_is_not_learnt():
    config = hf_liere.LieREViTConfig(**SMALL, image_size=16, patch_size=4)
    collator = PatchCollator(config, 6, [0.5] * 3, [0.5] * 3, AugmentationArguments(), 0)
    batch = collator([{"image": np.zeros((8, 12, 3), np.uint8), "label": 2}, {"label": -100}])
    assert batch["labels"].tolist() == [2, -100] and batch["spatial_shapes"].tolist() == [[2, 3], [1, 1]]
    assert batch["pixel_values"][1].abs().max() == 0 and batch["pixel_attention_mask"].sum(dim=1).tolist() == [6, 1]


def test_crops_have_the_aspect_ratio_of_the_image():
    """Two stripes that cross each other tell what share of each side a crop has: the same of both."""
    augment = Augmentation(NativeSize(4, 64), BICUBIC, AugmentationArguments(random_resized_crop=True), 0)
    for size in ((200, 800), (900, 300)):
        for index in range(20):
            height, width = augment.extent(size, 0, index)
            # Both sides are rounded to pixels.
            assert height / width == pytest.approx(size[0] / size[1], rel=0.02)
            shape = augment(np.zeros((*size, 3), np.uint8), 0, index).shape
            assert shape == (*NativeSize(4, 64)((height, width)), 3)


def test_sizes_use_the_patches_there_are():
    """No aspect ratio gets more than the limit, and none so few that both sides could have one more."""
    generator = np.random.default_rng(0)
    for height, width in generator.integers(5, 600, size=(200, 2)).tolist():
        rows, columns = (side // 8 for side in NativeSize(8, 50)((height, width)))
        assert rows * columns <= 50 < (rows + 1) * (columns + 1)
        # Both sides are rounded up from the same scale.
        assert (rows - 1) * width < columns * height and (columns - 1) * height < rows * width


@pytest.mark.parametrize("patch_size", ["6", pytest.param("[6,6]", marks=pytest.mark.slow)])
def test_the_default_of_the_training_grid_is_the_largest_square(patch_size, files, tmp_path):
    flags = ["--hidden_size", 16, "--num_hidden_layers", 1, "--num_attention_heads", 2, "--intermediate_size", 16]
    flags += ["--patch_size", patch_size, "--max_num_patches", 20, "--max_steps", 1, "--do_train", *TINY_RUN, *files]
    main([*map(str, flags), "--output_dir", str(tmp_path)])
    config = hf_liere.LieREViTConfig.from_pretrained(tmp_path)
    assert config.train_grid == (4, 4)


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--max_num_patches", 0], "--max_num_patches 0; accepted: 1 and above"),
        (["--patch_size", "[2,4]"], "--max_num_patches 20: patches of 2×4 are not square"),
        (["--mixup_alpha", 0.5], "--mixup_alpha mixes images of one size; accepted with --max_num_patches 20: 0"),
        (["--cutmix_alpha", 0.5], "--cutmix_alpha mixes"),
        (["--do_eval", "--evaluation_shuffle", "patches"], "--evaluation_shuffle permutes the patches of one size"),
        (["--do_eval", "--evaluation_offset", 0.5], "--evaluation_offset shifts"),
    ],
)
def test_mistakes_are_told_before_training(flags, message, files, tmp_path):
    with pytest.raises(InputError, match=message):
        train(tmp_path / "run", *files, *NATIVE, *flags)
    assert not (tmp_path / "run" / "model.safetensors").exists()


def test_a_model_of_another_library_is_refused(files, tmp_path):
    from transformers import ViTConfig, ViTForImageClassification

    names = dict(enumerate("abc"))
    config = ViTConfig(**SMALL, image_size=16, patch_size=4, id2label=names)
    ViTForImageClassification(config).save_pretrained(tmp_path / "vit")
    with pytest.raises(InputError, match="--max_num_patches 20: vit models take images of one size here"):
        evaluate(tmp_path / "vit", files, tmp_path / "evaluated", *NATIVE)


def test_rectangles_are_the_arrows_of_many_shapes(tmp_path):
    flags = ["--dataset_name", "arrows", "--dataset_config_name", "rectangles", "--image_size", 108, "--patch_size", 12]
    flags += ["--max_train_samples", 16, "--max_eval_samples", 30, "--do_eval", "--max_num_patches", 81]
    assert train(tmp_path, *flags)["eval_samples"] == 30
    with pytest.raises(InputError, match="'circles': unknown for the arrows; accepted: squares, rectangles"):
        train(tmp_path / "circles", "--dataset_name", "arrows", "--dataset_config_name", "circles")


def test_the_command_of_the_readme(files, tmp_path):
    (words,) = (words for words in commands(TRAINING) if "--max_num_patches" in words)
    places = {"TRAIN.parquet": files[1], "TEST.parquet": files[3], "outputs/native": str(tmp_path)}
    flags = [str(ROOT / words[2]), *(places.get(word, word) for word in words[3:])]
    assert main([*flags, "--max_steps", "1", "--use_cpu", "true", "--disable_tqdm", "true"])["eval_samples"] == 12
    assert AutoImageProcessor.from_pretrained(tmp_path).max_num_patches == 64
