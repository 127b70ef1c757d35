"""Top-1 accuracy, top-5 accuracy and cross entropy with bootstrapped confidence intervals, as a module of `evaluate`.

Loaded by path, so nothing is fetched: `evaluate.load("training/engine/metric.py")`. Import one module per
line here: the parser of `evaluate` misreads `import a, b`.
"""

import datasets
import evaluate
import numpy as np


_DESCRIPTION = """
Means over examples with percentile bootstrap intervals. Resamples are drawn once for all metrics by a seeded generator,
so the same examples in the same order always give the same interval.
"""

_KWARGS_DESCRIPTION = """
Args:
    ranks: the number of classes that score higher than the label of each example, 0 for a correct answer.
    losses: the cross entropy of each example.
    num_classes: number of classes.
    num_resamples: B of the bootstrap; the LieRE paper uses 1000.
    confidence: coverage of the intervals.
    seed: seed of the resampling.
    groups: a number for each example; examples with equal numbers are drawn together. By default each is drawn alone.
Returns:
    accuracy, top5_accuracy (only with more than five classes; else it is always 1) and loss, each with bounds under the
    same name with _low and _high.
"""


@evaluate.utils.file_utils.add_start_docstrings(_DESCRIPTION, _KWARGS_DESCRIPTION)
class BootstrappedClassification(evaluate.Metric):
    def _info(self):
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation="",
            inputs_description=_KWARGS_DESCRIPTION,
            features=datasets.Features({"ranks": datasets.Value("int64"), "losses": datasets.Value("float64")}),
        )

    def _compute(self, ranks, losses, num_classes, num_resamples=1000, confidence=0.95, seed=0, groups=None):
        ranks = np.asarray(ranks)
        values = np.stack([ranks < 1, ranks < 5, np.asarray(losses)], axis=1, dtype=np.float64, casting="unsafe")
        sums, sizes = values, np.ones(len(values))
        if groups is not None:
            _, members = np.unique(groups, return_inverse=True)
            sizes = np.bincount(members).astype(np.float64)
            sums = np.stack([np.bincount(members, weights=column) for column in values.T], axis=1)
        generator = np.random.default_rng(seed)
        means = np.empty((num_resamples, values.shape[1]))
        for resample in means:
            # Counting the draws costs less than gathering the drawn rows.
            drawn = np.bincount(generator.integers(len(sums), size=len(sums)), minlength=len(sums))
            resample[:] = drawn @ sums / (drawn @ sizes)
        low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2], axis=0)
        metrics = {}
        for name, mean, lower, upper in zip(
            ("accuracy", "top5_accuracy", "loss"), values.mean(axis=0), low, high, strict=True
        ):
            if name != "top5_accuracy" or num_classes > 5:
                metrics.update({name: float(mean), f"{name}_low": float(lower), f"{name}_high": float(upper)})
        return metrics
