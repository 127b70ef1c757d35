"""
One SGD step of a patched model: python -m torch.distributed.run --nproc_per_node 2 … KIND DIRECTORY

KIND is `ddp`; `fsdp` for FSDP2 layer by layer; or `fsdp_small` with units of single projections and of the rotary
encoding too.
"""

import sys

import torch
import torch.distributed as dist
from distributed_worker import full, leave
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel


def shard(model, kind):
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    for layers in [module for module in model.modules() if isinstance(module, nn.ModuleList)]:
        # Inside of a rotary encoding, lists hold tables of cos and sin without parameters.
        for layer in (layer for layer in layers if any(True for _ in layer.parameters())):
            if kind == "fsdp_small":
                for projection in [module for module in layer.modules() if isinstance(module, nn.Linear)]:
                    fully_shard(projection, mesh=mesh)
            fully_shard(layer, mesh=mesh)
    if kind == "fsdp_small":
        for tower in [module for module in model.modules() if "rotary_encoding" in dict(module.named_children())]:
            fully_shard(tower.rotary_encoding, mesh=mesh)
    wrapped = fully_shard(model, mesh=mesh)
    assert {type(parameter).__name__ for parameter in model.parameters()} == {"DTensor"}
    return wrapped


def main(kind, directory):
    dist.init_process_group("gloo")
    assert dist.get_world_size() == 2
    model, batch = torch.load(f"{directory}/start.pt", weights_only=False)
    model.train()
    wrapped = DistributedDataParallel(model, find_unused_parameters=True) if kind == "ddp" else shard(model, kind)
    share = slice(dist.get_rank(), None, 2)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    wrapped(**{name: value[share] for name, value in batch.items()}).loss.backward()
    optimizer.step()
    stepped = {name: full(value).detach() for name, value in model.named_parameters()}
    if dist.get_rank() == 0:
        torch.save(stepped, f"{directory}/stepped.pt")
    leave()


if __name__ == "__main__":
    main(*sys.argv[1:])
