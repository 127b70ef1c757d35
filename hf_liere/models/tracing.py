"""What holds for all functions of tensors here: when values can be looked at, and how often they are differentiated."""

import functools
import re
from collections.abc import Callable

import torch


def values_are_unknown(*tensors: torch.Tensor) -> bool:
    """Whether only shapes can be looked at: in a graph that is compiled, exported or traced, on the meta device."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return True
    return any(tensor.is_meta or type(tensor) not in (torch.Tensor, torch.nn.Parameter) for tensor in tensors)


def takes_operators(tensor: torch.Tensor) -> bool:
    """
    Whether a graph calls operators that the compiler does not look into: where they run several times faster than the
    plain operations that it would fuse, and read values. Exported graphs have plain operations only, and so have all
    graphs of old compilers (torch 2.9), which take every graph for an exported one.
    """
    return torch.compiler.is_compiling() and not torch.compiler.is_exporting() and tensor.device.type == "cpu"


def operator(schema: str) -> Callable:
    """
    Decorator of a function that becomes an operator of torch, `hf_liere::name`, by its name and this schema. Copies of
    this file that came with checkpoints have a namespace of their own.
    """
    package = __name__.rpartition(".")[0]
    namespace = "hf_liere" if package == "hf_liere.models" else re.sub(r"\W", "_", package)

    def register(function: Callable):
        name = f"{namespace}::{function.__name__.strip('_')}"
        return torch.library.custom_op(name, function, mutates_args=(), schema=schema)

    return register


class OperatorContext:
    """Stands in for the context of an autograd function whose parts an operator calls."""

    def __init__(self, needs_generators: bool):
        self.needs_input_grad = (False, needs_generators)

    def save_for_backward(self, *tensors: torch.Tensor) -> None:
        self.saved_tensors = tensors


class _SecondDerivative(torch.autograd.Function):
    """Hands a gradient on; whoever differentiates it once more is told that this cannot be done."""

    @staticmethod
    def forward(ctx, gradient, *sources):
        return gradient.clone()

    @staticmethod
    def backward(ctx, *gradients):
        raise RuntimeError(
            "The gradient of learned rotations cannot be differentiated a second time (create_graph=True, hessian): "
            "they have a first derivative only."
        )


def first_derivative_only(backward: Callable) -> Callable:
    """
    Decorator of the `backward` of an autograd function that is not differentiable itself.

    Unlike PyTorch's `once_differentiable`, which notices only incoming gradients that require a gradient, this also
    raises where the second derivative comes from what the function saved: `torch.autograd.functional.hessian` of a sum
    of rotations would be filled with zeros otherwise.

    Raises:
        RuntimeError: from the function that it returns, when its result is differentiated.
    """

    @functools.wraps(backward)
    def first_derivative(ctx, *gradients):
        with torch.no_grad():
            results = backward(ctx, *gradients)
        # Compiled graphs have no second derivative either, and say so themselves.
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return results
        tensors = (*gradients, *ctx.saved_tensors)
        sources = [tensor for tensor in tensors if isinstance(tensor, torch.Tensor) and tensor.requires_grad]
        if not sources:
            return results
        return tuple(None if result is None else _SecondDerivative.apply(result, *sources) for result in results)

    return first_derivative
