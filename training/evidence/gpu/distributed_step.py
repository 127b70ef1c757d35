"""
Compares one SGD step of DDP, in a process of torchrun, with the step of a model that sees the whole batch.

    python -m torch.distributed.run --nproc_per_node 2 -m training.evidence.gpu.distributed_step cuda
"""

import copy
import os
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from training.common.process_group import leave_process_group
from training.evidence.gpu.models import ENCODINGS, CheckFailed, Settings, batch, build_model, step


# Largest error relative to the largest change of a weight; convolutions use TF32 on GPUs.
ACCEPTED = 1e-2


def main(device: str) -> None:
    """
    Raises:
        CheckFailed: if the two steps differ.
    """
    # NCCL refuses processes that share a GPU.
    own_gpu = device == "cuda" and torch.cuda.device_count() >= int(os.environ["WORLD_SIZE"])
    dist.init_process_group("nccl" if own_gpu else "gloo")
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    rank, count = dist.get_rank(), dist.get_world_size()
    settings = Settings(device, quick=True)
    for encoding in list(ENCODINGS)[1:4]:
        model = build_model(settings, encoding)
        before = copy.deepcopy(model).state_dict()
        # One batch for each process.
        parts = [batch(settings, model.config) for _ in range(count)]
        for number, part in enumerate(parts):
            part["pixel_values"] += number
        alone = copy.deepcopy(model)
        whole = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        shared = DistributedDataParallel(model, device_ids=None if device == "cpu" else [torch.cuda.current_device()])
        for call, inputs in ((alone, whole), (shared, parts[rank])):
            optimizer = torch.optim.SGD(call.parameters(), lr=0.1)
            step(call, inputs)
            optimizer.step()
        change = max((value - before[name]).abs().max().item() for name, value in alone.state_dict().items())
        state = model.state_dict()
        error = max((state[name] - value).abs().max().item() for name, value in alone.state_dict().items()) / change
        if rank == 0:
            print(f"- {encoding}: the weights after a step differ by {error:.1e} of the largest change", flush=True)
        if not error < ACCEPTED:
            raise CheckFailed(f"{encoding}: the steps differ by {error:.1e}; accepted: {ACCEPTED}.")
    dist.barrier()


if __name__ == "__main__":
    main(sys.argv[1])
    leave_process_group()
