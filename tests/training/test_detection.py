"""Detection: boxes of the generated shapes, COCO's average precision, and whole runs of a small detector."""

import json

import numpy as np
import pytest
import torch
from checkout import ROOT
from PIL import Image
from slow_cases import slow_except
from training_helpers import (
    TINY_MODEL,
    TINY_RUN,
    run_script_twice,
    train,
    weights,
    write_parquet,
)
from transformers import (
    AutoModelForObjectDetection,
    DeformableDetrImageProcessor,
    EvalPrediction,
    ViTConfig,
    ViTModel,
)
from transformers.models.deformable_detr.modeling_deformable_detr import DeformableDetrObjectDetectionOutput

from hf_liere import LieREViTConfig, LieREViTForImageClassification
from training import object_detection
from training.common.arguments import InputError
from training.data.detection_data import (
    CATEGORIES,
    DetectionDataArguments,
    DetectionExamples,
    load_detections,
    read_coco,
    scene,
    write_shapes,
)
from training.data.sources import PARTS, DataRequest
from training.tasks.detection.detection_trainer import CocoMetrics, best_detections


TINY_DETECTOR = "--d_model 32 --encoder_layers 1 --decoder_layers 2 --detector_ffn_dim 16 --detector_heads 2".split()
TINY_DETECTOR += "--num_queries 5 --num_feature_levels 2 --image_size 32".split()


def run(folder, *flags):
    return object_detection.main(
        ["--output_dir", str(folder), *TINY_MODEL, *TINY_DETECTOR, *TINY_RUN, *map(str, flags)]
    )


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shapes")
    for split, size in (("train", 16), ("validation", 13)):
        write_shapes(folder, split, size, (32, 32))
    return folder


def test_pictures_are_found_where_coco_has_them(shapes, tmp_path):
    (tmp_path / "annotations").mkdir()
    (tmp_path / "train2017").symlink_to(shapes, target_is_directory=True)
    annotations = tmp_path / "annotations" / "instances_train2017.json"
    (written,) = shapes.glob("train_*.json")
    annotations.write_text(written.read_text())
    assert read_coco(annotations, None)[1] == tmp_path / "train2017"


def load(folder):
    arguments = DetectionDataArguments(shapes_folder=str(folder), max_train_samples=16, max_eval_samples=13)
    return load_detections(arguments, DataRequest((32, 32)))


def test_boxes_of_shapes_are_tight():
    """A picture without its last shape differs from the whole one exactly in a box's columns and rows."""
    checked = 0
    for index in range(60):
        picture, objects = scene("train", index, (48, 64))
        assert picture.shape == (48, 64, 3) and 1 <= len(objects) <= 4
        if len(objects) > 1:
            continue
        # Shapes are brighter than any ground.
        rows, columns = np.nonzero(picture.max(axis=2) >= 120)
        box = [columns.min(), rows.min(), columns.max() + 1 - columns.min(), rows.max() + 1 - rows.min()]
        assert objects[0][1] == box
        checked += 1
    assert checked > 5


def test_flipped_boxes_stay_on_their_shapes(shapes):
    source, _, names = load(shapes)
    assert names == list(CATEGORIES)
    examples = DetectionExamples(source, (32, 32), 3, flip_probability=0.5, seed=0)
    flipped = 0
    for index in range(16):
        plain, drawn = examples[index], examples[(3, index)]
        if np.array_equal(plain["image"], drawn["image"]):
            assert np.array_equal(plain["boxes"], drawn["boxes"])
            continue
        flipped += 1
        assert np.array_equal(plain["image"][:, ::-1], drawn["image"])
        expected = plain["boxes"] * [-1, 1, 1, 1] + [1, 0, 0, 0]
        np.testing.assert_allclose(drawn["boxes"], expected, atol=1e-6)
    assert 0 < flipped < 16


def test_best_detections_are_those_of_transformers():
    torch.manual_seed(0)
    logits, boxes = torch.randn(2, 7, 3), torch.rand(2, 7, 4) / 2 + 0.2
    outputs = DeformableDetrObjectDetectionOutput(logits=logits, pred_boxes=boxes)
    expected = DeformableDetrImageProcessor().post_process_object_detection(outputs, threshold=0.0, top_k=6)
    for detections, image in zip(best_detections(logits, boxes, 6), expected):
        torch.testing.assert_close(detections[:, 0], image["scores"])
        torch.testing.assert_close(detections[:, 1].long(), image["labels"])
        torch.testing.assert_close(detections[:, 2:], image["boxes"])


