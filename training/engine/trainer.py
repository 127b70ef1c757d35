"""Trainer with parameter groups for rotations and a stop at the first NaN; exact classification loss and metrics."""

import math
import time
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, IterableDataset
from transformers import EvalPrediction, Trainer
from transformers.utils import logging

from hf_liere.errors import InputError
from hf_liere.geometry.pose_embedding import POSE_ATTENTION
from training.common.messages import reason
from training.data.augmentation import IGNORED_LABEL, EpochSampler
from training.engine.finite import FirstBroken
from training.engine.progress import print_figures
from training.engine.pushing import HubPushes
from training.engine.saving import WholeCheckpoints


logger = logging.get_logger(__name__)
METRIC = Path(__file__).with_name("metric.py")
# A new model of 240 drawn pictures of three shapes is right for 63% after 160 optimizer steps, and for 97% after 400.
FEW_STEPS = 400


class RotaryTrainer(HubPushes, WholeCheckpoints, Trainer):
    """
    Differences from `Trainer`, for every task:

    - Only weights of linear and convolution layers decay. The rotations' parameters may have their own learning rate.
    - A step whose loss or gradient is not finite is not taken, and none after it. The next log, evaluation or
      checkpoint raises: nothing is read from the device in between.
    - The order and augmentation of examples do not depend on global random generators.

    Attributes:
        leaves_whole_model: Whether a finished run's folder itself contains the weights of a whole model.
        starts_new: Whether training starts from random weights, so that a few steps do not suffice.
    """

    leaves_whole_model = True
    starts_new = False

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        print_figures(self)
        if self.args.attn_implementation is not None:
            self._choose_attention(self.args.attn_implementation)
        self.evaluation_seconds = 0.0
        self.first_broken = FirstBroken()
        # Time and step at which losses were last logged.
        self._last_log: tuple[float, int] | None = None

    def _choose_attention(self, name: str) -> None:
        if self.model.config._attn_implementation == POSE_ATTENTION:
            raise InputError(f"--attn_implementation {name}: poses need attention of their own; leave it out.")
        try:
            self.model.set_attn_implementation(name)
        except (ValueError, ImportError) as error:
            raise InputError(f"--attn_implementation {name}: {reason(error)}; accepted: sdpa, eager.") from error

    def training_step(self, model, inputs, num_items_in_batch=None):
        loss = super().training_step(model, inputs, num_items_in_batch)
        self._record("loss", loss)
        if self.accelerator.sync_gradients:
            self._record_gradients(model)
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        # As for gradients that overflow with fp16, whose steps the scaler withholds.
        can_withhold = getattr(optimizer, "_step_supports_amp_scaling", False) and loss.device.type in ("cuda", "cpu")
        if self.is_deepspeed_enabled or not can_withhold:
            self.first_broken.check()
        elif self.accelerator.sync_gradients and self.accelerator.scaler is None:
            optimizer.found_inf = self.first_broken.found()
        return loss

    def _record_gradients(self, model: nn.Module) -> None:
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        if gradients and self.accelerator.scaler is None:
            norm = nn.utils.get_total_norm(gradients)
            self._record("gradient norm", norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
        if self.accelerator.num_processes > 1:
            # All processes take the step, or none.
            found = self.accelerator.reduce(self.first_broken.found())
            self._record("loss or gradient of another process", torch.where(found > 0, math.nan, 0.0))

    def _record(self, what: str, value: torch.Tensor) -> None:
        self.first_broken.record(
            value,
            f"The {what} is {{}} in step {self.state.global_step + 1} (epoch {self.state.epoch or 0:.2f}, "
            f"learning rate {self._get_learning_rate():.3g}). The step was not taken. Try a lower --learning_rate, "
            "more --warmup_steps, a smaller --max_grad_norm or --bf16 instead of --fp16, and resume from the last "
            "checkpoint.",
        )

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Weights of linear and convolution layers, but not generators, norms, biases, tokens or position tables."""
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
                logger.warning(f"{flag}={factor} has no effect: it applies to no trained parameter.")
            elif factor != 1:
                _regroup(optimizer, chosen, self.args.learning_rate * factor)
        return optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None):
        warmup_steps = self.args.get_warmup_steps(num_training_steps)
        if warmup_steps >= num_training_steps > 1:
            logger.warning(
                f"--warmup_steps {warmup_steps}: the run has {num_training_steps} steps and ends before it reaches "
                "--learning_rate. A share of the steps, such as --warmup_steps 0.1, fits runs of any length."
            )
        if self.starts_new and num_training_steps < FEW_STEPS and self.is_world_process_zero():
            logger.warning(
                f"This run of a new model has {num_training_steps} optimizer step{'s' * (num_training_steps != 1)}. "
                f"Fewer than {FEW_STEPS} are few, and it may not learn: try --max_steps {FEW_STEPS} or more epochs."
            )
        return super().create_scheduler(num_training_steps, optimizer)

    def learning_rate_groups(self, model: nn.Module) -> list[tuple[str, float, list[nn.Parameter]]]:
        """(flag, factor of the learning rate, parameters) of each group with a separate learning rate."""
        # By name: wrappers such as FSDP and detectors lack the model's method `rotary_parameters`.
        rotary = [parameter for name, parameter in model.named_parameters() if "rotary_encoding." in name]
        return [("rotary_learning_rate_factor", self.args.rotary_learning_rate_factor, rotary)]

    def _get_train_sampler(self, train_dataset=None) -> EpochSampler:
        dataset = self.train_dataset if train_dataset is None else train_dataset
        multiple = self._train_batch_size * self.args.world_size if self.args.world_size > 1 else 1
        repeats = getattr(dataset, "repeats", 1)
        return EpochSampler(len(dataset), self.args.order_seed, multiple, lambda: self.state, repeats)

    def get_train_dataloader(self) -> DataLoader:
        if isinstance(self.train_dataset, IterableDataset):
            # The stream is already split among the processes; accelerate would split it again.
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
        """Writes the files of a finished run."""
        self.save_model(folder)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds training speed, without evaluations, and remaining hours to logged losses."""
        self.first_broken.check()
        now, step = time.perf_counter() - self.evaluation_seconds, self.state.global_step
        if "loss" in logs and self._last_log is not None and step > self._last_log[1]:
            seconds = (now - self._last_log[0]) / (step - self._last_log[1])
            batch = self._train_batch_size * self.args.gradient_accumulation_steps * self.args.world_size
            logs["examples_per_second"] = round(batch / seconds, 1)
            logs["hours_to_go"] = round((self.state.max_steps - step) * seconds / 3600, 3)
        if "loss" in logs or self._last_log is None:
            self._last_log = now, step
        super().log(logs, start_time)

    def _save_checkpoint(self, model, trial) -> None:
        self.first_broken.check()
        super()._save_checkpoint(model, trial)

    def evaluate(self, *args, **kwargs) -> dict[str, float]:
        self.first_broken.check()
        start = time.perf_counter()
        metrics = super().evaluate(*args, **kwargs)
        self.evaluation_seconds += time.perf_counter() - start
        return metrics


class ClassificationTrainer(RotaryTrainer):
    """
    The loss is the mean over all examples of an optimizer step, across processes and accumulated batches.

    Targets may be mixed (see `Collator`) and smoothed. Several views of an example are averaged. If tokens have labels,
    tokens are the examples.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        # compute_loss divides by num_items_in_batch, so Trainer must pass it and not divide again.
        self.model_accepts_loss_kwargs = True
        # compute_loss needs the labels even if the model's forward does not take them.
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
            # The count covers all processes, but their gradients are averaged, not summed.
            total = total * self.accelerator.num_processes
        # If no example of the step can be read, the number and the loss are 0.
        if isinstance(num_items_in_batch, torch.Tensor):
            loss = total / num_items_in_batch.clamp(min=1)
        else:
            loss = total / max(num_items_in_batch, 1)
        return (loss, outputs) if return_outputs else loss


def _regroup(optimizer: torch.optim.Optimizer, chosen: set[int], learning_rate: float) -> None:
    """Moves the parameters with these ids to groups with this learning rate; they keep their weight decay."""
    for group in list(optimizer.param_groups):
        moved = [parameter for parameter in group["params"] if id(parameter) in chosen]
        if moved:
            group["params"] = [parameter for parameter in group["params"] if id(parameter) not in chosen]
            optimizer.add_param_group({"params": moved, "weight_decay": group["weight_decay"], "lr": learning_rate})


def _set_generator(loader: DataLoader) -> DataLoader:
    """
    Gives a loader a separate generator for the seeds of its workers.

    Otherwise it draws from the global generator: in every epoch, or with persistent workers only in the first. Then
    drop path and dropout would differ after resuming.
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
    """Cross entropy of (…, classes) logits, summed over the batch without `IGNORED_LABEL`, in float32 at least.

    It is linear in the target, so the loss of a mixed target is the weighted sum of two hard ones.
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
    """Logits (count · views, classes) → log of the probabilities averaged over views, (count, classes)."""
    views = logits.float().log_softmax(dim=1).unflatten(0, (count, -1))
    return views.logsumexp(dim=1) - math.log(views.shape[1])


def ranks_and_losses(logits: Any, labels: torch.Tensor, with_logits: bool = False) -> torch.Tensor:
    """Reduces logits to the rank of the label and the cross entropy of every example or token, (…, 2).

    With two classes, also the log odds of the second, (…, 3). `with_logits` appends the logits. The rank is the number
    of classes that score higher; ties go to the first class, as in `argmax`. Reducing before processes exchange results
    keeps evaluations with many classes small, and the loss exact for batches of unequal size. Rows with `IGNORED_LABEL`
    are meaningless.
    """
    logits = (logits[0] if isinstance(logits, tuple) else logits).float()
    losses = F.cross_entropy(logits.movedim(-1, 1), labels, reduction="none", ignore_index=IGNORED_LABEL)
    labels = labels.clamp(min=0).unsqueeze(-1)  # (…, 1)
    of_label = logits.gather(-1, labels)
    before = torch.arange(logits.shape[-1], device=logits.device) < labels
    ranks = ((logits > of_label) | ((logits == of_label) & before)).sum(dim=-1)
    scores = [logits[..., 1] - logits[..., 0]] if logits.shape[-1] == 2 else []
    reduced = torch.stack([ranks.float(), losses, *scores], dim=-1)
    return torch.cat([reduced, logits], dim=-1) if with_logits else reduced


class ClassificationMetrics:
    """
    Trainer's `compute_metrics` for the results of [`ranks_and_losses`].

    `loss` replaces Trainer's own, which gives batches of different sizes equal weight. `chance` is the accuracy of the
    most frequent class. Unreadable examples are excluded and counted. `examples` contains the last ranks and losses by
    example, and the logits, in half precision, if the results have them.

    If labels are per token, (samples, tokens), tokens without a label are excluded, and intervals resample whole
    samples because their tokens are dependent: `examples` contains the number of labelled tokens of each sample
    (`sizes`), the number of correct ones (`right`) and the mean of their losses.

    Args:
        num_classes: With five or fewer, top-5 accuracy is always 1 and is omitted.
    """

    def __init__(self, num_classes: int):
        self.num_classes = num_classes
        self.examples: dict[str, np.ndarray] = {}

    def __call__(self, results: EvalPrediction) -> dict[str, float]:
        labels = np.asarray(results.label_ids)
        read = labels != IGNORED_LABEL
        values = np.asarray(results.predictions, np.float64)[read]
        if not len(values):
            raise InputError(f"None of the {len(labels)} examples of the evaluation could be read.")
        values, logits = np.split(values, [3 if self.num_classes == 2 else 2], axis=1)
        ranks, losses, *scores = values.T
        if not np.isfinite(losses).all():
            wrong = int((~np.isfinite(losses)).sum())
            raise FloatingPointError(f"The evaluation loss of {wrong} of {len(losses)} examples is not finite.")
        self.examples = {"ranks": ranks.astype(np.int32), "losses": losses.astype(np.float32)}
        if logits.size:
            self.examples["logits"] = logits.astype(np.float16)
        chance = {"chance": float(np.bincount(labels[read]).max() / len(values))}
        counted = {"ranks": ranks.astype(np.int64), "losses": losses, "num_classes": self.num_classes}
        if labels.ndim == 2:
            groups = self.groups(read)
            self.examples = summarise_groups(ranks < 1, losses, groups)
            return self.metric.compute(**counted, groups=groups) | chance
        metrics = self.metric.compute(**counted) | chance
        if scores and 0 < labels[read].sum() < read.sum():
            positive = labels[read] == 1
            metrics |= area_under_curve(scores[0], positive) | balanced_accuracy(ranks < 1, positive)
        return metrics if read.all() else metrics | {"unreadable": int((~read).sum())}

    @cached_property
    def metric(self) -> Any:
        # Imported when the first evaluation ends: it takes a tenth of the time before the first step.
        import evaluate

        return evaluate.load(str(METRIC), keep_in_memory=True)

    def groups(self, read: np.ndarray) -> np.ndarray:
        """The resampling unit, its sample, of every labelled token, where `read` (samples, tokens) is true."""
        return np.nonzero(read)[0]


def summarise_groups(correct: np.ndarray, losses: np.ndarray, groups: np.ndarray) -> dict[str, np.ndarray]:
    """(tokens,) each → `sizes`, `right` and mean `losses` by group, in the order of the groups' numbers."""
    _, members, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    right, totals = (np.bincount(members, weights=values) for values in (correct, losses))
    return {
        "sizes": sizes.astype(np.int32),
        "right": right.astype(np.int32),
        "losses": (totals / sizes).astype(np.float32),
    }


def area_under_curve(
    scores: np.ndarray, positive: np.ndarray, num_resamples: int = 1000, confidence: float = 0.95, seed: int = 0
) -> dict[str, float]:
    """
    Area under the ROC curve: the share of (positive, negative) pairs in which the positive example scores higher; ties
    count half. The interval resamples positives and negatives separately.

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
    The mean of the accuracies on positive and on negative examples: one half for a constant answer, even if one class
    is rare. The interval resamples positives and negatives separately: among n examples of a class with accuracy r, the
    number of correct ones in a resample is binomial.

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
