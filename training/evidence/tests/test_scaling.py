"""Predictions for several machines, with figures worked by hand, counts of small models and real processes."""

import math
import sys

import pytest
import torch
from checkout import ROOT, SUPPORT
from fresh_process import run_processes

import hf_liere
from hf_liere.errors import InputError
from training.evidence import scaling
from training.evidence.scaling import Collective, Model, data_parallel, lost_share, padded, read_record, sharded
from training.evidence.speed.meta_counts import count


# 10 layers of 100 × 100 and a root of 50 × 100: 105,000 parameters. A sample takes 300 TFLOP.
WORK = {"flops": 300e12, "double_flops": 0, "bytes": 0, "operations": 0, "inside": 10e9, "outside": 1e9, "input": 1e8}
NOTHING = dict.fromkeys(WORK, 0)
LINE = {
    "model": "one",
    "encoding": "liere",
    "layers": 10,
    "layer": [[100, 100]],
    "root": [[50, 100]],
    "sample": WORK,
    "fixed": {**NOTHING, "bytes": 3.35e12, "outside": 2e9},
}
MODEL = Model(LINE, {"fixed": NOTHING})


def test_the_page_has_the_tables():
    assert scaling.tables(read_record(), [8, 64, 512]) in (ROOT / "docs/training.md").read_text(encoding="utf-8")


def test_rings_send_what_they_must():
    """Of 8 bytes, each of 4 ranks sends 3 parts of 2 in a ring, and as many again to sum them up."""
    assert [Collective(kind, 8, 4).sent() for kind in ("all_gather", "reduce_scatter", "all_reduce")] == [6, 6, 12]


@pytest.mark.parametrize(
    "collective, seconds",
    [
        (Collective("all_gather", 8e9, 8), 7e9 / 360e9 + 7 * 1.9e-6),
        # 16 GPUs of two nodes: 8 links of 50 GB/s are slower than NVLink; one hop of 15 is between nodes.
        (Collective("all_gather", 16e9, 16), 15e9 / 320e9 + 14 * 1.9e-6 + 4e-6),
        # The tree of 64 nodes is 7 + 6 hops deep, there and back.
        (Collective("all_reduce", 512e9, 512), 1022e9 / 320e9 + 2 * (7 * 1.2e-6 + 6 * 8.5e-6)),
        # One GPU of each of two nodes, with a link of its own.
        (Collective("all_reduce", 4e9, 2, per_node=1), 4e9 / 40e9 + 2 * 4e-6),
    ],
)
def test_seconds_of_a_collective(collective, seconds):
    assert collective.seconds() == pytest.approx(seconds, rel=1e-12)


def test_rows_are_padded_to_the_ranks():
    """Also generators, whose rows are axes: LieRE64's of a ViT-B are gathered as more numbers than its weights are."""
    assert padded([[5, 3], [8], []], 4) == 8 * 3 + 8 + 4
    assert padded([[2, 12, 12, 1, 2016]], 512) == 512 * 12 * 12 * 2016 > 86e6


def test_memory_and_micro_batches():
    assert MODEL.state(1) == 22 * 105_000
    assert MODEL.state(50) == 16 * 105_000 / 50 + 2 * (2 * 5_000 + 3 * 10_000)
    # Two rotations of 1 GB: 11 GB a sample; checkpointed 10 inputs of 0.1 GB, a layer of 1 GB and 1 GB outside.
    assert [MODEL.activations(2, checkpoints) / 1e9 for checkpoints in (False, True)] == [24, 8]
    assert MODEL.micro_batch(6, 8) == (6, False) and MODEL.micro_batch(32, 8) == (16, True)
    assert Model({**LINE, "sample": {**WORK, "outside": 80e9}}, {"fixed": NOTHING}).micro_batch(1, 8) is None


def test_seconds_of_a_step():
    """6 samples of 300 TFLOP at 0.4 of 989 TFLOP/s, and 1 s for the bytes of rotations; little is communicated."""
    second, products = 1 / (0.4 * 989e12), 300e12
    collectives, shards = scaling.strategies(MODEL, 8)["DDP"]
    assert MODEL.step(collectives, 6, shards) == pytest.approx(6 * products * second + 1)
    # Two micro-batches of 16 compute forward twice, and make the rotations twice.
    collectives, shards = scaling.strategies(MODEL, 8)["FSDP2"]
    assert MODEL.step(collectives, 32, shards) == pytest.approx(32 * 400e12 * second + 2)
    # Gathering 18 TB a second time hides nothing: both phases wait.
    slow = [Collective("all_gather", 360e9 * 8 / 7 * 50, 8, backward=phase) for phase in (False, True)]
    assert MODEL.step(slow, 6, shards) == pytest.approx(50 + 50 + 1, rel=1e-4)