def test_average_precision_of_known_detections(shapes):
    """Perfect boxes give 1; of two equally many wrong ones with higher scores precision is a half."""
    _, source, _ = load(shapes)

    def detections(index, wrong):
        _, boxes, labels = source[index]
        rows = [[0.5, label, *box] for label, box in zip(labels, boxes)]
        rows += [[0.9, label, 0.0, 0.0, 0.02, 0.02] for label in labels] if wrong else []
        return np.array(rows + [[0.0, 0, 0, 0, 0.01, 0.01]] * (8 - len(rows)))

    for wrong, expected in ((False, 1.0), (True, 0.5)):
        results = EvalPrediction(np.stack([detections(index, wrong) for index in range(13)]), np.arange(13))
        metrics = CocoMetrics(source)(results)
        assert metrics["map"] == pytest.approx(expected, abs=1e-6) and metrics["map_50"] == pytest.approx(expected)
    assert "map_large" not in metrics


@pytest.mark.slow
def test_two_processes_evaluate_as_one(shapes, tmp_path):
    """13 pictures on two processes in batches of 4: repeated ones would be counted twice."""
    sizes = ["--shapes_folder", shapes, "--max_train_samples", 16, "--max_eval_samples", 13]
    run(tmp_path / "run", *sizes, "--do_train", "--max_steps", 3)
    flags = ["--model_name_or_path", tmp_path / "run", *sizes, "--do_eval", "--per_device_eval_batch_size", 4]
    flags = [*map(str, flags), *TINY_RUN, "--image_size", "32"]
    one = object_detection.main([*flags, "--output_dir", str(tmp_path / "one")])
    run_script_twice(ROOT / "training" / "object_detection.py", *flags, "--output_dir", tmp_path / "two")
    two = json.loads((tmp_path / "two" / "eval_results.json").read_text())
    assert json.loads((tmp_path / "two" / "environment.json").read_text())["world_size"] == 2
    for name in ("eval_map", "eval_map_50", "eval_samples"):
        assert one[name] == pytest.approx(two[name], abs=1e-9)


def test_a_detector_reloads_and_starts_from_a_classifier(shapes, tmp_path):
    data = write_parquet(tmp_path / "train.parquet", 8)
    train(tmp_path / "classifier", "--train_files", data, "--max_steps", 1, "--image_size", 32)
    flags = ["--shapes_folder", shapes, "--do_train", "--max_train_samples", 16, "--max_eval_samples", 13]
    flags += ["--max_steps", 1, "--learning_rate", 0.0, "--weight_decay", 0.0]
    run(tmp_path / "run", *flags, "--backbone_name_or_path", tmp_path / "classifier")
    model, loading = AutoModelForObjectDetection.from_pretrained(tmp_path / "run", output_loading_info=True)
    assert not any(loading[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.config.id2label == dict(enumerate(CATEGORIES))
    given, taken = weights(tmp_path / "classifier"), model.state_dict()
    names = [name for name in given if name.startswith("liere.")]
    assert len(names) > 10
    for name in names:
        assert torch.equal(given[name], taken[name.replace("liere.", "model.backbone.model.", 1)]), name
    with pytest.raises(InputError, match="is a liere_vit; accepted: a Deformable DETR, or --backbone"):
        run(tmp_path / "other", *flags, "--model_name_or_path", tmp_path / "classifier")


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A classifier with absolute positions for images of 16 px, and its folder."""
    fields = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    fields |= {"image_size": 16, "patch_size": 4, "initializer_range": 0.2, "position_encoding": "absolute"}
    torch.manual_seed(0)
    model = LieREViTForImageClassification(LieREViTConfig(**fields)).eval()
    folder = tmp_path_factory.mktemp("plain") / "classifier"
    model.save_pretrained(folder)
    return model, folder


@pytest.mark.parametrize(
    "encoding", slow_except(("liere",), ("absolute", "rope_mixed", "liere", "comrope_ap", "comrope_ld"))
)
def test_every_encoding_starts_from_absolute_positions_for_larger_pictures(encoding, shapes, plain, tmp_path):
    """As the recipe coco: before a step is taken, the detector's feature map is the one of the classifier."""
    classifier, folder = plain
    flags = ["--shapes_folder", shapes, "--do_train", "--max_train_samples", 16, "--max_eval_samples", 13]
    flags += ["--max_steps", 1, "--learning_rate", 0.0, "--weight_decay", 0.0, "--backbone_name_or_path", folder]
    flags += ["--position_encoding", encoding, "--use_absolute_position_embeddings", "true", "--rotary_init", "zeros"]
    architecture = "--hidden_size 128 --num_hidden_layers 2 --num_attention_heads 2 --intermediate_size 32".split()
    flags = [*TINY_DETECTOR, *architecture, "--patch_size", "4", *TINY_RUN, *map(str, flags)]
    object_detection.main(["--output_dir", str(tmp_path), *flags])
    model = AutoModelForObjectDetection.from_pretrained(tmp_path).eval()
    backbone = model.model.backbone.model
    assert backbone.config.image_size == 32 and backbone.config.position_encoding == encoding
    pixels = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        hidden = classifier.liere(pixels).last_hidden_state[:, 1:]
        (found,) = backbone(pixels).feature_maps
    torch.testing.assert_close(found.flatten(2).transpose(1, 2), hidden, rtol=0, atol=1e-5)


def test_a_vit_of_transformers_is_no_backbone(shapes, tmp_path):
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    ViTModel(ViTConfig(**sizes, image_size=16, patch_size=4)).save_pretrained(tmp_path / "vit")
    flags = ["--shapes_folder", shapes, "--do_train", "--backbone_name_or_path", tmp_path / "vit"]
    with pytest.raises(InputError, match="vit' is a vit; accepted: image models of hf_liere"):
        run(tmp_path / "out", *flags)


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--hidden_size", "64"], "--hidden_size 64 contradicts the backbone's 128"),
        (["--position_encoding", "axial_rope"], "--position_encoding axial_rope: the backbone has absolute"),
        (["--position_encoding", "comrope_ld", "--block_size", "7"], "block_size=7 must divide"),
    ],
)
def test_backbones_that_contradict_the_flags(flags, message, shapes, plain, tmp_path):
    given = ["--backbone_name_or_path", str(plain[1]), "--shapes_folder", str(shapes), "--do_train", *TINY_RUN]
    with pytest.raises(InputError, match=message):
        object_detection.main(["--output_dir", str(tmp_path), *TINY_DETECTOR, *given, *flags])


