"""One SGD step under DDP or FSDP2 in a process of `torchrun`; process 0 saves the whole weights.

python -m torch.distributed.run --nproc_per_node 2 tests/distributed_worker.py ddp|fsdp CONFIG_DIR BATCH OUTPUT
"""

import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import hf_liere


def full(value):
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def leave():
    """End a process whose work is done and saved: threads of gloo now and then abort an interpreter that shuts down."""
    dist.barrier()
    os._exit(0)


def main(kind, config_dir, batch_file, output):
    dist.init_process_group("gloo")
    assert dist.get_world_size() == 2
    torch.manual_seed(0)
    model = hf_liere.LieREViTForImageClassification(hf_liere.LieREViTConfig.from_pretrained(config_dir))
    if kind == "fsdp":
        mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
        for layer in model.liere.layers:
            fully_shard(layer, mesh=mesh)
        wrapped = fully_shard(model, mesh=mesh)
        assert type(model.liere.layers[0].mlp.fc1.weight).__name__ == "DTensor"
    else:
        wrapped = DistributedDataParallel(model)
    batch = torch.load(batch_file)
    share = slice(dist.get_rank(), None, 2)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    wrapped(batch["pixel_values"][share], labels=batch["labels"][share]).loss.backward()
    optimizer.step()
    weights = {name: full(value).detach().clone() for name, value in model.state_dict().items()}
    if dist.get_rank() == 0:
        torch.save(weights, output)
    leave()


if __name__ == "__main__":
    main(*sys.argv[1:])
