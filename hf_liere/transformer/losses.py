"""Losses that no division of a batch changes (`gradient_accumulation_steps` of `Trainer`)."""

import inspect
from typing import Any

import torch
from transformers.loss.loss_utils import LOSS_MAPPING, ForSequenceClassificationLoss


IGNORED_LABEL = -100


class AcceptsCount:
    """
    Whether `Trainer` passes `num_items_in_batch` to a model, instead of dividing its loss by the number of accumulated
    batches: only where `forward` calls a loss that names it. Read as `accepts_loss_kwargs`, which users may set.
    """

    def __get__(self, model: Any, kind: Any) -> bool:
        code, plain = inspect.unwrap(kind.forward).__code__, getattr(kind, "plain_class", None)
        passes = "loss_function" in code.co_names and code.co_flags & inspect.CO_VARKEYWORDS
        if not passes or getattr(model, "loss_type", None) not in LOSS_MAPPING:
            return False
        names = inspect.signature(model.loss_function).parameters
        return "num_items_in_batch" in names and getattr(plain, "accepts_loss_kwargs", True)


def sequence_loss(labels, pooled_logits, config, num_items_in_batch=None, **kwargs) -> torch.Tensor:
    """As transformers; means that ignore the number of items become this batch's share of the mean over all labels."""
    count = num_items_in_batch
    loss = ForSequenceClassificationLoss(labels, pooled_logits, config, num_items_in_batch=count, **kwargs)
    if count is None or config.problem_type == "single_label_classification":
        return loss
    return loss * (labels.ne(IGNORED_LABEL).sum() / count).to(loss.device)
