"""
First derivatives of operators; asking for a second one raises. PyTorch drops tangents of forward mode below operators
without a word, so what may have one is computed by plain operations, which have all derivatives.
"""

from collections.abc import Callable

import torch
from torch.autograd import forward_ad
from torch.utils._pytree import tree_leaves


def in_forward_mode() -> bool:
    """Whether a forward-mode derivative (`torch.func.jvp`, `torch.autograd.forward_ad`) is being computed."""
    return forward_ad._current_level >= 0


def carry_tangents(*arguments) -> bool:
    """Whether tensors among the arguments, or in lists there, have a tangent, or may have one that cannot be seen."""
    if not in_forward_mode() or torch.compiler.is_compiling():
        return in_forward_mode()
    jvp = torch._C._functorch.TransformType.Jvp
    transforms = [each.key() for each in torch._C._functorch.get_interpreter_stack() or ()]
    # Only the innermost transform, which is the last, shows its tangents.
    if transforms and (transforms[-1] != jvp or transforms.count(jvp) > 1):
        return True
    return any(forward_ad.unpack_dual(x).tangent is not None for x in tensors_in(arguments))


def tensors_in(arguments) -> list[torch.Tensor]:
    """The tensors among arguments, and in lists there."""
    return [x for x in tree_leaves(arguments) if isinstance(x, torch.Tensor)]


def is_transformed() -> bool:
    """Whether a transform of `torch.func` is running: tensors do not say what outer ones differentiate."""
    return not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None


def differentiable_function(
    custom: torch.library.CustomOpDef, direct: Callable, schema: str, gradients: Callable, save: Callable
) -> type[torch.autograd.Function]:
    """
    Register the gradients of the operator `custom`, `direct` in `torch.ops`, for compiled graphs, and make the autograd
    function for everything else: that of `register_autograd` does not support `torch.func`. For the other arguments see
    [`dispatch.operator`].

    PyTorch's `once_differentiable` notices only incoming gradients that require a gradient. This also raises
    `RuntimeError` where the second derivative comes from saved tensors: `torch.autograd.functional.hessian` of a sum of
    rotations would otherwise be filled with zeros.
    """
    returns_list = schema.endswith("[]")

    def compute(ctx, *results):
        found, needed = gradients(ctx, *results), ctx.needs_input_grad
        return *(x if needs else None for x, needs in zip(found, needed)), *[None] * (len(needed) - len(found))

    def once(ctx, *results):
        with torch.no_grad():
            if carry_tangents(*results):
                # What is saved has no tangent, and gradients are linear in those of the results.
                duals = [(x, None) if x is None else forward_ad.unpack_dual(x) for x in results]
                tangents = (torch.zeros_like(x) if x is not None and t is None else t for x, t in duals)
                pairs = zip(compute(ctx, *(x for x, _ in duals)), compute(ctx, *tangents))
                found = tuple(None if x is None else forward_ad.make_dual(x, t) for x, t in pairs)
            else:
                found = compute(ctx, *results)
        tensors = tensors_in((*results, *ctx.saved_tensors)) if torch.is_grad_enabled() else []
        sources = tensors if is_transformed() else [x for x in tensors if x.requires_grad]
        return tuple(None if x is None else _SecondDerivative.apply(x, *sources) for x in found) if sources else found

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
    def jvp(ctx, tangent, *others):
        return tangent.clone()

    @staticmethod
    def backward(ctx, *gradients):
        raise RuntimeError(
            "The gradient of learned rotations cannot be differentiated a second time (create_graph=True, hessian): "
            "they have a first derivative only."
        )
