"""Parameters and multiply-accumulates of a model, and the share of the position encoding in both."""

import copy
import functools
import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from ...fast.dispatch import plain_functions, plain_operations
from ...patching.apply import is_patched, unpatch
from ...patching.vision_towers import find_towers, position_table
from .attention import eager_attention
from .encodings import rotary_encoding


# Operations per element of a layer norm, as in LieRE's Table 8.
NORM_OPERATIONS = 5


@dataclass
class Cost:
    """
    The cost of one model. Operations are multiply-accumulates, with 5 per element of a layer norm (LieRE Table 8).

    Attributes:
        parameters: Parameters of the model.
        encoding_parameters: Those of its rotations: generators, multipliers, or the constants of a folded model.
        table_parameters: Those of its learned table of absolute positions.
        operations: Operations of a forward pass, including rotations.
        rotation_operations: Those for computing the rotations of all layers, independent of the batch size.
        rotating_operations: Those for applying them to queries and keys, with `rotate_values` to values and outputs.
        parameter_share: Share of the position encoding (table and rotations) in all parameters.
        operation_share: Share of computing and applying rotations in all operations.
    """

    parameters: int
    encoding_parameters: int
    table_parameters: int
    operations: int
    rotation_operations: int
    rotating_operations: int
    parameter_share: float
    operation_share: float


def count_operations(run: Callable[[], object]) -> int:
    """
    Multiply-accumulates of the matrix products, convolutions and attentions that `run()` executes, and the operations
    of layer norms. Operators of this package count as the equivalent plain operations.
    """
    norms = {torch.ops.aten.native_layer_norm: lambda shape, *_, **__: 2 * NORM_OPERATIONS * math.prod(shape)}
    # The counted fused kernels depend on the torch release; all releases count matrix products.
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False, custom_mapping=norms) as counter:
        # Remove the counter's hooks, which attribute products to modules: LieREAttention changes the basis of weights
        # only in modules without hooks, and the hooks fail for views of parameters created without gradients.
        counter.mod_tracker.__exit__()
        # Torch's own registry would give these formulas to all counters of the process.
        for operator, function in plain_functions.items():
            counter.flop_registry[operator] = functools.partial(_plain_flops, function)
        run()
    return counter.get_total_flops() // 2


def _plain_flops(function: Callable, *arguments: Any, out_val: Any = None) -> int:
    with plain_operations(), FlopCounterMode(display=False) as counter:
        counter.mod_tracker.__exit__()
        function(*arguments)
    return counter.get_total_flops()


def count_forward(model: nn.Module, pixels: torch.Tensor, **options: Any) -> int:
    """
    [`count_operations`] of a forward pass on `pixels` with any attention implementation, without applying rotations of
    planes. `options` are further arguments of the model.
    """
    with ExitStack() as stack:
        for tower in find_towers(model):
            stack.enter_context(eager_attention(tower))
        return count_operations(lambda: model(pixels, **options))


def count_cost(model: nn.Module, pixels: torch.Tensor, **options: Any) -> Cost:
    """
    Args:
        model: A vision transformer that takes pixels, patched or not; it is not changed.
        pixels: A batch of inputs.
        options: Further arguments of the model.
    """
    tower = find_towers(model)[0]
    parameters = sum(parameter.numel() for parameter in model.parameters())
    table = position_table(tower.embeddings)
    # A table may be a view of a parameter, or sinusoids, which are not parameters.
    stored = {parameter.data_ptr() for parameter in tower.embeddings.parameters()}
    table_parameters = table.numel() if table is not None and table.data_ptr() in stored else 0
    encoding, calls, rotations = rotary_encoding(tower.module), [], []
    making = rotating = learned = 0
    with ExitStack() as stack:
        if encoding is not None:
            stack.enter_context(encoding.register_forward_pre_hook(lambda _, positions: calls.append(positions)))
            # Rotations cached by an earlier pass would not be counted.
            encoding.cache.clear()
        operations = plain = count_forward(model, pixels, **options)
    if encoding is not None and calls:
        encoding.cache.clear()
        learned = sum(parameter.numel() for parameter in encoding.parameters())
        making = count_operations(lambda: rotations.extend(encoding(*calls[0])))
        # Rotating planes does not use matrix products: count 2 multiply-accumulates per channel of each state.
        planes = sum(rotation.num_tokens() * rotation.num_planes() for rotation in rotations)
        states = 4 if getattr(encoding.config, "rotate_values", False) else 2
        rotating = planes * encoding.config.num_attention_heads * states * 2 * 2
        plain = count_forward(_remove_rotations(model), pixels, **options)
    spent = operations - plain + rotating
    return Cost(
        parameters=parameters,
        encoding_parameters=learned,
        table_parameters=table_parameters,
        operations=operations + rotating,
        rotation_operations=making,
        rotating_operations=spent - making,
        parameter_share=(learned + table_parameters) / parameters,
        operation_share=spent / (operations + rotating),
    )


def _remove_rotations(model: nn.Module) -> nn.Module:
    plain = copy.deepcopy(model)
    if is_patched(plain):
        return unpatch(plain)
    find_towers(plain)[0].module.rotary_encoding = None
    return plain
