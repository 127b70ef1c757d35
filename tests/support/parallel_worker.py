"""
Tensor parallelism: python -m torch.distributed.run --nproc_per_node 2 tests/support/parallel_worker.py FOLDER MODEL …

Each model is a folder in FOLDER. Two processes load it, compute logits, gradients and tokens, and save it again. If it
cannot be loaded, its error is saved instead.
"""

import copy
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from distributed_worker import full, leave

import hf_liere


TOKENS = torch.arange(3, 23).view(2, 10)


def compute(model):
    """Logits, gradients of one and of two backward passes, logits without gradients, and greedy tokens."""
    found, learned = {}, dict(hf_liere.rotary_parameters(model))
    for passes in ("one", "two"):
        outputs = model(TOKENS, labels=TOKENS)
        outputs.loss.backward()
        named = learned if passes == "two" else dict(model.named_parameters())
        # Copies, because the second pass adds to them.
        found[passes] = {name: full(value.grad).clone() for name, value in named.items()}
    found["logits"] = outputs.logits.detach()
    with torch.no_grad():
        found["quiet"] = model(TOKENS).logits
        found["tokens"] = model.generate(TOKENS[:1], max_new_tokens=5, do_sample=False)
    return found


def run(folder, name):
    try:
        config = transformers.distributed.DistributedConfig(tp_size=2)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder / name, distributed_config=config)
    except ValueError as error:
        return str(error)
    assert copy.deepcopy(model.model.rotary_encoding).share is model.model.rotary_encoding.share
    found = compute(model)
    model.save_pretrained(folder / f"{name}-again")
    return found


def main(folder, *names):
    dist.init_process_group("gloo")
    for name in names:
        found = run(Path(folder), name)
        torch.save(found, f"{folder}/{name}-{dist.get_rank()}.pt")
    leave()


if __name__ == "__main__":
    main(*sys.argv[1:])
