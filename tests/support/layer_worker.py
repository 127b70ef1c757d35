"""
Attention of plain PyTorch with the rotation as a layer, and one SGD step of it in a process of `torchrun`.

python -m torch.distributed.run --nproc_per_node 2 tests/support/layer_worker.py KIND OUTPUT

KIND is `ddp` or `fsdp` (FSDP2, block by block).
"""

import sys

import torch
import torch.distributed as dist
from distributed_worker import full, leave
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel

from hf_liere import LieRotaryEmbedding


class Block(nn.Module):
    """Four query heads and two key heads of eight channels."""

    def __init__(self):
        super().__init__()
        self.q_proj, self.out = nn.Linear(32, 32), nn.Linear(32, 32)
        self.k_proj, self.v_proj = nn.Linear(32, 16), nn.Linear(32, 16)
        self.rotary = LieRotaryEmbedding(4, 8, 2, "comrope_ld", 4, num_key_value_heads=2)

    def forward(self, x, positions):
        projections = (self.q_proj, self.k_proj, self.v_proj)
        query, key, value = (projection(x).unflatten(-1, (-1, 8)).transpose(1, 2) for projection in projections)
        query, key = self.rotary(query, key, positions)
        attended = scaled_dot_product_attention(query, key, value, enable_gqa=True)
        return x + self.out(attended.transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x, positions):
        for block in self.blocks:
            x = block(x, positions)
        return x


def model_and_batch():
    torch.manual_seed(0)
    return Model(), torch.randn(4, 6, 32), torch.randn(4, 6, 2)


def step(model, x, positions):
    """One step of SGD; the loss is a mean over the samples."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(x, positions).square().mean().backward()
    optimizer.step()


def main(kind, output):
    dist.init_process_group("gloo")
    model, x, positions = model_and_batch()
    share = slice(dist.get_rank(), None, 2)
    if kind == "ddp":
        wrapped = DistributedDataParallel(model)
    else:
        mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        wrapped = fully_shard(model, mesh=mesh)
    step(wrapped, x[share], positions[share])
    weights = {name: full(value.detach()) for name, value in model.state_dict().items()}
    if dist.get_rank() == 0:
        torch.save(weights, output)
    leave()


if __name__ == "__main__":
    main(*sys.argv[1:])