def test_rotations_keep_their_initialisation_in_a_detector(shapes, tmp_path):
    """LieRE draws from [0, 2π); a detector's own initialisation would make weights of 0.02."""
    flags = ["--shapes_folder", shapes, "--do_train", "--max_train_samples", 16, "--max_eval_samples", 13]
    run(tmp_path, *flags, "--max_steps", 1, "--learning_rate", 0.0)
    model = AutoModelForObjectDetection.from_pretrained(tmp_path)
    generators = model.model.backbone.model.rotary_encoding.generators
    assert generators.min() >= 0 and 5 < generators.max() < 2 * np.pi


def test_photographs_are_read_and_evaluated(shared, tmp_path):
    folder = shared / "data" / "bccd_detection"
    flags = ["--train_files", folder / "train.json", "--validation_files", folder / "val.json", "--do_train"]
    flags += ["--do_eval", "--max_train_samples", 4, "--max_eval_samples", 3, "--image_size", "[48, 64]"]
    metrics = run(tmp_path, *flags)
    assert metrics["eval_samples"] == 3 and 0 <= metrics["eval_map"] <= 1
    config = json.loads((tmp_path / "config.json").read_text())
    assert list(config["id2label"].values()) == ["RBC", "WBC", "Platelets"]


def write_coco(folder, **changes):
    Image.new("RGB", (8, 8)).save(folder / "one.png")
    content = {
        "images": [{"id": 1, "file_name": "one.png", "width": 8, "height": 8}],
        "annotations": [{"id": 1, "image_id": 1, "category_id": 2, "bbox": [1, 1, 3, 3]}],
        "categories": [{"id": 2, "name": "thing"}],
    }
    (folder / "data.json").write_text(json.dumps({**content, **changes}))
    return folder / "data.json"


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"categories": []}, "data.json has no 'categories'; accepted: COCO's format"),
        ({"categories": [{"id": 3, "name": "x"}]}, "annotation 1 has the unknown category 2"),
        ({"images": [{"id": 5, "file_name": "one.png"}]}, "annotation 1 has the unknown image 1"),
        (
            {"images": [{"id": 1, "file_name": "two.png"}]},
            "there is no picture 'two.png' in .*accepted: --image_folder",
        ),
        ({"annotations": [{"id": 1, "image_id": 1, "category_id": 2, "bbox": [1, 2]}]}, r"has the box \[1, 2\]"),
        ({"annotations": [{"id": 1, "image_id": 1, "category_id": 2}]}, "is not in COCO's format .KeyError: 'bbox'"),
    ],
)
def test_what_is_wrong_with_a_json_is_named(changes, message, tmp_path):
    with pytest.raises(InputError, match=message):
        read_coco(write_coco(tmp_path, **changes), None)


def test_what_is_no_json_is_named(tmp_path):
    (tmp_path / "data.json").write_text("{")
    with pytest.raises(InputError, match="data.json is not in COCO's format"):
        read_coco(tmp_path / "data.json", None)
    with pytest.raises(InputError, match="There is no file"):
        read_coco(tmp_path / "nothing.json", None)
    (tmp_path / "pictures").mkdir()
    file = write_coco(tmp_path)
    (tmp_path / "one.png").write_bytes(b"no picture")
    source, _, _ = load_detections(
        DetectionDataArguments(train_files=[str(file)]), DataRequest((8, 8), parts=PARTS[:1])
    )
    with pytest.raises(InputError, match="The picture one.png cannot be read"):
        source[0]
