"""
Chooses the code that computes a rotation, and the types it computes in: operations of PyTorch alone in exported graphs,
an operator elsewhere, inside the operator a backend registered for the device, and plain operations without one.

Operators have first derivatives; asking for a second one raises. PyTorch drops tangents of forward mode below operators
without a word, so what may have one is computed by plain operations, which have all derivatives.
"""

import contextlib
import contextvars
import functools
import math
import os
import re
from collections.abc import Callable, Iterator
from types import ModuleType

import torch
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only
from transformers.utils.generic import maybe_autocast


_LIBRARY = torch.library.Library("hf_liere", "FRAGMENT")
# In torch 2.9 `is_exporting()` is also true under torch.compile.
KNOWS_EXPORT = tuple(map(int, re.findall(r"\d+", torch.__version__)[:2])) > (2, 9)
# Operator → the function that computes it.
plain_functions: dict[Callable, Callable] = {}
# Device type → its backend, see `register_backend`.
_BACKENDS: dict[str, ModuleType] = {}
# Cases that a backend takes. Refusals are not kept: one that is due to a CUDA graph capture ends with the capture.
_accepted: set[tuple] = set()
# Device types on which layers are computed one after the other: CPUs, whose caches are small and whose calls are cheap,
# and those without float64, which need the fewest squarings that values allow.
_one_by_one = {"cpu", "meta", "mps"}
_backends_are_off = contextvars.ContextVar("_backends_are_off", default=False)


def working_dtype(device: torch.device) -> torch.dtype:
    """
    The type in which rotations are computed: float64, because rounding the exponent to float32 causes an error of 3e-5
    at LieRE64's initial norm, and float32 on MPS, which has no float64.
    """
    return torch.float32 if device.type == "mps" else torch.float64


def product_dtype(states: torch.Tensor) -> torch.dtype:
    """The type of what linear layers return for these states: that of autocast where it is on."""
    device = states.device.type
    # The meta device has no autocast.
    has_autocast = device != "meta" and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if has_autocast else states.dtype


def values_are_unknown(*tensors: torch.Tensor) -> bool:
    """Whether only shapes are known: in a graph, in functions that `torch.func` transforms, on `meta`."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or get_proxy_mode() is not None:
        return True
    return any(tensor.is_meta or not _has_memory(tensor) for tensor in tensors)


def _has_memory(tensor: torch.Tensor) -> bool:
    """False for fake tensors, those inside `torch.func` transforms, and other stand-ins for a tensor."""
    try:
        return tensor.untyped_storage().device == tensor.device
    except (NotImplementedError, RuntimeError):
        return False


def in_portable_graph() -> bool:
    """Whether a graph is exported or traced: it runs without this package, on operators of PyTorch alone."""
    if torch.jit.is_tracing():
        return True
    return torch.compiler.is_exporting() and (KNOWS_EXPORT or not torch.compiler.is_dynamo_compiling())


def register_backend(device_type: str, backend: ModuleType) -> None:
    """
    Use a backend for all tensors on this type of device.

    Args:
        backend: Has `NAME`, for reports; `SWITCH`, an environment variable that turns it off with 0;
            `refusal(tensor, dtype, block_size, function)`, the reason why a function does not take such tensors, or
            `None`; and some of the functions `apply_rotation`, `angle_gradients`, `outer_products`,
            `commuting_backward` (several in one pass), `block_rotations`, `block_tangents`, `batched_rotations`,
            `batched_backward`, `eigenbases`, `moments_gradient`, `quaternion_rotations` and `quaternion_gradients`.
    """
    _BACKENDS[device_type] = backend


@contextlib.contextmanager
def plain_operations() -> Iterator[None]:
    """Run plain operations inside this context, in this thread."""
    token = _backends_are_off.set(True)
    try:
        yield
    finally:
        _backends_are_off.reset(token)


def batches_layers(device: torch.device) -> bool:
    """Whether all layers are computed in one batch: on accelerators, where a launch costs more than a product."""
    return device.type not in _one_by_one


@contextlib.contextmanager
def as_on_accelerators() -> Iterator[None]:
    """Compute on CPUs as on accelerators inside this context, in all threads, to see there what runs on a GPU."""
    _one_by_one.discard("cpu")
    try:
        with plain_operations():
            yield
    finally:
        _one_by_one.add("cpu")


def find_backend(
    function: str, tensor: torch.Tensor, block_size: int, dtype: torch.dtype | None = None
) -> ModuleType | None:
    """
    The backend that computes a function of such tensors and blocks of this size, with results in `dtype` (by default
    that of the tensor); `None` for plain operations, which also take tensors without elements.
    """
    if _backends_are_off.get() or not tensor.numel():
        return None
    backend, refusal = ask_backend(function, tensor, block_size, dtype)
    return backend if refusal is None else None


def ask_backend(
    function: str, tensor: torch.Tensor, block_size: int, dtype: torch.dtype | None = None
) -> tuple[ModuleType | None, str | None]:
    """The backend of the tensor's device, if any, and its reason to refuse what [`find_backend`] is asked for."""
    backend, dtype = _BACKENDS.get(tensor.device.type), dtype or tensor.dtype
    if backend is None:
        return None, None
    if not hasattr(backend, function):
        return backend, "they lack this function"
    if os.environ.get(backend.SWITCH, "1") == "0":
        return backend, f"{backend.SWITCH}=0 turns them off"
    case = backend, function, tensor.device, dtype, block_size, tensor.shape[-1]
    if case not in _accepted:
        if refusal := backend.refusal(tensor, dtype, block_size, function):
            return backend, refusal
        _accepted.add(case)
    return backend, None


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
    [`operator`].

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


