"""Operators of torch made from functions, and what can be known of tensors in graphs."""

import functools
import re
from collections.abc import Callable

import torch
from transformers.utils.generic import maybe_autocast


# torch 2.9 takes every graph that its compiler makes for an exported one.
KNOWS_EXPORT = tuple(map(int, re.findall(r"\d+", torch.__version__)[:2])) > (2, 9)
# By the operator: the function that computes it.
plain_functions: dict[torch._ops.OpOverloadPacket, Callable] = {}


def values_are_unknown(*tensors: torch.Tensor) -> bool:
    """Whether only shapes can be looked at: in a graph, in functions that `torch.func` transforms, on `meta`."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return True
    return any(tensor.is_meta or not _has_memory(tensor) for tensor in tensors)


def _has_memory(tensor: torch.Tensor) -> bool:
    """Unlike fake tensors, those inside of `torch.func`, and others that stand for a tensor or a part of one."""
    try:
        return tensor.untyped_storage().device == tensor.device
    except (NotImplementedError, RuntimeError):
        return False


def in_portable_graph() -> bool:
    """
    Whether operations are recorded for a graph that runs where this package is not installed: one that is exported or
    traced. It holds operators of PyTorch only.
    """
    if torch.jit.is_tracing():
        return True
    return torch.compiler.is_exporting() and (KNOWS_EXPORT or not torch.compiler.is_dynamo_compiling())


def operator(
    schema: str,
    fake: Callable,
    gradients: Callable | None = None,
    save: Callable | None = None,
    reads_values: bool = False,
) -> Callable:
    """
    Decorator of a function that becomes an operator of torch, `hf_liere::name`, by its name and this schema, and is
    called through it. It computes in the types of its arguments, with autocast or without. `torch.func.vmap` calls it
    for one element after the other. Arguments are positional.

    Copies of this file that came with checkpoints have a namespace of their own.

    Args:
        schema: Arguments and results, as `torch.library.custom_op` takes them.
        fake: The same function of tensors without values, for the shapes, types and layouts of the results.
        gradients: Of the arguments, by the context and the gradients of the results, `None` where they are not needed.
            They are differentiated no further: an error says so.
        save: Saves in the context what `gradients` needs, by the context, the arguments and the results.
        reads_values: Whether what is done depends on values, so that graphs of a GPU cannot record it.
    """
    package = __name__.rpartition(".")[0]
    namespace = "hf_liere" if package == "hf_liere.models.rotation" else re.sub(r"\W", "_", package)

    def register(function: Callable):
        def compute(*arguments):
            device = next(argument for argument in arguments if isinstance(argument, torch.Tensor)).device
            with maybe_autocast(device.type, enabled=False):
                return function(*arguments)

        def one_by_one(info, dims, *arguments):
            chosen = ([_selected(x, dim, index) for x, dim in zip(arguments, dims)] for index in range(info.batch_size))
            results = [made(*selected) for selected in chosen]
            if isinstance(results[0], torch.Tensor):
                return torch.stack(results), 0
            stacked = [torch.stack(parts) for parts in zip(*results)]
            return type(results[0])(stacked), type(results[0])(0 for _ in stacked)

        name = f"{namespace}::{function.__name__.strip('_')}"
        tags = (torch.Tag.cudagraph_unsafe,) if reads_values else ()
        made = torch.library.custom_op(name, compute, mutates_args=(), schema=schema, tags=tags)
        made.register_fake(fake)
        made.register_vmap(one_by_one)
        # Called in this way, profilers see all of them.
        direct = getattr(getattr(torch.ops, namespace), name.partition("::")[2])
        plain_functions[direct] = function
        if gradients is None:
            return direct
        of_list = schema.endswith("[]")
        once = first_derivative_only(gradients)
        made.register_autograd((lambda ctx, results: once(ctx, *results)) if of_list else once, setup_context=save)

        # torch's own function of `register_autograd` does not take the transformations of `torch.func`.
        class Differentiable(torch.autograd.Function):
            generate_vmap_rule = True
            setup_context = staticmethod(save)
            backward = staticmethod(once)

            @staticmethod
            def forward(*arguments):
                results = direct(*arguments)
                return tuple(results) if of_list else results

        # By the name that graphs and profilers show.
        function_class = type(function.__name__.strip("_"), (Differentiable,), {})

        @functools.wraps(function)
        def differentiable(*arguments):
            needs_gradient = any(isinstance(x, torch.Tensor) and x.requires_grad for x in arguments)
            return (function_class.apply if needs_gradient and torch.is_grad_enabled() else direct)(*arguments)

        differentiable.operator = direct
        return differentiable

    return register


def _selected(argument, dim, index: int):
    if isinstance(argument, (list, tuple)):
        return argument if dim is None else [_selected(x, d, index) for x, d in zip(argument, dim)]
    return argument if dim is None else argument.select(dim, index)


class _SecondDerivative(torch.autograd.Function):
    """Hands a gradient on; whoever differentiates it once more is told that this cannot be done."""

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
        if not torch.is_grad_enabled():
            return results
        sources = [x for x in (*gradients, *ctx.saved_tensors) if isinstance(x, torch.Tensor) and x.requires_grad]
        if not sources:
            return results
        return tuple(None if result is None else _SecondDerivative.apply(result, *sources) for result in results)

    return first_derivative
