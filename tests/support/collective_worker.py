"""
The collectives of one training step in a process of a group, and the bytes that its sockets sent: saved by process 0.

collective_worker.py CONFIG_DIR OUTPUT, with the variables of torchrun
"""

import os
import socket
import struct
import sys

import torch
import torch.distributed as dist
from distributed_worker import leave, shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import hf_liere


# Operator of c10d → what it is, and which of its tensors is the whole one.
KINDS = {"allreduce_": "all_reduce", "_allgather_base_": "all_gather", "_reduce_scatter_base_": "reduce_scatter"}
# `tcpi_bytes_sent` in Linux's tcp.h.
BYTES_SENT = 200


class Collectives(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        kind = KINDS.get(function._schema.name.removeprefix("c10d::"))
        if kind is not None:
            tensors = [x for x in torch.utils._pytree.tree_leaves(arguments) if isinstance(x, torch.Tensor)]
            self.found.append((kind, max(x.nbytes for x in tensors)))
        return function(*arguments, **(options or {}))


def bytes_sent():
    """By all TCP sockets of this process until now."""
    total = 0
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            with socket.socket(fileno=os.dup(int(descriptor))) as copy:
                total += struct.unpack_from("Q", copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256), BYTES_SENT)[
                    0
                ]
        except (OSError, struct.error):
            # It is a file, or a socket of another kind.
            continue
    return total


def main(config_dir, output):
    dist.init_process_group("gloo")
    config, found = hf_liere.LieREViTConfig.from_pretrained(config_dir), {}
    batch = {"pixel_values": torch.randn(2, 3, 16, 16), "labels": torch.tensor([0, 1])}
    for kind in ("ddp", "fsdp", "fsdp_hybrid")[: 2 + (dist.get_world_size() > 2)]:
        model = hf_liere.LieREViTForImageClassification(config)
        model = DistributedDataParallel(model) if kind == "ddp" else shard(model, kind)
        # The first step makes connections, and DDP orders its buckets.
        model(**batch).loss.backward()
        dist.barrier()
        before = bytes_sent()
        with Collectives() as collectives:
            model(**batch).loss.backward()
        found[kind] = (collectives.found, bytes_sent() - before)
        dist.barrier()
    if dist.get_rank() == 0:
        torch.save(found, output)
    leave()


if __name__ == "__main__":
    main(*sys.argv[1:])
