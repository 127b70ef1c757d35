"""The trainer: metrics, exact losses over accumulated batches, parameter groups, and the stop at a NaN."""

from pathlib import Path

import pytest
import torch
from checkout import ROOT, SUPPORT
from encoding_cases import LEARNED, block_size
from fresh_process import run_two_processes
from host_waits import count_waits
from training_helpers import assert_same_weights, main, train, weights, write_images_folder, write_parquet
from transformers import Trainer

from hf_liere import LieREViTConfig, LieREViTForImageClassification
from hf_liere.errors import InputError
from training.common.arguments import RunArguments
from training.engine.trainer import ClassificationTrainer


@pytest.fixture(scope="module")
def parquet(tmp_path_factory):
    return write_parquet(tmp_path_factory.mktemp("data") / "train.parquet", 40)


@pytest.fixture(scope="module")
def trained(parquet, tmp_path_factory):
    """The folder of a run that is evaluated where it was trained, and its metrics."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    return folder, train(folder, "--train_files", parquet, "--validation_files", parquet, "--do_eval")


def test_accumulated_batches_equal_one_batch(parquet, tmp_path):
    """40 images in batches of 16: the last is incomplete, so that a mean of means would be wrong."""
    flags = ("--train_files", parquet, "--label_smoothing_factor", 0.1, "--logging_steps", 1)
    # Adam divides by the gradient's size, so that rounding decides about weights that hardly have one.
    flags += ("--optim", "sgd", "--learning_rate", 0.1)
    whole = train(tmp_path / "one", *flags, "--per_device_train_batch_size", 16)
    parts = train(tmp_path / "two", *flags, "--per_device_train_batch_size", 4, "--gradient_accumulation_steps", 4)
    assert_same_weights(tmp_path / "one", tmp_path / "two", 1e-6)
    assert whole["train_loss"] == pytest.approx(parts["train_loss"], abs=1e-6)


def test_the_implementation_of_attention_is_the_flags(parquet, tmp_path):
    flags = ("--train_files", parquet, "--num_train_epochs", 1, "--optim", "sgd", "--learning_rate", 0.1)
    for name in ("sdpa", "eager"):
        with torch.profiler.profile() as profile:
            train(tmp_path / name, *flags, "--attn_implementation", name)
        # Two layers in each of five steps.
        calls = {event.key: event.count for event in profile.key_averages()}
        assert calls.get("aten::scaled_dot_product_attention", 0) == (10 if name == "sdpa" else 0)
    assert_same_weights(tmp_path / "sdpa", tmp_path / "eager", 1e-6)
    with pytest.raises(InputError, match="--attn_implementation fast: .*not supported.*; accepted: sdpa, eager"):
        train(tmp_path / "fast", *flags, "--attn_implementation", "fast")


class RandomPictures:
    def __len__(self):
        return 64

    def __getitem__(self, index):
        """Our sampler also tells the epoch."""
        return {"pixel_values": torch.randn(3, 16, 16), "labels": 0}


def tiny_trainer(tmp_path, factor=1.0, run=None, kind=ClassificationTrainer, **fields):
    """A trainer with arguments of a `run` and fields of its model, which has a few random pictures."""
    config = LieREViTConfig(
        **{
            "hidden_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 32,
            "image_size": 16,
        }
        | {"patch_size": 4, "num_register_tokens": 1, "layerscale_value": 0.1, "use_absolute_position_embeddings": True}
        | fields
    )
    arguments = RunArguments(
        output_dir=str(tmp_path),
        use_cpu=True,
        do_train=True,
        weight_decay=0.1,
        rotary_learning_rate_factor=factor,
        **{"report_to": "none", "disable_tqdm": True} | (run or {}),
    )
    return kind(LieREViTForImageClassification(config), arguments, train_dataset=RandomPictures())


@pytest.mark.parametrize("encoding", LEARNED)
@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_only_weights_of_layers_decay(encoding, factor, tmp_path):
    size = block_size(encoding, head_dim=8, wanted=2)
    trainer = tiny_trainer(tmp_path, factor, position_encoding=encoding, block_size=size)
    names = {id(parameter): name for name, parameter in trainer.model.named_parameters()}
    rotary = {name for name, _ in trainer.model.rotary_parameters()}
    assert rotary
    groups = trainer.create_optimizer().param_groups
    seen = [names[id(parameter)] for group in groups for parameter in group["params"]]
    assert sorted(seen) == sorted(names.values())
    exempt = (
        "bias",
        "norm",
        "token",
        "position_embeddings",
        "rotary",
        "layernorm",
        "layer_scale",
        "layerscale",
        "lambda",
    )
    for group in groups:
        for parameter in group["params"]:
            name = names[id(parameter)]
            is_exempt = parameter.ndim == 1 or any(word in name.lower() for word in exempt)
            assert group["weight_decay"] == (0.0 if is_exempt else 0.1), name
            assert group["lr"] == pytest.approx(5e-5 * (factor if name in rotary else 1)), name


def test_a_rotary_factor_leaves_a_model_without_rotations_alone(tmp_path):
    """One recipe compares encodings, some of which learn no rotations."""
    for encoding in ("absolute", "axial_rope"):
        groups = tiny_trainer(tmp_path, 0.5, position_encoding=encoding).create_optimizer().param_groups
        assert {group["lr"] for group in groups} == {5e-5}


@pytest.mark.parametrize("warmup, is_told", [(20, True), (0.1, False), (19, False)])
def test_a_warmup_longer_than_the_run_is_told_before_the_first_step(warmup, is_told, tmp_path, caplog):
    trainer = tiny_trainer(tmp_path)
    trainer.args.warmup_steps = warmup
    with caplog.at_level("WARNING"):
        trainer.create_optimizer_and_scheduler(num_training_steps=20)
    assert ("--warmup_steps 20: the run has 20 steps" in caplog.text) == is_told


@pytest.mark.parametrize("steps, is_new, is_told", [(399, True, True), (400, True, False), (399, False, False)])
def test_few_steps_of_a_new_model_are_told_before_the_first_one(steps, is_new, is_told, tmp_path, caplog):
    trainer = tiny_trainer(tmp_path)
    trainer.starts_new = is_new
    with caplog.at_level("WARNING"):
        trainer.create_optimizer_and_scheduler(num_training_steps=steps)
    assert (f"This run of a new model has {steps} optimizer steps. Fewer than 400 are few" in caplog.text) == is_told


def test_a_run_tells_chance_and_that_it_has_not_learned(tmp_path, caplog):
    """Of noise, with two classes of three examples in four. The recipe counts steps unless epochs are asked for."""
    folder = write_images_folder(tmp_path / "noise", {"train": 8, "validation": 40}, ("a", "b", "b", "b"))
    flags = ["--image_folder", folder, "--do_eval", "--num_train_epochs", 2]
    with caplog.at_level("WARNING"):
        metrics = train(tmp_path / "run", "--recipe", ROOT / "training/recipes/images_mini.yaml", *flags)
    counts = [len(list(Path(folder, "validation", name).iterdir())) for name in "ab"]
    assert metrics["eval_chance"] == max(counts) / sum(counts) == 0.75
    assert "This run of a new model has 2 optimizer steps." in caplog.text
    assert "Nothing shows that the model has learned: its area under the ROC curve" in caplog.text


class Breaks(torch.autograd.Function):
    """A loss that is fine with a gradient that is not."""

    @staticmethod
    def forward(context, values):
        return values.clone()

    @staticmethod
    def backward(context, gradient):
        return gradient * float("nan")


@pytest.mark.parametrize(
    "flags, last",
    [
        (["--logging_steps", 5], 5),
        # What does not log, saves and evaluates nothing either.
        (["--logging_strategy", "no", "--save_strategy", "steps", "--save_steps", 4], 4),
        (["--logging_strategy", "no", "--eval_strategy", "steps", "--eval_steps", 4, "--do_eval"], 4),
        (["--logging_strategy", "no"], 6),
        # Other optimizers take any step that they are asked for.
        (["--logging_steps", 5, "--optim", "adamw_torch"], 3),
    ],
    ids=["log", "checkpoint", "evaluation", "end", "other optimizer"],
)
@pytest.mark.parametrize("what", [pytest.param("loss", marks=pytest.mark.slow), "gradient norm"])
def test_no_step_is_taken_from_the_first_nan_on(what, flags, last, parquet, tmp_path, monkeypatch):
    steps = []
    genuine = ClassificationTrainer.compute_loss

    def broken(trainer, model, *args, **kwargs):
        broken.trainer = trainer
        loss = genuine(trainer, model, *args, **kwargs)
        if not model.training:
            return loss
        steps.append({name: value.detach().clone() for name, value in trainer.model.state_dict().items()})
        if len(steps) != 3:
            return loss
        return loss * float("nan") if what == "loss" else Breaks.apply(loss)

    monkeypatch.setattr(ClassificationTrainer, "compute_loss", broken)
    files = ["--train_files", parquet, "--validation_files", parquet]
    with pytest.raises(FloatingPointError, match=f"The {what} is nan in step 3 .*The step was not taken"):
        train(tmp_path, *files, "--max_steps", 6, *flags)
    assert len(steps) == last
    left = broken.trainer.model.state_dict()
    assert all(torch.equal(left[name], value) for name, value in steps[2].items())
    assert not all(torch.equal(steps[1][name], value) for name, value in steps[2].items())
    assert not list(tmp_path.rglob("*.safetensors"))


def test_accumulated_batches_make_one_step(tmp_path, monkeypatch):
    """The third batch is the first half of the second step."""
    trainer = tiny_trainer(tmp_path, run={"gradient_accumulation_steps": 2, "logging_steps": 4, "max_steps": 4})
    genuine, states = trainer.compute_loss, []

    def broken(model, *args, **kwargs):
        states.append(model.classifier.weight.detach().clone())
        return genuine(model, *args, **kwargs) * (float("inf") if len(states) == 3 else 1)

    monkeypatch.setattr(trainer, "compute_loss", broken)
    with pytest.raises(FloatingPointError, match="The loss is inf in step 2 "):
        trainer.train()
    assert len(states) == 8 and not torch.equal(states[0], states[2])
    assert all(torch.equal(state, states[2]) for state in states[2:])


@pytest.mark.slow
def test_two_processes_take_the_same_steps(tmp_path):
    run_two_processes(SUPPORT / "broken_step_worker.py", tmp_path)
    first, second = (torch.load(tmp_path / f"{number}.pt") for number in range(2))
    assert "The loss or gradient of another process is nan in step 2 " in first["message"]
    assert "The loss is inf in step 2 " in second["message"]
    for found in (first, second):
        assert len(found["states"]) == 5 and torch.equal(found["states"], first["states"])
        assert not torch.equal(found["states"][0], found["states"][1])
        assert all(torch.equal(state, found["states"][1]) for state in found["states"][1:])


def test_between_logs_nothing_is_read_that_trainer_does_not_read(tmp_path):
    def count(kind, steps):
        trainer = tiny_trainer(tmp_path, run={"max_steps": steps, "logging_steps": 50}, kind=kind)
        with count_waits() as waits:
            trainer.train()
        return waits

    assert count(ClassificationTrainer, 7) - count(ClassificationTrainer, 3) == count(Trainer, 7) - count(Trainer, 3)


def test_weights_are_finite_and_trained(trained):
    folder, metrics = trained
    assert all(value.isfinite().all() for value in weights(folder).values())
    assert 0 <= metrics["eval_accuracy_low"] <= metrics["eval_accuracy"] <= metrics["eval_accuracy_high"] <= 1
    # Of three classes every answer is among the top five.
    assert "eval_top5_accuracy" not in metrics and metrics["eval_samples"] == 40


def test_resuming_demands_every_weight(parquet, tmp_path):
    from safetensors.torch import save_file

    flags = ("--train_files", parquet, "--save_steps", 2, "--max_steps", 4)
    train(tmp_path / "run", *flags)
    checkpoint = tmp_path / "run" / "checkpoint-2"
    saved = weights(checkpoint)
    saved["classifier.renamed"] = saved.pop("classifier.weight")
    save_file(saved, checkpoint / "model.safetensors", metadata={"format": "pt"})
    resume = (*flags, "--resume_from_checkpoint", checkpoint)
    with pytest.raises(ValueError, match="Missing: classifier.weight. Unexpected: classifier.renamed"):
        train(tmp_path / "run", *resume)
    saved["classifier.weight"] = saved.pop("classifier.renamed")[:, :-1].contiguous()
    save_file(saved, checkpoint / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ValueError, match=r"classifier.weight has shape \[3, 15\] in the checkpoint checkpoint-2 and \[3, 16\]"
    ):
        train(tmp_path / "run", *resume)
    with pytest.raises(ValueError, match="is not a checkpoint of a run; accepted: `last` or its folder"):
        train(tmp_path / "run", *flags, "--resume_from_checkpoint", Path("nowhere"))


def test_fine_tuning_replaces_the_classifier_deliberately(parquet, tmp_path):
    first = tmp_path / "first"
    train(first, "--train_files", parquet, "--image_mean", 0.4, 0.4, 0.4, "--max_steps", 2)
    other = write_parquet(tmp_path / "other.parquet", 20, num_labels=5)
    base = ["--model_name_or_path", str(first), "--use_cpu", "true", "--disable_tqdm", "true", "--seed", "3"]

    def fine_tune(name, *flags):
        return main([*base, "--output_dir", str(tmp_path / name), *map(str, flags)])

    fine_tune("second", "--do_train", "--train_files", other, "--drop_path_rate", 0.1, "--max_steps", 1)
    tuned = weights(tmp_path / "second")
    assert tuned["classifier.weight"].shape == (5, 16)
    processor = (tmp_path / "second" / "preprocessor_config.json").read_text()
    assert "0.4" in processor
    for name, value in weights(first).items():
        if not name.startswith("classifier."):
            assert (tuned[name] - value).abs().max() < 1e-3, name
    with pytest.raises(
        ValueError, match="checkpoint has 3 labels .*data set has 5 .*accepted if no classifier is trained"
    ):
        fine_tune("third", "--do_eval", "--validation_files", other)
    with pytest.raises(ValueError, match="--hidden_size 32 contradicts the checkpoint's 16; accepted beside"):
        fine_tune("fourth", "--do_train", "--train_files", parquet, "--hidden_size", 32)


def test_classes_in_another_order_mean_the_same(trained, parquet, tmp_path):
    """The checkpoint's order counts: an evaluation may not depend on how a data set numbers its classes."""
    import datasets

    table = datasets.load_dataset("parquet", data_files=parquet, split="train")
    names = table.features["label"].names
    renumbered = table.map(
        lambda row: {"label": 2 - row["label"]},
        features=datasets.Features({"image": table.features["image"], "label": datasets.ClassLabel(names=names[::-1])}),
    )
    renumbered.to_parquet(tmp_path / "renumbered.parquet")
    results = [
        main(
            ["--model_name_or_path", str(trained[0]), "--do_eval", "--use_cpu", "true", "--disable_tqdm", "true"]
            + ["--validation_files", str(path), "--output_dir", str(tmp_path / name)]
        )
        for name, path in (("a", parquet), ("b", tmp_path / "renumbered.parquet"))
    ]
    assert results[0]["eval_loss"] == results[1]["eval_loss"]
    assert results[0]["eval_accuracy"] == results[1]["eval_accuracy"]


def test_a_checkpoint_is_evaluated_at_another_size(trained, parquet, tmp_path):
    flags = ["--model_name_or_path", str(trained[0]), "--do_eval", "--use_cpu", "true", "--disable_tqdm", "true"]
    metrics = main(
        [*flags, "--validation_files", parquet, "--image_size", "24", "--output_dir", str(tmp_path / "at_24")]
    )
    assert metrics["eval_samples"] == 40 and (tmp_path / "at_24" / "eval_results.json").exists()
    with pytest.raises(ValueError, match="--image_size 25×25 is not divisible by the patch size 4×4; .* 24×24"):
        main([*flags, "--validation_files", parquet, "--image_size", "25", "--output_dir", str(tmp_path / "at_25")])
