"""A run of two processes, of which the second has a loss of infinity and finite gradients in its second step."""

import sys
from pathlib import Path

import torch
from checkout import ROOT
from distributed_worker import leave


if __name__ == "__main__":
    sys.path[:0] = map(str, (ROOT, ROOT / "tests" / "training"))
    from test_trainer import tiny_trainer

    torch.manual_seed(0)
    trainer = tiny_trainer(sys.argv[1], run={"max_steps": 6, "logging_steps": 4})
    genuine, states = trainer.compute_loss, []

    def compute_loss(model, *args, **kwargs):
        states.append(trainer.model.classifier.weight.detach().clone())
        is_broken = len(states) == 2 and trainer.args.process_index == 1
        return genuine(model, *args, **kwargs) + (float("inf") if is_broken else 0.0)

    trainer.compute_loss = compute_loss
    try:
        trainer.train()
        message = "nothing was raised"
    except FloatingPointError as error:
        message = str(error)
    result = {"message": message, "states": torch.stack([*states, trainer.model.classifier.weight.detach()])}
    torch.save(result, Path(sys.argv[1], f"{trainer.args.process_index}.pt"))
    leave()
