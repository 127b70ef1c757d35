"""First derivatives of operators; asking for a second one raises."""

import functools
from collections.abc import Callable

import torch


def differentiable_function(
    custom: torch.library.CustomOpDef, direct: Callable, schema: str, gradients: Callable, save: Callable
) -> type[torch.autograd.Function]:
    """
    Register the gradients of the operator `custom`, `direct` in `torch.ops`, for compiled graphs, and make the autograd
    function for everything else: that of `register_autograd` does not support `torch.func`. For the other arguments see
    [`dispatch.operator`].
    """
    returns_list = schema.endswith("[]")

    @forbid_second_derivative
    def once(ctx, *results):
        found, needed = gradients(ctx, *results), ctx.needs_input_grad
        return *(x if needs else None for x, needs in zip(found, needed)), *[None] * (len(needed) - len(found))

    custom.register_autograd((lambda ctx, results: once(ctx, *results)) if returns_list else once, setup_context=save)

    class Differentiable(torch.autograd.Function):
        generate_vmap_rule = True
        setup_context = staticmethod(save)
        backward = staticmethod(once)

        @staticmethod
        def forward(*arguments):
            results = direct(*arguments)
            return tuple(results) if returns_list else results

    # Graphs and profilers show this name.
    return type(direct.__name__, (Differentiable,), {})


class _SecondDerivative(torch.autograd.Function):
    """Identity whose backward raises: rotations have no second derivative."""

    generate_vmap_rule = True

    @staticmethod
    def forward(gradient, *sources):
        return gradient.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *gradients):
        raise RuntimeError(
            "The gradient of learned rotations cannot be differentiated a second time (create_graph=True, hessian): "
            "they have a first derivative only."
        )


def forbid_second_derivative(backward: Callable) -> Callable:
    """
    Decorator of the `backward` of an autograd function that is not differentiable itself.

    PyTorch's `once_differentiable` notices only incoming gradients that require a gradient. This also raises where the
    second derivative comes from saved tensors: `torch.autograd.functional.hessian` of a sum of rotations would
    otherwise be filled with zeros. When its result is differentiated, the decorated function raises `RuntimeError`.
    """

    @functools.wraps(backward)
    def first_derivative(ctx, *gradients):
        with torch.no_grad():
            results = backward(ctx, *gradients)
        if not torch.is_grad_enabled():
            return results
        sources = [x for x in (*gradients, *ctx.saved_tensors) if isinstance(x, torch.Tensor) and x.requires_grad]
        if not sources:
            return results
        return tuple(None if result is None else _SecondDerivative.apply(result, *sources) for result in results)

    return first_derivative
