"""Counts the operations of PyTorch that a function takes, views left out: on accelerators each is at least a launch."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from hf_liere.fast import application, rotating, rotation_gradients


# They change no number, or only call others that are counted.
VIEWS = {
    f"aten::{name}"
    for name in (
        "view transpose permute expand slice select unsqueeze squeeze _unsafe_view t detach alias as_strided split "
        "unbind reshape empty _reshape_alias unfold diagonal empty_like new_empty empty_strided resize_ detach_ "
        "lift_fresh resolve_conj resolve_neg result_type is_same_size narrow view_as expand_as set_ unflatten flatten "
        "movedim real numpy_T as_strided_ view_as_real view_as_complex meshgrid chunk split_with_sizes "
        "promote_types _to_copy to contiguous item is_nonzero mT conj matmul linear einsum broadcast_to "
        "new_zeros zeros ones stack zeros_like ones_like full full_like tensor_split dropout repeat pad"
    ).split()
}
# Parts of an operation that is counted.
FILLS = {"aten::copy_", "aten::fill_", "aten::zero_"}
# Kernels compute each of these functions in one launch.
KERNELS = ("apply_rotation", "angle_gradients", "outer_products")
KERNEL = "one kernel"


def count_operations(function: Callable[[], object]) -> int:
    """Operations of the second call of a function."""
    function()
    with one_event_for_each_kernel(), profile(activities=[ProfilerActivity.CPU]) as profiler:
        function()
    return sum(map(_is_counted, profiler.events()))


@contextmanager
def one_event_for_each_kernel() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for module in (application, rotation_gradients, rotating):
            for name in KERNELS:
                if (function := getattr(module, name, None)) is not None:
                    patch.setattr(module, name, _recorded(function))
        yield


def _recorded(function: Callable) -> Callable:
    def call(*arguments, **options):
        with record_function(KERNEL):
            result = function(*arguments, **options)
            # In the layout of kernels, which callers need not change: that of the states, or contiguous.
            if isinstance(result, torch.Tensor):
                return result.contiguous()
            return application.match_layout(result, arguments[0])

    return call


def _is_counted(event) -> bool:
    parent = event.cpu_parent
    while parent is not None:
        if parent.name == KERNEL:
            return False
        parent = parent.cpu_parent
    if event.name == KERNEL:
        return True
    children = {child.name for child in event.cpu_children if child.name.startswith("aten::")}
    return event.name.startswith("aten::") and event.name not in VIEWS and children <= VIEWS | FILLS
