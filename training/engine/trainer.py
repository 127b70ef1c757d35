"""Trainer with parameter groups for rotations and a stop at the first NaN, and its exact classification loss."""

import math
import time
from pathlib import Path
from typing import Any

import evaluate
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, IterableDataset
from transformers import EvalPrediction, Trainer
from transformers.utils import logging

from hf_liere.errors import InputError
from training.data.augmentation import IGNORED_LABEL, EpochSampler
from training.engine.pushing import HubPushes
from training.engine.saving import WholeCheckpoints


logger = logging.get_logger(__name__)
METRIC = Path(__file__).resolve().parents[1] / "metrics" / "classification.py"


class RotaryTrainer(HubPushes, WholeCheckpoints, Trainer):
    """
    Differences from `Trainer`, whatever the task:

    - Only weights of linear and convolution layers decay. The rotations' parameters may have their own learning rate.
    - A loss or gradient that is not finite raises before the step is taken.
    - Examples come in an order and with an augmentation that do not depend on global generators.

    Attributes:
        leaves_whole_model: Whether a finished run leaves the weights of a whole model in its folder itself.
    """

    leaves_whole_model = True

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.evaluation_seconds = 0.0
        # When, and at which step, losses were logged last.
        self._last_log: tuple[float, int] | None = None

    def training_step(self, model, inputs, num_items_in_batch=None):
        loss = super().training_step(model, inputs, num_items_in_batch)
        self._require_finite("loss", loss)
        # Under fp16 the scaler expects overflowing gradients and skips their step by itself.
        if self.accelerator.sync_gradients and self.accelerator.scaler is None:
            norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
            self._require_finite("gradient norm", norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
        return loss

    def _require_finite(self, what: str, value: torch.Tensor) -> None:
        if not math.isfinite(value := value.item()):
            raise FloatingPointError(
                f"The {what} is {value} in step {self.state.global_step + 1} (epoch {self.state.epoch or 0:.2f}, "
                f"learning rate {self._get_learning_rate():.3g}). The step was not taken. Try a lower --learning_rate, "
                "more --warmup_steps, a smaller --max_grad_norm or --bf16 instead of --fp16, and resume from the last "
                "checkpoint."
            )

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Weights of linear and convolution layers: no generators, norms, biases, tokens or position tables."""
        layers = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
        return [
            f"{name}.weight" if name else "weight"
            for name, module in model.named_modules()
            if isinstance(module, layers)
        ]

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        if self.optimizer is not None:
            return self.optimizer
        optimizer = super().create_optimizer(model)
        for flag, factor, parameters in self.learning_rate_groups(self.model if model is None else model):
            chosen = {id(parameter) for parameter in parameters if parameter.requires_grad}
            if factor != 1 and not chosen:
                logger.warning(f"{flag}={factor} has no effect: the model learns nothing that it concerns.")
            elif factor != 1:
                _regroup(optimizer, chosen, self.args.learning_rate * factor)
        return optimizer

    def learning_rate_groups(self, model: nn.Module) -> list[tuple[str, float, list[nn.Parameter]]]:
        """(flag, factor of the learning rate, parameters) of each group with a learning rate of its own."""
        # By name, because wrappers such as FSDP and detectors do not have the model's method `rotary_parameters`.
        rotary = [parameter for name, parameter in model.named_parameters() if "rotary_encoding." in name]
        return [("rotary_learning_rate_factor", self.args.rotary_learning_rate_factor, rotary)]

    def _get_train_sampler(self, train_dataset=None) -> EpochSampler:
        dataset = self.train_dataset if train_dataset is None else train_dataset
        multiple = self._train_batch_size * self.args.world_size if self.args.world_size > 1 else 1
        repeats = getattr(dataset, "repeats", 1)
        return EpochSampler(len(dataset), self.args.order_seed, multiple, lambda: self.state, repeats)

    def get_train_dataloader(self) -> DataLoader:
        if isinstance(self.train_dataset, IterableDataset):
            # The stream is already split among the processes; accelerate would split it once more.
            self.train_dataset.trainer_state = lambda: self.state
            return DataLoader(
                self.train_dataset,
                batch_size=self._train_batch_size,
                collate_fn=self.data_collator,
                num_workers=self.args.dataloader_num_workers,
                pin_memory=self.args.dataloader_pin_memory,
                generator=torch.Generator(),
            )
        return _set_generator(super().get_train_dataloader())

    def get_eval_dataloader(self, eval_dataset=None) -> DataLoader:
        return _set_generator(super().get_eval_dataloader(eval_dataset))

    def save_finished(self, folder: str) -> None:
        """Writes what a finished run leaves."""
        self.save_model(folder)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds to the losses the speed of training, without evaluations, and the hours that remain."""
        now, step = time.perf_counter() - self.evaluation_seconds, self.state.global_step
        if "loss" in logs and self._last_log is not None and step > self._last_log[1]:
            seconds = (now - self._last_log[0]) / (step - self._last_log[1])
            batch = self._train_batch_size * self.args.gradient_accumulation_steps * self.args.world_size
            logs["examples_per_second"] = round(batch / seconds, 1)
            logs["hours_to_go"] = round((self.state.max_steps - step) * seconds / 3600, 3)
        if "loss" in logs or self._last_log is None:
            self._last_log = now, step
        super().log(logs, start_time)

    def evaluate(self, *args, **kwargs) -> dict[str, float]:
        start = time.perf_counter()
        metrics = super().evaluate(*args, **kwargs)
        self.evaluation_seconds += time.perf_counter() - start
        return metrics


class ClassificationTrainer(RotaryTrainer):
    """
    The loss is the sum over all examples of a step, in all processes and accumulated batches, over their number.

    Targets may be mixed (see `Collator`) and smoothed; logits of several views of an example are averaged. Where every
    token has a label, tokens are the examples.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        # compute_loss divides by num_items_in_batch; Trainer must neither omit it nor divide once more.
        self.model_accepts_loss_kwargs = True
        # compute_loss takes the labels, also where the forward of the model has none.
        self.label_names = ["labels"]

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        inputs = dict(inputs)
        labels = inputs.pop("labels")
        mixed_labels, mixing_weights = inputs.pop("mixed_labels", None), inputs.pop("mixing_weights", None)
        outputs = model(**inputs)
        if outputs["logits"].shape[0] != labels.shape[0]:
            outputs["logits"] = average_views(outputs["logits"], labels.shape[0])
        smoothing = self.args.label_smoothing_factor if model.training else 0.0
        total = summed_cross_entropy(outputs["logits"], labels, mixed_labels, mixing_weights, smoothing)
        if num_items_in_batch is None:
            num_items_in_batch = (labels != IGNORED_LABEL).sum()
        else:
            # The count is over all processes, but their gradients are averaged, not summed.
            total = total * self.accelerator.num_processes
        # In a step in which no example can be read the number is 0, and so is the loss.
        loss = total / max(num_items_in_batch, 1)
        return (loss, outputs) if return_outputs else loss


def _regroup(optimizer: torch.optim.Optimizer, chosen: set[int], learning_rate: float) -> None:
    """Move the parameters with these ids to groups of another learning rate; each keeps its weight decay."""
    for group in list(optimizer.param_groups):
        moved = [parameter for parameter in group["params"] if id(parameter) in chosen]
        if moved:
            group["params"] = [parameter for parameter in group["params"] if id(parameter) not in chosen]
            optimizer.add_param_group({"params": moved, "weight_decay": group["weight_decay"], "lr": learning_rate})


def _set_generator(loader: DataLoader) -> DataLoader:
    """
    Lets a loader draw the seed of its workers from a generator of its own.

    From the global generator it would draw in every epoch, but with persistent workers in the first one only: after
    resuming, drop path and dropout would be out of step.
    """
    loader.base_dataloader.generator = torch.Generator()
    return loader


def summed_cross_entropy(
    logits: torch.Tensor,
    labels: torch.Tensor,
    mixed_labels: torch.Tensor | None = None,
    mixing_weights: torch.Tensor | None = None,
    smoothing: float = 0.0,
) -> torch.Tensor:
    """Cross entropy of (…, classes) logits, summed over the batch; examples labelled `IGNORED_LABEL` add nothing.

    It is linear in the target, so a mixed target is the weighted sum of two hard ones. In float32 at least.
    """
    logits = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
    logits, labels = logits.flatten(0, -2), labels.flatten()

    def per_example(targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits, targets, reduction="none", ignore_index=IGNORED_LABEL, label_smoothing=smoothing)

    losses = per_example(labels)
    if mixed_labels is not None:
        losses = mixing_weights * losses + (1 - mixing_weights) * per_example(mixed_labels)
    return losses.sum()


def average_views(logits: torch.Tensor, count: int) -> torch.Tensor:
    """Log of the mean probabilities, (count, classes), of logits (count · views, classes) of several views of each."""
    views = logits.float().log_softmax(dim=1).unflatten(0, (count, -1))
    return views.logsumexp(dim=1) - math.log(views.shape[1])


def ranks_and_losses(logits: Any, labels: torch.Tensor) -> torch.Tensor:
    """What the metrics need of an example or token: how many classes come before its label, and its cross entropy.

    (…, 2); with two classes also, (…, 3), the log odds of the second. Of equal logits the first class comes first, as
    for `argmax`. Reducing here, before processes exchange results, keeps an evaluation of many classes small, and its
    loss exact where processes or batches are not of equal size. Rows of `IGNORED_LABEL` mean nothing.
    """
    logits = (logits[0] if isinstance(logits, tuple) else logits).float()
    losses = F.cross_entropy(logits.movedim(-1, 1), labels, reduction="none", ignore_index=IGNORED_LABEL)
    labels = labels.clamp(min=0).unsqueeze(-1)
    of_label = logits.gather(-1, labels)
    before = torch.arange(logits.shape[-1], device=logits.device) < labels
    ranks = ((logits > of_label) | ((logits == of_label) & before)).sum(dim=-1)
    scores = [logits[..., 1] - logits[..., 0]] if logits.shape[-1] == 2 else []
    return torch.stack([ranks.float(), losses, *scores], dim=-1)


class ClassificationMetrics:
    """
    Trainer's `compute_metrics` for what [`ranks_and_losses`] makes of the logits.

    `loss` replaces Trainer's own, which weighs batches of different sizes alike. Examples that could not be read are
    left out and counted. `examples` holds what was computed last, by example: ranks and losses.

    Where every token has a label, (samples, tokens), tokens without one are left out, intervals resample whole samples,
    whose tokens depend on each other, and there are no `examples`.

    Args:
        num_classes: Among five or fewer every answer is one of the top five, so that accuracy is left out.
    """

    def __init__(self, num_classes: int):
        self.num_classes = num_classes
        self.metric = evaluate.load(str(METRIC), keep_in_memory=True)
        self.examples: dict[str, np.ndarray] = {}

    def __call__(self, results: EvalPrediction) -> dict[str, float]:
        labels = np.asarray(results.label_ids)
        read = labels != IGNORED_LABEL
        values = np.asarray(results.predictions, np.float64)[read]
        if not len(values):
            raise InputError(f"None of the {len(labels)} examples of the evaluation could be read.")
        ranks, losses, *scores = values.T
        if not np.isfinite(losses).all():
            wrong = int((~np.isfinite(losses)).sum())
            raise FloatingPointError(f"The evaluation loss of {wrong} of {len(losses)} examples is not finite.")
        self.examples = {"ranks": ranks.astype(np.int32), "losses": losses.astype(np.float32)}
        counted = {"ranks": ranks.astype(np.int64), "losses": losses, "num_classes": self.num_classes}
        if labels.ndim == 2:
            self.examples = {}
            return self.metric.compute(**counted, groups=self.groups(read))
        metrics = self.metric.compute(**counted)
        if scores and 0 < labels[read].sum() < read.sum():
            positive = labels[read] == 1
            metrics |= area_under_curve(scores[0], positive) | balanced_accuracy(ranks < 1, positive)
        return metrics if read.all() else metrics | {"unreadable": int((~read).sum())}

    def groups(self, read: np.ndarray) -> np.ndarray:
        """For every token with a label, where `read` (samples, tokens) is true, what it is drawn with: its sample."""
        return np.nonzero(read)[0]


def area_under_curve(
    scores: np.ndarray, positive: np.ndarray, num_resamples: int = 1000, confidence: float = 0.95, seed: int = 0
) -> dict[str, float]:
    """
    Area under the ROC curve: the share of pairs of a positive and a negative example in which the positive one has the
    higher score, ties counting half. The interval resamples positives and negatives, each among themselves.

    Args:
        scores: (examples,), higher for the positive class.
        positive: (examples,), whether an example is positive; both kinds must occur.
    """
    highs, lows = scores[positive], np.sort(scores[~positive])
    wins = (np.searchsorted(lows, highs, "left") + np.searchsorted(lows, highs, "right")) / (2 * len(lows))
    generator = np.random.default_rng(seed)
    areas = np.empty(num_resamples)
    for index in range(num_resamples):
        drawn = np.sort(generator.choice(lows, len(lows)))
        some = generator.choice(highs, len(highs))
        below = np.searchsorted(drawn, some, "left") + np.searchsorted(drawn, some, "right")
        areas[index] = below.mean() / (2 * len(lows))
    low, high = np.quantile(areas, [(1 - confidence) / 2, (1 + confidence) / 2])
    return {"auc": float(wins.mean()), "auc_low": float(low), "auc_high": float(high)}


def balanced_accuracy(
    correct: np.ndarray, positive: np.ndarray, num_resamples: int = 1000, confidence: float = 0.95, seed: int = 0
) -> dict[str, float]:
    """
    The mean of the accuracies of positive and of negative examples: one half for a constant answer, however rare one of
    them is. The interval resamples positives and negatives, each among themselves: of n examples of a class of accuracy
    r a resample has a binomial number of correct ones.

    Args:
        correct: (examples,), whether the answer is right.
        positive: (examples,), whether an example is positive; both kinds must occur.
    """
    generator = np.random.default_rng(seed)
    of_class = [correct[positive], correct[~positive]]
    drawn = [generator.binomial(len(some), some.mean(), num_resamples) / len(some) for some in of_class]
    low, high = np.quantile(np.mean(drawn, axis=0), [(1 - confidence) / 2, (1 + confidence) / 2])
    mean = float(np.mean([some.mean() for some in of_class]))
    return {
        "balanced_accuracy": mean,
        "balanced_accuracy_low": float(low),
        "balanced_accuracy_high": float(high),
    }
