"""What tests of patches of models of other libraries share: their cases differ, and these checks do not."""

import re
from dataclasses import replace

import torch

from hf_liere import patch, rotary_parameters, unpatch


def normal(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def randomize(model, scale=0.3):
    """Parameters of rotations away from their start."""
    generator = torch.Generator().manual_seed(5)
    for _, parameter in rotary_parameters(model):
        parameter.add_(scale * torch.randn(parameter.shape, generator=generator))


def gradients(run, model, inputs):
    model.zero_grad()
    run(model, inputs).square().mean().backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


@torch.no_grad()
def find_starts(run, case, config, encodings):
    """The cells of a page's table: encodings that start with the bits of the model, and those within rounding."""
    model, inputs = case.build(), case.inputs()
    found, before = {True: [], False: []}, run(model, inputs)
    for encoding in encodings:
        size = None if encoding == "rope_mixed" else 4
        try:
            patch(model, replace(config, position_encoding=encoding, block_size=size))
        except ValueError as reason:
            assert re.search("rope.freqs|cannot start with these|of one axis|multiples of one matrix", str(reason))
            continue
        error = (run(model, inputs) - before).abs().max()
        assert error < 1e-5
        found[bool(error == 0)].append(f"`{encoding}`")
        unpatch(model)
    return tuple(", ".join(names) or "–" for names in found.values())
