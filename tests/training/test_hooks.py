"""What the trainers override of transformers' Trainer, whose private methods may change with any release."""

import inspect

import pytest
import training_helpers  # noqa: F401 (makes training importable)
from transformers import Trainer

from training.engine.fine_tuning import FineTuningTrainer
from training.engine.pushing import HubPushes
from training.engine.saving import WholeCheckpoints
from training.engine.trainer import ClassificationTrainer, RotaryTrainer
from training.tasks.detection.detection_trainer import DetectionTrainer


OURS = (HubPushes, WholeCheckpoints, RotaryTrainer, ClassificationTrainer, DetectionTrainer, FineTuningTrainer)
# Every method that is overridden, with the parameters that transformers' own must have for the override to be right.
OVERRIDDEN = {
    "_finish_current_push": [],
    "_get_output_dir": ["trial"],
    "_get_train_sampler": ["train_dataset"],
    "_load_from_checkpoint": ["resume_from_checkpoint", "model"],
    "_push_from_checkpoint": ["checkpoint_folder"],
    "_save": ["output_dir", "state_dict"],
    "_save_checkpoint": ["model", "trial"],
    "compute_loss": ["model", "inputs", "return_outputs", "num_items_in_batch"],
    "create_optimizer": ["model"],
    "create_scheduler": ["num_training_steps", "optimizer"],
    "evaluate": ["eval_dataset", "ignore_keys", "metric_key_prefix"],
    "get_decay_parameter_names": ["model"],
    "get_eval_dataloader": ["eval_dataset"],
    "get_train_dataloader": [],
    "init_hf_repo": ["token"],
    "log": ["logs", "start_time"],
    "prediction_step": ["model", "inputs", "prediction_loss_only", "ignore_keys"],
    "push_to_hub": [],
    "save_model": ["output_dir", "_internal_call"],
    "train": ["resume_from_checkpoint", "trial", "ignore_keys_for_eval"],
    "training_step": ["model", "inputs", "num_items_in_batch"],
}
# What an override replaces is worth something only while Trainer itself goes through it there.
CALLED_BY = {
    "_finish_current_push": None,
    "_get_output_dir": "_save_checkpoint",
    "_get_train_sampler": "get_train_dataloader",
    "_load_from_checkpoint": "train",
    "_push_from_checkpoint": "_save_checkpoint",
    "_save": "save_model",
    "_save_checkpoint": None,
    "get_decay_parameter_names": "create_optimizer",
    "init_hf_repo": "__init__",
    "save_model": "_save_checkpoint",
}
# Called or read, not overridden.
USED = {"_get_learning_rate": [], "_prepare_inputs": ["inputs"], "compute_loss_context_manager": []}


def parameters(function):
    """Names of the parameters after self, without **kwargs; and whether there are such."""
    found = [*inspect.signature(function).parameters.values()][1:]
    named = [one.name for one in found if one.kind is not one.VAR_KEYWORD]
    return named, len(named) < len(found)


def test_every_override_is_named_here():
    overridden = {name for cls in OURS for name in vars(cls) if hasattr(Trainer, name) and not name.startswith("__")}
    assert overridden == OVERRIDDEN.keys()


@pytest.mark.parametrize("name", [*OVERRIDDEN, *USED])
def test_trainer_has_the_method_with_these_parameters(name):
    assert inspect.isfunction(getattr(Trainer, name, None)), f"Trainer has no {name}"
    expected = (OVERRIDDEN | USED)[name]
    assert parameters(getattr(Trainer, name))[0][: len(expected)] == expected


@pytest.mark.parametrize("name", OVERRIDDEN)
def test_overrides_take_all_that_trainer_passes(name):
    theirs, _ = parameters(getattr(Trainer, name))
    for cls in (cls for cls in OURS if name in vars(cls)):
        ours, takes_any = parameters(vars(cls)[name])
        assert takes_any or ours[: len(theirs)] == theirs


@pytest.mark.parametrize("name, caller", CALLED_BY.items())
def test_trainer_still_calls_what_is_overridden(name, caller):
    functions = vars(Trainer).values() if caller is None else [getattr(Trainer, caller)]
    codes = [inspect.unwrap(function).__code__ for function in functions if inspect.isfunction(function)]
    assert any(name in code.co_names for code in codes), f"Trainer.{caller or '*'} no longer calls {name}"
