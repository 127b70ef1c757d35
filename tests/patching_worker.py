"""One SGD step of a patched model under DDP: python -m torch.distributed.run --nproc_per_node 2 … DIRECTORY"""

import sys

import torch
import torch.distributed as dist
from distributed_worker import leave
from torch.nn.parallel import DistributedDataParallel


def main(directory):
    dist.init_process_group("gloo")
    assert dist.get_world_size() == 2
    model, batch = torch.load(f"{directory}/start.pt", weights_only=False)
    wrapped = DistributedDataParallel(model.train(), find_unused_parameters=True)
    share = slice(dist.get_rank(), None, 2)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    wrapped(**{name: value[share] for name, value in batch.items()}).loss.backward()
    optimizer.step()
    if dist.get_rank() == 0:
        torch.save({name: value.detach() for name, value in model.named_parameters()}, f"{directory}/stepped.pt")
    leave()


if __name__ == "__main__":
    main(*sys.argv[1:])
