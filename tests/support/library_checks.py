"""What tests of patches of models of other libraries share: their cases differ, and these checks do not."""

from typing import Any, NamedTuple

import torch

from hf_liere import patch, rotary_parameters


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


class Start(NamedTuple):
    """
    A patched model with its inputs; output, gradients, class and names of weights of the plain model, and gradients of
    the patched one.
    """

    model: Any
    inputs: dict
    before: torch.Tensor
    plain: dict[str, torch.Tensor]
    kind: type
    weights: list[str]
    learned: dict[str, torch.Tensor]


def check_start(run, case, config, is_exact):
    """A patched case computes the bits of the plain one, or is within rounding of it."""
    model, inputs = case.build(), case.inputs()
    before, plain = run(model, inputs), gradients(run, model, inputs)
    kind, weights = type(model), list(model.state_dict())
    patch(model, config)
    after, learned = run(model, inputs), gradients(run, model, inputs)
    if is_exact:
        assert torch.equal(after, before)
    else:
        assert (after - before).abs().max() < 1e-5
    return Start(model, inputs, before, plain, kind, weights, learned)


def check_gradients(start, tolerance=1e-4):
    """
    The gradients of the weights are those of the plain model, and all others belong to rotations; these are returned.
    """
    others = dict(start.learned)
    for name, gradient in start.plain.items():
        assert (others.pop(name) - gradient).abs().max() <= tolerance * gradient.abs().max() + 1e-7, name
    assert others.keys() == {name for name, _ in rotary_parameters(start.model)}
    return list(others.values())
