"""training/clip_finetuning.py end to end on tiny models and pictures: what is learnt, saved, resumed and refused."""

import json
import re
import shutil

import pytest
import torch
import transformers
from checkout import ROOT
from clip_training import CLASSES, TINY_RUN, ZeroShot, accuracies, but_for_rounding, measured_again, train
from fresh_process import run_warm
from patching_cases import CASES, IMAGE, ROTATING
from safetensors.torch import load_file, save_file
from training_helpers import small_clip, write_images

import hf_liere
from hf_liere import is_patched, load_rotary, rotary_parameters
from hf_liere.auto import load_checkpoint
from training.clip_finetuning import main


SCRIPT = ROOT / "training" / "clip_finetuning.py"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_images(tmp_path_factory.mktemp("data"), 24, 13, 24)


@pytest.fixture(scope="module")
def clip_folder(tmp_path_factory):
    """A CLIP of images and text with a tokenizer, as on the Hub."""
    folder = tmp_path_factory.mktemp("clip")
    model, tokenizer = small_clip()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


# Adam divides by gradients that are zero but for rounding, such as those of the keys' biases.
WHOLE = "--eval_image_sizes 16 24 --optim sgd --learning_rate 0.1".split()


@pytest.fixture(scope="module")
def whole(clip_folder, data, tmp_path_factory):
    """All weights trained, both models, evaluated at two sizes."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, train(folder, clip_folder, data, *WHOLE, "--save_steps", 1)


def test_saved_models_give_the_results_that_were_written(whole, data):
    folder, results = whole
    found = accuracies(results)
    assert list(found) == [("patched", 16), ("patched", 24), ("unpatched", 16), ("unpatched", 24)]
    for name in ("patched", "unpatched"):
        written = json.loads((folder / name / "resolutions.json").read_text())["resolutions"]
        assert written == [result for result in results if result["model"] == name]
        assert all(result["samples"] == 13 and result["accuracy_low"] <= result["accuracy"] for result in written)
        model = transformers.AutoModelForImageClassification.from_pretrained(folder / name)
        assert is_patched(model) == (name == "patched") and list(model.config.id2label.values()) == CLASSES
        forward = model.forward
        if name == "unpatched":
            model.forward = lambda **inputs: forward(**inputs, interpolate_pos_encoding=True)  # noqa: B023
        for size in (16, 24):
            assert found[name, size] == measured_again(model, data, size)
        assert not (folder / name / "training_args.bin").exists()
    run_config = (folder / "patched" / "run_config.json").read_text()
    assert json.loads(run_config)["rotary_patch"]["position_encoding"] == "comrope_ld"
    assert str(folder) not in run_config


@pytest.mark.parametrize("head", [pytest.param("classifier", marks=pytest.mark.slow), "zero_shot"])
def test_patched_and_unpatched_start_alike_at_every_size(head, clip_folder, data, tmp_path):
    """Equal seeds, images and steps: with a learning rate of zero nothing tells the models apart, to the last bit."""
    flags = ["--head", head, "--learning_rate", 0, "--eval_image_sizes", 16, 24, 32]
    found = accuracies(train(tmp_path, clip_folder, data, *flags))
    for size in (16, 24, 32):
        assert found["patched", size] == found["unpatched", size]


@pytest.mark.parametrize(
    "head, trainable",
    [
        ("classifier", "rotary+head"),
        ("zero_shot", "all"),
        pytest.param("classifier", "all", marks=pytest.mark.slow),
        pytest.param("zero_shot", "rotary", marks=pytest.mark.slow),
    ],
)
def test_only_what_is_named_learns(head, trainable, clip_folder, data, tmp_path):
    train(tmp_path, clip_folder, data, "--head", head, "--trainable", trainable, "--baseline", "false")
    auto = "AutoModelForImageClassification" if head == "classifier" else "AutoModelForZeroShotImageClassification"
    saved = getattr(transformers, auto).from_pretrained(tmp_path / "patched").state_dict()
    before = load_file(f"{clip_folder}/model.safetensors")
    learnt = {name for name, value in saved.items() if name not in before or not torch.equal(value, before[name])}
    rotary = {f"vision_model.rotary_encoding.{name}" for name in ("generators", "multipliers")}
    classifier = {"classifier.weight", "classifier.bias"} if head == "classifier" else set()
    frozen = {name for name in saved if name.startswith("text_")}
    if trainable == "all":
        # Keys have no gradient with respect to their bias, and unused parts have none.
        assert rotary | classifier <= learnt and not learnt & frozen
        assert {name for name in saved if name.endswith(("q_proj.weight", "fc1.weight"))} - frozen <= learnt
    else:
        assert learnt == rotary | classifier
    assert saved["vision_model.rotary_encoding.generators"].abs().max() > 0


@pytest.mark.parametrize("head", ["classifier", pytest.param("zero_shot", marks=pytest.mark.slow)])
def test_lora_and_rotations_load_again_by_their_own_libraries(head, clip_folder, data, tmp_path):
    peft = pytest.importorskip("peft")
    results = train(tmp_path, clip_folder, data, "--trainable", "lora+rotary", "--head", head, "--lora_rank", 2)
    folder = tmp_path / "patched"
    assert not (folder / "model.safetensors").exists()
    auto = "AutoModelForImageClassification" if head == "classifier" else "AutoModelForZeroShotImageClassification"
    labels = {"num_labels": 3} if head == "classifier" else {}
    base = getattr(transformers, auto).from_pretrained(clip_folder, **labels)
    model = peft.PeftModel.from_pretrained(load_rotary(base, folder / "rotary"), folder / "lora")
    assert all(value.abs().max() > 0 for _, value in rotary_parameters(model))
    assert any(value.abs().max() > 0 for name, value in model.named_parameters() if "lora_B" in name)
    if head == "classifier":
        assert accuracies(results)["patched", 16] == measured_again(model, data, 16)
        for name in ("patched", "unpatched"):
            whole, processor = load_checkpoint(tmp_path / name / "lora")
            assert accuracies(results)[name, 16] == measured_again(whole, data, 16)
            assert list(whole.config.id2label.values()) == list(CLASSES)
            assert processor.to_dict() == transformers.AutoImageProcessor.from_pretrained(tmp_path / name).to_dict()
    else:
        assert accuracies(results)["patched", 16] == measured_again(ZeroShot(model, folder), data, 16)


@pytest.mark.slow
def test_learning_rates_of_rotations_and_classifier(clip_folder, data, tmp_path):
    flags = ["--trainable", "rotary+head", "--baseline", "false"]
    train(tmp_path / "rotary", clip_folder, data, *flags, "--head_learning_rate_factor", 0)
    train(tmp_path / "head", clip_folder, data, *flags, "--rotary_learning_rate_factor", 0)
    train(tmp_path / "none", clip_folder, data, *flags, "--learning_rate", 0)
    start, rotary, head = (
        load_file(tmp_path / name / "patched/model.safetensors") for name in ("none", "rotary", "head")
    )
    generators = "vision_model.rotary_encoding.generators"
    assert torch.equal(rotary["classifier.weight"], start["classifier.weight"])
    assert not torch.equal(head["classifier.weight"], start["classifier.weight"])
    assert rotary[generators].abs().max() > 0 == head[generators].abs().max()


def test_checkpoint_without_a_weight_is_not_resumed(whole, clip_folder, data, tmp_path):
    shutil.copytree(whole[0] / "patched" / "checkpoint-1", tmp_path / "patched" / "checkpoint-1")
    path = tmp_path / "patched" / "checkpoint-1" / "model.safetensors"
    weights = load_file(path)
    weights["model.renamed"] = weights.pop("model.vision_model.rotary_encoding.generators")
    save_file(weights, path)
    with pytest.raises(
        ValueError, match="Missing: model.vision_model.rotary_encoding.generators. Unexpected: model.renamed"
    ):
        train(tmp_path, clip_folder, data, "--resume_from_checkpoint", "last")


@pytest.mark.slow
def test_new_tower_is_trained_then_patched_then_evaluated(data, tmp_path):
    vision = json.dumps(IMAGE)
    flags = ["--use_cpu", "true", "--disable_tqdm", "true", *data]
    fresh = ["--vision_config", vision, "--position_encoding", "none", "--do_train", "--max_steps", "2", *flags]
    main(["--output_dir", str(tmp_path / "new"), *fresh])
    trained = train(tmp_path / "tuned", str(tmp_path / "new/unpatched"), data, "--keep_absolute", "drop", "--layers", 1)
    model = transformers.AutoModelForImageClassification.from_pretrained(tmp_path / "tuned/patched")
    assert model.config.rotary_patch["keep_absolute"] == "drop" and model.config.rotary_patch["layers"] == [1]
    evaluate = ["--model_name_or_path", str(tmp_path / "tuned/patched"), "--do_eval", *flags]
    (again,) = main(["--output_dir", str(tmp_path / "again"), *evaluate])
    assert (again["accuracy"], again["loss"]) == but_for_rounding(accuracies(trained)["patched", 16])
    more = train(tmp_path / "more", str(tmp_path / "tuned/patched"), data, "--position_encoding", "comrope_ld")
    assert [result["model"] for result in more] == ["patched"]


def test_both_models_get_a_new_classifier_for_other_classes(data, tmp_path):
    """As many classes by other names: the second model may not take the first one's renaming for its own classes."""
    model = CASES["siglip_classifier"].build()
    model.config.id2label = dict(enumerate(["cat", "dog", "fox"]))
    with torch.no_grad():
        model.classifier.weight.fill_(100.0)
    model.save_pretrained(tmp_path / "animals")
    found = accuracies(train(tmp_path / "run", str(tmp_path / "animals"), data, "--learning_rate", 0))
    assert found["patched", 16] == found["unpatched", 16]
    saved = load_file(tmp_path / "run/unpatched/model.safetensors")["classifier.weight"]
    assert saved.abs().max() < 1


