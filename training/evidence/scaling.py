"""
Predicts training on several machines, as the section "Past one machine" of docs/training.md; nothing is measured:

    python training/evidence/scaling.py
    python training/evidence/scaling.py --gpus 16 128
    python training/evidence/scaling.py --count     # with torch 2.14: counts the models on `meta` again

Weights, optimizer (Adam) and gradients are float32, products bfloat16. DDP reduces gradients in float32. FSDP2 gathers
and reduces in bfloat16, as with accelerate: each layer, and the rest of the model (the root). Hybrid sharding does so
within a node, and reduces shards between nodes. The total batch is fixed. A GPU takes its share at once if that fits in
9/10 of its memory, else in micro-batches of a power of two with gradient checkpointing. Rotations are made by every
rank in every micro-batch, by operations that are not fused.

Each pass takes what is longer, products or communication, as if all that can overlap did: real steps take longer.
"""

import argparse
import json
import math
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple


sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from hf_liere.errors import InputError
from training.common.records import write_text
from training.evidence.reporting.markdown import markdown


RECORD = Path(__file__).parent / "speed" / "records" / "scaling.jsonl"
PER_NODE = 8
# An H100 SXM by NVIDIA's data sheet: bytes, bytes/s, FLOP/s; links in one direction, InfiniBand NDR for each GPU.
MEMORY, MEMORY_RATE, PEAK, DOUBLE_PEAK, NVLINK, NETWORK = 80e9, 3.35e12, 989e12, 67e12, 450e9, 50e9
# Assumed: the share of the peak that products of a model reach, and of a link that collectives reach; a launch.
UTILISATION, LINK_SHARE, LAUNCH = 0.4, 0.8, 4e-6
# Seconds of a hop: in a node and between nodes, in a ring and in a tree (LL128 in `hwLat` of NCCL's tuning.cc).
HOPS = {"ring": (1.9e-6, 4.0e-6), "tree": (1.2e-6, 8.5e-6)}
# Assumed: a file system's bytes/s for one writer, a restart, and the time between failures of a node: 2,048 nodes lost
# 419 times in 54 days (The Llama 3 Herd of Models, §3.3.4).
WRITE_RATE, RESTART, NODE_FAILURE = 2e9, 600.0, 2048 * 54 * 86400 / 419
BUCKET = 25 * 2**20
# Total batch, in images, clips or sequences.
BATCHES = {"ViT-B/16": 4096, "ViT-L/16": 4096, "ViT-H/14": 4096, "video ViT-B": 1024, "Llama-3-8B": 512}
ENCODINGS = (("rope_mixed", 2), ("comrope_ld", 8), ("liere", 8), ("liere", 64))
# No blocks of 64 in the 80 channels of a head of ViT-H.
CASES = [
    (name, *encoding)
    for name in BATCHES
    for encoding in (("none", None), *(ENCODINGS[:1] if "Llama" in name else ENCODINGS))
    if (name, *encoding) != ("ViT-H/14", "liere", 64)
]
SAVING_STEPS = (100, 1000, 10_000)


class Collective(NamedTuple):
    """`size` bytes of the whole tensor, among `ranks` GPUs of which `per_node` share a node."""

    kind: str
    size: float
    ranks: int
    per_node: int = PER_NODE
    backward: bool = True

    @property
    def nodes(self) -> int:
        return math.ceil(self.ranks / self.per_node)

    def is_of(self, far: bool, backward: bool) -> bool:
        """Whether it goes between nodes or not, in this pass."""
        return (self.nodes > 1, self.backward) == (far, backward)

    def sent(self) -> float:
        """
        Bytes that each GPU sends in a ring: (n − 1)/n of the tensor for an all-gather or reduce-scatter, twice that for
        an all-reduce, which is one after the other (Patarasuk and Yuan 2009).
        """
        return (2 if self.kind == "all_reduce" else 1) * (self.ranks - 1) / self.ranks * self.size

    def seconds(self) -> float:
        """
        Bytes at the rate of the slowest link, and hops: n − 1 in a ring, of which nodes − 1 are between nodes, twice
        for an all-reduce; that also has a tree, which is deep as log₂ of the nodes (NCCL, tuning.cc).
        """
        rings = 1 if self.nodes == 1 else self.per_node
        rate = LINK_SHARE * (NVLINK if self.nodes == 1 else min(NVLINK, rings * NETWORK))
        inside, between = HOPS["ring"]
        passes = 2 if self.kind == "all_reduce" else 1
        hops = passes * ((self.ranks - self.nodes) * inside + (self.nodes - 1) * between)
        if self.kind == "all_reduce":
            inside, between = HOPS["tree"]
            own = math.ceil(self.ranks / self.nodes)
            hops = min(hops, 2 * ((own - 1) * inside + math.log2(self.nodes) * between))
        return self.sent() / rate + hops