def operator(
    schema: str,
    fake: Callable,
    gradients: Callable | None = None,
    save: Callable | None = None,
    reads_values: bool = False,
    plainly: Callable | None = None,
) -> Callable:
    """
    Decorator that makes a function the operator `hf_liere::name` of torch: calls run the function, with gradients and
    in graphs. It takes positional arguments, computes in their types with or without autocast, and is called for one
    element after the other by `torch.func.vmap`. An argument with a tangent raises `NotImplementedError` unless there
    are plain operations.

    Args:
        schema: Arguments and results, as `torch.library.custom_op` takes them.
        fake: Returns empty results with the right shapes, types and layouts.
        gradients: `gradients(ctx, *result_gradients)`, the gradients of the first arguments; those that are not needed
            may have any value. They have no derivative.
        save: `save(ctx, inputs, output)` saves in the context what `gradients` needs.
        reads_values: Whether the computation depends on values, so that CUDA graphs cannot record it.
        plainly: The same function by operations of PyTorch alone, which have all derivatives, for portable graphs and
            arguments with tangents.
    """

    def register(function: Callable):
        def compute(*arguments):
            device = next(argument for argument in arguments if isinstance(argument, torch.Tensor)).device
            with maybe_autocast(device.type, enabled=False):
                return function(*arguments)

        def map_elements(info, dims, *arguments):
            def call(index: int):
                return custom(*tree_map(lambda x, dim: x if dim is None else x.select(dim, index), arguments, dims))

            results = tree_map(lambda *parts: torch.stack(parts), *map(call, range(info.batch_size)))
            return results, tree_map(lambda _: 0, results)

        def map_elements_of_engine(*arguments):
            # `is_grads_batched` and `jacobian(vectorize=True)` batch in an older way, which fails for lists of tensors.
            level = torch._C._vmapmode_increment_nesting() - 1
            torch._C._vmapmode_decrement_nesting()
            size = max(len(torch._remove_batch_dim(x, level, 1, 0)) for x in tensors_in(arguments))
            arguments = tree_map_only(torch.Tensor, lambda x: torch._remove_batch_dim(x, level, size, 0), arguments)
            dims = tree_map(lambda x: 0 if isinstance(x, torch.Tensor) else None, arguments)
            return tree_map(lambda x: torch._add_batch_dim(x, 0, level), torch.vmap(direct, dims)(*arguments))

        name = function.__name__.strip("_")
        tags = (torch.Tag.cudagraph_unsafe,) if reads_values else ()
        custom = torch.library.custom_op(f"hf_liere::{name}", compute, mutates_args=(), schema=schema, tags=tags)
        custom.register_fake(fake)
        custom.register_vmap(map_elements)
        _LIBRARY.impl(name, map_elements_of_engine, "Batched")
        # Profilers see all calls through `torch.ops`.
        direct = getattr(torch.ops.hf_liere, name)
        plain_functions[direct] = function
        differentiable = direct
        if gradients is not None:
            assert save is not None, "gradients are computed from saved tensors"
            differentiable = differentiable_function(custom, direct, schema, gradients, save).apply

        @functools.wraps(function)
        def call(*arguments):
            has_tangents = carry_tangents(*arguments)
            if plainly is not None and (has_tangents or in_portable_graph()):
                return plainly(*arguments)
            if has_tangents:
                refuse_tangents()
            needs_gradient = any(isinstance(x, torch.Tensor) and x.requires_grad for x in arguments) or is_transformed()
            return (differentiable if needs_gradient and torch.is_grad_enabled() else direct)(*arguments)

        vars(call)["operator"] = direct
        return call

    return register


def refuse_tangents() -> None:
    """Raises `NotImplementedError`: there is no derivative in forward mode."""
    raise NotImplementedError(
        "This derivative of learned rotations does not exist in forward mode (torch.func.jvp, forward_ad): compute "
        "rotations, and what is derived from them, inside one jvp or dual_level."
    )


def require(is_accepted: torch.Tensor, sentence: str, values: torch.Tensor) -> torch.Tensor:
    """
    1, a tensor, where a condition holds that a graph cannot see; else `RuntimeError`, also while a compiled graph runs,
    with the values in place of {} in the sentence. NaN in exported graphs, which have no operators of ours.
    """
    if in_portable_graph():
        return torch.where(is_accepted, 1.0, math.nan)
    return _require(is_accepted, values.detach(), sentence)


@operator(
    "(Tensor is_accepted, Tensor values, str sentence) -> Tensor",
    fake=lambda is_accepted, values, sentence: is_accepted.new_ones((), dtype=torch.float32),
    reads_values=True,
)
def _require(is_accepted, values, sentence):
    if not is_accepted:
        raise RuntimeError(sentence.format(values.tolist()))
    return is_accepted.new_ones((), dtype=torch.float32)