def test_every_family_leaves_a_whole_model(data, tmp_path):
    CASES["siglip_classifier"].build().save_pretrained(tmp_path / "siglip")
    results = train(tmp_path / "run", str(tmp_path / "siglip"), data)
    model = transformers.AutoModelForImageClassification.from_pretrained(tmp_path / "run" / "patched")
    assert type(model).__name__ == "RotarySiglipForImageClassification"
    assert accuracies(results)["patched", 16] == measured_again(model, data, 16)


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--position_encoding", "sinusoid"], "'sinusoid'; accepted are liere"),
        (["--block_size", 32], "block_size=32 does not fit a head_dim of 16"),
        (["--target", "text_model"], "matches no vision tower"),
        (["--position_encoding", "axial_rope"], "never starts neutral"),
        (["--image_size", 18], "18×18 is not divisible by the patch size 4×4"),
        (["--eval_image_sizes", 16, 18], "18×18 is not divisible"),
        (["--trainable", "rotary"], "accepted if no classifier is trained: the same labels"),
        (["--head", "zero_shot", "--trainable", "rotary+head"], "zero_shot has no classifier"),
        (["--head", "zero_shot", "--prompts", "a photo"], "accepted: texts with {}"),
        (
            ["--head", "zero_shot", "--prompts", "a very long photograph of {} and more"],
            "tokens; the text tower takes 32",
        ),
        (["--vision_config", "{}"], "accepted: one of them"),
        (["--head_learning_rate_factor", -1], "accepted: 0 and above"),
        (["--resume_from_checkpoint", "last"], "contains no checkpoint"),
        (["--push_to_hub"], "--push_to_hub"),
        (["--blocksize", 4], "the closest is 'block_size'"),
        ("--position_encoding rope_mixed --block_size 4".split(), "its only block_size is 2"),
    ],
)
def test_bad_input_is_refused_before_any_training(flags, message, clip_folder, data, tmp_path):
    with pytest.raises(ValueError, match=message):
        train(tmp_path, clip_folder, data, *flags)
    assert not list(tmp_path.glob("**/checkpoint-*"))