def padded(shapes: list[list[int]], ranks: int) -> int:
    """Numbers that FSDP2 gathers: every rank has ⌈d/n⌉ rows of a parameter of d rows, also where d < n."""
    return sum(math.ceil(rows / ranks) * ranks * math.prod(rest) for rows, *rest in (shape or [1] for shape in shapes))


def data_parallel(units: list[list[list[int]]], ranks: int, size: int = 4) -> list[Collective]:
    """All gradients, in buckets."""
    total = size * sum(math.prod(shape) for unit in units for shape in unit)
    buckets = math.ceil(total / BUCKET)
    return [Collective("all_reduce", total / buckets, ranks)] * buckets


def sharded(units: list[list[list[int]]], ranks: int, replicas: int = 1, size: int = 2) -> list[Collective]:
    """Each unit is gathered in both passes, the first one (the root) once; gradients are scattered, then reduced."""
    found = []
    for number, unit in enumerate(units):
        whole = size * padded(unit, ranks)
        found += [Collective("all_gather", whole, ranks, backward=phase) for phase in (False, True)[: 1 + (number > 0)]]
        found.append(Collective("reduce_scatter", whole, ranks))
        if replicas > 1:
            found.append(Collective("all_reduce", whole / ranks, replicas, per_node=1))
    return found


class Model:
    """A line of the record; `fixed` is what our rotations add to the same model without them, for any batch."""

    def __init__(self, line: dict[str, Any], bare: dict[str, Any]):
        self.name, self.layers, self.sample, self.line = line["model"], line["layers"], line["sample"], line
        self.units = [line["root"], *[line["layer"]] * self.layers]
        self.fixed = {key: value - bare["fixed"][key] for key, value in line["fixed"].items()}
        self.parameters = sum(math.prod(shape) for unit in self.units for shape in unit)
        self.rotation_bytes = self.fixed["inside"] + self.fixed["outside"]
        self.sample_seconds = self.sample["flops"] / PEAK / UTILISATION
        # Bytes and products one after the other, or launches if these take longer.
        work = self.fixed["bytes"] / MEMORY_RATE + self.fixed["double_flops"] / DOUBLE_PEAK
        self.rotation_seconds = max(work + self.fixed["flops"] / PEAK / UTILISATION, self.fixed["operations"] * LAUNCH)
        # In kernels that write the rotations, and read them and their gradients in the backward pass.
        self.least_rotation_seconds = max(
            3 * self.rotation_bytes / MEMORY_RATE, self.fixed["double_flops"] / DOUBLE_PEAK
        )

    def activations(self, batch: int, checkpoints: bool) -> float:
        """Bytes: all that layers save, or their inputs and one layer; and the rotations, which batches share."""
        inside = self.sample["inside"]
        if checkpoints:
            inside = self.layers * self.sample["input"] + inside / self.layers
        return batch * (inside + self.sample["outside"]) + self.rotation_bytes

    def state(self, shards: int) -> float:
        """
        Bytes of weights, gradients, Adam's two moments. DDP has further gradients in its buckets, and autocast a copy
        in bfloat16; FSDP2 in bfloat16 the root and its gradient, two gathered layers and the gradient of one.
        """
        if shards == 1:
            return (4 + 4 + 8 + 4 + 2) * self.parameters
        root, layer = (padded(unit, shards) for unit in self.units[:2])
        return 16 * (root + self.layers * layer) / shards + 2 * (2 * root + 3 * layer)

    def micro_batch(self, batch: int, shards: int) -> tuple[int, bool] | None:
        """Samples at once, and whether layers are checkpointed; `None` if not even one sample fits."""
        tried = [(batch, False), *((2**power, True) for power in range(int(math.log2(batch)), -1, -1))]
        room = 0.9 * MEMORY - self.state(shards)
        return next((each for each in tried if self.activations(*each) <= room), None)

    def step(self, collectives: list[Collective], batch: int, shards: int) -> float | None:
        """
        Seconds: a third of the products forward, two backward, and forward again with checkpointing. DDP reduces in the
        last micro-batch, FSDP2 communicates in each. Links of a node and between nodes work at the same time.
        """
        if (fits := self.micro_batch(batch, shards)) is None:
            return None
        size, checkpoints = fits
        passes = [size * self.sample_seconds / 3, size * self.sample_seconds * (2 + checkpoints) / 3]
        overlapped = sum(
            max(products, *(sum(c.seconds() for c in collectives if c.is_of(far, backward)) for far in (False, True)))
            for backward, products in enumerate(passes)
        )
        count = batch / size
        alone = sum(passes) if shards == 1 else overlapped
        return (count - 1) * alone + overlapped + count * self.rotation_seconds


