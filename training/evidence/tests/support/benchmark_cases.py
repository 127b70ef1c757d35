"""Small settings of the benchmark, and records of it."""

import dataclasses
import json

from training.evidence import benchmark_speed


TINY = "--model_size tiny --num_hidden_layers 2 --image_size 32 --batch_size 1 --warmup 1 --device cpu".split()


def settings(**overrides):
    options = benchmark_speed.parse_arguments(TINY)
    return dataclasses.replace(benchmark_speed.read_cases(options)[0].settings, **overrides)


def add_shares(records, case, name, **shares):
    """Rounds of a row with these shares of steps of one second."""
    for quantity, values in shares.items():
        for number, value in enumerate(values):
            fields = {part: dict.fromkeys(("wall", "cpu"), x) for part, x in (("value", value), ("baseline", 1.0))}
            records.add(case=case.key, quantity=quantity, row=name, round=number, **fields)


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]
