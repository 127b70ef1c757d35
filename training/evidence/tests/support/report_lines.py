"""Lines of results, and reports made from them."""

import base64
import json

import numpy as np
import pytest

from training.evidence import report
from training.evidence.reporting import result_lines, result_table


def line(encoding, seed, correct, condition=None, history=()):
    bits = base64.b64encode(np.packbits(correct).tobytes()).decode()
    return {
        "sweep": "shuffling",
        "script": "image_classification",
        "settings": {"position_encoding": encoding, "seed": seed},
        "condition": condition or {},
        "flags": ["cifar100_mini.yaml", "--train_files", "cifar.parquet", "--position_encoding", encoding]
        + ["--seed", str(seed), "--do_eval", "true"],
        "run": {"model": {}, "training": {"num_train_epochs": 3, "per_device_train_batch_size": 32}},
        "train_metrics": {"parameters": 1234567, "train_samples_per_second": 300.0, "train_runtime": 10.0},
        "metrics": {"eval_accuracy": float(np.mean(correct)), "eval_samples": len(correct)},
        "history": list(history),
        "examples": len(correct),
        "correct": bits,
        "environment": {"device": "cpu"},
    }


@pytest.fixture
def results(tmp_path):
    generator = np.random.default_rng(0)
    lines = []
    for encoding, part, epochs in (("absolute", 0.6, (0.3, 0.5, 0.6)), ("liere", 0.8, (0.61, 0.7, 0.8))):
        for seed in (0, 1):
            history = [[number, accuracy] for number, accuracy in enumerate(epochs, 1)]
            lines.append(line(encoding, seed, generator.random(200) < part, history=history))
            shuffled = generator.random(200) < part / 4
            lines.append(line(encoding, seed, shuffled, {"evaluation_shuffle": "patches"}))
    path = tmp_path / "shuffling.jsonl"
    path.write_text("".join(json.dumps(entry) + "\n" for entry in lines))
    return path, lines


def reported(tmp_path, sweep, entries):
    path = tmp_path / f"{sweep}.jsonl"
    path.write_text("".join(json.dumps({**entry, "sweep": sweep}) + "\n" for entry in entries))
    return report.main([str(path), "--output_dir", str(tmp_path / "report")]).read_text()


def seeded(sweep, settings, shares, seeds, seed=0, history=()):
    """Lines of models with these settings, of which each seed answers a share of 300 examples."""
    generator = np.random.default_rng(seed)
    return [
        {
            **line("liere", number, generator.random(300) < share, history=history),
            **{"sweep": sweep, "flags": ["cifar100.yaml", "--do_eval", "true"]},
            **{"settings": {**given, "seed": number}},
        }
        for given, share in zip(settings, shares)
        for number in range(seeds)
    ]


def cells_of(sweep, settings, shares, seeds, **further):
    return result_table.arrange(seeded(sweep, settings, shares, seeds, **further))


def named(*encodings):
    return [{"position_encoding": name} for name in encodings]


def two_modes(seeds):
    """Every second seed of one model stays at two thirds; the other solves the task, after half of the examples."""
    slow, fast = [[0.5, 0.4], [1.0, 0.95]], [[0.5, 0.95], [1.0, 0.96]]
    table = cells_of("arrows", named("axial_rope"), (1.0,), seeds, history=slow)
    for result in table["Axial RoPE"]["as trained"].results[::2]:
        result |= {"correct": result_lines.encode_examples(np.arange(300) < 200), "history": [[1.0, 0.6]]}
    return table | cells_of("arrows", named("liere"), (1.0,), seeds, history=fast)
