"""Facts about attention modules of any model: their arguments, projections, heads and devices."""

import inspect
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import CodeType
from typing import Any

import torch
from torch import nn


# Names of the cache of keys and values: from transformers 5.24 on, and before.
CACHES = ("cache", "past_key_values")


class View:
    """The object `base` with some attributes replaced or added."""

    def __init__(self, base, **replaced):
        self.base = base
        vars(self).update(replaced)

    def __getattr__(self, name: str):
        # copy and pickle read attributes before `base` is set.
        if name == "base" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.base, name)


@contextmanager
def replaced(name: str, value: object, *objects: object) -> Iterator[None]:
    """Give objects another value of an attribute; each has its own again at the end."""
    own = [getattr(each, name) for each in objects]
    try:
        for each in objects:
            setattr(each, name, value)
        yield
    finally:
        for each, before in zip(objects, own):
            setattr(each, name, before)


def forward_arguments(module: nn.Module) -> dict[str, inspect.Parameter]:
    """The arguments of the forward of a module's class, without `self`."""
    parameters = dict(inspect.signature(type(module).forward).parameters)
    parameters.pop("self", None)
    return parameters


def takes(module: nn.Module, argument: str) -> bool:
    return argument in inspect.signature(type(module).forward).parameters


def cache_name(names: Iterable[str]) -> str | None:
    """The argument or output that contains the KV cache, or `None`."""
    return next((name for name in CACHES if name in names), None)


def is_rotation(argument: str) -> bool:
    """Whether an argument gets cos and sin; some modules take those of queries and of keys."""
    return argument.startswith("position_embeddings")


def find_indexers(attention: nn.Module) -> list[nn.Module]:
    """
    The modules inside an attention module that take cos and sin beside it: the indexers of sparse attention, which
    choose the tokens that attention reads. Empty for modules that do not compute attention.
    """
    inside = [module for module in attention.modules() if module is not attention and takes_rotation(module)]
    attends = _computes_attention(attention) and not any(map(_computes_attention, inside))
    return inside if attends and takes_rotation(attention) else []


def takes_rotation(module: nn.Module) -> bool:
    return any(map(is_rotation, forward_arguments(module)))


def _computes_attention(module: nn.Module) -> bool:
    return not {"ALL_ATTENTION_FUNCTIONS", "scaled_dot_product_attention"}.isdisjoint(names_in_forward(module))


def required_arguments(module: nn.Module) -> list[str]:
    """Names of the arguments of forward without defaults, after the first one, which gets the hidden states."""
    _, *others = forward_arguments(module).values()
    return [each.name for each in others if each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD]


def forward_code(module: nn.Module) -> CodeType | None:
    return getattr(inspect.unwrap(type(module).forward), "__code__", None)


def names_in_forward(module: nn.Module) -> tuple[str, ...]:
    """Names of globals and attributes that the forward of a module's class reads."""
    code = forward_code(module)
    return () if code is None else code.co_names


def projections(attention: nn.Module) -> list[nn.Module]:
    """The query and key projections of an attention module, or its one projection for queries, keys and values."""
    for names in (("q_proj", "k_proj"), ("query", "key"), ("qkv",), ("Wqkv",), ("qkv_proj",)):
        found = [getattr(attention, name, None) for name in names]
        if all(isinstance(module, nn.Module) for module in found):
            return found
    return []


def linear_layer(projection: nn.Module) -> nn.Module:
    """The module with the weight of a projection, inside the wrappers of peft or of the model."""
    if hasattr(projection, "base_layer"):
        return projection.base_layer
    inner = (module for module in projection.modules() if hasattr(module, "out_features"))
    return projection if hasattr(projection, "weight") else next(inner, projection)


def head_shape(attention: nn.Module) -> tuple[int, int]:
    """(heads, head_dim) of an attention module. Raises `ValueError` if unknown, or different for queries and keys."""
    heads = _count_heads(attention)
    widths: set[Any] = {getattr(projection, "out_features", None) for projection in projections(attention)}
    if heads is None or len(widths) != 1 or None in widths:
        raise ValueError(
            f"The heads of {type(attention).__name__} cannot be rotated: {heads} heads, query and key projections of "
            f"widths {sorted(map(str, widths)) or 'unknown'}; one number of heads and equal widths are needed."
        )
    head_dim = next((getattr(attention, n) for n in ("head_dim", "attention_head_size") if hasattr(attention, n)), None)
    # One projection makes queries, keys and values.
    return heads, head_dim or widths.pop() // (3 if len(projections(attention)) == 1 else 1) // heads


def projection_widths(attention: nn.Module, head_dim: int) -> tuple[int | None, list[int | None]]:
    """
    The number of query heads that an attention module states, and the widths of its projections to queries, to keys and
    so on; `None` where they are unknown. A common projection is split, with equal widths for keys and values.
    """
    widths = [getattr(linear_layer(part), "out_features", None) for part in projections(attention)]
    heads = _count_heads(attention)
    if len(widths) == 1 and widths[0]:
        query_width = heads * head_dim if heads else widths[0] // 3
        rest = widths[0] - query_width
        widths = [query_width, rest // 2 if rest % 2 == 0 else None]
    return heads, widths


def _count_heads(attention: nn.Module) -> int | None:
    heads = next((getattr(attention, n) for n in ("num_heads", "num_attention_heads") if hasattr(attention, n)), None)
    return heads or getattr(getattr(attention, "config", None), "num_attention_heads", None)


def device_of(*modules: nn.Module) -> torch.device:
    """
    The device of the first parameter found, in the order of the modules: quantized modules may have none. Matrices come
    before vectors, which some models make on the CPU whatever the default device is. The CPU without parameters.
    """
    found = [parameter for module in modules for parameter in module.parameters()]
    devices = [*(parameter.device for parameter in found if parameter.ndim > 1), *(value.device for value in found)]
    return devices[0] if devices else torch.device("cpu")