def test_models_that_cannot_be_patched_are_refused_before_anything_is_written(data, tmp_path):
    hf_liere.LieREViTForImageClassification(hf_liere.LieREViTConfig(**IMAGE)).save_pretrained(tmp_path / "liere")
    ROTATING["dinov3"]().save_pretrained(tmp_path / "dinov3")
    with pytest.raises(ValueError, match="already rotates query and key"):
        train(tmp_path / "out", str(tmp_path / "liere"), data)
    arguments = ["--output_dir", tmp_path / "out", "--model_name_or_path", tmp_path / "dinov3", *data, *TINY_RUN]
    errors = run_warm(SCRIPT, *arguments, status=1).stderr
    assert re.match("error: .*Unrecognized configuration class", errors.splitlines()[-1]), errors
    assert "Traceback" not in errors and not (tmp_path / "out").exists()


@pytest.mark.slow
def test_encoding_that_learns_nothing(clip_folder, data, tmp_path):
    axial = ["--position_encoding", "axial_rope", "--rotary_init", "None", "--block_size", 2]
    with pytest.raises(ValueError, match="trains no parameter with --position_encoding axial_rope"):
        train(tmp_path, clip_folder, data, *axial, "--trainable", "rotary", "--head", "zero_shot")
    assert len(train(tmp_path, clip_folder, data, *axial, "--overwrite_output_dir")) == 2


def test_runs_are_neither_overwritten_nor_patched_twice(whole, clip_folder, data, tmp_path):
    with pytest.raises(ValueError, match="contains another run"):
        train(whole[0], str(whole[0] / "patched"), data)
    with pytest.raises(ValueError, match="accepted with --do_train only"):
        train(tmp_path, clip_folder, data, "--do_train", "false")
    with pytest.raises(ValueError, match="is patched with comrope_ld"):
        train(tmp_path, str(whole[0] / "patched"), data, "--position_encoding", "liere")