def test_lost_time():
    """10 s for every 100 steps of 1 s; once a day half of that and ten minutes."""
    assert lost_share(100, 1.0, 10.0, 86_400.0) == pytest.approx(0.1 + 650 / 86_400)


def test_other_numbers_of_gpus_are_refused():
    with pytest.raises(InputError, match="--gpus 12: accepted are multiples of 8"):
        scaling.main(["--gpus", "8", "12"])


def test_counts_on_meta():
    """Products, parameters and activations of ViT-B by hand; the record has them too."""
    found = count("ViT-B/16", "liere", 8)
    tokens, width, layers = 197, 768, 12
    of_layer = 2 * tokens * 12 * width**2 + 4 * tokens**2 * width
    flops = layers * of_layer + 2 * (tokens - 1) * width * 768 + 2 * width * 1000
    # Backward twice as many, but for the gradient of the pixels.
    assert found["sample"]["flops"] == pytest.approx(3 * flops, rel=0.01)
    # What a layer saves for a sample, in widths: both norms with their inputs, query, key, value, output, and 4 + 4 of
    # the MLP; besides them a few numbers per row.
    assert found["sample"]["inside"] == pytest.approx(layers * 16 * tokens * width * 2, rel=0.01)
    # Rotations of 8 × 8, for all samples; GPUs keep no squares of them.
    assert found["fixed"]["outside"] == pytest.approx(layers * 12 * tokens * 8 * 8**2 * 4, rel=0.02)
    shapes = [*found["root"], *found["layer"] * layers]
    with torch.device("meta"):
        model = hf_liere.LieREViTForImageClassification(hf_liere.LieREViTConfig(num_labels=1000))
    assert sum(map(math.prod, shapes)) == model.num_parameters()
    (stored,) = (x for x in read_record() if (x["model"], x["encoding"], x["block_size"]) == ("ViT-B/16", "liere", 8))
    assert stored["sample"]["flops"] == pytest.approx(found["sample"]["flops"], rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_bytes_on_the_wire(tmp_path, tiny, ranks):
    """The collectives of real processes, and the bytes that their sockets sent, are those that are predicted."""
    config = tiny(hidden_size=256, intermediate_size=512, position_encoding="liere", block_size=4)
    config.save_pretrained(tmp_path)
    run_processes(ranks, SUPPORT / "collective_worker.py", tmp_path, tmp_path / "found.pt")
    model = hf_liere.LieREViTForImageClassification(config)
    layers = [[list(p.shape) for p in layer.parameters()] for layer in model.liere.layers]
    of_layers = {id(parameter) for parameter in model.liere.layers.parameters()}
    units = [[list(p.shape) for p in model.parameters() if id(p) not in of_layers], *layers]
    found = torch.load(tmp_path / "found.pt", weights_only=True)
    assert list(found) == ["ddp", "fsdp", "fsdp_hybrid"][: ranks // 2 + 1]
    expected = {
        "ddp": data_parallel(units, ranks),
        "fsdp": sharded(units, ranks, size=4),
        "fsdp_hybrid": sharded(units, 2, 2, size=4),
    }
    for kind, (collectives, sent) in found.items():
        if kind == "ddp":
            # Buckets end with a parameter.
            assert {name for name, _ in collectives} == {"all_reduce"}
            assert sum(size for _, size in collectives) == sum(each.size for each in expected[kind])
        else:
            assert sorted(collectives) == sorted((each.kind, each.size) for each in expected[kind])
        # Gloo scatters sums by summing everything up everywhere.
        on_gloo = (each._replace(kind=each.kind.replace("reduce_scatter", "all_reduce")) for each in expected[kind])
        if sys.platform.startswith("linux"):
            assert sent == pytest.approx(sum(each.sent() for each in on_gloo), rel=0.05)
