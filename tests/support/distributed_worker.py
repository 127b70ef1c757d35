"""One SGD step in a process of `torchrun`; process 0 saves its logits and the whole weights after the step.

python -m torch.distributed.run --nproc_per_node 2 tests/support/distributed_worker.py KINDS CONFIG_DIR BATCH FOLDER

For each of KINDS, with commas, a step of a new model and a file in FOLDER. A kind is `ddp`; `fsdp` for FSDP2 block by
block, `fsdp_small` with units of single projections and of the rotary encoding too, `fsdp_hybrid` with two copies of
the shards; `ddp_accumulated` and `fsdp_accumulated` with a micro-batch for each sample; or `zero3` for DeepSpeed.
"""

import contextlib
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
    """
    End a process whose work is done and saved, without shutting Python down: a thread of Gloo that still has to release
    a tensor would abort the process then (`training/common/process_group.py`).
    """
    dist.barrier()
    os._exit(0)


def shard(model, kind):
    shape, names = (dist.get_world_size(),), ("shard",)
    if kind == "fsdp_hybrid":
        shape, names = (2, shape[0] // 2), ("replicate", "shard")
    mesh = dist.device_mesh.init_device_mesh("cpu", shape, mesh_dim_names=names)
    for layer in model.liere.layers:
        if kind == "fsdp_small":
            fully_shard(layer.attention.q_proj, mesh=mesh)
        fully_shard(layer, mesh=mesh)
    if kind == "fsdp_small":
        fully_shard(model.liere.rotary_encoding, mesh=mesh)
    assert type(model.liere.layers[0].mlp.fc1.weight).__name__ == "DTensor"
    return fully_shard(model, mesh=mesh)


def step(model, kind, batch):
    """Logits of this process; the model has the new weights."""
    wrapped = DistributedDataParallel(model) if kind.startswith("ddp") else shard(model, kind)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    size = 1 if kind.endswith("accumulated") else len(batch["labels"])
    parts = [dict(zip(batch, part)) for part in zip(*(values.split(size) for values in batch.values()))]
    logits = []
    for index, part in enumerate(parts):
        with micro_batch(wrapped, is_last=index == len(parts) - 1):
            outputs = wrapped(**part)
            (outputs.loss / len(parts)).backward()
        logits.append(outputs.logits)
    optimizer.step()
    return torch.cat(logits)


@contextlib.contextmanager
def micro_batch(model, is_last):
    """As accelerate's `accumulate`."""
    with contextlib.ExitStack() as contexts:
        if not isinstance(model, DistributedDataParallel):
            model.set_requires_gradient_sync(is_last)
        elif not is_last:
            contexts.enter_context(model.no_sync())
        yield


def zero3_step(model, batch):
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": len(batch["labels"]),
        # Nothing is so small that every process keeps it.
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "gradient_clipping": 0.0,
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config={**config, "zero_allow_untested_optimizer": True}
    )
    assert all(parameter.numel() == 0 for parameter in model.parameters())
    outputs = engine(**batch)
    engine.backward(outputs.loss)
    engine.step()
    return outputs.logits


def main(kinds, config_dir, batch_file, folder):
    dist.init_process_group("gloo")
    assert dist.get_world_size() == 2
    for kind in kinds.split(","):
        take_step(kind, config_dir, batch_file, f"{folder}/{kind}.pt")
    leave()


def take_step(kind, config_dir, batch_file, output):
    torch.manual_seed(0)
    model = hf_liere.LieREViTForImageClassification(hf_liere.LieREViTConfig.from_pretrained(config_dir))
    share = slice(dist.get_rank(), None, 2)
    batch = {name: values[share] for name, values in torch.load(batch_file).items()}
    if kind == "zero3":
        from deepspeed import zero

        logits = zero3_step(model, batch)
        with zero.GatheredParameters(list(model.parameters())):
            weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
    else:
        logits = step(model, kind, batch)
        weights = {name: full(value).detach().clone() for name, value in model.state_dict().items()}
    if dist.get_rank() == 0:
        torch.save({"logits": logits.detach(), "weights": weights}, output)


if __name__ == "__main__":
    main(*sys.argv[1:])
