"""What an answer without looking would score: the most frequent class of an evaluation, beside what a model scores."""

import math
from typing import Any


# Standard errors by which a model must exceed chance before it is said to have learned.
ABOVE_CHANCE = 3
MOST_FREQUENT = "the most frequent class of the evaluation"


def chance_of(metric: str, metrics: dict[str, Any], stated: float | None = None) -> tuple[float, float] | None:
    """
    The value of a metric by chance and its standard error for other examples: for an accuracy the share of the most
    frequent class, and 1/2 for an area under the ROC curve (its error is that of Mann and Whitney's U).

    Args:
        metrics: of the evaluation. Older ones lack `eval_chance`.
        stated: an accuracy instead of that of the most frequent class.

    Returns:
        `None` where chance is not known, or not defined: for losses, perplexities and average precisions.
    """
    share, examples = metrics.get("eval_chance"), metrics["eval_samples"] - metrics.get("eval_unreadable", 0)
    if metric == "eval_auc" and share is not None:
        pairs = share * (1 - share) * examples**2
        return 0.5, math.sqrt((examples + 1) / (12 * pairs))
    if metric != "eval_accuracy" or (stated is None and share is None):
        return None
    chance = share if stated is None else stated
    return chance, math.sqrt(chance * (1 - chance) / examples)


def describe_unlearned(metrics: dict[str, Any]) -> str | None:
    """A sentence if the metrics of a training run do not exceed chance; `None` if they do or chance is not known."""
    metric = "eval_auc" if "eval_auc" in metrics else "eval_accuracy"
    found = chance_of(metric, metrics) if metric in metrics else None
    if found is None or metrics[metric] > found[0] + ABOVE_CHANCE * found[1]:
        return None
    if found[0] + ABOVE_CHANCE * found[1] >= 1:
        return cannot_tell(metrics)
    name = "accuracy" if metric == "eval_accuracy" else "area under the ROC curve"
    about = f" ({MOST_FREQUENT})" if metric == "eval_accuracy" else ""
    return (
        f"Nothing shows that the model has learned: its {name} is {metrics[metric]:.1%}, and chance, {found[0]:.1%}"
        f"{about}, may reach {found[0] + ABOVE_CHANCE * found[1]:.1%} ({ABOVE_CHANCE} standard errors). Train longer."
    )


def cannot_tell(metrics: dict[str, Any]) -> str:
    """What to do about an evaluation on which even a model that is always right would not exceed chance."""
    if metrics.get("eval_chance") == 1:
        return "All examples of the evaluation are of one class, so it does not tell whether models learn."
    return (
        f"The evaluation has {metrics['eval_samples']} examples, too few to tell whether models learn: evaluate more."
    )