def strategies(model: Model, gpus: int) -> dict[str, tuple[list[Collective], int]]:
    """By name: collectives, and over how many GPUs the model is sharded."""
    node = min(gpus, PER_NODE)
    return {
        "DDP": (data_parallel(model.units, gpus), 1),
        "FSDP2": (sharded(model.units, gpus), gpus),
        "hybrid": (sharded(model.units, node, gpus // node), node),
    }


def lost_share(steps: int, step: float, saving: float, failure: float) -> float:
    """Share of the time for a checkpoint every `steps` steps, half of these and a restart per failure (Young 1974)."""
    return saving / (steps * step) + (steps * step / 2 + RESTART) / failure


def joined(values: Iterable[float | None], form: str) -> str:
    return " / ".join("–" if value is None else format(value, form) for value in values)


def memory_table(models: list[Model], gpus: list[int]) -> str:
    shards = [1, *sorted({PER_NODE, *gpus})]
    header = ["model", "parameters, M", "a sample, MB: all / checkpointed", "rotations, MB"]
    rows = []
    for model in models:
        samples = joined(((model.activations(1, each) - model.rotation_bytes) / 1e6 for each in (False, True)), ",.0f")
        state = joined((model.state(each) / 1e9 for each in shards), ",.1f")
        rows.append(
            [model.name, f"{model.parameters / 1e6:,.0f}", samples, f"{model.rotation_bytes / 1e6:,.0f}", state]
        )
    places = " / ".join(["DDP", *(f"over {each}" for each in shards[1:])])
    return markdown([*header, f"weights, gradients, optimizer, GB: {places}"], rows, "---:")


def step_table(models: list[Model], gpus: list[int]) -> str:
    header = ["model", "GPUs", "batch of a GPU", "GB of a GPU", "GB sent", "products, ms", "rotations, ms"]
    rows = []
    for model in models:
        for count in gpus:
            batch = max(1, BATCHES[model.name] // count)
            found = strategies(model, count).values()
            fits = [model.micro_batch(batch, shards) for _, shards in found]
            memory = joined(
                (e and (model.state(s) + model.activations(*e)) / 1e9 for e, (_, s) in zip(fits, found)), ".0f"
            )
            seconds = [model.step(collectives, batch, shards) for collectives, shards in found]
            own = [f"{1000 * each:,.1f}" for each in (batch * model.sample_seconds, model.rotation_seconds)]
            sent = joined((sum(each.sent() for each in collectives) / 1e9 for collectives, _ in found), ".2f")
            best = min(each for each in seconds if each is not None)
            times = joined((each and 1000 * each for each in seconds), ",.0f")
            rows.append([model.name, str(count), str(batch), memory, sent, *own, times, f"{batch * count / best:,.0f}"])
    return markdown([*header, "a step, ms", "input, samples/s"], rows, "---:")


def rotation_table(models: list[Model]) -> str:
    header = ["model", "encoding", "GFLOP", "GB read and written", "operations", "ms: least / as operations"]
    rows = []
    for model in models:
        fixed, seconds = model.fixed, model.rotation_seconds
        flops = (fixed["flops"] + fixed["double_flops"]) / 1e9
        cells = [f"{flops:,.1f}", f"{fixed['bytes'] / 1e9:,.1f}", f"{fixed['operations']:,.0f}"]
        times = joined((1000 * each for each in (model.least_rotation_seconds, seconds)), ",.2f")
        # Of a step with the rotations: s / (s + B t) = share.
        batches = joined((seconds / model.sample_seconds * (1 / share - 1) for share in (1 / 20, 1 / 100)), ",.0f")
        name = f"{model.line['encoding']} {model.line['block_size']}"
        rows.append([model.name, name, *cells, times, batches])
    return markdown([*header, "batch where they take 1/20 / 1/100"], rows, "---:")


def failure_table(models: list[Model], gpus: list[int]) -> str:
    count, rows = max(gpus), []
    for model in models:
        batch, saving = max(1, BATCHES[model.name] // count), 12 * model.parameters / WRITE_RATE
        failure = NODE_FAILURE / math.ceil(count / PER_NODE)
        found = (model.step(c, batch, shards) for c, shards in strategies(model, count).values())
        step = min(each for each in found if each is not None)
        lost = joined((1440 * lost_share(steps, step, saving, failure) for steps in SAVING_STEPS), ",.0f")
        best = math.sqrt(2 * saving * failure) / step
        rows.append([model.name, f"{failure / 3600:,.0f}", f"{saving:,.1f}", lost, f"{best:,.0f}"])
    every = " / ".join(f"{steps:,}" for steps in SAVING_STEPS)
    header = [f"model on {count} GPUs", "hours between failures", "a checkpoint, s"]
    return markdown([*header, f"lost a day, min: every {every} steps", "best every"], rows, "---:")


def tables(lines: list[dict[str, Any]], gpus: list[int]) -> str:
    bare = {line["model"]: line for line in lines if line["encoding"] == "none"}
    models = [Model(line, bare[line["model"]]) for line in lines if line["encoding"] != "none"]
    chosen = [m for m in models if (m.line["encoding"], m.line["block_size"]) in (("liere", 8),) or "Llama" in m.name]
    parts = memory_table(chosen, gpus), step_table(chosen, gpus), rotation_table(models), failure_table(chosen, gpus)
    return "\n\n".join(parts)


def read_record() -> list[dict[str, Any]]:
    if not RECORD.is_file():
        raise InputError(f"There is no record {str(RECORD)!r}: count the models with --count.")
    return [json.loads(line) for line in RECORD.read_text(encoding="utf-8").splitlines()]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, nargs="+", default=[8, 64, 512], help="multiples of 8 (8 64 512)")
    parser.add_argument("--count", action="store_true", help="count the models on `meta` again")
    given = parser.parse_args(arguments)
    if wrong := [count for count in given.gpus if count < 1 or count % PER_NODE]:
        raise InputError(f"--gpus {wrong[0]}: accepted are multiples of {PER_NODE}, the GPUs of a node.")
    if given.count:
        from training.evidence.speed.meta_counts import count as count_model

        write_text(RECORD, "".join(json.dumps(count_model(*case)) + "\n" for case in CASES))
    print(tables(read_record(), given.gpus))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except InputError as error:
        sys.exit(f"error: {error}")
