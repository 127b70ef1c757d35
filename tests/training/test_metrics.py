"""Metrics of evaluations and their intervals, against computations by hand."""

import evaluate
import numpy as np
import pytest
import torch
from checkout import ROOT
from transformers import EvalPrediction

from training.engine.trainer import (
    ClassificationMetrics,
    area_under_curve,
    average_views,
    balanced_accuracy,
    ranks_and_losses,
    summed_cross_entropy,
)


METRIC = str(ROOT / "training" / "engine" / "metric.py")


@pytest.fixture(scope="module")
def metric():
    return evaluate.load(METRIC, keep_in_memory=True)


def test_metrics_equal_a_computation_by_hand(metric):
    ranks, losses = [0, 1, 4, 5, 0, 9], [0.1, 0.5, 1.5, 2.0, 0.2, 5.0]
    result = metric.compute(ranks=ranks, losses=losses, num_classes=10)
    assert result["accuracy"] == pytest.approx(2 / 6)
    assert result["top5_accuracy"] == pytest.approx(4 / 6)
    assert result["loss"] == pytest.approx(sum(losses) / 6)
    assert result == metric.compute(ranks=ranks, losses=losses, num_classes=10)
    assert result != metric.compute(ranks=ranks, losses=losses, num_classes=10, seed=1)
    generator = np.random.default_rng(0)
    means = [np.mean(np.array(losses)[generator.integers(6, size=6)]) for _ in range(1000)]
    assert result["loss_low"] == pytest.approx(np.quantile(means, 0.025))
    assert result["loss_high"] == pytest.approx(np.quantile(means, 0.975))


def test_intervals_cover_the_truth(metric):
    generator = np.random.default_rng(0)
    covered = 0
    for _ in range(100):
        ranks = (generator.random(300) > 0.7).astype(int)
        result = metric.compute(ranks=ranks, losses=generator.random(300), num_classes=10, num_resamples=300)
        covered += result["accuracy_low"] <= 0.7 <= result["accuracy_high"]
    assert 88 <= covered <= 100


def test_ranks_follow_argmax_in_ties():
    logits = torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 0.0], [0.0, 2.0, 1.0], [0.0, 2.0, 1.0]])
    labels = torch.tensor([0, 1, 0, 1])
    result = ranks_and_losses(logits, labels)
    assert result[:, 0].tolist() == [0, 1, 2, 0]
    assert ((result[:, 0] == 0) == (logits.argmax(1) == labels)).all()
    expected = torch.log(logits.double().exp().sum(1)) - logits.double().gather(1, labels[:, None])[:, 0]
    torch.testing.assert_close(result[:, 1].double(), expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("num_classes", [2, 3])
def test_logits_are_kept_and_change_no_metric(num_classes):
    logits = torch.randn(50, num_classes, generator=torch.Generator().manual_seed(0)).bfloat16()
    labels = torch.arange(50) % num_classes
    found = []
    for with_logits in (False, True):
        metrics, reduced = ClassificationMetrics(num_classes), ranks_and_losses(logits, labels, with_logits)
        found.append(metrics(EvalPrediction(reduced.numpy(), labels.numpy())))
        assert ("logits" in metrics.examples) == with_logits
    assert found[0] == found[1] and ("auc" in found[0]) == (num_classes == 2)
    assert np.array_equal(metrics.examples["logits"], logits.half().numpy())


def test_mean_of_views_is_the_log_of_mean_probabilities():
    logits = torch.randn(6, 5, dtype=torch.float64)
    expected = logits.view(2, 3, 5).softmax(-1).mean(1).log()
    torch.testing.assert_close(average_views(logits, 2).double(), expected, atol=1e-6, rtol=0)


def test_area_under_the_curve_is_the_rank_statistic():
    stats = pytest.importorskip("scipy.stats")
    generator = np.random.default_rng(0)
    positive = generator.random(60) < 0.3
    scores = np.round(generator.normal(size=60) + positive, 1)
    expected = stats.mannwhitneyu(scores[positive], scores[~positive]).statistic / (positive.sum() * (~positive).sum())
    result = area_under_curve(scores, positive)
    assert result["auc"] == pytest.approx(expected, abs=1e-12)
    assert result["auc_low"] < result["auc"] < result["auc_high"]


def test_balanced_accuracy_is_the_mean_recall_and_one_half_for_a_constant_answer():
    generator = np.random.default_rng(0)
    positive, answers = generator.random(200) < 0.2, generator.random(200) < 0.4
    result = balanced_accuracy(answers == positive, positive)
    pairs = list(zip(positive.tolist(), answers.tolist()))
    sensitivity = pairs.count((True, True)) / positive.sum()
    specificity = pairs.count((False, False)) / (~positive).sum()
    assert result["balanced_accuracy"] == pytest.approx((sensitivity + specificity) / 2, abs=1e-12)
    # Means of 40 and of 160 draws: against the standard error of their mean.
    rates = zip((sensitivity, specificity), (positive.sum(), (~positive).sum()))
    error = np.sqrt(sum(rate * (1 - rate) / number for rate, number in rates)) / 2
    width = result["balanced_accuracy_high"] - result["balanced_accuracy_low"]
    # Quantiles of a thousand resamples are within a tenth of the width.
    assert width == pytest.approx(2 * 1.96 * error, rel=0.1)
    assert set(balanced_accuracy(~positive, positive).values()) == {0.5}


def test_losses_and_ranks_of_tokens_are_those_of_examples():
    logits, labels = torch.randn(3, 5, 4), torch.randint(4, (3, 5))
    labels[1, 2:] = -100
    flat = logits.flatten(0, 1), labels.flatten()
    assert torch.equal(summed_cross_entropy(logits, labels), summed_cross_entropy(*flat))
    torch.testing.assert_close(ranks_and_losses(logits, labels).flatten(0, 1), ranks_and_losses(*flat))


def test_intervals_resample_whole_samples(metric):
    """Samples whose tokens are all alike say as much as one token each, and as much as one example each."""
    ranks, losses = np.random.default_rng(0).integers(0, 3, 50), np.random.default_rng(1).random(50)
    alone = metric.compute(ranks=ranks, losses=losses, num_classes=4)
    groups = np.repeat(np.arange(50), 7)
    together = metric.compute(ranks=ranks[groups], losses=losses[groups], num_classes=4, groups=groups)
    assert together == pytest.approx(alone)
    narrower = metric.compute(ranks=ranks[groups], losses=losses[groups], num_classes=4)
    width = {
        name: value["accuracy_high"] - value["accuracy_low"]
        for name, value in (("whole", together), ("tokens", narrower))
    }
    assert width["tokens"] < 0.6 * width["whole"]
